"""Calling Inductor, its settings and its caches: rests on ``torch._inductor`` but for its code generation."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import sys
import threading
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx as compile_fx_module
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.codecache import CppPythonBindingsCodeCache, torch_key
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.triton_compat import triton_key
from torch._inductor.scheduler import Scheduler

from collage_fx.torch_compat.patch_cpp_conversions import bfloat16_by_instruction
from collage_fx.torch_compat.patch_cpp_loads import fetching_ahead

__all__ = [
    "COMBINED_LAUNCHES",
    "InductorFault",
    "add_to_cache_key",
    "compile_with_inductor",
    "copy_cache_facts",
    "cpp_compilers",
    "functional_decompositions",
    "fusing_distant_nodes",
    "generated_code",
    "generates_cpp",
    "inductor_compile_inner",
    "inductor_config",
    "inductor_faults",
    "innermost_callable",
    "mode_options",
    "prepare_cpp_compiler",
    "without_outer_loop_fusion",
]


#: What the names of attributes begin with that are there for the cache's key.
FACT = "collage_fx_"


def add_to_cache_key(gm: torch.fx.GraphModule, **facts: object) -> None:
    """Let Inductor's cache of graphs tell a graph from an equal one of which these facts differ.

    It looks at the attributes of the module.
    """
    for name, fact in facts.items():
        setattr(gm, FACT + name, fact)


def copy_cache_facts(source: torch.fx.GraphModule, to: torch.fx.GraphModule) -> None:
    """Give a copy of a graph what :func:`add_to_cache_key` has given the graph."""
    for name, fact in vars(source).items():
        if name.startswith(FACT):
            setattr(to, name, fact)


def inductor_compile_inner(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile one functional ATen graph with Inductor: a callable that takes a list.

    The code is Inductor's but for :func:`bfloat16_by_instruction` and :func:`fetching_ahead`.

    Its cache of graphs does not ask for whose vectors code was written, and runs that of an AVX-512 machine
    on one with AVX2, where it computes something else. So what the processor has becomes part of its key.
    """
    if any(isinstance(each, torch.Tensor) and generates_cpp(each.device) for each in example_inputs):
        isa = pick_vec_isa()
        add_to_cache_key(gm, vectors=(str(isa), isa.bit_width()))
    # What AOTAutograd decomposes by: newer Inductors refuse to call an operator in it that they write no
    # kernel for, and cache no graph. In ours are operators of which some calls are decomposed.
    kwargs.pop("get_decomp_fn", None)
    with bfloat16_by_instruction(), fetching_ahead():
        return compile_fx_inner(gm, example_inputs, **kwargs)


class InductorFault(Exception):
    """Inductor, or the compiler that it calls, failed at a graph; the message is the first line of theirs."""


@contextlib.contextmanager
def inductor_faults() -> Iterator[None]:
    """Within, whatever Inductor raises is an :class:`InductorFault`, with its cause."""
    try:
        yield
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        raise InductorFault(f"{type(error).__name__}: {said[0]}") from error


def without_outer_loop_fusion() -> contextlib.AbstractContextManager[Any]:
    """Within, loops of C++ kernels that agree in the outer dimensions alone stay apart."""
    return unittest.mock.patch.object(CppScheduling, "can_fuse_vertical_outer_loop", return_value=False)


@contextlib.contextmanager
def fusing_distant_nodes() -> Iterator[None]:
    """Inductor fuses nodes however many others are between them.

    Beyond 64 it does not, lest what they read is kept in memory for longer. Where all are computed from the
    same element of some tensors, it is the other way round: what is not fused is kept in memory.
    """
    with unittest.mock.patch.object(Scheduler, "are_long_distant_nodes", return_value=False):
        yield


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


def generates_cpp(device: torch.device) -> bool:
    """Whether Inductor writes C++ for the device."""
    return device.type == "cpu" and inductor_config.cpu_backend == "cpp"


#: Inductor's settings for few launches: one costs as much time as moving megabytes, and a model has a hundred
#: small tensors. Elementwise kernels that do not depend on each other are combined, eight a launch or more.
#: Newer versions look before whether that needs more memory, and count what a step writes in place as new.
COMBINED_LAUNCHES: dict[str, Any] = {"combo_kernels": True, "combo_kernels_pointwise_only": True}

for _name, _value in (("combo_kernel_peak_memory_pct_threshold", None), ("combo_kernel_max_distance", -1)):
    if hasattr(inductor_config, _name):
        COMBINED_LAUNCHES[_name] = _value


_PREPARING = "collage_fx: prepare the compiler"


@functools.cache
def prepare_cpp_compiler() -> concurrent.futures.Future[Any]:
    """Have what Inductor's C++ kernels need prepared on another core, once a process.

    On a machine that has compiled nothing yet, finding out what its processor can do and precompiling a
    header takes longer than a kernel. On any machine, Inductor's cache wants the hashes of two packages,
    hundreds of megabytes, before it can be asked. A fault of the compiler is raised by the future.
    """
    executor = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix=_PREPARING)
    prefix = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
    future = executor.submit(CppPythonBindingsCodeCache.load_async, prefix, device_type="cpu")
    executor.submit(lambda: (triton_key(), torch_key()))
    executor.shutdown(wait=False)
    if sys.platform != "win32":
        os.register_at_fork(before=functools.partial(_finish, executor))
    return future


def _finish(executor: concurrent.futures.Executor) -> None:
    """Before a fork: the new process has none of the threads, but waits for them, and for locks they hold."""
    if not threading.current_thread().name.startswith(_PREPARING):
        executor.shutdown()


def innermost_callable(compiled: Any) -> Callable[[list[Any]], Any]:
    """The generated code of what Inductor has compiled for the CPU, without profiling around it."""
    return cast("Callable[[list[Any]], Any]", getattr(compiled, "current_callable", None) or compiled)
