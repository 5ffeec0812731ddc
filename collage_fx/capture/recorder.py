"""Steps that Dynamo cannot capture: their Python is run, and what it does to tensors is recorded.

Note [Recorded steps]
---------------------
Dynamo captures a step from its bytecode. It cannot where the step branches on the value of a tensor inside of
its loop over the parameters (``if norm > 0:``), calls into NumPy, or calls ``torch.compile`` itself. Such a
step is run by Python instead, under a :class:`Recorder`. Operations on tensors are not executed but written
down, and their results are :class:`Deferred` tensors, of which only shape and dtype are known. When the step
asks for a value (``float(norm)``), and when it ends, what has been written down is compiled with the backend,
as any captured graph is, and executed. Then the deferred tensors that are still referenced become ordinary
ones, in place (``torch.utils.swap_tensors``).

* What one such flush executes is taken apart into the operations that have no tensor in common, which is
  mostly the update of one parameter. Equal ones (up to numbers) are compiled once.
* A deferred tensor that outlives a flush would be rounded to its storage format between the graphs. It gets
  an error term like a parameter (``Role.CARRIED``), so that an update that is computed in one graph and
  applied in another loses nothing.
* Operations on 0-d tensors that have values (step counters) are executed at once, as are random numbers,
  factories, factorizations of matrices, and operations whose result's shape depends on values: with the error
  terms of what they read (:meth:`Recorder._execute_now`). Random numbers of 16 bits are recorded: they serve
  stochastic rounding, which error terms make unnecessary.
* Numbers (Python's floats) are arguments of the compiled graphs, which Dynamo burns in until it sees them
  change. So are shapes, once a step brings others than the steps before it.

A graph that Dynamo would run eagerly rather than compile raises (:func:`_refuse_to_be_run`). Recording costs
Python time for each operation, on every step; captured steps cost none.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from collage_fx.capture.inputs import carried
from collage_fx.errors import EagerStepError
from collage_fx.graph import (
    depends_on_values,
    drawn_range,
    factorizes,
    facts_of,
    foreach_calls,
    foreach_name,
    foreach_rule,
    ignores_values,
)
from collage_fx.numerics import is_low_precision
from collage_fx.runtime import change_layout, expansion_of
from collage_fx.torch_compat import (
    SymbolicScope,
    TorchDispatchMode,
    base_of,
    compile_lock,
    disabled_torch_function,
    is_held_by_torch,
    schema_of,
    storage_of,
    without_modes,
    wrapper_subclass,
)

__all__ = ["Deferred", "Recorder", "Spec", "is_recording"]

aten = torch.ops.aten

#: A compiled component: called with its tensors, then its numbers, and then its sizes.
Compiled = Callable[..., Any]

#: Sizes that may be symbols in a graph. Of 0, 1, negative places and the end of a slice PyTorch has ideas.
SIZES = range(2, 1 << 62)


class Spec(NamedTuple):
    """What is known of a tensor without its values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> Spec:
        if type(tensor) is Deferred:
            return tensor.spec
        return Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class Deferred(Tensor):
    """The result of an operation that has been recorded.

    Attributes:
        spec: what is known of it.
        value: its number in the recorder's segment.
        executed: the tensor it stands for, once executed. It then becomes that tensor itself as soon as
            nothing in torch is holding on to it, as the operation is that asked for its value.
    """

    __torch_function__ = disabled_torch_function
    spec: Spec
    value: int
    executed: Tensor | None = None

    @staticmethod
    def of(spec: Spec, value: int) -> Deferred:
        deferred = cast(Deferred, wrapper_subclass(Deferred, *spec))
        deferred.spec = spec
        deferred.value = value
        return deferred

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} has been called on a tensor that a step of an optimizer has left uncomputed: the step "
            "ended with an exception, or handed the tensor to another thread"
        )


class _Ref(int):
    """A value, among the arguments of a recorded call."""


class _Number(float):
    """A number that may be another one in the next step, among the arguments of a recorded call."""


class _Int(_Number):
    """A number that the step wrote as an integer."""


class _Size(int):
    """A number of elements, or a place among them, among the arguments of a recorded call."""


@dataclass
class _Call:
    """A recorded operation.

    Attributes:
        signature: of the operator.
        args, kwargs: with :class:`_Ref` for tensors, :class:`_Number` for numbers, :class:`_Size` for sizes.
        tensors: the values it reads or writes, in the order of the arguments.
        numbers, sizes: the numbers and the sizes likewise.
        form: the arguments without all three.
        results: the values it makes, in the order of its results.
    """

    signature: _Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    form: tuple[Any, ...] = ()
    results: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        form: list[Any] = []
        self._take_apart(self.args, form)
        for name, argument in self.kwargs.items():
            form.append(name)
            self._take_apart(argument, form)
        self.form = tuple(form)

    def _take_apart(self, argument: Any, form: list[Any]) -> None:
        kind = type(argument)
        if kind is _Ref:
            self.tensors.append(argument)
            form.append(_Ref)
        elif kind is _Number or kind is _Int:
            self.numbers.append(float(argument))
            form.append(kind)
        elif kind is _Size:
            self.sizes.append(int(argument))
            form.append(kind)
        elif kind is tuple:
            form.append(len(argument))
            for element in argument:
                self._take_apart(element, form)
        else:
            form += (kind, argument)

    def with_integers(self) -> _Call:
        """The same with its numbers as the step wrote them, which are part of what it is then."""
        return _Call(self.signature, _with_integers(self.args), _with_integers(self.kwargs))


@dataclass
class _Value:
    """A tensor of a segment: an input, what a call has made, or a view of either.

    Attributes:
        base: the value whose memory it shares; itself, if it has its own.
        made_by: the call, and the place among its results; None for an input.
    """

    base: int
    made_by: tuple[_Call, int] | None = None


@dataclass
class _Segment:
    """What has been recorded since the last flush.

    Attributes:
        values, tensors, specs: what is recorded of a tensor, itself and its specification, by number.
        calls: in order.
        inputs: tensors met, by the memory they are a view of.
        of_storage: storage -> the input it belongs to.
        written: the values, bases all, that calls overwrite.
    """

    values: list[_Value] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    specs: list[Spec] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    inputs: dict[Any, int] = field(default_factory=dict)
    of_storage: dict[int, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)

    def add(self, tensor: Tensor, base: int | None = None, made_by: tuple[_Call, int] | None = None) -> int:
        number = len(self.values)
        self.values.append(_Value(number if base is None else base, made_by))
        self.tensors.append(tensor)
        self.specs.append(Spec.of(tensor))
        return number

    def base(self, value: int) -> int:
        return self.values[value].base

    def is_input(self, value: int) -> bool:
        return self.values[value].made_by is None

    def is_shared_scalar(self, value: int) -> bool:
        """Whether many updates may read it without being one: a learning rate, say."""
        return self.is_input(value) and value not in self.written and self.tensors[value].dim() == 0

    def still_referenced(self) -> list[int]:
        """The deferred tensors that someone besides the segment refers to."""
        return [
            value
            for value in range(len(self.tensors))
            if type(self.tensors[value]) is Deferred and sys.getrefcount(self.tensors[value]) > _UNREFERENCED
        ]

    def real(self, value: int) -> Tensor:
        """The real tensor of a value, once its base is real."""
        found = self.values[value]
        if found.made_by is None or found.base == value:
            return _real(self.tensors[value])
        call, place = found.made_by
        taken = call.signature.operator(*self._with_real(call.args), **self._with_real(call.kwargs))
        return cast(Tensor, taken[place] if isinstance(taken, (list, tuple)) else taken)

    def _with_real(self, argument: Any) -> Any:
        if isinstance(argument, _Ref):
            return self.real(int(argument))
        return _map(self._with_real, argument)


def _unreferenced_count() -> int:
    lonely = [object()]
    return sys.getrefcount(lonely[0])


_UNREFERENCED = _unreferenced_count()


@dataclass
class _Component:
    """Calls that have no tensor in common with the rest of a segment, and their results that are needed."""

    calls: list[_Call] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Records operations on tensors, and executes them compiled when a value is asked for.

    Args:
        compile_graph: from a graph module of tensors, floats and sizes to a callable. Also told whether
            shapes and sizes change from call to call.
        kind_of: what of a real tensor, beyond shape, dtype and device, a compiled graph depends on. Also told
            whether the graph overwrites it.
        original_of: a storage -> the tensor that the optimizer knows it by, if any: what ``p.data`` is a view
            of.
    """

    def __init__(
        self,
        compile_graph: Callable[[GraphModule, bool], Compiled],
        kind_of: Callable[[Tensor, bool], Any],
        original_of: Callable[[int], Tensor | None],
    ) -> None:
        super().__init__()
        self._compile_graph = compile_graph
        self._kind_of = kind_of
        self._original_of = original_of
        self._segment = _Segment()
        self._executed: list[Deferred] = []
        self._viewed: dict[int, Tensor] = {}
        self._steps = 0
        self._first_met: dict[Any, int] = {}
        self._compiled: dict[Any, Compiled] = {}
        self._predicted: dict[Any, tuple[Any, ...]] = {}
        self._outer: list[bool] = []

    def finish(self, *, successfully: bool) -> None:
        """At the end of a step: execute what has been recorded, or drop it."""
        try:
            if successfully:
                self.flush()
        finally:
            self._steps += 1
            self._segment = _Segment()
            self._executed.clear()
            self._viewed.clear()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Not to be one of the modes in any thread that keep Dynamo from compiling in all of them."""
        return True

    # Entering and leaving a mode saves and restores a flag that all threads share, and that is up while one
    # of them compiles.

    def __enter__(self) -> Recorder:
        with compile_lock:
            super().__enter__()
        self._outer.append(_recording.now)
        _recording.now = True
        return self

    def __exit__(self, *exception: Any) -> None:
        _recording.now = self._outer.pop()
        with compile_lock:
            super().__exit__(*exception)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within a step, execute operations as if nobody recorded."""
        was_recording, _recording.now = _recording.now, False
        try:
            with without_modes():
                yield
        finally:
            _recording.now = was_recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        signature = _signature(func)
        if self._executed:
            args, kwargs = _with_real(args), _with_real(kwargs)
        if signature.is_immediate and _draws_16_bits(func, args, kwargs):
            return self._record(signature, args, kwargs)
        if signature.is_immediate and not _is_index_of_integers(func, args):
            return self._execute_now(signature, args, kwargs)
        if self._has_its_values(signature, args, kwargs):
            return self._call(signature, args, kwargs)
        if signature.element_rule is not None:
            return self._record_each(signature, args, kwargs)
        return self._record(signature, args, kwargs)

    def _has_its_values(self, signature: _Signature, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether there is nothing to wait for, and little to gain: factories, arithmetic of 0-d counters."""
        is_small, is_sparse = True, False
        for tensor in _tensors_in([*args, *kwargs.values()]):
            if type(tensor) is Deferred:
                return False
            is_small = is_small and tensor.dim() == 0 and not is_low_precision(tensor.dtype)
            is_sparse = is_sparse or tensor.layout is not torch.strided
        return is_small or is_sparse or signature.reads_no_values

    def _call(self, signature: _Signature, args: Any, kwargs: dict[str, Any]) -> Any:
        """Execute an operation on the tensors as they are, after what it depends on."""
        if self._depends_on_what_is_recorded(signature, list(_tensors_in([*args, *kwargs.values()]))):
            self.flush()
        return signature.operator(*_with_real(args), **_with_real(kwargs))

    def _execute_now(self, signature: _Signature, args: Any, kwargs: dict[str, Any]) -> Any:
        """Execute an operation that cannot be recorded, such that no error term is left behind.

        It reads tensors that may have some in float32, and what it makes of them is rounded by an operation
        that is recorded. Where it only moves elements to other places, the error terms follow. Not so numbers
        that are read, and factorizations, which 16-bit tensors don't have.
        """
        func = signature.operator
        if torch.Tag.inplace_view in func.tags:
            self.flush()
            tensor, *others = _with_real(args)
            if self._owner(tensor) is not tensor:  # its error terms are found as the owner's
                return func(tensor, *others, **kwargs)
            return change_layout(tensor, lambda each: func(each, *others, **kwargs))
        if signature.reads_no_values or factorizes(func) or func is aten._local_scalar_dense.default:
            return self._call(signature, args, kwargs)
        wide: dict[int, tuple[Tensor, Tensor]] = {}

        def widened(tensor: Tensor) -> Tensor:
            if id(tensor) not in wide and self._may_have_error_terms(tensor):
                wide[id(tensor)] = tensor, self._converted(tensor, torch.float32)
            return wide[id(tensor)][1] if id(tensor) in wide else tensor

        def rounded(made: Tensor, eager: Tensor) -> Tensor:
            for tensor, value in wide.values():
                if made is _real(value):
                    return cast(Tensor, self._record(_signature(aten.copy_.default), (tensor, made), {}))
            return made if made.dtype == eager.dtype else self._converted(made, eager.dtype)

        wide_args = [_for_each_tensor(widened, argument) for argument in args]
        wide_kwargs = {name: _for_each_tensor(widened, argument) for name, argument in kwargs.items()}
        results = self._call(signature, wide_args, wide_kwargs)
        if not wide:
            return results
        likewise = self._without_elements(signature, args, kwargs)
        if isinstance(results, tuple):
            return tuple(map(rounded, results, likewise))
        return rounded(results, *likewise)

    def _converted(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return cast(Tensor, self._record(_signature(aten._to_copy.default), (tensor,), {"dtype": dtype}))

    def _may_have_error_terms(self, tensor: Tensor) -> bool:
        if type(tensor) is Deferred or not is_low_precision(tensor.dtype):
            return is_low_precision(tensor.dtype)
        is_written = self._segment.of_storage.get(_storage_of(tensor)) in self._segment.written
        return is_written or expansion_of(self._owner(tensor)) is not None

    def _depends_on_what_is_recorded(self, signature: _Signature, tensors: Sequence[Tensor]) -> bool:
        if any(type(tensor) is Deferred for tensor in tensors):
            return True
        if signature.reads_no_values:
            return False
        of_storage, written = self._segment.of_storage, self._segment.written
        met = [of_storage[s] for s in map(_storage_of, tensors) if s in of_storage]
        return any(signature.writes or value in written for value in met)

    def _record_each(self, signature: _Signature, args: Any, kwargs: dict[str, Any]) -> Any:
        """A ``_foreach_`` operator, element by element: elements are updates of their own."""
        assert signature.element_rule is not None
        with self:
            results = [
                signature.element_rule(*element, **keywords)
                for element, keywords in foreach_calls(args, kwargs)
            ]
            if not signature.writes:
                return results
            for target, result in zip(args[0], results, strict=True):
                target.copy_(result)
        return None

    def _record(self, signature: _Signature, args: Any, kwargs: dict[str, Any]) -> Any:
        segment = self._segment
        call = _Call(
            signature,
            tuple(map(self._written_down, args, signature.quantities)),
            {
                name: self._written_down(value, signature.quantities[signature.names.index(name)])
                for name, value in kwargs.items()
            },
        )
        predicted = self._predict(call, args, kwargs)
        if call.numbers and not all(spec.dtype.is_floating_point for spec in _flat(predicted)):
            call = call.with_integers()
        given = dict(zip(signature.names, args, strict=False))
        given.update(kwargs)
        for name in signature.writes:
            segment.written.update(segment.base(self._value_of(t)) for t in _tensors_in([given[name]]))
        returned = []
        for spec, (origin, name) in zip(predicted, signature.results, strict=True):
            if origin == "same":
                returned.append(given[name])
            else:
                base = segment.base(self._value_of(given[name])) if origin == "view" else None
                made = [self._make(call, each, base) for each in ([spec] if isinstance(spec, Spec) else spec)]
                returned.append(made[0] if isinstance(spec, Spec) else made)
        segment.calls.append(call)
        return returned[0] if len(returned) == 1 else tuple(returned) if returned else None

    def _make(self, call: _Call, spec: Spec, base: int | None) -> Tensor:
        deferred = Deferred.of(spec, len(self._segment.values))
        call.results.append(self._segment.add(deferred, base, (call, len(call.results))))
        return deferred

    def _written_down(self, argument: Any, quantity: str) -> Any:
        if isinstance(argument, Tensor):
            return _Ref(self._value_of(argument))
        if isinstance(argument, (list, tuple)):
            return tuple(self._written_down(element, quantity) for element in argument)
        if quantity == "number" and type(argument) in (int, float):
            return _Int(argument) if type(argument) is int else _Number(argument)
        return _Size(argument) if quantity == "size" and argument in SIZES else argument

    def _predict(self, call: _Call, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The specifications of an operation's results."""
        specs = self._segment.specs
        key = (call.signature, call.form, *call.sizes, *[specs[value] for value in call.tensors])
        predicted = self._predicted.get(key)
        if predicted is None:
            results = self._without_elements(call.signature, args, kwargs)
            predicted = self._predicted[key] = tuple(_specs_of(each) for each in results)
        return predicted

    def _without_elements(self, signature: _Signature, args: Any, kwargs: dict[str, Any]) -> Sequence[Any]:
        """Fake tensors in the place of an operation's results; where values decide, of any size."""
        with compile_lock, self.paused(), SymbolicScope().fake_mode:
            results = signature.operator(*_without_values(args), **_without_values(kwargs))
        return results if len(signature.results) > 1 else [results] if signature.results else []

    # -- tensors that the step has met

    def _value_of(self, tensor: Tensor) -> int:
        if type(tensor) is Deferred:
            return tensor.value
        segment = self._segment
        key = (_storage_of(tensor), tensor.storage_offset(), *Spec.of(tensor))
        if key not in segment.inputs:
            segment.inputs[key] = self._input(tensor)
        return segment.inputs[key]

    def _input(self, tensor: Tensor) -> int:
        """One input for all views of one memory."""
        segment = self._segment
        storage = _storage_of(tensor)
        if storage not in segment.of_storage:
            segment.of_storage[storage] = segment.add(self._owner(tensor))
        base = value = segment.of_storage[storage]
        owner = segment.tensors[base]
        if tensor.dtype != owner.dtype:
            value = self._view(segment, tensor, value, aten.view.dtype, tensor.dtype)
        place = (tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
        if place == (tuple(owner.shape), tuple(owner.stride()), int(owner.storage_offset())):
            return value
        return self._view(segment, tensor, value, aten.as_strided.default, *place)

    def _owner(self, tensor: Tensor) -> Tensor:
        """The tensor that has the memory of a real one, perhaps a view, to itself."""
        storage = _storage_of(tensor)
        original = self._viewed.get(storage, self._original_of(storage))
        return _whole(tensor) if original is None else original

    def _view(self, segment: _Segment, tensor: Tensor, value: int, func: Any, *args: Any) -> int:
        """A real tensor as a view of another value."""
        call = _Call(_signature(func), (_Ref(value), *args), {})
        call.results.append(segment.add(tensor, segment.base(value), (call, 0)))
        segment.calls.append(call)
        return call.results[0]

    # -- what becomes of it

    def flush(self) -> None:
        """Execute what has been recorded; deferred tensors that are still referred to become real."""
        segment, self._segment = self._segment, _Segment()
        kept = segment.still_referenced()
        with self.paused(), torch.no_grad():
            self._settle()
            for component in _components(segment, kept):
                self._execute(segment, component)
            for value in kept:
                base = segment.base(value)
                if base != value:
                    # Views that have a base to torch would keep us from swapping it; so they have it from us.
                    real = _real(segment.tensors[base])
                    self._viewed[_storage_of(real)] = real
                    self._become(segment.tensors[value], segment.real(value))

    def _become(self, deferred: Tensor, real: Tensor) -> None:
        if not is_held_by_torch(deferred):
            torch.utils.swap_tensors(deferred, real)
        else:
            assert isinstance(deferred, Deferred)
            deferred.executed = real
            self._executed.append(deferred)

    def _settle(self) -> None:
        """Let tensors become what they stand for that could not when they were executed."""
        executed, self._executed = self._executed, []
        while executed:
            deferred = executed.pop()
            assert deferred.executed is not None
            self._become(deferred, deferred.executed.detach())

    def _execute(self, segment: _Segment, component: _Component) -> None:
        touched = {segment.base(value) for call in component.calls for value in call.tensors}
        if not component.kept and not any(map(segment.is_input, touched & segment.written)):
            return
        for value in component.kept:
            result = segment.tensors[value]
            self._become(result, Spec.of(result).empty())
            if is_low_precision(result.dtype):
                carried[_real(result)] = None
        function = _Function(segment, component, self._kind_of)
        key = (function.form, function.shapes, *function.sizes)
        sizes: Sequence[int] = ()
        if key not in self._compiled and self._first_met.setdefault(function.form, self._steps) < self._steps:
            key, sizes = function.form, function.sizes
        compiled = self._compiled.get(key)
        if compiled is None:
            # Dynamo marks what FX generates while any thread compiles as not to be compiled.
            with compile_lock:
                module = function.module(takes_sizes=bool(sizes))
            compiled = self._compiled[key] = self._compile_graph(module, key is function.form)
        compiled(*function.tensors, *function.numbers, *sizes)


def _components(segment: _Segment, kept: Sequence[int]) -> list[_Component]:
    """The calls of a segment, apart where they have no tensor in common."""
    parent = list(range(len(segment.values)))

    def root(value: int) -> int:
        while parent[value] != value:
            parent[value] = parent[parent[value]]
            value = parent[value]
        return value

    own = [
        [value for value in (*call.results, *call.tensors) if not segment.is_shared_scalar(value)]
        for call in segment.calls
    ]
    for first, *others in own:
        for value in others:
            parent[root(value)] = root(first)
    found: dict[int, _Component] = {}
    for call, (first, *_) in zip(segment.calls, own, strict=True):
        found.setdefault(root(first), _Component()).calls.append(call)
    for value in sorted({segment.base(value) for value in kept}):
        if not segment.is_input(value):
            found[root(value)].kept.append(value)
    return list(found.values())


class _Function:
    """A component as a function of tensors and numbers.

    Attributes:
        tensors: the inputs, then the tensors that its results are to be written to.
        numbers, sizes: in the order of the calls.
        shapes: sizes and strides of the tensors.
        form: equal for components that are one function of tensors, numbers and sizes.
    """

    def __init__(
        self, segment: _Segment, component: _Component, kind_of: Callable[[Tensor, bool], Any]
    ) -> None:
        self.component = component
        self.inputs: list[int] = []
        self.numbers: list[float] = []
        self.sizes: list[int] = []
        self._places: dict[int, int] = {}
        calls = tuple(map(self._described, component.calls))
        kept = tuple(self._places[value] for value in component.kept)
        values = (*self.inputs, *component.kept)
        self.tensors = [_real(segment.tensors[value]) for value in values]
        specs = [segment.specs[value] for value in values]
        kinds = tuple(
            (len(spec.size), spec.dtype, spec.device, type(tensor), kind_of(tensor, value in segment.written))
            for value, spec, tensor in zip(values, specs, self.tensors, strict=True)
        )
        self.form = (calls, kept, kinds)
        self.shapes = tuple((spec.size, spec.stride) for spec in specs)

    def _described(self, call: _Call) -> tuple[Any, ...]:
        """A call with its values numbered within the component, and without its numbers and sizes."""
        self.numbers += call.numbers
        self.sizes += call.sizes
        read = [self._place(value) for value in call.tensors]
        for value in call.results:
            self._places[value] = len(self._places)
        return call.signature, call.form, *read, len(call.results)

    def _place(self, value: int) -> int:
        place = self._places.get(value)
        if place is None:
            place = self._places[value] = len(self._places)
            self.inputs.append(value)
        return place

    def module(self, *, takes_sizes: bool) -> GraphModule:
        """The component as a graph."""
        graph = Graph()
        nodes: dict[int, Node] = {
            value: graph.placeholder(f"tensor{i}") for i, value in enumerate(self.inputs)
        }
        targets = [graph.placeholder(f"result{i}") for i in range(len(self.component.kept))]
        numbers = iter([graph.placeholder(f"number{i}") for i in range(len(self.numbers))])
        sizes = iter([graph.placeholder(f"size{i}") for i in range(len(self.sizes) if takes_sizes else 0)])
        graph.call_function(_refuse_to_be_run)

        def argument(recorded: Any) -> Any:
            if isinstance(recorded, _Ref):
                return nodes[recorded]
            if isinstance(recorded, _Size):
                return next(sizes, int(recorded))
            return next(numbers) if isinstance(recorded, _Number) else _map(argument, recorded)

        for call in self.component.calls:
            node = graph.call_function(call.signature.operator, argument(call.args), argument(call.kwargs))
            has_several = call.signature.has_several_results
            for i, value in enumerate(call.results):
                nodes[value] = graph.call_function(operator.getitem, (node, i)) if has_several else node
        for target, value in zip(targets, self.component.kept, strict=True):
            graph.call_function(aten.copy_.default, (target, nodes[value]))
        graph.output(())
        return GraphModule({}, graph)


def _refuse_to_be_run() -> None:
    """In a graph that is to be compiled: there is nothing of it in what Dynamo traces."""
    if not torch.compiler.is_dynamo_compiling():
        raise EagerStepError(
            "a part of a recorded step would run eagerly, that is without error terms",
            where="a graph that torch.compile was given",
            remedy="switch torch.compile on again (TORCHDYNAMO_DISABLE, torch.compiler.set_stance, a "
            "TorchDispatchMode around the step), or step the optimizer without this backend",
        )


class _Recording(threading.local):
    """Whether operations that this thread calls are being recorded."""

    now = False


_recording = _Recording()


def is_recording() -> bool:
    """Whether operations that this thread calls are being recorded."""
    return _recording.now


# What is known of operators. --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Signature:
    """What matters of an operator's schema. There is one for each operator.

    Attributes:
        names: of its arguments.
        quantities: for each, whether a number there is one to calculate with, ``"number"``, a ``"size"``, or
            ``""``, neither (a dimension, say).
        writes: the arguments it overwrites.
        results: per result, ``("new", "")``, ``("same", argument)`` or ``("view", argument)``.
        reads_no_values: its result does not depend on the elements of its arguments.
        is_immediate: it is executed rather than recorded: see
            :func:`~collage_fx.graph.depends_on_values`.
        element_rule: of a ``_foreach_`` operator.
    """

    operator: Any
    names: tuple[str, ...]
    quantities: tuple[str, ...]
    writes: tuple[str, ...]
    results: tuple[tuple[str, str], ...]
    reads_no_values: bool
    is_immediate: bool
    element_rule: Callable[..., Any] | None

    @property
    def has_several_results(self) -> bool:
        returns = schema_of(self.operator).returns
        return len(returns) > 1 or any("List" in str(result.type) for result in returns)


_signatures: dict[Any, _Signature] = {}


def _signature(func: Any) -> _Signature:
    signature = _signatures.get(func)
    if signature is None:
        signature = _signatures[func] = _read_schema(func)
    return signature


def _draws_16_bits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it draws the random numbers that rounding float32 to bfloat16 at random takes."""
    return drawn_range(func, args, kwargs) == (0, 1 << 16) and kwargs.get("generator") is None


def _read_schema(func: Any) -> _Signature:
    schema = schema_of(func)
    aliased = {
        frozenset(argument.alias_info.before_set): argument.name
        for argument in schema.arguments
        if argument.alias_info is not None
    }
    first = schema.arguments[0].name if schema.arguments else ""
    # A view of all of it is executed where it is real: most steps make one at every access of ``.data``.
    is_another_name = func.is_view and facts_of(func).passes == 0 and len(schema.arguments) == 1
    results = []
    for result in schema.returns:
        if result.alias_info is not None and result.alias_info.is_write:
            results.append(("same", aliased[frozenset(result.alias_info.before_set)]))
        else:
            results.append(("view", first) if func.is_view else ("new", ""))
    return _Signature(
        func,
        names=tuple(argument.name for argument in schema.arguments),
        quantities=tuple(_quantity(argument.real_type) for argument in schema.arguments),
        writes=tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write),
        results=tuple(results),
        reads_no_values=is_another_name or ignores_values(func),
        is_immediate=depends_on_values(func),
        element_rule=foreach_rule(foreach_name(func).removesuffix("_")),
    )


def _quantity(argument: Any) -> str:
    """Of an argument's type: see :class:`_Signature`."""
    if argument.kind() in ("ListType", "OptionalType"):
        return _quantity(argument.getElementType())
    return {"NumberType": "number", "TensorType": "number", "SymIntType": "size"}.get(argument.kind(), "")


def _map(function: Callable[[Any], Any], argument: Any) -> Any:
    """A container of arguments with ``function`` of each; anything else as it is, numbers as plain ones."""
    if isinstance(argument, tuple):
        return tuple(function(element) for element in argument)
    if isinstance(argument, dict):
        return {name: function(element) for name, element in argument.items()}
    return float(argument) if isinstance(argument, _Number) else argument


def _real(tensor: Tensor) -> Tensor:
    real = tensor.executed if type(tensor) is Deferred else None
    return tensor if real is None else real


def _with_real(argument: Any) -> Any:
    """Arguments with real tensors in place of those deferred that stand for one."""
    return _for_each_tensor(_real, argument)


def _for_each_tensor(function: Callable[[Tensor], Tensor], argument: Any) -> Any:
    """Arguments, or results, with ``function`` of each tensor in its place."""
    if isinstance(argument, Tensor):
        return function(argument)
    if isinstance(argument, list):
        return [_for_each_tensor(function, element) for element in argument]
    return _map(lambda element: _for_each_tensor(function, element), argument)


def _whole(tensor: Tensor) -> Tensor:
    """A tensor that contains what the given one, perhaps a view, shares its memory with."""
    base = base_of(tensor)
    if base is not None and base.dtype == tensor.dtype:
        return base
    storage = tensor.untyped_storage()
    if tensor.numel() * tensor.itemsize == storage.nbytes():
        return tensor
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)


def _with_integers(argument: Any) -> Any:
    return int(argument) if isinstance(argument, _Int) else _map(_with_integers, argument)


def _flat(specs: Any) -> Iterator[Spec]:
    for spec in specs:
        yield from [spec] if isinstance(spec, Spec) else spec


def _is_index_of_integers(func: Any, args: Any) -> bool:
    """Whether an operator whose result's shape may depend on values has none that it does depend on."""
    return func is aten.index.Tensor and not any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


def _specs_of(result: Any) -> Any:
    return Spec.of(result) if isinstance(result, Tensor) else tuple(map(Spec.of, result))


def _tensors_in(arguments: Any) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors_in(argument)


def _without_values(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return Spec.of(argument).empty()
    if isinstance(argument, (list, tuple)):
        return [_without_values(element) for element in argument]
    if isinstance(argument, dict):
        return {name: _without_values(element) for name, element in argument.items()}
    return argument


def _storage_of(tensor: Tensor) -> int:
    return -1 if type(tensor) is Deferred else storage_of(tensor)
