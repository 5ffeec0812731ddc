"""Steps that stack a value of each tensor and take the stack apart again; steps that return numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from collage_fx import backend_of, full_value, install
from tests.support.training import Descent, set_gradients

#: Largest error |p - p64| / |p64 - p0| of compensated steps; plain bf16 loses most of these updates.
COMPENSATED = 0.02

#: Takes the norms of all parameters and of all gradients as stacks; returns a factor for each parameter.
Factors = Callable[[Tensor, Tensor], Sequence[Tensor]]


#: Has no say in the dtype of a product with a stack, and would have with a 0-d member.
SCALE = torch.tensor(0.75, dtype=torch.float32)


def trust_ratios(weights: Tensor, updates: Tensor) -> Sequence[Tensor]:
    weights.clamp_(max=10.0)
    is_usual = (weights != 0) & (updates != 0)
    return torch.where(is_usual, weights / (updates + 1e-6), 1.0).unbind()


def bounded(weights: Tensor, updates: Tensor) -> Sequence[Tensor]:
    return [each * 0.5 for each in torch.minimum(1.0 / updates, weights)]


def scaled(weights: Tensor, updates: Tensor) -> Sequence[Tensor]:
    return (torch.rsqrt(weights * SCALE) + updates).unbind()


def a_member_changed(weights: Tensor, updates: Tensor) -> Sequence[Tensor]:
    ratios = weights * 2
    ratios[1].mul_(0.25)
    return [ratios[i] for i in (0, 1, -2, -1)]


def of_all(weights: Tensor, updates: Tensor) -> Sequence[Tensor]:
    return (weights / updates.max()).unbind()


def summed_up(weights: Tensor, updates: Tensor) -> Sequence[Tensor]:
    return (torch.cumsum(weights, 0) / updates).unbind()


def reversed_order(weights: Tensor, updates: Tensor) -> Sequence[Tensor]:
    return (weights / updates.flip(0)).unbind()


def of_neighbours(weights: Tensor, updates: Tensor) -> Sequence[Tensor]:
    return [*(weights[:2] / weights[2:]), *updates[2:]]


def other_first(weights: Tensor, updates: Tensor) -> Sequence[Tensor]:
    total = torch.ones(4, dtype=weights.dtype)
    total.mul_(weights)
    return (total / total.sum() + updates).unbind()


APART = [trust_ratios, bounded, scaled, a_member_changed]
TOGETHER = [of_all, summed_up, reversed_order, of_neighbours, other_first]


class Stacking(Descent):
    def __init__(self, params: Any, factors: Factors) -> None:
        super().__init__(params, 2.0**-10)
        self.factors = factors
        self.param_groups[0]["step"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["step"] += 1
        params = [p for p in group["params"] if p.grad is not None]
        grads = [p.grad for p in params]
        factors = self.factors(
            torch.stack(torch._foreach_norm(params)), torch.stack([g.norm() for g in grads])
        )
        for p, g, factor in zip(params, grads, factors, strict=True):
            self.state[p]["factor"] = factor
            p.add_(g * factor, alpha=-group["lr"] / group["step"])


def train(factors: Factors, dtype: torch.dtype, *, installed: bool) -> tuple[Stacking, list[Tensor]]:
    torch.manual_seed(0)
    params = [Parameter(torch.rand(5, 3).add(0.5).bfloat16().to(dtype)) for _ in range(4)]
    optimizer = Stacking(params, factors)
    if installed:
        install(optimizer)
    for seed in range(6):
        set_gradients(params, seed)
        for p in params:
            assert p.grad is not None
            p.grad = p.grad.bfloat16().to(dtype)
        optimizer.step()
    return optimizer, [(full_value(p) if installed else p.detach()).double() for p in params]


def errors_of(factors: Factors) -> tuple[Stacking, float]:
    optimizer, ours = train(factors, torch.bfloat16, installed=True)
    _, exact = train(factors, torch.float64, installed=False)
    torch.manual_seed(0)
    starts = [torch.rand(5, 3).add(0.5).bfloat16().double() for _ in range(4)]
    moved = torch.stack([x - start for x, start in zip(exact, starts, strict=True)])
    return optimizer, float((torch.stack(ours) - torch.stack(exact)).norm() / moved.norm())


def units_of(optimizer: Stacking) -> set[str]:
    return {graph.route.unit for graph in backend_of(optimizer).report().graphs}


@pytest.mark.parametrize("factors", APART)
def test_what_is_done_to_each_member_of_a_stack_is_compiled_once(factors: Factors) -> None:
    optimizer, error = errors_of(factors)
    assert units_of(optimizer) == {"by family"}
    assert error < COMPENSATED
    assert optimizer.param_groups[0]["step"] == 6


@pytest.mark.parametrize("factors", TOGETHER)
def test_a_stack_whose_members_depend_on_each_other_stays_whole(factors: Factors) -> None:
    optimizer, error = errors_of(factors)
    assert "by family" not in units_of(optimizer)
    assert error < COMPENSATED


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(12))
def test_drawn_calculations_with_stacks(seed: int) -> None:
    """Draw operations that keep elements apart; every second calculation has one that does not."""
    drawn = random.Random(seed)
    apart: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda w, u: w * u,
        lambda w, u: w / (1 + u),
        lambda w, u: torch.where(w > u, w, 0.5),
        lambda w, u: w.clamp_(max=1.5),
        lambda w, u: torch.lerp(w, u, 0.25),
        lambda w, u: w.sqrt_().add_(u, alpha=0.5),
        lambda w, u: 2 - w.tanh(),
        lambda w, u: torch.stack([*w.unbind()]) + u,
    ]
    together = [lambda w, u: w - w.mean() / 2, lambda w, u: w.roll(1), lambda w, u: w.softmax(0) + u]
    chosen = drawn.choices(apart, k=4)
    if seed % 2:
        chosen[drawn.randrange(4)] = drawn.choice(together)

    def factors(weights: Tensor, updates: Tensor) -> Sequence[Tensor]:
        for function in chosen:
            weights = function(weights, updates)
        return weights.unbind()

    optimizer, error = errors_of(factors)
    assert error < COMPENSATED
    assert ("by family" in units_of(optimizer)) == (seed % 2 == 0)


def test_reductions_of_each_element() -> None:
    """Centralize stacked gradients over a dimension of their own, and over that of the stack."""

    class Centred(Descent):
        dim = 1

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            params = self.param_groups[0]["params"]
            stack = torch.stack([p.grad for p in params])
            stack.sub_(stack.mean(dim=(self.dim,), keepdim=True))
            for p, g in zip(params, stack.unbind(), strict=True):
                p.add_(g, alpha=-self.param_groups[0]["lr"])

    for dim, units in ((1, {"by family"}), (0, {"in parts"})):
        params = [Parameter(torch.ones(5, 3).bfloat16()) for _ in range(4)]
        exact = torch.ones(4, 5, 3, dtype=torch.float64)
        optimizer = install(Centred(params, 2.0**-10))
        optimizer.dim = dim
        for seed in range(6):
            set_gradients(params, seed)
            given = torch.stack([p.grad.double() for p in params if p.grad is not None])
            exact -= 2.0**-10 * (given - given.mean(dim=dim, keepdim=True))
            optimizer.step()
        ours = torch.stack([full_value(p).double() for p in params])
        assert float((ours - exact).norm() / (exact - 1).norm()) < COMPENSATED
        assert {each.route.unit for each in backend_of(optimizer).report().graphs} == units


def test_numbers_that_a_step_returns() -> None:
    """Counts and what follows from them, integers and floats, beside a tensor that the step makes."""

    class Counting(Descent):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            group = self.param_groups[0]
            group["step"] = group.get("step", 0) + 1
            group["product"] = group.get("product", 1.0) * 0.9
            group["size"] = group["lr"] / (1 - group["product"])
            for p in group["params"]:
                self.state[p]["last"] = p.grad * 2
                p.add_(p.grad, alpha=-group["size"])

    found = []
    for dtype in (torch.bfloat16, torch.float64):
        params = [Parameter(torch.ones(3, dtype=dtype)) for _ in range(3)]
        optimizer = Counting(params)
        if dtype is torch.bfloat16:
            install(optimizer)
        for seed in range(6):
            set_gradients(params, seed)
            optimizer.step()
        found.append([optimizer.param_groups[0][key] for key in ("step", "product", "size")])
        for p in params:
            assert p.grad is not None
            assert torch.equal(optimizer.state[p]["last"], p.grad * 2)
        if dtype is torch.bfloat16:
            assert {each.route.unit for each in backend_of(optimizer).report().graphs} == {"by family"}
    assert found[0] == found[1]
    assert [type(each) for each in found[0]] == [int, float, float]
