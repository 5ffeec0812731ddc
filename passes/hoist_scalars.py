"""The pass that lets numbers be computed once per step, not once per element.

Inductor computes an elementwise value where it is read, and a 0-d tensor counts as elementwise: Adam's bias
corrections (two powers and a root) would be computed in the inner loop of every parameter's kernel. This pass
marks each number that elementwise operations read, so that it is stored in memory
(:data:`~collage_fx.graph.editor.once`). The number is computed before the elements, on the CPU by a
separate kernel (Note [Parts of a step]). It stays on its device, so that no synchronization is needed; a
number on the host is still passed to a device kernel by value.
"""

from __future__ import annotations

from collage_fx.graph import GraphEditor, StepProgram, has_elements, once, readers_of, tensor_value
from collage_fx.passes.base import Pass


class HoistScalars(Pass):
    """Pass that computes 0-d tensors once per step, if made of 0-d tensors and read by elementwise code."""

    name = "hoist-scalars"
    after = ("pin-roundings",)
    optional = True

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        hoisted = 0
        for node in list(editor.graph.nodes):
            readers = list(filter(has_elements, readers_of(node)))
            is_0d = tensor_value(node) is not None and not has_elements(node)
            operands = node.all_input_nodes  # of a constant none: it stays in the code
            is_of_numbers = bool(operands) and not any(map(has_elements, operands))
            if node.op == "call_function" and is_0d and is_of_numbers and readers:
                with editor.graph.inserting_after(node):
                    kept = editor.call(once, node)
                for reader in readers:
                    reader.replace_input_with(node, kept)
                hoisted += 1
        return f"{hoisted} numbers"
