"""docs/compatibility.md is what ``./dev compat`` would write, and keeps its promises, for torch.optim."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.compatibility import torch_optim
from tests.compatibility.catalog import Row, Subject, rows_of
from tests.compatibility.measure import COMPENSATED, REFUSED, falls_short, measure
from tests.compatibility.table import Line, differences, document, key_of, line_of, read, torch_version

TEXT = (Path(__file__).parents[1] / "docs" / "compatibility.md").read_text()
WRITTEN = read(TEXT)
ROWS = [row for subject in torch_optim.SUBJECTS for row in rows_of(subject)]

written_with = re.search(r"with torch (\S+) ", TEXT)
assert written_with is not None
same_torch = pytest.mark.skipif(
    torch_version() != written_with[1], reason=f"the document is about torch {written_with[1]}"
)


@same_torch
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_in_the_document_and_good(row: Row) -> None:
    line = WRITTEN[key_of(row)]
    assert line.outcome == COMPENSATED or line.outcome.startswith(REFUSED)
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
    if written_with is not None and torch_version() == written_with[1]:
        assert differences(WRITTEN[key_of(row)], line_of(row, measured)) == []


def test_the_document_reads_back_as_it_was_written() -> None:
    assert document(list(WRITTEN.values())).splitlines()[6:] == TEXT.splitlines()[6:]


def test_differences_are_seen() -> None:
    line = Line("torch 1", "A", "", "bf16", "", "1", "1", "2", "", "", "1", "< 0.001", "0.010", "refused {x}")
    assert differences(line, line) == []
    nearly = {**vars(line), "error": "0.0105", "single": "0.00105"}
    assert differences(line, Line(**nearly)) == []
    for cell, other in (("error", "0.012"), ("plain", ""), ("graphs", "2"), ("outcome", "refused {y}")):
        assert len(differences(line, Line(**{**vars(line), cell: other}))) == 1


@pytest.mark.parametrize(
    ("plain", "error", "short"),
    [(1, 0.1, False), (1, 0.11, True), (0.2, 0.03, True), (0.19, 0.19, False), (0.01, 0.011, True)],
)
def test_falls_short(plain: float, error: float, short: bool) -> None:
    assert falls_short(plain, error) is short
