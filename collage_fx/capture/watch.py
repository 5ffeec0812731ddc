"""Watch over Dynamo: updates that would run eagerly, without error terms, are refused or reported.

Note [Nothing unnoticed]
------------------------
The compiled graphs compensate. There are six ways past them, each checked where it begins, which costs
nothing in a step that is compiled already:

* *Dynamo gives up on a function* that has been compiled too often. For this backend it never does: each
  optimizer has a limit, counted anew once it is loaded. A step at Dynamo's ``recompile_limit`` (in another
  function at :data:`COMPILATIONS` times the limit) is recorded from then on; a function that updates tensors
  of no optimizer is refused (:func:`_before_conversion`).
* *A graph break inside an update* hands the operation that caused it, and in a loop the whole function, to
  eager execution. The optimizer is recorded instead, before anything of the function has run: Note [Recorded
  steps] in ``recorder.py`` (:func:`_at_graph_break`). So it is where Dynamo or AOTAutograd fails
  (:func:`_at_failed_conversion`), where a captured graph would fail and the step catches what eager torch
  raises (:func:`record_instead`), and where a step may ask for classes that Dynamo does not see
  (:func:`_record_if_classes_matter`). In the middle of a step, the rest of the step is recorded
  (``recording.beginning_here``): what came before was compensated. Steps that torch has not wrapped, and
  functions that update weights in lines of their own (``source.py``), are recorded from the break to the end
  of the call of what ``torch.compile`` returned (``recording.beginning_in_call``), if they are called without
  gradients; with gradients they may differentiate, and are refused. A break in a closure, or in a function
  that updates nothing itself, leaves the update whole. (Dynamo can resume loops after a break, but then reads
  later parameters at the wrong index of an iterator: steps came out wrong without an error.)
* *Reading a tensor's value* (``norm.item()``) is captured, unless the step goes on to branch on it.
* *Steps that Dynamo does not trace*, such as those with sparse gradients: Note [Two doors] in
  ``refusals.py``. For ``fused=True`` Dynamo traces something else: Note [A wish for speed] in
  ``torch_compat/fused_updates.py``.
* *Steps that run eagerly.* A program that compiles or installs an optimizer's step requests compensated steps
  (:class:`_Requested`), which a global hook of torch checks (:func:`_before_eager_step`). If Python is in a
  call of what ``torch.compile`` returned, torch has been told not to compile: the step is recorded, and run
  operation by operation, this once. If not, the program has called the step itself instead of the compiled
  one, or the step of another optimizer (a new one, a copy, a loaded one) of the same parameters. Both are
  refused, unless the optimizer whose step is compensated holds the other: then the other is recorded.
* *Compiling the model with this backend*, and not the step: the second eager step of its parameters is
  reported (:func:`_check_plain_step`; the first may be taken by something compiled inside).

``strict`` backends raise a :class:`~collage_fx.errors.CollageError`; others warn once for each optimizer and
reason. Writes between two steps are checked later: Note [Written between two steps] in ``state/written.py``.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import errors, state, torch_compat
from collage_fx.capture import recording, refusals, rows
from collage_fx.capture.compiled import CompiledCode, compiling_for
from collage_fx.capture.numbers import scheduled_numbers
from collage_fx.capture.recorder import is_recording
from collage_fx.capture.recording import Request, beginning_in_call, is_recordable, is_recorded
from collage_fx.capture.source import line_that_updates, within_reach
from collage_fx.numerics import is_low_precision
from collage_fx.state import files_of, has_error_terms
from collage_fx.torch_compat import GraphBreak, ThinnedLists, is_being_stepped, is_class_traced, own_step

log = logging.getLogger("collage_fx")

#: The multiple of Dynamo's ``recompile_limit`` (8) that is the limit of a function that isn't just a step.
COMPILATIONS = 4

#: Dynamo's settings while it traces for this backend: its own limits are out of reach, numbers read from
#: tensors become part of the graph, and no two functions more mark a step's beginning for a profiler.
SETTINGS = {
    "recompile_limit": 1 << 30,
    "accumulated_recompile_limit": 1 << 30,
    "capture_scalar_outputs": True,
    "record_runtime_overhead": False,
}


class _Compilations(Counter[Any]):
    """Part of an optimizer or function: how often functions have been compiled for it.

    Functions that do the same are equal as code; records are by identity.
    """


@dataclass
class _ReadForward:
    """Part of a low-precision parameter that a differentiated graph reads."""

    is_stepped: bool = False  # eagerly


@dataclass(eq=False)
class _Requested:
    """Request for compensated steps of an optimizer: a part of its record."""

    request: Request
    is_compiled: bool = False  # a step, with error terms
    is_called: bool = False  # the step itself, eagerly, instead of a compiled callable


@dataclass(eq=False)
class _Facts:
    calls_compiled: bool = False  # whether its step runs eagerly and calls compiled code
    checked: Any = None  # state of all records when it had no parameters of another's compensated step
    is_traced_again: bool = False  # after an exception that Dynamo would raise


def _request(optimizer: Optimizer, request: Request, *, is_compiled: bool = False) -> _Requested:
    """Ask for compensated steps of an optimizer, unless somebody has; return the request."""
    requested = torch_compat.records.find(optimizer, _Requested)
    return requested or torch_compat.records.put(optimizer, _Requested(request, is_compiled))


def start_watch() -> None:
    """Start watching Dynamo and eager steps. A second call replaces the first."""
    torch_compat.watch_conversions(
        torch_compat.Watch(
            lambda backend: hasattr(backend, "stands_for") or hasattr(backend, "compensates"),
            Request.of,
            _before_conversion,
            _within_conversion,
            _after_conversion,
            _at_failed_conversion,
            _at_trace,
            _at_graph_break,
            _at_torch_compile,
            _rows_to_trace,
            _has_updates_of_concern,
            SETTINGS,
            is_recording,
            _before_call,
        )
    )
    torch_compat.before_eager_steps(_before_eager_step)


def _request_now() -> Request | None:
    return Request.of(*torch_compat.backend_being_traced_for())


torch_compat.trace_unfused(lambda: _request_now() is not None)


def note_forward(inputs: Iterable[Any]) -> None:
    """Note the parameters that a differentiated graph reads: eager steps of them are reported."""
    for each in inputs:
        if isinstance(each, torch.nn.Parameter) and each.requires_grad and is_low_precision(each.dtype):
            torch_compat.records.of(each, _ReadForward)


# -- Dynamo begins to trace through an optimizer

#: Functions that make an optimizer save and load error terms, or refuse it: loaded entries may not fit.
ADOPTING = refusals.refuse_uninitialized, state.adopt


def _at_trace(optimizer: Optimizer) -> Iterable[torch_compat.Place] | None:
    """Return the optimizer's scheduled numbers for a trace of ours, else None; raise for a refused step."""
    request = _request_now()
    if request is None:
        return None
    refusals.remember_state(optimizer, torch_compat.current_trace())
    state.unpack_all(optimizer)
    _record_if_classes_matter(optimizer, request)
    _is_refused(optimizer, *ADOPTING, strict=request.strict)
    _is_refused(optimizer, strict=request.strict)
    contexts, _ = _conversion.get()
    contexts.enter_context(_gradients_with_sizes(optimizer))
    return scheduled_numbers(optimizer)


def _record_if_classes_matter(optimizer: Optimizer, request: Request) -> None:
    """Record a step that may ask its parameters for a class of which Dynamo knows nothing, from here on.

    Dynamo takes it for a ``Parameter``, so compiles another branch. Steps of torch.optim ask for no class.
    """
    if torch_compat.is_of_torch_optim(type(optimizer).step):
        return
    unknown = next((each for each in state.parameter_names(optimizer) if not is_class_traced(each[1])), None)
    if unknown is None:
        return
    if is_recorded(optimizer):  # of a function in which it was not found before the trace
        raise torch_compat.RunEagerly
    name, kind = unknown[0], type(unknown[1]).__qualname__
    record_instead([optimizer], request, f"Dynamo takes a parameter of class {kind} for a Parameter")
    errors.UnsupportedOptimizerError(
        f"a parameter of class {kind}, which Dynamo takes for a Parameter: a step that asks for the class "
        f"would take another branch. The step of {type(optimizer).__name__} cannot be recorded",
        where=name,
        remedy=refusals.CALL_INIT,
    ).raise_or_warn(optimizer, strict=request.strict)


def _rows_to_trace(optimizer: Optimizer, lists: tuple[tuple[Any, ...], ...]) -> ThinnedLists | None:
    """Choose the rows of an optimizer's lists that Dynamo is to trace; None for all."""
    request, facts = _request_now(), rows.Rows.of(optimizer)
    traced = None
    if request is not None and (options := request.backend.options).not_by_family() is None:
        come_and_go = bool(facts.standing_in) or facts.come_and_go
        any_size = not (options.asks_for_sizes or facts.depend_on_sizes)
        traced = rows.rows_to_trace(
            optimizer, lists, come_and_go=come_and_go, packs=options.takes_float32, any_size=any_size
        )
    if traced is None and facts.standing_in:
        facts.are_understood = False
        refusals.forget_new_state(optimizer)
        raise torch_compat.ConvertAgain(whole=True)
    return traced


def _is_refused(optimizer: Optimizer, *checks: Callable[[Optimizer], Any], strict: bool) -> bool:
    """Check an optimizer; raise the first refusal if ``strict``, else warn; return whether it is refused."""
    try:
        for check in checks or (refusals.refuse_optimizer,):
            check(optimizer)
    except errors.CollageError as refusal:
        refusal.raise_or_warn(optimizer, strict=strict)
        return True
    return False


# -- Dynamo compiles a function, maybe once more


def _before_conversion(request: Request, compiler: Any, code: CodeType, variables: Mapping[str, Any]) -> None:
    """Leave recorded steps to Python; record steps, or refuse them, at the limit of compilations."""
    refusals.refuse_unknown_torch()
    if is_recording() or recording.is_switch(code):
        raise torch_compat.RunEagerly(always=recording.is_switch(code))
    if (begin := recording.beginning_again()) is not None:
        raise torch_compat.RunEagerly(begin=begin)
    is_a_step = torch_compat.is_step_wrapper(code)
    for optimizer in state.optimizers_among(variables).values() if is_a_step else ():
        if recording.switch(optimizer):
            raise torch_compat.RunEagerly  # Dynamo would look at the wrapper's variables as they were
        if not is_recorded(optimizer) and (reason := recording.reason_to_record(optimizer)):
            recording.record(optimizer, request, reason)
        if is_recorded(optimizer):
            raise torch_compat.RunEagerly
    too_often = [subject for subject in _subjects(code, variables) if _is_at_limit(subject, compiler, code)]
    for subject in too_often:
        if not (isinstance(subject, Optimizer) and is_recordable(subject)):
            _too_many(subject, compiler, code).raise_or_warn(subject, strict=request.strict)
        elif not is_recorded(subject) and (is_a_step or not is_being_stepped(subject)):
            recording.record(subject, request, _too_many(subject, compiler, code).met)
    if any(isinstance(subject, Optimizer) and is_recorded(subject) for subject in too_often):
        raise torch_compat.RunEagerly


@contextmanager
def _within_conversion(compiler: Any, code: CodeType, variables: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: show the compilation of a step; members without a gradient have a placeholder."""
    optimizers = state.optimizers_among(variables).values()
    stepped = next(iter(optimizers), None)
    with ExitStack() as stack:
        stack.callback(rows.remove_stand_ins, optimizers)
        for optimizer in optimizers:
            if torch_compat.is_torchs_step(optimizer, code, variables):
                rows.note_gradients(optimizer, with_stand_ins=not torch_compat.is_traced_whole())
        if stepped is not None:
            stack.enter_context(
                recording.show_progress(type(stepped).__name__, in_log=torch_compat.is_step_wrapper(code))
            )
        compiled = torch_compat.records.of(compiler, CompiledCode)
        compiled.codes[id(code)] = code
        stack.enter_context(compiling_for(compiled))
        token = _conversion.set((stack, torch.is_grad_enabled()))
        stack.callback(_conversion.reset, token)
        try:
            yield
        except (KeyboardInterrupt, SystemExit):  # no step has been taken, and maybe none will be
            for optimizer in optimizers:
                refusals.forget_new_state(optimizer)
            raise


#: Contexts to leave when the thread's conversion ends; whether the function is called with gradients enabled.
_conversion: ContextVar[tuple[ExitStack, bool]] = ContextVar("_conversion")


@contextmanager
def _gradients_with_sizes(optimizer: Optimizer) -> Iterator[None]:
    """Context manager: gradients that are views, as of a flat buffer, do not look like views.

    Since torch 2.13 the sizes of a gradient are symbols, for Dynamo and for AOTAutograd, if the gradient is a
    view and its parameter is not. Meanwhile another tensor of the same memory replaces the gradient.
    """
    parameters = [parameter for _, parameter in state.parameter_names(optimizer)]
    views = [(p, p.grad) for p in parameters if p.grad is not None and _is_view_of_its_own(p.grad, p)]
    for parameter, gradient in views:
        parameter.grad = gradient.detach()
    try:
        yield
    finally:
        for parameter, gradient in views:
            parameter.grad = gradient


def _is_view_of_its_own(gradient: Tensor, parameter: Tensor) -> bool:
    """Return whether a gradient that needs no gradient is a view although its parameter is none."""
    if gradient.requires_grad:
        return False
    if torch_compat.sharding_of(gradient) is not None:
        return torch_compat.base_of(torch_compat.local_tensor(gradient)) is not None
    return torch_compat.base_of(gradient) is not None and torch_compat.base_of(parameter) is None


def _at_failed_conversion(
    request: Request, code: CodeType, variables: Mapping[str, Any], error: Exception
) -> None:
    """Record steps at which Dynamo, or its backend, fails: Python may run them.

    Most such failures come from symbolic numbers and shapes, and a recorded step has fewer. But recorded
    steps are slower, and a failure can have another reason than the optimizer: hence a warning.
    """
    reason = f"capturing them failed with {type(error).__name__}: {error}"
    record_instead(state.optimizers_among(variables).values(), request, reason, level=logging.WARNING)


def record_instead(
    optimizers: Iterable[Optimizer], request: Request, reason: str, *, level: int = logging.INFO
) -> None:
    """Record optimizers from now on, and begin again, while a function that steps them is compiled.

    In the middle of a step, the rest of it is recorded, too. Optimizers that cannot be recorded are left out.
    """
    recordable = [o for o in optimizers if is_recordable(o) and not (is_recorded(o) or is_being_stepped(o))]
    for optimizer in recordable:
        recording.record(optimizer, request, reason, level=level)
    if recordable:
        raise torch_compat.ConvertAgain
    if (begin := recording.beginning_here(request, reason, level=level)) is not None:
        raise torch_compat.RunEagerly(begin=begin)


def _after_conversion(request: Request, compiler: Any, code: CodeType, variables: Mapping[str, Any]) -> None:
    """Count a compilation; at the limit, record the step that Python is in, from the next call on."""
    for subject in _subjects(code, variables):
        is_at_limit = _is_at_limit(subject, compiler, code)
        if is_at_limit and isinstance(subject, Optimizer) and is_recordable(subject):
            recording.record(subject, request, _too_many(subject, compiler, code).met)
        _done(subject, compiler, code, more=1)
        if isinstance(subject, Optimizer):
            torch_compat.records.of(compiler, CompiledCode).stepped[id(subject)] = ref(subject)
            state.note_held(subject)


def _before_call(compiler: Any) -> None:
    """Check for replaced tensors of the optimizers that a compiled callable steps; drop stale code."""
    if (compiled := torch_compat.records.find(compiler, CompiledCode)) is None:
        return
    if compiled.is_stale:
        torch_compat.records.drop(compiler, CompiledCode)
        for code in compiled.codes.values():
            torch_compat.drop_code(code)
    for reference in [*compiled.stepped.values()]:
        optimizer = reference()
        if optimizer is not None and not is_recorded(optimizer):  # recorded steps check for themselves
            state.settle_replaced(optimizer)


def _done(subject: Optimizer | CodeType, compiler: Any, code: CodeType, more: int = 0) -> int:
    """Return how often a function was compiled, with ``more``: for an optimizer, or one ``torch.compile``."""
    counts = torch_compat.records.of(subject if isinstance(subject, Optimizer) else compiler, _Compilations)
    of = files_of(subject).loads if isinstance(subject, Optimizer) else torch_compat.key_of_code(subject)
    key = torch_compat.key_of_code(code), of
    counts[key] += more
    return counts[key]


def _is_at_limit(subject: Optimizer | CodeType, compiler: Any, code: CodeType) -> bool:
    is_a_step = torch_compat.is_step_wrapper(code) or (
        isinstance(subject, Optimizer) and torch_compat.is_step_of(subject, code)
    )
    limit = torch_compat.dynamo_recompile_limit() * (1 if is_a_step else COMPILATIONS)
    return _done(subject, compiler, code) >= limit


def _subjects(code: CodeType, variables: Mapping[str, Any]) -> list[Optimizer | CodeType]:
    """Return the subjects to count a function's compilations for: its optimizers, or else its code.

    All functions that a decorator wraps have one code, that of its wrapper: the code inside counts then.
    Dynamo compiles functions defined in a file of torch, as ``torch.no_grad``'s, in a wrapper of its own.
    """
    if optimizers := state.optimizers_among(variables).values():
        return [*optimizers]
    if code.co_flags & inspect.CO_VARARGS and code.co_flags & inspect.CO_VARKEYWORDS:
        closed_over = [variables.get(name) for name in code.co_freevars]
        functions = [each for each in closed_over if isinstance(each, FunctionType)]
        if len(functions) == 1:
            return [cast(FunctionType, inspect.unwrap(functions[0])).__code__]
    return [code]


def _too_many(subject: Optimizer | CodeType, compiler: Any, code: CodeType) -> errors.CollageError:
    named, of, in_a_trainer = code, f"of {type(subject).__name__} ", ""
    if isinstance(subject, CodeType):  # perhaps a trainer's step, which runs the model as a closure
        named, of = subject, ""
        in_a_trainer = (
            ". In a trainer use its callback instead of torch.compile: CollageCallback of "
            "collage_fx.integrations.lightning or .transformers"
        )
    count = _done(subject, compiler, code)
    return errors.RecompileLimitError(
        f"this function {of}has been compiled {count} times; this call would compile it again",
        where=f"{named.co_name} ({named.co_filename}:{named.co_firstlineno})",
        remedy="find out what differs with TORCH_LOGS=recompiles. Pass a number that "
        "varies as a tensor, torch.tensor(...). If the compilations are worth their time, raise "
        f"torch._dynamo.config.recompile_limit{in_a_trainer}",
    )


def expect_some_gradients(optimizer: Optimizer, backend: Any) -> bool:
    """Note that an optimizer will be stepped with gradients of some parameters, at any time of others.

    A step of torch.optim is compiled once for all, as long as it consists of rows. Others are recorded, which
    DTensors cannot be: then each set of gradients is compiled.

    Returns:
        whether absent gradients need stand-ins, :data:`~collage_fx.runtime.STAND_INS`: Dynamo has guards on
        a DTensor's gradient that None does not pass.
    """
    request = Request.of(backend, {})
    is_cut = any(torch_compat.sharding_of(p) is not None for _, p in state.parameter_names(optimizer))
    if request is not None and torch_compat.is_traced_without_wrapper(optimizer):
        rows.Rows.of(optimizer).turns = 2  # all are members from the start
        return is_cut
    if request is not None and not is_cut and not is_recorded(optimizer):
        recording.record(optimizer, request, "it is stepped for some parameters at a time")
    return False


# -- Dynamo breaks the graph


def _at_graph_break(code: CodeType, graph_break: GraphBreak) -> None:
    """Record the optimizer whose update a graph break is in, or refuse it, or trace all of its rows."""
    _record_or_refuse(code, graph_break)
    if lists := torch_compat.thinned_lists():
        for each in lists:
            refusals.forget_new_state(each.optimizer)
        raise torch_compat.ConvertAgain(whole=True)


def _record_or_refuse(code: CodeType, graph_break: GraphBreak) -> None:
    request, optimizer = _request_now(), graph_break.optimizer
    if request is None:
        return
    if optimizer is None:
        _record_or_refuse_function(code, graph_break, request)
        return
    has_any = _has_updates_of_concern(request, optimizer)
    if (graph_break.is_in_closure or recording.is_in_closure()) and is_being_stepped(optimizer):
        return  # what follows the closure is captured by itself
    if has_any and _is_refused(optimizer, strict=request.strict):
        return  # Dynamo may not have traced a line of the step
    can_be_recorded = is_recordable(optimizer) and not is_being_stepped(optimizer)
    if graph_break.is_around_a_step and not can_be_recorded and graph_break.left is None:
        return  # its own step is like any function that steps an optimizer
    if can_be_recorded:
        if not is_recorded(optimizer):
            facts = torch_compat.records.of(optimizer, _Facts)
            if graph_break.is_exception and not facts.is_traced_again:
                facts.is_traced_again = True
                refusals.forget_new_state(optimizer)
                # Dynamo has called _init_group, and sees its entries in groups only now.
                raise torch_compat.ConvertAgain
            recording.record(optimizer, request, graph_break.reason)
        if torch_compat.is_step_wrapper(code):
            raise torch_compat.RunEagerly
        return
    begin = recording.beginning_here(request, graph_break.reason)
    if (begin := begin or beginning_in_call(request, graph_break.reason, [optimizer])) is not None:
        raise torch_compat.RunEagerly(begin=begin)
    if not has_any:
        return  # its parts are compiled, as by plain torch.compile
    refusal = errors.GraphBreakError(
        f"Dynamo cannot capture the step of {type(optimizer).__name__}, and would run a part "
        f"of it eagerly, without error terms: {graph_break.reason}",
        where=graph_break.where,
        remedy="call collage_fx.install(optimizer), and compile no part of its step"
        if is_recordable(optimizer)
        else "call collage_fx.install(optimizer) in place of torch.compile, which records such a step"
        + (", below the line that sets optimizer.step" if torch_compat.has_foreign_step(optimizer) else ""),
    )
    if request.strict:
        refusals.forget_new_state(optimizer)
    refusal.raise_or_warn(optimizer, strict=request.strict)


def _record_or_refuse_function(code: CodeType, graph_break: GraphBreak, request: Request) -> None:
    """Record, or refuse, a function that Python is to run, if lines of its own update weights.

    What it calls is compiled. A function that may differentiate is not recorded.
    """
    if graph_break.left is None or (line := line_that_updates(code)) is None:
        return
    optimizers, weights = within_reach(torch_compat.traced_frame_variables())
    packs = request.backend.options.takes_float32
    is_any = any(_has_updates_of_concern(request, each) for each in optimizers)
    if not is_any and not any(rows.is_of_concern(each, packs) for each in weights):
        return
    _, has_gradients = _conversion.get()
    if not has_gradients and (begin := beginning_in_call(request, graph_break.reason, optimizers, weights)):
        raise torch_compat.RunEagerly(begin=begin)
    errors.GraphBreakError(
        f"Dynamo cannot capture {code.co_name}, and would run its updates of weights eagerly, without error "
        f"terms: {graph_break.reason}",
        where=f"{code.co_filename}:{line} in {code.co_name}",
        remedy=f"move the lines that update weights to a function that {code.co_name} calls, which is then "
        f"captured by itself; or put @torch.no_grad() before {code.co_name}, if it differentiates nothing",
    ).raise_or_warn(code, strict=request.strict)


def _has_updates_of_concern(request: Request, optimizer: Optimizer) -> bool:
    packs = request.backend.options.takes_float32
    return any(rows.is_of_concern(parameter, packs) for _, parameter in state.parameter_names(optimizer))


# -- compensated steps are asked for


class _Requests:
    any_made = False  # whether ``torch.compile`` has been given a backend of ours
    newest_is_strict = False  # whether the newest step that was compiled is strict


def note_installed(optimizer: Optimizer, backend: Any) -> None:
    """Note that all steps of an optimizer are to be compensated from now on, if this backend compensates."""
    if (request := Request.of(backend, {})) is not None:
        _prepare(optimizer, request)
        torch_compat.records.put(optimizer, _Requested(request))
        _warn_of_parameters(optimizer, backend)


def note_compiled_step(optimizer: Optimizer, request: Request) -> None:
    """Note that a step is compiled with error terms: it may run eagerly only to call compiled code."""
    _Requests.newest_is_strict = request.strict
    if torch_compat.calls_compiled_function(optimizer):
        torch_compat.records.of(optimizer, _Facts).calls_compiled = True
        return
    requested = _request(optimizer, request)
    requested.is_compiled = True
    if request.strict:
        requested.request = requested.request._replace(strict=True)


def forget_compiled_step(optimizer: Optimizer) -> None:
    """Forget that an optimizer's step was compiled: it may be stepped eagerly, or compiled, again."""
    torch_compat.records.drop(optimizer, _Requested)
    recording.stop_recording(optimizer)


def not_compiled_yet(backend: Any) -> list[str]:
    """Return the classes of optimizers of low precision with requested, uncompiled steps, for a backend."""
    return [
        type(optimizer).__name__
        for optimizer, requested in torch_compat.records.all_of(_Requested)
        if not (requested.is_compiled or torch_compat.records.of(optimizer, recording.Recorded).has_recorded)
        and requested.request.backend is backend
        and any(is_low_precision(parameter.dtype) for _, parameter in state.parameter_names(optimizer))
    ]


def _strict_in_copies(optimizer: Optimizer) -> bool | None:
    requested = torch_compat.records.find(optimizer, _Requested)
    return requested.request.strict if requested is not None and requested.is_compiled else None


state.carry_along(
    "strict",
    _strict_in_copies,
    lambda copy, strict: _request(copy, Request(None, {}, strict), is_compiled=True),
)


def _at_torch_compile(backend: Any, keywords: dict[str, Any], function: Any) -> None:
    """Note that ``torch.compile`` was given an optimizer's step, or a function that names optimizers."""
    _Requests.any_made = True
    try:
        request = Request.of(backend, keywords)
    except errors.CollageError:
        return  # an invalid option, which the first call raises
    if request is None:
        return
    for optimizer in _optimizers_of(function):
        if not torch_compat.records.has(optimizer, _Requested):
            _warn_of_parameters(optimizer, request.backend)
        _request(optimizer, request)
        _prepare(optimizer, request)


def _prepare(optimizer: Optimizer, request: Request) -> None:
    """Make an optimizer save error terms; its steps, also of optimizers in it, may begin to be recorded."""
    _is_refused(optimizer, *ADOPTING, strict=request.strict)
    for each in (optimizer, *state.held_optimizers(optimizer)):
        recording.switch(each)


def _warn_of_parameters(optimizer: Optimizer, backend: Any) -> None:
    """Log a warning if no parameter is of low precision, unless state of float32 parameters may be packed.

    And if torch's Adafactor takes the machine epsilon of 16 bits, below which it normalizes no gradient.
    """
    parameters = [parameter for _, parameter in state.parameter_names(optimizer)]
    dtypes = {each.dtype for each in parameters}
    is_rewritten = any(rows.is_of_concern(each, backend.options.takes_float32) for each in parameters)
    if parameters and not is_rewritten and dtypes <= {torch.float32, torch.float64}:
        log.warning(
            "%s: no error terms: its parameters are %s (autocast keeps them so). For pure bf16, call "
            "model.to(torch.bfloat16)",
            type(optimizer).__name__,
            " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
        )
    is_adafactor = isinstance(optimizer, torch.optim.Adafactor)
    groups = [each for each in optimizer.param_groups if is_adafactor and each["eps"][0] is None]
    for dtype, other in {(p.dtype, group["eps"][1]) for group in groups for p in group["params"]}:
        if is_low_precision(dtype):
            told = (
                "Adafactor: eps[0]=None is %.2g, the machine epsilon of %s: smaller gradients are not "
                "normalized. To train as with float32 weights, give eps=(%.3g, %g)"
            )
            epsilons = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
            log.warning(told, epsilons[0], str(dtype).removeprefix("torch."), epsilons[1], other)


def _optimizers_of(function: Any) -> list[Optimizer]:
    """Return the optimizer whose method a function is, or else the optimizers among its outer variables."""
    if isinstance(owner := getattr(function, "__self__", None), Optimizer):
        return [owner]
    try:
        around = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # no function of Python's, or one with a variable that has no value yet
        return []
    return list(state.optimizers_among({**around.globals, **around.nonlocals}).values())


# -- a step runs eagerly


def _before_eager_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Record, check or report a step that is about to run eagerly: a hook of all optimizers."""
    if is_recording() or is_recorded(optimizer):
        return
    requested = torch_compat.records.find(optimizer, _Requested)
    call = next(_eager_calls(optimizer, requested), None)
    if call is not None:
        _record_eager_step(optimizer, *call)
        return
    if requested is None or not requested.is_compiled:
        state.note_eager_step(optimizer)
    if requested is not None:
        _check_bypassing_step(optimizer, requested)
    elif not _check_step_of_another(optimizer):
        _check_plain_step(optimizer)


def _eager_calls(optimizer: Optimizer, requested: _Requested | None) -> Iterator[tuple[Any, Request]]:
    """Yield functions that were to be compensated and that Python is in, innermost first, with requests."""
    is_held = own_step(optimizer) is not None and is_recordable(optimizer)  # the class's step, by a wrapper
    if requested is not None and (is_held or torch_compat.is_in_own_step(optimizer)):
        yield torch_compat.true_step(optimizer), requested.request
    found = list(torch_compat.compiled_callables_on_the_stack()) if _Requests.any_made else []
    if torch_compat.is_compiling_forbidden():
        found += torch_compat.compiled_callables_within(torch_compat.true_step(optimizer))
    for function, callback in found:
        if (request := Request.of(*torch_compat.backend_within(callback))) is not None:
            yield function, request


def _record_eager_step(optimizer: Optimizer, function: Any, request: Request) -> None:
    low = (name for name, p in state.parameter_names(optimizer) if is_low_precision(p.dtype))
    if (first := next(low, None)) is None:
        return
    is_told = torch_compat.is_compiling_forbidden()
    outer = getattr(function, "__self__", optimizer)
    is_whole = not isinstance(outer, Optimizer) or outer is optimizer or is_recordable(outer)
    is_within_another = torch_compat.wrapped_steps_on_the_stack(optimizer) > 1 or (is_told and not is_whole)
    if is_within_another or not is_recordable(optimizer):
        subject = optimizer if is_whole else outer
        errors.EagerStepError(
            f"torch runs the compiled step of {type(subject).__name__} eagerly, without error terms",
            where=first,
            remedy="let torch compile it: leave out TORCH_COMPILE_DISABLE, torch.compiler.set_stance and "
            "torch.utils' dispatch modes around it. Steps of classes that call Optimizer.__init__, and are "
            "not compiled in the class itself, are compensated also there",
        ).raise_or_warn(subject, strict=request.strict)
        return
    reason = "torch has been told not to compile" if is_told else "torch runs them eagerly"
    recording.record(optimizer, request, reason, for_one_step=is_told)


def _check_bypassing_step(optimizer: Optimizer, requested: _Requested) -> None:
    """Refuse a step that is called eagerly instead of compiled: each, or the second before any is compiled.

    Steps that torch has disabled for Dynamo come here, too; they are refused for that reason.
    """
    if not requested.is_compiled and _is_refused(optimizer, strict=requested.request.strict):
        return
    stepped = ((name, p) for name, p in state.parameter_names(optimizer) if p.grad is not None)
    if requested.is_compiled:
        there = (
            "although a compiled step keeps error terms of this optimizer's parameters: an eager step "
            "ignores them, and they no longer belong to the values that it writes"
        )
        first = next((name for name, p in stepped if state.record_of(p)), None)
    else:
        there = "twice, and the compiled step that torch.compile returned has not: nothing is compensated"
        first = next((name for name, p in stepped if is_low_precision(p.dtype)), None)
        if first is not None and not requested.is_called:
            requested.is_called = True
            return
    if first is None:
        return
    errors.EagerStepError(
        f"{type(optimizer).__name__}.step() has been called eagerly, {there}",
        where=first,
        remedy="call collage_fx.install(optimizer), which makes optimizer.step() the compiled step; or call "
        "the function that torch.compile(optimizer.step, backend=...) has returned. To go on without error "
        "terms, drop them with collage_fx.reset_error_terms(parameter)",
    ).raise_or_warn(optimizer, strict=requested.request.strict)


def _check_step_of_another(optimizer: Optimizer) -> bool:
    """Compensate or refuse a step of parameters that belong to another's; return whether there are any."""
    facts = torch_compat.records.of(optimizer, _Facts)
    if facts.calls_compiled or torch_compat.compiled_callables_within(torch_compat.true_step(optimizer)):
        return False
    requested = torch_compat.records.all_of(_Requested)
    seen = state.records_version(), len(requested), sum(len(g["params"]) for g in optimizer.param_groups)
    if facts.checked == seen:
        return False
    owners = {id(p): other for other, _ in requested for _, p in state.parameter_names(other)}
    for name, p in state.parameter_names(optimizer):
        owner = owners.get(id(p))
        if p.grad is None or not is_low_precision(p.dtype) or (owner is None and not has_error_terms(p)):
            continue
        held = state.held_optimizers(optimizer)
        if not any(torch_compat.records.has(inner, _Requested) or is_recorded(inner) for inner in held):
            _take_over_or_refuse(optimizer, name, owner)
        return True
    facts.checked = seen
    return False


def _take_over_or_refuse(optimizer: Optimizer, name: str, owner: Optimizer | None) -> None:
    requested = None if owner is None else torch_compat.records.find(owner, _Requested)
    if requested is not None and optimizer in state.held_optimizers(owner):
        reason = f"{type(owner).__name__}, which holds it, calls them outside of its own step"
        recording.record(optimizer, requested.request, reason)
        return
    # Error terms of a checkpoint that this optimizer has loaded itself belong to no compiled step.
    is_newest_strict = _Requests.newest_is_strict and not files_of(optimizer).is_adopted
    strict = is_newest_strict if requested is None else requested.request.strict
    kind = type(optimizer).__name__
    if owner is None:
        of, too, first = "have from a checkpoint, or from an optimizer that is gone", "", ""
    else:
        of = f"have from a compensated step of {type(owner).__name__}"
        too, first = ", too", "collage_fx.uninstall the other optimizer, or "
    errors.EagerStepError(
        f"{kind}.step() is eager: it would change parameters and not the error terms that they {of}",
        where=name,
        remedy=f"call collage_fx.install(optimizer) for this {kind}{too}. To go on without error terms, "
        f"{first}drop them with collage_fx.reset_error_terms(parameter)",
    ).raise_or_warn(optimizer, strict=strict)


def _check_plain_step(optimizer: Optimizer) -> None:
    """Report the second eager step of parameters whose model is compiled by this backend."""
    for name, p in state.parameter_names(optimizer):
        read = torch_compat.records.find(p, _ReadForward)
        if p.grad is None or read is None or state.record_of(p) is not None:
            continue
        if not read.is_stepped:
            read.is_stepped = True
            return
        torch_compat.records.clear(_ReadForward)
        errors.EagerStepError(
            f"the model is compiled with this backend, which leaves a forward pass to Inductor, and "
            f"{type(optimizer).__name__}.step() is not: it updates low-precision parameters eagerly, without "
            "error terms",
            where=name,
            remedy="compile the step: step = torch.compile(optimizer.step, backend=...). The model needs no "
            "backend of ours: torch.compile(model)",
        ).raise_or_warn(optimizer, strict=False)
        return
