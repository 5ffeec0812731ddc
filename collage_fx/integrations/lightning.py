"""Integration with Lightning's ``Trainer``: a callback."""

from __future__ import annotations

from typing import Any

from collage_fx.choices import takes_options
from collage_fx.integrations.trainers import InstallingCallback

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback

__all__ = ["CollageCallback"]


@takes_options
class CollageCallback(InstallingCallback, Callback):  # type: ignore[misc]  # Lightning has no types here
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

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Install the optimizers after the trainer has created them."""
        for optimizer in trainer.optimizers:
            self.install(
                optimizer,
                trainer.strategy.model,
                accumulate=trainer.accumulate_grad_batches,
                max_norm=trainer.gradient_clip_val,
                clips_values=trainer.gradient_clip_algorithm == "value",
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
