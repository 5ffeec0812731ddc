"""What a whole step on a GPU costs its host: compilation, launches, and what Python does at each step.

Models have their real numbers of tensors, in a sixteenth of their sizes: a kernel over a table is the same
for all lengths. The step is captured on the CPU and lowered as for a card; all tensors are on the CPU, and in
the place of Inductor's launcher is a stub. ``tests/gpu_kernels.py`` writes the table.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from tabulate import tabulate
from torch._inductor.utils import fresh_cache
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.sizes import LLAMA_LAYER, Shapes, gpt
from collage_fx.lowering.kernels import forget_kernels
from collage_tools.gpu_code.imaginary_cuda import machine_code
from tests.support.launched import on_the_cpu, step_on_cuda
from tests.support.optimizers import CompiledOptimizer, gradients
from tests.support.slow import processor_seconds
from tests.support.substitutes import launches_noted
from tests.support.twin import TwinBackend

#: The models' parameters.
MODELS: dict[str, Shapes] = {
    "GPT-2 124M": gpt(12, 768),
    "Llama-3-8B": [(128256, 4096), *(list(LLAMA_LAYER) * 32), (4096,), (128256, 4096)],
}

SMALLER = 16


@dataclass(frozen=True)
class Cost:
    """What a step costs its host.

    Attributes:
        tensors: parameters.
        launches: of kernels, by a step.
        seconds: of the processor, for the first step with nothing in Inductor's and Triton's caches: capture,
            passes, Inductor, and Triton for sm_90.
        operations: of torch, by a step whose gradients are where they were.
        moved: the same, if they are somewhere else.
        allocations: of the former, those that make tensors with memory of their own.
        calls: of Python functions, by a step whose gradients are where they were.
    """

    tensors: int
    launches: int
    seconds: float
    operations: int
    moved: int
    allocations: int
    calls: int


class _Operations(TorchDispatchMode):
    """Counts operations, and those among them whose results have memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.allocations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        result = func(*args, **(kwargs or {}))
        is_new = not any(returned.alias_info for returned in func._schema.returns)
        self.allocations += is_new and isinstance(result, torch.Tensor)
        return result


@contextmanager
def _counting_calls() -> Iterator[Counter[str]]:
    """Calls of Python functions, by the file that they are in."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def cost(shapes: Shapes, *, foreach: bool) -> Cost:
    """The cost of AdamW's step, ``plus``."""
    smaller = [tuple(max(1, size // SMALLER) for size in shape) for shape in shapes]

    class Backend(TwinBackend):
        def lower(self, program: Any, example_inputs: Any, inductor_options: Any) -> Any:
            self.on_cuda = step_on_cuda(program)
            for kernel in self.on_cuda.kernels:
                machine_code(kernel.function.name, kernel.function.source[True])
            self.engine = on_the_cpu(self.on_cuda)
            return super().lower(program, example_inputs, inductor_options)

    first, moved = gradients(smaller, 2)
    with fresh_cache(), launches_noted() as launched:
        forget_kernels()
        rig = CompiledOptimizer(
            smaller,
            lambda params: torch.optim.AdamW(params, foreach=foreach),
            Backend(compiles=False),
        )
        before = processor_seconds()
        rig.step(first)
        seconds = processor_seconds() - before
        rig.compiled()
        launched.clear()
        with _counting_calls() as calls:
            rig.compiled()
        of_a_step = len(launched)
        with _Operations() as operations:  # which makes the tensors look like others, to what checks them
            rig.compiled()
        rig.compiled()
        for parameter, grad in zip(rig.parameters, moved, strict=True):
            parameter.grad = grad.to(parameter.dtype)
        with _Operations() as when_moved:
            rig.compiled()
    return Cost(
        len(shapes),
        of_a_step,
        seconds,
        operations.found.total(),
        when_moved.found.total(),
        operations.allocations,
        calls.total(),
    )


HEADERS = (
    "model",
    "tensors",
    "foreach",
    "launches",
    "processor s, cold",
    "operations",
    "if gradients have moved",
    "allocations",
    "Python calls",
)


def table(costs: Sequence[tuple[str, bool, Cost]]) -> str:
    rows = [
        (
            name,
            c.tensors,
            foreach,
            c.launches,
            f"{c.seconds:.1f}",
            c.operations,
            c.moved,
            c.allocations,
            c.calls,
        )
        for name, foreach, c in costs
    ]
    return tabulate(rows, headers=HEADERS, tablefmt="github", disable_numparse=True)


def measured() -> Iterator[tuple[str, bool, Cost]]:
    cost([(64, 64)], foreach=False)  # imports, and the C++ that writes tables, once a machine
    for name, shapes in MODELS.items():
        for foreach in (False, True):
            yield name, foreach, cost(shapes, foreach=foreach)
