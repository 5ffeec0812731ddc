"""Results of tests, a line of JSON each, written by a worker and read by the process that started it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Container
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Job", "Result", "append", "begun", "chosen", "is_complete", "note_complete", "read"]

#: Bytes of a line, at most.
LONGEST = 1 << 17


@dataclass(frozen=True)
class Job:
    """Everything that a worker has to know.

    Attributes:
        results: file for the results.
        install: install each optimizer.
        dtype: ``"float32"`` or ``"bf16"``.
        tests: arguments of pytest; or of a script, its path.
        only: tests to run; None: all.
        sample: (k, n): run the n-th part of the tests that has the number k.
        is_script: run a script, not pytest.
        judges: the tests install optimizers themselves.
        cpu_for_cuda: ``.cuda()`` changes nothing.
        interpreted: run kernels operation by operation, which compiles nothing.
        shaken: seed of changes by an ulp and of other random numbers in steps: see ``Made``.
    """

    results: str
    install: bool
    dtype: str
    tests: list[str]
    only: list[str] | None = None
    sample: tuple[int, int] = (0, 1)
    is_script: bool = False
    judges: bool = False
    cpu_for_cuda: bool = False
    interpreted: bool = False
    shaken: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Result:
    """What came of a test.

    Attributes:
        test: pytest's node id.
        outcome: ``"passed"``, ``"failed"`` or ``"skipped"``. Lines that are no results have ``"begun"``, for
            a test that has not ended, or ``"complete"``, for a sample.
        error: class and first lines of the exception.
        where: innermost lines of its traceback.
        seconds: time of the test.
        installed: number of optimizers that were made.
        moved: for each parameter, how far some elements are from their start.
        warned: the library's warnings.
    """

    test: str
    outcome: str
    error: str = ""
    where: str = ""
    seconds: float = 0.0
    installed: int = 0
    moved: list[list[float]] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)


def append(path: Path | str, result: Result) -> None:
    """Write a result at the end of a file, at once."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def read(path: Path) -> dict[str, Result]:
    """Return the results of the tests that have ended."""
    results = (Result(**line) for line in _lines(path))
    return {result.test: result for result in results if result.outcome not in ("begun", "complete")}


def is_complete(path: Path, sample: tuple[int, int]) -> bool:
    """Whether every test of a sample, or of all samples, has a result."""
    complete = {line["test"] for line in _lines(path) if line["outcome"] == "complete"}
    return not complete.isdisjoint((str((0, 1)), str(sample)))


def note_complete(path: Path, sample: tuple[int, int]) -> None:
    """Write that every test of a sample has a result."""
    append(path, Result(str(sample), "complete"))


def begun(path: Path) -> str | None:
    """Return the test that has begun last, if it has not ended."""
    if not path.exists():
        return None
    with open(path, "rb") as file:  # often, while it grows
        file.seek(max(0, path.stat().st_size - LONGEST))
        *_, last = file.read().rstrip(b"\n").split(b"\n")
    is_begun = b'"outcome": "begun"' in last and last.endswith(b"}")
    return str(json.loads(last)["test"]) if is_begun else None


def chosen(test: str, job: Job, ended: Container[str]) -> bool:
    """Whether a job runs a test; which part of a sample a test is in depends on its name alone."""
    k, n = job.sample
    is_wanted = job.only is None or test in job.only
    return is_wanted and test not in ended and zlib.crc32(test.encode()) % n == k
