"""Steps that sum their changes are nearer to float64 than float32's, at no byte, for any optimizer."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.beyond_fp32 import (
    WAYS_OF_SPREADS,
    decay_reached,
    directed,
    error,
    errors_of_spread,
    moved,
    none,
    off,
)
from collage_fx import CollageBackend, explain, install
from tests.support.agreement import assert_same, trajectory
from tests.support.optimizers import CompiledOptimizer, gradients
from tests.support.training import parameters, set_gradients
from tests.support.twin import TwinBackend

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((33, 17), (37,))


@dataclass(frozen=True)
class Made:
    """An optimizer, and options of its constructor."""

    kind: Callable[..., Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, weights: list[torch.nn.Parameter], lr: float) -> Optimizer:
        return self.kind(weights, lr=lr, weight_decay=0.01, **self.options)


def _number(lr: float, weights: list[torch.nn.Parameter]) -> Tensor:
    """Return a learning rate as a tensor; torch computes ``1 - lr * decay`` in its dtype."""
    wide = weights[0].dtype is torch.float64
    return torch.tensor(lr, dtype=torch.float64 if wide else torch.float32)


MADE = {
    "AdamW": Made(torch.optim.AdamW),
    "AdamW, foreach": Made(torch.optim.AdamW, {"foreach": True}),
    "AdamW, fused": Made(torch.optim.AdamW, {"fused": True}),
    "AdamW, amsgrad": Made(torch.optim.AdamW, {"amsgrad": True}),
    "AdamW, lr a tensor": Made(
        lambda weights, lr, **options: torch.optim.AdamW(weights, _number(lr, weights), **options)
    ),
    "NAdam": Made(torch.optim.NAdam, {"decoupled_weight_decay": True}),
    "RAdam": Made(torch.optim.RAdam, {"decoupled_weight_decay": True}),
    "Adafactor": Made(torch.optim.Adafactor, {"eps": (1e-30, 1e-3)}),
    "Muon": Made(torch.optim.Muon),
}


def way_of(name: str, dtype: torch.dtype, options: dict[str, Any] | None = None) -> Tensor:
    """Return the way of a matrix at a learning rate at which float32 decays three times too much."""
    return moved(lambda weights: MADE[name](weights, 3e-6), dtype, options, steps=200, shape=(16, 32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_a_step_is_nearer_to_float64_than_float32(name: str, dtype: torch.dtype) -> None:
    """By 47 times, if the rest were exact; a fifth leaves room for what else an optimizer rounds.

    A decay of 3e-8 becomes 6e-8 or 0 in float32, in each of 200 steps in one direction: 200 * 2**-24 of a
    weight. A sum is rounded to its last place at random: sqrt(200) * 2**-24 / sqrt(12).
    """
    exact = way_of(name, torch.float64)
    of_float32 = off(way_of(name, torch.float32), exact)
    found = off(way_of(name, dtype, {}), exact)
    assert found < of_float32 / 5, (found, of_float32)


@pytest.mark.parametrize(
    ("name", "spread", "lr"),
    [
        ("AdamW", 0.02, 1e-4),
        ("AdamW", 0.02, 1e-6),
        ("AdamW", 0.5, 1e-5),
        ("AdamW, amsgrad", 0.02, 1e-5),
        ("AdamW, foreach", 0.02, 1e-5),
        ("NAdam", 0.02, 1e-5),
        ("SGD", 0.02, 1e-4),
        ("SGD, Nesterov", 0.5, 1e-5),
    ],
)
def test_weights_of_every_size_are_as_near_as_float32_or_a_ten_thousandth(
    name: str, spread: float, lr: float
) -> None:
    """The matrices of a language model are N(0, .02), where a moment in bfloat16 counts for most."""
    of_float32, found = errors_of_spread(name, spread, lr, [*WAYS_OF_SPREADS][:2])
    assert found <= max(of_float32, 1e-4)


def test_radams_error_is_that_of_its_last_steps() -> None:
    """Errors do not add up: after twice as many steps they are half as large, relative to the way."""
    found = []
    for steps in (600, 1200):
        make = partial(torch.optim.RAdam, lr=1e-4)
        course = partial(moved, make, shape=(64, 128), steps=steps, spread=0.02, gradients=directed)
        found.append(off(course(torch.bfloat16, {}), course(torch.float64, None)))
    assert found[0] < 1.33e-4
    assert found[1] < 0.55 * found[0]


@pytest.mark.parametrize(("state", "bound"), [("block8", 0.0015), ("block16", 1e-5)])
def test_momentum_in_few_bits_is_repaid(state: Any, bound: float) -> None:
    """Ten times less than by dither."""
    course = partial(
        moved,
        partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        shape=(64, 128),
        steps=600,
        gradients=directed,
    )
    exact = course(torch.float64, None)
    repaid, dithered = (
        off(course(torch.bfloat16, {"strategy": "light", "state": state, "rounding": rounding}), exact)
        for rounding in ("repay", "dither")
    )
    assert repaid <= min(bound, dithered / 4)


DECAYS = (1e-9, 1e-8, 3e-8, 1e-7, 1e-6, 1e-4, 1e-2)


@pytest.mark.parametrize(
    ("way", "decay"),
    [
        *(("here, float32", decay) for decay in DECAYS[4:]),
        *(("here, float32, `exact`", decay) for decay in DECAYS),
        *(("here, bfloat16, `plus`", decay) for decay in DECAYS),
        *(("here, bfloat16, `light`, `byte`", decay) for decay in DECAYS[4:]),
    ],
)
def test_the_decay_is_what_was_asked_for(way: str, decay: float) -> None:
    assert abs(decay_reached(way, decay) - 1) < 0.01


@pytest.mark.parametrize("way", ["here, bfloat16, `plus`", "here, float32, `exact`"])
def test_updates_below_half_a_unit_of_float32_arrive(way: str) -> None:
    assert error(way, 1e-7) < error("float32, or float32 masters", 1e-7) / 5


class Recorded(torch.optim.SGD):
    """SGD with weight decay beside the update, and a number that Python reads in each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.abs().max().item() < 1e9:
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {}), (Recorded, {})]
)
def test_float32_parameters_decay_with_any_optimizer(kind: Any, options: dict[str, Any]) -> None:
    make = partial(Made(kind, options), lr=1e-6)
    course = partial(moved, make, steps=400, gradients=none)
    exact = course(torch.float64, None)
    left, exactly = (course(torch.float32, options) for options in ({}, {"error_format": "exact"}))
    assert off(exactly, exact) < 0.1
    assert off(left, exact) > 0.3


def test_float32_parameters_go_on_with_the_bits_of_a_run_that_was_not_stopped() -> None:
    """The count of their steps is in checkpoints; plain torch and weights of bfloat16 leave it out."""

    def started(weights: Tensor) -> Optimizer:
        return torch.optim.AdamW([torch.nn.Parameter(weights.clone())], lr=1e-6)

    def stepped(optimizer: Optimizer, steps: range) -> Tensor:
        [weights] = optimizer.param_groups[0]["params"]
        for i in steps:
            drawn = torch.randn(64, 64, generator=torch.Generator().manual_seed(i))
            weights.grad = drawn.to(weights.dtype)
            optimizer.step()
        return weights.detach()

    options: Any = {"error_format": "exact"}
    run = install(started(torch.randn(64, 64, generator=torch.Generator().manual_seed(9))), **options)
    half = stepped(run, range(5)).clone()
    saved = copy.deepcopy(run.state_dict())
    whole = stepped(run, range(5, 10))
    for is_installed, dtype in ((True, torch.float32), (False, torch.float32), (True, torch.bfloat16)):
        resumed = started(half.to(dtype))
        if is_installed:
            install(resumed, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            resumed.load_state_dict(copy.deepcopy(saved))
        ended = stepped(resumed, range(5, 10))
        assert ended.equal(whole) == (is_installed and dtype is torch.float32)


def test_a_copied_or_pickled_backend_knows_whether_a_format_was_named() -> None:
    options: Any
    for options in ({}, {"error_format": "exact"}):
        backend = CollageBackend(**options)
        again = pickle.loads(pickle.dumps(backend))
        assert again.options == backend.options
        assert again.options.sums_float32 == bool(options)


@pytest.mark.parametrize("beta2", [0.9999, 0.99999])
def test_a_slow_average_decays_as_it_should(beta2: float) -> None:
    """The factor of float32 is off by up to 2**-25, in each of 1000 steps in one direction.

    Roundings of the average add up to sqrt(1000) * 2**-25 at random, a thirtieth of that.
    """
    squares = {}
    for dtype, changes in ((torch.float64, None), (torch.float32, None), (torch.float32, "summed")):
        torch._dynamo.reset()
        weights = torch.nn.Parameter(torch.ones(64, dtype=dtype))
        optimizer = torch.optim.AdamW([weights], lr=1e-3, betas=(0.9, beta2))
        step: Any = optimizer.step
        if changes is not None:
            step = torch.compile(optimizer.step, backend=CollageBackend())
        for i in range(2000):
            weights.grad = torch.full((64,), 1e-3 if i < 1000 else 0.0, dtype=dtype)
            step()
        squares[dtype, changes] = optimizer.state[weights]["exp_avg_sq"].double()
    exact = squares[torch.float64, None]
    summed, plain = (off(squares[torch.float32, changes], exact) for changes in ("summed", None))
    assert summed < plain / 3, (summed, plain)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("strategy", ["light", "plus", "full"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_bits_are_eager_bits(dtype: torch.dtype, strategy: Any, foreach: bool) -> None:
    def make(weights: list[torch.nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.1, foreach=foreach)

    rig = CompiledOptimizer(SHAPES, make, TwinBackend(strategy=strategy), dtype=dtype)
    start, grads = rig.start(), list(gradients(SHAPES, 20))
    compiled, eager = (trajectory(rig, start, grads, engine=engine) for engine in ("compiled", "eager"))
    assert_same(compiled, eager)
    assert [graph.route.unit for graph in rig.backend.report().graphs] == ["in parts"]


def test_as_written_errs_as_float32_does() -> None:
    exact = way_of("AdamW", torch.float64)
    of_float32 = off(way_of("AdamW", torch.float32), exact)
    options = {"strategy": "full", "rounding": "nearest", "changes": "as written"}
    found = off(way_of("AdamW", torch.bfloat16, options), exact)
    # The same decays; the updates of a compiled step differ in last bits from eager ones.
    assert abs(found / of_float32 - 1) < 0.01


def test_a_report_of_float32_weights_says_what_was_done() -> None:
    weights = parameters(shapes=[(4, 8)] * 2, dtype=torch.float32)
    set_gradients(weights)
    report = explain(torch.optim.AdamW(weights))
    assert "AdamW: updates of float32 tensors, without error terms; their changes are summed" in str(report)
    assert "bfloat16" in str(explain(torch.optim.AdamW(weights), changes="as written"))


@pytest.mark.parametrize(
    ("options", "dtype", "but"),
    [
        ({}, torch.float32, "float32 parameters, such as {}: use error_format='exact'."),
        ({"error_format": "exact"}, torch.float32, ""),
        (
            {"error_format": "byte"},
            torch.bfloat16,
            "bfloat16 parameters, such as {}: use error_format='exact'.",
        ),
        ({"rounding": "nearest"}, torch.bfloat16, "use error_format='exact', rounding='repay'."),
        ({"bytes_per_parameter": 8, "error_format": "exact"}, torch.float32, ""),
    ],
)
def test_a_report_names_parameters_that_get_no_decay(options: Any, dtype: torch.dtype, but: str) -> None:
    weights = parameters(shapes=[(64, 64)], dtype=dtype)
    set_gradients(weights)
    report = explain(torch.optim.AdamW(weights, lr=1e-6, weight_decay=0.01), **options)
    told = " ".join(str(report).split())
    assert "Here it is applied" + (", but little or nothing of it to" if but else ".") in told
    assert but.format("param_groups[0].params[0]") in told


@pytest.mark.parametrize(
    ("options", "what_happens"),
    [
        ({}, "Here it is applied."),
        ({"changes": "as written"}, "So it is here"),
        ({"strategy": "none"}, "So it is"),
    ],
)
def test_a_report_warns_of_weight_decay_that_float32_does_not_apply(options: Any, what_happens: str) -> None:
    weights = parameters(shapes=[(4, 8)])
    set_gradients(weights)
    told = " ".join(str(explain(torch.optim.AdamW(weights, lr=1e-6, weight_decay=0.01), **options)).split())
    assert "weight decay is 1e-08 in a step" in told
    assert "it would be 0. " + what_happens in told
    assert "weight decay is" not in str(explain(torch.optim.AdamW(weights, lr=1e-3), **options))
