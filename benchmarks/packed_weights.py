"""``python -m benchmarks.packed_weights``: what packed weights cost and save, for docs/few-bytes.md.

A GPT of ten million parameters is trained by AdamW on a CPU with plain bfloat16 and with each budget. Bytes
are those that torch's allocator has handed out: between two steps, and at the worst moment of a forward and
backward pass beyond these. Times are the best of several, taken in turn.

    python -m benchmarks.packed_weights [--width 384] [--layers 6]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.table import markdown, place, put_between
from benchmarks.timing import peak_extra_memory
from collage_fx import install
from collage_fx.state import bytes_held, known_tensors
from examples.train_gpt import GPT, Recipe, Text, batches, loss_of

PLACE = place("few-bytes.md", "packed_weights")

#: Name of a row -> options of ``install``; None for plain torch.
ROWS: dict[str, dict[str, Any] | None] = {
    "plain bf16": None,
    "default": {},
    "`bytes_per_parameter=5.1`": {"bytes_per_parameter": 5.1},
    "`bytes_per_parameter=4.1`": {"bytes_per_parameter": 4.1},
}
REPEATS = 7


@dataclass
class Training:
    """A training, with the best time of each part so far."""

    model: GPT
    optimizer: torch.optim.Optimizer
    data: tuple[Tensor, Tensor]
    of_passes: float = float("inf")
    of_step: float = float("inf")

    @classmethod
    def of(cls, options: dict[str, Any] | None, recipe: Recipe, data: tuple[Tensor, Tensor]) -> Training:
        torch.manual_seed(0)
        model = GPT(recipe).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        return cls(model, optimizer if options is None else install(optimizer, **options), data)

    def passes(self) -> None:
        loss_of(self.model, *self.data).backward()

    def run(self) -> None:
        self.optimizer.zero_grad()
        self.of_passes = min(self.of_passes, seconds(self.passes))
        self.of_step = min(self.of_step, seconds(self.optimizer.step))

    def row(self, name: str) -> list[object]:
        self.optimizer.zero_grad()
        elements = sum(p.numel() for p in self.model.parameters())
        held = bytes_held(known.tensor for known in known_tensors({"of": self.optimizer}).values())
        peak = peak_extra_memory(self.passes, "cpu")
        ms = (f"{1000 * each:.0f}" for each in (self.of_passes, self.of_step))
        return [name, f"{held / elements:.2f}", f"{peak / elements:.2f}", *ms]


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe = replace(Recipe(), width=arguments.width, layers=arguments.layers)
    data = next(batches(Text.of_standard_library().training, 2, recipe.context, 0, "cpu"))
    trainings = {name: Training.of(options, recipe, data) for name, options in ROWS.items()}
    for _ in range(3 + REPEATS):
        for each in trainings.values():
            each.run()
    headers = ["AdamW", "bytes held", "peak of a pass", "ms, passes", "ms, step"]
    table = markdown(headers, (each.row(name) for name, each in trainings.items()), texts=1)
    elements = sum(p.numel() for p in trainings["default"].model.parameters())
    text = f"{table}\n\n{elements / 1e6:.1f} million parameters, one thread, torch {torch.__version__}."
    put_between(*PLACE, text)
    print(text)


if __name__ == "__main__":
    main()
