"""The pass for ``wide`` arithmetic: the step on float32 values, each rounded once, where it is stored.

The captured graph computes in the storage format: each of its nodes rounds. Here every low-precision value is
carried in float32 from load to store instead, by name and in the graph, whatever Inductor would have done
about it.
"""

from __future__ import annotations

from dataclasses import dataclass

from collage_fx.graph import GraphEditor, Retyper, StepProgram
from collage_fx.passes.base import Pass


@dataclass(frozen=True)
class Widen(Pass):
    """Makes low-precision arithmetic float32 arithmetic; opaque operators keep their dtype."""

    name = "widen"
    after = ("allocate",)

    def applies_to(self, program: StepProgram) -> bool:
        return program.arithmetic == "wide"

    def run(self, program: StepProgram) -> str:
        Retyper(GraphEditor(program.gm, self.name), rounding=False).run()
        return "low-precision arithmetic carried in float32"
