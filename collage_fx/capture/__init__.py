"""From a call of ``step`` to an accepted graph whose inputs have names, in families of equal updates."""

from collage_fx.capture.families import Families, families_of
from collage_fx.capture.inputs import describe_input, describe_inputs
from collage_fx.capture.new_state import forget_new_state
from collage_fx.capture.recording import is_recorded
from collage_fx.capture.refusals import refuse_aliases, refuse_overlaps, refuse_unsupported
from collage_fx.capture.thinning import rows_to_trace

__all__ = [
    "Families",
    "describe_input",
    "describe_inputs",
    "families_of",
    "forget_new_state",
    "is_recorded",
    "refuse_aliases",
    "refuse_overlaps",
    "refuse_unsupported",
    "rows_to_trace",
]
