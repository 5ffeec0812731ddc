"""Dynamo's current trace, its backend, and exceptions that redirect it.

Rests on Dynamo's translator (``torch._dynamo.symbolic_convert``) and on its wrappers around a backend.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch._dynamo.exc import ShortenTraceback as ShortenTraceback
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import CompileContext

RELIED_ON = (
    "torch._guards:CompileContext has current_compile_id",
    "torch._dynamo.symbolic_convert:InstructionTranslator has current_tx",
    "torch._dynamo.symbolic_convert:InstructionTranslatorBase has f_code, f_globals, f_locals, output",
    "torch._dynamo.output_graph:OutputGraph has compiler_fn, root_tx",
    "torch:_TorchCompileWrapper has compiler_fn, kwargs",
)


def traced_frame_variables() -> dict[str, Any]:
    """Return the Python variables of the frame that Dynamo is compiling, as real objects.

    Empty outside of Dynamo. Includes the globals that the frame's code uses, so that a step inside a user's
    function is found, too.
    """
    output = output_being_traced()
    if output is None:
        return {}
    frame = output.root_tx
    global_names = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
    return {**global_names, **frame.f_locals}


def traced_frame_name() -> str:
    """Return the name of the function that Dynamo is compiling; empty outside of Dynamo."""
    output = output_being_traced()
    return "" if output is None else str(output.root_tx.f_code.co_name)


def current_trace() -> object:
    """Return a value that identifies Dynamo's current compilation; None outside of Dynamo."""
    return CompileContext.current_compile_id()


def output_being_traced() -> Any:
    """Return the ``OutputGraph`` that Dynamo is filling; None outside of Dynamo."""
    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:  # torch's own signal for "no translation is running"
        return None
    return None if translator is None else translator.output  # torch 2.11 returns None after a translation


def backend_being_traced_for() -> tuple[Any, dict[str, Any]]:
    """Return ``(backend, keywords)`` of the current trace; ``(None, {})`` outside of Dynamo."""
    output = output_being_traced()
    return (None, {}) if output is None else backend_within(output.compiler_fn)


def backend_within(compiler: Any) -> tuple[Any, dict[str, Any]]:
    """Return the backend that the user gave to ``torch.compile``, and the keywords of its calls."""
    keywords: dict[str, Any] = {}
    while True:  # torch.compile, Dynamo and its debugging tools each add a wrapper
        attributes = getattr(compiler, "__dict__", {})
        keywords = {**keywords, **attributes.get("kwargs", {})}
        inner = attributes.get("compiler_fn") or attributes.get("_torchdynamo_orig_backend")
        if inner is None:
            return compiler, keywords
        compiler = inner


def is_in_dynamo(function: FunctionType) -> bool:
    """Return whether a function is part of Dynamo."""
    return function.__module__.startswith("torch._dynamo")


class RunEagerly(ShortenTraceback):
    """Exception within a conversion: Python runs the function unchanged, without compiled code."""

    def __init__(self) -> None:
        super().__init__(first_useful_frame=None)


class ConvertAgain(ShortenTraceback):
    """Exception within a conversion: Dynamo traces the function again, which then takes another path."""

    def __init__(self) -> None:
        super().__init__(first_useful_frame=None)


class TraceWhole(ConvertAgain):
    """Exception within a conversion: Dynamo traces the function again, with complete lists."""
