"""The pass that undoes stochastic rounding of a new value if an error term can hold the rounded part.

Some optimizers with bfloat16 weights and without error terms round a float32 result up or down at random,
with probabilities in proportion to the distances, so that small updates take effect on average. The known
implementations (``copy_stochastic_`` of pytorch#120376, heavyball, torchao) work on the bits of float32,
whose upper half is bfloat16:

    (bits(x) + r) & 0xFFFF0000                     r uniform in [0, 0xFFFF]
    where(r < bits(x) & 0xFFFF, up, down)          down = bits(x) & 0xFFFF0000, up = down + 0x10000

Theorem. Both return one of the two neighbours of x in bfloat16, the larger in magnitude with probability
(bits(x) mod 2**16) / 2**16: the expected value is x. ``hi + lo`` with ``hi = RN(x)`` equals x to twice the
precision, so it is the intended value without noise. The sum of N random numbers minus ``(N - 1) * 2**15``
(heavyball's dithering) has the same expected value to within N / 2 ulps of float32.

Similar operations are left unchanged, and ``analyze`` refuses them: another mask, other bounds, numbers from
outside the graph, or a rounding that is not random, whose cut-off bits the step may compute elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from collage_fx import graph
from collage_fx.graph import GraphEditor, Role, StepProgram
from collage_fx.passes.base import Pass

aten = torch.ops.aten

HALF, LOWER, UPPER = 1 << 15, (1 << 16) - 1, (-1 << 16, 0xFFFF0000)

AND = aten.bitwise_and.Scalar
LEFT_SHIFT, RIGHT_SHIFT = aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_right_shift.Tensor_Scalar
COMPARISONS = {aten.lt.Tensor: (0, 1), aten.gt.Tensor: (1, 0)}


class UndoStochasticRounding(Pass):
    """Pass that replaces a stored ``stochastically_rounded(x)`` by ``x``, which gets error terms."""

    name = "undo-stochastic-rounding"
    after = ("normalize",)

    def applies_to(self, program: StepProgram) -> bool:
        return bool(program.gm.graph.find_nodes(op="call_function", target=aten.view.dtype))

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        stores = graph.copies_to_inputs(editor.graph)
        program.rounded_at_random = set()
        for node, info in zip(graph.placeholders(editor.graph), program.inputs, strict=True):
            keeps = info.role in (Role.PARAMETER, Role.STATE, Role.CARRIED)
            if node in stores and keeps and node.meta["val"].dtype == torch.bfloat16:
                rounded = _stored(stores[node])
                if rounded is not None and (exact := _value_before_rounding(rounded)) is not None:
                    program.rounded_at_random.add(node)
                    editor.replace(rounded, exact)
        # Random draws are side effects, which dead code elimination keeps.
        editor.graph.eliminate_dead_code()
        for node in reversed(list(editor.graph.nodes)):
            if graph.draws(node.target) and not node.users:
                editor.graph.erase_node(node)
        return f"{len(program.rounded_at_random)} tensors"


def _stored(store: Node) -> Node | None:
    """Return the stored float32 node, through casts and views, if it reinterprets integers; else None."""
    node = graph.source_of(store.args[1])
    is_it = isinstance(node, Node) and node.target is aten.view.dtype and node.args[1] is torch.float32
    return node if is_it else None


def _value_before_rounding(rounded: Node) -> Node | None:
    """Return the ``x`` whose stochastic rounding a float32 value is; None for other values."""
    bits = _integers(rounded.args[0])
    if bits is None or not _has_no_other_reader(rounded, bits):
        return None
    exact = _of_masked_sum(bits) or _of_choice(bits)
    value = graph.tensor_value(exact)
    return exact if value is not None and value.shape == rounded.meta["val"].shape else None


def _has_no_other_reader(rounded: Node, bits: Node) -> bool:
    """Return whether only the store reads the rounded bits: other readers may compute the lost part."""
    (operand,) = rounded.all_input_nodes
    while operand is not bits and len(operand.users) == 1:
        (operand,) = operand.all_input_nodes
    return operand is bits and len(bits.users) == 1


def _of_masked_sum(bits: Node) -> Node | None:
    """Return the node x of ``(bits(x) + r) & 0xFFFF0000`` or ``(bits(x) + r) >> 16 << 16``."""
    total = None
    if bits.target is AND and bits.args[1] in UPPER:
        total = bits.args[0]
    elif bits.target is LEFT_SHIFT and bits.args[1] == 16:
        shifted = _integers(bits.args[0])
        if shifted is not None and shifted.target is RIGHT_SHIFT and shifted.args[1] == 16:
            total = shifted.args[0]
    terms, constant = _sum(total)
    exact = [source for source in map(_source, terms) if source is not None]
    drawn = len(set(filter(_is_draw, terms)))
    is_it = len(exact) == 1 and 1 <= drawn == len(terms) - 1 and constant == -(drawn - 1) * HALF
    return exact[0] if is_it else None


def _of_choice(bits: Node) -> Node | None:
    """Return x of ``where(r < bits(x) & 0xFFFF, (bits(x) & 0xFFFF0000) + 0x10000, bits(x) & 0xFFFF0000)``."""
    if bits.target is not aten.where.self:
        return None
    operands: tuple[Any, ...] = bits.args
    condition, up, down = operands
    if condition.target not in COMPARISONS or down.target is not AND or down.args[1] not in UPPER:
        return None
    draw, fraction = (_integers(condition.args[i]) for i in COMPARISONS[condition.target])
    exact = _source(down.args[0])
    if draw is None or fraction is None or not _is_draw(draw) or _sum(up) != ([down], LOWER + 1):
        return None
    is_fraction = fraction.target is AND and fraction.args[1] == LOWER and fraction.args[0] is down.args[0]
    return exact if is_fraction else None


def _integers(node: object) -> Node | None:
    """Return the node of an integer tensor, looking through casts between int32 and int64."""
    while isinstance(node, Node):
        operand = graph.passed_operand(node)
        value, source = graph.tensor_value(node), graph.tensor_value(operand)
        if value is None or source is None or value.shape != source.shape:
            return node
        if not {value.dtype, source.dtype} <= {torch.int32, torch.int64}:
            return node
        node = operand
    return None


def _sum(node: object) -> tuple[list[Node], int]:
    """Return the terms of a sum of integers, and the constant among them."""
    found = _integers(node)
    if found is None:
        return [], 0
    if found.kwargs or found.target not in (aten.add.Tensor, aten.sub.Tensor):
        return [found], 0
    first, second = found.args
    terms, constant = _sum(first)
    if isinstance(second, int):
        return terms, constant + second if found.target is aten.add.Tensor else constant - second
    if found.target is aten.sub.Tensor:
        return [found], 0
    more, another = _sum(second)
    return terms + more, constant + another


def _source(node: object) -> Node | None:
    """Return the float32 node whose bits an integer node holds; None for other nodes."""
    found = _integers(node)
    if found is None or found.target is not aten.view.dtype or found.args[1] is not torch.int32:
        return None
    (source,) = found.all_input_nodes
    return source if source.meta["val"].dtype == torch.float32 else None


def _is_draw(node: Node) -> bool:
    """Return whether a node draws a uniform random integer of [0, 0xFFFF] per element."""
    return graph.drawn_range(node.target, node.args, node.kwargs) == (0, LOWER + 1)
