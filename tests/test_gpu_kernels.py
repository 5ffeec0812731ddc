"""What a GPU is given is what ``docs/gpu.md`` says, and what a step of that many bytes needs."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from collage_fx.torch_compat.version import version
from tests import gpu_kernels, gpu_steps
from tests.support import triton_offline as offline

pytestmark = pytest.mark.skipif(
    not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy: pip install triton numpy"
)


def fused(ptx: str) -> Counter[str]:
    """Count the fused multiply-adds of a thread, by type; Blackwell has one for two elements."""
    counted = Counter[str]()
    for kind, two in re.findall(r"\bfma\.rn(?:\.ftz)?\.(f\d\d)(x2)?", ptx):
        counted[kind] += 2 if two else 1
    return counted


def written(source: str) -> Counter[str]:
    """Count those that a thread has by the source: for its 8 elements of a full block, and one of a piece."""
    functions = re.findall(r"(?m)^def (\w+)\(.*\):\n((?:    .*\n)+)", source)
    body = dict(functions)["_body"]
    called = sum(text.count("tl.fma(") * body.count(f"{name}(") for name, text in functions)
    return Counter({"f32": 9 * (called + body.count("tl.fma("))}) - Counter()


@pytest.mark.rotating
@pytest.mark.parametrize("row", gpu_kernels.ROWS, ids=lambda row: f"{row.optimizer}, {row.words}")
def test_a_kernel_moves_what_is_held_once(row: gpu_kernels.Row) -> None:
    found = gpu_kernels.measured(row)
    print(found)
    # RMSprop counts steps that nothing reads: a launch of its own.
    assert found.launches <= 2 + row.optimizer.startswith("RMSprop")
    assert found.calls == 0
    assert found.moved == pytest.approx(found.held, abs=0.01)  # but for scales of blocks, a byte for each 32
    # A thousand instructions of native arithmetic wait for no four registers; torch 2.11 uses fewer.
    is_short = version() < (2, 12) and row.optimizer.startswith("RMSprop")
    spilled = 16 if "native" in row.words else 8 * is_short
    assert all(code.spilled <= spilled for code in found.code.values())
    if "native" not in row.options.values():  # whose products in two parts are made of fma
        for code in found.code.values():
            if "ptx" in code.stages:
                assert fused(code.stages["ptx"]) == written(found.kernel.source)
    if "state" not in row.options and row.options.get("error_format") != "byte":
        assert found.wide[0] == found.wide[1]
    if "block8" in row.words:  # a root for the integer of each moment is approximate, no other
        assert found.kernel.source.count("tl.sqrt(") == 2
    told = gpu_kernels.PATH.read_text(encoding="utf-8")
    if torch.__version__.partition("+")[0] in told:  # registers and instructions are those of a version
        if "native" not in row.options.values():
            most = 1.3 if "weights" in row.options else 1.2 if "block8" in row.words else 0.75
            assert found.kernel.ratio < most, "it would be bound by instructions, not by memory"
        for of in (gpu_kernels.table, gpu_kernels.predicted):
            line = of([(row, found)]).splitlines()[-1]
            assert " ".join(line.split()) in " ".join(told.split())


def test_what_a_step_costs_its_host_does_not_depend_on_the_number_of_tensors() -> None:
    small, large = (gpu_steps.cost(shapes, foreach=True) for shapes in gpu_steps.MODELS.values())
    print(small, large)
    assert (small.tensors, large.tensors) == (148, 291)
    assert small.launches == large.launches == 2
    for what in ("operations", "moved", "allocations", "calls"):
        assert getattr(small, what) == getattr(large, what), what
    told = gpu_kernels.PATH.read_text(encoding="utf-8")
    if torch.__version__.partition("+")[0] in told:
        counted = (large.launches, large.operations, large.moved, large.allocations)
        lines = [line.split("|") for line in told.splitlines() if line.startswith("| Llama-3-8B")]
        assert [tuple(int(line[i]) for i in (4, 6, 7, 8)) for line in lines] == [counted, counted]
