"""Tensors that a step creates and returns; they are state from the next step on.

Note [State is born with its error term]
----------------------------------------
``state["z"] = p.clone(); state["z"].sub_(lr * g)`` in one step: the graph returns z, and Dynamo puts z into
the state. Rounded when it is returned, z would lose its first update. So a returned tensor becomes an input
that the graph stores to: the step allocates the memory (:class:`~collage_fx.runtime.MakingStep`), and the
passes give z an error term. The term is *new* until the next step is compiled, whose graph has a recurrence
of z; it is dropped if the strategy does not choose z.

Note [Values that leave a graph]
--------------------------------
``at = p.clone()``, the step of an inner optimizer, ``p.lerp_(at, 0.5)``: three graphs, and ``at`` leaves the
first as a result. It gets an error term likewise, and the third graph reads it whole. The first graph is
compiled before p has an error term. So parameters and states of optimizers that are compensated are read with
error terms of zeros until they have their own; reading creates none. A graph that updates nothing is
rewritten only if a *value of weights* leaves it (:func:`values_of_weights`): forward passes are left alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator

import torch
from torch.fx import Graph, Node

from collage_fx.graph import operator_facts
from collage_fx.graph.nodes import (
    copies_to_inputs,
    is_conversion,
    is_copy_to_input,
    is_low_precision_tensor,
    made_of,
    placeholders,
    tensor_value,
)
from collage_fx.graph.program import InputInfo, Role, StepProgram
from collage_fx.numerics import is_dense
from collage_fx.torch_compat import current_size, fake_like, pytree, storage_of

aten = torch.ops.aten


def results_to_inputs(program: StepProgram) -> dict[int, int]:
    """Turn rounded low-precision tensors that a step creates and returns into inputs that it stores to.

    The inputs are added to the graph, infos and repetition of the program, which no pass has seen. It is
    computed in ``wide`` arithmetic: the displacement of a parameter is kept unrounded. Recorded steps and
    plain steps stay as they are. Return the index of the input that replaces a result, by the index of the
    result in the whole graph.
    """
    if not program.keeps_new_tensors:
        return {}
    graph, repetition = program.gm.graph, program.repetition
    results = list(pytree.tree_leaves(graph.output_node().args))
    found = ((k, _owner(program, k, results[k])) for k in _rounded(program, results))
    owners = {k: owner for k, owner in found if owner is not None}
    order = sorted(owners, key=owners.__getitem__)  # results of one owner are neighbours
    first, last = len(placeholders(graph)), placeholders(graph)[-1]
    for k in order:
        with graph.inserting_after(last):
            last = graph.placeholder(f"new_{k}")
        last.meta["val"] = fake_like(results[k].meta["val"])
        with graph.inserting_before(graph.output_node()):
            store = graph.call_function(aten.copy_.default, (last, results[k]))
        store.meta["val"] = last.meta["val"]
        results[k] = None
    if not order:
        return {}
    graph.output_node().update_arg(0, tuple(results))
    program.gm.recompile()
    program.repetition = repetition.extended([owners[k] for k in order])
    program.arithmetic = "wide"
    made = program.repetition.inputs - repetition.inputs
    program.infos = [*program.infos, *[InputInfo("a tensor that the step creates", "new", Role.NEW)] * made]
    copies = {k: program.repetition.copies[first + i] for i, k in enumerate(order)}
    whole = enumerate(repetition.outputs) if repetition.outputs else ((k, (k, 0)) for k in order)
    return {index: copies[k][member] for index, (k, member) in whole if k in copies}


def values_of_weights(graph: Graph, whole: Collection[Node]) -> set[Node]:
    """Return the nodes that are copies, sums, differences, averages and the like of tensors with error terms.

    Activations are none: a weight is broadcast for them, or multiplied as a matrix. ``whole``: inputs with
    error terms.
    """
    #: Value of weights -> number of elements of weights that it is computed from, at most its own number.
    found = {node: _elements_of(node) for node in whole}
    for node in graph.nodes:
        read = [operand for operand in node.all_input_nodes if operand in found]
        if node.op != "call_function" or not read or is_copy_to_input(node):
            continue
        value, size, source = tensor_value(node), _elements_of(node), max(map(found.__getitem__, read))
        if value is None:
            found[node] = source  # a list of tensors
        elif (operand := operator_facts.passed_operand(node)) is not None:
            if operand in found:
                found[node] = min(size, found[operand])
        elif node.target is operator.getitem or operator_facts.facts_of(node.target).moves:
            found[node] = min(size, sum(map(found.__getitem__, read)))
        elif not value.is_floating_point():
            continue
        elif operator_facts.is_pointwise(node.target) or is_conversion(node):
            if source >= size:
                found[node] = size
        elif torch.Tag.reduction in getattr(node.target, "tags", ()):
            found[node] = size
    return found.keys() - set(whole)


def _elements_of(node: Node) -> int:
    """Return the number of elements of a tensor; 0 for a list of tensors or a number."""
    value = tensor_value(node)
    return 0 if value is None else math.prod(map(current_size, value.shape))


def _rounded(program: StepProgram, results: list[Node | None]) -> Iterator[int]:
    """Yield the indices of results that own their memory and whose values rounding may have cut."""
    inputs = placeholders(program.gm.graph)
    read_whole = program.already_compensated | program.may_get_terms
    kept_up = {node for i, node in enumerate(inputs) if i in read_whole}
    kept_up |= {each for each in copies_to_inputs(program.gm.graph) if is_low_precision_tensor(each)}
    values = {node: tensor_value(node) for node in (*results, *inputs) if node is not None}
    regions = {node: _region(value) for node, value in values.items() if value is not None}
    for k, node in enumerate(results):
        value = tensor_value(node)
        if node is None or value is None or node.op != "call_function" or not is_low_precision_tensor(node):
            continue
        storage, first, end = regions[node]
        is_own = results.count(node) == 1 and not any(
            other is not node and region[0] == storage and region[1] < end and first < region[2]
            for other, region in regions.items()
        )
        if is_own and _has_known_layout(value) and _is_rounded(node, kept_up):
            yield k


def _has_known_layout(value: torch.Tensor) -> bool:
    return all(type(size) is int for size in (*value.shape, *value.stride())) and is_dense(value)


def _region(value: torch.Tensor) -> tuple[int, float, float]:
    """Return the storage of a tensor, its first element there, and the end; all of it if that is unknown."""
    first = value.storage_offset()
    is_known = type(first) is int and _has_known_layout(value)
    return storage_of(value), *((first, first + value.numel()) if is_known else (-math.inf, math.inf))


def _is_rounded(node: Node, kept_up: set[Node]) -> bool:
    """Return whether a value differs from every low-precision input without an error term.

    ``kept_up``: inputs that have an error term, or are updated and so have it in the next step.
    """
    while operator_facts.is_movement(node) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node in kept_up or (bool(node.all_input_nodes) and not operator_facts.ignores_values(node.target))


def _owner(program: StepProgram, k: int, result: Node) -> int | None:
    """Return the position of an input whose family the result k belongs to; None if there is none."""
    inputs, repetition, sources = placeholders(program.gm.graph), program.repetition, made_of(result)
    owned = [i for i in range(len(inputs)) if repetition.owners[i] is not None]
    members = max(1, sum(each == k for each, _ in repetition.outputs))
    alike = [i for i in owned if sources.isdisjoint(inputs) and len(repetition.copies[i]) == members]
    return next((i for i in owned if inputs[i] in sources), next(iter(alike), None))
