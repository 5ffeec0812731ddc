"""Door of ``collage_tools.gpu_code``: the launches that a step would need on a device that is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule
from torch.optim import Optimizer
from typing_extensions import Unpack

from collage_fx.graph import Reason, StepProgram
from collage_fx.lowering import Lowered, step_in_parts, why_not_compiled
from collage_fx.options import GivenOptions
from collage_fx.report import CollageReport
from collage_fx.runtime import Kernel, Launch, StepInParts
from collage_fx.tools.explain import CaptureOnly, captured
from collage_fx.torch_compat import without_triton

Device = Callable[[], AbstractContextManager[None]]
Move = Callable[[GraphModule], GraphModule]


@dataclass(frozen=True)
class DeviceLaunch:
    """Launch of a kernel for all its tensors, or the calls of a kernel for each of them.

    Attributes:
        name: name of the kernel; empty if it is called for each tensor.
        source: source of a Python module with the kernel, for addresses that are multiples of 16 bytes.
        reason: why it is called for each tensor; empty if it is not.
        units: units of length of all the tensors.
        accesses: bytes per unit of each load and store.
        width: elements per unit.
        threads: threads per unit.
        tiles: tiles of a program, one after the other.
    """

    name: str
    source: str
    tensors: int
    launches: int
    reason: str = ""
    units: int = 0
    accesses: tuple[int, ...] = ()
    width: int = 1
    threads: float = 0.0
    tiles: int = 1


def launches_elsewhere(
    optimizer: Optimizer, device: Device, move: Move, **options: Unpack[GivenOptions]
) -> tuple[CollageReport, tuple[DeviceLaunch, ...] | str]:
    """Capture an optimizer's step as ``explain`` does, and lower it for a device that is not there.

    Return the report, and the launches in their order, or why there are none. The parameters are on the CPU;
    torch has the device in the context manager that ``device`` makes; ``move`` copies a graph onto it.
    """
    backend = _Elsewhere(device, move, **options)
    captured(optimizer, backend)
    if isinstance(backend.step, Reason):
        return backend.report(), str(backend.step)
    return backend.report(), tuple(map(_launch, backend.step.on_devices))


class _Elsewhere(CaptureOnly):
    """Backend that lowers steps for a device that is not there, and runs the rewritten graph."""

    def __init__(self, device: Device, move: Move, **options: Unpack[GivenOptions]) -> None:
        super().__init__(**options)
        self._device, self._move = device, move
        #: Last step in parts for the device, or the reason why there is none.
        self.step: StepInParts | Reason = Reason("the step has nothing to compensate")

    def lower(
        self, program: StepProgram, example_inputs: Sequence[Any], inductor_options: dict[str, Any]
    ) -> Lowered | Reason:
        why = why_not_compiled(program.gm.graph, program)
        moved = replace(program, gm=self._move(program.gm))
        with self._device(), without_triton():
            self.step = why or step_in_parts(moved)
        return super().lower(program, example_inputs, inductor_options)


def _launch(group: Launch | Sequence[Any]) -> DeviceLaunch:
    if not isinstance(group, Launch):
        kernel: Kernel = group[0].kernel
        reasons = "; ".join(str(reason) for _, reason in kernel.reasons)
        return DeviceLaunch("", "", len(group), sum(call.kernel.launches for call in group), reasons)
    function = group.function
    kinds = {a: c.kind for a, c in zip(function.arguments, group.kernel.columns, strict=True)}
    return DeviceLaunch(
        function.name,
        function.source[True],
        tensors=len(group.lengths),
        launches=1,
        units=sum(group.lengths),
        accesses=tuple(kinds[argument] for argument in function.accesses if kinds[argument] > 0),
        width=group.kernel.width,
        threads=function.threads / function.size,
        tiles=function.tiles,
    )
