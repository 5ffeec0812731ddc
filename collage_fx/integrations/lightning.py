"""Integration with Lightning's ``Trainer``: a callback."""

from __future__ import annotations

from typing import Any

from typing_extensions import Unpack

from collage_fx.backend import CollageBackend
from collage_fx.choices import takes_options
from collage_fx.errors import InvalidOptionError
from collage_fx.installation import join
from collage_fx.options import GivenOptions, refuse_unknown
from collage_fx.wings.gradient_release import step_in_backward

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback

__all__ = ["CollageCallback"]


@takes_options
class CollageCallback(Callback):  # type: ignore[misc]  # Lightning has no types here
    """Callback that compensates all optimizers of a ``Trainer``: ``Trainer(callbacks=[CollageCallback()])``.

    The module must be in bfloat16 or float16 (``Trainer(precision="bf16-true")``). The trainer's checkpoints
    hold the error terms.

    Args:
        in_backward: step in the backward pass, by :func:`collage_fx.step_in_backward`; gradients are then
            clipped to the trainer's ``gradient_clip_val`` by the norm of the step before.
        options: options of :class:`collage_fx.CollageBackend`, such as ``strategy="light"``. An optimizer
            that is installed keeps its own, and is not to be asked for others here. With ``metrics=True``
            the trainer's loggers get :meth:`collage_fx.CollageBackend.scalars`; unless ``metrics_every`` is
            given, the steps that are logged are measured.

    Attributes:
        backend: the backend, for ``backend.report()``.
    """

    def __init__(self, *, in_backward: bool = False, **options: Unpack[GivenOptions]) -> None:
        refuse_unknown(options, CollageCallback)
        self._given = options
        self.backend = CollageBackend(**options)
        self.in_backward = in_backward

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Install the optimizers after the trainer has created them."""
        for optimizer in trainer.optimizers:
            self.backend = join(optimizer, self._given, self.backend)
            if self.in_backward:
                if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
                    raise InvalidOptionError(
                        "gradients that are clipped by value are gone before the trainer clips them",
                        where="Trainer(gradient_clip_algorithm=...)",
                        remedy='use gradient_clip_algorithm="norm", or leave in_backward out',
                    )
                step_in_backward(
                    trainer.strategy.model,
                    optimizer,
                    accumulate=trainer.accumulate_grad_batches,
                    max_norm=trainer.gradient_clip_val or None,
                )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Measure the steps that the trainer logs; its count of steps is that of a checkpoint by now."""
        self.backend.meter.follow(max(1, trainer.log_every_n_steps), trainer.global_step)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the backend's scalars; the trainer writes the last values at each step that it logs."""
        if found := self.backend.scalars():
            pl_module.log_dict(found)
