"""A step that one optimizer has in the place of its class's, as its hooks and its schedulers expect it."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

RELIED_ON = (
    "torch.optim:Optimizer.__init__ has _optimizer_step_pre_hooks, _optimizer_step_post_hooks",
    "torch.optim.lr_scheduler:LRScheduler.__init__ has _opt_called",
)

#: Attribute of an optimizer: what its own step runs.
_RUN = "__collage_fx_step__"
#: Attribute of the function behind an optimizer's own step, and of those that schedulers put around it.
_BEFORE = "__collage_fx_before__"

#: Attributes of an optimizer: its hooks.
_PRE, _POST = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"

#: The hooks of an optimizer while what is compiled runs, in which Dynamo would trace them once more.
_NO_HOOKS: OrderedDict[int, Any] = OrderedDict()


def own_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """What :func:`give_own_step` was given for the optimizer; None where it has no step of its own."""
    return vars(optimizer).get(_RUN)


def is_in_own_step(optimizer: Optimizer) -> bool:
    """Whether what :func:`give_own_step` was given is running for the optimizer."""
    return vars(optimizer).get(_PRE) is _NO_HOOKS


def has_foreign_step(optimizer: Optimizer) -> bool:
    """Whether somebody other than us has given the optimizer a step of its own.

    A scheduler is nobody: it puts a function around the step that it finds, to note that it is called.
    """
    step = vars(optimizer).get("step")
    is_schedulers = getattr(step, "__wrapped__", None) is type(optimizer).step
    return not (step is None or is_schedulers or hasattr(step, _BEFORE))


def give_own_step(optimizer: Optimizer, run: Callable[..., Any]) -> None:
    """Have ``optimizer.step(...)`` call ``run(...)`` from now on, between the optimizer's own hooks.

    It is a method of the instance, which Dynamo does not trace into. Schedulers are content with it, whether
    they are made before or after.
    """
    vars(optimizer)[_RUN] = run
    before = vars(optimizer).get("step")
    if hasattr(before, _BEFORE):
        return
    label = f"Optimizer.step#{type(optimizer).__name__}.step"  # as torch names it for a profiler

    # wraps() takes along what a scheduler has noted on the function that it has put there.
    @torch.compiler.disable
    @functools.wraps(before or type(optimizer).step)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        run = own_step(self)
        if run is None:
            return type(self).step(self, *args, **kwargs)
        self._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at
        with torch.profiler.record_function(label):
            return _between_hooks(self, run, (self, *args), kwargs)

    setattr(step, _BEFORE, before)
    vars(optimizer)["step"] = MethodType(step, optimizer)


def take_own_step_back(optimizer: Optimizer) -> None:
    """Undo :func:`give_own_step`; a function that has been put around the step since runs the eager one."""
    del vars(optimizer)[_RUN]
    step = vars(optimizer)["step"]
    if isinstance(step, MethodType) and hasattr(step, _BEFORE):
        del vars(optimizer)["step"]
        if (before := getattr(step, _BEFORE)) is not None:
            vars(optimizer)["step"] = before


def _between_hooks(
    optimizer: Optimizer, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What ``run`` returns; before and after it the optimizer's hooks are called as torch calls them."""
    own = vars(optimizer)  # which has no hooks if its class does not call Optimizer.__init__
    hooks = {name: own[name] for name in (_PRE, _POST) if name in own}
    for hook in hooks.get(_PRE, _NO_HOOKS).values():
        replaced = hook(optimizer, args, kwargs)
        if replaced is not None:
            args, kwargs = replaced
    own.update(dict.fromkeys(hooks, _NO_HOOKS))
    try:
        result = run(*args[1:], **kwargs)
    finally:
        own.update(hooks)
    for hook in hooks.get(_POST, _NO_HOOKS).values():
        hook(optimizer, args, kwargs)
    return result
