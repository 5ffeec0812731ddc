"""Tool ``gpu_code``: the kernels that a GPU would run for a step, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from tabulate import tabulate
from torch.fx import GraphModule
from torch.optim import Optimizer
from typing_extensions import Unpack

from collage_fx import CollageReport
from collage_fx.choices import Architecture, did_you_mean
from collage_fx.errors import InvalidOptionError
from collage_fx.graph import Role, placeholders, tensor_value
from collage_fx.options import GivenOptions
from collage_fx.tools import DeviceLaunch, launches_elsewhere
from collage_tools.gpu_code.imaginary_cuda import (
    ARCHITECTURES,
    have_triton,
    imaginary_cuda,
    machine_code,
    to_cuda,
)
from collage_tools.gpu_code.sass import CARDS, busiest, by_pipe, full_block

#: Widest memory access of a thread, in bytes.
WIDEST = 16


@dataclass(frozen=True)
class GpuKernel:
    """Kernel of a step, compiled for a GPU.

    Attributes:
        name: name of the kernel in profilers; empty if Inductor's code is called for each tensor.
        source: source of a Python module with the Triton kernel, for addresses that are multiples of 16
            bytes.
        tensors: number of tensors whose update (or numbers, or sums) it computes.
        launches: number of launches per step; of code that is called for each tensor, of all its calls.
        bytes_per_parameter: bytes loaded and stored per element of the parameters, counted in the source
            without masks, tables and numbers.
        accesses: bytes per element of each of these loads and stores (a scale of 32 elements counts 1/32).
        registers: registers per thread.
        spilled: bytes of registers that a thread spills to memory.
        wide_accesses: number of 16-byte loads and stores in the machine code of a thread.
        instructions: instructions per element of the parameters that a full block executes, by pipe;
            "issue" = all of them. Empty for numbers, for sums and for AMD's GPUs. See Note [Instructions of
            a full block] in ``sass.py``.
        issue: picoseconds per element of the parameters that the issue slots of the GPU need, or its busiest
            pipe if that needs more.
        memory: picoseconds per element of the parameters that the bytes need at the speed of a copy.
        reason: why there is no launch for all tensors; empty if there is.
    """

    name: str
    source: str
    tensors: int
    launches: int
    bytes_per_parameter: float = 0.0
    accesses: tuple[float, ...] = ()
    registers: int = 0
    spilled: int = 0
    wide_accesses: int = 0
    reason: str = ""
    instructions: Mapping[str, float] = field(default_factory=dict)
    issue: float = 0.0
    memory: float = 0.0

    @property
    def ratio(self) -> float:
        """Time of the instructions as a share of the memory's; 0 if either is not known."""
        return self.issue / self.memory if self.memory else 0.0

    def milliseconds(self, parameters: float) -> float:
        """Predict the time for a number of parameters: of the memory or of the instructions, the longer."""
        return max(self.issue, self.memory) * parameters * 1e-9


@dataclass(frozen=True)
class GpuCode:
    """Code that a GPU would run for a step.

    Attributes:
        arch: the GPU architecture.
        kernels: kernels in the order of their launches; empty if there is a ``reason``.
        report: report of the rewritten step.
        reason: why the step is compiled as a single graph, or not compiled; empty if it is in parts.
    """

    arch: str
    kernels: tuple[GpuKernel, ...]
    report: CollageReport
    reason: str = ""

    @property
    def launches(self) -> int:
        """Number of kernel launches per step."""
        return sum(kernel.launches for kernel in self.kernels)

    def to_table(self) -> str:
        """Return a text table with a row per kernel."""
        if self.reason:
            return f"No kernels over tables for {self.arch}: {self.reason}"
        headers = (
            *("kernel", "tensors", "launches", "bytes", "registers", "spilled"),
            *(f"{WIDEST}-byte accesses", "instructions", "issue ps", "memory ps"),
        )
        rows = [
            (k.name, k.tensors, k.launches, k.bytes_per_parameter, k.registers, k.spilled, k.wide_accesses)
            + ((k.instructions["issue"], k.issue, k.memory) if k.instructions else ("", "", ""))
            if k.name
            else ("for each tensor", k.tensors, k.launches, *["?"] * 7)
            for k in self.kernels
        ]
        table = tabulate(rows, headers=headers, tablefmt="simple", floatfmt=".4g")
        reasons = dict.fromkeys(kernel.reason for kernel in self.kernels if kernel.reason)
        lines = [
            f"For {self.arch}: {self.launches} launches per step. Bytes, instructions and times are per "
            "element of the parameters, registers per thread.",
            table,
        ]
        if any(kernel.instructions for kernel in self.kernels):
            name = CARDS[self.arch].name
            lines.append(f"Times: issue slots and copied bytes of {name}. The longer bounds a step.")
        return "\n\n".join([*lines, *(f"For each tensor, because {reason}" for reason in reasons)])

    def __str__(self) -> str:
        sources = [f"# {kernel.name}\n\n{kernel.source.strip()}" for kernel in self.kernels if kernel.name]
        return "\n\n\n".join([self.to_table(), *sources])


def gpu_code(
    optimizer: Optimizer, *, arch: Architecture = "sm_90", **options: Unpack[GivenOptions]
) -> GpuCode:
    """Return the Triton kernels that a GPU would run for ``optimizer.step``, with facts from the compilers.

    No GPU is needed: the step is captured as in :func:`~collage_fx.explain`, moved to an imaginary GPU, and
    lowered as for a real GPU; Triton and ptxas compile the kernels. The optimizer is not changed. During the
    call, ``torch.cuda`` reports the imaginary GPU in the whole process.

    Args:
        optimizer: any ``torch.optim.Optimizer`` with parameters on the CPU.
        arch: ``"sm_80"`` (A100), ``"sm_90"`` (H100, H200), ``"sm_100"`` (B200), or ``"gfx942"`` (MI300). For
            the latter, the kernels written for an NVIDIA GPU are compiled; only a ROCm build of torch writes
            kernels for it.
        options: options of :class:`~collage_fx.CollageBackend`.

    Raises:
        InvalidOptionError: Triton is not installed, or the architecture or an option is unknown.
        CollageError: compiling the step would raise this error.
    """
    if arch not in ARCHITECTURES:
        known = did_you_mean(arch, ARCHITECTURES)
        raise InvalidOptionError(f"arch={arch!r} is unknown", where="arch", remedy=known)
    if not have_triton():
        raise InvalidOptionError(
            "Triton is not installed, or NumPy, which it needs",
            where="the code for a GPU",
            remedy="pip install triton numpy (on Linux; a CUDA build of torch includes Triton)",
        )
    report, found = launches_elsewhere(optimizer, partial(imaginary_cuda, arch), _on_cuda, **options)
    if isinstance(found, str):
        return GpuCode(arch, (), report, found)
    elements = sum(tensor.numel for tensor in report.tensors if tensor.role is Role.PARAMETER)
    return GpuCode(arch, tuple(_kernel(each, elements, arch) for each in found), report)


def _on_cuda(gm: GraphModule) -> GraphModule:
    """Return a copy of a graph on the imaginary GPU; learning rates (float64 numbers) stay on the CPU."""
    inputs = [(node.name, tensor_value(node)) for node in placeholders(gm.graph)]
    is_number = {name: value is not None and value.dtype is torch.float64 for name, value in inputs}
    return to_cuda(gm, keep_on_cpu=[name for name in is_number if is_number[name]])


def _kernel(found: DeviceLaunch, elements: int, arch: str) -> GpuKernel:
    """Return the kernel of a launch for all tensors, or of separate calls for each tensor."""
    if not found.name:
        return GpuKernel("", "", found.tensors, found.launches, reason=found.reason)
    code = machine_code(found.name, found.source, arch)
    moved = sum(found.accesses) * found.units / elements
    pipes, issue, memory = dict[str, float](), 0.0, 0.0
    if moved and (card := CARDS.get(arch)) is not None:
        executed = by_pipe(full_block(code.stages["sass"], found.tiles))
        # Threads for each element of the parameters: those of a program, times the share of this launch.
        each = found.threads * found.units / elements
        pipes = {pipe: number * each for pipe, number in executed.items()}
        issue, memory = busiest(pipes, card)[1] * 1e12, moved / card.bandwidth * 1e12
    return GpuKernel(
        found.name,
        found.source,
        tensors=found.tensors,
        launches=found.launches,
        bytes_per_parameter=moved,
        accesses=tuple(unit / found.width for unit in found.accesses),
        registers=code.registers,
        spilled=code.spilled,
        wide_accesses=code.accesses.get(WIDEST, 0),
        instructions=pipes,
        issue=issue,
        memory=memory,
    )
