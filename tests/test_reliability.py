"""A hundred cases of ``./dev soak``."""

from __future__ import annotations

import pytest

from tests.reliability.__main__ import DOCUMENT
from tests.reliability.cases import drawn
from tests.reliability.runs import two_running


@pytest.fixture(autouse=True)
def _no_code_that_is_gone(_fresh_start: None) -> None:
    """No optimizer is there still whose compiled code Dynamo has dropped."""
    two_running.cache_clear()


SPOILED = "a value changed after it was saved", "an error term damaged in a file"


@pytest.mark.parametrize("tenth", range(10))
def test_what_is_carried_on_loses_nothing_and_what_is_spoiled_is_named(tenth: int) -> None:
    for seed in range(10 * tenth, 10 * (tenth + 1)):
        outcome = drawn(seed)
        assert outcome.lost == 0, (seed, outcome)
        is_named = (
            len(outcome.told) == 1 and "error terms of other values than param_groups" in outcome.told[0]
        )
        assert is_named if outcome.what[0] in SPOILED else not outcome.told, (seed, outcome)


def test_the_page_has_no_run_that_lost_an_element() -> None:
    rows = [line.split("|") for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    lost = {row[1].strip(): int(row[3]) for row in rows if row[3].strip().isdigit()}
    assert len(lost) >= 20
    assert not any(lost.values()), lost
