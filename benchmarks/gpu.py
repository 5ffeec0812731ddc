"""``python -m benchmarks.gpu FOLDER``: what a lent GPU can tell in nine minutes, what decides most first.

Each part is a command with a limit of seconds, compiling included. What it prints goes to a file of FOLDER
while it runs, and ``summary.md`` is written anew behind each part, so that a machine that is taken away
leaves what it has found. A part that has ended is not run again; what there was no time for is, by the same
command.
A second machine trains a model of 124 million parameters: ``./dev paper --device cuda --size 124m``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]

#: Rows of the benchmark that decide most.
PEERS = (
    *("light", "plus", "light, block16", "light, byte, block8", "light, block8", "light, byte"),
    *("torch bf16 fused", "torch fp32 fused", "bf16 + fp32 master, fused"),
)
FAST_PEERS = ("light", "plus", "light, block16", "light, byte, block8")


@dataclass(frozen=True)
class Part:
    """Command of a run.

    Attributes:
        name: its file in the folder is ``NAME.txt``.
        decides: what its result decides.
        seconds: its limit.
        command: arguments of Python; ``{folder}`` is the folder.
        variables: of the environment.
    """

    name: str
    decides: str
    seconds: int
    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


def _tests(*given: str) -> list[str]:
    return ["-m", "pytest", "-m", "gpu", "-q", "--tb=long", "-p", "no:cacheprovider", *given]


def _times(folder: str, seconds: int, size: str, peers: Sequence[str]) -> list[str]:
    options = ["--device", "cuda", "--sizes", size, "--quick", "--deadline", str(seconds - 10)]
    return ["-m", "benchmarks", *options, "--results", f"{{folder}}/{folder}", "--peers", *peers]


_ABOUT = (
    "import subprocess, torch, triton; p = torch.cuda.get_device_properties(0); print(torch.__version__, "
    "triton.__version__, p); subprocess.run(['nvidia-smi', '-q', '-d', 'CLOCK,POWER,TEMPERATURE'])"
)
_FIRST = "two_launches or three_launches or round_trip or (agrees and wide and bfloat16)"

#: The parts of a run, in their order.
PARTS = (
    Part("card", "which card, and its clocks", 15, ["-c", _ABOUT]),
    Part("first-tests", "whether anything below counts", 90, _tests("tests/test_gpu.py", "-k", _FIRST)),
    Part("times", "whether memory bounds a step", 125, _times("times", 125, "a", PEERS)),
    Part(
        "fast-times",
        "whether approximate roots are worth a last bit",
        75,
        _times("fast-times", 75, "a", FAST_PEERS),
        {"TORCHINDUCTOR_USE_FAST_MATH": "1"},
    ),
    Part("trainings", "whether trainings are the CPU's", 100, _tests("tests/test_gpu_training.py")),
    Part("tests", "what else is wrong", 80, _tests("tests/test_gpu.py", "-k", f"not ({_FIRST})")),
    Part("launches", "the time between launches", 40, _times("launches", 40, "launch", PEERS[:2])),
)


def run_part(part: Part, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a part for so many seconds at most; return its exit status, None if its time was up."""
    path, begun = folder / f"{part.name}.txt", time.monotonic()
    command = [sys.executable, *(each.format(folder=folder) for each in part.command)]
    variables = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **part.variables}
    with path.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the processes that it has started, too
            process.wait()
            status = None
    return {"status": status, "seconds": time.monotonic() - begun}


def last_line(path: Path) -> str:
    """Return the last line of a file that says something; a ruler says nothing."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return next((line.strip(" =") for line in reversed(lines) if line.strip(" =-_.")), "")


def summary(parts: Sequence[Part], ended: Mapping[str, Mapping[str, Any]], folder: Path) -> str:
    """Return the page on a run: a row for each part, and the tables of the times."""
    rows = []
    for part in parts:
        result = ended.get(part.name)
        if result is None:
            rows.append((part.name, part.decides, "no time", "", ""))
            continue
        status = "time was up" if result["status"] is None else f"exit status {result['status']}"
        says = last_line(folder / f"{part.name}.txt").replace("|", "/")
        rows.append((part.name, part.decides, status, f"{result['seconds']:.0f}", says))
    headers = ("part", "decides", "result", "seconds", "its last line")
    texts = [tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)]
    for path in sorted(folder.glob("*/*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        of_peers = [
            (
                row["peer"],
                f"{row['ms']:.3f}",
                f"{row['over_copy']:.2f}",
                row["launches"],
                f"{row['host_ms']:.2f}",
            )
            if "ms" in row
            else (row["peer"], row["status"], "", "", "")
            for row in found["rows"]
        ]
        headers = (path.parent.name, "ms", "× its copy", "launches", "host ms")
        texts.append(tabulate(of_peers, headers=headers, tablefmt="github", disable_numparse=True))
    return "\n\n".join(texts) + "\n"


def run(parts: Sequence[Part], folder: Path, seconds: float) -> dict[str, Any]:
    """Run the parts that have not ended within their limits, for so many seconds in all."""
    folder.mkdir(parents=True, exist_ok=True)
    kept, ends = folder / "ended.json", time.monotonic() + seconds
    ended: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for part in parts:
        left = ends - time.monotonic()
        if left < 5 or (part.name in ended and ended[part.name]["status"] is not None):
            continue
        print(f"{part.name}: {part.decides}", flush=True)
        ended[part.name] = run_part(part, folder, min(part.seconds, left))
        kept.write_text(json.dumps(ended), encoding="utf-8")
        (folder / "summary.md").write_text(summary(parts, ended, folder), encoding="utf-8")
    return ended


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("folder", type=Path, help="for results")
    parser.add_argument("--seconds", type=float, default=540, help="for all (540)")
    given = parser.parse_args(argv)
    folder = given.folder.resolve()
    run(PARTS, folder, given.seconds)
    print((folder / "summary.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
