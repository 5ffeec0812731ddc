"""The smallest demonstration: a weight of 1.0 and updates that plain bfloat16 rounds away.

Next to 1.0 the bfloat16 numbers are 0.0039 apart below and 0.0078 above. AdamW with a learning rate of
1e-3, an everyday one, moves a weight by about 0.001 a step, so every single result rounds back to 1.0: a
norm's gain never trains, and nothing says so. The same optimizer with the same bfloat16 weight, compiled
with collage_backend, arrives where float64 does.

    python examples/lost_update.py [--steps 100] [--device cpu]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor

from collage_fx import collage_backend, full_value

LEARNING_RATE = 1e-3


def train(dtype: torch.dtype, steps: int, device: str, *, collage: bool = False) -> Tensor:
    """Minimise w²/2 from w = 1, where the gradient is w itself."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=dtype, device=device))
    optimizer = torch.optim.AdamW([weight], lr=LEARNING_RATE)
    step: Callable[[], object] = optimizer.step
    if collage:
        step = torch.compile(optimizer.step, backend=collage_backend)  # the only difference
    for _ in range(steps):
        weight.grad = weight.detach().clone()
        step()
    return weight


def main() -> None:
    parser = argparse.ArgumentParser(description="A bfloat16 weight that does not move, and one that does.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    weights = {
        "plain bfloat16": train(torch.bfloat16, options.steps, options.device),
        "bfloat16 with Collage": train(torch.bfloat16, options.steps, options.device, collage=True),
        "float64": train(torch.float64, options.steps, options.device),
    }
    values = {name: full_value(weight).item() for name, weight in weights.items()}
    exact = 1 - values["float64"]
    rows = [
        [name, weights[name].item(), value, f"{(1 - value) / exact:.1%}"] for name, value in values.items()
    ]
    print(f"A weight of 1.0 after {options.steps} steps of AdamW at learning rate {LEARNING_RATE}:")
    headers = ["", "weight", "with its error term", "distance moved"]
    print(tabulate(rows, headers=headers, floatfmt=".6f", colalign=("left", "right", "right", "right")))


if __name__ == "__main__":
    main()
