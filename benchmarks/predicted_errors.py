"""``python -m benchmarks.predicted_errors``: predicted errors beside measured ones, in docs/choosing.md.

A matrix of weights from N(0, spread) takes 600 steps. The error is the distance from float64's end, relative
to the way that float64 has gone. It is predicted by ``explain`` before the first step. It takes two minutes
on one core.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from benchmarks.beyond_fp32 import directed, moved, off
from benchmarks.table import markdown, place, put_between
from collage_fx import explain

PLACE = place("choosing.md", "predicted_errors")

SPREADS, RATES, STEPS, SHAPE = (0.02, 0.1, 0.5, 1.0), (1e-5, 1e-6), 600, (64, 128)

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.01),
    "SGD 0.9": partial(torch.optim.SGD, momentum=0.9),
}

#: Optimizer -> way -> options.
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "AdamW": {
        "10 bytes": {},
        "8 bytes": {"bytes_per_parameter": 8.1},
        "5.1 bytes": {"bytes_per_parameter": 5.1},
        "`mcf`": {"error_format": "mcf"},
    },
    "SGD 0.9": {
        "8 bytes": {},
        "6.1 bytes": {"bytes_per_parameter": 6.1},
        "4.1 bytes": {"bytes_per_parameter": 4.1},
        "`mcf`": {"error_format": "mcf"},
    },
}


def predicted(name: str, spread: float, lr: float, options: dict[str, Any]) -> float:
    """Return the error that ``explain`` predicts before the first step."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter((torch.randn(*SHAPE, generator=generator) * spread).bfloat16())
    weights.grad = directed(SHAPE, generator)
    error = explain(OPTIMIZERS[name]([weights], lr=lr), **options).predicted_error()
    assert error is not None
    return error


def measured_errors(name: str, spread: float, lr: float, ways: list[dict[str, Any]]) -> list[float]:
    """Return the errors after all steps, in some ways."""
    make = partial(OPTIMIZERS[name], lr=lr)
    course = partial(moved, make, steps=STEPS, shape=SHAPE, spread=spread, gradients=directed)
    exact = course(torch.float64, None)
    return [off(course(torch.bfloat16, options), exact) for options in ways]


def table() -> str:
    found: dict[tuple[str, str, float], list[str]] = {}
    for name, ways in WAYS.items():
        for lr in RATES:
            for spread in SPREADS:
                errors = measured_errors(name, spread, lr, [*ways.values()])
                for (way, options), error in zip(ways.items(), errors, strict=True):
                    cell = f"{predicted(name, spread, lr, options):.5f} / {error:.5f}"
                    found.setdefault((name, way, lr), []).append(cell)
    rows = [
        [f"{name}, {way}", f"{lr:g}", *found[name, way, lr]]
        for name, ways in WAYS.items()
        for way in ways
        for lr in RATES
        if way not in ("`mcf`", "6.1 bytes")
        and (name, way) != ("AdamW", "8 bytes")  # tests/report/test_prediction.py holds more
    ]
    headers = ["", "`lr`", *(f"N(0, {spread:g})" for spread in SPREADS)]
    about = f"Predicted / measured error after {STEPS} steps, by the size of weights and the learning rate:"
    return f"{about}\n\n{markdown(headers, rows)}"


if __name__ == "__main__":
    put_between(*PLACE, table())
