"""Numbers and double words made from bit patterns: any finite ones, often close to each other.

A generator takes ``pick(first, last) -> int``. Drawn from Hypothesis it makes examples that shrink, drawn
from a seeded random generator it makes large samples: :func:`examples` and :func:`sample`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from tests.support.exact import ENCODINGS, Encoding

__all__ = [
    "Generator",
    "examples",
    "finite",
    "near_storage_numbers",
    "sample",
    "two_numbers",
    "two_words",
    "word_and_number",
]

Pick = Callable[[int, int], int]
#: Draws one case, a tuple of patterns of one format.
Generator = Callable[[Encoding, Pick], tuple[int, ...]]


def _magnitude(encoding: Encoding, pick: Pick) -> int:
    """Any magnitude; the smallest, the largest and the subnormals more often."""
    last = encoding.infinity - 1
    kind = pick(0, 9)
    if kind == 0:
        return pick(0, 3)
    if kind == 1:
        return last - pick(0, 3)
    if kind == 2:
        return pick(0, 1 << encoding.significand_bits)
    return pick(0, last)


def _signed(encoding: Encoding, pick: Pick, magnitude: int) -> int:
    return magnitude | (encoding.sign if pick(0, 1) else 0)


def finite(encoding: Encoding, pick: Pick) -> tuple[int]:
    """One finite number."""
    return (_signed(encoding, pick, _magnitude(encoding, pick)),)


def _relative_to(encoding: Encoding, pick: Pick, other: int) -> int:
    """A number whose magnitude differs from that of ``other`` by up to p + 2 binades; or any number."""
    if pick(0, 3) == 0:
        return finite(encoding, pick)[0]
    p = encoding.significand_bits + 1
    reach = (p + 2) << encoding.significand_bits
    magnitude = (other & ~encoding.sign) + pick(-reach, reach)
    return _signed(encoding, pick, min(max(magnitude, 0), encoding.infinity - 1))


def two_numbers(encoding: Encoding, pick: Pick) -> tuple[int, int]:
    """Any two finite numbers."""
    (a,) = finite(encoding, pick)
    return a, _relative_to(encoding, pick, a)


def _word(encoding: Encoding, pick: Pick, hi: int) -> tuple[int, int]:
    """A double word near ``hi``: a pair with hi = RN(hi + lo)."""
    limit = encoding.nearest(encoding.ulp(encoding.decode(hi)) / 2)  # half the quantum rounds to 0
    lo = limit - (pick(0, limit) if pick(0, 1) else pick(0, min(limit, 4 << encoding.significand_bits)))
    lo = _signed(encoding, pick, lo)
    exact = encoding.decode(hi) + encoding.decode(lo)
    if encoding.overflows(exact):
        return hi, 0
    # A tie, or hi a power of two: the nearest may be hi's neighbour. What remains is a number of the format.
    nearest = encoding.nearest(exact)
    remainder = exact - encoding.decode(nearest)
    lo = encoding.nearest(remainder)
    assert encoding.decode(lo) == remainder
    return nearest, lo


def word_and_number(encoding: Encoding, pick: Pick) -> tuple[int, int, int]:
    """A double word and a number: hi, lo, y."""
    hi, lo = _word(encoding, pick, finite(encoding, pick)[0])
    return hi, lo, _relative_to(encoding, pick, hi)


def two_words(encoding: Encoding, pick: Pick) -> tuple[int, int, int, int]:
    """Two double words: xh, xl, yh, yl."""
    xh, xl = _word(encoding, pick, finite(encoding, pick)[0])
    return xh, xl, *_word(encoding, pick, _relative_to(encoding, pick, xh))


def near_storage_numbers(storage: Encoding) -> Generator:
    """Generates float32 numbers at, half-way between, and anywhere between two neighbours of ``storage``."""

    def generate(encoding: Encoding, pick: Pick) -> tuple[int]:
        magnitude = _magnitude(storage, pick)
        first, last = (encoding.nearest(storage.decode(magnitude + step)) for step in (0, 1))
        middle = encoding.nearest((storage.decode(magnitude) + storage.decode(magnitude + 1)) / 2)
        pattern = (first + pick(-2, 2), middle + pick(-2, 2), pick(first, last))[pick(0, 2)]
        return (_signed(encoding, pick, max(pattern, 0)),)

    return generate


def examples(
    generator: Generator, dtype: torch.dtype, max_size: int = 8
) -> st.SearchStrategy[list[tuple[int, ...]]]:
    """A Hypothesis strategy of short lists of cases."""

    @st.composite
    def case(draw: Any) -> tuple[int, ...]:
        return generator(ENCODINGS[dtype], lambda first, last: draw(st.integers(first, last)))

    return st.lists(case(), min_size=1, max_size=max_size)


def sample(generator: Generator, dtype: torch.dtype, size: int) -> list[tuple[int, ...]]:
    """The same ``size`` cases in every run."""
    pick = random.Random(0).randint
    return [generator(ENCODINGS[dtype], pick) for _ in range(size)]
