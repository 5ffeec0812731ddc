"""A ``step`` of an optimizer instance, which replaces its class's step and suits hooks and schedulers."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from collage_fx.torch_compat.dynamo_trace import Refused

RELIED_ON = (
    "torch.optim:Optimizer.__init__ has _optimizer_step_pre_hooks, _optimizer_step_post_hooks",
    "torch.optim.lr_scheduler:LRScheduler.__init__ has _opt_called",
)

#: Attribute of an optimizer: function that its own step runs.
_RUN = "__collage_fx_step__"
#: Attribute of an optimizer's own step, and of scheduler wrappers around it: the previous step.
_BEFORE = "__collage_fx_before__"

#: Names of an optimizer's attributes that hold its hooks.
_PRE, _POST = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"

#: Hooks of an optimizer while the compiled step runs: empty, because Dynamo would trace them a second time.
_NO_HOOKS: OrderedDict[int, Any] = OrderedDict()


def own_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """Return the function given to :func:`set_own_step`; None if the optimizer has no step of its own."""
    return vars(optimizer).get(_RUN)


def is_in_own_step(optimizer: Optimizer) -> bool:
    """Return whether the function given to :func:`set_own_step` is running for the optimizer."""
    return vars(optimizer).get(_PRE) is _NO_HOOKS


def has_foreign_step(optimizer: Optimizer) -> bool:
    """Return whether other code has given the optimizer instance a step of its own.

    A scheduler's wrapper around the step, which only notes that the step is called, does not count.
    """
    step = vars(optimizer).get("step")
    is_schedulers = getattr(step, "__wrapped__", None) is type(optimizer).step
    return not (step is None or is_schedulers or hasattr(step, _BEFORE))


def set_own_step(optimizer: Optimizer, run: Callable[..., Any]) -> None:
    """Make ``optimizer.step(...)`` call ``run(...)`` between the optimizer's own hooks.

    The step is an attribute of the instance, and Dynamo does not trace into it. Schedulers accept it, whether
    they are created before or after.
    """
    vars(optimizer)[_RUN] = run
    before = vars(optimizer).get("step")
    if hasattr(before, _BEFORE):
        return
    label = f"Optimizer.step#{type(optimizer).__name__}.step"  # as torch names it for a profiler

    # wraps() copies the attributes that a scheduler has set on its wrapper.
    @torch.compiler.disable
    @functools.wraps(before or type(optimizer).step)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        run = own_step(self)
        if run is None:
            return type(self).step(self, *args, **kwargs)
        self._opt_called = True  # type: ignore[attr-defined]  # read by schedulers
        try:
            with torch.profiler.record_function(label):
                return _between_hooks(self, run, (self, *args), kwargs)
        except Refused as refusal:
            raise refusal.remove_dynamo_frames() from None

    setattr(step, _BEFORE, before)
    vars(optimizer)["step"] = MethodType(step, optimizer)


def remove_own_step(optimizer: Optimizer) -> None:
    """Undo :func:`set_own_step`; a wrapper added around the step since then runs the eager step."""
    del vars(optimizer)[_RUN]
    step = vars(optimizer)["step"]
    if isinstance(step, MethodType) and hasattr(step, _BEFORE):
        del vars(optimizer)["step"]
        if (before := getattr(step, _BEFORE)) is not None:
            vars(optimizer)["step"] = before


@contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Context manager: the optimizer has no hooks around its step; gives those that it had, by attribute."""
    own = vars(optimizer)  # no hooks if its class does not call Optimizer.__init__
    hooks = {name: own[name] for name in (_PRE, _POST) if name in own}
    own.update(dict.fromkeys(hooks, _NO_HOOKS))
    try:
        yield hooks
    finally:
        own.update(hooks)


def _between_hooks(
    optimizer: Optimizer, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call the optimizer's hooks before and after ``run``, as torch does; return the result of ``run``."""
    for hook in vars(optimizer).get(_PRE, _NO_HOOKS).values():
        replaced = hook(optimizer, args, kwargs)
        if replaced is not None:
            args, kwargs = replaced
    with without_hooks(optimizer) as hooks:
        result = run(*args[1:], **kwargs)
    for hook in hooks.get(_POST, _NO_HOOKS).values():
        hook(optimizer, args, kwargs)
    return result
