"""State in containers and objects, and under names that collide: error terms are saved, copied and loaded."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx import error_terms, full_value
from collage_fx.state.optimizers import state_tensors
from tests.support.twin import TwinBackend


@dataclass
class Record:
    """State as a dataclass, a list in it."""

    slow: Tensor
    others: list[Tensor] = field(default_factory=list)


class Plain:
    """State as attributes."""

    def __init__(self, slow: Tensor) -> None:
        self.slow = slow
        self.itself = self


class Slotted:
    """State in slots, in an object that is in an object."""

    __slots__ = ("inner",)

    def __init__(self, slow: Tensor) -> None:
        self.inner = Plain(slow)


class Weights(torch.nn.Module):
    """State as a module, in a submodule of it as well."""

    def __init__(self, slow: Tensor, other: Tensor) -> None:
        super().__init__()
        self.register_buffer("slow", slow)
        self.inner = torch.nn.Module()
        self.inner.register_buffer("other", other)


def tensors(p: Tensor) -> tuple[Tensor, Tensor]:
    return p.detach().clone(), p.detach() * 0.5


#: Makes the state of a parameter, and gives the two tensors in it that a step updates.
Kind = tuple[Callable[[Tensor], dict[str, Any]], Callable[[dict[str, Any]], list[Tensor]]]

KINDS: dict[str, Kind] = {
    "dataclass": (
        lambda p: {"average": Record(tensors(p)[0], [tensors(p)[1]])},
        lambda state: [state["average"].slow, state["average"].others[0]],
    ),
    "object": (
        lambda p: {"average": Plain(tensors(p)[0]), "slots": Slotted(tensors(p)[1])},
        lambda state: [state["average"].slow, state["slots"].inner.slow],
    ),
    "module": (
        lambda p: {"average": Weights(*tensors(p))},
        lambda state: [state["average"].slow, state["average"].inner.other],
    ),
    "object in a list in a dictionary": (
        lambda p: {"all": {"first": [Plain(each) for each in tensors(p)]}},
        lambda state: [each.slow for each in state["all"]["first"]],
    ),
    "named as a parameter": (
        lambda p: dict(zip(("parameter", "slow"), tensors(p), strict=True)),
        lambda state: [state["parameter"], state["slow"]],
    ),
    "a dot and a dictionary": (
        lambda p: {"a.b": tensors(p)[0], "a": {"b": tensors(p)[1]}},
        lambda state: [state["a.b"], state["a"]["b"]],
    ),
    "a number and its text": (
        lambda p: dict(zip((0, "0"), tensors(p), strict=True)),  # type: ignore[arg-type]
        lambda state: [state[0], state["0"]],  # type: ignore[index]
    ),
}


class SlowWeights(torch.optim.Optimizer):
    """Two copies of the parameter follow it."""

    def __init__(self, params: list[torch.nn.Parameter], kind: Kind) -> None:
        super().__init__(params, {})
        self.kind = kind
        for p in params:
            self.state[p] = kind[0](p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=2.0**-10)
                for each in self.kind[1](self.state[p]):
                    each.sub_(p.grad, alpha=2.0**-11)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "kind"}


def stepped(optimizer: SlowWeights, steps: range) -> None:
    torch._dynamo.reset()
    backend = TwinBackend(compiles=False)
    backend.engine = "eager"
    step = torch.compile(optimizer.step, backend=backend)
    for i in steps:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.linspace(0.1, 1 + i, p.numel()).to(p.dtype)
        step()


def everything(optimizer: SlowWeights) -> list[Tensor]:
    held = [(p, *optimizer.kind[1](optimizer.state[p])) for p in optimizer.param_groups[0]["params"]]
    return [full_value(each) for of_one in held for each in of_one]


def started(kind: Kind) -> SlowWeights:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.rand(6, generator=generator).add(1).bfloat16() for _ in range(2)]
    return SlowWeights([torch.nn.Parameter(each) for each in drawn], kind)


def loaded(optimizer: SlowWeights, path: Path) -> SlowWeights:
    torch.save(optimizer.state_dict(), path)
    params = [torch.nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]]
    other = SlowWeights(params, optimizer.kind)
    other.load_state_dict(torch.load(path, weights_only=False))
    return other


def pickled(optimizer: SlowWeights, path: Path) -> SlowWeights:
    other: SlowWeights = pickle.loads(pickle.dumps(optimizer))
    other.kind = optimizer.kind
    return other


def deep_copied(optimizer: SlowWeights, path: Path) -> SlowWeights:
    other = copy.deepcopy(optimizer)
    other.kind = optimizer.kind
    return other


@pytest.mark.parametrize("way", [loaded, pickled, deep_copied])
@pytest.mark.parametrize("name", KINDS)
def test_a_run_goes_on_as_if_nothing_had_been_between(
    name: str, way: Callable[[SlowWeights, Path], SlowWeights], tmp_path: Path
) -> None:
    optimizer = started(KINDS[name])
    stepped(optimizer, range(3))
    for p in optimizer.param_groups[0]["params"]:
        for each in KINDS[name][1](optimizer.state[p]):
            assert any(bool(term.any()) for term in error_terms(each))
    other = way(optimizer, tmp_path / "checkpoint")
    stepped(optimizer, range(3, 5))
    stepped(other, range(3, 5))
    assert all(map(torch.equal, everything(optimizer), everything(other)))


def test_slots_are_what_they_were() -> None:
    x = torch.zeros(())
    state = {"step": x, "all": [x, {"a": x}], "of": Record(x, [x]), "a.b": x, "a": {"b": x}}
    names = [slot for slot, _ in state_tensors(state)]
    assert names == ["step", "all.0", "all.1.a", "of.slow", "of.others.0", "a.b", "a.b#2"]


def test_an_optimizer_or_a_class_in_the_state_is_not_looked_into() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    assert list(state_tensors({"inner": inner, "kind": Plain})) == []
