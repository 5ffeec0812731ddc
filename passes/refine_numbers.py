"""The pass that computes numbers of a step in float64.

A number is a 0-d tensor made of 0-d tensors: a bias correction, a step size. Optimizers count steps in
float32, and ``1 - beta ** step`` is computed there, too: for a beta of 0.99999 it is off by 3e-3 in the first
step, and by 3e-5 after a hundred. In float64 it takes the same time, as it is computed once for each tensor.
It is rounded to float32 where elements read it.
"""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from collage_fx.graph import GraphEditor, StepProgram, is_conversion, is_transparent, tensor_value
from collage_fx.passes.base import Pass


class RefineNumbers(Pass):
    """Pass that carries 0-d float32 tensors in float64 until elements read them or a store writes them."""

    name = "refine-numbers"
    after = ("widen",)

    def applies_to(self, program: StepProgram) -> bool:
        return program.arithmetic == "wide" and program.changes == "summed"

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        numbers = _Numbers(editor)
        for node in list(editor.graph.nodes):
            with editor.graph.inserting_before(node):
                numbers.visit(node)
        return f"{numbers.count} numbers"


class _Numbers:
    """Numbers of a graph, and their values in float64."""

    def __init__(self, editor: GraphEditor) -> None:
        self.count = 0  # operations that are computed in float64
        self._editor = editor
        self._refined: dict[Node, Node] = {}

    def visit(self, node: Node) -> None:
        if is_conversion(node) and _dtype_of_number(node) in (torch.float32, torch.float64):
            (source,) = node.all_input_nodes
            if _dtype_of_number(source) in (torch.float32, torch.float64):
                self._define(node, self._in_float64(source))
                return
        if _computes_number(node):
            args, kwargs = map_arg((node.args, dict(node.kwargs)), self._in_float64)
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
            self._define(node, self._editor.call(node.target, *args, **kwargs))
            self.count += 1
        else:
            for operand in node.all_input_nodes:
                if operand in self._refined and operand.all_input_nodes:  # a constant stays in the code
                    narrow = self._editor.convert(self._refined[operand], torch.float32)
                    node.replace_input_with(operand, narrow)

    def _define(self, node: Node, value: Node) -> None:
        """Note the value of a float32 number in float64; put a value of another dtype in its place."""
        if _dtype_of_number(node) is torch.float32 and _dtype_of_number(value) is torch.float64:
            self._refined[node] = value
        else:
            node.replace_all_uses_with(value)

    def _in_float64(self, node: Node) -> Node:
        if _dtype_of_number(node) is not torch.float32:
            return node
        return self._refined[node] if node in self._refined else self._editor.convert(node, torch.float64)


def _dtype_of_number(node: Node) -> torch.dtype | None:
    """Return the dtype of a 0-d tensor; None for anything else."""
    value = tensor_value(node)
    return value.dtype if value is not None and value.dim() == 0 else None


def _computes_number(node: Node) -> bool:
    """Return whether an operation makes a number of numbers, one of them float32 or made so."""
    if node.op != "call_function" or is_conversion(node) or not is_transparent(node.target):
        return False
    tensors = [each for each in node.all_input_nodes if tensor_value(each) is not None]
    dtypes = {*map(_dtype_of_number, (node, *tensors))}
    return None not in dtypes and torch.float32 in dtypes
