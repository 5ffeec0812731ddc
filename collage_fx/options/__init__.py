"""Options and their checks; ``budgets`` beside them has the options that a limit on bytes leads to."""

from collage_fx.options.options import (
    DEFAULT_FORMATS,
    DEFAULT_ROUNDINGS,
    MODES,
    GivenOptions,
    Options,
    refuse_unknown,
    refuse_unless,
)

__all__ = [
    "DEFAULT_FORMATS",
    "DEFAULT_ROUNDINGS",
    "MODES",
    "GivenOptions",
    "Options",
    "refuse_unknown",
    "refuse_unless",
]
