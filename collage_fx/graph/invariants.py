"""Checks of a graph's invariants between passes, in code that shares nothing with the passes."""

from __future__ import annotations

from torch.fx import Node

from collage_fx.errors import GraphInvariantError
from collage_fx.graph.nodes import is_copy_to_input, placeholders
from collage_fx.graph.program import StepProgram
from collage_fx.torch_compat import OpOverload, schema_of


def verify(program: StepProgram, *, after: str, compensated: bool = False) -> None:
    """Raise :class:`~collage_fx.errors.GraphInvariantError` for the first node that breaks an invariant.

    Checked: FX's own lint; every tensor node has a ``meta["val"]``; the only mutation is the epilogue, with
    at most one store per input and source and destination agreeing in dtype and shape; the inputs the graph
    was captured with are unchanged in number and order and new ones come behind them; once a compensating
    pass has run (``compensated``), every auxiliary input has a writer.
    """
    graph = program.gm.graph
    graph.lint()
    _check_inputs(program, after)
    stored: set[Node] = set()
    for node in graph.nodes:
        schema = schema_of(node.target) if isinstance(node.target, OpOverload) else None
        returns_nothing = schema is not None and not schema.returns
        if node.op == "call_function" and "val" not in node.meta and not returns_nothing:
            raise GraphInvariantError(
                'a node without meta["val"]', where=f"{node.format_node()} after {after}"
            )
        if is_copy_to_input(node):
            _check_store(node, stored, after)
        elif schema is not None and schema.is_mutable:
            raise GraphInvariantError(
                "mutation outside the epilogue", where=f"{node.format_node()} after {after}"
            )
    unwritten = [a for state in program.states for a in state.written if a not in stored]
    if compensated and unwritten:
        raise GraphInvariantError(
            "an auxiliary tensor that no store writes", where=f"{unwritten[0]} after {after}"
        )


def _check_inputs(program: StepProgram, after: str) -> None:
    inputs = placeholders(program.gm.graph)
    captured, added = inputs[: len(program.inputs)], inputs[len(program.inputs) :]
    expected = [node for owner in (*program.states, *program.reads) for node in owner.added_inputs]
    if added != expected:
        raise GraphInvariantError(f"additional inputs {added}, expected {expected}", where=f"after {after}")
    for state in program.states:
        if captured[state.position] is not state.placeholder:
            raise GraphInvariantError("an input has moved", where=f"{state.info.name} after {after}")


def _check_store(node: Node, stored: set[Node], after: str) -> None:
    destination, source = node.all_input_nodes[0], node.args[1]
    where = f"{node.format_node()} after {after}"
    if not isinstance(source, Node):
        raise GraphInvariantError("a stored value that is not a node", where=where)
    if destination in stored:
        raise GraphInvariantError("two stores into one input", where=where)
    stored.add(destination)
    to, value = destination.meta["val"], source.meta["val"]
    if to.dtype != value.dtype:
        raise GraphInvariantError(f"a value of {value.dtype} stored into a tensor of {to.dtype}", where=where)
    if to.shape != value.shape:
        raise GraphInvariantError(f"a value of shape {value.shape} stored into shape {to.shape}", where=where)
