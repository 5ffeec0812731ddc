"""Optimizers with float32 master weights of their own: parameters keep the whole value that they are set to.

And steps that need no error term, which ``install`` does not take for steps past the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_fx
from collage_fx import full_value

SHAPE = (16, 8)
LR = 1e-4


def copied(p: Tensor, master: Tensor) -> None:
    p.copy_(master)


def copied_rounded(p: Tensor, master: Tensor) -> None:
    p.copy_(master.to(p.dtype))


def copied_to_data(p: Tensor, master: Tensor) -> None:
    p.data.copy_(master.to(p.dtype).data)


def assigned_to_data(p: Tensor, master: Tensor) -> None:
    p.data = master.to(p.dtype)


def scaled_by_one(p: Tensor, master: Tensor) -> None:
    p.copy_((master * 1.0).view_as(p))


class Masters(Optimizer):
    """Steps of float32 copies, which are made anew from the parameters at every third step."""

    def __init__(self, params: Any, write: Callable[[Tensor, Tensor], None], *, is_broken: bool) -> None:
        super().__init__(params, {"lr": LR})
        self.write, self.is_broken, self.steps = write, is_broken, 0
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        self.masters = [p.detach().float().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for p, master in zip(self.param_groups[0]["params"], self.masters, strict=True):
            master.sub_(LR * p.grad.float())
        if self.is_broken:
            torch._dynamo.graph_break()
        for p, master in zip(self.param_groups[0]["params"], self.masters, strict=True):
            self.write(p, master)


def set_gradients(params: list[Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(SHAPE, generator=generator).to(p.dtype)


def parameters(dtype: torch.dtype) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(SHAPE, generator=generator).to(dtype)) for _ in range(2)]


@pytest.mark.parametrize(
    ("write", "dtype", "is_broken"),
    [
        (copied, torch.bfloat16, False),
        (copied_rounded, torch.float16, False),
        (copied_to_data, torch.bfloat16, True),
        (assigned_to_data, torch.bfloat16, False),
        (scaled_by_one, torch.bfloat16, True),
    ],
)
def test_a_parameter_is_the_master_weight_that_it_is_set_to(
    write: Callable[[Tensor, Tensor], None], dtype: torch.dtype, is_broken: bool
) -> None:
    params = parameters(dtype)
    optimizer = collage_fx.install(Masters(params, write, is_broken=is_broken))
    for step in range(4):
        set_gradients(params, step)
        optimizer.step()
        for p, master in zip(params, optimizer.masters, strict=True):
            assert torch.equal(p, master.to(dtype))
            if dtype is torch.bfloat16:
                assert torch.equal(full_value(p), master)  # no bit of float32 is lost
            else:  # float16's numbers are not float32's upper half: 2**-11 and 2**-11 of it
                assert ((full_value(p) - master).abs() <= 2.0**-21 * master.abs() + 2.0**-24).all()


class Other(Optimizer):
    """An update by a given function, after the closure, unless the learning rate is 0."""

    def __init__(self, params: Any, update: Callable[[Tensor], None]) -> None:
        super().__init__(params, {"lr": LR})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None and self.param_groups[0]["lr"] > 0:
            closure()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.update(p)


def overwritten(p: Tensor) -> None:
    p.copy_(torch.sign(p.grad))  # type: ignore[arg-type]


def multiplied(p: Tensor) -> None:
    p.mul_(1 - LR)


@pytest.mark.parametrize("case", ["overwritten", "lr 0", "no gradients", "frozen", "closure", "float32"])
def test_a_step_that_needs_no_error_term_is_no_alarm(case: str) -> None:
    params = parameters(torch.float32 if case == "float32" else torch.bfloat16)
    optimizer = collage_fx.install(Other(params, overwritten if case == "overwritten" else multiplied))
    if case == "lr 0":
        optimizer.param_groups[0]["lr"] = 0.0
    if case == "frozen":
        params[0].requires_grad_(False)

    def closure() -> Tensor:
        with torch.no_grad():
            params[0].clamp_(-0.5, 0.5)
        return torch.tensor(1.0)

    for step in range(2):
        if case not in ("no gradients", "closure"):
            set_gradients(params[1:] if case == "frozen" else params, step)
        optimizer.step(closure if case == "closure" else None)
    if case == "closure":
        assert params[0].abs().max() <= 0.5
        set_gradients(params, 3)
        optimizer.step()
        assert collage_fx.error_terms(params[0])
