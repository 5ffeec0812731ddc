"""Patch of ``AveragedModel``: its updates happen in functions that Dynamo compiles.

Note [Averages are stored in a frame of their own]
--------------------------------------------------
``torch.optim.swa_utils.AveragedModel.update_parameters`` branches on the value of a tensor (the number of
models averaged so far) while iterators are alive: Dynamo runs the frame eagerly, and compiles only the
functions that it calls. A ``multi_avg_fn`` is such a function and contains the whole update. But an
``avg_fn`` (also the default, the equal average on the CPU) only returns the new value, and the frame stores
it, rounded, where no backend can give it an error term. So importing collage_fx wraps the method: during a
call, a ``multi_avg_fn`` that computes the same values and stores them itself stands for ``avg_fn``. The copy
of the model that the first update makes is repeated in a function of its own, for the same reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from collage_fx.torch_compat.patching import Patch

AVERAGES = Patch(
    name="averages",
    target="torch.optim.swa_utils:AveragedModel.update_parameters(self, model)",
    why="AveragedModel stores averages in a function that Dynamo compiles, so with error terms",
    waits_for="an AveragedModel that stores each average in one function, also on the CPU and the first time",
    during="the process",
    affects="everybody",
    relies_on=("torch.optim.swa_utils:AveragedModel has avg_fn, multi_avg_fn",),
)

#: Function ``(average, current value, number of models averaged so far) -> new average``.
Average = Callable[[Tensor, Tensor, Tensor | int], Tensor]

_equal_average: Average = get_swa_avg_fn()


def install() -> None:
    """Replace ``AveragedModel.update_parameters``."""
    AVERAGES.install(_updating)


def _updating(
    update_parameters: Callable[[AveragedModel, torch.nn.Module], None],
    self: AveragedModel,
    model: torch.nn.Module,
) -> None:
    if self.n_averaged == 0:
        update_parameters(self, model)
        models = self.module, model
        buffers = [each.buffers() if self.use_buffers else () for each in models]
        return _copy_each(*([*each.parameters(), *more] for each, more in zip(models, buffers, strict=True)))
    is_on_cpu = all(p.device.type == "cpu" for p in self.parameters())
    average = self.avg_fn or (_equal_average if is_on_cpu else None)
    if self.multi_avg_fn is not None or average is None:
        return update_parameters(self, model)
    self.multi_avg_fn = functools.partial(_average_each, average)
    try:
        update_parameters(self, model)
    finally:
        self.multi_avg_fn = None


@torch.no_grad()
def _copy_each(averaged: Sequence[Tensor], current: Sequence[Tensor]) -> None:
    for mine, new in zip(averaged, current, strict=False):
        if mine.device == new.device:
            mine.copy_(new)


@torch.no_grad()
def _average_each(
    average: Average, averaged: Sequence[Tensor], current: Sequence[Tensor], count: Tensor | int
) -> None:
    for mine, new in zip(averaged, current, strict=True):
        mine.copy_(average(mine, new, count))
