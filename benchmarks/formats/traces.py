"""Gradients to replay: made to be hard on quantised moments, recorded from a training, and their lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from examples.train_gpt import GPT, Recipe, Text, batches, gradient_of, loss_of


@dataclass(frozen=True)
class Trace:
    """Gradients of pieces of tensors, step after step.

    Attributes:
        gradients: bfloat16 [steps, batch, pieces, length]; no block reaches over the end of a piece.
        pieces: their names.
        batch: names of what the pieces are there for more than once, such as seeds.
    """

    gradients: Tensor
    pieces: tuple[str, ...]
    batch: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.gradients)


# Hard. ------------------------------------------------------------------------------------------------------

#: Scale of hard gradients; where it varies, the median.
SCALE = 1e-4


def hard_trace(seeds: tuple[int, ...] = (3, 5, 7), steps: int = 1500, length: int = 1024) -> Trace:
    """Nine kinds of gradients that 8 bits with a common scale are in trouble with."""
    found = [hard_gradients(seed, steps, length) for seed in seeds]
    stacked = torch.stack([torch.stack([*each.values()], 1) for each in found], 1)
    return Trace(stacked.bfloat16(), tuple(found[0]), tuple(map(str, seeds)))


def hard_gradients(seed: int, steps: int, length: int) -> dict[str, Tensor]:
    """The nine kinds, float32 [steps, length] each.

    Elements have a scale of their own, lognormal. "Noisy" is normal about a tenth of another normal number.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    def scales(sigma: float) -> Tensor:
        return (normal(length) * sigma).exp() * SCALE

    def noisy() -> Tensor:
        return normal(steps, length) + 0.1 * normal(length)

    time = torch.arange(steps)[:, None].float()
    period = torch.randint(2, 22, (length,), generator=generator)
    student = normal(steps, length) / ((normal(steps, length) ** 2 + normal(steps, length) ** 2) / 2).sqrt()
    return {
        "gauss": scales(1) * noisy(),
        "spread": scales(3) * noisy(),
        "sparse 1 %": scales(1) * normal(steps, length) * (uniform(steps, length) < 0.01),
        "rows 5 %": scales(1)
        * normal(steps, length)
        * (uniform(steps, length // 32) < 0.05).repeat_interleave(32, 1),
        "student t2": scales(1) * student,
        "decay to 1e-4": scales(1) * noisy() * 10 ** (-4 * time / steps),
        "tiny 1e-7": scales(1) * 1e-3 * noisy(),
        "periodic": scales(1) * (time % period == 0) * (1 + 0.1 * normal(steps, length)),
        "constant": scales(1) * torch.ones(steps, 1) * torch.sign(normal(length)),
    }


# Recorded. --------------------------------------------------------------------------------------------------

#: What is trained for the recorded trace.
RECIPE = Recipe(steps=1500, width=96, longest_warmup=50, final_lr=0.0, betas=(0.9, 0.95))
QUICK_RECIPE = replace(RECIPE, steps=100, batch=2, context=16, width=32, heads=2, layers=1)

#: Elements of a piece, and pieces of a matrix.
LENGTH, PIECES = 1024, 2


def recorded_trace(recipe: Recipe, progress: Callable[[str], None]) -> Trace:
    """Gradients of a byte-level GPT in bfloat16 that trains on the standard library with float32 masters.

    Of each matrix the beginning and the middle, aligned to 1024 elements, but for the table of positions.
    """
    torch.manual_seed(recipe.seed)
    model = GPT(recipe).bfloat16()
    parameters = list(model.parameters())
    masters = [nn.Parameter(each.detach().float()) for each in parameters]
    optimizer = torch.optim.AdamW(masters, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True)
    names = {
        f"{name.removesuffix('.weight')} [{place}]": (parameter, place)
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and name != "positions"
        for place in (parameter.numel() * i // PIECES // LENGTH * LENGTH for i in range(PIECES))
    }
    data = batches(Text.of_standard_library().training, recipe.batch, recipe.context, recipe.seed, "cpu")
    gradients, loss = [], math.nan
    for step in range(recipe.steps):
        if step % 100 == 0:
            progress(f"recording gradients, step {step} of {recipe.steps}, loss {loss:.3f}")
        loss_tensor = loss_of(model, *next(data))
        model.zero_grad()
        loss_tensor.backward()
        loss = loss_tensor.item()
        nn.utils.clip_grad_norm_(parameters, recipe.clip)
        gradients.append(
            torch.stack([gradient_of(p).flatten()[at : at + LENGTH].clone() for p, at in names.values()])
        )
        optimizer.param_groups[0]["lr"] = recipe.lr(step)
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = gradient_of(parameter).float()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    return Trace(torch.stack(gradients)[:, None], tuple(names), ("recorded",))


# For lengths. -----------------------------------------------------------------------------------------------


def correlated_updates(steps: int, count: int, seed: int = 0) -> Iterator[Tensor]:
    """Updates in units of the learning rate, float32 [count] each: an AR(1) process about a drift.

    The process is 0.3 of a standard one with a correlation of 0.9 from step to step; the drift is 0.12 of a
    standard normal number for each element. So displacements grow with the length, as in a training.
    """
    generator = torch.Generator().manual_seed(seed)
    drift = 0.12 * torch.randn(count, generator=generator)
    state = torch.randn(count, generator=generator)
    for _ in range(steps):
        state = 0.9 * state + math.sqrt(1 - 0.9**2) * torch.randn(count, generator=generator)
        yield drift + 0.3 * state
