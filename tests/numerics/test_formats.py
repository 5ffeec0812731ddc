"""The facts about the storage formats, against torch's own and against exact arithmetic on encodings."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from collage_fx.numerics.formats import STORAGE_FORMATS, FloatFormat, is_low_precision, storage_format
from tests.support.bit_patterns import finite, sample
from tests.support.exact import ENCODINGS

each_format = pytest.mark.parametrize("fmt", STORAGE_FORMATS.values(), ids=lambda fmt: fmt.name)


@each_format
def test_facts(fmt: FloatFormat) -> None:
    facts, encoding = torch.finfo(fmt.dtype), ENCODINGS[fmt.dtype]
    assert fmt.unit_roundoff == Fraction(facts.eps) / 2 == encoding.unit_roundoff
    assert fmt.quantum == Fraction(facts.smallest_normal) * Fraction(facts.eps) == encoding.quantum
    assert fmt.largest == Fraction(facts.max) == encoding.largest
    assert Fraction(2) ** fmt.min_exponent == Fraction(facts.smallest_normal)
    assert fmt.bytes == facts.bits // 8
    assert str(fmt.dtype) == f"torch.{fmt.name}"
    assert fmt.discarded_bits == ENCODINGS[torch.float32].significand_bits - encoding.significand_bits


def test_formats_are_found_by_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert is_low_precision(dtype)
        assert storage_format(dtype).dtype == dtype
    for dtype in (torch.float32, torch.float64, torch.int16, torch.complex32, torch.float8_e5m2):
        assert not is_low_precision(dtype)


@each_format
def test_ulp_is_the_distance_to_the_next_number(fmt: FloatFormat) -> None:
    encoding = ENCODINGS[fmt.dtype]
    value = Fraction(0)
    for pattern in range(encoding.infinity):
        following = encoding.decode(pattern + 1)
        assert fmt.ulp(value) == fmt.ulp(-value) == following - value
        value = following


@each_format
def test_ulp_between_numbers_is_that_of_the_binade(fmt: FloatFormat) -> None:
    assert fmt.ulp(Fraction(4, 3)) == fmt.ulp(Fraction(1)) == 2 * fmt.unit_roundoff
    assert fmt.ulp(Fraction(2, 3)) == fmt.unit_roundoff
    assert fmt.ulp(fmt.quantum / 3) == fmt.quantum


@each_format
def test_numbers_and_midpoints_round_to_nearest_even(fmt: FloatFormat) -> None:
    encoding = ENCODINGS[fmt.dtype]
    for (pattern,) in sample(finite, fmt.dtype, size=2000):
        number, following = encoding.decode(pattern), encoding.decode(pattern + 1)
        assert fmt.nearest(number) == number
        assert fmt.nearest((number + following) / 2) == (number, following)[pattern % 2]
        assert fmt.nearest((2 * number + following) / 3) == number
        assert fmt.nearest((number + 2 * following) / 3) == following


@each_format
@settings(max_examples=300, deadline=None)
@given(value=st.fractions() | st.floats(allow_nan=False, allow_infinity=False))
def test_nearest(fmt: FloatFormat, value: Fraction | float) -> None:
    encoding, exact = ENCODINGS[fmt.dtype], Fraction(value)
    if encoding.overflows(exact):
        assert abs(fmt.nearest(value)) > fmt.largest  # as if there were further binades
    else:
        assert fmt.nearest(value) == encoding.round(exact)


@each_format
@settings(max_examples=300, deadline=None)
@given(value=st.floats())
@example(-0.0)
@example(-1e-300)
@example(65520.0)
@example(65519.99)
def test_round_is_what_storing_leaves(fmt: FloatFormat, value: float) -> None:
    encoding, stored = ENCODINGS[fmt.dtype], fmt.round(value)
    if not math.isfinite(value):
        assert str(stored) == str(value)
        return
    pattern = encoding.nearest(abs(Fraction(value)))
    expected = float(encoding.decode(pattern)) if encoding.is_finite(pattern) else math.inf
    assert str(stored) == str(math.copysign(expected, value))
