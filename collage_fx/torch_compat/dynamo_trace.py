"""Dynamo's current trace, its backend, exceptions that redirect it, and its records of earlier conversions.

Rests on Dynamo's translator (``torch._dynamo.symbolic_convert``) and on its wrappers around a backend.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any

import torch
from torch import optim
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame, utils
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import CompileContext

RELIED_ON = (
    "torch._guards:CompileContext has current_compile_id",
    "torch._dynamo.symbolic_convert:InstructionTranslator has current_tx",
    "torch._dynamo.symbolic_convert:InstructionTranslatorBase has f_code, f_globals, f_locals, output",
    "torch._dynamo.output_graph:OutputGraph has compiler_fn, root_tx",
    "torch:_TorchCompileWrapper has compiler_fn, kwargs",
    "torch._dynamo.exc:ShortenTraceback.remove_dynamo_frames",
    "torch._dynamo:utils has clear_compilation_metrics, get_compilation_metrics",
    "torch._dynamo:eval_frame has reset_code, skip_code",
)


def traced_frame_variables() -> dict[str, Any]:
    """Return the variables of the frame that Dynamo is compiling, and the globals that its code uses.

    Real objects; empty outside of Dynamo.
    """
    output = output_being_traced()
    if output is None:
        return {}
    frame = output.root_tx
    used = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
    return {**used, **frame.f_locals}


def traced_frame_name() -> str:
    """Return the name of the function that Dynamo is compiling; empty outside of Dynamo."""
    output = output_being_traced()
    return "" if output is None else str(output.root_tx.f_code.co_name)


#: Function that returns a value that identifies Dynamo's current compilation; None outside of Dynamo.
current_trace: Callable[[], object] = CompileContext.current_compile_id


def untraced(entry: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that Dynamo does not trace, and do not let Dynamo trace the method that calls it.

    A frame of the method that Dynamo inlines into another is traced as before.
    """
    eval_frame.skip_code(entry.__func__.__code__)  # type: ignore[attr-defined]  # a classmethod
    return torch.compiler.disable(function)


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


#: Function that forgets the conversions so far.
forget_counts = utils.clear_compilation_metrics


def conversions() -> int:
    """Return the number of conversions so far."""
    return len(utils.get_compilation_metrics())


def recompile_reasons() -> list[str]:
    """Return the reason of each repeated conversion of the same function."""
    reasons = (metrics.recompile_reason for metrics in utils.get_compilation_metrics())
    return [reason for reason in reasons if reason]


#: Function that drops everything that code has been converted to: its next call is converted again.
drop_code: Callable[[CodeType], None] = eval_frame.reset_code


class WeakBackend:
    """Weak reference to a backend, for ``torch.compile``, which keeps every backend until its reset."""

    def __init__(self, backend: Any) -> None:
        self._reference = weakref.ref(backend)

    @property
    def backend(self) -> Any:
        """Backend that is referred to."""
        return self._reference()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.backend(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeakBackend) and self._reference is other._reference

    def __hash__(self) -> int:
        return id(self._reference)

    def reset(self) -> None:
        """Reset the backend, if it is alive: ``torch.compiler.reset()`` does it."""
        if self.backend is not None:
            self.backend.reset()


def backend_within(compiler: Any) -> tuple[Any, dict[str, Any]]:
    """Return the backend that the user gave to ``torch.compile``, and the keywords of its calls."""
    keywords: dict[str, Any] = {}
    while True:  # torch.compile, Dynamo and its debugging tools each add a wrapper
        if isinstance(compiler, WeakBackend):
            return compiler.backend, keywords
        attributes = getattr(compiler, "__dict__", {})
        keywords = {**keywords, **attributes.get("kwargs", {})}
        inner = attributes.get("compiler_fn") or attributes.get("_torchdynamo_orig_backend")
        if inner is None:
            return compiler, keywords
        compiler = inner


def is_in_dynamo(function: FunctionType) -> bool:
    """Return whether a function is part of Dynamo."""
    return function.__module__.startswith("torch._dynamo")


class Refused(ShortenTraceback):
    """Exception that the caller of a compiled function gets without Dynamo's frames and without its remarks.

    Frames from the first one of other code are kept, as a closure's; all with ``TORCHDYNAMO_VERBOSE=1``.

    Attributes:
        frames: frames to show if there is no other code, such as those of the exception that led to this one.
    """

    frames: TracebackType | None = None

    def __init__(self, text: str) -> None:
        super().__init__(text, first_useful_frame=None)
        self._text = text

    @torch.compiler.disable  # Dynamo would trace it, which ``fullgraph=True`` makes an error of its own
    def remove_dynamo_frames(self) -> Refused:
        """Return the exception as the caller is to see it; Dynamo calls this."""
        if dynamo_config.verbose:
            return self
        self.args = (self.located(self._text, _statement_being_traced(self)),)
        shown = self.__traceback__
        while shown is not None and _is_internal(shown.tb_frame):
            shown = shown.tb_next
        return self.with_traceback(shown or self.frames)

    def located(self, text: str, statement: str) -> str:
        """Return the message with the statement that Dynamo was tracing; empty if it is not known."""
        return text


def _is_internal(frame: FrameType) -> bool:
    """Return whether a frame is of torch, of this package, or of Python's library between them."""
    package = frame.f_globals.get("__name__", "torch").partition(".")[0]
    return package in ("torch", "collage_fx") or package in sys.stdlib_module_names


def _statement_being_traced(error: Exception) -> str:
    """Return ``file:line in function: statement`` of an exception in a trace, but of torch's step wrapper."""
    for frame in reversed(getattr(error, "real_stack", None) or ()):
        if frame.filename != inspect.getfile(optim.Optimizer):
            at = f"{frame.filename}:{frame.lineno} in {frame.name}"
            return f"{at}: {frame.line}" if frame.line else at
    return ""


class RunEagerly(ShortenTraceback):
    """Exception within a conversion: Python runs the function unchanged, without compiled code.

    If ``always``, it is never converted again, for anyone. With ``begin``, called first, nor are its callees.
    """

    def __init__(self, *, always: bool = False, begin: Callable[[], None] | None = None) -> None:
        super().__init__(first_useful_frame=None)
        self.always, self.begin = always, begin


class ConvertAgain(ShortenTraceback):
    """Exception within a conversion: Dynamo traces the function again, which then takes another path.

    If ``whole``, the lists that its step loops over are complete then.
    """

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__(first_useful_frame=None)
        self.whole = whole
