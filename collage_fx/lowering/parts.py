"""Division of a step's graph into parts that can run in sequence.

Note [Parts of a step]
----------------------
The update of one parameter hardly ever needs that of another, so the graph of a step falls apart into as many
pieces as there are parameters, and most of them are the same piece over other tensors. A *part* is a set of
stores and results together with everything they are computed from:

* Two values belong to one part if one is computed from the other.
* So do all stores into a tensor and all reads of a tensor that is stored into: whether a read sees the old
  value is then a question within one functional graph, where it has an answer, never one of the order in
  which parts run. Tensors that are only read (gradients) join nothing.
* *Free* values are copied into each part that reads them instead of joining those that do: numbers computed
  from numbers that the step does not change (a scheduled ``lr`` and what follows from it), and tensors made
  of constants.
* Numbers computed from numbers that the step changes (a step counter's bias correction) are a part of their
  own, whose results are given to what reads them. So are, together, numbers that are to be computed once
  (``hoist-scalars``) from numbers that the step does not change. What is left is about elements alone, and
  may be computed for a piece of the tensors at a time (Note [One call for all tensors]).

Soundness. Parts read only inputs that no other part stores, values that they compute themselves, and results
of parts that have run before; no other tensor is written but the parts' own stores. So any topological order
of the parts computes what the graph does. (Inputs that share memory, one of them stored, do not occur:
AOTAutograd makes one input of them.) Results get memory of their own. :func:`parts_of` returns None where a
result is to share that of an input or another result, where there is no such order, and where something in
the graph is not a function of its operands (random numbers, asserts, higher-order operators): the graph is
then lowered whole. (``samples_first`` in ``rules.py`` cuts parts further: what it takes out of one reads
inputs that the rest stores, and has to run before.)
"""

from __future__ import annotations

import operator
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from collage_fx.graph import (
    Groups,
    Reason,
    copies_to_inputs,
    device_facts,
    draws,
    is_copy_to_input,
    is_number,
    once,
    placeholders,
    source_of,
    tensor_value,
)
from collage_fx.torch_compat import OpOverload, pytree, schema_of, storage_of

aten = torch.ops.aten


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


def parts_of(graph: Graph) -> list[Part] | Reason:
    """Return the parts of a functional graph with ``copy_`` epilogue, in a valid order."""
    for node in graph.nodes:
        if not _is_a_function(node):
            return Reason.at(node, "it is not a function of its operands")
    if _returns_shared_memory(graph):
        return Reason("it returns a view of an input, or two of one memory")
    return _Partition(graph).parts()


def _is_a_function(node: Node) -> bool:
    """Return whether a node is an input, the output, or a function that makes new tensors."""
    if node.op in ("placeholder", "get_attr"):
        return tensor_value(node) is not None or is_number(node)
    if node.op == "output" or is_copy_to_input(node):
        return True
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        # Indexing of several results, and Python arithmetic on symbolic numbers.
        return node.target is operator.getitem or is_number(node)
    return not schema_of(node.target).is_mutable and not draws(node.target)


def _returns_shared_memory(graph: Graph) -> bool:
    """Return whether a returned tensor is a view of an input or of another returned tensor."""
    inputs = {_memory(node) for node in placeholders(graph)}
    returned = [_memory(node) for node in dict.fromkeys(_returned(graph))]
    return len(set(returned)) < len(returned) or not inputs.isdisjoint(returned)


def _memory(node: Node) -> int | None:
    value = tensor_value(node)
    return None if value is None else storage_of(value)


class _Partition:
    """Partition of the nodes of a graph into parts."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.stored = copies_to_inputs(graph)
        self.groups = Groups[Node]()
        self.free: set[Node] = set()
        self.scalar: set[Node] = set()
        self.cuts: list[tuple[Node, Node]] = []
        self.kept: list[Node] = []

    def parts(self) -> list[Part] | Reason:
        for node in self.graph.nodes:
            self._visit(node)
        return self._in_order()

    def _visit(self, node: Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            if node in self.stored:
                self.groups.find(node)
                if is_number(node):
                    self.scalar.add(node)
            elif is_number(node):
                self.free.add(node)
            return
        if node.op == "output":
            return
        operands = node.all_input_nodes
        is_store = is_copy_to_input(node)
        if not is_store and self.free.issuperset(operands) and (is_number(node) or not operands):
            if node.target is once and operands:
                self.scalar.add(node)
                self.kept.append(node)
                self.groups.join(node, self.kept[0])
            else:
                self.free.add(node)
            return
        if is_number(node) and all(operand in self.scalar or operand in self.free for operand in operands):
            self.scalar.add(node)
        for operand in operands:
            if operand.op in ("placeholder", "get_attr"):
                if operand in self.stored:
                    self.groups.join(node, operand)
            elif operand in self.scalar and node not in self.scalar:
                self.cuts.append((operand, node))
            elif operand not in self.free:
                self.groups.join(node, operand)
        self.groups.find(node)

    def _join_numbers_of_one_reader(self) -> None:
        """Join the scalars on a launched device that only one part reads."""
        readers: dict[Node, set[Node]] = defaultdict(set)
        for number, reader in self.cuts:
            readers[self.groups.find(number)].add(self.groups.find(reader))
        kept = set(map(self.groups.find, self.kept))
        first: dict[Node, Node] = {}
        for number, (reader, *others) in readers.items():
            value = tensor_value(number)
            is_launched = value is not None and device_facts(value.device).is_launched
            if is_launched and not others and number not in kept:
                self.groups.join(first.setdefault(reader, number), number)

    def _in_order(self) -> list[Part] | Reason:
        self._join_numbers_of_one_reader()
        stores: dict[Node, list[Node]] = defaultdict(list)
        for store in self.stored.values():
            stores[self.groups.find(store)].append(store)
        results: dict[Node, dict[Node, None]] = defaultdict(dict)
        given: dict[Node, set[Node]] = defaultdict(set)
        for number, reader in self.cuts:
            source, destination = self.groups.find(number), self.groups.find(reader)
            if source is not destination:
                results[source][number] = None
                given[destination].add(number)
        for value in _returned(self.graph):
            results[self.groups.find(value)][value] = None
        fingerprints = _fingerprints(self.graph)
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
    value = source_of(store.args[1])
    return -1 if isinstance(value, Node) and value.op != "call_function" else fingerprints[store]


def _fingerprints(graph: Graph) -> dict[Node, int]:
    """Return a hash of each node's computation, without shapes: the same in every process."""
    found: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            operands = [found[operand] for operand in node.all_input_nodes]
            numbers = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, (int, float))]
            described = f"{node.target}{operands}{numbers}"
        else:
            value = tensor_value(node)
            described = f"{node.op}{value is not None and (value.dtype, value.dim() == 0)}"
        found[node] = zlib.crc32(described.encode())
    return found


def _returned(graph: Graph) -> Iterator[Node]:
    """Yield the tensors that a graph computes and returns."""
    for value in pytree.tree_leaves(graph.output_node().args):
        if tensor_value(value) is not None and value.op == "call_function" and not is_copy_to_input(value):
            yield value
