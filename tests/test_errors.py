"""Errors have codes that stay, a page that says what they mean, and examples that raise them."""

from __future__ import annotations

import re
import textwrap

import pytest

from collage_fx.cli import main
from collage_fx.errors import CollageError, error_kinds
from tests.error_page import EXAMPLES, PATH, message

#: Codes are for good: a new kind has a new one, and that of a kind that goes is not given again.
CODES = {
    "CFX001": "InvalidOptionError",
    "CFX002": "UnsupportedOptimizerError",
    "CFX003": "UnsupportedTensorError",
    "CFX004": "AliasedStateError",
    "CFX005": "ConflictingErrorFormatError",
    "CFX006": "CheckpointMismatchError",
    "CFX007": "ChangedTensorError",
    "CFX008": "LostErrorTermsError",
    "CFX009": "RecompileLimitError",
    "CFX010": "GraphBreakError",
    "CFX011": "EagerStepError",
    "CFX012": "UncompensatedParameterError",
    "CFX013": "FailedLoweringError",
    "CFX014": "GraphInvariantError",
    "CFX015": "FailedPassError",
}


def test_codes_stay() -> None:
    assert {code: kind.__name__ for code, kind in error_kinds().items()} == CODES


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.code)
def test_an_example_raises_what_the_page_shows(kind: type[CollageError]) -> None:
    told = message(kind)
    assert textwrap.dedent(EXAMPLES[kind]) in PATH.read_text()
    assert told.endswith(f"more: collage-fx error {kind.code}")
    shown = re.sub(r"/[\w/.-]+\.py:\d+", "FILE", PATH.read_text())
    assert re.sub(r"/[\w/.-]+\.py:\d+", "FILE", told) in shown, "python -m tests.error_page writes the page"


@pytest.mark.parametrize("code", CODES)
def test_the_page_and_the_command_have_each_kind(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"## {code}\n\n**`{CODES[code]}`** " in PATH.read_text()
    assert main(["error", code.lower()]) == 0
    assert capsys.readouterr().out.startswith(f"{code}: {CODES[code]}\n\n")


def test_a_code_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["error", "CFX099"]) != 0
    assert "no error 'CFX099'; did you mean CFX0" in capsys.readouterr().err
