"""Compensated arithmetic on bit patterns, against exact arithmetic; each bound has its formula beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from collage_fx.numerics.arithmetic import (
    add_double_words,
    double_word_constant,
    finite_or_zero,
    grow,
    join,
    multiply_double_words,
    negate_double_word,
    scale_double_word,
    two_prod,
    two_sum,
)
from collage_fx.numerics.operators import split
from tests.support.bit_patterns import (
    Generator,
    examples,
    finite,
    near_storage_numbers,
    sample,
    two_numbers,
    two_words,
    word_and_number,
)
from tests.support.exact import ENCODINGS, Encoding, fractions, patterns, tensor

DTYPES = [torch.bfloat16, torch.float16]
FLOAT32 = ENCODINGS[torch.float32]


# -- bounds


def fits(encoding: Encoding, *terms: Fraction) -> bool:
    """Whether no sum of these terms, in any order, with a few roundings on the way, overflows."""
    return sum(map(abs, terms)) <= encoding.largest * (1 - 8 * encoding.unit_roundoff)


def product_underflow(encoding: Encoding) -> Fraction:
    """η: how far off a product is at most when its error is not relative.

    Half a quantum, and half of float32's where the product is rounded to that first: those of float16 are
    not, as the smallest, quantum², is a normal number of float32.
    """
    in_float32 = FLOAT32.quantum / 2 if encoding.quantum**2 < FLOAT32.smallest_normal else Fraction(0)
    return encoding.quantum / 2 + in_float32


def rounds_relatively(encoding: Encoding, product: Fraction) -> bool:
    """Whether rounding is what it would be with an unlimited range of exponents."""
    return abs(product) >= encoding.smallest_normal or encoding.round(product) == product


def has_exact_remainder(encoding: Encoding, product: Fraction) -> bool:
    return ((product - encoding.round(product)) / encoding.quantum).denominator == 1


def multiply_bound(encoding: Encoding, xh: Fraction, xl: Fraction, yh: Fraction, yl: Fraction) -> Fraction:
    u = encoding.unit_roundoff
    if (
        has_exact_remainder(encoding, xh * yh)
        and rounds_relatively(encoding, xh * yl)
        and rounds_relatively(encoding, xl * yh)
    ):
        return 7 * u**2 * abs((xh + xl) * (yh + yl))
    # Every operation's own error, with |xl| <= u |xh| and |yl| <= u |yh|:
    eta, p = product_underflow(encoding), abs(xh * yh)
    remainder, remainder_error = u * p + 2 * eta, eta
    cross, cross_error = (1 + u) * u * p + eta, u * u * p + eta
    cross_sum, cross_sum_error = (1 + u) * 2 * cross, u * 2 * cross
    low_error = u * (remainder + cross_sum)
    neglected = u**2 * p  # xl yl
    return remainder_error + 2 * cross_error + cross_sum_error + low_error + neglected


def scale_bound(encoding: Encoding, xh: Fraction, xl: Fraction, y: Fraction) -> Fraction:
    u = encoding.unit_roundoff
    if has_exact_remainder(encoding, xh * y) and rounds_relatively(encoding, xl * y):
        return (Fraction(3, 2) * u**2 + 4 * u**3) * abs((xh + xl) * y)
    eta, p = product_underflow(encoding), abs(xh * y)
    remainder, remainder_error = u * p + 2 * eta, eta
    cross, cross_error = (1 + u) * u * p + eta, u * u * p + eta
    rest = u * ((1 + u) * p + eta + cross)  # what is left over by the sum of the rounded products
    return remainder_error + cross_error + u * (rest + remainder)


# -- properties: (dtype, *operands) -> how many of the cases the property speaks about


def check_two_sum(dtype: torch.dtype, a: Tensor, b: Tensor) -> int:
    encoding, held = ENCODINGS[dtype], 0
    s, e = two_sum(a, b)
    for x, y, s_, e_ in zip(fractions(a), fractions(b), patterns(s), patterns(e), strict=True):
        if encoding.overflows(x + y):
            assert not encoding.is_finite(s_)
        elif abs(y) != encoding.largest:
            assert encoding.decode(s_) == encoding.round(x + y)
            assert encoding.is_finite(e_)
            assert encoding.decode(s_) + encoding.decode(e_) == x + y
            held += 1
    return held


def check_two_prod(dtype: torch.dtype, a: Tensor, b: Tensor) -> int:
    encoding, held = ENCODINGS[dtype], 0
    p, e = two_prod(a, b)
    for x, y, p_, e_ in zip(fractions(a), fractions(b), patterns(p), patterns(e), strict=True):
        product = x * y
        if encoding.overflows(product):
            assert not encoding.is_finite(p_)
            continue
        assert encoding.is_finite(p_)
        assert encoding.is_finite(e_)
        if dtype == torch.float16 or abs(product) >= FLOAT32.smallest_normal:
            assert encoding.decode(p_) == encoding.round(product)
        exact = has_exact_remainder(encoding, product)
        assert exact or encoding.ulp(x) * encoding.ulp(y) < encoding.quantum
        error = abs(encoding.decode(p_) + encoding.decode(e_) - product)
        assert (error == 0) == exact
        assert error <= product_underflow(encoding)
        held += exact
    return held


def check_word(dtype: torch.dtype, word: tuple[int, ...], exact: Fraction, bound: Fraction) -> None:
    encoding = ENCODINGS[dtype]
    assert all(map(encoding.is_finite, word))
    high, low = map(encoding.decode, word)
    assert abs(high + low - exact) <= bound
    assert encoding.round(high + low) == high
    assert abs(low) <= encoding.ulp(high) / 2


def check_grow(dtype: torch.dtype, hi: Tensor, lo: Tensor, y: Tensor) -> int:
    encoding, held = ENCODINGS[dtype], 0
    results = zip(*map(patterns, grow(hi, lo, y)), strict=True)
    for operands, result in zip(zip(*map(fractions, (hi, lo, y)), strict=True), results, strict=True):
        if fits(encoding, *operands):
            exact = sum(operands, Fraction(0))
            check_word(dtype, result, exact, 2 * encoding.unit_roundoff**2 * abs(exact))
            held += 1
    return held


def check_add_double_words(dtype: torch.dtype, xh: Tensor, xl: Tensor, yh: Tensor, yl: Tensor) -> int:
    encoding, held = ENCODINGS[dtype], 0
    u = encoding.unit_roundoff
    results = zip(*map(patterns, add_double_words(xh, xl, yh, yl)), strict=True)
    for operands, result in zip(zip(*map(fractions, (xh, xl, yh, yl)), strict=True), results, strict=True):
        if fits(encoding, *operands):
            exact = sum(operands, Fraction(0))
            check_word(dtype, result, exact, (3 * u**2 + 13 * u**3) * abs(exact))
            held += 1
    return held


def check_multiply_double_words(dtype: torch.dtype, xh: Tensor, xl: Tensor, yh: Tensor, yl: Tensor) -> int:
    encoding, held = ENCODINGS[dtype], 0
    results = zip(*map(patterns, multiply_double_words(xh, xl, yh, yl)), strict=True)
    for operands, result in zip(zip(*map(fractions, (xh, xl, yh, yl)), strict=True), results, strict=True):
        a, b, c, d = operands
        if fits(encoding, a * c, a * d, b * c):
            check_word(dtype, result, (a + b) * (c + d), multiply_bound(encoding, a, b, c, d))
            held += 1
    return held


def check_scale_double_word(dtype: torch.dtype, xh: Tensor, xl: Tensor, y: Tensor) -> int:
    encoding, held = ENCODINGS[dtype], 0
    results = zip(*map(patterns, scale_double_word(xh, xl, y)), strict=True)
    for operands, result in zip(zip(*map(fractions, (xh, xl, y)), strict=True), results, strict=True):
        a, b, c = operands
        if fits(encoding, a * c, b * c):
            check_word(dtype, result, (a + b) * c, scale_bound(encoding, a, b, c))
            held += 1
    return held


def check_negate_double_word(dtype: torch.dtype, hi: Tensor, lo: Tensor, _y: Tensor) -> int:
    for operand, result in zip((hi, lo), negate_double_word(hi, lo), strict=True):
        assert [-x for x in fractions(operand)] == fractions(result)
    return len(hi)


def check_join(dtype: torch.dtype, hi: Tensor, lo: Tensor) -> int:
    for x, y, joined in zip(fractions(hi), fractions(lo), patterns(join(hi, lo)), strict=True):
        assert FLOAT32.decode(joined) == FLOAT32.decode(FLOAT32.nearest(x + y))
    return len(hi)


PROPERTIES = [
    (check_two_sum, two_numbers),
    (check_two_prod, two_numbers),
    (check_grow, word_and_number),
    (check_add_double_words, two_words),
    (check_multiply_double_words, two_words),
    (check_scale_double_word, word_and_number),
    (check_negate_double_word, word_and_number),
    (check_join, two_numbers),
]
each_property = pytest.mark.parametrize(
    ("check", "generator"), PROPERTIES, ids=[check.__name__.removeprefix("check_") for check, _ in PROPERTIES]
)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
Check = Callable[..., int]


def tensors(cases: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """One tensor for each operand."""
    return [tensor(operand, dtype) for operand in zip(*cases, strict=True)]


@each_property
@each_dtype
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_property_of_any_patterns(
    check: Check, generator: Generator, dtype: torch.dtype, data: st.DataObject
) -> None:
    check(dtype, *tensors(data.draw(examples(generator, dtype)), dtype))


@each_property
@each_dtype
def test_property_of_a_sample(check: Check, generator: Generator, dtype: torch.dtype) -> None:
    cases = sample(generator, dtype, size=3000)
    held = check(dtype, *tensors(cases, dtype))
    assert held > len(cases) / 5, "the sample misses what the property speaks about"


# -- two_sum


@each_dtype
def test_two_sum_overflows_early_only_beside_the_largest_number(dtype: torch.dtype) -> None:
    encoding = ENCODINGS[dtype]
    every = tensor(filter(encoding.is_finite, range(2 * encoding.sign)), dtype)
    early = set()
    for steps in range(6):
        for sign in (0, encoding.sign):
            b = tensor([(encoding.infinity - 1 - steps) | sign], dtype)
            s, e = two_sum(every, b)
            if (s.isfinite() & ~e.isfinite()).any():
                early.add(steps)
            s, e = two_sum(b.expand_as(every), every)
            assert ((s.isfinite() & ~e.isfinite()) <= (every.abs() == torch.finfo(dtype).max)).all()
    assert early == {0}


def fast_two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """What the published Collage code uses [Dekker 1971]: exact for |a| >= |b|."""
    s = a + b
    return s, b - (s - a)


@each_dtype
def test_fast_two_sum_needs_its_condition_and_two_sum_does_not(dtype: torch.dtype) -> None:
    def residual(
        sum_of_two: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], a: Tensor, b: Tensor
    ) -> float:
        s, e = sum_of_two(a, b)
        return float(a.double() + b.double() - s.double() - e.double())

    # 2**p + 3 is a tie between 2**p + 2 and 2**p + 4; s - a = 2**p + 1 is another, and the error vanishes.
    p = ENCODINGS[dtype].significand_bits + 1
    update, weight = torch.tensor(2.0**p, dtype=dtype), torch.tensor(3.0, dtype=dtype)
    assert residual(fast_two_sum, update, weight) == 0
    assert residual(fast_two_sum, weight, update) == -1
    assert residual(two_sum, weight, update) == residual(two_sum, update, weight) == 0


@each_dtype
def test_fast_two_sum_is_often_wrong(dtype: torch.dtype) -> None:
    a, b = tensors(sample(two_numbers, dtype, size=3000), dtype)
    (s, e), (_, correct) = fast_two_sum(a, b), two_sum(a, b)
    usable = s.isfinite() & correct.isfinite()
    ordered = a.abs() >= b.abs()
    assert torch.equal(e[usable & ordered], correct[usable & ordered])
    assert (e != correct)[usable & ~ordered].float().mean() > 0.01


# -- split


def check_split(dtype: torch.dtype, value: Tensor) -> int:
    encoding, u, held = ENCODINGS[dtype], ENCODINGS[dtype].unit_roundoff, 0
    hi, lo = split(value, dtype, dtype)
    hi_, rest = split(value, dtype, torch.float32)
    assert patterns(hi) == patterns(hi_)
    results = zip(*map(patterns, (value, hi, lo, rest)), strict=True)
    for pattern, high, low, remainder in results:
        exact = FLOAT32.decode(pattern)
        assert high & ~encoding.sign == encoding.nearest(abs(exact))
        assert (high & encoding.sign > 0) == (pattern & FLOAT32.sign > 0)
        if not encoding.is_finite(high):
            assert low == remainder == 0
            continue
        h, l = encoding.decode(high), encoding.decode(low)  # noqa: E741
        # The remainder is at most u |value|, and is rounded once more: relatively, or to the quantum.
        assert FLOAT32.decode(remainder) == exact - h
        assert l == encoding.round(exact - h)
        assert abs(h + l - exact) <= max(u**2 * abs(exact), encoding.quantum / 2)
        assert abs(l) <= encoding.ulp(h) / 2
        tie = abs(l) == encoding.ulp(h) / 2 and high % 2 == 1
        assert tie or encoding.round(h + l) == h
        assert FLOAT32.round(h + l) == h + l  # so that join is exact
        held += 1
    return held


@pytest.mark.parametrize("near", [True, False], ids=["near-storage-numbers", "any"])
@each_dtype
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_split_any_pattern(dtype: torch.dtype, near: bool, data: st.DataObject) -> None:
    generator = near_storage_numbers(ENCODINGS[dtype]) if near else finite
    check_split(dtype, *tensors(data.draw(examples(generator, torch.float32)), torch.float32))


@each_dtype
def test_split_a_sample(dtype: torch.dtype) -> None:
    cases = sample(near_storage_numbers(ENCODINGS[dtype]), torch.float32, size=3000)
    assert check_split(dtype, *tensors(cases, torch.float32)) > len(cases) / 2
    check_split(dtype, *tensors(sample(finite, torch.float32, size=1000), torch.float32))


@each_dtype
def test_split_keeps_no_rest_of_what_is_not_finite(dtype: torch.dtype) -> None:
    encoding = ENCODINGS[dtype]
    # Half-way to what would come after the largest number, float32 still finite.
    overflow = float((encoding.largest + encoding.decode(encoding.infinity)) / 2)
    value = torch.tensor([math.inf, -math.inf, math.nan, overflow, -overflow])
    for lo_dtype in (dtype, torch.float32):
        hi, lo = split(value, dtype, lo_dtype)
        assert str(hi.tolist()) == "[inf, -inf, nan, inf, -inf]"
        assert patterns(lo) == [0] * 5
    below = torch.tensor([overflow]).nextafter(torch.tensor([0.0]))
    assert split(below, dtype, dtype)[0].item() == float(encoding.largest)


@each_dtype
def test_finite_or_zero(dtype: torch.dtype) -> None:
    hi = torch.tensor([1.0, math.inf, -math.inf, math.nan, -0.0, torch.finfo(dtype).max], dtype=dtype)
    lo = torch.tensor([0.5, math.nan, 1.0, math.inf, -0.0, math.nan], dtype=dtype)
    assert str(finite_or_zero(lo, hi).tolist()) == "[0.5, 0.0, 0.0, 0.0, -0.0, nan]"


# -- constants


@each_dtype
@settings(deadline=None)
@given(value=st.floats(allow_nan=False, allow_infinity=False))
@example(0.999)
@example(1 - 1e-3 * 0.1)
@example(1e-8)
@example(65519.0)
def test_double_word_constant(dtype: torch.dtype, value: float) -> None:
    encoding = ENCODINGS[dtype]
    hi, lo = double_word_constant(value, dtype)
    exact, u = Fraction(value), encoding.unit_roundoff
    if encoding.overflows(exact):
        assert (hi, lo) == (math.copysign(math.inf, value), 0)
        return
    assert math.copysign(1, hi) == math.copysign(1, value)
    assert Fraction(hi) == encoding.round(exact)
    assert Fraction(lo) == encoding.round(exact - Fraction(hi))
    assert abs(exact - Fraction(hi) - Fraction(lo)) <= max(u**2 * abs(exact), encoding.quantum / 2)


@each_dtype
def test_double_word_constant_of_what_is_not_finite(dtype: torch.dtype) -> None:
    assert double_word_constant(math.inf, dtype) == (math.inf, 0)
    assert double_word_constant(-math.inf, dtype) == (-math.inf, 0)
    hi, lo = double_word_constant(math.nan, dtype)
    assert math.isnan(hi)
    assert lo == 0
