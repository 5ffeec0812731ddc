"""The formats ``exact`` and ``byte``, compiled as in a step, on every float32 number, or pair, there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from collage_fx.numerics import ROUND_TO_STORAGE, UPPER_HALF
from collage_fx.numerics.operators import (
    DITHERED_BYTE,
    DITHERED_UPPER,
    LOWER_HALF,
    ULP_PARTS,
    WITH_BYTE,
    WITH_LOWER_HALF,
    WITH_ULP_PARTS,
)
from tests.support.printed import in_parts

CHUNK = 1 << 24
NANS = 2 * (2**23 - 1)

pytestmark = pytest.mark.slow


def _count_all(count: Callable[[Tensor], dict[str, Tensor]], patterns: int = 1 << 32) -> dict[str, int]:
    """The sums, over all integers of as many patterns, of what a function finds in some of them."""
    total: Counter[str] = Counter()
    compiled = torch.compile(count, dynamic=False, backend=in_parts)
    first = torch.arange(CHUNK, dtype=torch.int32)
    for start in range(-patterns // 2, patterns // 2, CHUNK):
        found = compiled(first + start)
        total.update({name: int(each) for name, each in found.items()})
    return dict(total)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def test_bfloat16() -> None:
    def count(bits: Tensor) -> dict[str, Tensor]:
        x = bits.view(torch.float32)
        hi, rest = UPPER_HALF(x), LOWER_HALF(x)
        again, even = WITH_LOWER_HALF(hi, rest), ROUND_TO_STORAGE(x, torch.bfloat16)
        is_finite = hi.abs() < torch.inf
        differs = is_finite & (hi != even)
        return {
            "exact": (is_finite & (_bits(again) == bits)).sum(),
            "inexact": (is_finite & (_bits(again) != bits)).sum(),
            "not to even": differs.sum(),
            "not to even, and a tie": (differs & (rest == -(2**15))).sum(),
            "NaN": ((x != x) & (hi != hi) & (again != again) & (rest == 0)).sum(),
            "infinite": ((hi.abs() == torch.inf) & (again == hi) & (rest == 0)).sum(),
            "infinite as nearest even": ((hi.abs() == torch.inf) & (even == hi)).sum(),
            "off the grid": (is_finite & ((_bits(hi) & 0xFFFF) != 0)).sum(),
        }

    infinite = 2 * (1 + 2**15)  # infinity, and what lies half an ulp above the largest number or more
    above_even = 2 * 0x7F80 // 2  # of both signs, the ties above the even ones of so many finite numbers
    assert _count_all(count) == {
        "exact": 2**32 - NANS - infinite,
        "inexact": 0,
        "not to even": above_even,
        "not to even, and a tie": above_even,
        "NaN": NANS,
        "infinite": infinite,
        "infinite as nearest even": infinite,
        "off the grid": 0,
    }


def test_every_pair_beside_bfloat16() -> None:
    """What is normalised comes back; what only somebody else can leave is hi."""

    def count(bits: Tensor) -> dict[str, Tensor]:
        hi, rest = (bits & -0x10000).view(torch.float32), (bits << 16) >> 16
        value = WITH_LOWER_HALF(hi, rest.to(torch.int16))
        same = (_bits(UPPER_HALF(value)) == _bits(hi)) & (LOWER_HALF(value).to(torch.int32) == rest)
        is_finite = hi.abs() < torch.inf
        foreign = (hi == 0) & (rest < 0)
        return {
            "back": (is_finite & ~foreign & same).sum(),
            "not back": (is_finite & ~foreign & ~same & (value.abs() < torch.inf)).sum(),
            "foreign, and hi": (foreign & (value == hi)).sum(),
            "not finite, and hi": (~is_finite & ((value == hi) | ((value != value) & (hi != hi)))).sum(),
        }

    not_finite = 2 * 2**7 * 2**16
    assert _count_all(count) == {
        "back": 2**32 - not_finite - 2 * 2**15,
        "not back": 0,
        "foreign, and hi": 2 * 2**15,
        "not finite, and hi": not_finite,
    }


def test_float16() -> None:
    def count(bits: Tensor) -> dict[str, Tensor]:
        x = bits.view(torch.float32)
        hi = ROUND_TO_STORAGE(x, torch.float16)
        parts = ULP_PARTS(x, hi)
        again = WITH_ULP_PARTS(hi, parts)
        is_finite, is_large = hi.abs() < torch.inf, x.abs() >= 2.0**-16
        off = (again - x).abs()  # exact: both are multiples of a number of 24 bits less
        return {
            "finite": is_finite.sum(),
            "large and exact": (is_finite & is_large & (again == x)).sum(),
            "large": (is_finite & is_large).sum(),
            "small and near": (is_finite & ~is_large & (off <= 2.0**-40)).sum(),
            "beyond half an ulp": (is_finite & (parts.to(torch.int32).abs() > 2**14)).sum(),
            "NaN": ((x != x) & (again != again) & (parts == 0)).sum(),
            "infinite": ((hi.abs() == torch.inf) & (again == hi) & (parts == 0)).sum(),
        }

    found = _count_all(count)
    assert found["large and exact"] == found["large"]
    assert found["small and near"] == found["finite"] - found["large"]
    assert found["beyond half an ulp"] == 0
    assert found["NaN"] == NANS
    assert found["finite"] + found["infinite"] + NANS == 2**32


def test_every_byte_beside_bfloat16() -> None:
    """All 24-bit floats, by the least phase and by the largest; no NaN becomes a number."""

    def count(bits: Tensor) -> dict[str, Tensor]:
        is_float24 = (bits & 0xFF) == 0
        x, turns = bits.view(torch.float32), torch.where((bits & 0x100) == 0, 0, -1).to(torch.int32)
        hi = DITHERED_UPPER(x, turns, torch.bfloat16)
        again = WITH_BYTE(hi, DITHERED_BYTE(x, turns, torch.bfloat16), torch.bfloat16)
        is_finite, cut_off = hi.abs() < torch.inf, bits & 0xFF
        is_up = (turns < 0) & (cut_off > 0)
        return {
            "back": (is_float24 & is_finite & (_bits(again) == bits)).sum(),
            "not back": (is_float24 & is_finite & (_bits(again) != bits)).sum(),
            "neighbours": (is_finite & (_bits(again) == bits - cut_off + torch.where(is_up, 256, 0))).sum(),
            "finite": is_finite.sum(),
            "NaN": ((x != x) & (hi != hi) & (again != again)).sum(),
            "infinite": ((hi.abs() == torch.inf) & (again == hi)).sum(),
        }

    found = _count_all(count)
    # Of each sign 0x7f7f80 patterns of 23 bits are below what rounds to infinity.
    assert (found["back"], found["not back"]) == (2 * 0x7F7F80, 0) == (16_711_424, 0)
    assert found["neighbours"] == found["finite"]
    assert found["NaN"] == NANS
    assert found["finite"] + found["infinite"] + NANS == 2**32


def test_every_byte_beside_float16() -> None:
    """Every finite number with every byte comes back, by phases of all kinds."""

    def count(bits: Tensor) -> dict[str, Tensor]:
        hi, rest = (bits >> 8).to(torch.int16).view(torch.float16).float(), (bits << 24 >> 24).to(torch.int8)
        value, turns = WITH_BYTE(hi, rest, torch.float16), bits * -0x61C88647
        upper = DITHERED_UPPER(value, turns, torch.float16)
        same = (upper == hi) & (DITHERED_BYTE(value, turns, torch.float16) == rest)
        is_finite = hi.abs() < torch.inf
        return {
            "finite": is_finite.sum(),
            "back": (is_finite & same).sum(),
            "not finite, and hi": (~is_finite & ((value == hi) | ((value != value) & (hi != hi)))).sum(),
        }

    finite = 2 * 0x7C00 * 2**8
    assert _count_all(count, patterns=2**24) == {
        "finite": finite,
        "back": finite,
        "not finite, and hi": 2**24 - finite,
    }
