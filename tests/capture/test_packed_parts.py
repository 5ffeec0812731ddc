"""Packed state of recorded steps: each part of one packs what it updates, and reads what others pack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx import CollageBackend, full_value
from collage_fx.errors import InvalidOptionError
from collage_fx.state import held_per_parameter
from collage_fx.state.packed import is_packed, why_left_unpacked
from tests.support.training import Descent, differences, everything, parameters, run_steps, set_gradients

SHAPES = ((64, 96), (5,))
LR = 1e-3

State = dict[str, Any]


class Recorded(Descent):
    """Calls ``update`` for each parameter; that branches on values, unless it is told not to."""

    def __init__(self, params: Any, *, branches: bool = True) -> None:
        super().__init__(params)
        self.branches = branches

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        for p in self.param_groups[0]["params"]:
            self.update(p, p.grad, self.state[p])

    def update(self, p: Tensor, g: Tensor, state: State) -> None:
        raise NotImplementedError

    def branch(self, value: Tensor) -> None:
        """What comes behind it is another part of the step."""
        if self.branches and value.norm() > 1e9:
            raise AssertionError


class Adam(Recorded):
    """In two parts: the moments, then the parameter."""

    def moments(self, p: Tensor, g: Tensor, state: State) -> tuple[Tensor, Tensor]:
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        m, v = state["m"], state["v"]
        # Torch 2.11 takes lerp, addcmul and addcdiv apart in another way where Dynamo captures them.
        m.mul_(0.9).add_(g.to(m.dtype), alpha=0.1)
        v.mul_(0.95).add_(g * g, alpha=0.05)
        return m, v

    def update(self, p: Tensor, g: Tensor, state: State) -> None:
        m, v = self.moments(p, g, state)
        self.branch(g * 2 + m)
        p.add_(m / v.sqrt().add_(1e-8), alpha=-LR)


class CapturedAdam(Adam):
    def __init__(self, params: Any) -> None:
        super().__init__(params, branches=False)


class AdamAfterItsBranch(Adam):
    """In one part, as if captured."""

    def update(self, p: Tensor, g: Tensor, state: State) -> None:
        self.branch(g)
        branches, self.branches = self.branches, False
        super().update(p, g, state)
        self.branches = branches


class Momentum(Recorded):
    """With something done to its moment, and then to the parameter."""

    def update(self, p: Tensor, g: Tensor, state: State) -> None:
        if not state:
            state["m"] = torch.zeros_like(p)
        state["m"].mul_(0.9).add_(g.to(p.dtype), alpha=0.1)
        p.add_(self.direction(p, g, state), alpha=-LR)

    def direction(self, p: Tensor, g: Tensor, state: State) -> Tensor:
        self.branch(g)
        return state["m"]


def run(kind: type[Recorded], *, steps: int = 6, **options: Any) -> tuple[Recorded, CollageBackend]:
    params = parameters(shapes=SHAPES)
    optimizer, backend = kind(params), CollageBackend(strategy="light", **options)
    run_steps(torch.compile(optimizer.step, backend=backend), params, range(steps))
    assert bool(backend.report().graphs[-1].route.recorded) == optimizer.branches
    return optimizer, backend


def run_within(kind: type[Recorded], budget: float) -> tuple[Recorded, CollageBackend]:
    params = parameters(shapes=SHAPES[:1])
    optimizer, backend = kind(params), CollageBackend(bytes_per_parameter=budget)
    run_steps(torch.compile(optimizer.step, backend=backend), params, range(3))
    return optimizer, backend


def in_float64(kind: type[Recorded], steps: int = 6) -> Recorded:
    rounded = parameters(shapes=SHAPES)
    params = [torch.nn.Parameter(p.detach().double()) for p in rounded]
    optimizer = kind(params)
    for seed in range(steps):
        set_gradients(rounded, seed)
        for p, of in zip(params, rounded, strict=True):
            assert of.grad is not None
            p.grad = of.grad.double()
        optimizer.step()
    return optimizer


def moved(optimizer: Recorded) -> Tensor:
    """What the parameter whose state is packed has moved by."""
    start = parameters(shapes=SHAPES)[0]
    return full_value(optimizer.param_groups[0]["params"][0].detach()) - start.detach().double()


def error(kind: type[Recorded], optimizer: Recorded) -> float:
    expected = moved(in_float64(kind))
    return float((moved(optimizer) - expected).norm() / expected.norm())


def state_of(optimizer: Recorded) -> State:
    state: State = optimizer.state[optimizer.param_groups[0]["params"][0]]
    return state


@pytest.mark.parametrize("state", ["block16", "block8"])
def test_a_part_reads_what_another_packs(state: str) -> None:
    optimizer, backend = run(Adam, state=state)
    assert all(map(is_packed, state_of(optimizer).values()))
    assert not any(map(is_packed, optimizer.state[optimizer.param_groups[0]["params"][1]].values()))
    captured, _ = run(CapturedAdam, state=state)
    # The other part reads what has been rounded.
    assert error(Adam, optimizer) < 2 * error(Adam, captured) < 0.02
    _, without = run(Adam)
    # The other part is compiled twice: for state before it is packed, and after.
    assert len(backend.reports) <= len(without.reports) + 1


def test_a_recorded_part_stores_the_bits_of_a_captured_step() -> None:
    found = []
    for branches in (True, False):
        params = parameters(shapes=SHAPES)
        optimizer = AdamAfterItsBranch(params, branches=branches)
        run_steps(optimizer.step, params, [5])  # a captured step packs what is there before it
        backend = CollageBackend(strategy="light", state="block8")
        step: Any = torch.compile(optimizer.step, backend=backend)
        run_steps(step, params, range(5))
        assert bool(backend.report().graphs[-1].route.recorded) == branches
        found.append(everything(optimizer))
        assert all(map(is_packed, state_of(optimizer).values()))
    assert not differences(*found)


class Centered(Adam):
    """Divides, in its second part, by the root of a difference."""

    def update(self, p: Tensor, g: Tensor, state: State) -> None:
        m, v = self.moments(p, g, state)
        self.branch(g)
        p.addcdiv_(g, (v - m * m).abs_().add_(1e-2).sqrt_() - 1e-3, value=-LR)


class BecomesItsState(Momentum):
    def direction(self, p: Tensor, g: Tensor, state: State) -> Tensor:
        self.branch(g)
        p.copy_(state["m"])
        return g


class SlowWeights(Recorded):
    """An average of the parameter, which another part updates."""

    def update(self, p: Tensor, g: Tensor, state: State) -> None:
        if not state:
            state["m"] = torch.zeros_like(p)
        p.add_(g, alpha=-LR)
        self.branch(p)
        state["m"].lerp_(p, 0.5)


class Recomputed(Momentum):
    """Its moment crosses a branch before it is stored."""

    def update(self, p: Tensor, g: Tensor, state: State) -> None:
        if not state:
            state["m"] = torch.zeros_like(p)
        new = state["m"] * 0.9 + g * 0.1
        self.branch(new)
        state["m"].copy_(new)
        p.add_(new, alpha=-LR)


class HoldsAView(Momentum):
    def direction(self, p: Tensor, g: Tensor, state: State) -> Tensor:
        flat = state["m"].view(-1)[2:]
        self.branch(g)
        flat.mul_(0.5)
        return state["m"]


class LooksAtMemory(Momentum):
    def direction(self, p: Tensor, g: Tensor, state: State) -> Tensor:
        self.branch(g)
        assert state["m"].data_ptr()
        return state["m"]


class Transposes(Momentum):
    def direction(self, p: Tensor, g: Tensor, state: State) -> Tensor:
        if p.dim() > 1:
            state["m"].t_()
            state["m"].t_()
        self.branch(g)
        return state["m"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Centered, "may be negative"),
        (BecomesItsState, "a parameter is overwritten with it"),
        (HoldsAView, "a view of a part of it"),
        (LooksAtMemory, "looks at its memory"),
        (Transposes, "looks at its memory"),
    ],
)
def test_what_a_part_cannot_do_with_packed_state_leaves_it_unpacked(kind: type[Recorded], why: str) -> None:
    optimizer, backend = run(kind, state="block8", steps=6)
    state = state_of(optimizer)
    assert not is_packed(state["m"])
    assert why in why_left_unpacked(state["m"])
    assert error(kind, optimizer) < 0.01
    compilations = len(backend.reports)
    run_steps(optimizer.step, optimizer.param_groups[0]["params"], range(3))
    assert len(backend.reports) == compilations


class HasAnotherNameFirst(Momentum):
    """When its state is packed, that which it knows it by would be left behind."""

    def direction(self, p: Tensor, g: Tensor, state: State) -> Tensor:
        m = state["m"].detach()
        self.branch(g)
        m.mul_(0.5)
        return state["m"]


@pytest.mark.parametrize("kind", [SlowWeights, Recomputed, HasAnotherNameFirst])
def test_what_a_part_does_not_know_all_of_is_not_packed(kind: type[Recorded]) -> None:
    optimizer, _ = run(kind, state="block8")
    assert not is_packed(state_of(optimizer)["m"])
    assert error(kind, optimizer) < 0.01


class GoesByAnotherName(Momentum):
    def direction(self, p: Tensor, g: Tensor, state: State) -> Tensor:
        state["calls"] = state.get("calls", 0) + 1
        if state["calls"] == 1:
            return super().direction(p, g, state)
        m, detached = state["m"].data, state["m"].detach()
        m.mul_(0.5)
        self.branch(g)
        detached.mul_(0.5)
        self.branch(g)
        assert m is not state["m"]
        return m


class AsksForItsLayout(Momentum):
    """What C++ decides by the strides: whether a copy is made, and of which."""

    def direction(self, p: Tensor, g: Tensor, state: State) -> Tensor:
        m = state["m"]
        assert m.stride() == p.stride()
        assert m.is_contiguous()
        m.contiguous().mul_(0.5)
        m.reshape(-1).mul_(2)
        m.flatten().mul_(0.5)
        like = torch.zeros_like(m)
        assert like.stride() == p.stride()
        self.branch(g)
        return m + like


class CallsWhatIsNotRecorded(Momentum):
    def direction(self, p: Tensor, g: Tensor, state: State) -> Tensor:
        m = state["m"]
        assert torch.equal(m, m)
        assert not torch.equal(m, m + 1)
        assert m.norm() > 0
        large = m[m.abs() > 1e9]
        assert large.numel() == 0
        largest = m.flatten().topk(2).values
        return m + largest.sum() * 1e-3


class ZeroesItsState(Momentum):
    def direction(self, p: Tensor, g: Tensor, state: State) -> Tensor:
        state["calls"] = state.get("calls", 0) + 1
        self.branch(g)
        if state["calls"] == 4:
            state["m"].zero_()
        return state["m"]


@pytest.mark.parametrize(
    "kind", [GoesByAnotherName, AsksForItsLayout, CallsWhatIsNotRecorded, ZeroesItsState]
)
def test_what_a_step_does_with_packed_state(kind: type[Recorded]) -> None:
    optimizer, _ = run(kind, state="block16")
    assert is_packed(state_of(optimizer)["m"])
    assert error(kind, optimizer) < 5e-3
    moment = state_of(optimizer)["m"].double()
    expected = state_of(in_float64(kind))["m"]
    assert float((moment - expected).norm() / expected.norm()) < 5e-3


def test_a_closure_sees_the_value() -> None:
    params = parameters(shapes=SHAPES)
    optimizer = Momentum(params)
    step: Callable[..., Any] = torch.compile(
        optimizer.step, backend=CollageBackend(strategy="light", state="block8")
    )
    seen: list[Tensor] = []

    def closure() -> None:
        for p in params:
            if optimizer.state[p]:
                seen.append(optimizer.state[p]["m"].float().norm())

    for seed in range(3):
        set_gradients(params, seed)
        step(closure)
    assert is_packed(state_of(optimizer)["m"])
    assert len(seen) == 4
    assert all(bool(0 < norm < 100) for norm in seen)


def test_a_step_whose_sizes_change_leaves_state_unpacked() -> None:
    """Then one code serves all, and sizes are symbols in it."""

    class FirstRows(Momentum):
        rows = 0

        def direction(self, p: Tensor, g: Tensor, state: State) -> Tensor:
            self.branch(g)
            if p.dim() > 1:
                self.rows += 3
                p[: self.rows].add_(state["m"][: self.rows], alpha=-LR)
            return state["m"]

    optimizer, _ = run(FirstRows, state="block8")
    assert error(FirstRows, optimizer) < 0.02


class ThreeMoments(Momentum):
    def direction(self, p: Tensor, g: Tensor, state: State) -> Tensor:
        for name in ("second", "third"):
            if name not in state:
                state[name] = torch.zeros_like(p)
            state[name].mul_(0.9).add_(g.to(p.dtype), alpha=0.1)
        self.branch(g)
        return state["m"] + state["second"] + state["third"]


def test_a_budget_is_followed_as_by_adam_and_refuses_who_holds_more() -> None:
    optimizer, backend = run_within(Adam, 8)
    assert all(map(is_packed, state_of(optimizer).values()))
    assert held_per_parameter(optimizer) == pytest.approx(8.06, abs=0.01)
    assert backend.report().graphs[-1].budgets[0].state == "block16"
    run_within(ThreeMoments, 16)
    with pytest.raises(InvalidOptionError, match=r"=5\.1, where this optimizer holds 6\.1"):
        run_within(ThreeMoments, 5.1)


def test_an_optimizer_that_is_over_its_budget_is_left_as_it_is() -> None:
    params = parameters(shapes=SHAPES)
    optimizer = ThreeMoments(params)
    step: Any = torch.compile(optimizer.step, backend=CollageBackend(bytes_per_parameter=5.1))
    run_steps(step, params, [0])
    before = everything(optimizer)
    with pytest.raises(InvalidOptionError):
        run_steps(step, params, [1])
    assert not differences(before, everything(optimizer))
