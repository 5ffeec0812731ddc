"""Entries of an optimizer's state that each step replaces by new tensors; programs that keep the old ones."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from collage_fx import backend_of, error_terms, full_value, install
from tests.support.training import Descent, set_gradients

STEPS = 8
#: Largest error |p - p64| / |p64 - p0| of compensated steps; plain bf16 loses most of these updates.
COMPENSATED = 0.02

#: Ways in which a program keeps a tensor, each with the way back to it.
WAYS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "object": (lambda tensor: tensor, lambda kept: kept),
    "detached": (lambda tensor: tensor.detach(), lambda kept: kept),
    "data": (lambda tensor: tensor.data, lambda kept: kept),
    "view": (lambda tensor: tensor.reshape(-1)[:1], lambda kept: kept),
    "NumPy array": (lambda tensor: tensor.view(torch.int16).numpy(), torch.from_numpy),
    "memory": (lambda tensor: tensor.untyped_storage(), lambda kept: torch.tensor(list(kept))),
    "dictionary": (lambda tensor: copy.copy({"value": tensor}), lambda kept: kept["value"]),
}


class Replacing(Descent):
    """Step that makes its state anew: norms, which no step reads, and averages, which the next one reads."""

    def __init__(self, params: Any, *, branches: bool = False) -> None:
        super().__init__(params, 2.0**-10)
        self.branches = branches
        self.history: list[Tensor] = []  # what the program keeps may be in the optimizer

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if self.branches and not float(p.grad.abs().max()) > 0:
                continue
            state["average"] = 0.9 * state["average"] + 0.1 * p.grad if state else 0.1 * p.grad
            state["norm"] = p.grad.norm()
            state["norms"] = [state["norm"] * 2]
            p.sub_(state["average"] * self.param_groups[0]["lr"])


def run(
    keep: Callable[[int, Replacing], None], *, branches: bool = False, **options: Any
) -> tuple[Replacing, list[Parameter]]:
    params = [Parameter(torch.ones(6, 4).bfloat16()), Parameter(torch.ones(5).bfloat16())]
    optimizer = install(Replacing(params, branches=branches), **options)
    for seed in range(STEPS):
        set_gradients(params, seed)
        optimizer.step()
        keep(seed, optimizer)
    return optimizer, params


DRAWN = [random.Random(seed) for seed in range(4)]


@pytest.mark.parametrize("branches", [False, True], ids=["captured", "recorded"])
@pytest.mark.parametrize("drawn", DRAWN, ids=range(len(DRAWN)))
def test_what_a_program_keeps_of_state_stays_as_it_was(drawn: random.Random, branches: bool) -> None:
    kept: list[tuple[str, Any, Tensor]] = []
    chosen = [(seed, way) for seed in range(STEPS) for way in WAYS if drawn.random() < 0.3]

    def keep(seed: int, optimizer: Replacing) -> None:
        for way in (way for at, way in chosen if at == seed):
            entries = drawn.choice(list(optimizer.state.values()))
            value = drawn.choice([entries["average"], entries["norm"], entries["norms"][0]])
            take, back = WAYS[way]
            kept.append((way, thing := take(value), back(thing).clone()))
            if way == "object":
                optimizer.history.append(thing)

    _, params = run(keep, branches=branches)
    assert len(kept) > STEPS
    for way, thing, before in kept:
        assert torch.equal(WAYS[way][1](thing), before), way
    _, others = run(lambda seed, optimizer: None, branches=branches)
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(full_value(p), full_value(q))


def test_a_captured_step_makes_the_same_tensors_again() -> None:
    """Where it does not read them and the program has none of them: there is nothing to be settled."""
    seen: list[list[int]] = []
    terms: list[Tensor] = []

    def keep(seed: int, optimizer: Replacing) -> None:
        entries = [*optimizer.state.values()]
        seen.append([id(value) for each in entries for value in (each["norm"], each["norms"][0])])
        if seed == STEPS - 1:
            terms.extend(error_terms(entries[0]["norm"]))

    optimizer, params = run(keep)
    assert seen[-1] == seen[-2] == seen[-3]
    norm = next(iter(optimizer.state.values()))["norm"]
    assert params[0].grad is not None
    exact = params[0].grad.double().norm()
    # The norm has 8 bits, and its error term 8 more.
    whole = norm.double() + sum(term.double() for term in terms)
    assert float(abs(whole - exact) / exact) < 2.0**-16


@pytest.mark.parametrize("options", [{}, {"strategy": "full"}, {"bytes_per_parameter": 8.1}], ids=str)
def test_state_that_is_made_anew_from_itself_compiles_a_few_times(options: dict[str, Any]) -> None:
    """Packed state as well, whose object code holds."""
    counts: list[int] = []
    _, params = run(
        lambda seed, optimizer: counts.append(len(backend_of(optimizer).report().graphs)), **options
    )
    assert counts[-1] == counts[3] <= 3
    exact = [torch.ones_like(p, dtype=torch.float64) for p in params]
    averages = [torch.zeros_like(x) for x in exact]
    for seed in range(STEPS):
        set_gradients(params, seed)
        for p, x, average in zip(params, exact, averages, strict=True):
            assert p.grad is not None
            average.mul_(0.9).add_(p.grad.double(), alpha=0.1)
            x.sub_(average, alpha=2.0**-10)
    for p, x in zip(params, exact, strict=True):
        assert float((full_value(p).double() - x).norm() / (x - 1).norm()) < COMPENSATED
