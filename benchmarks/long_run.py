"""What formats lose over the length of a run: ``python -m benchmarks.long_run``.

A byte-level GPT trains in bfloat16 for 20,000 steps, and every optimizer below gets its gradients at each
step, as it trains: AdamW on weights of the model's shapes, in each format, through its compiled step, and in
float64. So the chaos of trainings, which part from each other whatever they are stored in, is none of the
result. The error of a format is ‖d − d64‖ / ‖d64‖, with d the displacement of the weights since the start,
read as hi + error terms, and d64 that in float64: 0 is perfect, 1 is as good as not moving at all.

The table is printed and, after a run of full length, put into benchmarks/README.md. --quick takes some
hundred steps and writes nothing unless it is told where. The exit status is 1 if what is claimed in
:data:`CLAIMS` does not hold.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.__main__ import machine, say
from benchmarks.formats.__main__ import written
from benchmarks.table import Results, put_between, write_whole
from collage_fx import CollageBackend, full_value
from examples.train_gpt import GPT, Recipe, Text, batches, loss_of, validate

HERE = Path(__file__).parent
BEGIN = "<!-- written by python -m benchmarks.long_run -->"
END = "<!-- end of what benchmarks.long_run writes -->"

#: What is trained; its matrices have rows of 32 elements and more, so that all of them can be packed.
RECIPE = Recipe(
    steps=20_000, batch=2, context=64, width=64, layers=1, heads=2, final_lr=0.0, evaluate_every=2_000
)
QUICK = replace(RECIPE, steps=200, context=16)

#: The steps after which displacements are compared, as parts of the run.
MARKS = (0.05, 0.1, 0.25, 0.5, 1.0)

BASELINE, EXACT, MCF, BYTE = "fp32 masters", "full, exact", "full, mcf", "light, byte"
FORMATS: dict[str, dict[str, Any]] = {
    "none": {"strategy": "none"},
    "budget of 5.1": {"bytes_per_parameter": 5.1},
    BYTE: {"strategy": "light", "error_format": "byte"},
    "budget of 8": {"bytes_per_parameter": 8},
    "plus, mcf": {"strategy": "plus", "error_format": "mcf"},
    "plus, exact": {"strategy": "plus", "error_format": "exact"},
    MCF: {"strategy": "full", "error_format": "mcf"},
    EXACT: {"strategy": "full", "error_format": "exact"},
    BASELINE: {"strategy": "full", "error_format": "fp32"},
}


@dataclass(frozen=True)
class Cell:
    """Weights of normal numbers, and what moves them."""

    std: float
    lr: float
    weight_decay: float

    def __str__(self) -> str:
        return f"N(0, {self.std:g}), lr {self.lr:g}, weight decay {self.weight_decay:g}"


CELLS = (Cell(1, 1e-5, 0.0), Cell(1, 1e-5, 0.1), Cell(0.02, 1e-5, 0.1))


class Follower:
    """AdamW on the weights of all cells, which gets the gradients of a model that trains."""

    def __init__(
        self, model: GPT, recipe: Recipe, dtype: torch.dtype, options: dict[str, Any] | None
    ) -> None:
        generator = torch.Generator().manual_seed(recipe.seed)
        self.recipe = recipe
        self.leaders = list(model.parameters())
        self.weights = [
            [
                nn.Parameter((torch.randn(p.shape, generator=generator) * cell.std).bfloat16().to(dtype))
                for p in self.leaders
            ]
            for cell in CELLS
        ]
        self.starts = [_flat(weights) for weights in self.weights]
        groups = [
            {"params": weights, "weight_decay": cell.weight_decay, "lr": torch.tensor(0.0)}
            for cell, weights in zip(CELLS, self.weights, strict=True)
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=recipe.betas)
        self.backend = None if options is None else CollageBackend(**options)
        self.step: Callable[[], object] = self.optimizer.step
        if self.backend is not None:
            self.step = torch.compile(self.step, backend=self.backend)

    def follow(self, step: int) -> None:
        """The step of this number, with the gradients that the model has."""
        part = self.recipe.lr(step) / self.recipe.peak_lr
        for cell, group in zip(CELLS, self.optimizer.param_groups, strict=True):
            group["lr"].fill_(cell.lr * part)
            for weight, leader in zip(group["params"], self.leaders, strict=True):
                assert leader.grad is not None
                weight.grad = leader.grad.to(weight.dtype)
        self.step()

    def moved(self) -> list[Tensor]:
        """The displacement since the start, of each cell."""
        return [_flat(weights) - start for weights, start in zip(self.weights, self.starts, strict=True)]


def _flat(weights: Sequence[Tensor]) -> Tensor:
    return torch.cat([full_value(weight).flatten() for weight in weights])


def measure(recipe: Recipe) -> Results:
    """All figures; the optimizers of all formats step in turn."""
    started = time.monotonic()
    torch.manual_seed(recipe.seed)
    text = Text.of_standard_library()
    model = GPT(recipe).bfloat16()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(0.0), betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    train_step = torch.compile(optimizer.step, backend=CollageBackend())
    exact = Follower(model, recipe, torch.float64, None)
    followers = {name: Follower(model, recipe, torch.bfloat16, options) for name, options in FORMATS.items()}
    marks = [max(1, round(part * recipe.steps)) for part in MARKS]
    results: Results = {
        "machine": machine("cpu"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cells": [str(cell) for cell in CELLS],
        "steps": marks,
        "losses": [],
        "errors": {name: [[] for _ in CELLS] for name in FORMATS},
    }
    data = batches(text.training, recipe.batch, recipe.context, recipe.seed, "cpu")
    for step in range(recipe.steps):
        optimizer.zero_grad()
        loss_of(model, *next(data)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for follower in (exact, *followers.values()):
            follower.follow(step)
        optimizer.param_groups[0]["lr"].fill_(recipe.lr(step))
        train_step()
        if step + 1 in marks:
            wanted = exact.moved()
            for name, follower in followers.items():
                for errors, moved, best in zip(
                    results["errors"][name], follower.moved(), wanted, strict=True
                ):
                    errors.append(float((moved - best).norm() / best.norm()))
            results["losses"].append(validate(model, recipe, text, "cpu"))
            say(f"step {step + 1}, validation loss {results['losses'][-1]:.3f}")
    results["bytes"] = {
        name: follower.backend.report().bytes_per_parameter()["total"]
        for name, follower in followers.items()
        if follower.backend is not None
    }
    results["seconds"] = round(time.monotonic() - started)
    return results


#: What a run shows of weights N(0, 1), whether they decay or not.
CLAIMS: dict[str, Callable[[list[float], list[float], list[float], list[float]], bool]] = {
    # A dithered rounding to a grid has an error of 1/sqrt(6) of its distance, one to nearest of 1/sqrt(12).
    "`exact` is at most 1.42 times as far off as fp32 masters": lambda masters, exact, mcf, byte: all(
        ours <= math.sqrt(2) * theirs for ours, theirs in zip(exact, masters, strict=True)
    ),
    "`mcf` falls behind, and ends more than ten times as far off": lambda masters, exact, mcf, byte: (
        mcf[0] < mcf[-1] > 10 * masters[-1]
    ),
    "`byte` does not fall behind": lambda masters, exact, mcf, byte: byte[-1] < byte[0],
}


def claims(results: Results) -> dict[str, bool]:
    """Whether each of the claims holds."""
    of = [results["errors"][name] for name in (BASELINE, EXACT, MCF, BYTE)]
    far = [i for i, cell in enumerate(CELLS) if cell.std == 1]
    return {text: all(holds(*(errors[i] for errors in of)) for i in far) for text, holds in CLAIMS.items()}


def report(results: Results, style: str) -> str:
    """A table for each cell, then the claims."""
    losses = ", ".join(
        f"{loss:.2f} after {step}" for loss, step in zip(results["losses"], results["steps"], strict=True)
    )
    sections = [
        f"{results['machine']}, torch {results['torch']}, {results['seconds'] / 60:.0f} minutes on one core. "
        f"Validation losses of the model that trains: {losses} steps."
    ]
    for i, cell in enumerate(results["cells"]):
        rows = [
            [f"{results['bytes'][name]:.4g}", name, *(f"{error:.2g}" for error in errors[i])]
            for name, errors in results["errors"].items()
        ]
        headers = ["bytes", "format", *(f"{step} steps" for step in results["steps"])]
        alignment = ["right", "left", *["right"] * len(results["steps"])]
        sections += [
            f"**{cell}**",
            tabulate(rows, headers=headers, tablefmt=style, colalign=alignment, disable_numparse=True),
        ]
    holds = (f"- {text}: {'yes' if held else '**no**'}" for text, held in claims(results).items())
    return "\n\n".join([*sections, "Of weights N(0, 1):", "\n".join(holds)])


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a shorter run")
    parser.add_argument("--results", type=Path, help="JSON file (benchmarks/results/long_run/results.json)")
    parser.add_argument("--document", type=Path, help="to put the tables in (benchmarks/README.md)")
    options = parser.parse_args(argv)
    if not options.quick:
        options.results = options.results or HERE / "results" / "long_run" / "results.json"
        options.document = options.document or HERE / "README.md"
    return options


def main(argv: Sequence[str]) -> int:
    options = parse_arguments(argv)
    torch.set_num_threads(1)
    text = written(measure(QUICK if options.quick else RECIPE)) + "\n"
    results: Results = json.loads(text)
    if options.results:
        write_whole(options.results, text)
    if options.document:
        put_between(options.document, BEGIN, END, report(results, "github"))
    say(report(results, "simple"))
    return 0 if all(claims(results).values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
