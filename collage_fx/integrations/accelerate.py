"""Accelerate's ``Accelerator.prepare`` with compensated optimizers."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from collage_fx.install import install

__all__ = ["prepare"]


def prepare(accelerator: Any, *objects: Any, **options: Any) -> Any:
    """``accelerator.prepare(*objects)``, with all optimizers among them installed.

    The model is to be in bfloat16 or float16. ``save_state`` and ``load_state`` keep the error terms.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        objects: models, optimizers, schedulers and loaders.
        options: those of :func:`collage_fx.install`.

    Returns:
        What ``prepare`` returns, in the same order.
    """
    for each in objects:
        if isinstance(each, Optimizer):
            install(each, **options)
    return accelerator.prepare(*objects)
