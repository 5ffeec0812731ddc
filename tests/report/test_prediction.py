"""Predicted errors of weights: near to those that runs measure, and a warning where they are too large."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.beyond_fp32 import directed
from benchmarks.predicted_errors import OPTIMIZERS, SHAPE, WAYS, measured_errors, predicted
from collage_fx import CollageError, backend_of, explain, install
from tests.support.substitutes import failing_prediction
from tests.support.training import Descent

#: Steps after which an installed optimizer knows its updates, if its learning rate does not rise.
ENOUGH_STEPS = 56


def started(name: str, spread: float, lr: float) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter((torch.randn(*SHAPE, generator=generator) * spread).bfloat16())
    return OPTIMIZERS[name]([weights], lr=lr)


def stepped(
    optimizer: torch.optim.Optimizer, steps: int, schedule: Callable[[int], float] | None = None
) -> list[str]:
    """Take steps; return the warnings about predicted errors."""
    generator, (weights,) = torch.Generator().manual_seed(1), optimizer.param_groups[0]["params"]
    scheduler = schedule and torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            weights.grad = directed(SHAPE, generator)
            optimizer.step()
            if scheduler:
                scheduler.step()
    return [text for each in caught if "redicted error" in (text := str(each.message))]


@pytest.mark.parametrize(
    ("name", "way", "spread", "lr"),
    [
        ("AdamW", "10 bytes", 0.5, 1e-6),
        ("AdamW", "5.1 bytes", 0.02, 1e-4),
        ("AdamW", "5.1 bytes", 0.5, 1e-6),
        ("AdamW", "`mcf`", 0.5, 1e-6),
        ("SGD 0.9", "4.1 bytes", 1.0, 1e-6),
        ("SGD 0.9", "`mcf`", 0.02, 1e-6),
    ],
)
def test_an_error_is_predicted_within_a_factor_of_two(name: str, way: str, spread: float, lr: float) -> None:
    """Before the first step by a trial, and by the run's own updates after 56 steps."""
    options = WAYS[name][way]
    [measured] = measured_errors(name, spread, lr, [options])
    optimizer = install(started(name, spread, lr), **options)
    stepped(optimizer, ENOUGH_STEPS)
    of_run = backend_of(optimizer).report().predicted_error()
    assert of_run is not None
    for found in (predicted(name, spread, lr, options), of_run):
        assert abs(math.log2(found / measured)) < 1, (found, measured)


def test_a_trial_is_of_the_learning_rate_that_the_optimizer_has_now() -> None:
    optimizer, other = started("AdamW", 0.5, 1e-3), started("AdamW", 0.5, 1e-6)
    at_first = explain(optimizer, bytes_per_parameter=5.1).predicted_error()
    optimizer.param_groups[0]["lr"] = 1e-6
    now, wanted = (explain(each, bytes_per_parameter=5.1).predicted_error() for each in (optimizer, other))
    assert at_first is not None
    assert now is not None
    assert now > 2 * at_first
    assert now == wanted


def test_a_budget_that_is_too_small_is_told_once_with_the_numbers_and_a_budget_that_is_enough() -> None:
    optimizer = install(started("AdamW", 0.5, 1e-6), bytes_per_parameter=5.1)
    assert not stepped(optimizer, ENOUGH_STEPS - 1)
    [told] = stepped(optimizer, 2 * ENOUGH_STEPS)
    report = backend_of(optimizer).report()
    error = report.predicted_error()
    assert error is not None
    assert error > 0.05
    for part in ("AdamW in 5.06 bytes", f"{error:.2g} of the way", "lr 1e-06", "size 0.49"):
        assert part in told
    assert "bytes_per_parameter=6.1" in told
    assert f"{error:.2g} of the way" in str(report)
    [enough] = [explain(optimizer, bytes_per_parameter=6.1).predicted_error()]
    assert enough is not None
    assert enough <= 0.05


def test_a_budget_that_is_enough_is_not_told() -> None:
    assert not stepped(install(started("AdamW", 0.5, 1e-6)), ENOUGH_STEPS)
    assert not stepped(install(started("AdamW", 0.02, 1e-4), bytes_per_parameter=5.1), ENOUGH_STEPS)


def test_warm_up_is_not_judged_and_its_end_is() -> None:
    """After 120 steps of warm-up to 1e-4, where 5.1 bytes are enough; a hundredth of that is not."""

    def warm_up(step: int) -> float:
        return min(step, 120) / 120

    optimizer = install(started("AdamW", 0.5, 1e-4), bytes_per_parameter=5.1)
    assert not stepped(optimizer, 250, warm_up)
    optimizer = install(started("AdamW", 0.5, 1e-6), bytes_per_parameter=5.1)
    assert not stepped(optimizer, 120, warm_up)
    assert "lr 1e-06" in stepped(optimizer, 130, lambda step: 1.0)[0]


def test_a_strict_backend_warns_and_goes_on() -> None:
    optimizer = install(started("AdamW", 1.0, 1e-6), bytes_per_parameter=5.1, strict=True)
    assert len(stepped(optimizer, ENOUGH_STEPS + 1)) == 1


@pytest.mark.parametrize(
    ("spread", "lr", "budget"),
    [(0.02, 1e-3, 4.1), (0.02, 1e-5, 4.1), (0.02, 1e-6, 6.1), (0.5, 1e-6, 6.1), (1.0, 1e-6, 6.1)],
)
def test_auto_takes_the_fewest_bytes_that_are_enough(spread: float, lr: float, budget: float) -> None:
    optimizer = install(started("AdamW", spread, lr), bytes_per_parameter="auto")
    stepped(optimizer, 1)
    report = backend_of(optimizer).report()
    assert report.bytes_per_parameter()["total"] == pytest.approx(budget, rel=0.02)
    error = report.predicted_error()
    assert error is not None
    assert error <= 0.02


def test_auto_keeps_whole_weights_where_nothing_is_known() -> None:
    """There is no gradient, and SGD's updates have its size."""
    report = explain(started("SGD 0.9", 0.5, 1e-4), bytes_per_parameter="auto")
    assert report.predicted_error() is None
    assert {row.error_format for row in report.tensors if not row.packed} == {"exact"}


def test_auto_is_instead_of_other_options() -> None:
    with pytest.raises(CollageError, match="bytes_per_parameter='auto' chooses strategy"):
        install(started("AdamW", 0.5, 1e-4), bytes_per_parameter="auto", strategy="light")
    wrong: Any = "automatic"
    with pytest.raises(CollageError, match="'automatic' is not allowed"):
        install(started("AdamW", 0.5, 1e-4), bytes_per_parameter=wrong)


def test_a_decay_that_float32_parameters_lose_is_told_with_their_name() -> None:
    """1e-8 a step is below half a unit in the last place. docs/beyond-fp32.md measures it."""
    weights = torch.nn.Parameter(torch.randn(64, 64))
    for lr, is_lost in ((1e-6, True), (1e-5, False)):
        optimizer = torch.optim.AdamW([("w", weights)], lr=lr, weight_decay=0.01)
        text = str(explain(optimizer, bytes_per_parameter=8))
        assert ("but little or nothing of it to float32 parameters, such as w" in text) == is_lost


class Picky(Descent):
    """Descent that refuses float64."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(p.dtype is torch.float64 for group in self.param_groups for p in group["params"]):
            raise ValueError("no float64")
        super().step(closure)


def test_a_fault_of_the_library_is_raised_and_not_taken_for_one_of_the_optimizer() -> None:
    with failing_prediction(ValueError("ours")), pytest.raises(ValueError, match="ours"):
        explain(started("AdamW", 0.5, 1e-6))


def test_gradients_that_are_not_finite_give_no_prediction() -> None:
    """Such a gradient stands at the first steps of a GradScaler."""
    for value in (math.inf, math.nan):
        optimizer = started("AdamW", 0.5, 1e-6)
        optimizer.param_groups[0]["params"][0].grad = torch.full(SHAPE, value).bfloat16()
        assert explain(optimizer).predicted_error() is None


def test_a_description_names_the_horizon() -> None:
    optimizer = started("AdamW", 0.5, 1e-6)
    [text] = explain(optimizer, bytes_per_parameter=5.1).predictions()
    assert "over 600 steps" in text
    assert "in float64 in these steps" in text


@pytest.mark.parametrize("kind", [Descent, Picky])
def test_an_optimizer_is_not_changed_by_a_trial(kind: type[Descent]) -> None:
    weights = torch.nn.Parameter(torch.randn(8, 8).bfloat16())
    weights.grad, before = torch.ones_like(weights), weights.detach().clone()
    optimizer = kind([weights], lr=1e-6)
    error = explain(optimizer, error_format="byte").predicted_error()
    assert (error is None) == (kind is Picky)
    assert weights.equal(before)
    assert weights.grad.equal(torch.ones_like(weights))
    assert not optimizer.state


def test_a_parameter_without_a_gradient_does_not_hide_the_size_of_the_others() -> None:
    """SGD's updates have the size of gradients, so that without any there is no prediction."""
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.nn.Parameter(torch.randn(64, 64, generator=generator).bfloat16()) for _ in range(2)
    )
    optimizer = torch.optim.SGD([first, second], lr=1e-4, momentum=0.9)
    assert explain(optimizer).predicted_error() is None
    first.grad = torch.randn(64, 64, generator=generator).bfloat16()
    error = explain(optimizer).predicted_error()
    assert error is not None
    assert 0 < error < 1
