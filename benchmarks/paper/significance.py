"""Whether differences are other than zero: the sign test, Welch's t-test, and Holm's correction."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import mpmath  # comes with sympy

LEVEL = 0.05


@dataclass(frozen=True)
class Difference:
    """How far apart two things are found to be.

    Attributes:
        value: of the difference.
        low, high: between them the true one lies, with 95 % confidence; infinite where there are too few.
        p: two-sided, of the hypothesis that there is none.
    """

    value: float
    low: float
    high: float
    p: float


def sign_test(differences: Sequence[float]) -> Difference:
    """The median of independent differences, of which each may have a distribution of its own.

    Under the hypothesis that is tested either sign is as likely. Differences of zero have none, and count for
    the interval alone, whose ends are order statistics: infinite for fewer than six.

    Args:
        differences: at least one.
    """
    signs = [each > 0 for each in differences if each]
    fewer = min(sum(signs), len(signs) - sum(signs))
    ordered, count = sorted(differences), len(differences)
    ranks = [rank for rank in range(1, count // 2 + 1) if _at_most(rank - 1, count) <= LEVEL / 2]
    low, high = (ordered[ranks[-1] - 1], ordered[-ranks[-1]]) if ranks else (-math.inf, math.inf)
    return Difference(statistics.median(ordered), low, high, min(1.0, 2 * _at_most(fewer, len(signs))))


def welch(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The mean of one sample less that of another, which may have another variance.

    Args:
        first: independent of each other and of the second.
        second: with fewer than two in either nothing is found.
    """
    value = statistics.fmean(first) - statistics.fmean(second)
    if min(len(first), len(second)) < 2:
        return Difference(value, -math.inf, math.inf, 1.0)
    parts = [statistics.variance(each) / len(each) for each in (first, second)]
    if sum(parts) == 0:
        return Difference(value, value, value, 1.0 if value == 0 else 0.0)
    error = math.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(each) - 1) for part, each in zip(parts, (first, second), strict=True)
    )
    width = error * _quantile(freedom)
    return Difference(value, value - width, value + width, _two_sided(abs(value) / error, freedom))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for their number [Holm, Scand. J. Statist. 6, 1979], in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def _at_most(heads: int, tosses: int) -> float:
    """The probability of so many heads of a fair coin, or fewer."""
    return sum(math.comb(tosses, k) for k in range(heads + 1)) / 2**tosses


def _two_sided(t: float, freedom: float) -> float:
    """P(|T| > t) of Student's distribution, which is a regularized incomplete beta function."""
    return float(mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True))


def _quantile(freedom: float) -> float:
    """The t that is exceeded with a probability of :data:`LEVEL`, on both sides together."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _two_sided(middle, freedom) > LEVEL else (low, middle)
    return high
