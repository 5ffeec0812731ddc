"""Pictures of graphs as boxes and arrows: one tensor's update out of hundreds, or a whole graph.

A box says what is computed in the notation of arithmetic, with the names of other boxes as operands, so that
it can be read without following the arrows. Casts and constants are part of the text of their readers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from collage_fx.graph import (
    PASS_MARK,
    copies_to_inputs,
    facts_of,
    is_conversion,
    is_copy_to_input,
    operator_name,
    reached,
    tensor_value,
)
from collage_fx.numerics import short_name

#: Light tints of Okabe and Ito's palette, which differ for any colour vision; black text is legible on each.
PASS_COLORS = (
    *("#cfe8f7", "#ffe3b0", "#bfe8d8", "#f6d3e6", "#fbf6b4", "#f8cdb5", "#d5d9f5", "#e2e2e2"),
    *("#9cc9e8", "#f2c15e", "#8fd3b6", "#e3a3c8"),
)

TYPESET = str.maketrans("-*", "−×")
#: Operators that round their first operand.
ROUNDINGS = {"dithered", "round_to_storage", "upper_half"}


@dataclass(frozen=True)
class Box:
    """Box for a node of a graph.

    Attributes:
        name: name of the node.
        text: equation of the result.
        layout: data type and shape of the result.
        made_by: pass that made the node; empty if it was captured.
        role: ``input``, ``operation``, or ``store`` into an input.
    """

    name: str
    text: str
    layout: str
    made_by: str
    role: str


@dataclass(frozen=True)
class Picture:
    """Boxes in the order of the graph, and arrows as pairs of their names."""

    boxes: tuple[Box, ...]
    arrows: tuple[tuple[str, str], ...]

    def to_text(self) -> str:
        """Write a line for each box, with the pass that made it."""
        width = max((len(box.text) for box in self.boxes), default=0)
        lines = (f"    {box.layout:10}  {box.text:{width}}  {box.made_by}" for box in self.boxes)
        return "\n".join(line.rstrip() for line in lines)

    @property
    def passes(self) -> list[str]:
        """Names of the passes that made a box."""
        return list(dict.fromkeys(box.made_by for box in self.boxes if box.made_by))


def pass_color(name: str, passes: Sequence[str]) -> str:
    """Return the colour of boxes made by a pass, by its position among ``passes``."""
    return PASS_COLORS[passes.index(name) % len(PASS_COLORS)]


def whole_graph(graph: Graph) -> Picture:
    """Make a picture of every node of a graph but the output."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    return _picture(nodes, {}, {node: node.name for node in nodes}, frozenset())


def picture(graph: Graph, inputs: Collection[str], names: Mapping[str, str]) -> Picture:
    """Make a picture of the part of a graph that computes the new values of some inputs.

    The new value of another input is a box without operands, such as ``exp_avg'``, with a picture of its own.

    Args:
        graph: functional graph.
        inputs: names of the inputs to show the update of; names that the graph does not have are ignored.
        names: names of the graph's inputs in the picture.
    """
    stores = copies_to_inputs(graph)
    roots = [store for placeholder, store in stores.items() if placeholder.name in inputs]
    own = {node for root in roots for node in _rounded_versions(root)}
    cuts = {
        node: f"{names.get(placeholder.name, placeholder.name)}'"
        for placeholder, store in stores.items()
        if placeholder.name not in inputs
        for node in _rounded_versions(store)
        if node not in own and node.op != "placeholder"
    }
    wanted = {*roots, *reached(roots, lambda node: [] if node in cuts else _read(node))}
    nodes = [node for node in graph.nodes if node in wanted]
    hidden = {n for n in nodes if _is_inlined(n) and n not in cuts}
    labels = {node: cuts.get(node) or names.get(node.name, node.name) for node in graph.nodes}
    return _picture(nodes, cuts, labels, hidden)


def _rounded_versions(store: Node) -> Iterator[Node]:
    """Yield the value that a store stores, and the nodes before its casts and rounding."""
    value = store.args[1]
    while isinstance(value, Node):
        yield value
        is_rounding = is_conversion(value) or operator_name(value.target) in ROUNDINGS
        value = value.args[0] if is_rounding else None


def _is_inlined(node: Node) -> bool:
    """Return whether a node is part of its readers' text: a cast, or a constant such as ``full([], 0)``."""
    return is_conversion(node) or (node.op == "call_function" and not node.all_input_nodes)


def _picture(
    nodes: Sequence[Node],
    cuts: Mapping[Node, str],
    labels: Mapping[Node, str],
    hidden: Collection[Node],
) -> Picture:
    boxes, arrows = [], []
    for node in nodes:
        if node in hidden:
            continue
        is_leaf = node in cuts or node.op == "placeholder"
        operands = [] if is_leaf else _shown_operands(node, hidden)
        arrows += [(operand.name, node.name) for operand in operands]
        boxes.append(
            Box(
                name=node.name,
                text=labels[node] if is_leaf else _equation(node, labels, hidden),
                layout=_layout(node),
                made_by=node.meta.get(PASS_MARK, ""),
                role="input" if is_leaf else "store" if is_copy_to_input(node) else "operation",
            )
        )
    return Picture(tuple(boxes), tuple(dict.fromkeys(arrows)))


def _read(node: Node) -> list[Node]:
    """Return the nodes whose values a node reads, without the destination of a store."""
    operands = node.args[1:2] if is_copy_to_input(node) else node.all_input_nodes
    return [operand for operand in operands if isinstance(operand, Node)]


def _shown_operands(node: Node, hidden: Collection[Node]) -> list[Node]:
    """Return the operands of a node that have boxes of their own."""
    return [
        shown
        for operand in _read(node)
        for shown in (_shown_operands(operand, hidden) if operand in hidden else [operand])
    ]


def _equation(node: Node, labels: Mapping[Node, str], hidden: Collection[Node]) -> str:
    if is_copy_to_input(node):
        return " ← ".join(_operand(arg, labels, hidden) for arg in node.args[:2])
    return f"{labels[node]} = {_expression(node, labels, hidden)}"


def _expression(node: Node, labels: Mapping[Node, str], hidden: Collection[Node]) -> str:
    operator, facts = operator_name(node.target), facts_of(node.target)
    operands = [_operand(arg, labels, hidden) for arg in node.args]
    if is_conversion(node):
        return f"{operands[1]}({operands[0]})"
    if not node.all_input_nodes and facts.fills is not None:
        return operands[-1]
    if operator == "round_to_storage":
        return f"round({', '.join(operands)})"
    if facts.sign and len(operands) == 2:
        first, second = operands
        alpha = node.kwargs.get("alpha", 1)
        factor = "" if alpha == 1 else f"{_operand(alpha, labels, hidden)} × "
        return f"{first} {facts.sign.translate(TYPESET)} {factor}{second}"
    operands += [
        f"{name}={_operand(arg, labels, hidden)}"
        for name, arg in node.kwargs.items()
        if name not in ("layout", "device", "pin_memory")
    ]
    return f"{operator}({', '.join(operands)})"


def _operand(arg: object, labels: Mapping[Node, str], hidden: Collection[Node]) -> str:
    if isinstance(arg, Node):
        return _expression(arg, labels, hidden) if arg in hidden else labels.get(arg, arg.name)
    if isinstance(arg, float):
        return f"{arg:.6g}"
    if isinstance(arg, torch.dtype):
        return short_name(arg)
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(_operand(each, labels, hidden) for each in arg)}]"
    return str(arg)


def _layout(node: Node) -> str:
    value = tensor_value(node)
    return "" if value is None else f"{short_name(value.dtype)}[{','.join(map(str, value.shape))}]"
