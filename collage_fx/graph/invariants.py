"""Checks of a graph's invariants between passes, in code that shares nothing with the passes."""

from __future__ import annotations

from collections.abc import Iterator

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
    program.gm.graph.lint()
    for what, where in _offenders(program, compensated=compensated):
        place = where.format_node() if isinstance(where, Node) else where
        raise GraphInvariantError(what, where=f"{place} after {after}".lstrip())


def _offenders(program: StepProgram, *, compensated: bool) -> Iterator[tuple[str, Node | str]]:
    """Yield each broken invariant, and the node or the input that breaks it."""
    inputs = placeholders(program.gm.graph)
    captured, added = inputs[: len(program.inputs)], inputs[len(program.inputs) :]
    expected = [node for owner in (*program.states, *program.reads) for node in owner.added_inputs]
    if added != expected:
        yield f"additional inputs {added}, expected {expected}", ""
    for state in program.states:
        if captured[state.position] is not state.placeholder:
            yield "an input has moved", state.info.name
    stored: set[Node] = set()
    for node in program.gm.graph.nodes:
        schema = schema_of(node.target) if isinstance(node.target, OpOverload) else None
        returns_nothing = schema is not None and not schema.returns
        if node.op == "call_function" and "val" not in node.meta and not returns_nothing:
            yield 'a node without meta["val"]', node
        if is_copy_to_input(node):
            destination, source = node.all_input_nodes[0], node.args[1]
            if not isinstance(source, Node):
                yield "a stored value that is not a node", node
                continue
            if destination in stored:
                yield "two stores into one input", node
            stored.add(destination)
            to, value = destination.meta["val"], source.meta["val"]
            if to.dtype != value.dtype:
                yield f"a value of {value.dtype} stored into a tensor of {to.dtype}", node
            if to.shape != value.shape:
                yield f"a value of shape {value.shape} stored into shape {to.shape}", node
        elif schema is not None and schema.is_mutable:
            yield "mutation outside the epilogue", node
    for auxiliary in (each for state in program.states for each in state.written):
        if compensated and auxiliary not in stored:
            yield "an auxiliary tensor that no store writes", str(auxiliary)
