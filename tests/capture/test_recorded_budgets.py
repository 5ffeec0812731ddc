"""Recorded steps pack no state: what asks for packed state is refused, and other budgets are kept."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import CollageBackend, full_value
from collage_fx.capture.recording import Request, record
from collage_fx.choices import PackedFormatName
from collage_fx.errors import InvalidOptionError
from collage_fx.numerics import ERROR_FORMATS
from collage_fx.state import held_per_parameter
from collage_fx.state.packed import is_packed
from tests.support.training import Descent, differences, everything, parameters, run_steps, set_gradients
from tests.support.warned import warned

SHAPES = ((64, 96), (5,))
LR = 1e-3

State = dict[str, Any]


class Recorded(Descent):
    """Calls ``update`` for each parameter, after a branch on its gradient's values."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.branch(p.grad)
            self.update(p, p.grad, self.state[p])

    def update(self, p: Tensor, g: Tensor, state: State) -> None:
        raise NotImplementedError

    def branch(self, value: Tensor) -> None:
        if value.norm() > 1e9:
            raise AssertionError


class Adam(Recorded):
    """In two parts: the moments, then the parameter."""

    def update(self, p: Tensor, g: Tensor, state: State) -> None:
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        m, v = state["m"], state["v"]
        m.mul_(0.9).add_(g.to(m.dtype), alpha=0.1)
        v.mul_(0.95).add_(g * g, alpha=0.05)
        self.branch(m)
        p.add_(m / v.sqrt().add_(1e-8), alpha=-LR)


class ThreeMoments(Recorded):
    def update(self, p: Tensor, g: Tensor, state: State) -> None:
        for name in ("first", "second", "third"):
            if name not in state:
                state[name] = torch.zeros_like(p)
            state[name].mul_(0.9).add_(g.to(p.dtype), alpha=0.1)
        p.add_(state["first"] + state["second"] + state["third"], alpha=-LR)


class NoState(Recorded):
    def update(self, p: Tensor, g: Tensor, state: State) -> None:
        p.add_(g.to(p.dtype), alpha=-LR)


def run(optimizer: Optimizer, backend: CollageBackend, seeds: range) -> None:
    run_steps(torch.compile(optimizer.step, backend=backend), optimizer.param_groups[0]["params"], seeds)


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=LR, betas=(0.9, 0.95), weight_decay=0.0)


#: Relative noise of averages that are rounded by dither. Its standard deviation is half a distance, at most
#: 2**-8 of a number; an average with a decay of b has sqrt(1 / (1 - b**2)) times as much; a root halves it.
NOISE = 2.0**-8 * (1 / (1 - 0.9**2) + 1 / (1 - 0.95**2) / 4) ** 0.5


def error_and_bound(kind: Any, optimizer: Optimizer, steps: int, error_format: str) -> tuple[float, float]:
    """The distance from where float64 ends, relative to the way there, and what it may be.

    ``NOISE``, and what parameters lose of each step: a distance of the error format's, up or down.
    """
    rounded = parameters(shapes=SHAPES)
    start = [p.detach().double() for p in rounded]
    params = [torch.nn.Parameter(p.clone()) for p in start]
    reference = kind(params)
    for seed in range(steps):
        set_gradients(rounded, seed)
        for p, of in zip(params, rounded, strict=True):
            assert of.grad is not None
            p.grad = of.grad.double()
        reference.step()
    ends = [full_value(p.detach()) for p in optimizer.param_groups[0]["params"]]
    moved, lost = norm(params, start), norm(ends, params)
    distance = 2 * float(ERROR_FORMATS[error_format].error_bound(torch.bfloat16).relative)
    return lost / moved, NOISE + steps**0.5 * distance * norm(start) / moved


def norm(one: Sequence[Tensor], other: Sequence[Tensor] | None = None) -> float:
    """The norm of some tensors, or of their distance from others."""
    distances = one if other is None else [a - b for a, b in zip(one, other, strict=True)]
    return sum(float(each.detach().square().sum()) for each in distances) ** 0.5


def momentum(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=LR, momentum=0.9)


def moments(optimizer: Optimizer) -> list[Tensor]:
    """The moments of the parameter that is large enough to have them packed."""
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    return [each for each in state.values() if isinstance(each, Tensor) and each.dim()]


@pytest.mark.parametrize("state", ["block16", "block8"])
def test_packed_state_is_refused_before_the_first_recorded_step(state: PackedFormatName) -> None:
    params = parameters(shapes=SHAPES)
    optimizer = Adam(params)
    before = everything(optimizer)
    with pytest.raises(InvalidOptionError, match=rf"state='{state}' .* captured whole.* recorded") as refused:
        run(optimizer, CollageBackend(state=state), range(1))
    assert "bytes_per_parameter=8 or 10" in str(refused.value)
    assert not differences(before, everything(optimizer))
    assert not optimizer.state


def test_without_strict_state_is_left_unpacked_with_a_warning() -> None:
    params = parameters(shapes=SHAPES)
    optimizer = Adam(params)
    backend = CollageBackend(strategy="light", state="block8", strict=False)
    (told,) = warned(lambda: run(optimizer, backend, range(6)))
    assert "state='block8'" in told
    assert not any(map(is_packed, moments(optimizer)))
    met, bound = error_and_bound(Adam, optimizer, 6, "exact")
    assert met < bound


@pytest.mark.parametrize(
    ("kind", "budget", "held"), [(Adam, 7, 7), (Adam, 8, 8), (Adam, 10, 10), (ThreeMoments, 10, 10)]
)
def test_a_recorded_step_keeps_a_budget_unpacked(kind: type[Recorded], budget: float, held: float) -> None:
    params = parameters(shapes=SHAPES)
    optimizer, backend = kind(params), CollageBackend(bytes_per_parameter=budget)
    run(optimizer, backend, range(6))
    assert held_per_parameter(optimizer) == pytest.approx(held, rel=1e-3)
    assert not any(map(is_packed, moments(optimizer)))
    assert all(budget.state is None for graph in backend.report().graphs for budget in graph.budgets)
    met, bound = error_and_bound(kind, optimizer, 6, backend.report().graphs[-1].budgets[0].error_format)
    assert met < bound


def test_a_budget_that_holds_no_two_moments_holds_an_optimizer_without_state() -> None:
    params = parameters(shapes=SHAPES)
    optimizer, backend = NoState(params), CollageBackend(bytes_per_parameter=3)
    run(optimizer, backend, range(6))
    assert held_per_parameter(optimizer) == pytest.approx(3, rel=1e-3)
    met, bound = error_and_bound(NoState, optimizer, 6, "byte")
    assert met < bound


@pytest.mark.parametrize(("kind", "budget", "held"), [(Adam, 5.1, 7), (ThreeMoments, 8, 10)])
def test_an_optimizer_that_is_over_its_budget_is_left_as_it_is(
    kind: type[Recorded], budget: float, held: int
) -> None:
    params = parameters(shapes=SHAPES)
    optimizer, backend = kind(params), CollageBackend(bytes_per_parameter=budget)
    run(optimizer, backend, range(1))  # which makes the state
    before = everything(optimizer)
    with pytest.raises(
        InvalidOptionError, match=rf"={budget}, where this optimizer holds {held}: .* recorded"
    ):
        run(optimizer, backend, range(1, 2))
    assert not differences(before, everything(optimizer))


@pytest.mark.parametrize("options", [{"state": "block8"}, {"bytes_per_parameter": 5.1}])
def test_captured_steps_that_come_to_be_recorded_are_refused_with_state_as_packed(
    options: dict[str, Any],
) -> None:
    params = parameters(shapes=SHAPES[:1])
    optimizer, backend = adamw(params), CollageBackend(**options)
    run(optimizer, backend, range(3))
    assert all(map(is_packed, moments(optimizer)))
    before = everything(optimizer)
    record(optimizer, Request(backend, {}, strict=True), "of the test")
    with pytest.raises(InvalidOptionError, match="recorded"):
        run_steps(optimizer.step, params, [3])
    assert all(map(is_packed, moments(optimizer)))
    assert not differences(before, everything(optimizer))


def test_captured_steps_that_come_to_be_recorded_go_on_unpacked_within_their_budget() -> None:
    params = parameters(shapes=SHAPES)
    optimizer, backend = adamw(params), CollageBackend(bytes_per_parameter=8)
    run(optimizer, backend, range(3))
    assert all(map(is_packed, moments(optimizer)))
    assert held_per_parameter(optimizer) == pytest.approx(8, rel=2e-3)  # without the counts of dither
    record(optimizer, Request(backend, {}, strict=True), "of the test")
    run_steps(optimizer.step, params, range(3, 6))
    assert not any(map(is_packed, moments(optimizer)))
    assert held_per_parameter(optimizer) == pytest.approx(8, rel=1e-3)
    met, bound = error_and_bound(adamw, optimizer, 6, backend.report().graphs[-1].budgets[0].error_format)
    assert met < bound


def test_a_recorded_step_keeps_the_error_terms_that_captured_steps_have_chosen() -> None:
    """By Adam's budgets they would have another format."""
    params = parameters(shapes=SHAPES)
    optimizer = momentum(params)
    backend = CollageBackend(bytes_per_parameter=7)
    run(optimizer, backend, range(3))
    captured = backend.report().graphs[-1].budgets[0]
    record(optimizer, Request(backend, {}, strict=True), "of the test")
    run_steps(optimizer.step, params, range(3, 6))
    recorded = backend.report().graphs[-1]
    assert recorded.route.recorded
    assert recorded.budgets[0].error_format == captured.error_format
    assert recorded.budgets[0].error_format != recorded.budgets[1].error_format  # of the smallest
    met, bound = error_and_bound(momentum, optimizer, 6, recorded.budgets[0].error_format)
    assert met < bound


def test_a_step_that_torch_is_told_not_to_compile_has_its_state_unpacked_this_once() -> None:
    params = parameters(shapes=SHAPES)
    optimizer, backend = adamw(params), CollageBackend(strategy="light", state="block16")
    step = torch.compile(optimizer.step, backend=backend)
    packed = []
    for seed, stance in enumerate(["default", "default", "force_eager", "default", "default"]):
        with torch.compiler.set_stance(stance):
            run_steps(step, params, [seed])
        packed.append(all(map(is_packed, moments(optimizer))))
    assert packed[1:] == [True, False, True, True]
    met, bound = error_and_bound(adamw, optimizer, 5, "exact")
    assert met < bound


def test_a_recorded_optimizer_unpacks_what_a_checkpoint_holds_packed() -> None:
    """The decoded values, rounded to bfloat16: it goes on as from a checkpoint of these."""
    ends = []
    captured = adamw(parameters(shapes=SHAPES))
    run(captured, CollageBackend(strategy="light", state="block8"), range(3))
    of = captured.state[captured.param_groups[0]["params"][0]]
    for packs in (True, False):
        params = parameters(shapes=SHAPES)
        optimizer = Adam(params)
        first = optimizer.state[params[0]]
        for name, moment in (("m", of["exp_avg"]), ("v", of["exp_avg_sq"])):
            assert is_packed(moment)
            first[name] = moment if packs else torch.empty_like(moment).copy_(moment)
        assert is_packed(first["m"]) == packs
        loaded = Adam(params)
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        run(loaded, CollageBackend(strategy="light"), range(3, 5))
        assert not any(map(is_packed, moments(loaded)))
        ends.append(everything(loaded))
    assert not differences(*ends)
