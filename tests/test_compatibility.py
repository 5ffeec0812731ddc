"""docs/compatibility.md is what ``./dev compat`` would write, and keeps its promises, for torch.optim."""

from __future__ import annotations

import re
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from collage_fx.audit import COMPENSATED, FAILED, REFUSED, falls_short
from tests.compatibility import third_party, torch_optim
from tests.compatibility.catalog import Row, Subject, rows_of
from tests.compatibility.measure import measure
from tests.compatibility.table import Line, differences, document, key_of, line_of, read, torch_version
from tests.compatibility.worker import Worker

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "compatibility.md").read_text()
WRITTEN = read(TEXT)
WRITTEN_WITH = TEXT.partition("with torch ")[2].split()[0]


@pytest.mark.skipif(torch_version() != WRITTEN_WITH, reason=f"the document is about torch {WRITTEN_WITH}")
@pytest.mark.parametrize(
    "row", [row for subject in torch_optim.SUBJECTS for row in rows_of(subject)], ids=lambda row: row.name
)
def test_every_row_is_in_the_document_and_good(row: Row) -> None:
    line = WRITTEN[key_of(row)]
    assert line.outcomes <= {COMPENSATED, REFUSED}
    assert not line.falls_short


@pytest.mark.parametrize("subject", torch_optim.SUBJECTS, ids=lambda subject: subject.name)
def test_default_options_measured_again(subject: Subject) -> None:
    row = next(iter(rows_of(subject)))
    measured = {variant.name: measure(variant) for variant in row.variants()}
    for met in measured.values():
        assert met.outcome in (COMPENSATED, REFUSED), met.reason
        if met.outcome == COMPENSATED:
            assert met.plain is not None
            assert met.error is not None
            assert not falls_short(met.plain, met.error)
    if torch_version() == WRITTEN_WITH:
        assert differences(WRITTEN[key_of(row)], line_of(row, measured)) == []


def test_the_document_reads_back_as_it_was_written() -> None:
    heading = 3  # lines, which name the torch and the machine that run this
    assert document(list(WRITTEN.values())).splitlines()[heading:] == TEXT.splitlines()[heading:]


def test_differences_are_seen() -> None:
    line = Line(
        "torch 1", "A", "", "bf16", "", "1", "1", "9", "2", "", "", "1", "< 0.001", "0.010", "refused {x}"
    )
    assert differences(line, line) == []
    assert differences(line, Line(**{**vars(line), "error": "0.0105", "single": "0.00105"})) == []
    for cell, other in (("error", "0.012"), ("plain", ""), ("graphs", "2"), ("outcome", "refused {y}")):
        assert len(differences(line, Line(**{**vars(line), cell: other}))) == 1


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
