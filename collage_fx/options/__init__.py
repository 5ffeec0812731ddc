"""Options and their checks; ``budgets`` beside them has the options that a limit on bytes leads to."""

from collage_fx.choices import GivenOptions
from collage_fx.options.options import Options, refuse_unknown, refuse_unless

__all__ = ["GivenOptions", "Options", "refuse_unknown", "refuse_unless"]
