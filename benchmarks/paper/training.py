"""One training: a cell in, a record out. It can stop at a deadline and go on from there to the bit."""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.paper.optimizers import EagerAdamW, Making, Measured
from benchmarks.paper.settings import SIZES, STRATEGIES, Cell, Setting, Start
from collage_fx import CollageBackend, full_value, load_full_state_dict
from examples.train_gpt import GPT, Recipe, Text, bytes_per_parameter, loss_of

Record = dict[str, Any]

WEIGHT_DECAY, CLIP, BETA1 = 0.1, 1.0, 0.9
MASK, MASKED_SHARE = 255, 0.15  # no byte of a text in UTF-8 is 255
VALIDATION_BATCHES, VALIDATION_BATCH = 4, 64
ACCURACY_BATCHES = 32  # of a classifier, at the end
POINTS = 20  # of each curve


# Text and model. --------------------------------------------------------------------------------------------


@functools.cache
def text_of(task: str) -> Text:
    """The sources of Python's library; of C++, as torch installs it, to be tuned to; rows of both."""
    if task == "sources":
        python, headers = text_of("bytes"), text_of("tuning")
        return Text(*map(_rows, (python.training, python.validation), (headers.training, headers.validation)))
    if task != "tuning":
        return Text.of_standard_library()
    root = Path(torch.__file__).parent / "include"
    names = [
        Path(folder, file).relative_to(root)
        for part in ("c10", "torch", "ATen/core", "ATen/native")
        for folder, _, files in os.walk(root / part)
        for file in files
        if file.endswith(".h")
    ]
    return Text.of_files(root, names)


def _rows(*texts: Tensor) -> Tensor:
    """Texts as rows of the shortest one's length."""
    length = min(map(len, texts))
    return torch.stack([text[:length] for text in texts])


class Encoder(GPT):
    """The same transformer, in which every byte sees all others."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.mask.zero_()


class Classifier(Encoder):
    """An encoder with a head on the mean of its outputs: a logit for each of two texts."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.head = nn.Linear(recipe.width, 2, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x.mean(1, keepdim=True))


def recipe_of(setting: Setting, seed: int) -> Recipe:
    """As the demo's recipe has it: a warm-up, then a cosine to a tenth of the peak."""
    size = SIZES[setting.size]
    return Recipe(
        steps=setting.steps(),
        batch=size.batch * setting.batch,
        context=size.context,
        width=size.width,
        layers=size.layers,
        heads=size.heads,
        peak_lr=setting.lr,
        final_lr=setting.lr / 10,
        betas=(BETA1, setting.beta2),
        weight_decay=WEIGHT_DECAY,
        clip=CLIP,
        seed=seed,
    )


def batch_at(text: Tensor, task: str, recipe: Recipe, size: int, number: int) -> tuple[Tensor, Tensor]:
    """The windows of one step, and what is to be predicted: the same for every strategy."""
    generator = torch.Generator().manual_seed(1_000_003 * recipe.seed + number)
    starts = torch.randint(text.shape[-1] - recipe.context, (size, 1), generator=generator)
    if task == "sources":
        source = torch.randint(len(text), (size, 1), generator=generator)
        return text[source, starts + torch.arange(recipe.context)].long(), source
    window = text[starts + torch.arange(recipe.context + 1)].long()
    if task != "masked":
        return window[:, :-1], window[:, 1:]
    window = window[:, :-1]
    masked = torch.rand(window.shape, generator=generator) < MASKED_SHARE
    asked = window.masked_fill(~masked, -100)  # which cross_entropy leaves out
    return window.masked_fill(masked, MASK), asked


@torch.no_grad()
def validate(model: nn.Module, text: Text, task: str, recipe: Recipe, device: str) -> float:
    """Loss on windows of held-out files, the same ones every time and for every seed."""
    losses = []
    for number in range(VALIDATION_BATCHES):
        batch = batch_at(text.validation, task, replace(recipe, seed=10**6), VALIDATION_BATCH, number)
        losses.append(loss_of(model, *(each.to(device) for each in batch)).item())
    return statistics.fmean(losses)


@torch.no_grad()
def accuracy(model: nn.Module, text: Text, task: str, recipe: Recipe, device: str) -> float:
    """Share of windows of held-out files that a classifier puts into the right class."""
    right = 0
    for number in range(ACCURACY_BATCHES):
        windows, source = batch_at(
            text.validation, task, replace(recipe, seed=10**6), VALIDATION_BATCH, number
        )
        right += int((model(windows.to(device)).argmax(-1) == source.to(device)).sum())
    return right / (ACCURACY_BATCHES * VALIDATION_BATCH)


def model_of(task: str, recipe: Recipe) -> GPT:
    """A model with the recipe's weights, in float32."""
    torch.manual_seed(recipe.seed)
    return {"masked": Encoder, "sources": Classifier}.get(task, GPT)(recipe)


def started(cell: Cell, start: Start, folder: Path, device: str) -> Path:
    """The float32 checkpoint that a cell begins with, trained if it is not there yet."""
    path = folder / f"start-{cell.draw():08x}.pt"
    if path.exists():
        return path
    recipe = recipe_of(replace(cell.setting, task=start.task, lr=start.lr), cell.draw())
    recipe = replace(recipe, steps=start.steps)
    model = model_of(start.task, recipe).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=recipe.betas, weight_decay=WEIGHT_DECAY)
    text = text_of(start.task)
    for number in range(recipe.steps):
        optimizer.param_groups[0]["lr"] = recipe.lr(number)
        optimizer.zero_grad()
        batch = batch_at(text.training, start.task, recipe, recipe.batch, number)
        loss_of(model, *(each.to(device) for each in batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    save(model.state_dict(), path)
    return path


def one_thread() -> None:
    """Leave the other cores to the other trainings."""
    torch.set_num_threads(1)


def save(value: object, path: Path) -> None:
    """Write a file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{os.getpid()}.half")
    torch.save(value, half)
    half.replace(path)


# The two kinds of optimizer, alike to the loop. -------------------------------------------------------------


class Stepper(Protocol):
    """An optimizer that steps, and what can be said of it."""

    optimizer: Any

    def step(self, lr: float, number: int) -> None: ...
    def weights(self) -> list[Tensor]: ...
    def second_moments(self) -> list[Tensor]: ...
    def points(self) -> list[tuple[int, float, float]]: ...  # step, EDQ ratio, share of lost updates
    def bytes_per_parameter(self) -> float: ...
    def load_weights(self, weights: dict[str, Tensor]) -> None: ...


class Compiled:
    """torch.optim.AdamW, compiled by this project's backend."""

    def __init__(self, model: GPT, recipe: Recipe, options: dict[str, Any], measure_every: int) -> None:
        torch.compiler.reset()
        self.model, self.options = model, options
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=torch.tensor(0.0), betas=recipe.betas, weight_decay=recipe.weight_decay
        )
        self.parameters = list(model.parameters())
        self.backend = CollageBackend(metrics=True, metrics_every=measure_every, **options)
        self.compiled = torch.compile(self.optimizer.step, backend=self.backend)
        self.steps_before: int | None = None  # that were taken before a resume

    def step(self, lr: float, number: int) -> None:
        if self.steps_before is None:
            self.steps_before = number - 1
        self.optimizer.param_groups[0]["lr"].fill_(lr)
        self.compiled()

    def weights(self) -> list[Tensor]:
        return [full_value(p) for p in self.parameters]

    def second_moments(self) -> list[Tensor]:
        return [full_value(self.optimizer.state[p]["exp_avg_sq"]) for p in self.parameters]

    def points(self) -> list[tuple[int, float, float]]:
        measured = self.backend.metrics(self.model).overall()
        before = self.steps_before or 0
        return [(before + s, each.edq_ratio, each.lost_share) for s, each in measured.items()]

    def bytes_per_parameter(self) -> float:
        return bytes_per_parameter(self.optimizer)

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        if self.options.get("strategy") == "none":
            self.model.load_state_dict(weights)
        else:
            load_full_state_dict(self.model, self.optimizer, weights)


class Eager:
    """An optimizer of ``optimizers.py``."""

    def __init__(self, model: GPT, recipe: Recipe, making: Making, measure_every: int) -> None:
        self.parameters = list(model.parameters())
        self.names = [name for name, _ in model.named_parameters()]
        self.optimizer = EagerAdamW(self.parameters, making, recipe.betas, recipe.weight_decay)
        self.measure_every = measure_every
        self.measured: list[tuple[int, float, float]] = []

    def step(self, lr: float, number: int) -> None:
        if number % self.measure_every:
            self.optimizer.step(lr)
            return
        sums = Measured()
        self.optimizer.step(lr, sums)
        self.measured.append((number, sums.along / sums.intended, sums.lost / sums.asked))

    def weights(self) -> list[Tensor]:
        return [kept.value() for kept in self.optimizer.weights]

    def second_moments(self) -> list[Tensor]:
        return [kept.value() for kept in self.optimizer.second]

    def points(self) -> list[tuple[int, float, float]]:
        return self.measured

    def bytes_per_parameter(self) -> float:
        kept = sum(tensor.nbytes for tensor in self.optimizer.tensors())
        return kept / sum(p.numel() for p in self.parameters)

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.optimizer.load_weights([weights[name] for name in self.names])


# A training. ------------------------------------------------------------------------------------------------


class Curves:
    """What a training shows as it goes on, and what it has to keep for that."""

    def __init__(self, parameters: Sequence[Tensor], beta2: float) -> None:
        self.beta2 = beta2
        self.exact = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
        self.points: dict[str, list[list[float]]] = {
            name: [] for name in ("loss", "edq_ratio", "lost_share", "weight_norm", "v_mean", "v_exact")
        }

    def follow(self, parameters: Sequence[Tensor]) -> None:
        """The second moments in float64, of the very gradients that the optimizer gets."""
        for parameter, value in zip(parameters, self.exact, strict=True):
            assert parameter.grad is not None
            gradient = parameter.grad.double()
            value.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)

    def take(self, number: int, loss: float, stepper: Stepper) -> None:
        """A point of each curve."""
        self.points["loss"].append([number, loss])
        norm = math.sqrt(sum(w.double().square().sum().item() for w in stepper.weights()))
        self.points["weight_norm"].append([number, norm])
        for name, moments in (("v_mean", stepper.second_moments()), ("v_exact", self.exact)):
            count = sum(v.numel() for v in moments)
            self.points[name].append([number, sum(v.double().sum().item() for v in moments) / count])

    def second_moment_error(self, stepper: Stepper) -> float:
        """Mean relative error of the optimizer's second moments where they are not zero."""
        errors = [
            (stored.double() / exact - 1).abs()[exact > 0]
            for stored, exact in zip(stepper.second_moments(), self.exact, strict=True)
        ]
        return torch.cat(errors).mean().item()


def train(cell: Cell, folder: Path, device: str, deadline: float) -> Record | None:
    """Train a cell from where it was left.

    Args:
        cell: what to train.
        folder: for checkpoints.
        device: where.
        deadline: of time.time(); past it the training is put into `folder`.

    Returns:
        What it showed, or None if there was not time enough.
    """
    if time.time() > deadline:
        return None
    begun_at = time.perf_counter()
    setting, recipe = cell.setting, recipe_of(cell.setting, cell.draw())
    text = text_of(setting.task)
    model = model_of(setting.task, recipe).to(device, torch.bfloat16)
    every = max(1, recipe.steps // POINTS)
    strategy = STRATEGIES[cell.strategy]
    stepper: Stepper
    if isinstance(strategy.made, Making):
        stepper = Eager(model, recipe, strategy.made, every)
    else:
        stepper = Compiled(model, recipe, strategy.made, every)
    if start := setting.start():
        known = torch.load(started(cell, start, folder, device), map_location=device)
        stepper.load_weights({**model.state_dict(), **known})  # a head has no start
    parameters = list(model.parameters())
    curves = Curves(parameters, setting.beta2)

    left = folder / f"{zlib.crc32(repr(cell).encode()):08x}.pt"
    begun = 0
    if left.exists():
        begun, seconds = _go_on(left, model, stepper, curves)
        begun_at -= seconds
    for number in range(begun + 1, recipe.steps + 1):
        model.zero_grad()
        batch = batch_at(text.training, setting.task, recipe, recipe.batch, number)
        loss_of(model, *(each.to(device) for each in batch)).backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        curves.follow(parameters)
        stepper.step(strategy.rate * recipe.lr(number - 1), number)
        if number % every == 0 or number == recipe.steps:
            curves.take(number, validate(model, text, setting.task, recipe, device), stepper)
            if time.time() > deadline and number < recipe.steps:
                _leave(left, number, time.perf_counter() - begun_at, model, stepper, curves)
                return None
    _take_measured(stepper, curves)
    left.unlink(missing_ok=True)
    return {
        **cell.key(),
        "steps": recipe.steps,
        "parameters": sum(p.numel() for p in parameters),
        "bytes": stepper.bytes_per_parameter(),
        "loss": curves.points["loss"][-1][1],
        **(
            {"accuracy": accuracy(model, text, setting.task, recipe, device)}
            if setting.task == "sources"
            else {}
        ),
        "v_error": curves.second_moment_error(stepper),
        "seconds": time.perf_counter() - begun_at,
        "curves": curves.points,
    }


def _take_measured(stepper: Stepper, curves: Curves) -> None:
    for number, edq_ratio, lost_share in stepper.points():
        curves.points["edq_ratio"].append([number, edq_ratio])
        curves.points["lost_share"].append([number, lost_share])


def _leave(
    path: Path, number: int, seconds: float, model: nn.Module, stepper: Stepper, curves: Curves
) -> None:
    _take_measured(stepper, curves)
    state = {
        "number": number,
        "seconds": seconds,
        "model": model.state_dict(),
        "optimizer": stepper.optimizer.state_dict(),
        "points": curves.points,
        "exact": curves.exact,
    }
    save(state, path)


def _go_on(path: Path, model: nn.Module, stepper: Stepper, curves: Curves) -> tuple[int, float]:
    """Load what was left; how many steps have been taken, and in how many seconds."""
    state = torch.load(path, map_location=next(model.parameters()).device)
    model.load_state_dict(state["model"])
    stepper.optimizer.load_state_dict(state["optimizer"])
    curves.points, curves.exact = state["points"], state["exact"]
    return state["number"], state["seconds"]
