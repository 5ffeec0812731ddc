"""Groups of parameters of which some have no gradients for a while, as of a model that thaws."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from collage_fx import full_value, install
from tests.support.training import Descent, compiled, parameters, set_gradients

STEPS = 6
SHAPES = [(4, 3), (5,), (3, 4), (4,)]

#: Largest error |p - p64| / |p64 - p0|; with a state that begins anew in each step it is above 0.1.
COMPENSATED = 0.02


class Momentum(Descent):
    """Momentum that the step makes, as most optimizers of other packages do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(0.9).add_(p.grad)
                p.add_(state["momentum"], alpha=-group["lr"])


class Inside(Optimizer):
    """An optimizer around another, with its groups and its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=1e-4, momentum=0.9)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


Make = Callable[[Any], Optimizer]

OPTIMIZERS: tuple[Make, ...] = (
    functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
    functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9, nesterov=True, foreach=True),
    functools.partial(torch.optim.AdamW, lr=1e-4),
    functools.partial(torch.optim.RMSprop, lr=1e-4, momentum=0.9, centered=True),
    functools.partial(torch.optim.Adagrad, lr=1e-4),
    functools.partial(torch.optim.NAdam, lr=1e-4),
    functools.partial(Momentum, lr=1e-4),
    Inside,
)


def installed(optimizer: Optimizer) -> Callable[[], Any]:
    return install(optimizer).step


def errors(make: Make, dtype: torch.dtype, way: Callable[[Optimizer], Callable[[], Any]], seed: int) -> float:
    """The largest error of a parameter after steps in which drawn groups have gradients."""
    draw = random.Random(seed)
    params = parameters(dtype, SHAPES)
    exact = [torch.nn.Parameter(p.detach().double()) for p in params]
    start = [p.detach().clone() for p in exact]
    cuts = sorted(draw.sample(range(1, len(SHAPES)), draw.choice((1, 2))))
    bounds = list(zip([0, *cuts], [*cuts, len(SHAPES)], strict=True))
    optimizer, reference = (
        make([{"params": each[first:last]} for first, last in bounds]) for each in (params, exact)
    )
    step = way(optimizer)
    begins = [draw.choice((0, 0, 1, 3, STEPS)) for _ in bounds]  # each group's first step with gradients
    for i in range(STEPS):
        set_gradients(params, seed=i)
        for begin, (first, last) in zip(begins, bounds, strict=True):
            for p, x in zip(params[first:last], exact[first:last], strict=True):
                p.grad = p.grad if begin <= i else None
                x.grad = None if p.grad is None else p.grad.double()
        step()
        reference.step()
    found = []
    for p, x, before in zip(params, exact, start, strict=True):
        moved = x.detach() - before
        error = (full_value(p) - x.detach()).norm()
        assert bool(moved.any()) or not bool(error)  # a parameter without a gradient stays
        found.append(float(error / moved.norm()) if bool(moved.any()) else 0.0)
    return max(found)


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: getattr(make, "func", make).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [installed, compiled])
@pytest.mark.parametrize("seed", range(4))
def test_state_is_kept_whichever_groups_have_gradients(
    make: Make, dtype: torch.dtype, way: Callable[[Optimizer], Callable[[], Any]], seed: int
) -> None:
    assert errors(make, dtype, way, seed) <= COMPENSATED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [installed, compiled])
def test_momentum_behind_a_frozen_group(
    dtype: torch.dtype, way: Callable[[Optimizer], Callable[[], Any]]
) -> None:
    """Dynamo's guards on an empty state fit the state that the first step has left: momentum began anew."""
    frozen, trained = parameters(dtype, [(3,), (4,)])
    optimizer = torch.optim.SGD([{"params": [frozen]}, {"params": [trained]}], lr=2.0**-4, momentum=0.5)
    step, start = way(optimizer), full_value(trained)
    for _ in range(3):
        trained.grad = torch.ones_like(trained)
        step()
    expected = start - 2.0**-4 * (1 + 1.5 + 1.75)
    assert float(start.abs().max()) < 4
    # Each step may leave an ulp of float32 below 4; momentum and update are numbers of bfloat16.
    torch.testing.assert_close(full_value(trained), expected, rtol=0, atol=3 * 2.0**-22)
