"""Pictures of graphs as SVG, laid out in layers from inputs down to stores.

Sugiyama's method in its simplest form: layers by longest path, an order in each layer by the mean position of
neighbours, long arrows routed through the layers that they cross. It needs no software, so that a report can
be made, and read, anywhere; Graphviz (:func:`collage_fx.report.pictures.dot`) lays out larger graphs better.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import fmean

from collage_fx.report.pictures import Box, Picture, pass_color

CHARACTER = 6.7  # width of one at 11 px in a monospaced font
BOX_HEIGHT = 34.0
LAYER_HEIGHT = 54.0
GAP = 14.0
MARGIN = 12.0
LONGEST_TEXT = 46
LEGEND_HEIGHT = 20.0
TITLE_HEIGHT = 26.0
SWEEPS = 12


@dataclass
class _Place:
    """A box, or a point that an arrow passes, in its layer."""

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


def svg(drawn: Picture, passes: Sequence[str]) -> str:
    """One picture, new boxes in the colours of the passes that made them, with a legend."""
    body, width, height = _drawing(drawn, passes)
    return _document(body, width, height)


def side_by_side(pictures: Sequence[Picture], titles: Sequence[str], passes: Sequence[str]) -> str:
    """Several pictures in one document, from left to right, each under its title."""
    bodies, left, tallest = [], 0.0, 0.0
    for drawn, title in zip(pictures, titles, strict=True):
        body, width, height = _drawing(drawn, passes)
        width = max(width, 2 * MARGIN + CHARACTER * 1.2 * len(title))
        heading = f'<text x="{MARGIN}" y="18" font-size="13" font-weight="bold">{escape(title)}</text>'
        inner = f'<g transform="translate(0 {TITLE_HEIGHT})">{body}</g>'
        bodies.append(f'<g transform="translate({left:.0f} 0)">{heading}{inner}</g>')
        left, tallest = left + width + 2 * MARGIN, max(tallest, height + TITLE_HEIGHT)
    return _document("".join(bodies), left, tallest)


def _document(body: str, width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="monospace" font-size="11">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{body}</svg>'
    )


def _drawing(drawn: Picture, passes: Sequence[str]) -> tuple[str, float, float]:
    layers = _layers(drawn)
    _order(layers)
    _position(layers)
    places = [place for layer in layers for place in layer]
    left = min((place.x - place.width / 2 for place in places), default=0.0) - MARGIN
    width = max((place.x + place.width / 2 for place in places), default=0.0) - left + MARGIN
    arrows = "".join(_arrow(place, left) for place in places if place.box is not None)
    boxes = "".join(_box(place, place.box, left, passes) for place in places if place.box is not None)
    graph_height = 2 * MARGIN + len(layers) * LAYER_HEIGHT - (LAYER_HEIGHT - BOX_HEIGHT)
    legend_x = MARGIN + 20
    legend = "".join(
        f'<rect x="{MARGIN}" y="{graph_height + i * LEGEND_HEIGHT:.0f}" width="14" height="14" '
        f'fill="{pass_color(name, passes)}" stroke="#444444"/>'
        f'<text x="{legend_x}" y="{graph_height + i * LEGEND_HEIGHT + 11:.0f}">made by {escape(name)}</text>'
        for i, name in enumerate(drawn.passes)
    )
    return (
        arrows + boxes + legend,
        max(width, 200.0),
        graph_height + len(drawn.passes) * LEGEND_HEIGHT + MARGIN,
    )


def _layers(drawn: Picture) -> list[list[_Place]]:
    """The boxes by layer, and a point in every layer that an arrow crosses."""
    depth = _depths(drawn)
    layers: list[list[_Place]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]

    def place(layer: int, width: float, box: Box | None = None) -> _Place:
        layers[layer].append(_Place(layer, width, box))
        return layers[layer][-1]

    places = {box.name: place(depth[box.name], _box_width(box), box) for box in drawn.boxes}
    for start, end in drawn.arrows:
        last = places[start]
        for layer in range(depth[start] + 1, depth[end]):
            point = place(layer, GAP)
            _connect(last, point)
            last = point
        _connect(last, places[end])
    return layers


def _depths(drawn: Picture) -> dict[str, int]:
    """The layer of each box: its longest path to one that nobody reads, so right above its first reader."""
    height: dict[str, int] = {}
    readers: dict[str, list[str]] = {}
    for start, end in drawn.arrows:
        readers.setdefault(start, []).append(end)
    for box in reversed(drawn.boxes):  # a graph's nodes stand in an order in which operands come first
        height[box.name] = max((height[end] + 1 for end in readers.get(box.name, ())), default=0)
    highest = max(height.values(), default=0)
    return {name: highest - each for name, each in height.items()}


def _connect(upper: _Place, lower: _Place) -> None:
    upper.below.append(lower)
    lower.above.append(upper)


def _order(layers: list[list[_Place]]) -> None:
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        for layer in layers if downwards else reversed(layers):
            for i, place in enumerate(layer):
                place.x = i
        for layer in layers if downwards else reversed(layers):
            for i, place in enumerate(layer):
                neighbours = place.above if downwards else place.below
                place.x = fmean([other.x for other in neighbours]) if neighbours else float(i)
            layer.sort(key=lambda place: place.x)
            for i, place in enumerate(layer):
                place.x = float(i)


def _position(layers: list[list[_Place]]) -> None:
    for layer in layers:
        _separate(layer)
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        for layer in layers if downwards else reversed(layers):
            for place in layer:
                neighbours = (place.above if downwards else place.below) or place.above or place.below
                if neighbours:
                    place.x = fmean([other.x for other in neighbours])
            _separate(layer)


def _separate(layer: list[_Place]) -> None:
    """Move the places of a layer apart, in their order, and about as far to the left as to the right."""
    wanted = [place.x for place in layer]
    for one, other in itertools.pairwise(layer):
        other.x = max(other.x, one.x + (one.width + other.width) / 2 + GAP)
    if layer:
        shift = fmean([place.x - x for place, x in zip(layer, wanted, strict=True)])
        for place in layer:
            place.x -= shift


def _box_width(box: Box) -> float:
    return CHARACTER * max(len(_shown(box.text)), len(box.layout)) + 16


def _shown(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"


def _box(place: _Place, box: Box, left: float, passes: Sequence[str]) -> str:
    x, center = place.x - place.width / 2 - left, f'x="{place.x - left:.1f}" text-anchor="middle"'
    fill = pass_color(box.made_by, passes) if box.made_by else "#ffffff"
    made_by = f"\nmade by {box.made_by}" if box.made_by else ""
    return (
        f'<g class="box"><title>{escape(box.text + made_by)}</title>'
        f'<rect x="{x:.1f}" y="{place.top:.1f}" width="{place.width:.1f}" height="{BOX_HEIGHT}" '
        f'rx="{14 if box.role == "input" else 3}" fill="{fill}" stroke="#444444" '
        f'stroke-width="{2 if box.role == "store" else 1}"/>'
        f'<text {center} y="{place.top + 15:.1f}">{escape(_shown(box.text))}</text>'
        f'<text {center} y="{place.top + 28:.1f}" font-size="9" fill="#555555">'
        f"{escape(box.layout)}</text></g>"
    )


def _arrow(start: _Place, left: float) -> str:
    """All arrows that leave a box, each as one smooth line through the points it passes."""
    lines = []
    for target in start.below:
        path, place = [f"M{start.x - left:.1f} {start.bottom:.1f}"], start
        while True:
            middle = (place.bottom + target.top) / 2
            path.append(
                f"C{place.x - left:.1f} {middle:.1f} {target.x - left:.1f} {middle:.1f} "
                f"{target.x - left:.1f} {target.top:.1f}"
            )
            if target.box is not None:
                break
            path.append(f"V{target.bottom:.1f}")
            place, target = target, target.below[0]
        tip = f"M{target.x - left - 4:.1f} {target.top - 6:.1f}l4 6 4 -6"
        lines.append(f'<path d="{" ".join(path)} {tip}" fill="none" stroke="#888888"/>')
    return "".join(lines)
