"""Which optimizer's step Python is in: rests on the wrapper that ``torch.optim`` puts around ``step``."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

RELIED_ON = ("torch._dynamo.eval_frame:_TorchDynamoContext.__call__ has callback, fn, compile_wrapper",)


def optimizer_being_stepped() -> torch.optim.Optimizer | None:
    """The optimizer whose step, running eagerly, has called what Dynamo compiles; None if there is none."""
    found = (optimizer_of_method(*frame) for frame in possible_steps_on_the_stack())
    return next((optimizer for optimizer in found if optimizer is not None), None)


def is_step_wrapper(code: CodeType) -> bool:
    """Whether code is that of the function that torch puts around the ``step`` of every optimizer's class."""
    return is_in_torchs_optimizer(code) and "func" in code.co_freevars and code.co_name == "wrapper"


def is_step_of(optimizer: torch.optim.Optimizer, code: CodeType) -> bool:
    """Whether code is that of a ``step`` of the optimizer's class, or of a base class, in torch's wrapper."""
    steps = (vars(cls)["step"] for cls in type(optimizer).__mro__ if "step" in vars(cls))
    return any(getattr(inspect.unwrap(step), "__code__", None) is code for step in steps)


def is_torchs_step(optimizer: torch.optim.Optimizer, code: CodeType, variables: Mapping[str, Any]) -> bool:
    """Whether a frame is that of the step of one of torch.optim's own classes, without closure."""
    step = inspect.unwrap(type(optimizer).step)
    return (
        type(optimizer).__module__.startswith("torch.optim.")
        and step.__module__.startswith("torch.optim.")
        and code is step.__code__
        and variables.get("closure") is None
    )


def is_being_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether Python is in the middle of the optimizer's ``step``."""
    return any(
        is_step_wrapper(code) and optimizer_of_method(code, variables) is optimizer
        for code, variables in possible_steps_on_the_stack()
    )


def calls_what_is_compiled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether what Dynamo compiles right now is called by the optimizer's ``step``, which runs eagerly.

    As where a class has ``step = torch.compile(AdamW.step)``: torch puts its wrapper around that.
    """
    is_called_compiled = False
    for code, variables in possible_steps_on_the_stack():
        if is_called_compiled and is_step_wrapper(code) and optimizer_of_method(code, variables) is optimizer:
            return True
        is_called_compiled |= code.co_filename == inspect.getfile(torch._dynamo.eval_frame)
    return False


def wrapped_steps_on_the_stack(optimizer: torch.optim.Optimizer) -> int:
    """How many of torch's wrappers around a step of this optimizer are running, one within another."""
    return sum(
        is_step_wrapper(code) and optimizer_of_method(code, variables) is optimizer
        for code, variables in possible_steps_on_the_stack()
    )


def compiled_callables_on_the_stack() -> Iterator[tuple[Callable[..., Any], Any]]:
    """Pairs ``(function, callback of Dynamo)`` of the running callables that ``torch.compile`` returned.

    Innermost first, up to a function that is disabled for Dynamo.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == inspect.getfile(torch._dynamo.eval_frame):
            if "callback" in frame.f_code.co_freevars:
                yield frame.f_locals["fn"], frame.f_locals["callback"]
            elif frame.f_code.co_name == "_fn":
                return
        frame = frame.f_back


def compiled_callables_within(function: Any) -> list[tuple[Callable[..., Any], Any]]:
    """The same pairs, of what ``torch.compile`` returned and ``function`` is a wrapper around."""
    found = []
    while function is not None and hasattr(function, "get_compiler_config"):  # which wrappers of it have, too
        cells = inspect.getclosurevars(function).nonlocals
        if "callback" in cells:
            found.append((cells["fn"], cells["callback"]))
        function = getattr(function, "__wrapped__", None)
    return found


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


def functions_passed(code: CodeType, variables: Mapping[str, Any]) -> list[FunctionType]:
    """The functions that a frame has as arguments, in whatever wrapping: a step's closure is one of them."""
    are_starred = [bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)]
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + sum(are_starred)]
    passed: list[Any] = []
    for value in map(variables.get, arguments):
        passed += (
            value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else [value]
        )
    functions = map(_function_of, passed)
    return [function for function in functions if isinstance(function, FunctionType)]


def _function_of(value: Any) -> Any:
    """The function that Python runs where ``value`` is called, if it is one of Python's."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, MethodType):
        return value.__func__
    return value if isinstance(value, FunctionType) else inspect.getattr_static(type(value), "__call__", None)


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
