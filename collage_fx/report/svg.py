"""Pictures as SVG: boxes in layers, from inputs at the top down to stores, and arrows between them.

The layout is Sugiyama's method in its simplest form. The layer of a box is its longest path to a box that
nobody reads. Boxes of a layer are ordered, and then moved, to the mean position of their neighbours. Arrows
that cross layers pass through a point in each. It needs no software, so that a report can be made and read
anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import fmean

from collage_fx.report.pictures import Box, Picture, pass_color

CHARACTER = 6.7  # width of a character at 11 px in a monospaced font
BOX_HEIGHT = 34.0
LAYER_HEIGHT = 54.0
GAP = 14.0
MARGIN = 12.0
LONGEST_TEXT = 46
LEGEND_HEIGHT = 20.0
TITLE_HEIGHT = 26.0
LEAST_WIDTH = 200.0
SWEEPS = 12


@dataclass
class _Place:
    """Position of a box, or of a point that an arrow passes, in its layer."""

    layer: int
    width: float
    box: Box | None = None
    x: float = 0.0
    above: list[_Place] = field(default_factory=list)
    below: list[_Place] = field(default_factory=list)

    @property
    def top(self) -> float:
        return MARGIN + self.layer * LAYER_HEIGHT

    @property
    def bottom(self) -> float:
        return self.top + BOX_HEIGHT


def svg(pictures: Sequence[Picture], titles: Sequence[str], passes: Sequence[str]) -> str:
    """Draw pictures from left to right in one document.

    Args:
        pictures: to draw. Each gets a legend of the passes that made its boxes.
        titles: a title for each picture.
        passes: all passes, whose order gives the colours.
    """
    bodies, left, tallest = [], 0.0, 0.0
    for drawn, title in zip(pictures, titles, strict=True):
        body, width, height = _drawing(drawn, passes)
        width = max(width, 2 * MARGIN + CHARACTER * 1.2 * len(title))
        heading = f'<text x="{MARGIN}" y="18" font-size="13" font-weight="bold">{escape(title)}</text>'
        inner = f'<g transform="translate(0 {TITLE_HEIGHT})">{body}</g>'
        bodies.append(f'<g transform="translate({left:.0f} 0)">{heading}{inner}</g>')
        left, tallest = left + width + 2 * MARGIN, max(tallest, height + TITLE_HEIGHT)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left:.0f}" height="{tallest:.0f}" '
        f'viewBox="0 0 {left:.0f} {tallest:.0f}" font-family="monospace" font-size="11">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(bodies)}</svg>'
    )


def _drawing(drawn: Picture, passes: Sequence[str]) -> tuple[str, float, float]:
    """Draw one picture; return SVG elements, width and height."""
    layers = _layers(drawn)
    _sweep(layers, _order)
    _sweep(layers, _separate)
    places = [place for layer in layers for place in layer]
    left = min((place.x - place.width / 2 for place in places), default=0.0) - MARGIN
    for place in places:
        place.x -= left
    width = max((place.x + place.width / 2 for place in places), default=0.0) + MARGIN
    arrows = "".join(_arrow(place, target) for place in places if place.box for target in place.below)
    boxes = "".join(_box(place, place.box, passes) for place in places if place.box)
    bottom = 2 * MARGIN + len(layers) * LAYER_HEIGHT - (LAYER_HEIGHT - BOX_HEIGHT)
    legend = ""
    for name in drawn.passes:
        legend += (
            f'<rect x="{MARGIN}" y="{bottom:.0f}" width="14" height="14" '
            f'fill="{pass_color(name, passes)}" stroke="#444444"/>'
            f'<text x="{MARGIN + 20}" y="{bottom + 11:.0f}">made by {escape(name)}</text>'
        )
        bottom += LEGEND_HEIGHT
    return arrows + boxes + legend, max(width, LEAST_WIDTH), bottom + MARGIN


def _layers(drawn: Picture) -> list[list[_Place]]:
    """Make a place for each box, and a place in every layer that an arrow crosses, by layer."""
    depth = _depths(drawn)
    layers: list[list[_Place]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]

    def add(layer: int, width: float, box: Box | None = None) -> _Place:
        layers[layer].append(_Place(layer, width, box))
        return layers[layer][-1]

    places = {box.name: add(depth[box.name], _width(box), box) for box in drawn.boxes}
    for start, end in drawn.arrows:
        points = [add(layer, GAP) for layer in range(depth[start] + 1, depth[end])]
        for upper, lower in itertools.pairwise([places[start], *points, places[end]]):
            upper.below.append(lower)
            lower.above.append(upper)
    return layers


def _depths(drawn: Picture) -> dict[str, int]:
    """Compute the layer of each box, right above its first reader."""
    height: dict[str, int] = {}
    readers: dict[str, list[str]] = {}
    for start, end in drawn.arrows:
        readers.setdefault(start, []).append(end)
    for box in reversed(drawn.boxes):  # readers stand behind what they read
        height[box.name] = max((height[end] + 1 for end in readers.get(box.name, ())), default=0)
    highest = max(height.values(), default=0)
    return {name: highest - each for name, each in height.items()}


def _sweep(layers: list[list[_Place]], settle: Callable[[list[_Place]], None]) -> None:
    """Draw every place to the mean of its neighbours, layer by layer, down and up by turns."""
    for layer in layers:
        settle(layer)
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        for layer in layers if downwards else reversed(layers):
            for place in layer:
                if neighbours := (place.above if downwards else place.below) or place.above or place.below:
                    place.x = fmean([other.x for other in neighbours])
            settle(layer)


def _order(layer: list[_Place]) -> None:
    """Sort the places of a layer by their positions, which become 0, 1, ..."""
    layer.sort(key=lambda place: place.x)
    for i, place in enumerate(layer):
        place.x = float(i)


def _separate(layer: list[_Place]) -> None:
    """Move the places of a layer apart in their order; the mean of their positions stays."""
    wanted = [place.x for place in layer]
    for one, other in itertools.pairwise(layer):
        other.x = max(other.x, one.x + (one.width + other.width) / 2 + GAP)
    if layer:
        shift = fmean([place.x - x for place, x in zip(layer, wanted, strict=True)])
        for place in layer:
            place.x -= shift


def _width(box: Box) -> float:
    return CHARACTER * max(len(_shown(box.text)), len(box.layout)) + 16


def _shown(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"


def _box(place: _Place, box: Box, passes: Sequence[str]) -> str:
    center = f'x="{place.x:.1f}" text-anchor="middle"'
    fill = pass_color(box.made_by, passes) if box.made_by else "#ffffff"
    made_by = f"\nmade by {box.made_by}" if box.made_by else ""
    return (
        f'<g class="box"><title>{escape(box.text + made_by)}</title>'
        f'<rect x="{place.x - place.width / 2:.1f}" y="{place.top:.1f}" width="{place.width:.1f}" '
        f'height="{BOX_HEIGHT}" rx="{14 if box.role == "input" else 3}" fill="{fill}" stroke="#444444" '
        f'stroke-width="{2 if box.role == "store" else 1}"/>'
        f'<text {center} y="{place.top + 15:.1f}">{escape(_shown(box.text))}</text>'
        f'<text {center} y="{place.top + 28:.1f}" font-size="9" fill="#555555">'
        f"{escape(box.layout)}</text></g>"
    )


def _arrow(place: _Place, target: _Place) -> str:
    """Draw an arrow from a box as one smooth line through the points that it passes."""
    path = f"M{place.x:.1f} {place.bottom:.1f}"
    while True:
        middle = (place.bottom + target.top) / 2
        path += f" C{place.x:.1f} {middle:.1f} {target.x:.1f} {middle:.1f} {target.x:.1f} {target.top:.1f}"
        if target.box:
            tip = f"M{target.x - 4:.1f} {target.top - 6:.1f}l4 6 4 -6"
            return f'<path d="{path} {tip}" fill="none" stroke="#888888"/>'
        path += f" V{target.bottom:.1f}"
        place, target = target, target.below[0]
