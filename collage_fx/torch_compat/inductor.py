"""Calls, settings and caches of Inductor: rests on ``torch._inductor``, except its code generation."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import torch
from functorch.compile import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import CppCompileError
from torch._inductor.lowering import register_lowering

from collage_fx.torch_compat.patch_inductor import without_contraction, without_patterns
from collage_fx.torch_compat.patch_numbers import keeping_numbers_symbolic
from collage_fx.torch_compat.version import version

aten = torch.ops.aten

RELIED_ON = (
    (
        "torch._inductor.compile_fx:"
        "compile_fx(model_, example_inputs_, inner_compile, config_patches, decompositions)"
    ),
    "torch._inductor:config has combo_kernels, combo_kernels_pointwise_only, cpu_backend",
    "torch._inductor:config has joint_graph_constant_folding, max_fusion_size, realize_opcount_threshold",
    "torch._inductor:config has get_hash, size_asserts, use_fast_math",
    "torch._inductor.config:cpp has cxx, enable_floating_point_contract_flag, enable_unsafe_math_opt_flag",
    "torch._inductor.config:cpp has max_horizontal_fusion_size, threads",
    "torch._inductor.config:eager_numerics has division_rounding",
    "functorch.compile:config has enable_autograd_cache",
)

#: Prefix of attributes of a graph module that are part of Inductor's cache key.
FACT = "collage_fx_"


def add_to_cache_key(gm: torch.fx.GraphModule, **facts: object) -> None:
    """Add facts to the key of a graph in Inductor's cache, which includes the module's attributes."""
    for name, fact in facts.items():
        setattr(gm, FACT + name, fact)


@functools.cache
def _revision() -> str:
    """Return a hash of this package: its settings and patches decide the results of Inductor's code."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def copy_cache_facts(source: torch.fx.GraphModule, to: torch.fx.GraphModule) -> None:
    """Copy the facts of :func:`add_to_cache_key` from a graph to its copy."""
    for name, fact in vars(source).items():
        if name.startswith(FACT):
            setattr(to, name, fact)


def inductor_compile_inner(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile a rewritten graph with Inductor to a callable of a single list.

    Unless the mode is to tune, kernels are not chosen by the time that they take: reductions by other blocks
    have other last bits, and so ranks would differ, and a resumed run from the one that goes on.
    """
    tunes = inductor_config.max_autotune
    with without_contraction(), inductor_config.patch(deterministic=not tunes):
        return inductor_compile_as_it_is(gm, example_inputs, **kwargs)


def inductor_compile_as_it_is(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile a functional ATen graph to the code that plain Inductor writes.

    The cache key gets the revision of this package, and the vector instructions that the code is written for:
    a machine with AVX2 would get code of a machine with AVX-512, which computes other results there.
    """
    add_to_cache_key(gm, revision=_revision())
    if any(isinstance(each, torch.Tensor) and each.device.type == "cpu" for each in example_inputs):
        add_to_cache_key(gm, vectors=torch.backends.cpu.get_cpu_capability())
    _write_factors_out(gm.graph)
    # AOTAutograd's decompositions: newer versions of Inductor refuse an operator that is in them and has no
    # kernel, and do not cache the graph. Ours contain operators of which only some calls are decomposed.
    kwargs.pop("get_decomp_fn", None)
    compiled = compile_fx_inner(gm, example_inputs, **kwargs)
    if hasattr(compiled, "source_code"):
        note_generated_code([compiled.source_code])
    return compiled


def realize_results_of(operator: Any) -> None:
    """Lower ``operator(x)`` to ``x`` stored in memory: its readers load it, not recompute it."""

    @register_lowering(operator, type_promotion_kind=None)
    def lowering(x: Any) -> Any:
        x.realize()
        return x


def _write_factors_out(graph: torch.fx.Graph) -> None:
    """Write ``add(x, y, alpha=c)`` as ``add(x, y * c)`` where one of both is a product of matrices.

    Inductor makes ``addmm`` of it, and (2.13 does) drops the factor: ``p.add_(a @ b, alpha=-lr)`` adds a @ b.
    """
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        x, y = node.args
        is_of_matrices = any(each.target is aten.mm.default for each in node.all_input_nodes)
        if "alpha" in node.kwargs and is_of_matrices and isinstance(y, torch.fx.Node):
            with graph.inserting_before(node):
                scaled = graph.call_function(aten.mul.Tensor, (y, node.kwargs["alpha"]))
            scaled.meta.update(y.meta)
            node.args, node.kwargs = (x, scaled), {}


_generated: ContextVar[list[str] | None] = ContextVar("_generated", default=None)


@contextlib.contextmanager
def generated_code() -> Iterator[list[str]]:
    """Context manager: collect the code that Inductor writes for each graph, Python and kernels, in a list.

    Code of graphs found in the cache, too. On exit the list is appended to that of the surrounding context.
    """
    sources, outer = list[str](), _generated.get()
    token = _generated.set(sources)
    try:
        yield sources
    finally:
        _generated.reset(token)
        if outer is not None:
            outer.extend(sources)


def note_generated_code(sources: Iterable[str]) -> None:
    """Add code of an earlier compilation, which is used again, to the list of :func:`generated_code`."""
    if (found := _generated.get()) is not None:
        found.extend(sources)


class InductorFault(Exception):
    """Failure of Inductor, or of a compiler that it calls; the message is a line of theirs.

    The line is the first, or the compiler's first that tells of an error.

    Attributes:
        ours: file, line and function of this package that raised the error; empty if Inductor raised it.
        is_by_compiler: whether a working C++ compiler found the error in its source.
    """

    def __init__(self, error: Exception) -> None:
        said = str(error).strip().splitlines() or [""]
        first = next((line for line in said if " error: " in line), said[0])
        super().__init__(f"{type(error).__name__}: {first}")
        self.ours = _ours(error)
        self.is_by_compiler = isinstance(error, CppCompileError)


def _ours(error: BaseException) -> str:
    """Return file and line of this package at which an error began; empty if it began in torch.

    Frames of other packages count as part of their caller. Empty for RecursionErrors, which any frame raises.
    """
    place, is_called = "", False
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package == "torch":
            place, is_called = "", True
        elif package == __name__.partition(".")[0] and is_called:
            place = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    return "" if "RecursionError" in str(error) else place


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    inner_compile: Callable[..., Any],
    decompositions: dict[Any, Callable[..., Any]] | None,
    config_patches: dict[str, Any] | None,
    symbols_left_out: Set[str] = frozenset(),
) -> Callable[..., Any]:
    """Compile a Dynamo graph through AOTAutograd, with ``inner_compile`` instead of Inductor's own.

    AOTAutograd applies ``decompositions``; None are Inductor's own (:func:`functional_decompositions`): then
    only ``inner_compile`` differs from plain Inductor. AOTAutograd's cache is off: on a hit it would return
    the code of an earlier compilation without calling ``inner_compile``, so without error terms. Inductor's
    own cache, whose key is the rewritten graph, stays on. ``symbols_left_out`` of the graph stay symbols.
    """
    inputs = (*gm.parameters(), *gm.buffers(), *example_inputs)
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        if decompositions is not None:
            stack.enter_context(keeping_numbers_symbolic(symbols_left_out))
            if all(value.device.type == "cpu" for value in tensors):
                stack.enter_context(without_patterns())
        compiled = compile_fx(
            gm,
            list(example_inputs),
            inner_compile=inner_compile,
            decompositions=decompositions,
            config_patches=config_patches,
        )
    return cast(Callable[..., Any], compiled)


def mode_options(mode: str) -> dict[str, Any]:
    """Return the Inductor configuration of a ``torch.compile`` mode.

    Raises RuntimeError for a mode unknown to torch.
    """
    return dict(list_mode_options(mode))


def cpp_compilers() -> list[str]:
    """Return the names of the C++ compilers that Inductor tries, in order."""
    names = inductor_config.cpp.cxx
    return [str(name) for name in (names if isinstance(names, (list, tuple)) else [names]) if name]


def functional_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions that Inductor expects its graphs to have been made with."""
    return dict(select_decomp_table())


#: Settings of Inductor for few launches: a launch takes as long as moving megabytes, and a model has a
#: hundred small tensors. Independent elementwise kernels are combined, eight or more per launch. The limit of
#: memory, an estimate that counts in-place writes as new memory, is off. Kernels are not timed in several
#: configurations, which would need copies of the written tensors.
COMBINED_LAUNCHES: dict[str, Any] = {
    "combo_kernels": True,
    "combo_kernels_pointwise_only": True,
    "triton.autotune_pointwise": False,
}

for _name, _value in (("combo_kernel_peak_memory_pct_threshold", None), ("combo_kernel_max_distance", -1)):
    if hasattr(inductor_config, _name):
        COMBINED_LAUNCHES[_name] = _value


#: Whether a CUDA graph keeps the value that a 0-d tensor of the host had at the capture: since torch 2.13 the
#: generated code reads it during the capture; before, it copied it to the device.
FREEZES_NUMBERS = version() >= (2, 13)


def innermost_callable(compiled: Any) -> Callable[[list[Any]], Any]:
    """Return the generated function of a compiled graph for the CPU, without the profiling around it."""
    return cast("Callable[[list[Any]], Any]", getattr(compiled, "current_callable", None) or compiled)
