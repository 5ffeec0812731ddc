"""Rewrite that carries low-precision values in float32, for the passes ``widen`` and ``pin-roundings``.

Afterwards every operation that was computed in bfloat16 or float16 works on float32 values; casts remain only
where memory is read (inputs) and written (the ``copy_`` epilogue, outputs, operators that need the storage
dtype). With ``rounding=False`` the intermediate roundings are dropped on purpose; with ``rounding=True``
every value is rounded to the storage format's grid where the original graph rounded it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from collage_fx.graph import nodes
from collage_fx.graph.editor import GraphEditor
from collage_fx.graph.operator_facts import filled_on_grid, is_transparent, keeps_grid
from collage_fx.numerics import ROUND_TO_STORAGE, UPPER_HALF, is_low_precision, storage_format


class Retyper:
    """Rewriter of a graph, in place, that carries low-precision values in float32.

    ``also``: matrix products to compute in float32; all others keep the storage dtype.
    """

    def __init__(self, editor: GraphEditor, *, rounding: bool, also: Collection[Node] = ()) -> None:
        self.editor = editor
        self.rounding = rounding
        self.also = also
        self._float32: dict[Node, Node] = {}
        self._stored: dict[Node, Node] = {}
        self._memory: set[Node] = set()

    def run(self) -> None:
        for node in list(self.editor.graph.nodes):
            with self.editor.graph.inserting_before(node):
                self._visit(node)

    def _visit(self, node: Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            return
        if node.op == "output":
            node.args = map_arg(node.args, self._in_storage)
        elif nodes.is_copy_to_input(node):
            destination, value = node.all_input_nodes[0], self._in_storage(nodes.stored(node))
            node.update_arg(1, self.editor.convert(value, destination.meta["val"].dtype))
        elif not any(nodes.is_low_precision_tensor(n) for n in (node, *node.all_input_nodes)):
            return
        elif nodes.is_conversion(node):
            self._visit_conversion(node)
        elif node.target is operator.getitem:
            # Result of several: float32 if a transparent operator made it, otherwise unchanged.
            (results,), index = node.all_input_nodes, node.args[1]
            if results.meta["val"][index].dtype != node.meta["val"].dtype:
                self._float32[node] = self.editor.call(operator.getitem, results, index)
        elif is_transparent(node.target) or node in self.also:
            self._visit_transparent(node)
        else:
            # Matrix products, library calls, custom operators: operands and results keep the storage dtype.
            node.args, node.kwargs = map_arg((node.args, node.kwargs), self._in_storage)

    def _visit_conversion(self, node: Node) -> None:
        (source,), dtype = node.all_input_nodes, node.meta["val"].dtype
        if is_low_precision(dtype):
            is_upper_half = source.target is UPPER_HALF and dtype is torch.bfloat16
            is_on_grid = is_upper_half or source.meta["val"].dtype == dtype
            value = self.editor.convert(self._in_float32(source), torch.float32)
            self._define(node, value, rounds=not is_on_grid)
        else:
            node.replace_all_uses_with(self.editor.convert(self._in_float32(source), dtype))

    def _visit_transparent(self, node: Node) -> None:
        value, low = nodes.tensor_value(node), nodes.is_low_precision_tensor(node)
        args, kwargs = node.args, dict(node.kwargs)
        if self.rounding and low and value is not None:
            args, kwargs = filled_on_grid(node, storage_format(value.dtype))
        args, kwargs = map_arg((args, kwargs), self._in_float32)
        if low and isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs = {**kwargs, "dtype": torch.float32}
        result = self.editor.call(node.target, *args, **kwargs)
        if low:
            self._define(node, result, rounds=not keeps_grid(node))
        else:
            if value is not None and result.meta["val"].dtype != value.dtype:
                result = self.editor.convert(result, value.dtype)
            node.replace_all_uses_with(result)

    def _define(self, node: Node, result: Node, *, rounds: bool) -> None:
        """Record ``result`` (float32) as the carrier of the low-precision ``node``."""
        # A value that no other node reads is rounded by the store itself.
        if self.rounding and rounds and any(user.op != "output" for user in nodes.readers_of(node)):
            result = self.editor.call(ROUND_TO_STORAGE, result, node.meta["val"].dtype)
        self._float32[node] = result

    def _in_float32(self, node: Node) -> Node:
        """Return the float32 carrier of a low-precision node; any other node unchanged."""
        if not nodes.is_low_precision_tensor(node):
            return node
        if node not in self._float32:  # memory: an input, or an opaque operator's result
            self._float32[node] = self.editor.convert(node, torch.float32)
            self._memory.add(node)
        return self._float32[node]

    def _in_storage(self, node: Node) -> Node:
        """Return a low-precision node in its storage dtype: itself if it is memory, otherwise a cast."""
        carrier = self._float32.get(node)
        if carrier is None or node in self._memory:
            return node
        if node not in self._stored:
            self._stored[node] = self.editor.convert(carrier, node.meta["val"].dtype)
        return self._stored[node]
