"""Triton kernels over tables of addresses, compiled, cached and launched by Inductor's runtime."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime.hints import DeviceProperties

RELIED_ON = (
    "torch._inductor.runtime.triton_heuristics:fixed_config(config, filename, triton_meta, inductor_meta)",
    "torch._inductor.runtime.triton_heuristics:FixedGrid has generate",
)

#: Threads of a warp if torch does not say.
WARP = 32
#: Alignment of addresses, in bytes, for the variant of a kernel with accesses of this size.
ALIGNED_BYTES = 16

#: Imports that the module of a kernel begins with, under the names that Inductor's kernels have for them.
TRITON_HEAD = """import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.triton_helpers import libdevice

triton_helpers.set_driver_to_gpu()
"""


def warp_size(device: torch.device) -> int:
    """Return the threads of a warp on a device: 32, or 64 on some AMD devices."""
    return DeviceProperties.create(device).warp_size or WARP


def triton_decorator(config: Mapping[str, int], name: str, device: torch.device) -> str:
    """Write Inductor's decorator for a kernel ``name(table, programs, *constants)`` of one configuration."""
    constants = [each for each in config if not each.startswith("num_")]
    triton = {
        "signature": {"table": "*i64", "programs": "*i64", **dict.fromkeys(constants, "constexpr")},
        "device": DeviceProperties.create(device),
        "constants": {},
        "configs": [{(i,): [["tt.divisibility", 16]] for i in range(2)}],
        "enable_fp_fusion": False,
    }
    grid = ["_grid_0", "_grid_1", "_grid_2"]
    inductor = {
        "grid_type": "FixedGrid",
        "fixed_grid": grid,
        "extra_launcher_args": grid,
        "kernel_name": name,
        "mutated_arg_names": [],
        "is_hip": torch.version.hip is not None,
    }
    return (
        f"@triton_heuristics.fixed_config({dict(config)!r}, filename=__file__, "
        f"triton_meta={triton!r}, inductor_meta={inductor!r})"
    )


@dataclass(frozen=True)
class TableKernel:
    """Triton kernel over a table.

    Attributes:
        name: name of the kernel in profilers: different for each rule, the same in each process.
        arguments: for each column of a row, the index of the argument whose address it holds; the length, if
            it is an argument, is itself in the last column.
        size: units of length per block.
        source: source of a module with the kernel: by True for aligned addresses of elements, False for any.
        accesses: the argument of each load and store.
        adding: the kernel that adds this kernel's partial sums, if it has any: Note [Sums of a launch].
        threads, tiles: numbers of a program's threads, and of its tiles, one after the other.
        begins: whether kernels are compiled ahead of their first launch.
    """

    begins: ClassVar[bool] = True
    name: str
    arguments: tuple[int, ...]
    size: int
    source: Mapping[bool, str]
    accesses: tuple[int, ...] = ()
    adding: TableKernel | None = None
    threads: int = WARP
    tiles: int = 1

    def begin(self) -> None:
        """Start to compile the kernel for aligned addresses, maybe in another process."""
        if TableKernel.begins:
            _begun(self.name, self.source[True])
            if self.adding is not None:
                self.adding.begin()

    def loaded(self, *, aligned: bool) -> Any:
        """Return the compiled kernel: ``run(table, programs, *grid, stream=...)``."""
        return _loaded(self.name, self.source[aligned])


@contextlib.contextmanager
def no_kernels_ahead() -> Iterator[None]:
    """Context manager: no kernel is compiled ahead of its first launch, as for a device that is not there."""
    before, TableKernel.begins = TableKernel.begins, False
    try:
        yield
    finally:
        TableKernel.begins = before


@functools.cache
def _begun(name: str, source: str) -> Any:
    return AsyncCompile().triton(name, source, device_str="cuda")


@functools.cache
def _loaded(name: str, source: str) -> Any:
    """Wait for a kernel, once: a future of Inductor loads the kernel again at each call of ``result``."""
    kernel = _begun(name, source)
    return kernel.result() if hasattr(kernel, "result") else kernel


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context manager: make a CUDA device the current one, unless it is already, which is faster."""
    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def launch(kernel: Any, table: torch.Tensor, programs: torch.Tensor, device: torch.device) -> None:
    """Launch a loaded kernel on the current stream, with one program for each word."""
    with on_device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        kernel.run(table, programs, programs.numel(), 1, 1, stream=stream)


def launches_of(code: str) -> int:
    """Return the number of launches of Inductor's code: its Triton kernels, and calls of torch's kernels."""
    calls = (ast.unparse(each.func) for each in ast.walk(ast.parse(code)) if isinstance(each, ast.Call))
    return sum(each.startswith(("extern_kernels.", "torch.ops.")) or each.endswith(".run") for each in calls)
