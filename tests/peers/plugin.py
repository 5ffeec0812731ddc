"""Plugin of pytest that writes down a result for each test."""

from __future__ import annotations

import gc
import random
import time
import traceback
import warnings
import zlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.peers.making import Made, moved
from tests.peers.recording import Job, Result, append, chosen, read

__all__ = ["Recorder"]


class Recorder:
    """Runs the chosen tests, each with the same random numbers in every mode."""

    def __init__(self, job: Job, made: Made) -> None:
        self._job = job
        self._made = made
        self._result = Result("", "")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        ended = read(Path(self._job.results))
        items[:] = [item for item in items if chosen(item.nodeid, self._job, ended)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._result = Result(item.nodeid, "passed")
        append(self._job.results, Result(item.nodeid, "begun"))
        self._made.clear()
        self._made.is_on = True
        seed = zlib.crc32(item.nodeid.encode())
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        started = time.perf_counter()
        try:
            return (yield)
        finally:
            self._result.seconds = round(time.perf_counter() - started, 2)
            append(self._job.results, self._result)
            self._made.clear()
            self._made.is_on = False
            torch._dynamo.reset()
            gc.collect()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                return (yield)
            finally:
                self._result.installed = len(self._made.optimizers)
                self._result.moved = moved(self._made.starts)
                self._result.warned = [
                    str(each.message)[:300] for each in caught if "collage" in each.filename
                ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.outcome != "passed" and self._result.outcome != "failed":
            self._result.outcome = report.outcome
            if call.excinfo is not None:
                self._result.error = _described(call.excinfo.value)
                self._result.where = _place(traceback.extract_tb(call.excinfo.value.__traceback__))
        return report


def _described(error: BaseException) -> str:
    """Return the class and first lines of an exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[:6])}"[:1000]


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost lines of a traceback."""
    return " < ".join(f"{'/'.join(Path(f.filename).parts[-2:])}:{f.lineno}" for f in [*frames][::-1][:5])
