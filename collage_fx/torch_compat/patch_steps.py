"""Patches of optimizers outside of compilations: their steps, averages, and the loading of state dicts.

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
from types import CellType
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.optim import Optimizer, optimizer
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from collage_fx.torch_compat.patching import Patch

FLAT_STATES = Patch(
    name="flat-states",
    target="torch.distributed.checkpoint.state_dict:_unflatten_optim_state_dict(optim, state_dict, info)",
    why="torch keeps error terms in a flattened checkpoint, although no state has their names",
    waits_for="unflattening by the names in the state dict, not by those of the optimizer's state",
    during="the process",
    is_there=torch.distributed.is_available(),
)

LOADING_OF_MODULES = Patch(
    name="loading-of-modules",
    target="torch.nn:Module.load_state_dict(self, state_dict)",
    why="loading new weights drops the error terms of the old weights",
    waits_for="a global hook of Module.load_state_dict, like those of forward",
    during="the process",
    affects="everybody",
)

OWN_STEPS = Patch(
    name="own-steps",
    target="torch.optim:Optimizer.profile_hook_step(func) has wrapper",
    why="Optimizer.step dispatches to the recorder for optimizers that Dynamo cannot capture",
    waits_for="step hooks that may replace the call of step",
    during="recorded steps",
    affects="everybody",
    relies_on=("torch.optim:Optimizer.__init__ has _patch_step_function",),
)

AVERAGES = Patch(
    name="averages",
    target="torch.optim.swa_utils:AveragedModel.update_parameters(self, model)",
    why="AveragedModel stores averages in a function that Dynamo compiles, so with error terms",
    waits_for="an AveragedModel that stores each average in one function, also on the CPU and the first time",
    during="the process",
    affects="everybody",
    relies_on=("torch.optim.swa_utils:AveragedModel has avg_fn, multi_avg_fn",),
)

#: Attribute of a replaced step: the original step.
_MARK = "__collage_fx__"

#: Functions that replace torch's unflattening of optimizer state dicts, and ``Module.load_state_dict``.
wrap_flat_states, wrap_loading_of_modules = FLAT_STATES.install, LOADING_OF_MODULES.install


def before_eager_steps(hook: Callable[[Optimizer, Any, Any], None]) -> None:
    """Call a function before each eager step of any optimizer.

    Its arguments are the optimizer and the step's arguments. A second call replaces the function.
    """
    global _hook
    if _hook is None:
        optimizer.register_optimizer_step_pre_hook(_before_step)
    _hook = hook


def before_first_eager_step(prepare: Callable[[], object]) -> None:
    """Call a function before the first eager step, unless there is a hook; it sets the hook of all steps."""

    def hook(*step: Any) -> None:
        prepare()
        _before_step(*step)

    if _hook is None:
        before_eager_steps(hook)


def _before_step(*step: Any) -> None:
    """Call the hook, which may be replaced in the call, unless Dynamo traces the step."""
    if _hook is not None and not torch.compiler.is_compiling():
        _hook(*step)


_hook: Callable[[Optimizer, Any, Any], None] | None = None


def reroute_step(wrapper: Any, switch: Callable[[Any], Callable[..., Any]]) -> bool:
    """Replace a ``step`` by ``switch(step)``, inside torch's wrapper around the step.

    There it is reached by every call: by the bound method that ``torch.compile`` was given, and by a
    scheduler's or a trainer's wrapper. A second call changes nothing. Return whether this call replaced it.
    """
    cell: CellType = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
    step = cell.cell_contents
    if hasattr(step, _MARK):
        return False
    switched = switch(step)
    setattr(switched, _MARK, step)
    cell.cell_contents = switched
    return True


#: Function ``(average, current value, number of models averaged so far) -> new average``.
Average = Callable[[Tensor, Tensor, Tensor | int], Tensor]

_equal_average: Average = get_swa_avg_fn()


def _updating(update_parameters: Callable[..., None], self: AveragedModel, model: torch.nn.Module) -> None:
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


#: Function that replaces ``AveragedModel.update_parameters``.
install_averages = functools.partial(AVERAGES.install, _updating)


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
