"""What Inductor does with ours otherwise than with other graphs: patterns, fusion, what it keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._inductor import ir
from torch._inductor.virtualized import V

from collage_fx.torch_compat.patching import Patch

__all__ = ["fusing_distant_nodes", "without_outer_loop_fusion"]


DISTANT_NODES = Patch(
    name="distant-nodes",
    target="torch._inductor.scheduler:Scheduler.are_long_distant_nodes(self, node1, node2)",
    why="elementwise nodes of one loop are fused, however many others are between them",
    during="lowerings",
)

OUTER_LOOPS = Patch(
    name="outer-loops",
    target="torch._inductor.codegen.cpp:CppScheduling.can_fuse_vertical_outer_loop(self, node1, node2)",
    why="where Inductor's C++ backend has failed, loops that agree in the outer dimensions alone stay apart",
    during="lowerings",
)

PATTERNS = Patch(
    name="patterns",
    target="torch._inductor.fx_passes.joint_graph:lazy_init",
    why="no patterns of attention, padding and shuffled rows are made for steps on the CPU",
    during="lowerings",
    relies_on=("torch._inductor.fx_passes.joint_graph:joint_graph_passes has lazy_init",),
)

KEPT_VALUES = Patch(
    name="kept-values",
    target="torch._inductor.ir:ComputedBuffer.make_indexer(self)",
    why="what samples a few elements of a value does not have all of it kept in memory",
    during="lowerings",
    relies_on=("torch._inductor.ir:ComputedBuffer has data, get_name, get_size",),
)

LOADED_VALUES = Patch(
    name="loaded-values",
    target="torch._inductor.virtualized:OpsWrapper._default(self, name, args, kwargs)",
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


def without_patterns() -> contextlib.AbstractContextManager[None]:
    """Within, Inductor doesn't make its patterns of attention, padding and shuffled rows.

    That takes a second, once a process; the first graph that is compiled for others has them made as ever. In
    a step on the CPU there is nothing that they would make faster.
    """
    return PATTERNS.entered(lambda original: lambda *args: None)


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
