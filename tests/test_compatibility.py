"""The pages of measured optimizers are what ``./dev compat`` would write, and keep their promises."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from collage_fx.options.budgets import TOLERANCE
from collage_tools.audit import COMPENSATED, FAILED, REFUSED, UNSUPPORTED, Measurement, falls_short
from tests.compatibility import __main__ as command
from tests.compatibility import third_party, torch_optim
from tests.compatibility.__main__ import ANSWER, DETAILS, MEASURED, pages
from tests.compatibility.catalog import BUDGETS, Row, Subject, rows_of
from tests.compatibility.measure import measure
from tests.compatibility.pages import NO, REMARK, UNDER_A_BUDGET, WORKS, subjects
from tests.compatibility.table import (
    NOT_TRIED,
    Line,
    differences,
    dump,
    is_good,
    key_of,
    line_of,
    read,
    torch_version,
    worse,
)
from tests.compatibility.worker import Worker

ROOT = Path(__file__).parents[1]
TEXT = MEASURED.read_text()
WRITTEN = read(TEXT)
WRITTEN_WITH = json.loads(TEXT)["torch"]


@pytest.mark.skipif(torch_version() != WRITTEN_WITH, reason=f"the file is about torch {WRITTEN_WITH}")
@pytest.mark.parametrize(
    "row", [row for subject in torch_optim.SUBJECTS for row in rows_of(subject)], ids=lambda row: row.name
)
def test_every_row_has_been_measured_and_is_good(row: Row) -> None:
    line = WRITTEN[key_of(row)]
    assert line.outcomes <= {COMPENSATED, REFUSED}
    assert not line.falls_short
    assert not line.worse_than_plain


@pytest.mark.prose
@pytest.mark.parametrize("subject", torch_optim.SUBJECTS, ids=lambda subject: subject.name)
def test_default_options_measured_again(subject: Subject) -> None:
    row = next(iter(rows_of(subject)))
    measured = {variant.name: measure(variant) for variant in row.variants()}
    checks = {variant.name for variant in row.variants() if variant.check}
    budgets = {variant.name: variant.budget for variant in row.variants() if variant.budget is not None}
    for name, met in measured.items():
        assert met.outcome in (COMPENSATED, REFUSED), met.reason
        if met.outcome == COMPENSATED and name not in checks:
            assert met.plain is not None
            assert met.error is not None
            assert not falls_short(met.plain, met.error)
            assert met.bytes is not None
            assert met.bytes <= budgets.get(name, math.inf) * (1 + TOLERANCE)
    if torch_version() == WRITTEN_WITH:
        assert differences(WRITTEN[key_of(row)], line_of(row, measured)) == []


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """Process of its own, as packages patch torch."""
    worker = Worker(time_limit=300)
    yield worker
    worker.stop()


ONE_OF_EACH = [next(iter(rows_of(subject))) for subject in (*torch_optim.SUBJECTS, *third_party.SUBJECTS)]


@pytest.mark.rotating
@pytest.mark.parametrize("row", ONE_OF_EACH, ids=lambda row: row.name)
def test_a_row_is_no_worse_on_other_shapes_and_resumed(row: Row, worker: Worker) -> None:
    """A few interpreted steps: the nightly ``./dev compat --check`` takes all of them, compiled."""
    try:
        row.subject.version  # noqa: B018
    except PackageNotFoundError:
        pytest.skip(f"{row.subject.package} is not installed: pip install 'collage-fx[compat]'")
    written = WRITTEN.get(key_of(row))
    if written is None or NOT_TRIED in (written.resumed, written.other_shapes):
        pytest.skip("the nightly run has not measured this row yet")
    if known := [each for each in (written.resumed, written.other_shapes) if not is_good(each)]:
        pytest.skip(f"known: {known[0]}")
    met = worker.measure_quickly(next(iter(row.variants())).name)
    assert met.outcome in (COMPENSATED, UNSUPPORTED), met.reason
    if met.error is not None:
        assert met.plain is not None
        assert met.single is not None
        assert met.error <= 2 * met.single or not falls_short(met.plain, met.error)


def test_the_file_reads_back_as_it_was_written() -> None:
    lines = slice(3, None)  # those before name the torch and the machine that run this
    assert dump(WRITTEN.values()).splitlines()[lines] == TEXT.splitlines()[lines]


def test_the_pages_are_those_of_the_file() -> None:
    told = "python -m tests.compatibility --pages writes the pages"
    assert (ANSWER.read_text(), DETAILS.read_text()) == pages(), told


def test_a_class_works_works_with_a_remark_or_does_not() -> None:
    line = replace(example(), outcome="compensated {80 steps}", error="0.010 (100×)")
    kinds = {
        WORKS: [line, replace(line, options="other")],
        REMARK: [line, replace(line, options="other", outcome="inaccurate {x}; compensated")],
        NO: [replace(line, outcome="refused {y}"), replace(line, options="other", outcome="fails {z}")],
    }
    for expected, lines in kinds.items():
        (found,) = subjects(lines)
        assert found.result == expected
    (short,) = subjects([replace(line, error="0.27 (3.6×)", single="0.16")])
    assert (short.result, short.remarks) == (REMARK, ["float32 parameters are off by 0.16, too"])


def test_the_answer_is_short() -> None:
    tables = ANSWER.read_text().split("\n\n")
    rows = next(part for part in tables if part.startswith("| package")).splitlines()[2:]
    assert len(rows) <= 20
    assert {row.split("|")[1].split()[0] for row in rows} == {
        line.package.split()[0] for line in WRITTEN.values()
    }


def test_differences_are_seen() -> None:
    line = example()
    noise = {"error": "0.0105 (95×)", "single": "0.00105", "error_8": "0.021 (48×) inaccurate {x}"}
    assert differences(line, line) == []
    assert differences(line, replace(line, **noise)) == []
    for cell, other in (
        *(("error", "0.012 (83×)"), ("plain", ""), ("graphs", "2"), ("outcome", "refused {y}")),
        *(("error_8", "0.03 (33×) inaccurate {x}"), ("error_8", "0.02 (50×)"), ("bytes_8", "10")),
        *(("error_5", NOT_TRIED), ("error_5", "refused {z}"), ("error_5", "0.01 (100×)")),
    ):
        assert len(differences(line, replace(line, **{cell: other}))) == 1


def test_worse_is_told_from_other(capsys: pytest.CaptureFixture[str]) -> None:
    line = replace(
        example(), other_shapes="0.010 (99×) {eager torch refuses 0-d (ValueError)}", resumed="same bits"
    )
    other = {"graphs": "2", "left": "1 × x {y}", "seconds": "99", "error": "0.0101 (98×)", "bytes": "9"}
    better = {
        "error_8": "0.02 (50×)",
        "error_5": "0.1 (10×)",
        "outcome": "compensated",
        "error": "< 0.001 (9×)",
    }
    bad = {
        "error": ("0.012 (83×)", "nan (nan×)", "inf (0×)"),
        "error_8": ("0.02 (50×) silently plain {x}", "fails {x}", "0.03 (33×) inaccurate {x}"),
        "bytes": ("10.1",),
        "bytes_8": ("8.3", "11"),
        "bytes_5": ("5.2",),
        "other_shapes": ("0.02 (50×) {x}", "fails {ValueError: x}", "0.010 (99×) inaccurate {x}"),
        "resumed": ("differs {2 tensors, p first}", "fails {KeyError}", "refused {x}"),
        "outcome": ("refused {x}; fails {x}", "silently plain {y}"),
    }
    assert worse(line, replace(line, **other)) == []
    assert worse(line, replace(line, **better)) == []
    assert worse(replace(line, resumed=NOT_TRIED), replace(line, resumed="fails {x}")) == []
    assert worse(replace(line, bytes_5=""), replace(line, bytes_5="5.16")) == []
    for cell, values in bad.items():
        for value in values:
            assert len(worse(line, replace(line, **{cell: value}))) == 1, (cell, value)
            assert worse(replace(line, **{cell: value}), line) == []


def test_the_command_names_rows_that_are_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = next(
        line for line in WRITTEN.values() if line.optimizer == "AdamW" and line.package.startswith("torch ")
    )
    file = tmp_path / "measured.json"
    file.write_text(TEXT)
    monkeypatch.setattr(command, "MEASURED", file)
    monkeypatch.setattr(command, "write_pages", lambda: None)
    measured = [replace(line, error="0.5 (2×)")]
    monkeypatch.setattr(command, "measure_all", lambda rows, **options: measured)
    assert command.main(["--only", "AdamW", "--torch"]) == 1
    assert f"WORSE: {' '.join(line.key)}: error: {line.error!r} is written" in capsys.readouterr().out
    assert read(file.read_text())[line.key] == line
    assert command.main(["--only", "AdamW", "--torch", "--accept"]) == 0
    assert read(file.read_text())[line.key] == measured[0]


def test_parts_are_all_rows() -> None:
    parts = [command.selected(command.parse_arguments(["--part", part])) for part in ("1/3", "2/3", "3/3")]
    names = [row.name for rows in parts for row in rows]
    assert sorted(names) == sorted(row.name for row in command.selected(command.parse_arguments([])))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_budget_that_is_worse_than_plain_is_seen() -> None:
    line = example()
    assert line.worse_than_plain == []
    assert replace(line, error_8="1.1 (0.91×)").worse_than_plain == ["8 B"]
    assert replace(line, error_5="nan (nan×) silently plain {x}").worse_than_plain == ["5.1 B"]


def example() -> Line:
    """A line that is inaccurate under one budget and refuses the other."""
    return Line(
        *("torch 1", "A", "", "bf16", "", "1", "1", "9", "2", "", "", "1", "< 0.001", "0.010 (100×)", "10"),
        *("0.02 (50×) inaccurate {x}", "8.1", "refused {y}", "", "refused {x}"),
    )


def test_what_a_line_says_of_budgets() -> None:
    (row, *_) = rows_of(torch_optim.SUBJECTS[0])
    measured = {
        variant.name: Measurement(COMPENSATED, plain=1.0, single=0.0, error=0.02, bytes=10.0)
        for variant in row.variants()
    }
    names = {variant.budget: variant.name for variant in row.variants() if variant.budget is not None}
    assert list(names) == list(BUDGETS)
    measured[names[8]] = Measurement(COMPENSATED, plain=1.0, error=1e-5, bytes=8.06)
    measured[names[5.1]] = Measurement(REFUSED, "too much", plain=1.0)
    line = line_of(row, measured)
    assert (line.error, line.bytes) == ("0.02 (50×)", "10")
    assert (line.error_8, line.bytes_8) == ("< 0.001 (> 1000×)", "8.06")
    assert (line.error_5, line.bytes_5) == ("refused {too much}", "")
    assert line.outcome == COMPENSATED


def test_the_named_rows_are_under_a_budget() -> None:
    for key in UNDER_A_BUDGET:
        assert NOT_TRIED not in (WRITTEN[key].error_8, WRITTEN[key].error_5)


@pytest.mark.parametrize(
    ("plain", "error", "short"),
    [(1, 0.1, False), (1, 0.11, True), (0.2, 0.03, True), (0.19, 0.19, False), (0.01, 0.011, True)],
)
def test_falls_short(plain: float, error: float, short: bool) -> None:
    assert falls_short(plain, error) is short


def test_a_measurement_that_a_signal_kills_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    (row, *_) = rows_of(torch_optim.SUBJECTS[0])
    (variant, *_) = row.variants()
    monkeypatch.setattr("tests.compatibility.worker._serve", kill_itself)
    worker = Worker(time_limit=300)
    try:
        measured = worker.measure(variant.name)
    finally:
        worker.stop()
    assert measured.outcome == FAILED
    assert measured.reason == f"its process was killed by signal {signal.SIGBUS.value} (Bus error)"


def kill_itself(pipe: Connection) -> None:
    pipe.recv()
    signal.raise_signal(signal.SIGBUS)


def test_the_extra_installs_every_package_that_is_measured() -> None:
    extra = re.search(r"^compat = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert extra is not None
    packages = {subject.package.replace("_", "-") for subject in third_party.SUBJECTS}
    assert packages == set(re.findall(r'"([^"]+)"', extra[1]))
