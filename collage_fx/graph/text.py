"""Text form of a graph, one node per line, for tests and documentation."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from collage_fx.graph.nodes import PASS_MARK, operator_name, tensor_value
from collage_fx.torch_compat import pytree


def graph_text(graph: Graph) -> str:
    """Return a readable text of a graph: one line per node, new nodes marked with the pass that made them."""
    return "\n".join(_node_text(node) for node in graph.nodes)


def _node_text(node: Node) -> str:
    value = tensor_value(node)
    kind = "" if value is None else f": {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    mark = f"  # {node.meta[PASS_MARK]}" if PASS_MARK in node.meta else ""
    if node.op == "placeholder":
        return f"{node.name}{kind} = input(){mark}"
    if node.op == "output":
        return f"return {', '.join(str(leaf) for leaf in pytree.tree_leaves(node.args))}".rstrip()
    operands = [_operand_text(arg) for arg in node.args]
    operands += [f"{name}={_operand_text(arg)}" for name, arg in node.kwargs.items()]
    return f"{node.name}{kind} = {operator_name(node.target)}({', '.join(operands)}){mark}"


def _operand_text(arg: Any) -> str:
    return str(arg).removeprefix("torch.")
