"""What has been recorded of a step, and its parts that have no tensor in common, as functions and graphs."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.node import map_aggregate

from collage_fx.capture.signatures import Signature
from collage_fx.graph import components
from collage_fx.torch_compat import disabled_torch_function, wrapper_subclass

aten = torch.ops.aten

#: Sizes that may be symbols in a graph. Of 0, 1, negative indices and the end of a slice PyTorch has ideas.
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
        raise left_uncomputed(func)


def left_uncomputed(func: Any) -> RuntimeError:
    """The error of an operation on a deferred tensor that nobody records any more."""
    return RuntimeError(
        f"{func} has been called on a tensor that a step of an optimizer has left uncomputed: the step "
        "ended with an exception, or handed the tensor to another thread"
    )


def real(argument: Any) -> Any:
    """The tensor that a deferred one stands for, if it has been executed; anything else is itself."""
    executed = argument.executed if type(argument) is Deferred else None
    return argument if executed is None else executed


@dataclass
class Call:
    """A recorded operation.

    Attributes:
        signature: of the operator.
        form: its arguments and keyword arguments, with a class in the place of each tensor (``Tensor``), of
            each number to calculate with (``float``, or ``int`` where the step wrote an integer) and of each
            size (``SymInt``).
        tensors: the values it reads or writes, in the order of the arguments.
        numbers, sizes: likewise.
        results: the values it makes, in the order of its results.
    """

    signature: Signature
    form: tuple[Any, ...] = ()
    tensors: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)

    def with_arguments(
        self, args: Sequence[Any], kwargs: dict[str, Any], number_of: Callable[[Tensor], int]
    ) -> Call:
        """The call, with arguments that it has not had yet; ``number_of`` tells a tensor's number."""
        names, quantities = self.signature.names, self.signature.quantities
        self.form = (
            tuple([self._taken_apart(*each, number_of) for each in zip(args, quantities, strict=False)]),
            tuple([(n, self._taken_apart(kwargs[n], quantities[names.index(n)], number_of)) for n in kwargs]),
        )
        return self

    def _taken_apart(self, argument: Any, quantity: str, number_of: Callable[[Tensor], int]) -> Any:
        kind = type(argument)
        if isinstance(argument, Tensor):
            self.tensors.append(number_of(argument))
            return Tensor
        if isinstance(argument, (list, tuple)):
            return tuple([self._taken_apart(element, quantity, number_of) for element in argument])
        if quantity == "number" and (kind is float or kind is int):
            self.numbers.append(float(argument))
            return kind
        if quantity == "size" and argument in SIZES:
            self.sizes.append(argument)
            return torch.SymInt
        return argument

    def arguments(self, tensors: Iterable[Any], numbers: Iterable[Any], sizes: Iterable[Any]) -> Any:
        """The arguments and keyword arguments, with others in the place of its tensors, numbers and sizes."""
        given = {
            Tensor: iter(tensors),
            float: (numbers := iter(numbers)),
            int: numbers,
            torch.SymInt: iter(sizes),
        }
        args, named = map_aggregate(
            self.form, lambda each: next(given[each]) if isinstance(each, type) else each
        )
        return args, dict(named)

    def with_integers(self) -> Call:
        """The same with integers as the step wrote them, which are part of what it is then."""
        numbers = iter(self.numbers)
        left: list[float] = []

        def argument(each: Any) -> Any:
            if each is int:
                return int(next(numbers))
            if each is float:
                left.append(next(numbers))
            return each

        return Call(self.signature, map_aggregate(self.form, argument), self.tensors, left, self.sizes)


@dataclass(slots=True)
class _Value:
    """A tensor of a segment: an input, what a call has made, or a view of either.

    Attributes:
        tensor, spec: itself, and what is known of it.
        base: the number of the value whose memory it shares; its own, if it has its own.
        made_by: the call, and which of its results it is; None for an input.
    """

    tensor: Any
    spec: Spec
    base: int
    made_by: tuple[Call, int] | None = None


@dataclass
class Segment:
    """What has been recorded since the last flush.

    Attributes:
        values: the tensors, by number.
        calls: in order.
        inputs: tensors met, by the memory they are a view of.
        of_storage: storage -> the input it belongs to.
        written: the values, bases all, that calls overwrite.
    """

    values: list[_Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    inputs: dict[Any, int] = field(default_factory=dict)
    of_storage: dict[int, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)

    def add_input(self, tensor: Tensor) -> int:
        """The number of a tensor that has its memory to itself."""
        number = len(self.values)
        self.values.append(_Value(tensor, Spec.of(tensor), number))
        return number

    def add_result(self, call: Call, tensor: Tensor | Spec, of: int | None = None) -> Tensor:
        """The next result of a call.

        Args:
            call: which makes it.
            tensor: itself, or what is known of it if it is deferred.
            of: the value that it is a view of, if it is one.
        """
        number = len(self.values)
        if isinstance(tensor, Spec):
            tensor = Deferred.of(tensor, number)
        base = number if of is None else self.base(of)
        self.values.append(_Value(tensor, Spec.of(tensor), base, (call, len(call.results))))
        call.results.append(number)
        return tensor

    def add_view(self, tensor: Tensor, value: int, signature: Signature, *args: Any) -> int:
        """The number of a real tensor that a call makes as a view of another value."""
        call = Call(signature, ((Tensor, *args), ()), [value])
        self.calls.append(call)
        self.add_result(call, tensor, value)
        return call.results[0]

    def has(self, deferred: Deferred) -> bool:
        """Whether a deferred tensor is the segment's own, rather than one that an earlier one has left."""
        return deferred.value < len(self.values) and self.values[deferred.value].tensor is deferred

    def base(self, value: int) -> int:
        return self.values[value].base

    def is_input(self, value: int) -> bool:
        return self.values[value].made_by is None

    def still_referenced(self) -> list[int]:
        """The deferred tensors that someone besides the segment refers to."""
        return [
            number
            for number, value in enumerate(self.values)
            if type(value.tensor) is Deferred and sys.getrefcount(value.tensor) > _UNREFERENCED
        ]

    def real(self, number: int) -> Tensor:
        """The real tensor of a value, once its base is."""
        value = self.values[number]
        if value.base == number or value.made_by is None:
            return cast(Tensor, real(value.tensor))
        call, i = value.made_by
        args, kwargs = call.arguments(map(self.real, call.tensors), call.numbers, call.sizes)
        taken = call.signature.operator(*args, **kwargs)
        return cast(Tensor, taken[i] if isinstance(taken, (list, tuple)) else taken)

    def components(self, kept: Sequence[int]) -> list[tuple[list[Call], list[int]]]:
        """Split the calls into those that have no tensor in common, each with the results to be kept."""
        found = components(
            self.calls,
            lambda call: (v for v in (*call.results, *call.tensors) if not self._is_shared_scalar(v)),
        )
        bases = {self.base(value) for value in kept}
        return [(calls, [r for call in calls for r in call.results if r in bases]) for calls in found]

    def _is_shared_scalar(self, value: int) -> bool:
        """Whether many updates may read it without being one: a learning rate, say."""
        return self.is_input(value) and value not in self.written and self.values[value].tensor.dim() == 0


def _unreferenced_count() -> int:
    lonely = _Value(object(), Spec((), (), torch.float32, torch.device("cpu")), 0)
    return sys.getrefcount(lonely.tensor)


_UNREFERENCED = _unreferenced_count()


class Function:
    """Calls that have no tensor in common with others, as a function of tensors, numbers and sizes.

    Args:
        segment: of which they are.
        calls: themselves.
        kept: their results that are needed, which have become real tensors.
        kind_of: see :class:`~collage_fx.capture.recorder.Recorder`.

    Attributes:
        tensors: the inputs, then the tensors that its results are to be written to.
        numbers, sizes: in the order of the calls.
        shapes: sizes and strides of the tensors.
        described: the calls, equal where they do the same, whatever kind of tensors they do it to.
        form: equal for what is one function of tensors, numbers and sizes.
    """

    def __init__(
        self,
        segment: Segment,
        calls: Sequence[Call],
        kept: Sequence[int],
        kind_of: Callable[[Tensor, bool], Any],
    ) -> None:
        self.numbers: list[float] = []
        self.sizes: list[int] = []
        self._calls, self._kept = calls, kept
        self._inputs: list[int] = []
        self._order: dict[int, int] = {}
        self.described = tuple(map(self._describe, calls))
        used = (*self._inputs, *kept)
        values = [segment.values[value] for value in used]
        self.tensors = [real(value.tensor) for value in values]
        kinds = tuple(
            (
                len(spec.size),
                spec.dtype,
                spec.device,
                type(tensor),
                kind_of(tensor, value in segment.written),
            )
            for value, spec, tensor in zip(used, (v.spec for v in values), self.tensors, strict=True)
        )
        self.form = (self.described, tuple(self._order[value] for value in kept), kinds)
        self.shapes = tuple((value.spec.size, value.spec.stride) for value in values)

    def _describe(self, call: Call) -> tuple[Any, ...]:
        """A call with its values numbered within the component, and without its numbers and sizes."""
        order = self._order
        self.numbers += call.numbers
        self.sizes += call.sizes
        read = []
        for value in call.tensors:
            if value not in order:
                order[value] = len(order)
                self._inputs.append(value)
            read.append(order[value])
        for value in call.results:
            order[value] = len(order)
        return call.signature, call.form, *read, len(call.results)

    def operators_of(self, numbers: Collection[int]) -> set[Signature]:
        """The operators that calculate with the numbers at some positions."""
        found, first = set(), 0
        for call in self._calls:
            if any(first <= position < first + len(call.numbers) for position in numbers):
                found.add(call.signature)
            first += len(call.numbers)
        return found

    def module(self, inputs: Collection[int], *, takes_sizes: bool) -> GraphModule:
        """A graph of the tensors, some numbers, and perhaps the sizes.

        Args:
            inputs: the positions of numbers that it takes, as 0-d tensors; others are constants.
            takes_sizes: whether it takes sizes, or has them as constants.
        """
        graph = Graph()
        nodes = {value: graph.placeholder(f"tensor{i}") for i, value in enumerate(self._inputs)}
        targets = [graph.placeholder(f"result{i}") for i in range(len(self._kept))]
        given = {i: graph.placeholder(f"number{i}") for i in inputs}
        sizes: Sequence[Any] = self.sizes
        if takes_sizes:
            sizes = [graph.placeholder(f"size{i}") for i in range(len(sizes))]
        read = {i: graph.call_function(aten._local_scalar_dense.default, (n,)) for i, n in given.items()}
        numbers_left = iter([read.get(i, number) for i, number in enumerate(self.numbers)])
        sizes_left = iter(sizes)
        for call in self._calls:
            arguments = call.arguments(map(nodes.__getitem__, call.tensors), numbers_left, sizes_left)
            node = graph.call_function(call.signature.operator, *arguments)
            for i, value in enumerate(call.results):
                has_several = call.signature.returns_several
                nodes[value] = graph.call_function(operator.getitem, (node, i)) if has_several else node
        for target, value in zip(targets, self._kept, strict=True):
            graph.call_function(aten.copy_.default, (target, nodes[value]))
        graph.output(())
        return GraphModule({}, graph)
