"""Pictures as SVG: a column of boxes in the order of the graph, and arcs from operands to their readers.

It needs no software, so that a report can be made and read anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape

from collage_tools.pages.pictures import Picture, pass_color

CHARACTER = 6.7  # width of a character at 11 px in a monospaced font
ROW_HEIGHT = 26.0
BOX_HEIGHT = 20.0
MARGIN = 12.0
LEGEND_HEIGHT = 20.0
TITLE_HEIGHT = 26.0
#: Distance between the boxes and the control points of an arc to the next row, and to all distant rows.
LEAST_REACH, MOST_REACH = 12.0, 96.0


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


#: Width of a histogram's bars, and height of the highest bar.
BAR_WIDTH, BAR_HEIGHT = 9.0, 160.0


def histogram(
    counts: Sequence[float], *, labels: Mapping[int, str], marked: Collection[int], line: Sequence[float] = ()
) -> str:
    """Draw a histogram: a bar for each count.

    Args:
        counts: heights of the bars.
        labels: texts below some bars, by index.
        marked: indices of bars in another colour.
        line: heights of a curve in front of the bars.
    """
    highest = max([*counts, *line, 1])
    width = 2 * MARGIN + BAR_WIDTH * len(counts)
    bottom = MARGIN + BAR_HEIGHT

    def y(count: float) -> float:
        return bottom - BAR_HEIGHT * count / highest

    body = "".join(
        f'<rect x="{MARGIN + i * BAR_WIDTH:.1f}" y="{y(count):.1f}" width="{BAR_WIDTH - 1:.1f}" '
        f'height="{bottom - y(count):.1f}" fill="{"#D55E00" if i in marked else "#0072B2"}">'
        f"<title>{count:,.10g}</title></rect>"
        for i, count in enumerate(counts)
    )
    points = " ".join(f"{MARGIN + (i + 0.5) * BAR_WIDTH:.1f},{y(value):.1f}" for i, value in enumerate(line))
    if points:
        body += f'<polyline points="{points}" fill="none" stroke="#000000" stroke-dasharray="4 2"/>'
    body += "".join(
        f'<text x="{MARGIN + (i + 0.5) * BAR_WIDTH:.1f}" y="{bottom + 14:.0f}" text-anchor="middle">'
        f"{escape(text)}</text>"
        for i, text in labels.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom + 22:.0f}" '
        f'font-family="monospace" font-size="11"><rect width="100%" height="100%" fill="#ffffff"/>'
        f"{body}</svg>"
    )


def _drawing(drawn: Picture, passes: Sequence[str]) -> tuple[str, float, float]:
    """Draw one picture; return SVG elements, width and height."""
    of_texts = CHARACTER * max((len(box.text) for box in drawn.boxes), default=0) + 2 * MARGIN
    wide = of_texts + CHARACTER * max((len(box.layout) for box in drawn.boxes), default=0)
    row = {box.name: i for i, box in enumerate(drawn.boxes)}
    arrows = [(row[start], row[end]) for start, end in drawn.arrows]
    left = MARGIN + max((_reach(*arrow) for arrow in arrows), default=0.0)
    body = "".join(_arc(left, *arrow) for arrow in arrows)
    for i, box in enumerate(drawn.boxes):
        y = MARGIN + i * ROW_HEIGHT
        made_by = f"\nmade by {box.made_by}" if box.made_by else ""
        body += (
            f'<g class="box"><title>{escape(box.text + made_by)}</title>'
            f'<rect x="{left:.0f}" y="{y:.0f}" width="{wide:.0f}" height="{BOX_HEIGHT:.0f}" '
            f'rx="{10 if box.role == "input" else 3}" '
            f'fill="{pass_color(box.made_by, passes) if box.made_by else "#ffffff"}" stroke="#444444" '
            f'stroke-width="{2 if box.role == "store" else 1}"/>'
            f'<text x="{left + 8:.0f}" y="{y + 14:.0f}">{escape(box.text)}</text>'
            f'<text x="{left + of_texts:.0f}" y="{y + 14:.0f}" font-size="9" fill="#555555">'
            f"{escape(box.layout)}</text></g>"
        )
    bottom = MARGIN + len(drawn.boxes) * ROW_HEIGHT
    for name in drawn.passes:
        body += (
            f'<rect x="{left:.0f}" y="{bottom:.0f}" width="14" height="14" '
            f'fill="{pass_color(name, passes)}" stroke="#444444"/>'
            f'<text x="{left + 20:.0f}" y="{bottom + 11:.0f}">made by {escape(name)}</text>'
        )
        bottom += LEGEND_HEIGHT
    return body, left + wide + MARGIN, bottom + MARGIN


def _reach(start: int, end: int) -> float:
    """Return the distance between the boxes and the control points of an arc between two rows."""
    return min(LEAST_REACH * (end - start), MOST_REACH)


def _arc(left: float, start: int, end: int) -> str:
    """Draw an arrow between the left edges of the boxes in two rows."""
    above, below = (MARGIN + row * ROW_HEIGHT + BOX_HEIGHT / 2 for row in (start, end))
    x = left - _reach(start, end)
    path = f"M{left:.0f} {above:.0f} C{x:.0f} {above:.0f} {x:.0f} {below:.0f} {left:.0f} {below:.0f}"
    return f'<path d="{path} l-6 -4 m6 4 l-6 4" fill="none" stroke="#888888"/>'
