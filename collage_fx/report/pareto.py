"""The Pareto picture of a budget: predicted error against bytes of the plans for a step, as SVG.

What is chosen lies on the frontier, a staircase: below it and to the left of its corners is no plan, so that
is where the names are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from collage_fx.plans import Plan, frontier

WIDTH, LEFT, TOP, RIGHT = 700.0, 70.0, 14.0, 24.0
#: Between the least and the largest error on the axis.
HEIGHT = 240.0
#: Of points, in the order in which they are drawn: how they are filled and outlined.
KINDS = {
    "beaten": "fill='#ffffff' stroke='#767676'",
    "best": "fill='#5b8db8' stroke='#ffffff'",
    "followed": "fill='#d55e00' stroke='#ffffff'",
}
LINE, CHARACTER, MARK = 15.0, 7.0, 5.0  # of text at 12 px, and half of a point's width


def plan_picture(plans: Sequence[Plan]) -> str:
    """A point for each plan, told apart by shape as well as by colour, with its options as a tooltip.

    Args:
        plans: the one that is followed, then all, the smallest first. All have bytes and errors.
    """
    followed, *others = plans
    best = frontier(others)
    exponents = [math.log10(plan.error) for plan in others]
    low, high = math.floor(min(exponents)), max(math.ceil(max(exponents)), math.floor(min(exponents)) + 1)
    most = math.ceil(max(plan.bytes for plan in others))

    def x(size: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * size / most

    def y(exponent: float) -> float:
        return TOP + HEIGHT * (high - exponent) / (high - low)

    places = {plan: (x(plan.bytes), y(exponent)) for plan, exponent in zip(others, exponents, strict=True)}
    kinds = {plan: _kind(plan, followed, best) for plan in others}
    names = _names(best, places)
    bottom = max([TOP + HEIGHT, *(baseline + LINE / 2 for _, baseline in names.values())])
    parts = [
        *(_row(y(exponent), f"{10.0**exponent:g}") for exponent in range(low, high + 1)),
        *(_column(x(size), bottom, str(size)) for size in range(most + 1)),
        _stairs([places[plan] for plan in best], x(most), TOP),
        *(_point(plan, places[plan], kind) for kind in KINDS for plan in others if kinds[plan] == kind),
        *(_name(plan, *names[plan], is_followed=plan == followed) for plan in best),
        f"<text x='{(LEFT + WIDTH - RIGHT) / 2:.0f}' y='{bottom + 36:.0f}' text-anchor='middle'>"
        "bytes per parameter</text>",
        f"<text transform='translate(16 {TOP + HEIGHT / 2:.0f}) rotate(-90)' text-anchor='middle'>"
        "predicted error</text>",
    ]
    said = "; ".join(f"{_short(plan)}: {plan.bytes:.4g} bytes, error {plan.error:.2g}" for plan in best)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' class='plans' width='{WIDTH:.0f}' "
        f"height='{bottom + 46:.0f}' font-family='sans-serif' font-size='12' role='img'>"
        "<title>Predicted error against bytes per parameter</title>"
        f"<desc>{len(others)} plans. Followed: {escape(_short(followed))}. None as small has a smaller error "
        f"than each of these: {escape(said)}.</desc><rect width='100%' height='100%' fill='#ffffff'/>"
        f"{''.join(parts)}</svg>"
    )


def _short(plan: Plan) -> str:
    return ", ".join(filter(None, (plan.strategy, plan.error_format, plan.state)))


def _kind(plan: Plan, followed: Plan, best: Sequence[Plan]) -> str:
    return "followed" if plan == followed else "best" if plan in best else "beaten"


def _names(best: Sequence[Plan], places: dict[Plan, tuple[float, float]]) -> dict[Plan, tuple[float, float]]:
    """Where each name ends: below its point and to its left, and below those that it would cover."""
    ends: dict[Plan, tuple[float, float]] = {}
    for plan in best:
        right, baseline = places[plan][0] - MARK, places[plan][1] + LINE
        for earlier, (end, above) in sorted(ends.items(), key=lambda item: item[1][1]):
            starts_before = right - CHARACTER * len(_short(plan)) < end
            if starts_before and abs(baseline - above) < LINE and earlier != plan:
                baseline = above + LINE
        ends[plan] = right, baseline
    return ends


def _row(y: float, label: str) -> str:
    return (
        f"<path stroke='#dddddd' d='M{LEFT:.0f} {y:.1f}H{WIDTH - RIGHT:.0f}'/>"
        f"<text x='{LEFT - 8:.0f}' y='{y + 4:.1f}' text-anchor='end'>{label}</text>"
    )


def _column(x: float, bottom: float, label: str) -> str:
    return (
        f"<path stroke='#dddddd' d='M{x:.1f} {bottom:.1f}v5'/>"
        f"<text x='{x:.1f}' y='{bottom + 18:.1f}' text-anchor='middle'>{label}</text>"
    )


def _stairs(corners: Sequence[tuple[float, float]], right: float, top: float) -> str:
    """The least error for each number of bytes."""
    (first, _), *_ = corners
    steps = "".join(f"H{x:.1f}V{y:.1f}" for x, y in corners)
    line = f"M{first:.1f} {top:.1f}{steps}H{right:.1f}"
    return f"<path class='frontier' d='{line}' fill='none' stroke='#5b8db8' stroke-width='2'/>"


def _point(plan: Plan, place: tuple[float, float], kind: str) -> str:
    x, y = place
    shape = (
        f"<path d='M{x:.1f} {y - 2 * MARK:.1f}l{2 * MARK} {2 * MARK} -{2 * MARK} {2 * MARK} "
        f"-{2 * MARK} -{2 * MARK}z'/>"
        if kind == "followed"
        else f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{MARK}'/>"
    )
    says = f"{plan}: {plan.bytes:.4g} bytes per parameter, predicted error {plan.error:.2g}"
    return f"<g class='plan {kind}' {KINDS[kind]}><title>{escape(says)}</title>{shape}</g>"


def _name(plan: Plan, right: float, baseline: float, *, is_followed: bool) -> str:
    weight = " font-weight='bold'" if is_followed else ""
    return f"<text x='{right:.1f}' y='{baseline:.1f}' text-anchor='end'{weight}>{escape(_short(plan))}</text>"
