"""Train a small GPT of unit-scaled layers in pure bfloat16 and in pure float16, and the same GPT of torch's.

Unit Scaling [1, 2] puts a constant factor on each operation, another one in the backward pass, such that
weights, activations and gradients begin with a standard deviation of about 1. float16 is dense there and
has room on both sides, so nothing has to scale the loss. The package ``unit-scaling`` has such layers, and
optimizers that give each weight the learning rate that goes with its shape. Collage keeps what the update of
such a weight loses:

    model = unit_scaling.TransformerDecoder(width, vocabulary, layers, heads).half()
    optimizer = unit_scaling.optim.AdamW(model.parameters(), lr=1.0, eps=2**-12)
    collage_fx.install(optimizer, error_format="exact")

Both models have the same shapes, see the same bytes (train_gpt.py's) and are trained without loss scaling,
autocast and clipping: in float32; and with weights, activations, gradients and optimizer state all in 16
bits, without error terms (none) and with those of strategy ``plus`` in two formats (mcf, exact), and, if
asked for, with packed weights and moments (4.1 bytes). There are two tables. The first is of training, means
over seeds, ± their standard deviation:

    validation loss      in nats per byte
    displacement error   how far hi + lo ends from AdamW in float64 on the very gradients that this run had,
                         relative to the distance that float64 has gone
    v lost               share of second moments that are 0 where float64's are not

The second shows what becomes of numbers of the float32 runs in formats of fewer bits. It takes the weights
of their ends, and one batch in float32 and in float16:

    lost         share of the numbers that are not 0, but 0 in the format
    subnormal    share of those below the format's normal numbers, where bits are missing, and not lost
    overflows    how many are infinite or NaN
    rms error    norm of the errors relative to the norm of the numbers, in the tensor where that is largest

[1] Blake et al., Unit Scaling: Out-of-the-Box Low-Precision Training, ICML 2023, arXiv:2303.11257
[2] Blake et al., u-μP: The Unit-Scaled Maximal Update Parametrization, ICLR 2025, arXiv:2407.17465

    python -m examples.train_unit_scaled [--steps 300] [--seeds 1] [--eps 1e-8] [--quick]
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import unit_scaling
import unit_scaling.functional as U
from tabulate import tabulate
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from collage_fx import full_value, install
from examples.train_gpt import (
    QUICK,
    VOCABULARY,
    Recipe,
    Text,
    batches,
    fast_products,
    gradient_of,
    validate,
)

# Models. ----------------------------------------------------------------------------------------------------


class PlainLayer(nn.Module):
    """What ``unit_scaling.TransformerLayer`` is without its scales: causal attention and a gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_gate = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)
        self.attention_norm, self.mlp_norm = (
            nn.RMSNorm(width, eps=1e-5, elementwise_affine=False) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_out(self.attend(self.attention_norm(x)))
        normed = self.mlp_norm(x)
        return x + self.mlp_out(self.mlp_in(normed) * F.silu(self.mlp_gate(normed)))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.queries_keys_values(x).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, length, width)


def plain_layers(recipe: Recipe) -> nn.Sequential:
    """The layers of ``unit_scaling.TransformerDecoder``, without scales and with nanoGPT's first weights."""
    layers = nn.Sequential(
        nn.Embedding(VOCABULARY, recipe.width),
        *(PlainLayer(recipe.width, recipe.heads) for _ in range(recipe.layers)),
        nn.RMSNorm(recipe.width, eps=1e-5, elementwise_affine=False),
        nn.Linear(recipe.width, VOCABULARY, bias=False),
    )
    for name, weight in layers.named_parameters():
        residual = name.endswith("_out.weight")
        nn.init.normal_(weight, std=0.02 / math.sqrt(2 * recipe.layers) if residual else 0.02)
    return layers


def unit_scaled_layers(recipe: Recipe) -> nn.Sequential:
    layers: nn.Sequential = unit_scaling.TransformerDecoder(
        recipe.width, VOCABULARY, recipe.layers, recipe.heads
    )
    return layers


class Decoder(nn.Module):
    """Layers, with matrix products in float32 on a CPU that has no others."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, text: Tensor) -> Tensor:
        with fast_products(text.device.type):
            logits: Tensor = self.layers(text)
            return logits


@dataclass(frozen=True)
class Family:
    """Layers, and the loss and optimizer that go with them."""

    name: str
    layers: Callable[[Recipe], nn.Sequential]
    cross_entropy: Callable[[Tensor, Tensor], Tensor]
    adamw: type[torch.optim.AdamW]
    lr: float  # the best of some, for 300 steps in float32
    weight_decay: float  # as adamw understands it: both take off 1e-4 a step at the peak
    eps: float

    def loss_of(self, model: nn.Module, text: Tensor, following: Tensor) -> Tensor:
        """Of 16-bit logits; their exponentials alone are summed in float32, as is customary."""
        return self.cross_entropy(model(text).float().flatten(0, 1), following.flatten())


PLAIN = Family("plain", plain_layers, F.cross_entropy, torch.optim.AdamW, lr=1e-3, weight_decay=0.1, eps=1e-8)
UNIT_SCALED = Family(
    "unit-scaled",
    unit_scaled_layers,
    U.cross_entropy,
    unit_scaling.optim.AdamW,
    lr=1.0,
    weight_decay=1e-4,
    # A second moment below float16's smallest number, 2**-24, is stored as 0, and eps alone then divides. Its
    # root is small beside gradients of about 1; those of a plain model may all be smaller.
    eps=2**-12,
)
FAMILIES = (PLAIN, UNIT_SCALED)

STRATEGIES: dict[str, dict[str, Any]] = {
    "none": {"strategy": "none"},
    "mcf": {"strategy": "plus", "error_format": "mcf"},
    "exact": {"strategy": "plus", "error_format": "exact"},
    "4.1 bytes": {"bytes_per_parameter": 4.1},
}


# Training. --------------------------------------------------------------------------------------------------


class ExactOptimizer:
    """AdamW in float64 from the same weights, on the very gradients that another AdamW gets."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.start = [p.detach().double() for p in self.parameters]
        self.copies = [start.clone() for start in self.start]
        remaining = iter(self.copies)
        self.exact = torch.optim.AdamW(
            [
                {**group, "params": [next(remaining) for _ in group["params"]]}
                for group in optimizer.param_groups
            ]
        )

    def follow(self) -> None:
        """Take the step that the other is about to take."""
        for parameter, exact in zip(self.parameters, self.copies, strict=True):
            exact.grad = None if parameter.grad is None else parameter.grad.double()
        for group, exact_group in zip(self.optimizer.param_groups, self.exact.param_groups, strict=True):
            exact_group["lr"] = float(group["lr"])
        self.exact.step()

    def displacement_error(self) -> float:
        off = norm(full_value(p).double() - e for p, e in zip(self.parameters, self.copies, strict=True))
        return off / norm(e - start for e, start in zip(self.copies, self.start, strict=True))

    def lost_second_moments(self) -> float:
        """Share of those that are 0, hi + lo, among those that are not in float64."""
        pairs = [
            (full_value(self.optimizer.state[p]["exp_avg_sq"]), self.exact.state[e]["exp_avg_sq"])
            for p, e in zip(self.parameters, self.copies, strict=True)
        ]
        lost = sum(int(((stored == 0) & (exact != 0)).sum()) for stored, exact in pairs)
        return lost / sum(int((exact != 0).sum()) for _, exact in pairs)


def norm(tensors: Iterable[Tensor]) -> float:
    """The 2-norm of all elements of all tensors."""
    return math.sqrt(sum(float(tensor.detach().double().square().sum()) for tensor in tensors))


@dataclass(frozen=True)
class Run:
    """One training: what it was of, and what it led to."""

    family: Family
    dtype: torch.dtype
    strategy: str | None
    model: nn.Module
    optimizer: Optimizer
    loss: float
    displacement_error: float
    second_moments_lost: float


def train(family: Family, dtype: torch.dtype, strategy: str | None, recipe: Recipe, text: Text) -> Run:
    """Train a model whose numbers are all in ``dtype``; without a strategy, by the optimizer as it is."""
    torch.compiler.reset()
    torch.manual_seed(recipe.seed)
    model = Decoder(family.layers(recipe)).to(dtype)
    optimizer = family.adamw(
        model.parameters(),
        lr=torch.tensor(family.lr),  # a tensor can follow a schedule without a recompilation
        betas=recipe.betas,
        eps=family.eps,
        weight_decay=family.weight_decay,
    )
    exact = ExactOptimizer(optimizer)
    if strategy is not None:
        install(optimizer, **STRATEGIES[strategy])
    schedule = LambdaLR(optimizer, lambda step: recipe.lr(step) / recipe.peak_lr)
    data = batches(text.training, recipe.batch, recipe.context, recipe.seed, "cpu")
    for _ in range(recipe.steps):
        optimizer.zero_grad()
        family.loss_of(model, *next(data)).backward()
        exact.follow()
        optimizer.step()
        schedule.step()
    return Run(
        family,
        dtype,
        strategy,
        model,
        optimizer,
        validate(model, recipe, text, "cpu"),
        exact.displacement_error(),
        exact.lost_second_moments(),
    )


# What formats do to numbers. --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fate:
    """What became of many numbers in a format of fewer bits; see the top of this file."""

    lost: float
    subnormal: float
    overflows: int
    rms_error: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Fate:
        """Of pairs (numbers, what the format made of them), the latter in any dtype."""
        rms_error = max(norm([stored.double() - exact]) / norm([exact]) for exact, stored in pairs)
        exact, stored = (
            torch.cat([each.detach().double().flatten() for each in side])
            for side in zip(*pairs, strict=True)
        )
        counted = exact != 0
        small = (stored != 0) & (stored.abs() < torch.finfo(dtype).smallest_normal)
        return cls(
            lost=float((stored == 0)[counted].double().mean()),
            subnormal=float(small[counted].double().mean()),
            overflows=int((~stored.isfinite()).sum()),
            rms_error=rms_error,
        )


def numbers_of_a_pass(
    family: Family, model: nn.Module, batch: tuple[Tensor, Tensor]
) -> dict[str, list[Tensor]]:
    """What the layers put out, the gradients of that, and those of the weights, in one batch."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    hooks = [module.register_forward_hook(keep) for module in model.modules() if not [*module.children()]]
    model.zero_grad()
    family.loss_of(model, *batch).backward()
    for hook in hooks:
        hook.remove()
    return {
        "activations": outputs,
        "their gradients": [gradient_of(output) for output in outputs],
        "gradients of weights": [gradient_of(weight) for weight in model.parameters()],
    }


def fates(run: Run, recipe: Recipe, text: Text) -> dict[str, Fate]:
    """What float16 and e4m3 do to the numbers of a training in float32, when it has ended."""
    half = copy.deepcopy(run.model).half()
    # Of the same weights.
    single = copy.deepcopy(half).float()
    batch = next(batches(text.training, recipe.batch, recipe.context, recipe.seed + 2, "cpu"))
    exact, stored = (numbers_of_a_pass(run.family, model, batch) for model in (single, half))
    found = {
        f"{kind} in float16": Fate.of([*zip(exact[kind], stored[kind], strict=True)], torch.float16)
        for kind in exact
    }
    moments = [run.optimizer.state[p]["exp_avg_sq"] for p in run.model.parameters()]
    found["second moments in float16"] = Fate.of([(v, v.half()) for v in moments], torch.float16)
    eight = torch.float8_e4m3fn
    found["weights in e4m3"] = Fate.of([(p, p.detach().to(eight)) for p in run.model.parameters()], eight)
    return found


# Results. ---------------------------------------------------------------------------------------------------


def over_seeds(values: Sequence[float], digits: str) -> str:
    text = f"{statistics.fmean(values):{digits}}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):{digits}}"


def table_of_training(runs: Sequence[Sequence[Run]]) -> str:
    """A row for the runs of all seeds."""
    headers = ["model", "numbers", "strategy", "validation loss", "displacement error", "v lost"]
    rows = [
        [
            same[0].family.name,
            str(same[0].dtype).removeprefix("torch."),
            same[0].strategy or "",
            over_seeds([run.loss for run in same], ".4f"),
            over_seeds([run.displacement_error for run in same], ".2g"),
            over_seeds([run.second_moments_lost for run in same], ".2%"),
        ]
        for same in runs
    ]
    return tabulate(rows, headers, disable_numparse=True, colalign=("left",) * 3 + ("right",) * 3)


def table_of_fates(found: dict[str, dict[str, Fate]]) -> str:
    """A row for each kind of number and family."""
    headers = ["numbers", "model", "lost", "subnormal", "overflows", "rms error"]
    rows = [
        [
            kind,
            family,
            f"{fate.lost:.2%}",
            f"{fate.subnormal:.2%}",
            str(fate.overflows),
            f"{fate.rms_error:.2%}",
        ]
        for kind in next(iter(found.values()))
        for family, fate in ((family, fates[kind]) for family, fates in found.items())
    ]
    return tabulate(rows, headers, disable_numparse=True, colalign=("left",) * 2 + ("right",) * 4)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a unit-scaled GPT, and a plain one, in 16 bits.")
    parser.add_argument("--steps", type=int, help="of each training (default 300)")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each row (default 1)")
    parser.add_argument("--eps", type=float, help="of both models' AdamW (default: the model's own)")
    names, asked = list(STRATEGIES), [name for name in STRATEGIES if "bytes" not in name]
    parser.add_argument(
        "--strategies", nargs="+", default=asked, choices=names, metavar="NAME", help=f"of {names}"
    )
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    parser.add_argument(
        "--dtypes", nargs="+", default=[*dtypes], choices=dtypes, metavar="DTYPE", help=f"of {[*dtypes]}"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = QUICK if options.quick else Recipe(steps=300)
    recipe = replace(recipe, steps=options.steps or recipe.steps)
    text = Text.of_standard_library()

    sixteen_bits = itertools.product([dtypes[name] for name in options.dtypes], options.strategies)
    settings: list[tuple[torch.dtype, str | None]] = [(torch.float32, None), *sixteen_bits]
    recipes = [replace(recipe, seed=seed) for seed in range(options.seeds)]
    families = [replace(each, eps=each.eps if options.eps is None else options.eps) for each in FAMILIES]
    runs, found = [], {}
    for family in families:
        of_settings = [[train(family, *setting, each, text) for each in recipes] for setting in settings]
        found[family.name] = fates(of_settings[0][0], recipe, text)
        runs += of_settings
    print(f"{recipe.steps} steps:")
    print(table_of_training(runs))
    print("\nAfter the trainings in float32, of the first seed:")
    print(table_of_fates(found))


if __name__ == "__main__":
    main()
