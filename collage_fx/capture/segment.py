"""Recorded operations of a step and their operators; components of them as functions and graphs."""

from __future__ import annotations

import functools
import hashlib
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from collage_fx import graph, torch_compat
from collage_fx.errors import UnsupportedTensorError
from collage_fx.graph import is_matrix_product
from collage_fx.torch_compat import SymbolicScope, wrapper_subclass

aten = torch.ops.aten

#: Sizes that may be symbols in a graph; PyTorch specializes 0 and 1, negative indices and ends of slices.
SIZES = range(2, 1 << 62)


@dataclass(frozen=True, eq=False, repr=False)
class Signature:
    """Facts about an operator's schema. There is one object for each operator."""

    operator: Any
    quantities: dict[str, str]  # argument -> meaning of a number in it: see :func:`_quantity`
    writes: tuple[str, ...]  # names of the arguments that it overwrites
    results: tuple[tuple[str, str], ...]  # each ("new", ""), ("same", argument) or ("view", argument)
    returns_several: bool  # a tuple or a list
    reads_no_values: bool  # whether its result is independent of the elements of its arguments
    is_immediate: bool  # executed rather than recorded: see :func:`~collage_fx.graph.depends_on_values`
    element_rule: Callable[..., Any] | None  # of a ``_foreach_`` operator, for one element

    def __repr__(self) -> str:
        return str(self.operator)


@functools.cache
def signature_of(operator: Any) -> Signature:
    """Return the signature of an ATen operator."""
    schema = torch_compat.schema_of(operator)
    arguments, returns = schema.arguments, schema.returns
    aliases = {each.name: each.alias_info for each in arguments if each.alias_info is not None}
    aliased = {frozenset(alias.before_set): name for name, alias in aliases.items()}
    first = arguments[0].name if arguments else ""
    # A view of a whole real tensor is executed at once: most steps make one at every access of ``.data``.
    is_whole_view = operator.is_view and graph.facts_of(operator).passes == 0 and len(arguments) == 1
    results = []
    for alias in (result.alias_info for result in returns):
        if alias is not None and alias.is_write:
            results.append(("same", aliased[frozenset(alias.before_set)]))
        else:
            results.append(("view", first) if operator.is_view else ("new", ""))
    return Signature(
        operator,
        quantities={argument.name: _quantity(argument.real_type) for argument in arguments},
        writes=tuple(name for name, alias in aliases.items() if alias.is_write),
        results=tuple(results),
        returns_several=len(returns) > 1 or any("List" in str(result.type) for result in returns),
        reads_no_values=is_whole_view or graph.ignores_values(operator),
        is_immediate=graph.depends_on_values(operator),
        element_rule=graph.foreach_rule(graph.foreach_name(operator).removesuffix("_")),
    )


def _quantity(kind: Any) -> str:
    """Return the meaning of a number in an argument: "number" to calculate with, "size", "" for others."""
    if kind.kind() in ("ListType", "OptionalType"):
        return _quantity(kind.getElementType())
    kinds = {"NumberType": "number", "FloatType": "number", "TensorType": "number", "SymIntType": "size"}
    return kinds.get(kind.kind(), "")


def draws_16_bits(operator: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws random numbers for stochastic rounding of float32 to bfloat16."""
    return graph.drawn_range(operator, args, kwargs) == (0, 1 << 16) and kwargs.get("generator") is None


def is_index_of_integers(operator: Any, args: Any) -> bool:
    """Return whether a call selects elements by index, so that its result's shape is known; not by a mask."""
    return operator is torch.ops.aten.index.Tensor and not any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


class Spec(NamedTuple):
    """Specification of a tensor without its values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> Spec:
        """Return the specification of a real or deferred tensor."""
        if type(tensor) is Deferred:
            return tensor.spec
        return Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


def is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor spans its memory."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return where in its memory the elements of a tensor are, and their dtype."""
    return (*Spec.of(tensor), tensor.storage_offset())


def found_in(kind: type[Any], template: Any) -> Iterator[Any]:
    """Yield the templates of a kind, or the tensors of a class, in lists and tuples."""
    if isinstance(template, kind):
        yield template
    elif isinstance(template, (list, tuple)):
        for each in template:
            yield from found_in(kind, each)


class Deferred(Tensor):
    """Result of an operation that has been recorded.

    Once executed, it becomes the tensor ``executed`` itself as soon as torch no longer holds on to it, as the
    operation does that asked for its value.
    """

    __torch_function__ = torch_compat.disabled_torch_function
    spec: Spec
    value: int  # number of the tensor in the recorder's segment
    executed: Tensor | None = None  # holds the values

    @staticmethod
    def of(spec: Spec, value: int) -> Deferred:
        """Make a deferred tensor."""
        size, stride, dtype, device = spec
        deferred: Deferred = wrapper_subclass(Deferred, size, strides=stride, dtype=dtype, device=device)
        deferred.spec = spec
        deferred.value = value
        return deferred

    def as_subclass(self, cls: type[Tensor]) -> Any:
        """Refuse a result in the class of an operand, which torch asks for: it has no values yet."""
        raise UnsupportedTensorError(
            f"a step that Python runs calculates with a tensor of class {cls.__qualname__}, whose results "
            "have to be of this class, too",
            where=cls.__qualname__,
            remedy="calculate with tensor.as_subclass(torch.Tensor), which shares its memory",
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise left_uncomputed(func)


def left_uncomputed(func: Any) -> RuntimeError:
    """Make the error for an operation on a deferred tensor whose step is over."""
    return RuntimeError(
        f"{func} has been called on a tensor that a step of an optimizer has left uncomputed: the step "
        "ended with an exception, or handed the tensor to another thread"
    )


def real(argument: Any) -> Any:
    """Return the values of an executed deferred tensor; anything else unchanged."""
    executed = argument.executed if type(argument) is Deferred else None
    return argument if executed is None else executed


@dataclass
class Operation:
    """Recorded call of an operator.

    The form is arguments and keyword arguments, with classes as placeholders: ``Tensor`` for a tensor,
    ``float`` for a number to calculate with (``int`` where the step wrote an integer), ``SymInt`` for a size.
    """

    signature: Signature
    form: tuple[Any, ...] = ()
    tensors: list[int] = field(default_factory=list)  # values that it reads or writes, in the form's order
    numbers: list[float] = field(default_factory=list)  # to calculate with
    sizes: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)  # values that it makes, in the order of its results
    overwritten: set[int] = field(default_factory=set)  # bases whose memory it writes to
    first_number: int = 0  # position of its first number among the numbers of the segment
    has_integers: bool = False  # whether integers to calculate with are constants, part of the form

    def with_arguments(
        self, args: Sequence[Any], kwargs: dict[str, Any], number_of: Callable[[Tensor], int]
    ) -> Operation:
        quantities = self.signature.quantities
        by_position = zip(args, quantities.values(), strict=False)
        self.form = (
            tuple([self._taken_apart(*each, number_of) for each in by_position]),
            tuple([(n, self._taken_apart(kwargs[n], quantities[n], number_of)) for n in kwargs]),
        )
        return self

    def _taken_apart(self, argument: Any, quantity: str, number_of: Callable[[Tensor], int]) -> Any:
        """Append the tensors, numbers and sizes in an argument to the lists; return its form."""
        kind = type(argument)
        if isinstance(argument, Tensor):
            self.tensors.append(number_of(argument))
            return Tensor
        if isinstance(argument, (list, tuple)):
            return tuple([self._taken_apart(element, quantity, number_of) for element in argument])
        if quantity == "number" and (kind is float or (kind is int and not self.has_integers)):
            self.numbers.append(float(argument))
            return kind
        if quantity == "size" and argument in SIZES:
            self.sizes.append(argument)
            return torch.SymInt
        return argument

    def arguments(self, tensors: Iterable[Any], numbers: Iterable[Any], sizes: Iterable[Any]) -> Any:
        """Return the arguments and keyword arguments, with the given tensors, numbers and sizes filled in."""
        numbers = iter(numbers)
        left = {Tensor: iter(tensors), float: numbers, int: numbers, torch.SymInt: iter(sizes)}
        args, named = map_aggregate(self.form, lambda x: next(left[x]) if isinstance(x, type) else x)
        return args, dict(named)


@dataclass(slots=True)
class _Value:
    """A tensor of a segment: an input, a result of an operation, or a view of either."""

    tensor: Any  # real or deferred
    spec: Spec
    base: int  # number of the value whose memory it shares; its own number if it has memory of its own
    made_by: tuple[Operation, int] | None = None  # with the index among its results; None for an input


@dataclass
class Segment:
    """Operations that have been recorded since the last flush. A value is told by its number, its index."""

    values: list[_Value] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)  # of all operations, in a step that is matched its own
    inputs: dict[Any, int] = field(default_factory=dict)  # real tensors met, by their storage and layout
    of_storage: dict[int, int] = field(default_factory=dict)  # storage -> number of the input that spans it
    written: set[int] = field(default_factory=set)  # values that operations overwrite; all are bases
    #: Base -> positions of the operations that make or overwrite a value of its memory.
    makers: dict[int, list[int]] = field(default_factory=dict)

    def add(self, operation: Operation) -> None:
        operation.first_number = len(self.numbers)
        self.numbers += operation.numbers
        self.written |= operation.overwritten
        for base in operation.overwritten.union(map(self.base, operation.results)):
            self.makers.setdefault(base, []).append(len(self.operations))
        self.operations.append(operation)

    def add_input(self, tensor: Tensor) -> int:
        number = len(self.values)
        self.values.append(_Value(tensor, Spec.of(tensor), number))
        return number

    def add_result(self, operation: Operation, tensor: Tensor | Spec, of: int | None = None) -> Tensor:
        """Add the next result of an operation, or the specification of a deferred result.

        ``of`` is the number of the value that the result is a view of, if it is a view.
        """
        number = len(self.values)
        if isinstance(tensor, Spec):
            tensor = Deferred.of(tensor, number)
        base = number if of is None else self.base(of)
        self.values.append(_Value(tensor, Spec.of(tensor), base, (operation, len(operation.results))))
        operation.results.append(number)
        return tensor

    def add_view(self, tensor: Tensor, value: int, signature: Signature, *args: Any) -> int:
        """Add a real tensor as the view of another value that an operator returns; return its number."""
        operation = Operation(signature, ((Tensor, *args), ()), [value])
        self.add_result(operation, tensor, value)
        self.add(operation)
        return operation.results[0]

    def has(self, deferred: Deferred) -> bool:
        return deferred.value < len(self.values) and self.values[deferred.value].tensor is deferred

    def base(self, value: int) -> int:
        return self.values[value].base

    def is_input(self, value: int) -> bool:
        return self.values[value].made_by is None

    def forget_tensors(self) -> None:
        for value in self.values:
            value.tensor = None

    def still_referenced(self, *, by_python: bool) -> list[int]:
        """Return the numbers of the deferred tensors that are referenced outside of the segment.

        If ``by_python``, references of torch do not count: of views, autograd, operations that call others.
        """
        deferred = [(number, v) for number, v in enumerate(self.values) if type(v.tensor) is Deferred]
        by_python = by_python and not any(v.base == n and v.tensor.requires_grad for n, v in deferred)
        return [
            number
            for number, value in deferred
            if sys.getrefcount(value.tensor)
            > UNREFERENCED + (torch_compat.references_by_torch(value.tensor) if by_python else 0)
        ]

    def real(self, number: int) -> Tensor:
        """Return the real tensor of a value whose base is real."""
        value = self.values[number]
        if value.base == number or value.made_by is None:
            return cast(Tensor, real(value.tensor))
        operation, i = value.made_by
        tensors = map(self.real, operation.tensors)
        args, kwargs = operation.arguments(tensors, operation.numbers, operation.sizes)
        taken = operation.signature.operator(*args, **kwargs)
        return cast(Tensor, taken[i] if isinstance(taken, (list, tuple)) else taken)

    def components(self, kept: Sequence[int]) -> list[tuple[list[Operation], list[int]]]:
        """Split the operations into components without a common tensor, each with its results to be kept.

        Operations that nothing needs are left out: a number that changes in them changes nothing.
        """
        bases = {self.base(value) for value in kept}
        needed, live = set(bases), list[Operation]()
        for operation in reversed(self.operations):
            if not needed.isdisjoint(map(self.base, operation.results)) or any(
                value in needed or self.is_input(value) for value in operation.overwritten
            ):
                live.append(operation)
                needed |= {self.base(value) for value in operation.tensors}

        def connects(value: int) -> bool:  # a shared scalar, such as a learning rate, does not
            return not self.is_input(value) or value in self.written or self.values[value].tensor.dim() > 0

        found = graph.components(live[::-1], lambda op: filter(connects, (*op.results, *op.tensors)))
        return [(each, [r for operation in each for r in operation.results if r in bases]) for each in found]

    def needed_for(self, base: int) -> list[Operation]:
        """Return the operations that a value with memory of its own depends on."""
        found, left = set[int](), [(base, len(self.operations))]
        while left:
            base, end = left.pop()
            for i in self.makers.get(base, ()):
                if i < end and i not in found:
                    found.add(i)
                    left += [(self.base(value), i) for value in self.operations[i].tensors]
        return [self.operations[i] for i in sorted(found)]

    def has_product(self, operation: Operation) -> bool:
        """Return whether an operation is a product of matrices; that of two vectors is a sum."""
        results = [self.values[result].spec for result in operation.results]
        return is_matrix_product(operation.signature.operator) and any(each.size for each in results)


_lonely = _Value(object(), Spec((), (), torch.float32, torch.device("cpu")), 0)
#: Reference count of a tensor that only a segment references.
UNREFERENCED = sys.getrefcount(_lonely.tensor)


class RecordedFunction:
    """Component of recorded operations as a function of tensors, numbers and sizes.

    ``kept``: numbers of the results that are needed, now real tensors; ``kind_of``: see the recorder. The
    function answers questions if there are any results that are ``returned``: then it writes to no input.
    """

    def __init__(
        self,
        segment: Segment,
        operations: Sequence[Operation],
        kept: Sequence[int],
        kind_of: Callable[[Tensor, bool], Any],
        returned: Sequence[int] = (),
    ) -> None:
        self.positions: list[int] = []  # of its numbers, among those of the segment
        self.sizes: list[int] = []
        self.is_together = False  # whether it is several components that become one graph
        self.bound: Mapping[int, Tensor] = {}  # values that are the graph's attributes then: always the same
        self.shared: Mapping[int, int] = {}  # number's index -> index of the first that is always equal, then
        self._segment = segment
        self.operations, self.kept, self.returned = operations, kept, returned
        self.inputs: list[int] = []
        self._order: dict[int, int] = {}
        self.described = tuple(map(self._describe, operations))  # whatever kind of tensors they read
        self.values = (*self.inputs, *kept)  # numbers of its tensors
        values = [segment.values[value] for value in self.values]
        self._kinds: list[Any] = []
        self.look_at(kind_of, len(values))
        self.shapes = tuple((value.spec.size, value.spec.stride) for value in values)

    @property
    def numbers(self) -> list[float]:
        """Numbers to calculate with, in the order of the operations."""
        return [self._segment.numbers[position] for position in self.positions]

    def places(self) -> list[tuple[Signature, int]]:
        """Return of each number its operator, and how many of its numbers come before."""
        return [(each.signature, i) for each in self.operations for i in range(len(each.numbers))]

    def tensors(self) -> list[Tensor]:
        """Return the inputs, then the tensors that the results are written to; bound tensors are left out."""
        values = self._segment.values
        return [real(values[value].tensor) for value in self.values if value not in self.bound]

    def look_at(self, kind_of: Callable[[Tensor, bool], Any], count: int) -> None:
        """Look at the kinds of the first tensors, which error terms change and the form depends on."""
        written = () if self.returned else self._segment.written
        self._kinds[:count] = [
            (tensor.dim(), tensor.dtype, tensor.device, type(tensor), kind_of(tensor, value in written))
            for value, tensor in zip(self.values[:count], self.tensors(), strict=False)
        ]
        results = (tuple(map(self._order.__getitem__, each)) for each in (self.kept, self.returned))
        #: Key of the function, whatever its numbers and sizes.
        self.form = (self.described, *results, tuple(self._kinds), torch.get_default_dtype())

    def _describe(self, operation: Operation) -> tuple[Any, ...]:
        """Describe an operation by numbers within the component, without its numbers and sizes."""
        order = self._order
        self.positions += range(operation.first_number, operation.first_number + len(operation.numbers))
        self.sizes += operation.sizes
        read = []
        for value in operation.tensors:
            if value not in order:
                order[value] = len(order)
                self.inputs.append(value)
            read.append(order[value])
        for value in operation.results:
            order[value] = len(order)
        return operation.signature, operation.form, *read, len(operation.results)

    def names(self) -> tuple[str, str]:
        """Return names of the operations that are the same in each process: with these sizes, with any."""
        texts = map(repr, ((self.described, self.shapes, self.sizes), self.described))
        of_these, of_any = (hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)
        return of_these, of_any

    def module(self, inputs: Collection[int], *, takes_sizes: bool, scope: SymbolicScope) -> GraphModule:
        """Build a graph of the function, with its tensors as inputs, then numbers, then sizes.

        ``inputs`` are the positions of the numbers that are inputs, as 0-d tensors; others are constants. If
        the function is several components, nodes have the entry ``example_value`` of ``meta``, made by the
        scope, by which Dynamo's graphs tell what they return.
        """
        body = Graph()
        named = {f"bound{value}": tensor for value, tensor in self.bound.items()}
        nodes = {value: body.get_attr(f"bound{value}") for value in self.inputs if value in self.bound}
        for i, value in enumerate(self.inputs):
            if value not in self.bound:
                nodes[value] = body.placeholder(f"tensor{i}")
        targets = [body.placeholder(f"result{i}") for i in range(len(self.kept))]
        given = {i: body.placeholder(f"number{i}") for i in inputs}
        sizes: Sequence[Any] = self.sizes
        if takes_sizes:
            sizes = [body.placeholder(f"size{i}") for i in range(len(sizes))]
        made = [*nodes.items(), *zip(self.kept, targets, strict=True)]
        if self.returned:
            overwritten = set().union(*(each.overwritten for each in self.operations))
            for value in sorted(overwritten & nodes.keys()):
                nodes[value] = body.call_function(aten.clone.default, (nodes[value],))
        read = {i: body.call_function(aten._local_scalar_dense.default, (n,)) for i, n in given.items()}
        numbers = enumerate(self.numbers)
        numbers_left = iter([read.get(self.shared.get(i, i), number) for i, number in numbers])
        sizes_left = iter(sizes)
        for operation in self.operations:
            arguments = operation.arguments(
                map(nodes.__getitem__, operation.tensors), numbers_left, sizes_left
            )
            node = body.call_function(operation.signature.operator, *arguments)
            for i, value in enumerate(operation.results):
                has_several = operation.signature.returns_several
                nodes[value] = body.call_function(operator.getitem, (node, i)) if has_several else node
        for target, value in zip(targets, self.kept, strict=True):
            body.call_function(aten.copy_.default, (target, nodes[value]))
        body.output(tuple(map(nodes.__getitem__, self.returned)))
        if self.is_together:
            values = self._segment.values
            made += nodes.items()
            with scope.fake_mode:
                examples: dict[Node, Any] = {node: values[value].spec.empty() for value, node in made}
            examples |= zip(read.values(), scope.numbers, strict=True)
            for node in body.nodes:  # an operator that writes returns its first operand
                examples.setdefault(node, examples.get(next(iter(node.all_input_nodes), node)))
                node.meta["example_value"] = examples[node]
        return GraphModule(named, body)
