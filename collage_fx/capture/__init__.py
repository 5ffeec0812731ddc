"""Capture of a step: an accepted graph with named inputs, split into families of equal updates."""

from collage_fx.capture.compiled import NotByFamily, note_write
from collage_fx.capture.families import Families, families_of
from collage_fx.capture.inputs import describe_input, describe_inputs
from collage_fx.capture.numbers import decompositions, without_numbers
from collage_fx.capture.recording import RecordedPart, Request
from collage_fx.capture.refusals import (
    first_overlap,
    forget_new_state,
    number_of_the_past,
    refuse_aliases,
    refuse_devices,
    refuse_fused_operators,
    refuse_overlaps,
    refuse_uninitialized,
    refuse_unknown_torch,
    refuse_unsupported,
)
from collage_fx.capture.rows import Rows, have_other_sizes, is_of_concern, stand_in_for
from collage_fx.capture.segment import Deferred
from collage_fx.capture.source import first_call
from collage_fx.capture.watch import (
    expect_some_gradients,
    forget_compiled_step,
    not_compiled_yet,
    note_compiled_step,
    note_forward,
    note_installed,
    record_instead,
    start_watch,
)
