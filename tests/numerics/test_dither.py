"""Dither: which neighbour a number goes to, by the definition in ``numerics/dither.py``."""

from __future__ import annotations

from fractions import Fraction
from math import floor, isinf

import pytest
import torch
from torch import Tensor
from torch._inductor import config

from collage_fx.numerics import DITHERED_SUM, PHASES, storage_format
from collage_fx.numerics.dither import GOLDEN, NEAR, SPACING, dithered, dithered_sum, phase, phases
from collage_fx.numerics.operators import DITHERED
from tests.support.bit_patterns import near_storage_numbers, sample
from tests.support.exact import ENCODINGS, fractions, tensor
from tests.support.float_bits import same_bits
from tests.support.printed import BACKENDS

each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def _numbers(dtype: torch.dtype) -> Tensor:
    """At, beside and between storage-format numbers, and what is not finite."""
    cases = sample(near_storage_numbers(ENCODINGS[dtype]), torch.float32, size=3000)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 0.0, -0.0])
    spread = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.linspace(
        -30, 16, 3000
    )
    return torch.cat([tensor((pattern for (pattern,) in cases), torch.float32), special, spread])


def _some_phases(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(-(2**31), 2**31, x.shape, generator=generator).to(torch.int32)
    drawn[::7], drawn[1::7] = 0, -1  # the least phase and the largest
    return drawn


def _by_definition(value: Fraction, phase: int, dtype: torch.dtype) -> Fraction:
    """One neighbour or the other, as the docstring of ``dithered`` has it."""
    bits = {torch.bfloat16: 16, torch.float16: 13}[dtype]
    ulp = storage_format(dtype).ulp(value)
    share = Fraction((phase % 2**32) >> (32 - bits), 2**bits)
    magnitude = floor(abs(value) / ulp + share) * ulp
    return magnitude if value > 0 else -magnitude


@each_dtype
def test_rounds_as_the_definition_says(dtype: torch.dtype) -> None:
    x = _numbers(dtype)
    turns = _some_phases(x)
    found = dithered(x, turns, dtype)
    assert same_bits(found, found.to(dtype).float()).all()  # it is on the grid
    number = x.isfinite() & found.isfinite()
    for value, turn, met in zip(
        fractions(x[number]), turns[number].tolist(), fractions(found[number]), strict=True
    ):
        assert met == _by_definition(value, turn, dtype)
    assert torch.equal(found.signbit()[~x.isnan()], x.signbit()[~x.isnan()])
    assert found[x.isnan()].isnan().all()
    assert torch.equal(found[x.isinf()], x[x.isinf()])
    too_large = x.isfinite() & ~found.isfinite()
    assert (x[too_large].abs().double() > float(storage_format(dtype).largest)).all()
    stored = _numbers(dtype).to(dtype).float()
    assert same_bits(dithered(stored, turns, dtype)[~stored.isnan()], stored[~stored.isnan()]).all()


def test_phases_are_those_of_the_note() -> None:
    def hashed(window: int) -> int:
        for _ in range(2):
            window = ((window >> 16) ^ window) * 0x45D9F3B % 2**32
        return window

    for count, start in ((0, 0), (1, 0), (31, 5), (32, 5), (123_456_789, -3), (2**31 - 1, 2**31 - 1)):
        first = phase(torch.tensor(count).int(), torch.tensor(start).int())
        expected = (start * SPACING + count * GOLDEN + hashed(count // 32)) % 2**32
        assert int(first) % 2**32 == expected
        like = torch.empty(4, 6).t()[:, 1:]  # neither contiguous nor dense
        places = torch.arange(24).reshape(4, 6).t()[:, 1:] - 6
        assert torch.equal(phases(like, first).long() % 2**32, (places * SPACING + expected) % 2**32)
        later = torch.tensor(100).int()
        assert torch.equal(
            phases(like, first, later).long() % 2**32, ((places + 100) * SPACING + expected) % 2**32
        )


@each_dtype
def test_nothing_is_lost_on_average(dtype: torch.dtype) -> None:
    """Of a rest that stays the same, n steps of one window are up in a share that is off by less than 2/n."""
    steps = 32
    ulp = 2.0 ** (1 - storage_format(dtype).precision)
    rest = torch.linspace(0.001, 0.999, 1000)
    x = 1 + rest * ulp
    start = torch.zeros((), dtype=torch.int32)
    ups = torch.zeros(1000)
    for count in range(steps):
        turns = phases(x, phase(torch.tensor(count).int(), start))
        ups += dithered(x, turns, dtype) > 1
    # A window of 32 multiples of the golden ratio leaves gaps of 1/34 to 1/21.
    assert ((ups / steps - (x - 1) / ulp).abs() < 2 / steps).all()


def _sums() -> tuple[Tensor, Tensor]:
    """Numbers and changes of up to some hundred units, next to powers of two and elsewhere; special values.

    A unit is a normal number, so that its product with a phase is exact.
    """
    drawn = torch.Generator().manual_seed(2)
    x = torch.randn(8000, generator=drawn) * 2.0 ** torch.randint(-90, 120, (8000,), generator=drawn)
    power = 2.0 ** torch.randint(-100, 120, (8000,), generator=drawn)
    x[::3] = (power * (1 + torch.randint(-2, 3, (8000,), generator=drawn) * 2.0**-23))[::3]
    units = torch.randn(8000, generator=drawn) * 4.0 ** torch.randint(-8, 5, (8000,), generator=drawn)
    change = x * units * 2.0**-24
    change[5::100] = torch.randn(80, generator=drawn)
    x[7::100], change[8::100] = 0.0, 0.0
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4028235e38, -3.4028235e38, 0.0, -0.0, 1e-45])
    return torch.cat([x, ends.repeat_interleave(8)]), torch.cat([change, ends.repeat(8)])


def _sum_by_definition(x: float, change: float, phase: int) -> float:
    """Compute the sum of two finite numbers as the docstring of ``dithered_sum`` has it."""
    exact = Fraction(x) + Fraction(change)
    nearest = float(torch.tensor(x) + torch.tensor(change))
    if isinf(nearest) or exact == Fraction(nearest):
        return nearest
    towards = torch.inf if exact > Fraction(nearest) else -torch.inf
    neighbour = float(torch.nextafter(torch.tensor(nearest), torch.tensor(towards)))
    if isinf(neighbour):
        return nearest
    share = Fraction((phase if exact > nearest else ~phase) % 2**23, 2**23)
    is_beyond = abs(exact - Fraction(nearest)) > share * abs(Fraction(neighbour) - Fraction(nearest))
    return neighbour if is_beyond and abs(Fraction(change)) <= abs(Fraction(x)) * Fraction(NEAR) else nearest


def test_a_sum_near_its_first_term_is_rounded_as_the_definition_says() -> None:
    x, change = _sums()
    turns = _some_phases(x)
    found = dithered_sum(x, change, turns)
    finite = x.isfinite() & change.isfinite()
    for first, second, turn, met in zip(
        x[finite].tolist(),
        change[finite].tolist(),
        turns[finite].tolist(),
        found[finite].tolist(),
        strict=True,
    ):
        assert met == _sum_by_definition(first, second, turn)
    assert same_bits(found[~finite], (x + change)[~finite]).all()
    moved = (found != x + change)[finite].float().mean()
    assert 0.1 < moved < 0.5, "dither does something here"


def test_changes_far_below_a_unit_arrive_on_average() -> None:
    """Next to a power of two, too, where the units below are half of those above."""
    for x in (1.0, 1.0 + 2.0**-23, 1.5, -2.0, 2.0**-100):
        for units in (0.01, -0.3, 0.5, 7.25, -40.1):
            change = torch.full((2**16,), units * abs(x) * 2.0**-24)
            every = torch.arange(0, 2**23, 2**7).to(torch.int32)
            sums = dithered_sum(torch.full_like(change, x), change, every).double()
            exact = x + change[0].double()
            assert abs(sums.mean() - exact) <= abs(x) * 2.0**-23 * 2.0**-15


VECTORS = [1, 256, None]


@pytest.mark.parametrize("simdlen", VECTORS)
@pytest.mark.parametrize("code", [*BACKENDS])
def test_compiled_sums_are_eager_sums(code: str, simdlen: int | None) -> None:
    def step(x: Tensor, change: Tensor, turns: Tensor, out: Tensor) -> None:
        out.copy_(DITHERED_SUM(x * 1.0, change * 1.0, turns))

    x, change = _sums()
    turns = _some_phases(x)
    with config.patch({"cpp.simdlen": simdlen}):
        compiled = torch.compile(step, backend=BACKENDS[code])
        compiled(x, change, turns, out := torch.empty_like(x))
    assert same_bits(out, dithered_sum(x, change, turns)).all()


@pytest.mark.parametrize("simdlen", VECTORS)
@pytest.mark.parametrize("code", [*BACKENDS])
@each_dtype
def test_compiled_bits_are_eager_bits(dtype: torch.dtype, code: str, simdlen: int | None) -> None:
    def step(x: Tensor, count: Tensor, start: Tensor, out: Tensor, seen: Tensor, turned: Tensor) -> None:
        turns = PHASES(out, phase(count, start))
        rounded = DITHERED(x * 1.0, turns, dtype)
        out.copy_(rounded)
        seen.copy_(rounded)
        # In a part of a step the kernel is given the place of the first element.
        first = () if code == "in parts" else (start,)
        turned.copy_(PHASES(out, phase(count, start), *first))

    x = _numbers(dtype)
    count, start = torch.tensor(77).int(), torch.tensor(12345).int()

    def run(function: object) -> list[Tensor]:
        outputs = [torch.zeros(x.shape, dtype=dtype), torch.zeros_like(x), torch.zeros(x.shape).int()]
        assert callable(function)
        function(x, count, start, *outputs)
        return outputs

    with config.patch({"cpp.simdlen": simdlen}):
        compiled = run(torch.compile(step, backend=BACKENDS[code]))
    for mine, expected in zip(compiled, run(step), strict=True):
        assert same_bits(mine.float(), expected.float()).all()


def test_operators_are_their_definitions() -> None:
    x = torch.randn(5, 3)
    turns = PHASES(x, torch.tensor(7).int())
    assert torch.equal(turns, phases(x, torch.tensor(7).int()))
    sums = (x, x * 2.0**-22, turns)
    assert torch.equal(DITHERED_SUM(*sums), dithered_sum(*sums))
    torch.library.opcheck(DITHERED_SUM, sums, test_utils=("test_schema", "test_faketensor"))
    for operator, given in ((PHASES, (x, torch.tensor(7).int())), (DITHERED, (x, turns, torch.bfloat16))):
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))
