"""Roundings that the arithmetic relies on are made of operations that lowering cannot drop.

See Note [Rounding must survive lowering] in ``collage_fx/arithmetic.py``. The graph arrives in its readable
form, in which a low-precision node means "rounded" and a cast there and back is a rounding; it leaves in its
compilable form, in which values are float32 numbers on the storage format's grid and every remaining cast is
either exact or a store.
"""

from __future__ import annotations

from dataclasses import dataclass

from collage_fx.graph import GraphEditor
from collage_fx.passes.base import Pass
from collage_fx.program import StepProgram
from collage_fx.retype import Retyper

__all__ = ["PinRoundings"]


@dataclass(frozen=True)
class PinRoundings(Pass):
    """Results that the graph reads back are rounded explicitly; those only stored are not."""

    name = "pin-roundings"
    after = ("compensate-wide", "compensate-native")

    def run(self, program: StepProgram) -> str:
        Retyper(GraphEditor(program.gm, self.name), rounding=True).run()
        return "low-precision values carried on the storage grid in float32"
