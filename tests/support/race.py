"""One optimizer three times over the same gradients: compensated and compiled, plain and eager, float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import CollageBackend, full_value

__all__ = ["Race", "alike", "relative_error"]

Parameters = list[torch.nn.Parameter]


class Race:
    """Low-precision parameters, a plain twin and a float64 twin, each under its optimizer.

    Args:
        parameters: the compensated ones; the twins start from their values.
        make: parameters -> optimizer.
        options: of the backend.

    Attributes:
        optimizers: compensated, plain, float64.
        step: the compensated one's compiled step.
    """

    def __init__(
        self, parameters: Sequence[Tensor], make: Callable[[Parameters], Optimizer], **options: Any
    ) -> None:
        ours = [p if isinstance(p, torch.nn.Parameter) else torch.nn.Parameter(p) for p in parameters]
        self.parameters: tuple[Parameters, ...] = (
            ours,
            [alike(p, p.dtype) for p in ours],
            [alike(p, torch.float64) for p in ours],
        )
        self.start = [p.detach().double().clone() for p in ours]
        self.optimizers = [make(parameters) for parameters in self.parameters]
        self.backend = CollageBackend(**options)
        self.step = torch.compile(self.optimizers[0].step, backend=self.backend)
        self.generator = torch.Generator().manual_seed(1)

    def add(self, parameter: torch.nn.Parameter, **options: Any) -> None:
        """A further parameter, in a group of its own."""
        twins = (parameter, alike(parameter, parameter.dtype), alike(parameter, torch.float64))
        for twin, parameters, optimizer in zip(twins, self.parameters, self.optimizers, strict=True):
            parameters.append(twin)
            optimizer.add_param_group({"params": [twin], **options})
        self.start.append(parameter.detach().double().clone())

    def draw_gradients(self, only: Sequence[int] | None = None) -> None:
        """The same gradients for all three; None for parameters that are not among ``only``."""
        for i, twins in enumerate(zip(*self.parameters, strict=True)):
            gradient = torch.randn(twins[0].shape, generator=self.generator).to(twins[0].dtype) + 0.5
            for twin in twins:
                wanted = only is None or i in only
                twin.grad = alike(gradient, twin.dtype, twin).detach() if wanted else None

    def run(self, steps: int, only: Sequence[int] | None = None) -> None:
        for _ in range(steps):
            self.draw_gradients(only)
            self.step()
            self.step_twins()

    def step_twins(self) -> None:
        for optimizer in self.optimizers[1:]:
            optimizer.step()

    @property
    def compilations(self) -> int:
        return len(self.backend.report().graphs)

    def errors(self, i: int) -> tuple[float, float]:
        """The relative errors of one parameter's net displacement: compensated, plain."""
        ours, plain, exact = (parameters[i] for parameters in self.parameters)
        meant = exact.detach() - self.start[i]
        return relative_error(full_value(ours) - self.start[i], meant), relative_error(
            plain.detach().double() - self.start[i], meant
        )

    def assert_compensated(self, *which: int) -> None:
        """Plain, a fifth or more of these displacements is lost; compensated, a tenth of that at most."""
        for i in which or range(len(self.start)):
            ours, plain = self.errors(i)
            assert plain >= 0.2, f"parameter {i}: plain {plain:.2g} is no test"
            assert ours <= plain / 10, f"parameter {i}: compensated {ours:.2g}, plain {plain:.2g}"


def alike(tensor: Tensor, dtype: torch.dtype, layout: Tensor | None = None) -> torch.nn.Parameter:
    """A parameter with a tensor's values and the strides, dense or not, of ``layout``, by default its own."""
    layout = tensor if layout is None else layout
    made = torch.empty_strided(layout.size(), layout.stride(), dtype=dtype)
    return torch.nn.Parameter(made.copy_(tensor.detach()))


def relative_error(met: Tensor, meant: Tensor) -> float:
    return float((met - meant).norm() / meant.norm())
