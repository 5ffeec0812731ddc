"""The error format ``exact``: float32 numbers, kept as hi and the 16 bits that hi leaves of them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from collage_fx.numerics import arithmetic
from collage_fx.numerics.error_formats.base import AuxiliarySpec, ErrorBound, ErrorFormat
from collage_fx.numerics.formats import BFLOAT16
from collage_fx.numerics.operators import define_operator


class Exact(ErrorFormat):
    """A float32 number in 4 bytes: hi, and what it leaves of the number, as a 16-bit integer.

    The value is the float32 number, bit for bit, at half of what a hidden float32 copy takes. Exceptions: a
    number so large that it rounds to infinity is infinity, and a NaN is another NaN; in float16, which has
    fewer exponents, numbers below 2**-16 are off by 2**-40 at most. A zero's sign may be lost there.

    Where hi is changed by somebody else, the integer beside it is worth half an ulp of the new hi at most.
    Beside a bfloat16 zero that is nothing, where it is negative, or a number below the smallest of bfloat16.

    bfloat16. With the float32 pattern b, hi is the upper half of ``b + 0x8000`` and the integer is the lower
    half of b, as a signed number: what b exceeds hi's pattern by. So hi is b rounded to nearest, ties away
    from zero. They cannot go to even: an even hi would have the numbers between both of its ties, and the
    ties, 2**16 + 1 patterns for 16 bits.

    float16. hi is b rounded to nearest even. The integer is b - hi in units of 2**-15 of hi's ulp, 2**14 of
    them at most. float32 numbers from 2**-16 on are multiples of that.
    """

    name = "exact"
    precision = "the other 16 bits of a float32 number"
    is_elementwise = True

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        return (AuxiliarySpec.like(hi, "rest", torch.int16),)

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """None; below 2**-16 float16's ulp is 2**-24, of which half the integer's unit is 2**-40."""
        return ErrorBound() if dtype == BFLOAT16.dtype else ErrorBound(absolute=Fraction(1, 2**40))

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        (rest,) = auxiliaries
        near = hi.to(torch.float32)
        if hi.dtype == BFLOAT16.dtype:
            return WITH_LOWER_HALF(near, rest)
        return WITH_ULP_PARTS(near, rest)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        if dtype == BFLOAT16.dtype:
            return UPPER_HALF(value).to(dtype), LOWER_HALF(value)
        hi = value.to(dtype)
        return hi, ULP_PARTS(value, hi.to(torch.float32))


#: :func:`arithmetic.upper_half` as one operator.
UPPER_HALF = define_operator(
    "upper_half(Tensor value) -> Tensor", arithmetic.upper_half, None, torch.Tag.pointwise
)

#: :func:`arithmetic.lower_half` as one operator.
LOWER_HALF = define_operator(
    "lower_half(Tensor value) -> Tensor",
    arithmetic.lower_half,
    lambda value: torch.empty_like(value, dtype=torch.int16),
    torch.Tag.pointwise,
)

#: :func:`arithmetic.with_lower_half` as one operator.
WITH_LOWER_HALF = define_operator(
    "with_lower_half(Tensor hi, Tensor rest) -> Tensor",
    arithmetic.with_lower_half,
    None,
    torch.Tag.pointwise,
)

#: :func:`arithmetic.ulp_parts` as one operator.
ULP_PARTS = define_operator(
    "ulp_parts(Tensor value, Tensor hi) -> Tensor",
    arithmetic.ulp_parts,
    lambda value, hi: torch.empty_like(value, dtype=torch.int16),
    torch.Tag.pointwise,
)

#: :func:`arithmetic.with_ulp_parts` as one operator.
WITH_ULP_PARTS = define_operator(
    "with_ulp_parts(Tensor hi, Tensor parts) -> Tensor",
    arithmetic.with_ulp_parts,
    None,
    torch.Tag.pointwise,
)
