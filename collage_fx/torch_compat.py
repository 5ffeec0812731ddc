"""Everything that rests on torch's private interfaces, and so may differ from version to version.

Supported: torch 2.11 and newer (tested on 2.11, 2.13 and 2.15). A private name that has moved is reported by
name at import, with the versions that are known to work, rather than by an AttributeError in the middle of a
training run.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Literal, cast
from weakref import WeakSet

import torch

from collage_fx.wrapping import wrap_method

__all__ = [
    "Attempt",
    "ConvertOtherwise",
    "GraphBreak",
    "ShortenTraceback",
    "aot_input_of",
    "compile_with_inductor",
    "cpp_compilers",
    "current_attempt",
    "current_trace",
    "detect_fake_mode",
    "dynamo_recompile_limit",
    "functional_decompositions",
    "generated_code",
    "has_internal_overlap",
    "has_storage",
    "inductor_compile_inner",
    "inductor_config",
    "keep_numbers_symbolic",
    "make_fx",
    "mode_options",
    "needs_autograd",
    "optimizer_being_stepped",
    "pointwise_of",
    "prims_fma",
    "real_tensors",
    "register_pointwise_lowering",
    "symbol_source",
    "trace_instead",
    "traced_frame_name",
    "traced_frame_variables",
    "watch_conversions",
    "watch_graph_breaks",
    "watch_traced_optimizers",
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
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch._dynamo.decorators import substitute_in_graph
    from torch._dynamo.eval_frame import always_optimize_code_objects
    from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import (
        InstructionTranslator,
        InstructionTranslatorBase,
        TensorifyState,
    )
    from torch._dynamo.trace_rules import get_torch_obj_rule_map, torch_name_rule_map
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
    from torch._guards import CompileContext, detect_fake_mode
    from torch._inductor import config as inductor_config
    from torch._inductor import ir, list_mode_options
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import ops
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import make_fx
except ImportError as error:
    raise ImportError(
        f"collage_fx does not know torch {torch.__version__}: {error}. "
        f"It is tested with torch {', '.join(TESTED_TORCH)}; please install one of those or a newer "
        "collage_fx"
    ) from error

#: ``a * b + c``, an operator that Inductor registers and that AOTAutograd puts into graphs.
prims_fma: Any = torch.ops.prims.fma

#: Compiles one functional ATen graph with Inductor: ``(gm, example_inputs, **kwargs) -> callable taking a
#: list``.
inductor_compile_inner: Callable[..., Callable[[list[Any]], Any]] = compile_fx_inner


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
    with functorch_config.patch(enable_autograd_cache=False):
        compiled = compile_fx(
            gm,
            list(example_inputs),
            inner_compile=inner_compile,
            decompositions=decompositions,
            config_patches=config_patches,
        )
    return cast(Callable[..., Any], compiled)


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


def traced_frame_variables() -> dict[str, Any]:
    """The Python variables of the frame that Dynamo is compiling, real objects; empty outside of Dynamo.

    Includes the globals that the frame's code names, so that a step inside a user's function is found too.
    """
    try:
        frame = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:  # torch's own signal for "no translation is running"
        return {}
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
    try:
        return str(InstructionTranslator.current_tx().output.root_tx.f_code.co_name)
    except AttributeError:
        return ""


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
    try:
        return _innermost(InstructionTranslator.current_tx().output.compiler_fn)
    except AttributeError:
        return None, {}


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
    attempts: Sequence[Attempt],
) -> None:
    """Have functions called around each of Dynamo's conversions of a frame into a graph.

    Args:
        before: ``(backend, keywords, code, variables)`` (see :func:`watch_traced_optimizers`); an exception
            of it ends the conversion and reaches the user, True applies the following two.
        after: ``(code, variables)``, once a graph has been compiled.
        attempts: how to convert. Where a conversion ends in :class:`ConvertOtherwise`, the next is tried.

    Called once per compilation of a frame; costs nothing where nothing is compiled.
    """

    def watching(original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            code, variables = frame.f_code, frame.f_locals
            if not before(*_innermost(self._torchdynamo_orig_backend), code, variables):
                return original(self, frame, *args, **kwargs)
            if _optimizer_of_method(code, variables) is not None:
                # Dynamo runs frames eagerly in which it sees no tensor, as in step(self) of most optimizers.
                always_optimize_code_objects[code] = True
            converted = _convert(lambda: original(self, frame, *args, **kwargs), attempts)
            if converted is not None and converted.guarded_code is not None:
                after(code, variables)
            return converted

        return watched

    wrap_method(ConvertFrameAssert, "__call__", watching)


@dataclass(frozen=True)
class Attempt:
    """A way to convert a frame.

    Attributes:
        settings: of Dynamo's configuration.
        is_last: whether there is no other way.
    """

    settings: dict[str, Any]
    is_last: bool = False


class ConvertOtherwise(ShortenTraceback):
    """Raised by a watch of graph breaks to have a frame converted in the next way."""

    def __init__(self) -> None:
        super().__init__(first_useful_frame=None)


class _Conversion(threading.local):
    """The attempt that this thread is at."""

    attempt: Attempt | None = None


_conversion = _Conversion()


def current_attempt() -> Attempt | None:
    """The way in which a frame is being converted; None outside of watched conversions."""
    return _conversion.attempt


def _convert(conversion: Callable[[], Any], attempts: Sequence[Attempt]) -> Any:
    """Run a conversion in the first way that it does not ask to replace."""
    outer = _conversion.attempt
    try:
        for attempt in attempts:
            _conversion.attempt = attempt
            with dynamo_config.patch(attempt.settings), contextlib.suppress(ConvertOtherwise):
                return conversion()
    finally:
        _conversion.attempt = outer
    raise AssertionError("the last attempt asked for another")


def dynamo_recompile_limit() -> int:
    """How often Dynamo compiles a function at most, as the user has set it."""
    return int(dynamo_config.recompile_limit)


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo cannot go on tracing.

    Attributes:
        optimizer: whose update is being traced there; None where it is none's.
        reason: Dynamo's, in a sentence or two.
        where: file, line and function.
        is_harmless: what is run eagerly there changes no tensor (a branch, say), and what follows is captured
            in a graph of its own.
    """

    optimizer: torch.optim.Optimizer | None
    reason: str
    where: str
    is_harmless: bool


def watch_graph_breaks(watch: Callable[[Any, dict[str, Any], GraphBreak], None]) -> None:
    """Have ``watch(backend, keywords, graph_break)`` called when Dynamo decides to break a graph.

    Or to skip a frame. An exception of a :class:`ShortenTraceback` class reaches the user, as in
    :func:`watch_traced_optimizers`.
    """

    def watching(original: Callable[..., None]) -> Callable[..., None]:
        def watched(self: Any, code_options: Any, reason: str, exc: Any) -> None:
            if not _is_torchs_own(self.f_code, exc):
                is_skip = reason.startswith(
                    ("Failed to handle", "Encountered graph break that we cannot resume")
                )
                graph_break = _describe_graph_break(self, exc, is_skip=is_skip)
                watch(*_innermost(self.output.compiler_fn), graph_break)
            original(self, code_options, reason, exc)

        return watched

    wrap_method(InstructionTranslatorBase, "log_graph_break", watching)


def _is_torchs_own(code: CodeType, cause: Any) -> bool:
    """Whether it is the break that torch.optim's wrapper around ``step`` has written into it."""
    is_call = getattr(cause, "gb_type", None) == "Call to `torch._dynamo.graph_break()`"
    return is_call and _is_in_torchs_optimizer(code)


def _is_in_torchs_optimizer(code: CodeType) -> bool:
    return code.co_filename == inspect.getfile(torch.optim.Optimizer)


def _describe_graph_break(translator: Any, cause: Any, *, is_skip: bool) -> GraphBreak:
    stack = list(getattr(cause, "real_stack", None) or ())
    lines = [line.strip() for line in str(getattr(cause, "msg", cause)).splitlines() if line.strip()]
    explained = [line.removeprefix("Explanation: ") for line in lines[:2]]
    where = (
        f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}" if stack else translator.f_code.co_name
    )
    return GraphBreak(
        _optimizer_updated_by(translator, stack),
        ". ".join(explained),
        where,
        not is_skip and getattr(cause, "gb_type", None) in _EXECUTES_NOTHING,
    )


#: Graph breaks whose instruction, the one that Dynamo leaves to eager execution, changes no tensor.
_EXECUTES_NOTHING = (
    "Data-dependent branching",
    "Call to `torch._dynamo.graph_break()`",
    "Unsupported Tensor.item() call with capture_scalar_outputs=False",
)


def _optimizer_updated_by(translator: Any, stack: Sequence[Any]) -> torch.optim.Optimizer | None:
    """The optimizer in one of whose methods a translation is, but for the closure that a step calls.

    Looked for among the function that is being traced and the Python frames that called it.
    """
    below = {(entry.filename, entry.name) for entry in stack}
    for code, variables in [(translator.f_code, translator.f_locals), *_possible_steps_on_the_stack()]:
        optimizer = _optimizer_of_method(code, variables)
        if optimizer is not None:
            return None if below & _functions_passed(code, variables) else optimizer
        below.add((code.co_filename, code.co_name))
    return None


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
    """Have Dynamo inline ``traceable`` where a traced program calls the builtin ``function``.

    For every backend: Dynamo has one table of rules. A second call for the same function changes nothing.
    """
    name = f"{function.__module__}.{function.__name__}"
    maps: list[dict[str, Any]] = list(torch_name_rule_map)  # type: ignore[arg-type]
    rules = [rules for rules in maps if name in rules]
    for each in rules:
        del each[name]
    if rules:
        get_torch_obj_rule_map.cache_clear()
        substitute_in_graph(function)(traceable)


def symbol_source(value: torch.SymInt | torch.SymFloat) -> str:
    """The expression a symbolic number was read from, as ``self.param_groups[0]['lr']``, else its symbol."""
    expression = value.node.expr
    sources = value.node.shape_env.var_to_sources.get(expression, ())
    return str(sources[0].name) if sources and isinstance(sources[0].name, str) else str(expression)


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Allocate real tensors although a fake tensor mode is active (as it is while a backend runs)."""
    with unset_fake_temporarily():
        yield


def register_pointwise_lowering(
    operator: Any, element_function: Callable[..., Callable[[Sequence[Any]], Any]], *, dtype: torch.dtype
) -> None:
    """Lower ``operator(x, *constants)`` to one elementwise computation within the kernel that reads it.

    Args:
        operator: an overload of one tensor and constants.
        element_function: ``(*constants) -> function of [value of x]`` giving the value of the result, for one
            element.
        dtype: of the result.
    """

    def lowering(x: Any, *constants: Any) -> Any:
        load = x.make_loader()
        compute = element_function(*constants)
        return ir.Pointwise.create(
            device=x.get_device(),
            dtype=dtype,
            inner_fn=lambda index: compute([load(index)]),
            ranges=list(x.get_size()),
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
    if name == "full":
        return ops.constant(args[1], dtype)
    if node.target is torch.ops.aten.view.dtype:
        return ops.to_dtype_bitcast(values[tensors[0]], args[1], dtype)
    operands = [values[arg] if isinstance(arg, torch.fx.Node) else ops.constant(arg, dtype) for arg in args]
    return getattr(ops, _ELEMENT_NAMES.get(name, name))(*operands)
