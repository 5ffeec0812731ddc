"""``./dev formats``: replay AdamW with its state stored in many ways, and write docs/formats.md.

Some minutes on one core. --quick takes shorter traces, writes no page unless it is told where, and is no
basis for figures: the test of this command.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import machine, say
from benchmarks.formats.asked import Results
from benchmarks.formats.page import page, picture
from benchmarks.formats.replay import (
    BETA2S,
    CELLS,
    HARD_CELLS,
    Cell,
    Run,
    error_of_length,
    errors,
    reference,
    replay,
)
from benchmarks.formats.rows import LENGTHS, MOMENTS, STATES, WEIGHTS, Row
from benchmarks.formats.traces import QUICK_RECIPE, RECIPE, Trace, hard_trace, recorded_trace
from benchmarks.table import write_whole

ROOT = Path(__file__).resolve().parents[2]


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev formats", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter traces")
    parser.add_argument("--results", type=Path, help="JSON file (benchmarks/results/formats/results.json)")
    parser.add_argument(
        "--page", type=Path, help="Markdown file (docs/formats.md); its picture is beside it, .svg"
    )
    options = parser.parse_args(argv)
    if not options.quick:
        options.results = options.results or ROOT / "benchmarks" / "results" / "formats" / "results.json"
        options.page = options.page or ROOT / "docs" / "formats.md"
    return options


class Replays:
    """A trace, and what rows are compared with on it."""

    def __init__(self, trace: Trace, cells: Sequence[Cell]) -> None:
        self.trace = trace
        self.cells = cells
        self.reference: Run = reference(trace, cells)

    def errors(self, row: Row) -> dict[str, Any]:
        return asdict(errors(replay(row, self.trace, self.cells), self.reference))

    def about(self) -> dict[str, Any]:
        return {
            "steps": len(self.trace),
            "length": self.trace.gradients.shape[-1],
            "pieces": self.trace.pieces,
            "batch": self.trace.batch,
            "cells": [str(cell) for cell in self.cells],
            "largest_update": self.reference.largest_update.tolist(),
        }


def measure(quick: bool, progress: Callable[[str], None]) -> Results:
    """All figures."""
    started = time.monotonic()
    traces = {
        "recorded": Replays(recorded_trace(QUICK_RECIPE if quick else RECIPE, progress), CELLS),
        "hard": Replays(hard_trace((3,), 200, 256) if quick else hard_trace(), HARD_CELLS),
    }
    results: Results = {
        "about": f"A {'quick' if quick else 'full'} run on {time.strftime('%Y-%m-%d')}",
        "machine": machine("cpu"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "beta2s": BETA2S,
        "traces": {name: each.about() for name, each in traces.items()},
    }
    for kind, rows, names in (
        ("states", STATES, ("recorded", "hard")),
        ("weights", WEIGHTS, ("recorded",)),
        ("moments", MOMENTS, ("recorded", "hard")),
    ):
        results[kind] = []
        for row in rows:
            progress(f"{kind}: {row.name}")
            found = {name: traces[name].errors(row) for name in names}
            about = {"name": row.name, "whose": row.whose, "bytes": row.bytes(kind)}
            results[kind].append({**about, **found})
    lengths = [100, 400] if quick else [1500, 6000, 24000]
    results["lengths"] = {"steps": lengths}
    for encoding in LENGTHS:
        progress(f"lengths: {encoding.name}")
        results["lengths"][encoding.name] = [error_of_length(encoding, steps) for steps in lengths]
    results["seconds"] = round(time.monotonic() - started)
    return results


def written(value: Any, depth: int = 2, digits: int = 4) -> str:
    """JSON with line breaks down to a depth, and numbers of so many digits."""
    if isinstance(value, float):
        return json.dumps(float(f"{value:.{digits}g}"))
    if not isinstance(value, (dict, list, tuple)):
        return json.dumps(value)
    comma, (first, last) = (",\n", ("\n", "\n")) if depth > 0 else (", ", ("", ""))
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {written(each, depth - 1, digits)}" for key, each in value.items()]
        return "{" + first + comma.join(items) + last + "}"
    return "[" + first + comma.join(written(each, depth - 1, digits) for each in value) + last + "]"


def main(argv: Sequence[str]) -> int:
    options = parse_arguments(argv)
    text = written(measure(options.quick, say)) + "\n"
    results: Results = json.loads(text)
    if options.results:
        write_whole(options.results, text)
    if options.page:
        drawn = options.page.with_suffix(".svg")
        picture(results, drawn)
        options.page.write_text(page(results, drawn.name))
    else:
        say(page(results))
    say(f"{results['seconds']} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
