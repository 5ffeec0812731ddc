"""The objects that outlive a compilation: all that runs at every step, or between steps."""

from collage_fx.runtime.batches import (
    LENGTH,
    MOST_ARGUMENTS,
    MOST_BUFFERS,
    SUMS_OF_PIECE,
    buffer_at,
    prepare_compiler,
)
from collage_fx.runtime.calls import Call, Kernel, StepInParts, ValueIndex
from collage_fx.runtime.checkpoint import adopt, note_compiled
from collage_fx.runtime.error_terms import (
    change_layout,
    expansion_of,
    require_format,
)
from collage_fx.runtime.layouts import Expected, refuse_layout
from collage_fx.runtime.meter import MeasuredInput, Meter, MeteredStep, Rows
from collage_fx.runtime.metrics import Metrics, UpdateQuality
from collage_fx.runtime.optimizers import KnownTensor, known_tensors, optimizers_among, parameter_names
from collage_fx.runtime.step import CompensatedStep, WholeStep, bind

__all__ = [
    "LENGTH",
    "MOST_ARGUMENTS",
    "MOST_BUFFERS",
    "SUMS_OF_PIECE",
    "Call",
    "CompensatedStep",
    "Expected",
    "Kernel",
    "KnownTensor",
    "MeasuredInput",
    "Meter",
    "MeteredStep",
    "Metrics",
    "Rows",
    "StepInParts",
    "UpdateQuality",
    "ValueIndex",
    "WholeStep",
    "adopt",
    "bind",
    "buffer_at",
    "change_layout",
    "expansion_of",
    "known_tensors",
    "note_compiled",
    "optimizers_among",
    "parameter_names",
    "prepare_compiler",
    "refuse_layout",
    "require_format",
]
