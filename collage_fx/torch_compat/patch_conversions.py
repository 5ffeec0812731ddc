"""Around Dynamo's conversions of functions for this backend: rests on its ``convert_frame``."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, decorators, eval_frame
from torch._dynamo.exc import ShortenTraceback, Unsupported
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.types import ConvertFrameReturn
from torch.optim import Optimizer

from collage_fx.torch_compat.dynamo_trace import ConvertAgain, RunAsItIs, TraceWhole, backend_within
from collage_fx.torch_compat.optim_frames import (
    is_in_torchs_optimizer,
    optimizer_being_stepped,
    optimizer_of_method,
)
from collage_fx.torch_compat.patch_graph_breaks import GraphBreak, watching_graph_breaks
from collage_fx.torch_compat.patch_numbers import noticing_burned_in, tracing_numbers
from collage_fx.torch_compat.patch_optimizers import (
    Place,
    Thin,
    looked_for,
    thinned,
    thinning_lists,
    tracing_whole,
    watching_optimizers,
)
from collage_fx.torch_compat.patching import Patch

CONVERSIONS = Patch(
    name="conversions",
    target="torch._dynamo.convert_frame:convert_frame_assert(compiler_fn)",
    why="what converts functions for this backend also asks it before and after",
    waits_for="hooks of a backend before and after Dynamo converts a frame for it",
    relies_on=(
        "torch._dynamo.convert_frame:ConvertFrameAssert.__call__(self, frame) has apply_to_code",
        "torch._dynamo.convert_frame:ConvertFrameAssert.__call__ has _nonrecursive_disable_wrapper_code",
        "torch._dynamo.convert_frame:ConvertFrameAssert has _torchdynamo_orig_backend",
        "torch._dynamo.convert_frame:ConvertFrame has convert_frame_assert, _torchdynamo_orig_backend",
        "torch._dynamo.eval_frame:_optimize_assert has convert_frame_assert",
        "torch._dynamo.exc:BackendCompilerFailed has inner_exception",
        "torch._dynamo.types:ConvertFrameReturn has apply_to_code, guarded_code",
        "torch._dynamo:config has accumulated_recompile_limit, capture_scalar_outputs, recompile_limit",
        "torch._dynamo:config has record_runtime_overhead",
    ),
)

FRAMES = Patch(
    name="frames",
    target="torch._dynamo.convert_frame:has_tensor_in_frame",
    why="methods of optimizers are compiled also where Dynamo sees no tensor in them",
    waits_for="a way for a backend to have a frame converted in which Dynamo sees no tensor",
    during="conversions",
    relies_on=("torch._dynamo.convert_frame:ConvertFrameAssert.__call__ has has_tensor_in_frame",),
)

TEXTS = Patch(
    name="texts",
    target="torch:Tensor.__repr__(self)",
    why="tensors whose text becomes part of a guard's are not copied from a GPU, element by element, for it",
    needed_for="speed",
    during="conversions",
    until=(2, 13),
)

COMPILED_CALLS = Patch(
    name="compiled-calls",
    target="torch._dynamo.eval_frame:_callback_from_stance(callback) has fail_callback",
    why="steps are compensated whatever torch's stance, and whatever the program has put in place of state",
    waits_for="a way for a backend to refuse torch.compiler.set_stance",
    affects="everybody",
)


#: The lock that Dynamo holds while it compiles.
compile_lock = convert_frame.compile_lock


@dataclass(frozen=True)
class Watch:
    """The questions that are asked about Dynamo's conversions of functions into graphs.

    ``backend`` is what ``torch.compile`` was given (a name already looked up) and ``keywords`` the ``mode``
    and ``options`` that go with it.

    Attributes:
        is_watched: ``(backend)``: whether it may be one of ours; nothing is asked about others.
        before: ``(backend, keywords, code, variables)``, at the beginning of a conversion; an exception of it
            ends the conversion and reaches the user, True applies the following.
        within: ``(code, variables)``: the context of a conversion.
        after: ``(backend, keywords, compiler, code, variables)``, once a graph has been compiled. The
            compiler is an object that stands for one call of ``torch.compile``.
        failed: like ``before``, and the exception that the conversion ended with, or the backend in it, other
            than a refusal; it is raised again after.
        at_optimizer: see :func:`watching_optimizers`.
        at_graph_break: see :func:`watching_graph_breaks`.
        handed_over: ``(backend, keywords, function)``, when ``torch.compile`` is given a function.
        rows_to_trace, abandon: see :func:`thinning_lists`.
        settings: of Dynamo's configuration, for a conversion.
    """

    is_watched: Callable[[Any], bool]
    before: Callable[[Any, dict[str, Any], CodeType, Mapping[str, Any]], bool]
    within: Callable[[CodeType, Mapping[str, Any]], AbstractContextManager[None]]
    after: Callable[[Any, dict[str, Any], Any, CodeType, Mapping[str, Any]], None]
    failed: Callable[[Any, dict[str, Any], CodeType, Mapping[str, Any], Exception], None]
    at_optimizer: Callable[[Optimizer, Any, dict[str, Any]], Iterable[Place] | None]
    at_graph_break: Callable[[Any, dict[str, Any], CodeType, GraphBreak], None]
    handed_over: Callable[[Any, dict[str, Any], Any], None]
    rows_to_trace: Thin
    abandon: Callable[[Optimizer], None]
    settings: dict[str, Any]


def watch_conversions(watch: Watch) -> None:
    """Have a :class:`Watch` asked about all that Dynamo does for what ``torch.compile`` is given from now on.

    Where something that it asks, or the backend within a conversion, raises :class:`RunAsItIs`, the frame is
    run by Python; where it raises :class:`ConvertAgain`, the conversion begins anew. Called once per
    compilation of a frame; costs nothing where nothing is compiled. A second call replaces the first.
    """

    def watched(convert: Callable[..., Any], frame: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_not_to_be_converted():
            return ConvertFrameReturn(apply_to_code=False)
        code, variables = frame.f_code, frame.f_locals
        compiler = backend_within(convert)
        try:
            if not watch.before(*compiler, code, variables):
                return convert(frame, *args, **kwargs)
            try:
                with (
                    watch.within(code, variables),
                    dynamo_config.patch(watch.settings),
                    _patched(watch, code, variables),
                ):
                    converted = convert(frame, *args, **kwargs)
            except (ShortenTraceback, Unsupported) as error:
                # Refusals, and what fullgraph=True asks for; or what a backend has failed with.
                if (failure := getattr(error, "inner_exception", None)) is not None:
                    watch.failed(*compiler, code, variables, failure)
                raise
            except Exception as error:
                watch.failed(*compiler, code, variables, error)
                raise
            finally:
                thinned.clear()
                looked_for.clear()
        except RunAsItIs:
            return ConvertFrameReturn(apply_to_code=False)
        except (TraceWhole, ConvertAgain) as again:
            whole = isinstance(again, TraceWhole)
        else:
            if converted is not None and converted.guarded_code is not None:
                watch.after(*compiler, _compiler_of(convert), code, variables)
            return converted
        # Here nothing refers to the abandoned trace any more, nor to state that was made in it.
        token = tracing_whole.set(whole or tracing_whole.get())
        try:
            return watched(convert, frame, *args, **kwargs)
        finally:
            tracing_whole.reset(token)

    def converting(original: Callable[..., Any]) -> Callable[..., Any]:
        def convert_frame_assert(compiler_fn: Any, *args: Any, **kwargs: Any) -> Any:
            convert = original(compiler_fn, *args, **kwargs)
            backend, keywords = backend_within(compiler_fn)
            if not watch.is_watched(backend):
                return convert
            if (function := _given_to_compile()) is not None:
                watch.handed_over(backend, keywords, function)
            return _Watched(convert, watched)

        return convert_frame_assert

    CONVERSIONS.install(converting)


def _compiler_of(callback: Any) -> Any:
    """The innermost of the wrappers that Dynamo puts around a backend: one for each ``torch.compile``."""
    while (inner := getattr(callback, "__dict__", {}).get("_torchdynamo_orig_backend")) is not None:
        callback = inner
    return callback


class _Watched:
    """A converter of Dynamo's, with a function of ours called around each conversion."""

    def __init__(self, convert: Callable[..., Any], around: Callable[..., Any]) -> None:
        functools.update_wrapper(self, convert)
        self._convert = convert
        self._around = around

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._convert, frame, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._convert, name)


def _given_to_compile() -> Any:
    """The function that ``torch.compile`` has been called with, if it is what runs now."""
    compiling = inspect.unwrap(torch.compile).__code__  # Lightning, for one, puts a function around it
    caller: Any = sys._getframe()
    while caller is not None and caller.f_code is not compiling:
        caller = caller.f_back
    return None if caller is None else caller.f_locals.get("model")


def _is_not_to_be_converted() -> bool:
    """Whether the function to be converted was disabled for Dynamo, unlike those that it calls.

    Dynamo goes by who calls the function whose conversion it is asked for, and looks past its own frames, but
    not past ours.
    """
    caller: Any = sys._getframe()
    while caller is not None and caller.f_code.co_filename in (__file__, convert_frame.__file__):
        caller = caller.f_back
    return caller is not None and caller.f_code is decorators._nonrecursive_disable_wrapper_code


@contextlib.contextmanager
def _patched(watch: Watch, code: CodeType, variables: Mapping[str, Any]) -> Iterator[None]:
    """Within, all patches are in force that a conversion for this backend needs."""

    def has_tensor(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return lambda frame: (frame.f_code is code and _may_update(code, variables)) or original(frame)

    with (
        _fewer_objects_to_look_at(),
        _silent_about_profiling(),
        FRAMES.entered(has_tensor),
        TEXTS.entered(lambda original: _without_elements),
        watching_optimizers(watch.at_optimizer),
        thinning_lists(watch.rows_to_trace, watch.abandon),
        watching_graph_breaks(watch.at_graph_break),
        tracing_numbers(),
    ):
        yield


def _without_elements(tensor: Tensor, **keywords: Any) -> str:
    """Write down a tensor without its elements."""
    return f"tensor(..., device='{tensor.device}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"


@contextlib.contextmanager
def _fewer_objects_to_look_at() -> Iterator[None]:
    """Within, the garbage collector leaves alone what was there before.

    Of a compilation's hundred thousands of objects most stay until its end, and again and again it would look
    at a million others: an eighth of a compilation's time. What a program has frozen itself stays frozen.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _silent_about_profiling() -> Iterator[None]:
    """Within, Dynamo does not say that it leaves out the mark that torch's wrapper sets around each step."""

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
    """Compile a graph that Dynamo has not captured, while no other thread compiles anything."""
    with compile_lock, _fewer_objects_to_look_at(), noticing_burned_in():
        yield


def _may_update(code: CodeType, variables: Mapping[str, Any]) -> bool:
    """Whether a function is an optimizer's method, or what follows a graph break.

    Dynamo runs functions eagerly in which it sees no tensor, and it doesn't look into objects. The wrapper of
    torch's around ``step``, which does nothing to tensors, may run so.
    """
    is_method = optimizer_of_method(code, variables) is not None and not is_in_torchs_optimizer(code)
    return is_method or code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)


def dynamo_recompile_limit() -> int:
    """The user's limit on how often Dynamo compiles one function."""
    return int(dynamo_config.recompile_limit)


def is_told_not_to_compile() -> bool:
    """Whether torch has been told to compile nothing: by its stance, or ``TORCH_COMPILE_DISABLE``."""
    unchanged = _converting_within_steps  # any function will do
    return bool(dynamo_config.disable) or COMPILED_CALLS.replaced(unchanged) is not unchanged


def heed_stances(
    compensates: Callable[[Any, dict[str, Any]], bool],
    is_recording: Callable[[], bool],
    before_call: Callable[[Any], None],
) -> None:
    """From now on, decide whether Dynamo is asked about a call of what ``torch.compile`` returned.

    Where it is not, the original function runs; an optimizer's step hooks meet that. A second call replaces
    the first.

    - While this thread records a step, Dynamo is not asked.
    - Stances that forbid compiling, and ``TORCH_COMPILE_DISABLE``: nor is it for a backend that compensates.
      It would take note never to compile that code again.
    - ``force_backend``: the same, as that backend would compensate nothing.
    - ``"eager_on_recompile"``: what is compiled is called. Of the rest, Dynamo is asked about what a step
      calls after its hooks, for then it is too late to take the step in another way.
    - ``"eager_then_compile"`` has the first call compiled, and ``"fail_on_recompile"`` is torch's business.

    Args:
        compensates: ``(backend, keywords)``: whether it is a backend that compensates.
        is_recording: whether this thread records a step.
        before_call: ``(compiler)``, before each call. The compiler is the one that :class:`Watch` is told of.
    """
    # fullgraph=True counts what has been compiled; less than zero is "do not count". Since torch 2.13.
    count_compiled = getattr(eval_frame, "set_fullgraph_compiled_frame_count", lambda count: None)

    def deciding(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def callback_from_stance(callback: Any) -> Any:
            if is_recording():
                count_compiled(-1)
                return None
            if not callback:
                return original(callback)
            before_call(_compiler_of(callback))
            chosen = original(callback)
            if chosen is callback and not dynamo_config.disable:
                return chosen
            if not compensates(*backend_within(callback)):
                return chosen
            if chosen is False:
                return _Watched(callback, _converting_within_steps)
            if chosen is None or chosen is callback or not compensates(*backend_within(chosen)):
                count_compiled(-1)
                return None
            return chosen if chosen.__name__ == "fail_callback" else callback

        return callback_from_stance

    COMPILED_CALLS.install(deciding)


def _converting_within_steps(convert: Callable[..., Any], frame: Any, *args: Any, **kwargs: Any) -> Any:
    if is_in_torchs_optimizer(frame.f_code) or optimizer_being_stepped() is None:
        return ConvertFrameReturn(apply_to_code=False)
    return convert(frame, *args, **kwargs)
