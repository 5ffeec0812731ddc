"""A rule's graph in terms of one element: eager functions, kinds of values, and when they are computed.

Note [Early and late]
---------------------
The roundings of our operators ask whether a number is finite, which costs as much as the rounding. A kernel
asks once for many elements: it computes what is to be rounded, the *early* values, and notes the largest
magnitude (:attr:`Elements.tested`; that of a rounding, or of its rest, is its operand's or less). What
follows from roundings is *late*. Where an early value is made of a rounded one, as in ``native`` arithmetic,
that rounding is computed as if its operand, whose magnitude is noted, too, were finite.

Note [Two early loops]
----------------------
From a load to a rounded sum of Adam there are 150 cycles, a root and a quotient among them, in a hundred
instructions: a processor, which holds some hundreds, waits for results. In two loops, up to the last quotient
and from there, twice as many elements are under way, which saves a tenth of the time.

Values that are made of scales of blocks, and of which a rounding asks, have a loop of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from collage_fx import numerics
from collage_fx.codegen.functions import CONVERT, Function, expression, function_of
from collage_fx.codegen.spellings import CPP, STORED_AS_BITS, NoSpelling
from collage_fx.graph import made_of, reached, tensor_value

aten = torch.ops.aten

#: Functions that join hi and an error term. Where their results are below a limit they are finite.
JOINS = (numerics.arithmetic.with_lower_half, numerics.with_byte, numerics.arithmetic.with_ulp_parts)

#: Functions whose results are numbers of the dtype that is their last argument.
ON_GRID = (numerics.arithmetic.round_to_storage, numerics.dithered, numerics.dithered_upper)

#: Functions whose results are finite, and no NaN, where their first operands are below a limit.
NO_LARGER = (*ON_GRID, numerics.arithmetic.upper_half, numerics.arithmetic.rest)


def place() -> Tensor:
    """Mark the index of an element in a kernel's tensors."""
    raise NotImplementedError


def largest_magnitude(value: Tensor) -> Tensor:
    """Mark the largest magnitude of a block's elements."""
    raise NotImplementedError


#: Operators that compute quotients, and all operators whose results take a processor many cycles.
QUOTIENTS = (aten.div.Tensor, aten.reciprocal.default, aten.rsqrt.default)
SLOW = (*QUOTIENTS, aten.sqrt.default)

#: Most quotients that one loop hands to the next.
MOST_QUOTIENTS = 2

#: Elements of a chunk without blocks, and blocks of a chunk: see ``kernels.py``.
CHUNK, BLOCKS = 128, 16

#: Operators that add all elements up.
TOTALS = (aten.sum.default, aten.mean.default)


class Kind(Enum):
    """Number of values of a node: a single value, a value for each row, element and so on, or a total.

    What is made of two kinds is of the later one, but of a row's and a column's value it is an element's.
    """

    NUMBER = auto()
    OF_ROW = auto()
    OF_COLUMN = auto()
    OF_BLOCK = auto()
    OF_ELEMENT = auto()
    TOTAL = auto()


#: Kinds of placeholder functions in a graph.
_KINDS: dict[Any, Kind] = {
    place: Kind.OF_ELEMENT,
    largest_magnitude: Kind.OF_BLOCK,
    **dict.fromkeys(TOTALS, Kind.TOTAL),
}


class Store(NamedTuple):
    """Value that is stored into an input."""

    into: Node
    value: Node

    @property
    def is_of_halves(self) -> bool:
        """Whether it rounds to float16, which a function does for many elements."""
        return self.into.meta["val"].dtype is torch.float16 and is_rounding(self.value)

    @property
    def is_apart(self) -> bool:
        """Whether a separate loop, or a function, writes the stored values."""
        return self.is_of_halves or self.into.meta["val"].dtype.itemsize == 1


class Elements:
    """Values of a rule's graph.

    Args:
        graph: graph of the rule: placeholders, operations, ``copy_`` into placeholders; it is edited.
        width: elements per unit of its length: 1, or the elements of a block; 0 for a rule of scalars.
        writes_roundings: whether a conversion to a low-precision float gets an operand that is rounded: where
            the conversion itself does not round.

    Attributes:
        stores: stores of elements, of values per block, and of scalars.
        totals: stores of the sums of all elements, of which the caller makes sums and means. A rule of
            scalars has no elements: the sum of a number has no spelling.
        tested: elements' values whose magnitude tells whether roundings need to ask for infinity and NaN.
        early: elements' values that are computed before that is known.
        functions: C++ definitions of the functions that statements call, by name.
    """

    def __init__(self, graph: Graph, width: int, *, writes_roundings: bool = True) -> None:
        self.graph, self.width = graph, width
        _Rewriter(graph, writes_roundings=writes_roundings).run()
        inputs = graph.find_nodes(op="placeholder")
        self.inputs = [node for node in inputs if isinstance(node.meta["val"], Tensor)]
        copies: list[Any] = list(graph.find_nodes(op="call_function", target=aten.copy_.default))
        stores = [Store(*copy.args) for copy in copies]
        self.totals = [store for store in stores if width and store.value.target in TOTALS]
        self.stores = [store for store in stores if store not in self.totals]
        self.written = {store.into for store in stores}
        self._total_inputs = {store.into for store in self.totals}
        self.nodes = [node for node in graph.nodes if node.op in ("placeholder", "call_function")]
        self.functions: dict[str, str] = {}
        self._names: dict[Node, str] = {}
        self.kinds: dict[Node, Kind] = {}
        for node in self.nodes:
            self.kinds[node] = self._kind(node)
        self.is_matrix = not {Kind.OF_ROW, Kind.OF_COLUMN}.isdisjoint(self.kinds.values())
        roots = [root for node in self.nodes if (root := self._root_of_test(node)) is not None]
        self.tested = list(dict.fromkeys(roots))
        self.largest = [node for node in self.nodes if node.target is largest_magnitude]
        rounded = [root for root in self.tested if root.target not in JOINS]
        self.early = self._early(self.in_blocks) | self._early(rounded, behind_scales=True)

    def name_of(self, node: Node) -> str:
        """Return the C++ name of a value; an input is its pointer, with ``_0`` for a single number."""
        if node.op == "placeholder":
            return f"{node.name}_0"
        return self._names.setdefault(node, f"t{len(self._names)}")

    @property
    def chunk(self) -> int:
        """Number of elements that a kernel goes through at a time."""
        return BLOCKS * self.width if self.width > 1 else CHUNK

    @property
    def in_blocks(self) -> list[Node]:
        """Values whose largest magnitudes are :attr:`largest`."""
        return [operand_of(node) for node in self.largest]

    def cut(self, wanted: Sequence[Node]) -> tuple[list[Node], list[Node], list[Node]]:
        """Divide early values among two loops: Note [Two early loops].

        Returns:
            the quotients that the first loop hands to the second, none if there is no second one; the values
            that the first loop computes, and those of the second.
        """
        needed = self._early(wanted)
        slow = [node for node in self.nodes if node in needed and node.target in SLOW]
        last = [node for node in slow if not self.made_of([node], slow)]
        second = made_of(*self.made_of(last, wanted), up_to=last).difference(last)
        is_worth_it = any(node.target is numerics.dithered_sum for node in second)
        is_apart = all(node.target in QUOTIENTS for node in last)
        is_slow = any(node.target in SLOW for node in second)
        if is_slow or not (is_worth_it and is_apart and len(last) <= MOST_QUOTIENTS):
            return [], list(wanted), []
        return last, [node for node in wanted if node not in second], [n for n in wanted if n in second]

    def made_of(self, values: Sequence[Node], among: Iterable[Node]) -> set[Node]:
        """Return the nodes that are computed from some values, among some nodes."""
        return reached(values, lambda node: node.users).intersection(among)

    def of_kind(self, kind: Kind, nodes: Iterable[Node]) -> list[Node]:
        """Return the nodes of a kind, among some nodes."""
        return [node for node in nodes if self.kinds[node] is kind]

    def _kind(self, node: Node) -> Kind:
        if self.width == 0:
            return Kind.NUMBER
        if node.op == "placeholder":
            value = node.meta["val"]
            if node in self._total_inputs:
                return Kind.TOTAL
            if not isinstance(value, Tensor) or value.dim() == 0:
                return Kind.NUMBER
            if value.dim() == 2 and 1 in tuple(value.shape):
                if self.width > 1:
                    return Kind.OF_BLOCK
                rows, columns = (size != 1 for size in value.shape)
                return Kind.OF_ROW if rows else Kind.OF_COLUMN if columns else Kind.NUMBER
            return Kind.OF_ELEMENT
        if node.target is aten.copy_.default:
            return self.kinds[operand_of(node)]
        if node.target in _KINDS:
            return _KINDS[node.target]
        kinds = [self.kinds[operand] for operand in node.all_input_nodes]
        if {Kind.OF_ROW, Kind.OF_COLUMN}.issubset(kinds):
            return Kind.OF_ELEMENT
        return max(kinds, default=Kind.NUMBER, key=lambda kind: kind.value)

    def _root_of_test(self, node: Node) -> Node | None:
        """Return the value whose magnitude decides a function's test for infinity and NaN."""
        function = function_at(node)
        if function is None or not function.tests or self.kinds[node] is not Kind.OF_ELEMENT:
            return None
        value = node if node.target in JOINS else operand_of(node)
        # A value that is finite if its first operand, or that operand's, is below a limit.
        while value.target in NO_LARGER or (value.target in JOINS and operand_of(value).target in NO_LARGER):
            value = operand_of(value)
        return value if self.kinds[value] is Kind.OF_ELEMENT else None

    def _early(self, wanted: Sequence[Any], *, behind_scales: bool = False) -> set[Node]:
        """Return elements' values that values are made of, and these; ``behind_scales``: of scales, too."""
        found = made_of(*wanted)
        if not (behind_scales or found.isdisjoint(self.largest)):
            raise NoSpelling("a block's scale that other scales are made of")
        return set(self.of_kind(Kind.OF_ELEMENT, found))

    def kept(self, late: Iterable[Any], early: Collection[Node]) -> list[Node]:
        """Return the early values that late values are made of, except values that are cheap to recompute."""
        kept = {node for node in early if not _is_cheap(node)}
        needed = kept & made_of(*late, up_to={*kept, *self.largest})
        return [node for node in self.nodes if node in needed]

    def is_at_hand(self, node: Node, known: Collection[Node]) -> bool:
        """Return whether a value is one quick operation on values that are known or cheap to recompute."""
        operands = self.of_kind(Kind.OF_ELEMENT, node.all_input_nodes)
        return node.target not in SLOW and all(each in known or _is_cheap(each) for each in operands)


def _is_cheap(node: Node) -> bool:
    return node.op == "placeholder" or node.target is place or is_load(node)


def has_spelling(node: Node) -> bool:
    """Return whether printed C++ has an expression for an operation, as far as its operands tell.

    An operation whose result is no tensor (a list of tensors, a size) has none.
    """
    if node.target in (*numerics.ELEMENTWISE, *numerics.PLACED, *numerics.BLOCK_OPERATORS):
        return True
    result = tensor_value(node)
    if result is None:
        return False
    operands = dict.fromkeys(node.all_input_nodes, "x")
    try:
        if is_rounding(node):
            return operand_of(node).meta["val"].dtype in (torch.float32, node.args[1])
        expression(node, operands, CPP, is_number=result.dim() == 0)
    except NoSpelling:
        return False
    return True


def operand_of(node: Node) -> Node:
    """Return the first operand of an operation."""
    operand = node.args[0]
    assert isinstance(operand, Node)
    return operand


def function_at(node: Node) -> Function | None:
    """Return the C++ function that a node calls; None if it is no call of an eager function.

    Raises:
        NoSpelling: the function has none.
    """
    target: Any = node.target
    if target in (place, largest_magnitude) or not hasattr(target, "__code__"):
        return None
    tensors = [arg for arg in node.args if isinstance(arg, Node)]
    dtypes = tuple(arg.meta["val"].dtype for arg in tensors)
    return function_of(CPP, target, dtypes, tuple(node.args[len(tensors) :]))


def is_read(node: Node) -> bool:
    """Return whether the elements of an input are read, and not only overwritten."""
    return any(user.target is not aten.copy_.default or user.args[1] is node for user in node.users)


def is_load(node: Node) -> bool:
    """Return whether a node is the conversion of an input."""
    return node.target is CONVERT and operand_of(node).op == "placeholder"


def reads_half(node: Node) -> bool:
    """Return whether a node converts a float16 input to float32."""
    dtypes = torch.float16, torch.float32
    return is_load(node) and (operand_of(node).meta["val"].dtype, node.meta["val"].dtype) == dtypes


def is_rounding(node: Node) -> bool:
    """Return whether a node converts to a low-precision float."""
    return node.target is CONVERT and node.args[1] in STORED_AS_BITS


def _is_on_grid(value: Any, dtype: torch.dtype) -> bool:
    """Return whether a float32 value is known to be a number of a low-precision dtype."""
    if value.target is numerics.arithmetic.upper_half:
        return dtype is torch.bfloat16
    if value.target in ON_GRID:
        return bool(value.args[-1] is dtype)
    if value.target is CONVERT:
        return bool(value.args[0].meta["val"].dtype is dtype)
    return value.target in (aten.neg.default, aten.abs.default) and _is_on_grid(value.args[0], dtype)


class _Rewriter:
    """Replacement of our operators by calls of their eager functions, with roundings written out."""

    def __init__(self, graph: Graph, *, writes_roundings: bool) -> None:
        self.graph, self.writes_roundings = graph, writes_roundings

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "call_function":
                with self.graph.inserting_before(node):
                    made = self._replacement(node)
                if made is not None:
                    node.replace_all_uses_with(made)
                    self.graph.erase_node(node)
        self._join_equal()
        self.graph.eliminate_dead_code()

    def _join_equal(self) -> None:
        known: dict[Any, Node] = {}
        for node in list(self.graph.nodes):
            if node.op == "call_function" and node.target is not aten.copy_.default:
                first = known.setdefault((node.target, str(node.args), str(node.kwargs)), node)
                if first is not node:
                    node.replace_all_uses_with(first)
                    self.graph.erase_node(node)

    def _call(self, target: Any, args: Sequence[Any], like: Node, dtype: torch.dtype = torch.float32) -> Node:
        made = self.graph.call_function(target, tuple(args))
        made.meta["val"] = like.meta["val"].new_empty(like.meta["val"].shape, dtype=dtype)
        return made

    def _replacement(self, node: Node) -> Node | None:
        target, value = node.target, node.meta["val"]
        if not isinstance(value, Tensor):
            raise NoSpelling(f"{getattr(target, '__name__', target)} of integers that are no tensors")
        dtype = value.dtype
        args: tuple[Any, ...] = node.args
        if target in numerics.ELEMENTWISE:
            return self._call(numerics.ELEMENTWISE[target], args, node, dtype)
        if target in numerics.PLACED:
            at = self._call(place, (), node, dtype)
            return self._call(numerics.PLACED[target], (at, *args[1:]), node, dtype)
        if target is numerics.BLOCK_VALUES:
            codes, scales, *of_kind = args
            unit = self._call(numerics.block_unit, (scales, *of_kind), scales)
            return self._call(numerics.number_of_code, (codes, unit, *of_kind), node, dtype)
        if target is numerics.BLOCK_SCALES:
            value, _, is_signed = args
            largest = self._call(largest_magnitude, (value,), node)
            root = largest if is_signed else self._root(largest)
            return self._call(numerics.block_scale, (root,), node, dtype)
        if target is numerics.BLOCK_CODES:
            value, scales, phases, _, *of_kind = args
            (_, is_signed) = of_kind
            units = self._call(numerics.units_of_block, (scales, *of_kind), scales)
            most = self._call(numerics.most_of_block, (scales, *of_kind), scales)
            given = (value if is_signed else self._root(value), units, most, phases, *of_kind)
            return self._call(numerics.code_of_number, given, node, dtype)
        if self.writes_roundings and is_rounding(node) and not _is_on_grid(args[0], dtype):
            if (source := args[0].meta["val"].dtype) is not torch.float32:
                raise NoSpelling(f"a rounding of {source} to {dtype}")
            node.update_arg(0, self._call(numerics.arithmetic.round_to_storage, (args[0], dtype), args[0]))
        return None

    def _root(self, value: Node) -> Node:
        """Return the square root of a value, which other nodes may compute, too."""
        with self.graph.inserting_after(value):
            return self._call(aten.sqrt.default, (value,), value)
