"""24-bit floats, by the definition in ``numerics/float24.py``: eager, and compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor import config

from collage_fx.numerics import ERROR_FORMATS, PHASES, storage_format
from collage_fx.numerics.dither import phase, phases
from collage_fx.numerics.float24 import dithered_byte, dithered_upper, nearest, with_byte
from collage_fx.numerics.operators import DITHERED_BYTE, DITHERED_UPPER, WITH_BYTE
from tests.support.bit_patterns import near_storage_numbers, sample
from tests.support.exact import ENCODINGS, fractions, tensor
from tests.support.float24 import nearest as nearest_of
from tests.support.float24 import rounded
from tests.support.float_bits import same_bits
from tests.support.printed import BACKENDS

each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def _numbers(dtype: torch.dtype) -> Tensor:
    """At, beside and between storage-format numbers, what is not finite, and numbers of every size."""
    cases = sample(near_storage_numbers(ENCODINGS[dtype]), torch.float32, size=3000)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 0.0, -0.0])
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, -(1 << 23) + 1], dtype=torch.int32).view(torch.float32)
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(3000, generator=generator) * 2.0 ** torch.linspace(-60, 16, 3000)
    largest = float(storage_format(dtype).largest)
    top = largest * (1 + torch.linspace(0, 2.0 ** -storage_format(dtype).precision, 200))
    found = [tensor((pattern for (pattern,) in cases), torch.float32), special, nans, spread, top, -top]
    return torch.cat([*found, torch.randn(100_003, generator=generator)])


def _some_phases(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(-(2**31), 2**31, x.shape, generator=generator).to(torch.int32)
    drawn[::7], drawn[1::7] = 0, -1  # the least phase and the largest
    return drawn


@each_dtype
def test_rounds_as_the_definition_says(dtype: torch.dtype) -> None:
    x = _numbers(dtype)[:10_000]
    turns = _some_phases(x)
    hi, rest = dithered_upper(x, turns, dtype), dithered_byte(x, turns, dtype)
    assert same_bits(hi, hi.to(dtype).float()).all()
    value = with_byte(hi, rest, dtype)
    kept = x.isfinite() & hi.isfinite()
    for number, turn, upper, whole in zip(
        fractions(x[kept]), turns[kept].tolist(), fractions(hi[kept]), fractions(value[kept]), strict=True
    ):
        expected = rounded(number, turn, dtype)
        assert (whole, upper) == (expected, nearest_of(expected, dtype))
    assert torch.equal(hi.signbit()[~x.isnan()], x.signbit()[~x.isnan()])
    assert torch.equal(hi.isnan(), x.isnan())
    assert torch.equal(hi[x.isinf()], x[x.isinf()])
    too_large = x.isfinite() & ~hi.isfinite()
    assert (x[too_large].abs().double() > float(storage_format(dtype).largest)).all()
    assert not rest[~hi.isfinite()].any()
    assert same_bits(value[~kept], hi[~kept]).all()


@each_dtype
def test_what_is_stored_comes_back(dtype: torch.dtype) -> None:
    """By any phase, as nothing is cut off; and without one."""
    x = _numbers(dtype)
    hi, rest = nearest(x, dtype)
    stored = with_byte(hi, rest, dtype)
    kept = hi.isfinite()
    for turn in (0, -1, 12345 << 12):
        turns = torch.full(x.shape, turn, dtype=torch.int32)
        again = dithered_upper(stored, turns, dtype), dithered_byte(stored, turns, dtype)
        assert torch.equal(again[0][kept], hi[kept])
        assert torch.equal(again[1][kept], rest[kept])
    assert {-128, 127} <= set(rest.tolist())


def test_somebody_elses_zeros_are_zeros() -> None:
    """Beside a bfloat16 zero a byte below zero would make a NaN; beside float16's it is half an ulp."""
    every = torch.arange(-128, 128).to(torch.int8)
    for zero in (0.0, -0.0):
        of_bfloat16 = with_byte(torch.full((256,), zero), every, torch.bfloat16)
        assert not of_bfloat16[every <= 0].any()
        assert (of_bfloat16.abs() < 2.0**-133).all()
        of_float16 = with_byte(torch.full((256,), zero), every, torch.float16)
        assert torch.equal(of_float16, every * 2.0**-32)


@each_dtype
def test_nothing_is_lost_on_average(dtype: torch.dtype) -> None:
    """Steps of a small part of a unit take numbers on, past what rounds to one storage-format number.

    To nearest, none would move. Of the 32 choices of a window less than one is wrong. If those of a thousand
    numbers were independent, the root of a window's count and of theirs would be left of it on average.
    """
    unit = 2.0 ** (1 - storage_format(dtype).precision) / 2**8
    share = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-5}[dtype]  # of a unit is what float32 holds of it
    steps = 512
    start = 1 + unit * torch.arange(100, 140).repeat(25)
    fmt = ERROR_FORMATS["byte"]
    expansion = fmt.split(start, dtype)
    for _ in range(steps):
        value = fmt.join(*expansion)
        expansion = fmt.store(value + share * unit, *expansion, torch.zeros((), dtype=torch.int32))
    off = (fmt.join(*expansion) - start) / unit - steps * share
    assert off.abs().max() < steps / 32
    assert abs(float(off.mean())) < (steps / 32) ** 0.5 / len(start) ** 0.5


def test_small_float16_numbers_are_rounded_by_all_of_their_bits() -> None:
    """Below 2**-14 a number may have a rest that is a small part of a unit."""
    x = torch.full((1 << 16,), 2.0**-32 * 2.0**-10)
    turns = phases(x, phase(torch.tensor(5).int(), torch.tensor(0).int()))
    ups = dithered_byte(x, turns, torch.float16).sum()
    assert abs(int(ups) - (1 << 6)) <= 2  # of a lattice's points those in an interval


VECTORS = [1, 256, None]


@pytest.mark.parametrize("simdlen", VECTORS)
@pytest.mark.parametrize("code", [*BACKENDS])
@each_dtype
def test_compiled_bits_are_eager_bits(dtype: torch.dtype, code: str, simdlen: int | None) -> None:
    def step(x: Tensor, one: Tensor, count: Tensor, hi: Tensor, rest: Tensor, *outputs: Tensor) -> None:
        whole, seen, alone = outputs
        value = WITH_BYTE(hi.float(), rest, dtype)
        turns = PHASES(hi, phase(count, count))
        upper, lower = DITHERED_UPPER(x * one, turns, dtype), DITHERED_BYTE(x * one, turns, dtype)
        whole.copy_(value)
        seen.copy_(upper)
        alone.copy_(DITHERED_UPPER(one, phase(count, count), dtype) * value)  # a number, beside vectors
        hi.copy_(upper.to(dtype))
        rest.copy_(lower)

    x = _numbers(dtype)

    def run(function: object) -> list[Tensor]:
        generator = torch.Generator().manual_seed(2)  # what somebody else may have left there
        hi = x[torch.randperm(len(x), generator=generator)].to(dtype)
        rest = torch.randint(-128, 128, x.shape, generator=generator).to(torch.int8)
        outputs = [hi, rest, *(torch.zeros_like(x) for _ in range(3))]
        assert callable(function)
        function(x, torch.ones(()), torch.tensor(77).int(), *outputs)
        return outputs

    with config.patch({"cpp.simdlen": simdlen}):
        compiled = run(torch.compile(step, backend=BACKENDS[code]))
    for mine, expected in zip(compiled, run(step), strict=True):
        assert same_bits(mine.float(), expected.float()).all()


@each_dtype
def test_operators_are_their_definitions(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3)
    turns = PHASES(x, torch.tensor(7).int())
    hi, rest = DITHERED_UPPER(x, turns, dtype), DITHERED_BYTE(x, turns, dtype)
    assert torch.equal(hi, dithered_upper(x, turns, dtype))
    assert torch.equal(rest, dithered_byte(x, turns, dtype))
    assert torch.equal(WITH_BYTE(hi, rest, dtype), with_byte(hi, rest, dtype))
    for operator, given in (
        (DITHERED_UPPER, (x, turns, dtype)),
        (DITHERED_BYTE, (x, turns, dtype)),
        (WITH_BYTE, (hi, rest, dtype)),
    ):
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))
