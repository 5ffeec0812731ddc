"""Storage formats: facts about bfloat16, float16 and float32 from which bounds and verdicts are derived.

Numbers are exact (:class:`fractions.Fraction`), so that tolerances, verdicts and tests can be derived instead
of typed in. Nothing here reads the values of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import copysign, inf, isfinite

import torch


@dataclass(frozen=True)
class FloatFormat:
    """Binary interchange format, float32 or narrower.

    Attributes:
        precision: bits of the significand, the implicit one counted (p in the literature).
        min_exponent: exponent of the smallest normal number, 2**min_exponent.
        max_exponent: exponent of the largest finite binade, 2**max_exponent.
    """

    dtype: torch.dtype
    precision: int
    min_exponent: int
    max_exponent: int

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def unit_roundoff(self) -> Fraction:
        """Largest relative error of rounding to nearest without underflow, u = 2**-p."""
        return Fraction(1, 2**self.precision)

    @property
    def quantum(self) -> Fraction:
        """Smallest positive subnormal number, of which every finite number is a multiple."""
        return Fraction(2) ** (self.min_exponent - self.precision + 1)

    @property
    def largest(self) -> Fraction:
        """Largest finite number."""
        return (2 - Fraction(2) ** (1 - self.precision)) * Fraction(2) ** self.max_exponent

    @property
    def discarded_bits(self) -> int:
        """Number of significand bits that a float32 number has beyond this format."""
        return 24 - self.precision

    def ulp(self, value: Fraction) -> Fraction:
        """Return the distance of neighbours in the binade of a value; the quantum for subnormals and zero."""
        if value == 0:
            return self.quantum
        magnitude = abs(value)
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        if Fraction(2) ** exponent > magnitude:
            exponent -= 1
        return max(Fraction(2) ** (exponent - self.precision + 1), self.quantum)

    def nearest(self, value: Fraction | float) -> Fraction:
        """Round to nearest, ties to even, without overflow (IEEE 754-2019, section 4.3.1)."""
        exact = Fraction(value)
        ulp = self.ulp(exact)
        return round(exact / ulp) * ulp  # Fraction's round() takes ties to even

    def round(self, value: float) -> float:
        """Round to nearest as a store does: overflow gives infinity; ±0, ±inf and NaN stay."""
        if value == 0 or not isfinite(value):
            return value
        nearest = self.nearest(value)
        return copysign(float(abs(nearest)) if abs(nearest) <= self.largest else inf, value)


BFLOAT16 = FloatFormat(torch.bfloat16, precision=8, min_exponent=-126, max_exponent=127)
FLOAT16 = FloatFormat(torch.float16, precision=11, min_exponent=-14, max_exponent=15)
FLOAT32 = FloatFormat(torch.float32, precision=24, min_exponent=-126, max_exponent=127)

#: Formats whose state tensors collage_fx compensates, by dtype. float32 state gets no error terms, but may be
#: packed. float64 state is left alone.
STORAGE_FORMATS: dict[torch.dtype, FloatFormat] = {f.dtype: f for f in (BFLOAT16, FLOAT16)}


def short_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype (``bf16``, ``f16``, ``f32``, ``f64``), or else its whole name."""
    return _SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


_SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64"}


def is_low_precision(dtype: torch.dtype) -> bool:
    """Return whether a dtype is bfloat16 or float16."""
    return dtype in STORAGE_FORMATS


def storage_format(dtype: torch.dtype) -> FloatFormat:
    """Return the :class:`FloatFormat` of bfloat16, float16 or float32."""
    return FLOAT32 if dtype == FLOAT32.dtype else STORAGE_FORMATS[dtype]
