"""What Inductor does with ours otherwise than with other graphs: patterns, fusion, what it keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

from collage_fx.torch_compat.patching import Patch, Shape

__all__ = [
    "DISTANT_NODES",
    "KEPT_VALUES",
    "LOADED_VALUES",
    "OUTER_LOOPS",
    "OUTPUT_CODE",
    "PATTERNS",
    "PATTERN_PASSES",
    "computing_anew",
    "fusing_distant_nodes",
    "generated_code",
    "without_needless_patterns",
    "without_outer_loop_fusion",
]

DISTANT_NODES = Patch(
    name="distant-nodes",
    target="torch._inductor.scheduler:Scheduler.are_long_distant_nodes",
    parameters=("self", "node1", "node2"),
    why="elementwise nodes of one loop are fused, however many others are between them",
    during="lowerings",
)

OUTER_LOOPS = Patch(
    name="outer-loops",
    target="torch._inductor.codegen.cpp:CppScheduling.can_fuse_vertical_outer_loop",
    parameters=("self", "node1", "node2"),
    why="where Inductor's C++ backend has failed, loops that agree in the outer dimensions alone stay apart",
    during="lowerings",
)

PATTERN_PASSES = Patch(
    name="pattern-passes",
    target="torch._inductor.compile_fx:joint_graph_passes",
    parameters=("graph",),
    why="no patterns of attention are made for steps in which there is none",
    during="lowerings",
    relies_on=(
        Shape(
            target="torch._inductor.compile_fx:_recursive_joint_graph_passes",
            mentions=("joint_graph_passes",),
        ),
    ),
)

PATTERNS = Patch(
    name="patterns",
    target="torch._inductor.fx_passes.joint_graph:lazy_init",
    why="the same: this function makes them",
    during="lowerings",
    relies_on=(
        Shape(target="torch._inductor.fx_passes.joint_graph:joint_graph_passes", mentions=("lazy_init",)),
    ),
)

OUTPUT_CODE = Patch(
    name="output-code",
    target="torch._inductor.graph:GraphLowering.save_output_code",
    why="reports show the code that Inductor has written",
    during="lowerings",
)

KEPT_VALUES = Patch(
    name="kept-values",
    target="torch._inductor.ir:ComputedBuffer.make_indexer",
    parameters=("self",),
    why="what samples a few elements of a value does not have all of it kept in memory",
    during="lowerings",
    relies_on=(Shape(target="torch._inductor.ir:ComputedBuffer", mentions=("data", "get_name", "get_size")),),
)

LOADED_VALUES = Patch(
    name="loaded-values",
    target="torch._inductor.virtualized:OpsWrapper._default",
    parameters=("self", "name", "args", "kwargs"),
    why="the same, where the value is loaded",
    during="lowerings",
)


def fusing_distant_nodes() -> contextlib.AbstractContextManager[None]:
    """Within, Inductor fuses nodes however many others are between them.

    Beyond 64 it does not, lest what they read is kept in memory for longer. Where all are computed from the
    same element of some tensors, it is the other way round: what is not fused is kept in memory.
    """
    return DISTANT_NODES.entered(lambda original: lambda *nodes: False)


def without_outer_loop_fusion() -> contextlib.AbstractContextManager[None]:
    """Within, loops of C++ kernels that agree in the outer dimensions alone stay apart."""
    return OUTER_LOOPS.entered(lambda original: lambda *nodes: False)


#: What Inductor's patterns for attention, for padding and for shuffled rows have in them, one of these each.
_IN_PATTERNS = frozenset({"mm", "bmm", "addmm", "baddbmm", "randperm"})


def without_needless_patterns() -> contextlib.AbstractContextManager[None]:
    """Within, graphs in which there can be no such pattern don't have them made: a second, once a process.

    The first graph that may contain one has them made as ever. (On a GPU there are further patterns.)
    """

    def only_if_needed(with_patterns: Callable[..., Any]) -> Callable[..., Any]:
        def passes(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
            names = {getattr(getattr(n.target, "overloadpacket", n.target), "__name__", "") for n in nodes}
            values = [node.meta.get("val") for node in graph.graph.nodes]
            on_cpu = all(v.device.type == "cpu" for v in values if isinstance(v, torch.Tensor))
            if not on_cpu or _IN_PATTERNS.intersection(names):
                return with_patterns(graph, *args, **kwargs)
            with PATTERNS.entered(lambda original: lambda *args: None):
                return with_patterns(graph, *args, **kwargs)

        return passes

    return PATTERN_PASSES.entered(only_if_needed)


@contextlib.contextmanager
def generated_code() -> Iterator[list[str]]:
    """The list that Inductor's code of every graph compiled meanwhile goes into: Python with its kernels.

    Also of graphs that it finds in its cache.
    """
    sources: list[str] = []

    def saving(watching: Callable[[str], None] | None) -> Callable[[str], None]:
        def save(source: str) -> None:
            sources.append(source)
            if watching is not None:
                watching(source)

        return save

    with OUTPUT_CODE.entered(saving):
        yield sources


@dataclass(frozen=True)
class _Element:
    """An element of a value that Inductor has decided to keep in memory."""

    buffer: Any
    index: Any


@contextlib.contextmanager
def computing_anew() -> Iterator[None]:
    """Within, elementwise values that Inductor keeps in memory are computed from what they are made of.

    For a reader of a few elements: if it loaded them, whole tensors would have to be written for it. Loaded
    are numbers, results of anything but elementwise operations, and what is read under a mask (a padded
    tensor), where no value from elsewhere can be used, so that each reader's would be computed for itself.
    """
    block = V.get_ops_handler()
    computed: dict[Any, Any] = {}

    def indexing(make_indexer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def indexer(buffer: Any) -> Any:
            is_number = all(length == 1 for length in buffer.get_size())
            if is_number or not isinstance(buffer.data, ir.Pointwise) or V.get_ops_handler() is not block:
                return make_indexer(buffer)
            return lambda index: _Element(buffer, index)

        return indexer

    def computing(operation: Callable[..., Any]) -> Callable[..., Any]:
        def default(wrapper: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if name != "load" or not isinstance(args[1], _Element):
                return operation(wrapper, name, args, kwargs)
            element = args[1]
            key = element.buffer.get_name(), tuple(element.index)
            if key not in computed:
                computed[key] = element.buffer.data.make_loader()(element.index)
            return computed[key]

        return default

    with KEPT_VALUES.entered(indexing), LOADED_VALUES.entered(computing):
        yield
