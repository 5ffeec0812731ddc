"""Division of a step's graph into parts that can run in sequence.

Note [Parts of a step]
----------------------
The update of one parameter hardly ever needs that of another, so the graph of a step falls apart into as many
pieces as there are parameters, and most of them are the same piece over other tensors. A *part* is a set of
stores and results together with everything they are computed from:

* Two values belong to one part if one is computed from the other.
* So do all stores into a tensor and all reads of it: whether a read sees the old value does not depend on the
  order in which parts run. Tensors that are only read (gradients) join nothing.
* *Free* values are copied into each part that reads them: numbers computed from numbers that the step does
  not change (a scheduled ``lr`` and what follows from it), and tensors made of constants.
* Numbers computed from numbers that the step changes (a step counter's bias correction) are a part of their
  own, whose results are given to what reads them. So are numbers that are to be computed once
  (``hoist-scalars``) from numbers that the step does not change, those of one input together: sixty groups
  with an ``lr`` each are sixty equal parts. What is left is about elements alone, and may be computed for a
  piece of the tensors at a time (Note [One call for all tensors]).

Soundness. Parts read only inputs that no other part stores, values that they compute themselves, and results
of parts that have run before. So any topological order of the parts computes what the graph does. (Inputs
that share memory, one of them stored, are one input by AOTAutograd.) Results get memory of their own.
:func:`parts_of` returns a reason to lower the graph whole where a result is to share memory, where there is
no such order, and where something is not a function of its operands (random numbers, asserts).
"""

from __future__ import annotations

import operator
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from collage_fx import graph
from collage_fx.graph import Reason
from collage_fx.torch_compat import OpOverload, pytree, schema_of, storage_of

#: Kinds of nodes that are in no part, unless they are inputs that are stored into.
OUTSIDE = ("placeholder", "get_attr", "output")


@dataclass(frozen=True)
class Part:
    """Stores and results of a graph that are computed together.

    Attributes:
        stores: ``copy_`` nodes of the epilogue, in an order that equal parts have in common.
        results: values that other parts read or that the graph returns, likewise.
        given: results of other parts that this one reads.
    """

    stores: tuple[Node, ...]
    results: tuple[Node, ...]
    given: frozenset[Node]


def parts_of(step: Graph) -> list[Part] | Reason:
    """Return the parts of a functional graph with ``copy_`` epilogue, in a valid order."""
    for node in step.nodes:
        if not _is_a_function(node):
            return Reason.at(node, "it is not a function of its operands")
    inputs = {_memory(node) for node in graph.placeholders(step)}
    returned = [_memory(node) for node in dict.fromkeys(_returned(step))]
    if len(set(returned)) < len(returned) or not inputs.isdisjoint(returned):
        return Reason("it returns a view of an input, or two of one memory")
    return _in_order(step)


def _is_a_function(node: Node) -> bool:
    """Return whether a node is an input, the output, or a function that makes new tensors."""
    if node.op in ("placeholder", "get_attr"):
        return graph.tensor_value(node) is not None or graph.is_number(node)
    if node.op == "output" or graph.is_copy_to_input(node):
        return True
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        # Indexing of several results, and Python arithmetic on symbolic numbers.
        return node.target is operator.getitem or graph.is_number(node)
    return not schema_of(node.target).is_mutable and not graph.draws(node.target)


def _memory(node: Node) -> int | None:
    value = graph.tensor_value(node)
    return None if value is None else storage_of(value)


def _cut(step: Graph) -> tuple[dict[Node, int], list[tuple[Node, Node]]]:
    """Return the number of each node's part, and pairs of a scalar that crosses parts and a reader."""
    stored = graph.copies_to_inputs(step)
    free, scalar, kept = _numbers(step, stored)
    given = scalar.difference(stored)
    bound = [node for node in step.nodes if node in stored or not (node in free or node.op in OUTSIDE)]
    known = frozenset(bound)

    def joined(node: Node) -> Iterator[Any]:
        yield node
        if node in kept:
            inputs = [each for each in graph.reached([node], graph.operands_of) if each.op == "placeholder"]
            yield from inputs or [graph.once]
        for operand in node.all_input_nodes:
            if operand in known and (operand not in given or node in scalar):
                yield operand

    pieces = graph.components([*bound, *free.intersection(_returned(step))], joined)
    piece_of = {node: i for i, piece in enumerate(pieces) for node in piece}
    of_elements = (node for node in bound if node not in scalar)
    cuts = [(each, node) for node in of_elements for each in node.all_input_nodes if each in given]
    readers: dict[int, set[int]] = defaultdict(set)
    for operand, node in cuts:
        readers[piece_of[operand]].add(piece_of[node])

    def only_reader(i: int) -> set[int]:
        """Return the only reader of a piece of scalars on a launched device, which joins such pieces."""
        value = graph.tensor_value(pieces[i][0])
        is_launched = value is not None and graph.device_facts(value.device).is_launched
        return readers[i] if is_launched and len(readers[i]) == 1 and kept.isdisjoint(pieces[i]) else set()

    parts = graph.components(range(len(pieces)), only_reader)
    return {node: k for k, part in enumerate(parts) for i in part for node in pieces[i]}, cuts


def _numbers(step: Graph, stored: Collection[Node]) -> tuple[set[Node], set[Node], set[Node]]:
    """Return the free nodes, the scalars of parts, and the scalars that are computed once."""
    free, scalar, kept = set[Node](), set[Node](), set[Node]()
    for node in step.nodes:
        operands, is_number = node.all_input_nodes, graph.is_number(node)
        is_free = free.issuperset(operands) and (is_number or not operands)
        if node.op in ("placeholder", "get_attr"):
            if is_number:
                (scalar if node in stored else free).add(node)
        elif node.op != "output" and is_free and not graph.is_copy_to_input(node):
            if node.target is graph.once and operands:
                scalar.add(node)
                kept.add(node)
            else:
                free.add(node)
        elif is_number and all(operand in scalar or operand in free for operand in operands):
            scalar.add(node)
    return free, scalar, kept


def _in_order(step: Graph) -> list[Part] | Reason:
    """Return the parts in an order in which numbers are computed before they are read."""
    part_of, cuts = _cut(step)
    stores: dict[int, list[Node]] = defaultdict(list)
    for store in graph.copies_to_inputs(step).values():
        stores[part_of[store]].append(store)
    results: dict[int, dict[Node, None]] = defaultdict(dict)
    given: dict[int, set[Node]] = defaultdict(set)
    for number, reader in cuts:
        source, destination = part_of[number], part_of[reader]
        if source != destination:
            results[source][number] = None
            given[destination].add(number)
    for value in _returned(step):
        results[part_of[value]][value] = None
    fingerprints = _fingerprints(step)
    waiting = list(dict.fromkeys([*stores, *results]))
    parts: list[Part] = []
    made: set[Node] = set()
    while waiting:
        ready = [group for group in waiting if given[group] <= made]
        if not ready:
            number = next(number for group in waiting for number in given[group] - made)
            return Reason.at(number, "parts of the graph need each other's numbers")
        for group in ready:
            ordered = sorted(stores[group], key=lambda store: _rank_of_store(store, fingerprints))
            named = sorted(results[group], key=fingerprints.__getitem__)
            parts.append(Part(tuple(ordered), tuple(named), frozenset(given[group])))
            made.update(results[group])
        waiting = [group for group in waiting if group not in set(ready)]
    return parts


def _rank_of_store(store: Node, fingerprints: Mapping[Node, int]) -> int:
    """Return a sort key for a part's stores: stores of unchanged inputs come first.

    After a store into that input they would read its new value: Inductor's passes take copies away.
    """
    value = graph.source_of(store.args[1])
    return -1 if isinstance(value, Node) and value.op != "call_function" else fingerprints[store]


def _fingerprints(step: Graph) -> dict[Node, int]:
    """Return a hash of each node's computation, without shapes: the same in every process."""
    found: dict[Node, int] = {}
    for node in step.nodes:
        if node.op == "call_function":
            operands = [found[operand] for operand in node.all_input_nodes]
            numbers = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, (int, float))]
            described = f"{node.target}{operands}{numbers}"
        else:
            value = graph.tensor_value(node)
            described = f"{node.op}{value is not None and (value.dtype, value.dim() == 0)}"
        found[node] = zlib.crc32(described.encode())
    return found


def _returned(step: Graph) -> Iterator[Node]:
    """Yield the tensors that a graph computes and returns."""
    for value in pytree.tree_leaves(step.output_node().args):
        is_made = graph.tensor_value(value) is not None and value.op == "call_function"
        if is_made and not graph.is_copy_to_input(value):
            yield value
