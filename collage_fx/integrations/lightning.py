"""Lightning's ``Trainer``: one callback."""

from __future__ import annotations

from typing import Any

from collage_fx.backend import CollageBackend
from collage_fx.install import install

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback

__all__ = ["CollageCallback"]


class CollageCallback(Callback):  # type: ignore[misc]  # Lightning has no types here
    """Compensates all optimizers of a ``Trainer``: ``Trainer(..., callbacks=[CollageCallback()])``.

    The module is to be in bfloat16 or float16 (``Trainer(precision="bf16-true")``). The trainer's checkpoints
    hold the error terms.

    Args:
        options: those of :class:`collage_fx.CollageBackend`, such as ``strategy="light"``.

    Attributes:
        backend: for ``backend.report()``.
    """

    def __init__(self, **options: Any) -> None:
        self.backend = CollageBackend(**options)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Install the optimizers, once the trainer has made them."""
        for optimizer in trainer.optimizers:
            install(optimizer, backend=self.backend)
