"""Mutated low-precision state that is no optimizer's: averaged models, accumulated gradients, all in one."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)

from collage_fx import CollageBackend, error_terms, full_value
from collage_fx.lowering.lower import inductor_settings
from tests.support import triton_offline as offline
from tests.support.float_bits import same_bits
from tests.support.race import Race, relative_error
from tests.support.training import Descent, live_error_terms, parameters
from tests.support.twin import Engine, TwinBackend

ROOT = Path(__file__).parents[1]

# Averaged models. -----------------------------------------------------------------------------------------

AVERAGES: dict[str, dict[str, Any]] = {
    "ema multi": {"multi_avg_fn": get_ema_multi_avg_fn(0.999)},
    "ema": {"avg_fn": get_ema_avg_fn(0.999)},
    "swa": {},
    "swa avg": {"avg_fn": get_swa_avg_fn()},
    "swa multi": {"multi_avg_fn": get_swa_multi_avg_fn()},
}


def walk(model: torch.nn.Module, generator: torch.Generator) -> None:
    """One step of a random walk for the model's parameters."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)


@pytest.mark.parametrize("average", AVERAGES)
def test_an_averaged_model(average: str) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model, exact_model = torch.nn.Linear(8, 4).bfloat16(), torch.nn.Linear(8, 4).double()
    options = AVERAGES[average]
    ours, plain = AveragedModel(model, **options), AveragedModel(model, **options)
    exact = AveragedModel(exact_model, **options)
    backend = CollageBackend()
    update = torch.compile(ours.update_parameters, backend=backend)
    for _ in range(300):
        walk(model, generator)
        exact_model.load_state_dict(model.state_dict())
        update(model)
        plain.update_parameters(model)
        exact.update_parameters(exact_model)
    for p, q, r in zip(ours.parameters(), plain.parameters(), exact.parameters(), strict=True):
        plain_error = relative_error(q.detach().double(), r.detach())
        assert plain_error >= 0.01  # the net displacement is of the size of the weights
        # hi + lo: u**2 = 2**-16 a step, forgotten at the rate of the average or not, 300 times at random
        assert relative_error(full_value(p), r.detach()) <= 2.0**-16 * 300**0.5
    assert int(ours.n_averaged) == 300
    # the copy and the average
    assert len([graph for graph in backend.report().graphs if graph.tensors]) == 2
    assert set(ours.state_dict()) == set(plain.state_dict())


of_another_dtype = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11's AveragedModel refuses a model of another dtype",
)


@pytest.mark.parametrize(
    ("average", "dtype"),
    [
        ("ema multi", torch.bfloat16),
        ("swa", torch.bfloat16),
        pytest.param("swa", torch.float32, marks=of_another_dtype),
    ],
)
def test_the_first_copy_of_a_model_has_its_error_terms(average: str, dtype: torch.dtype) -> None:
    """What hi alone lacks would be half of the displacement, and stay so in a slow average."""
    race = Race(parameters(shapes=[(16, 8)]), lambda params: torch.optim.AdamW(params, lr=1e-5))
    models = []
    for (p,) in race.parameters:
        model = torch.nn.Linear(8, 16, bias=False)
        model.weight = p
        models.append(model)
    options = AVERAGES[average]
    ours, exact = AveragedModel(models[0], **options).to(dtype), AveragedModel(models[2], **options)
    update = torch.compile(ours.update_parameters, backend=race.backend)
    race.run(20)
    start = race.start[0]
    for _ in range(2):
        update(models[0])
        exact.update_parameters(models[2])
        (mine,), (meant,) = ours.parameters(), exact.parameters()
        hi_alone = relative_error(race.parameters[0][0].detach().double() - start, meant.detach() - start)
        assert hi_alone >= 0.2
        # no more than what the parameter itself is off by, and 2**-16 of a weight for each rounding
        allowed = race.errors(0)[0] + float(2.0**-16 * start.norm() / (meant.detach() - start).norm())
        assert relative_error(full_value(mine) - start, meant.detach() - start) <= allowed
        race.run(1)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_the_first_copy_of_a_buffer_has_its_error_terms_if_buffers_are_averaged(use_buffers: bool) -> None:
    model = torch.nn.Module()
    model.register_buffer("seen", torch.ones(8, dtype=torch.bfloat16))
    model.register_parameter("p", parameters(shapes=[(8,)])[0])

    @torch.no_grad()
    def add(seen: Tensor) -> None:
        seen += 2.0**-10

    backend = CollageBackend()
    torch.compile(add, backend=backend)(model.get_buffer("seen"))
    average = AveragedModel(model, use_buffers=use_buffers)
    torch.compile(average.update_parameters, backend=backend)(model)
    lost = 0 if use_buffers else 2.0**-10
    assert torch.equal(
        full_value(average.module.get_buffer("seen")) + lost, full_value(model.get_buffer("seen"))
    )


def average_of_mean(averaged: Tensor, current: Tensor, count: Tensor | int) -> Tensor:
    return (averaged + current * count) / (count + 1)


@pytest.mark.parametrize("options", [{}, {"avg_fn": average_of_mean}, {"avg_fn": get_ema_avg_fn(0.9)}])
def test_eager_averages_are_what_torch_computes(options: dict[str, Any]) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).bfloat16()

    source = model()
    ours, torchs = (AveragedModel(model(), use_buffers=True, **options) for _ in range(2))
    original: Any = AveragedModel.update_parameters
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        walk(source, generator)
        source(torch.randn(5, 4, generator=generator).bfloat16())  # its statistics change
        ours.update_parameters(source)
        original.__wrapped__(torchs, source)
    for name, tensor in torchs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name
    assert ours.multi_avg_fn is None
    pickle.dumps(AveragedModel(model()))


# Gradient accumulation. -----------------------------------------------------------------------------------


@torch.no_grad()
def accumulate(params: list[torch.nn.Parameter], grads: list[Tensor]) -> None:
    for p, g in zip(params, grads, strict=True):
        assert p.grad is not None
        p.grad += g


RESETS: dict[str, Any] = {
    "none": lambda optimizer, p: optimizer.zero_grad(),
    "zero_grad": lambda optimizer, p: optimizer.zero_grad(set_to_none=False),
    "zero_": lambda optimizer, p: p.grad.zero_(),
    "data.zero_": lambda optimizer, p: p.grad.data.zero_(),
}


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_micro_batch_gradients(reset: str, dtype: torch.dtype) -> None:
    (p,) = params = parameters(dtype, shapes=[(32,)])
    optimizer = Descent(params)
    backend = CollageBackend()
    step = torch.compile(accumulate, backend=backend)
    generator = torch.Generator().manual_seed(0)
    p.grad = torch.zeros_like(p)
    for _ in range(3):
        exact, plain = torch.zeros(32, dtype=torch.float64), torch.zeros(32, dtype=dtype)
        RESETS[reset](optimizer, p)
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        assert not p.grad.any()
        for _ in range(64):
            gradient = (1 + 0.1 * torch.randn(32, generator=generator)).to(dtype)
            step(params, [gradient])
            plain += gradient
            exact += gradient.double()
        u = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
        assert relative_error(plain.double(), exact) > u  # plain: 64 roundings, half of them of the full size
        # 64 roundings to u**2, or float32's, of partial sums no larger than the last
        assert torch.all((full_value(p.grad) - exact).abs() <= 64 * max(u**2, 2.0**-24) * exact)
    assert len(backend.report().graphs) == 1


class Sums:
    """A compiled sum of which some entries have been zeroed since their error terms were written.

    In vectors and in the tail.
    """

    def __init__(self, dtype: torch.dtype, **options: Any) -> None:
        (self.p,) = self.params = parameters(dtype, shapes=[(37,)])
        self.backend = TwinBackend(**options)
        self.step = torch.compile(accumulate, backend=self.backend)
        self.grad = self.p.grad = torch.zeros_like(self.p)
        self.step(self.params, [torch.zeros_like(self.p)])
        self.lo, *self.counts = live_error_terms(self.grad)
        generator = torch.Generator().manual_seed(0)
        self.begun, self.gradient = (torch.randn(37, generator=generator).to(dtype) for _ in range(2))
        scale = 2.0**-10 if self.lo.is_floating_point() else 2.0**13
        self.error = (torch.randn(37, generator=generator) * scale).to(self.lo.dtype)
        self.begun[::3] = 0
        if not self.lo.is_floating_point():
            self.error[::3] = 2**15 - 1  # the least that is no rest of a zero

    def by(self, engine: Literal["compiled", "eager"] | Engine) -> tuple[Tensor, Tensor]:
        """The sum and its error term after one more gradient."""
        self.backend.engine = engine
        self.grad.copy_(self.begun)
        self.lo.copy_(self.error)
        for count in self.counts:
            count.zero_()
        self.step(self.params, [self.gradient])
        assert torch.equal(full_value(self.grad)[::3], self.gradient.double()[::3])
        return self.grad.clone(), self.lo.clone()


KINDS: list[dict[str, Any]] = [
    {},
    {"error_format": "mcf"},
    {"error_format": "fp32"},
    {"arithmetic": "native"},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_compiled_sums_have_the_bits_of_the_rewritten_graph(dtype: torch.dtype, options: Any) -> None:
    sums = Sums(dtype, **options)
    for compiled, eager in zip(sums.by("compiled"), sums.by("eager"), strict=True):
        assert torch.all(same_bits(compiled, eager))


@pytest.mark.skipif(not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_triton_sums_have_the_bits_of_the_rewritten_graph(dtype: torch.dtype, options: Any) -> None:
    sums = Sums(dtype, **options)
    with torch._inductor.config.patch(inductor_settings(sums.backend.options.arithmetic)):
        source = offline.triton_source(offline.to_cuda(sums.backend.graphs[0]))
    interpreted = sums.by(lambda arguments: offline.run_in_interpreter(source, arguments))
    for triton, eager in zip(interpreted, sums.by("eager"), strict=True):
        assert torch.all(same_bits(triton, eager))


def test_a_step_reads_the_whole_accumulated_gradient() -> None:
    """1 + 2**-8 is 1 in bfloat16: the sum of a large and many small micro-batches."""
    params = [torch.nn.Parameter(torch.zeros(4).bfloat16())]
    (p,) = params
    step = torch.compile(torch.optim.SGD(params, lr=1.0).step, backend=CollageBackend())
    add = torch.compile(accumulate, backend=CollageBackend())
    moved = torch.zeros(4, dtype=torch.float64)
    for _ in range(2):
        p.grad = torch.zeros_like(p)
        for value in (1.0, 2.0**-10, 2.0**-10):
            add(params, [torch.full_like(p, value)])
        step()
        moved -= 1 + 2.0**-9
        assert torch.equal(full_value(p), moved)


# Everything in one function. ------------------------------------------------------------------------------


def test_clipping_a_step_and_an_average_in_one_compiled_function() -> None:
    race = Race(
        parameters(shapes=[(8, 4), (4,)]),
        lambda params: torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.99)),
    )
    averages = [[p.detach().clone() for p in params] for params in race.parameters]
    start = [average.double() for average in averages[0]]
    max_norm = 0.5

    def train(side: int) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(race.parameters[side], max_norm)
        race.optimizers[side].step()
        with torch.no_grad():
            for average, p in zip(averages[side], race.parameters[side], strict=True):
                average.lerp_(p, 0.01)
        return norm

    compiled = torch.compile(lambda: train(0), backend=race.backend)
    for _ in range(60):
        race.draw_gradients()
        norms = [compiled(), train(1), train(2)]
        assert float(norms[0]) == pytest.approx(float(norms[2]), rel=2.0**-8)
    race.assert_compensated()
    for ours, plain, exact, begun in zip(*averages, start, strict=True):
        assert error_terms(ours)
        lost = relative_error(plain.double() - begun, exact - begun)
        kept = relative_error(full_value(ours) - begun, exact - begun)
        assert lost >= 0.2
        assert kept <= lost / 10


CLIP_AND_STEP = """
import torch
from torch._dynamo.utils import counters
import collage_fx
p = torch.nn.Parameter(torch.full((4,), 256.0, dtype=torch.bfloat16))
p.grad = torch.full_like(p, 8.0)
optimizer = torch.optim.SGD([p], lr=0.5)

def train():
    torch.nn.utils.clip_grad_norm_([p], 2.0)
    optimizer.step()

torch.compile(train, backend="collage")()
print(collage_fx.full_value(p).tolist())
print(counters["inductor"]["fxgraph_cache_bypass"])
"""


def test_clipping_compiles_in_a_process_that_has_compiled_nothing_else() -> None:
    """Inductor calls torch for the norms of a list: it must not take that for a case of ours to decompose.

    A gradient of norm 16 becomes one of 1 in each element, up to the roundings to bfloat16 of the norm, of
    the factor and of their product; that of the pair is one of 2**-16 of its value.
    """
    command = [sys.executable, "-c", CLIP_AND_STEP]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    values, bypassed = done.stdout.splitlines()
    assert ast.literal_eval(values) == pytest.approx(
        [255.5] * 4, rel=0, abs=0.5 * 3 * 2.0**-8 + 256 * 2.0**-16
    )
    assert bypassed == "0", "what our table holds is no reason for Inductor not to use its cache of graphs"


def test_a_float32_average_reads_the_whole_parameter() -> None:
    """Its graph updates nothing of low precision, but what it averages is hi + lo."""
    (p,) = params = parameters(shapes=[(16,)])
    average = p.detach().float()
    optimizer = Descent(params, lr=2.0**-14)
    backend = CollageBackend()
    step = torch.compile(optimizer.step, backend=backend)

    @torch.no_grad()
    def follow() -> None:
        average.lerp_(p.float(), 0.5)

    update = torch.compile(follow, backend=backend)
    p.grad = torch.ones_like(p)
    start = p.detach().double()
    for _ in range(20):
        step()
        update()
    assert float((p == start).float().mean()) >= 0.5, "hi alone would say little"
    # Twenty averages later it is two steps behind the parameter; the start is forgotten to 2**-20.
    assert relative_error(average.double() - start, full_value(p) - start) <= 0.1
