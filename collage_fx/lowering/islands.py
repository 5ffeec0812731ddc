"""Division of a part into flat parts and parts with reductions or matrix products, which Inductor compiles.

Note [Islands]
--------------
Inductor's C++ has no vectors for the bits of a float, and drops roundings. So a part that has a reduction, a
product of matrices or a function without a spelling is cut where our operators begin and end:

* A value is *printable* if printed C++ computes it for each element: an elementwise operation that has a
  spelling, of tensors of one shape and one dense layout (its *space*), or of numbers. In a contiguous space
  it may read values of rows or columns, which are of another space (Note [Rows and columns]).
* All else are *islands*. Inductor compiles them, of plain arithmetic alone.

Values have *levels*: even those of printable values, odd those of islands, not below those of their operands.
Values of one level and space are a part, which reads results of lower levels. What crosses over gets memory:

* each value of an island that a printed part reads, or an island of a higher level;
* each printable value that is one of rows or columns to a printed part;
* each printable value that an island reads, if our operators are behind it. Others are computed in the island
  once more, and by printed parts all printable values: that costs no memory, and the bits are the same.

On a GPU a part is cut so that its elementwise work is launched once for all tensors (Note [One launch for all
tensors]), and islands are called for stacks of tensors (Note [Stacks of tensors]). Our operators may be in
islands there, and a value is printable if it is elementwise, of one layout, and not between two islands:
Newton-Schulz iterations are one island. No value is computed twice but numbers. A number that is made of an
island's is a part of its own.

Soundness. Inputs are stored by parts of the last level alone, each of which reads inputs of its own space,
inputs that are not stored, numbers, and results; numbers are stored after all else. What is stored in no
dense layout, or another than its own, is computed before, and then copied by Inductor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from torch.fx import Node

from collage_fx import graph
from collage_fx.codegen import has_spelling
from collage_fx.lowering.elementary import OUR_OPERATORS
from collage_fx.lowering.parts import Part
from collage_fx.lowering.rules import common_columns, is_input, is_total, nodes_of, order_in_memory, rule_of
from collage_fx.numerics import BLOCK_OPERATORS

#: Space of scalars.
NUMBERS = "numbers"

#: Space of constants, which have no layout.
ANY = "any"


def cut(part: Part) -> list[Part]:
    """Cut a part into flat parts and islands, in a valid order.

    A part that is flat or compiled as a whole is left as it is.
    """
    rule = rule_of(part)
    found = _Cut(part, on_device=graph.device_facts(rule.device).is_launched)
    is_whole = not found.has_ours or (rule.independent and not found.islands)
    return [part] if is_whole else found.parts()


class _Cut:
    """Spaces and levels of a part's values, and the values that cross from level to level."""

    def __init__(self, part: Part, *, on_device: bool) -> None:
        self._part, self._on_device = part, on_device
        self._nodes = nodes_of(part)
        self._order = {node: i for i, node in enumerate(self._nodes)}
        self._written = {store.all_input_nodes[0] for store in part.stores}
        self._space: dict[Node, Hashable | None] = {}
        #: Numbers of columns of the spaces in which values of rows or columns are read.
        self._columns: dict[Hashable, int] = {}
        self._is_printable: dict[Node, bool] = {}
        #: Levels of values; of a printable value that islands compute once more, that of its latest island.
        self._level: dict[Node, int] = {}
        self._inlined: dict[Node, int] = {}
        for node in self._nodes:
            space = None if self._is_input(node) else self._space_of_printable(node)
            self._is_printable[node] = space is not None
            is_number_of_part = not self._is_input(node) and self._is_summed(node)
            self._space[node] = NUMBERS if is_number_of_part else _layout(node) if space is None else space
        if on_device:
            self._leave_to_inductor()
        for node in self._nodes:
            self._place(node)
        #: Values that Inductor computes.
        self.islands = [node for node in self._nodes if self._is_island(node)]
        #: Whether a printable value is the result of one of our operators.
        self.has_ours = any(node.target in OUR_OPERATORS for node in self._nodes)
        self._kept: set[Node] = set()

    def parts(self) -> list[Part]:
        """Return the parts, in an order in which they can run."""
        last = max(self._level.values(), default=0)
        last += last % 2
        stores: dict[Hashable | None, list[Node]] = defaultdict(list)
        for store in self._part.stores:
            stores[self._space_of_store(store)].append(store)
        results: dict[tuple[int, Hashable | None], list[Node]] = defaultdict(list)
        for value in self._part.results:
            if self._is_island(value):
                self._keep(value)
            else:
                results[last, self._space[value]].append(value)
                self._keep_behind(value)
        for store in self._part.stores:
            self._keep_behind(graph.stored(store))
        for value in sorted(self._kept, key=self._order.__getitem__):
            level = self._level[value]
            if self._is_summed(value):
                results[level - 1, self._space[value.all_input_nodes[0]]].append(value)
            else:
                results[level, None if level % 2 else self._space[value]].append(value)
        of_last = dict.fromkeys([*stores, *(space for level, space in results if level == last)])
        spaces = sorted(of_last, key=lambda space: (space is NUMBERS, space is None))
        keys = sorted((key for key in results if key[0] < last), key=lambda key: key[0])
        return [
            *(self._part_of(level, [], results[level, space]) for level, space in keys),
            *(self._part_of(last + (space is None), stores[space], results[last, space]) for space in spaces),
        ]

    def _part_of(self, level: int, stores: Sequence[Node], results: Sequence[Node]) -> Part:
        """Make a part that is given the values of lower levels that it reads."""
        lower = {value for value in self._kept if self._level[value] < level and value not in results}
        part = Part(tuple(stores), tuple(results), frozenset({*self._part.given, *lower}))
        return replace(part, given=part.given & set(nodes_of(part)))

    def _leave_to_inductor(self) -> None:
        """Make islands of the printable values that an island is computed from and that read an island."""
        islands = [node for node in self._nodes if self._is_island(node) and not self._is_summed(node)]
        behind = graph.reached(islands, lambda node: self._order.keys() & node.users.keys())
        for node in behind & graph.reached(islands, self._computed_from):
            self._is_printable[node] = False
            self._space[node] = _layout(node)

    def _place(self, node: Node) -> None:
        if self._is_input(node):
            self._inlined[node] = 0
            return
        if self._is_summed(node):
            level = self._level.get(node.all_input_nodes[0], 0)
            self._level[node] = self._inlined[node] = level + level % 2 + 1
            return
        operands = node.all_input_nodes
        if not self._is_printable[node]:
            levels = [self._inlined.get(each, self._level.get(each, 0) | 1) for each in operands]
            self._level[node] = self._inlined[node] = max(levels, default=0) | 1
            return
        smaller = self._broadcast(node)
        levels = [
            self._level[each] + (each in smaller or (self._is_hoisted(each) and not graph.is_number(node)))
            for each in operands
            if each in self._level
        ]
        self._level[node] = max((level + level % 2 for level in levels), default=0)
        may_inline = graph.is_number(node) if self._on_device else node.target not in OUR_OPERATORS
        if may_inline and all(operand in self._inlined for operand in operands):
            self._inlined[node] = max((self._inlined[operand] for operand in operands), default=0)

    def _is_hoisted(self, node: Node) -> bool:
        """Return whether a number has a part of its own: on a device, a number made of an island's values."""
        is_printable_number = self._is_printable[node] and self._space[node] is NUMBERS
        return self._on_device and is_printable_number and self._level[node] > 0

    def _is_input(self, node: Node) -> bool:
        return is_input(self._part, node)

    def _is_island(self, node: Node) -> bool:
        return not self._is_printable[node] and not self._is_input(node)

    def _space_of_printable(self, node: Node) -> Hashable | None:
        """Return the space of a printable value; None if the value is an island."""
        value = graph.tensor_value(node)
        values = [graph.tensor_value(operand) for operand in node.all_input_nodes]
        if value is None or None in values or graph.may_raise(node):
            return None
        if not self._on_device and not has_spelling(node):
            return None
        elements = [each for each in node.all_input_nodes if not graph.is_number(each)]
        if graph.is_number(node):
            return None if elements else NUMBERS
        is_of_blocks = node.target in BLOCK_OPERATORS
        if is_of_blocks:
            elements = elements[:1]
        elif not graph.is_elementwise(node):
            return None
        elif smaller := self._broadcast(node):
            return None if self._on_device else self._space_of_matrix(node, smaller)
        elif any(each.meta["val"].shape != value.shape for each in elements):
            return None
        spaces = {self._space[each] for each in elements} - {ANY}
        # A copy may have another order in memory than what it copies.
        is_moved = not is_of_blocks and not spaces <= {_layout(node)}
        return ANY if not spaces else spaces.pop() if len(spaces) == 1 and not is_moved else None

    def _broadcast(self, node: Node) -> list[Node]:
        """Return the operands, but for constants, that are smaller than an elementwise operation's result."""
        if not graph.is_elementwise(node) or graph.is_number(node):
            return []
        shape = node.meta["val"].shape
        elements = [each for each in node.all_input_nodes if not graph.is_number(each)]
        return [each for each in elements if each.meta["val"].shape != shape and self._space[each] is not ANY]

    def _space_of_matrix(self, node: Node, smaller: Sequence[Node]) -> Hashable | None:
        """Return the space of a printable value of a matrix that is made of values of rows or columns."""
        value = node.meta["val"]
        columns = common_columns((each.meta["val"].shape for each in smaller), value.shape)
        others = [each for each in node.all_input_nodes if each not in smaller and not graph.is_number(each)]
        space = _layout(node)
        if (
            columns is None
            or not value.is_contiguous()
            or not all(each.meta["val"].is_contiguous() for each in smaller)
            or not self._written.isdisjoint(smaller)
            or any(self._space[each] not in (space, ANY) for each in others)
        ):
            return None
        agrees = not columns or self._columns.setdefault(space, columns) == columns
        return space if agrees else None

    def _space_of_store(self, store: Node) -> Hashable | None:
        """Return the space of the part that makes a store; None if Inductor makes the store."""
        into, value = store.all_input_nodes[0], graph.stored(store)
        is_of_space = self._is_printable[value] and value.target in BLOCK_OPERATORS
        if is_of_space or self._space[value] in (ANY, _layout(into)):
            return self._space[value] if self._space[value] is not ANY else _layout(into)
        if not self._is_input(value):
            self._keep(value)
        return None

    def _keep(self, value: Node) -> None:
        """Give memory to a value, and to the operands that cross a level."""
        if value not in self._kept:
            self._kept.add(value)
            self._keep_behind(value)

    def _keep_behind(self, root: Node) -> None:
        """Give memory to the values that cross a level on the way to a value."""
        if self._is_island(root) and root not in self._kept:
            self._keep(root)
            return

        def crosses(node: Node) -> bool:
            return node is not root and not self._is_input(node) and self._crosses(node, root)

        behind = graph.reached([root], lambda node: () if crosses(node) else self._computed_from(node))
        for node in filter(crosses, behind):
            self._keep(node)

    def _computed_from(self, node: Node) -> Iterator[Node]:
        return iter(() if self._is_input(node) else node.all_input_nodes)

    def _is_summed(self, node: Node) -> bool:
        """Return whether a value is the total of a printable value, computed in the same part."""
        if node.op != "call_function" or not is_total(node):
            return False
        return self._space[node.all_input_nodes[0]] not in (None, ANY)

    def _crosses(self, node: Node, root: Node) -> bool:
        """Return whether a value is given to the part that computes ``root``."""
        if not self._is_island(root) or self._is_summed(root):
            space = self._space[root.all_input_nodes[0] if self._is_summed(root) else root]
            if self._is_hoisted(node) and space is not NUMBERS:
                return True
            return self._is_island(node) or self._space[node] not in (space, NUMBERS, ANY)
        if self._is_island(node):
            return self._level[node] < self._level[root]
        return node not in self._inlined


def _layout(node: Node) -> Hashable | None:
    """Return the space of a tensor in memory; None if its layout is not dense."""
    value = graph.tensor_value(node)
    if value is None or not value.numel() or not graph.is_dense(value):
        return None
    return (tuple(value.shape), order_in_memory(value)) if value.dim() else NUMBERS
