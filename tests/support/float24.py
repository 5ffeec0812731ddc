"""24-bit floats and dither by their definitions, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import torch

from collage_fx.numerics import storage_format

__all__ = ["nearest", "phase", "rounded"]


def phase(place: int, step: int) -> int:
    """That of the element in this place in memory, of a whole tensor: Note [Dither]."""
    window = step // 32
    for _ in range(2):
        window = ((window >> 16) ^ window) * 0x45D9F3B % 2**32
    return (place * 0xB504F333 + step * 0x9E3779B9 + window) % 2**32


def rounded(value: Fraction, phase: int, dtype: torch.dtype) -> Fraction:
    """The 24-bit float that a float32 number is rounded to.

    Up where the rest and as many of the phase's upper bits as count make a unit.
    """
    unit, sign = storage_format(dtype).ulp(value) / 2**8, _above(value, dtype)
    bits = {torch.bfloat16: 8, torch.float16: 24}[dtype]
    share = Fraction((phase % 2**32) >> (32 - bits), 2**bits)
    below = floor(sign * value / unit)
    part = torch.tensor(float(sign * value / unit - below), dtype=torch.float64)
    part = part.float()  # which does not hold all bits of a negative number's
    return sign * (below + (Fraction(float(part)) + share >= 1)) * unit


def nearest(value: Fraction, dtype: torch.dtype) -> Fraction:
    """The storage-format number nearest to a value, the one above where two are."""
    ulp, sign = storage_format(dtype).ulp(value), _above(value, dtype)
    return sign * floor(sign * value / ulp + Fraction(1, 2)) * ulp


def _above(value: Fraction, dtype: torch.dtype) -> int:
    """Whether up is away from zero, as in bfloat16, or to infinity."""
    return -1 if dtype == torch.bfloat16 and value < 0 else 1
