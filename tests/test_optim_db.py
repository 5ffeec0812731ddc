"""Every configuration of torch's own optimizer database, beside float64, plain bfloat16 and float32.

A usual run has a third of these tests, another each day: Note [Slow tests] in ``tests/support/slow.py``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.testing._internal.common_optimizers import optim_db

from collage_fx import CollageBackend, full_value
from collage_fx.errors import CollageError, UnsupportedOptimizerError, UnsupportedTensorError

#: Untyped, because torch types its classes of optimizers as optimizers.
DATABASE: list[Any] = optim_db

#: Of the learning rate, at each step.
SCHEDULE = (1.0, 0.75, 0.5, 0.25, 0.0, 0.25, 0.5, 1.0, 0.0, 0.5)
SHAPES = ((12, 8), (8, 12), (7,))

#: Settings of an implementation, and the classes that have it: by the option that asks for it.
SETTINGS: dict[str, Callable[[Any], bool]] = {
    "foreach=False": lambda info: "foreach" in info.supported_impls,
    "foreach=True": lambda info: "foreach" in info.supported_impls,
    "fused=True": lambda info: "fused" in info.supported_impls,
    "capturable=True": lambda info: "capturable" in info.supported_impls or takes(info, "capturable"),
    "": lambda info: not info.supported_impls,
}

#: Classes that are refused, each for the gradients or the closure that it works with.
REFUSED = ("LBFGS", "SparseAdam")


def takes(info: Any, option: str) -> bool:
    return option in info.optim_cls([Parameter(torch.zeros(2, 2))]).defaults


CASES = {
    f"{info.optim_cls.__name__} {setting}".strip(): (info, setting)
    for info in DATABASE
    for setting, has in SETTINGS.items()
    if has(info)
}


@dataclass
class Run:
    """An optimizer of the database on parameters of one dtype, with its schedule."""

    optimizer: Optimizer
    params: list[Parameter]
    start: list[Tensor]
    schedule: LambdaLR

    @classmethod
    def of(cls, info: Any, options: dict[str, Any], dtype: torch.dtype) -> Run:
        generator = torch.Generator().manual_seed(0)
        shapes = [shape for shape in SHAPES if len(shape) == 2 or info.optim_cls is not torch.optim.Muon]
        drawn = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
        params = [Parameter(each.to(dtype)) for each in drawn]
        optimizer = info.optim_cls(params, **copy.deepcopy(options))
        schedule = LambdaLR(optimizer, lambda step: SCHEDULE[step % len(SCHEDULE)])
        return cls(optimizer, params, [p.detach().clone() for p in params], schedule)

    def give(self, gradients: Sequence[Tensor]) -> None:
        for p, gradient in zip(self.params, gradients, strict=True):
            p.grad = gradient.to(p.dtype)

    def error(self, exact: Run) -> float:
        """How far off the displacement is, relative to it."""
        off = [full_value(p) - p64.detach() for p, p64 in zip(self.params, exact.params, strict=True)]
        moved = [p64.detach() - p0 for p64, p0 in zip(exact.params, exact.start, strict=True)]
        return float(_norm(off) / _norm(moved))


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors]).norm()


def step_all(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.rotating
@pytest.mark.parametrize("case", [name for name in CASES if name not in REFUSED])
def test_every_configuration(case: str) -> None:
    """All of a class in one compiled function: one of them may be off a tenth as much as plain bfloat16."""
    info, setting = CASES[case]
    name, _, value = setting.partition("=")
    inputs = info.optim_inputs_func(device="cpu")
    chosen = {name: value == "True"} if name else {}
    ours = [Run.of(info, {**each.kwargs, **chosen}, torch.bfloat16) for each in inputs]
    exact, single, plain = beside = [
        [Run.of(info, each.kwargs, dtype) for each in inputs]
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]
    compiled = torch.compile(step_all, backend=CollageBackend())
    generator = torch.Generator().manual_seed(1)
    for _ in SCHEDULE:
        gradients = [torch.randn(p.shape, generator=generator).bfloat16() for p in ours[0].params]
        for run in itertools.chain(ours, *beside):
            run.give(gradients)
        compiled([run.optimizer for run in ours])
        for runs in beside:
            step_all([run.optimizer for run in runs])
        for run in itertools.chain(ours, *beside):
            run.schedule.step()
    for i, each in enumerate(inputs):
        error, of_single, of_plain = (runs[i].error(exact[i]) for runs in (ours, single, plain))
        assert error <= max(0.1 * of_plain, 0.05, 3 * of_single), each.desc


def refused(case: str, error: type[CollageError], words: str) -> None:
    """Every configuration is refused in these words, and has taken no step."""
    info, _ = CASES[case]
    for each in info.optim_inputs_func(device="cpu"):
        torch._dynamo.reset()
        run = Run.of(info, each.kwargs, torch.bfloat16)
        run.give([g.to_sparse() if case == "SparseAdam" else g for g in run.start])
        step: Any = torch.compile(run.optimizer.step, backend=CollageBackend())
        arguments: list[Any] = [lambda: torch.tensor(0.0)] if case == "LBFGS" else []
        with pytest.raises(error, match=words):
            step(*arguments)
        assert all(map(torch.equal, run.params, run.start)), each.desc


def test_lbfgs_is_refused() -> None:
    refused("LBFGS", UnsupportedOptimizerError, "decides from step to step what to compute")


def test_sparse_gradients_are_refused() -> None:
    refused("SparseAdam", UnsupportedTensorError, "compensated updates are defined for dense tensors")
