"""Whether a mean of few paired differences is other than zero: Student's t-test, and Holm's correction."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import mpmath  # comes with sympy

__all__ = ["Difference", "holm", "paired"]


@dataclass(frozen=True)
class Difference:
    """A mean of paired differences.

    Attributes:
        mean: of them.
        half_width: of its 95 % confidence interval; infinite for one pair.
        p: two-sided, of the hypothesis that the mean is zero; 1 for one pair.
    """

    mean: float
    half_width: float
    p: float


def paired(differences: Sequence[float]) -> Difference:
    """Student's t-test of paired differences, one for each seed.

    Args:
        differences: at least one.
    """
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return Difference(mean, math.inf, 1.0)
    error = statistics.stdev(differences) / math.sqrt(count)
    if error == 0:
        return Difference(mean, 0.0, 1.0 if mean == 0 else 0.0)
    return Difference(mean, _quantile(count - 1) * error, _two_sided(abs(mean) / error, count - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for their number [Holm, Scand. J. Statist. 6, 1979], in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def _two_sided(t: float, freedom: int) -> float:
    """P(|T| > t) of Student's distribution, which is a regularized incomplete beta function."""
    return float(mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True))


def _quantile(freedom: int, level: float = 0.05) -> float:
    """The t that is exceeded with this probability, on both sides together."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _two_sided(middle, freedom) > level else (low, middle)
    return high
