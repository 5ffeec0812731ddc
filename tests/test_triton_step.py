"""The Triton code of the AdamW step: generated, read, compiled to PTX and interpreted, without a GPU.

What only the card can tell (contraction by ptxas, approximate division and pow) is in ``tests/test_gpu.py``.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support import triton_offline as offline
from tests.support.agreement import assert_half_ulp, assert_same, trajectory
from tests.support.optimizers import Case, CompiledOptimizer, Tensors, gradients
from tests.support.twin import TwinBackend, without_pinning

pytestmark = pytest.mark.skipif(
    not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy: pip install triton numpy"
)

STEPS = 3
#: Multiples of no block size; the first fits in one, the second takes two of the interpreter's.
SHAPES = ((33, 17), (9001,))

#: Added to the bits of a float32 to round it: half an ulp less one, for 16 and 13 discarded bits; and the mask then.
HALF = {torch.bfloat16: 0x7FFF, torch.float16: 0xFFF}
MASK = {torch.bfloat16: -0x10000, torch.float16: -0x2000}

CASES = [
    Case("light", "wide", "mcf", torch.bfloat16),
    Case("plus", "wide", "mcf", torch.bfloat16),
    Case("plus", "wide", "mcf", torch.float16),
    Case("full", "wide", "fp32", torch.bfloat16),
    Case("light", "native", "mcf", torch.bfloat16),
    Case("full", "native", "mcf", torch.float16),
]


@dataclass
class Step:
    """A rewritten AdamW step as Triton code, and an optimizer to run it on."""

    rig: CompiledOptimizer
    start: Tensors
    source: str
    roundings: int

    def interpreted(self, arguments: list[Any]) -> Any:
        return offline.run_in_interpreter(self.source, arguments)


def step_of(case: Case, capturable: bool = True) -> Step:
    """Capture the step on the CPU and generate its Triton code; not ``capturable``: step counters stay on the host."""
    shapes = SHAPES if case.arithmetic == "wide" else SHAPES[:1]
    backend = TwinBackend(compiles=False, **case.options())
    backend.engine = "eager"

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, capturable=capturable)

    rig = CompiledOptimizer(shapes, make, backend, dtype=case.dtype)
    start = rig.start()
    (graph,) = backend.graphs
    inputs = graph.graph.find_nodes(op="placeholder")
    counters = [node.name for node in inputs if node.meta["val"].dim() == 0]
    assert len(counters) == len(shapes)
    source = offline.triton_source(offline.to_cuda(graph, keep_on_cpu=() if capturable else counters))
    roundings = sum("round_to_storage" in str(node.target) for node in graph.graph.nodes)
    return Step(rig, start, source, roundings)


@functools.cache
def cached_step(case: Case) -> Step:
    return step_of(case)


def kernels_of(step: Step) -> str:
    """The statements of all kernels."""
    return "\n".join(text[text.index("@triton.jit") :] for text in offline.kernels(step.source).values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_bits_are_eager_bits(case: Case) -> None:
    """Equal: the interpreter divides and contracts as IEEE 754 says, and takes roots and powers as the twin does."""
    step = cached_step(case)
    grads = list(gradients([tuple(p.shape) for p in step.rig.parameters], STEPS))
    interpreted = trajectory(step.rig, step.start, grads, engine=step.interpreted)
    assert_same(interpreted, trajectory(step.rig, step.start, grads, engine="eager"))
    for tensors in interpreted:
        assert_half_ulp(tensors)
    last = interpreted[-1]
    assert all(bool((last[name] != 0).any()) for name in last if name.endswith(".lo"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_source_has_every_rounding(case: Case) -> None:
    step = cached_step(case)
    text = kernels_of(step)
    print(case, step.roundings, text.count(str(HALF[case.dtype])), text.count(str(MASK[case.dtype])), text.count("div_rn"), len(offline.kernels(step.source)))


def test_ptx() -> None:
    for case in CASES:
        step = cached_step(case)
        for name, ptx in offline.compile_to_ptx(step.source).items():
            print(case, name, ptx.count(str(HALF[case.dtype])), len(re.findall(r"and\.b32.*" + str(MASK[case.dtype]), ptx)), ptx.count("fma.rn"), ptx.count("div."), re.findall("div\.\S+",ptx)[:1],set(re.findall("cvt\S+",ptx)))
            open(f"/tmp/p/ptx_{case}_{name[-2:]}.ptx","w").write(ptx)
