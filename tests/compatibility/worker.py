"""Measurements in a process of their own: a crash, a hang or a patched torch ends there."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from collage_tools.audit import FAILED, Measurement
from tests.compatibility.results import FOLDER

__all__ = ["Worker"]


class Worker:
    """Measures variants one after the other; a process that does not answer in time is ended, and replaced.

    Args:
        time_limit: seconds for one variant.
    """

    def __init__(self, time_limit: float) -> None:
        self.time_limit = time_limit
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None

    def measure(self, name: str) -> Measurement:
        """Measure the variant of that name."""
        return self._ask("measure", name)

    def measure_quickly(self, name: str) -> Measurement:
        """Measure a few steps of the variant of that name on some of the other shapes, resumed."""
        return self._ask("measure_quickly", name)

    def _ask(self, function: str, name: str) -> Measurement:
        """Return what a function of ``measure.py`` measures in the process, or how the process fails."""
        pipe = self._pipe or self._start()
        pipe.send((function, name))
        if not pipe.poll(self.time_limit):
            self.stop()
            return Measurement(FAILED, f"took more than {self.time_limit:.0f} s")
        try:
            measured: Measurement = pipe.recv()
        except (EOFError, ConnectionResetError):  # the second if it has not read the question
            process = self._process
            assert process is not None
            process.join()
            self.stop()
            return Measurement(FAILED, f"its process {_end(process.exitcode)}")
        return measured

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=False)
        self._process.start()
        theirs.close()
        return self._pipe

    def stop(self) -> None:
        """End the process; the next measurement starts another."""
        if self._process is not None and self._pipe is not None:
            self._pipe.close()  # which ends it, unless it hangs
            self._process.join(5)
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None


def _end(exit_status: int | None) -> str:
    """How a process ended; where a signal has killed it, the exit status is its number, negative."""
    if exit_status is not None and exit_status < 0:
        return f"was killed by signal {-exit_status} ({signal.strsignal(-exit_status)})"
    return f"ended with exit status {exit_status}"


def _serve(pipe: Connection) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    log = os.open(FOLDER / "worker.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):  # what packages print, and Dynamo's warnings, which are in the measurements too
        os.dup2(log, stream)
    faulthandler.enable()  # the frames of a crash are in the log
    from tests.compatibility import measure
    from tests.compatibility.rows import variant_named  # optimizers are imported here alone

    while True:
        try:
            function, name = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(measure, function)(variant_named(name)))
