"""``python -m benchmarks.metrics``: print what measuring a step takes beside it, for docs/metrics.md.

Steps of AdamW with and without metrics take turns, in one process; medians are printed.
"""

from __future__ import annotations

import statistics
import time

import torch
from tabulate import tabulate

from benchmarks.sizes import SIZES, Shapes
from collage_fx import CollageBackend

ROUNDS = 20


def seconds(shapes: Shapes) -> tuple[float, float, int]:
    """The time of a step without and with metrics, and the number of measured tensors."""
    steps, backends = [], []
    for metrics in (False, True):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
        for p in parameters:
            p.grad = torch.randn(p.shape).bfloat16()
        backends.append(CollageBackend(metrics=metrics))
        optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        steps.append(torch.compile(optimizer.step, backend=backends[-1]))
    times: list[list[float]] = [[], []]
    for number in range(ROUNDS + 2):
        for step, taken in zip(steps, times, strict=True):
            begun = time.perf_counter()
            step()
            if number >= 2:  # the first two are compiled
                taken.append(time.perf_counter() - begun)
    plain, measured = map(statistics.median, times)
    return plain, measured, len(backends[1].metrics()[ROUNDS])


def main() -> None:
    rows = []
    for name in ("launch", "c", "b"):
        plain, measured, tensors = seconds(SIZES[name].shapes(0))
        each = (measured - plain) / tensors
        rows.append([SIZES[name].about, tensors, plain * 1e3, measured * 1e3, each * 1e3])
    headers = ["parameters", "measured tensors", "step, ms", "measured step, ms", "for each tensor, ms"]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(tabulate(rows, headers, floatfmt=".2f"))


if __name__ == "__main__":
    main()
