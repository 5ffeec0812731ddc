"""Error formats: how a value is split between what the user sees (hi) and what is kept beside it.

A format is the only place that knows what its auxiliary tensors are. The passes ask it for their
specifications, for the function that joins hi and auxiliaries into one float32 value and for its inverse, and
trace both into the graph. Another format is another file here, and a place in the registry below.
"""

from __future__ import annotations

from collage_fx.numerics.error_formats.base import AuxiliarySpec, ErrorBound, ErrorFormat
from collage_fx.numerics.error_formats.blocks import Blocks
from collage_fx.numerics.error_formats.byte import Byte
from collage_fx.numerics.error_formats.dither import Dither
from collage_fx.numerics.error_formats.exact import (
    LOWER_HALF,
    ULP_PARTS,
    UPPER_HALF,
    WITH_LOWER_HALF,
    WITH_ULP_PARTS,
    Exact,
)
from collage_fx.numerics.error_formats.fp32 import Fp32
from collage_fx.numerics.error_formats.mcf import Mcf

__all__ = [
    "ERROR_FORMATS",
    "LOWER_HALF",
    "PACKED_FORMATS",
    "ULP_PARTS",
    "UPPER_HALF",
    "WITH_LOWER_HALF",
    "WITH_ULP_PARTS",
    "AuxiliarySpec",
    "Blocks",
    "Byte",
    "Dither",
    "ErrorBound",
    "ErrorFormat",
    "Exact",
    "Fp32",
    "Mcf",
    "format_named",
]

#: The registered formats by name. The first that the arithmetic can use is the default.
ERROR_FORMATS: dict[str, ErrorFormat] = {fmt.name: fmt for fmt in (Exact(), Mcf(), Fp32(), Byte(), Dither())}

#: The registered formats of packed state, which keep no hi, by the value of the option ``state``: for
#: numbers of either sign, and for numbers that are not negative.
PACKED_FORMATS: dict[str, tuple[ErrorFormat, ErrorFormat]] = {
    f"block{bits}": (Blocks(bits, signed=True), Blocks(bits, signed=False)) for bits in (16, 8)
}


def format_named(name: str) -> ErrorFormat | None:
    """The registered format of a name, of those that keep hi or of packed state; None if there is none."""
    packed = {fmt.name: fmt for pair in PACKED_FORMATS.values() for fmt in pair}
    return ERROR_FORMATS.get(name) or packed.get(name)
