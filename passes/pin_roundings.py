"""The pass that turns roundings into operations that lowering cannot drop.

See Note [Rounding must survive lowering] in ``numerics/arithmetic.py``. Before the pass the graph is in its
readable form: a low-precision node means "rounded", and a cast to the storage format and back is a rounding.
Afterwards it is in its compilable form: values are float32 numbers on the storage format's grid, and every
remaining cast is either exact or part of a store.
"""

from __future__ import annotations

import torch
from torch import Tensor

from collage_fx.graph import GraphEditor, Retyper, StepProgram
from collage_fx.passes.base import Pass


class PinRoundings(Pass):
    """Pass that rounds explicitly each result that the graph reads back; a store rounds the others."""

    name = "pin-roundings"
    after = ("compensate-wide", "compensate-native")

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        if program.arithmetic == "native":
            # torch 2.11's Inductor can round only divisions correctly.
            for node in editor.graph.find_nodes(op="call_function", target=torch.ops.aten.reciprocal.default):
                with editor.graph.inserting_before(node):
                    (quotient,) = editor.inline(_one_divided_by, node.args[0])
                node.replace_all_uses_with(quotient)
                editor.graph.erase_node(node)
        Retyper(editor, rounding=True).run()
        return "low-precision values carried on the storage grid in float32"


def _one_divided_by(x: Tensor) -> Tensor:
    return torch.ones((), dtype=x.dtype, device=x.device) / x
