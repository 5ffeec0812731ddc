"""``python -m benchmarks.which_default``: compare what could be the default, and write docs/choosing.md.

Errors and checkpoints are measured, in half a minute on one core. Times are those that ``./dev bench`` has
stored in ``benchmarks/results/``, as ratios to the default's in the same run.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.beyond_fp32 import directed, moved, off
from benchmarks.float32 import adamw, errors
from benchmarks.formats.traces import hard_gradients
from benchmarks.table import markdown, place, put_between
from collage_fx import install

PLACE = place("choosing.md", "which_default")
RESULTS = Path(__file__).parent / "results"

#: Columns of times -> file of results. All are of GPT-2, size ``a``.
TIMES = {
    "CPU time": "cpu-2-cores-of-amd-epyc-torch-2.13.0.json",
    "H200 time": "cuda-nvidia-h200-torch-2.11.0.json",
}

#: Options by their names in the table, and their names in stored results.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "none: the default": ({}, "plus"),
    "`bytes_per_parameter=8`": ({"bytes_per_parameter": 8.1}, "light, block16"),
    "`bytes_per_parameter=5.1`": ({"bytes_per_parameter": 5.1}, "light, byte, block8"),
    '`strategy="full"`': ({"strategy": "full"}, "full"),
}

#: Sizes of weights and learning rates: where a moment's rounding counts for most, and a weight's.
CELLS = ((0.02, 1e-4), (1.0, 1e-6))

#: Kind of hard gradients whose neighbours differ by orders of magnitude.
SPREAD = "spread"


def displacement(
    gradients: Sequence[Tensor] | Tensor, lr: float, size: float, dtype: torch.dtype, options: Any
) -> Tensor:
    """Return the way of weights of a size, by options, or in a dtype if these are None."""
    given = iter(gradients)
    return moved(
        lambda weights: adamw(weights, lr),
        dtype,
        options,
        steps=len(gradients),
        shape=gradients[0].shape,
        gradients=lambda *_: next(given),
        spread=size,
    )


def errors_of(options: dict[str, Any], steps: int = 600) -> list[float]:
    """Return the errors of :data:`CELLS`, of "spread" gradients, and of the worst other kind."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for size, lr in CELLS:
        course = partial(displacement, [directed((64, 128), generator) for _ in range(steps)], lr, size)
        found.append(off(course(torch.bfloat16, options), course(torch.float64, None)))
    kinds = hard_gradients(3, steps, 1024)
    course = partial(displacement, torch.stack([*kinds.values()], 1).bfloat16(), 1e-3, CELLS[0][0])
    of_kinds = errors(course(torch.bfloat16, options), course(torch.float64, None))
    by_kind = dict(zip(kinds, of_kinds.tolist(), strict=True))
    return [*found, by_kind.pop(SPREAD), max(by_kind.values())]


def times(peer: str) -> list[str]:
    """Return stored times of a step, relative to the default's; a dash where there is none."""
    found = []
    for name in TIMES.values():
        rows = json.loads((RESULTS / name).read_text())["rows"]
        row: dict[str, Any] = next((row for row in rows if (row["size"], row["peer"]) == ("a", peer)), {})
        default = next(row for row in rows if (row["size"], row["peer"]) == ("a", "plus"))
        # On a CPU the default was timed in turn with each row.
        ratio = 1 / row["plus_over"] if "plus_over" in row else row.get("ms", 0) / default["ms"]
        found.append(f"{ratio:.2f}" if ratio else "–")
    return found


def checkpoint_bytes(options: dict[str, Any]) -> float:
    """Return the bytes of a parameter in a saved checkpoint of a model and its optimizer."""
    torch._dynamo.reset()
    model = torch.nn.Linear(1024, 1024, bias=False).bfloat16()
    optimizer = install(adamw(list(model.parameters()), 1e-3), **options)
    model.weight.grad = torch.randn_like(model.weight)
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file.getbuffer().nbytes / model.weight.numel()


def table(steps: int = 600) -> str:
    cells = [f"error, N(0, {size:g}), lr {lr:g}" for size, lr in CELLS]
    headers = ["options", *cells, f"error, “{SPREAD}”", "error, other hard", *TIMES, "checkpoint"]
    rows = []
    for name, (options, peer) in WAYS.items():
        numbers = (f"{each:.2g}" for each in errors_of(options, steps))
        rows.append([name, *numbers, *times(peer), f"{checkpoint_bytes(options):.2f}"])
    return markdown(headers, rows, texts=1)


if __name__ == "__main__":
    put_between(*PLACE, table())
