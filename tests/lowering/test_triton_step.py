"""The Triton code of the AdamW step: generated, read, compiled to PTX and interpreted, without a GPU.

What only the card can tell (contraction by ptxas, approximate division and pow) is in ``tests/test_gpu.py``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from collage_fx.lowering.lower import inductor_settings
from collage_tools.gpu_code.imaginary_cuda import imported_kernel
from tests.support import triton_offline as offline
from tests.support.agreement import assert_half_ulp, assert_same, trajectory
from tests.support.optimizers import Case, CompiledOptimizer, Tensors, gradients
from tests.support.substitutes import without_pinning
from tests.support.twin import TwinBackend

pytestmark = pytest.mark.skipif(
    not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy: pip install triton numpy"
)

STEPS = 3
#: Multiples of no block size; the first fits in one, the second takes two of the interpreter's.
SHAPES = ((33, 17), (9001,))

#: What a rounding does to a float32's bits, as (operator, PTX instruction, constant): clear the lower 16, for
#: bfloat16; for float16 make a power of two 13 binades above the number, to be added and taken away again.
FINGERPRINT = {
    torch.bfloat16: ("&", "and.b32", -(1 << 16)),
    torch.float16: ("+", "add.s32", 13 << 23),
}

CASES = [
    Case("plus", "wide", "exact", torch.bfloat16),
    Case("plus", "wide", "exact", torch.float16),
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


def step_of(case: Case, capturable: bool = True, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Step:
    """Capture the step on the CPU, generate its Triton code; ``capturable``, or with counters on the host."""
    shapes = shapes if case.arithmetic == "wide" else shapes[:1]
    backend = TwinBackend(compiles=False, **case.options())
    backend.engine = "eager"

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, capturable=capturable)

    rig = CompiledOptimizer(shapes, make, backend, dtype=case.dtype)
    start = rig.start()
    (graph,) = backend.graphs
    inputs = graph.graph.find_nodes(op="placeholder")
    # Of the optimizer's; dither's counts, and the indices of first elements, are integers beside the tensors.
    counters = [n.name for n in inputs if not n.meta["val"].dim() and n.meta["val"].is_floating_point()]
    assert len(counters) == len(shapes)
    on_cuda = offline.to_cuda(graph, keep_on_cpu=() if capturable else counters)
    with torch._inductor.config.patch(inductor_settings(case.arithmetic, [torch.device("cuda")])):
        source = offline.triton_source(on_cuda)
    # Dither clears the lower bits of a number for bfloat16 too; for float16 it adds no power of two.
    marked = ("round_to_storage", "upper_half", *(["dithered"] if case.dtype == torch.bfloat16 else []))
    targets = [str(node.target) for node in graph.graph.nodes]
    # The sum that dither rounds in float32 has no rounding to the storage format.
    roundings = sum(any(name in each for name in marked) and "dithered_sum" not in each for each in targets)
    return Step(rig, start, source, roundings)


@functools.cache
def cached_step(case: Case) -> Step:
    return step_of(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_bits_are_eager_bits(case: Case) -> None:
    """Equal: the interpreter computes as IEEE 754 says, and takes roots and powers as the twin does."""
    step = cached_step(case)
    grads = list(gradients([tuple(p.shape) for p in step.rig.parameters], STEPS))
    interpreted = trajectory(step.rig, step.start, grads, engine=step.interpreted)
    assert_same(interpreted, trajectory(step.rig, step.start, grads, engine="eager"))
    for tensors in interpreted:
        assert_half_ulp(tensors)
    last = interpreted[-1]
    assert all(bool((last[name] != 0).any()) for name in last if name.endswith((".lo", ".rest")))


def test_counters_on_the_host() -> None:
    """State made before the step was compiled: bias corrections from 0-d tensors on the CPU."""
    case = Case("plus", "wide", "mcf", torch.bfloat16)
    step = step_of(case, capturable=False)
    assert "cpp_pybinding" in step.source  # the counters' own kernel
    grads = list(gradients(SHAPES, STEPS))
    interpreted = trajectory(step.rig, step.start, grads, engine=step.interpreted)
    assert_same(interpreted, trajectory(step.rig, step.start, grads, engine="eager"))


def roundings_in_source(kernel: str, dtype: torch.dtype) -> int:
    operator, _, constant = FINGERPRINT[dtype]
    names = re.findall(rf"(tmp\d+) = tl\.full\(\[1\], {constant}, tl\.int32\)", kernel)
    return sum(len(re.findall(rf"{re.escape(operator)} {name}$", kernel, re.MULTILINE)) for name in names)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rounding_is_in_the_source(case: Case) -> None:
    step = cached_step(case)
    kernels = offline.kernels(step.source).values()
    assert step.roundings > 0
    assert sum(roundings_in_source(kernel, case.dtype) for kernel in kernels) == step.roundings


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rounding_is_in_the_ptx(case: Case) -> None:
    """As often as in the source, for each of the elements that a thread works on."""
    step = cached_step(case)
    _, instruction, constant = FINGERPRINT[case.dtype]
    kernels = offline.kernels(step.source)
    for name, ptx in offline.compile_to_ptx(step.source).items():
        results = re.findall(rf"{re.escape(instruction)}\s+(%\w+), %\w+, {constant};", ptx)
        wanted = roundings_in_source(kernels[name], case.dtype)
        assert len(results) % max(wanted, 1) == 0
        assert bool(results) == bool(wanted)
        if case.dtype == torch.float16:
            for power in results:  # not contracted with whatever made the number, nor folded away
                assert re.search(rf"add\.f32\s+%\w+, %\w+, {power};", ptx)
                assert re.search(rf"sub\.f32\s+%\w+, %\w+, {power};", ptx)


def test_native_division_is_rounded_correctly_on_the_card() -> None:
    native, wide = (
        "".join(offline.compile_to_ptx(cached_step(case).source).values())
        for case in (
            Case("light", "native", "mcf", torch.bfloat16),
            Case("light", "wide", "mcf", torch.bfloat16),
        )
    )
    assert "div.rn.f32" in native
    assert "div.full.f32" not in native
    assert "div.full.f32" in wide  # within 2 ulps, which tests/test_gpu.py allows for


#: As many as are combined, and twice, of two sizes that both fit into vectors of 16 bytes.
MANY = ((1024, 256), (256, 256)) * 8


@functools.cache
def many_tensors(error_format: str) -> Step:
    return step_of(Case("plus", "wide", error_format, torch.bfloat16), shapes=MANY)


each_format = pytest.mark.parametrize("error_format", ["mcf", "exact"])


@each_format
def test_many_tensors_take_few_launches(error_format: str) -> None:
    """Alone, each would take one for its bias corrections, two for its phases and one for its update."""
    source = many_tensors(error_format).source
    assert len(re.findall(r"\.run\(", source)) <= 4 * len(MANY) / 8
    assert len(offline.kernels(source)) <= 4


def test_no_configurations_are_timed_in_the_first_step() -> None:
    """For which copies would be made of all that a kernel writes."""
    for name, text in offline.kernels(many_tensors("exact").source).items():
        with imported_kernel(name, text) as kernel:
            assert len(kernel.configs) == 1, name


@each_format
def test_machine_code_has_wide_loads_and_spills_nothing(error_format: str) -> None:
    updates = _updates_in_sass(many_tensors(error_format))
    assert updates
    for sass in updates:
        assert "LDG.E.128" in sass
        assert "STG.E.128" in sass
        assert not re.search(r"\b(LDL|STL)\b", sass)


def _updates_in_sass(step: Step) -> list[str]:
    """The machine code of the kernels that update elements."""
    kernels = offline.compile_to_ptx(step.source, "sass").values()
    return [sass for sass in kernels if "LDG.E.128" in sass]


def test_exact_takes_few_instructions_more_than_mcf() -> None:
    """Dither rounds the sum that exact stores, and none that mcf stores."""
    mcf, exact = (
        sum(
            len(re.findall(r"^\s*(?:@%p\d+ )?[a-z][\w.]+\s.*;$", ptx, re.MULTILINE))
            for ptx in offline.compile_to_ptx(cached_step(case).source).values()
        )
        for case in (
            Case("plus", "wide", "mcf", torch.bfloat16),
            Case("plus", "wide", "exact", torch.bfloat16),
        )
    )
    assert 500 < exact < 1.2 * mcf


def test_without_pinned_roundings_the_kernel_loses_the_error_terms() -> None:
    """What the tests above protect: the same graph but for the last pass."""
    with without_pinning():
        step = step_of(Case("light", "wide", "mcf", torch.bfloat16))
    assert step.roundings == len(SHAPES)  # of second moments, by dither, an operator from the start
    grads = list(gradients(SHAPES, 1))
    (interpreted,) = trajectory(step.rig, step.start, grads, engine=step.interpreted)
    (eager,) = trajectory(step.rig, step.start, grads, engine="eager")
    assert not interpreted["0.p.lo"].any()
    assert eager["0.p.lo"].any()
