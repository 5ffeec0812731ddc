"""The pass that has numbers computed once a step, not once an element.

Inductor computes an elementwise value where it is read, and a 0-d tensor is an elementwise value of one
element: Adam's bias corrections, two powers and a root, become part of the inner loop of every parameter's
kernel. Here each number that elements read is marked as one to be kept in memory
(:data:`~collage_fx.graph.operators.once`). It is computed before the elements are, on the CPU by a kernel of
its own (Note [Parts of a step]), on the device on which it was, so that nothing waits for a device; a number
on the host is a value to a kernel on a device, as before.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from collage_fx.graph import GraphEditor, StepProgram, has_elements, is_copy_to_input, once, tensor_value
from collage_fx.passes.base import Pass


@dataclass(frozen=True)
class HoistScalars(Pass):
    """Has 0-d tensors that are made of 0-d tensors, and read by computations of elements, computed once."""

    name = "hoist-scalars"
    after = ("pin-roundings",)

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        hoisted = 0
        for node in list(editor.graph.nodes):
            readers = [user for user in node.users if has_elements(user) and not is_copy_to_input(user)]
            if _is_computed_number(node) and readers:
                with editor.graph.inserting_after(node):
                    kept = editor.call(once, node)
                for reader in readers:
                    reader.replace_input_with(node, kept)
                hoisted += 1
        editor.finish()
        return f"{hoisted} numbers"


def _is_computed_number(node: Node) -> bool:
    """Whether a node is a 0-d tensor computed from others alone.

    A constant has no operands: it stays in the code.
    """
    value = tensor_value(node)
    operands = node.all_input_nodes
    if node.op != "call_function" or value is None or value.dim() > 0 or not operands:
        return False
    values = [tensor_value(operand) for operand in operands]
    return all(operand is None or operand.dim() == 0 for operand in values)
