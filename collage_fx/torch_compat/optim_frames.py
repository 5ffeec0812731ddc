"""Frames of optimizer steps on Python's stack: rests on torch.optim's wrapper around ``step``."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch.utils.weak import WeakIdRef

RELIED_ON = (
    "torch._dynamo.eval_frame:_TorchDynamoContext.__call__ has callback, fn, compile_wrapper, cleanups, "
    "result",
)


def optimizer_being_stepped() -> torch.optim.Optimizer | None:
    """Return the optimizer whose eagerly running step called the function that Dynamo compiles."""
    found = (optimizer_of_method(*frame) for frame in possible_steps_on_the_stack())
    return next((optimizer for optimizer in found if optimizer is not None), None)


def is_step_wrapper(code: CodeType) -> bool:
    """Return whether code belongs to the wrapper that torch puts around ``step`` of every optimizer."""
    return is_in_torchs_optimizer(code) and "func" in code.co_freevars and code.co_name == "wrapper"


#: Attribute of an optimizer: step that the program has given this instance.
TRUE = "__collage_fx_true_step__"


def true_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the step that an installed optimizer had before, as a function of the optimizer.

    It is the step of the optimizer's class, unless the program has given the instance a step of its own: then
    it is that step, with torch's wrapper around.
    """
    return vars(optimizer).get(TRUE, type(optimizer).step)


def is_step_of(optimizer: torch.optim.Optimizer, code: CodeType) -> bool:
    """Return whether code belongs to the optimizer's step, or ``step`` of a base class, unwrapped."""
    steps = [vars(cls)["step"] for cls in type(optimizer).__mro__ if "step" in vars(cls)]
    unwrapped = map(inspect.unwrap, [true_step(optimizer), *steps])
    return any(getattr(step, "__code__", None) is code for step in unwrapped)


#: Attribute of an object around a step's closure: the closure.
PASSED = "__collage_fx_passed__"

#: Attribute of a class of ``collage_fx.optim``: the class that it is made of.
ORIGINAL = "__collage_fx_original__"


def original_class(cls: type) -> type:
    """Return the class that a class of ``collage_fx.optim`` is made of; any other class itself."""
    return cast(type, vars(cls).get(ORIGINAL, cls))


def is_of_torch_optim(value: type | Callable[..., Any]) -> bool:
    """Return whether a class or a function is torch.optim's own, or a class is made of such a class.

    Its module is one in ``torch.optim``, or for Adafactor and Muon ``torch.optim`` itself.
    """
    value = original_class(value) if isinstance(value, type) else value
    return f"{value.__module__}.".startswith("torch.optim.")


def is_torchs_step(optimizer: torch.optim.Optimizer, code: CodeType, variables: Mapping[str, Any]) -> bool:
    """Return whether a frame runs the step of a class of torch.optim, without a closure.

    It never does for Adafactor and Muon: Dynamo has no graph break between torch's wrapper and their step,
    and compiles the frame of the wrapper, with hooks that may read all parameters, so all rows are traced.
    """
    step = inspect.unwrap(type(optimizer).step)
    are_torchs = is_of_torch_optim(type(optimizer)) and is_of_torch_optim(step)
    return are_torchs and code is step.__code__ and variables.get("closure") is None


def is_traced_without_wrapper(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether :func:`is_torchs_step` can be true of the optimizer: all of torch.optim's but two."""
    has_row_by_row = original_class(type(optimizer)).__module__ != "torch.optim"
    return is_of_torch_optim(type(optimizer)) and has_row_by_row and TRUE not in vars(optimizer)


def is_being_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's ``step`` is on Python's stack."""
    return wrapped_steps_on_the_stack(optimizer) > 0


def calls_compiled_function(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's eager ``step`` calls the function that Dynamo is compiling.

    Example: a class with ``step = torch.compile(AdamW.step)``, which torch puts its wrapper around.
    """
    is_called_compiled = False
    for code, variables in possible_steps_on_the_stack():
        if is_called_compiled and is_step_wrapper(code) and optimizer_of_method(code, variables) is optimizer:
            return True
        is_called_compiled |= code.co_filename == inspect.getfile(torch._dynamo.eval_frame)
    return False


def wrapped_steps_on_the_stack(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of torch's step wrappers of this optimizer on the stack, nested."""
    wrappers = (each for each in possible_steps_on_the_stack() if is_step_wrapper(each[0]))
    return sum(optimizer_of_method(*each) is optimizer for each in wrappers)


def compiled_callables_on_the_stack() -> Iterator[tuple[Callable[..., Any], Any]]:
    """Yield ``(function, Dynamo's callback)`` of running ``torch.compile`` callables.

    Order: innermost first, up to a function that is disabled for Dynamo.
    """
    for frame in frames_on_the_stack():
        if frame.f_code.co_filename == inspect.getfile(torch._dynamo.eval_frame):
            if "callback" in frame.f_code.co_freevars:
                yield frame.f_locals["fn"], frame.f_locals["callback"]
            elif frame.f_code.co_name == "_fn":
                return


class RunningCall(NamedTuple):
    """Call of a callable that ``torch.compile`` returned.

    Attributes:
        compiler: object that identifies the call of ``torch.compile``.
        cleanups: functions that are called, the last one last, when it ends.
        has_returned: returns, in them, whether it ends without an exception.
    """

    compiler: Any
    name: str
    arguments: list[Any]
    cleanups: list[Callable[[], None]]
    has_returned: Callable[[], bool]


def running_call() -> RunningCall | None:
    """Return the innermost call of a compiled callable that Python is in; None if it is in none."""
    file = inspect.getfile(torch._dynamo.eval_frame)
    frames = (frame for frame in frames_on_the_stack() if frame.f_code.co_filename == file)
    if (frame := next((each for each in frames if "cleanups" in each.f_locals), None)) is None:
        return None
    found = frame.f_locals
    return RunningCall(
        compiler_within(found["callback"]),
        getattr(found["fn"], "__qualname__", "function"),
        [*found["args"], *found["kwargs"].values()],
        found["cleanups"],
        lambda: "result" in frame.f_locals,
    )


def compiler_within(callback: Any) -> Any:
    """Return the innermost of Dynamo's wrappers around a backend: each ``torch.compile`` creates its own."""
    while (inner := getattr(callback, "__dict__", {}).get("_torchdynamo_orig_backend")) is not None:
        callback = inner
    return callback


def compiled_callables_within(function: Any) -> list[tuple[Callable[..., Any], Any]]:
    """Return ``(function, Dynamo's callback)`` of ``torch.compile`` callables inside a wrapper."""
    found = []
    while function is not None and hasattr(function, "get_compiler_config"):  # wraps() copies it
        cells = inspect.getclosurevars(function).nonlocals
        if "callback" in cells:
            found.append((cells["fn"], cells["callback"]))
        function = getattr(function, "__wrapped__", None)
    return found


def frames_on_the_stack() -> Iterator[FrameType]:
    """Yield Python's frames, innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def possible_steps_on_the_stack() -> Iterator[tuple[CodeType, Mapping[str, Any]]]:
    """Yield Python's frames, innermost first; with variables if the frame may be a step.

    Other frames come without: reading variables keeps the objects alive as long as the frame.
    """
    for frame in frames_on_the_stack():
        may_be_a_step = frame.f_code.co_name == "step" or is_in_torchs_optimizer(frame.f_code)
        yield frame.f_code, frame.f_locals if may_be_a_step else {}


def variables_on_the_stack(is_asked_for: Callable[[CodeType], bool]) -> Mapping[str, Any] | None:
    """Return the variables of Python's innermost frame whose code is asked for; None if there is none."""
    frames = frames_on_the_stack()
    return next((frame.f_locals for frame in frames if is_asked_for(frame.f_code)), None)


def key_of_code(code: CodeType) -> Hashable:
    """Return a key of code, the same for functions that do the same.

    Code that Dynamo has written may hold constants that have no hash: it has a key by identity.
    """
    try:
        hash(code)
    except TypeError:
        return WeakIdRef(code)
    return code


def is_in_torchs_optimizer(code: CodeType) -> bool:
    """Return whether code is in the file of the base class of optimizers, like the step wrapper."""
    return code.co_filename == inspect.getfile(torch.optim.Optimizer)


def functions_passed(code: CodeType, variables: Mapping[str, Any]) -> list[FunctionType]:
    """Return the functions among a frame's arguments, unwrapped; a step's closure is such a function."""
    are_starred = [bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)]
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + sum(are_starred)]
    passed: list[Any] = []
    for value in map(variables.get, arguments):
        value = tuple(value.values()) if isinstance(value, dict) else value
        passed += value if isinstance(value, tuple) else [value]
    functions = map(_function_of, passed)
    return [function for function in functions if isinstance(function, FunctionType)]


def _function_of(value: Any) -> Any:
    """Return the Python function that a call of ``value`` runs; None if there is none."""
    value = getattr(value, PASSED, value)
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, MethodType):
        return value.__func__
    return value if isinstance(value, FunctionType) else inspect.getattr_static(type(value), "__call__", None)


def optimizer_of_method(code: CodeType, variables: Mapping[str, Any]) -> torch.optim.Optimizer | None:
    """Return the optimizer whose method, step wrapper or own step a frame runs; None for other frames."""
    if not code.co_varnames:
        return None
    value = variables.get(code.co_varnames[0])
    if is_in_torchs_optimizer(code) and isinstance(value, tuple) and value:
        value = value[0]
        return value if isinstance(value, torch.optim.Optimizer) else None
    if isinstance(value, torch.optim.Optimizer) and hasattr(type(value), code.co_name):
        return value
    values = [each for value in variables.values() for each in (value if type(value) is tuple else (value,))]
    optimizers = (each for each in values if isinstance(each, torch.optim.Optimizer))
    return next((each for each in optimizers if code in codes_of(vars(each).get("step"))), None)


def codes_of(step: Any) -> list[CodeType]:
    """Return the code of a callable and of the functions inside: of methods, partial functions, wrappers."""
    codes = []
    while step is not None:
        if (code := getattr(step, "__code__", None)) is not None and not isinstance(step, MethodType):
            codes.append(code)
        step = next(
            (getattr(step, name) for name in ("func", "__func__", "__wrapped__") if hasattr(step, name)), None
        )
    return codes
