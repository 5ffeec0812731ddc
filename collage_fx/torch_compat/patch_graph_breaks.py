"""Patch that reports graph breaks: rests on ``log_graph_break`` of Dynamo's translator."""

from __future__ import annotations

import contextlib
import inspect
import re
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from collage_fx.torch_compat.optim_frames import (
    functions_passed,
    is_in_torchs_optimizer,
    optimizer_of_method,
    possible_steps_on_the_stack,
)
from collage_fx.torch_compat.patching import Patch

GRAPH_BREAKS = Patch(
    name="graph-breaks",
    target=(
        "torch._dynamo.symbolic_convert:"
        "InstructionTranslatorBase.log_graph_break(self, code_options, reason, exc)"
    ),
    why="a graph break in an optimizer's update is reported before anything runs",
    waits_for="a hook of a backend before a graph is broken",
    relies_on=("torch._dynamo.exc:Unsupported has gb_type, msg, real_stack", "torch._dynamo:graph_break"),
)

#: End of Dynamo's sentence on a graph break, or on a disabled function, whose author has given no reason.
NOT_GIVEN = re.compile(r"(\. Message: None| \(reason: None\))$")


@dataclass(frozen=True)
class GraphBreak:
    """Graph break: a place in the code where Dynamo cannot continue tracing.

    Attributes:
        optimizer: the optimizer whose step is being traced; None if no step is.
        is_in_closure: whether it is in a closure that was passed to the step.
        is_around_a_step: whether it is torch.optim's own break around the step of an inner optimizer.
        is_exception: whether Dynamo believes that Python would raise an exception there.
        reason: Dynamo's reason, in a sentence or two.
        where: file, line and function.
        left: variables of the function, if Python runs the rest of it, but not what it calls; else None.
    """

    optimizer: torch.optim.Optimizer | None
    is_in_closure: bool
    is_around_a_step: bool
    is_exception: bool
    reason: str
    where: str
    left: Mapping[str, Any] | None


def watching_graph_breaks(
    watch: Callable[[CodeType, GraphBreak], None],
) -> contextlib.AbstractContextManager[None]:
    """Context manager: call ``watch(code, graph_break)`` at each graph break.

    ``watch`` is also called when Dynamo decides to skip a frame. ``code`` is of the function that is being
    converted, which may have called the function with the break. A ``ShortenTraceback`` reaches the user.
    """

    def watched(original: Callable[..., None], self: Any, code_options: Any, reason: str, exc: Any) -> None:
        is_torchs_own = is_in_torchs_optimizer(self.f_code) and _is_called_by_torchs_optimizer(exc)
        if not is_torchs_own:
            # Dynamo resumes after a break, unless it is in a loop or in some blocks.
            rest = self.f_locals if "kipping the " in str(reason) else None
            watch(self.f_code, _describe_graph_break(self, exc, rest))
        original(self, code_options, reason, exc)

    return GRAPH_BREAKS.entered(watched)


def _is_called_by_torchs_optimizer(cause: Any) -> bool:
    """Return whether ``torch._dynamo.graph_break()`` in the base class of optimizers caused a break."""
    is_call = getattr(cause, "gb_type", None) == "Call to `torch._dynamo.graph_break()`"
    stack = _stack_of(cause)
    return is_call and bool(stack) and stack[-1].filename == inspect.getfile(torch.optim.Optimizer)


def _stack_of(cause: Any) -> list[Any]:
    return list(getattr(cause, "real_stack", None) or ())


def _describe_graph_break(translator: Any, cause: Any, left: Mapping[str, Any] | None) -> GraphBreak:
    stack = _stack_of(cause)
    lines = [line.strip() for line in str(getattr(cause, "msg", cause)).splitlines() if line.strip()]
    explained = [NOT_GIVEN.sub("", line.removeprefix("Explanation: ")) for line in lines[:2]]
    places = (f"{e.filename}:{e.lineno} in {e.name}" for e in reversed(stack) if not _is_internal(e))
    where = next(places, translator.f_code.co_name)
    reason = ". ".join(explained)
    stepped_by = _optimizer_stepped_by(translator, stack, reason)
    is_exception = reason.startswith("Observed exception")
    return GraphBreak(*stepped_by, _is_called_by_torchs_optimizer(cause), is_exception, reason, where, left)


def _is_internal(entry: Any) -> bool:
    """Return whether an entry of Dynamo's stack is in a file of torch, of this package or of Python."""
    path = Path(entry.filename)
    packages = [Path(__file__).parents[1], Path(torch.__file__).parent]
    is_python = Path(sysconfig.get_path("stdlib")) in path.parents and "site-packages" not in path.parts
    return is_python or any(package in path.parents for package in packages)


def _optimizer_stepped_by(
    translator: Any, stack: Sequence[Any], reason: str
) -> tuple[torch.optim.Optimizer | None, bool]:
    """Return the optimizer whose method is being translated, and whether inside a closure that it calls.

    The function that is being traced and the Python frames that called it are searched. A closure that is
    disabled for Dynamo breaks the graph where it is called, and the reason contains its name.
    """
    below = {(entry.filename, entry.name) for entry in stack}
    for code, variables in [(translator.f_code, translator.f_locals), *possible_steps_on_the_stack()]:
        optimizer = optimizer_of_method(code, variables)
        if optimizer is not None:
            passed = functions_passed(code, variables)
            codes = {(each.__code__.co_filename, each.__code__.co_name) for each in passed}
            return optimizer, bool(below & codes) or any(str(each) in reason for each in passed)
        below.add((code.co_filename, code.co_name))
    return None, False
