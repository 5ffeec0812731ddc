"""Values of weights that leave one part of a step and are used in another: snapshots, anchors, differences.

An inner optimizer of torch is a graph of its own, so the step around it is several graphs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from collage_fx import CollageBackend, full_value, install
from collage_fx.errors import UncompensatedParameterError
from tests.support.training import Descent, parameters, set_gradients

Parameters = list[torch.nn.Parameter]
Step = Callable[[], Any]

LR = 1e-4
STEPS = 8
SHAPES = ((16, 8), (8,))

#: Largest error of the displacement, relative to it. A step of 1e-5 beside weights up to 4 is rounded to
#: float32, half an ulp of which, 2**-23, is 1.2 % of it. The errors of 8 steps are independent: they are
#: a third of this, 8**0.5 / 8.
ALLOWED = 0.01


def pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([each.numel() for each in like])
    return [part.view_as(each) for part, each in zip(parts, like, strict=True)]


SNAPSHOTS: dict[str, Callable[[Sequence[Tensor]], list[Tensor]]] = {
    "clone": lambda ps: [p.detach().clone() for p in ps],
    "data": lambda ps: [p.data.clone() for p in ps],
    "plus zero": lambda ps: [p + 0 for p in ps],
    "empty": lambda ps: [torch.empty_like(p).copy_(p) for p in ps],
    "foreach": lambda ps: list(torch._foreach_add(list(ps), 0.0)),
    "stack": lambda ps: [torch.stack([p, p])[0] for p in ps],
    "one vector": lambda ps: pieces(torch.cat([p.reshape(-1) for p in ps]), ps),
    "dictionary": lambda ps: list({i: p.clone() for i, p in enumerate(ps)}.values()),
    "half": lambda ps: [0.5 * p + 0.5 * p for p in ps],
    "float": lambda ps: [p.float() if p.dtype is torch.bfloat16 else p.clone() for p in ps],
}

BACK: dict[str, Callable[[Tensor, Tensor], object]] = {
    "lerp": lambda p, s: p.lerp_(s.to(p.dtype), 0.5),
    "copy": lambda p, s: p.copy_(s + 0.5 * (p - s)),
    "sum": lambda p, s: p.mul_(0.5).add_(s, alpha=0.5),
    "difference": lambda p, s: p.sub_(0.5 * (p - s)),
}

INNER: dict[str, Callable[[Parameters], Optimizer]] = {
    "SGD": lambda ps: SGD(ps, lr=LR),
    "momentum": lambda ps: SGD(ps, lr=LR, momentum=0.5),
    "AdamW": lambda ps: AdamW(ps, lr=LR / 10),
    "own": lambda ps: Descent(ps, lr=LR),
}


class Outer(Optimizer):
    """Optimizer around another one."""

    def __init__(self, params: Iterable[torch.nn.Parameter], inner: str) -> None:
        super().__init__(params, {})
        self.count = 0
        self.params: Parameters = self.param_groups[0]["params"]
        self.inner = INNER[inner](self.params)
        self.kept: list[Tensor] = []


class Interpolating(Outer):
    """Snapshot, inner step, and half of the way back, with each part as drawn.

    Args:
        params: the parameters.
        drawn: inner optimizer, snapshot, way back, place of the snapshot.
    """

    def __init__(self, params: Parameters, drawn: Sequence[str]) -> None:
        inner, self.snapshot, self.way, self.place = drawn
        super().__init__(params, inner)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        made = SNAPSHOTS[self.snapshot](self.params)
        if self.place == "attribute":
            self.kept = made
        elif self.place == "state":
            for p, s in zip(self.params, made, strict=True):
                self.state[p]["snapshot"] = s
        self.inner.step()
        if self.place == "attribute":
            made = self.kept
        elif self.place == "state":
            made = [self.state[p]["snapshot"] for p in self.params]
        for p, s in zip(self.params, made, strict=True):
            BACK[self.way](p, s)


def errors(make: Callable[[Parameters, bool], Step], steps: int = STEPS) -> float:
    """Return the error of the displacement; ``make`` gets parameters, and whether to compensate."""
    torch._dynamo.reset()
    low = parameters(shapes=SHAPES)
    exact = [torch.nn.Parameter(p.detach().double()) for p in low]
    start = [p.detach().clone() for p in exact]
    ours, reference = make(low, True), make(exact, False)
    for seed in range(steps):
        set_gradients(low, seed)
        for p, x in zip(low, exact, strict=True):
            assert p.grad is not None
            x.grad = p.grad.double()
        ours()
        reference()
    met = torch.cat([(full_value(p) - s).view(-1) for p, s in zip(low, start, strict=True)])
    meant = torch.cat([(x.detach() - s).view(-1) for x, s in zip(exact, start, strict=True)])
    return float((met - meant).norm() / meant.norm())


def drawn(count: int) -> list[Any]:
    """Draw programs; each snapshot is taken, with an inner optimizer of torch."""
    draw, cases = random.Random(0), []
    for i, snapshot in enumerate(draw.sample(list(SNAPSHOTS), count)):
        inner = draw.choice(list(INNER)[: 3 if i else 4])
        way, place = draw.choice(list(BACK)), draw.choice(["local", "attribute", "state"])
        cases.append(pytest.param((inner, snapshot, way, place), id=f"{inner}-{snapshot}-{way}-{place}"))
    return cases


@pytest.mark.filterwarnings("error:collage_fx")
@pytest.mark.parametrize("program", drawn(len(SNAPSHOTS)))
def test_a_snapshot_crosses_an_inner_step_whole(program: Sequence[str]) -> None:
    def make(params: Parameters, compensate: bool) -> Step:
        optimizer = Interpolating(params, program)
        return install(optimizer).step if compensate else optimizer.step

    assert errors(make) < ALLOWED


class EveryThird(Outer):
    """Lookahead: a part of the step has no operations in the first two steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.count % 3 == 0:
            self.kept = [p.detach().clone() for p in self.params]
        self.inner.step()
        if self.count % 3 == 2:
            for p, s in zip(self.params, self.kept, strict=True):
                p.lerp_(s, 0.5)
        self.count += 1


class Anchored(Outer):
    """The difference of two weights crosses."""

    def __init__(self, params: Parameters, inner: str) -> None:
        super().__init__(params, inner)
        self.kept = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        away = [p - s for p, s in zip(self.params, self.kept, strict=True)]
        self.inner.step()
        for p, each in zip(self.params, away, strict=True):
            p.sub_(each, alpha=0.5)


class Shared(Outer):
    """An optimizer with the groups of another one."""

    def __init__(self, params: Parameters, inner: str) -> None:
        super().__init__(params, inner)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        at = [p.detach().clone() for p in self.params]
        self.inner.step()
        for p, s in zip(self.params, at, strict=True):
            p.copy_(s + 0.5 * (p - s))


@pytest.mark.filterwarnings("error:collage_fx")
@pytest.mark.parametrize("kind", [EveryThird, Anchored, Shared])
def test_parts_that_come_late_or_write_again_are_compensated(kind: type[Outer]) -> None:
    def make(params: Parameters, compensate: bool) -> Step:
        optimizer = kind(params, "SGD")
        return install(optimizer).step if compensate else optimizer.step

    assert errors(make) < ALLOWED


@pytest.mark.filterwarnings("error:collage_fx")
def test_functions_around_a_step_hand_weights_on_whole() -> None:
    def make(params: Parameters, compensate: bool) -> Step:
        optimizer = SGD(params, lr=LR)

        @torch.no_grad()
        def taken(weights: Parameters) -> list[Tensor]:
            return [p.clone() for p in weights]

        @torch.no_grad()
        def back(weights: Parameters, at: list[Tensor]) -> None:
            for p, s in zip(weights, at, strict=True):
                p.lerp_(s, 0.5)

        take: Any = taken
        bring: Any = back
        if compensate:
            install(optimizer)
            take, bring = (torch.compile(each, backend=CollageBackend()) for each in (taken, back))

        def step() -> None:
            at = take(params)
            optimizer.step()
            bring(params, at)

        return step

    assert errors(make) < ALLOWED


class HandsOnBoth(Outer):
    """A vector and its pieces cross, in one memory; with ``owned`` the pieces have memory of their own."""

    owned = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        flat = torch.cat([p.reshape(-1) for p in self.params])
        parts = [each.clone() if self.owned else each for each in pieces(flat, self.params)]
        self.inner.step()
        flat.mul_(0.5)
        for p, s in zip(self.params, parts, strict=True):
            p.lerp_(s, 0.5)


def test_what_cannot_cross_whole_is_refused_and_the_remedy_works() -> None:
    torch._dynamo.reset()
    low = parameters(shapes=SHAPES)
    set_gradients(low)
    before = [p.detach().clone() for p in low]
    with pytest.raises(UncompensatedParameterError, match=r"test_values_between_parts\.py.*\n.*clone"):
        install(HandsOnBoth(low, "SGD")).step()
    assert all(map(torch.equal, before, low))

    def make(params: Parameters, compensate: bool) -> Step:
        optimizer = HandsOnBoth(params, "SGD")
        optimizer.owned = True
        return install(optimizer).step if compensate else optimizer.step

    assert errors(make) < ALLOWED


def test_a_forward_pass_is_left_to_inductor() -> None:
    """Its results are computed from weights, and are no values of weights."""
    torch._dynamo.reset()
    backend = CollageBackend()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8)).bfloat16()
    install(SGD(model.parameters(), lr=LR))
    run = torch.compile(model, backend=backend)
    with torch.no_grad():
        run(torch.ones(4, 8, dtype=torch.bfloat16))
    assert ["lowered by Inductor as it is" in each.note for each in backend.report().graphs] == [True]


# 16-bit values on the way to a float32 state. ---------------------------------------------------------------


class KeepsStatistics(Descent):
    """State in float32, computed from parameters in their own dtype."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state, wide = self.state[p], max(torch.float32, p.dtype, key=lambda each: each.itemsize)
            state["norm"] = p.norm(dim=-1).to(wide)
            state["squares"] = (p * p).sum(-1).to(wide)
            state["scaled"] = (p * 1.01).to(wide)
            state["centred"] = (p - p.mean(-1, keepdim=True)).to(wide)
        super().step()


@pytest.mark.parametrize("way", ["stance", "disabled", "compiled"])
def test_float32_state_is_computed_from_unrounded_values(way: str) -> None:
    torch._dynamo.reset()
    (low,) = parameters(shapes=[(16, 8)])
    exact = torch.nn.Parameter(low.detach().double())
    ours, reference = install(KeepsStatistics([low], lr=LR)), KeepsStatistics([exact], lr=LR)
    first: dict[str, Tensor] = {}
    for seed in range(STEPS):
        set_gradients([low], seed)
        assert low.grad is not None
        exact.grad = low.grad.double()
        with torch._dynamo.config.patch(disable=way == "disabled"):
            if way == "stance":
                with torch.compiler.set_stance("force_eager"):
                    ours.step()
            else:
                ours.step()
        reference.step()
        first = first or {name: each.clone() for name, each in reference.state[exact].items()}
    for name, meant in reference.state[exact].items():
        met = ours.state[low][name].double()
        assert float((met - meant).norm() / (meant - first[name]).norm()) < ALLOWED, name
