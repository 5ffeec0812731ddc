"""The compiled step leaves the bits that its rewritten graph leaves when it is run eagerly.

Equal means equal, in ``wide`` arithmetic too: C++ is compiled without contraction into fma, and the twin's
square root and pow are rounded as the instruction and the C library round them (``tests/support/twin.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args
from unittest import mock

import pytest
import torch
from torch._inductor.utils import fresh_cache, run_and_get_code

from collage_fx.graph import Arithmetic, Reason, Strategy
from collage_fx.runtime.batches import Batch
from collage_fx.tools.audit import audit
from collage_fx.torch_compat import inductor_compile_inner
from tests.support.agreement import assert_half_ulp, assert_same, differences, trajectory
from tests.support.float_bits import same_bits
from tests.support.optimizers import Case, CompiledOptimizer, Tensors, gradients
from tests.support.twin import TwinBackend, without_pinning

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


@dataclass
class Run:
    """What one compilation computed: fifty steps, their eager twins, and four with spoilt gradients."""

    case: Case
    graphs: int
    compiled: list[Tensors]
    eager: list[Tensors]
    clean: list[Tensors]
    spoilt: list[Tensors]


@pytest.fixture(scope="module", params=CASES, ids=str)
def run(request: pytest.FixtureRequest) -> Run:
    case: Case = request.param
    backend = TwinBackend(**case.options())
    rig, start = first_step(case, backend=backend)
    grads = list(gradients(SHAPES, STEPS))
    compiled, eager = (trajectory(rig, start, grads, engine=engine) for engine in BOTH)
    few = list(gradients(SHAPES, 4, seed=5))
    clean = trajectory(rig, start, few)
    for index, value in SPOILT.items():
        few[0][0][index] = value
    spoilt = trajectory(rig, start, few)
    return Run(case, len(backend.graphs), compiled, eager, clean, spoilt)


#: The ends of the names of auxiliaries.
AUXILIARIES = (".lo", ".rest")


def test_compiled_bits_are_eager_bits(run: Run) -> None:
    assert_same(run.compiled, run.eager)


def test_one_compilation_serves_every_step(run: Run) -> None:
    assert run.graphs == 1


def test_error_terms_are_those_of_the_strategy_and_alive(run: Run) -> None:
    """This is what breaks when a rounding does not survive lowering: hi and lo cancel, and lo is zero."""
    last = run.compiled[-1]
    expansions = {name.split(".")[1] for name in last if name.endswith(AUXILIARIES)}
    assert expansions == EXPANSIONS[run.case.strategy]
    for name in last:
        if name.endswith(AUXILIARIES):
            # By chance a value lies on hi's grid for one in 2**8 (bfloat16), 2**11 (float16).
            assert float((last[name] != 0).double().mean()) > 0.9, name


def test_error_terms_stay_below_half_an_ulp(run: Run) -> None:
    for tensors in run.compiled:
        assert_half_ulp(tensors)


def test_inf_and_nan_stay_where_they_are(run: Run) -> None:
    """One step with inf and nan among the gradients, then three ordinary ones; the others do not notice."""
    touched = torch.zeros(SHAPES[0], dtype=torch.bool)
    for index in SPOILT:
        touched[index] = True
    for met, want in zip(run.spoilt, run.clean, strict=True):
        assert_half_ulp(met)  # which says that lo is zero beside what is not finite
        assert not met["0.p"][touched].isfinite().any()
        assert not met["0.exp_avg_sq"][touched].isfinite().any()
        for name in met:
            others = ~touched if name.startswith("0.") and met[name].shape == SHAPES[0] else ...
            assert bool(same_bits(met[name][others], want[name][others]).all()), name


# ------------------------------------------------------------ what pinning is for


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
    with mock.patch(
        "collage_fx.runtime.batches.Batch.__call__", autospec=True, side_effect=Batch.__call__
    ) as called:
        assert_same(*(trajectory(rig, start, grads, engine=engine) for engine in BOTH))
    assert max(call.args[0].jobs for call in called.call_args_list) > 2


@pytest.mark.usefixtures("two_threads")
def test_loops_that_threads_share() -> None:
    """Code that Inductor writes divides its loops itself."""
    case = Case("plus", "wide", "mcf", torch.bfloat16)
    shapes = ((97, 211), (20_007,))
    backend = TwinBackend(**case.options())
    with fresh_cache(), mock.patch("collage_fx.lowering.kernels.printed", return_value=Reason("of the test")):
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
    lowered: list[tuple[set[int], set[int]]] = []

    def spy(gm: Any, inputs: Sequence[Any], **options: Any) -> Any:
        compiled: Any = inductor_compile_inner(gm, inputs, **options)
        lowered.append((set(compiled.mutated_input_idxs), set(options["static_input_idxs"])))
        return compiled

    with (
        mock.patch("collage_fx.lowering.attempts.inductor_compile_inner", spy),
        mock.patch(
            "collage_fx.lowering.lower.lower_in_parts", return_value=Reason("of the test")
        ),  # as on a GPU
    ):
        first_step(Case("plus", "wide", "mcf", torch.bfloat16))
    ((mutated, static),) = lowered
    # Of each parameter: itself, the two moments, two error terms, a count of roundings, the step counter.
    assert len(mutated) == 2 * 7
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
