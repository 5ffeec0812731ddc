"""Integration with Lightning's ``Trainer``: a callback."""

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
    """Callback that compensates all optimizers of a ``Trainer``: ``Trainer(callbacks=[CollageCallback()])``.

    The module must be in bfloat16 or float16 (``Trainer(precision="bf16-true")``). The trainer's checkpoints
    hold the error terms.

    Args:
        options: options of :class:`collage_fx.CollageBackend`, such as ``strategy="light"``.

    Attributes:
        backend: the backend, for ``backend.report()``.
    """

    def __init__(self, **options: Any) -> None:
        self.backend = CollageBackend(**options)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Install the optimizers after the trainer has created them."""
        for optimizer in trainer.optimizers:
            install(optimizer, backend=self.backend)
