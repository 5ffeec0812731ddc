"""The picture of a budget's plans: every plan at its place, the frontier, and names that cover nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from collage_fx import explain
from collage_fx.plans import Plan, frontier
from collage_fx.report.pareto import CHARACTER, HEIGHT, LEFT, LINE, RIGHT, TOP, WIDTH, plan_picture
from tests.support.training import parameters

HTML, SVG = "{http://www.w3.org/1999/xhtml}", "{http://www.w3.org/2000/svg}"

SMALL, BEATEN, CHOSEN, LARGE = (
    Plan("light", "byte", "block8", 2.0, 0.1),
    Plan("light", "byte", None, 3.0, 0.1),
    Plan("light", "exact", None, 4.0, 0.01),
    Plan("full", "exact", None, 5.0, 0.001),
)
PLANS = (CHOSEN, SMALL, BEATEN, CHOSEN, LARGE)


def drawn(plans: tuple[Plan, ...]) -> ElementTree.Element:
    return ElementTree.fromstring(plan_picture(plans))


def center(point: ElementTree.Element) -> tuple[float, float]:
    """Of a circle, or of a diamond, which begins at its top."""
    circle = point.find(f"{SVG}circle")
    if circle is not None:
        return float(circle.attrib["cx"]), float(circle.attrib["cy"])
    diamond = point.find(f"{SVG}path")
    assert diamond is not None
    x, top, half = map(float, re.findall(r"[\d.]+", diamond.attrib["d"])[:3])
    return x, top + half


def points(picture: ElementTree.Element) -> dict[str, tuple[str, tuple[float, float]]]:
    """Of each plan, by its tooltip: of which kind it is, and where."""
    found = {}
    for group in picture.iter(f"{SVG}g"):
        title = group.find(f"{SVG}title")
        assert title is not None
        found[title.text or ""] = group.attrib["class"].split()[1], center(group)
    return found


def test_points_are_where_bytes_and_errors_say() -> None:
    """Bytes from 0 to 5, errors from 1e-3 to 0.1, which are two decades."""
    unit, decade = (WIDTH - LEFT - RIGHT) / 5, HEIGHT / 2
    expected = {
        SMALL: ("best", 2, 0),
        BEATEN: ("beaten", 3, 0),
        CHOSEN: ("followed", 4, 1),
        LARGE: ("best", 5, 2),
    }
    found = points(drawn(PLANS))
    assert len(found) == len(expected)
    for plan, (kind, size, below) in expected.items():
        said = f"{plan}: {plan.bytes:.4g} bytes per parameter, predicted error {plan.error:.2g}"
        assert found[said][0] == kind
        assert found[said][1] == pytest.approx((LEFT + size * unit, TOP + below * decade), abs=0.06)


def test_the_frontier_goes_through_the_best_alone() -> None:
    picture = drawn(PLANS)
    (stairs,) = (each for each in picture.iter(f"{SVG}path") if each.attrib.get("class") == "frontier")
    corners = re.findall(r"H([\d.]+)V([\d.]+)", stairs.attrib["d"])
    best = [place for kind, place in points(picture).values() if kind != "beaten"]
    assert [tuple(map(float, each)) for each in corners] == sorted(best)


def test_it_says_in_words_what_it_shows() -> None:
    picture = drawn(PLANS)
    assert picture.attrib["role"] == "img"
    title, description = (picture.findtext(f"{SVG}{tag}") for tag in ("title", "desc"))
    assert title == "Predicted error against bytes per parameter"
    assert description == (
        "4 plans. Followed: light, exact. None as small has a smaller error than each of these: light, byte, "
        "block8: 2 bytes, error 0.1; light, exact: 4 bytes, error 0.01; full, exact: 5 bytes, error 0.001."
    )
    bold = [text.text for text in picture.iter(f"{SVG}text") if "font-weight" in text.attrib]
    assert bold == ["light, exact"]


def test_a_frontier_has_no_plan_that_another_beats() -> None:
    assert frontier(PLANS[1:]) == [SMALL, CHOSEN, LARGE]
    assert frontier([]) == []


Make = Callable[[Any], torch.optim.Optimizer]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
        torch.optim.Adagrad,
    ],
    ids=["AdamW", "SGD", "Adagrad"],
)
def test_the_page_of_a_budget_has_it_with_names_in_view_and_apart(make: Make) -> None:
    report = explain(make(parameters(shapes=((256, 256), (256,)))), bytes_per_parameter=8)
    followed, *plans = report.graphs[-1].plans
    root = ElementTree.fromstring(report.to_html())
    (picture,) = (each for each in root.iter(f"{SVG}svg") if each.attrib.get("class") == "plans")
    assert len(points(picture)) == len(plans)
    names = [
        (float(text.attrib["x"]), float(text.attrib["y"]), text.text or "")
        for text in picture.iter(f"{SVG}text")
        if text.text and text.text.startswith(("light", "plus", "full"))
    ]
    assert len(names) == len(frontier(plans))
    for end, baseline, name in names:
        assert end - CHARACTER * len(name) > LEFT
        assert baseline < float(picture.attrib["height"])
    for (end, baseline, name), (other_end, other, other_name) in itertools.combinations(names, 2):
        apart = end - CHARACTER * len(name) >= other_end or other_end - CHARACTER * len(other_name) >= end
        assert apart or abs(baseline - other) >= LINE - 0.11  # of coordinates with one digit
    table = next(
        table for table in root.iter(f"{HTML}table") if "predicted error" in "".join(table.itertext())
    )
    cells = [["".join(cell.itertext()).strip() for cell in row] for row in table.iter(f"{HTML}tr")][1:]
    assert [cell[1] for cell in cells] == [str(plan) for plan in frontier(plans)]
    assert [cell[1] for cell in cells if cell[0] == "→"] == [str(followed)]


class LowMomentum(torch.optim.Optimizer):
    """Float32 parameters with a momentum in bfloat16."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=torch.bfloat16))
            momentum.mul_(0.9).add_(p.grad)
            p.add_(momentum, alpha=-1e-3)


def test_a_page_has_none_without_a_budget_or_parameters_to_spend_it_on() -> None:
    without = explain(torch.optim.SGD(parameters(), lr=1e-3))
    nothing_low = explain(LowMomentum(parameters(torch.float32), {}), bytes_per_parameter=8)
    assert nothing_low.graphs[-1].plans
    assert nothing_low.tensors
    for report in (without, nothing_low):
        html = report.to_html()
        assert "Plans" not in html
        assert "class='plans'" not in html
