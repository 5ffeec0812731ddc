"""Error format ``byte``: 24-bit floats, kept as hi and a byte, and rounded by dither."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collage_fx.numerics.error_formats.base import COUNT, AuxiliarySpec, ErrorBound, ErrorFormat
from collage_fx.numerics.float24 import nearest
from collage_fx.numerics.formats import storage_format
from collage_fx.numerics.operators import DITHERED_BYTE, DITHERED_UPPER, PHASE, PHASES, WITH_BYTE


class Byte(ErrorFormat):
    """24-bit floats, with eight more bits of fraction than hi, in 3 bytes: ``numerics/float24.py``.

    Each step rounds up or down by dither (Note [Dither] in ``numerics/dither.py``), so that nothing is lost
    on average, however small updates are. The relative error of a sum shrinks with the root of the number of
    steps. That of rounding to nearest, as in an error term of the tensor's own dtype, does not.

    Numbers that round to infinity are infinity, and NaNs stay NaNs. If a program changes hi, the byte beside
    it counts at most half an ulp of the new hi.
    """

    name = "byte"
    precision = "one byte: 16 bits in bfloat16, 19 in float16, rounded up or down by dither"
    is_elementwise = True
    is_dithered = True

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        return (AuxiliarySpec.like(hi, "rest", torch.int8), COUNT)

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """Return a unit of the byte, 2**-8 of an ulp; an ulp is at most twice the unit roundoff of the value.

        That is the error of a step's stores, and of :meth:`split` next to half an ulp, where the byte ends.
        Elsewhere the error of a split is half of it.
        """
        fmt = storage_format(dtype)
        return ErrorBound(fmt.unit_roundoff / 2**7, fmt.quantum / 2**8)

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        rest, _ = auxiliaries
        return WITH_BYTE(hi.to(torch.float32), rest, hi.dtype)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        hi, rest = nearest(value, dtype)
        return hi.to(dtype), rest, COUNT.zeros(value.device)

    def store(self, value: Tensor, hi: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        _, count, start = inputs
        phases = PHASES(hi, PHASE(count, start))
        upper = DITHERED_UPPER(value, phases, hi.dtype)
        return upper.to(hi.dtype), DITHERED_BYTE(value, phases, hi.dtype), count + 1
