"""``python -m benchmarks.conversion``: measure runs that are converted and taken back, for docs/pure-bf16.md.

Three times 50 steps: in float32 ("f") or compensated ("c"). All runs get the same gradients, a constant plus
noise, of values that bfloat16 holds, so that the errors are those of the optimizer. An error is the 2-norm of
the distance from float64, relative to the movement of float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.by_hand import Lion
from benchmarks.table import markdown, place, put_between
from collage_fx import convert, full_value

PLACE = place("pure-bf16.md", "conversion")

STEPS = 50
#: Smallest matrix of which state is packed.
SHAPE = (64, 64)

Parameters = list[nn.Parameter]


MAKE: dict[str, Callable[[Parameters], Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "Lion": lambda parameters: Lion(parameters, lr=1e-5, weight_decay=0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-4),
}
BUDGETS: tuple[Mapping[str, Any], ...] = ({}, {"bytes_per_parameter": 8}, {"bytes_per_parameter": 5.1})


def _gradients(steps: int) -> tuple[Tensor, list[Tensor]]:
    """Return a start, and the gradients of all steps."""
    generator = torch.Generator().manual_seed(0)
    start, constant = (torch.randn(SHAPE, generator=generator) for _ in range(2))
    noise = (torch.randn(SHAPE, generator=generator) for _ in range(steps))
    return start, [(constant + each).bfloat16() for each in noise]


def error(make: Callable[[Parameters], Optimizer], options: Mapping[str, Any], phases: str) -> float:
    """Return the error of a run, whose phases are of ``STEPS`` steps: ``"fcf"`` is there and back."""
    start, gradients = _gradients(STEPS * len(phases))
    model, exact = nn.ParameterList([nn.Parameter(start.clone())]), nn.Parameter(start.double())
    (p,) = model
    optimizer, oracle = make([p]), make([exact])
    dtypes = {"f": torch.float32, "c": torch.bfloat16}
    for i, gradient in enumerate(gradients):
        dtype = dtypes[phases[i // STEPS]]
        if p.dtype is not dtype:
            convert(model, optimizer, dtype, **(options if dtype is torch.bfloat16 else {}))
        p.grad, exact.grad = gradient.to(dtype), gradient.double()
        optimizer.step()
        oracle.step()
    moved = exact.detach() - start
    return float((full_value(p) - exact.detach()).norm() / moved.norm())


def table() -> str:
    """Return the table of all optimizers and budgets."""
    rows = []
    for name, make in MAKE.items():
        if name in ("Adam", "NAdam"):  # much like AdamW; tests/test_conversion.py holds them
            continue
        float32 = error(make, {}, "fff")
        for options in BUDGETS:
            stays, back = error(make, options, "ccc"), error(make, options, "fcf")
            budget = next(iter(options.values()), "default")
            numbers = [f"{each:.2g}" for each in (float32, stays, back)]
            rows.append([name, budget, *numbers, f"{back / max(float32, stays):.2f}"])
    headers = ("optimizer", "bytes", "float32", "compensated", "there and back", "÷ the worse")
    return markdown(headers, rows)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    text = table()
    print(text)
    put_between(*PLACE, text)


if __name__ == "__main__":
    main()
