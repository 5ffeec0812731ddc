"""``explain``: the report of an optimizer's step, without stepping."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim import Optimizer

from collage_fx.backend import CollageBackend
from collage_fx.program import StepProgram
from collage_fx.report import CollageReport

__all__ = ["explain"]


def explain(optimizer: Optimizer, **options: Any) -> CollageReport:
    """What compiling ``optimizer.step`` would do: the same report as ``backend.report()``, without taking a step.

    The step is captured on a deep copy of the optimizer (parameters included, so this takes their memory once more), with zero
    gradients where there are none; the optimizer itself isn't touched.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        options: those of :class:`~collage_fx.CollageBackend`.

    Returns:
        the report; its graphs have been rewritten, but neither compiled to kernels nor run.
    """
    backend = _CaptureOnly(**options)
    clone = copy.deepcopy(optimizer)
    for group in clone.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    with contextlib.suppress(_StepNotTaken):
        # The class's own step: an instance's may be wrapped by a learning rate scheduler and bound to the original.
        torch.compile(_with_code_of_its_own(_step), backend=backend)(type(clone).step, clone)
    return backend.report()


class _StepNotTaken(Exception):
    """Raised in place of running the compiled step."""


class _CaptureOnly(CollageBackend):
    """Everything but the kernels."""

    def lower(
        self, graph: StepProgram | GraphModule, example_inputs: Sequence[Any], inductor_options: dict[str, Any]
    ) -> Any:
        return _do_not_step


def _do_not_step(arguments: list[Any]) -> Any:
    raise _StepNotTaken


_do_not_step._boxed_call = True  # type: ignore[attr-defined]


def _step(step: Callable[[Optimizer], Any], optimizer: Optimizer) -> None:
    step(optimizer)


def _with_code_of_its_own(function: types.FunctionType) -> types.FunctionType:
    """A copy that shares no Dynamo cache (and no recompilation limit) with any other call."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
