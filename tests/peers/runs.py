"""Jobs run by workers: a time limit for each test, results kept, a worker that has died is replaced."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from tests.peers import sources
from tests.peers.recording import (
    Job,
    Result,
    append,
    begun,
    chosen,
    is_complete,
    note_complete,
    read,
)
from tests.peers.suites import ROOT, Dtype, Suite
from tests.peers.verdicts import ends_apart

__all__ = ["Options", "Results", "run"]

WORKER = Path(__file__).with_name("worker.py")

#: Plain runs that begin an ulp apart.
SHAKEN_RUNS = 4

#: Seconds for a worker to start and to collect the tests.
START = 300


@dataclass(frozen=True)
class Options:
    """Options of a run of several suites.

    Attributes:
        folder: for results.
        sample: (k, n): the k-th of n parts of the tests.
        time_limit: seconds for a test.
        interpreted: run kernels operation by operation.
        again: run installed what has results already.
    """

    folder: Path = sources.FOLDER
    sample: tuple[int, int] = (0, 1)
    time_limit: float = 300
    interpreted: bool = False
    again: bool = False


class Results(NamedTuple):
    """Results of a suite by test.

    Attributes:
        plain: of all tests.
        installed: of those that pass plainly.
        shaken: plain results of runs that begin an ulp apart, of those whose parameters end apart.
    """

    plain: dict[str, Result]
    installed: dict[str, Result]
    shaken: list[dict[str, Result]]


def run(suite: Suite, dtype: Dtype, options: Options) -> Results:
    """Return the results of a suite.

    Plain results hold for a version of the package and of torch; installed ones for our sources, too.
    """
    root = sources.unpacked(suite, options.folder)
    folder = options.folder / "results" / f"{suite.name}-{suite.version}-torch-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    plain: dict[str, Result] = {}
    ids: list[str] | None = None
    if not suite.judges:
        plain = _run(suite, root, dtype, None, folder / f"{dtype}-plain.jsonl", options)
        ids = [test for test, result in plain.items() if result.outcome == "passed"]
    way = "-interpreted" if options.interpreted else ""
    path = folder / f"{dtype}-installed{way}-{_digest()}.jsonl"
    if options.again:
        path.unlink(missing_ok=True)
    installed = _run(suite, root, dtype, ids, path, options, install=True)
    if suite.judges:
        plain = {
            test: result if result.outcome == "skipped" else Result(test, "passed")
            for test, result in installed.items()
        }
    shaken: list[dict[str, Result]] = []
    if dtype == "float32" and not suite.judges:
        unstable = [test for test, result in installed.items() if ends_apart(plain[test], result)]
        for seed in range(SHAKEN_RUNS):
            path = folder / f"{dtype}-shaken-{seed}.jsonl"
            shaken.append(_run(suite, root, dtype, unstable, path, options, shaken=seed))
    return Results(plain, installed, shaken)


def _run(
    suite: Suite,
    root: Path,
    dtype: Dtype,
    ids: list[str] | None,
    path: Path,
    options: Options,
    *,
    install: bool = False,
    shaken: int | None = None,
) -> dict[str, Result]:
    """Run what has no result yet; return all results that belong to the sample."""
    job = Job(
        str(path),
        install,
        dtype,
        [*suite.arguments, *suite.tests],
        ids,
        options.sample,
        bool(suite.processes),
        suite.judges,
        suite.cpu_for_cuda,
        options.interpreted and install,
        shaken,
    )
    if ids == [] or (is_complete(path, options.sample) and shaken is None):
        pass
    elif suite.processes:
        _run_scripts(suite, root, job, options.time_limit)
    else:
        ini = options.folder / "pytest.ini"  # a suite's own options may need plugins that are not here
        ini.write_text("[pytest]\n")
        given = ["-c", str(ini), "--rootdir", str(root)]
        job = replace(job, tests=[*given, *(str(root / test) for test in suite.tests), *suite.arguments])
        _run_pytest(job, root, options.time_limit)
        note_complete(path, options.sample)
    return {test: result for test, result in read(path).items() if chosen(test, job, ())}


def _digest() -> str:
    """Digest of the sources that installed results depend on."""
    hashed = hashlib.sha256()
    for pattern in ("collage_fx/**/*.py", "passes/*.py", "tests/peers/*.py"):
        for path in sorted(ROOT.glob(pattern)):
            if path.name not in ("listed.py", "verdicts.py", "__main__.py", "runs.py"):
                hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]


def _environment() -> dict[str, str]:
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), given]))}


def _run_pytest(job: Job, root: Path, time_limit: float) -> None:
    """Run pytest until every test has a result; a test that takes too long or ends the process has failed."""
    path = Path(job.results)
    while True:
        before = read(path)
        with open(path.with_suffix(".log"), "a") as log:
            command = [sys.executable, str(WORKER), job.to_json()]
            process = _start(command, root, log.fileno())
            reason = _watched(process, path, time_limit)
        test = begun(path)
        if test is not None:
            append(path, Result(test, "failed", error=reason))
        elif process.returncode in (0, 1, 5):  # passed, failed, nothing collected
            return
        if len(read(path)) == len(before):
            tail = path.with_suffix(".log").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"pytest runs no test of {root}: it {reason}\n{tail}")


def _start(command: list[str], root: Path, log: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, cwd=root, env=_environment(), stdout=log, stderr=log, start_new_session=True
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that has a session of its own, and its children."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _watched(process: subprocess.Popen[bytes], path: Path, time_limit: float) -> str:
    """Wait for a worker's end; end it when its results file stays as it is for too long."""
    size, since = -1, time.monotonic()
    try:
        while True:
            try:
                status = process.wait(0.5)
            except subprocess.TimeoutExpired:
                pass
            else:
                return (
                    f"ended with exit status {status}" if status >= 0 else f"was killed by signal {-status}"
                )
            now = path.stat().st_size if path.exists() else 0
            if now != size:
                size, since = now, time.monotonic()
            limit = time_limit if begun(path) is not None else max(time_limit, START)
            if time.monotonic() - since > limit:
                _kill(process)
                return f"took more than {limit:.0f} s"
    except BaseException:
        _kill(process)
        raise


def _run_scripts(suite: Suite, root: Path, job: Job, time_limit: float) -> None:
    """Run scripts, by one process each or by several under torchrun. A script's exit status is its result."""
    path = Path(job.results)
    for test, script, count in _scripts(suite):
        if not chosen(test, job, read(path)):
            continue
        one = replace(job, tests=[str(root / script)])
        command = [sys.executable, str(WORKER), one.to_json()]
        if count > 1:
            launcher = [
                "-m",
                "torch.distributed.run",
                f"--nproc-per-node={count}",
                f"--master-port={_port()}",
            ]
            command = [sys.executable, *launcher, str(WORKER), one.to_json()]
        log = path.with_suffix(f".{Path(script).stem}.{count}.log")
        started = time.monotonic()
        with open(log, "w") as file:
            process = _start(command, log.parent, file.fileno())
            try:
                status = process.wait(time_limit * 5)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    _kill(process)
        seconds = round(time.monotonic() - started, 1)
        error = "" if status == 0 else _last_error(log) if status is not None else "took too long"
        append(path, Result(test, "failed" if error else "passed", error, seconds=seconds))


def _scripts(suite: Suite) -> Iterable[tuple[str, str, int]]:
    for script in suite.tests:
        for count in suite.processes:
            yield f"{script.rpartition('scripts/')[2]}[{count}]", script, count


def _last_error(log: Path) -> str:
    """Return the line of a log that names an exception, the last one that is not torchrun's."""
    lines = log.read_text(errors="replace").splitlines()
    named = [line for line in lines if re.search(r"^(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b.*", line)]
    theirs = [line for line in named if "ChildFailedError" not in line]
    return (theirs or named or lines or ["no output"])[-1][:1000]


def _port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
