"""``python -m benchmarks.long_run``, some hundred steps of it: it measures what it says, and can say no."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from benchmarks.long_run import (
    BASELINE,
    BEGIN,
    BYTE,
    CELLS,
    CLAIMS,
    END,
    EXACT,
    FORMATS,
    HERE,
    MCF,
    QUICK,
    claims,
    main,
    report,
)

Results = dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, str]:
    """The results and the document of a quick run."""
    folder = tmp_path_factory.mktemp("long_run")
    document = folder / "document.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    found = folder / "results" / "results.json"
    assert main(["--quick", "--results", str(found), "--document", str(document)]) == 0
    return json.loads(found.read_text()), document.read_text()


@pytest.mark.prose
def test_every_format_is_measured_at_every_mark(run: tuple[Results, str]) -> None:
    results, text = run
    assert results["steps"][-1] == QUICK.steps
    assert results["losses"][-1] < results["losses"][0]  # it trains
    for name in FORMATS:
        errors = results["errors"][name]
        assert [len(each) for each in errors] == [len(results["steps"])] * len(CELLS)
        assert all(0 < error < 1.01 for each in errors for error in each)
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert report(results, "github") in text


@pytest.mark.prose
def test_formats_are_those_that_they_are_called(run: tuple[Results, str]) -> None:
    """By the bytes that their compiled steps report, to the counts and to what is too small to be packed."""
    held = {name: round(size, 1) for name, size in run[0]["bytes"].items()}
    assert {name: held[name] for name in ("none", BYTE, MCF, EXACT, BASELINE)} == {
        "none": 6,
        BYTE: 7,
        MCF: 12,
        EXACT: 12,
        BASELINE: 18,
    }
    assert 5.06 <= held["budget of 5.1"] <= 5.2
    assert 8 <= held["budget of 8"] <= 8.1


@pytest.mark.prose
def test_what_is_rounded_to_bfloat16_hardly_moves(run: tuple[Results, str]) -> None:
    assert min(run[0]["errors"]["none"][0]) > 0.95


@pytest.mark.prose
@pytest.mark.parametrize(
    ("instead", "of"), [(MCF, EXACT), (EXACT, MCF), (MCF, BYTE)], ids=["exact", "mcf", "byte"]
)
def test_a_claim_that_does_not_hold_is_named(run: tuple[Results, str], instead: str, of: str) -> None:
    results = copy.deepcopy(run[0])
    results["errors"][of] = results["errors"][instead]
    failed = [text for text, held in claims(results).items() if not held]
    assert [text for text in CLAIMS if text.startswith(f"`{of.split(', ')[1]}`")] == failed
    assert f"- {failed[0]}: **no**" in report(results, "github")


def test_what_is_published_is_of_a_full_run_and_holds() -> None:
    results: Results = json.loads((HERE / "results" / "long_run" / "results.json").read_text())
    assert results["steps"][-1] >= 20_000
    assert list(results["errors"]) == list(FORMATS)
    assert all(claims(results).values())
    assert f"{BEGIN}\n\n{report(results, 'github')}\n\n{END}" in (HERE / "README.md").read_text()
