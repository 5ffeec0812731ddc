"""State whose rounding has no useful bound, drawn at random, against float64 on the same gradients.

Averages of weights, whatever their decay, and matrices that a step makes and multiplies with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from collage_fx import CollageBackend, error_terms, full_value, install
from collage_fx.choices import Strategy

Dtype = torch.dtype

# Averages of weights. -------------------------------------------------------------------------------------

MOVES: list[Callable[[Tensor, Tensor, float], object]] = [
    lambda e, x, tau: e.lerp_(x, tau),
    lambda e, x, tau: e.mul_(1 - tau).add_(x, alpha=tau),
    lambda e, x, tau: e.copy_((1 - tau) * e + tau * x),
    lambda e, x, tau: e.add_(x - e, alpha=tau),
    lambda e, x, tau: torch._foreach_lerp_([e], [x], tau),
]

WEIGHTS: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    lambda p, q, e: p,
    lambda p, q, e: p.detach().clone(),
    lambda p, q, e: 0.999 * p,
    lambda p, q, e: 0.5 * (p + q),
    lambda p, q, e: (p + q + p) / 3,
    lambda p, q, e: -p,
    lambda p, q, e: e,
]

#: Steps, and the size of a weight's move in each of them.
STEPS, MOVE = 24, 2.0**-10


def drawn_averages(seed: int, count: int = 6) -> list[tuple[Any, Any, float]]:
    """Draw ways to move, inputs, and shares between .001 and .9."""
    rng = random.Random(seed)
    low, high = math.log(0.001), math.log(0.9)
    return [(rng.choice(MOVES), rng.choice(WEIGHTS), math.exp(rng.uniform(low, high))) for _ in range(count)]


@torch.no_grad()
def follow(averages: Sequence[Tensor], p: Tensor, q: Tensor, rules: Sequence[tuple[Any, Any, float]]) -> None:
    for average, before, (move, source, tau) in zip(averages, (p, *averages), rules, strict=False):
        move(average, source(p, q, before), tau)


class WithAverages(torch.optim.Optimizer):
    """Signed descent that keeps averages of its weights."""

    def __init__(self, params: Sequence[Tensor], rules: Sequence[tuple[Any, Any, float]]) -> None:
        super().__init__(params, {"lr": MOVE})
        self.rules = rules

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        p, q = self.param_groups[0]["params"]
        for each in (p, q):
            each.sub_(each.grad, alpha=MOVE)
        for i in range(len(self.rules)):
            if i not in self.state[p]:
                self.state[p][i] = p.detach().clone()
        follow([self.state[p][i] for i in range(len(self.rules))], p, q, self.rules)


def run_averages(where: str, rules: Any, dtype: Dtype, start: Dtype, options: Any) -> list[Tensor]:
    """Run in ``dtype`` from weights of ``start``, compensated if there are options; return the averages."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(16, 8, generator=generator).to(start) for _ in range(2)]
    gradients = [torch.randint(1, 3, (2, 16, 8), generator=generator).double() for _ in range(STEPS)]
    params = [torch.nn.Parameter(w.to(dtype, copy=True)) for w in weights]
    if where == "step":
        optimizer = WithAverages(params, rules)
        if options is not None:
            install(optimizer, **options)
        for gradient in gradients:
            for p, g in zip(params, gradient, strict=True):
                p.grad = g.to(dtype)
            optimizer.step()
        return [optimizer.state[params[0]][i] for i in range(len(rules))]
    averages = [params[0].detach().clone() for _ in rules]
    step: Any = follow if options is None else torch.compile(follow, backend=CollageBackend(**options))
    inputs: Sequence[Tensor] = params
    if where == "function":
        inputs = [p.detach().clone() for p in params]
    for i in range(STEPS):
        for x, w in zip(inputs, weights, strict=True):
            x.data.copy_((w.double() - MOVE * 8 * i).to(start))
        step(averages, *inputs, rules)
    return averages


@pytest.mark.parametrize("where", ["function", "function of parameters", "step"])
@pytest.mark.parametrize(
    ("strategy", "dtype"), [("light", torch.bfloat16), ("plus", torch.float16), ("full", torch.bfloat16)]
)
def test_averages_of_weights(where: str, strategy: Strategy, dtype: Dtype) -> None:
    rules = drawn_averages(seed=len(where) + len(strategy))
    meant = run_averages(where, rules, torch.float64, dtype, None)
    plain = run_averages(where, rules, dtype, dtype, None)
    ours = run_averages(where, rules, dtype, dtype, {"strategy": strategy})
    for mine, rounded, exact in zip(ours, plain, meant, strict=True):
        assert error_terms(mine)
        # An average, and the weights of a step, have up to eight float32 roundings in each step.
        assert float((full_value(mine) - exact).norm()) <= STEPS * 8 * 2.0**-24 * float(exact.norm())
        assert float((rounded.double() - exact).norm()) > float((full_value(mine) - exact).norm())


# What a step makes and multiplies with. -------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def root_of_eigenvalues(c: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(wide(c))
    return ((vectors * values.clamp(min=1e-7).pow(-0.25)) @ vectors.t()).to(c.dtype)


def root_by_iteration(c: Tensor) -> Tensor:
    """Inverse square root by the coupled iteration of Newton and Schulz, in the dtype of c."""
    one = torch.eye(c.shape[0], dtype=c.dtype)
    y, z = c / c.norm(), one
    for _ in range(10):
        factor = 1.5 * one - 0.5 * z @ y
        y, z = y @ factor, factor @ z
    return cast(Tensor, z / c.norm().sqrt())


def inverse_by_iteration(c: Tensor) -> Tensor:
    one = torch.eye(c.shape[0], dtype=c.dtype)
    x = c / c.norm() ** 2
    for _ in range(14):
        x = x @ (2 * one - c @ x)
    return x


def projector(c: Tensor) -> Tensor:
    vectors = torch.linalg.eigh(wide(c))[1][:, -2:]
    return (torch.eye(c.shape[0], dtype=vectors.dtype) - vectors @ vectors.t()).to(c.dtype)


MADE = [root_of_eigenvalues, root_by_iteration, inverse_by_iteration, projector]
STATISTICS: list[Callable[[Tensor, Tensor], object]] = [
    lambda c, g: c.addmm_(g, g.t()),
    lambda c, g: c.lerp_(g @ g.t(), 0.1),
    lambda c, g: c.mul_(0.95).add_(g @ g.t(), alpha=0.05),
]
WRITES: list[Callable[[dict[str, Tensor], str, Tensor], object]] = [
    lambda state, name, x: state[name].copy_(x),
    lambda state, name, x: state[name].zero_().add_(x),
    lambda state, name, x: state.update({name: x}),
]


class Preconditioned(torch.optim.Optimizer):
    """Descent along ``made(statistics) @ g``, with the matrix made in every k-th step."""

    def __init__(self, params: Sequence[Tensor], made: Any, statistics: Any, write: Any, every: int) -> None:
        super().__init__(params, {"lr": 2.0**-9})
        self.made, self.statistics, self.write, self.every, self.steps = made, statistics, write, every, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            state, columns = self.state[p], p.grad.reshape(p.shape[0], -1)
            if not state:
                state["c"] = 0.03 * torch.eye(p.shape[0], dtype=p.dtype)
                state["made"] = torch.eye(p.shape[0], dtype=p.dtype)
            self.statistics(state["c"], columns)
            if self.steps % self.every == 1 % self.every:
                self.write(state, "made", self.made(state["c"]))
            p.add_((state["made"] @ columns).reshape(p.shape), alpha=-self.param_groups[0]["lr"])


def run_preconditioned(
    rule: tuple[Any, ...], shape: tuple[int, ...], dtype: Dtype, start: Dtype, options: Any
) -> Tensor:
    """Run in ``dtype`` from a parameter of ``start``, compensated if there are options; return its move."""
    generator = torch.Generator().manual_seed(2)
    first = torch.randn(shape, generator=generator).to(start)
    p = torch.nn.Parameter(first.to(dtype, copy=True))
    optimizer = Preconditioned([p], *rule)
    if options is not None:
        install(optimizer, **options)
    for _ in range(10):
        p.grad = (torch.randn(shape, generator=generator) + 0.5).to(start).to(dtype)
        optimizer.step()
    return full_value(p).detach().double() - first.double()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("strategy", ["light", "plus", "full"])
def test_what_a_step_makes_and_multiplies_with(strategy: Strategy, seed: int) -> None:
    rng = random.Random(10 * seed + len(strategy))
    rule = MADE[seed % len(MADE)], rng.choice(STATISTICS), rng.choice(WRITES), rng.choice([1, 2, 3])
    shape, dtype = rng.choice([(8,), (8, 4), (6, 9)]), rng.choice([torch.bfloat16, torch.float16])
    moves = [
        run_preconditioned(rule, shape, each, dtype, options)
        for each, options in (
            (dtype, {"strategy": strategy}),
            (dtype, None),
            (torch.float32, None),
            (torch.float64, None),
        )
    ]
    ours, plain, single = (float((move - moves[3]).norm() / moves[3].norm()) for move in moves[:3])
    # float32's own error, by other orders of sums and eigenvalues: some times as large; or the update's last
    # bit of the storage format, once, where a product of a gradient alone keeps the format.
    assert ours <= min(max(8 * single, 2.0**-9), plain / 2)
