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
  for speed] in ``torch_compat/patch_fused_updates.py``.
* *Calling ``optimizer.step()`` itself* instead of the compiled callable. Every optimizer runs the global step
  hooks when it is stepped eagerly; ours looks whether the optimizer's parameters have error terms
  (:func:`_before_eager_step`).
* *Compiling the model with this backend*, and not the step. A forward pass is none of its business and left
  to Inductor; the second eager step of the parameters in it, without error terms, is reported
  (:func:`_look_at_plain_step`: a first one may be taken by something compiled within, or before the others).

``strict`` backends raise a :class:`~collage_fx.errors.CollageError`; others warn once an optimizer and
reason. Changes that a program makes to a parameter itself, by loading weights for instance, are its own
business: see :func:`~collage_fx.reset_error_terms`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from collage_fx.capture.members import note_gradients, stand_in, withdraw
from collage_fx.capture.new_state import forget_new_state, remember_state
from collage_fx.capture.numbers import scheduled_numbers
from collage_fx.capture.progress import telling
from collage_fx.capture.recording import (
    branches_on_values,
    is_recordable,
    is_recorded,
    record,
    stop_recording,
)
from collage_fx.capture.refusals import refuse_optimizer, refuse_unknown_torch
from collage_fx.errors import (
    CollageError,
    EagerStepError,
    GraphBreakError,
    RecompileLimitError,
    raise_or_warn,
)
from collage_fx.graph import device_facts
from collage_fx.numerics import is_low_precision
from collage_fx.runtime import (
    adopt,
    expansion_of,
    forget_wider_state,
    known_tensors,
    note_held,
    optimizers_among,
    parameter_names,
    prepare_compiler,
    settle_replaced,
    times_loaded,
    unpack_state,
)
from collage_fx.torch_compat import (
    ConvertAgain,
    GraphBreak,
    Place,
    RunAsItIs,
    Thin,
    Watch,
    base_of,
    before_eager_steps,
    calls_what_is_compiled,
    current_trace,
    dynamo_recompile_limit,
    is_being_stepped,
    is_step_of,
    is_step_wrapper,
    is_torchs_step,
    is_traced_whole,
    keep_sizes,
    watch_conversions,
)

__all__ = ["forget_compiled_step", "note_compiled_step", "note_forward", "record_instead"]

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
_compiled: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
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
            _before_call,
            lambda *conversion: _at_failed_conversion(strictness, *conversion),
            lambda *traced: _at_trace(strictness, *traced),
            lambda *graph_break: _at_graph_break(strictness, *graph_break),
            rows_to_trace,
            forget_new_state,
            SETTINGS,
        )
    )
    before_eager_steps(_before_eager_step)


def note_compiled_step(optimizer: Optimizer, *, strict: bool) -> None:
    """Note that a step of ``optimizer`` is compiled with error terms: it isn't to be run eagerly any more.

    Unless it is the eager step that calls what is compiled.
    """
    if not calls_what_is_compiled(optimizer):
        _compiled[optimizer] = strict or _compiled.get(optimizer, False)


def forget_compiled_step(optimizer: Optimizer) -> None:
    """Let the optimizer be stepped eagerly, or be compiled, as if it had not been compiled before."""
    _compiled.pop(optimizer, None)
    stop_recording(optimizer)


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
            raise RunAsItIs
        for known in known_tensors({"self": optimizer}).values():
            keep_sizes(known.tensor)
    too_often = [subject for subject in _subjects(code, variables) if _is_at_limit(subject, code)]
    for subject in too_often:
        if not (isinstance(subject, Optimizer) and is_recordable(subject)):
            raise_or_warn(subject, _too_many(subject, code), strict=strict)
        elif not is_recorded(subject) and (is_step_wrapper(code) or not is_being_stepped(subject)):
            record(subject, backend, keywords, _too_many(subject, code).met, strict=strict)
    if any(isinstance(subject, Optimizer) and is_recorded(subject) for subject in too_often):
        raise RunAsItIs
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


def _too_many(subject: Optimizer | CodeType, code: CodeType) -> CollageError:
    of = f"of {type(subject).__name__} " if isinstance(subject, Optimizer) else ""
    return RecompileLimitError(
        f"this function {of}has been compiled {_done(subject, code)} times, and would have to be once more",
        where=f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})",
        remedy="find out what changes with TORCH_LOGS=recompiles. A number can be a tensor, "
        "torch.tensor(...). If the compilations are worth their time, raise "
        "torch._dynamo.config.recompile_limit",
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
    can_be_recorded = is_recordable(optimizer) and not is_being_stepped(optimizer)
    if graph_break.is_around_a_step and not can_be_recorded:
        return  # its own step is like any function that steps an optimizer
    if can_be_recorded:
        if not is_recorded(optimizer):
            record(optimizer, backend, keywords, graph_break.reason, strict=strict)
        if is_step_wrapper(code):
            raise RunAsItIs
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


# -- a step is called without its compiled callable


def _before_eager_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or is_recorded(optimizer):
        return
    if optimizer not in _compiled:
        forget_wider_state(optimizer)
        _look_at_plain_step(optimizer)
        return
    stepped = (name for name, p in parameter_names(optimizer) if p.grad is not None and expansion_of(p))
    first = next(stepped, None)
    if first is not None:
        raise_or_warn(optimizer, _bypassed(optimizer, first), strict=_compiled[optimizer])


def _bypassed(optimizer: Optimizer, name: str) -> CollageError:
    return EagerStepError(
        f"{type(optimizer).__name__}.step() has been called eagerly, although a compiled step keeps error "
        "terms of this optimizer's parameters, which an eager step would neither use nor keep up",
        where=name,
        remedy="call the compiled step: step = torch.compile(optimizer.step, backend=...). To go on without "
        "it, drop the error terms with collage_fx.reset_error_terms(parameter)",
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
