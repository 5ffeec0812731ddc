"""Error format ``exact``: float32 numbers, kept as hi and the other 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from collage_fx.numerics import operators
from collage_fx.numerics.error_formats.base import COUNT, AuxiliarySpec, ErrorBound, ErrorFormat
from collage_fx.numerics.formats import BFLOAT16


class Exact(ErrorFormat):
    """Float32 numbers in 4 bytes: hi, and the difference from hi as a 16-bit integer.

    The value is the float32 number, bit for bit, in half the memory of a hidden float32 copy. Exceptions:
    numbers that round to infinity are infinity, and NaNs are other NaNs. In float16, which has fewer
    exponents, numbers below 2**-16 have an error of at most 2**-40, and zeros may lose their sign.

    If a program changes hi, the integer beside it counts at most half an ulp of the new hi. Beside a bfloat16
    zero it counts nothing if it is negative, or else as a number below the smallest of bfloat16.

    bfloat16. For the float32 pattern b, hi is the upper half of ``b + 0x8000``, and the integer is the lower
    half of b as a signed number, the difference between b and hi's pattern. So hi is b rounded to nearest,
    ties away from zero. Ties cannot go to even: an even hi would stand for the patterns between its two ties
    and for both ties, 2**16 + 1 patterns for 16 bits.

    float16. hi is b rounded to nearest even. The integer is b - hi in units of 2**-15 of hi's ulp, at most
    2**14 of them. float32 numbers of at least 2**-16 are multiples of the unit.

    The count is that of the steps whose last sum dither has rounded: Note [The last rounding].
    """

    name = "exact"
    precision = "the other 16 bits of a float32 number"
    is_elementwise = True
    is_dithered = True
    dithers_sums = True

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        return (AuxiliarySpec.like(hi, "rest", torch.int16), COUNT)

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """Return no error; for float16 2**-40, half a unit of the integer where the ulp is 2**-24."""
        return ErrorBound() if dtype == BFLOAT16.dtype else ErrorBound(absolute=Fraction(1, 2**40))

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        rest, _ = auxiliaries
        near = hi.to(torch.float32)
        if hi.dtype == BFLOAT16.dtype:
            return operators.WITH_LOWER_HALF(near, rest)
        return operators.WITH_ULP_PARTS(near, rest)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        start = COUNT.zeros(value.device)
        if dtype == BFLOAT16.dtype:
            return operators.UPPER_HALF(value).to(dtype), operators.LOWER_HALF(value), start
        hi = value.to(dtype)
        return hi, operators.ULP_PARTS(value, hi.to(torch.float32)), start
