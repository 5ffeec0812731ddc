"""The compiled step: everything that runs at each step."""

from collage_fx.runtime.calls import Plan, Present, Stack, StepInParts, bytes_of
from collage_fx.runtime.kernels import HOST, NO_MEMBER, Call, Column, Kernel, Stackable
from collage_fx.runtime.launches import LONGEST_PIECE, Launch, is_captured
from collage_fx.runtime.layouts import Expected, refuse_layout
from collage_fx.runtime.step import (
    STAND_INS,
    CompensatedStep,
    MakingStep,
    Member,
    WholeStep,
    bind,
    with_numbers,
)
from collage_fx.runtime.tables import WORD
from collage_fx.runtime.temporaries import in_rounds, limit_on
