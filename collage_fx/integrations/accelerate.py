"""Integration with Accelerate: ``Accelerator.prepare`` with compensated optimizers."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from collage_fx.install import install

__all__ = ["prepare"]


def prepare(accelerator: Any, *objects: Any, **options: Any) -> Any:
    """Call ``accelerator.prepare(*objects)`` after installing all optimizers among the objects.

    The model must be in bfloat16 or float16. ``save_state`` and ``load_state`` keep the error terms.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        objects: models, optimizers, schedulers and loaders.
        options: options of :func:`collage_fx.install`.

    Returns:
        the result of ``accelerator.prepare``, in the same order.
    """
    for each in objects:
        if isinstance(each, Optimizer):
            install(each, **options)
    return accelerator.prepare(*objects)
