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


HEADERS = ("setup or fault", "runs", "elements lost", "warned")


def table(outcomes: Iterable[Outcome]) -> list[tuple[str, int, int, str]]:
    """A row for each way and fault; a run that went several ways counts for each."""
    by_what: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        for what in set(outcome.what):
            by_what[what].append(outcome)
    return [(what, len(of), sum(each.lost for each in of), _told(of)) for what, of in sorted(by_what.items())]


def _told(outcomes: list[Outcome]) -> str:
    """In how many cases a warning named the tensor, or an error was raised."""
    told = sum(bool(each.told) for each in outcomes)
    return f"{told} times" if told else ""


def document(rows: Sequence[tuple[str, int, int, str]], cases: int, seconds: float) -> str:
    """The page ``docs/reliability.md``."""
    measured = f"{cases} cases in {seconds / 60:.0f} min on {os.cpu_count()} cores, torch {torch.__version__}"
    head = INTRODUCTION.format(lost=sum(lost for _, _, lost, _ in rows) or "No", cases=cases)
    return f"{head.rstrip()}\n\n{tabulate(rows, headers=HEADERS, tablefmt='github')}\n\n{measured}.\n"


INTRODUCTION = """# Reliability

A resumed run has every bit of one that nothing has interrupted: parameters, state and error terms. `./dev
soak` draws thousands of runs of several optimizers, formats and strategies, which are saved, killed, loaded
elsewhere or spoiled one to three times, and compares them. {lost} elements were lost in {cases} cases.

- **elements lost** are those that are not, bit for bit, what they should be. If a checkpoint was spoiled,
  the error terms of that tensor have to become zero, those of others to stay, and a warning has to name the
  tensor.
- A run counts for each way that it went.

Faults around a step (gradients that are not finite, interrupted compilations, forks, full disks, memory
that runs out) are in [`tests/test_faults.py`](../tests/test_faults.py): the step works, or it is refused
and nothing has changed."""


if __name__ == "__main__":
    raise SystemExit(main())
