"""What Inductor does with ours otherwise than with other graphs: patterns, fusion, what it keeps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from collage_fx.torch_compat.patching import Patch

DISTANT_NODES = Patch(
    name="distant-nodes",
    target="torch._inductor.scheduler:Scheduler.are_long_distant_nodes(self, node1, node2)",
    why="elementwise nodes of one loop are fused, however many others are between them",
    waits_for="a setting of Inductor's for the distance beyond which nodes are not fused",
    needed_for="speed",
    during="lowerings",
)

OUTER_LOOPS = Patch(
    name="outer-loops",
    target="torch._inductor.codegen.cpp:CppScheduling.can_fuse_vertical_outer_loop(self, node1, node2)",
    why="where Inductor's C++ backend has failed, loops that agree in the outer dimensions alone stay apart",
    waits_for="a setting of Inductor's for the fusion of outer loops",
    needed_for="speed",
    during="lowerings",
)

PATTERNS = Patch(
    name="patterns",
    target="torch._inductor.fx_passes.joint_graph:lazy_init",
    why="no patterns of attention, padding and shuffled rows are made for steps on the CPU",
    waits_for="a setting of Inductor's that leaves its patterns unmade",
    needed_for="speed",
    during="lowerings",
    relies_on=("torch._inductor.fx_passes.joint_graph:joint_graph_passes has lazy_init",),
)

LOADED_KERNELS = Patch(
    name="loaded-kernels",
    target="torch._inductor.async_compile:AsyncCompile.triton(self, kernel_name, source_code, device_str)",
    why="a Triton kernel whose body goes into a frame of ours is compiled there alone, others without fma",
    waits_for="settings of Inductor's for enable_fp_fusion, and for kernels compiled when first run",
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


def without_triton() -> contextlib.AbstractContextManager[None]:
    """Within, Triton kernels that Inductor writes are compiled when they are first run, if ever."""
    return LOADED_KERNELS.entered(_deferring)


#: In the text of a kernel: whether LLVM may make an fma of a product and a sum.
CONTRACTS, DOES_NOT = "'enable_fp_fusion': True", "'enable_fp_fusion': False"


def without_contraction() -> contextlib.AbstractContextManager[None]:
    """Context manager: Triton kernels that Inductor writes round each product before it is added.

    Else LLVM chooses, for each element of a thread, which of two products goes into an fma with the other:
    bits would depend on where in a block an element is.
    """
    return LOADED_KERNELS.entered(_rounding_products)


def _rounding_products(original: Callable[..., Any]) -> Callable[..., Any]:
    def triton(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Any:
        return original(self, kernel_name, source_code.replace(CONTRACTS, DOES_NOT), device_str)

    return triton


def _deferring(original: Callable[..., Any]) -> Callable[..., Any]:
    def triton(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Any:
        return _Deferred(functools.partial(original, self, kernel_name, source_code, device_str))

    return triton


class _Deferred:
    """A kernel of Inductor's that is compiled when it is run."""

    def __init__(self, compile_: Callable[[], Any]) -> None:
        self._compile = compile_

    @functools.cached_property
    def _kernel(self) -> Any:
        kernel = self._compile()
        return kernel.result() if hasattr(kernel, "result") else kernel

    def run(self, *arguments: Any, **named: Any) -> Any:
        return self._kernel.run(*arguments, **named)
