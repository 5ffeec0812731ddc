"""24-bit floats: numbers with a storage dtype's exponents, and eight more bits of fraction than it has.

Beside bfloat16 these are float32 numbers without their last 8 bits, beside float16 numbers with 18 bits of
fraction, a multiple of 2**-32 where they are below 2**-14. Such a number is hi, to which it rounds, and a
byte, which is what it exceeds hi by in units of its own last place: from -128 to 127, as a number halfway
between two of the storage dtype goes to the one above. Above is away from zero in bfloat16, of which the byte
counts bit patterns, and towards infinity in float16.

So every byte is used, and there is no number that a slow drift could not pass. With hi to nearest even the
byte would have to be 128 now and then; kept at 127, a weight would stay there until one step is a unit long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from collage_fx.numerics.arithmetic import lower_half, upper_half, with_lower_half
from collage_fx.numerics.formats import BFLOAT16, FLOAT16
from collage_fx.numerics.operators import define_operator


def nearest(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Float32 ``value`` -> the number of ``dtype`` nearest to it, as float32, and the byte beside that, int8.

    They stand for the 24-bit float nearest to the value, or to the next one where that rounds to another
    number of ``dtype``. The byte is zero where that number is not finite.
    """
    if dtype == BFLOAT16.dtype:
        hi, rest = upper_half(value), (lower_half(value).to(torch.int32) + 0x80) >> 8
    else:
        hi, rest = _parted(value, *_in_units(value))
    return hi, torch.round(rest).clamp(max=127).to(torch.int8)


def dithered_upper(value: Tensor, phases: Tensor, dtype: torch.dtype) -> Tensor:
    """The number of ``dtype`` nearest to what float32 ``value`` is rounded to by dither, as float32.

    That is one of the two 24-bit floats beside it: the upper one where the rest, in units of what is cut off,
    and the phase make one unit. A value that is one stays what it is, and so do NaN and infinity.

    Args:
        value: float32, any shape.
        phases: int32, of that shape: Note [Dither] in ``numerics/dither.py``.
        dtype: bfloat16 or float16.
    """
    return _dithered(value, phases, dtype)[0]


def dithered_byte(value: Tensor, phases: Tensor, dtype: torch.dtype) -> Tensor:
    """What that 24-bit float exceeds :func:`dithered_upper` by, int8; zero where this is not finite."""
    return _dithered(value, phases, dtype)[1]


def _dithered(value: Tensor, phases: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if dtype == BFLOAT16.dtype:
        bits = (value.view(torch.int32) + ((phases >> 24) & 0xFF)) & -0x100
        rounded = torch.where(value == value, bits.view(torch.float32), value)
        return upper_half(rounded), (lower_half(rounded) >> 8).to(torch.int8)
    units, unit = _in_units(value)
    share = ((phases >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24
    hi, rest = _parted(value, _whole(units, 1 - share), unit)  # exact: the share added to units would not be
    return hi, rest.to(torch.int8)


def with_byte(hi: Tensor, rest: Tensor, dtype: torch.dtype) -> Tensor:
    """The 24-bit float of which these are the number of ``dtype``, in float32, and the byte; as float32.

    It is ``hi`` where that is not finite; and in bfloat16 where it is zero and the byte less, as only
    somebody else can leave it.
    """
    if dtype == BFLOAT16.dtype:
        return with_lower_half(hi, rest.to(torch.int32) << 8)
    bits = hi.view(torch.int32)
    towards_zero = (rest.to(torch.int32) ^ bits) >> 31  # -1 there: the number may have a smaller exponent
    unit = _unit((bits & 0x7FFFFFFF) + towards_zero).view(torch.float32)
    return hi + rest.to(torch.float32) * unit


def _in_units(value: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 number in units of the last place that it has among 24-bit floats, exact; and that unit."""
    unit = _unit(value.view(torch.int32) & 0x7FFFFFFF)
    return value * ((254 << 23) - unit).view(torch.float32), unit.view(torch.float32)


def _unit(magnitude: Tensor) -> Tensor:
    """The bits of the last place of 24-bit floats beside float16, from the bits of a magnitude, int32."""
    smallest = torch.full((), (127 + FLOAT16.min_exponent) << 23, dtype=torch.int32, device=magnitude.device)
    return (torch.maximum(magnitude, smallest) & 0x7F800000) - ((FLOAT16.precision - 1 + 8) << 23)


def _parted(value: Tensor, units: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """So many units as a float16 number, of the value's sign, and what they exceed it by; both float32."""
    ulps = _whole(units * 2.0**-8, 0.5)
    magnitude = (ulps * 256 * unit).abs()
    is_finite = magnitude <= float(FLOAT16.largest)
    infinity = torch.full((), float("inf"), dtype=torch.float32, device=value.device)
    magnitude = torch.where(is_finite | (value != value), magnitude, infinity)
    hi = (magnitude.view(torch.int32) | (value.view(torch.int32) & -(2**31))).view(torch.float32)
    return hi, torch.where(is_finite, units - ulps * 256, 0.0)


def _whole(x: Tensor, least: Tensor | float) -> Tensor:
    """Round to a whole number: up where the fraction is ``least`` at least."""
    below = torch.floor(x)
    return torch.where(x - below >= least, below + 1, below)


def _byte_like(value: Tensor, phases: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(value, dtype=torch.int8)


#: :func:`dithered_upper` as one operator.
DITHERED_UPPER = define_operator(
    "dithered_upper(Tensor value, Tensor phases, ScalarType dtype) -> Tensor",
    dithered_upper,
    None,
    torch.Tag.pointwise,
)

#: :func:`dithered_byte` as one operator.
DITHERED_BYTE = define_operator(
    "dithered_byte(Tensor value, Tensor phases, ScalarType dtype) -> Tensor",
    dithered_byte,
    _byte_like,
    torch.Tag.pointwise,
)

#: :func:`with_byte` as one operator.
WITH_BYTE = define_operator(
    "with_byte(Tensor hi, Tensor rest, ScalarType dtype) -> Tensor", with_byte, None, torch.Tag.pointwise
)
