"""Integration with Hugging Face's ``Trainer`` and its subclasses, such as TRL's ``SFTTrainer``."""

from __future__ import annotations

from typing import Any

from accelerate.state import GradientState
from transformers import TrainerCallback
from typing_extensions import Unpack

from collage_fx.backend import CollageBackend
from collage_fx.choices import takes_options
from collage_fx.install import join
from collage_fx.options import GivenOptions
from collage_fx.wings.gradient_release import step_in_backward

__all__ = ["CollageCallback"]


@takes_options
class CollageCallback(TrainerCallback):  # type: ignore[misc]  # its types are not looked at
    """Callback that compensates the optimizer of a ``Trainer``: ``Trainer(callbacks=[CollageCallback()])``.

    The model must be in bfloat16 or float16 (``from_pretrained(..., dtype=torch.bfloat16)``). Any ``optim``
    of torch works, including the default ``adamw_torch_fused``. The trainer's checkpoints hold the error
    terms; ``model.safetensors`` alone holds only ``hi``: see :func:`collage_fx.save_full_state_dict`.

    Args:
        in_backward: step in the backward pass, by :func:`collage_fx.step_in_backward`; gradients are then
            clipped to the trainer's ``max_grad_norm`` by the norm of the step before. The norm that the
            trainer logs is of gradients that are gone, so 0.
        options: options of :class:`collage_fx.CollageBackend`, such as ``strategy="light"``. An optimizer
            that is installed keeps its own, and is not to be asked for others here.

    Attributes:
        backend: the backend, for ``backend.report()``.
    """

    def __init__(self, *, in_backward: bool = False, **options: Unpack[GivenOptions]) -> None:
        self._given = options
        self.backend = CollageBackend(**options)
        self.in_backward = in_backward

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Install the optimizer after the trainer has created it and loaded its state."""
        self.backend = join(optimizer, self._given, self.backend)
        if self.in_backward:
            step_in_backward(
                model,
                optimizer,
                accumulate=lambda: GradientState().sync_gradients,
                max_norm=args.max_grad_norm or None,
            )
