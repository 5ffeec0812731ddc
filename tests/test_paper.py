"""``./dev paper``: it measures what it says, goes on where it stopped; its page has no number of its own."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from benchmarks.paper.__main__ import Files, main, parse_arguments, run_cells
from benchmarks.paper.optimizers import (
    EagerAdamW,
    Making,
    Master,
    Measured,
    Pair,
    ReleasedInBfloat16,
    ReleasedInFloat32,
)
from benchmarks.paper.page import Runs, differences, page, pairs_table
from benchmarks.paper.settings import (
    BASELINE,
    LETTERS,
    QUICK,
    SETTINGS,
    SIZES,
    Cell,
    Plan,
    Setting,
    full_plan,
    plan_of_pairs,
    quick_plan,
)
from benchmarks.paper.significance import holm, sign_test, welch
from benchmarks.paper.training import POINTS, train


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quick run, whose page is beside its results."""
    folder = tmp_path_factory.mktemp("paper")
    arguments = ["--quick", "--processes", "1", "--results", str(folder), "--page", str(folder / "paper.md")]
    assert main([*arguments, "--checkpoints", str(folder / "checkpoints")]) == 0
    return folder


@pytest.mark.prose
def test_a_quick_run_trains_every_cell_and_writes_the_page(quick: Path) -> None:
    runs = Runs.of_folder(quick)
    assert len(runs.records) == len(quick_plan().cells)
    assert all(math.isfinite(record["loss"]) for record in runs.records)
    assert (quick / "paper.md").read_text() == page(runs, quick_plan())
    classified = [record["accuracy"] for record in runs.records if record["task"] == "sources"]
    assert len(classified) == 2 * len(LETTERS)
    assert all(0 < each < 1 for each in classified)
    assert all(
        (quick / f"paper-{name}.png").stat().st_size > 10_000 for name in ("main", "sweeps", "product")
    )


def test_the_page_has_the_numbers_of_the_results() -> None:
    root = Path(__file__).resolve().parents[1]
    written = page(Runs.of_folder(root / "benchmarks" / "results"), full_plan())
    assert (root / "docs" / "paper.md").read_text() == written, "./dev paper --page-only writes the page"


@pytest.mark.prose
def test_what_is_measured_is_what_strategies_are_for(quick: Path) -> None:
    runs = Runs.of_folder(quick)
    seen = {
        name: runs.of(QUICK, name)[0] for name in ("none", "plus, mcf", BASELINE, "released, bf16 default")
    }
    bytes_each = {name: round(record["bytes"], 1) for name, record in seen.items()}
    assert bytes_each == {"none": 6, "plus, mcf": 10, BASELINE: 14, "released, bf16 default": 10}
    lost = {name: record["curves"]["lost_share"][-1][1] for name, record in seen.items()}
    assert lost["none"] > 0.3 > 0.01 > lost["plus, mcf"] > lost[BASELINE]
    assert seen["none"]["v_error"] > 1e-3 > 1e-4 > seen["plus, mcf"]["v_error"] > seen[BASELINE]["v_error"]
    # of the released product, what a second moment lacks after 24 steps of decaying once too often
    assert seen["released, bf16 default"]["v_error"] > 1e-2
    assert abs(seen["plus, mcf"]["loss"] - seen[BASELINE]["loss"]) < 1e-3
    assert seen["none"]["loss"] - seen[BASELINE]["loss"] > 5e-3


@pytest.mark.prose
def test_a_second_call_repeats_nothing(quick: Path) -> None:
    before = {path: path.read_text() for path in quick.glob("paper-*.json")}
    arguments = ["--quick", "--results", str(quick), "--page", str(quick / "again.md")]
    assert main([*arguments, "--checkpoints", str(quick / "checkpoints")]) == 0
    assert {path: path.read_text() for path in quick.glob("paper-*.json")} == before
    assert (quick / "again.md").read_text() == (quick / "paper.md").read_text()


@pytest.mark.prose
@pytest.mark.parametrize("strategy", ["plus, mcf", "light", "5.1 bytes", BASELINE, "stochastic"])
def test_a_training_that_a_deadline_stops_goes_on_to_the_bit(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "tiny", replace(SIZES["tiny"], steps=2 * POINTS))  # a point every other step
    cell = Cell(QUICK, strategy, seed=0)
    whole = train(cell, tmp_path / "whole", "cpu", math.inf)
    assert whole is not None

    now = iter([0.0] * 8 + [1e9])  # it begins, and has time for some of the points
    clocks = SimpleNamespace(time=lambda: next(now), perf_counter=time.perf_counter)
    monkeypatch.setattr("benchmarks.paper.training.time", clocks)
    assert train(cell, tmp_path / "parts", "cpu", 1.0) is None
    (left,) = (tmp_path / "parts").iterdir()
    assert 0 < torch.load(left)["number"] < 2 * POINTS
    monkeypatch.undo()
    monkeypatch.setitem(SIZES, "tiny", replace(SIZES["tiny"], steps=2 * POINTS))
    parts = train(cell, tmp_path / "parts", "cpu", math.inf)
    assert parts is not None
    assert parts["seconds"] > 0
    assert {**parts, "seconds": whole["seconds"]} == whole
    assert not list((tmp_path / "parts").iterdir())


def test_fp32_masters_are_torchs_adamw() -> None:
    """What everything is compared with, beside torch's own on float32 copies."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(64, 33).bfloat16())
    master = nn.Parameter(parameter.detach().float())
    ours = EagerAdamW([parameter], Making(Master, moments=torch.float32), (0.9, 0.99), 0.1)
    theirs = torch.optim.AdamW([master], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(50):
        parameter.grad = torch.randn_like(parameter)
        master.grad = parameter.grad.float()
        ours.step(1e-3)
        theirs.step()
    # 50 steps of some three roundings to float32 each: 150 · 2⁻²⁴ is 9e-6
    torch.testing.assert_close(ours.weights[0].value(), master.detach(), rtol=1e-5, atol=1e-7)
    assert torch.equal(parameter, ours.weights[0].value().bfloat16())


@pytest.mark.parametrize("beta", [0.95, 0.999])
def test_the_released_product_settles_where_its_definition_says(beta: float) -> None:
    """With a factor of q in place of β2, v' = q v + (1 - β2) x settles at (1 - β2) / (1 - q) of x."""
    b = torch.tensor(beta).bfloat16().item()
    new = torch.full((8,), 1.0)

    def settled(kind: type[Pair], steps: int = 400) -> float:
        kept = kind(torch.full((8,), 0.5).bfloat16(), torch.Generator())
        for _ in range(steps if beta < 0.99 else 20 * steps):
            kept.average(new, beta)
        return kept.value().mean().item()

    assert settled(Pair) == pytest.approx(1, rel=0.01)
    if beta == 0.95:  # b, b - 1 of the result once more, and that counted twice
        assert settled(ReleasedInBfloat16) == pytest.approx((1 - beta) / (1 - b * (2 * b - 1)), rel=0.1)
    else:  # b = 1: what is left of β2 is all there is, and counts twice
        assert settled(ReleasedInBfloat16) == pytest.approx(0.5, rel=0.02)
        assert settled(ReleasedInFloat32) > 3


def test_pairs_are_those_of_the_page_and_have_a_folder_of_their_own() -> None:
    root = Path(__file__).resolve().parents[1]
    runs = Runs.of_folder(root / "benchmarks" / "results")
    line, *others = differences(runs, SETTINGS, ["8 bytes", "none of them"])
    assert not others
    found = sign_test([gap for each in SETTINGS for gap in runs.gaps(each, "8 bytes").values()])
    assert f"median {found.value:+.5f}, 95 % {found.low:+.5f} to {found.high:+.5f}, 33 pairs" in line
    assert parse_arguments(["--pairs", "plus"]).results == root / "benchmarks" / "results" / "pairs"
    there = parse_arguments(["--pairs", "plus", "8 bytes", "--results", "here"])
    assert (there.pairs, there.results) == (["plus", "8 bytes"], Path("here") / "pairs")
    cells = plan_of_pairs(["plus", "4.1 bytes"], seeds=2).cells
    assert len(cells) == len(SETTINGS) * 2 * 3
    assert {each.strategy for each in cells} == {"plus", "4.1 bytes", BASELINE}


def test_a_table_of_pairs() -> None:
    """Strategies that were trained beside fp32 masters have a row, in whichever settings."""
    losses = {
        ("4.1 bytes", 0): 2.5,
        ("4.1 bytes", 1): 2.0,
        (BASELINE, 0): 2.25,
        (BASELINE, 1): 2.0,
        ("plus", 2): 1,
    }
    records = [
        {**Cell(SETTINGS[0], strategy, seed).key(), "loss": loss, "bytes": 4.1}
        for (strategy, seed), loss in losses.items()
    ]
    head, _, *rows = pairs_table(Runs(records, []), SETTINGS).splitlines()
    assert [each.strip() for each in head.split("|")][1:5] == ["strategy", "bytes", "positive", "difference"]
    (row,) = rows
    assert [each.strip() for each in row.split("|")][1:5] == ["4.1 bytes", "4.1", "1 of 2", "+0.1250"]
    assert not pairs_table(Runs([], []), SETTINGS)


def test_the_sign_test() -> None:
    """Against binomial tables: of 10 signs one or none is as likely as 11 / 1024."""
    found = sign_test([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, -1.0])
    assert found.p == pytest.approx(2 * 11 / 1024)
    assert (found.low, found.value, found.high) == (1.0, 4.5, 8.0)  # the second and the ninth
    assert sign_test([0.0, 0.0, 1.0]).p == 1
    assert sign_test([1.0] * 5).high == math.inf
    assert sign_test([1.0] * 6).p == pytest.approx(2 / 64)


def test_the_interval_of_a_median_covers_it() -> None:
    """At least 95 % of samples of 33, of a skewed distribution too, less four standard errors."""
    draws = torch.rand(2000, 33, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
    found = [sign_test(row.tolist()) for row in draws]
    covered = sum(each.low <= 0.5**3 <= each.high for each in found) / 2000
    assert covered > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 2000)
    assert covered < 1


def test_welchs_test_and_holms_correction() -> None:
    """Against a table, t = 2.776 for 4 degrees of freedom, and R's ``t.test(extra ~ group, sleep)``."""
    found = welch([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    assert (found.value, found.high - found.value) == pytest.approx((-1, 2.7764 * math.sqrt(2 / 3)), rel=1e-4)
    first, second = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0], [1.9, 0.8, 1.1, 0.1, -0.1, 4.4]
    found = welch(first, [*second, 5.5, 1.6, 4.6, 3.4])
    assert (found.p, found.low, found.high) == pytest.approx((0.07939, -3.3654832, 0.2054832), abs=1e-5)
    assert welch([0.5], [0.1, 0.2]).p == 1
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_settings_draw_independently_and_strategies_alike() -> None:
    cells = full_plan().cells
    draws: dict[int, set[tuple[Setting, int]]] = {}
    for cell in cells:
        draws.setdefault(cell.draw(), set()).add((cell.setting, cell.seed))
    assert all(len(drawn) == 1 for drawn in draws.values())
    assert len(draws) == 3 * len({cell.setting for cell in cells}) == 3 * (len(SETTINGS) + 1)


def test_measured_counts_what_is_asked_and_what_is_lost() -> None:
    measured = Measured()
    measured.count(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 0.0]))
    assert (measured.along / measured.intended, measured.lost / measured.asked) == (0.5, 0.5)


@pytest.mark.prose
def test_a_training_that_fails_ends_the_run_and_what_was_trained_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a strategy cannot be had for a model: the pool must not train all others first, unrecorded."""
    cells = tuple(Cell(QUICK, name, seed=0) for name in (BASELINE, "no such strategy", *["Kahan"] * 40))
    files = Files(tmp_path)
    with pytest.raises(KeyError, match="no such strategy"):
        run_cells(Plan((QUICK,), cells), files, tmp_path / "checkpoints", "cpu", 1, time.time() + 600)
    kept = json.loads((tmp_path / "paper-bytes-tiny.json").read_text())["runs"]
    assert kept[0]["strategy"] == BASELINE
    assert len(kept) < 10
