"""Places for the names of points in a scatter plot: x in units of the axis, y in text lines.

No name covers a point, a name or a leader line, and no leader line goes across a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Point = tuple[float, float]
#: Points of a leader line, without its ends; empty = no line.
Leader = list[Point]

#: Half of the width of a point, and distance from it to its name.
POINT, GAP = 0.05, 0.12
#: Half of the height of a name, with its margin.
HALF = 0.5


@dataclass(frozen=True)
class Place:
    """Rectangle of a name, or of a point."""

    left: float
    right: float
    y: float
    is_right: bool = True  # of its point

    @property
    def end(self) -> float:
        """Side towards the point."""
        return self.left if self.is_right else self.right

    def touches(self, other: Place) -> bool:
        beside = self.left >= other.right or other.left >= self.right
        return not beside and abs(self.y - other.y) < 2 * HALF

    def crosses(self, leader: Leader) -> bool:
        return any(self.left < x < self.right and abs(y - self.y) < HALF for x, y in leader)


def placed(points: Mapping[str, Point], widths: Mapping[str, float], least_x: float) -> dict[str, Place]:
    """Return a place for each name, the highest point's first.

    A name that finds no place is put before all others, and the search begins again: names in a crowd
    come first then.
    """
    order = sorted(points, key=lambda name: -points[name][1])
    for _ in range(len(points) ** 2):
        found, left_out = _placed(order, points, widths, least_x)
        if left_out is None:
            return found
        order.remove(left_out)
        order.insert(0, left_out)
    raise ValueError("no places for all names: draw the picture larger")


def _placed(
    order: Sequence[str], points: Mapping[str, Point], widths: Mapping[str, float], least_x: float
) -> tuple[dict[str, Place], str | None]:
    """Place names in an order; also the first name without a place."""
    dots = {point: Place(point[0] - POINT, point[0] + POINT, point[1]) for point in points.values()}
    found: dict[str, Place] = {}
    leaders: list[Leader] = []
    for name in order:
        x, y = points[name]
        column = [other for other, _ in points.values() if abs(other - x) < 2 * POINT]
        others = [dot for point, dot in dots.items() if point[0] not in column]
        for place in _candidates(column, y, widths[name], least_x):
            if any(map(place.touches, [*dots.values(), *found.values()])):
                continue
            line = leader(points[name], place)
            if any(map(place.crosses, leaders)) or any(
                each.crosses(line) for each in [*others, *found.values()]
            ):
                continue
            found[name] = place
            leaders.append(line)
            break
        else:
            return found, name
    return found, None


def _candidates(column: Sequence[float], y: float, width: float, least_x: float) -> Iterator[Place]:
    """Yield places, the nearest first.

    ``column``: x of the point and of those almost above it, whose names begin at the same x.
    """
    for half_lines in range(40):
        for gap in (GAP, 3 * GAP) if half_lines else (GAP,):
            for height in sorted({y - half_lines / 2, y + half_lines / 2}):
                yield Place(max(column) + gap, max(column) + gap + width, height)
                if min(column) - gap - width > least_x:
                    yield Place(min(column) - gap - width, min(column) - gap, height, is_right=False)


def leader(point: Point, place: Place) -> Leader:
    """Return the line from a point to its name: empty if the name is beside the point."""
    (x, y), parts = point, 64
    if abs(place.y - y) <= 0.5:
        return []
    return [(x + (place.end - x) * i / parts, y + (place.y - y) * i / parts) for i in range(1, parts)]
