"""Values of weights that leave one part of a step and are used in another: snapshots, anchors, differences.

An inner optimizer of torch is a graph of its own, so the step around it is several graphs.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from collage_fx import CollageBackend, full_value, install
from collage_fx.errors import UncompensatedParameterError
from tests.support.training import Descent, parameters, set_gradients, set_gradients_of_both
from tests.support.warned import warned

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


def errors(
    make: Callable[[Parameters, bool], Step], steps: int = STEPS, dtype: torch.dtype = torch.bfloat16
) -> float:
    """Return the error of the displacement; ``make`` gets parameters, and whether to compensate."""
    torch._dynamo.reset()
    low = parameters(dtype, SHAPES)
    exact = [torch.nn.Parameter(p.detach().double()) for p in low]
    start = [p.detach().clone() for p in exact]
    ours, reference = make(low, True), make(exact, False)
    for seed in range(steps):
        set_gradients_of_both(low, exact, seed)
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


def stepping_between(
    params: Parameters,
    taken: Callable[[Parameters], list[Tensor]],
    chosen: Callable[[list[Tensor]], list[Tensor]] = list,
    *,
    compensate: bool,
    is_early: bool = False,
) -> Step:
    """Take values of weights, step, go half of the way back; ``is_early``: functions are called before."""
    optimizer, take = SGD(params, lr=LR), taken

    @torch.no_grad()
    def back(weights: Parameters, at: list[Tensor]) -> None:
        for p, s in zip(weights, at, strict=True):
            p.lerp_(s, 0.5)

    bring = back
    if compensate:
        take, bring = (torch.compile(each, backend=CollageBackend()) for each in (taken, back))  # type: ignore[assignment]
        if is_early:
            take(params)
        install(optimizer)

    def step() -> None:
        at = chosen(take(params))
        optimizer.step()
        bring(params, at)

    return step


@pytest.mark.filterwarnings("error:collage_fx")
@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_functions_around_a_step_hand_weights_on_whole(is_early: bool, dtype: torch.dtype) -> None:
    """Also functions that were compiled when nobody knew of an optimizer of their weights."""

    @torch.no_grad()
    def taken(weights: Parameters) -> list[Tensor]:
        return [p.clone() for p in weights]

    def make(params: Parameters, compensate: bool) -> Step:
        return stepping_between(params, taken, compensate=compensate, is_early=is_early)

    assert errors(make, dtype=dtype) < ALLOWED


def test_a_function_called_early_follows_whole_weights() -> None:
    """An average of weights whose optimizer is installed later."""

    @torch.no_grad()
    def follow(averages: list[Tensor], weights: Parameters) -> None:
        for average, p in zip(averages, weights, strict=True):
            average.lerp_(p, 0.7)

    def make(params: Parameters, compensate: bool) -> Step:
        averages, optimizer = [p.detach().clone() for p in params], SGD(params, lr=LR)
        run = torch.compile(follow, backend=CollageBackend()) if compensate else follow
        run(averages, params)
        if compensate:
            install(optimizer)

        def step() -> None:
            optimizer.step()
            run(averages, params)
            made.append(averages)

        return step

    made: list[list[Tensor]] = []
    errors(make, steps=4)
    # ours and the reference's, by turns
    for mine, exact, p in zip(made[0], made[1], parameters(shapes=SHAPES), strict=True):
        moved = exact - p.detach().double()
        assert float((full_value(mine).double() - exact).norm()) < ALLOWED * float(moved.norm())


class Holder:
    """Object that is no optimizer, around one, in an attribute, a list or a dictionary."""

    def __init__(self, params: Parameters, kind: str, *, installed: bool) -> None:
        self.params = params
        inner = SGD(params, lr=LR)
        if installed:
            install(inner)
        self.inner: Any = {"attribute": inner, "list": [inner], "dictionary": {0: inner}}[kind]

    @torch.no_grad()
    def step(self) -> None:
        at = [p.detach().clone() for p in self.params]
        (self.inner if isinstance(self.inner, Optimizer) else self.inner[0]).step()
        for p, s in zip(self.params, at, strict=True):
            p.lerp_(s, 0.5)


@pytest.mark.filterwarnings("error:collage_fx")
@pytest.mark.parametrize(
    ("kind", "installed"), [("attribute", False), ("attribute", True), ("list", False), ("dictionary", True)]
)
def test_a_method_around_a_step_hands_weights_on_whole(kind: str, installed: bool) -> None:
    """Dynamo sees no tensor among the variables of such a method."""

    def make(params: Parameters, compensate: bool) -> Step:
        holder = Holder(params, kind, installed=compensate and installed)
        return torch.compile(holder.step, backend=CollageBackend()) if compensate else holder.step

    assert errors(make) < ALLOWED


class Copies(Descent):
    """Deep copies of a tensor of a recorded step."""

    def __init__(self, params: Parameters, what: str) -> None:
        super().__init__(params, lr=LR)
        self.what = what

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad.double().norm() > 0:  # the step is recorded
                p.add_(p.grad, alpha=-LR)
                original = {"parameter": p, "gradient": p.grad, "value": 2 * p, "view": p.data}[self.what]
                copied = copy.deepcopy(original).detach()
                p.mul_(1 - LR)
                p.add_(copied, alpha=-LR)


@pytest.mark.parametrize("what", ["parameter", "gradient", "value", "view"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_deep_copies_are_copies(what: str, dtype: torch.dtype) -> None:
    def make(params: Parameters, compensate: bool) -> Step:
        optimizer = Copies(params, what)
        return install(optimizer).step if compensate else optimizer.step

    assert errors(make, dtype=dtype) < ALLOWED


class HandsOnBoth(Outer):
    """A vector and its pieces cross, in one memory."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        flat = torch.cat([p.reshape(-1) for p in self.params])
        parts = pieces(flat, self.params)
        self.inner.step()
        flat.mul_(0.5)
        for p, s in zip(self.params, parts, strict=True):
            p.lerp_(s, 0.5)


def test_a_step_whose_values_cannot_cross_whole_is_recorded() -> None:
    def make(params: Parameters, compensate: bool) -> Step:
        optimizer = HandsOnBoth(params, "SGD")
        return install(optimizer).step if compensate else optimizer.step

    assert errors(make) < ALLOWED


def test_a_function_whose_values_cannot_cross_whole_is_refused_and_the_remedy_works() -> None:
    def make(params: Parameters, compensate: bool, *, owned: bool = True) -> Step:
        @torch.no_grad()
        def taken(weights: Parameters) -> list[Tensor]:
            flat = torch.cat([p.reshape(-1) for p in weights])
            return [flat, *(each.clone() if owned else each for each in pieces(flat, weights))]

        return stepping_between(params, taken, lambda made: made[1:], compensate=compensate)

    low = parameters(shapes=SHAPES)
    set_gradients(low)
    before = [full_value(p) for p in low]
    with pytest.raises(UncompensatedParameterError, match=r"test_values_between_parts\.py.*\n.*clone"):
        make(low, compensate=True, owned=False)()
    assert all(torch.equal(x, full_value(p)) for x, p in zip(before, low, strict=True))
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


DETACHED: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p.detach().view(p.shape),
}


@pytest.mark.parametrize("detached", DETACHED)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_average", [True, False], ids=["average", "copy"])
def test_a_function_that_reads_detached_weights_too_early_says_so(
    detached: str, kind: torch.dtype, is_average: bool
) -> None:
    """Their optimizer is installed afterwards. And the remedy is right."""
    torch._dynamo.reset()
    params = parameters(shapes=SHAPES)
    kept = [p.detach().to(kind).clone() for p in params]

    @torch.compile(backend=CollageBackend())
    def keep(kept: list[Tensor], weights: list[Tensor]) -> None:
        for each, weight in zip(kept, weights, strict=True):
            each.lerp_(weight.to(each.dtype), 0.5) if is_average else each.copy_(weight)

    def run() -> None:
        with torch.no_grad():
            keep(kept, [DETACHED[detached](p) for p in params])

    def step() -> None:
        set_gradients(params)
        optimizer.step()

    assert warned(run) == []
    optimizer = install(Descent(params, lr=LR))
    (text,) = warned(step, run, run)
    assert "torch.compiler.reset()" in text
    torch.compiler.reset()
    before, wholes = [full_value(each) for each in kept], [full_value(p) for p in params]
    for _ in range(STEPS):
        assert warned(step, run) == []
        wholes = [full_value(p) for p in params]
        before = [old.lerp(p, 0.5) if is_average else p for old, p in zip(before, wholes, strict=True)]
    for each, meant, start in zip(kept, before, parameters(shapes=SHAPES), strict=True):
        assert float((full_value(each) - meant).norm() / (meant - start).norm()) < ALLOWED


# Views of weights that are given to functions. --------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda p: p.detach()[1:],
    "rows of data": lambda p: p.data[1:],
    "rows, detached": lambda p: p[1:].detach(),
    "flat": lambda p: p.detach().view(-1),
    "transposed": lambda p: p.detach().t(),
    "whole": lambda p: p.detach(),
}


def over_views(
    params: Parameters, view: Callable[[Tensor], Tensor], *, outside: bool, writes: bool, compensate: bool
) -> Step:
    """Take values of views, step, and go half of the way back, in views that are taken outside or inside."""
    optimizer = SGD(params, lr=LR)

    @torch.no_grad()
    def take(given: list[Tensor]) -> list[Tensor]:
        return [(each if outside else view(each)).clone() for each in given]

    @torch.no_grad()
    def back(given: list[Tensor], at: list[Tensor]) -> None:
        for each, s in zip(given, at, strict=True):
            (each if outside and writes else view(each)).lerp_(s, 0.5)

    taken, bring, backend = take, back, CollageBackend()
    if compensate:
        taken, bring = (torch.compile(each, backend=backend) for each in (take, back))  # type: ignore[assignment]
        install(optimizer, backend=backend)

    def given() -> list[Tensor]:
        return [view(p) for p in params] if outside else [*params]

    def step() -> None:
        at = taken(given())
        optimizer.step()
        bring(given() if writes else [*params], at)

    return step


@pytest.mark.filterwarnings("error:collage_fx")
@pytest.mark.parametrize("writes", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_that_are_given_to_functions_are_refused_and_the_remedy_works(name: str, writes: bool) -> None:
    def make(params: Parameters, compensate: bool, *, outside: bool = False) -> Step:
        matrices = [p for p in params if p.dim() == 2]
        return over_views(matrices, VIEWS[name], outside=outside, writes=writes, compensate=compensate)

    if name == "whole":
        assert errors(lambda params, compensate: make(params, compensate, outside=True)) < ALLOWED
        return
    low = parameters(shapes=SHAPES)
    set_gradients(low)
    with pytest.raises(UncompensatedParameterError, match=r"reads or writes a view(.|\n)*params\[0\]"):
        make(low, compensate=True, outside=True)()
    torch._dynamo.reset()
    assert errors(make) < ALLOWED


def test_numbers_of_views_are_left_to_the_program() -> None:
    """A norm of a view for a log changes no weight."""
    params = parameters(shapes=SHAPES)
    set_gradients(params)
    optimizer = install(SGD(params, lr=LR))
    optimizer.step()
    norm = torch.compile(lambda rows: rows.float().norm(), backend=CollageBackend())
    rows = params[0].detach()[1:]
    assert float(norm(rows)) == pytest.approx(float(rows.float().norm()), rel=2**-8)


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
            state["product"] = (p @ p.t()).to(wide)
            state["sum of products"] = torch.addmm(p @ p.t(), p, p.t(), beta=2).to(wide)
            state["of a matrix and a vector"] = torch.mv(p, p[0]).to(wide)
            state["batch"] = torch.einsum(
                "bij,bkj->bik", p.view(2, -1, p.shape[1]), p.view(2, -1, p.shape[1])
            ).to(wide)
        super().step()


class KeepsStatisticsAndBranches(KeepsStatistics):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["params"][0].norm() > 0:
            super().step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["stance", "disabled", "compiled", "recorded"])
def test_float32_state_is_computed_from_unrounded_values(way: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    (low,) = parameters(shapes=[(16, 8)], dtype=dtype)
    exact = torch.nn.Parameter(low.detach().double())
    kind = KeepsStatisticsAndBranches if way == "recorded" else KeepsStatistics
    ours, reference = install(kind([low], lr=LR)), kind([exact], lr=LR)
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
