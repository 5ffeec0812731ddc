"""The capture of a step: an accepted graph whose inputs have names, in families of equal updates."""

from collage_fx.capture.families import Families, families_of
from collage_fx.capture.inputs import describe_input, describe_inputs
from collage_fx.capture.new_state import forget_new_state
from collage_fx.capture.numbers import decompositions
from collage_fx.capture.recorder import is_recording
from collage_fx.capture.recording import why_recorded
from collage_fx.capture.refusals import (
    refuse_aliases,
    refuse_fused_operators,
    refuse_overlaps,
    refuse_unsupported,
)
from collage_fx.capture.thinning import rows_to_trace
from collage_fx.capture.watch import note_compiled_step, record_instead

__all__ = [
    "Families",
    "decompositions",
    "describe_input",
    "describe_inputs",
    "families_of",
    "forget_new_state",
    "is_recording",
    "note_compiled_step",
    "record_instead",
    "refuse_aliases",
    "refuse_fused_operators",
    "refuse_overlaps",
    "refuse_unsupported",
    "rows_to_trace",
    "why_recorded",
]
