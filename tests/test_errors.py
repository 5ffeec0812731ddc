"""Errors have codes that stay, a page each that says what they mean, and examples that raise them."""

from __future__ import annotations

import re

import pytest
import torch

from collage_fx.cli import main
from collage_fx.errors import CollageError, EagerStepError, FailedLoweringError, error_kinds
from tests.error_page import EXAMPLES, FOLDER, INDEX, Example, explained, frame, index, page_of, run, shown

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
    "CFX016": "UnsupportedTorchError",
    "CFX017": "GradientReleaseError",
}

KINDS = list(error_kinds().values())
CASES = [
    pytest.param(kind, example, id=f"{kind.code}-{i}")
    for kind, examples in EXAMPLES.items()
    for i, example in enumerate(examples, start=1)
]


def test_codes_stay() -> None:
    assert {code: kind.__name__ for code, kind in error_kinds().items()} == CODES


@pytest.mark.prose
@pytest.mark.parametrize(("kind", "example"), CASES)
def test_an_example_raises_what_its_page_shows_and_changes_nothing(
    kind: type[CollageError], example: Example
) -> None:
    outcome = run(kind, example)
    assert outcome.told.endswith(f"\n  more: collage-fx error {kind.code}")
    page = page_of(kind).read_text()
    assert shown(example, "")[: -len("\n```\n\n")] in page, "python -m tests.error_page writes the page"
    assert masked(outcome.told) in masked(page), "python -m tests.error_page writes the page"
    assert outcome.is_warning == ("(a warning" in example.caption)
    if not outcome.is_warning:
        assert bool(outcome.changed) == example.is_late, outcome.changed


def masked(text: str) -> str:
    """Without line numbers, and with another torch than that of the pages without what is torch's to say."""
    text = re.sub(r"(\.py:)\d+", r"\1N", text)
    if torch.__version__.startswith("2.13."):
        return text
    return re.sub(r"(eagerly, without error terms: |Inductor failed: ).*", r"\1...", text)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_a_page_is_as_it_is_written(kind: type[CollageError]) -> None:
    """All of it but the messages."""
    page = page_of(kind).read_text()
    without = re.sub(r"(?<=^```text\n).*?\n(?=```$)", "\n", page, flags=re.DOTALL | re.MULTILINE)
    head, foot = frame(kind)
    assert without == head + "".join(shown(each, "") for each in EXAMPLES[kind]) + foot


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_a_kind_is_explained_in_a_few_lines(kind: type[CollageError]) -> None:
    summary, meaning, remedy = explained(kind)
    assert re.fullmatch(r"[A-Z`].*\.", summary)
    assert "\n" not in summary, "a sentence or two"
    assert meaning
    assert remedy
    assert len(f"{summary}\n{meaning}\n{remedy}".splitlines()) <= 10


def test_there_are_pages_of_these_kinds_and_no_others() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {"index", *CODES}
    assert INDEX.read_text() == index(), "python -m tests.error_page writes the page"
    assert re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| `(\w+)` \| .+ \|$", INDEX.read_text(), re.MULTILINE) == [
        *CODES.items()
    ]


def test_only_these_kinds_are_warnings_of_their_own() -> None:
    """Others are warnings with ``strict=False``; these need no such wish."""
    warned_of = {
        kind for kind, examples in EXAMPLES.items() if any("(a warning" in each.caption for each in examples)
    }
    assert warned_of == {EagerStepError, FailedLoweringError}


@pytest.mark.parametrize("code", CODES)
def test_the_command_prints_what_a_kind_means(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["error", code.lower()]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{code}: {CODES[code]}\n\n")
    assert "\n\nWhat to do: " in printed
    assert printed.endswith(f"\n\nIts page, with examples, is docs/errors/{code}.md.\n")


def test_a_code_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["error", "CFX099"]) != 0
    assert "no error 'CFX099'; did you mean CFX0" in capsys.readouterr().err
