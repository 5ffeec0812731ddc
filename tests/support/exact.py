"""Exact arithmetic on encodings: bit pattern <-> Fraction, rounding included. Nothing of the library is used.

The encoding is IEEE 754's (2019, section 3.4): sign, biased exponent, trailing significand. The order of the
patterns of positive numbers is the order of their values, so that rounding to nearest is a binary search
among patterns, and a tie goes to the pattern that ends in 0. That is all there is here; speed is no aim.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

__all__ = ["ENCODINGS", "Encoding", "fractions", "patterns", "tensor"]


@dataclass(frozen=True)
class Encoding:
    """A binary interchange format: widths of its fields."""

    exponent_bits: int
    significand_bits: int

    @property
    def infinity(self) -> int:
        """The pattern of +infinity; those of the finite non-negative numbers are 0 ... infinity - 1."""
        return ((1 << self.exponent_bits) - 1) << self.significand_bits

    @property
    def sign(self) -> int:
        return 1 << (self.exponent_bits + self.significand_bits)

    @functools.cached_property
    def quantum(self) -> Fraction:
        """The smallest positive number, of which all others are multiples."""
        bias = (1 << (self.exponent_bits - 1)) - 1
        return Fraction(2) ** (1 - bias - self.significand_bits)

    @functools.cached_property
    def smallest_normal(self) -> Fraction:
        return self.decode(1 << self.significand_bits)

    @functools.cached_property
    def largest(self) -> Fraction:
        return self.decode(self.infinity - 1)

    @property
    def unit_roundoff(self) -> Fraction:
        """Half the distance from 1 to the next larger number."""
        return Fraction(1, 2 << self.significand_bits)

    def is_finite(self, pattern: int) -> bool:
        return pattern & ~self.sign < self.infinity

    def _quanta(self, magnitude: int) -> int:
        """The value of a non-negative number's pattern, in quanta."""
        exponent, significand = divmod(magnitude, 1 << self.significand_bits)
        return (significand + (1 << self.significand_bits)) << (exponent - 1) if exponent else significand

    def decode(self, pattern: int) -> Fraction:
        """The value of a pattern; for infinity's, what would come next if there were another binade."""
        value = self._quanta(pattern & ~self.sign) * self.quantum
        return -value if pattern & self.sign else value

    def nearest(self, value: Fraction) -> int:
        """The pattern of ``value`` rounded to nearest, ties to even, or that of an infinity."""
        quanta = abs(value) / self.quantum
        below = bisect_right(range(self.infinity), quanta.__floor__(), key=self._quanta) - 1
        twice, sum_of_neighbours = 2 * quanta, self._quanta(below) + self._quanta(below + 1)
        up = twice > sum_of_neighbours or (twice == sum_of_neighbours and below % 2 == 1)
        return (self.sign if value < 0 else 0) | (below + up)

    def round(self, value: Fraction) -> Fraction:
        """The value of :meth:`nearest`, which must be finite."""
        pattern = self.nearest(value)
        assert self.is_finite(pattern), f"{float(value)} overflows"
        return self.decode(pattern)

    def holds(self, value: Fraction) -> bool:
        return self.decode(self.nearest(value)) == value

    def overflows(self, value: Fraction) -> bool:
        return not self.is_finite(self.nearest(value))

    def ulp(self, value: Fraction) -> Fraction:
        """Distance from a number of the format to the next larger in magnitude."""
        pattern = self.nearest(abs(value))
        return self.decode(pattern + 1) - self.decode(pattern)


ENCODINGS = {
    torch.bfloat16: Encoding(8, 7),
    torch.float16: Encoding(5, 10),
    torch.float32: Encoding(8, 23),
}
_INTEGER = {2: torch.int16, 4: torch.int32}


def patterns(x: Tensor) -> list[int]:
    """The (unsigned) encodings of a tensor's elements."""
    bits = 8 * x.dtype.itemsize
    return [pattern % (1 << bits) for pattern in x.flatten().view(_INTEGER[x.dtype.itemsize]).tolist()]


def tensor(encodings: Iterable[int], dtype: torch.dtype) -> Tensor:
    """The 1-d tensor of these encodings: inverse of :func:`patterns`."""
    return torch.tensor(list(encodings), dtype=torch.int64).to(_INTEGER[dtype.itemsize]).view(dtype)


def fractions(x: Tensor) -> list[Fraction]:
    """The values of a tensor's elements, all of them finite."""
    assert x.isfinite().all()
    return [ENCODINGS[x.dtype].decode(pattern) for pattern in patterns(x)]
