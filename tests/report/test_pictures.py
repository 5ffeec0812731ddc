"""One tensor's update as boxes and arrows, and as SVG."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from collage_fx import CollageReport, explain
from collage_fx.errors import InvalidOptionError
from tests.support.training import parameters

captures_alpha = pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="torch 2.11 captures add(alpha=...) as two operations"
)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def sgd() -> CollageReport:
    p = torch.nn.Parameter(torch.ones(4).bfloat16())
    return explain(torch.optim.SGD([("weight", p)], lr=0.5))


@pytest.fixture(scope="module")
def adamw() -> CollageReport:
    first, second = parameters()
    return explain(torch.optim.AdamW([("first", first), ("second", second)], lr=1e-3))


@captures_alpha
def test_a_step_in_the_notation_of_arithmetic(sgd: CollageReport) -> None:
    before, after = sgd.graphs[0].pictures()
    assert [box.text for box in before.boxes] == ["p", "g", "add = p + -0.5 × g", "p ← add"]
    assert before.arrows == (("arg0_1", "add"), ("arg1_1", "add"), ("add", "copy_"))
    assert [(box.text, box.made_by) for box in after.boxes] == [
        ("p", ""),
        ("g", ""),
        ("p_rest", "allocate"),
        ("p_count", "allocate"),
        ("p_start", "allocate"),
        ("mul_1 = f32(g) × -0.5", "widen"),
        ("with_lower_half = with_lower_half(f32(p), p_rest)", "compensate-wide"),
        ("phase = phase(p_count, p_start)", "sum-changes"),
        ("once = once(phase)", "hoist-scalars"),
        ("phases = phases(p, once)", "sum-changes"),
        ("dithered_sum = dithered_sum(with_lower_half, mul_1, phases)", "sum-changes"),
        ("upper_half = upper_half(dithered_sum)", "compensate-wide"),
        ("lower_half = lower_half(dithered_sum)", "compensate-wide"),
        ("add_3 = p_count + 1", "compensate-wide"),
        ("p_rest ← lower_half", "compensate-wide"),
        ("p_count ← add_3", "compensate-wide"),
        ("p ← bf16(upper_half)", ""),
    ]


def test_one_tensor_of_many_and_not_what_others_compute(adamw: CollageReport) -> None:
    (graph,) = adamw.graphs
    for picture in graph.pictures("second"):
        inputs = [box.text for box in picture.boxes if box.role == "input"]
        added = {"p_rest", "p_count", "p_start"}
        assert sorted(set(inputs) - added) == ["exp_avg'", "exp_avg_sq'", "p", "step'"]
        assert {box.layout.split("[")[1] for box in picture.boxes} == {"5]", "]"}
        assert len(picture.boxes) < 60
    before, after = graph.pictures("second.exp_avg_sq")
    ends = [box.text for box in before.boxes if box.role != "operation"]
    assert ends[:2] == ["exp_avg_sq", "g"]
    assert [end.split()[:2] for end in ends[2:]] == [["exp_avg_sq", "←"]]
    assert {"exp_avg_sq", "exp_avg_sq_rest", "g"} == {box.text for box in after.boxes if box.role == "input"}


def test_arrows_point_from_earlier_boxes_to_later_ones(adamw: CollageReport) -> None:
    for row in adamw.tensors:
        for picture in adamw.graphs[0].pictures(row.name):
            place = {box.name: i for i, box in enumerate(picture.boxes)}
            assert all(place[start] < place[end] for start, end in picture.arrows)


def test_svg_is_strict_xml_with_every_box_in_view_and_none_on_another(
    adamw: CollageReport, tmp_path: Path
) -> None:
    graph = adamw.graphs[0]
    path = graph.draw(tmp_path / "first.svg", tensor="first")
    root = ElementTree.parse(path).getroot()
    boxes = root.findall(f".//{SVG}g[@class='box']/{SVG}rect")
    assert len(boxes) == sum(len(picture.boxes) for picture in graph.pictures("first"))
    for half in root.findall(f"{SVG}g"):
        left = float(half.attrib["transform"].split("(")[1].split()[0])
        places = [
            [float(rect.attrib[name]) for name in ("x", "y", "width", "height")]
            for rect in half.findall(f".//{SVG}g[@class='box']/{SVG}rect")
        ]
        for i, (x, y, width, height) in enumerate(places):
            assert x >= 0
            assert left + x + width <= float(root.attrib["width"])
            assert y + height <= float(root.attrib["height"])
            for other_x, other_y, other_width, _ in places[:i]:
                assert other_y != y or x >= other_x + other_width or other_x >= x + width
    texts = {element.text for element in root.iter(f"{SVG}text")}
    assert {"first before", "first after", "made by compensate-wide"} <= texts
    drawn = {box.text for picture in graph.pictures("first") for box in picture.boxes}
    assert drawn <= texts


def test_what_is_missing_is_named(sgd: CollageReport, tmp_path: Path) -> None:
    (graph,) = sgd.graphs
    with pytest.raises(InvalidOptionError, match="did you mean weight"):
        graph.draw(tmp_path / "x.svg", tensor="wieght")
    with pytest.raises(InvalidOptionError, match=r"no way to draw a \.jpeg file"):
        graph.draw(tmp_path / "x.jpeg")
    plain = explain(torch.optim.SGD(parameters(torch.float32))).graphs[0]
    with pytest.raises(InvalidOptionError, match="updates no bfloat16"):
        plain.draw(tmp_path / "x.svg")
    assert list(tmp_path.iterdir()) == []
