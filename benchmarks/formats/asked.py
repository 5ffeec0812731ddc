"""What the project asks of its formats, as bounds on this study's figures. A new one is a line here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Results = dict[str, Any]

#: Which beta2 of a list, and which cell.
LOW, HIGH = 0, 1
SMALLEST_UPDATES = 0  # N(0, 1), lr 1e-5


@dataclass(frozen=True)
class Asked:
    """A bound.

    Attributes:
        what: which figure.
        most: its bound.
        figure: from the results to the figure; raises :class:`Missing` if a row that it is of isn't there.
    """

    what: str
    most: float
    figure: Callable[[Results], float]

    def reached(self, results: Results) -> float | None:
        """The figure, None if there is no such row."""
        try:
            return self.figure(results)
        except Missing:
            return None


class Missing(Exception):
    """There is no row of this name."""


def row(results: Results, kind: str, name: str) -> dict[str, Any]:
    for each in results[kind]:
        if each["name"] == name:
            return dict(each)
    raise Missing(name)


def whole(results: Results, name: str) -> Iterator[tuple[float, int, int]]:
    """The errors of a state on the recorded trace, each with its place: (beta2, cell)."""
    for i, cells in enumerate(row(results, "states", name)["recorded"]["whole"]):
        for j, (error,) in enumerate(cells):
            yield error, i, j


def over(results: Results, name: str, other: str) -> Iterator[tuple[float, int, int]]:
    """A state's errors over those of another, with their places."""
    pairs = zip(whole(results, name), whole(results, other), strict=True)
    yield from ((error / base, i, j) for (error, i, j), (base, _, _) in pairs)


def off(results: Results, name: str, other: str) -> float:
    """The largest relative difference between the errors of two states."""
    return max(abs(ratio - 1) for ratio, _, _ in over(results, name, other))


def of_length(results: Results, name: str, steps: int) -> float:
    lengths = results["lengths"]
    if name not in lengths or steps not in lengths["steps"]:
        raise Missing(name)
    return float(lengths[name][lengths["steps"].index(steps)])


def hard(results: Results, name: str, without: str = "") -> float:
    """The largest error of moments on a piece of the hard trace, of any seed, at the higher beta2."""
    (cell,) = row(results, "moments", name)["hard"]["pieces"][HIGH]
    names = results["traces"]["hard"]["pieces"]
    return max(error for seed in cell for piece, error in zip(names, seed, strict=True) if piece != without)


def hard_piece(results: Results, name: str, piece: str) -> float:
    (cell,) = row(results, "moments", name)["hard"]["pieces"][HIGH]
    return max(seed[results["traces"]["hard"]["pieces"].index(piece)] for seed in cell)


def largest_update(results: Results, name: str) -> float:
    return max(row(results, "moments", name)["hard"]["largest_update"][HIGH])


def second(results: Results, name: str, figure: str) -> float:
    return abs(float(row(results, "moments", name)["recorded"][figure][HIGH]))


# Rows that are asked for, by name; the page says which of them are not there yet.
DITHERED = "bfloat16, dithered"  # moments
BLOCK8 = "block8"  # moments
BYTES_5, BYTES_8, BYTES_8_ELEMENTWISE = "block8, byte", "block16, exact", "light, exact, dithered"  # states
FLASHOPTIM = "FlashOptim, 24-bit weights"

ASKED = (
    Asked("`exact` differs from float32, every cell", 0.01, lambda r: off(r, "full, exact", "float32")),
    Asked("`exact`, 24000 steps", 1e-3, lambda r: of_length(r, "exact", 24000)),
    Asked("`byte`, 24000 steps", 0.035, lambda r: of_length(r, "byte", 24000)),
    Asked("`byte`, 1500 steps", 0.13, lambda r: of_length(r, "byte", 1500)),
    Asked("dithered bfloat16 moments, hard trace, each piece", 0.01, lambda r: hard(r, DITHERED)),
    Asked("their second moment, rms relative error", 0.03, lambda r: second(r, DITHERED, "second_rms")),
    Asked("their second moment, mean relative error", 0.002, lambda r: second(r, DITHERED, "second_bias")),
    Asked("`block8`, hard trace, each piece but “spread”", 0.09, lambda r: hard(r, BLOCK8, "spread")),
    Asked("`block8`, hard trace, “spread”", 0.5, lambda r: hard_piece(r, BLOCK8, "spread")),
    Asked("`block8`, hard trace, largest update", 20, lambda r: largest_update(r, BLOCK8)),
    Asked(
        "5 bytes over FlashOptim's error, every cell",
        1,
        lambda r: max(ratio for ratio, _, _ in over(r, BYTES_5, FLASHOPTIM)),
    ),
    Asked(
        "the same at N(0, 1), lr 1e-5",
        0.2,
        lambda r: max(ratio for ratio, _, j in over(r, BYTES_5, FLASHOPTIM) if j == SMALLEST_UPDATES),
    ),
    Asked(
        "`block16` beside `exact`, N(0, 0.02)",
        2e-4,
        lambda r: max(e for e, _, j in whole(r, BYTES_8) if j >= 3),
    ),
    Asked(
        "`block16` beside `exact`, N(0, 1), lr 1e-5",
        2e-3,
        lambda r: max(e for e, _, j in whole(r, BYTES_8) if j == SMALLEST_UPDATES),
    ),
    Asked(
        "8 bytes without scales (`light`), every cell",
        4e-3,
        lambda r: max(e for e, _, _ in whole(r, BYTES_8_ELEMENTWISE)),
    ),
)


def score(errors: dict[str, Any], beta2: int) -> float:
    """One number of a row on a trace: the geometric mean of its errors, of cells and batch."""
    found = [error for cell in errors["whole"][beta2] for error in cell]
    return math.exp(sum(math.log(error) for error in found) / len(found))
