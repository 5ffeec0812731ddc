"""What Dynamo is compiling right now, for which backend, and how to send it another way.

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
    """The Python variables of the frame that Dynamo is compiling, real objects; empty outside of Dynamo.

    Includes the globals that the frame's code names, so that a step inside a user's function is found too.
    """
    output = output_being_traced()
    if output is None:
        return {}
    frame = output.root_tx
    global_names = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
    return {**global_names, **frame.f_locals}


def traced_frame_name() -> str:
    """The name of the function whose frame Dynamo is compiling right now; empty outside of Dynamo."""
    output = output_being_traced()
    return "" if output is None else str(output.root_tx.f_code.co_name)


def current_trace() -> object:
    """A value that identifies the compilation that Dynamo is at, None outside of Dynamo."""
    return CompileContext.current_compile_id()


def output_being_traced() -> Any:
    """The ``OutputGraph`` that Dynamo is filling right now; None outside of Dynamo."""
    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:  # torch's own signal for "no translation is running"
        return None
    return None if translator is None else translator.output  # that of torch 2.11, behind a translation


def backend_being_traced_for() -> tuple[Any, dict[str, Any]]:
    """The backend that Dynamo is tracing for, by :func:`backend_within`; ``(None, {})`` outside of it."""
    output = output_being_traced()
    return (None, {}) if output is None else backend_within(output.compiler_fn)


def backend_within(compiler: Any) -> tuple[Any, dict[str, Any]]:
    """The backend that the user gave to ``torch.compile``, and the keywords that this adds to its call."""
    keywords: dict[str, Any] = {}
    while True:  # torch.compile, Dynamo and its debugging tools each put a wrapper of their own around it
        attributes = getattr(compiler, "__dict__", {})
        keywords = {**keywords, **attributes.get("kwargs", {})}
        inner = attributes.get("compiler_fn") or attributes.get("_torchdynamo_orig_backend")
        if inner is None:
            return compiler, keywords
        compiler = inner


def is_dynamos(function: FunctionType) -> bool:
    """Whether a function is part of Dynamo."""
    return function.__module__.startswith("torch._dynamo")


class RunAsItIs(ShortenTraceback):
    """Raised within a conversion to have Python run the function as it is, without compiled code."""

    def __init__(self) -> None:
        super().__init__(first_useful_frame=None)


class ConvertAgain(ShortenTraceback):
    """Raised within a conversion to have Dynamo trace the function once more, which now goes another way."""

    def __init__(self) -> None:
        super().__init__(first_useful_frame=None)


class TraceWhole(ConvertAgain):
    """Raised within a conversion to have it begin anew without thinned lists."""
