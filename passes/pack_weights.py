"""The pass that chooses which parameters are kept as codes alone, in a format such as ``int16x32``.

A weight may have any recurrence: its rounding is right on average, and its error is that of the format. It
keeps error terms if its rows are not made of whole blocks, if it has few elements, or if the step keeps
single elements of a block. A recorded step chooses none.
"""

from __future__ import annotations

from collage_fx.graph import StepProgram, splits_blocks
from collage_fx.passes.base import Pass


class PackWeights(Pass):
    """Pass that gives the format of weights to parameters that may have it; others keep error terms."""

    name = "pack-weights"
    after = ("analyze", "pack-state")

    def applies_to(self, program: StepProgram) -> bool:
        is_asked = program.weights is not None or program.known_formats
        return bool(is_asked) and program.strategy != "none"

    def run(self, program: StepProgram) -> str:
        chosen = 0
        parameters = [each for each in program.parameters if not each.is_float32]
        for state in parameters:
            fmt = program.known_formats.get(state.position, program.weights)
            if fmt is None:
                continue
            why_not = splits_blocks(state, fmt) or state.why_not_stored(fmt)
            chosen += state.pack(fmt, why_not, "a weight")
        return f"{chosen} of {len(parameters)} parameters"
