"""``python -m benchmarks.munit_scaling``: train with the layers of μnit Scaling, for docs/unit-scaling.md.

μnit Scaling [1] trains in FP8 with static scales, and with weights that begin with a variance of 1:

- a hidden linear layer multiplies its result, and the gradients in the backward pass, by 1 / sqrt(fan in);
  the head multiplies by 1 / fan in
- a norm is the last operation of each residual branch, and the sum of both is fixed:
  sqrt(1 - tau) x + sqrt(tau) branch(x)
- factors of hidden layers' products are e4m3, for gradients e5m2, without scales of tensors; embedding and
  head stay as stored
- learning rates of hidden layers are divided by sqrt(fan in); the decay does not depend on them

The shapes are those of ``examples/train_unit_scaled.py``, with its norms, which have no weights, and with
unit scaling's loss, whose gradients begin near 1. FP8 is emulated as in ``benchmarks/narrow_products.py``. It
takes some minutes.

[1] Narayan et al., μnit Scaling: Simple and Scalable FP8 LLM Training, ICML 2025, arXiv:2502.05967
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import unit_scaling.functional as U
from torch import Tensor, nn

from benchmarks.narrow_products import PRODUCTS, NarrowProducts, Rounding, write_table
from benchmarks.table import place
from examples.train_gpt import VOCABULARY, Recipe
from examples.train_unit_scaled import Family, PlainLayer

PLACE = place("unit-scaling.md", "munit_scaling")
#: Share of a branch in the variance of its sum.
TAU = 0.4
#: Best of 0.1, 0.3, 1 and 3 in float32.
LR = 1.0


class Hidden(nn.Linear):
    """Linear layer with weights of variance 1 and a static scale."""

    roundings: tuple[Rounding, Rounding] | None = None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.in_features**-0.5
        if self.roundings is None:
            return F.linear(x, self.weight) * scale
        with NarrowProducts(*self.roundings):
            product = F.linear(x, self.weight)
        return product * scale


class Layer(PlainLayer):
    """Attention and a gated MLP, each with its norm at the end of the branch."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        for name, each in [*self.named_children()]:
            if isinstance(each, nn.Linear):
                setattr(self, name, Hidden(each.in_features, each.out_features))

    def forward(self, x: Tensor) -> Tensor:
        x = _fixed_sum(x, self.attention_norm(self.attention_out(self.attend(x))))
        gated = self.mlp_in(x) * F.silu(self.mlp_gate(x))
        return _fixed_sum(x, self.mlp_norm(self.mlp_out(gated)))


def _fixed_sum(x: Tensor, branch: Tensor) -> Tensor:
    return math.sqrt(1 - TAU) * x + math.sqrt(TAU) * branch


class Head(nn.Linear):
    """Linear layer with weights of variance 1, whose result is divided by the number of inputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) / self.in_features


def layers(recipe: Recipe, roundings: tuple[Rounding, Rounding] | None) -> nn.Sequential:
    made = nn.Sequential(
        nn.Embedding(VOCABULARY, recipe.width),
        *(Layer(recipe.width, recipe.heads) for _ in range(recipe.layers)),
        nn.RMSNorm(recipe.width, eps=1e-5, elementwise_affine=False),
        Head(recipe.width, VOCABULARY),
    )
    for each in made.modules():
        if isinstance(each, Hidden):
            each.roundings = roundings
    return made


class AdamW(torch.optim.AdamW):
    """AdamW with learning rates of hidden layers divided by sqrt(fan in); decay does not depend on them."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: Tensor, weight_decay: float, **options: Any
    ) -> None:
        embedding, *hidden, head = parameters
        groups = [{"params": [embedding, head], "lr": lr, "weight_decay": weight_decay / float(lr)}]
        for inputs in sorted({each.shape[1] for each in hidden}):
            rate = lr / math.sqrt(inputs)
            same = [each for each in hidden if each.shape[1] == inputs]
            groups.append({"params": same, "lr": rate, "weight_decay": weight_decay / float(rate)})
        super().__init__(groups, **options)


def family(products: str, lr: float = LR) -> Family:
    """Return the layers with products of other numbers, and their AdamW."""
    made = partial(layers, roundings=PRODUCTS[products])
    return Family("μnit-scaled", made, U.cross_entropy, AdamW, lr=lr, weight_decay=1e-4, eps=1e-8)


def families() -> dict[str, Family]:
    return {products: family(products) for products in ("as stored", "FP8")}


if __name__ == "__main__":
    write_table(families(), PLACE, "Train with the layers of μnit Scaling.")
