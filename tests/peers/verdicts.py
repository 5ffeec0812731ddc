"""Verdicts: what a suite's tests do plainly, and with each optimizer installed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.peers.listed import LISTED, Listed, reason_for
from tests.peers.recording import Result

__all__ = ["Verdict", "apart", "ends_apart", "verdict"]

#: Part of a parameter's way by which float32 runs, plain and installed, may end apart. Roundings are 6e-8 of
#: a weight; another rule or a missing step is more than this.
APART = 0.05

#: How many times as far as plain runs that begin an ulp apart, of which there are some.
AS_FAR_AS_SHAKEN = 2


@dataclass
class Verdict:
    """Numbers of one suite in one dtype.

    Attributes:
        suite: its name.
        dtype: of parameters.
        tests: number of tests that ran plainly.
        plain: number of tests that pass plainly.
        passed: number of them that pass installed.
        shaken: number of these that end apart, as plain runs do that begin an ulp apart.
        listed: failures with a reason.
        failed: failures without.
        needed: entries of the list that a failure needs.
    """

    suite: str
    dtype: str
    tests: int
    plain: int
    passed: int = 0
    shaken: int = 0
    listed: list[Result] = field(default_factory=list)
    failed: list[Result] = field(default_factory=list)
    needed: set[Listed] = field(default_factory=set)

    def by_kind(self) -> list[tuple[int, Result]]:
        """Return a failure of each kind, with how many there are: the same error at the same line."""
        kinds: dict[str, list[Result]] = defaultdict(list)
        for result in self.failed:
            kinds[f"{result.error[:60]} {result.where.partition(' < ')[0]}"].append(result)
        return sorted(((len(of), of[0]) for of in kinds.values()), key=lambda kind: -kind[0])


def verdict(
    suite: str,
    dtype: str,
    plain: Mapping[str, Result],
    installed: Mapping[str, Result],
    shaken: Sequence[Mapping[str, Result]] = (),
    listed: tuple[Listed, ...] = LISTED,
) -> Verdict:
    """Compare the results of a suite. A test that has no result installed has failed.

    ``shaken``: plain results of runs that begin an ulp apart, of the tests of :func:`ends_apart`.
    """
    passing = {test: result for test, result in plain.items() if result.outcome == "passed"}
    ran = sum(result.outcome != "skipped" for result in plain.values())
    found = Verdict(suite, dtype, ran, len(passing))
    for test, reference in passing.items():
        result = installed.get(test, Result(test, "failed", "has no result"))
        if dtype == "float32" and ends_apart(reference, result):
            distance = apart(reference.moved, result.moved)
            others = (each[test].moved for each in shaken if test in each)
            unstable = max((apart(reference.moved, each) for each in others), default=0.0)
            if distance <= AS_FAR_AS_SHAKEN * unstable:
                found.shaken += 1
            else:
                error = f"Apart: parameters end {distance:.2g} of their way from where they end plainly"
                error += f"; {unstable:.2g} if they begin an ulp apart"
                result = replace(result, outcome="failed", error=error)
        if result.outcome == "passed":
            found.passed += 1
        elif entry := reason_for(suite, dtype, result, listed):
            found.listed.append(result)
            found.needed.add(entry)
        else:
            found.failed.append(result)
    return found


def ends_apart(plain: Result, installed: Result) -> bool:
    """Return whether a test that passes both ways moves float32 parameters elsewhere.

    One that is named for bfloat16 makes such parameters itself: they are to end elsewhere.
    """
    passes = plain.outcome == installed.outcome == "passed" and "bfloat16" not in plain.test
    return passes and apart(plain.moved, installed.moved) > APART


def apart(plain: list[list[float]], installed: list[list[float]]) -> float:
    """Return the largest distance of two ends of a parameter's way, as a part of the way."""
    largest = 0.0
    for ours, theirs in zip(installed, plain, strict=False):
        way = math.hypot(*theirs)
        if len(ours) == len(theirs) and math.isfinite(way) and way > 0:
            distance = math.dist(ours, theirs) / way
            largest = max(largest, distance if math.isfinite(distance) else math.inf)
    return largest
