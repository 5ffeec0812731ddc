"""Around Dynamo's conversion of a frame: rests on its ``convert_frame`` and ``eval_frame``."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame, trace_rules
from torch._dynamo.convert_frame import CatchErrorsWrapper, ConvertFrameAssert, compile_lock
from torch._dynamo.eval_frame import always_optimize_code_objects
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback, Unsupported
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.types import ConvertFrameReturn

from collage_fx.torch_compat.dynamo_optimizers import thinned, tracing_whole
from collage_fx.torch_compat.dynamo_trace import ConvertAgain, RunAsItIs, TraceWhole, backend_within
from collage_fx.torch_compat.optim_frames import optimizer_of_method
from collage_fx.wrapping import wrap_method

__all__ = [
    "compile_lock",
    "dynamo_recompile_limit",
    "run_compiled_functions_as_they_are_if",
    "watch_conversions",
]


def watch_conversions(
    before: Callable[[Any, dict[str, Any], CodeType, Mapping[str, Any]], bool],
    after: Callable[[CodeType, Mapping[str, Any]], None],
    failed: Callable[[Any, dict[str, Any], CodeType, Mapping[str, Any], Exception], None],
    settings: dict[str, Any],
) -> None:
    """Have functions called around each of Dynamo's conversions of a frame into a graph.

    Args:
        before: ``(backend, keywords, code, variables)`` (see :func:`watch_traced_optimizers`); an exception
            of it ends the conversion and reaches the user, True applies the following.
        after: ``(code, variables)``, once a graph has been compiled.
        failed: like ``before``, and the exception that the conversion ended with, or the backend in it, other
            than a refusal; it is raised again after.
        settings: of Dynamo's configuration, for the conversion.

    Where one of them, or another watch or the backend within the conversion, raises :class:`RunAsItIs`, the
    frame is run by Python; where it raises :class:`ConvertAgain`, the conversion begins anew. Called once per
    compilation of a frame; costs nothing where nothing is compiled.
    """

    def watching(original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            code, variables = frame.f_code, frame.f_locals
            compiler = backend_within(self._torchdynamo_orig_backend)
            try:
                if not before(*compiler, code, variables):
                    return original(self, frame, *args, **kwargs)
                if _may_update(code, variables):
                    always_optimize_code_objects[code] = True
                try:
                    with dynamo_config.patch(settings), _no_garbage_collection():
                        converted = original(self, frame, *args, **kwargs)
                except BackendCompilerFailed as error:
                    failed(*compiler, code, variables, error.inner_exception)
                    raise
                except (ShortenTraceback, Unsupported):  # refusals, and what fullgraph=True asks for
                    raise
                except Exception as error:
                    failed(*compiler, code, variables, error)
                    raise
                finally:
                    thinned.clear()
            except RunAsItIs:
                return ConvertFrameReturn(apply_to_code=False)
            except TraceWhole:
                token = tracing_whole.set(True)
                try:
                    return watched(self, frame, *args, **kwargs)
                finally:
                    tracing_whole.reset(token)
            except ConvertAgain:
                return watched(self, frame, *args, **kwargs)
            if converted is not None and converted.guarded_code is not None:
                after(code, variables)
            return converted

        return watched

    wrap_method(ConvertFrameAssert, "__call__", watching)
    wrap_method(CatchErrorsWrapper, "__call__", _one_at_a_time)


def _may_update(code: CodeType, variables: Mapping[str, Any]) -> bool:
    """Whether a function is an optimizer's method, or what follows a graph break.

    Dynamo runs functions eagerly in which it sees no tensor, and it doesn't look into objects.
    """
    is_method = optimizer_of_method(code, variables) is not None
    return is_method or code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Cycles are collected later: of a compilation's hundred thousands of objects most stay until its end.

    An eighth of its time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _one_at_a_time(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have a thread wait for another's compilation before it looks whether to compile.

    Dynamo looks first. Whether a tensor mode keeps it from compiling is one answer for all threads, and yes
    while another thread compiles; it would then run the function eagerly, from then on. What Dynamo never
    compiles must not wait: Python's import machinery is among it, and holds locks of its own.
    """

    def convert(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if trace_rules.check(frame.f_code):
            return original(self, frame, *args, **kwargs)
        with compile_lock:
            return original(self, frame, *args, **kwargs)

    return convert


def dynamo_recompile_limit() -> int:
    """How often Dynamo compiles a function at most, as the user has set it."""
    return int(dynamo_config.recompile_limit)


def run_compiled_functions_as_they_are_if(condition: Callable[[], bool]) -> None:
    """Have what ``torch.compile`` returned call the original function while ``condition()`` is true.

    As the stance ``"force_eager"`` does, which is one for all threads.
    """
    # fullgraph=True counts what has been compiled; less than zero is "do not count". Since torch 2.13.
    count_compiled = getattr(eval_frame, "set_fullgraph_compiled_frame_count", lambda count: None)

    def conditional(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def callback_from_stance(callback: Any) -> Any:
            if not condition():
                return original(callback)
            count_compiled(-1)
            return None

        return callback_from_stance

    wrap_method(eval_frame, "_callback_from_stance", conditional)
