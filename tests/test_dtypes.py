"""Parameters, gradients and state of three dtypes: what is compiled, skipped, saved and sharded is right."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer, RMSprop

from collage_fx import CollageBackend, error_terms, full_value, install
from collage_fx.errors import ChangedTensorError
from collage_fx.torch_compat.version import version
from tests.compatibility.dtypes import (
    CASES,
    LARGEST,
    PATH,
    TRIPLES,
    Case,
    Triple,
    allow_any_gradient,
    measure,
    optimizer_of,
    section_of,
)
from tests.support.processes import Processes
from tests.support.training import Descent, differences, everything

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PAIRS = [(p, g) for p in (BF16, FP16, FP32) for g in (BF16, FP16, FP32)]
SHAPES = ((7, 5), (11,))

Make = Callable[[list[Parameter]], Optimizer]
Gradients = list[Tensor | None]


def adam(params: list[Parameter]) -> Optimizer:
    return Adam(params, lr=5e-5, foreach=False)


def fused(params: list[Parameter]) -> Optimizer:
    return AdamW(params, lr=5e-5, fused=True)


def momentum(params: list[Parameter]) -> Optimizer:
    return SGD(params, lr=5e-5, momentum=0.9)


def rmsprop(params: list[Parameter]) -> Optimizer:
    return RMSprop(params, lr=2e-5)


def muon(params: list[Parameter]) -> Optimizer:
    return Muon([p for p in params if p.dim() == 2], lr=2e-4)


class Breaks(Descent):
    """A step that Dynamo cannot capture."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            moment = self.state[p].setdefault("moment", torch.zeros_like(p))
            moment.mul_(0.9).add_(p.grad, alpha=0.1)
            torch._dynamo.graph_break()
            p.add_(moment, alpha=-self.param_groups[0]["lr"])


def breaks(params: list[Parameter]) -> Optimizer:
    return Breaks(params, lr=5e-5)


class Run:
    """An installed optimizer of parameters that may have gradients of any dtype, and its float64 run.

    Args:
        make: makes the optimizer.
        pairs: dtypes of parameter and gradient; each has parameters of :data:`SHAPES`.
    """

    def __init__(self, make: Make, pairs: Sequence[tuple[torch.dtype, torch.dtype]]) -> None:
        torch._dynamo.reset()
        generator = torch.Generator().manual_seed(0)
        self.dtypes = [gradient for _, gradient in pairs for _ in SHAPES]
        draws = [(dtype, torch.randn(s, generator=generator)) for dtype, _ in pairs for s in SHAPES]
        self.params = [Parameter(draw.to(dtype)) for dtype, draw in draws]
        self.start = [p.detach().clone() for p in self.params]
        for p in self.params:
            allow_any_gradient(p)
        self.backend = CollageBackend()
        self.optimizer = install(make(self.params), backend=self.backend)
        self.exact = [Parameter(p.detach().double()) for p in self.params]
        self.reference = make(self.exact)

    def gradients(self, seed: int) -> Gradients:
        generator = torch.Generator().manual_seed(seed)
        return [
            (1 + torch.randn(p.shape, generator=generator) / 3).to(dtype)
            for p, dtype in zip(self.params, self.dtypes, strict=True)
        ]

    def step(self, gradients: Gradients) -> None:
        for p, x, gradient in zip(self.params, self.exact, gradients, strict=True):
            p.grad = gradient
            x.grad = None if gradient is None else gradient.double()
        self.optimizer.step()
        self.reference.step()

    def error(self) -> float:
        """Return the largest error of a displacement."""
        errors = []
        for p, x, start in zip(self.params, self.exact, self.start, strict=True):
            moved = x.detach() - start
            if moved.any():
                errors.append(float((full_value(p).double() - start - moved).norm() / moved.norm()))
        return max(errors)


# Each triple. -----------------------------------------------------------------------------------------------


def test_the_page_has_every_case_and_all_of_them_right() -> None:
    lines = section_of(PATH.read_text()).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][1:]
    assert [cell[0] for cell in cells] == [case.name for case in CASES]
    assert {cell[2] for cell in cells} == {f"{len(TRIPLES)} of {len(TRIPLES)}"}


def drawn(seed: int) -> tuple[Case, Triple]:
    generator = random.Random(seed)
    return generator.choice(CASES), generator.choice(TRIPLES)


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(24))
def test_an_optimizer_with_a_triple_of_dtypes_is_right(seed: int) -> None:
    case, triple = drawn(seed)
    cell = measure(case, triple)
    # Newer torch traces no lists of two dtypes that its eager step does not take either.
    is_taken = version() <= (2, 13) or not isinstance(cell.eager, str) or cell.error != cell.eager
    assert cell.is_right or not is_taken, (str(case), str(triple), cell)


@pytest.mark.parametrize(
    "triple",
    [
        pytest.param(Triple("bf16", "fp32", "fp32"), id="gradients wider than parameters"),
        pytest.param(Triple("fp32", "bf16", "bf16"), id="gradients narrower than parameters"),
        pytest.param(Triple("fp32", "fp32", "bf16"), id="moments narrower than parameters"),
        pytest.param(Triple("bf16", "bf16", "fp32"), id="moments wider than parameters"),
        pytest.param(Triple("fp16", "bf16", "fp32"), id="three dtypes"),
    ],
)
@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_adam_with_each_kind_of_triple(way: dict[str, bool], triple: Triple) -> None:
    (case,) = (case for case in CASES if case.name == "Adam" and case.way == way)
    cell = measure(case, triple)
    assert isinstance(cell.error, float)
    assert cell.error <= LARGEST


# Several dtypes in one group. -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [adam, fused, momentum, breaks])
def test_all_pairs_of_parameter_and_gradient_in_one_group(make: Make) -> None:
    run = Run(make, PAIRS)
    for seed in range(30):
        run.step(run.gradients(seed))
    assert run.error() <= LARGEST


def test_muon_takes_gradients_of_other_dtypes() -> None:
    """Its products are in bfloat16, which limits float32 parameters likewise."""
    run = Run(muon, [(BF16, FP32), (FP32, BF16)])
    for seed in range(20):
        run.step(run.gradients(seed))
    assert run.error() <= 0.02


@pytest.mark.parametrize("make", [adam, fused, momentum, rmsprop])
def test_gradients_of_other_dtypes_come_and_go(make: Make) -> None:
    """Each third is missing in turn, and all of the last pair at first, which no compilation has met."""
    run = Run(make, PAIRS)
    for seed in range(30):
        gradients = run.gradients(seed)
        last = len(gradients) - len(SHAPES)
        run.step(
            [None if i % 3 == seed % 3 or (i >= last and seed < 8) else g for i, g in enumerate(gradients)]
        )
    assert run.error() <= LARGEST
    assert len(run.backend.report().graphs) <= 3


def test_a_gradient_that_becomes_narrower_is_converted_and_a_wider_one_is_refused() -> None:
    run = Run(adam, [(BF16, FP32)])
    run.step(run.gradients(0))
    run.step([g if g is None else g.to(BF16) for g in run.gradients(1)])
    assert run.error() <= LARGEST
    run = Run(adam, [(BF16, BF16)])
    run.step(run.gradients(0))
    before = everything(run.optimizer)
    with pytest.raises(ChangedTensorError, match=r"torch\.float32"):
        run.step([g if g is None else g.float() for g in run.gradients(1)])
    assert not differences(before, everything(run.optimizer))


# What is around a step. -------------------------------------------------------------------------------------


def test_fp16_gradients_of_float32_parameters_under_a_loss_scaler() -> None:
    """Their gradients are unscaled in the step, and an overflow changes nothing."""
    run = Run(fused, [(FP32, FP16), (BF16, FP32), (FP32, FP32)])
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    scaler.scale(torch.ones(()))
    for seed in range(12):
        gradients = run.gradients(seed)
        for p, x, gradient in zip(run.params, run.exact, gradients, strict=True):
            assert gradient is not None
            p.grad, x.grad = gradient * scaler.get_scale(), gradient.double()
        if seed == 5:
            before = everything(run.optimizer)
            assert run.params[0].grad is not None
            run.params[0].grad[0] = float("inf")
            scaler.step(run.optimizer)
            assert not differences(before, everything(run.optimizer))
        else:
            scaler.step(run.optimizer)
            run.reference.step()
        scaler.update()
    assert run.error() <= LARGEST


def resumed(case: Case, triple: Triple, *, loads_first: bool) -> tuple[Optimizer, Optimizer]:
    """Return an optimizer after eight steps, and one that was loaded after four."""

    def go(optimizer: Optimizer, seeds: range) -> None:
        dtype = {"bf16": BF16, "fp16": FP16, "fp32": FP32}[triple.gradient]
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            optimizer.step()

    generator = torch.Generator().manual_seed(0)
    dtype = {"bf16": BF16, "fp16": FP16, "fp32": FP32}[triple.parameter]
    start = [torch.randn(shape, generator=generator).to(dtype) for shape in case.shapes]
    torch._dynamo.reset()
    params, optimizer = optimizer_of(case, triple, start, dtype, **case.way)
    install(optimizer)
    go(optimizer, range(4))
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), [p.detach() for p in params]], file)
    go(optimizer, range(4, 8))
    torch._dynamo.reset()
    state, values = torch.load(io.BytesIO(file.getvalue()))
    loaded_params = [Parameter(value) for value in values]
    for p in loaded_params:
        allow_any_gradient(p)
    loaded = case.make(loaded_params, **case.way)
    if loads_first:
        loaded.load_state_dict(state)
        install(loaded)
    else:
        install(loaded)
        loaded.load_state_dict(state)
    go(loaded, range(4, 8))
    return optimizer, loaded


@pytest.mark.filterwarnings("ignore:collage_fx. no error terms")
@pytest.mark.parametrize("loads_first", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_checkpoint_keeps_the_dtype_and_the_bits_of_state(seed: int, loads_first: bool) -> None:
    triples = [t for t in TRIPLES if t.state != t.parameter and t.state != "fp32"]
    case = next(c for c in CASES if c.name == ("Adam", "SGD", "AdamW")[seed % 3] and "fused" in c.way)
    # Plain torch's load rounds state between bfloat16 and float16, which nothing can undo.
    triples = [t for t in triples if not loads_first or t.parameter == "fp32"]
    triple = triples[seed % len(triples)]
    one, other = resumed(case, triple, loads_first=loads_first)
    assert not differences(everything(one), everything(other))


# Sharded. ---------------------------------------------------------------------------------------------------


def errors_of_shards(fused: bool) -> list[float]:
    """Train an FSDP2 module of bfloat16 and float32 parameters with float32 and bfloat16 gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 5).bfloat16(), torch.nn.Linear(5, 7)]
    model = torch.nn.Sequential(*layers)
    start = [p.detach().double() for p in model.parameters()]
    exact = [Parameter(value.clone()) for value in start]
    mesh = init_device_mesh("cpu", (2,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    params = list(model.parameters())
    options: dict[str, Any] = {"lr": 5e-5, "fused" if fused else "foreach": fused}
    optimizer, reference = install(AdamW(params, **options)), AdamW(exact, lr=5e-5)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        for p, x in zip(params, exact, strict=True):
            assert isinstance(p, DTensor)
            gradient = (1 + torch.randn(x.shape, generator=generator) / 3).to(
                BF16 if p.dtype is FP32 else FP32
            )
            allow_any_gradient(p)
            p.grad = torch.distributed.tensor.distribute_tensor(gradient, p.device_mesh, p.placements)
            x.grad = gradient.double()
        optimizer.step()
        reference.step()
    assert all(error_terms(p) for p in params if p.dtype is BF16)
    errors = []
    for p, x, old in zip(params, exact, start, strict=True):
        value = full_value(p)
        assert isinstance(value, DTensor)
        moved = x.detach() - old
        errors.append(float((value.full_tensor().double() - old - moved).norm() / moved.norm()))
    return errors


@pytest.mark.parametrize("fused", [False, True])
def test_dtensors_of_several_dtypes_in_one_group(two_processes: Processes, fused: bool) -> None:
    for errors in two_processes.run(errors_of_shards, fused):
        assert max(errors) <= LARGEST
