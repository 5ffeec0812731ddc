"""A step that asks its parameters for their class takes the branch that Python takes."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from collage_fx import CollageBackend, full_value, install
from collage_fx.capture.recording import is_recorded
from collage_fx.errors import UnsupportedOptimizerError, UnsupportedTensorError
from tests.support.refusals import refused
from tests.support.training import Descent, compiled

LR = 1e-4
#: Largest error |p - p64| / |p64 - p0|. Plain bf16 has about 1, the other branch 2/3.
COMPENSATED = 0.02


class Lie(Parameter):
    """A parameter whose updates are three times as large."""

    kind = "lie"

    def turned(self, update: Tensor) -> Tensor:
        return 3 * update


class Deeper(Lie):
    """Derived once more."""


class Curved(Tensor):
    """A tensor, not a ``Parameter``, whose updates are three times as large."""

    kind = "lie"

    def turned(self, update: Tensor) -> Tensor:
        return 3 * update


@functools.singledispatch
def turned(p: Any, update: Tensor) -> Tensor:
    return update


@turned.register(Lie)
@turned.register(Curved)
def _(p: Any, update: Tensor) -> Tensor:
    return 3 * update


def matched(p: Tensor, update: Tensor) -> Tensor:
    match p:
        case Lie() | Curved():
            return 3 * update
    return update


FACTORS: dict[type, float] = {Lie: 3.0, Deeper: 3.0, Curved: 3.0}
#: Ways to ask.
ASKING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "isinstance": lambda p, update: 3 * update if isinstance(p, (Lie, Curved)) else update,
    "type": lambda p, update: update if type(p) is Parameter else 3 * update,
    "__class__": lambda p, update: 3 * update if p.__class__ in FACTORS else update,
    "name": lambda p, update: update if type(p).__name__ == "Parameter" else 3 * update,
    "method": lambda p, update: p.turned(update) if hasattr(p, "turned") else update,
    "attribute": lambda p, update: 3 * update if getattr(p, "kind", "") == "lie" else update,
    "table": lambda p, update: FACTORS.get(type(p), 1.0) * update,
    "issubclass": lambda p, update: 3 * update if issubclass(type(p), (Lie, Curved)) else update,
    "singledispatch": turned,
    "match": matched,
}

#: Ways to make a parameter.
MAKING: dict[str, Callable[[Tensor], Parameter]] = {
    "Lie": Lie,
    "Deeper": Deeper,
    "Curved": lambda tensor: Parameter(tensor.as_subclass(Curved)),
}


class Asks(Descent):
    def __init__(self, params: Any, ask: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(params, LR)
        self.ask = ask

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(self.ask(p, p.grad * 1.0), alpha=-LR)


class AsksInside(Asks):
    """As part of the step of a class of torch.optim that the class derives from."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


def plain(tensor: Tensor) -> Tensor:
    return tensor.detach().as_subclass(Tensor).double()


CASES = [*itertools.product(ASKING, MAKING, (torch.bfloat16, torch.float16, torch.float32))]


@pytest.mark.parametrize(("ask", "make", "dtype"), random.Random(0).sample(CASES, 9))
def test_the_branch_is_pythons(ask: str, make: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in ((6, 4), (5,))]
    params = [MAKING[make](values[0].clone()), Parameter(values[1].clone())]
    exact = [MAKING[make](values[0].double()), Parameter(values[1].double())]
    kind = Asks if dtype is not torch.float16 else AsksInside
    optimizer, reference = kind(params, ASKING[ask]), kind(exact, ASKING[ask])
    step = install(optimizer).step if make == "Lie" else compiled(optimizer)
    for _ in range(4):
        for p, x in zip(params, exact, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            x.grad = p.grad.double()
        step()
        reference.step()
    for p, x, value in zip(params, exact, values, strict=True):
        moved = plain(x) - value.double()
        error = (full_value(p).detach().as_subclass(Tensor).double() - plain(x)).norm() / moved.norm()
        # float32 rounds each of 4 updates of about LR by at most 2**-24 of the parameter.
        assert error < COMPENSATED


def test_steps_of_torch_ask_for_no_class_and_are_captured() -> None:
    p = Lie(torch.randn(6, 4).bfloat16())
    p.grad = torch.ones_like(p)
    optimizer: Optimizer = install(torch.optim.AdamW([p], lr=LR))
    optimizer.step()
    assert not is_recorded(optimizer)


class Holder:
    """An optimizer where it is not looked for before a function is traced."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.parts = {"optimizers": [optimizer]}

    def step(self) -> None:
        self.parts["optimizers"][0].step()


def test_an_optimizer_that_is_found_in_the_trace_is_recorded_and_saves_error_terms() -> None:
    """Its step was refused, with advice that its class follows already."""
    p = Lie(torch.randn(6, 4).bfloat16())
    start, optimizer = plain(p), Asks([p], ASKING["isinstance"])
    holder = Holder(optimizer)

    @torch.compile(backend=CollageBackend())
    def step() -> None:
        holder.step()

    for _ in range(3):
        p.grad = torch.ones_like(p)
        step()
    wanted = torch.full_like(start, 3 * 3 * -LR)
    assert (full_value(p) - start - wanted).norm() < COMPENSATED * wanted.norm()
    assert "collage_fx.parameter.exact.rest" in optimizer.state_dict()["state"][0]


class NotWrapped(Optimizer):
    """Made without ``Optimizer.__init__``: its step cannot be recorded."""

    def __init__(self, params: Any) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(params)}]
        self.state, self.defaults = {}, {}  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(ASKING["isinstance"](p, p.grad), alpha=-LR)


def test_a_step_that_cannot_be_recorded_is_refused() -> None:
    """Its remedy, to call ``Optimizer.__init__``, is what ``Asks`` does above."""
    p = Lie(torch.randn(6, 4).bfloat16())
    p.grad = torch.ones_like(p)
    text = refused(NotWrapped([p]), UnsupportedOptimizerError)
    assert "Lie" in text
    assert "super().__init__(parameters, defaults)" in text


class Calculates(Asks):
    """With values of the parameter's class, after a branch."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(self.ask(p, p.grad) + 1e-3 * p, alpha=-LR)


def test_results_of_the_parameters_class_are_refused() -> None:
    """Python would give them the class of the operand; the remedy is that of a parameter of class ``Lie``."""
    p = MAKING["Curved"](torch.randn(6, 4).bfloat16())
    p.grad = torch.ones(6, 4).bfloat16()
    text = refused(Calculates([p], ASKING["isinstance"]), UnsupportedTensorError)
    assert "Curved" in text
    assert "as_subclass(torch.Tensor)" in text
    own = MAKING["Lie"](torch.randn(6, 4).bfloat16())
    own.grad = torch.ones(6, 4).bfloat16()
    start, optimizer = plain(own), Calculates([own], ASKING["isinstance"])
    compiled(optimizer)()
    wanted = -LR * (3 * plain(own.grad) + 1e-3 * start)
    assert (full_value(own) - start - wanted).norm() < COMPENSATED * wanted.norm()
