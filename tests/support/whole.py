"""Options with which a backend compiles every update for itself, as a whole graph."""

from __future__ import annotations

from dataclasses import dataclass

from collage_fx.graph import StepProgram
from collage_fx.pipeline import PIPELINE, Pass

__all__ = ["WHOLE", "pipeline"]


@dataclass(frozen=True)
class Onlooker(Pass):
    """Does nothing, but might ask for the names of tensors."""

    name = "onlooker"

    def run(self, program: StepProgram) -> str:
        return ""


#: ``CollageBackend(passes=WHOLE)``: a pass that is to see every tensor keeps equal ones from being one.
WHOLE = (*PIPELINE, Onlooker())


def pipeline(*, by_family: bool) -> tuple[Pass, ...]:
    """The passes to give a backend."""
    return PIPELINE if by_family else WHOLE
