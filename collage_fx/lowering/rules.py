"""Rules: parts of a step in a form that is the same for equal parts.

Note [One kernel for equal parts]
---------------------------------
A part is written down as a :class:`Rule`: its operations in the order of a walk from its stores, operands as
numbers, constants literally. One kernel serves all parts of a rule, the same function of different tensors.

Where every operation is elementwise and every tensor has one shape and one dense layout, element *i* in
memory of each result depends on element *i* in memory of each operand, whatever the shape. Such a *flat* rule
leaves the shape out: it is compiled for vectors of a symbolic length *n* (2 at least). A printed kernel
(``codegen``) takes addresses and *n*, and is not called from Python (Note [One call for all tensors]).
Inductor's own checks of sizes and strides are off: :mod:`collage_fx.runtime.layouts` checks the arguments of
a step. On a GPU the kernel of a flat rule, or of numbers, is launched once for all its tensors, which it
finds in a table (Note [A kernel over a table], Note [One launch for all tensors]). A flat rule may also have:

* phases, which go by the places of elements in memory: its kernel is given that of the first of its piece;
* blocks of elements with a scale in common (Note [Blocks]): it is compiled for tensors ``[n, 32]`` and scales
  ``[n, 1]``, with n the number of blocks;
* totals, the sum or the mean of all elements, in any order of addition (Note [Sums of a launch]);
* on the host, numbers of rows or columns: Note [Rows and columns].

Other rules (reductions, matrix products, views) name sizes and strides, and serve the tensors that agree in
them. On a GPU they are called for all these tensors at once: Note [Stacks of tensors] in ``stacks.py``.

Note [Rows and columns]
-----------------------
Adafactor keeps a mean for each row and each column of a matrix, and Ranger subtracts the mean of each row. A
flat rule on the host that reads such values takes its elements as a matrix: the leading dimensions are the
rows, the trailing ones the columns. A tensor ``[rows, 1]`` has a number for each row, ``[1, columns]`` for
each column; ``[64, 32, 3, 3]`` and ``[64, 1, 1, 1]`` are 64 rows of 288 columns. All smaller tensors of a
rule, contiguous, must agree on the number of columns, which the kernel is given; ``[1, 1]`` goes with any.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from collage_fx import graph
from collage_fx.codegen import MEAN, TOTAL, has_spelling
from collage_fx.lowering.parts import Part
from collage_fx.numerics import BLOCK, BLOCK_OPERATORS, PHASES
from collage_fx.runtime import HOST, LONGEST_PIECE
from collage_fx.torch_compat import pytree

aten = torch.ops.aten

#: The operators of totals in flat rules, and the kinds of these totals.
TOTALS = {aten.sum.default: TOTAL, aten.mean.default: MEAN}

#: Elements that a sum in a flat rule can count, or 32-bit indices.
LONGEST = 1 << 31


class Symbol(Enum):
    """Placeholder in arguments: for the length, the columns, or the index of the first element."""

    LENGTH = "n"
    COLUMNS = "columns"
    FIRST = "first"

    def __repr__(self) -> str:
        return self.value


class Broadcast(NamedTuple):
    """Repetition of a smaller tensor beside the elements of a larger tensor.

    Attributes:
        of_rows: whether it has a number for each row.
        of_columns: whether it has a number for each column; if neither, it has a single number.
        columns: number of columns of the larger tensor; 0 for any number.
    """

    of_rows: bool
    of_columns: bool
    columns: int


def broadcast(shape: Sequence[int], into: Sequence[int]) -> Broadcast | None:
    """Return how a tensor of one shape is repeated in another shape; None if it is not by rows or columns."""
    padded = (*(1 for _ in range(len(into) - len(shape))), *shape)
    if len(shape) > len(into) or padded == tuple(into):
        return None
    if math.prod(padded) == 1:
        return Broadcast(of_rows=False, of_columns=False, columns=0)
    for k in range(len(into) + 1):
        columns = math.prod(into[k:])
        if padded[:k] == tuple(into[:k]) and math.prod(padded[k:]) == 1:
            return Broadcast(of_rows=True, of_columns=False, columns=columns)
        if math.prod(padded[:k]) == 1 and padded[k:] == tuple(into[k:]):
            return Broadcast(of_rows=False, of_columns=True, columns=columns)
    return None


def common_columns(shapes: Iterable[Sequence[int]], into: Sequence[int]) -> int | None:
    """Return the number of columns that smaller tensors agree on; 0 for any number.

    None if they differ, or one is not repeated by rows or columns.
    """
    kinds = {broadcast(shape, into) for shape in shapes}
    columns = {kind.columns for kind in kinds if kind is not None} - {0}
    return None if None in kinds or len(columns) > 1 else next(iter(columns), 0)


@dataclass(frozen=True)
class Reference:
    """Operand that is the value of an earlier line."""

    line: int


@dataclass(frozen=True)
class Line:
    """Value of a rule: an input (no target) or the result of an operation."""

    target: Any
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, eq=False)
class Rule:
    """Computation of a part, without its tensors: equal parts have equal rules.

    Attributes:
        key: equal for equal rules.
        flat: whether it is elementwise in one dense layout.
        stores: ``(destination, value)`` lines; None is a result, whose memory is a further input.
        operands: nodes of this part that are the rule's inputs, in their order.
        length: number of elements, or blocks, of this part's tensors, if it is flat.
        width: elements per unit of length: 1, or the elements of a block.
        columns: number of columns of a flat rule that reads numbers of rows or columns; else 0.
        independent: whether all inputs are memory, and a flat rule stores into no scalars, or a rule of
            scalars has only scalars.
    """

    key: Hashable
    flat: bool
    lines: tuple[Line, ...]
    stores: tuple[tuple[int | None, int], ...]
    operands: tuple[Node, ...]
    length: int
    width: int
    columns: int
    independent: bool

    @property
    def device(self) -> torch.device:
        """Device of the kernel: that of its tensors, ignoring host scalars."""
        layouts = [line.args for line in self.lines if line.target is None and len(line.args) > 1]
        devices = [device for _, device, *_ in layouts]
        return next((device for device in devices if device != HOST), HOST)

    @property
    def is_tabled(self) -> bool:
        """Whether a kernel over a table is tried."""
        return self.independent and graph.device_facts(self.device).is_launched

    @property
    def is_placed(self) -> bool:
        """Whether a flat rule depends on the indices of its elements, and is given the first index."""
        return self.flat and (self.columns > 0 or any(line.target is PHASES for line in self.lines))

    @property
    def operations(self) -> str:
        """Names of the rule's operators."""
        return ", ".join(sorted({str(line.target) for line in self.lines if line.target is not None}))

    @property
    def first_operand(self) -> int:
        """Kernel's argument behind the length, the index of the first element, and the number of columns."""
        return self.flat + self.is_placed + (self.columns > 0)

    @property
    def totals(self) -> dict[int, int]:
        """Kinds of the totals that a flat rule computes, by the kernel's argument that is the destination."""
        results = [self.lines[value].target for into, value in self.stores if into is None]
        arguments = enumerate(results, self.first_operand + len(self.operands))
        return {i: TOTALS[each] for i, each in arguments if self.flat and each in TOTALS}


def rule_of(part: Part) -> Rule:
    """Return the rule of a part of a graph."""
    return _Writer(part).rule()


def nodes_of(part: Part) -> list[Node]:
    """Return all nodes that a part's stores and results depend on, operands first."""
    found: dict[Node, None] = {}
    roots = [*part.results]
    for store in reversed(part.stores):
        roots += reversed([n for n in store.args[:2] if isinstance(n, Node)])
    stack = [(node, False) for node in roots]
    while stack:
        node, done = stack.pop()
        if node in found:
            continue
        if done or is_input(part, node):
            found[node] = None
            continue
        stack.append((node, True))
        stack += [(operand, False) for operand in reversed(node.all_input_nodes)]
    return list(found)


def is_total(node: Node) -> bool:
    """Return whether a node is the float32 sum, or mean, of all elements of a float32 tensor."""
    if node.target not in (*TOTALS, aten.sum.dim_IntList, aten.mean.dim):
        return False
    operand, value = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return value.dim() == 0 < operand.dim() and operand.dtype is value.dtype is torch.float32


def is_input(part: Part, node: Node) -> bool:
    """Return whether a node is an input of a part."""
    return node.op in ("placeholder", "get_attr") or node in part.given


class _Writer:
    """Walk from the stores of a part back to its inputs."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.nodes = nodes_of(part)
        #: The inputs, in the order of the nodes.
        self.inputs = dict.fromkeys(node for node in self.nodes if is_input(part, node))
        self.written = [*part.results, *(store.all_input_nodes[0] for store in part.stores)]
        computed = (node for node in self.nodes if node not in self.inputs)
        self.has_blocks = any(node.target in BLOCK_OPERATORS for node in computed)
        self.shape = max((v.shape for v in self._elements()), key=torch.Size.numel, default=torch.Size())
        self.on_host = not any(graph.device_facts(value.device).is_launched for value in self._elements())
        self.totals = {value for value in part.results if is_total(value)}
        self.columns = self._columns()
        self.flat = self._is_flat()

    def rule(self) -> Rule:
        numbers = {node: i for i, node in enumerate(self.nodes)}
        lines = tuple(self._line(node, numbers) for node in self.nodes)
        stores = (
            *((numbers[each.all_input_nodes[0]], numbers[graph.stored(each)]) for each in self.part.stores),
            *((None, numbers[value]) for value in self.part.results),
        )
        layouts = () if self.flat else tuple(self._layout(value) for value in self.part.results)
        key = (self.flat, tuple(map(repr, lines)), stores, layouts)
        width = BLOCK if self.has_blocks else 1
        length, columns = (self.shape.numel() // width, self.columns or 0) if self.flat else (0, 0)
        independent = self._is_independent()
        return Rule(key, self.flat, lines, stores, (*self.inputs,), length, width, columns, independent)

    def _elements(self) -> list[Tensor]:
        values = map(graph.tensor_value, self.nodes)
        return [value for value in values if value is not None and value.dim() > 0]

    def _is_flat(self) -> bool:
        of_unit = BLOCK if self.has_blocks else 1
        if not self.shape or not self.shape.numel() or self.shape.numel() % of_unit or self.columns is None:
            return False
        operations = (node for node in self.nodes if node not in self.inputs and node not in self.totals)
        memory = [graph.tensor_value(node) for node in (*self.part.results, *self.inputs)]
        placed = [v for v in memory if v is not None and v.dim() > 0 and not self._is_of_blocks(v)]
        layouts = {order_in_memory(value) for value in placed if value.shape == self.shape}
        return (
            len(layouts) <= 1
            and all(value.is_contiguous() if self.columns else graph.is_dense(value) for value in placed)
            and (not self.totals or self.shape.numel() < (LONGEST if self.on_host else LONGEST_PIECE))
            and all(node.target in BLOCK_OPERATORS or graph.is_elementwise(node) for node in operations)
        )

    def _columns(self) -> int | None:
        """Return the number of columns of a rule that reads numbers of rows or columns.

        0 if all tensors have one shape; None if a smaller tensor is of another kind, or is stored.
        """
        elements = filter(graph.has_elements, self.nodes)
        others = [node for node in elements if node.meta["val"].shape != self.shape]
        smaller = [node for node in others if not self._is_of_blocks(node.meta["val"])]
        if not smaller:
            return 0
        columns = common_columns((node.meta["val"].shape for node in smaller), self.shape)
        constants = set[Node]()
        for node in self.nodes:
            if node not in self.inputs and constants.issuperset(node.all_input_nodes):
                constants.add(node)
        is_printed = (
            self.on_host
            and not self.has_blocks
            and not set(smaller).intersection(self.written)
            and constants.isdisjoint(self.part.results)
            and all(node in self.inputs or node in self.totals or has_spelling(node) for node in self.nodes)
        )
        if columns is None or not is_printed or self.shape.numel() >= LONGEST:
            return None
        return columns or self.shape.numel()

    def _is_independent(self) -> bool:
        are_tensors = all(graph.tensor_value(node) is not None for node in self.inputs)
        if not are_tensors or any(map(graph.may_raise, self.nodes)):
            return False
        if self.flat:
            return not any(graph.is_number(node) and node not in self.totals for node in self.written)
        return all(map(graph.is_number, self.nodes))

    def _is_of_blocks(self, value: Tensor) -> bool:
        """Return whether a tensor has one element for each block of the other tensors."""
        rows = self.shape[0] if self.shape else 1
        return self.has_blocks and value.shape == (rows, self.shape.numel() // (rows * BLOCK))

    def _line(self, node: Node, numbers: dict[Node, int]) -> Line:
        if node in self.inputs:
            return Line(None, self._layout(node))
        args: tuple[Any, ...] = node.args
        kwargs = dict(node.kwargs)
        if self.flat and node in self.totals:
            is_mean = node.target in (aten.mean.default, aten.mean.dim)
            total = aten.mean.default if is_mean else aten.sum.default
            return Line(total, (Reference(numbers[node.all_input_nodes[0]]),))
        if self.flat and not graph.is_number(node):
            kwargs.pop("memory_format", None)
            if node.target is PHASES:
                args = (*args[:2], Symbol.FIRST)
            if (at := graph.size_argument(node.target)) is not None:
                # A constant is repeated along rows and columns.
                size = (1, 1) if self.columns else self._flat_layout(node.meta["val"])[0]
                args = (*args[:at], size, *args[at + 1 :])
        args, kwargs = pytree.tree_map_only(Node, lambda n: Reference(numbers[n]), (args, kwargs))
        return Line(node.target, args, tuple(sorted(kwargs.items())))

    def _layout(self, node: Node) -> tuple[Any, ...]:
        """Return the description of an input: everything that a kernel's code may depend on."""
        value = graph.tensor_value(node)
        if value is None:
            return (type(node.meta["val"]),)
        if self.flat and value.dim() > 0:
            return value.dtype, value.device, *self._flat_layout(value)
        return value.dtype, value.device, tuple(value.shape), tuple(value.stride())

    def _flat_layout(self, value: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the sizes and strides that a tensor has in a flat rule."""
        if self.columns:
            kind = broadcast(value.shape, self.shape)
            columns = Symbol.COLUMNS if kind is None or kind.of_columns else 1
            return (Symbol.LENGTH if kind is None or kind.of_rows else 1, columns), (columns, 1)
        if not self.has_blocks:
            return (Symbol.LENGTH,), (1,)
        width = 1 if self._is_of_blocks(value) else BLOCK
        return (Symbol.LENGTH, width), (width, 1)


def order_in_memory(value: Tensor) -> tuple[tuple[int, int], ...]:
    """Return dimensions of more than one element with their strides: equal for equal orders in memory."""
    if value.numel() == 0:
        return ()
    dimensions = enumerate(zip(value.shape, value.stride(), strict=True))
    return tuple((i, stride) for i, (size, stride) in dimensions if size > 1)
