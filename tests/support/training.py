"""Small optimizers, parameters and gradients for the tests of what surrounds the passes."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx import CollageBackend
from collage_fx.state.error_terms import record_of

SHAPES = ((4, 6), (5,))


class Descent(Optimizer):
    """The least of an optimizer: one operation a parameter, no state. Like most outside torch.optim.

    No ``_init_group``.
    """

    def __init__(self, params: Any, lr: float = 2.0**-12) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


class LateMomentum(Optimizer):
    """State that is born inside the first step, in containers, and attributes that pickling leaves out."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.decay = 0.999

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moments"] = {"second": [torch.zeros_like(p)]}
                second = state["moments"]["second"][0]
                second.mul_(self.decay).addcmul_(p.grad, p.grad, value=1 - self.decay)
                p.addcdiv_(p.grad, second.sqrt().add_(1e-8), value=-group["lr"])


class Lion(Descent):
    """Its recurrence, in torch's operations."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["exp_avg"] = torch.zeros_like(p)
            moment = state["exp_avg"]
            p.mul_(1 - 1e-4).add_(torch.sign(moment * 0.9 + p.grad * 0.1), alpha=-1e-3)
            moment.lerp_(p.grad, 0.01)


def parameters(
    dtype: torch.dtype = torch.bfloat16, shapes: Iterable[Sequence[int]] = SHAPES, seed: int = 0
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(tuple(shape), generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params: Iterable[Tensor], seed: int = 0) -> None:
    """Gradients that depend on ``seed`` alone, in place where there are some."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        gradient = torch.randn(p.shape, generator=generator).to(p)
        if p.grad is None:
            p.grad = gradient
        else:
            p.grad.copy_(gradient)


def set_gradients_of_both(params: Sequence[Tensor], exact: Sequence[Tensor], seed: int) -> None:
    """Set the same gradients for parameters and for their float64 twins."""
    set_gradients(params, seed)
    for p, x in zip(params, exact, strict=True):
        assert p.grad is not None
        x.grad = p.grad.double()


def run_steps(step: Callable[[], Any], params: Sequence[Tensor], seeds: Iterable[int]) -> None:
    for seed in seeds:
        set_gradients(params, seed)
        step()


def compiled(optimizer: Optimizer, **options: Any) -> Callable[[], Any]:
    return torch.compile(optimizer.step, backend=CollageBackend(**options))


def set_as_own_step(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """Make a compiled step the optimizer's own, by which torch then makes state to be loaded."""
    method = types.MethodType(lambda self, closure=None: step(), optimizer)
    optimizer.step = method  # type: ignore[method-assign]  # as programs do; mypy knows methods of classes


def everything(optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of all that a run depends on: parameters, state, error terms."""
    found: dict[str, Tensor] = {}
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            tensors = {
                "parameter": p,
                **dict(collage_fx.state.optimizers.state_tensors(optimizer.state.get(p, {}))),
            }
            for slot, tensor in tensors.items():
                found[f"{i}.{j}.{slot}"] = tensor.detach().clone()
                for k, term in enumerate(collage_fx.error_terms(tensor)):
                    found[f"{i}.{j}.{slot}.error.{k}"] = term.clone()
    return found


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that differ, in any bit, in dtype or in layout, or that only one side has."""
    return [
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not _identical(one[name], other[name])
    ]


def _identical(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
        return False
    return (
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if a.dim()
        else bool(a == b)
    )


def live_error_terms(tensor: Tensor) -> tuple[Tensor, ...]:
    """The buffers of a tensor's error terms, as its format has them."""
    expansion = record_of(tensor)
    return () if expansion is None else expansion.auxiliaries


def errors_beside_float64(
    make: Callable[[Any], Optimizer],
    step_of: Callable[[Optimizer], Callable[[], Any]],
    params: Sequence[torch.nn.Parameter],
    steps: int,
) -> tuple[Optimizer, list[float]]:
    """Train with an optimizer, and in float64 with the same gradients: it, and ``‖d − d64‖ / ‖d64‖`` of each.

    Args:
        make: parameters -> optimizer.
        step_of: gives the optimizer's step, compiled.
        params: how far each moves is d, by its full value.
        steps: how many are taken.
    """
    exact = [torch.nn.Parameter(p.detach().double()) for p in params]
    start = [p.detach().clone() for p in exact]
    optimizer, reference = make(params), make(exact)
    step = step_of(optimizer)
    for seed in range(steps):
        set_gradients_of_both(params, exact, seed)
        step()
        reference.step()
    errors = []
    for p, x, before in zip(params, exact, start, strict=True):
        wanted = x.detach() - before
        errors.append(float((collage_fx.full_value(p) - before - wanted).norm() / wanted.norm()))
    return optimizer, errors
