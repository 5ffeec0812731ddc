"""Optimizers outside of compilations: their steps, what they save and load, their copies and pickles."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType
from typing import Any, cast

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from collage_fx.torch_compat.patching import Patch, Shape

__all__ = ["EAGER_STEPS", "OWN_STEPS", "STATES", "before_eager_steps", "reroute_steps", "wrap_states"]

_STATE = "error terms are saved, loaded, copied and pickled with what they belong to"

#: By the method of ``Optimizer`` that is replaced: Note [Owning the round trip] in ``runtime/checkpoint.py``.
STATES = {
    name: Patch(
        name=name.strip("_"),
        target=f"torch.optim:Optimizer.{name}",
        parameters=parameters,
        why=_STATE,
        affects="everybody",
    )
    for name, parameters in {
        "state_dict": ("self",),
        "load_state_dict": ("self", "state_dict"),
        "__getstate__": ("self",),
        "__setstate__": ("self", "state"),
    }.items()
}

EAGER_STEPS = Patch(
    name="eager-steps",
    target="torch.optim.optimizer:register_optimizer_step_pre_hook",
    parameters=("hook",),
    why="a step past the compiled one is noticed (torch's own hook, for all optimizers)",
    affects="everybody",
)

OWN_STEPS = Patch(
    name="own-steps",
    target="torch.optim:Optimizer.profile_hook_step",
    parameters=("func",),
    mentions=("wrapper",),
    why="a class one of whose optimizers is recorded asks before each step whether it is to be",
    during="recorded steps",
    affects="everybody",
    relies_on=(Shape(target="torch.optim:Optimizer.__init__", mentions=("_patch_step_function",)),),
)

#: Attribute of a step that is behind a switch: the step itself.
_MARK = "__collage_fx__"


def wrap_states(wrappers: dict[str, Callable[[Any], Callable[..., Any]]]) -> None:
    """Have ``wrapper(original)`` called in the place of methods of ``Optimizer``, those of :data:`STATES`."""
    for name, wrapper in wrappers.items():
        STATES[name].install(wrapper)


def before_eager_steps(hook: Callable[[Optimizer, Any, Any], None]) -> None:
    """Have a function called before each step of any optimizer that runs eagerly.

    Its arguments are the optimizer and those of the step. A second call replaces the first.
    """
    global _hook
    if _hook is not None:
        _hook.remove()
    _hook = register_optimizer_step_pre_hook(hook)


_hook: RemovableHandle | None = None


def reroute_steps(cls: type[Optimizer], switch: Callable[[Any], Callable[..., Any]]) -> None:
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
