"""Hugging Face's ``Trainer`` and what derives from it, such as TRL's ``SFTTrainer``: one callback."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from collage_fx.backend import CollageBackend
from collage_fx.install import install

__all__ = ["CollageCallback"]


class CollageCallback(TrainerCallback):  # type: ignore[misc]  # its types are not looked at
    """Compensates the optimizer of a ``Trainer``: ``Trainer(..., callbacks=[CollageCallback()])``.

    The model is to be in bfloat16 or float16 (``from_pretrained(..., dtype=torch.bfloat16)``). Any ``optim``
    of torch's will do, the default ``adamw_torch_fused`` too. The trainer's checkpoints hold the error terms;
    ``model.safetensors`` alone has ``hi``: see :func:`collage_fx.save_full_state_dict`.

    Args:
        options: those of :class:`collage_fx.CollageBackend`, such as ``strategy="light"``.

    Attributes:
        backend: for ``backend.report()``.
    """

    def __init__(self, **options: Any) -> None:
        self.backend = CollageBackend(**options)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Install the optimizer, once the trainer has made it and has loaded its state."""
        install(optimizer, backend=self.backend)
