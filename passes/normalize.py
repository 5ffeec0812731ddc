"""Composite updates become visible multiplications and additions.

Optimizers write an update in many ways: ``torch._foreach_addcdiv_`` over lists, ``addcmul``, ``lerp``,
``add(alpha=...)``, and AOTAutograd adds ``prims.fma``. The later passes read recurrences and place roundings,
for which an update has to be made of elementary operations. Each rule is an eager function equal to the
operator in exact arithmetic.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from collage_fx.graph import GraphEditor, tensor_value
from collage_fx.passes.base import Pass
from collage_fx.program import StepProgram

__all__ = ["Normalize"]

aten = torch.ops.aten


def _scaled(x: Any, factor: Any) -> Any:
    return x if isinstance(factor, (int, float)) and factor == 1 else x * factor


def _add(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return x + _scaled(y, alpha)


def _sub(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return x - _scaled(y, alpha)


def _rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return y - _scaled(x, alpha)


def _addcmul(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    return x + _scaled(a * b, value)


def _addcdiv(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    return x + _scaled(a / b, value)


def _lerp(x: Any, end: Any, weight: Any) -> Any:
    return x + _scaled(end - x, weight)


def _fma(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


#: Operator -> the elementary operations it stands for.
COMPOSITES: dict[Any, Callable[..., Any]] = {
    aten.add: _add,
    aten.sub: _sub,
    aten.rsub: _rsub,
    aten.addcmul: _addcmul,
    aten.addcdiv: _addcdiv,
    aten.lerp: _lerp,
    torch.ops.prims.fma: _fma,
}


def _pow(base: Any, exponent: Any) -> Any:
    return base**exponent


#: ``_foreach_NAME`` -> what it does to each element of its lists, where that isn't ``torch.NAME``.
FOREACH: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": _pow,
    "addcmul": lambda x, a, b, value=1: _addcmul(x, a, b, value=value),
    "addcdiv": lambda x, a, b, value=1: _addcdiv(x, a, b, value=value),
    "lerp": _lerp,
    "clamp_min": lambda x, bound: torch.clamp(x, min=bound),
    "clamp_max": lambda x, bound: torch.clamp(x, max=bound),
    "copy": lambda x, source: source.to(x.dtype).expand(x.shape),
    "zero": torch.zeros_like,
    "norm": lambda x, ord=2: torch.linalg.vector_norm(x, ord),
    "max": torch.amax,
}


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
    rule = COMPOSITES.get(getattr(node.target, "overloadpacket", None))
    if rule is None or (rule in (_add, _sub) and node.kwargs.get("alpha", 1) == 1):
        return False
    with editor.graph.inserting_before(node):
        call = _Call(rule, (None,) * len(node.args) + tuple(node.kwargs))
        (result,) = editor.inline(call, *node.args, *node.kwargs.values())
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
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    namespace, _, operator_name = node.target._schema.name.partition("::_foreach_")
    if namespace != "aten" or not operator_name:
        return False
    rule = FOREACH.get(operator_name) or getattr(torch, operator_name)
    arguments = [*node.args, *node.kwargs.values()]
    call = _Call(
        rule, (None,) * len(node.args) + tuple("value" if n == "scalars" else n for n in node.kwargs)
    )
    length = next(len(argument) for argument in arguments if isinstance(argument, (list, tuple)))
    results: list[Node] = []
    with editor.graph.inserting_before(node):
        for i in range(length):
            element = [
                argument[i] if isinstance(argument, (list, tuple)) else argument for argument in arguments
            ]
            results.extend(editor.inline(call, *element))
    for user in list(node.users):
        if user.target is operator.getitem:
            index = user.args[1]
            assert isinstance(index, int)
            _replace(editor, user, results[index])
    return True


def _replace(editor: GraphEditor, node: Node, result: Node) -> None:
    """Put ``result`` in ``node``'s place, in the dtype that ``node`` had."""
    value = tensor_value(node)
    if value is not None:
        with editor.graph.inserting_before(node):
            result = editor.convert(result, value.dtype)
    node.replace_all_uses_with(result)
    editor.graph.erase_node(node)
