"""A feature written as a user of the library could: one file, no edit elsewhere.

The wing counts, for each parameter, the sizes of its updates and the norm of what its stored value alone has
lost of them. It asks the optimizer for its parameters at each step, reads whole values, keeps what it knows
in the optimizer's record, and has it saved and loaded with the optimizer's state.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from collage_fx import full_value, install, offload, step_in_backward
from collage_fx.state import carry_along, parameter_names
from collage_fx.torch_compat import records
from tests.support.training import Descent

# -- The wing


@dataclass
class UpdateSizes:
    """Part of an optimizer's record.

    Attributes:
        counts: name of a parameter -> i -> number of updates with 2**i <= abs(update) < 2**(i + 1).
        lost: name -> norm of the whole value without the stored one, after the last step.
        ends: name -> whole value after the last step.
    """

    counts: dict[str, dict[int, int]] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    ends: dict[str, Tensor] = field(default_factory=dict)

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        now = {name: full_value(p).detach().clone() for name, p in parameter_names(optimizer)}
        for name, p in parameter_names(optimizer):
            moved = (now[name] - self.ends.get(name, now[name])).abs()
            octaves, numbers = moved[moved > 0].log2().floor().unique(return_counts=True)
            counts = self.counts.setdefault(name, {})
            for octave, number in zip(octaves.tolist(), numbers.tolist(), strict=True):
                counts[int(octave)] = counts.get(int(octave), 0) + number
            self.lost[name] = float((now[name] - p.detach()).norm())
        self.ends = now


def count_updates(optimizer: Optimizer) -> UpdateSizes:
    """Begin to count an optimizer's updates; call it before the optimizer loads a state."""
    counted = records.of(optimizer, UpdateSizes)
    counted.ends = {name: full_value(p).detach().clone() for name, p in parameter_names(optimizer)}
    optimizer.register_step_post_hook(counted.after_step)
    return counted


def _saved(optimizer: Optimizer) -> list[Any] | None:
    counted = records.find(optimizer, UpdateSizes)
    return None if counted is None else [counted.counts, counted.lost]


def _loaded(optimizer: Optimizer, saved: list[Any]) -> None:
    counted = records.of(optimizer, UpdateSizes)
    counted.counts, counted.lost = copy.deepcopy(saved)


carry_along("collage_fx.update_sizes", _saved, _loaded)

# -- Its tests


class Branching(Descent):
    """Step that is recorded."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if all(float(p.grad.float().norm()) >= 0 for p in self.param_groups[0]["params"]):
            super().step()


def model_of(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))).bfloat16()


def steps(model: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for seed in range(first, last):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sizes(moved: Tensor) -> dict[int, int]:
    return dict(Counter(math.frexp(each)[1] - 1 for each in moved.flatten().tolist() if each))


WAYS: dict[str, tuple[Any, Callable[[nn.Module, Optimizer], object]]] = {
    "installed": (torch.optim.AdamW, lambda model, optimizer: install(optimizer)),
    "packed": (torch.optim.AdamW, lambda model, optimizer: install(optimizer, bytes_per_parameter=8)),
    "recorded": (Branching, lambda model, optimizer: install(optimizer)),
    "in the backward pass": (torch.optim.AdamW, step_in_backward),
    "offloaded": (torch.optim.AdamW, lambda model, optimizer: offload(optimizer)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_counted_and_a_resume_goes_on_counting(way: str) -> None:
    kind, door = WAYS[way]

    def made() -> tuple[nn.Module, Optimizer, UpdateSizes]:
        torch._dynamo.reset()
        model = model_of(2)
        optimizer = kind(model.named_parameters(), lr=1e-4)
        door(model, optimizer)
        return model, optimizer, count_updates(optimizer)

    model, optimizer, counted = made()
    before = {name: full_value(p) for name, p in model.named_parameters()}
    steps(model, optimizer, 0, 1)
    for name, p in model.named_parameters():
        assert counted.counts[name] == sizes(full_value(p) - before[name])
        assert counted.lost[name] == float((full_value(p) - p.detach()).norm()) > 0
    steps(model, optimizer, 1, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(model, optimizer, 3, 5)
    again, resumed, counted_again = made()
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    counted_again.ends = {name: full_value(p) for name, p in again.named_parameters()}
    steps(again, resumed, 3, 5)
    assert (counted_again.counts, counted_again.lost) == (counted.counts, counted.lost)


def test_parameters_that_come_are_counted_from_then_on() -> None:
    model = model_of(3)
    optimizer = install(torch.optim.AdamW(model[:2].named_parameters(), lr=1e-4))
    counted = count_updates(optimizer)
    steps(model, optimizer, 0, 2)
    optimizer.add_param_group({"params": [(f"2.{name}", p) for name, p in model[2].named_parameters()]})
    steps(model, optimizer, 2, 5)
    updates = {name: sum(of.values()) for name, of in counted.counts.items()}
    assert updates["0.bias"] == 5 * 8
    assert updates["2.bias"] == 2 * 8  # the first step after it came is where its changes begin
