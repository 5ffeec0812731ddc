"""Which tests are left out of a usual run, and how long each file takes.

Note [Slow tests]
-----------------
Most tests compile, which takes seconds, and many are tables of cases: every optimizer with every strategy.
A usual run, as in continuous integration, has almost every test function but only a few cases of each;
`--all` has all of them. Left out are:

* the cases in slow.txt, by the names that pytest gives them. `--write-slow` writes that file from the times
  that it has measured: of each function, cases in an order drawn from their names (so that each value of a
  parameter is met in some function) run until they have taken SECONDS, one at least. Cases that are in the
  file and have not been measured stay there; with `--all`, they are dropped from files that have been: they
  have other names now.
  A case whose test expects something else than those that stay is put back: Note [Outcomes].
* tests marked with pytest.mark.slow: slow on any machine.
* tests marked with pytest.mark.prose: they compile, or build, what a document shows, to see that it is true.
* two thirds, drawn from their names, of the tests marked with pytest.mark.rotating. The third that runs is
  another one each day; `--third N` runs the N-th, 0 to 2, and the header of a run says which third ran.
  `--third all` runs all of them.
* likewise two thirds of the files in in_turn.txt, but where files or folders are named.

Tests that are marked are not in slow.txt.

Times are of the processor, in a process and its descendants: they are the same on a machine that does other
work meanwhile.

Note [Outcomes]
---------------
Some cases of a function expect a warning or a refusal, others that there is none: the one case that stays
must not be the only kind that a usual run sees. What a case expects is read off the function: conditions on
its parameters alone in ``if`` and ``assert``, such as ``write in ("mul_", "copy_")``, and parameters that are
True or False. Where slow.txt has all cases in which such a condition is true, or all in which it is false, a
usual run has one of them all the same. Functions that slow.txt has as a whole stay left out.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import functools
import hashlib
import inspect
import os
import textwrap
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "slow.txt"
#: The most that the cases of one function may take in a usual run, but for the first.
SECONDS = 1.0
#: The most that the first may take.
MOST_SECONDS = 30.0

#: Marks of tests that a usual run leaves out whatever their times, and of those that it has in turn.
LEFT_OUT, ROTATING = ("slow", "prose"), "rotating"
MARKS = (*LEFT_OUT, ROTATING)

#: Files of whose tests a run of everything has a third: those that take ten seconds or more, but for passes
#: and bits, where a fault is worst.
IN_TURN = tuple(FILE.with_name("in_turn.txt").read_text(encoding="utf-8").split())

#: Files with a case for each file of the library: a usual run has all of them.
LAWS = tuple(f"tests/test_{name}.py" for name in ("map", "rooms", "words"))

#: The third of the rotating tests whose turn is today.
TODAYS_THIRD = datetime.date.today().toordinal() % 3

#: Name of the property of a report that holds the seconds of its phase.
_PROPERTY = "processor seconds"


def left_out(
    items: list[Any],
    third: int | None,
    names: Collection[str] | None = None,
    in_turn: Collection[str] = (),
) -> list[Any]:
    """Return the tests that a usual run leaves out, of the rotating ones all but a third.

    Args:
        items: all tests.
        third: 0, 1 or 2; None leaves none of them out.
        names: names of cases to leave out; by default those in slow.txt.
        in_turn: files whose tests are rotating, too.
    """
    names = {*(FILE.read_text().splitlines() if names is None else names)}

    def is_left_out(item: Any) -> bool:
        marks = {mark for mark in MARKS if item.get_closest_marker(mark) is not None}
        is_rotating = ROTATING in marks or item.nodeid.partition("::")[0] in in_turn
        another_day = is_rotating and third is not None and _draw(item.nodeid)[0] % 3 != third
        return another_day or item.nodeid in names or not marks.isdisjoint(LEFT_OUT)

    slow = [item for item in items if is_left_out(item)]
    needed = _with_other_outcomes(items, {item.nodeid for item in slow} & names)
    return [item for item in slow if item.nodeid not in needed]


def _with_other_outcomes(items: Sequence[Any], slow: Collection[str]) -> set[str]:
    """Return the slow cases to run as no other case of their function expects what they expect."""
    waiting, staying = defaultdict[str, list[Any]](list), defaultdict[str, list[Any]](list)
    for item in items:
        (waiting if item.nodeid in slow else staying)[_function_of(item.nodeid)].append(item)
    needed = set()
    for function in waiting.keys() & staying.keys():
        seen = {outcome for item in staying[function] for outcome in outcomes(item)}
        for item in sorted(waiting[function], key=lambda item: _draw(item.nodeid)):
            if not seen.issuperset(found := outcomes(item)):
                seen |= found
                needed.add(item.nodeid)
    return needed


#: Functions that conditions on parameters may call.
_CALLED = {"bool", "isinstance", "issubclass", "len"}


def outcomes(item: Any) -> set[tuple[str, bool]]:
    """Return the conditions on a case's parameters alone, each with its value: Note [Outcomes]."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    found = {(name, value) for name, value in params.items() if isinstance(value, bool)}
    for text, is_condition in _conditions(item.function, frozenset(params)):
        with contextlib.suppress(LookupError, TypeError, AttributeError):  # a condition of other cases
            value = eval(text, item.function.__globals__, params)
            if is_condition or isinstance(value, bool):
                found.add((text, bool(value)))
    return found


@functools.cache
def _conditions(function: Callable[..., Any], params: frozenset[str]) -> list[tuple[str, bool]]:
    """Return expressions of parameters alone in the conditions and assertions of a function.

    Each comes with True if it is a condition, False if it is an operand of an assertion.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    known = params - stored

    def is_of_parameters(node: ast.expr) -> bool:
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        calls = {ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}
        is_free = not names & (stored | params - known) and calls <= _CALLED
        return is_free and bool(names & known)

    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp)):
            found += [(ast.unparse(each), True) for each in _operands(node.test) if is_of_parameters(each)]
        elif isinstance(node, ast.Assert):
            parts = (each for each in ast.walk(node.test) if isinstance(each, (ast.Compare, ast.BoolOp)))
            found += [(ast.unparse(each), False) for each in parts if is_of_parameters(each)]
    return found


def _operands(condition: ast.expr) -> list[ast.expr]:
    """Return the operands of ``and`` and ``or``; another condition itself."""
    return condition.values if isinstance(condition, ast.BoolOp) else [condition]


def _function_of(name: str) -> str:
    """Return the name of a test without that of its case."""
    return name.partition("[")[0]


def _file_of(name: str) -> str:
    """Return the file in the name of a test."""
    return name.partition("::")[0]


def _draw(name: str) -> bytes:
    """Return bytes that are another draw for each name, and the same in each run."""
    return hashlib.sha256(name.encode()).digest()


def slow_ones(
    seconds: Mapping[str, float], known: Collection[str] = (), *, is_all: bool = False
) -> list[str]:
    """Return the names to leave out, sorted.

    Args:
        seconds: of the tests that have been measured.
        known: names that have been left out so far; those that have not been measured still are.
        is_all: whether all tests have been measured of each file: others of its names are gone.
    """
    if is_all:
        measured = {_file_of(name) for name in seconds}
        known = [name for name in known if _file_of(name) not in measured]
    cases = defaultdict[str, list[str]](list)
    for name in seconds:
        cases[_function_of(name)].append(name)
    slow = {name for name in known if name not in seconds}
    for function, names in cases.items():
        if _file_of(function) in LAWS:
            continue
        taken = 0.0
        for name in sorted(names, key=_draw):
            if taken + seconds[name] > (SECONDS if taken else MOST_SECONDS):
                slow.add(name)
            else:
                taken += seconds[name]
    return sorted(slow)


class Clock:
    """Plugin of each process that runs tests: notes the processor's time of each phase in its report."""

    def __init__(self) -> None:
        self._begun = processor_seconds()

    def pytest_runtest_logstart(self) -> None:
        self._begun = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = processor_seconds()
        report.user_properties.append((_PROPERTY, now - self._begun))
        self._begun = now
        return report


class Times:
    """Plugin of the process that reports: collects how long each test takes, its fixtures included."""

    def __init__(self, write: bool, *, is_all: bool) -> None:
        self._write = write
        self._is_all = is_all
        self._seconds = defaultdict[str, float](float)
        self._marked = set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _PROPERTY:
                self._seconds[report.nodeid] += float(str(value))
        if any(mark in report.keywords for mark in MARKS):
            self._marked.add(report.nodeid)

    def late(self) -> float:
        """Return the seconds of the cases that a usual run is to leave out, and has not."""
        known = FILE.read_text().splitlines()
        return sum(self._seconds[name] for name in {*slow_ones(self._seconds)} - self._marked - {*known})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        files = defaultdict[str, float](float)
        for name, seconds in self._seconds.items():
            files[_file_of(name)] += seconds
        if len(files) > 1:
            terminalreporter.section("seconds of the processor, by file")
            for name in sorted(files, key=lambda name: -files[name]):
                terminalreporter.line(f"{files[name]:7.1f}  {name}")
            terminalreporter.line(f"{sum(files.values()):7.1f}  in all")
            if (late := self.late()) and not self._write:
                terminalreporter.line(f"{late:7.1f}  of it in cases that --write-slow would leave out")
        if self._write:
            known = FILE.read_text().splitlines()
            slow = sorted({*slow_ones(self._seconds, known, is_all=self._is_all)} - self._marked)
            FILE.write_text("".join(f"{name}\n" for name in slow))
            terminalreporter.line(f"written: {FILE}")


def processor_seconds() -> float:
    """Return the processor's time in this process and its descendants (on Linux the living ones, too)."""
    spent = os.times()
    waited_for = spent.children_user + spent.children_system
    return spent.user + spent.system + waited_for + sum(_living_descendants(os.getpid()))


def _living_descendants(pid: int) -> Iterator[float]:
    """Yield the processor's time in each child of a process that it has not waited for, and in theirs."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError, ValueError):  # the thread, or a child, has ended meanwhile
            for child in map(int, path.read_text().split()):
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                yield sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
                yield from _living_descendants(child)
