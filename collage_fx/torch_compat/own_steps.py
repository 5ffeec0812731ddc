"""A ``step`` of an optimizer instance, which replaces its class's step and suits hooks and schedulers.

Note [Replaced steps]
---------------------
A program may set a step of its own, ``optimizer.step = ...``, after ours. A scheduler, or a wrapper, calls
ours in it. A step that does not call ours updates weights without error terms. Nobody can call ours any more
once it has been deleted, which a weak reference tells at once. If somebody still holds it, ``zero_grad`` and
``state_dict`` look at the step. A *guard* is put around a step that is not known to call ours. The guard goes
when ours has been called in it; else it refuses the step (``watch_replacement`` of :func:`set_own_step`).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from collage_fx.torch_compat.dynamo_trace import Refused
from collage_fx.torch_compat.optim_frames import TRUE, compiled_callables_within, is_step_wrapper

RELIED_ON = (
    "torch.optim:Optimizer.__init__ has _optimizer_step_pre_hooks, _optimizer_step_post_hooks, "
    "_optimizer_state_dict_pre_hooks",
    "torch.optim.lr_scheduler:LRScheduler.__init__ has _opt_called, _wrapped_by_lr_sched",
)

#: Attributes of an optimizer: function that its own step runs; weak reference to our function, which the own
#: step is a method of; step of the program's that has been seen to call it; handle of the hook that looks at
#: the step when the optimizer is saved.
_RUN, _OURS = "__collage_fx_step__", "__collage_fx_ours__"
_TRUSTED, _HOOK = "__collage_fx_trusted__", "__collage_fx_hook__"
#: Attributes of an optimizer while its own step runs: threads that are in it, and the optimizer's hooks.
_INSIDE, _KEPT = "__collage_fx_inside__", "__collage_fx_hooks__"

#: Attribute of an optimizer's own step, and of scheduler wrappers around it: the previous step.
_BEFORE = "__collage_fx_before__"
#: Attribute of a guard: step that it is put around.
_GUARDED = "__collage_fx_guarded__"

#: Attributes of an optimizer that hold its hooks before and after a step, and before saving.
_PRE, _POST = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_SAVING = "_optimizer_state_dict_pre_hooks"


def own_step(optimizer: Optimizer) -> Any:
    """Return the function given to :func:`set_own_step`; None if the optimizer has no step of its own."""
    return vars(optimizer).get(_RUN)


def is_in_own_step(optimizer: Optimizer) -> bool:
    """Return whether this thread is in the optimizer's own step."""
    return threading.get_ident() in vars(optimizer).get(_INSIDE, ())


def note_true_step(optimizer: Optimizer) -> None:
    """Take note, for :func:`true_step`, of a step that the program has given the optimizer instance.

    Also of the step of a class that does not call ``Optimizer.__init__``, which puts torch's wrapper around,
    or that has compiled its step: torch would refuse to compile the wrapper.
    """
    own = vars(optimizer)
    step = own.get("step")
    if hasattr(step, _GUARDED):
        step = own["step"] = getattr(step, _GUARDED)
    if not _calls_ours(optimizer, step):
        own.pop(TRUE, None)
        foreign, of_class = _foreign_step(optimizer), type(optimizer).step
        compiled = compiled_callables_within(of_class)
        if foreign is None and (compiled or _is_unwrapped(of_class)):
            foreign = MethodType(compiled[-1][0] if compiled else of_class, optimizer)
        if foreign is not None:
            own[TRUE] = _with_hooks(optimizer, foreign)


def _is_unwrapped(step: Any) -> bool:
    return isinstance(step, FunctionType) and not is_step_wrapper(step.__code__)


def has_foreign_step(optimizer: Optimizer) -> bool:
    """Return whether the program has given the instance a step of its own that is not installed."""
    return TRUE not in vars(optimizer) and _foreign_step(optimizer) is not None


def _foreign_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """Return the step that the program has given the optimizer instance; None if it has given none.

    A scheduler's wrapper, which only notes that the step is called, is no such step.
    """
    step = vars(optimizer).get("step")
    if step is None or _calls_ours(optimizer, step):
        return None
    if hasattr(step, "_wrapped_by_lr_sched"):
        step = MethodType(step.__wrapped__, optimizer)
    if compiled := compiled_callables_within(getattr(step, "__func__", step)):
        is_bound = isinstance(step, MethodType) and step.__self__ is optimizer
        step = compiled[-1][0]  # compiled by another backend so far
        step = MethodType(step, optimizer) if is_bound and not isinstance(step, MethodType) else step
    return None if getattr(step, "__func__", None) is type(optimizer).step else step


def _calls_ours(optimizer: Optimizer, step: Any) -> bool:
    """Return whether a step is ours, a scheduler's wrapper around ours, or has been seen to call ours."""
    ours = vars(optimizer).get(_OURS, lambda: None)()
    by_scheduler = step.__wrapped__ if hasattr(step, "_wrapped_by_lr_sched") else None
    inside = {id(each) for each in (step, getattr(step, "__func__", None), by_scheduler)} - {id(None)}
    return ours is not None and not inside.isdisjoint({id(ours), id(vars(optimizer).get(_TRUSTED))})


def guard_replaced_step(optimizer: Optimizer) -> None:
    """Put a guard around a step of the optimizer that is not known to call ours: Note [Replaced steps]."""
    step = vars(optimizer).get("step")
    if step is None or own_step(optimizer) is None or hasattr(step, _GUARDED) or _calls_ours(optimizer, step):
        return

    @torch.compiler.disable
    @functools.wraps(step)
    def guarded(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        run = own_step(self)
        if run is None:
            return step(*args, **kwargs)
        may_call_ours = vars(self)[_OURS]() is not None
        taken = functools.partial(step, *args, **kwargs)
        returned, has_called_ours = run.watch_replacement(taken, may_call_this=may_call_ours)
        if has_called_ours and hasattr(vars(self).get("step"), _GUARDED):
            vars(self)["step"] = vars(self)[_TRUSTED] = step
        return returned

    setattr(guarded, _GUARDED, step)
    vars(optimizer)["step"] = MethodType(guarded, optimizer)


def _at_lost_step(reference: weakref.ref[Optimizer], _: Any) -> None:
    """Guard the step that has taken the place of ours, which is about to be deleted."""
    if (optimizer := reference()) is not None:
        guard_replaced_step(optimizer)


def _with_hooks(optimizer: Optimizer, step: Any) -> Callable[..., Any]:
    """Return a step of an instance as a function of the optimizer, with torch's wrapper around."""
    is_bound = isinstance(step, MethodType) and step.__self__ is optimizer
    if is_bound and isinstance(step.__func__, FunctionType) and not _is_unwrapped(step.__func__):
        return step.__func__

    # Without the attributes of a compiled function, which torch.compile would stumble over.
    @functools.wraps(step.__func__ if is_bound else step, updated=())
    def function(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return step.__func__(self, *args, **kwargs) if is_bound else step(*args, **kwargs)

    return Optimizer.profile_hook_step(function)


def set_own_step(optimizer: Optimizer, run: Any) -> None:
    """Make ``optimizer.step(...)`` call ``run(...)`` between the optimizer's own hooks.

    The step is an attribute of the instance, which Dynamo does not trace and schedulers accept. If another
    step replaces it, ``run.watch_replacement(step, may_call_this=...)`` takes that, and returns its result
    and whether it has called this step.
    """
    vars(optimizer)[_RUN] = run
    before = vars(optimizer).get("step")
    if _calls_ours(optimizer, before):
        return
    label = f"Optimizer.step#{type(optimizer).__name__}.step"  # as torch names it for a profiler

    # wraps() copies the attributes that a scheduler has set on its wrapper.
    @torch.compiler.disable
    @functools.wraps(before or type(optimizer).step)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        run = own_step(self)
        if run is None or is_in_own_step(self):  # the latter where the true step is a wrapper around this one
            return type(self).step(self, *args, **kwargs) if before is None else before(*args, **kwargs)
        self._opt_called = True  # type: ignore[attr-defined]  # read by schedulers
        try:
            with torch.profiler.record_function(label):
                return _between_hooks(self, run, (self, *args), kwargs)
        except Refused as refusal:
            raise refusal.remove_dynamo_frames() from None

    setattr(step, _BEFORE, before)
    vars(optimizer)["step"] = MethodType(step, optimizer)
    vars(optimizer)[_OURS] = weakref.ref(step, functools.partial(_at_lost_step, weakref.ref(optimizer)))
    if _SAVING in vars(optimizer):
        vars(optimizer)[_HOOK] = optimizer.register_state_dict_pre_hook(guard_replaced_step)
    if "zero_grad" in vars(optimizer):
        return

    @functools.wraps(type(optimizer).zero_grad)
    def zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            guard_replaced_step(self)
        type(self).zero_grad(self, *args, **kwargs)

    setattr(zero_grad, _BEFORE, None)
    vars(optimizer)["zero_grad"] = MethodType(zero_grad, optimizer)


def without_own_step(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's attributes as they would be without :func:`set_own_step`."""
    own = dict(attributes)
    if _OURS not in own:
        return own
    step, ours = own.get("step"), own.pop(_OURS)()
    for name in (_HOOK, _RUN, TRUE, _TRUSTED):
        own.pop(name, None)
    if hasattr(own.get("zero_grad"), _BEFORE):
        del own["zero_grad"]
    if getattr(step, "__func__", None) is ours:
        del own["step"]
        if (before := getattr(step, _BEFORE)) is not None:
            own["step"] = before
    return own


def remove_own_step(optimizer: Optimizer) -> None:
    """Undo :func:`set_own_step`; a wrapper added around the step since then runs the eager step."""
    own = vars(optimizer)
    if _HOOK in own:
        own[_HOOK].remove()
    left = without_own_step(own)
    for name in own.keys() - left.keys():
        del own[name]
    own |= left


class without_hooks:
    """Context manager: the optimizer has no hooks around its step; hooks that it registers come to the rest.

    Several threads may be inside, each with a part of the step.
    """

    _lock = threading.Lock()

    def __init__(self, optimizer: Optimizer) -> None:
        self._own = vars(optimizer)  # no hooks if its class does not call Optimizer.__init__

    def __enter__(self) -> None:
        own = self._own
        with self._lock:
            inside = own.setdefault(_INSIDE, [])
            if not inside:
                own[_KEPT] = own.get(_PRE), own.get(_POST)
                # Dynamo would trace the hooks a second time.
                own |= {_PRE: OrderedDict(), _POST: OrderedDict()}
            inside.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        own = self._own
        with self._lock:
            inside = own[_INSIDE]
            inside.remove(threading.get_ident())
            if not inside:
                del own[_INSIDE]
                for name, kept in zip((_PRE, _POST), own.pop(_KEPT), strict=True):
                    added = own.pop(name)
                    if added or kept is not None:
                        own[name] = added if kept is None else kept
                        own[name].update(added)


def _between_hooks(
    optimizer: Optimizer, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the result of ``run``, between the optimizer's hooks, as torch calls them."""
    own = vars(optimizer)
    before, after = own.get(_KEPT, (own.get(_PRE), own.get(_POST)))
    for hook in (before or {}).values():
        replaced = hook(optimizer, args, kwargs)
        if replaced is not None:
            args, kwargs = replaced
    keys = {*(after or ())}
    with without_hooks(optimizer):
        result = run(*args[1:], **kwargs)
    for key, hook in [*(after or {}).items()]:
        if key in keys:  # torch's wrapper around the step has called one that the step registered
            hook(optimizer, args, kwargs)
    return result
