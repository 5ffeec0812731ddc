"""Optimizers outside of compilations: their steps, what they save and load, their copies and pickles."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType
from typing import Any, cast

import torch.distributed
from torch.optim import Optimizer, optimizer
from torch.utils.hooks import RemovableHandle

from collage_fx.torch_compat.patching import Patch, Wrapper

SAVING = Patch(
    name="saving",
    target="torch.optim:Optimizer.state_dict(self)",
    why="error terms are saved with what they belong to",
    affects="everybody",
)

LOADING = Patch(
    name="loading",
    target="torch.optim:Optimizer.load_state_dict(self, state_dict)",
    why="error terms are loaded as they were saved",
    affects="everybody",
)

PACKING = Patch(
    name="packing",
    target="torch.optim:Optimizer.__getstate__(self)",
    why="copies and pickles of an optimizer take error terms along",
    affects="everybody",
)

UNPACKING = Patch(
    name="unpacking",
    target="torch.optim:Optimizer.__setstate__(self, state)",
    why="the same, where they are made",
    affects="everybody",
)

FLAT_STATES = Patch(
    name="flat-states",
    target="torch.distributed.checkpoint.state_dict:_unflatten_optim_state_dict(optim, state_dict, info)",
    why="error terms in a flattened checkpoint are not left out for having no state of their name",
    is_there=torch.distributed.is_available(),
)

LOADING_OF_MODULES = Patch(
    name="loading-of-modules",
    target="torch.nn:Module.load_state_dict(self, state_dict)",
    why="error terms of weights that are loaded over do not stay beside the new ones",
    affects="everybody",
)

EAGER_STEPS = Patch(
    name="eager-steps",
    target="torch.optim.optimizer:register_optimizer_step_pre_hook(hook)",
    why="a step past the compiled one is noticed (by torch's own hook)",
    affects="everybody",
)

OWN_STEPS = Patch(
    name="own-steps",
    target="torch.optim:Optimizer.profile_hook_step(func) has wrapper",
    why="a class of which an optimizer is recorded asks, at each step, for whom",
    during="recorded steps",
    affects="everybody",
    relies_on=("torch.optim:Optimizer.__init__ has _patch_step_function",),
)

#: Attribute of a step that is behind a switch: the step itself.
_MARK = "__collage_fx__"


def wrap_states(
    saving: Wrapper, loading: Wrapper, packing: Wrapper, unpacking: Wrapper, flat: Wrapper
) -> None:
    """Have ``wrapper(original)`` called in the place of ``Optimizer``'s methods.

    ``state_dict``, ``load_state_dict``, ``__getstate__`` and ``__setstate__``, in this order; and of what
    makes a state dict of one that ``torch.distributed.checkpoint`` has flattened.
    """
    SAVING.install(saving)
    LOADING.install(loading)
    PACKING.install(packing)
    UNPACKING.install(unpacking)
    FLAT_STATES.install(flat)


def wrap_loading_of_modules(wrapper: Wrapper) -> None:
    """Have ``wrapper(original)`` called in the place of ``Module.load_state_dict``."""
    LOADING_OF_MODULES.install(wrapper)


def before_eager_steps(hook: Callable[[Optimizer, Any, Any], None]) -> None:
    """Have a function called before each step of any optimizer that runs eagerly.

    Its arguments are the optimizer and those of the step. A second call replaces the first.
    """
    global _hook
    if _hook is not None:
        _hook.remove()
    if EAGER_STEPS.applies:
        _hook = optimizer.register_optimizer_step_pre_hook(hook)


_hook: RemovableHandle | None = None


def reroute_steps(cls: type[Optimizer], switch: Wrapper) -> None:
    """Put ``switch(step)`` in the place of a class's own ``step``, behind torch's wrapper around that.

    There it is met by every call: of the bound method that ``torch.compile`` was given, and of a scheduler's
    or a trainer's wrapper. A second call changes nothing.
    """
    wrapper = cast(Any, cls.step)
    cell: CellType = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
    step = cell.cell_contents
    if not hasattr(step, _MARK):
        switched = switch(step)
        setattr(switched, _MARK, step)
        cell.cell_contents = switched
