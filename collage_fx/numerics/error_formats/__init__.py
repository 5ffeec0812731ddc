"""Error formats: how a value is split between the tensor that the user sees (hi) and auxiliary tensors.

A format is the only place that knows its auxiliary tensors. The passes ask a format for their specifications,
for the function that joins hi and auxiliaries into one float32 value, and for the inverse function, and trace
both functions into the graph. Another format is another entry in a registry below, perhaps by a plug-in.
"""

from __future__ import annotations

from collage_fx.numerics.error_formats.base import AuxiliarySpec as AuxiliarySpec
from collage_fx.numerics.error_formats.base import ErrorBound as ErrorBound
from collage_fx.numerics.error_formats.base import ErrorFormat as ErrorFormat
from collage_fx.numerics.error_formats.blocks import Blocks
from collage_fx.numerics.error_formats.byte import Byte
from collage_fx.numerics.error_formats.dither import Bf16, Dither, Sum
from collage_fx.numerics.error_formats.exact import Exact
from collage_fx.numerics.error_formats.one_term import Fp32, Mcf
from collage_fx.numerics.error_formats.weights import Weights

#: Registered formats that keep hi, by name. The first that an arithmetic can use is its default.
ERROR_FORMATS: dict[str, ErrorFormat] = {fmt.name: fmt for fmt in (Exact(), Mcf(), Fp32(), Byte(), Dither())}

#: Registered formats of packed state, which keep no hi, by the value of the option ``state``. A pair: for
#: numbers of either sign, and for non-negative numbers.
PACKED_FORMATS: dict[str, tuple[ErrorFormat, ErrorFormat]] = {
    f"block{bits}": (Blocks(bits, signed=True), Blocks(bits, signed=False)) for bits in (16, 8)
}
PACKED_FORMATS["bf16"] = (Bf16(),) * 2

#: Format of float32 parameters whose last sum is rounded by dither.
SUM = Sum()

#: Registered formats of packed weights, by the value of the option ``weights``.
WEIGHT_FORMATS: dict[str, ErrorFormat] = {fmt.name: fmt for fmt in (Weights(),)}


def format_named(name: str) -> ErrorFormat | None:
    """Return the registered format of a name, packed or not; None if there is none."""
    packed = {fmt.name: fmt for pair in PACKED_FORMATS.values() for fmt in pair}
    return ({SUM.name: SUM} | ERROR_FORMATS | packed | WEIGHT_FORMATS).get(name)
