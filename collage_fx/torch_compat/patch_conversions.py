"""Watch over Dynamo's conversions of functions for this backend: rests on its ``convert_frame``."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, decorators, eval_frame
from torch._dynamo.exc import ShortenTraceback, Unsupported
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.types import ConvertFrameReturn
from torch.optim import Optimizer

from collage_fx.torch_compat import optim_frames, patch_optimizers, records
from collage_fx.torch_compat.dynamo_trace import ConvertAgain, RunEagerly, backend_within
from collage_fx.torch_compat.patch_dtypes import tracing_several_dtypes
from collage_fx.torch_compat.patch_graph_breaks import GraphBreak, watching_graph_breaks
from collage_fx.torch_compat.patch_numbers import noticing_burned_in, tracing_numbers
from collage_fx.torch_compat.patch_optimizers import Place, Thin
from collage_fx.torch_compat.patching import Patch
from collage_fx.torch_compat.tensors import pytree

#: Threshold of the garbage collector for the oldest objects at which it never looks at them.
NEVER = 2**31 - 1

CONVERSIONS = Patch(
    name="conversions",
    target="torch._dynamo.convert_frame:convert_frame_assert(compiler_fn)",
    why="this backend is called before and after Dynamo converts a function for it",
    waits_for="hooks of a backend before and after Dynamo converts a frame for it",
    during="the process",
    relies_on=(
        "torch._dynamo.convert_frame:ConvertFrameAssert.__call__(self, frame) has apply_to_code",
        "torch._dynamo.convert_frame:ConvertFrameAssert.__call__ has _nonrecursive_disable_wrapper_code",
        "torch._dynamo.convert_frame:ConvertFrameAssert has _torchdynamo_orig_backend",
        "torch._dynamo.convert_frame:ConvertFrame has convert_frame_assert, _torchdynamo_orig_backend",
        "torch._dynamo.eval_frame:_optimize_assert has convert_frame_assert",
        "torch._dynamo.exc:BackendCompilerFailed has inner_exception",
        "torch._dynamo.types:ConvertFrameReturn has apply_to_code, frame_exec_strategy, guarded_code",
        "torch._dynamo:config has accumulated_recompile_limit, capture_scalar_outputs, recompile_limit",
        "torch._dynamo:config has record_runtime_overhead",
    ),
)

FRAMES = Patch(
    name="frames",
    target="torch._dynamo.convert_frame:has_tensor_in_frame",
    why="methods of optimizers are compiled even if Dynamo sees no tensor in their variables",
    waits_for="an option of a backend to convert frames in which Dynamo sees no tensor",
    relies_on=("torch._dynamo.convert_frame:ConvertFrameAssert.__call__ has has_tensor_in_frame",),
)

TEXTS = Patch(
    name="texts",
    target="torch:Tensor.__repr__(self)",
    why="texts of guards do not contain elements of tensors, which would be copied from a GPU one by one",
    needed_for="speed",
    until=(2, 13),
)

COMPILED_CALLS = Patch(
    name="compiled-calls",
    target="torch._dynamo.eval_frame:_callback_from_stance(callback) has fail_callback",
    why="steps are compensated under any stance of torch, also after a program has replaced state",
    waits_for="a way for a backend to refuse torch.compiler.set_stance",
    during="the process",
    affects="everybody",
)

#: Lock that Dynamo holds while it compiles.
compile_lock = convert_frame.compile_lock


@dataclass(frozen=True)
class Watch:
    """Callbacks about Dynamo's conversions of functions into graphs.

    Attributes:
        is_watched: whether a backend given to ``torch.compile`` (never a name) may belong to collage_fx. The
            other callbacks are not called for other backends.
        request_of: ``(backend, keywords)``, with the ``mode`` and ``options`` given to ``torch.compile`` -> a
            value for the later callbacks of a conversion, which are not called if it is None.
        before: ``(request, compiler, code, variables)``. The compiler is an object that identifies a call of
            ``torch.compile``. An exception ends the conversion and reaches the user.
        within: ``(compiler, code, variables)`` -> the context of a conversion.
        after: ``(request, compiler, code, variables)``, after a graph was compiled.
        failed: ``(request, code, variables, exception)``, when an exception that is no refusal has ended the
            conversion or the backend in it; the exception is then raised again.
        at_optimizer, at_graph_break, rows_to_trace: see :func:`watching_optimizers`,
            :func:`watching_graph_breaks`, :func:`thinning_lists`.
        handed_over: ``(backend, keywords, function)``, when ``torch.compile`` is given a function.
        is_of_concern: whether the updates of ``(request, optimizer)`` are to be rewritten.
        settings: Dynamo's configuration during a conversion.
        is_recording: whether this thread records a step.
        before_call: ``(compiler)``, before each call of a compiled function.
    """

    is_watched: Callable[[Any], bool]
    request_of: Callable[[Any, dict[str, Any]], Any]
    before: Callable[[Any, Any, CodeType, Mapping[str, Any]], None]
    within: Callable[[Any, CodeType, Mapping[str, Any]], AbstractContextManager[None]]
    after: Callable[[Any, Any, CodeType, Mapping[str, Any]], None]
    failed: Callable[[Any, CodeType, Mapping[str, Any], Exception], None]
    at_optimizer: Callable[[Optimizer], Iterable[Place] | None]
    at_graph_break: Callable[[CodeType, GraphBreak], None]
    handed_over: Callable[[Any, dict[str, Any], Any], None]
    rows_to_trace: Thin
    is_of_concern: Callable[[Any, Optimizer], bool]
    settings: dict[str, Any]
    is_recording: Callable[[], bool]
    before_call: Callable[[Any], None]


def watch_conversions(watch: Watch) -> None:
    """Call the callbacks of a :class:`Watch` around Dynamo's conversions from now on.

    If a callback, or the backend during a conversion, raises :class:`RunEagerly`, Python runs the frame; if
    it raises :class:`ConvertAgain`, the conversion starts again. The callbacks are called once per
    compilation of a frame, so they cost nothing in compiled calls; but for ``is_recording`` and
    ``before_call``. A second call of this function replaces the first.
    """

    def watched(convert: Callable[..., Any], frame: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_not_to_be_converted():
            return ConvertFrameReturn(apply_to_code=False)
        code, variables = frame.f_code, frame.f_locals
        try:
            request = watch.request_of(*backend_within(convert))
            if request is None:
                return convert(frame, *args, **kwargs)
            compiler = optim_frames.compiler_within(convert)
            watch.before(request, compiler, code, variables)
            try:
                with (
                    watch.within(compiler, code, variables),
                    dynamo_config.patch(watch.settings),
                    # A part without operations, now, may have some in a later step.
                    dynamo_config.patch(allow_empty_graphs=_may_be_empty(watch, request, code, variables)),
                    _patched(watch, code, variables),
                ):
                    converted = convert(frame, *args, **kwargs)
            except (ShortenTraceback, Unsupported) as error:
                # Refusals and errors that fullgraph=True requests, or the failure of a backend.
                if (failure := getattr(error, "inner_exception", None)) is not None:
                    watch.failed(request, code, variables, failure)
                raise
            except Exception as error:
                watch.failed(request, code, variables, error)
                raise
        except RunEagerly as chosen:
            if chosen.begin is None:
                return ConvertFrameReturn(apply_to_code=chosen.always)
            chosen.begin()
            skip = ConvertFrameReturn().frame_exec_strategy
            return ConvertFrameReturn(type(skip)(skip.cur_action, skip.cur_action), apply_to_code=False)
        except ConvertAgain as again:
            whole = again.whole
        else:
            if converted is not None and converted.guarded_code is not None:
                watch.after(request, compiler, code, variables)
            return converted
        # Here no reference to the abandoned trace, or to state created in it, is left.
        token = patch_optimizers.tracing_whole.set(whole or patch_optimizers.tracing_whole.get())
        try:
            return watched(convert, frame, *args, **kwargs)
        finally:
            patch_optimizers.tracing_whole.reset(token)

    def convert_frame_assert(
        original: Callable[..., Any], compiler_fn: Any, *args: Any, **kwargs: Any
    ) -> Any:
        convert = original(compiler_fn, *args, **kwargs)
        backend, keywords = backend_within(compiler_fn)
        if not watch.is_watched(backend):
            return convert
        # The function that torch.compile was called with, if that call is running; Lightning wraps it.
        compiling = inspect.unwrap(torch.compile).__code__
        called = optim_frames.variables_on_the_stack(lambda code: code is compiling) or {}
        if (function := called.get("model")) is not None:
            for code in optim_frames.codes_of(function):
                records.put(code, _IsGiven())
            watch.handed_over(backend, keywords, function)
        return _Watched(convert, watched)

    CONVERSIONS.install(convert_frame_assert)
    COMPILED_CALLS.install(functools.partial(_decide, watch))


class _Watched:
    """Converter of Dynamo's with a function called around each conversion."""

    def __init__(self, convert: Callable[..., Any], around: Callable[..., Any]) -> None:
        functools.update_wrapper(self, convert)
        self._convert = convert
        self._around = around

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._convert, frame, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._convert, name)


def _is_not_to_be_converted() -> bool:
    """Return whether the function to convert is disabled for Dynamo, but not the functions it calls.

    Dynamo decides this by the function's caller, for which it skips its own frames, but not ours.
    """
    skipped = __file__, optim_frames.frames_on_the_stack.__code__.co_filename, convert_frame.__file__
    codes = (frame.f_code for frame in optim_frames.frames_on_the_stack())
    caller = next((code for code in codes if code.co_filename not in skipped), None)
    return caller is decorators._nonrecursive_disable_wrapper_code


@contextlib.contextmanager
def _patched(watch: Watch, code: CodeType, variables: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: all patches that a conversion for this backend needs."""

    def has_tensor(original: Callable[[Any], bool], frame: Any) -> bool:
        return (frame.f_code is code and _may_update(code, variables)) or original(frame)

    def text_without_elements(original: Callable[..., str], x: torch.Tensor, **_: Any) -> str:
        return f"tensor(..., device='{x.device}', size={tuple(x.shape)}, dtype={x.dtype})"

    with (
        _collecting_young_objects(),
        _silent_about_profiling(),
        FRAMES.entered(has_tensor),
        TEXTS.entered(text_without_elements),
        patch_optimizers.watching_optimizers(watch.at_optimizer),
        patch_optimizers.thinning_lists(watch.rows_to_trace),
        watching_graph_breaks(watch.at_graph_break),
        tracing_numbers(),
        tracing_several_dtypes(),
    ):
        yield


@contextlib.contextmanager
def _collecting_young_objects() -> Iterator[None]:
    """Context manager: the garbage collector leaves objects alone that have been there for a while.

    A compilation creates hundreds of thousands of objects that stay. The collector would scan them, and a
    million others, again and again: a third of the compilation's time.
    """
    before = gc.get_threshold()
    if before[2] == NEVER:  # by a compilation around this one, or in another thread
        yield
        return
    gc.set_threshold(*before[:2], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def _silent_about_profiling() -> Iterator[None]:
    """Context manager: Dynamo does not report that it omits torch's profiler mark around each step."""

    def is_about_more(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Profiler record function")

    context_managers = logging.getLogger("torch._dynamo.variables.ctx_manager")
    context_managers.addFilter(is_about_more)
    try:
        yield
    finally:
        context_managers.removeFilter(is_about_more)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Context manager: compile a graph that Dynamo has not captured, while no other thread compiles."""
    with compile_lock, _collecting_young_objects(), noticing_burned_in(), tracing_several_dtypes():
        yield


def _may_update(code: CodeType, variables: Mapping[str, Any]) -> bool:
    """Return whether a function is an optimizer's method, or the rest of a function after a graph break.

    Or a method of an object that holds optimizers or parameters. Dynamo runs a function eagerly if it finds
    no tensor in its variables, and does not look into objects; torch's wrapper around ``step`` has none.
    """
    optimizer = optim_frames.optimizer_of_method(code, variables)
    is_method = optimizer is not None and not optim_frames.is_in_torchs_optimizer(code)
    holder = variables.get(code.co_varnames[0]) if code.co_varnames else None
    is_own = hasattr(type(holder), code.co_name) and not isinstance(holder, Optimizer)
    holds = records.has(code, _IsGiven) or is_own
    held = pytree.tree_leaves(list(getattr(holder, "__dict__", {}).values())) if holds else []
    is_holders = any(isinstance(each, Optimizer | torch.nn.Parameter) for each in held)
    return is_method or is_holders or code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)


def _may_be_empty(watch: Watch, request: Any, code: CodeType, variables: Mapping[str, Any]) -> bool:
    """Return whether a function without operations may have some in another call, and so is compiled.

    Not that of an optimizer that is left alone: torch 2.13 takes the value of one key for that of another
    where a function only looks a parameter up (``self.indices[p]``).
    """
    optimizer = optim_frames.optimizer_of_method(code, variables)
    if optimizer is not None and not watch.is_of_concern(request, optimizer):
        return False
    return _may_update(code, variables) and not optim_frames.is_in_torchs_optimizer(code)


class _IsGiven:
    """Part of the record of code: ``torch.compile`` was given its function with this backend."""


def dynamo_recompile_limit() -> int:
    """Return the user's limit on how often Dynamo compiles a function."""
    return int(dynamo_config.recompile_limit)


def is_compiling_forbidden() -> bool:
    """Return whether torch's stance, or ``TORCH_COMPILE_DISABLE``, forbids compiling."""
    unchanged = _converting_within_steps  # any function will do
    return bool(dynamo_config.disable) or COMPILED_CALLS.replaced(unchanged) is not unchanged


#: Since torch 2.13, fullgraph=True counts compiled frames; a negative count means "do not count".
_count_compiled = getattr(eval_frame, "set_fullgraph_compiled_frame_count", lambda count: None)


def _decide(watch: Watch, original: Callable[[Any], Any], callback: Any) -> Any:
    """Decide whether Dynamo handles a call of a function that ``torch.compile`` returned.

    Otherwise the original function runs, and an optimizer's step hooks take care of the step. Dynamo handles
    no call while this thread records a step. Of a backend that compensates, by torch's stance:

    - Those that forbid compiling, and ``TORCH_COMPILE_DISABLE``: none. Dynamo would never compile the code.
    - ``force_backend``: none, because the forced backend would not compensate.
    - ``"eager_on_recompile"``: existing compiled code is called. New code is compiled only for functions that
      a step calls after its hooks, because then the step can no longer be taken in another way.
    - ``"eager_then_compile"``: the first call is compiled. ``"fail_on_recompile"``: as in torch.
    """
    if watch.is_recording():
        _count_compiled(-1)
        return None
    if not callback:
        return original(callback)
    watch.before_call(optim_frames.compiler_within(callback))
    chosen = original(callback)
    if chosen is callback and not dynamo_config.disable:
        return chosen
    if watch.request_of(*backend_within(callback)) is None:
        return chosen
    if chosen is False:
        return _Watched(callback, _converting_within_steps)
    is_forbidden = chosen is None or chosen is callback
    if is_forbidden or watch.request_of(*backend_within(chosen)) is None:
        _count_compiled(-1)
        return None
    return chosen if chosen.__name__ == "fail_callback" else callback


def _converting_within_steps(convert: Callable[..., Any], frame: Any, *args: Any, **kwargs: Any) -> Any:
    if optim_frames.is_in_torchs_optimizer(frame.f_code) or optim_frames.optimizer_being_stepped() is None:
        return ConvertFrameReturn(apply_to_code=False)
    return convert(frame, *args, **kwargs)
