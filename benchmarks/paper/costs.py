"""What strategies cost beside fp32 master weights: bytes and time, measured in turn in one process."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.__main__ import machine
from benchmarks.paper.settings import Setting
from benchmarks.paper.training import batch_at, recipe_of, text_of
from benchmarks.peers import PEERS
from examples.train_gpt import GPT, loss_of

MASTERS = "bf16 + fp32 master, fused"
ROUNDS = 15

#: Bytes a parameter of weights, moments, error terms and copies; two for the gradient come to all of them.
KEPT = {
    "torch bf16 fused": 6.0,
    "light, mcf": 8.0,
    "plus, mcf": 10.0,
    "light": 8.0,
    "plus": 10.0,
    "light, byte": 7.0,
    "light, byte, block8": 5.06,
    MASTERS: 14.0,
}


def measure_costs(size: str, device: str) -> list[dict[str, Any]]:
    """A row for each optimizer: the time of its step and of a training's, over D's of the same round."""
    recipe = recipe_of(Setting(size=size), 0)
    torch.manual_seed(0)
    model = GPT(recipe).to(device, torch.bfloat16)
    batch = [
        each.to(device) for each in batch_at(text_of("bytes").training, "bytes", recipe, recipe.batch, 0)
    ]
    loss_of(model, *batch).backward()
    parameters = list(model.parameters())
    steps: dict[str, Callable[[], Any]] = {name: PEERS[name].make(_copies(parameters)) for name in KEPT}
    for step in steps.values():
        for _ in range(4):  # the first compile
            step()
    rounds: list[dict[str, float]] = []
    passes: list[float] = []
    for _ in range(ROUNDS):
        passes.append(_seconds(lambda: _gradients(model, batch), device))
        rounds.append({name: _seconds(step, device) for name, step in steps.items()})
    return [
        {
            "optimizer": name,
            "bytes": kept,
            "step_ms": 1e3 * statistics.median(each[name] for each in rounds),
            "step_ratio": statistics.median(each[name] / each[MASTERS] for each in rounds),
            "training_ratio": statistics.median(
                (both + each[name]) / (both + each[MASTERS])
                for both, each in zip(passes, rounds, strict=True)
            ),
            "passes_ms": 1e3 * statistics.median(passes),
            "parameters": sum(p.numel() for p in parameters),
            "tokens": recipe.batch * recipe.context,
            "threads": torch.get_num_threads(),
            "machine": machine(device),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        for name, kept in KEPT.items()
    ]


def _copies(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Weights of its own for an optimizer, with the gradients of the model."""
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    for copy, parameter in zip(copies, parameters, strict=True):
        copy.grad = parameter.grad
    return copies


def _gradients(model: GPT, batch: list[torch.Tensor]) -> None:
    model.zero_grad(set_to_none=False)
    loss_of(model, *batch).backward()


def _seconds(work: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
