"""Patches of optimizers outside of compilations: their steps, and the loading of state dicts."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType
from typing import Any

import torch.distributed
from torch.optim import Optimizer, optimizer

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

#: Attribute of a replaced step: the original step.
_MARK = "__collage_fx__"


#: Functions that replace, by ``replacement(original, ...)``, the unflattening of a flattened optimizer state
#: dict, and ``Module.load_state_dict``.
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
    scheduler's or a trainer's wrapper. A second call changes nothing.

    Returns:
        whether the step has been replaced now.
    """
    cell: CellType = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
    step = cell.cell_contents
    if hasattr(step, _MARK):
        return False
    switched = switch(step)
    setattr(switched, _MARK, step)
    cell.cell_contents = switched
    return True
