"""``python -m benchmarks.edits``: measure edits of weights after each step, and write docs/between-steps.md.

AdamW steps a matrix, and after each step a program edits it: in place, as programs do, or by ``assign``. The
error is the distance from the weights of float64, relative to the way that these have gone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.beyond_fp32 import directed, off
from benchmarks.table import markdown, place, put_between
from collage_fx import assign, full_value, install

PLACE = place("between-steps.md", "edits")
SHAPE, SPREAD, STEPS, RATE = (64, 128), 0.02, 300, 1e-4

#: Edits of a weight after each step. QK-clip multiplies by the root of a factor below 1.
EDITS: dict[str, Callable[[Tensor], Tensor]] = {
    "QK-clip, `w * 0.999`": lambda w: w * 0.999,
    "`w.clamp(-0.04, 0.04)`": lambda w: w.clamp(-0.04, 0.04),
    "rows of norm 0.25": lambda w: w * (0.25 / w.norm(dim=1, keepdim=True)),
}


def moved(edit: Callable[[Tensor], Tensor], dtype: torch.dtype, *, installed: bool, assigns: bool) -> Tensor:
    """Return the way that weights have gone in :data:`STEPS` steps with an edit after each, in float64."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    start = (torch.randn(*SHAPE, generator=generator) * SPREAD).bfloat16()
    p = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = torch.optim.AdamW([p], lr=RATE)
    if installed:
        install(optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s)collage_fx: ")  # of an edit in place: measured here
        for _ in range(STEPS):
            p.grad = directed(SHAPE, generator).to(dtype)
            optimizer.step()
            if assigns:
                assign(p, edit(full_value(p)))
            else:
                with torch.no_grad():
                    p.copy_(edit(p))
    whole = full_value(p) if installed else p
    return whole.detach().double() - start.double()


def tables() -> str:
    rows = []
    for name, edit in EDITS.items():
        exact = moved(edit, torch.float64, installed=False, assigns=False)
        ways = (
            moved(edit, torch.bfloat16, installed=False, assigns=False),
            moved(edit, torch.float32, installed=False, assigns=False),
            moved(edit, torch.bfloat16, installed=True, assigns=False),
            moved(edit, torch.bfloat16, installed=True, assigns=True),
        )
        rows.append([name, *(f"{off(way, exact):.2g}" for way in ways)])
    headers = ("error", "plain bf16", "float32", "installed, in place", "installed, `assign`")
    version = torch.__version__.partition("+")[0]
    about = f"After {STEPS} steps of AdamW, lr {RATE:g}, on a matrix from N(0, {SPREAD:g}), torch {version}:"
    return f"{about}\n\n{markdown(headers, rows)}"


if __name__ == "__main__":
    put_between(*PLACE, tables())
