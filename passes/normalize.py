"""The pass that decomposes composite operators into multiplications, additions and the like.

Optimizers write an update in many ways: ``torch._foreach_addcdiv_`` over lists, ``addcmul``, ``lerp``,
``add(alpha=...)``, and AOTAutograd adds ``prims.fma``. The later passes read recurrences and place roundings;
for that, an update must consist of elementary operations. ``graph/operator_facts.py`` lists the composites.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, cast

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from collage_fx import graph
from collage_fx.graph import GraphEditor, StepProgram
from collage_fx.passes.base import Pass

aten = torch.ops.aten
prims = torch.ops.prims


class Normalize(Pass):
    """Pass that replaces composite and foreach operators by elementary operations."""

    name = "normalize"

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        rules = _unpack_foreach, _open_composite, _open_matrix_sum, _open_outer_product
        lists, *opened = (sum(rule(editor, node) for node in list(editor.graph.nodes)) for rule in rules)
        for node in list(editor.graph.nodes):
            _fold_number(editor, node)
        for node in list(editor.graph.nodes):
            _keep_as_tensor(editor, node)
            _choose_constant_branch(editor, node)
            _forward_copy(editor, node)
        graph.read_before_overwriting(editor)
        return f"{sum(opened)} composite and {lists} foreach operations opened"


def _keep_as_tensor(editor: GraphEditor, node: Node) -> None:
    """Replace a tensor made of ``x.item()`` by x: a number that is read would be a symbol of the graph."""
    read = node.args[0] if node.target is aten.scalar_tensor.default else None
    if isinstance(read, Node) and read.target is aten._local_scalar_dense.default:
        (x,) = read.all_input_nodes
        if x.meta["val"].device == node.meta["val"].device:
            _replace(editor, node, x)


def _open_composite(editor: GraphEditor, node: Node) -> bool:
    rule = graph.composite_of(node.target, node.kwargs)
    if rule is None:
        return False
    kwargs: dict[str, Any] = node.kwargs
    with editor.graph.inserting_before(node):
        (result,) = editor.inline(rule, *node.args, **kwargs)
    _replace(editor, node, result)
    return True


def _open_matrix_sum(editor: GraphEditor, node: Node) -> bool:
    """Replace ``x.addmm_(a, b)`` by ``x + mm(a, b)``; the product is rounded as stored, x need not be.

    Not replaced if x has fewer dimensions than the result: then it is a bias, not a value that is updated.
    """
    operator_of_product = graph.facts_of(node.target).product
    if operator_of_product is None or not graph.is_low_precision_tensor(node):
        return False
    x, a, b = node.args
    if node.all_input_nodes[0].meta["val"].shape != node.meta["val"].shape:
        return False
    with editor.graph.inserting_before(node):
        product = editor.call(operator_of_product, a, b)
        numbers = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        (result,) = editor.inline(graph.weighted_sum, x, product, *numbers)
    _replace(editor, node, result)
    return True


def _open_outer_product(editor: GraphEditor, node: Node) -> bool:
    """Replace a matrix product of columns and rows by ``column * row``, as nothing is added up in it.

    As an elementwise operation it is computed in ``wide`` arithmetic, where a product of bfloat16 matrices
    rounds its factors and its result (Adafactor's second moment is such a product).
    """
    if node.target not in (aten.mm.default, aten.bmm.default):
        return False
    column, row = node.args
    factor = graph.tensor_value(column)
    if factor is None or factor.shape[-1] != 1 or not factor.dtype.is_floating_point:
        return False
    with editor.graph.inserting_before(node):
        _replace(editor, node, editor.call(aten.mul.Tensor, column, row))
    return True


def _fold_number(editor: GraphEditor, node: Node) -> None:
    """Replace a 0-d node whose value is known at compile time by a ``full`` of its dtype and device.

    The number is not rounded to the storage format; later passes decide about that.
    """
    value = graph.tensor_value(node)
    if value is None or value.shape or value.is_complex():
        return
    with editor.real_tensors():
        computed = _computed(editor, node)
        number = None if computed is None else computed.to(_dtype_of_number(node)).item()
    if number is not None:
        with editor.graph.inserting_before(node):
            full = editor.call(aten.full.default, [], number, dtype=value.dtype, device=value.device)
        _replace(editor, node, full)


def _computed(editor: GraphEditor, node: Node) -> torch.Tensor | None:
    """Return the value of a 0-d node, in any dtype: a constant tensor, or computed from other numbers.

    torch 2.15 decomposes ``_foreach_lerp`` with a number into a ``torch.tensor(0.1)`` for each tensor, copied
    to a GPU.
    """
    operands = node.all_input_nodes
    if node.target is aten.lift_fresh_copy.default and operands[0].op == "get_attr":
        return cast("torch.Tensor", getattr(editor.gm, str(operands[0].target)))
    if not operands or not all(map(_is_number, operands)):
        return None
    if graph.passed_operand(node) is operands[0]:
        return _number(operands[0])
    if not graph.is_pointwise(node.target):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), _number)
    return cast("torch.Tensor", node.target(*args, **kwargs))  # type: ignore[operator]


def _is_number(node: Node) -> bool:
    is_0d = node.target is aten.full.default and not node.meta["val"].shape
    return is_0d and isinstance(node.args[1], (int, float))


def _number(node: Node) -> torch.Tensor:
    value: Any = node.args[1]
    return torch.full([], value, dtype=_dtype_of_number(node))


def _dtype_of_number(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return torch.float64 if graph.is_low_precision_tensor(node) else dtype


def _choose_constant_branch(editor: GraphEditor, node: Node) -> None:
    """Replace ``where(False, a, b)`` by ``b``."""
    operands: tuple[Any, ...] = node.args
    if node.target is aten.where.self and _is_number(operands[0]):
        chosen = operands[1] if operands[0].args[1] else operands[2]
        if chosen.meta["val"].shape == node.meta["val"].shape:
            _replace(editor, node, chosen)


def _forward_copy(editor: GraphEditor, node: Node) -> None:
    """Replace ``copy(destination, source)`` by ``source``, in the destination's dtype, shape and strides.

    AOTAutograd writes it if an in-place result has other strides than its destination. A returned tensor
    keeps memory of its own: state that is created as a copy of a gradient must not alias the gradient.
    """
    if node.target not in (aten.copy.default, prims.copy_strided.default):
        return
    source: Any = node.args[graph.facts_of(node.target).passes or 0]
    value = node.meta["val"]
    with editor.graph.inserting_before(node):
        result = editor.convert(source, value.dtype)
        if result.meta["val"].shape != value.shape:
            result = editor.call(aten.expand.default, result, list(value.shape))
    if any(user.op == "output" for user in node.users):
        with editor.graph.inserting_before(node):
            own = editor.call(aten.clone.default, result)
        node.replace_all_uses_with(own, delete_user_cb=lambda user: user.op == "output")
    node.replace_all_uses_with(result)
    editor.graph.erase_node(node)
    editor.propagate_from(result)


def _unpack_foreach(editor: GraphEditor, node: Node) -> bool:
    """Replace ``_foreach_op(xs, ys, scalar)``, read by ``getitem``, by ``op(x, y, scalar)`` per element."""
    name = graph.foreach_name(node.target)
    rule = graph.foreach_rule(name)
    if not name or rule is None:
        return False
    results: list[Node] = []
    with editor.graph.inserting_before(node):
        for args, kwargs in graph.foreach_calls(node.args, node.kwargs):
            if isinstance(rule, functools.partial):
                results.append(editor.call(rule.func, *args, **rule.keywords))
            else:
                results.extend(editor.inline(rule, *args, **kwargs))
    for user in list(node.users):
        if user.target is operator.getitem:
            index: Any = user.args[1]
            _replace(editor, user, results[index])
    return True


def _replace(editor: GraphEditor, node: Node, result: Node) -> None:
    """Replace ``node`` by ``result``, converted to the dtype of ``node``."""
    value = graph.tensor_value(node)
    if value is not None:
        with editor.graph.inserting_before(node):
            result = editor.convert(result, value.dtype)
    node.replace_all_uses_with(result)
    editor.graph.erase_node(node)
