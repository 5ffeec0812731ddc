"""Which optimizer's step Python is in: rests on the wrapper that ``torch.optim`` puts around ``step``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch

__all__ = ["is_being_stepped", "is_step_wrapper", "optimizer_being_stepped"]


def optimizer_being_stepped() -> torch.optim.Optimizer | None:
    """The optimizer whose step, running eagerly, has called what Dynamo compiles; None if there is none."""
    found = (optimizer_of_method(*frame) for frame in possible_steps_on_the_stack())
    return next((optimizer for optimizer in found if optimizer is not None), None)


def is_step_wrapper(code: CodeType) -> bool:
    """Whether code is that of the function that torch puts around the ``step`` of every optimizer's class."""
    return is_in_torchs_optimizer(code) and "func" in code.co_freevars and code.co_name == "wrapper"


def is_being_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether Python is in the middle of the optimizer's ``step``."""
    return any(
        is_step_wrapper(code) and optimizer_of_method(code, variables) is optimizer
        for code, variables in possible_steps_on_the_stack()
    )


def possible_steps_on_the_stack() -> Iterator[tuple[CodeType, Mapping[str, Any]]]:
    """The Python frames that are running, innermost first; with their variables if they may be a step.

    Not with all: reading a frame's variables keeps them alive as long as the frame.
    """
    frame = sys._getframe()
    while frame is not None:
        may_be_a_step = frame.f_code.co_name == "step" or is_in_torchs_optimizer(frame.f_code)
        yield frame.f_code, frame.f_locals if may_be_a_step else {}
        frame = frame.f_back  # type: ignore[assignment]


def is_in_torchs_optimizer(code: CodeType) -> bool:
    """Whether code is of the file of the base class of optimizers, as the wrapper around ``step`` is."""
    return code.co_filename == inspect.getfile(torch.optim.Optimizer)


def functions_passed(code: CodeType, variables: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The file and name of each function among a frame's arguments: the closure of a step is one of them."""
    passed: list[Any] = []
    for name in code.co_varnames:
        value = variables.get(name)
        passed += (
            value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else [value]
        )
    codes = [value.__code__ for value in passed if isinstance(value, FunctionType)]
    return {(each.co_filename, each.co_name) for each in codes}


def optimizer_of_method(code: CodeType, variables: Mapping[str, Any]) -> torch.optim.Optimizer | None:
    """The optimizer whose method a frame runs (or torch's wrapper around ``step``); None for other frames."""
    if not code.co_varnames:
        return None
    value = variables.get(code.co_varnames[0])
    if is_in_torchs_optimizer(code) and isinstance(value, tuple) and value:
        value = value[0]
        return value if isinstance(value, torch.optim.Optimizer) else None
    is_method = isinstance(value, torch.optim.Optimizer) and hasattr(type(value), code.co_name)
    return value if is_method else None
