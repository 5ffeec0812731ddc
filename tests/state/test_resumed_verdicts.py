"""Resumes with numbers that change: the first step after a load does not decide by a number of that step.

Nor do its bits depend on whether a number is a constant of the code, as in that step, or an input.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from collage_fx import install
from tests.support.training import differences, everything, parameters, set_gradients

#: Steps that are taken after the load.
STEPS = 3

NUMBERS: dict[str, Callable[[int], float]] = {
    "1/t": lambda t: 1 / t,
    "1 - (1 + t)/(10 + t)": lambda t: 1 - (1 + t) / (10 + t),
    "1 - min(.999, 1 - 1/t)": lambda t: 1 - min(0.999, 1 - 1 / t),
}


class Averaging(Optimizer):
    """Step with an average whose decay depends on the step; it is recorded, and makes its state anew.

    Args:
        params: the parameters.
        number: step -> weight of the gradient.
    """

    def __init__(self, params: list[torch.nn.Parameter], number: Callable[[int], float]) -> None:
        super().__init__(params, {"t": 0})
        self.number = number

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["t"] += 1
            w = self.number(group["t"])
            for p in group["params"]:
                if float(p.grad.float().norm()) > 0:
                    state = self.state[p]
                    state["m"] = (1 - w) * state.get("m", torch.zeros_like(p)) + w * p.grad
                    p.add_(state["m"], alpha=-1e-3)


class InPlace(Averaging):
    """Step with an average that begins as the gradient; ``branches``: it is recorded."""

    branches = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["t"] += 1
            for p in group["params"]:
                if self.branches and not float(p.grad.float().norm()) > 0:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = p.grad.clone()
                elif group["t"] % 2:
                    state["m"].lerp_(p.grad, self.number(group["t"]))
                else:
                    torch._foreach_lerp_([state["m"]], [p.grad], self.number(group["t"]))
                p.add_(state["m"], alpha=-1e-3)


class Recorded(InPlace):
    branches = True


#: Weights below and from 1/2 on, where torch's ``lerp`` has two formulas.
WEIGHTS: dict[str, Callable[[int], float]] = {
    "9/(10 + t)": lambda t: 9 / (10 + t),
    "cosine": lambda t: 0.5 + 0.4 * math.cos(t),
}

#: A known fault: the first step after a load takes a number that changes for a constant.
NOT_SAVED = pytest.mark.xfail(reason="no checkpoint says which numbers of a recorded step change")

CASES = [
    *((Averaging, NUMBERS[name], stop) for name in NUMBERS for stop in (2, 3)),
    *((InPlace, number, stop) for number in WEIGHTS.values() for stop in (2, 3)),
    *(pytest.param(Recorded, number, 3, marks=NOT_SAVED) for number in WEIGHTS.values()),
]


@pytest.mark.parametrize(("kind", "number", "stop"), CASES)
def test_a_resumed_run_goes_on_bit_by_bit(
    kind: type[Averaging], number: Callable[[int], float], stop: int
) -> None:
    def made() -> tuple[Averaging, list[torch.nn.Parameter]]:
        torch._dynamo.reset()
        params = parameters(shapes=[(8, 6)])
        return install(kind(params, number)), params

    def take(optimizer: Averaging, params: list[torch.nn.Parameter], first: int, last: int) -> None:
        for seed in range(first, last):
            set_gradients(params, seed)
            optimizer.step()

    going_on, params = made()
    take(going_on, params, 0, stop)
    saved, weights = copy.deepcopy(going_on.state_dict()), [p.detach().clone() for p in params]
    take(going_on, params, stop, stop + STEPS)
    resumed, loaded = made()
    with torch.no_grad():
        for p, weight in zip(loaded, weights, strict=True):
            p.copy_(weight)
    resumed.load_state_dict(saved)
    take(resumed, loaded, stop, stop + STEPS)
    assert not differences(everything(going_on), everything(resumed))
