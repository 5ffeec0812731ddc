"""What was compiled for one of each family, done for all: Note [One of each family] in ``families.py``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from collage_fx.graph import is_copy_to_input, placeholders
from collage_fx.sharing import Call, StepInParts

__all__ = ["Repetition", "input_name", "repeated_graph", "repeated_step"]

#: A family, and a member of it; None and 0 for what is done once for all families.
Turn = tuple[int | None, int]

ONCE: Turn = (None, 0)


@dataclass(frozen=True)
class Repetition:
    """How the graph of one of each family, the *small* one, recurs in the whole graph.

    Attributes:
        inputs: how many the whole graph has.
        copies: for each input of the small graph, the places of what stands for it in the whole one: one for
            each member of its family, a single one if it is common to all families.
        owners: for each input of the small graph, its family; None if it is common.
        turns: ``(family, member)`` in the order of the whole graph.
        outputs: for each result of the whole graph, ``(result of the small graph, member)``.
    """

    inputs: int
    copies: tuple[tuple[int, ...], ...]
    owners: tuple[int | None, ...]
    turns: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]

    def place(self, position: int, member: int) -> int:
        """What stands for an input of the small graph when it is a member's turn."""
        return self.copies[position][0 if self.owners[position] is None else member]

    def reordered(self, order: Sequence[int]) -> Repetition:
        """With the inputs of the small graph in another order."""
        return replace(
            self, copies=tuple(self.copies[i] for i in order), owners=tuple(self.owners[i] for i in order)
        )

    def extended(self, owned_by: Sequence[int]) -> Repetition:
        """With further inputs, behind the others in both graphs.

        Args:
            owned_by: for each of them the earlier input that it belongs to. In the whole graph, too, they
                come in the order of these.
        """
        order = sorted(
            (place, i, member)
            for i, position in enumerate(owned_by)
            for member, place in enumerate(self.copies[position])
        )
        places = {(i, member): self.inputs + n for n, (_, i, member) in enumerate(order)}
        copies = [
            tuple(places[i, member] for member in range(len(self.copies[position])))
            for i, position in enumerate(owned_by)
        ]
        return replace(
            self,
            inputs=self.inputs + len(order),
            copies=(*self.copies, *copies),
            owners=(*self.owners, *(self.owners[position] for position in owned_by)),
        )


def repeated_step(step: StepInParts, repetition: Repetition) -> StepInParts | None:
    """The calls of a step for every member of each family; None if it returns more than new tensors."""
    first_constant = len(repetition.copies)
    first_result = first_constant + len(step.constants)
    calls = _calls_by_family(step, repetition, first_result)
    outputs = [place for place in step.outputs if place is not None and place >= first_result]
    if calls is None or step.numbers or len(outputs) < len(step.outputs):
        return None
    families, owners = calls
    results: dict[tuple[int, int], int] = {}

    def place_of(place: int, member: int) -> int:
        if place < first_constant:
            return repetition.place(place, member)
        if place < first_result:
            return repetition.inputs + place - first_constant
        key = (place, 0 if owners[place] is None else member)
        return results.setdefault(key, repetition.inputs + len(step.constants) + len(results))

    planned = [
        replace(call, places=tuple(place_of(place, member) for place in call.places))
        for family, member in (ONCE, *repetition.turns)
        for call in families[family]
    ]
    return StepInParts(
        repetition.inputs,
        step.constants,
        [step.results[place - first_result] for place, _ in results],
        [],
        planned,
        [place_of(outputs[k], member) for k, member in repetition.outputs],
    )


def _calls_by_family(
    step: StepInParts, repetition: Repetition, first_result: int
) -> tuple[dict[int | None, list[Call]], dict[int, int | None]] | None:
    """The calls of each family, in order, and the family of each result; None if a call is of several.

    A result is made by the first call that names it.
    """
    calls: dict[int | None, list[Call]] = defaultdict(list)
    results: dict[int, int | None] = {}
    for call in step.calls:
        owners = {repetition.owners[place] for place in call.places if place < len(repetition.owners)}
        owners |= {results[place] for place in call.places if place in results}
        owners.discard(None)
        if len(owners) > 1:
            return None
        family = next(iter(owners), None)
        calls[family].append(call)
        for place in call.places:
            if place >= first_result:
                results.setdefault(place, family)
    return calls, results


def input_name(place: int) -> str:
    """What AOTAutograd calls an input."""
    return f"arg{place}_1"


def repeated_graph(gm: GraphModule, repetition: Repetition) -> GraphModule:
    """The whole functional graph.

    Values are those of the small graph: within a family, layouts and dtypes are the same.
    """
    small = placeholders(gm.graph)
    graph = Graph()
    whole: dict[tuple[Node, int], Node] = {}
    ordered = sorted(
        (place, i, member)
        for i, copies in enumerate(repetition.copies)
        for member, place in enumerate(copies)
    )
    for place, i, member in ordered:
        whole[small[i], member] = graph.placeholder(input_name(place))
        whole[small[i], member].meta["val"] = small[i].meta["val"]
    families = _families_of_nodes(gm.graph, dict(zip(small, repetition.owners, strict=True)))

    def of(node: Node, member: int) -> Node:
        return whole[node, 0 if families[node] is None else member]

    def copy(node: Node, member: int) -> None:
        copied = graph.node_copy(node, lambda operand: of(operand, member))
        copied._rename(re.sub(r"_\d+$", "", node.name))
        whole[node, member] = copied

    operations: dict[int | None, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output") and not is_copy_to_input(node):
            operations[families[node]].append(node)
    for family, member in (ONCE, *repetition.turns):
        for node in operations[family]:
            copy(node, member)
    stores = {node.args[0]: node for node in gm.graph.nodes if is_copy_to_input(node)}
    for _, i, member in ordered:
        if small[i] in stores:
            copy(stores[small[i]], member)
    results = pytree.tree_leaves(gm.graph.output_node().args)
    graph.output(tuple(of(results[k], member) for k, member in repetition.outputs))
    return GraphModule(gm, graph)


def _families_of_nodes(graph: Graph, inputs: dict[Node, int | None]) -> dict[Node, int | None]:
    """The family of each node of the small graph; None for what is common.

    What is made of constants and common numbers goes with what reads it.
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
