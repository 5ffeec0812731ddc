"""Entries of an optimizer's state that are no dictionaries: tensors, numbers, None, lists, objects."""

from __future__ import annotations

import io
import random
import types
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from collage_fx import backend_of, full_value, install, uninstall
from tests.support.training import Descent, set_gradients

LR = 1e-4
#: Largest error |p - p64| / |p64 - p0| of compensated steps; plain bf16 has about 1.
COMPENSATED = 0.02

#: Containers of one tensor, each with the way to the tensor in it; None: the tensor is not kept.
CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor] | None]] = {
    "tensor": (lambda tensor: tensor, lambda entry: entry),
    "list": (lambda tensor: [tensor, 3], lambda entry: entry[0]),
    "tuple": (lambda tensor: (tensor, None), lambda entry: entry[0]),
    "dictionary": (lambda tensor: {"m": tensor}, lambda entry: entry["m"]),
    "object": (lambda tensor: types.SimpleNamespace(m=tensor), lambda entry: entry.m),
    "number": (lambda tensor: 0.5, None),
    "None": (lambda tensor: None, None),
    "text": (lambda tensor: "text", None),
    "empty list": (lambda tensor: [], None),
}


class Keeps(Descent):
    """Averages of gradients: one for each parameter, and one of the first parameter's under a name."""

    def __init__(self, params: Any, own: str, shared: str, *, made_before: bool) -> None:
        super().__init__(params, LR)
        self.containers = CONTAINERS[own], CONTAINERS[shared]
        if made_before:
            self.make()

    def make(self) -> None:
        params = self.param_groups[0]["params"]
        (make, _), (make_shared, _) = self.containers
        for p in params:
            self.state[p] = make(torch.zeros_like(p, requires_grad=False))
        state: dict[Any, Any] = self.state
        state["shared"] = make_shared(torch.zeros_like(params[0], requires_grad=False))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.state:
            self.make()
        (_, own_in), (_, shared_in) = self.containers
        state: dict[Any, Any] = self.state
        for i, p in enumerate(self.param_groups[0]["params"]):
            update = p.grad
            kept = [own_in(state[p])] if own_in is not None else []
            if shared_in is not None and i == 0:
                kept.append(shared_in(state["shared"]))
            for average in kept:
                average.mul_(0.99).add_(p.grad, alpha=0.01)
                update = update + average * 30
            p.add_(update, alpha=-LR)


CASES = [("None", "tensor", True), ("tensor", "None", False)]
DRAWN = [*product(CONTAINERS, CONTAINERS, (False, True))]


def alike(params: list[Parameter], others: list[Parameter]) -> bool:
    """Return whether two lists of parameters have the same bits and error terms."""
    pairs = [*zip(params, others, strict=True)]
    return all(torch.equal(p, q) and torch.equal(full_value(p), full_value(q)) for p, q in pairs)


@pytest.mark.parametrize(("own", "shared", "made_before"), [*CASES, *random.Random(0).sample(DRAWN, 5)])
def test_any_entry_of_state_lives_as_in_torch(own: str, shared: str, made_before: bool) -> None:
    """Through steps, reports, a file, a load and ``uninstall``."""
    values = [torch.randn(6, 4).bfloat16(), torch.randn(5).bfloat16()]
    params = [Parameter(value.clone()) for value in values]
    exact = [Parameter(value.double()) for value in values]

    def optimizer_of(given: list[Parameter]) -> Keeps:
        return Keeps(given, own, shared, made_before=made_before)

    optimizer, reference = install(optimizer_of(params), strategy="full"), optimizer_of(exact)
    others: list[tuple[list[Parameter], Any]] = [(params, optimizer), (exact, reference)]

    def step(seed: int) -> None:
        set_gradients(params, seed)
        for each, owner in others:
            for p, q in zip(each, params, strict=True):
                assert q.grad is not None
                p.grad = q.grad.to(p.dtype)
            owner.step()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="collage_fx")
        for seed in range(3):
            step(seed)
        assert backend_of(optimizer).report().graphs
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        again = [Parameter(p.detach().clone()) for p in params]
        loaded = install(optimizer_of(again), strategy="full")
        loaded.load_state_dict(torch.load(file, weights_only=False))
        others.append((again, loaded))
        for seed in range(3, 6):
            step(seed)
    assert alike(again, params)
    for p, x, value in zip(params, exact, values, strict=True):
        moved = x.detach() - value.double()
        assert (full_value(p).double() - x.detach()).norm() < COMPENSATED * moved.norm()
    uninstall(optimizer)
    optimizer.step()


class Decaying(Descent):
    """Weights are an average, as it seems, of themselves and of zero."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.mul_(1 - 2.0**-8).add_(p.grad, alpha=-self.param_groups[0]["lr"])


class Branching(Decaying):
    """Step that branches on a value, so that it is recorded."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["params"][0].grad.sum() < torch.inf:
            super().step()


def refer_under_a_name(optimizer: Any, params: list[Parameter]) -> None:
    optimizer.state["known"] = {"all": list(params)}


def refer_in_the_state_of_another(optimizer: Any, params: list[Parameter]) -> None:
    optimizer.state[params[-1]] = {"tied": params[0]}


def refer_in_a_group(optimizer: Any, params: list[Parameter]) -> None:
    optimizer.param_groups[-1]["teachers"] = params[:1]


@pytest.mark.parametrize("make", [Decaying, Branching])
@pytest.mark.parametrize("refer", [refer_under_a_name, refer_in_the_state_of_another, refer_in_a_group])
def test_a_parameter_is_one_also_where_others_refer_to_it(refer: Any, make: type[Descent]) -> None:
    params = [Parameter(torch.ones(8, 8).bfloat16()) for _ in range(3)]
    optimizer = make(params)
    refer(optimizer, params)
    install(optimizer, strategy="light")  # error terms for parameters alone
    exact = [p.detach().double() for p in params]
    for seed in range(20):
        set_gradients(params, seed)
        for p, whole in zip(params, exact, strict=True):
            assert p.grad is not None
            whole.mul_(1 - 2.0**-8).sub_(2.0**-12 * p.grad.double())
        optimizer.step()
    for p, whole in zip(params, exact, strict=True):
        assert float((full_value(p) - whole).norm() / (1 - whole).norm()) < COMPENSATED
