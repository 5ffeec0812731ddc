"""``python -m benchmarks.few_bytes``: measure optimizers in few bytes, and write docs/few-bytes.md.

A matrix of weights takes the same gradients in float64, in plain bf16 and in the ways of this package. Bytes
are those of the weights, the optimizer's state and the error terms, as the report counts them; the error is
the distance from float64's weights, relative to the way that these have gone. It takes some minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.beyond_fp32 import directed, moved, off
from benchmarks.by_hand import Lion
from benchmarks.table import markdown, place, put_between
from collage_fx import backend_of

PLACE = place("few-bytes.md", "few_bytes")
SHAPE, SPREAD, STEPS = (64, 128), 0.02, 600

#: Ways to take a step, and their options.
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "8-bit state": {"strategy": "light", "state": "block8"},
    "fewest bytes": {"strategy": "light", "error_format": "byte", "state": "block8"},
}


#: Optimizers, each at a learning rate of its kind.
OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "Muon": (torch.optim.Muon, {"lr": 1e-3}),
    "Lion": (Lion, {"lr": 1e-4}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-4}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-4}),
    "RMSprop, momentum": (torch.optim.RMSprop, {"lr": 1e-4, "momentum": 0.9}),
}


def run(name: str, options: Mapping[str, Any] | None, dtype: torch.dtype) -> tuple[Tensor, Optimizer]:
    """Return the way that the weights have gone, and the optimizer; None = the optimizer's own step."""
    kind, arguments = OPTIMIZERS[name]
    made: list[Optimizer] = []

    def make(weights: list[torch.nn.Parameter]) -> Optimizer:
        made.append(kind(weights, **arguments))
        return made[0]

    course = partial(moved, make, steps=STEPS, shape=SHAPE, spread=SPREAD, gradients=directed)
    return course(dtype, options), made[0]


def errors_of(name: str) -> list[str]:
    """Return the row of an optimizer: errors in plain bf16 and float32, then bytes and errors here."""
    exact, _ = run(name, None, torch.float64)
    row = [
        name,
        *(f"{off(run(name, None, dtype)[0], exact):.2g}" for dtype in (torch.bfloat16, torch.float32)),
    ]
    for options in WAYS.values():
        way, optimizer = run(name, options, torch.bfloat16)
        held = backend_of(optimizer).report().bytes_per_parameter()["total"]
        row += [f"{held:.2f}", f"{off(way, exact):.2g}"]
    return row


def tables() -> str:
    headers = ["", "error, plain bf16", "error, float32"]
    headers += [f"{what}, {way}" for way in WAYS for what in ("bytes", "error")]
    about = f"After {STEPS} steps of a {SHAPE[0]}×{SHAPE[1]} matrix of weights from N(0, {SPREAD:g}):"
    rates = ", ".join(f"{name} {arguments['lr']:g}" for name, (_, arguments) in OPTIMIZERS.items())
    table = markdown(headers, map(errors_of, OPTIMIZERS))
    version = torch.__version__.partition("+")[0]
    return f"{about}\n\n{table}\n\nLearning rates: {rates}. torch {version}."


if __name__ == "__main__":
    put_between(*PLACE, tables())
