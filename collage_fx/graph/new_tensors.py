"""Tensors that a step makes and returns: state, from the next step on.

Note [State is born with its error term]
----------------------------------------
``state["z"] = p.clone(); state["z"].sub_(lr * g)`` in one step: the graph returns z, and Dynamo puts it into
the state. Rounded as it is returned, z would have lost its first step. So a returned tensor becomes an input
that is stored into: the step is given new memory (:class:`~collage_fx.runtime.MakingStep`), and the passes
give it an error term as they do other state. Whether the error term is worth its memory is known when the
next step is compiled, which has a recurrence of z. Until then the error term is *new*; it is dropped if the
strategy does not choose z.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch.fx import Node

from collage_fx.graph.nodes import (
    copies_to_inputs,
    is_dense,
    is_low_precision_tensor,
    operands_of,
    placeholders,
    reached,
    tensor_value,
)
from collage_fx.graph.operator_facts import ignores_values, is_movement
from collage_fx.graph.program import InputInfo, Role, StepProgram
from collage_fx.torch_compat import another_fake, pytree, storage_of

aten = torch.ops.aten


def results_to_inputs(program: StepProgram) -> dict[int, int]:
    """Make inputs of the rounded low-precision tensors that a step makes and returns.

    Args:
        program: before any pass. Its graph, infos and repetition get the inputs.

    Returns:
        for each of the whole graph's results that is one now, and None instead, the index of the input.
    """
    graph, repetition = program.gm.graph, program.repetition
    results = list(pytree.tree_leaves(graph.output_node().args))
    owners = {
        k: owner for k in _rounded(program, results) if (owner := _owner(program, results, k)) is not None
    }
    order = sorted(owners, key=owners.__getitem__)  # those of one owner are one after the other
    first, last = len(placeholders(graph)), placeholders(graph)[-1]
    for k in order:
        with graph.inserting_after(last):
            last = graph.placeholder(f"new_{k}")
        last.meta["val"] = another_fake(results[k].meta["val"])
        with graph.inserting_before(graph.output_node()):
            store = graph.call_function(aten.copy_.default, (last, results[k]))
        store.meta["val"] = last.meta["val"]
        results[k] = None
    if not order:
        return {}
    graph.output_node().update_arg(0, tuple(results))
    program.gm.recompile()
    program.repetition = repetition.extended([owners[k] for k in order])
    made = program.repetition.inputs - repetition.inputs
    program.infos = [*program.infos, *[InputInfo("a tensor that the step makes", "new", Role.NEW)] * made]
    copies = {k: program.repetition.copies[first + i] for i, k in enumerate(order)}
    whole = enumerate(repetition.outputs) if repetition.outputs else ((k, (k, 0)) for k in order)
    return {index: copies[k][member] for index, (k, member) in whole if k in copies}


def _rounded(program: StepProgram, results: list[Node | None]) -> Iterator[int]:
    """The places of results with memory of their own whose values a rounding may have cut."""
    inputs = placeholders(program.gm.graph)
    kept_up = {node for i, node in enumerate(inputs) if i in program.already_compensated}
    kept_up |= {each for each in copies_to_inputs(program.gm.graph) if is_low_precision_tensor(each)}
    memory = Counter(
        storage_of(value) for node in {*results, *inputs} if (value := tensor_value(node)) is not None
    )
    for k, node in enumerate(results):
        value = tensor_value(node)
        if node is None or value is None or node.op != "call_function" or not is_low_precision_tensor(node):
            continue
        sizes = (*value.shape, *value.stride())
        is_own = memory[storage_of(value)] == 1 and results.count(node) == 1
        if (
            is_own
            and all(type(size) is int for size in sizes)
            and is_dense(value)
            and _is_rounded(node, kept_up)
        ):
            yield k


def _is_rounded(node: Node, kept_up: set[Node]) -> bool:
    """Whether a value is another than that of a low-precision input without an error term.

    Those kept up are what has one, and what is updated, which will have one in the next step.
    """
    while is_movement(node) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    is_computed = (
        node.op == "call_function" and bool(node.all_input_nodes) and not ignores_values(node.target)
    )
    return is_computed or node in kept_up


def _owner(program: StepProgram, results: list[Node | None], k: int) -> int | None:
    """The position of an input of the family that a result is of, or, of constants alone, may be of."""
    result, repetition = results[k], program.repetition
    assert result is not None
    made_of = reached([result], operands_of)
    inputs = placeholders(program.gm.graph)
    owned = [i for i in range(len(inputs)) if repetition.owners[i] is not None]
    members = max(1, sum(each == k for each, _ in repetition.outputs))
    alike = [i for i in owned if made_of.isdisjoint(inputs) and len(repetition.copies[i]) == members]
    return next((i for i in owned if inputs[i] in made_of), next(iter(alike), None))
