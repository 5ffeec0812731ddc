"""``python -m benchmarks.beyond_fp32``: measure AdamW at small learning rates, and write docs/beyond-fp32.md.

Weights from N(0, 0.5), or of one, take the same gradients in float64, in float32, and in the ways of this
package. The error of a run is the norm of its distance from float64's, relative to the way that float64 has
gone; it takes three minutes on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.table import put_between
from collage_fx import CollageBackend, full_value

__all__ = ["MARKS", "PAGE", "WAYS", "decay_reached", "error", "moved", "off"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "beyond-fp32.md"
MARKS = ("<!-- written by python -m benchmarks.beyond_fp32 -->", "<!-- end -->")

WEIGHTS, STEPS, STEPS_OF_DECAY, WEIGHT_DECAY = 4096, 1500, 300, 0.01
RATES = (1e-7, 1e-6, 3e-6, 1e-5)
DECAYS = (1e-9, 1e-8, 3e-8, 1e-7, 1e-6, 1e-4, 1e-2)

#: Ways to take a step: dtype of the weights, and options of the backend; None = torch's own step.
WAYS: dict[str, tuple[torch.dtype, dict[str, Any] | None]] = {
    "float32, or float32 masters": (torch.float32, None),
    "here, float32": (torch.float32, {}),
    "here, bfloat16, `plus`": (torch.bfloat16, {}),
    "here, bfloat16, `light`": (torch.bfloat16, {"strategy": "light"}),
    "here, bfloat16, `light`, `byte`": (torch.bfloat16, {"strategy": "light", "error_format": "byte"}),
    "here, bfloat16, `plus`, rounded to nearest": (torch.bfloat16, {"rounding": "nearest"}),
    "here, bfloat16, `plus`, as written": (torch.bfloat16, {"changes": "as written"}),
}

#: Weights -> their optimizer.
Make = Callable[[list[torch.nn.Parameter]], Optimizer]


def drawn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a gradient of noise and a tenth of it in one direction."""
    return (torch.randn(*shape, generator=generator) * 1e-3 + 1e-4).bfloat16()


def none(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a gradient of zeros, so that there is weight decay alone."""
    return torch.zeros(*shape, dtype=torch.bfloat16)


def moved(
    make: Make,
    dtype: torch.dtype,
    options: Mapping[str, Any] | None,
    *,
    steps: int,
    shape: Sequence[int] = (WEIGHTS,),
    gradients: Callable[[Sequence[int], torch.Generator], Tensor] = drawn,
) -> Tensor:
    """Return the way that weights have gone in some steps, in float64.

    Args:
        make: the optimizer.
        dtype: dtype of the weights.
        options: options of the backend; None = the optimizer's own step.
        steps: number of steps.
        shape: shape of the weights.
        gradients: gradient of a step.
    """
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    start = (torch.randn(*shape, generator=generator) * 0.5).bfloat16()
    weights = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = make([weights])
    step: Any = optimizer.step
    if options is not None:
        step = torch.compile(optimizer.step, backend=CollageBackend(**options))
    for _ in range(steps):
        weights.grad = gradients(shape, generator).to(dtype)
        step()
    whole = weights if options is None else full_value(weights)
    return whole.detach().double() - start.double()


def off(way: Tensor, exact: Tensor) -> float:
    """Return the distance of two ends, relative to the way to the exact one."""
    return float((way - exact).norm() / exact.norm())


def _ways(way: str, lr: float, **course: Any) -> tuple[Tensor, Tensor]:
    """Return the way that AdamW's weights have gone in one of the ways, and in float64."""

    def make(weights: list[torch.nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(weights, lr=lr, weight_decay=WEIGHT_DECAY)

    return moved(make, *WAYS[way], **course), moved(make, torch.float64, None, **course)


def error(way: str, lr: float) -> float:
    """Return the distance from float64's weights, relative to the way that these have gone."""
    return off(*_ways(way, lr, steps=STEPS))


def decay_reached(way: str, decay: float) -> float:
    """Return the share of the weight decay that was asked for, in steps without gradients."""
    found, exact = _ways(way, decay / WEIGHT_DECAY, steps=STEPS_OF_DECAY, gradients=none)
    return float((exact * found).sum() / (exact * exact).sum())


def tables() -> str:
    decays = [[way, *(f"{decay_reached(way, decay):.3f}" for decay in DECAYS)] for way in WAYS]
    errors = [[way, *(f"{error(way, lr):.4f}" for lr in RATES)] for way in WAYS]
    return "\n\n".join(
        (
            f"Share of the decay that was asked for, after {STEPS_OF_DECAY} steps without gradients, by "
            "`lr * weight_decay`:",
            _table("", DECAYS, decays),
            f"Error of the weights after {STEPS} steps with `weight_decay={WEIGHT_DECAY}`, by `lr`:",
            _table("", RATES, errors),
            f"torch {torch.__version__.partition('+')[0]}.",
        )
    )


def _table(name: str, columns: Sequence[float], rows: Sequence[Sequence[str]]) -> str:
    headers = (name, *(f"{column:g}" for column in columns))
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    put_between(PAGE, *MARKS, tables())
