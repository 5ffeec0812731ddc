"""Transposed values: where they are transposed, and where they are copied into another order in memory.

Muon transposes matrices with more rows than columns, orthogonalizes them, and transposes the result back: a
view, with its elements in another order in memory than the parameter's.

* What is computed of the elements of views is computed of the tensors, and the result is viewed; sums of all
  elements of a view are sums of the tensor.
* The view that an elementwise operation reads beside tensors in the usual order is copied, once: the
  operation would not be flat (Note [One kernel for equal parts] in ``rules.py``).
* A result of the graph keeps its order in memory. A value in another order than the usual one is copied
  before it is viewed in another shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch.fx import GraphModule, Node

from collage_fx.graph import GraphEditor, copy_of, is_copy_to_input, is_elementwise, is_number, tensor_value
from collage_fx.lowering.rules import is_total

aten = torch.ops.aten

#: Views of a tensor with its dimensions in another order.
TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int)

#: Views of a tensor in another shape or dtype, which do not exist for each order in memory.
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.view.dtype)


def in_order_of_memory(gm: GraphModule) -> GraphModule:
    """Return a graph in which elementwise operations of transposed values are flat.

    The given graph is not changed.
    """
    if not any(node.target in TRANSPOSES for node in gm.graph.nodes):
        return gm
    rewriter = _Rewriter(GraphEditor(copy_of(gm), "in-order-of-memory"))
    rewriter.run()
    return rewriter.editor.gm


class _Rewriter:
    """Rewriter of a graph, operation by operation."""

    def __init__(self, editor: GraphEditor) -> None:
        self.editor = editor
        #: Operations by kind and operands, so that none is added twice.
        self._known: dict[str, Node] = {}
        #: Nodes with other strides than the nodes in whose place they are.
        self._changed = set[Node]()

    def run(self) -> None:
        output = self.editor.graph.output_node()
        for node in list(self.editor.graph.nodes):
            if node.op == "call_function" and not is_copy_to_input(node):
                with self.editor.graph.inserting_before(node):
                    result = self._result(node)
                    if _strides(result) != _strides(node):
                        self._changed.add(result)
                        if output in node.users:
                            output.replace_input_with(node, self._as_promised(result, node))
                if result is not node:
                    node.replace_all_uses_with(result)
        self.editor.graph.eliminate_dead_code()
        self.editor.gm.recompile()

    def _result(self, node: Node) -> Node:
        """Return the node to be read in place of a node."""
        if not self._changed.isdisjoint(node.all_input_nodes):
            # A view in another shape might not exist for an operand's order in memory.
            operands = node.all_input_nodes if node.target in RESHAPES else []
            views = [each for each in operands if not each.meta["val"].is_contiguous()]
            node = self._applied(node, {view: self._copied(view) for view in views})
        if (source := _transposed(node)) is not None:
            tensor, dimensions = _transposed(source), range(node.meta["val"].dim())
            if tensor is not None and [_order(source)[i] for i in _order(node)] == [*dimensions]:
                return tensor  # a transposed view of a transposed view
            return self._once(node)
        if is_total(node) and (tensor := _transposed(node.all_input_nodes[0])) is not None:
            return self._applied(node, {node.all_input_nodes[0]: tensor})
        operands = _elements(node)
        return self._flat(node, operands) if operands else node

    def _flat(self, node: Node, operands: Sequence[Node]) -> Node:
        """Return the result of an elementwise operation on ``operands``, computed in one order in memory."""
        tensors = {view: tensor for view in operands if (tensor := _transposed(view)) is not None}
        if len(tensors) == len(operands) and len({tuple(_order(view)) for view in tensors}) == 1:
            view = operands[0]
            moved = self._once(self._applied(node, tensors))
            return self._once(self._applied(view, {tensors[view]: moved}))
        others = (each for each in operands if each not in tensors)
        if not any(each.meta["val"].is_contiguous() for each in others):
            return node
        copies = {view: self._copied(view) for view in tensors if not view.meta["val"].is_contiguous()}
        return self._once(self._applied(node, copies) if copies else node)

    def _applied(self, node: Node, instead: Mapping[Node, Node]) -> Node:
        """Add a node's operation with other operands, and return it."""
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: instead.get(each, each))
        return self.editor.call(node.target, *args, **kwargs)

    def _as_promised(self, value: Node, like: Node) -> Node:
        """Add a copy of a value in another value's order in memory."""
        strides = like.meta["val"].stride()
        order = sorted(range(len(strides)), key=lambda i: -strides[i])
        moved = self._copied(self.editor.call(aten.permute.default, value, order))
        back = sorted(range(len(strides)), key=order.__getitem__)
        return self.editor.call(aten.permute.default, moved, back)

    def _copied(self, view: Node) -> Node:
        """Add a copy of a view in the usual order in memory."""
        return self._once(self.editor.call(aten.clone.default, view, memory_format=torch.contiguous_format))

    def _once(self, node: Node) -> Node:
        """Return the operation of this kind and these operands that was known first."""
        return self._known.setdefault(f"{node.target} {node.args} {node.kwargs}", node)


def _transposed(node: Node) -> Node | None:
    """Return the tensor of which a value is a transposed view; None if it is none."""
    return node.all_input_nodes[0] if node.target in TRANSPOSES else None


def _strides(node: Node) -> list[int]:
    """Return the strides of all dimensions of more than one element; the other strides may be any numbers."""
    value = tensor_value(node)
    if value is None:
        return []
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size != 1]


def _order(view: Node) -> list[int]:
    """Return the dimensions of the tensor in the order of its transposed view."""
    dimensions = list(range(view.meta["val"].dim()))
    if view.target is aten.permute.default:
        return [dimensions[i] for i in cast("Sequence[int]", view.args[1])]
    pair = view.args[1:] if view.target is aten.transpose.int else (0, -1)
    first, second = cast("tuple[int, int]", pair)
    dimensions[first], dimensions[second] = dimensions[second], dimensions[first]
    return dimensions


def _elements(node: Node) -> list[Node]:
    """Return the operands of an elementwise operation but for numbers, if they have its shape.

    A copy in the usual order is made in no other order. A view may name sizes or dimensions, which are others
    where its operand is transposed, even if it leaves the shape as it is.
    """
    value = tensor_value(node)
    is_view = node.target in RESHAPES or getattr(node.target, "is_view", False)
    is_in_usual_order = node.kwargs.get("memory_format") is torch.contiguous_format
    if value is None or (is_view and len(node.args) > 1) or is_in_usual_order or not is_elementwise(node):
        return []
    operands = [each for each in node.all_input_nodes if not is_number(each)]
    return operands if all(each.meta["val"].shape == value.shape for each in operands) else []
