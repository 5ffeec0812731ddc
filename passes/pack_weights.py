"""The pass that packs weights: parameters of which only codes are kept, in a format such as ``int16x32``.

Other than a moment, a parameter may have any recurrence: its rounding is right on average, and its error is
that of the format. It keeps error terms if its rows are not made of whole blocks, if it has few elements, if
it is a shard, or if a mask makes the step keep single elements of a block. A recorded step packs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from collage_fx.graph import StateTensor, StepProgram, splits_blocks
from collage_fx.numerics import ErrorFormat
from collage_fx.passes.base import Pass
from collage_fx.passes.pack_state import why_not_stored


@dataclass(frozen=True)
class PackWeights(Pass):
    """Pass that gives the format of packed weights to parameters that may have it."""

    name = "pack-weights"
    after = ("analyze", "pack-state")

    def applies_to(self, program: StepProgram) -> bool:
        is_asked = program.weights is not None or program.packed_weights
        return bool(is_asked) and program.strategy != "none"

    def run(self, program: StepProgram) -> str:
        chosen = 0
        parameters = [each for each in program.parameters if not each.is_float32]
        for state in parameters:
            fmt = program.packed_weights.get(state.position, program.weights)
            if fmt is None:
                continue
            state.not_packed = _why_not(state, fmt)
            if state.not_packed:
                state.selection += f"; not packed: {state.not_packed}"
            else:
                state.chosen_format, state.selection = fmt, "a weight"
                chosen += 1
        return f"{chosen} of {len(parameters)} parameters"


def _why_not(state: StateTensor, fmt: ErrorFormat) -> str:
    """Return why a parameter is not packed; empty if it is."""
    if state.info.cut_from:
        return "it is a shard, whose memory FSDP2 holds"
    if splits_blocks(state, fmt):
        return "the step keeps single elements, which have a scale in common with others"
    return why_not_stored(state, fmt)
