"""Transposed values: where they are transposed, and where they are copied into another order in memory.

Muon transposes matrices with more rows than columns, orthogonalizes them, and transposes the result back: a
view, with its elements in another order in memory than the parameter's.

* What is computed of the elements of views is computed of the tensors, and the result is viewed. So a product
  of a matrix and its transpose reads one tensor, and what rounds its elements works in their order in memory.
  Sums of all elements of a view are sums of the tensor.
* An elementwise operation of a view and of tensors in the usual order would not be flat (Note [One kernel for
  equal parts] in ``rules.py``). There the view is copied, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from collage_fx.graph import copy_of, is_copy_to_input, is_elementwise, is_number
from collage_fx.lowering.rules import is_total

aten = torch.ops.aten

#: Views of a tensor with its dimensions in another order.
TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int)


def in_order_of_memory(gm: GraphModule) -> GraphModule:
    """Return a graph in which elementwise operations of transposed values are flat.

    The given graph is not changed.
    """
    if not any(node.target in TRANSPOSES for node in gm.graph.nodes):
        return gm
    gm = copy_of(gm)
    known: dict[str, Node] = {}
    changed = set[Node]()  # nodes with other strides than before
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or is_copy_to_input(node):
            continue
        if not changed.isdisjoint(node.all_input_nodes):
            node.meta["val"] = _value(node)
            changed.add(node)
        with gm.graph.inserting_before(node):
            if (source := _transposed(node)) is not None:
                tensor = _transposed(source)
                is_tensor = tensor is not None and _orders_cancel(source, node)
                node.replace_all_uses_with(tensor if is_tensor else _once(node, known))
            elif is_total(node) and (tensor := _transposed(node.all_input_nodes[0])) is not None:
                node.replace_input_with(node.all_input_nodes[0], tensor)
            elif operands := _elements(node):
                result = _flat(node, operands, known)
                if result is not node:
                    node.replace_all_uses_with(result)
                    changed.add(result)
    gm.graph.eliminate_dead_code(lambda node: is_copy_to_input(node) or node.op != "call_function")
    gm.recompile()
    return gm


def _flat(node: Node, operands: Sequence[Node], known: dict[str, Node]) -> Node:
    """Return the result of an elementwise operation, computed of elements in one order in memory.

    Args:
        node: the operation.
        operands: its operands that have elements.
        known: operations that have been added before; those of the same operands are not added again.
    """
    tensors = {view: tensor for view in operands if (tensor := _transposed(view)) is not None}
    if len(tensors) == len(operands) and len({tuple(_order(view)) for view in tensors}) == 1:
        view = operands[0]
        moved = _once(_applied(node, tensors), known)
        return _once(_applied(view, {tensors[view]: moved}), known)
    others = (each for each in operands if each not in tensors)
    if not any(each.meta["val"].is_contiguous() for each in others):
        return node
    copies = {view: _copied(view, known) for view in tensors if not view.meta["val"].is_contiguous()}
    return _once(_applied(node, copies) if copies else node, known)


def _transposed(node: Node) -> Node | None:
    """Return the tensor of which a value is a transposed view; None if it is none."""
    return node.all_input_nodes[0] if node.target in TRANSPOSES else None


def _order(view: Node) -> list[int]:
    """Return the dimensions of the tensor in the order of its transposed view."""
    dimensions = list(range(view.meta["val"].dim()))
    if view.target is aten.permute.default:
        return [dimensions[i] for i in view.args[1]]  # type: ignore[union-attr,index]
    first, second = view.args[1:] if view.target is aten.transpose.int else (0, -1)
    dimensions[first], dimensions[second] = dimensions[second], dimensions[first]  # type: ignore[index]
    return dimensions


def _orders_cancel(inner: Node, outer: Node) -> bool:
    """Return whether a transposed view of a transposed view is the tensor."""
    return [_order(inner)[i] for i in _order(outer)] == sorted(_order(outer))


def _elements(node: Node) -> list[Node]:
    """Return the operands of an elementwise operation but for numbers, if they have its shape."""
    if not is_elementwise(node):
        return []
    operands = [each for each in node.all_input_nodes if not is_number(each)]
    shape = node.meta["val"].shape
    return operands if all(each.meta["val"].shape == shape for each in operands) else []


def _applied(node: Node, instead: Mapping[Node, Node]) -> Node:
    """Add a node's operation with other operands, and return it."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: instead.get(each, each))
    made = node.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    made.meta |= {**node.meta, "val": _value(made)}
    return made


def _copied(view: Node, known: dict[str, Node]) -> Node:
    """Add a copy of a view in the usual order in memory."""
    copied = view.graph.call_function(aten.clone.default, (view,), {"memory_format": torch.contiguous_format})
    copied.meta |= {**view.meta, "val": _value(copied)}
    return _once(copied, known)


def _once(node: Node, known: dict[str, Node]) -> Node:
    """Return the operation of this kind and these operands that was known first."""
    return known.setdefault(f"{node.target} {node.args} {node.kwargs}", node)


def _value(node: Node) -> Any:
    """Compute the fake value of a node from the values of its operands."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    with node.all_input_nodes[0].meta["val"].fake_mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]
