"""``report.to_html()``: one file, strict, offline, and right in a real browser."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import sympy
import torch

from collage_fx import CollageBackend, CollageReport, explain
from collage_tools.pages.mathml import recurrence_mathml
from collage_tools.pages.pictures import PASS_COLORS, pass_color
from tests.support.browser import BROWSER, NO_BROWSER
from tests.support.training import Descent, parameters, run_steps

HTML = "{http://www.w3.org/1999/xhtml}"
SVG = "{http://www.w3.org/2000/svg}"
MATH = "{http://www.w3.org/1998/Math/MathML}"


def adamw_report() -> CollageReport:
    names = [f"blocks.{i}.{part}.weight" for i in range(2) for part in ("attention", "mlp")]
    shapes = [(4, 6), (5,), (4, 7), (6,)]
    named = list(zip(names, parameters(shapes=shapes), strict=True))
    return explain(torch.optim.AdamW(named, lr=1e-3))


@pytest.fixture(scope="module")
def report() -> CollageReport:
    return adamw_report()


def test_it_is_well_formed_and_has_all_parts(report: CollageReport) -> None:
    root = ElementTree.fromstring(report.to_html())
    body = root.find(f"{HTML}body")
    assert body is not None
    text = "".join(body.itertext())
    for part in (
        "4 parameters",
        "4 × exp_avg_sq",
        "stalls: u/(1-a) = 3.9",
        "blocks.*.mlp.weight.exp_avg",
        "widen",
    ):
        assert part in text
    assert len(list(root.iter(f"{MATH}math"))) == 3
    assert len(list(root.iter(f"{SVG}svg"))) == 3  # a drawing of each treatment
    memory = list(root.iter(f"{HTML}table"))[1]
    bytes_under = [(element.text or "").strip() for element in memory.iter(f"{HTML}td")][:14]
    own = f"{report.bytes_per_parameter()['total']:.4g}"
    # A count of 4 bytes for each of the 12 tensors.
    counts = 12 * 4 / sum(row.numel for row in report.tensors if row.symbol == "p")
    light, full = f"{8 + counts:.4g}", f"{12 + counts:.4g}"
    assert bytes_under == [
        *("as compiled", own, "none", "6", "light", light, "plus", own, "full", full),
        *("full, in mcf", "12", "full, in fp32", "18"),
    ]
    added = {element.text[2:].strip() for element in root.iter(f"{HTML}ins") if element.text}
    assert any("p_rest ← " in line for line in added)
    assert "Generated code" not in text


def test_formats_on_the_page_are_explained() -> None:
    optimizer = torch.optim.AdamW(parameters(shapes=[(64, 128)]))
    page = explain(optimizer, bytes_per_parameter=4.2).to_html()
    for used in ("weights in 16 bits", "numbers in 8 bits", "numbers that are not negative in 8 bits"):
        assert f"{used}, 32 of them with a scale" in page


def test_reasons_stand_below_their_treatment_as_wide_as_the_table(report: CollageReport) -> None:
    root = ElementTree.fromstring(report.to_html())
    table = next(each for each in root.iter(f"{HTML}table") if each.get("class") == "treatments")
    rows = list(table.iter(f"{HTML}tr"))[1:]
    assert [row.get("class") for row in rows] == ["treated", "why"] * 3
    reasons = [cell for row in rows[1::2] for cell in row][1::2]
    assert all(int(cell.get("colspan", 0)) == len(rows[0]) - 1 for cell in reasons)
    assert all(cell.get("data-head") is not None for row in rows[::2] for cell in row)


def test_an_update_that_is_left_alone_is_drawn_once() -> None:
    page = explain(torch.optim.SGD(parameters(shapes=((4,),)), lr=0.1), strategy="none").to_html()
    assert "Its update, unchanged" in page
    assert ">before</text>" not in page


def test_it_refers_to_nothing_outside_itself(report: CollageReport) -> None:
    html = report.to_html()
    assert re.findall(r"<script|src=|href=|url\(|@import|<link|<iframe|\son\w+=", html) == []
    addresses = set(re.findall(r"https?://[^\"'\s<]*", html))
    assert addresses == {uri.strip("{}") for uri in (HTML, SVG, MATH)}
    assert "default-src 'none'" in html


def test_names_are_escaped() -> None:
    p = torch.nn.Parameter(torch.ones(2).bfloat16())
    html = explain(torch.optim.SGD([("<script>alert(1)</script>&", p)])).to_html()
    assert "<script" not in html
    ElementTree.fromstring(html)


def test_hundreds_of_tensors_are_a_few_drawings(report: CollageReport) -> None:
    (graph,) = report.graphs
    rows = tuple(
        dataclasses.replace(row, name=row.name.replace("blocks.", f"stages.{i}."))
        for i in range(100)
        for row in graph.tensors
    )
    many = CollageReport([dataclasses.replace(graph, tensors=rows)])
    assert len(many.tensors) == 1200
    assert many.to_html().count("<svg") == report.to_html().count("<svg")
    assert len(many.to_html()) < 2 * len(report.to_html())


def test_several_steps_and_one_that_was_left_alone() -> None:
    backend = CollageBackend()
    for kind, dtype in ((Descent, torch.bfloat16), (torch.optim.SGD, torch.float32)):
        optimizer = kind(params := parameters(dtype))
        run_steps(torch.compile(optimizer.step, backend=backend), params, [0])
    html = backend.report().to_html(kernels=True)
    root = ElementTree.fromstring(html)
    assert [heading.text for heading in root.iter(f"{HTML}h2")] == [
        "Descent",
        "1. 2 parameters",
        "Generated code",
    ]
    assert "updates no bfloat16 or float16 tensor" in html
    code = [element.text or "" for element in root.iter(f"{HTML}pre")][-1]
    assert backend.report().graphs[0].code[-1].strip() == code.strip()
    assert "extern" in code or "triton" in code


def test_explained_and_empty_reports_say_that_there_is_no_code(report: CollageReport) -> None:
    assert "captured, not compiled" in report.to_html(kernels=True)
    assert "Nothing has been compiled yet" in CollageReport().to_html()


def test_a_symbol_is_one_name_and_a_minus_is_a_minus() -> None:
    v = sympy.Symbol("exp_avg_sq")
    root = ElementTree.fromstring(recurrence_mathml("exp_avg_sq", sympy.Float("0.999") * v - v**-2))
    names = [element.text for element in root.iter(f"{MATH}mi")]
    assert names == ["exp_avg_sq′", "exp_avg_sq", "exp_avg_sq"]
    assert "−" in [element.text for element in root.iter(f"{MATH}mo")]


@pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
def test_a_browser_shows_it(report: CollageReport, tmp_path: Path) -> None:
    """Drawn, not only parsed: boxes of the passes' colours are on the screen."""
    image = pytest.importorskip("matplotlib.image")
    page = report.save_html(tmp_path / "report.html")
    assert BROWSER is not None
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"),
        *(f"--screenshot={tmp_path / 'page.png'}", "--window-size=1500,2400", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (tmp_path / "page.png").is_file(), done.stderr[-2000:]
    pixels = (image.imread(tmp_path / "page.png")[..., :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (2400, 1500)
    seen = {f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in map(tuple, pixels.reshape(-1, 3)[::3])}
    passes = [name for name, _ in report.graphs[0].passes]
    for name in ("allocate", "widen", "compensate-wide", "pin-roundings"):
        assert pass_color(name, passes) in seen
    assert len({pass_color(name, passes) for name in passes}) == len(passes) <= len(PASS_COLORS)
