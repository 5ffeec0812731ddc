"""The paper's experiments at a small size: ``./dev paper``.

Byte-level transformers are trained in bfloat16 on real text, three seeds each, by every strategy, as β2, the
learning rate, the batch, the size and the task are varied one at a time. Results go to
``benchmarks/results/paper-*.json``, one line a training, as each ends; ``docs/paper.md`` and its pictures are
made from those files alone. A run that was stopped goes on where it was: trainings that a file has are not
repeated, and those that a deadline cut short left a checkpoint.

    ./dev paper                                      everything, some 80 minutes on 2 cores
    ./dev paper --minutes 30                         as much of it as that time allows; call it again
    ./dev paper --quick --results DIR --page FILE    a few steps of everything, to see that it runs
    ./dev paper --page-only                          write the page from the files
    ./dev paper --pairs plus "4.1 bytes"             these beside fp32 masters, in the 33 cells of the sweeps
    ./dev paper --device cuda --size 124m            every strategy at 124 M parameters, 9 minutes a call
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.__main__ import cores, machine, say
from benchmarks.formats.__main__ import written
from benchmarks.paper.costs import measure_costs
from benchmarks.paper.page import PAIRS, Runs, differences, write_page
from benchmarks.paper.settings import (
    SIZES,
    STRATEGIES,
    Cell,
    Plan,
    full_plan,
    large_plan,
    plan_of_pairs,
    quick_plan,
)
from benchmarks.paper.training import Record, one_thread, started, train
from benchmarks.table import write_whole

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass
class Files:
    """The files of results: one for each task and size, one for the costs.

    Args:
        folder: that holds them.
    """

    folder: Path
    known: dict[Path, list[Record]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in sorted(self.folder.glob("paper-*.json")):
            self.known[path] = json.loads(path.read_text())["runs"]

    def has(self, cell: Cell) -> bool:
        """Whether the cell has been trained."""
        key = cell.key()
        return any({name: run[name] for name in key} == key for run in self.known.get(self._path(cell), []))

    def add(self, cell: Cell, record: Record) -> None:
        """Write what a training showed into its file."""
        path = self._path(cell)
        self.known.setdefault(path, []).append(record)
        write_results(path, self.known[path])

    def _path(self, cell: Cell) -> Path:
        return self.folder / f"paper-{cell.setting.task}-{cell.setting.size}.json"


def write_results(path: Path, runs: Sequence[Record]) -> None:
    """A line for each, numbers with six digits."""
    write_whole(path, written({"runs": runs}, digits=6) + "\n")


def run_cells(
    plan: Plan, files: Files, checkpoints: Path, device: str, processes: int, deadline: float
) -> list[Cell]:
    """Train what the files lack; those that there was no time for."""
    cells = sorted((c for c in plan.cells if not files.has(c)), key=lambda c: (c.seed, -c.cost()))
    left: list[Cell] = []
    if not cells:
        return left
    where = {
        "machine": machine(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    bar: tqdm[Any]
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(processes, context, initializer=one_thread) as pool,
        tqdm(
            total=round(sum(c.cost() for c in cells)), unit="s", desc="of predicted time", leave=True
        ) as bar,
    ):
        starts = {c.draw(): (c, start) for c in cells if (start := c.setting.start())}
        wait_for(pool.submit(started, *each, checkpoints, device) for each in starts.values())
        trainings: dict[Future[Record | None], Cell] = {
            pool.submit(train, cell, checkpoints, device, deadline): cell for cell in cells
        }
        try:
            for future in as_completed(trainings):
                cell, record = trainings[future], future.result()
                if record is None:
                    left.append(cell)
                    continue
                files.add(cell, {**record, **where})
                bar.set_postfix_str(f"{cell.strategy}, {cell.setting.task} {cell.setting.size}")
                bar.update(round(cell.cost()))
        except BaseException:
            # Or it would train all that is left, and nobody would write it down.
            pool.shutdown(cancel_futures=True)
            raise
    return left


def wait_for(futures: Iterable[Future[Any]]) -> None:
    for future in list(futures):
        future.result()


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev paper", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--size", choices=list(SIZES), help="every strategy at this size, and nothing else")
    parser.add_argument(
        "--pairs", nargs="+", choices=list(STRATEGIES), help="strategies to train beside fp32 masters alone"
    )
    parser.add_argument("--seeds", type=int, help="of each cell (default 3; with --size 1)")
    parser.add_argument("--minutes", type=float, help="stop after so many, to go on with the next call")
    parser.add_argument("--processes", type=int, help="at a time (default: one for each core, or one GPU)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder (of --pairs: pairs in it)")
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs" / "paper.md", help="pictures lie beside it"
    )
    parser.add_argument("--page-only", action="store_true", help="write the page from the results there are")
    parser.add_argument("--checkpoints", type=Path, default=ROOT / "paper_checkpoints", help="folder")
    options = parser.parse_args(argv)
    if options.quick and options.results == parser.get_default("results"):
        parser.error(
            "--quick: name a folder by --results and a file by --page; these are not to be published"
        )
    if options.pairs:
        options.results /= PAIRS
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    if options.minutes is None:
        options.minutes = 9 if options.device == "cuda" else 90
    if options.processes is None:
        options.processes = 1 if options.device == "cuda" else cores()
    return options


def main(argv: Sequence[str]) -> int:
    options = parse_arguments(argv)
    deadline = time.time() + 60 * options.minutes
    files = Files(options.results)
    plan: Plan
    if options.size:
        plan = large_plan(options.size, options.seeds or 1)
    elif options.pairs:
        plan = plan_of_pairs(options.pairs, options.seeds or 3)
    else:
        plan = quick_plan() if options.quick else full_plan(options.seeds or 3)
    left: list[Cell] = []
    if options.pairs:
        left = run_cells(plan, files, options.checkpoints, options.device, options.processes, deadline)
        for line in differences(Runs.of_folder(options.results), plan.settings, options.pairs):
            say(line)
    elif not options.page_only:
        costs = options.results / "paper-costs.json"
        if not options.size and not costs.exists():
            write_results(costs, measure_costs("tiny" if options.quick else "5m", options.device))
        left = run_cells(plan, files, options.checkpoints, options.device, options.processes, deadline)
    if left:
        say(f"{len(left)} of {len(plan.cells)} trainings are left: the same command goes on with them")
        return 0
    if not (options.size or options.pairs):
        write_page(options.results, options.page, plan)
        say(f"{options.page} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
