"""The rounding that has to survive lowering: the definition, eagerly and compiled, bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from collage_fx.numerics.arithmetic import round_to_storage
from tests.support import triton_offline as offline
from tests.support.bit_patterns import examples, finite, near_storage_numbers, sample
from tests.support.exact import ENCODINGS, patterns, tensor
from tests.support.float_bits import same_bits

DTYPES = [torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
FLOAT32 = ENCODINGS[torch.float32]


@functools.cache
def every_decision(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each number of a format and each midpoint of two neighbours, with the float32 number on either side.

    Returns:
        float32 ``x`` and the numbers that they are to be rounded to.
    """
    encoding = ENCODINGS[dtype]
    # With what would come after the largest number in infinity's place, so that there is a last midpoint.
    numbers = [float(encoding.decode(pattern)) for pattern in range(encoding.infinity + 1)]
    exact = torch.tensor(numbers, dtype=torch.float64)
    number, middle = exact[:-1].float(), ((exact[:-1] + exact[1:]) / 2).float()
    assert torch.equal(middle.double() * 2, exact[:-1] + exact[1:])  # float32 holds every midpoint
    rounded = torch.cat([number, torch.tensor([torch.inf])])
    lower, upper = rounded[:-1], rounded[1:]
    even = torch.where(torch.arange(len(lower)) % 2 == 0, lower, upper)
    up, down = torch.tensor(torch.inf), torch.tensor(0.0)
    decisions = [
        (number, lower),
        (number.nextafter(up), lower),
        (number.nextafter(down), lower),
        (middle, even),
        (middle.nextafter(up), upper),
        (middle.nextafter(down), lower),
    ]
    x, expected = (torch.cat(column) for column in zip(*decisions, strict=True))
    return torch.cat([x, -x]), torch.cat([expected, -expected])


@functools.cache
def any_patterns() -> Tensor:
    """Over a million float32 patterns, not a whole number of vectors; 1 in 128 is not finite."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, ((1 << 20) + 7,), generator=generator)
    special = [
        0,
        FLOAT32.infinity,
        FLOAT32.infinity + 1,
        FLOAT32.sign - 1,
    ]  # 0, infinity, a NaN, the last NaN
    special += [pattern | FLOAT32.sign for pattern in special]
    return torch.cat([tensor(special, torch.float32), bits.to(torch.int32).view(torch.float32)])


@each_dtype
def test_every_decision(dtype: torch.dtype) -> None:
    x, expected = every_decision(dtype)
    assert same_bits(round_to_storage(x, dtype), expected).all()
    assert same_bits(x.to(dtype).float(), expected).all()


@each_dtype
def test_any_pattern_is_rounded_as_a_cast_rounds(dtype: torch.dtype) -> None:
    x = any_patterns()
    rounded = round_to_storage(x, dtype)
    assert same_bits(rounded, x.to(dtype).float()).all()
    assert torch.equal(rounded.isnan(), x.isnan())
    assert torch.equal(rounded.signbit(), x.signbit())


def check_nearest(dtype: torch.dtype, x: Tensor) -> None:
    encoding = ENCODINGS[dtype]
    exact = map(FLOAT32.decode, patterns(x))
    for value, rounded in zip(exact, patterns(round_to_storage(x, dtype)), strict=True):
        nearest = encoding.nearest(abs(value))
        expected = (
            FLOAT32.nearest(encoding.decode(nearest)) if encoding.is_finite(nearest) else FLOAT32.infinity
        )
        assert rounded & ~FLOAT32.sign == expected


@each_dtype
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nearest_in_exact_arithmetic(dtype: torch.dtype, data: st.DataObject) -> None:
    generator = data.draw(st.sampled_from([finite, near_storage_numbers(ENCODINGS[dtype])]))
    (x,) = zip(*data.draw(examples(generator, torch.float32)), strict=True)
    check_nearest(dtype, tensor(x, torch.float32))


@each_dtype
def test_nearest_in_exact_arithmetic_on_a_sample(dtype: torch.dtype) -> None:
    cases = sample(finite, torch.float32, 2000)
    cases += sample(near_storage_numbers(ENCODINGS[dtype]), torch.float32, 2000)
    check_nearest(dtype, tensor((pattern for (pattern,) in cases), torch.float32))


def in_both_formats(x: Tensor) -> list[Tensor]:
    """Rounded numbers and what rounding left over, which is zero if the rounding is compiled away."""
    rounded = [round_to_storage(x, dtype) for dtype in DTYPES]
    return [*rounded, *(x - hi for hi in rounded)]


def test_compiled_bits_are_eager_bits() -> None:
    decisions = [every_decision(dtype) for dtype in DTYPES]
    x = torch.cat([any_patterns(), *(x for x, _ in decisions)])
    compiled = torch.compile(in_both_formats, dynamic=True)
    for mine, eager in zip(compiled(x), in_both_formats(x), strict=True):
        assert same_bits(mine, eager).all()
    tail = x[:5].contiguous()  # less than a vector
    for mine, eager in zip(compiled(tail), in_both_formats(tail), strict=True):
        assert same_bits(mine, eager).all()


def test_compiled_casts_are_no_roundings() -> None:
    """Why there is a function at all. Should this fail one day, Inductor has begun to keep casts."""

    def with_casts(x: Tensor) -> Tensor:
        return x - x.to(torch.bfloat16).float()

    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert with_casts(x).count_nonzero() > 900
    assert torch.compile(with_casts)(x).count_nonzero() == 0


@pytest.mark.skipif(
    not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy: pip install triton numpy"
)
def test_triton_bits_are_eager_bits() -> None:
    def store(x: Tensor, *outputs: Tensor) -> None:
        for output, value in zip(outputs, in_both_formats(x), strict=True):
            output.copy_(value)

    # The interpreter is slow: a part of them, every kind of decision included.
    parts = [every_decision(dtype)[0][::11] for dtype in DTYPES]
    x = torch.cat([any_patterns()[:10_000], *parts])
    inputs = [x, *(torch.zeros_like(x) for _ in range(4))]
    source = offline.triton_source(offline.to_cuda(offline.functional_graph(store, *inputs)))
    offline.run_in_interpreter(source, inputs)
    for mine, eager in zip(inputs[1:], in_both_formats(x), strict=True):
        assert same_bits(mine, eager).all()
