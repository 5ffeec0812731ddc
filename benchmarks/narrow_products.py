"""``python -m benchmarks.narrow_products``: train with products of 8 and 4 bits, for docs/unit-scaling.md.

A CPU multiplies no such numbers. So the factors of each linear layer are rounded to them, and the product is
computed as before: weights and inputs in the forward pass, gradients of outputs in the backward pass. FP8 is
e4m3, for gradients e5m2, without scales; NVFP4 is e2m1 in blocks of 16, rounded at random for gradients.
Weights stay as they are stored, and the optimizer steps them: float32 numbers, as masters, or bfloat16
numbers without and with error terms. The layers are those of ``examples/train_unit_scaled.py``. It takes some
minutes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.table import markdown, place, put_between
from examples.train_gpt import QUICK, Recipe, Text
from examples.train_unit_scaled import UNIT_SCALED, Family, train

PLACE = place("unit-scaling.md", "narrow_products")
RECIPE, SEEDS = Recipe(steps=120), 3

Rounding = Callable[[Tensor], Tensor]

#: Numbers of e2m1 that are not negative, and how many share a scale in NVFP4.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCK = 16
LARGEST_E4M3 = torch.finfo(torch.float8_e4m3fn).max


def e4m3(x: Tensor) -> Tensor:
    """Round to e4m3, without a scale; what is larger than its numbers becomes the largest."""
    return x.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn).to(x.dtype)


def e5m2(x: Tensor) -> Tensor:
    """Round to e5m2, without a scale."""
    return x.to(torch.float8_e5m2).to(x.dtype)


def nvfp4(x: Tensor, *, stochastic: bool = False) -> Tensor:
    """Round to e2m1 with an e4m3 scale for each block of a row, and a float32 scale for the tensor."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    tensor_scale = (blocks.abs().amax() / (E2M1[-1] * LARGEST_E4M3)).clamp_min(torch.finfo().tiny)
    scale = tensor_scale * e4m3(blocks.abs().amax(-1, keepdim=True) / (E2M1[-1] * tensor_scale))
    size = torch.where(scale > 0, blocks.abs() / scale, 0).clamp_max(E2M1[-1])
    above = torch.bucketize(size, E2M1).clamp_min(1)
    low, high = E2M1[above - 1], E2M1[above]
    share = (size - low) / (high - low)
    up = share > (torch.rand_like(share) if stochastic else 0.5)
    return (torch.where(up, high, low) * scale).copysign(blocks).flatten(-2).to(x.dtype)


def nvfp4_stochastic(x: Tensor) -> Tensor:
    """Round to NVFP4 up or down at random, so that nothing is lost on average."""
    return nvfp4(x, stochastic=True)


class RoundForward(torch.autograd.Function):
    """A rounding that the backward pass takes for the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Rounding) -> Tensor:
        return rounding(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class RoundBackward(torch.autograd.Function):
    """The identity, with a rounding of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Rounding) -> Tensor:
        ctx.rounding = rounding
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.rounding(gradient), None


class NarrowProducts(TorchFunctionMode):
    """Context manager: round the factors of linear layers."""

    def __init__(self, forward: Rounding, backward: Rounding) -> None:
        super().__init__()
        self.forward, self.backward = forward, backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        factors = (RoundForward.apply(each, self.forward) for each in args[:2])
        return RoundBackward.apply(func(*factors, *args[2:], **(kwargs or {})), self.backward)


#: Numbers of products, and the roundings of forward and backward passes.
PRODUCTS: dict[str, tuple[Rounding, Rounding] | None] = {
    "as stored": None,
    "FP8": (e4m3, e5m2),
    "NVFP4": (nvfp4, nvfp4_stochastic),
}

#: How weights and state are stored, and the strategy of ``examples/train_unit_scaled.py``.
STORED = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, "none"),
    "bfloat16, error terms": (torch.bfloat16, "exact"),
    "bfloat16, 4.1 bytes": (torch.bfloat16, "4.1 bytes"),
}


def layers_with(roundings: tuple[Rounding, Rounding] | None) -> Callable[[Recipe], nn.Sequential]:
    """Return a function that makes unit-scaled layers whose products are of other numbers."""

    def layers(recipe: Recipe) -> nn.Sequential:
        made = UNIT_SCALED.layers(recipe)
        inner = made.forward

        def forward(text: Tensor) -> Tensor:
            if roundings is None:
                return inner(text)
            with NarrowProducts(*roundings):
                return inner(text)

        made.forward = forward  # type: ignore[method-assign]
        return made

    return layers


def trainings(families: Mapping[str, Family], recipe: Recipe, seeds: int) -> str:
    """Train each family with weights and state as in :data:`STORED`; return the table of losses and errors.

    Args:
        families: name of the products -> layers with these products, of one name.
        recipe: the training.
        seeds: number of trainings of each kind.
    """
    text = Text.of_standard_library()
    rows = []
    for stored, (dtype, strategy) in STORED.items():
        losses, errors = [], []
        for family in families.values():
            runs = [train(family, dtype, strategy, replace(recipe, seed=s), text) for s in range(seeds)]
            losses.append(f"{statistics.fmean(run.loss for run in runs):.4f}")
            errors.append(f"{statistics.fmean(run.displacement_error for run in runs):.2g}")
        rows.append([stored, *losses, *errors])
    headers = ("weights, state", *(f"{what}, {each}" for what in ("loss", "error") for each in families))
    version = torch.__version__.partition("+")[0]
    (kind,) = {family.name for family in families.values()}
    about = f"{recipe.steps} steps of a {kind} GPT, means of {seeds} seeds, torch {version}:"
    return f"{about}\n\n{markdown(headers, rows)}"


def write_table(families: Mapping[str, Family], where: tuple[Path, str, str], description: str) -> None:
    """Write the table of :func:`trainings` into a page, or print that of a tiny model: a command."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a tiny model; print the table alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        print(trainings(families, QUICK, 1))
        return
    put_between(*where, trainings(families, RECIPE, SEEDS))


def families() -> dict[str, Family]:
    return {name: replace(UNIT_SCALED, layers=layers_with(roundings)) for name, roundings in PRODUCTS.items()}


if __name__ == "__main__":
    write_table(families(), PLACE, "Train with products of 8 and 4 bits.")
