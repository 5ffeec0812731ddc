"""Relation of a whole step to the graph of one member of each family: Note [One of each family]."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from collage_fx.graph import nodes
from collage_fx.graph.operator_facts import first_not_elementwise, size_argument
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
        shapes: for each family the shape of each member, if these differ; else nothing. The tensors of a
            member, but scalars, have its shape, are contiguous, and are computed element by element.
    """

    inputs: int
    copies: tuple[tuple[int, ...], ...]
    owners: tuple[int | None, ...]
    members: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    shapes: tuple[tuple[torch.Size, ...], ...] = ()

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

    def of_member(self, value: Any, family: int | None, member: int) -> Any:
        """Return the value of a member for that of its family's first member, in the small graph."""
        shape = self.shape_of(family, member)
        if shape is None or not isinstance(value, Tensor) or not value.dim():
            return value
        return fake_like(value, shape)

    def copies_of(self, position: int, value: Any) -> Iterator[tuple[int, Any]]:
        """Yield index and value of each copy of an input of the small graph that has a value."""
        for member, index in enumerate(self.copies[position]):
            yield index, self.of_member(value, self.owners[position], member)

    def shape_of(self, family: int | None, member: int) -> torch.Size | None:
        """Return the shape of a member; None if all members of its family have the layouts of the first."""
        shapes = self.shapes[family] if self.shapes and family is not None else ()
        return shapes[member] if shapes else None

    def inputs_of(self, family: int, member: int) -> list[int]:
        """Return the whole graph's indices of the inputs that belong to one member."""
        return [self.copies[i][member] for i, owner in enumerate(self.owners) if owner == family]

    def reordered(self, order: Sequence[int]) -> Repetition:
        """Return the repetition whose small graph has its inputs in another order."""
        copies, owners = self.copies, self.owners
        return replace(self, copies=tuple(copies[i] for i in order), owners=tuple(owners[i] for i in order))

    def extended(self, owned_by: Sequence[int]) -> Repetition:
        """Return the repetition with additional inputs behind the others, in both graphs.

        ``owned_by``: for each additional input the earlier input that it belongs to. Those of an input are
        neighbours, and so are, in the whole graph, those of each of its copies.
        """
        copies: list[list[int]] = [[] for _ in owned_by]
        inputs = itertools.count(self.inputs)
        for position, of_one in itertools.groupby(range(len(owned_by)), owned_by.__getitem__):
            for _, i in itertools.product(self.copies[position], of_one):
                copies[i].append(next(inputs))
        owners = (*self.owners, *(self.owners[position] for position in owned_by))
        return replace(self, inputs=next(inputs), copies=(*self.copies, *map(tuple, copies)), owners=owners)


def input_name(index: int) -> str:
    """Return the name that AOTAutograd gives to the input at an index."""
    return f"arg{index}_1"


def repeated_graph(gm: GraphModule, repetition: Repetition) -> GraphModule:
    """Build the whole functional graph from the graph of one member of each family.

    A node's ``meta["val"]`` is that of its original in the small graph, but for members of other shapes, and
    for results that have memory of their own. A small graph that is the whole graph is returned unchanged.
    """
    if repetition.is_whole:
        return gm
    small = nodes.placeholders(gm.graph)
    graph = Graph()
    whole: dict[tuple[Node, int], Node] = {}
    pairs = ((i, *each) for i, copies in enumerate(repetition.copies) for each in enumerate(copies))
    ordered = sorted((index, i, member) for i, member, index in pairs)
    inputs: dict[int, Node] = {}
    for index, i, member in ordered:
        if index not in inputs:
            inputs[index] = graph.placeholder(input_name(index))
            value = repetition.of_member(small[i].meta["val"], repetition.owners[i], member)
            inputs[index].meta["val"] = value
        whole[small[i], member] = inputs[index]
    families = _families_of_nodes(gm.graph, dict(zip(small, repetition.owners, strict=True)))

    def of(node: Node, member: int) -> Node:
        return whole[node, 0 if families[node] is None else member]

    def copy(node: Node, member: int) -> None:
        args, kwargs = map_arg((node.args, node.kwargs), lambda operand: of(operand, member))
        name = re.sub(r"_\d+$", "", node.name)
        shape = repetition.shape_of(families[node], member) if nodes.has_elements(node) else None
        if shape is not None and (at := size_argument(node.target)) is not None:
            args = (*args[:at], [*shape], *args[at + 1 :])
        copied = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        copied.meta.update(node.meta)
        if "val" in node.meta:
            copied.meta["val"] = repetition.of_member(node.meta["val"], families[node], member)
        whole[node, member] = copied

    operations: dict[int | None, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output") and not nodes.is_copy_to_input(node):
            operations[families[node]].append(node)
    for family, member in (ONCE, *repetition.members):
        for node in operations[family]:
            copy(node, member)
    stores = nodes.copies_to_inputs(gm.graph)
    for _, i, member in ordered:
        if small[i] in stores:
            copy(stores[small[i]], member)
    results = pytree.tree_leaves(gm.graph.output_node().args)
    values = [nodes.tensor_value(node) for node in (*small, *results)]
    held = Counter(storage_of(value) for value in values if value is not None)
    for k, member in repetition.outputs:
        value = nodes.tensor_value(results[k])
        if value is not None and held[storage_of(value)] == 1:
            made = whole[results[k], member]
            made.meta["val"] = fake_like(made.meta["val"])
    outputs = ((results[k], member) for k, member in repetition.outputs)
    graph.output(tuple(None if node is None else of(node, member) for node, member in outputs))
    return GraphModule(gm, graph)


def first_of_one_size(graph: Graph, repetition: Repetition) -> Node | None:
    """Return the first operation that is not elementwise, in families whose members differ in shape."""
    if not any(repetition.shapes):
        return None
    families = _families_of_nodes(graph, dict(zip(nodes.placeholders(graph), repetition.owners, strict=True)))
    return first_not_elementwise(node for node in graph.nodes if repetition.shape_of(families[node], 0))


def _families_of_nodes(graph: Graph, inputs: dict[Node, int | None]) -> dict[Node, int | None]:
    """Return the family of each node of the small graph; None for common nodes.

    A node computed from constants and common numbers alone belongs to the only family that reads it.
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
