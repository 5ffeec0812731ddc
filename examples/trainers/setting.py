"""What the examples of this folder share: text, model, recipe, command line, and the table that they print.

Each trains the byte-level GPT of train_gpt.py on the sources of Python's standard library, in pure bfloat16:
the learning rate warms up from 0, gradients are accumulated over two parts of a batch and clipped, and there
is a checkpoint half-way. It does so three times, and only options of Collage differ: without error terms,
with them, and with hidden float32 copies. Each time, a new trainer then goes on from the checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from torch.utils.data import Dataset

from examples.train_fsdp import lr_of
from examples.train_gpt import BASELINE, GPT, QUICK, STRATEGIES, Recipe, Text, validate

ACCUMULATED = 2  # parts of a batch


@dataclass(frozen=True)
class Setting:
    """One training, or the second half of one."""

    recipe: Recipe
    text: Text
    options: dict[str, Any]  # of CollageBackend
    folder: Path  # for the checkpoint
    resume: bool  # from there, half-way

    @property
    def half(self) -> int:
        """The number of steps before the checkpoint."""
        return self.recipe.steps // 2

    @property
    def warmup(self) -> int:
        return min(self.recipe.longest_warmup, self.recipe.steps // 10 + 1)

    @property
    def part(self) -> int:
        """Windows in a part of a batch."""
        return self.recipe.batch // ACCUMULATED

    def lr_factor(self, step: int) -> float:
        """Learning rate of a step relative to its peak; 0 in the first."""
        return lr_of(self.recipe, step) / self.recipe.peak_lr

    def model(self) -> GPT:
        torch.manual_seed(self.recipe.seed)
        return GPT(self.recipe).to(torch.bfloat16)

    def windows(self) -> Windows:
        """All that one training sees, in order."""
        return Windows(self.text.training, self.recipe)


class Windows(Dataset[dict[str, Tensor]]):
    """Random windows of text, the same ones every time: bytes, and as labels the byte that follows each."""

    def __init__(self, text: Tensor, recipe: Recipe) -> None:
        self.text, self.length = text, recipe.context
        generator = torch.Generator().manual_seed(recipe.seed)
        self.starts = torch.randint(
            len(text) - self.length, (recipe.steps * recipe.batch,), generator=generator
        )

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = int(self.starts[index])
        window = self.text[start : start + self.length + 1].long()
        return {"text": window[:-1], "labels": window[1:]}


def loss_of(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy in nats per byte."""
    return F.cross_entropy(model(batch["text"]).float().flatten(0, 1), batch["labels"].flatten())


def compare(train: Callable[[Setting], GPT], trainer: str) -> None:
    """Run the trainings of one example and print their validation losses.

    Args:
        train: makes model and trainer, trains, and returns the model. With ``resume``, from the checkpoint
            that it has written before.
        trainer: its name.
    """
    parser = argparse.ArgumentParser(description=f"Train a small GPT in pure bfloat16 by {trainer}.")
    parser.add_argument("--steps", type=int, help="of each training (default 300)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument(
        "--out", type=Path, default=Path("trainer_checkpoints"), help="folder for checkpoints"
    )
    names = ["none", "plus", BASELINE]
    parser.add_argument(
        "--strategies", nargs="+", default=names, choices=names, metavar="NAME", help=f"of {names}"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe = QUICK if arguments.quick else Recipe(steps=300)
    recipe = replace(recipe, steps=arguments.steps or recipe.steps)
    text = Text.of_standard_library()

    rows = []
    for name in arguments.strategies:
        folder = arguments.out / Path(sys.argv[0]).stem / name.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        losses, weights = [], []
        for resume in (False, True):
            torch.compiler.reset()
            model = train(Setting(recipe, text, STRATEGIES[name].options, folder, resume))
            losses.append(f"{validate(model, recipe, text, 'cpu'):.4f}")
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        rows.append([name, *losses, f"{int((weights[0] != weights[1]).sum())} of {len(weights[0])}"])
    headers = ["strategy", "validation loss", "resumed half-way", "weights that differ then"]
    print(f"{trainer}, {recipe.steps} steps:")
    print(tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 3)))
