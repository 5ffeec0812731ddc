"""Composite updates become visible multiplications and additions.

Optimizers write an update in many ways: ``torch._foreach_addcdiv_`` over lists, ``addcmul``, ``lerp``,
``add(alpha=...)``, and AOTAutograd adds ``prims.fma``. The later passes read recurrences and place roundings,
for which an update has to be made of elementary operations: those of ``collage_fx/composites.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from collage_fx.composites import COMPOSITES, foreach_calls, foreach_rule
from collage_fx.graph import GraphEditor, tensor_value
from collage_fx.passes.base import Pass
from collage_fx.program import StepProgram

__all__ = ["Normalize"]

aten = torch.ops.aten


@dataclass(frozen=True)
class _Call:
    """``rule`` called with flat values, the last ones keyword arguments. Hashable, so its trace is reused."""

    rule: Callable[..., Any]
    names: tuple[str | None, ...]

    def __call__(self, *values: Any) -> Any:
        positional = [value for value, name in zip(values, self.names, strict=True) if name is None]
        keyword = {name: value for value, name in zip(values, self.names, strict=True) if name is not None}
        return self.rule(*positional, **keyword)


@dataclass(frozen=True)
class Normalize(Pass):
    """Composite and foreach operators -> elementary operations."""

    name = "normalize"

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        unpacked = sum(_unpack_foreach(editor, node) for node in list(editor.graph.nodes))
        opened = sum(_open_composite(editor, node) for node in list(editor.graph.nodes))
        for node in list(editor.graph.nodes):
            _choose_constant_branch(editor, node)
            _forward_copy(editor, node)
        editor.finish()
        return f"{opened} composite and {unpacked} foreach operations opened"


def _open_composite(editor: GraphEditor, node: Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    rule = COMPOSITES.get(packet)
    if rule is None or (packet in (aten.add, aten.sub) and node.kwargs.get("alpha", 1) == 1):
        return False
    with editor.graph.inserting_before(node):
        (result,) = _opened(editor, rule, node.args, node.kwargs)
    _replace(editor, node, result)
    return True


def _choose_constant_branch(editor: GraphEditor, node: Node) -> None:
    """``where(False, a, b)`` -> ``b``: what torch 2.11's own decomposition of ``lerp`` leaves behind."""
    if node.target is not aten.where.self:
        return
    condition, *branches = node.args
    if (
        isinstance(condition, Node)
        and condition.target is aten.full.default
        and not condition.meta["val"].shape
    ):
        chosen = branches[0] if condition.args[1] else branches[1]
        chosen_value, value = tensor_value(chosen), tensor_value(node)
        if chosen_value is not None and value is not None and chosen_value.shape == value.shape:
            assert isinstance(chosen, Node)
            _replace(editor, node, chosen)


def _forward_copy(editor: GraphEditor, node: Node) -> None:
    """``copy(destination, source)`` -> ``source``, in the destination's dtype, shape and strides.

    AOTAutograd writes it where an in-place result is laid out unlike its destination (a transposed weight
    with a contiguous gradient); the destination's old value plays no part in it.
    """
    if node.target is not aten.copy.default:
        return
    source, value = node.args[1], tensor_value(node)
    assert isinstance(source, Node)
    assert value is not None
    with editor.graph.inserting_before(node):
        result = editor.convert(source, value.dtype)
        if result.meta["val"].shape != value.shape:
            result = editor.call(aten.expand.default, result, list(value.shape))
    node.replace_all_uses_with(result)
    editor.graph.erase_node(node)
    editor.propagate_from(result)


def _unpack_foreach(editor: GraphEditor, node: Node) -> bool:
    """``_foreach_op(xs, ys, scalar)`` -> ``op(x, y, scalar)`` for each; read through ``getitem`` nodes."""
    rule = foreach_rule(node.target)
    if rule is None:
        return False
    results: list[Node] = []
    with editor.graph.inserting_before(node):
        for args, kwargs in foreach_calls(node.args, node.kwargs):
            results.extend(_opened(editor, rule, args, kwargs))
    for user in list(node.users):
        if user.target is operator.getitem:
            index = user.args[1]
            assert isinstance(index, int)
            _replace(editor, user, results[index])
    return True


def _opened(
    editor: GraphEditor, rule: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Node, ...]:
    return editor.inline(_Call(rule, (None,) * len(args) + tuple(kwargs)), *args, *kwargs.values())


def _replace(editor: GraphEditor, node: Node, result: Node) -> None:
    """Put ``result`` in ``node``'s place, in the dtype that ``node`` had."""
    value = tensor_value(node)
    if value is not None:
        with editor.graph.inserting_before(node):
            result = editor.convert(result, value.dtype)
    node.replace_all_uses_with(result)
    editor.graph.erase_node(node)
