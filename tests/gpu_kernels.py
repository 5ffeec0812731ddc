"""``python -m tests.gpu_kernels``: compile steps for GPUs, without one, and write ``docs/gpu.md``.

A step is captured on the CPU and its rewritten graph moved to "cuda"; the Triton kernels printed for it, over
tables, are compiled for three generations of cards. What is counted is in the kernels themselves: in their
source what is loaded and stored for each element, in their machine code registers and what has spilled.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from collage_fx import gpu_code
from collage_fx.graph import Role
from collage_tools.gpu_code import GpuCode, GpuKernel
from collage_tools.gpu_code.imaginary_cuda import ARCHITECTURES, MachineCode, machine_code
from collage_tools.gpu_code.sass import CARDS
from tests import gpu_steps
from tests.support.gpu_host import CALLS
from tests.support.training import Descent, Lion, parameters

PATH = Path(__file__).resolve().parent.parent / "docs" / "gpu.md"

#: Numbers of parameters of the models whose times are predicted.
SIZES = {"8 B": 8e9}

#: Four of a shape that can be packed.
SHAPES = ((64, 128),) * 4


class Adan(Descent):
    """Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm", 2022, without its restarts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                for name in ("m", "v", "n", "last"):
                    state[name] = torch.zeros_like(p)
            m, v, n, last = (state[name] for name in ("m", "v", "n", "last"))
            change = p.grad - last
            last.copy_(p.grad)
            m.lerp_(p.grad, 0.02)
            v.lerp_(change, 0.08)
            both = p.grad + 0.92 * change
            n.mul_(0.99).addcmul_(both, both, value=0.01)
            p.addcdiv_(m + 0.92 * v, n.sqrt().add_(1e-8), value=-self.param_groups[0]["lr"])


def _adamw(**keywords: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.AdamW(params, **keywords)


@dataclass(frozen=True)
class Row:
    """A step that is compiled.

    Attributes:
        optimizer: its name in the table.
        make: parameters -> optimizer.
        options: of the backend.
    """

    optimizer: str
    make: Callable[[Any], torch.optim.Optimizer]
    options: Mapping[str, Any]

    @property
    def words(self) -> str:
        named = {name: str(each) for name, each in self.options.items()}
        return ", ".join(named.values()) or "plus"


def _rows() -> Iterator[Row]:
    formats: list[dict[str, Any]] = [
        {"strategy": "light"},
        {},
        {"strategy": "full"},
        *({"strategy": "plus", "error_format": name} for name in ("mcf", "fp32")),
        {"strategy": "light", "error_format": "byte"},
        {"strategy": "light", "error_format": "exact", "state": "block16"},
        {"strategy": "light", "error_format": "exact", "state": "block8"},
        {"strategy": "light", "error_format": "byte", "state": "block8"},
        {"strategy": "light", "error_format": "byte", "state": "block8", "weights": "int16x32"},
        *({"strategy": name, "arithmetic": "native"} for name in ("light", "full")),
    ]
    for options in formats:
        yield Row("AdamW", _adamw(), options)
    yield Row("AdamW, foreach", _adamw(foreach=True), {})
    yield Row("AdamW, amsgrad", _adamw(amsgrad=True), {})
    yield Row("SGD, momentum", lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), {})
    yield Row("Lion", Lion, {})
    yield Row("Adan", Adan, {})
    yield Row("RMSprop, centred", lambda params: torch.optim.RMSprop(params, centered=True), {})
    yield Row("Adagrad", torch.optim.Adagrad, {})


#: The rows of the table.
ROWS = tuple(_rows())


@dataclass(frozen=True)
class Measured:
    """What was found out of a step.

    Attributes:
        launches: kernels that are launched, each once for all tensors.
        calls: kernels that are launched for each tensor.
        moved: bytes for each parameter that the kernels load and store, by their source.
        held: the same by the report: all that is kept is read and written, and the gradient is read.
        code: machine code of the kernel of the elements, by architecture.
        wide: its accesses of 16 bytes, and those that 8 elements of each tensor take.
        kernel: the kernel of the elements, with its instructions and times on sm_90.
        fast: its instructions if roots and quotients are approximate.
    """

    launches: int
    calls: int
    moved: float
    held: float
    code: Mapping[str, MachineCode]
    wide: tuple[int, int]
    kernel: GpuKernel
    fast: float


def compiled(row: Row) -> tuple[GpuCode, GpuKernel]:
    """Compile a row's step; return its code, and the kernel of the elements."""
    code = gpu_code(row.make(parameters(shapes=SHAPES)), **row.options)
    (elements,) = (kernel for kernel in code.kernels if kernel.bytes_per_parameter)
    return code, elements


def measured(row: Row, architectures: Iterable[str] = ARCHITECTURES) -> Measured:
    """Compile a row's step."""
    code, elements = compiled(row)
    with torch._inductor.config.patch(use_fast_math=True):
        _, fast = compiled(row)
    found = {arch: machine_code(elements.name, elements.source, arch) for arch in architectures}
    rows = code.report.tensors
    numel = sum(each.numel for each in rows if each.role is Role.PARAMETER)
    counts = sum(each.error_bytes for each in rows if each.error_format == "dither")
    held = sum((each.bytes + each.error_bytes) * (each.role is not Role.GRADIENT) for each in rows) - counts
    return Measured(
        sum(bool(kernel.name) for kernel in code.kernels),
        sum(not kernel.name for kernel in code.kernels),
        elements.bytes_per_parameter,
        2 * held / numel + 2,
        found,
        (
            min(each.accesses.get(16, 0) for each in found.values()),
            sum(math.ceil(8 * each / 16) for each in elements.accesses),
        ),
        elements,
        fast.instructions["issue"],
    )


HEADERS = (
    "optimizer",
    "options",
    "bytes moved",
    "registers",
    "16-byte accesses",
)


def table(rows: Sequence[tuple[Row, Measured]]) -> str:
    cells = []
    for row, found in rows:
        registers = " / ".join(str(code.registers) for code in found.code.values())
        wide = f"{found.wide[0]} of {found.wide[1]}"
        cells.append((row.optimizer, row.words, f"{found.moved:.4g}", registers, wide))
    return tabulate(cells, headers=HEADERS, tablefmt="github", disable_numparse=True)


PREDICTED = (
    "optimizer",
    "options",
    "instructions (fast)",
    "issue ps",
    "memory ps",
    *(f"{name} ms" for name in SIZES),
)


def predicted(rows: Sequence[tuple[Row, Measured]]) -> str:
    cells = [
        (
            row.optimizer,
            row.words,
            f"{found.kernel.instructions['issue']:.0f} ({found.fast:.0f})",
            f"{found.kernel.issue:.2f}",
            f"{found.kernel.memory:.2f}",
            *(f"{found.kernel.milliseconds(number):.3g}" for number in SIZES.values()),
        )
        for row, found in rows
    ]
    return tabulate(cells, headers=PREDICTED, tablefmt="github", disable_numparse=True)


#: Results of ``./dev bench`` on an H200, and the clock at which it ran.
ON_H200 = PATH.parent.parent / "benchmarks" / "results" / "cuda-nvidia-h200-torch-2.11.0.json"
H200_CLOCK = 1.98e9
#: The rows of the tables above under the names that the benchmark has for them.
IN_BENCHMARK = {
    "light": "light",
    "plus": "plus",
    "light, byte": "light, byte",
    "light, block16": "light, exact, block16",
    "light, block8": "light, exact, block8",
    "light, byte, block8": "light, byte, block8",
}


def on_h200(results: Mapping[str, Any], rows: Sequence[tuple[Row, Measured]]) -> str:
    """Return the table of measured times; rows of this package have the prediction beside them."""
    kernels = {row.words: found.kernel for row, found in rows if row.optimizer == "AdamW"}
    cells = []
    for row in sorted(results["rows"], key=lambda row: (row["peer"] not in IN_BENCHMARK, row["ms"])):
        expected = ""
        if row["peer"] in IN_BENCHMARK:
            issue = kernels[IN_BENCHMARK[row["peer"]]].issue * CARDS["sm_90"].clock / H200_CLOCK
            of_copy = 1e9 * row["copy_ms"] / results["parameters"]["a"]
            expected = f"{max(1, issue / of_copy):.2f}"
        figures = (f"{row['bytes']:.4g}", f"{row['ms']:.3f}", f"{row['over_copy']:.2f}", expected)
        cells.append((row["peer"], *figures, row["launches"], f"{row['host_ms']:.2f}"))
    headers = ("AdamW", "bytes moved", "ms", "× its copy", "predicted", "launches", "host ms")
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)


DOCUMENT = """# On a GPU

**What has run on a card?** The tests and kernels, once, on an H200 with torch 2.11: 71 of 80 tests passed
and one failed ([details](#the-tests-on-that-card)). Since then kernels have run only on a fake CUDA driver,
every night ([below](#run-by-a-fake-driver)).

**How fast is it?** AdamW's step of GPT-2 took 0.56 ms (`light`) and 0.68 ms (`plus`); torch's fused AdamW
took 0.68 ms in bf16 and 1.02 ms in fp32. A step has two launches, whatever the number of tensors.

**What would my card run?** `collage-fx explain --optimizer AdamW --code triton --arch sm_90` shows the
kernels of any optimizer, on any Linux machine; `collage_fx.gpu_code(optimizer)` is the same in a program.

## Measured on an H200

GPT-2 124M: 148 tensors, {parameters:.1f} million parameters. {about}.

{on_h200}

- **× its copy**: the time over that of a copy of as many bytes, which moved {copies:.2f} TB/s.
- **predicted**: the same from the kernels' instructions, at {boosted:.2f} GHz ([below](#predicted-times)).

If memory bounds a step, the prediction is right within 15 %. If instructions do (`block8`),
the card issued about three quarters of the instructions that it can. The kernels have changed since this run.
`python -m benchmarks.gpu FOLDER` measures anew; [benchmarks](../benchmarks/README.md) has all columns.

A step of LAMB took 1.08 ms and 5 launches; without this package 14.3 ms and 2,220 launches. The host needed
0.51 ms for a step of AdamW (torch's fused AdamW: 0.53), 0.65 and 0.57 if all gradients had moved.

## The tests on that card

Of 80 tests for a GPU, 71 passed and one failed: a training with Muon. Its message was cut off, and it has
not run since. Eight others need two GPUs, did not end, or were left out.

Errors against float64 are the CPU's to three digits or more (AdamW, LAMB, Adafactor, Muon). Of the elements
of hi, 5 of 48,549 differ from the CPU's step with AdamW, none with LAMB and Adafactor, 159 with Muon.

## Kernels

A step is launched once for the counters of all tensors and once for their elements; centred RMSprop has a
third launch. A program of a kernel reads from a table of addresses which tensor it works on. Read from the
kernels, without a GPU (torch {torch}, Triton {triton}):

{table}

- **bytes moved** for each parameter, by the kernel's source: what is held, read once and written once, and
  the gradient.
- **registers** of a thread for sm_80, sm_90, sm_100 and gfx942 (MI300). Only `full, native` spills.
- **16-byte accesses** of a full block, of those that 8 elements of a thread take. Bytes and scales are
  accessed in smaller pieces.

No product and sum are fused (fma) unless the product is exact. So bits do not depend on where an element
lies: unaligned gradients and other shards have the same bits.

Matrix products and sums over rows (Muon, Shampoo, LAMB, Adafactor) are called once for each shape, with a
stack of the tensors; values between kernels take 2 GiB at most. LAMB has 5 launches, Adafactor 28 for four
shapes, Muon 107 for the four shapes of GPT-2.

## Predicted times

For an H100 (SXM: {sms} multiprocessors at {clock:.4g} GHz, {bandwidth:.2g} TB/s, which is 90 % of its
memory's bandwidth):

{predicted}

- **instructions** of a full block, for each element, in the machine code for sm_90. **fast**: with
  `torch._inductor.config.use_fast_math = True`: roots are within an ulp, quotients within two.
- **issue**: picoseconds for each element. Each of four schedulers issues an instruction for 32 threads each
  clock; integers and comparisons have half of this rate.
- **memory**: bytes moved / bandwidth.
- **8 B ms**: the longer of the two, times 8 billion parameters. Launches and the table's upload, some
  10 µs, come on top.

## What a step costs its host

AdamW, `plus`, the models' numbers of tensors in a sixteenth of their sizes. All of `step()` but Dynamo's
guards, with a stub in the place of the driver:

{costs}

- **processor s, cold**: the first step with empty caches, without imports.
- **operations** of torch in a later step, and **allocations** among them; with gradients that have moved,
  the table is uploaded anew.
- **Python calls** of a later step. None of these depends on the number of tensors.

## Run by a fake driver

`./dev test --fake-gpu` runs the GPU tests on a machine without one. Only the CUDA driver is a fake: it
executes kernels from their PTX on the CPU, checks each access, and runs queued work as late as CUDA allows.
Compiled steps have the bits of the rewritten graph run eagerly; captured CUDA graphs those of usual steps;
resumed trainings those that go on. A step of AdamW has no copy and no wait; if gradients have moved, it
uploads the table, and from the fifth such step on it waits for the upload four steps before. The step makes
{calls} calls of Python functions, or {moved} if gradients have moved.

Only a card shows times, and the last bits of `div.full` and of approximate functions.

Written by `python -m tests.gpu_kernels`; not to be edited."""


def document(rows: Sequence[tuple[Row, Measured]], costs: Sequence[tuple[str, bool, gpu_steps.Cost]]) -> str:
    import triton

    results = json.loads(ON_H200.read_text(encoding="utf-8"))
    copies = [1e-9 * row["bytes"] * results["parameters"]["a"] / row["copy_ms"] for row in results["rows"]]
    return DOCUMENT.format(
        about=results["about"],
        parameters=results["parameters"]["a"] / 1e6,
        copies=statistics.median(copies),
        boosted=H200_CLOCK * 1e-9,
        on_h200=on_h200(results, rows),
        torch=torch.__version__.partition("+")[0],
        triton=triton.__version__,
        table=table(rows),
        predicted=predicted(rows),
        sms=CARDS["sm_90"].multiprocessors,
        clock=CARDS["sm_90"].clock * 1e-9,
        bandwidth=CARDS["sm_90"].bandwidth * 1e-12,
        costs=gpu_steps.table(costs),
        calls=CALLS["2.13"][0],
        moved=CALLS["2.13"][1],
    )


def main() -> int:
    found = []
    for row in ROWS:
        found.append((row, measured(row)))
        print(*(of(found[-1:]).splitlines()[-1] for of in (table, predicted)), sep="\n", flush=True)
    PATH.write_text(document(found, list(gpu_steps.measured())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
