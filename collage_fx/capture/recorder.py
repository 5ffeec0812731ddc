"""Recorder of steps that Dynamo cannot capture: Python runs the step, its tensor operations are recorded.

Note [Recorded steps]
---------------------
Dynamo cannot capture a step that branches on the value of a tensor inside its loop over the parameters
(``if norm > 0:``), calls into NumPy, or calls ``torch.compile`` itself. Python runs such a step instead,
under a :class:`Recorder`: operations on tensors are recorded, and their results are
:class:`~collage_fx.capture.segment.Deferred` tensors, of which only shape and dtype are known. When the step
ends, or needs values before, the backend compiles the recorded operations like a captured graph, and executes
them (a *flush*). Then the deferred tensors that are still referenced become
ordinary tensors, in place (``torch.utils.swap_tensors``).

* Each flush splits its operations into components that have no tensor in common, mostly the update of one
  parameter each. Equal components (up to numbers) are compiled once.
* A deferred tensor that outlives a flush gets an error term like a parameter (``Role.CARRIED``): an update
  that is computed in one graph and applied in another is not rounded in between.
* Operations on 0-d tensors with values (step counters) are executed at once, and so are random numbers,
  factories, factorizations of matrices, and operations whose result's shape depends on values. They read
  tensors with their error terms (:meth:`Recorder._execute_now`). Random numbers of 16 bits are recorded: they
  serve stochastic rounding, which error terms make unnecessary.
* Python floats that change are arguments of the compiled graphs: Note [Constants and inputs] in
  ``compiled.py``. So are shapes, once they change. An operator that takes no such number as an argument, and
  is given new numbers again and again, is executed at once as well.
* State is not packed: no component shows all that the step does with a state (``recording.py``).
* A step with the calls of an earlier one is not recorded again: Note [Matched steps] in ``matching.py``.

Note [Questions]
----------------
Many steps ask for a number of each parameter (``if norm > 0:``). With a flush for each, they would be
executed parameter by parameter. So such a number is computed by a function of its own, from copies of the
tensors that it would overwrite, and nothing is executed: the operations are computed again when the step
ends. A question flushes if that cost more: if it needs the result of an operation that was computed for an
earlier one, or a product of matrices; or if it needs random numbers, which would be others then.

A matched step answers its questions together, at the first of them, as the tensors are known before the step
meets them: those that the optimizer holds, and the gradients of its parameters. An answer is used if, by the
time of its question, the calls have met these very tensors, and the numbers that it was computed with. Where
answers lead to other calls again and again, no pattern fits for long, and questions flush from then on.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx.node import map_aggregate
from torch.utils.weak import TensorWeakRef

from collage_fx import torch_compat
from collage_fx.capture.compiled import Compiled, CompileGraph, Part, compiled_for
from collage_fx.capture.inputs import MadeInStep
from collage_fx.capture.numbers import each_element
from collage_fx.capture.segment import (
    Deferred,
    Operation,
    RecordedFunction,
    Segment,
    Signature,
    Spec,
    draws_16_bits,
    found_in,
    is_index_of_integers,
    is_whole,
    layout_of,
    left_uncomputed,
    real,
    signature_of,
)
from collage_fx.errors import UnsupportedTensorError
from collage_fx.graph import factorizes
from collage_fx.numerics import is_low_precision
from collage_fx.state import KnownTensor, change_layout, record_of
from collage_fx.torch_compat import pytree, storage_of

aten = torch.ops.aten

#: Compiled functions that may differ in burned-in numbers; from then on their operators are executed at once.
BURNED_IN_AGAIN = 4

#: Functions that return a tensor's only value -> their conversion of its number.
QUESTIONS: dict[Any, Callable[[Any], Any]] = {
    Tensor.item: lambda value: value,
    Tensor.__bool__: bool,
    Tensor.__float__: float,
    Tensor.__index__: int,
    Tensor.__int__: int,
}

#: Name of a function -> its numbers, None where a number has changed. Checkpoints hold them.
Numbers = dict[str, list[float | None]]

#: Whether operations that this thread calls are being recorded.
_is_recording: ContextVar[bool] = ContextVar("_is_recording", default=False)


class Flushed(NamedTuple):
    """Segment that has been executed."""

    segment: Segment
    kept: Sequence[int]  # numbers of the results that were still referenced
    parts: Sequence[Part]  # its components, without their tensors
    questions: Sequence[Part]  # the functions by which questions were answered


class Recorder(torch_compat.TorchDispatchMode):
    """Mode that records operations on tensors, and executes them compiled when a value is asked for.

    While an operation is being recorded (``is_dispatching``), functions that are called are ours. ``kind_of``
    tells what a compiled graph depends on beyond the shape, dtype and device of a real tensor; its second
    argument is whether the graph overwrites the tensor.
    """

    def __init__(
        self,
        compile_graph: CompileGraph,
        kind_of: Callable[[Tensor, bool], Any],
        original_of: Callable[[int], Tensor | None],  # the optimizer's tensor in a storage: of p.data, p
        known: Callable[[], Mapping[int, KnownTensor]],  # tensors that the optimizer holds, by ``id``
        numbers: Numbers,  # of the functions compiled so far; they are added to
    ) -> None:
        super().__init__()
        self.compile_graph = compile_graph
        self.kind_of = kind_of
        self._original_of = original_of
        self._known = known
        self._numbers = numbers
        self.is_dispatching = False
        self.segment = Segment()
        #: Functions of the segment by which values were computed that the step has asked for.
        self.questions: list[Part] = []
        self._answered_by: set[int] = set()  # operations in these that calculate, by ``id``
        self.answers = True  # whether it computes them without executing the segment, where that is possible
        self.flushed: list[Flushed] = []  # since the list was cleared
        self.written_at_once: set[int] = set()  # storages that the step may have written otherwise
        self.executed = 0  # number of operations that have been executed at once, without views
        self.called: Any = None  # function of torch whose call is under way
        self.called_at = 0  # number of operations that are older than that call
        self.interrupted: Callable[[], None] = lambda: None  # called before each operation
        self._executed: list[Deferred] = []
        self._viewed: dict[int, Tensor] = {}
        self._steps = 1 if numbers else 0  # a first step makes lasting state
        self._first_met: dict[Any, int] = {}
        self._compiled: dict[Any, list[Compiled]] = {}
        self._at_once: set[Signature] = set()
        self._changing: set[tuple[Signature, int]] = set()  # places of numbers that code takes as inputs
        self._constant: set[tuple[tuple[Signature, int], float]] = set()  # others, with the numbers
        self._predicted: dict[Any, tuple[tuple[Any, ...], bool]] = {}
        self._noted: list[tuple[type, TensorWeakRef]] = []
        self._entered: list[Token[bool]] = []

    def finish(self, *, successfully: bool) -> None:
        try:
            if successfully:
                self.flush()
                with self.paused(), torch.no_grad():
                    self.settle()  # tensors that views held, which are gone with their segment
            else:
                self._executed.clear()
        finally:
            self._steps += 1
            self.segment = Segment()
            self.questions = []
            self._answered_by.clear()
            self.written_at_once.clear()
            self.flushed.clear()
            self._viewed.clear()
            for kind, reference in self._noted:
                if (tensor := reference()) is not None:
                    torch_compat.records.drop(tensor, kind)
            self._noted.clear()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: this mode does not keep Dynamo from compiling, in this thread or others."""
        return True

    # Entering and leaving a mode saves and restores a flag of all threads, which is set while one compiles.

    def __enter__(self) -> Recorder:
        with torch_compat.compile_lock:
            super().__enter__()
        self._entered.append(_is_recording.set(True))
        return self

    def __exit__(self, *exception: Any) -> None:
        _is_recording.reset(self._entered.pop())
        with torch_compat.compile_lock:
            super().__exit__(*exception)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: operations are executed, not recorded."""
        token = _is_recording.set(False)
        try:
            with torch_compat.without_modes():
                yield
        finally:
            _is_recording.reset(token)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():  # operations that are made of others would come whole
            with torch.inference_mode(False), torch.no_grad(), self:
                return func(*args, **(kwargs or {}))
        # TorchScript's interpreter, unlike Python's calls, leaves modes for functions on while it dispatches.
        before, self.is_dispatching = self.is_dispatching, True
        try:
            self.interrupted()
            return self._dispatched(func, types, args, kwargs)
        finally:
            self.is_dispatching = before

    def _dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(map(torch_compat.is_wrapper, types)):
            return NotImplemented  # its class calls operators on the tensors inside, which are recorded
        kwargs = kwargs or {}
        signature = signature_of(func)
        if signature.is_immediate and torch.Tag.inplace_view in func.tags:
            return self._changed_in_place(func, args, kwargs)
        if self._executed:
            args, kwargs = map_aggregate((args, kwargs), real)
        if signature.is_immediate or signature in self._at_once:
            if draws_16_bits(func, args, kwargs):
                return self._record(signature, args, kwargs)
            if not is_index_of_integers(func, args):
                return self._execute_now(signature, args, kwargs)
        if func is aten.scalar_tensor.default and self.called is not torch.scalar_tensor:
            return self._record(signature, args, kwargs)  # within another function, such as where
        if self._has_its_values(signature, args, kwargs):
            return self._call(signature, args, kwargs)
        if signature.element_rule is not None:
            return self._record_each(signature, args, kwargs)
        return self._record(signature, args, kwargs)

    # -- operations that are executed at once

    def _has_its_values(self, signature: Signature, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether an operation is executed at once: its operands are real, and fusing gains little."""
        tensors = [*found_in(Tensor, [*args, *kwargs.values()])]
        if any(type(tensor) is Deferred for tensor in tensors):
            return False
        has_no_rule = signature.reads_no_values or any(each.layout is not torch.strided for each in tensors)
        return has_no_rule or all(each.dim() == 0 and not is_low_precision(each.dtype) for each in tensors)

    def _call(self, signature: Signature, args: Any, kwargs: dict[str, Any]) -> Any:
        """Execute an operation on real tensors, after the recorded operations that it depends on."""
        if signature.reads_no_values and signature.results == (("new", ""),):  # such as those of randn_like
            args, kwargs = map_aggregate((args, kwargs), _of_its_layout)
        tensors = [*found_in(Tensor, [*args, *kwargs.values()])]
        depends = any(type(tensor) is Deferred for tensor in tensors)
        if not (depends or signature.reads_no_values):
            inputs = [self.segment.of_storage.get(_storage_of(tensor)) for tensor in tensors]
            depends = any(i in self.segment.written or (signature.writes and i is not None) for i in inputs)
        if depends:
            self.flush()
            args, kwargs = map_aggregate((args, kwargs), real)
        if signature.writes:
            self.written_at_once.update(map(_storage_of, tensors))
        result = signature.operator(*args, **kwargs)
        self.executed += not signature.operator.is_view
        is_new = signature.results == (("new", ""),) and isinstance(result, Tensor)
        if self._steps and is_new and is_low_precision(result.dtype):
            self.note(MadeInStep, result)  # not in a first step, which makes lasting state
        return result

    def _execute_now(self, signature: Signature, args: Any, kwargs: dict[str, Any]) -> Any:
        """Execute an operation that cannot be recorded, without leaving error terms behind.

        The operation reads tensors with error terms, and others beside them, in float32; its results are
        rounded by an operation that is recorded. Where it only moves elements, error terms follow. Two kinds
        read rounded values: numbers that Python reads, and factorizations, which 16-bit tensors do not have.
        """
        func = signature.operator
        if func is aten._local_scalar_dense.default and (answer := self._answer(args[0])) is not None:
            return func(answer)
        if signature.reads_no_values or factorizes(func) or func is aten._local_scalar_dense.default:
            return self._call(signature, args, kwargs)
        wide: dict[int, tuple[Tensor, Tensor]] = {}
        any_has_terms = any(map(self._may_have_error_terms, found_in(Tensor, [*args, *kwargs.values()])))

        def widened(tensor: Tensor) -> Tensor:
            if any_has_terms and id(tensor) not in wide and is_low_precision(tensor.dtype):
                wide[id(tensor)] = tensor, self._converted(tensor, torch.float32)
            return wide[id(tensor)][1] if id(tensor) in wide else tensor

        def rounded(made: Any, eager: Any) -> Any:
            for tensor, value in wide.values():
                if made is real(value):
                    return self._record(signature_of(aten.copy_.default), (real(tensor), made), {})
            # Integers keep their dtype; fake tensors of torch 2.11 give them that of the tensor searched.
            if isinstance(made, Tensor) and made.is_floating_point() and eager.is_floating_point():
                return made if made.dtype == eager.dtype else self._converted(made, eager.dtype)
            return made

        results = self._call(signature, *pytree.tree_map_only(Tensor, widened, (args, kwargs)))
        if not wide or not any(isinstance(each, Tensor) for each in pytree.tree_leaves(results)):
            return results
        return pytree.tree_map(rounded, results, self._without_elements(signature, args, kwargs))

    def _answer(self, asked: Tensor) -> Tensor | None:
        """Compute a value that the step asks for, and execute nothing of the segment: Note [Questions].

        Return None if that is not possible, or would compute too much twice.
        """
        segment = self.segment
        if not (self.answers and self.called in QUESTIONS and type(asked) is Deferred and segment.has(asked)):
            return None
        operations = segment.needed_for(asked.value)
        if segment.base(asked.value) != asked.value or any(
            id(each) in self._answered_by
            or segment.has_product(each)
            or torch.Tag.nondeterministic_seeded in each.signature.operator.tags
            for each in operations
        ):
            return None
        self._answered_by.update(id(each) for each in operations if not each.signature.operator.is_view)
        with self.paused(), torch.no_grad():
            function = RecordedFunction(segment, operations, (), self.kind_of, [asked.value])
            compiled, (answer,) = self._called(function)
        self.questions.append(Part(function, compiled))
        return cast(Tensor, answer)

    def _changed_in_place(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Change a tensor's layout in place, as ``t_`` does, or replace its memory, as ``set_`` does.

        Error terms follow a change of layout. From memory with the same layout, values are copied with their
        error terms. A parameter with another layout would no longer match its gradient.

        Raises:
            UnsupportedTensorError: the tensor's error terms cannot follow.
        """
        with torch_compat.without_modes():
            made = [each.tensor for each in self.segment.values if type(each.tensor) is Deferred]
            deferred = {storage_of(each): each for each in made}
            self.flush()
            tensor, *others = map_aggregate(args, real)
            for i, each in enumerate(others):  # torch reads the storage of an argument before it calls us
                if isinstance(each, torch.UntypedStorage) and storage_of(each) in deferred:
                    others[i] = real(deferred[storage_of(each)]).untyped_storage()
            storage, known = _storage_of(tensor), self._known()
            for of in known.values() if id(tensor) not in known else ():  # perhaps an alias of one
                if _storage_of(of.tensor) == storage:
                    self._viewed[storage] = of.tensor
            if self.owner(tensor) is not tensor:  # its error terms are found as the owner's
                return cast(Tensor, func(tensor, *others, **kwargs))
            takes_memory = func.overloadpacket is aten.set_
            is_parameter = self._original_of(storage) is tensor
            if is_low_precision(tensor.dtype) and (takes_memory or is_parameter):
                changed = func(torch.empty_like(tensor), *others, **kwargs)
                is_alike = Spec.of(changed) == Spec.of(tensor)
                if takes_memory and is_alike and _whole_memory(changed) is changed:
                    self._record(signature_of(aten.copy_.default), (tensor, changed), {})
                    return tensor
                if (is_parameter and not is_alike) or (takes_memory and record_of(tensor) is not None):
                    raise UnsupportedTensorError(
                        f"{func} in a recorded step gives this tensor another layout, or memory of which "
                        "other tensors are a part, where its error term cannot follow",
                        where=known[id(tensor)].name if id(tensor) in known else "a tensor of the step",
                        remedy="use a view, p.t() for p.t_(), or copy the values into the tensor with copy_",
                    )
            if takes_memory:
                return cast(Tensor, func(tensor, *others, **kwargs))
            return change_layout(tensor, lambda each: func(each, *others, **kwargs))

    def _converted(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return cast(Tensor, self._record(signature_of(aten._to_copy.default), (tensor,), {"dtype": dtype}))

    def _may_have_error_terms(self, tensor: Tensor) -> bool:
        """Return whether a low-precision tensor has error terms, or will have them once computed."""
        if type(tensor) is Deferred or not is_low_precision(tensor.dtype):
            return is_low_precision(tensor.dtype)
        is_written = self.segment.of_storage.get(_storage_of(tensor)) in self.segment.written
        return is_written or record_of(self.owner(tensor)) is not None

    # -- operations that are recorded

    def _record_each(self, signature: Signature, args: Any, kwargs: dict[str, Any]) -> Any:
        assert signature.element_rule is not None
        with self:
            results = each_element(signature.element_rule, *args, **kwargs)
            if not signature.writes:
                return results
            for target, result in zip(args[0], results, strict=True):
                target.copy_(result)
        return None

    def _record(self, signature: Signature, args: Any, kwargs: dict[str, Any]) -> Any:
        segment = self.segment
        given = dict(zip(signature.quantities, args, strict=False))
        given.update(kwargs)
        operation = Operation(signature).with_arguments(args, kwargs, self._value_of)
        predicted, takes_integers = self._predict(operation, args, kwargs)
        if operation.numbers and takes_integers:
            operation = Operation(signature, has_integers=True).with_arguments(args, kwargs, self._value_of)
        for name in signature.writes:
            bases = (segment.base(self._value_of(t)) for t in found_in(Tensor, given[name]))
            operation.overwritten.update(bases)
        returned = []
        for spec, (origin, name) in zip(predicted, signature.results, strict=True):
            if origin == "same":
                returned.append(given[name])
                continue
            of = self._value_of(given[name]) if origin == "view" else None
            if isinstance(spec, Spec):
                returned.append(segment.add_result(operation, spec, of))
            else:
                returned.append([segment.add_result(operation, each, of) for each in spec])
        segment.add(operation)
        return returned[0] if len(returned) == 1 else tuple(returned) if returned else None

    def _predict(
        self, operation: Operation, args: Any, kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], bool]:
        """Return the specifications of an operation's results, and whether it calculates with integers."""
        values = self.segment.values
        read = [values[value].spec for value in operation.tensors]
        key = (operation.signature, operation.form, *operation.sizes, *read, torch.get_default_dtype())
        predicted = self._predicted.get(key)
        if predicted is None:
            made = self._without_elements(operation.signature, args, kwargs)
            returned = len(operation.signature.results)
            results = made if returned > 1 else [made] if returned else []
            is_integer = any(not tensor.dtype.is_floating_point for tensor in found_in(Tensor, results))
            specs = tuple(
                Spec.of(result) if isinstance(result, Tensor) else tuple(map(Spec.of, result))
                for result in results
            )
            predicted = self._predicted[key] = specs, is_integer
        return predicted

    def _without_elements(self, signature: Signature, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation on fake tensors; sizes that depend on values are arbitrary."""
        with torch_compat.compile_lock, self.paused(), torch_compat.SymbolicScope().fake_mode:
            args, kwargs = pytree.tree_map_only(Tensor, lambda each: Spec.of(each).empty(), (args, kwargs))
            return signature.operator(*args, **kwargs)

    # -- tensors that the step has met

    def _value_of(self, tensor: Tensor) -> int:
        if type(tensor) is Deferred:
            if not self.segment.has(tensor):
                raise left_uncomputed("an operation")
            return tensor.value
        inputs = self.segment.inputs
        key = (_storage_of(tensor), *layout_of(tensor))
        if key not in inputs:
            inputs[key] = self._input(tensor)
        return inputs[key]

    def _input(self, tensor: Tensor) -> int:
        segment = self.segment
        storage = _storage_of(tensor)
        if storage not in segment.of_storage:
            segment.of_storage[storage] = segment.add_input(self.owner(tensor))
        value = segment.of_storage[storage]
        owner = segment.values[value].tensor
        if tensor.dtype != owner.dtype:
            value = segment.add_view(tensor, value, signature_of(aten.view.dtype), tensor.dtype)
        strides, of_owner = ((*each[:2], each[-1]) for each in map(layout_of, (tensor, owner)))
        if strides != of_owner:
            value = segment.add_view(tensor, value, signature_of(aten.as_strided.default), *strides)
        return value

    def owner(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the whole memory of a real tensor, which may be a view."""
        storage = _storage_of(tensor)
        original = self._viewed.get(storage, self._original_of(storage))
        return _whole_memory(tensor) if original is None else original

    # -- what becomes of it

    def flush(self) -> None:
        segment, self.segment = self.segment, Segment()
        questions, self.questions = self.questions, []
        self._answered_by.clear()
        is_within = self.is_dispatching and len(segment.operations) > self.called_at
        self.called_at = 0
        with self.paused(), torch.no_grad():
            kept = segment.still_referenced(by_python=not is_within)
            self.settle()
            executed = [self._execute(segment, *each) for each in segment.components(kept)]
            self.make_views(segment, kept)
        parts = [part for part in executed if part is not None]
        self.flushed.append(Flushed(segment, kept, parts, questions))

    def make_views(self, segment: Segment, kept: Sequence[int]) -> None:
        for value in kept:
            base = segment.base(value)
            if base != value:
                # torch cannot swap a tensor that is the base of a view, so these views have no base.
                whole = real(segment.values[base].tensor)
                self._viewed[storage_of(whole)] = whole
                self._become(segment.values[value].tensor, segment.real(value))

    def take_over(self, deferred: Tensor, result: Tensor | None = None) -> None:
        """Make a deferred tensor the given result, to which nothing else refers; by default, new memory."""
        self._become(deferred, Spec.of(deferred).empty() if result is None else result)
        if is_low_precision(deferred.dtype):
            self.note(MadeInStep, real(deferred))

    def _become(self, deferred: Tensor, tensor: Tensor) -> None:
        """Make a deferred tensor the given tensor, now or when torch no longer holds on to it."""
        if not torch_compat.is_held_by_torch(deferred):
            torch.utils.swap_tensors(deferred, tensor)
        else:
            assert isinstance(deferred, Deferred)
            deferred.executed = tensor
            self._executed.append(deferred)

    def settle(self) -> None:
        executed, self._executed = self._executed, []
        while executed:
            deferred = executed.pop()
            assert deferred.executed is not None
            self._become(deferred, deferred.executed.detach())

    def _execute(self, segment: Segment, operations: Sequence[Operation], kept: Sequence[int]) -> Part | None:
        """Compile a component, unless its code is known, and execute it; return None if nothing needs it."""
        touched = {segment.base(value) for operation in operations for value in operation.tensors}
        if not kept and not any(map(segment.is_input, touched & segment.written)):
            return None
        for value in kept:
            self.take_over(segment.values[value].tensor)
        function = RecordedFunction(segment, operations, kept, self.kind_of)
        return Part(function, self._called(function)[0])

    def _called(self, function: RecordedFunction) -> tuple[Compiled, Any]:
        """Execute a function, compiled unless its code is known; return the code, and its results."""
        key = (function.form, function.shapes, *function.sizes)
        if key not in self._compiled and self._first_met.setdefault(function.form, self._steps) < self._steps:
            key = function.form
        known = self._compiled.setdefault(key, [])
        known[:] = [each for each in known if not each.owner.is_stale]
        if (compiled := next((each for each in known if each.fits(function)), None)) is not None:
            return compiled, compiled(function)
        takes_sizes = key is function.form
        compiled = self._compile(function, takes_sizes=takes_sizes)
        known.insert(0, compiled)
        if len(known) >= BURNED_IN_AGAIN:
            places = function.places()
            self._at_once.update(places[position][0] for position in compiled.burned_in)
        returned = compiled(function)
        if not compiled.owner.is_stale:
            # The code is that for tensors with the error terms that it gives.
            function.look_at(self.kind_of, len(function.inputs))
            key = function.form if takes_sizes else (function.form, *key[1:])
            self._compiled.setdefault(key, known)
            self._first_met.setdefault(function.form, self._steps)
        return compiled, returned

    def _compile(self, function: RecordedFunction, *, takes_sizes: bool) -> Compiled:
        """Compile a function, with the numbers that have been seen to change as inputs, and note its numbers.

        Code with one of the former as a constant is stale, whether or not tensors have error terms by now.
        """
        of_these_sizes, of_any = function.names()
        last = self._numbers.get(of_these_sizes) or self._numbers.get(of_any)
        places = [*zip(function.places(), function.numbers, strict=True)]
        if last is None:  # its operations may be known from other functions, as those of another branch
            last = [
                None if place in self._changing and (place, number) not in self._constant else number
                for place, number in places
            ]
        now = [new if new == old else None for new, old in zip(function.numbers, last, strict=True)]
        names = (of_these_sizes, of_any) if takes_sizes else (of_these_sizes,)
        self._numbers |= dict.fromkeys(names, now)
        changed = [i for i, number in enumerate(now) if number is None]
        compiled = compiled_for(function, self.compile_graph, changed, takes_sizes=takes_sizes)
        for each in itertools.chain(*self._compiled.values()):
            if not (each.names.isdisjoint(names) or each.constants.keys().isdisjoint(compiled.inputs)):
                each.owner.end()
        compiled.names.update(names)
        self._changing.update(places[i][0] for i in compiled.inputs)
        self._constant.update(places[i] for i in compiled.constants)
        return compiled

    def note(self, kind: type, tensor: Tensor) -> None:
        """Add a part, which threads share, to a tensor's record until the step ends."""
        torch_compat.records.put(tensor, kind())
        self._noted.append((kind, TensorWeakRef(tensor)))


def is_recording() -> bool:
    """Return whether operations that this thread calls are being recorded."""
    return _is_recording.get()


def _of_its_layout(argument: Any) -> Any:
    """Return a tensor without values for a deferred tensor; anything else unchanged."""
    return argument.spec.empty() if type(argument) is Deferred else argument


def _storage_of(tensor: Tensor) -> int:
    return -1 if type(tensor) is Deferred else storage_of(tensor)


def _whole_memory(tensor: Tensor) -> Tensor:
    """Return a tensor of all the memory of the given tensor, which may be a view."""
    base = torch_compat.base_of(tensor)
    # A view whose ``.data`` has been replaced keeps the base that it had.
    if base is not None and base.dtype == tensor.dtype and storage_of(base) == storage_of(tensor):
        return base
    if is_whole(tensor):
        return tensor
    with torch_compat.without_modes():
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
