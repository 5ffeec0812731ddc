"""The compiled step leaves the bits that its rewritten graph leaves when it is run eagerly.

Equal means equal, in ``wide`` arithmetic too: C++ is compiled without contraction into fma, and the twin's
square root and pow are rounded as the instruction and the C library round them (``tests/support/twin.py``).
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import pytest
import torch
from torch._inductor.utils import fresh_cache, run_and_get_code

from collage_fx.choices import Arithmetic, Strategy
from collage_fx.runtime.batches import job_size
from collage_tools.audit import audit
from tests.support.agreement import assert_half_ulp, assert_same, differences, trajectory
from tests.support.float_bits import same_bits
from tests.support.optimizers import Case, CompiledOptimizer, Tensors, gradients
from tests.support.substitutes import by_inductor, given_to_inductor, lowered_as, without_pinning
from tests.support.twin import TwinBackend

STEPS = 50
#: 561 and 37 elements: vectors of 16 or 32 and a tail of another length.
SHAPES = ((33, 17), (37,))
BOTH: tuple[Literal["compiled", "eager"], ...] = ("compiled", "eager")
DTYPES = (torch.bfloat16, torch.float16)

ARITHMETICS: tuple[tuple[Arithmetic, str], ...] = (
    ("wide", "mcf"),
    ("wide", "exact"),
    ("wide", "fp32"),
    ("wide", "byte"),
    ("native", "mcf"),
)
CASES = [
    Case(strategy, arithmetic, error_format, dtype)
    for dtype in DTYPES
    for arithmetic, error_format in ARITHMETICS
    for strategy in get_args(Strategy)[1:]
]

#: Tensors with error terms under each strategy.
EXPANSIONS = {"light": {"p"}, "plus": {"p", "exp_avg_sq"}, "full": {"p", "exp_avg", "exp_avg_sq"}}


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def first_step(
    case: Case, shapes: tuple[tuple[int, ...], ...] = SHAPES, backend: TwinBackend | None = None
) -> tuple[CompiledOptimizer, Tensors]:
    """An AdamW whose step has been compiled, and its tensors as they were before it was."""
    rig = CompiledOptimizer(shapes, adamw, backend or TwinBackend(**case.options()), dtype=case.dtype)
    return rig, rig.start()


#: Where a gradient of the first parameter is not finite, in the first of a few more steps.
SPOILT = {(0, 0): float("inf"), (7, 3): float("nan"), (32, 16): -float("inf")}


#: The ends of the names of auxiliaries.
AUXILIARIES = (".lo", ".rest")


@pytest.mark.rotating
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_bits_are_eager_bits(case: Case) -> None:
    """Fifty steps that one compilation serves; then one with gradients that are inf and nan."""
    rig, start = first_step(case)
    grads = list(gradients(SHAPES, STEPS))
    compiled, eager = (trajectory(rig, start, grads, engine=engine) for engine in BOTH)
    assert_same(compiled, eager)
    assert_error_terms_are_alive(compiled[-1], case.strategy)
    for tensors in compiled:
        assert_half_ulp(tensors)
    few = list(gradients(SHAPES, 4, seed=5))
    clean = trajectory(rig, start, few)
    for index, value in SPOILT.items():
        few[0][0][index] = value
    assert_spoilt_alone(trajectory(rig, start, few), clean)
    assert len(rig.backend.report().graphs) == 1


def assert_error_terms_are_alive(last: Tensors, strategy: Strategy) -> None:
    """Assert that they are not zero, as where a rounding does not survive lowering: hi and lo cancel."""
    expansions = {name.split(".")[1] for name in last if name.endswith(AUXILIARIES)}
    assert expansions == EXPANSIONS[strategy]
    for name in last:
        if name.endswith(AUXILIARIES):
            # By chance a value lies on hi's grid for one in 2**8 (bfloat16), 2**11 (float16).
            assert float((last[name] != 0).double().mean()) > 0.9, name


def assert_spoilt_alone(spoilt: list[Tensors], clean: list[Tensors]) -> None:
    """Assert that inf and nan among the gradients of a first step stay, and no other element notices."""
    touched = torch.zeros(SHAPES[0], dtype=torch.bool)
    for index in SPOILT:
        touched[index] = True
    for met, want in zip(spoilt, clean, strict=True):
        assert_half_ulp(met)  # which says that lo is zero beside what is not finite
        assert not met["0.p"][touched].isfinite().any()
        assert not met["0.exp_avg_sq"][touched].isfinite().any()
        for name in met:
            others = ~touched if name.startswith("0.") and met[name].shape == SHAPES[0] else ...
            assert bool(same_bits(met[name][others], want[name][others]).all()), name


# ------------------------------------------------------------ what pinning is for


@pytest.mark.usefixtures("by_inductor")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arithmetic", ["wide", "native"])
def test_without_pinned_roundings_compiled_code_loses_the_error_terms(
    dtype: torch.dtype, arithmetic: Arithmetic
) -> None:
    """The graph is right, what Inductor makes of it is not. If this fails, torch has changed."""
    shapes = (SHAPES[0],)
    with without_pinning():
        rig, start = first_step(Case("light", arithmetic, "mcf", dtype), shapes)
    grads = list(gradients(shapes, 3))
    compiled, eager = (trajectory(rig, start, grads, engine=engine)[-1] for engine in BOTH)
    assert float((eager["0.p.lo"] != 0).double().mean()) > 0.9
    assert differences(compiled, eager)
    if arithmetic == "wide":
        assert not compiled["0.p.lo"].any()


# ------------------------------------------------------------ long rows, threads


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    "case",
    [Case("plus", "wide", "mcf", torch.bfloat16), Case("light", "native", "mcf", torch.float16)],
    ids=str,
)
def test_jobs_that_threads_share(case: Case) -> None:
    """More elements than a job has, and no multiple of anything."""
    shapes = ((97, 211), (200_003,))
    rig, start = first_step(case, shapes, TwinBackend(**case.options()))
    grads = list(gradients(shapes, 5))
    assert_same(*(trajectory(rig, start, grads, engine=engine) for engine in BOTH))
    route = rig.backend.report().graphs[-1].route
    assert "in one call for all tensors" not in dict(route.reasons)
    elements = sum(map(math.prod, shapes))
    assert elements > 2 * job_size(elements, torch.get_num_threads())


@pytest.mark.usefixtures("two_threads")
def test_loops_that_threads_share() -> None:
    """Code that Inductor writes divides its loops itself."""
    case = Case("plus", "wide", "mcf", torch.bfloat16)
    shapes = ((97, 211), (20_007,))
    backend = TwinBackend(**case.options())
    with fresh_cache(), by_inductor():
        (rig, start), codes = run_and_get_code(first_step, case, shapes, backend)
    assert any("#pragma omp for" in code for code in codes)
    grads = list(gradients(shapes, 5))
    assert_same(*(trajectory(rig, start, grads, engine=engine) for engine in BOTH))


# ------------------------------------------------------------ numbers that are given


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_decay_that_is_known_when_the_step_runs(dtype: torch.dtype) -> None:
    """``1 - lr * weight_decay`` of a tensor: whether it is near 1 is decided in the graph, once a step."""

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(1e-3), weight_decay=0.1)

    backend = TwinBackend(**Case("plus", "native", "mcf", dtype).options())
    rig = CompiledOptimizer(SHAPES[:1], make, backend, dtype=dtype)
    start, grads = rig.start(), list(gradients(SHAPES[:1], 10))
    assert_same(*(trajectory(rig, start, grads, engine=engine) for engine in BOTH))


# ------------------------------------------------------------ memory layouts


def test_strided_parameters_and_gradients() -> None:
    """A transposed parameter: error terms have its strides, and those of the gradient make no difference."""
    case = Case("full", "wide", "mcf", torch.bfloat16)
    rig = CompiledOptimizer(SHAPES[:1], adamw, TwinBackend(**case.options()))
    rig.parameters[0].data = torch.randn(17, 33, generator=torch.Generator().manual_seed(2)).bfloat16().t()
    grads = list(gradients(SHAPES[:1], 5))
    rig.step(grads[0])
    start = rig.tensors()
    strides = {tensor.stride() for name, tensor in rig.live() if tensor.dim() == 2}
    assert strides == {(1, 33)}
    assert_same(*(trajectory(rig, start, grads, engine=engine) for engine in BOTH))


# ------------------------------------------------------------ what CUDA graphs need


def test_everything_a_step_mutates_is_static() -> None:
    """Error terms too: CUDA graphs refuse to record a step that mutates an input whose address may change."""
    with given_to_inductor() as given, lowered_as("whole"):
        first_step(Case("plus", "wide", "mcf", torch.bfloat16))
    ((mutated, static),) = given
    # Tensors of each parameter: itself, the two moments, two error terms, the step counter.
    assert len(mutated) == 2 * 6
    assert mutated <= static


@pytest.mark.parametrize("shape", [(96, 32), (128, 64)])
def test_products_of_a_transposed_matrix(shape: tuple[int, int]) -> None:
    """Muon's, of a matrix with more rows than columns, are read in tiles and stored in two halves."""
    found = audit(
        lambda params: torch.optim.Muon(params, lr=2e-4),
        shapes=[shape],
        steps=6,
        schedules={"constant": None},
    )
    assert found.is_good, str(found)
