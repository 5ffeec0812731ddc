"""Everything that rests on torch's private interfaces, and so may differ from version to version.

Supported: torch 2.11 and newer (tested on 2.11, 2.13 and 2.15). A private name that has moved is reported by
name at import, with the versions that are known to work, rather than by an AttributeError in the middle of a
training run.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import gc
import inspect
import re
import sys
import unittest.mock
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Literal, cast
from weakref import WeakSet

import torch

from collage_fx.sums_in_cpp import Sums, Vectors
from collage_fx.wrapping import wrap_method

__all__ = [
    "COMBINED_LAUNCHES",
    "ConvertAgain",
    "FakeTensorMode",
    "GraphBreak",
    "RunAsItIs",
    "ShortenTraceback",
    "SymbolicScope",
    "ThinnedLists",
    "TraceWhole",
    "another_fake",
    "aot_input_of",
    "assert_size_stride",
    "bfloat16_by_instruction",
    "compile_lock",
    "compile_with_inductor",
    "cpp_compilers",
    "current_trace",
    "depends_on_values",
    "detect_fake_mode",
    "disabled_torch_function",
    "dynamo_recompile_limit",
    "factorizes",
    "forget_static_addresses",
    "functional_decompositions",
    "generated_code",
    "generates_cpp",
    "graph_module",
    "has_internal_overlap",
    "has_storage",
    "inductor_compile_inner",
    "inductor_config",
    "innermost_callable",
    "is_being_stepped",
    "is_step_wrapper",
    "keep_numbers_symbolic",
    "laid_out_like",
    "make_fx",
    "mode_options",
    "needs_autograd",
    "optimizer_being_stepped",
    "pointwise_of",
    "prepare_cpp_compiler",
    "prims_fma",
    "real_tensors",
    "register_pointwise_lowering",
    "register_realizing_lowering",
    "register_sampling_lowering",
    "register_summing_lowering",
    "rest_in_cpp",
    "rounded_in_cpp",
    "run_compiled_functions_as_they_are_if",
    "symbol_source",
    "thin_lists",
    "thinned_lists",
    "trace_instead",
    "traced_frame_name",
    "traced_frame_variables",
    "versions_to_increment",
    "watch_conversions",
    "watch_graph_breaks",
    "watch_traced_optimizers",
    "without_modes",
    "wrapper_subclass",
]

OLDEST_TORCH = (2, 11)
TESTED_TORCH = ("2.11", "2.13", "2.15")


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


if _version() < OLDEST_TORCH:
    raise ImportError(
        f"collage_fx needs torch >= {'.'.join(map(str, OLDEST_TORCH))}, found {torch.__version__}: "
        "AOTAutograd's input descriptors and the Inductor entry points it is built on are missing there"
    )

try:
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import eval_frame, trace_rules
    from torch._dynamo.convert_frame import CatchErrorsWrapper, ConvertFrameAssert, compile_lock
    from torch._dynamo.decorators import substitute_in_graph
    from torch._dynamo.eval_frame import always_optimize_code_objects
    from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis, Unsupported
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
    from torch._dynamo.source import ConstantSource
    from torch._dynamo.symbolic_convert import (
        InstructionTranslator,
        InstructionTranslatorBase,
        TensorifyState,
    )
    from torch._dynamo.trace_rules import get_torch_obj_rule_map, torch_name_rule_map
    from torch._dynamo.types import ConvertFrameReturn
    from torch._dynamo.variables.lists import ListVariable
    from torch._dynamo.variables.optimizer import OptimizerVariable
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd import graph_compile
    from torch._functorch._aot_autograd.descriptors import (
        BufferAOTInput,
        ParamAOTInput,
        PlainAOTInput,
        SyntheticBaseAOTInput,
        ViewBaseAOTInput,
    )
    from torch._functorch._aot_autograd.schemas import OutputType
    from torch._guards import CompileContext, TracingContext, detect_fake_mode, tracing
    from torch._inductor import compile_fx as compile_fx_module
    from torch._inductor import config as inductor_config
    from torch._inductor import ir, list_mode_options
    from torch._inductor.codecache import CppPythonBindingsCodeCache, torch_key
    from torch._inductor.codegen import cpp as cpp_module
    from torch._inductor.codegen.cpp import CppKernel, CppOverrides, CppVecKernel, CppVecOverrides
    from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP, cexpr_index
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.graph import GraphLowering
    from torch._inductor.lowering import lowerings, pointwise_cat, register_lowering, to_dtype
    from torch._inductor.runtime.triton_compat import triton_key
    from torch._inductor.utils import sympy_product
    from torch._inductor.virtualized import OpsWrapper, V, ops
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
    from torch.fx._lazy_graph_module import _LazyGraphModule
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
    from torch.overrides import _pop_mode_temporarily
    from torch.utils._mode_utils import no_dispatch
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing
    from torch.utils.weak import WeakIdKeyDictionary
except ImportError as error:
    raise ImportError(
        f"collage_fx does not know torch {torch.__version__}: {error}. "
        f"It is tested with torch {', '.join(TESTED_TORCH)}; please install one of those or a newer "
        "collage_fx"
    ) from error

#: ``a * b + c``, an operator that Inductor registers and that AOTAutograd puts into graphs.
prims_fma: Any = torch.ops.prims.fma


def inductor_compile_inner(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile one functional ATen graph with Inductor: a callable that takes a list.

    The code is Inductor's but for :func:`bfloat16_by_instruction`.
    """
    with bfloat16_by_instruction():
        return compile_fx_inner(gm, example_inputs, **kwargs)


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    inner_compile: Callable[..., Any],
    decompositions: dict[Any, Callable[..., Any]],
    config_patches: dict[str, Any] | None,
) -> Callable[..., Any]:
    """Run a Dynamo graph through AOTAutograd and Inductor with ``inner_compile`` in place of Inductor's own.

    ``decompositions`` are applied by AOTAutograd; :func:`functional_decompositions` are Inductor's own.
    AOTAutograd's cache is switched off: on a hit it would return the code of an earlier compilation without
    calling ``inner_compile``, that is without the error terms. Inductor's own cache, keyed by the graph it is
    given (the rewritten one), stays on, so that a second process still starts warm.
    """
    with functorch_config.patch(enable_autograd_cache=False), _without_needless_patterns():
        compiled = compile_fx(
            gm,
            list(example_inputs),
            inner_compile=inner_compile,
            decompositions=decompositions,
            config_patches=config_patches,
        )
    return cast(Callable[..., Any], compiled)


#: What Inductor's patterns for attention, for padding and for shuffled rows have in them, one of these each.
_IN_PATTERNS = frozenset({"mm", "bmm", "addmm", "baddbmm", "randperm"})


@contextlib.contextmanager
def _without_needless_patterns() -> Iterator[None]:
    """Within, graphs in which there can be no such pattern don't have them made: a second, once a process.

    The first graph that may contain one has them made as ever. (On a GPU there are further patterns.)
    """
    with_patterns = compile_fx_module.joint_graph_passes

    def passes(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        names = {getattr(getattr(n.target, "overloadpacket", n.target), "__name__", "") for n in nodes}
        values = [node.meta.get("val") for node in graph.graph.nodes]
        on_cpu = all(v.device.type == "cpu" for v in values if isinstance(v, torch.Tensor))
        if not on_cpu or _IN_PATTERNS.intersection(names):
            return with_patterns(graph, *args, **kwargs)
        with unittest.mock.patch.object(joint_graph, "lazy_init", return_value=None):
            return with_patterns(graph, *args, **kwargs)

    with unittest.mock.patch.object(compile_fx_module, "joint_graph_passes", passes):
        yield


@contextlib.contextmanager
def generated_code() -> Iterator[list[str]]:
    """The list that Inductor's code of every graph compiled meanwhile goes into: Python with its kernels.

    Also of graphs that it finds in its cache.
    """
    sources: list[str] = []
    watching = GraphLowering.save_output_code

    def save(source: str) -> None:
        sources.append(source)
        if watching is not None:
            watching(source)

    with unittest.mock.patch.object(GraphLowering, "save_output_code", save):
        yield sources


def needs_autograd(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a Dynamo graph computes something that is to be differentiated.

    AOTAutograd's own answer is yes for every in-place update through ``.data`` of a parameter that requires
    gradients, while gradients are enabled: the style of most optimizers that lack a ``torch.no_grad``.
    """
    results = [n for n in gm.graph.output_node().all_input_nodes if n.op not in ("placeholder", "get_attr")]
    inputs = [
        value
        for value in (*gm.parameters(), *gm.buffers(), *example_inputs)
        if isinstance(value, torch.Tensor)
    ]
    return torch.is_grad_enabled() and (
        any(getattr(node.meta.get("example_value"), "requires_grad", False) for node in results)
        or any(value.requires_grad and not value.is_leaf for value in inputs)
    )


def mode_options(mode: str) -> dict[str, Any]:
    """Inductor configuration of a ``torch.compile`` mode.

    Raises RuntimeError for a mode that torch doesn't know.
    """
    return dict(list_mode_options(mode))


def cpp_compilers() -> list[str]:
    """The names of the C++ compilers that Inductor tries, in order."""
    names = inductor_config.cpp.cxx
    return [str(name) for name in (names if isinstance(names, (list, tuple)) else [names]) if name]


def functional_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions Inductor expects to have been applied to the graphs it is given."""
    return dict(select_decomp_table())


def aot_input_of(
    placeholder: torch.fx.Node,
) -> tuple[Literal["attribute", "argument", "alias"], str | int] | None:
    """Where an input of an AOTAutograd graph comes from.

    Returns:
        ``("attribute", name)`` for a parameter or buffer of the Dynamo module, ``("argument", position)`` for
        one of its inputs, ``("alias", description)`` for the common memory of several aliasing inputs, None
        for anything else (pieces of tensor subclasses, tokens).
    """
    descriptor = placeholder.meta.get("desc")
    if isinstance(descriptor, (ParamAOTInput, BufferAOTInput)):
        return "attribute", descriptor.target
    if isinstance(descriptor, PlainAOTInput):
        return "argument", descriptor.idx
    if isinstance(descriptor, (SyntheticBaseAOTInput, ViewBaseAOTInput)):
        return "alias", descriptor.expr()
    return None


def versions_to_increment() -> list[int] | None:
    """What AOTAutograd's wrapper still has to do for the inference graph that it is compiling.

    Returns:
        the inputs whose version counters it will count up, where that is all: what the graph returns is new,
        and what it does to its inputs is done in it, to their elements alone. None otherwise.
    """
    context = TracingContext.try_get()
    found = None if context is None else context.fw_metadata
    if found is None or found.num_intermediate_bases or found.num_mutated_inp_runtime_indices:
        return None
    changed = (info.mutates_metadata or info.mutation_inductor_storage_resize for info in found.input_info)
    if any(changed) or any(info.output_type is not OutputType.non_alias for info in found.output_info):
        return None
    return list(found.mutated_graph_handled_indices_seen_by_autograd)


def traced_frame_variables() -> dict[str, Any]:
    """The Python variables of the frame that Dynamo is compiling, real objects; empty outside of Dynamo.

    Includes the globals that the frame's code names, so that a step inside a user's function is found too.
    """
    output = _output_being_traced()
    if output is None:
        return {}
    frame = output.root_tx
    global_names = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
    return {**global_names, **frame.f_locals}


def has_internal_overlap(tensor: torch.Tensor) -> bool:
    """Whether elements of a strided tensor are known to share memory, as those of ``x.expand(n)`` do."""
    return bool(torch._debug_has_internal_overlap(tensor) == 1)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own, as sparse tensors and some wrapper subclasses have not."""
    return torch._C._has_storage(tensor)


def current_trace() -> object:
    """A value that identifies the compilation that Dynamo is at, None outside of Dynamo."""
    return CompileContext.current_compile_id()


def traced_frame_name() -> str:
    """The name of the function whose frame Dynamo is compiling right now; empty outside of Dynamo."""
    output = _output_being_traced()
    return "" if output is None else str(output.root_tx.f_code.co_name)


def _output_being_traced() -> Any:
    """What Dynamo is putting the graph together in right now; None outside of Dynamo."""
    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:  # torch's own signal for "no translation is running"
        return None
    return translator.output


def watch_traced_optimizers(watch: Callable[[torch.optim.Optimizer, Any, dict[str, Any]], bool]) -> None:
    """Have ``watch(optimizer, backend, keywords)`` called when Dynamo begins to trace through an optimizer.

    ``backend`` is what ``torch.compile`` was given (a name already looked up) and ``keywords`` the ``mode``
    and ``options`` that go with it. An exception of a :class:`ShortenTraceback` class ends the trace and
    reaches the user as it is, before anything has run: that is how an input can be refused for which Dynamo
    would fall back to eager execution without asking any backend. Costs nothing where nothing is traced. One
    watch at a time; a second replaces the first.

    Where ``watch`` returns True, two silent faults of Dynamo are made good. It forgets what a step assigns to
    attributes of the optimizer (``self.steps += 1``), because it doesn't register optimizers for side
    effects. And of the lists that ``_init_group`` fills, it sees those that are positional arguments filled
    and those that are keyword arguments empty, so that nothing is updated.
    """

    def watching(original: Callable[..., None]) -> Callable[..., None]:
        def watched(self: Any, value: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            is_ours = watch(value, *_backend_being_traced_for())
            original(self, value, *args, **kwargs)
            if is_ours:
                side_effects = InstructionTranslator.current_tx().output.side_effects
                if value not in side_effects:
                    side_effects.track_object_existing(value, self)
                _traced_for_us.add(value)

        return watched

    wrap_method(OptimizerVariable, "__init__", watching)
    wrap_method(OptimizerVariable, "call_method", _with_positional_lists)


def _with_positional_lists(call_method: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "_init_group" and kwargs and self.value in _traced_for_us:
            bound = inspect.signature(self.value._init_group).bind(*args, **kwargs)
            args, kwargs = list(bound.args), bound.kwargs
        return call_method(self, tx, name, args, kwargs)

    return called


_traced_for_us: WeakSet[torch.optim.Optimizer] = WeakSet()


def _backend_being_traced_for() -> tuple[Any, dict[str, Any]]:
    output = _output_being_traced()
    return (None, {}) if output is None else _innermost(output.compiler_fn)


def _innermost(compiler: Any) -> tuple[Any, dict[str, Any]]:
    """The backend as the user gave it, and the keywords ``torch.compile`` adds to its call."""
    keywords: dict[str, Any] = {}
    while True:  # torch.compile, Dynamo and its debugging tools each put a wrapper of their own around it
        attributes = getattr(compiler, "__dict__", {})
        keywords = {**keywords, **attributes.get("kwargs", {})}
        inner = attributes.get("compiler_fn") or attributes.get("_torchdynamo_orig_backend")
        if inner is None:
            return compiler, keywords
        compiler = inner


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
        failed: like ``before``, and the exception that the conversion ended with; it is raised again after.
        settings: of Dynamo's configuration, for the conversion.

    Where one of them, or another watch or the backend within the conversion, raises :class:`RunAsItIs`, the
    frame is run by Python; where it raises :class:`ConvertAgain`, the conversion begins anew. Called once per
    compilation of a frame; costs nothing where nothing is compiled.
    """

    def watching(original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            code, variables = frame.f_code, frame.f_locals
            compiler = _innermost(self._torchdynamo_orig_backend)
            try:
                if not before(*compiler, code, variables):
                    return original(self, frame, *args, **kwargs)
                if _may_update(code, variables):
                    always_optimize_code_objects[code] = True
                try:
                    with dynamo_config.patch(settings), _no_garbage_collection():
                        converted = original(self, frame, *args, **kwargs)
                except (ShortenTraceback, Unsupported):  # refusals, and what fullgraph=True asks for
                    raise
                except Exception as error:
                    failed(*compiler, code, variables, error)
                    raise
                finally:
                    _thinned.clear()
            except RunAsItIs:
                return ConvertFrameReturn(apply_to_code=False)
            except TraceWhole:
                token = _tracing_whole.set(True)
                try:
                    return watched(self, frame, *args, **kwargs)
                finally:
                    _tracing_whole.reset(token)
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
    is_method = _optimizer_of_method(code, variables) is not None
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


class RunAsItIs(ShortenTraceback):
    """Raised by a watch to have Python run the frame that is being converted."""

    def __init__(self) -> None:
        super().__init__(first_useful_frame=None)


class ConvertAgain(ShortenTraceback):
    """Raised within a conversion when something has changed that makes Dynamo trace another way."""

    def __init__(self) -> None:
        super().__init__(first_useful_frame=None)


class TraceWhole(ConvertAgain):
    """Raised within a conversion to have it begin anew without :func:`thin_lists`."""


_tracing_whole: ContextVar[bool] = ContextVar("_tracing_whole", default=False)


@dataclass(frozen=True)
class ThinnedLists:
    """What ``_init_group`` has filled lists with, and what of it is traced.

    Attributes:
        optimizer: whose step loops over them.
        rows: for each parameter its entries in the lists that are not empty: itself, its gradient, its state.
        kept: which rows are traced.
    """

    optimizer: torch.optim.Optimizer
    rows: tuple[tuple[Any, ...], ...]
    kept: tuple[int, ...]


#: Row by row what a step will loop over -> the rows that are enough to trace, None for all.
Thin = Callable[[torch.optim.Optimizer, Any, dict[str, Any], Sequence[tuple[Any, ...]]], Sequence[int] | None]


def thin_lists(choose: Thin, abandon: Callable[[torch.optim.Optimizer], None]) -> None:
    """Have Dynamo trace the steps of torch.optim's own classes for some of their parameters.

    ``choose(optimizer, backend, keywords, rows)`` is asked each time that ``_init_group`` has filled the
    lists that a step loops over. Guards are made for all rows. What is left out is the backend's to make good
    (:func:`thinned_lists`), or it raises :class:`TraceWhole`. A graph break has the step traced whole, too,
    after a call of ``abandon``: behind it Python would go on with what is left of the lists.

    Only where the step is all that is compiled: nothing else in the graph reads what it updates. A second
    call replaces the first.
    """

    def updating(original: Callable[..., None]) -> Callable[..., None]:
        def update_list_args(
            self: Any, tx: Any, args: Any, kwargs: Any, py_args: Any, py_kwargs: Any
        ) -> None:
            original(self, tx, args, kwargs, py_args, py_kwargs)
            if _tracing_whole.get() or not _is_traced_alone(self.value, tx.output.root_tx):
                return
            lists = [arg for arg in args if isinstance(arg, ListVariable) and arg.items]
            columns = [
                py for arg, py in zip(args, py_args, strict=True) if any(arg is each for each in lists)
            ]
            if not lists or any(len(column) != len(columns[0]) for column in columns):
                return
            rows = tuple(zip(*columns, strict=True))
            kept = choose(self.value, *_innermost(tx.output.compiler_fn), rows)
            if kept is not None:
                for each in lists:
                    for i in set(range(len(rows))).difference(kept):
                        each.items[i].realize()  # makes its guards
                    each.items[:] = [each.items[i] for i in kept]
                _thinned.setdefault(tx.output, []).append(ThinnedLists(self.value, rows, tuple(kept)))

        return update_list_args

    def breaking(original: Callable[..., Any]) -> Callable[..., Any]:
        def compile_subgraph(self: Any, tx: Any, reason: Any, *args: Any, **kwargs: Any) -> Any:
            if reason.graph_break and self in _thinned:
                for lists in _thinned[self]:
                    abandon(lists.optimizer)
                raise TraceWhole
            return original(self, tx, reason, *args, **kwargs)

        return compile_subgraph

    wrap_method(OptimizerVariable, "update_list_args", updating)
    wrap_method(OutputGraph, "compile_subgraph", breaking)


#: By trace.
_thinned = WeakIdKeyDictionary()


def _is_traced_alone(optimizer: torch.optim.Optimizer, root: Any) -> bool:
    """Whether the frame that is converted is that of a step that torch.optim has written, without closure."""
    step = inspect.unwrap(type(optimizer).step)
    return (
        optimizer in _traced_for_us
        and type(optimizer).__module__.startswith("torch.optim.")
        and step.__module__.startswith("torch.optim.")
        and root.f_code is step.__code__
        and root.f_locals.get("closure") is None
    )


def thinned_lists() -> list[ThinnedLists]:
    """What of the lists of the step that is being compiled is traced; empty where all of it is."""
    output = _output_being_traced()
    return [] if output is None else list(_thinned.get(output, ()))


def dynamo_recompile_limit() -> int:
    """How often Dynamo compiles a function at most, as the user has set it."""
    return int(dynamo_config.recompile_limit)


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo cannot go on tracing.

    Attributes:
        optimizer: whose step is being traced there; None where it is none's.
        is_in_closure: whether it is in a function that the step was given to call.
        is_around_a_step: whether it is torch.optim's own, around the step of an optimizer within.
        reason: Dynamo's, in a sentence or two.
        where: file, line and function.
    """

    optimizer: torch.optim.Optimizer | None
    is_in_closure: bool
    is_around_a_step: bool
    reason: str
    where: str


def watch_graph_breaks(watch: Callable[[Any, dict[str, Any], CodeType, GraphBreak], None]) -> None:
    """Have ``watch(backend, keywords, code, graph_break)`` called when Dynamo decides to break a graph.

    ``code`` is the function's that is being converted; it may have called the one that breaks.

    Or to skip a frame. An exception of a :class:`ShortenTraceback` class reaches the user, as in
    :func:`watch_traced_optimizers`.
    """

    def watching(original: Callable[..., None]) -> Callable[..., None]:
        def watched(self: Any, code_options: Any, reason: str, exc: Any) -> None:
            if not _is_torchs_own(self.f_code, exc):
                watch(*_innermost(self.output.compiler_fn), self.f_code, _describe_graph_break(self, exc))
            original(self, code_options, reason, exc)

        return watched

    wrap_method(InstructionTranslatorBase, "log_graph_break", watching)


def _is_torchs_own(code: CodeType, cause: Any) -> bool:
    """Whether it is the break that torch.optim's wrapper around ``step`` has written into it."""
    return _is_call_for_a_break(cause) and _is_in_torchs_optimizer(code)


def _is_call_for_a_break(cause: Any) -> bool:
    return getattr(cause, "gb_type", None) == "Call to `torch._dynamo.graph_break()`"


def _is_in_torchs_optimizer(code: CodeType) -> bool:
    return code.co_filename == inspect.getfile(torch.optim.Optimizer)


def _describe_graph_break(translator: Any, cause: Any) -> GraphBreak:
    stack = list(getattr(cause, "real_stack", None) or ())
    lines = [line.strip() for line in str(getattr(cause, "msg", cause)).splitlines() if line.strip()]
    explained = [line.removeprefix("Explanation: ") for line in lines[:2]]
    where = (
        f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}" if stack else translator.f_code.co_name
    )
    in_optimizer = bool(stack) and stack[-1].filename == inspect.getfile(torch.optim.Optimizer)
    around_a_step = in_optimizer and _is_call_for_a_break(cause)
    stepped_by = _optimizer_stepped_by(translator, stack)
    return GraphBreak(*stepped_by, around_a_step, ". ".join(explained), where)


def _optimizer_stepped_by(translator: Any, stack: Sequence[Any]) -> tuple[torch.optim.Optimizer | None, bool]:
    """The optimizer in one of whose methods a translation is, and whether in a closure that it calls.

    Looked for among the function that is being traced and the Python frames that called it.
    """
    below = {(entry.filename, entry.name) for entry in stack}
    for code, variables in [(translator.f_code, translator.f_locals), *_possible_steps_on_the_stack()]:
        optimizer = _optimizer_of_method(code, variables)
        if optimizer is not None:
            return optimizer, bool(below & _functions_passed(code, variables))
        below.add((code.co_filename, code.co_name))
    return None, False


def _possible_steps_on_the_stack() -> Iterator[tuple[CodeType, Mapping[str, Any]]]:
    """The Python frames that are running, innermost first; with their variables if they may be a step.

    Not with all: reading a frame's variables keeps them alive as long as the frame.
    """
    frame = sys._getframe()
    while frame is not None:
        may_be_a_step = frame.f_code.co_name == "step" or _is_in_torchs_optimizer(frame.f_code)
        yield frame.f_code, frame.f_locals if may_be_a_step else {}
        frame = frame.f_back  # type: ignore[assignment]


def optimizer_being_stepped() -> torch.optim.Optimizer | None:
    """The optimizer whose step, running eagerly, has called what Dynamo compiles; None if there is none."""
    found = (_optimizer_of_method(*frame) for frame in _possible_steps_on_the_stack())
    return next((optimizer for optimizer in found if optimizer is not None), None)


def is_step_wrapper(code: CodeType) -> bool:
    """Whether it is the function that torch puts around the ``step`` of every optimizer's class."""
    return _is_in_torchs_optimizer(code) and "func" in code.co_freevars and code.co_name == "wrapper"


def is_being_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether Python is in the middle of the optimizer's ``step``."""
    return any(
        is_step_wrapper(code) and _optimizer_of_method(code, variables) is optimizer
        for code, variables in _possible_steps_on_the_stack()
    )


def forget_static_addresses(tensors: Iterable[torch.Tensor]) -> None:
    """Have Dynamo treat tensors as it does others that a function is called with.

    Those of an optimizer that it has begun to trace it guards on one by one, so that the next parameter would
    not get the code of the last.
    """
    for tensor in tensors:
        vars(tensor).pop("_dynamo_static_input_type", None)


def _functions_passed(code: CodeType, variables: Mapping[str, Any]) -> set[tuple[str, str]]:
    """File and name of the functions among a frame's arguments: what a step may call is its closure."""
    passed: list[Any] = []
    for name in code.co_varnames:
        value = variables.get(name)
        passed += (
            value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else [value]
        )
    codes = [value.__code__ for value in passed if isinstance(value, FunctionType)]
    return {(each.co_filename, each.co_name) for each in codes}


def _optimizer_of_method(code: CodeType, variables: Mapping[str, Any]) -> torch.optim.Optimizer | None:
    """``self``, if the frame is an optimizer's method (or torch's wrapper around ``step``)."""
    if not code.co_varnames:
        return None
    value = variables.get(code.co_varnames[0])
    if _is_in_torchs_optimizer(code) and isinstance(value, tuple) and value:
        value = value[0]
        return value if isinstance(value, torch.optim.Optimizer) else None
    is_method = isinstance(value, torch.optim.Optimizer) and hasattr(type(value), code.co_name)
    return value if is_method else None


def keep_numbers_symbolic() -> None:
    """Before torch 2.13: have AOTAutograd keep a symbolic float that it has replaced by a tensor everywhere.

    It does replace ``-lr`` or ``1 - lr`` by tensor operations there, but then looks only for ``lr`` itself
    among what it has replaced, doesn't find it, and starts over with the number burned in.
    """
    if _version() < (2, 13):
        wrap_method(graph_compile, "tensorify_python_scalars", _restarting_only_if_burned_in)


def _restarting_only_if_burned_in(original: Callable[..., None]) -> Callable[..., None]:
    def tensorify(gm: torch.fx.GraphModule, shape_env: Any, fake_mode: Any) -> None:
        asked: list[str] = []
        burned_in: set[str] = set()
        with unittest.mock.patch.object(TensorifyState, "specialize", asked.append):
            try:
                original(gm, shape_env, fake_mode)
            except TensorifyScalarRestartAnalysis:
                burned_in = {str(symbol) for symbol in shape_env.replacements}.intersection(asked)
        for name in burned_in:
            TensorifyState.specialize(name)
        if burned_in:
            raise TensorifyScalarRestartAnalysis

    return tensorify


def trace_instead(function: Callable[..., Any], traceable: Callable[..., Any]) -> None:
    """Have Dynamo inline ``traceable`` where a traced program calls ``function``, which may be a builtin.

    For every backend: Dynamo has one table of rules. A second call for the same function changes nothing.
    """
    name = f"{function.__module__}.{function.__name__}"
    if name in _traced_otherwise:
        return
    _traced_otherwise.add(name)
    maps: list[dict[str, Any]] = list(torch_name_rule_map)  # type: ignore[arg-type]
    for rules in maps:
        rules.pop(name, None)
    get_torch_obj_rule_map.cache_clear()
    substitute_in_graph(function)(traceable)


_traced_otherwise: set[str] = set()


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


def symbol_source(value: torch.SymInt | torch.SymFloat) -> str:
    """The expression a symbolic number was read from, as ``self.param_groups[0]['lr']``, else its symbol."""
    expression = value.node.expr
    sources = value.node.shape_env.var_to_sources.get(expression, ())
    return str(sources[0].name) if sources and isinstance(sources[0].name, str) else str(expression)


#: ``__torch_function__`` of a tensor subclass that has nothing to say there.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl

_DEPENDS_ON_VALUES = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
    torch.Tag.inplace_view,
}


def depends_on_values(operator: Any) -> bool:
    """Whether more than the elements of an operator's result depends on its arguments' elements.

    Its shape, a Python number it returns, or whether it fails, as factorizations of matrices may. Also
    operators that draw random numbers, or change what a tensor is.
    """
    return bool(_DEPENDS_ON_VALUES.intersection(operator.tags)) or factorizes(operator)


def factorizes(operator: Any) -> bool:
    """Whether an operator factorizes matrices, or reads factors, which may fail.

    None of them is there for 16-bit formats on the CPU.
    """
    name = operator._schema.name.partition("::")[2].lstrip("_")
    factorizing = ("linalg_", "cholesky", "geqrf", "svd")
    others = ("linalg_vector_norm", "linalg__powsum", "linalg_cross", "linalg_matrix_exp")
    return name.startswith(factorizing) and name not in others


def wrapper_subclass(
    cls: type[torch.Tensor],
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A tensor of class ``cls`` that has no memory."""
    return torch.Tensor._make_wrapper_subclass(cls, size, strides=stride, dtype=dtype, device=device)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Run tensor operations as if no mode were active, whether of dispatch or of functions."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        if torch._C._is_torch_function_mode_enabled():
            stack.enter_context(_pop_mode_temporarily())
        yield


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Allocate real tensors although a fake tensor mode is active (as it is while a backend runs)."""
    with unset_fake_temporarily():
        yield


def graph_module(root: Any, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A GraphModule that writes its Python code when somebody calls it or asks for the code."""
    return _LazyGraphModule(root, graph)


#: Inductor's settings for few launches: one costs as much time as moving megabytes, and a model has a hundred
#: small tensors. Elementwise kernels that do not depend on each other are combined, eight a launch or more.
#: Newer versions look before whether that needs more memory, and count what a step writes in place as new.
COMBINED_LAUNCHES: dict[str, Any] = {"combo_kernels": True, "combo_kernels_pointwise_only": True}
for _name, _value in (("combo_kernel_peak_memory_pct_threshold", None), ("combo_kernel_max_distance", -1)):
    if hasattr(inductor_config, _name):
        COMBINED_LAUNCHES[_name] = _value


@functools.cache
def prepare_cpp_compiler() -> concurrent.futures.Future[Any]:
    """Have what Inductor's C++ kernels need prepared on another core, once a process.

    On a machine that has compiled nothing yet, finding out what its processor can do and precompiling a
    header takes longer than a kernel. On any machine, Inductor's cache wants the hashes of two packages,
    hundreds of megabytes, before it can be asked. A fault of the compiler is raised by the future.
    """
    executor = concurrent.futures.ThreadPoolExecutor(max_workers=2)
    prefix = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
    future = executor.submit(CppPythonBindingsCodeCache.load_async, prefix, device_type="cpu")
    executor.submit(lambda: (triton_key(), torch_key()))
    executor.shutdown(wait=False)
    return future


def another_fake(value: torch.Tensor) -> torch.Tensor:
    """A new fake tensor like ``value``, a fake tensor: faster than running an operation that makes one."""
    assert isinstance(value, FakeTensor)
    with no_dispatch():
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, meta, value.device)


def register_pointwise_lowering(
    operator: Any, element_function: Callable[..., Callable[[Sequence[Any]], Any]], *, dtype: torch.dtype
) -> None:
    """Lower ``operator(*tensors, *constants)`` to an elementwise computation in the kernel that reads it.

    Args:
        operator: an overload of tensors of one shape and constants.
        element_function: ``(device, *constants) -> function of [values of the tensors]`` giving the value of
            the result, for one element.
        dtype: of the result.
    """

    def lowering(*arguments: Any) -> Any:
        tensors = [argument for argument in arguments if isinstance(argument, ir.TensorBox)]
        loads = [tensor.make_loader() for tensor in tensors]
        compute = element_function(tensors[0].get_device(), *arguments[len(tensors) :])
        return ir.Pointwise.create(
            device=tensors[0].get_device(),
            dtype=dtype,
            inner_fn=lambda index: compute([load(index) for load in loads]),
            ranges=list(tensors[0].get_size()),
        )

    register_lowering(operator, type_promotion_kind=None)(lowering)


#: ATen operators whose name in Inductor's elementwise language differs.
_ELEMENT_NAMES = {"__rshift__": "bitwise_right_shift", "__lshift__": "bitwise_left_shift"}


def pointwise_of(node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> Any:
    """One node of a traced elementwise function in Inductor's language, its operands from ``values``."""
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    args: tuple[Any, ...] = node.args
    tensors = [arg for arg in args if isinstance(arg, torch.fx.Node)]
    dtype = (tensors[0] if tensors else node).meta["val"].dtype
    if name == "alias":
        return values[tensors[0]]
    if name in ("full", "scalar_tensor"):
        return ops.constant(args[-1], node.meta["val"].dtype)
    if name == "convert_element_type":
        return ops.to_dtype(values[tensors[0]], args[1], src_dtype=dtype)
    if node.target is torch.ops.aten.view.dtype:
        return ops.to_dtype_bitcast(values[tensors[0]], args[1], dtype)
    operands = [values[arg] if isinstance(arg, torch.fx.Node) else ops.constant(arg, dtype) for arg in args]
    return getattr(ops, _ELEMENT_NAMES.get(name, name))(*operands)


def register_realizing_lowering(operator: Any) -> None:
    """Lower ``operator(x)`` to ``x`` in memory: what reads it loads it instead of computing it anew."""

    def lowering(x: Any) -> Any:
        x.realize()
        return x

    register_lowering(operator, type_promotion_kind=None)(lowering)


def register_summing_lowering(
    operator: Any,
    terms: Callable[[Sequence[Any]], Sequence[Any]],
    sums_of: Callable[[int], Sums],
    *,
    names: Sequence[str],
    otherwise: Mapping[str, str | None],
) -> None:
    """Lower ``operator(*tensors, more)`` to sums over all elements, in the loop that computes the tensors.

    Args:
        operator: an overload of float32 tensors of one shape, or None, and of a float64 vector; it returns a
            float64 vector, of which the other is the end.
        terms: from the values of one element of each tensor, without the Nones, to what it adds to each sum:
            float64 numbers, then truth values.
        sums_of: what those sums are, given how many tensors there are.
        names: of the sums that the operator returns.
        otherwise: for one that isn't among those sums, the one that it is the same as, or None for zero.
    """

    def lowering(*operands: Any) -> Any:
        *tensors, more = operands
        given = [tensor for tensor in tensors if tensor is not None]
        for tensor in given:
            tensor.realize()  # else each sum would be traced from the inputs of the step
        size, device = given[0].get_size(), given[0].get_device()
        loaders = [tensor.make_loader() for tensor in given]
        shared = _load_in_common(given[0])
        sums, elements = sums_of(len(given)), sympy_product(size)
        hint = V.graph.sizevars.optimization_hint(elements, fallback=0)
        counter = torch.int64 if hint >= 1 << 31 else torch.int32
        is_one = V.graph.sizevars.statically_known_equals(elements, 1)  # Inductor makes no sum of it
        in_cpp = generates_cpp(device) and not is_one

        def term(number: int, dtype: torch.dtype) -> Callable[[Any, Any], Any]:
            def inner(index: Any, reduced: Any) -> Any:
                shared(reduced)
                loaded = [load(reduced) for load in loaders]
                if in_cpp:
                    return _part_of_sum(sums, number, loaded)
                value = terms(loaded)[number]
                return value if dtype is torch.float64 else ops.to_dtype(value, dtype, src_dtype=torch.bool)

            return inner

        def sum_of(name: str) -> Any:
            dtype = torch.float64 if in_cpp or name in sums.products else counter
            total = ir.Reduction.create(
                device=device,
                dst_dtype=dtype,
                src_dtype=dtype,
                inner_fn=term(sums.number(name), dtype),
                ranges=[],
                reduction_ranges=list(size),
                reduction_type="sum",
            )
            total.realize()
            return to_dtype(total, torch.float64).make_loader()

        loads = {name: sum_of(name) for name in (*sums.products, *sums.counts)}
        which = [name if name in loads else otherwise[name] for name in names]

        def result(index: Any) -> Any:
            position = ops.index_expr(index[0], torch.int32)
            value = ops.constant(0.0, torch.float64)
            for number, name in enumerate(which):
                if name is not None:
                    is_here = ops.eq(position, ops.constant(number, torch.int32))
                    value = ops.where(is_here, loads[name]([]), value)
            return value

        own = ir.Pointwise.create(device=device, dtype=torch.float64, inner_fn=result, ranges=[len(which)])
        return pointwise_cat([own, more], 0)

    register_lowering(operator, type_promotion_kind=None)(lowering)


#: What stands for an element's part in a sum of a C++ kernel.
_SUM = "collage_fx: sum"

#: The sums of C++ kernels, by how many inputs they have.
_sums: dict[int, Sums] = {}


def _part_of_sum(sums: Sums, number: int, inputs: Sequence[Any]) -> Any:
    _sums[len(inputs)] = sums
    return ops.inline_asm_elementwise(*inputs, asm=f"{_SUM} {number}", dtype=torch.float64)


def _summand(inputs: Sequence[Any], text: str) -> Any:
    """A variable that is not computed: :func:`_sum_in_cpp` finds it in the place of a number to be added."""
    variable = V.kernel.cse.generate(V.kernel.compute, f"{text} {inputs}", write=False, dtype=torch.float64)
    variable.update_on_args("to_dtype", inputs, {})
    variable.collage_fx_summand = int(text.removeprefix(_SUM)), inputs
    return variable


def _summing(original: Callable[..., Any]) -> Callable[..., Any]:
    """``reduction`` of a C++ kernel that knows :func:`_summand`."""

    def reduction(
        kernel: Any, dtype: torch.dtype, src_dtype: torch.dtype, reduction_type: str, value: Any
    ) -> Any:
        summand = getattr(value, "collage_fx_summand", None)
        if summand is None:
            return original(kernel, dtype, src_dtype, reduction_type, value)
        return _sum_in_cpp(kernel, *summand)

    return reduction


def _sum_in_cpp(kernel: Any, number: int, inputs: tuple[Any, ...]) -> str:
    """One of the sums of an object that is made, and given the inputs, for the first of them."""
    known = kernel.reduction_cse.reduction_cache
    if (_SUM, inputs) not in known:
        known[_SUM, inputs] = _object_of_sums(kernel, inputs)
    return f"{known[_SUM, inputs]}.sum({number})"


def _as_wide_as_stores(original: Callable[..., Any]) -> Callable[..., Any]:
    """``select_tiling`` that gives a loop with sums as many elements at a time as it would have without.

    That is a vector's worth of what it stores. Inductor itself counts by float32 as soon as one node of the
    loop, as those of the sums, has nothing else.
    """

    def select_tiling(self: Any, functions: Any, *args: Any) -> Any:
        bodies = cpp_module._get_loop_body(functions)
        if not any(map(_has_summands, bodies)):
            return original(self, functions, *args)
        found = {cpp_module.get_loop_body_lowp_fp(body)[0] for body in bodies} - {None}
        if len(found) != 1:
            return original(self, functions, *args)
        answer = found.pop(), True
        with unittest.mock.patch.object(cpp_module, "get_loop_body_lowp_fp", return_value=answer):
            return original(self, functions, *args)

    return select_tiling


def _has_summands(body: Any) -> bool:
    nodes = body.root_block.graph.find_nodes(op="call_method", target="inline_asm_elementwise")
    return any(node.kwargs["asm"].startswith(_SUM) for node in nodes)


def _object_of_sums(kernel: Any, inputs: tuple[Any, ...]) -> Any:
    """The variable of a :class:`Sums` object that adds up the inputs; it is closed when all are in."""
    acc = kernel.reduction_cse.generate(kernel.loads, f"{_SUM} {inputs}", write=False)
    is_vec, width, name = isinstance(kernel, CppVecKernel), 1, f"SumsOf{len(inputs)}"
    vectors: list[Vectors] = []
    if is_vec:
        width = kernel._get_num_vectors(torch.float32)
        inputs = tuple(_as_stored(x if x.is_vec else kernel.broadcast(x)) for x in inputs)
        vectors = [_vectors(kernel, x) for x in inputs]
        name += "".join(f"_{str(x.dtype).removeprefix('torch.')}" for x in inputs)
    kernel.is_reduction = True
    kernel.reduction_var_names.append(f"{acc}")
    defined = kernel.__dict__.setdefault("collage_fx_sums", set())
    definition = "" if name in defined else f"{_sums[len(inputs)].definition(name, vectors, width)}\n"
    defined.add(name)
    kernel.reduction_prefix_generators.append(lambda size: f"{definition}{name} {acc};")
    if is_vec:
        kernel.non_parallel_reduction_suffix.writeline(f"{acc}.close();")
        kernel.local_reduction_stores.writeline(f"{acc}_local.close();")
    kernel._gen_parallel_reduction_buffers(
        acc,
        name,
        "sum",
        torch.float64,
        reduction_combine_fn=lambda kind, total, part, **_: f"{total}.join({part})",
        reduction_init_fn=lambda *_: f"{name}()",
    )
    given = ", ".join(map(str, inputs))
    if not is_vec:
        kernel.stores.writeline(f"{acc}.one({given});")
    elif kernel.tail_size:
        kernel.stores.writeline(f"{acc}.some({cexpr_index(kernel.tail_size)}, {given});")
    else:
        kernel.stores.writeline(f"{acc}.put({given});")
    return acc


def _as_stored(x: Any) -> Any:
    """A variable of fewer bits that was converted to a float32 one, if that is how it came about."""
    return getattr(x, "collage_fx_stored", x)


def _vectors(kernel: Any, x: Any) -> Vectors:
    is_float = x.dtype is torch.float32
    floats = str(x) if is_float else _conversion(x, torch.float32, x.dtype)
    floats = re.sub(rf"\b{x}\b", "@", floats)
    return Vectors(kernel._get_vec_type(x.dtype), DTYPE_TO_CPP[x.dtype], str(kernel.tiling_factor), floats)


#: Of each graph that is being lowered: what all sums over as many elements read.
_in_common: weakref.WeakKeyDictionary[Any, dict[Any, Callable[[Any], Any]]] = weakref.WeakKeyDictionary()


def _load_in_common(tensor: Any) -> Callable[[Any], Any]:
    """A load whose result nobody needs, which costs nothing: of the tensor that was the first of its size.

    For C++, Inductor makes one loop of sums only if they read something in common, and makes none of sums and
    what they are computed from if there are other sums in it already.
    """
    if not generates_cpp(tensor.get_device()):
        return lambda index: None
    known = _in_common.setdefault(V.graph, {})
    return known.setdefault(tuple(tensor.get_size()), tensor.make_loader())


def register_sampling_lowering(
    operator: Any,
    place: Callable[..., Any],
    sampled: Callable[[Any, Any, Callable[[Any, Any], Any]], Any],
    *,
    sample: int,
    places: int,
) -> None:
    """Lower ``operator(*tensors, *constants)`` to counts over a few elements, without the tensors in memory.

    Args:
        operator: an overload of float32 tensors of one shape, or None for zeros, and constants, that returns
            a float64 vector.
        place: ``(values of one element, *constants)`` -> which number of the vector counts it, int32.
        sampled: ``(i, elements, floor division)`` -> position of the i-th of the few; there is none if it is
            not below ``elements``.
        sample: how many there are at most.
        places: length of the vector.
    """

    def lowering(*operands: Any) -> Any:
        tensors = [operand for operand in operands if operand is None or isinstance(operand, ir.TensorBox)]
        constants, first = operands[len(tensors) :], operands[0]
        size, device, elements = first.get_size(), first.get_device(), sympy_product(first.get_size())
        if V.graph.sizevars.statically_known_equals(elements, 0):
            return lowerings[torch.ops.aten.full.default]([places], 0.0, dtype=torch.float64, device=device)
        loaders = [None if tensor is None else tensor.make_loader() for tensor in tensors]

        def of_each(dtype: torch.dtype, function: Callable[[Any], Any]) -> Any:
            """Loads what has been computed for each of the few, and kept."""
            box = ir.Pointwise.create(device=device, dtype=dtype, inner_fn=function, ranges=[sample])
            box.realize()
            with ir.ComputedBuffer.force_realize():  # else positions would be computed anew in each load
                return box.make_loader()

        load_position = of_each(
            torch.int64, lambda index: ops.index_expr(sampled(index[0], elements, FloorDiv), torch.int64)
        )

        def placed(index: Any) -> Any:
            position, last = load_position(index), ops.index_expr(elements - 1, torch.int64)
            within = ops.minimum(position, last)
            where = _indices(ops.indirect_indexing(within, elements, check=False, wrap_neg=False), size)
            zero = ops.constant(0.0, torch.float32)
            with _computing_anew():
                values = [zero if load is None else load(where) for load in loaders]
            return ops.where(ops.le(position, last), place(values, *constants), ops.constant(-1, torch.int32))

        load_place = of_each(torch.int32, placed)

        def counted(index: Any, reduced: Any) -> Any:
            is_here = ops.eq(load_place(reduced), ops.index_expr(index[0], torch.int32))
            return ops.to_dtype(is_here, torch.int32, src_dtype=torch.bool)

        counts = ir.Reduction.create(
            device=device,
            dst_dtype=torch.int32,
            src_dtype=torch.int32,
            inner_fn=counted,
            ranges=[places],
            reduction_ranges=[sample],
            reduction_type="sum",
        )
        counts.realize()
        return to_dtype(counts, torch.float64)

    register_lowering(operator, type_promotion_kind=None)(lowering)


def _indices(position: Any, size: Sequence[Any]) -> list[Any]:
    """Of an element, from its place among all of them."""
    inner = [sympy_product(size[i + 1 :]) for i in range(len(size))]
    outermost = [FloorDiv(position, each) for each in inner[:1]]
    return outermost + [ModularIndexing(position, inner[i], size[i]) for i in range(1, len(size))]


@dataclass(frozen=True)
class _Element:
    """An element of a value that Inductor has decided to keep in memory."""

    buffer: Any
    index: Any


@contextlib.contextmanager
def _computing_anew() -> Iterator[None]:
    """Within, elementwise values that Inductor keeps in memory are computed from what they are made of.

    For a reader of a few elements: if it loaded them, whole tensors would have to be written for it. Loaded
    are numbers, results of anything but elementwise operations, and what is read under a mask (a padded
    tensor), where no value from elsewhere can be used, so that each reader's would be computed for itself.
    """
    make_indexer, operation = ir.ComputedBuffer.make_indexer, OpsWrapper._default
    block = V.get_ops_handler()
    computed: dict[Any, Any] = {}

    def indexer(buffer: Any) -> Any:
        is_number = all(length == 1 for length in buffer.get_size())
        if is_number or not isinstance(buffer.data, ir.Pointwise) or V.get_ops_handler() is not block:
            return make_indexer(buffer)
        return lambda index: _Element(buffer, index)

    def computing(wrapper: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name != "load" or not isinstance(args[1], _Element):
            return operation(wrapper, name, args, kwargs)
        element = args[1]
        key = element.buffer.get_name(), tuple(element.index)
        if key not in computed:
            computed[key] = element.buffer.data.make_loader()(element.index)
        return computed[key]

    with (
        unittest.mock.patch.object(ir.ComputedBuffer, "make_indexer", indexer),
        unittest.mock.patch.object(OpsWrapper, "_default", computing),
    ):
        yield


#: Raises AssertionError for a tensor of other sizes or strides: ``(tensor, size, stride)``.
assert_size_stride: Callable[[torch.Tensor, tuple[int, ...], tuple[int, ...]], None] = (
    torch._C._dynamo.guards.assert_size_stride
)


def laid_out_like(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: whether each of them is to compiled code like the one in its place.

    Class, dtype, device, size, stride, dispatch keys (sparse, negated, ...), and whether it requires a
    gradient. One call into C++. It may say no to tensors that are: if the thread's modes are others, or if
    there is one twice. The tensors are not kept alive.
    """
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
    )
    return cast("Callable[..., bool]", guards.check)


def innermost_callable(compiled: Any) -> Callable[[list[Any]], Any]:
    """The generated code of what Inductor has compiled for the CPU, without profiling around it."""
    return cast("Callable[[list[Any]], Any]", getattr(compiled, "current_callable", None) or compiled)


class SymbolicScope:
    """Fake tensors and symbolic numbers that belong to no capture, for a graph that is made from scratch.

    A context manager: within it, graphs of its values can be made and compiled, whatever is being compiled
    around it.
    """

    def __init__(self) -> None:
        self.shape_env = ShapeEnv()
        self.fake_mode = FakeTensorMode(shape_env=self.shape_env)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(unset_fake_temporarily())
        self._stack.enter_context(tracing(TracingContext(self.fake_mode)))

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def length(self, name: str, hint: int) -> Any:
        """A symbolic integer that is 2 at least."""
        source = ConstantSource(name)
        symbol = self.shape_env.create_symbol(hint, source, DimDynamic.DYNAMIC)
        return self.shape_env.create_symintnode(symbol, hint=hint, source=source)

    def number(self, name: str, kind: type) -> Any:
        """A symbolic number of any value: ``kind`` is ``torch.SymInt`` or ``torch.SymFloat``."""
        source = ConstantSource(name)
        hint: Any = 3 if kind is torch.SymInt else 0.3
        symbol = self.shape_env.create_unspecified_symbol(hint, source, DimDynamic.DYNAMIC)
        create = (
            self.shape_env.create_symintnode if kind is torch.SymInt else self.shape_env.create_symfloatnode
        )
        return create(symbol, hint=hint, source=source)

    def tensor(
        self, size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A fake tensor."""
        with self.fake_mode:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def run(self, node: torch.fx.Node) -> Any:
        """The value of an operation, from the values of its operands."""
        args, kwargs = torch.utils._pytree.tree_map_only(
            torch.fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs)
        )
        with self.fake_mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def has_guards(self) -> bool:
        """Whether something was decided by the value that a symbol stands for."""
        return bool(self.shape_env.guards)


#: What stands for the rounding to a storage dtype where Inductor has only names of its own operators.
_ROUNDINGS = {f"collage_fx: round to {dtype}": dtype for dtype in (torch.bfloat16, torch.float16)}


def generates_cpp(device: torch.device) -> bool:
    """Whether Inductor writes C++ for the device."""
    return device.type == "cpu" and inductor_config.cpu_backend == "cpp"


def rounded_in_cpp(value: Any, storage_dtype: torch.dtype) -> Any:
    """A float32 element rounded to a storage dtype and returned as float32, in a C++ kernel.

    Written as two conversions that Inductor does not know to be conversions: the text of the code is all that
    it gets, in the place of inline assembly, which C++ kernels have no other use for.
    """
    (name,) = (name for name, dtype in _ROUNDINGS.items() if dtype == storage_dtype)
    return ops.inline_asm_elementwise(value, asm=name, dtype=torch.float32)


#: What stands for :func:`rest_in_cpp`.
_REST = "collage_fx: rest"


def rest_in_cpp(value: Any, hi: Any) -> Any:
    """``value - hi`` where ``hi`` is finite, zero elsewhere, of float32 elements in a C++ kernel."""
    return ops.inline_asm_elementwise(value, hi, asm=_REST, dtype=torch.float32)


def inline_asm_elementwise(*inputs: Any, asm: str, **options: Any) -> Any:
    """The C++ for :func:`rounded_in_cpp`, :func:`rest_in_cpp` and sums, for scalars and for vectors."""
    if asm == _REST:
        return _rest(*inputs)
    if asm.startswith(_SUM):
        return _summand(inputs, asm)
    if asm not in _ROUNDINGS:
        raise NotImplementedError(f"inline assembly in C++ kernels: {asm}")
    (value,) = inputs
    return _rounded(value, _ROUNDINGS[asm])


def _rounded(value: Any, storage_dtype: torch.dtype) -> Any:
    """Converted, and back.

    Inductor's own text for a conversion would find Inductor's own variables: once a number has been stored in
    bfloat16, that text for "the stored number in float32" finds the number as it was *before* it was rounded.
    In parentheses it is another text. The way back to the storage dtype is announced, on the other hand, so
    that a store of the result stores what was rounded here and converts nothing.
    """
    known = V.kernel.cse.try_get(_convert_text(value, storage_dtype, torch.float32))
    stored = known or _converted(value, storage_dtype, torch.float32)
    rounded = _converted(stored, torch.float32, storage_dtype)
    _announce(rounded, storage_dtype, stored)
    return rounded


def _rest(value: Any, hi: Any) -> Any:
    """The rest, and announced beside it the rest in bfloat16: what is not read of the two costs nothing.

    Converted by instruction, the difference is looked at once for both: it is an infinity or NaN where ``hi``
    is.
    """
    text = (_REST_OF_VECTORS if value.is_vec else _REST_OF_SCALARS).format(x=value, hi=hi)
    rest = _variable(text, torch.float32, value, hi)
    if _by_instruction.get() and _convert_text(rest, torch.bfloat16, torch.float32).startswith(_CONVERT):
        text = _REST_BY_INSTRUCTION.format(x=value, hi=hi, rest=rest)
        _announce(rest, torch.bfloat16, _variable(text, torch.bfloat16, value, hi))
    return rest


def _converted(source: Any, dtype: torch.dtype, source_dtype: torch.dtype) -> Any:
    """A variable of its own for a conversion."""
    variable = _variable(f"({_conversion(source, dtype, source_dtype)})", dtype, source)
    if dtype is torch.float32:
        variable.collage_fx_stored = source
    return variable


def _conversion(source: Any, dtype: torch.dtype, source_dtype: torch.dtype) -> str:
    """The text of a conversion, by instruction if there is one."""
    text = _convert_text(source, dtype, source_dtype)
    for conversion, by_instruction in _BY_INSTRUCTION.items():
        if _by_instruction.get() and text.startswith(conversion):
            return by_instruction.format(x=source)
    return text


def _convert_text(source: Any, dtype: torch.dtype, source_dtype: torch.dtype) -> str:
    return str(V.kernel.get_to_dtype_expr(source, dtype, source_dtype))


def _announce(source: Any, dtype: torch.dtype, converted: Any) -> None:
    """A float32 number will be found to be there in another dtype already."""
    V.kernel.cse.put(_convert_text(source, dtype, torch.float32), converted)


def _variable(text: str, dtype: torch.dtype, *sources: Any) -> Any:
    variable = V.kernel.cse.generate(V.kernel.compute, text, dtype=dtype)
    variable.update_on_args("to_dtype", sources, {})
    return variable


_REST_OF_SCALARS = "(std::abs({hi}) < std::numeric_limits<float>::infinity() ? {x} - {hi} : 0.0f)"
_REST_OF_VECTORS = (
    "decltype({x})::blendv(decltype({x})(0.0f), {x} - {hi}, "
    "{hi}.abs() < decltype({x})(std::numeric_limits<float>::infinity()))"
)

#: Two vectors of float32 to one of bfloat16, and back.
_CONVERT = "at::vec::convert<at::BFloat16,1,float,2>("
_CONVERT_BACK = "at::vec::convert<float,2,at::BFloat16,1>("

#: Where there is an instruction for it, that, unless a number is subnormal, which it takes for zero.
_CONVERT_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
[&]() -> decltype(at::vec::convert<at::BFloat16,1,float,2>({x})) {{
    __m512 first = {x}[0], second = {x}[1];
    if (C10_LIKELY(!(_mm512_fpclass_ps_mask(first, 0x20) | _mm512_fpclass_ps_mask(second, 0x20))))
        return at::vec::Vectorized<at::BFloat16>((__m512i)_mm512_cvtne2ps_pbh(second, first));
    return at::vec::convert<at::BFloat16,1,float,2>({x});
}}()
#else
at::vec::convert<at::BFloat16,1,float,2>({x})
#endif
"""
#: Likewise, unless a number is subnormal, infinite or NaN.
_REST_BY_INSTRUCTION = """
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
[&]() -> decltype(at::vec::convert<at::BFloat16,1,float,2>({rest})) {{
    __m512 first = _mm512_sub_ps({x}[0], {hi}[0]), second = _mm512_sub_ps({x}[1], {hi}[1]);
    if (C10_LIKELY(!(_mm512_fpclass_ps_mask(first, 0xb9) | _mm512_fpclass_ps_mask(second, 0xb9))))
        return at::vec::Vectorized<at::BFloat16>((__m512i)_mm512_cvtne2ps_pbh(second, first));
    return at::vec::convert<at::BFloat16,1,float,2>({rest});
}}()
#else
at::vec::convert<at::BFloat16,1,float,2>({rest})
#endif
"""


def _upper_halves(first: int) -> str:
    """A vector of 16 bfloat16 from the first-th on as float32: each the upper half of one.

    The lower halves, which the mask makes zero, have no index.
    """
    places = ",".join(f"{place}<<16" for place in reversed(range(first, first + 16)))
    permuted = f"_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, _mm512_set_epi32({places}), {{x}})"
    return f"at::vec::Vectorized<float>(_mm512_castsi512_ps({permuted}))"


#: One permutation a vector, where ATen's has three instructions.
_CONVERT_BACK_BY_INSTRUCTION = f"""
#if defined(CPU_CAPABILITY_AVX512)
at::vec::VectorizedN<float,2>({_upper_halves(0)}, {_upper_halves(16)})
#else
at::vec::convert<float,2,at::BFloat16,1>({{x}})
#endif
"""

_BY_INSTRUCTION = {
    _CONVERT: _CONVERT_BY_INSTRUCTION,
    _CONVERT_BACK: _CONVERT_BACK_BY_INSTRUCTION,
}

_by_instruction: ContextVar[bool] = ContextVar("_by_instruction", default=False)


@contextlib.contextmanager
def bfloat16_by_instruction() -> Iterator[None]:
    """Within, C++ code converts vectors to bfloat16 and back by the processor's instructions, if it has any.

    The bits are those of ATen's conversion, which takes sixteen instructions (and six back), NaN's payload
    aside. An AdamW step has a dozen such conversions and little else to do.
    """
    token = _by_instruction.set(True)
    try:
        yield
    finally:
        _by_instruction.reset(token)


def _announcing(original: Callable[..., Any]) -> Callable[..., Any]:
    """``to_dtype`` of vector code that finds its conversion made."""

    def to_dtype(x: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        if _by_instruction.get() and x.is_vec and {x.dtype, dtype} == {torch.float32, torch.bfloat16}:
            text, cse = _convert_text(x, dtype, x.dtype), V.kernel.cse
            if text.startswith(tuple(_BY_INSTRUCTION)) and not cse.contains(text):
                cse.put(text, _converted(x, dtype, x.dtype))
        return original(x, dtype, *args, **kwargs)

    return to_dtype


for _overrides in (CppOverrides, CppVecOverrides):
    _overrides.inline_asm_elementwise = staticmethod(inline_asm_elementwise)  # type: ignore[method-assign]
CppVecOverrides.to_dtype = staticmethod(_announcing(CppVecOverrides.to_dtype))  # type: ignore[method-assign]
for _kernel in (CppKernel, CppVecKernel):
    _kernel.reduction = _summing(_kernel.reduction)  # type: ignore[method-assign]
cpp_module.TilingSelect.select_tiling = _as_wide_as_stores(cpp_module.TilingSelect.select_tiling)  # type: ignore[method-assign]
