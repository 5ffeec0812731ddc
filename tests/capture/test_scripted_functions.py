"""Functions of TorchScript in a recorded step: their operations are recorded like Python's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_fx
from collage_fx import full_value
from tests.support.race import relative_error

STEPS = 6
LR = 1e-3


@torch.jit.script
def length(x: Tensor, k: float) -> Tensor:
    return 1 + k * x.pow(2).sum(-1, keepdim=True)


@torch.jit.script
def scaled(x: Tensor, g: Tensor, k: float) -> Tensor:
    return g / length(x, k)


@torch.jit.script
def projected(x: Tensor, g: Tensor, k: float) -> Tensor:
    flat = (x * g).reshape(x.size(0), -1).sum(1).unsqueeze(-1)
    return g - k * flat * x if bool(flat.abs().max() > 0) else g


@torch.jit.script
def halved_in_place(x: Tensor, g: Tensor, k: float) -> Tensor:
    moved = x.detach().clone()
    moved.sub_(g, alpha=k)
    moved.t_().mul_(0.5)
    return moved.t()


class Scripted(Optimizer):
    """The update is a scripted function, after a branch on a value, which Dynamo does not capture."""

    def __init__(self, params: Any, function: Any) -> None:
        super().__init__(params, {"lr": LR})
        self.function = function

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            assert p.grad is not None
            if p.grad.norm() > 0:
                p.sub_(LR * self.function(p, p.grad, 0.5))


def moved(function: Any, dtype: torch.dtype, of: torch.dtype, *, installed: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(16, 8, generator=generator).to(of).to(dtype)) for _ in range(2)]
    starts = [p.detach().double() for p in params]
    optimizer = Scripted(params, function)
    if installed:
        collage_fx.install(optimizer)
    for _ in range(STEPS):
        for p in params:
            p.grad = torch.randn(16, 8, generator=generator).to(of).to(dtype)
        optimizer.step()
    ways = [full_value(p).double() - start for p, start in zip(params, starts, strict=True)]
    return torch.cat([way.detach().flatten() for way in ways])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [scaled, projected, halved_in_place], ids=lambda f: str(f.name))
def test_a_scripted_function_is_recorded(function: Any, dtype: torch.dtype) -> None:
    exact = moved(function, torch.float64, dtype, installed=False)
    ours = moved(function, dtype, dtype, installed=True)
    plain = moved(function, dtype, dtype, installed=False)
    single = moved(function, torch.float32, dtype, installed=False)
    # One rounding to float32 in each step, as float32 parameters have.
    assert relative_error(ours, exact) <= 2 * relative_error(single, exact) + 1e-3
    assert relative_error(plain, exact) >= 0.2
