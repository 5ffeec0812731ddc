"""AdamW on recorded gradients, with its state stored in one way or another between steps, against float64.

A step computes in float32 from what was loaded, and stores what it has computed: the update is made of the
new moments before they are rounded, as all of the compared projects do it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.formats.encodings import Encoding, Plain
from benchmarks.formats.rows import TORCH, Row
from benchmarks.formats.traces import Trace, correlated_updates

BETA1, EPS, WEIGHT_DECAY, WARMUP = 0.9, 1e-8, 0.1, 50
BETA2S = (0.95, 0.999)

#: Second moments are compared after every so many steps of the second half of a run.
COMPARED_EVERY = 25


@dataclass(frozen=True)
class Cell:
    """Weights of a normal distribution, and the peak of the learning rate."""

    std: float
    lr: float

    def __str__(self) -> str:
        return f"N(0, {self.std:g}), lr {self.lr:.0e}".replace("e-0", "e-")


CELLS = tuple(Cell(std, lr) for std in (1.0, 0.02) for lr in (1e-5, 1e-4, 1e-3))
HARD_CELLS = (Cell(0.02, 1e-3),)


def learning_rate(step: int, steps: int) -> float:
    """In units of its peak: a linear warm-up, then a cosine down to 0; steps count from 0."""
    warmup = min(WARMUP, steps // 4)
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


@dataclass
class Run:
    """What one way to store the state has led to.

    Attributes:
        moved: net displacement of the weights, float64 [beta2s, cells, batch, pieces, length].
        seconds: second moments as they were stored, [beta2s, batch, pieces, length] at compared steps.
        largest_update: largest magnitude of an update in units of the learning rate, [beta2s, batch].
    """

    moved: Tensor
    seconds: list[Tensor]
    largest_update: Tensor


@torch.no_grad()
def replay(row: Row, trace: Trace, cells: Sequence[Cell], dtype: torch.dtype = torch.float32) -> Run:
    """Replay a trace from the same weights, which are bfloat16 numbers, for each row.

    Args:
        row: how to store the state.
        trace: gradients.
        cells: distributions of weights and learning rates, all replayed at once, with every one of BETA2S.
        dtype: in which to compute.
    """
    steps, *shape = trace.gradients.shape
    torch.manual_seed(0)
    standard = torch.randn(shape)
    start = torch.stack([(standard * cell.std).bfloat16() for cell in cells]).to(dtype)
    beta2 = torch.tensor(BETA2S, dtype=torch.float64)[:, None, None, None]
    b2, rest2 = beta2.to(dtype), (1 - beta2).to(dtype)
    rates = torch.tensor([cell.lr for cell in cells], dtype=torch.float64)[:, None, None, None]

    weights = row.weight.store(start.expand(len(BETA2S), *start.shape), None)
    started = row.weight.load(weights).double()
    first = row.first.store(torch.zeros(shape, dtype=dtype), None)
    second = row.second.store(torch.zeros(len(BETA2S), *shape, dtype=dtype), None)
    seconds: list[Tensor] = []
    largest = torch.zeros(len(BETA2S), shape[0], dtype=dtype)
    for t in range(1, steps + 1):
        gradient = trace.gradients[t - 1].to(dtype)
        m = row.first.load(first) * BETA1 + gradient * (1 - BETA1)
        v = row.second.load(second) * b2 + gradient.square() * rest2
        first, second = row.first.store(m, first), row.second.store(v, second)
        correction2 = (1 - beta2**t).sqrt().to(dtype)
        update = m / (1 - BETA1**t) / (v.sqrt() / correction2 + EPS)
        largest = torch.maximum(largest, update.abs().amax((-1, -2)))
        rate = rates * learning_rate(t - 1, steps)
        change = -rate.to(dtype) * update[:, None]
        weights = row.weight.update(weights, (rate * WEIGHT_DECAY).to(dtype), change)
        if 2 * t > steps and t % COMPARED_EVERY == 0:
            seconds.append(row.second.load(second))
    return Run(row.weight.load(weights).double() - started, seconds, largest)


EXACTLY = Row("float64", TORCH, *(Plain(torch.float64),) * 3)


def reference(trace: Trace, cells: Sequence[Cell]) -> Run:
    """The run that others are compared with: nothing is rounded but to float64."""
    return replay(EXACTLY, trace, cells, torch.float64)


@dataclass(frozen=True)
class Errors:
    """A run's differences from the reference; as lists, for they are written to a file.

    Attributes:
        whole: ``‖d − d64‖ / ‖d64‖`` of the net displacements d, [beta2s][cells][batch].
        pieces: the same of each piece, [beta2s][cells][batch][pieces].
        second_rms: root mean square relative error of stored second moments, [beta2s]; of those not zero.
        second_bias: their mean relative error.
        largest_update: [beta2s][batch].
    """

    whole: list[list[list[float]]]
    pieces: list[list[list[list[float]]]]
    second_rms: list[float]
    second_bias: list[float]
    largest_update: list[list[float]]


def errors(run: Run, exact: Run) -> Errors:
    difference = run.moved - exact.moved
    whole = (-1, -2)
    squares, totals = torch.zeros(2, len(BETA2S), dtype=torch.float64)
    counted = 0
    for stored, wanted in zip(run.seconds, exact.seconds, strict=True):
        relative = torch.where(wanted > 0, stored.double() / wanted - 1, 0)
        squares += relative.square().sum((1, 2, 3))
        totals += relative.sum((1, 2, 3))
        counted += int((wanted[0] > 0).sum())
    return Errors(
        (difference.norm(dim=whole) / exact.moved.norm(dim=whole)).tolist(),
        (difference.norm(dim=-1) / exact.moved.norm(dim=-1)).tolist(),
        (squares / counted).sqrt().tolist(),
        (totals / counted).tolist(),
        run.largest_update.tolist(),
    )


@torch.no_grad()
def error_of_length(encoding: Encoding, steps: int, count: int = 2048, lr: float = 1e-5) -> float:
    """``‖d − d64‖ / ‖d64‖`` of weights N(0, 1) after so many updates; the rate is a cosine down to 0."""
    torch.manual_seed(1)
    start = torch.randn(count).bfloat16().float()
    state, exact, no_decay = encoding.store(start, None), start.double(), torch.zeros(())
    for step, update in enumerate(correlated_updates(steps, count), 1):
        rate = lr * (1 + math.cos(math.pi * (step - 1) / steps)) / 2
        state = encoding.update(state, no_decay, -rate * update)
        exact -= rate * update.double()
    wanted = exact - start.double()
    return float((encoding.load(state).double() - start.double() - wanted).norm() / wanted.norm())
