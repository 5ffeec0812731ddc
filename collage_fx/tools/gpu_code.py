"""The function ``gpu_code``: the kernels that a GPU would be given for a step, on a machine without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tabulate import tabulate
from torch.fx import GraphModule
from torch.optim import Optimizer

from collage_fx.errors import InvalidOptionError, did_you_mean
from collage_fx.graph import Reason, Role, StepProgram, placeholders, tensor_value
from collage_fx.lowering import Lowered, step_in_parts, why_not_compiled
from collage_fx.options import refuse_unknown
from collage_fx.report import CollageReport
from collage_fx.runtime import Kernel, Launch, StepInParts
from collage_fx.tools.explain import CaptureOnly, captured
from collage_fx.torch_compat import imaginary_cuda, without_triton

#: The widest access of a thread, bytes.
WIDEST = 16


@dataclass(frozen=True)
class GpuKernel:
    """A kernel of a step.

    Attributes:
        name: as profilers show it; empty where Inductor's code is called for each tensor.
        source: of a Python module with the Triton kernel, for addresses that are multiples of 16 bytes.
        tensors: of how many it computes the update (or the numbers, or the sums).
        launches: how often a step launches it.
        bytes_per_parameter: what it loads and stores for each element of the parameters: counted in its
            source, and without masks, tables and numbers.
        accesses: of each of these loads and stores, the bytes of an element (of 32 elements' scale: 1/32).
        registers: of a thread.
        spilled: bytes of registers that a thread keeps in memory.
        wide_accesses: loads and stores of 16 bytes by a thread, in its machine code.
        reason: why there is no launch for all tensors, if there is none.
    """

    name: str
    source: str
    tensors: int
    launches: int
    bytes_per_parameter: float
    accesses: tuple[float, ...]
    registers: int
    spilled: int
    wide_accesses: int
    reason: str = ""


@dataclass(frozen=True)
class GpuCode:
    """What a GPU would be given for a step.

    Attributes:
        arch: the architecture it has been compiled for.
        kernels: in the order of their launches; empty if there is a ``reason``.
        report: what has been rewritten.
        reason: why the step is compiled as one graph, or not compiled, if that is so.
    """

    arch: str
    kernels: tuple[GpuKernel, ...]
    report: CollageReport
    reason: str = ""

    @property
    def launches(self) -> int:
        """How many kernels a step launches."""
        return sum(kernel.launches for kernel in self.kernels)

    def to_table(self) -> str:
        """A row for each kernel, as text."""
        if self.reason:
            return f"No kernels over tables for {self.arch}: {self.reason}"
        headers = (
            "kernel",
            "tensors",
            "launches",
            "bytes",
            "registers",
            "spilled",
            f"{WIDEST}-byte accesses",
        )
        rows = [
            (k.name, k.tensors, k.launches, k.bytes_per_parameter, k.registers, k.spilled, k.wide_accesses)
            if k.name
            else ("for each tensor", k.tensors, k.launches, *["?"] * 4)
            for k in self.kernels
        ]
        table = tabulate(rows, headers=headers, tablefmt="simple", floatfmt=".4g")
        reasons = dict.fromkeys(kernel.reason for kernel in self.kernels if kernel.reason)
        lines = [
            f"For {self.arch}: {self.launches} launches a step. Bytes are those of a parameter's element, "
            "registers those of a thread.",
            table,
            *(f"For each tensor, because {reason}" for reason in reasons),
        ]
        return "\n\n".join(lines)

    def __str__(self) -> str:
        sources = [f"# {kernel.name}\n\n{kernel.source.strip()}" for kernel in self.kernels if kernel.name]
        return "\n\n\n".join([self.to_table(), *sources])


def gpu_code(optimizer: Optimizer, *, arch: str = "sm_90", **options: Any) -> GpuCode:
    """The Triton kernels that a GPU would be given for ``optimizer.step``, and what compilers make of them.

    No GPU is needed: the step is captured as :func:`~collage_fx.explain` does, moved to a card that is
    imaginary, and lowered as for a real one; Triton and ptxas compile the kernels. The optimizer isn't
    touched. While this runs, ``torch.cuda`` answers for the imaginary card in the whole process.

    Args:
        optimizer: any ``torch.optim.Optimizer`` with parameters on the CPU.
        arch: ``"sm_80"`` (A100), ``"sm_90"`` (H100, H200), ``"sm_100"`` (B200), or ``"gfx942"`` (MI300), for
            which the kernels of an NVIDIA card are compiled, as Inductor writes others in a build for ROCm
            alone.
        options: those of :class:`~collage_fx.CollageBackend`.

    Raises:
        InvalidOptionError: Triton is not installed, or the architecture or an option is unknown.
        CollageError: what compiling the step would raise.
    """
    if arch not in imaginary_cuda.ARCHITECTURES:
        known = did_you_mean(arch, imaginary_cuda.ARCHITECTURES)
        raise InvalidOptionError(f"arch={arch!r} is unknown", where="arch", remedy=known)
    if not imaginary_cuda.have_triton():
        raise InvalidOptionError(
            "Triton is not installed, or NumPy, which it needs",
            where="the code for a GPU",
            remedy="pip install triton numpy (on Linux; a CUDA build of torch brings Triton along)",
        )
    refuse_unknown(options)
    backend = _OnGpu(arch, **options)
    captured(optimizer, backend)
    report = backend.report()
    if isinstance(backend.step, Reason):
        return GpuCode(arch, (), report, str(backend.step))
    elements = sum(tensor.numel for tensor in report.tensors if tensor.role is Role.PARAMETER)
    kernels = [_of_group(group, elements, arch) for group in backend.step.on_devices]
    return GpuCode(arch, tuple(kernels), report)


class _OnGpu(CaptureOnly):
    """A backend that lowers steps for a card that isn't there, and runs the rewritten graph.

    Attributes:
        step: the last one that a GPU would take, or why it is not made of launches.
    """

    step: StepInParts | Reason

    def __init__(self, arch: str, **options: Any) -> None:
        super().__init__(**options)
        self.arch = arch
        self.step = Reason("there is nothing to compensate in it")

    def lower(
        self, program: StepProgram, example_inputs: Sequence[Any], inductor_options: dict[str, Any]
    ) -> Lowered | Reason:
        why = why_not_compiled(program.gm.graph, is_recorded=program.is_recorded)
        moved = replace(program, gm=_on_cuda(program.gm))
        with imaginary_cuda.imaginary_cuda(self.arch), without_triton():
            self.step = why or step_in_parts(moved)
        return super().lower(program, example_inputs, inductor_options)


def _on_cuda(gm: GraphModule) -> GraphModule:
    """A copy of a graph on the imaginary card, but for learning rates, which are Python's."""
    inputs = [(node.name, tensor_value(node)) for node in placeholders(gm.graph)]
    is_number = {name: value is not None and value.dtype is torch.float64 for name, value in inputs}
    return imaginary_cuda.to_cuda(gm, keep_on_cpu=[name for name in is_number if is_number[name]])


def _of_group(group: Launch | Sequence[Any], elements: int, arch: str) -> GpuKernel:
    """A launch for all tensors, or the calls for each."""
    if not isinstance(group, Launch):
        kernel: Kernel = group[0].kernel
        reasons = "; ".join(str(reason) for _, reason in kernel.reasons)
        return GpuKernel("", "", len(group), len(group), 0.0, (), 0, 0, 0, reasons)
    name, source = group.kernel.name, group.kernel.source[True]
    code = imaginary_cuda.machine_code(name, source, arch)
    return GpuKernel(
        name,
        source,
        tensors=len(group.lengths),
        launches=1,
        bytes_per_parameter=sum(group.accesses) * sum(group.lengths) / elements,
        accesses=tuple(unit / group.elements_of_unit for unit in group.accesses),
        registers=code.registers,
        spilled=code.spilled,
        wide_accesses=code.accesses.get(WIDEST, 0),
    )
