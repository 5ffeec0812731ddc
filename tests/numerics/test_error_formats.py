"""The contract of ErrorFormat, for every registered format."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from collage_fx.numerics.error_formats import ERROR_FORMATS, ErrorBound, ErrorFormat
from collage_fx.numerics.formats import storage_format
from tests.support.bit_patterns import examples, near_storage_numbers, sample, word_and_number
from tests.support.exact import ENCODINGS, fractions, patterns, tensor
from tests.support.float_bits import same_bits

FLOAT32 = ENCODINGS[torch.float32]
each_format = pytest.mark.parametrize("fmt", ERROR_FORMATS.values(), ids=lambda fmt: fmt.name)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def without_sign_of_zero(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.zeros_like(x), x)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for the sign of zeros and for which NaN it is."""
    return bool(same_bits(without_sign_of_zero(a), without_sign_of_zero(b)).all())


def zeros(fmt: ErrorFormat, hi: Tensor) -> list[Tensor]:
    return [spec.zeros(hi.device) for spec in fmt.auxiliaries(hi)]


def float32_values(dtype: torch.dtype) -> Tensor:
    """At, beside and between storage-format numbers, overflowing ones and what is not finite included."""
    cases = sample(near_storage_numbers(ENCODINGS[dtype]), torch.float32, size=3000)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 0.0, -0.0])
    return torch.cat([tensor((pattern for (pattern,) in cases), torch.float32), special])


@each_format
def test_registered_under_its_name(fmt: ErrorFormat) -> None:
    assert ERROR_FORMATS[fmt.name] is fmt


@each_format
@each_dtype
def test_split_gives_what_is_specified(fmt: ErrorFormat, dtype: torch.dtype) -> None:
    value = torch.randn(3, 4)
    hi, *auxiliaries = fmt.split(value, dtype)
    assert (hi.dtype, hi.shape) == (dtype, value.shape)
    specifications = fmt.auxiliaries(hi)
    assert len({s.name for s in specifications}) == len(auxiliaries)
    for auxiliary, s in zip(auxiliaries, specifications, strict=True):
        assert (auxiliary.dtype, auxiliary.shape) == (s.dtype, s.shape)
    assert fmt.nbytes(hi) == sum(auxiliary.nbytes for auxiliary in auxiliaries)
    if fmt.is_elementwise:
        assert all(s.shape == () or (s.shape, s.stride) == (hi.shape, hi.stride()) for s in specifications)
    if fmt.is_double_word:
        assert [s.dtype for s in specifications] == [dtype]


@each_format
@each_dtype
def test_zeros_mean_hi(fmt: ErrorFormat, dtype: torch.dtype) -> None:
    hi = tensor(range(1 << 16), dtype)
    joined = fmt.join(hi, *zeros(fmt, hi))
    assert joined.dtype == torch.float32
    assert same_numbers(joined, hi.float())
    again, *auxiliaries = fmt.split(joined, dtype)
    assert same_numbers(again, hi)
    assert not any(auxiliary.count_nonzero() for auxiliary in auxiliaries)


@each_format
@each_dtype
def test_hi_is_nearest_and_nothing_is_kept_of_what_is_not_finite(
    fmt: ErrorFormat, dtype: torch.dtype
) -> None:
    encoding = ENCODINGS[dtype]
    value = float32_values(dtype)
    hi, *auxiliaries = fmt.split(value, dtype)
    number = value.isfinite() & (value != 0)
    for exact, met in zip(fractions(value[number]), patterns(hi[number]), strict=True):
        even = encoding.nearest(exact)
        is_tie = met != even and abs(encoding.decode(met) - exact) == abs(encoding.decode(even) - exact)
        assert met == even or is_tie
    assert same_bits(hi, value.to(dtype))[~number].all()
    assert (~hi.isfinite()).sum() > value.isfinite().logical_not().sum()  # finite values overflow too
    for auxiliary in auxiliaries:
        if auxiliary.shape == value.shape:
            assert auxiliary.isfinite().all()
            assert not auxiliary[~hi.isfinite()].count_nonzero()


@each_format
@each_dtype
def test_round_trip(fmt: ErrorFormat, dtype: torch.dtype) -> None:
    value = float32_values(dtype)
    expansion = fmt.split(value, dtype)
    joined = fmt.join(*expansion)
    again = fmt.split(joined, dtype)
    normalised = same_bits(without_sign_of_zero(joined.to(dtype)), without_sign_of_zero(expansion[0]))
    assert normalised.float().mean() > 0.8
    for before, after in zip(expansion, again, strict=True):
        kept = normalised if before.dim() else ...
        assert same_numbers(before[kept], after[kept])
    # A tie: hi is its odd neighbour before, its even one after. The value stays, unless that one is infinite.
    survives = normalised | again[0].isfinite()
    assert same_numbers(fmt.join(*again)[survives], joined[survives])
    assert (~survives).float().mean() < 0.1


@each_format
@each_dtype
def test_error_terms_are_the_rest_of_the_value(fmt: ErrorFormat, dtype: torch.dtype) -> None:
    value = float32_values(dtype)
    value = value[value.to(dtype).isfinite()]
    hi, *auxiliaries = fmt.split(value, dtype)
    terms = [fractions(term) for term in fmt.error_terms(hi, *auxiliaries)]
    expansions = zip(fractions(hi), *terms, strict=True)
    assert [sum(expansion, Fraction(0)) for expansion in expansions] == fractions(fmt.join(hi, *auxiliaries))


@each_format
@each_dtype
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_round_trip_of_a_double_word(fmt: ErrorFormat, dtype: torch.dtype, data: st.DataObject) -> None:
    encoding = ENCODINGS[dtype]
    words = [
        (hi, lo)
        for hi, lo, _ in data.draw(examples(word_and_number, dtype))
        if FLOAT32.holds(encoding.decode(hi) + encoding.decode(lo))
    ]
    hi, lo = (tensor(column, dtype) for column in (zip(*words, strict=True) if words else ((), ())))
    value = hi.float() + lo.float()
    if fmt.is_double_word:
        assert torch.equal(fmt.join(hi, lo), value)
    high, *auxiliaries = fmt.split(value, dtype)
    if not fmt.keeps_error:
        assert torch.equal(fmt.join(high, *auxiliaries), high.float())
        return
    (term,) = fmt.error_terms(high, *auxiliaries)
    is_tie = (high != hi) & ((value.double() - high).abs() == (value.double() - hi).abs())
    to_even = fmt.name not in ("exact", "byte")  # as the words do
    assert not to_even or not is_tie.any()
    assert same_numbers(high[~is_tie], hi[~is_tie])
    if fmt.name == "byte":
        relative, absolute, _ = map(float, fmt.error_bound(dtype))
        off = (high.double() + term - value.double()).abs()
        assert (off <= torch.clamp(relative * value.double().abs(), min=absolute)).all()
        return
    assert same_numbers(term.to(dtype)[~is_tie], lo[~is_tie])
    assert torch.equal((high.double() + term)[is_tie], value.double()[is_tie])


@each_format
@each_dtype
def test_beside_a_given_hi_the_value_is_as_near_as_can_be(fmt: ErrorFormat, dtype: torch.dtype) -> None:
    """Where an error term makes a tie, a split would take the other neighbour for hi."""
    ulp = float(storage_format(dtype).ulp(Fraction(1)))
    hi = (1.5 + ulp * torch.arange(4)).repeat(5).to(dtype)
    hi = torch.cat([hi, -hi])
    term = ulp * torch.tensor([0.5, -0.25, 0.25, -0.5, 0.0]).repeat_interleave(4).repeat(2)
    exact = hi.double() + term
    off = (fmt.join(hi, *fmt.beside(hi, term)).double() - exact).abs()
    # The last number before a tie is one of float32's from it, and that is rounded.
    bound = 2.0**-23 + float(fmt.error_bound(dtype).relative) * exact.abs()
    assert (off <= bound).all()


@each_format
@each_dtype
def test_error_bound(fmt: ErrorFormat, dtype: torch.dtype) -> None:
    """It holds, and where there is one, something comes within a tenth of it."""
    value = float32_values(dtype)
    value = value[value.to(dtype).isfinite() & (value != 0)]
    kept = fmt.join(*fmt.split(value, dtype))
    relative, absolute, _ = fmt.error_bound(dtype)
    off = [abs(a - b) for a, b in zip(fractions(value), fractions(kept), strict=True)]
    bounds = [max(relative * abs(exact), absolute) for exact in fractions(value)]
    assert all(each <= bound for each, bound in zip(off, bounds, strict=True))
    is_near = any(10 * each >= 9 * bound > 0 for each, bound in zip(off, bounds, strict=True))
    assert is_near or not any(fmt.error_bound(dtype))


@pytest.mark.parametrize(
    ("fmt", "dtype", "relative", "absolute"),
    [
        ("exact", torch.bfloat16, 0, 0),
        ("exact", torch.float16, 0, 2**-40),
        ("mcf", torch.bfloat16, 2**-16, 2**-134),
        ("mcf", torch.float16, 2**-22, 2**-25),
        ("fp32", torch.bfloat16, 0, 0),
        ("fp32", torch.float16, 0, 0),
        ("byte", torch.bfloat16, 2**-15, 2**-141),
        ("byte", torch.float16, 2**-18, 2**-32),
    ],
)
def test_bounds_are_those_of_the_docs(fmt: str, dtype: torch.dtype, relative: float, absolute: float) -> None:
    assert ERROR_FORMATS[fmt].error_bound(dtype) == ErrorBound(Fraction(relative), Fraction(absolute))


@each_format
@each_dtype
def test_saved_auxiliaries_survive_what_plain_torch_does_to_state(
    fmt: ErrorFormat, dtype: torch.dtype
) -> None:
    """``Optimizer.load_state_dict`` casts everything to the parameter's dtype."""
    hi, *auxiliaries = fmt.split(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), dtype)
    for spec, buffer in zip(fmt.auxiliaries(hi), auxiliaries, strict=True):
        saved = spec.saved(buffer)
        assert (saved.dtype, saved.shape) == (spec.saved_dtype, spec.saved_shape)
        assert saved.data_ptr() == buffer.data_ptr()
        cast = saved.to(dtype)
        if not buffer.is_floating_point():
            assert torch.equal(spec.loaded(cast), buffer)
        elif dtype == buffer.dtype:
            assert same_bits(spec.loaded(cast), buffer).all()
        assert torch.equal(spec.loaded(saved), buffer)
