"""Integrations with trainers: optimizers are installed, and may be stepped in the backward pass.

The callbacks of Hugging Face's and Lightning's trainers have a base class; Accelerate has a function, which
needs nothing of its package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import Unpack

from collage_fx.backend import CollageBackend
from collage_fx.choices import takes_options
from collage_fx.errors import InvalidOptionError
from collage_fx.installation import InstallOptions, join
from collage_fx.options import GivenOptions, refuse_unknown
from collage_fx.wings.gradient_release import step_in_backward


class InstallingCallback:
    """Base class of trainers' callbacks: it installs the optimizers that a trainer has created.

    Attributes:
        backend: the backend, for ``backend.report()``; that of the optimizer, if it was installed before.
    """

    def __init__(self, *, in_backward: bool = False, **options: Unpack[GivenOptions]) -> None:
        refuse_unknown(options, type(self))
        self._given = options
        self.backend = CollageBackend(**options)
        self.in_backward = in_backward

    def install(
        self,
        optimizer: Any,
        model: torch.nn.Module,
        *,
        accumulate: int | Callable[[], bool],
        max_norm: float | None,
        clips_values: bool = False,
    ) -> None:
        """Install an optimizer, and let it step in the backward pass if that was asked for.

        ``max_norm``: to what the trainer clips gradients, or with ``clips_values`` each of their elements.
        """
        self.backend = join(optimizer, self._given, self.backend)
        if self.in_backward and max_norm and clips_values:
            met = "gradients that are clipped by value are gone before the trainer clips them"
            remedy = 'use gradient_clip_algorithm="norm", or leave in_backward out'
            raise InvalidOptionError(met, where="Trainer(gradient_clip_algorithm=...)", remedy=remedy)
        if self.in_backward:
            step_in_backward(model, optimizer, accumulate=accumulate, max_norm=max_norm or None)


@takes_options
def prepare(
    accelerator: Any, *objects: Any, in_backward: bool = False, **options: Unpack[InstallOptions]
) -> Any:
    """Call ``accelerator.prepare(*objects)`` after installing all optimizers among the objects.

    Optimizers that are installed keep their options, and are not to be asked for others here.

    The model must be in bfloat16 or float16. ``save_state`` and ``load_state`` keep the error terms.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        objects: models, optimizers, schedulers and loaders.
        in_backward: step in the backward pass, by :func:`collage_fx.step_in_backward`, which takes
            ``max_norm`` in place of ``accelerator.clip_grad_norm_``. It needs a single model.
        options: options of :func:`collage_fx.install`. With ``metrics=True``,
            ``accelerator.log(collage_fx.backend_of(optimizer).scalars(), step)`` gives its trackers the
            measurements; call it on all processes.

    Returns:
        the result of ``accelerator.prepare``, in the same order.
    """
    refuse_unknown(options.keys() - {"backend"}, prepare)
    for each in objects:
        if isinstance(each, Optimizer):
            join(each, options)
    prepared = accelerator.prepare(*objects)
    if in_backward:
        found = prepared if isinstance(prepared, tuple) else (prepared,)
        models = [each for each in found if isinstance(each, torch.nn.Module)]
        if len(models) != 1:
            met = f"in_backward=True with {len(models)} models"
            remedy = "call collage_fx.step_in_backward(model, optimizer) for each model yourself"
            raise InvalidOptionError(met, where="prepare", remedy=remedy)

        def is_last() -> bool:
            return bool(accelerator.sync_gradients)

        for each in found:
            if isinstance(each, Optimizer):
                step_in_backward(models[0], each, accumulate=is_last, scaler=accelerator.scaler)
    return prepared
