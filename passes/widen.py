"""The pass for ``wide`` arithmetic: compute the step in float32, and round each value once, when stored.

The captured graph computes in the storage format: each of its nodes rounds. This pass carries every
low-precision value in float32 from load to store, explicitly in the graph, so that the result does not depend
on Inductor's own choice of intermediate precision.
"""

from __future__ import annotations

from dataclasses import dataclass

from collage_fx.graph import GraphEditor, Retyper, StepProgram
from collage_fx.passes.base import Pass


@dataclass(frozen=True)
class Widen(Pass):
    """Pass that turns low-precision arithmetic into float32 arithmetic; opaque operators keep their dtype."""

    name = "widen"
    after = ("allocate",)

    def applies_to(self, program: StepProgram) -> bool:
        return program.arithmetic == "wide"

    def run(self, program: StepProgram) -> str:
        Retyper(GraphEditor(program.gm, self.name), rounding=False).run()
        return "low-precision arithmetic carried in float32"
