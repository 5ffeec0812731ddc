"""Which tests are left out of a usual run, and how long each file takes.

Note [Slow tests]
-----------------
Most tests compile, which takes seconds, and many are tables of cases: every optimizer with every strategy.
A usual run, as in continuous integration, has every test function but only a few cases of each; `--all` has
all of them. The cases that wait for `--all` are listed in slow.txt by the names that pytest gives them;
`--all --write-slow` writes that file from the times it has measured: of each function, cases in an order
drawn from their names (so that each value of a parameter is met in some function) run until they have taken
SECONDS, one at least. What is slow on any machine is marked with pytest.mark.slow instead. Of tests that are
marked with pytest.mark.rotating a usual run has a third, the next one each day: `--third N` has the N-th, 0
to 2, and the header of a run says which it was.
"""

from __future__ import annotations

import datetime
import hashlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "slow.txt"
#: What the cases of one function may take in a usual run, but for the first.
SECONDS = 2.0
#: What the first may take.
MOST_SECONDS = 30.0


#: The third of the rotating tests whose turn is today.
TODAYS_THIRD = datetime.date.today().toordinal() % 3


def left_out(items: list[Any], third: int) -> list[Any]:
    """The tests that a usual run leaves out, of the rotating ones all but a third."""
    names = set(FILE.read_text().splitlines())
    rotating = [item for item in items if item.get_closest_marker("rotating") is not None]
    others = {item for i, item in enumerate(rotating) if i % 3 != third}
    return [
        item
        for item in items
        if item in others or item.nodeid in names or item.get_closest_marker("slow") is not None
    ]


def slow_ones(seconds: Mapping[str, float]) -> list[str]:
    """The names to leave out, of those measured, sorted."""
    cases = defaultdict[str, list[str]](list)
    for name in seconds:
        cases[name.partition("[")[0]].append(name)
    slow = list[str]()
    for names in cases.values():
        taken = 0.0
        for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
            if taken + seconds[name] > (SECONDS if taken else MOST_SECONDS):
                slow.append(name)
            else:
                taken += seconds[name]
    return sorted(slow)


class Times:
    """Collects how long each test takes, its fixtures included."""

    def __init__(self, write: bool) -> None:
        self._write = write
        self._seconds = defaultdict[str, float](float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        files = defaultdict[str, float](float)
        for name, seconds in self._seconds.items():
            files[name.partition("::")[0]] += seconds
        if len(files) > 1:
            terminalreporter.section("seconds by file")
            for name in sorted(files, key=lambda name: -files[name]):
                terminalreporter.line(f"{files[name]:7.1f}  {name}")
        if self._write:
            FILE.write_text("".join(f"{name}\n" for name in slow_ones(self._seconds)))
            terminalreporter.line(f"written: {FILE}")
