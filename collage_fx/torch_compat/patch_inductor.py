"""Patches of Inductor for graphs of this backend: patterns and Triton kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from collage_fx.torch_compat.patching import Patch

PATTERNS = Patch(
    name="patterns",
    target="torch._inductor.fx_passes.joint_graph:lazy_init",
    why="patterns of attention, padding and shuffled rows are not created for steps on the CPU",
    waits_for="a setting of Inductor to create no patterns",
    needed_for="speed",
    during="lowerings",
    relies_on=("torch._inductor.fx_passes.joint_graph:joint_graph_passes has lazy_init",),
)

LOADED_KERNELS = Patch(
    name="loaded-kernels",
    target="torch._inductor.async_compile:AsyncCompile.triton(self, kernel_name, source_code, device_str)",
    why="Inductor's Triton kernels have no fused multiply-add; for a card that is not there they wait",
    waits_for="settings of Inductor for enable_fp_fusion, and for compiling kernels when first run",
    during="lowerings",
)


def without_patterns() -> contextlib.AbstractContextManager[None]:
    """Context manager: skip Inductor's patterns of attention, padding and shuffled rows.

    Creating them takes a second, once per process; the first graph of another backend does it.
    """
    return PATTERNS.entered(lambda original, *args: None)


def without_triton() -> contextlib.AbstractContextManager[None]:
    """Context manager: compile Triton kernels of Inductor when they are first run, if ever."""

    def triton(original: Callable[..., Any], *given: Any, **options: Any) -> Any:
        @functools.cache
        def kernel() -> Any:
            made = original(*given, **options)
            return made.result() if hasattr(made, "result") else made

        return SimpleNamespace(run=lambda *arguments, **named: kernel().run(*arguments, **named))

    return LOADED_KERNELS.entered(triton)


#: Text in the source of a kernel that allows, or forbids, LLVM to fuse a product and a sum.
CONTRACTS, DOES_NOT = "'enable_fp_fusion': True", "'enable_fp_fusion': False"


def without_contraction() -> contextlib.AbstractContextManager[None]:
    """Context manager: have Triton kernels of Inductor round each product before it is added.

    Otherwise bits would depend on an element's position in its block: LLVM chooses, for each element of a
    thread, which of two products to fuse with the addition.
    """

    def triton(
        original: Callable[..., Any], self: Any, kernel_name: str, source_code: str, device_str: str = "cuda"
    ) -> Any:
        return original(self, kernel_name, source_code.replace(CONTRACTS, DOES_NOT), device_str)

    return LOADED_KERNELS.entered(triton)
