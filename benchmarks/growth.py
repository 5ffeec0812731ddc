"""How the time of the first steps grows with what an optimizer has: ``python -m benchmarks.growth``.

AdamW's first two steps, on small tensors, in one process: with six tensors in one group, with a hundred
shapes, sixty groups that differ in the learning rate, twenty optimizers, and thousands of tensors. Inductor's
cache is warm. It is time on the cores, whatever else the machine does: the least of some rounds, which take
turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.peers import make_gradients, make_parameters
from collage_fx import install

#: Shapes of a layer.
LAYER = ((16, 16), (16, 64), (64,), (16,), (16,), (64, 16))


def group(shapes: Sequence[tuple[int, ...]], lr: float = 1e-3) -> dict[str, object]:
    gradients = make_gradients(shapes, torch.bfloat16, "cpu")
    return {"params": make_parameters(shapes, torch.bfloat16, "cpu", gradients), "lr": lr}


def adamw(*groups: dict[str, object]) -> torch.optim.Optimizer:
    return install(torch.optim.AdamW(groups))


#: Cases that are timed, by name: functions that make the optimizers.
CASES: dict[str, Callable[[], Sequence[torch.optim.Optimizer]]] = {
    "six tensors": lambda: [adamw(group(LAYER))],
    "100 shapes": lambda: [adamw(group([(8 + i, 16) for i in range(100)]))],
    "60 groups": lambda: [adamw(*(group(LAYER, 1e-3 * (1 + i)) for i in range(60)))],
    "20 optimizers": lambda: [adamw(group(LAYER)) for _ in range(20)],
    "2,000 tensors": lambda: [adamw(group([(16, 16)] * 2000))],
    "5,000 tensors": lambda: [adamw(group([(16, 16)] * 5000))],
}


def timed(make: Callable[[], Sequence[torch.optim.Optimizer]]) -> float:
    """Return the seconds on the cores that the first two steps take."""
    torch.compiler.reset()
    optimizers = make()
    begun = time.process_time()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.step()
    return time.process_time() - begun


def main(rounds: int, cases: Sequence[str]) -> None:
    for name in cases:
        timed(CASES[name])
    found = [{name: timed(CASES[name]) for name in cases} for _ in range(rounds)]
    seconds = {name: min(each[name] for each in found) for name in cases}
    for name, each in seconds.items():
        print(f"{name:16} {each:6.2f} s, {each / seconds[cases[0]]:5.1f} of {cases[0]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    given = parser.parse_args()
    main(given.rounds, given.cases)
