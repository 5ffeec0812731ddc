"""``./dev bench``: time optimizer steps on this machine, print tables and keep the results.

Results are written after every row; --resume goes on where a run was broken off. On a GPU, where time may be
lent, the rows that say most come first, and what the --deadline leaves out is named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.compiling import TIMED
from benchmarks.count import count_instructions
from benchmarks.measure import OURS, Failure, Process
from benchmarks.peers import PEERS, Peer
from benchmarks.sizes import SIZES
from benchmarks.table import MEASURED, Results, compile_table, heading, table, write_document, write_whole

HERE = Path(__file__).parent

#: The status of a row that there was no time for.
TOO_LATE = "not reached before the deadline"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), help="of benchmarks/sizes.py")
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), metavar="NAME", help="rows, by name")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, a smaller compile budget")
    parser.add_argument(
        "--compile-budget", type=float, metavar="SECONDS", help="for one peer (180, quick 45)"
    )
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="for all (none, on cuda 450)")
    parser.add_argument(
        "--resume", action="store_true", help="measure only what the results have no numbers for"
    )
    parser.add_argument(
        "--count",
        action=argparse.BooleanOptionalAction,
        help="count instructions under valgrind, minutes more (unless --quick, on a CPU)",
    )
    parser.add_argument(
        "--compile-times",
        action="store_true",
        help="measure how long compiling takes instead, of torch.optim's classes: 20 minutes",
    )
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the JSON files")
    parser.add_argument(
        "--document", type=Path, help="to put the tables in (README.md beside the default results)"
    )
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch.cuda.is_available() is False: no GPU, or a torch without CUDA")
    if options.document is None and options.results == HERE / "results":
        options.document = HERE / "README.md"
    return options


@dataclass(frozen=True)
class Effort:
    """How long things may take, in seconds, and how often they are repeated."""

    compile_budget: float
    at_most: int
    at_least: int
    seconds: float
    ends: float

    def limit(self, seconds: float) -> float:
        """So many, or what is left."""
        left = self.ends - time.monotonic()
        if left <= 0:
            raise Failure(TOO_LATE)
        return min(seconds, left)


def effort_of(options: argparse.Namespace) -> Effort:
    budget = options.compile_budget or (45 if options.quick else 180)
    deadline = options.deadline or (450 if options.device == "cuda" else float("inf"))
    at_most, at_least, seconds = (50, 3, 3) if options.quick else (200, 5, 15)
    if options.device == "cuda":
        seconds = min(seconds, 5)  # 200 rounds at most sizes
    return Effort(budget, at_most, at_least, seconds, time.monotonic() + deadline)


# What is measured on. ---------------------------------------------------------------------------------------


def machine(device: str) -> str:
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{cores()} cores of {_processor()}"


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return named[1] if named else platform.processor() or platform.machine()


def results_file(options: argparse.Namespace) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", machine(options.device).lower()).strip("-")
    return Path(options.results) / f"{options.device}-{slug}-torch-{torch.__version__.split('+')[0]}.json"


def opened(path: Path, options: argparse.Namespace) -> Results:
    """The results so far; a run that does not resume forgets those that it is to measure."""
    known: Results = {"rows": [], "parameters": {}, "instructions": {}, "compile_times": []}
    if path.exists():
        known.update(json.loads(path.read_text()))
    where = f"{torch.get_num_threads()} threads, Python {platform.python_version()}"
    known.update(
        machine=machine(options.device),
        device=options.device,
        torch=torch.__version__,
        python=platform.python_version(),
        threads=torch.get_num_threads(),
    )
    today = time.strftime("%Y-%m-%d")
    if options.compile_times:
        known.setdefault("about", f"Compile times of {today}, {where}")
        return known
    if not (options.resume and known["rows"]):
        known["about"] = f"{'A quick run' if options.quick else 'A full run'} on {today}, {where}"
    elif today not in known["about"]:
        known["about"] += f"; gone on with on {today}"
    names = options.peers or list(PEERS)
    if options.resume:  # what there is no number for is tried again
        known["rows"] = [row for row in known["rows"] if row["status"] == MEASURED]
        counted = {name: count for name, count in known["instructions"].items() if isinstance(count, float)}
    else:
        again = {(size, name) for size in sizes_of(options) for name in names}
        known["rows"] = [row for row in known["rows"] if (row["size"], row["peer"]) not in again]
        again_counted = names if is_counting(options) else ()
        counted = {name: n for name, n in known["instructions"].items() if name not in again_counted}
    known["instructions"] = counted
    return known


def is_counting(options: argparse.Namespace) -> bool:
    return options.device == "cpu" and (options.count or (options.count is None and not options.quick))


def sizes_of(options: argparse.Namespace) -> list[str]:
    return options.sizes or [name for name, size in SIZES.items() if options.device in size.devices]


#: What is measured first on a GPU.
FIRST_SIZES, FIRST_PEERS = ("d", "c", "e", "f"), ("light", "plus", "torch fp32 fused", "torch bf16 fused")


def stages(options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """The sizes and the peers at each, in the order in which they are measured."""
    sizes, names = sizes_of(options), list(options.peers or PEERS)
    if options.device == "cpu":
        return [(size, names) for size in sizes]
    early = [size for size in FIRST_SIZES if size in sizes]
    begun = [(size, [name for name in names if name in FIRST_PEERS]) for size in early]
    rest = [name for name in names if name not in FIRST_PEERS]
    others = [size for size in sizes if size not in early]
    return [each for each in (*begun, *((s, rest) for s in early), *((s, names) for s in others)) if each[1]]


# One size. --------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """Measures peers at one size and keeps the rows."""

    size: str
    device: str
    effort: Effort
    results: Results
    path: Path

    def __post_init__(self) -> None:
        self.process = Process()
        self.cold: dict[str, float | str] = {}  # seconds to compile, or why it did not

    def all(self, peers: Sequence[Peer]) -> None:
        done = {row["peer"] for row in self.results["rows"] if row["size"] == self.size}
        wanted = [peer for peer in peers if peer.name not in done]
        ours = [PEERS[name] for name in OURS]
        with tempfile.TemporaryDirectory(prefix="collage_fx_bench_") as folder:
            self.caches = Path(folder)
            try:
                if wanted:
                    self.results["parameters"][self.size] = self._ask("parameters", limit=120)
                    self._try_compiling([p for p in dict.fromkeys([*ours, *wanted]) if p.compiles])
                for peer in wanted:
                    self._keep(peer, self._row(peer))
            except Failure as failure:  # the size as a whole: too large, or too late
                say(f"size {self.size}: {failure}")
            finally:
                self.process.stop()

    def _ask(self, request: str, *arguments: Any, limit: float) -> Any:
        return _ask(self.process, self.size, self.device, self.effort, request, *arguments, limit=limit)

    def _cache(self, peer: Peer) -> str:
        return str(self.caches / re.sub(r"\W+", "_", peer.base))

    def _try_compiling(self, peers: Sequence[Peer]) -> None:
        """Everything is first compiled in a process of its own, which can be killed."""
        bases = [p for p in peers if p.base == p.name and not p.unavailable(self.device)]
        with ThreadPoolExecutor(self._jobs()) as pool:
            self.cold = dict(zip([p.name for p in bases], pool.map(self._try, bases), strict=True))

    def _jobs(self) -> int:
        """As many at a time as leave each four threads to compile with, and enough memory."""
        jobs = torch.get_num_threads() // 4
        if self.device == "cuda":
            jobs = min(jobs, torch.cuda.mem_get_info()[0] // (40 * self.results["parameters"][self.size]))
        return max(1, jobs)

    def _try(self, peer: Peer) -> float | str:
        started = time.monotonic()
        try:
            built = _alone(self.size, self.device, self.effort, "build", peer.name, self._cache(peer))
        except Failure as failure:
            return str(failure).replace("not done", "not compiled")
        finally:
            say(f"size {self.size}: compiled {peer.name} in {time.monotonic() - started:.0f} s, or tried to")
        return float(built[1])

    def _row(self, peer: Peer) -> dict[str, Any]:
        row: dict[str, Any] = {"size": self.size, "peer": peer.name, "bytes": peer.bytes}
        try:
            return {**row, **self._measure(peer), "status": MEASURED}
        except Failure as failure:
            return {**row, "status": str(failure)}

    def _measure(self, peer: Peer) -> dict[str, Any]:
        reason = peer.unavailable(self.device) or self.cold.get(peer.base)
        if isinstance(reason, str) and reason:
            raise Failure(reason)
        beside = [PEERS[name] for name in OURS if isinstance(self.cold.get(name), float)]
        effort = self.effort
        try:
            for each in dict.fromkeys([*beside, peer]):  # ours are there, unless the process was ended
                first, settled = self._ask(
                    "build", each.name, self._cache(each), limit=effort.compile_budget + 60
                )
            first, settled = self._ask("build", peer.name, self._cache(peer), limit=60)
            repeats = effort.at_most, effort.at_least, effort.seconds
            measured: dict[str, Any] = self._ask(
                "measure", peer.name, *repeats, limit=10 * effort.seconds + 60
            )
        finally:
            if peer.name not in OURS:
                self.process.tell_if_running("drop", peer.name)
        measured["first_step_s"] = first
        if peer.compiles:
            measured.update(warm_s=settled, cold_s=self.cold.get(peer.name))
        return measured

    def _keep(self, peer: Peer, row: dict[str, Any]) -> None:
        self.results["rows"].append(row)
        save(self.path, self.results)
        time_ = f"{row['ms']:.2f} ms, {row['over_copy']:.2f} × its copy" if "ms" in row else row["status"]
        say(f"size {self.size}: {peer.name}: {time_}")


def _ask(
    process: Process, size: str, device: str, effort: Effort, request: str, *arguments: Any, limit: float
) -> Any:
    process.ask("open", size, device, time_limit=effort.limit(120))
    return process.ask(request, *arguments, time_limit=effort.limit(limit))


# Compilation. -----------------------------------------------------------------------------------------------


def compile_times(
    results: Results, path: Path, effort: Effort, optimizers: Sequence[tuple[str, str]]
) -> None:
    """Time the first steps of each in a process with empty caches, and in another that finds them full."""
    for size, name in optimizers:
        row: dict[str, Any] = {"size": size, "optimizer": name}
        with tempfile.TemporaryDirectory(prefix="collage_fx_bench_") as folder:
            try:
                for key, request, *arguments in (
                    ("cold_s", "compile", name, folder),
                    ("warm_s", "compile", name, folder),
                    ("explain_s", "explain", name),
                ):
                    row[key] = _alone(size, results["device"], effort, request, *arguments)
                row["status"] = MEASURED
            except Failure as failure:
                row["status"] = str(failure)
        others = [r for r in results["compile_times"] if (r["size"], r["optimizer"]) != (size, name)]
        results["compile_times"] = [*others, row]
        save(path, results)
        say(f"{name} at {size}: " + ", ".join(f"{key} {row[key]:.1f}" for key in row if key.endswith("_s")))


def _alone(size: str, device: str, effort: Effort, request: str, *arguments: Any) -> Any:
    """The answer of a process of its own."""
    process = Process()
    try:
        return _ask(process, size, device, effort, request, *arguments, limit=effort.compile_budget)
    finally:
        process.stop()


# All of them. -----------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, flush=True)


def save(path: Path, results: Results) -> None:
    write_whole(path, json.dumps(results, indent=1) + "\n")


def count(results: Results, peers: Sequence[Peer], limit: float) -> None:
    """Add instructions per parameter, where they are not known yet."""
    names = [p.name for p in peers if not p.unavailable("cpu") and p.name not in results["instructions"]]
    if names:
        say("counting instructions")
        with tempfile.TemporaryDirectory(prefix="collage_fx_count_") as folder:
            results["instructions"].update(count_instructions(names, Path(folder), limit))


def measure(options: argparse.Namespace, effort: Effort, results: Results, path: Path) -> None:
    """All rows of all sizes, and instructions."""
    for size, names in stages(options):
        Run(size, options.device, effort, results, path).all([PEERS[name] for name in names])
        if size in results["parameters"]:
            say(f"\n{heading(results, size)}\n{table(results, size)}\n")
    if is_counting(options):
        count(results, [PEERS[name] for name in options.peers or PEERS], limit=900)
        save(path, results)
    for size in sizes_of(options):
        if size in results["parameters"]:
            say(f"\n{heading(results, size)}\n{table(results, size)}")
    if missing := left_out(options, results):
        say(f"\nnot reached before the deadline (--resume goes on with them): {', '.join(missing)}")


def left_out(options: argparse.Namespace, results: Results) -> list[str]:
    """The rows that there was no time for."""
    status = {(row["size"], row["peer"]): row["status"] for row in results["rows"]}
    return [
        f"({size}) {name}"
        for size, names in stages(options)
        for name in names
        if status.get((size, name), TOO_LATE) == TOO_LATE
    ]


def main(argv: Sequence[str]) -> int:
    options, started = parse_arguments(argv), time.monotonic()
    effort = effort_of(options)
    path = results_file(options)
    results = opened(path, options)
    if options.compile_times:
        timed = [each for each in TIMED if not options.sizes or each[0] in options.sizes]
        compile_times(results, path, effort, timed)
        say(f"\n{compile_table(results)}")
    else:
        measure(options, effort, results, path)
    if options.document is not None:
        write_document(options.document, options.results)
    say(f"\nwrote {path} in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
