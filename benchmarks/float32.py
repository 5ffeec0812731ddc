"""``python -m benchmarks.float32``: measure packed state of float32 parameters, and write docs/float32.md.

Each row is a real optimizer that takes real steps: torch's, those of this package, and the 8-bit AdamW of
bitsandbytes and of torchao where these are installed. About ten minutes on one core; tables that are
in ``--folder`` already are not measured again.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from benchmarks.formats.replay import learning_rate
from benchmarks.formats.traces import hard_gradients
from benchmarks.table import markdown, place, put_between
from benchmarks.timing import Clock, ratio, rounds
from collage_fx import install
from collage_fx.state import bytes_held
from examples.train_gpt import GPT, Recipe, Text, batches, loss_of, validate

PLACE = place("float32.md", "float32")

#: Parameters -> an optimizer, at a learning rate.
Make = Callable[[Sequence[Parameter], float], Optimizer]

BETAS, WEIGHT_DECAY, RATE, STD = (0.9, 0.999), 0.1, 1e-3, 0.02
RECIPE = Recipe(steps=300, batch=4, context=64, width=64, layers=2, heads=4, weight_decay=WEIGHT_DECAY)
QUICK_RECIPE = replace(RECIPE, steps=4, batch=2, context=16, width=64, layers=1)


def adamw(params: Any, lr: float) -> Optimizer:
    return torch.optim.AdamW(params, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)


@dataclass(frozen=True)
class Way:
    """Way to keep AdamW's state.

    Attributes:
        name: in the tables.
        make: makes the optimizer.
        package: to be installed, beside torch.
    """

    name: str
    make: Make
    package: str = ""

    @property
    def is_here(self) -> bool:
        return not self.package or importlib.util.find_spec(self.package) is not None


def ours(make: Make, **options: Any) -> Make:
    """Return a function that makes an optimizer with a compiled step."""
    return lambda params, lr: install(make(params, lr), **options)


def eight_bits_of(package: str) -> Make:
    """Return a function that makes a package's AdamW with state of 8 bits, imported where it is made."""

    def make(params: Any, lr: float) -> Optimizer:
        kind = importlib.import_module(f"{package}.optim").AdamW8bit
        made: Optimizer = kind(params, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
        return made

    return make


FLOAT32 = "float32 moments, torch"
STATES = ("bf16", "block16", "block8")
WAYS = (
    Way(FLOAT32, adamw),
    *(Way(f'`state="{state}"`', ours(adamw, state=state)) for state in STATES),
    *(Way(f"{name}, AdamW8bit", eight_bits_of(name), name) for name in ("bitsandbytes", "torchao")),
)

#: Other optimizers, by name: makers.
OTHERS: dict[str, Make] = {
    "AdamW, amsgrad": lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=WEIGHT_DECAY, amsgrad=True),
    "SGD, momentum": lambda p, lr: torch.optim.SGD(p, lr=100 * lr, momentum=0.9),
    "RMSprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr),
    "NAdam": lambda p, lr: torch.optim.NAdam(p, lr=lr),
    "RAdam": lambda p, lr: torch.optim.RAdam(p, lr=lr),
    "Adamax": lambda p, lr: torch.optim.Adamax(p, lr=lr),
    "Adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr),
    "Adadelta": lambda p, lr: torch.optim.Adadelta(p, lr=1000 * lr),
    "Adafactor": lambda p, lr: torch.optim.Adafactor(p, lr=lr, eps=(2.0**-23, 1e-3)),
    "Muon": lambda p, lr: torch.optim.Muon(p, lr=lr),
}


def held_bytes(optimizer: Optimizer) -> float:
    """Count the bytes of parameters and state for each parameter, without numbers and shared tables."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    total = 0.0
    for p in params:
        total += p.nbytes
        for name, each in optimizer.state[p].items():
            if not isinstance(each, Tensor) or not each.dim() or name.startswith("qmap"):
                continue
            total += _bytes_of(each)
    return total / sum(p.numel() for p in params)


def _bytes_of(state: Tensor) -> float:
    """Return the bytes of a state tensor, which may consist of other tensors."""
    if hasattr(state, "__tensor_flatten__"):
        names, _ = state.__tensor_flatten__()
        return sum(getattr(state, name).nbytes for name in names if name != "qmap")
    return bytes_held([state])


# Errors. ----------------------------------------------------------------------------------------------------


class Schedule:
    """Learning rates of an optimizer, in units of those that it was made with."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups = [(group, float(group["lr"])) for group in optimizer.param_groups]

    def set(self, factor: float) -> None:
        for group, lr in self.groups:
            if isinstance(group["lr"], Tensor):  # torchao's; it refuses another object
                group["lr"].fill_(lr * factor)
            else:
                group["lr"] = lr * factor


def displacements(make: Make, gradients: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, float]:
    """Take the steps of a trace of gradients; return the way of each kind of them, and bytes a parameter.

    Args:
        make: makes the optimizer.
        gradients: [steps, kinds, elements]; the parameter is the matrix of kinds and elements.
        dtype: dtype of the weights.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    start = torch.randn(gradients.shape[1:]) * STD
    p = Parameter(start.to(dtype, copy=True))
    optimizer = make([p], RATE)
    schedule = Schedule(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step, gradient in enumerate(gradients):
            p.grad = gradient.to(dtype)
            schedule.set(learning_rate(step, len(gradients)))
            optimizer.step()
    return p.detach().double() - start.double(), held_bytes(optimizer)


def errors(way: Tensor, exact: Tensor) -> Tensor:
    """Return the error of each kind: the norm of the distance, relative to the way in float64."""
    return (way - exact).norm(dim=-1) / exact.norm(dim=-1)


def traces(seeds: Sequence[int], steps: int, length: int = 1024) -> list[tuple[Tensor, list[str]]]:
    """Make hard gradients: nine kinds, float32 [steps, kinds, elements], for each seed."""
    found = [hard_gradients(seed, steps, length) for seed in seeds]
    return [(torch.stack([*each.values()], 1), [*each]) for each in found]


def _geometric_mean(values: Tensor) -> float:
    return float(values.log().mean().exp())


def _shown(value: float) -> str:
    return f"{value:.2g}"


def table_of_errors(seeds: Sequence[int], steps: int) -> str:
    """Return the table of errors of AdamW for each kind of gradients, the worst of the seeds."""
    given = traces(seeds, steps)
    exact = [displacements(adamw, gradients, torch.float64)[0] for gradients, _ in given]
    rows = []
    for way in (each for each in WAYS if each.is_here):
        say(f"errors: {way.name}")
        runs = [displacements(way.make, gradients) for gradients, _ in given]
        of_kinds = torch.stack([errors(run, ex) for (run, _), ex in zip(runs, exact, strict=True)])
        numbers = [_geometric_mean(of_kinds), *of_kinds.amax(0).tolist()]
        rows.append([way.name, f"{runs[0][1]:.3g}", *map(_shown, numbers)])
    return markdown(["moments", "bytes", "geometric mean", *given[0][1]], rows, texts=1)


def table_of_optimizers(seeds: Sequence[int], steps: int) -> str:
    """Return the table of errors of other optimizers, geometric means over kinds and seeds."""
    given = traces(seeds, steps)
    rows = []
    for name, make in OTHERS.items():
        exact = [displacements(make, gradients, torch.float64)[0] for gradients, _ in given]
        row = [name]
        for state in (None, *STATES):
            say(f"errors: {name}, {state}")
            chosen = make if state is None else ours(make, state=state)
            runs = [displacements(chosen, gradients) for gradients, _ in given]
            found = torch.stack([errors(run, ex) for (run, _), ex in zip(runs, exact, strict=True)])
            row.append(f"{_shown(_geometric_mean(found))} ({runs[0][1]:.4g} B)")
        rows.append(row)
    return markdown(["optimizer", "float32 state", *(f"`{state}`" for state in STATES)], rows, texts=1)


# Training and time. -----------------------------------------------------------------------------------------


def trained(make: Make, recipe: Recipe, text: Text) -> float:
    """Train a GPT in float32; return the loss on held-out text."""
    torch._dynamo.reset()
    torch.manual_seed(recipe.seed)
    model = GPT(recipe)
    params = list(model.parameters())
    optimizer = make(params, recipe.peak_lr)
    schedule = Schedule(optimizer)
    data = batches(text.training, recipe.batch, recipe.context, recipe.seed, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(recipe.steps):
            schedule.set(recipe.lr(step) / recipe.peak_lr)
            loss = loss_of(model, *next(data))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(params, recipe.clip)
            optimizer.step()
    return validate(model, recipe, text, "cpu")


def table_of_losses(recipe: Recipe, seeds: Sequence[int], file: Path) -> str:
    """Return the table of losses on held-out text, and of their differences from float32 moments.

    Args:
        recipe: setting of the trainings.
        seeds: seeds of the trainings.
        file: JSON file of the losses so far.
    """
    text = Text.of_standard_library()
    known: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    rows: list[list[str]] = []
    baseline: list[float] = []
    for way in (each for each in WAYS if each.is_here):
        losses = []
        for seed in seeds:
            name, started = f"{way.name}, seed {seed}", time.perf_counter()
            if name not in known:
                known[name] = round(trained(way.make, replace(recipe, seed=seed), text), 4)
                file.write_text(json.dumps(known, indent=1))
                say(f"loss: {name}: {known[name]:.4f}, {time.perf_counter() - started:.0f} s")
            losses.append(known[name])
        baseline = baseline or losses
        apart = torch.tensor(losses) - torch.tensor(baseline)
        shown = "" if way.name == FLOAT32 else f"{float(apart.mean()):+.4f} ± {_deviation(apart):.4f}"
        rows.append([way.name, *(f"{loss:.4f}" for loss in losses), shown])
    return markdown(["moments", *(f"seed {seed}" for seed in seeds), "difference"], rows, texts=1)


def _deviation(values: Tensor) -> float:
    """Return the standard deviation of the mean."""
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else 0.0


def table_of_times(shapes: Sequence[tuple[int, ...]], seconds: float) -> str:
    """Return the table of times of a step, interleaved in one process, as ratios to torch's fused AdamW."""
    torch._dynamo.reset()
    torch.set_num_threads(1)  # two would wait for each other where other programs run
    steps: dict[str, Callable[[], Any]] = {}
    fused = Way("float32 moments, torch, fused", lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True))
    for way in (fused, *(each for each in WAYS if each.is_here)):
        params = [Parameter(torch.randn(shape) * STD) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p) * 1e-3
        steps[way.name] = way.make(params, 1e-4).step
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in steps.values():
            for _ in range(3):  # compilations
                step()
        times = rounds(Clock("cpu"), steps, at_most=200, at_least=5, seconds=seconds)
    of = {name: [elapsed for elapsed, _ in each] for name, each in times.items()}
    rows = [[name, f"{ratio(each, of[fused.name])[0]:.2f}"] for name, each in of.items()]
    return markdown(["moments", "time of a step"], rows, texts=1)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.float32", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps, printed: the test of this command")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "collage_fx_float32",
        help="finished tables, with which a run that was broken off goes on (a folder for temporary files)",
    )
    options = parser.parse_args(argv)
    quick = options.quick
    if quick:
        options.folder = Path(tempfile.mkdtemp())
    seeds, steps = ((3,), 8) if quick else ((3, 5, 7), 1500)
    recipe = QUICK_RECIPE if quick else RECIPE
    shapes = [(64, 96)] if quick else [(1024, 1024)] * 4 + [(1024,)] * 4
    started = time.monotonic()
    make = {
        "errors": lambda: table_of_errors(seeds, steps),
        "optimizers": lambda: table_of_optimizers(seeds[:1], 4 if quick else 500),
        "losses": lambda: table_of_losses(
            recipe, (0,) if quick else (0, 1, 2), options.folder / "losses.json"
        ),
        "times": lambda: table_of_times(shapes, 0.1 if quick else 20.0),
    }
    sections = []
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, table in make.items():
        file = options.folder / f"{name}.md"
        if not file.exists():
            file.write_text(table())
        sections.append(file.read_text())
    text = "\n\n".join(f"{caption}\n\n{table}" for caption, table in zip(CAPTIONS, sections, strict=True))
    if quick:
        print(text)
    else:
        put_between(*PLACE, text)
    say(f"{time.monotonic() - started:.0f} s")
    return 0


CAPTIONS = (
    f"AdamW, 1500 steps of hard gradients ([their nine kinds](formats.md)), weights N(0, {STD}), a peak "
    f"learning rate of {RATE}, beta2 = {BETAS[1]}; three seeds, of the kinds the worst:",
    "Other optimizers, 500 steps of the same gradients, one seed, geometric mean of the nine kinds; the "
    "bytes of a parameter in brackets:",
    f"Loss on held-out text of a byte-level GPT in float32, after "
    f"{RECIPE.steps} steps; the difference from float32 moments is the mean of the seeds, with its standard "
    "error:",
    "Time of a step of AdamW for 4 matrices of 1024×1024 and 4 vectors, on one core, relative to torch's "
    "fused AdamW:",
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
