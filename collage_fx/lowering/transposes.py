"""Copies of transposed values into the order of the tensors that they update.

Muon transposes matrices with more rows than columns, orthogonalizes them, and transposes the result back: a
view, with its elements in another order in memory than the parameter's. An elementwise operation of both
would not be flat (Note [One kernel for equal parts] in ``rules.py``). So such a view is copied, once.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from collage_fx.graph import copy_of, is_copy_to_input, is_elementwise

aten = torch.ops.aten

#: Views of a tensor with its dimensions in another order.
TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int)


def in_order_of_inputs(gm: GraphModule) -> GraphModule:
    """Return a graph in which transposed values that update contiguous tensors are contiguous copies.

    Only values that nothing but elementwise operations read, on the way to the updated tensors, are copied.
    The given graph is not changed.
    """
    chosen = {node.name for node in _to_be_copied(gm)}
    if not chosen:
        return gm
    gm = copy_of(gm)
    changed = set[Node]()
    for node in gm.graph.nodes:
        if not changed.isdisjoint(node.all_input_nodes) and not is_copy_to_input(node):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            with node.meta["val"].fake_mode:
                node.meta["val"] = node.target(*args, **kwargs)
            changed.add(node)
        if node.name in chosen:
            value = node.meta["val"]
            with gm.graph.inserting_after(node), value.fake_mode:
                copied = gm.graph.call_function(aten.clone.default, (node,))
                copied.meta |= {**node.meta, "val": value.contiguous()}
            node.replace_all_uses_with(copied, lambda user, copied=copied: user is not copied)
            copied.kwargs = {"memory_format": torch.contiguous_format}
            changed.add(copied)
    gm.recompile()
    return gm


def _to_be_copied(gm: GraphModule) -> set[Node]:
    """Return the transposed values that update contiguous tensors by elementwise operations alone."""
    found = set[Node]()
    only_updates: dict[Node, bool] = {}
    for node in reversed(gm.graph.nodes):
        if is_copy_to_input(node):
            only_updates[node] = node.all_input_nodes[0].meta["val"].is_contiguous()
        elif node.op == "call_function":
            is_read_so = bool(node.users) and all(map(only_updates.get, node.users))
            if is_read_so and node.target in TRANSPOSES and not node.meta["val"].is_contiguous():
                found.add(node)
            only_updates[node] = is_read_so and is_elementwise(node)
        else:
            only_updates[node] = False
    return found
