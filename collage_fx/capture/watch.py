"""The watch over Dynamo: updates that would run eagerly, without error terms, are refused or reported.

Note [Nothing unnoticed]
------------------------
Compensation lives in the compiled graphs. There are six ways past them, and each is met where it opens,
which costs nothing in a step that is compiled already:

* *Dynamo gives up on a function* that has been compiled too often, and runs it as it is from then on, for
  every optimizer of the class. It never does for this backend: each optimizer has a limit of its own, whose
  count begins anew when it is loaded. A step that reaches Dynamo's ``recompile_limit`` is recorded from then
  on. So are the steps in another function at :data:`COMPILATIONS` times the limit, and Python runs that; one
  that updates tensors of no optimizer's is refused (:func:`_before_conversion`).
* *A graph break inside an update* hands the operation it happened at, and in a loop the whole function, to
  eager execution. When Dynamo reports one, before anything has run, the optimizer is recorded from then on:
  Note [Recorded steps] in ``recorder.py`` (:func:`_at_graph_break`). So it is where Dynamo or AOTAutograd
  fails (:func:`_at_failed_conversion`), and where a captured graph would fail that a step catches when eager
  torch does (:func:`record_instead`). If Python is in the middle of that very step, it is too late to record
  it, and the break is refused. One in the closure of a step of torch.optim, or anywhere outside of the
  methods of an optimizer, leaves the update whole. (Dynamo can be made to resume loops after a break. It then
  reads the parameters of later iterations at the wrong place of an iterator: steps came out wrong without an
  error.)
* *Reading a tensor's value* (``norm.item()``) would break the graph too; it is captured instead, unless the
  step goes on to branch on it.
* *Something that Dynamo doesn't trace*: sparse gradients, optimizers whose step is disabled for Dynamo. See
  Note [Two doors] in ``refusals.py``. For ``fused=True`` it is given something else to trace: Note [A wish
  for speed] in ``torch_compat/fused_updates.py``.
* *Steps that run eagerly.* Whoever has an optimizer's step compiled, or the optimizer installed, wishes for
  compensated steps (:class:`_Wish`). Every optimizer runs torch's global hooks when it is stepped eagerly, in
  whatever thread, and ours asks what that step was to be (:func:`_before_eager_step`). If Python is in a call
  of what ``torch.compile`` returned, torch refuses to compile, for its stance or ``TORCH_COMPILE_DISABLE``:
  the step is recorded, and run operation by operation, this once. If not, the program has called the step
  itself, past the compiled one; or that of another optimizer (a new one, a copy, one that is loaded) with
  parameters that belong to a compensated step. Both are refused, unless the optimizer whose step is
  compensated holds the other: then that is recorded.
* *Compiling the model with this backend*, and not the step. A forward pass is none of its business and left
  to Inductor; the second eager step of the parameters in it, without error terms, is reported
  (:func:`_look_at_plain_step`: a first one may be taken by something compiled within, or before the others).

``strict`` backends raise a :class:`~collage_fx.errors.CollageError`; others warn once an optimizer and
reason. What the program itself, or another method of the optimizer, writes to parameters and state between
two steps is met at the next one: Note [Written between two steps] in ``state/written.py``.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from collage_fx.capture.members import note_gradients, stand_in, withdraw
from collage_fx.capture.new_state import forget_new_state, remember_state
from collage_fx.capture.numbers import scheduled_numbers
from collage_fx.capture.progress import telling
from collage_fx.capture.recorder import is_recording
from collage_fx.capture.recording import (
    branches_on_values,
    is_recordable,
    is_recorded,
    record,
    stop_recording,
)
from collage_fx.capture.refusals import refuse_optimizer, refuse_unknown_torch
from collage_fx.codegen import prepare_compiler
from collage_fx.errors import (
    CollageError,
    EagerStepError,
    GraphBreakError,
    RecompileLimitError,
    raise_or_warn,
)
from collage_fx.graph import device_facts
from collage_fx.numerics import is_low_precision
from collage_fx.state import (
    adopt,
    carry_along,
    expansion_of,
    has_error_terms,
    held_optimizers,
    known_tensors,
    note_eager_step,
    note_held,
    optimizers_among,
    parameter_names,
    records_there,
    settle_replaced,
    times_loaded,
    unpack_state,
)
from collage_fx.torch_compat import (
    ConvertAgain,
    GraphBreak,
    Place,
    RunEagerly,
    Thin,
    Watch,
    backend_within,
    base_of,
    before_eager_steps,
    calls_compiled_function,
    compiled_callables_on_the_stack,
    compiled_callables_within,
    current_trace,
    dynamo_recompile_limit,
    handle_stances,
    is_being_stepped,
    is_compiling_forbidden,
    is_in_own_step,
    is_step_of,
    is_step_wrapper,
    is_torchs_step,
    is_traced_whole,
    keep_sizes,
    watch_conversions,
    wrapped_steps_on_the_stack,
)

#: The multiple of Dynamo's ``recompile_limit`` (8) that is the limit of a function that isn't just a step.
COMPILATIONS = 4

#: Dynamo's settings while it traces for this backend: its own limits are out of reach, numbers read from
#: tensors become part of the graph, and a step doesn't call two functions more that would mark its beginning
#: for a profiler.
SETTINGS = {
    "recompile_limit": 1 << 30,
    "accumulated_recompile_limit": 1 << 30,
    "capture_scalar_outputs": True,
    "record_runtime_overhead": False,
}

#: ``(backend, keywords)`` -> whether it is strict; None for backends that compensate nothing.
Strictness = Callable[[Any, dict[str, Any]], bool | None]

#: Counts of compilations by identity: functions that do the same are equal as code.
_conversions = WeakIdKeyDictionary()
#: By what Dynamo compiles with, of which each call of ``torch.compile`` has its own: the optimizers stepped.
_stepped = WeakIdKeyDictionary()
#: The low-precision parameters that a graph to be differentiated reads: whether one has been stepped eagerly.
_read_forward = WeakTensorKeyDictionary()


def install(is_ours: Callable[[Any], bool], strictness: Strictness, rows_to_trace: Thin) -> None:
    """Start watching Dynamo and eager steps. A second call replaces the first.

    Args:
        is_ours: whether what ``torch.compile`` was given is a backend of ours.
        strictness: how it is to be treated, at each conversion of a function.
        rows_to_trace: see :class:`~collage_fx.torch_compat.Watch`.
    """
    watch_conversions(
        Watch(
            is_ours,
            lambda *conversion: _before_conversion(strictness, *conversion),
            _within_conversion,
            lambda *conversion: _after_conversion(strictness, *conversion),
            lambda *conversion: _at_failed_conversion(strictness, *conversion),
            lambda *traced: _at_trace(strictness, *traced),
            lambda *graph_break: _at_graph_break(strictness, *graph_break),
            lambda *hand_over: _at_hand_over(strictness, *hand_over),
            rows_to_trace,
            forget_new_state,
            SETTINGS,
        )
    )
    handle_stances(lambda *backend: strictness(*backend) is not None, is_recording, _before_call)

    def before_eager_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():  # else Dynamo traces this
            _before_eager_step(strictness, optimizer)

    before_eager_steps(before_eager_step)


def note_forward(inputs: Iterable[Any]) -> None:
    """Note the inputs of a graph to be differentiated, of whose parameters an eager step is reported."""
    for each in inputs:
        if isinstance(each, torch.nn.Parameter) and each.requires_grad and is_low_precision(each.dtype):
            _read_forward.setdefault(each, False)


# -- Dynamo begins to trace through an optimizer


def _at_trace(
    strictness: Strictness, optimizer: Optimizer, backend: Any, keywords: dict[str, Any]
) -> Iterable[Place] | None:
    """The optimizer's scheduled numbers, if a trace is for a backend of ours; raise if it is refused."""
    strict = strictness(backend, keywords)
    if strict is None:
        return None
    remember_state(optimizer, current_trace())
    unpack_state(optimizer)
    try:
        adopt(optimizer)
        refuse_optimizer(optimizer)
    except CollageError as refusal:
        raise_or_warn(optimizer, refusal, strict=strict)
    low = (p for _, p in parameter_names(optimizer) if is_low_precision(p.dtype))
    if any(device_facts(p.device).compiles_cpp for p in low):
        prepare_compiler()  # while Dynamo traces
    _conversion.get().enter_context(_gradients_with_sizes(optimizer))
    return scheduled_numbers(optimizer)


def _is_refused(optimizer: Optimizer, *, strict: bool) -> bool:
    """Raise if an optimizer's steps are refused and ``strict``; else whether that has been warned of."""
    try:
        refuse_optimizer(optimizer)
    except CollageError as refusal:
        raise_or_warn(optimizer, refusal, strict=strict)
        return True
    return False


# -- Dynamo compiles a function, maybe once more


def _before_conversion(
    strictness: Strictness,
    backend: Any,
    keywords: dict[str, Any],
    code: CodeType,
    variables: Mapping[str, Any],
) -> bool:
    """Whether a conversion is for a backend of ours; raise if it is one too many."""
    strict = strictness(backend, keywords)
    if strict is None:
        return False
    refuse_unknown_torch()
    for optimizer in _stepped_by(code, variables):
        if not is_recorded(optimizer) and branches_on_values(optimizer):
            reason = "it branches on the value of lr, which is a tensor"
            record(optimizer, backend, keywords, reason, strict=strict)
        if is_recorded(optimizer):
            raise RunEagerly
        for known in known_tensors({"self": optimizer}).values():
            keep_sizes(known.tensor)
    too_often = [subject for subject in _subjects(code, variables) if _is_at_limit(subject, code)]
    for subject in too_often:
        if not (isinstance(subject, Optimizer) and is_recordable(subject)):
            raise_or_warn(subject, _too_many(subject, code), strict=strict)
        elif not is_recorded(subject) and (is_step_wrapper(code) or not is_being_stepped(subject)):
            record(subject, backend, keywords, _too_many(subject, code).met, strict=strict)
    if any(isinstance(subject, Optimizer) and is_recorded(subject) for subject in too_often):
        raise RunEagerly
    return True


@contextmanager
def _within_conversion(code: CodeType, variables: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: tell of a step, have gradients stand in for missing ones."""
    optimizers = optimizers_among(variables).values()
    stepped = next(iter(optimizers), None)
    with ExitStack() as stack:
        stack.callback(withdraw, optimizers)
        for optimizer in optimizers:
            if is_torchs_step(optimizer, code, variables):
                note_gradients(optimizer)
                if not is_traced_whole():
                    stand_in(optimizer)
        if stepped is not None:
            stack.enter_context(telling(type(stepped).__name__, log=is_step_wrapper(code)))
        token = _conversion.set(stack)
        stack.callback(_conversion.reset, token)
        yield


#: The contexts of the conversion that this thread is at.
_conversion: ContextVar[ExitStack] = ContextVar("_conversion")


@contextmanager
def _gradients_with_sizes(optimizer: Optimizer) -> Iterator[None]:
    """Context manager: gradients that are views, as of a flat buffer, do not look like views.

    Since torch 2.13 the sizes of a gradient are symbols, for Dynamo and for AOTAutograd, if it is a view and
    its parameter is not. In its place stands, meanwhile, another tensor of the same memory.
    """
    parameters = [parameter for _, parameter in parameter_names(optimizer)]
    views = [(p, p.grad) for p in parameters if p.grad is not None and _is_view_of_its_own(p.grad, p)]
    for parameter, gradient in views:
        parameter.grad = gradient.detach()
    try:
        yield
    finally:
        for parameter, gradient in views:
            parameter.grad = gradient


def _is_view_of_its_own(gradient: Tensor, parameter: Tensor) -> bool:
    """Tell whether a gradient, not itself to be differentiated, is a view although its parameter is none."""
    return not gradient.requires_grad and base_of(gradient) is not None and base_of(parameter) is None


def _stepped_by(code: CodeType, variables: Mapping[str, Any]) -> list[Optimizer]:
    """The optimizers that a function is about to step, if it is torch's wrapper around a step."""
    return list(optimizers_among(variables).values()) if is_step_wrapper(code) else []


def _at_failed_conversion(
    strictness: Strictness,
    backend: Any,
    keywords: dict[str, Any],
    code: CodeType,
    variables: Mapping[str, Any],
    error: Exception,
) -> None:
    """Have steps recorded where Dynamo fails, or what it hands the graph to: Python may do them.

    Symbolic numbers and shapes are where most such failures come from, and a recorded step has fewer. But it
    is slower, and a failure can have another reason than the optimizer: hence a warning.
    """
    optimizers = optimizers_among(variables).values()
    strict = bool(strictness(backend, keywords))
    reason = f"capturing them failed with {type(error).__name__}: {error}"
    record_instead(optimizers, backend, keywords, reason, strict=strict, level=logging.WARNING)


def record_instead(
    optimizers: Iterable[Optimizer],
    backend: Any,
    keywords: dict[str, Any],
    reason: str,
    *,
    strict: bool,
    level: int = logging.INFO,
) -> None:
    """While a function is compiled that steps ``optimizers``: record those that can be, and begin again."""
    recordable = [
        o for o in optimizers if is_recordable(o) and not is_recorded(o) and not is_being_stepped(o)
    ]
    for optimizer in recordable:
        record(optimizer, backend, keywords, reason, strict=strict, level=level)
    if recordable:
        raise ConvertAgain


def _after_conversion(
    strictness: Strictness,
    backend: Any,
    keywords: dict[str, Any],
    compiler: Any,
    code: CodeType,
    variables: Mapping[str, Any],
) -> None:
    """Count a compilation; at the limit, have the step that Python is in recorded from the next call on."""
    for subject in _subjects(code, variables):
        if _is_at_limit(subject, code) and isinstance(subject, Optimizer) and is_recordable(subject):
            strict = bool(strictness(backend, keywords))
            record(subject, backend, keywords, _too_many(subject, code).met, strict=strict)
        _conversions.setdefault(subject, Counter())[_counted(subject, code)] += 1
        if isinstance(subject, Optimizer):
            _stepped.setdefault(compiler, WeakSet()).add(subject)
            note_held(subject)


def _before_call(compiler: Any) -> None:
    for optimizer in _stepped.get(compiler, ()):
        if not is_recorded(optimizer):  # which see to it themselves
            settle_replaced(optimizer)


def _done(subject: Optimizer | CodeType, code: CodeType) -> int:
    return int(_conversions.get(subject, Counter())[_counted(subject, code)])


def _is_at_limit(subject: Optimizer | CodeType, code: CodeType) -> bool:
    """Whether a function has been compiled as often for a subject as it may be."""
    is_a_step = is_step_wrapper(code) or (isinstance(subject, Optimizer) and is_step_of(subject, code))
    return _done(subject, code) >= dynamo_recompile_limit() * (1 if is_a_step else COMPILATIONS)


def _counted(subject: Optimizer | CodeType, code: CodeType) -> tuple[CodeType, int]:
    """What compilations are counted by: they begin anew when an optimizer is loaded, which calls for one."""
    return code, times_loaded(subject) if isinstance(subject, Optimizer) else 0


def _subjects(code: CodeType, variables: Mapping[str, Any]) -> list[Optimizer | CodeType]:
    """The subjects that a function's compilations are counted for: its optimizers, or else its code."""
    return list(optimizers_among(variables).values()) or [code]


#: Where a trainer's step is a closure, torch.compile(optimizer.step) is called with the model within.
_IN_A_TRAINER = (
    ". In a trainer use its callback instead of torch.compile: CollageCallback of "
    "collage_fx.integrations.lightning or .transformers"
)


def _too_many(subject: Optimizer | CodeType, code: CodeType) -> CollageError:
    of = f"of {type(subject).__name__} " if isinstance(subject, Optimizer) else ""
    return RecompileLimitError(
        f"this function {of}has been compiled {_done(subject, code)} times, and would have to be once more",
        where=f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})",
        remedy="find out what changes with TORCH_LOGS=recompiles. A number can be a tensor, "
        "torch.tensor(...). If the compilations are worth their time, raise "
        f"torch._dynamo.config.recompile_limit{_IN_A_TRAINER if isinstance(subject, CodeType) else ''}",
    )


# -- Dynamo breaks the graph


def _at_graph_break(
    strictness: Strictness,
    backend: Any,
    keywords: dict[str, Any],
    code: CodeType,
    graph_break: GraphBreak,
) -> None:
    strict = strictness(backend, keywords)
    optimizer = graph_break.optimizer
    if strict is None or optimizer is None:
        return
    if not any(is_low_precision(parameter.dtype) for _, parameter in parameter_names(optimizer)):
        return
    if graph_break.is_in_closure and _is_captured_after_its_closure(optimizer):
        return
    if _is_refused(optimizer, strict=strict):  # of which Dynamo may not have traced a line
        return
    can_be_recorded = is_recordable(optimizer) and not is_being_stepped(optimizer)
    if graph_break.is_around_a_step and not can_be_recorded:
        return  # its own step is like any function that steps an optimizer
    if can_be_recorded:
        if not is_recorded(optimizer):
            record(optimizer, backend, keywords, graph_break.reason, strict=strict)
        if is_step_wrapper(code):
            raise RunEagerly
        return
    refusal = GraphBreakError(
        f"Dynamo cannot capture the step of {type(optimizer).__name__}, and would run a part "
        f"of it eagerly, without error terms: {graph_break.reason}",
        where=graph_break.where,
        remedy="change that line (what Dynamo says about it: TORCH_LOGS=graph_breaks). If it belongs to "
        "the first step alone, where state is made, take that one eagerly, before the compiled ones. Or "
        "accept with strict=False that the part is not compensated",
    )
    if strict:
        forget_new_state(optimizer)
    raise_or_warn(optimizer, refusal, strict=strict)


def _is_captured_after_its_closure(optimizer: Optimizer) -> bool:
    """Whether a break in the closure of an optimizer's step is the only break there will be.

    Another one, after that, would come too late to record the step.
    """
    return type(optimizer).step.__module__.startswith("torch.optim.") or is_being_stepped(optimizer)


# -- compensated steps are asked for


@dataclass(eq=False)
class _Wish:
    """A wish for compensated steps of one optimizer.

    Attributes:
        backend: what ``torch.compile``, or ``install``, was given.
        keywords: and with it: ``mode`` or ``options``.
        strict: whether steps that are not compensated are refused.
        is_compiled: whether a step has been compiled with error terms.
        is_called: whether the step itself has been called eagerly, in place of what is to be compiled.
    """

    backend: Any
    keywords: dict[str, Any]
    strict: bool
    is_compiled: bool = False
    is_called: bool = False


class _Wishes:
    """The wishes of a process.

    Attributes:
        by_optimizer: those for optimizers that are known.
        are_there: whether ``torch.compile`` has been given a backend of ours.
        are_strict: whether the newest step that was compiled is.
    """

    by_optimizer: ClassVar[WeakKeyDictionary[Optimizer, _Wish]] = WeakKeyDictionary()
    are_there = False
    are_strict = False


def note_installed(optimizer: Optimizer, backend: Any, *, strict: bool) -> None:
    """Note that all steps of ``optimizer`` are to be compensated from now on, by this backend."""
    _adopt(optimizer, strict=strict)
    _Wishes.by_optimizer[optimizer] = _Wish(backend, {}, strict)


def note_compiled_step(optimizer: Optimizer, backend: Any, *, strict: bool) -> None:
    """Note that a step of ``optimizer`` is compiled with error terms: it isn't to be run eagerly any more.

    Unless it is the eager step that calls what is compiled.
    """
    _Wishes.are_strict = strict
    if calls_compiled_function(optimizer):
        _calls_what_is_compiled.add(optimizer)
        return
    wish = _Wishes.by_optimizer.setdefault(optimizer, _Wish(backend, {}, strict))
    wish.is_compiled, wish.strict = True, strict or wish.strict


#: Optimizers with a step, run eagerly, that calls what is compiled.
_calls_what_is_compiled: WeakSet[Optimizer] = WeakSet()


def forget_compiled_step(optimizer: Optimizer) -> None:
    """Let the optimizer be stepped eagerly, or be compiled, as if it had not been compiled before."""
    _Wishes.by_optimizer.pop(optimizer, None)
    stop_recording(optimizer)


def not_compiled_yet(is_meant: Callable[[Any, dict[str, Any]], bool]) -> list[str]:
    """The classes of optimizers whose steps are to be compiled and have not been, by the backends meant."""
    return [
        type(optimizer).__name__
        for optimizer, wish in list(_Wishes.by_optimizer.items())
        if not wish.is_compiled and is_meant(wish.backend, wish.keywords)
    ]


def _strict_in_copies(optimizer: Optimizer) -> bool | None:
    wish = _Wishes.by_optimizer.get(optimizer)
    return wish.strict if wish is not None and wish.is_compiled else None


def _ask_for_copy(optimizer: Optimizer, strict: bool) -> None:
    _Wishes.by_optimizer.setdefault(optimizer, _Wish(None, {}, strict, is_compiled=True))


carry_along("strict", _strict_in_copies, _ask_for_copy)


def _at_hand_over(strictness: Strictness, backend: Any, keywords: dict[str, Any], function: Any) -> None:
    """Note that ``torch.compile`` was given an optimizer's step, or a function that names optimizers."""
    _Wishes.are_there = True
    try:
        strict = strictness(backend, keywords)
    except CollageError:
        return  # of an option, which the first call raises
    if strict is None:
        return
    for optimizer in _optimizers_of(function):
        _Wishes.by_optimizer.setdefault(optimizer, _Wish(backend, keywords, strict))
        _adopt(optimizer, strict=strict)


def _adopt(optimizer: Optimizer, *, strict: bool) -> None:
    try:
        adopt(optimizer)
    except CollageError as refusal:
        raise_or_warn(optimizer, refusal, strict=strict)


def _optimizers_of(function: Any) -> list[Optimizer]:
    """The optimizer whose method a function is; or those among the variables around it."""
    if isinstance(owner := getattr(function, "__self__", None), Optimizer):
        return [owner]
    try:
        around = inspect.getclosurevars(function)
    except (
        TypeError,
        ValueError,
    ):  # not a function of Python's, or one with a variable that has no value yet
        return []
    return list(optimizers_among({**around.globals, **around.nonlocals}).values())


# -- a step runs eagerly


def _before_eager_step(strictness: Strictness, optimizer: Optimizer) -> None:
    if is_recording() or is_recorded(optimizer):
        return
    wish = _Wishes.by_optimizer.get(optimizer)
    call = next(_calls(strictness, optimizer, wish), None)
    if call is not None:
        _record_eager_step(optimizer, call)
        return
    if wish is None or not wish.is_compiled:
        note_eager_step(optimizer)
    if wish is not None:
        _look_at_bypassing_step(optimizer, wish)
    elif not _look_at_step_of_another(optimizer):
        _look_at_plain_step(optimizer)


class _Call(NamedTuple):
    """A call of what is to be compensated, which torch runs eagerly.

    Attributes:
        function: what was to be compiled.
        backend: by which.
        keywords: what goes with that.
        strict: whether it is strict.
    """

    function: Any
    backend: Any
    keywords: dict[str, Any]
    strict: bool


def _calls(strictness: Strictness, optimizer: Optimizer, wish: _Wish | None) -> Iterator[_Call]:
    """The calls, innermost first, that Python is in while the optimizer's step runs eagerly."""
    if wish is not None and is_in_own_step(optimizer):
        yield _Call(type(optimizer).step, wish.backend, wish.keywords, wish.strict)
    found = list(compiled_callables_on_the_stack()) if _Wishes.are_there else []
    if is_compiling_forbidden():
        found += compiled_callables_within(type(optimizer).step)
    for function, callback in found:
        backend, keywords = backend_within(callback)
        if (strict := strictness(backend, keywords)) is not None:
            yield _Call(function, backend, keywords, strict)


def _record_eager_step(optimizer: Optimizer, call: _Call) -> None:
    """Have a step recorded that torch runs eagerly, or refuse it."""
    low = (name for name, p in parameter_names(optimizer) if is_low_precision(p.dtype))
    if (first := next(low, None)) is None:
        return
    is_told = is_compiling_forbidden()
    outer = getattr(call.function, "__self__", optimizer)
    is_whole = not isinstance(outer, Optimizer) or outer is optimizer or is_recordable(outer)
    if (
        not is_recordable(optimizer)
        or wrapped_steps_on_the_stack(optimizer) > 1
        or (is_told and not is_whole)
    ):
        subject = optimizer if is_whole else outer
        raise_or_warn(subject, _run_eagerly(subject, first), strict=call.strict)
        return
    reason = "torch has been told not to compile" if is_told else "torch runs them eagerly"
    record(optimizer, call.backend, call.keywords, reason, strict=call.strict, for_one_step=is_told)


def _run_eagerly(optimizer: Any, name: str) -> CollageError:
    return EagerStepError(
        f"torch runs the compiled step of {type(optimizer).__name__} eagerly, without error terms",
        where=name,
        remedy="let torch compile it: leave out TORCH_COMPILE_DISABLE, torch.compiler.set_stance and "
        "torch.utils' dispatch modes around it. Steps of classes that call Optimizer.__init__, and are not "
        "compiled in the class itself, are compensated also there",
    )


def _look_at_bypassing_step(optimizer: Optimizer, wish: _Wish) -> None:
    """Refuse a step that is called in the place of the compiled one; before that is there, the second.

    Steps that torch has disabled for Dynamo come here, too: they are refused for what they are.
    """
    if not wish.is_compiled and _is_refused(optimizer, strict=wish.strict):
        return
    stepped = ((name, p) for name, p in parameter_names(optimizer) if p.grad is not None)
    if wish.is_compiled:
        first = next((name for name, p in stepped if expansion_of(p)), None)
    else:
        first = next((name for name, p in stepped if is_low_precision(p.dtype)), None)
        if first is not None and not wish.is_called:
            wish.is_called = True
            return
    if first is not None:
        raise_or_warn(optimizer, _bypassed(optimizer, first, wish), strict=wish.strict)


def _bypassed(optimizer: Optimizer, name: str, wish: _Wish) -> CollageError:
    there = (
        "although a compiled step keeps error terms of this optimizer's parameters, which an eager step "
        "would neither use nor keep up"
        if wish.is_compiled
        else "twice, and the compiled step that torch.compile returned has not: nothing is compensated"
    )
    return EagerStepError(
        f"{type(optimizer).__name__}.step() has been called eagerly, {there}",
        where=name,
        remedy="have optimizer.step() be the compiled step, collage_fx.install(optimizer); or call what "
        "step = torch.compile(optimizer.step, backend=...) returned. To go on without it, drop the error "
        "terms with collage_fx.reset_error_terms(parameter)",
    )


def _look_at_step_of_another(optimizer: Optimizer) -> bool:
    """Look for parameters of another optimizer, whose steps are compensated: have these be, too, or refuse.

    Returns:
        whether there are such parameters.
    """
    if optimizer in _calls_what_is_compiled or compiled_callables_within(type(optimizer).step):
        return False
    state = records_there(), len(_Wishes.by_optimizer), sum(len(g["params"]) for g in optimizer.param_groups)
    if _of_no_other.get(optimizer) == state:
        return False
    owners = {id(p): other for other in list(_Wishes.by_optimizer) for _, p in parameter_names(other)}
    for name, p in parameter_names(optimizer):
        owner = owners.get(id(p))
        if p.grad is None or not is_low_precision(p.dtype) or (owner is None and not has_error_terms(p)):
            continue
        if not any(
            inner in _Wishes.by_optimizer or is_recorded(inner) for inner in held_optimizers(optimizer)
        ):
            _take_over_or_refuse(optimizer, name, owner)
        return True
    _of_no_other[optimizer] = state
    return False


#: Optimizers none of whose parameters is in another's compensated step, and when that has been looked at.
_of_no_other: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()


def _take_over_or_refuse(optimizer: Optimizer, name: str, owner: Optimizer | None) -> None:
    """Have the steps of an optimizer compensated if the owner of its parameters holds it; refuse others."""
    wish = None if owner is None else _Wishes.by_optimizer.get(owner)
    if wish is not None and optimizer in held_optimizers(owner):
        _Wishes.by_optimizer[optimizer] = wish
        reason = f"{type(owner).__name__}, which holds it, calls them outside of its own step"
        record(optimizer, wish.backend, wish.keywords, reason, strict=wish.strict)
        return
    strict = _Wishes.are_strict if wish is None else wish.strict
    raise_or_warn(optimizer, _of_another(optimizer, name, owner), strict=strict)


def _of_another(optimizer: Optimizer, name: str, owner: Optimizer | None) -> CollageError:
    kind, of = type(optimizer).__name__, "" if owner is None else f" of {type(owner).__name__}"
    return EagerStepError(
        f"{kind}.step() updates parameters eagerly that belong to a compensated step{of}, whose error terms "
        "it would neither use nor keep up",
        where=name,
        remedy=f"have this {kind} compensated as well, collage_fx.install(optimizer). To go on without it, "
        "collage_fx.uninstall the other optimizer, or drop the error terms with "
        "collage_fx.reset_error_terms(parameter)",
    )


def _look_at_plain_step(optimizer: Optimizer) -> None:
    if not _read_forward:
        return
    for name, p in parameter_names(optimizer):
        if p.grad is not None and p in _read_forward and expansion_of(p) is None:
            if not _read_forward[p]:
                _read_forward[p] = True
                return
            _read_forward.clear()
            raise_or_warn(optimizer, _only_the_model_is_compiled(optimizer, name), strict=False)
            return


def _only_the_model_is_compiled(optimizer: Optimizer, name: str) -> CollageError:
    return EagerStepError(
        f"the model is compiled with this backend, which leaves a forward pass to Inductor, and "
        f"{type(optimizer).__name__}.step() is not: it updates low-precision parameters eagerly, without "
        "error terms",
        where=name,
        remedy="compile the step: step = torch.compile(optimizer.step, backend=...). The model needs no "
        "backend of ours: torch.compile(model)",
    )
