"""24-bit floats: numbers with the exponents of a storage dtype and eight more bits of fraction.

Beside bfloat16 these are float32 numbers without their last 8 bits. Beside float16 they have 18 bits of
fraction, and are multiples of 2**-32 below 2**-14. A 24-bit float is stored as hi, the number of the storage
dtype that it rounds to, and a byte, the difference from hi in units of the last place of the 24-bit float.
The byte is between -128 and 127, because ties round up: away from zero in bfloat16, where the byte counts bit
patterns, and towards infinity in float16.

So every value of the byte is used, and a slow drift can pass every number. If hi were rounded to nearest
even, the byte would have to be 128 in some ties; limited to 127, a weight would stay there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from collage_fx.numerics.arithmetic import lower_half, scalar_like, upper_half, with_lower_half
from collage_fx.numerics.formats import BFLOAT16, FLOAT16


def nearest(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split float32 ``value`` into the nearest number of ``dtype``, as float32, and the byte, int8.

    The pair is the 24-bit float nearest to the value, or its neighbour where the nearest rounds to another
    number of ``dtype``. The byte is zero where that number is not finite.
    """
    if dtype == BFLOAT16.dtype:
        hi, rest = upper_half(value), (lower_half(value).to(torch.int32) + 0x80) >> 8
    else:
        hi, rest = _split(value, *_in_units(value))
    return hi, torch.round(rest).clamp(max=127).to(torch.int8)


def dithered_upper(value: Tensor, phases: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 ``value`` to a 24-bit float by dither; return the upper part, as float32.

    The 24-bit float is one of the two neighbours of the value: the upper one where the discarded fraction of
    a unit and the phase add up to one unit. 24-bit floats, NaN and infinity stay as they are.

    Args:
        value: float32, any shape.
        phases: int32, of the same shape: Note [Dither] in ``numerics/dither.py``.
        dtype: bfloat16 or float16.
    """
    return _dithered(value, phases, dtype)[0]


def dithered_byte(value: Tensor, phases: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the byte beside :func:`dithered_upper`, int8; zero where the upper part is not finite."""
    return _dithered(value, phases, dtype)[1]


def _dithered(value: Tensor, phases: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if dtype == BFLOAT16.dtype:
        bits = (value.view(torch.int32) + ((phases >> 24) & 0xFF)) & -0x100
        rounded = torch.where(value == value, bits.view(torch.float32), value)
        return upper_half(rounded), (lower_half(rounded) >> 8).to(torch.int8)
    units, unit = _in_units(value)
    share = ((phases >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24
    hi, rest = _split(value, _whole(units, 1 - share), unit)  # exact: units + share would not be
    return hi, rest.to(torch.int8)


def with_byte(hi: Tensor, rest: Tensor, dtype: torch.dtype) -> Tensor:
    """Join ``hi``, a number of ``dtype`` in float32, and a byte into the 24-bit float, as float32.

    The result is ``hi`` where ``hi`` is not finite, and in bfloat16 where ``hi`` is zero and the byte
    negative. The library never stores such a pair, but a program that writes to hi may leave one.
    """
    if dtype == BFLOAT16.dtype:
        return with_lower_half(hi, rest.to(torch.int32) << 8)
    bits = hi.view(torch.int32)
    towards_zero = (rest.to(torch.int32) ^ bits) >> 31  # -1: maybe another exponent
    unit = _unit((bits & 0x7FFFFFFF) + towards_zero).view(torch.float32)
    return hi + rest.to(torch.float32) * unit


def _in_units(value: Tensor) -> tuple[Tensor, Tensor]:
    """Divide float32 numbers by the last place of the 24-bit float, exactly; return quotient and unit."""
    unit = _unit(value.view(torch.int32) & 0x7FFFFFFF)
    return value * ((254 << 23) - unit).view(torch.float32), unit.view(torch.float32)


def _unit(magnitude: Tensor) -> Tensor:
    """Return the last place of 24-bit floats beside float16, as int32 bits, from the bits of a magnitude."""
    smallest = scalar_like((127 + FLOAT16.min_exponent) << 23, magnitude)
    return (torch.maximum(magnitude, smallest) & 0x7F800000) - ((FLOAT16.precision - 1 + 8) << 23)


def _split(value: Tensor, units: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Split a number of units into a float16 number with the sign of ``value``, and units; both float32."""
    ulps = _whole(units * 2.0**-8, 0.5)
    magnitude = (ulps * 256 * unit).abs()
    is_finite = magnitude <= float(FLOAT16.largest)
    infinity = scalar_like(float("inf"), value)
    magnitude = torch.where(is_finite | (value != value), magnitude, infinity)
    hi = (magnitude.view(torch.int32) | (value.view(torch.int32) & -(2**31))).view(torch.float32)
    return hi, torch.where(is_finite, units - ulps * 256, 0.0)


def _whole(x: Tensor, least: Tensor | float) -> Tensor:
    """Round to a whole number: up where the fraction is at least ``least``."""
    below = torch.floor(x)
    return torch.where(x - below >= least, below + 1, below)
