"""Optimizers with recorded steps, and the way from ``step`` to the recorder: Note [Recorded steps]."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from collage_fx import errors, state, torch_compat
from collage_fx.capture.inputs import BornInStep, MadeInStep, SpanningClosure
from collage_fx.capture.matching import Matcher
from collage_fx.capture.recorder import Numbers, Recorder, is_recording
from collage_fx.capture.refusals import forget_new_state, refuse_optimizer, remember_state
from collage_fx.clock import clock, is_taken
from collage_fx.numerics import is_low_precision
from collage_fx.state import known_tensors, optimizers_among
from collage_fx.torch_compat import has_foreign_step, pytree, records, reroute_step, sharding_of, storage_of

log = logging.getLogger("collage_fx")

#: Number of consecutive steps that may each need a compilation before a warning.
COMPILING_STEPS = 32

#: Attribute of an optimizer whose steps are recorded; unlike a table of ours, Dynamo guards on an attribute.
RECORDING = "__collage_fx_recording__"


class Request(NamedTuple):
    """Request for compensated steps."""

    backend: Any  # given to ``torch.compile`` or ``install``; None for a copy of an optimizer
    keywords: dict[str, Any]  # of the backend's calls: ``mode``
    strict: bool  # whether steps that are not compensated are refused

    @staticmethod
    def of(backend: Any, keywords: dict[str, Any]) -> Request | None:
        """Return the request that a call of ``torch.compile`` makes; None if its backend compensates nothing.

        A backend that was given by name has the attribute ``stands_for``: a function that makes it of the
        options among the ``keywords``, or raises for an option that is unknown, or has a wrong value.
        """
        if (backend_for := getattr(backend, "stands_for", None)) is not None:
            backend = backend_for(**(keywords.get("options") or {}))
            keywords = {name: value for name, value in keywords.items() if name != "options"}
        is_asked = getattr(backend, "compensates", False)
        return Request(backend, keywords, backend.options.strict) if is_asked else None


def is_recorded(optimizer: Optimizer) -> bool:
    """Return whether the steps of an optimizer are recorded, whoever calls them."""
    return RECORDING in vars(optimizer)


class RecordedPart(NamedTuple):
    """Facts about a graph that is a part of a recorded step: the entry :data:`RECORDING` of its ``meta``."""

    reason: str = ""  # why the optimizer's steps are recorded; empty for a graph that is no such part
    is_compiled: bool = True  # rather than run operation by operation
    stepped: Callable[[], list[Optimizer]] = list  # optimizers of the step, or of the recorded function
    by_family: bool = False  # whether it is compiled by family, or not at all

    @staticmethod
    def of(module: GraphModule) -> RecordedPart:
        """Return the facts about a graph that a backend is given."""
        part: RecordedPart = module.meta.get(RECORDING, RecordedPart())
        return part


@dataclass(eq=False)
class Recorded:
    """Facts about an optimizer's recorded steps: a part of its record."""

    has_recorded: bool = False
    is_resumed: bool = False  # whether it has loaded a checkpoint of recorded steps
    numbers: Numbers = field(default_factory=dict)
    for_one_step: _Recording | None = None  # for single steps, once there has been one


def stop_recording(optimizer: Optimizer) -> None:
    """Stop recording the steps of an optimizer."""
    vars(optimizer).pop(RECORDING, None)


def reason_to_record(optimizer: Optimizer) -> str:
    """Return why an optimizer's steps are to be recorded even if they can be captured; "" if they are not."""
    if isinstance(optimizer, torch.optim.Adafactor) and any(
        isinstance(group["lr"], Tensor) for group in optimizer.param_groups
    ):
        return "it branches on the value of lr, which is a tensor"  # after it has begun
    if records.of(optimizer, Recorded).is_resumed:
        return "so were the steps of the run that is resumed, and captured steps have other bits"
    return ""


def is_recordable(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's step has torch's wrapper, which ``Optimizer.__init__`` puts around."""
    code = getattr(torch_compat.true_step(optimizer), "__code__", None)
    return code is not None and torch_compat.is_step_wrapper(code) and not has_foreign_step(optimizer)


def record(
    optimizer: Optimizer,
    request: Request,
    reason: str,
    *,
    level: int = logging.INFO,
    for_one_step: bool = False,
) -> None:
    """Record each step of an optimizer from now on, even where it is called eagerly.

    A step that the optimizer is in the middle of is not recorded yet. ``reason`` says why steps cannot be
    captured. ``for_one_step``: only the next step is recorded; it runs operation by operation.
    """
    facts = records.of(optimizer, Recorded)
    if (recording := facts.for_one_step if for_one_step else None) is None:
        log.log(level, "%s: its steps are run by Python and recorded: %s", type(optimizer).__name__, reason)
        recording = _Recording([optimizer], request, reason, for_one_step=for_one_step)
    if for_one_step:
        facts.for_one_step = recording
    reroute_step(torch_compat.true_step(optimizer), _switched)
    vars(optimizer)[RECORDING] = recording


def _restore_numbers(optimizer: Optimizer, numbers: Numbers) -> None:
    """Go on with the numbers of a checkpoint, or of the original of a copy; drop code for other numbers."""
    recorded = records.of(optimizer, Recorded)
    if numbers != recorded.numbers:
        recorded.numbers, recorded.for_one_step = {**numbers}, None
        if (recording := vars(optimizer).get(RECORDING)) is not None:
            record(optimizer, recording.request, recording.reason)


def _note_resumed(optimizer: Optimizer, is_resumed: bool) -> None:
    records.of(optimizer, Recorded).is_resumed = is_resumed


state.carry_along(
    "collage_fx.numbers", lambda each: {**records.of(each, Recorded).numbers} or None, _restore_numbers
)
state.carry_along("collage_fx.recorded", lambda each: is_recorded(each) or None, _note_resumed)


def _switched(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``step`` such that it is recorded for optimizers that are to be recorded.

    Where Dynamo does not capture the step as a whole, Python calls the wrapper: a recording may begin in the
    middle (:func:`beginning_here`), and ends with the step. Dynamo looks into every function called here.
    """

    def switched(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        recording = getattr(self, RECORDING, None)
        if recording is not None:
            try:
                return recording.run(step, self, args, kwargs)
            finally:
                if recording.is_for_one_step:
                    stop_recording(self)
        if torch.compiler.is_compiling():
            return step(self, *args, **kwargs)
        begun: list[_Begun] = []  # beginning_here() reads it, and had_gradients
        had_gradients = torch.is_grad_enabled()  # noqa: F841
        if args or kwargs:
            args, kwargs = _with_closures(args, kwargs, begun)
        try:
            result = step(self, *args, **kwargs)
        except BaseException as error:
            if begun:
                begun[0].end(error)
            raise
        if begun:
            begun[0].end(None)
        return result

    return switched


_SWITCH = _switched(Optimizer.step).__code__


def is_switch(code: CodeType) -> bool:
    """Return whether code belongs to the wrapper around ``step`` that records it."""
    return code is _SWITCH


def switch(optimizer: Optimizer) -> bool:
    """Make an optimizer's steps recordable from their middle on; return whether its class has changed."""
    return is_recordable(optimizer) and reroute_step(torch_compat.true_step(optimizer), _switched)


class _Begun:
    """Recording that began in the middle of a step."""

    def __init__(self, recording: _Recording, *, had_gradients: bool) -> None:
        self.outside = partial(recording.outside, had_gradients=had_gradients)
        self._had_gradients = had_gradients
        self._recorded = recording.recorded()
        self._recorded.__enter__()

    @torch.compiler.disable
    def end(self, error: BaseException | None) -> None:
        try:
            self._recorded.__exit__(None if error is None else type(error), error, None)
        finally:
            torch.set_grad_enabled(self._had_gradients)


@torch.compiler.disable
def _with_closures(args: Any, kwargs: dict[str, Any], begun: list[_Begun]) -> tuple[Any, dict[str, Any]]:
    """Wrap the closures among a step's arguments, so that they run unrecorded once a recording has begun."""

    def wrapped(argument: Any) -> Any:
        return _Closure(argument, begun) if callable(argument) else argument

    return tuple(map(wrapped, args)), {name: wrapped(value) for name, value in kwargs.items()}


class _Closure:
    """Closure of a step, which runs unrecorded once a recording has begun."""

    def __init__(self, function: Callable[..., Any], begun: Sequence[_Begun]) -> None:
        self.__collage_fx_passed__ = function
        self._begun = begun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self.__collage_fx_passed__
        return (self._begun[0].outside(function) if self._begun else function)(*args, **kwargs)


def is_in_closure() -> bool:
    """Return whether Python is in the closure of a step, and not in another step that the closure calls."""
    called = _Closure.__call__.__code__
    variables = torch_compat.variables_on_the_stack(lambda code: code is called or is_switch(code))
    return variables is not None and type(variables["self"]) is _Closure


def beginning_here(request: Request, reason: str, *, level: int = logging.INFO) -> Callable[[], None] | None:
    """Return the function that records the innermost step that Python is in from here on, and later steps.

    This recording ends with the step. None if Python is in no step.
    """
    variables = torch_compat.variables_on_the_stack(is_switch)
    if variables is None or "begun" not in variables or variables["begun"] or is_in_closure():
        return None  # in none, or in one that is recorded
    optimizer, begun = variables["self"], variables["begun"]

    def begin() -> None:
        record(optimizer, request, reason, level=level)
        recording = vars(optimizer)[RECORDING]
        begun.append(_Begun(recording, had_gradients=variables["had_gradients"]))

    return begin


def beginning_in_call(
    request: Request, reason: str, optimizers: Sequence[Optimizer], weights: Sequence[Tensor] = ()
) -> Callable[[], None] | None:
    """Return the function that records the call of a compiled callable that Python is in, and later calls.

    None if there is none, or one that is given a function, whose forward and backward pass would be recorded.
    """
    call = torch_compat.running_call()
    if call is None or any(map(callable, pytree.tree_leaves(call.arguments))):
        return None
    log.info("%s: its calls are run by Python and recorded: %s", call.name, reason)
    records.put(call.compiler, _Recording(optimizers, request, reason, call.name, weights))
    return beginning_again()


def beginning_again() -> Callable[[], None] | None:
    """Return the function that begins to record the call that Python is in, if such calls are recorded."""
    call = torch_compat.running_call()
    if call is None or (recording := records.find(call.compiler, _Recording)) is None:
        return None

    def begin() -> None:
        recording.meet(each for each in pytree.tree_leaves(call.arguments) if isinstance(each, Tensor))
        recorded = recording.recorded()
        recorded.__enter__()

        def end() -> None:
            error = None if call.has_returned() else sys.exc_info()[1]
            has_gradients = torch.is_grad_enabled()  # the call has left its own contexts
            try:
                recorded.__exit__(None if error is None else type(error), error, None)
            except torch_compat.Refused as refusal:
                raise refusal.remove_dynamo_frames() from None
            finally:
                torch.set_grad_enabled(has_gradients or torch.is_grad_enabled())

        call.cleanups.append(end)

    return begin


class _Recording:
    """Recorder of one optimizer's steps, or of a function that steps some, with facts about them.

    That of a compiled function is a part of the object that identifies its call of ``torch.compile``.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        request: Request,
        reason: str,
        label: str = "",
        weights: Sequence[Tensor] = (),
        *,
        for_one_step: bool = False,
    ) -> None:
        self.reason = reason
        self.is_for_one_step = for_one_step
        self._label = label or type(optimizers[0]).__name__
        self.request = request
        numbers = records.of(optimizers[0], Recorded).numbers if optimizers else {}
        self._parameters: dict[int, Tensor] = {}
        self._recorder = Recorder(self._compiled, self._kind_of, self._parameters.get, self._known, numbers)
        # A compiled function outlives optimizers.
        self._matcher = Matcher(self._recorder, self._is_gradient, self._expected, binds=not label)
        self._references = [*map(weakref.ref, optimizers)]
        self._weights = [*map(TensorWeakRef, weights)]
        self._others: WeakSet[Optimizer] = WeakSet()
        self._ids: set[int] = set()
        self._gradients: dict[int, TensorWeakRef] = {}
        self._without_state: list[Tensor] = []
        self._born: list[Tensor] = []
        self._calls_closure = False
        self._has_compiled = False
        self._steps_that_compiled = 0
        self._steps = 0
        self._progress = ExitStack()
        self._version: object = None

    @torch.compiler.disable
    def run(self, step: Callable[..., Any], optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        if is_recording():  # an optimizer inside another one that is being recorded
            return step(optimizer, *args, **kwargs)
        outside = partial(self.outside, had_gradients=torch.is_grad_enabled())
        with self.recorded(is_matching=not any(map(callable, (*args, *kwargs.values())))):
            return step(optimizer, *map(outside, args), **{k: outside(v) for k, v in kwargs.items()})

    def meet(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors that a call is given, and optimizers whose weights it may update beside its own."""
        self._weights += [*map(TensorWeakRef, tensors)]
        living = {id(each): each for reference in self._weights if (each := reference()) is not None}
        self._weights = [*map(TensorWeakRef, living.values())]
        known = self._stepped()
        self._others = WeakSet(each for each in state.stepped_optimizers() if each not in known)

    def _stepped(self) -> list[Optimizer]:
        return [each for reference in self._references if (each := reference()) is not None]

    @contextmanager
    def recorded(self, *, is_matching: bool = True) -> Iterator[None]:
        """Context manager: a step, or the rest of a step, is recorded, or matched if that is possible."""
        optimizers = self._stepped()
        self._without_state = []
        for optimizer in optimizers:
            self._refuse(optimizer)
            if not self._steps:
                state.adopt(optimizer)
                torch_compat.restore_capturable(optimizer)
                for inner in optimizers_among(vars(optimizer)).values():  # captured steps may have noted it
                    torch_compat.restore_capturable(inner)
                    if inner not in optimizers:
                        self._others.add(inner)
            if state.records_version() != self._version:
                state.unpack_all(optimizer, for_good=True)  # packed by captured steps, or in a checkpoint
            remember_state(optimizer, object())
            state.settle_replaced(optimizer)
            self._without_state += [
                p for _, p in state.parameter_names(optimizer) if not state.has_state(optimizer, p)
            ]
        for other in self._others:
            state.settle_replaced(other)
        self._steps += 1
        self._look_at()
        self._has_compiled = False
        try:
            with self._progress, torch.no_grad(), self._recorder, self._matcher:
                self._matcher.begin(is_matching=is_matching and not self.is_for_one_step and self._steps > 1)
                yield
                self._matcher.finish(successfully=True)
            if self._born:
                self._matcher.forget_step()
            for tensor in self._born:
                state.note_new(tensor)
            is_known = self._matcher.has_matched and state.records_version() == self._version
            for optimizer in optimizers:
                if not (is_known and state.holds_the_same(optimizer)):
                    state.note_held(optimizer)  # a step may have replaced state
                records.of(optimizer, Recorded).has_recorded = True
            self._version = state.records_version()
        except BaseException:
            self._matcher.finish(successfully=False)
            for optimizer in optimizers:
                forget_new_state(optimizer)
            raise
        finally:
            self._born.clear()
            for optimizer in (*optimizers, *self._others):
                state.note_step(optimizer)  # also of a step that failed half-way
        self._steps_that_compiled = self._steps_that_compiled + 1 if self._has_compiled else 0

    def _refuse(self, optimizer: Optimizer) -> None:
        """Raise, or warn, if the steps of an optimizer cannot be recorded as the options ask.

        Operations recorded on a DTensor would be on this process's shard alone. A recorded step is compiled
        in parts, none of which shows all that the step does with a state, so none packs it.
        """
        backend = self.request.backend
        try:
            refuse_optimizer(optimizer)
            for name, p in state.parameter_names(optimizer):
                if p.grad is not None and is_low_precision(p.dtype) and sharding_of(p) is not None:
                    raise errors.UnsupportedTensorError(
                        f"a {type(p).__name__} in a step that has to be recorded, for which Dynamo cannot "
                        f"capture it: {self.reason}",
                        where=name,
                        remedy="change what Dynamo cannot capture, train with ordinary tensors "
                        "(DistributedDataParallel), or step the optimizer without this backend",
                    )
            # A single step may unpack state: the next compiled step packs it again.
            if not self.is_for_one_step and (asked := backend.options.state) is not None:
                raise errors.InvalidOptionError(
                    f"state={asked!r} packs state, which needs a step that is captured whole; this one is "
                    f"recorded, operation by operation: {self.reason}",
                    where=f"{type(optimizer).__name__}.step",
                    remedy="give bytes_per_parameter=8 or 10, which pack nothing then, or leave state= out; "
                    "or change what Dynamo cannot capture",
                )
        except errors.CollageError as refusal:
            refusal.raise_or_warn(optimizer, strict=self.request.strict)
        # A first step may make state. Later ones, and those after captured steps, find it.
        if not self.is_for_one_step and (self._steps_that_compiled or self._steps < 2):
            backend.refuse_excess(optimizer)

    def _look_at(self) -> None:
        self._parameters.clear()
        self._ids.clear()
        self._gradients.clear()
        weights = [each for reference in self._weights if (each := reference()) is not None]
        stepped = (*self._others, *self._stepped())
        of_optimizers = (p for each in stepped for _, p in state.parameter_names(each))
        for parameter in (*weights, *of_optimizers):
            self._parameters[storage_of(parameter)] = parameter
            self._ids.add(id(parameter))
            if (gradient := parameter.grad) is not None:
                self._gradients[id(gradient)] = reference = TensorWeakRef(gradient)
                if torch_compat.has_storage(gradient):
                    self._gradients[storage_of(gradient)] = reference  # of its data, or of all its buffer

    def outside(self, argument: Any, *, had_gradients: bool) -> Any:
        """Wrap an argument of ``step``: a closure runs unrecorded, with gradients as outside the step."""
        if not callable(argument):
            return argument

        def closure(*args: Any, **kwargs: Any) -> Any:
            self._calls_closure = True
            try:
                self._matcher.flush()
            finally:
                self._calls_closure = False
            has_gradients = had_gradients or torch.is_grad_enabled()
            with self._recorder.paused(), torch.set_grad_enabled(has_gradients):
                result = argument(*args, **kwargs)
            self._look_at()
            return result

        return closure

    def _known(self) -> dict[int, state.KnownTensor]:
        return known_tensors({f"{type(each).__name__}_{i}": each for i, each in enumerate(self._stepped())})

    def _kind_of(self, tensor: Tensor, is_written: bool) -> Any:
        """Return facts about a tensor that compiled code depends on; note its role in the step."""
        is_parameter = id(tensor) in self._ids
        role = "parameter" if is_parameter else "gradient" if self._is_gradient(tensor) else None
        is_made = records.has(tensor, MadeInStep)
        if role is None and (is_written or is_made) and not records.has(tensor, BornInStep):
            held = (o.state.get(p) for o in self._stepped() for p in self._without_state)
            if any(each is tensor for entries in held for _, each in state.state_tensors(entries)):
                self._recorder.note(BornInStep, tensor)
                self._born.append(tensor)
        gets_terms = is_parameter and is_written  # if it has none
        stored = state.StoredAs(has_error_terms=True) if gets_terms else state.stored_as(tensor)
        spans = role is None and self._calls_closure and (is_written or is_made)
        if spans:
            self._recorder.note(SpanningClosure, tensor)
        else:
            records.drop(tensor, SpanningClosure)
        kind_of_new = spans, is_made, records.has(tensor, BornInStep)
        if role is None and (reference := self._gradients.get(storage_of(tensor))) is not None:
            role = None if reference() is None else "gradient"  # a step may free gradients that it has read
        return role, kind_of_new, stored

    def _is_gradient(self, tensor: Tensor) -> bool:
        reference = self._gradients.get(id(tensor))
        return reference is not None and reference() is tensor

    def _expected(self) -> dict[int, Callable[[], Tensor | None]]:
        """Return, by the memory of each tensor of the step, functions that return the next step's."""
        held = (each.tensor for each in self._known().values() if torch_compat.has_storage(each.tensor))
        found: dict[int, Callable[[], Tensor | None]] = {
            storage_of(each): TensorWeakRef(each) for each in held
        }
        for parameter in self._parameters.values():
            if (gradient := parameter.grad) is not None and torch_compat.has_storage(gradient):
                found[storage_of(gradient)] = partial(self._gradient_of, TensorWeakRef(parameter))
        return found

    def _gradient_of(self, parameter: TensorWeakRef) -> Tensor | None:
        found = parameter()
        return None if found is None or found.grad is None else self._recorder.owner(found.grad)

    def _compiled(self, module: GraphModule, arguments: Any, by_family: bool) -> Callable[..., Any]:
        """Compile a component; warn if many steps in a row had to compile."""
        if self._steps_that_compiled >= COMPILING_STEPS:
            errors.RecompileLimitError(
                f"each of the last {COMPILING_STEPS} steps of {self._label}, which are recorded, has brought "
                "something new that had to be compiled, which takes most of a step's time",
                where=f"{self._label}.step",
                remedy="look for what differs from step to step besides numbers: shapes, or the order of "
                "operations",
            ).raise_or_warn(self._recorder, strict=False)
        if not (self._has_compiled or by_family):  # what is known by family compiles nothing new
            self._progress.enter_context(show_progress(self._label))
        self._has_compiled |= not by_family
        module.meta[RECORDING] = RecordedPart(self.reason, not self.is_for_one_step, self._stepped, by_family)
        compiled: Callable[..., Any] = self.request.backend(module, arguments, **self.request.keywords)
        return compiled


#: Whether this process has shown the line as a warning.
_has_warned = False


@contextmanager
def show_progress(subject: str, *, in_log: bool = True) -> Iterator[None]:
    """Context manager: show that a step of a class is compiled, by a clock in a terminal, and ``in_log``.

    The line in the log is a warning the first time in a process if standard error is no terminal (a log file,
    a notebook), so that a program which has configured no logging shows why its first step takes long. Nested
    uses in the same thread show nothing.
    """
    if in_log and not is_taken.get():
        log.log(_level(), "%s: compiling its step: about 10 s, or 2 s with a warm Inductor cache", subject)
    with clock(f"collage_fx: compiling the step of {subject}"):
        yield


def _level() -> int:
    global _has_warned
    distributed = torch.distributed
    is_first = not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank())
    if _has_warned or not is_first or sys.stderr.isatty():
        return logging.INFO
    _has_warned = True
    return logging.WARNING
