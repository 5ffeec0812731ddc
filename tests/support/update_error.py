"""The error of AdamW's updates, against torch's own AdamW in float64 on the same gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collage_fx import CollageBackend, full_value
from tests.support.optimizers import CompiledOptimizer

__all__ = [
    "SECOND_MOMENT_CHECKPOINTS",
    "decay_achieved",
    "displacement",
    "second_moment_errors",
]

Optimizer = torch.optim.Optimizer
Parameters = list[torch.nn.Parameter]


def _in_float64(parameters: Parameters) -> Parameters:
    return [torch.nn.Parameter(p.detach().double()) for p in parameters]


# ------------------------------------------------------------ net displacement

SMALL_STEPS = {"lr": 1e-5, "betas": (0.9, 0.999), "weight_decay": 0.1}


def _adamw(parameters: Parameters) -> Optimizer:
    return torch.optim.AdamW(parameters, **SMALL_STEPS)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Displacement:
    """The displacement of weights, against float64; 2-norms relative to that of float64's net displacement.

    Attributes:
        error: of the full value.
        error_of_hi: of hi alone.
        decay: the part of float64's displacement that is weight decay.
    """

    error: float
    error_of_hi: float
    decay: float


def displacement(
    backend: CollageBackend,
    *,
    size: int = 512,
    steps: int = 300,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Displacement:
    """AdamW, lr 1e-5 and wd 0.1, on N(0, 1) weights; gradients are an N(0, 1) constant plus N(0, 1) noise."""
    rig = CompiledOptimizer([(size, size)], _adamw, backend, device=device, dtype=dtype)
    exact = _in_float64(rig.parameters)
    oracle = _adamw(exact)
    start = exact[0].detach().clone()
    generator = torch.Generator().manual_seed(1)
    constant = torch.randn(size, size, generator=generator)
    for _ in range(steps):
        grad = (constant + torch.randn(size, size, generator=generator)).to(device, dtype)
        rig.step([grad])
        exact[0].grad = grad.double()
        oracle.step()
    meant = exact[0].detach() - start
    (parameter,) = rig.parameters
    return Displacement(
        _relative(full_value(parameter) - start - meant, meant),
        _relative(parameter.detach().double() - start - meant, meant),
        _relative(start * (1 - (1 - 1e-5 * 0.1) ** steps), meant),
    )


def _relative(part: Tensor, whole: Tensor) -> float:
    return float(part.norm() / whole.norm())


# --------------------------------------------------------------- second moment

SECOND_MOMENT_STEPS = 5000
#: When the second moment is looked at: before the gradients drop to a tenth, soon after, and at the end.
SECOND_MOMENT_CHECKPOINTS = (2500, 3000, 5000)
SHAPE = (64, 64)


def _second_moment_gradients(dtype: torch.dtype) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(2)
    for i in range(SECOND_MOMENT_STEPS):
        scale = 1e-2 if i < SECOND_MOMENT_STEPS // 2 else 1e-3
        yield (torch.randn(SHAPE, generator=generator) * scale).to(dtype)


def _with_betas(parameters: Parameters, betas: Sequence[float]) -> Optimizer:
    """One parameter, so one second moment, for each beta2."""
    groups = [{"params": [p], "betas": (0.9, beta2)} for p, beta2 in zip(parameters, betas, strict=True)]
    return torch.optim.AdamW(groups, lr=1e-4)


@functools.cache
def _exact_second_moments(betas: tuple[float, ...], dtype: torch.dtype) -> dict[int, list[Tensor]]:
    """float64 second moments after each checkpoint, on the CPU."""
    parameters = [torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64)) for _ in betas]
    oracle = _with_betas(parameters, betas)
    moments = {}
    for step, grad in enumerate(_second_moment_gradients(dtype), 1):
        for parameter in parameters:
            parameter.grad = grad.double()
        oracle.step()
        if step in SECOND_MOMENT_CHECKPOINTS:
            moments[step] = [oracle.state[p]["exp_avg_sq"].clone() for p in parameters]
    return moments


def second_moment_errors(
    backend: CollageBackend,
    betas: tuple[float, ...],
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> dict[float, list[float]]:
    """beta2 -> mean relative error of v after each checkpoint; the gradients drop to a tenth half-way."""
    rig = CompiledOptimizer(
        [SHAPE] * len(betas), lambda ps: _with_betas(ps, betas), backend, device=device, dtype=dtype
    )
    exact = _exact_second_moments(betas, dtype)
    errors: dict[float, list[float]] = {beta2: [] for beta2 in betas}
    for step, grad in enumerate(_second_moment_gradients(dtype), 1):
        rig.step([grad] * len(betas))
        if step in SECOND_MOMENT_CHECKPOINTS:
            for beta2, parameter, want in zip(betas, rig.parameters, exact[step], strict=True):
                met = full_value(rig.optimizer.state[parameter]["exp_avg_sq"]).cpu()
                errors[beta2].append(float(((met - want).abs() / want).mean()))
    return errors


# ---------------------------------------------------------------- weight decay


def decay_achieved(
    backend: CollageBackend, *, steps: int = 1000, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> float:
    """Share of float64's weight decay that p = 1 undergoes, at worst: no gradients, lr 1e-3, wd 0.1."""

    def make(parameters: Parameters) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)

    rig = CompiledOptimizer([(64,)], make, backend, device=device, dtype=dtype)
    rig.parameters[0].data.fill_(1)
    exact = _in_float64(rig.parameters)
    oracle = make(exact)
    zeros = torch.zeros(64)
    for _ in range(steps):
        rig.step([zeros])
        exact[0].grad = zeros.to(device, torch.float64)
        oracle.step()
    shares = (1 - full_value(rig.parameters[0])) / (1 - exact[0].detach())
    return float(shares[(shares - 1).abs().argmax()])
