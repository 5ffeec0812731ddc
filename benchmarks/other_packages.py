"""Time the steps of another package's optimizers: ``python -m benchmarks.other_packages Lamb Kron``.

Optimizers of pytorch_optimizer, by the names of their classes, with tensors so small that nearly all of it is
Python's time. Printed are the seconds on the cores of the first three steps, in which they are compiled, but
for what Inductor has in its cache, and the least time of a step, in eager torch and installed, which take
turns.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers import make_gradients, make_parameters
from collage_fx import install

WARM_UP = 8


def made(name: str, tensors: int) -> torch.optim.Optimizer:
    shapes = [(16, 16)] * tensors
    torch.manual_seed(0)
    gradients = make_gradients(shapes, torch.bfloat16, "cpu")
    kind = importlib.import_module("pytorch_optimizer").load_optimizer(name)
    optimizer: torch.optim.Optimizer = kind(make_parameters(shapes, torch.bfloat16, "cpu", gradients))
    return optimizer


def timed(step: Callable[[], Any]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def main(names: list[str], tensors: int, repeats: int) -> None:
    torch.set_num_threads(1)
    for name in names:
        eager, installed = made(name, tensors), install(made(name, tensors))
        started = time.process_time()
        for _ in range(3):
            installed.step()
        compiled = time.process_time() - started
        for _ in range(WARM_UP):
            eager.step()
            installed.step()
        pairs = [(timed(eager.step), timed(installed.step)) for _ in range(repeats)]
        of_eager, ours = (1e3 * min(each) for each in zip(*pairs, strict=True))
        steps = f"a step {of_eager:.2f} ms eager, {ours:.2f} ms installed, {ours / of_eager:.1f} of it"
        print(f"{name:16} {tensors} tensors: first steps {compiled:.1f} s; {steps}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.other_packages", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--tensors", type=int, default=148)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    main(options.names, options.tensors, options.repeats)
