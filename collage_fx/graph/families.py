"""Relation of a whole step to the graph of one member of each family: Note [One of each family]."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph, GraphModule, Node, map_arg

from collage_fx.graph.nodes import copies_to_inputs, is_copy_to_input, placeholders, tensor_value
from collage_fx.torch_compat import fake_like, pytree, storage_of

#: ``(family, member)`` of operations common to all families.
ONCE: tuple[int | None, int] = (None, 0)


@dataclass(frozen=True)
class Repetition:
    """Map from the *small* graph, with one member of each family, to the whole graph of ``inputs`` inputs.

    Attributes:
        copies: for each input of the small graph, the indices of its copies in the whole graph: an index per
            member of its family, or a single index if the input is common to all families. A number that is
            only read may be the copy of several members.
        owners: for each input of the small graph, its family; None if it is common.
        members: ``(family, member)`` in the order of the whole graph.
        outputs: for each result of the whole graph, ``(index of the small graph's result, member)``.
    """

    inputs: int
    copies: tuple[tuple[int, ...], ...]
    owners: tuple[int | None, ...]
    members: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, inputs: int) -> Repetition:
        """Return the repetition of a whole graph with ``inputs`` inputs: one family with one member."""
        indices = range(inputs)
        return cls(inputs, tuple((index,) for index in indices), (0,) * inputs, ((0, 0),), ())

    @property
    def is_whole(self) -> bool:
        """Whether the small graph is the whole graph."""
        return len(self.members) == 1

    def input_of(self, position: int, member: int) -> int:
        """Return the whole graph's index of a member's copy of an input of the small graph."""
        return self.copies[position][0 if self.owners[position] is None else member]

    def inputs_of(self, family: int, member: int) -> list[int]:
        """Return the whole graph's indices of the inputs that belong to one member."""
        return [self.copies[i][member] for i, owner in enumerate(self.owners) if owner == family]

    def reordered(self, order: Sequence[int]) -> Repetition:
        """Return the repetition whose small graph has its inputs in another order."""
        return replace(
            self, copies=tuple(self.copies[i] for i in order), owners=tuple(self.owners[i] for i in order)
        )

    def extended(self, owned_by: Sequence[int]) -> Repetition:
        """Return the repetition with additional inputs behind the others, in both graphs.

        Args:
            owned_by: for each additional input the earlier input that it belongs to. The additional inputs of
                an input are neighbours, and so are, in the whole graph, those of each of its copies.
        """
        copies: list[list[int]] = [[] for _ in owned_by]
        inputs = itertools.count(self.inputs)
        for position, of_one in itertools.groupby(range(len(owned_by)), owned_by.__getitem__):
            for _, i in itertools.product(self.copies[position], of_one):
                copies[i].append(next(inputs))
        return replace(
            self,
            inputs=next(inputs),
            copies=(*self.copies, *map(tuple, copies)),
            owners=(*self.owners, *(self.owners[position] for position in owned_by)),
        )


def input_name(index: int) -> str:
    """Return the name that AOTAutograd gives to the input at an index."""
    return f"arg{index}_1"


def repeated_graph(gm: GraphModule, repetition: Repetition) -> GraphModule:
    """Build the whole functional graph from the graph of one member of each family.

    A node's ``meta["val"]`` is that of its original in the small graph, but for results that have memory of
    their own: within a family, layouts and dtypes are equal. If the small graph is the whole graph, it is
    returned unchanged.
    """
    if repetition.is_whole:
        return gm
    small = placeholders(gm.graph)
    graph = Graph()
    whole: dict[tuple[Node, int], Node] = {}
    ordered = sorted(
        (index, i, member)
        for i, copies in enumerate(repetition.copies)
        for member, index in enumerate(copies)
    )
    inputs: dict[int, Node] = {}
    for index, i, member in ordered:
        if index not in inputs:
            inputs[index] = graph.placeholder(input_name(index))
            inputs[index].meta["val"] = small[i].meta["val"]
        whole[small[i], member] = inputs[index]
    families = _families_of_nodes(gm.graph, dict(zip(small, repetition.owners, strict=True)))

    def of(node: Node, member: int) -> Node:
        return whole[node, 0 if families[node] is None else member]

    def copy(node: Node, member: int) -> None:
        args, kwargs = map_arg((node.args, node.kwargs), lambda operand: of(operand, member))
        name = re.sub(r"_\d+$", "", node.name)
        copied = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        copied.meta.update(node.meta)
        whole[node, member] = copied

    operations: dict[int | None, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output") and not is_copy_to_input(node):
            operations[families[node]].append(node)
    for family, member in (ONCE, *repetition.members):
        for node in operations[family]:
            copy(node, member)
    stores = copies_to_inputs(gm.graph)
    for _, i, member in ordered:
        if small[i] in stores:
            copy(stores[small[i]], member)
    results = pytree.tree_leaves(gm.graph.output_node().args)
    values = [tensor_value(node) for node in (*small, *results)]
    held = Counter(storage_of(value) for value in values if value is not None)
    for k, member in repetition.outputs:
        value = tensor_value(results[k])
        if value is not None and held[storage_of(value)] == 1:
            whole[results[k], member].meta["val"] = fake_like(value)
    outputs = ((results[k], member) for k, member in repetition.outputs)
    graph.output(tuple(None if node is None else of(node, member) for node, member in outputs))
    return GraphModule(gm, graph)


def _families_of_nodes(graph: Graph, inputs: dict[Node, int | None]) -> dict[Node, int | None]:
    """Return the family of each node of the small graph; None for common nodes.

    A node computed from constants and common numbers alone belongs to the family that reads it, if it is a
    single family.
    """
    families = dict(inputs)
    for node in graph.nodes:
        if node not in families:
            owners = {families[operand] for operand in node.all_input_nodes} - {None}
            families[node] = next(iter(owners), None)
    for node in reversed(graph.nodes):
        if families[node] is None and node.op == "call_function":
            owners = {families[user] for user in node.users}
            families[node] = owners.pop() if len(owners) == 1 else None
    return families
