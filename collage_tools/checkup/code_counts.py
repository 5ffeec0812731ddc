"""Counts of the 65,536 codes of 16-bit floats in a tensor, and statistics of them.

Note [Pile-ups]: rounding to nearest leaves a mark in weights that it froze. A weight below a power of two,
2**k, has half the ulp of a weight above. So updates of a certain size move a weight up to 2**k but not
beyond, where they are less than half an ulp. A weight above 2**k that is moved down by a large update stops
there, too. So weights collect at exact powers of two: 1.4 to 40 times as many as neighbouring numbers lead to
expect. Weights rounded from master weights have a smooth density across 2**k; so have weights with error
terms or stochastic rounding, and weights that an initializer draws. ``docs/checkup.md`` has measurements.

The expected number at 2**k is that of the larger one of the densities below and above, each over a sixteenth
of 2**k: the other one may be lower because the distribution ends there. The code 2**k stands for the numbers
from a quarter ulp below to half an ulp above, where an ulp is that of the binade above: for 3/4 as many as a
code above, or for as many if a conversion has cut bits off; then all powers of two have 4/3 of the usual
share. Weights that were rounded twice, or that lie on a grid, have uneven counts everywhere. So the codes at
5/4, 3/2 and 7/4 of 2**k, where rounding to nearest leaves no mark, are counted for comparison. A binade with
a code that no weight has, but many have its neighbours, holds products of rounded numbers that no update has
moved, such as ``torch.randn(..., dtype=torch.bfloat16) * 0.03``: the power above it is left out.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from collage_fx.numerics import STORAGE_FORMATS

#: Number of codes of a 16-bit float, and of codes without the sign.
CODES, MAGNITUDES = 1 << 16, 1 << 15
#: Number of entries that are converted at once.
CHUNK = 1 << 20

#: Least expected number of entries at a power of two, or at adjacent powers taken together.
LEAST_EXPECTED = 10
#: Factor by which the entries of a pile-up exceed the expected number.
LEAST_FACTOR = 1.1
#: Excess in standard deviations beyond LEAST_FACTOR that is no chance: 3e-7 a power of two.
LEAST_SIGNIFICANCE = 5.0
#: Error of an expected number, relative to it, that the slope of the density may cause.
SLOPE = 0.1
#: Share of each power of two, relative to the usual share, after a conversion that cuts bits off, and the
#: conditions for that: number of powers, largest deviation of each, and of their mean square.
CUT_OFF, FEWEST_CUT_OFF, MOST_DEVIATION, MOST_SQUARES = 4 / 3, 3, 3.5, 2.0
#: Factor by which numbers of a table exceed their neighbours.
TABLE_FACTOR = 1.5
#: Numbers of adjacent powers of two that are taken together.
SPANS = (1, 2, 3)
#: Ratio of densities on both sides of a power of two beyond which it is the edge of the distribution.
EDGE = 10
#: Factor of the counts at 5/4, 3/2 and 7/4, relative to their neighbours, beyond which numbers are on a grid.
UNEVEN = 2.0
#: Least mean number of entries of codes on each side of a code without any that is no chance: 2e-9.
BESIDE_A_HOLE = 20

#: Rows of :func:`power_sums`.
AT, BELOW, ABOVE, COMPARED, COMPARED_EXPECTED = range(5)


def as_16_bits(tensor: Tensor) -> Tensor | None:
    """Return the entries as a flat bfloat16 or float16 tensor if that changes no value; else None."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype in STORAGE_FORMATS:
        return flat
    if flat.dtype is not torch.float32 or not flat.numel():
        return None
    for dtype in STORAGE_FORMATS:
        if all(torch.equal(part.to(dtype).float(), part) for part in flat.split(CHUNK)):
            return flat.to(dtype)
    return None


def count_codes(numbers: Tensor) -> Tensor:
    """Count the entries of a flat bfloat16 or float16 tensor by code: int64[65536]."""
    counts = torch.zeros(CODES, dtype=torch.int64)
    for part in numbers.view(torch.uint16).split(CHUNK):
        counts += torch.bincount(part.int(), minlength=CODES)
    return counts


def magnitudes(counts: Tensor) -> Tensor:
    """Add the counts of codes that differ in their sign: int64[32768]."""
    return counts[:MAGNITUDES] + counts[MAGNITUDES:]


@functools.cache
def values(dtype: torch.dtype) -> Tensor:
    """Return the values of all codes of a 16-bit dtype: float64[65536], with infinities and NaN."""
    return torch.arange(CODES, dtype=torch.int32).to(torch.uint16).view(dtype).double()


@functools.cache
def reach(dtype: torch.dtype) -> Tensor:
    """Return the least change of each number of a 16-bit dtype, toward 0, that is not lost: float64[32768].

    That is half the distance to the next number toward 0. Any smaller change is rounded to none.
    """
    positive = values(dtype)[:MAGNITUDES]
    return torch.cat([positive[1:2] / 2, positive.diff() / 2])


def count_stuck(of_magnitudes: Tensor, dtype: torch.dtype, lr: float, weight_decay: float) -> int:
    """Count entries that an update of size ``lr`` and a decay of ``lr * weight_decay`` cannot move."""
    positive = values(dtype)[:MAGNITUDES]
    stuck = reach(dtype) > lr * (1 + weight_decay * positive)
    return int(of_magnitudes[stuck & positive.isfinite()].sum())


def binades(of_magnitudes: Tensor, dtype: torch.dtype) -> Tensor:
    """Reorder counts by binade: row = biased exponent, column = fraction."""
    return of_magnitudes.view(-1, 1 << (STORAGE_FORMATS[dtype].precision - 1))


def power_sums(of_magnitudes: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum up counts at and beside powers of two: float64[5, powers]; sums of several tensors add up.

    Rows are AT 2**k, BELOW and ABOVE it (mean per code above), COMPARED and COMPARED_EXPECTED: at 5/4, 3/2
    and 7/4 of 2**k, and as neighbours there lead to expect; all are zero above a binade with holes. The first
    column is the smallest power whose lower neighbour is a normal number, see :func:`first_exponent`.
    """
    rows = binades(of_magnitudes, dtype).double()[1:-1]  # without subnormal numbers, infinities and NaN
    lower, upper = rows[:-1], rows[1:]
    width = rows.shape[1] // 16
    quarters = [rows.shape[1] * i // 4 for i in (1, 2, 3)]
    beside = [upper[:, q - width : q].sum(1) + upper[:, q + 1 : q + width + 1].sum(1) for q in quarters]
    sums = [
        upper[:, 0],
        lower[:, -2 * width :].mean(1) * 2,
        upper[:, 1 : width + 1].mean(1),
        upper[:, quarters].sum(1),
        torch.stack(beside).sum(0) / (2 * width),
    ]
    means = torch.nn.functional.avg_pool1d(lower[:, None], width, 1)[:, 0]  # of codes i to i + width - 1
    is_hole = (lower[:, width:-width] == 0) & (means[:, : -width - 1] > BESIDE_A_HOLE)
    is_moved = ~(is_hole & (means[:, width + 1 :] > BESIDE_A_HOLE)).any(1)
    return torch.stack(sums) * is_moved


def is_table(of_magnitudes: Tensor, dtype: torch.dtype) -> bool:
    """Return whether numbers that are no powers of two occur far more often than their neighbours.

    Such numbers are of a formula, as in a Fourier basis, or of a grid. Powers of two may be frequent there,
    too, and are no trace of rounding. Even and odd codes are compared apart, because sums of equal steps may
    be multiples of two ulps. Codes next to powers of two are left out.
    """
    rows = binades(of_magnitudes, dtype).double()
    beside = max(4, rows.shape[1] // 32)
    rows = rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(0, 1)
    counts = rows[:, 2 * beside : -2 * beside]
    means = torch.nn.functional.avg_pool1d(rows[:, None], beside, 1)[:, 0]  # of codes i to i + beside - 1
    count = counts.shape[1]
    left, right = means[:, beside : beside + count], means[:, 2 * beside + 1 : 2 * beside + 1 + count]
    mean = torch.maximum(left, right)  # the density may end beside a code
    deviation = (counts + TABLE_FACTOR**2 * mean / beside).sqrt().clamp(min=1)
    return bool(((counts - TABLE_FACTOR * mean) / deviation > LEAST_SIGNIFICANCE).any())


def first_exponent(dtype: torch.dtype) -> int:
    """Return the exponent of the first column of :func:`power_sums`."""
    return STORAGE_FORMATS[dtype].min_exponent + 1


@dataclass(frozen=True)
class PileUp:
    """Entries at exact powers of two, beside the number that their neighbours lead to expect.

    Attributes:
        exponent: exponent of the largest power of two.
        span: number of adjacent powers that were taken together.
        observed: number of entries at them, of both signs.
        expected: number that a smooth density has there.
        significance: excess over LEAST_FACTOR times the expected number, in standard deviations.
    """

    exponent: int
    span: int
    observed: int
    expected: float
    significance: float

    @property
    def factor(self) -> float:
        return self.observed / self.expected

    @property
    def is_certain(self) -> bool:
        return self.significance > LEAST_SIGNIFICANCE


def pile_ups(sums: Tensor, dtype: torch.dtype) -> list[PileUp]:
    """Return counts at all powers of two, and runs of them, that are expected to have enough entries.

    Args:
        sums: sums of :func:`power_sums`.
        dtype: dtype of the weights.

    Powers at the edge of the distribution are left out, as are those on a grid of few numbers.
    """
    width = (1 << (STORAGE_FORMATS[dtype].precision - 1)) // 16
    at, below, above, compared, compared_expected = sums
    is_even = (compared <= UNEVEN * compared_expected.clamp(min=1)) & (below > 0) & (above > 0)
    is_inside = ((above * EDGE >= below) & (below * EDGE >= above) & is_even).tolist()
    density = torch.maximum(below, above)
    expected = (0.75 * density).tolist()
    variance = (0.75**2 * density / width).tolist()  # of means of 2 * width and width codes
    uneven = (compared / compared_expected.clamp(min=1)).clamp(min=1).tolist()
    observed = at.tolist()
    least = max(LEAST_EXPECTED, max(expected) / EDGE)  # the slope is steep in the tails
    tested = [i for i, inside in enumerate(is_inside) if inside and expected[i] >= least]
    if _are_cut_off([(observed[i], expected[i], variance[i]) for i in tested]):
        expected = [CUT_OFF * each for each in expected]
        variance = [CUT_OFF**2 * each for each in variance]
    found = []
    for span in SPANS:
        for first in range(len(observed) - span + 1):
            part = range(first, first + span)
            total = sum(expected[i] for i in part)
            if total < LEAST_EXPECTED or not all(is_inside[i] for i in part):
                continue
            factor = LEAST_FACTOR * sum(uneven[i] * expected[i] for i in part) / total
            number = sum(observed[i] for i in part)
            deviation = math.sqrt(number + factor**2 * sum(variance[i] for i in part))
            excess = (number - factor * total) / max(deviation, 1.0)
            exponent = first_exponent(dtype) + first + span - 1
            found.append(PileUp(exponent, span, int(number), total, excess))
    return found


def _are_cut_off(tested: list[tuple[float, float, float]]) -> bool:
    """Return whether all powers of two have the share of numbers that were cut off, instead of rounded.

    Args:
        tested: observed and expected numbers, and variances of the latter.
    """
    deviations = [
        (number - CUT_OFF * wanted)
        / math.sqrt(max(1.0, number + CUT_OFF**2 * variance + (SLOPE * wanted) ** 2))
        for number, wanted, variance in tested
    ]
    total = sum(wanted for _, wanted, _ in tested)
    return (
        len(tested) >= FEWEST_CUT_OFF
        and sum(number for number, _, _ in tested) > LEAST_FACTOR * total
        and all(abs(each) < MOST_DEVIATION for each in deviations)
        and sum(each**2 for each in deviations) < MOST_SQUARES * len(tested)
    )


# Two checkpoints. -------------------------------------------------------------------------------------------

#: Number of biased exponents of float32 numbers; 0 stands for zero.
EXPONENTS = 256
#: Fewest entries, and least share of a tensor, whose ulp is small enough to show how far a weight moves.
FEWEST_OF_REFERENCE, SHARE_OF_REFERENCE = 200, 0.002
#: Share of the reference that has to have moved.
MOVED_REFERENCE = 0.9
#: Least expected share of moved entries, and fewest entries, of a binade that is judged.
LEAST_MOVED, FEWEST_IN_BINADE = 0.2, 100


def count_moves(earlier: Tensor, later: Tensor) -> Tensor:
    """Count entries by the exponents of their earlier value and of their move: int64[256, 256]."""
    counts = torch.zeros(EXPONENTS**2, dtype=torch.int64)
    for before, after in zip(earlier.split(CHUNK), later.split(CHUNK), strict=True):
        old = before.float()
        keys = _exponent(old) * EXPONENTS + _exponent(after.float() - old)
        counts += torch.bincount(keys, minlength=EXPONENTS**2)
    return counts.view(EXPONENTS, EXPONENTS)


def _exponent(numbers: Tensor) -> Tensor:
    return (numbers.view(torch.int32) >> 23) & 0xFF


@dataclass(frozen=True)
class Moves:
    """Numbers of entries of a tensor that moved between two checkpoints, and that should have moved.

    Attributes:
        entries: number of entries compared.
        moved: number of entries that differ.
        judged: number of entries in binades for which there is an expected share of at least LEAST_MOVED.
        judged_moved, judged_expected: number of them that moved, and that were expected to.
        lost: number of missing moves in binades where less than half of the expected moves happened.
    """

    entries: int
    moved: int
    judged: int = 0
    judged_moved: int = 0
    judged_expected: float = 0.0
    lost: float = 0.0


def moves(table: Tensor, precision: int) -> Moves:
    """Compare the moves of large weights with the moves of small weights.

    A weight's update does not depend on its ulp. So the smallest weights, whose ulps are far smaller than
    their moves, show how far weights of this tensor move, and a larger weight whose half ulp is less than
    that should have moved, too. This holds for masters, error terms and stochastic rounding; rounding to
    nearest in each step loses the moves.

    Args:
        table: counts of :func:`count_moves`.
        precision: bits of the significand of the weights' format.
    """
    counts = table.double()
    entries = counts.sum(1)
    moved = counts[:, 1:].sum(1)
    total = Moves(int(entries.sum()), int(moved.sum()))
    needed = max(FEWEST_OF_REFERENCE, SHARE_OF_REFERENCE * float(entries[1:].sum()))
    enough = (entries[1:].cumsum(0) >= needed).nonzero()
    if not len(enough):
        return total
    last = int(enough[0]) + 1
    reference = counts[1 : last + 1].sum(0)
    reference /= reference.sum()
    if reference[1:].sum() < MOVED_REFERENCE:
        return total
    at_least = reference.flip(0).cumsum(0).flip(0)  # share of moves of 2**e and more
    exponents = torch.arange(EXPONENTS)
    share = at_least[(exponents - precision).clamp(min=1)]  # half an ulp is 2**(exponent - precision)
    is_judged = (exponents > last) & (entries >= FEWEST_IN_BINADE) & (share >= LEAST_MOVED)
    expected = share * entries
    missing = torch.where(is_judged & (moved < expected / 2), expected - moved, 0)
    return replace(
        total,
        judged=int(entries[is_judged].sum()),
        judged_moved=int(moved[is_judged].sum()),
        judged_expected=float(expected[is_judged].sum()),
        lost=float(missing.sum()),
    )


# Traces of training. ----------------------------------------------------------------------------------------

#: Numbers of rows and columns of a matrix that are looked at.
MOST_ROWS, MOST_COLUMNS = 256, 4096


def unevenness(matrix: Tensor) -> float:
    """Return how much the squared norms of rows or columns differ beyond chance, in standard deviations.

    Entries that an initializer draws independently give about 0, rows of orthogonal matrices less. Gradients
    are products of few vectors, so training makes some rows and columns larger than others.
    """
    rows = matrix.shape[0]
    every = torch.linspace(0, rows - 1, min(rows, MOST_ROWS)).long()
    squares = matrix.reshape(rows, -1)[every, :MOST_COLUMNS].float().square()
    found = []
    for each in (squares, squares.T):
        kept = each[each.sum(1) > 0]
        if kept.shape[0] < 2 or kept.shape[1] < 2:
            continue
        sums = kept.sum(1)
        variance = kept.shape[1] * float(kept.var())
        degrees = kept.shape[0] - 1
        if variance > 0:
            spread = float((sums - sums.mean()).square().sum()) / variance
            found.append((spread - degrees) / math.sqrt(2 * degrees))
    return max(found, default=0.0)
