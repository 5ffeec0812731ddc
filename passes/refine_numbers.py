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
        return program.sums

    def run(self, program: StepProgram) -> str:
        editor, count = GraphEditor(program.gm, self.name), 0
        refined: dict[Node, Node] = {}

        def in_float64(node: Node) -> Node:
            if _dtype_of_number(node) is not torch.float32:
                return node
            return refined[node] if node in refined else editor.convert(node, torch.float64)

        def define(node: Node, value: Node) -> None:
            """Note the value of a float32 number in float64; put one of another dtype in its place."""
            if _dtype_of_number(node) is torch.float32 and _dtype_of_number(value) is torch.float64:
                refined[node] = value
            else:
                node.replace_all_uses_with(value)

        def visit(node: Node) -> bool:
            """Compute a number in float64; return whether an operation is computed in float64."""
            source = next(iter(node.all_input_nodes), node)
            dtypes = {_dtype_of_number(node), _dtype_of_number(source)}
            if is_conversion(node) and dtypes <= {torch.float32, torch.float64}:
                define(node, in_float64(source))
            elif _computes_number(node):
                args, kwargs = map_arg((node.args, dict(node.kwargs)), in_float64)
                if kwargs.get("dtype") is torch.float32:
                    kwargs = {**kwargs, "dtype": torch.float64}
                define(node, editor.call(node.target, *args, **kwargs))
                return True
            else:
                for operand in node.all_input_nodes:
                    if operand in refined and operand.all_input_nodes:  # a constant stays in the code
                        node.replace_input_with(operand, editor.convert(refined[operand], torch.float32))
            return False

        for node in list(editor.graph.nodes):
            with editor.graph.inserting_before(node):
                count += visit(node)
        return f"{count} numbers"


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
