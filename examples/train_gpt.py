"""Train a small GPT in pure bfloat16, with and without Collage: what ``./dev demo`` runs.

Model, batch, learning rate (1e-3 after a warm-up of 100 steps, then a cosine down to 1e-4), weight decay 0.1
and gradient clipping at 1.0 are what nanoGPT [1] recommends for a first training without a GPU, with half of
its layers; betas are torch's default (0.9, 0.999). The text is the source of Python's standard library; every
tenth file is kept for validation. Weights, activations, gradients and optimizer state are bfloat16, without
autocast. The runs start from the same weights and see the same batches:

    none          plain low precision (the paper's A)
    light         weights carry an error term (B)
    plus          weights and second moments do (C)
    plus, mcf     the same in the paper's format, where the others hold float32 numbers in two pieces
    8 bytes       what the backend chooses for so many bytes a parameter: moments in integers of 16 bits
    5.1 bytes     the same for 5.1: moments in integers of 8 bits, and a byte beside each weight
    4.1 bytes     the same for 4.1: weights as integers of 16 bits, too
    fp32 master   the usual remedy: hidden float32 copies of weights and optimizer state (D)

Two things go wrong in plain bfloat16. It has 8 significant bits, so an update below about 1/256 of its
weight is rounded away: some at the peak of the learning rate, most once it has decayed. And with beta2 =
0.999 a second moment can only grow, since 0.999·v rounds back to v. The lower the learning rate, as larger
models need it, the more is lost: here 3e-4 about doubles the gap in the loss and 3e-3 halves it.

What is measured, the first two by the backend itself (``CollageBackend(metrics=True)``):

    updates lost  share of the elements whose intended update is not zero but whose stored value is unchanged
    EDQ ratio     effective descent quality [2] over its optimum: <D, D̂> / <D, D>, with D the update that the
                  step makes in float32 of the same state and gradient, and D̂ what the stored weights moved
                  by; 1 means that nothing was lost
    v off by      mean relative error of the second moments at the end, against their recurrence in float64

[1] https://github.com/karpathy/nanoGPT, README, "I only have a macbook"
[2] Yu et al., Collage: Light-Weight Low-Precision Strategy for LLM Training, ICML 2024, arXiv:2405.03637

    ./dev demo [OPTION ...]    or    python examples/train_gpt.py [OPTION ...]

    --all                  every row, ten minutes; without it none, plus, 5.1 bytes and fp32 master
    --strategies NAME ...  these rows
    --steps 1000           of each training
    --seed 0               of weights and data order
    --quick                a tiny model and a few steps, to see that it runs
    --out demo_results     folder for figure and table
    --device cpu
    --threads 1            of torch
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
import sysconfig
import time
import timeit
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from tabulate import tabulate
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from collage_fx import CollageBackend, full_value
from collage_fx.metrics.quality import MeasuredTensor, Metrics
from collage_fx.state.packed import is_packed

VOCABULARY = 256  # bytes
TRAINING_BYTES, VALIDATION_BYTES = 4 << 20, 1 << 19
VALIDATION_BATCHES, VALIDATION_BATCH = 8, 64


@dataclass(frozen=True)
class Recipe:
    """The setting, the same for every strategy."""

    steps: int = 1000
    batch: int = 12
    context: int = 64
    width: int = 128
    layers: int = 2
    heads: int = 4
    peak_lr: float = 1e-3
    final_lr: float = 1e-4
    longest_warmup: int = 100
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 50
    measure_every: int = 20

    def lr(self, step: int) -> float:
        """Learning rate of a step, counted from 0: linear warm-up, then a cosine."""
        warmup = min(self.longest_warmup, self.steps // 10 + 1)
        if step < warmup:
            return self.peak_lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        return self.final_lr + (self.peak_lr - self.final_lr) * (1 + math.cos(math.pi * progress)) / 2


QUICK = Recipe(steps=24, batch=4, context=32, width=64, layers=1, heads=2, evaluate_every=8, measure_every=8)


@dataclass(frozen=True)
class Strategy:
    """One row of the table, one curve of the figure; the colours (Okabe-Ito) suit colour-blind readers."""

    name: str
    options: dict[str, Any]
    colour: str
    line: str | tuple[int, tuple[int, ...]]  # matplotlib's name of it, or an offset and lengths of dashes


#: Minutes of a training of 1000 steps on one core of an AMD EPYC: docs/demo.md.
MINUTES = 1.5

BASELINE = "fp32 master"
STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("none", {"strategy": "none"}, "#D55E00", "-"),
        Strategy("light", {"strategy": "light"}, "#56B4E9", "-"),
        Strategy("plus", {"strategy": "plus"}, "#0072B2", "--"),
        Strategy("plus, mcf", {"strategy": "plus", "error_format": "mcf"}, "#009E73", "-."),
        Strategy("8 bytes", {"bytes_per_parameter": 8}, "#CC79A7", (0, (5, 1, 1, 1, 1, 1))),
        Strategy("5.1 bytes", {"bytes_per_parameter": 5.1}, "#E69F00", (0, (3, 1))),
        Strategy("4.1 bytes", {"bytes_per_parameter": 4.1}, "#F0E442", (0, (1, 1))),
        Strategy(BASELINE, {"strategy": "full", "error_format": "fp32"}, "#000000", ":"),
    )
}


#: Rows of a run without options.
SHORT = ("none", "plus", "5.1 bytes", BASELINE)


# Text. ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes, of other files, to validate on."""

    training: Tensor
    validation: Tensor

    @classmethod
    def of_standard_library(cls) -> Text:
        """The sources of the Python that runs this, without its tests."""
        root = Path(sysconfig.get_paths()["stdlib"])
        names = []
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = set(subfolders) - {"site-packages", "dist-packages", "test", "tests"}
            names += [Path(folder, file).relative_to(root) for file in files if file.endswith(".py")]
        return cls.of_files(root, names)

    @classmethod
    def of_files(cls, root: Path, names: Sequence[Path]) -> Text:
        """Files below a folder, in an order that mixes packages but stays the same; a tenth is held out."""
        names = sorted(names, key=lambda name: (zlib.crc32(name.as_posix().encode()), name.as_posix()))
        training = _read((root / name for i, name in enumerate(names) if i % 10), TRAINING_BYTES)
        validation = _read((root / name for name in names[::10]), VALIDATION_BYTES)
        if min(len(training), len(validation)) < 10_000:
            raise SystemExit(
                f"{root} holds no sources to train on; run this with a complete Python and torch"
            )
        return cls(training, validation)


def _read(paths: Iterable[Path], cap: int) -> Tensor:
    text = bytearray()
    for path in paths:
        text += path.read_bytes()
        if len(text) >= cap:
            break
    return torch.tensor(text[:cap], dtype=torch.uint8)


def batches(text: Tensor, size: int, context: int, seed: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows of text: the bytes, and for each the byte that follows."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (size, 1), generator=generator)
        chunk = text[starts + window].long().to(device)
        yield chunk[:, :-1], chunk[:, 1:]


# Model. -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention_out(self.attend(self.attention_norm(x), mask))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        """Causal attention, written out: several times faster than torch's fused one in bfloat16 on CPU."""
        batch, length, width = x.shape
        size = width // self.heads
        split = self.queries_keys_values(x).view(batch, length, 3, self.heads, size)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        scores = queries @ keys.transpose(-2, -1) * size**-0.5 + mask
        return (scores.softmax(-1) @ values).transpose(1, 2).reshape(batch, length, width)


class GPT(nn.Module):
    """A byte-level GPT: learned positions, pre-norm blocks, no biases, embedding and output matrix tied."""

    mask: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, recipe.width)
        self.positions = nn.Parameter(torch.empty(recipe.context, recipe.width))
        self.blocks = nn.ModuleList(Block(recipe.width, recipe.heads) for _ in range(recipe.layers))
        self.norm = nn.RMSNorm(recipe.width, eps=1e-5)
        mask = torch.full((recipe.context, recipe.context), -torch.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith("out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * recipe.layers) if residual else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        with fast_products(text.device.type):
            x = self.bytes(text) + self.positions
            for block in self.blocks:
                x = block(x, self.mask)
            return self.logits(self.norm(x))

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.bytes.weight)


class ProductsInFloat32(TorchFunctionMode):
    """Matrix products of bfloat16 matrices, summed in float32 and rounded once to bfloat16.

    Which is what hardware with bfloat16 products does. On a CPU without, torch's own take several times as
    long, and all of that time is spent outside of the optimizer.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in (F.linear, Tensor.__matmul__):
            return func(*args, **(kwargs or {}))
        left, right = args[:2]
        return func(left.float(), right.float()).to(left.dtype)


@functools.cache
def bfloat16_products_are_slow(device: str) -> bool:
    """Whether this CPU multiplies bfloat16 matrices slower than float32 ones."""
    if device != "cpu":
        return False

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(512, 512, dtype=dtype)
        return min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=5))

    return seconds(torch.bfloat16) > seconds(torch.float32)


def fast_products(device: str) -> AbstractContextManager[Any]:
    """Context manager: matrix products in the faster of both ways."""
    return ProductsInFloat32() if bfloat16_products_are_slow(device) else nullcontext()


def loss_of(model: nn.Module, text: Tensor, following: Tensor) -> Tensor:
    """Cross-entropy in nats per byte, of bfloat16 logits; the sum alone is float32, as is customary."""
    return F.cross_entropy(model(text).float().flatten(0, 1), following.flatten())


# What the optimizer should have done, and what it did. ------------------------------------------------------


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


PARTS = {
    "queries_keys_values": "attention",
    "attention_out": "attention",
    "mlp_in": "mlp",
    "mlp_out": "mlp",
    "attention_norm": "norm",
    "mlp_norm": "norm",
    "norm": "norm",
}


def part_of(tensor: MeasuredTensor) -> str:
    """Which kind of module a parameter belongs to."""
    return PARTS.get(tensor.module.rpartition(".")[2], "embedding")


class ExactSecondMoments:
    """The second moments in float64, of the very gradients that the optimizer gets."""

    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        self.optimizer = optimizer
        self.beta2: float = optimizer.param_groups[0]["betas"][1]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.values = {p: torch.zeros_like(p, dtype=torch.float64) for p in parameters}

    def follow(self) -> None:
        for parameter, value in self.values.items():
            gradient = gradient_of(parameter).double()
            value.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)

    def mean_error(self) -> float:
        """Mean relative error of the optimizer's, over the elements that had a gradient."""
        errors = []
        for parameter, exact in self.values.items():
            stored = full_value(self.optimizer.state[parameter]["exp_avg_sq"])
            errors.append((stored / exact - 1).abs()[exact > 0])
        return torch.cat(errors).mean().item()


def bytes_per_parameter(optimizer: torch.optim.AdamW) -> float:
    """Weights, optimizer state and all error terms; not the gradients, which every strategy has alike.

    Packed tensors are held as codes and scales, which are saved beside them, and take no memory of their own.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = (entry for state in optimizer.state_dict()["state"].values() for entry in state.items())
    tensors = [t for name, t in saved if t.dim() > 0 and not (name.endswith(".fingerprint") or is_packed(t))]
    tensors += [p for p in parameters if not is_packed(p)]
    return sum(t.nbytes for t in tensors) / sum(p.numel() for p in parameters)


# Training. --------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What one strategy's training showed."""

    strategy: Strategy
    curve: list[tuple[int, float]] = field(default_factory=list)  # (steps taken, validation loss)
    metrics: Metrics = field(default_factory=lambda: Metrics({}, {}))
    step_seconds: list[float] = field(default_factory=list)
    second_moment_error: float = math.nan
    bytes_per_parameter: float = math.nan

    @property
    def loss(self) -> float:
        return self.curve[-1][1]

    def mean(self, quality: str) -> float:
        return statistics.fmean(getattr(each, quality) for each in self.metrics.overall().values())

    def step_milliseconds(self) -> float:
        """Median time of an optimizer step; the first one compiles and does not count."""
        return 1e3 * statistics.median(self.step_seconds[1:])


def train(strategy: Strategy, recipe: Recipe, text: Text, device: str, bar: tqdm[Any]) -> Run:
    """One training; only the backend of the optimizer's step differs between strategies."""
    torch.compiler.reset()
    torch.manual_seed(recipe.seed)
    model = GPT(recipe).to(device, torch.bfloat16)
    # As a tensor, the learning rate can follow a schedule without a recompilation.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(0.0), betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    backend = CollageBackend(metrics=True, metrics_every=recipe.measure_every, **strategy.options)
    step: Callable[[], object] = torch.compile(optimizer.step, backend=backend)

    run = Run(strategy)
    exact = ExactSecondMoments(optimizer)
    data = batches(text.training, recipe.batch, recipe.context, recipe.seed, device)
    for number in range(recipe.steps):
        bar.set_description(f"{strategy.name}{'' if number else ', compiling'}")
        optimizer.param_groups[0]["lr"].fill_(recipe.lr(number))
        optimizer.zero_grad()
        loss_of(model, *next(data)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        exact.follow()
        started = time.perf_counter()
        step()
        if (number + 1) % recipe.measure_every:
            run.step_seconds.append(time.perf_counter() - started)
        if (number + 1) % recipe.evaluate_every == 0 or number + 1 == recipe.steps:
            run.curve.append((number + 1, validate(model, recipe, text, device)))
            bar.set_postfix_str(f"validation loss {run.loss:.3f}", refresh=False)
        if not number:
            bar.unpause()  # what it expects of the steps to come is not to go by the one that compiled
        bar.update()
    run.metrics = backend.metrics(model)
    run.second_moment_error = exact.mean_error()
    run.bytes_per_parameter = bytes_per_parameter(optimizer)
    return run


@torch.no_grad()
def validate(model: nn.Module, recipe: Recipe, text: Text, device: str) -> float:
    """Loss on windows of the held-out files, the same ones every time."""
    data = batches(text.validation, VALIDATION_BATCH, recipe.context, recipe.seed + 1, device)
    return statistics.fmean(loss_of(model, *next(data)).item() for _ in range(VALIDATION_BATCHES))


# Results. ---------------------------------------------------------------------------------------------------


def table(runs: Sequence[Run]) -> str:
    headers = [
        "strategy",
        "validation loss",
        "updates lost",
        "by the bf16\nweight alone",
        "EDQ ratio",
        "v off by",
        "bytes per\nparameter",
        "optimizer\nstep",
    ]
    rows = [
        [
            run.strategy.name,
            f"{run.loss:.4f}",
            f"{run.mean('lost_share'):.1%}",
            f"{run.mean('lost_share_hi'):.1%}",
            f"{run.mean('edq_ratio'):.4f}",
            f"{run.second_moment_error:.2%}",
            f"{run.bytes_per_parameter:.3g}",
            f"{run.step_milliseconds():.1f} ms",
        ]
        for run in runs
    ]
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * 7))


def table_by_part(runs: Sequence[Run]) -> str:
    """EDQ ratio by kind of module, at the peak of the learning rate and at its end."""
    rows = []
    for run in runs:
        by_part = list(run.metrics.by(part_of).values())
        peak, end = by_part[min(len(by_part) - 1, len(by_part) // 10)], by_part[-1]
        rows.append(
            [run.strategy.name, *(f"{peak[part].edq_ratio:.4f} → {end[part].edq_ratio:.4f}" for part in peak)]
        )
    headers = ["EDQ ratio, lr peak → end", *next(iter(runs[0].metrics.by(part_of).values()))]
    return tabulate(
        rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * (len(headers) - 1))
    )


def conclusion(runs: Sequence[Run]) -> str:
    """What the numbers say, whichever way they fall."""
    by_name = {run.strategy.name: run for run in runs}
    plain, baseline = by_name.get("none"), by_name.get(BASELINE)
    lines = []
    if plain:
        lines.append(
            f"Plain bfloat16 loses {plain.mean('lost_share'):.0%} of AdamW's updates, "
            f"{list(plain.metrics.overall().values())[-1].lost_share:.0%} when last measured."
        )
    if plain and baseline:
        lines.append(
            f"Its validation loss ends {_apart(plain, baseline)} that of the {BASELINE} run"
            f"{_head_start(plain, baseline)}."
        )
    if baseline:
        lines += [
            f"Collage {run.strategy.name} loses {run.mean('lost_share'):.1%} and ends "
            f"{_apart(run, baseline)} it, with {run.bytes_per_parameter:.3g} bytes per parameter."
            for run in runs
            if run.strategy.name in ("light", "plus", "8 bytes", "5.1 bytes", "4.1 bytes")
        ]
        lines.append(
            f"fp32 masters take 14 bytes: the {baseline.bytes_per_parameter:.3g} of this run include "
            "bfloat16 copies of the moments."
        )
    return "\n".join(lines)


def _apart(run: Run, baseline: Run) -> str:
    return f"{abs(run.loss - baseline.loss):.4f} {'above' if run.loss > baseline.loss else 'below'}"


def _head_start(plain: Run, baseline: Run) -> str:
    """When the baseline had reached what plain bfloat16 ends with, if it was ahead at all."""
    reached = next((steps for steps, loss in baseline.curve if loss <= plain.loss), None)
    return "" if reached is None else f", which was that far by step {reached} of {plain.curve[-1][0]}"


def draw(runs: Sequence[Run], path: Path) -> None:
    """Validation loss, EDQ ratio and share of lost updates by step, 1500 pixels wide."""
    figure = Figure(figsize=(15, 5.4), layout="constrained")
    losses, ratios, losts = figure.subplots(1, 3)
    for run in runs:
        style = {"color": run.strategy.colour, "linestyle": run.strategy.line, "linewidth": 2.4}
        losses.plot(*zip(*run.curve, strict=True), label=run.strategy.name, **style)
        for axes, name in ((ratios, "edq_ratio"), (losts, "lost_share")):
            points = [(step, getattr(each, name)) for step, each in run.metrics.overall().items()]
            axes.plot(*zip(*points, strict=True), **style)
    losses.set_ylim(*_limits(runs))
    losses.set_title("Validation loss, nats per byte")
    ratios.set_ylim(0, 1.05)
    ratios.set_title("EDQ ratio: how much of each update arrives")
    losts.set_ylim(-0.02, 1)
    losts.set_title("Share of updates that are lost")
    for axes in (losses, ratios, losts):
        axes.set_xlabel("step", fontsize=12)
        axes.title.set_fontsize(14)
        axes.tick_params(labelsize=12)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(runs), fontsize=13)
    figure.savefig(path, dpi=100)


def _limits(runs: Sequence[Run]) -> tuple[float, float]:
    """Limits of the losses; the first steps, where all fall alike from 5.5, would flatten all others."""
    shown = [loss for run in runs for _, loss in run.curve[len(run.curve) // 6 :]]
    margin = 0.05 * (max(shown) - min(shown)) + 1e-3
    return min(shown) - margin, max(shown) + margin


#: Curves of the small picture: label, colour and line. 14 bytes are those of masters with bf16 weights.
PANEL: dict[str, tuple[str, str, str]] = {
    "none": ("plain bf16: {:.3f}", "#D55E00", "-"),
    BASELINE: ("fp32 masters, 14 bytes: {:.3f}", "#000000", "-"),
    "5.1 bytes": ("here, 5.1 bytes: {:.3f}", "#0072B2", "--"),
}


def draw_panel(runs: Sequence[Run], path: Path) -> None:
    """Validation loss of three runs, labelled beside the ends of their curves, for 390 pixels and more."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    low, high = _limits(runs)
    height = (high - low) / 12  # of a label
    place = math.inf
    for run in sorted(runs, key=lambda run: list(PANEL).index(run.strategy.name)):
        label, colour, line = PANEL[run.strategy.name]
        axes.plot(*zip(*run.curve, strict=True), color=colour, linestyle=line, linewidth=3)
        place = run.loss + 2 * height if math.isinf(place) else min(run.loss - height, place - height)
        end = run.curve[-1][0]
        axes.text(end, place, label.format(run.loss), fontsize=14, color=colour, ha="right", va="center")
    axes.set_ylim(min(low, place - height), high)
    axes.set_title("Validation loss in nats per byte, by step", fontsize=15)
    axes.tick_params(labelsize=13)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=140)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.format_help = lambda: f"{__doc__}"  # type: ignore[method-assign]
    names = list(STRATEGIES)
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--all", action="store_const", const=names, dest="strategies")
    rows.add_argument("--strategies", nargs="+", choices=names, metavar="NAME")
    parser.set_defaults(strategies=[name for name in names if name in SHORT])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("demo_results"))
    parser.add_argument("--device", default="cpu")
    # So small a model gains a quarter from a second core, and runs ten times slower where that core is busy.
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.steps is not None and options.steps < 2:
        parser.error("--steps: the first step compiles, so there must be two or more")
    return options


def main() -> None:
    options = parse_arguments()
    recipe = replace(QUICK if options.quick else Recipe(), seed=options.seed)
    if options.steps is not None:
        recipe = replace(recipe, steps=options.steps, measure_every=min(recipe.measure_every, options.steps))
    torch.set_num_threads(options.threads)
    text = Text.of_standard_library()
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    count, minutes = len(options.strategies), MINUTES * recipe.steps / Recipe.steps
    if not options.quick:
        print(f"{count} trainings of {recipe.steps} steps, each about {minutes:.1f} minutes on an idle core")
    bar: tqdm[Any]
    with tqdm(total=recipe.steps * len(options.strategies), unit="step") as bar:
        runs = []
        for name in options.strategies:
            runs.append(run := train(STRATEGIES[name], recipe, text, options.device, bar))
            bar.write(
                f"{name}: validation loss {run.loss:.4f}, {run.mean('lost_share'):.1%} of updates lost, "
                f"{run.bytes_per_parameter:.3g} bytes per parameter"
            )
    figure = options.out / "train_gpt.png"
    draw(runs, figure)
    shown = [run for run in runs if run.strategy.name in PANEL]
    if len(shown) == len(PANEL):
        draw_panel(shown, options.out / "train_gpt_loss.png")
    results = f"{table(runs)}\n\n{table_by_part(runs)}\n\n{conclusion(runs)}\n"
    (options.out / "train_gpt.txt").write_text(results)
    print(f"\n{results}\n{figure}, after {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
