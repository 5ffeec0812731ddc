"""Numbers: storage formats, compensated arithmetic, error formats, and what measures an update.

Ordinary eager functions of tensors, and facts about formats; nothing here knows of graphs, optimizers or
compilers.
"""

from collage_fx.numerics.arithmetic import DoubleWord
from collage_fx.numerics.error_formats import ERROR_FORMATS, ErrorFormat
from collage_fx.numerics.formats import FloatFormat, is_low_precision, short_name, storage_format
from collage_fx.numerics.update_sums import OCTAVES, ROW, SIZES, SUMS

__all__ = [
    "ERROR_FORMATS",
    "OCTAVES",
    "ROW",
    "SIZES",
    "SUMS",
    "DoubleWord",
    "ErrorFormat",
    "FloatFormat",
    "is_low_precision",
    "short_name",
    "storage_format",
]
