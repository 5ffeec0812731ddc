"""``python -m tests.reliability``: takes drawn cases, and writes the table of what came of them."""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from tabulate import tabulate

from tests.reliability import sharded
from tests.reliability.cases import Outcome, drawn

DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev soak", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    options = parser.parse_args()
    started = time.perf_counter()
    outcomes = taken(range(options.seed, options.seed + options.cases), options.processes)
    outcomes += sharded.taken(range(options.seed, options.seed + options.cases // 50))
    rows = table(outcomes)
    print(tabulate(rows, headers=HEADERS))
    print(f"{len(outcomes)} cases in {time.perf_counter() - started:.0f} s")
    if options.write:
        DOCUMENT.write_text(document(rows, len(outcomes), time.perf_counter() - started))
    return int(any(outcome.lost for outcome in outcomes))


def taken(seeds: Iterable[int], processes: int) -> list[Outcome]:
    """The outcomes of the cases of some seeds."""
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        return list(pool.map(drawn, seeds, chunksize=8))


HEADERS = ("setup or fault", "runs", "elements lost", "told")


def table(outcomes: Iterable[Outcome]) -> list[tuple[str, int, int, str]]:
    """A row for each way and fault; a run that went several ways counts for each."""
    by_what: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        for what in set(outcome.what):
            by_what[what].append(outcome)
    return [(what, len(of), sum(each.lost for each in of), _told(of)) for what, of in sorted(by_what.items())]


def _told(outcomes: list[Outcome]) -> str:
    """What was raised or warned about: how often, and an example."""
    told = [each.told[0] for each in outcomes if each.told]
    return f"{len(told)}: {told[0]}" if told else ""


def document(rows: Sequence[tuple[str, int, int, str]], cases: int, seconds: float) -> str:
    """The page ``docs/reliability.md``."""
    measured = f"{cases} cases in {seconds / 60:.0f} min on {os.cpu_count()} cores, torch {torch.__version__}"
    return f"{INTRODUCTION}\n{tabulate(rows, headers=HEADERS, tablefmt='github')}\n\n{measured}.\n"


INTRODUCTION = """# Reliability

A run that is saved, killed, loaded elsewhere and gone on with has to have every bit of one that nothing has
interrupted: parameters, state and error terms. `./dev soak --write` draws thousands of such runs, of several
optimizers, formats and strategies (`tests/reliability`), compares, and writes this
page; the tests take a hundred of them. A run goes one to three ways, one after the other, and counts for
each.

What goes wrong around a step (gradients that are not finite, an interrupted compilation, a fork after it, a
full disk, memory that runs out, two processes that compile at once, parameters and state that are replaced)
is in [`tests/test_faults.py`](../tests/test_faults.py): the step works, or it is refused and
nothing has changed.

DTensors that are cut by columns are rounded to nearest: the bits of dither go by places in memory
([limits](limits.md#several-processes)).

"Elements lost" counts those that are not, bit for bit, what they should be. Where a checkpoint has been
spoiled, the error terms of the tensor concerned have to become zero, those of all others to stay, and a
warning has to name the tensor.
"""


if __name__ == "__main__":
    raise SystemExit(main())
