"""What ``CollageBackend(metrics=True)`` measures, against the same computed from saved tensors in float64."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from collage_fx import CollageBackend, full_value, install
from collage_fx.errors import InvalidOptionError
from collage_fx.metrics.quality import MeasuredTensor, Metrics, UpdateQuality
from collage_fx.metrics.rows import (
    COUNTS,
    OCTAVES,
    SAMPLE,
    SIZES,
    SUMS,
    TOGETHER,
    Sampled,
    places,
    rows_of,
    size_bin,
)
from collage_fx.numerics.formats import storage_format
from collage_tools.pages.plots import plot
from tests.support.substitutes import captured_into_a_cuda_graph, observing_within
from tests.support.training import (
    Descent,
    compiled,
    differences,
    everything,
    parameters,
    run_steps,
    set_gradients,
)

DTYPES = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
OPTIONS: tuple[dict[str, Any], ...] = (
    {"strategy": "none"},
    {"strategy": "light"},
    {"strategy": "plus"},
    {"strategy": "full"},
    {"strategy": "full", "arithmetic": "native"},
    {"strategy": "full", "error_format": "fp32"},
)


#: Bound of a float64 sum of the elements of a sample.
LOSS = SAMPLE * 2.0**-53


class Momentum(Optimizer):
    """Momentum of numbers with few bits: every result of its arithmetic is a float32 number."""

    decay, lr = 0.5, 2.0**-12

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(self.decay).add_(p.grad)
                p.add_(state["momentum"], alpha=-self.lr)


def with_few_bits(
    dtype: torch.dtype, shapes: Sequence[Sequence[int]] = ((9, 7), (2, 3, 50), (1,))
) -> tuple[list[torch.nn.Parameter], Callable[[int], None]]:
    """Parameters in ±[1, 2), and what sets their gradients for a step.

    Gradients are multiples of q = 2**-6 (bfloat16) or 2**-8 (float16) below 4. Three steps halve the quantum
    of momentum to q / 4, so that updates are multiples of 2**-22 at least and new parameters have 23 bits.
    """
    generator = torch.Generator().manual_seed(0)
    bits, quantum = (7, 2.0**-6) if dtype == torch.bfloat16 else (10, 2.0**-8)
    params = []
    for shape in map(tuple, shapes):
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        magnitudes = 1 + torch.randint(0, 1 << bits, shape, generator=generator) * 2.0**-bits
        params.append(torch.nn.Parameter((signs * magnitudes).to(dtype)))

    def set_gradients(step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for p in params:
            multiples = torch.randint(-255, 256, p.shape, generator=generator)
            p.grad = (multiples * quantum).to(dtype)
            p.grad[p.grad.abs() < 16 * quantum] = 0  # some elements have no update

    return params, set_gradients


def expected(old: Tensor, old_full: Tensor, update: Tensor, tensor: Tensor) -> dict[str, float]:
    """The sums over the sample, for all elements, from tensors that the test has saved."""
    scale = old.numel() / len(places(old.numel(), CPU))
    whole = full_value(tensor)
    old, old_full, update, hi, whole = (
        each.flatten()[places(old.numel(), CPU)].double() for each in (old, old_full, update, tensor, whole)
    )
    moved_hi, moved, error = hi - old, whole - old_full, whole - hi
    asked = update != 0
    values = (
        update.square(),
        update * moved_hi,
        moved_hi.square(),
        update * moved,
        moved.square(),
        error.square(),
        asked,
        asked & (moved_hi == 0),
        asked & (moved == 0),
        moved_hi == 0,
        error != 0,
    )
    return {name: value.sum().item() * scale for name, value in zip(SUMS, values, strict=True)}


def bin_of(update: float, hi: float, dtype: torch.dtype) -> int:
    """The index in SIZES at which an update counts, in exact arithmetic."""
    if update == 0:
        return 0
    if not math.isfinite(update):
        return len(OCTAVES)
    halves = abs(Fraction(update)) / (storage_format(dtype).ulp(Fraction(hi)) / 2)
    return 1 + sum(halves >= Fraction(2) ** k for k in OCTAVES[1:])


def expected_sizes(update: Tensor, hi: Tensor, dtype: torch.dtype) -> tuple[float, ...]:
    """The sizes of a sample's elements, which are all of a small tensor; scaled to the number of elements."""
    sample = places(hi.numel(), CPU).tolist()
    counts = [0] * len(SIZES)
    for i in sample:
        counts[bin_of(update.flatten()[i].item(), hi.flatten()[i].item(), dtype)] += 1
    return tuple(count * (hi.numel() / len(sample)) for count in counts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
def test_values_and_unchanged_bits(options: dict[str, Any], dtype: torch.dtype) -> None:
    check_values_and_bits(options, dtype, ((9, 7), (2, 3, 50), (1,)))


@pytest.mark.parametrize("options", OPTIONS[:4], ids=lambda options: "-".join(options.values()))
def test_values_and_unchanged_bits_of_tensors_that_are_all_alike(options: dict[str, Any]) -> None:
    """One update in all, whose error terms and rows are told apart by nothing but their order."""
    check_values_and_bits(options, torch.bfloat16, ((9, 7), (9, 7), (9, 7)))


def check_values_and_bits(
    options: dict[str, Any], dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]
) -> None:
    """Intended updates are float32 numbers here, so that the sums are exact up to the additions.

    Those are off by at most LOSS of the sum of absolute values.
    """
    backend = CollageBackend(metrics=True, **options)
    params, set_gradients = with_few_bits(dtype, shapes)
    optimizer = Momentum(params)
    step = torch.compile(optimizer.step, backend=backend)
    twins, set_twins = with_few_bits(dtype, shapes)
    plain = Momentum(twins)
    unmeasured = compiled(plain, **options)
    lost = 0.0
    for number in (1, 2, 3):
        set_gradients(number)
        set_twins(number)
        zeros = [torch.zeros_like(p) for p in params]
        momenta = [optimizer.state[p].get("momentum", zero) for p, zero in zip(params, zeros, strict=True)]
        tensors = {"": params, ".momentum": momenta}
        before = {
            slot: [(each.detach().clone(), full_value(each)) for each in listed]
            for slot, listed in tensors.items()
        }
        step()
        unmeasured()
        assert differences(everything(optimizer), everything(plain)) == []
        measured = backend.metrics()[number]
        has_momentum = number > 1 and options["strategy"] in ("none", "full")  # the first step makes it
        assert len(measured) == len(params) * (2 if has_momentum else 1)
        for i, p in enumerate(params):
            assert p.grad is not None
            old_momentum = before[".momentum"][i][1]
            momentum = Momentum.decay * old_momentum + p.grad.double()
            updates = {"": -Momentum.lr * momentum, ".momentum": momentum - old_momentum}
            for slot, update in updates.items():
                name = f"param_groups[0].params[{i}]{slot}"
                if name in measured:
                    tensor = p if not slot else optimizer.state[p]["momentum"]
                    wanted = expected(*before[slot][i], update, tensor)
                    for key, value in wanted.items():
                        tolerance = 0 if key in COUNTS else LOSS * sum_of_sizes(wanted, key)
                        assert getattr(measured[name], key) == pytest.approx(value, rel=0, abs=tolerance), key
                    assert measured[name].sizes == expected_sizes(update, before[slot][i][0], dtype)
                    lost += wanted["lost_hi"]
    assert lost > 0, "nothing was lost, so that losses were not counted"


@pytest.mark.parametrize("scale", [1.0, 2.0**-80, 2.0**75])
def test_sums_of_a_sample(scale: float) -> None:
    """Also of numbers whose squares float32 does not have."""
    params, set_gradients = with_few_bits(torch.bfloat16, [(40, 70)])
    (p,) = params
    p.data.mul_(scale)
    backend = CollageBackend(strategy="light", metrics=True)
    step = torch.compile(Momentum(params).step, backend=backend)
    for number in (1, 2):
        set_gradients(1)
        assert p.grad is not None
        p.grad.mul_(scale)
        p.grad[:10] = 0
        old, old_full = p.detach().clone(), full_value(p)
        step()
        factor = 1 if number == 1 else 1 + Momentum.decay
        wanted = expected(old, old_full, -Momentum.lr * factor * p.grad.double(), p)
        (measured,) = backend.metrics()[number].values()
        for key, value in wanted.items():
            tolerance = SAMPLE * 2.0**-53 * sum_of_sizes(wanted, key)
            assert getattr(measured, key) == pytest.approx(value, rel=0, abs=tolerance), key
        assert wanted["error"] > 0


@pytest.mark.parametrize("options", OPTIONS[1:], ids=lambda options: "-".join(options.values()))
def test_a_measured_step_is_compiled_as_another(options: dict[str, Any]) -> None:
    codes = []
    for metrics in (False, True):
        params = parameters(shapes=[(64, 64), (64, 64)])
        backend = CollageBackend(metrics=metrics, **options)
        run_steps(torch.compile(torch.optim.AdamW(params).step, backend=backend), params, range(2))
        codes.append([graph.code for graph in backend.report().graphs])
    assert codes[0] == codes[1]


def sum_of_sizes(wanted: dict[str, float], key: str) -> float:
    """At least the sum of the absolute values of a product's terms (Cauchy and Schwarz)."""
    factors = {"along_hi": ("intended", "effective_hi"), "along": ("intended", "effective")}
    return math.sqrt(math.prod(wanted[each] for each in factors.get(key, (key, key))))


class Normalized(Optimizer):
    """A reduction on the way: its kernels are made for shapes, not for elements in a row."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                largest = p.grad.abs().amax(dim=0, keepdim=True)
                p.add_(p.grad / largest, alpha=-Momentum.lr)


class Shifted(Optimizer):
    """Values that many read, one after the other, and that parts of a kernel read under a mask."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                x = p.grad
                for _ in range(12):
                    x = torch.nn.functional.pad(x[1:], [0] * (2 * x.dim() - 1) + [1]) + x * 0
                p.add_(x, alpha=-Momentum.lr)


@pytest.mark.parametrize("strategy", ["none", "light"])
@pytest.mark.parametrize("kind", [Momentum, Normalized])
def test_larger_tensors_are_sampled(kind: type[Optimizer], strategy: Any) -> None:
    """Which elements are in the sample is known, so that the counts are exact again."""
    params, set_gradients = with_few_bits(torch.bfloat16, [(40, 70), (1025,)])
    optimizer = kind(params, **({} if kind is Momentum else {"defaults": {}}))
    backend = CollageBackend(strategy=strategy, metrics=True)
    set_gradients(1)
    for p in params:
        assert p.grad is not None
        p.grad[-1] = 4.0  # the largest: divided by it, gradients are exact
    before = [p.detach().clone() for p in params]
    torch.compile(optimizer.step, backend=backend)()
    measured = backend.metrics()[1]
    for i, (p, old) in enumerate(zip(params, before, strict=True)):
        assert p.grad is not None
        gradient = p.grad.double() / (1 if kind is Momentum else 4)
        wanted = expected_sizes(-Momentum.lr * gradient, old, torch.bfloat16)
        assert measured[f"param_groups[0].params[{i}]"].sizes == wanted
        assert sum(wanted) == pytest.approx(p.numel())


def test_updates_of_many_steps_are_sampled() -> None:
    params, set_gradients = with_few_bits(torch.bfloat16, [(40, 70)])
    backend = CollageBackend(strategy="light", metrics=True)
    set_gradients(1)
    (p,) = params
    old = p.detach().clone()
    torch.compile(Shifted(params, {}).step, backend=backend)()
    assert p.grad is not None
    update = torch.zeros(old.shape, dtype=torch.float64)
    update[:-12] = -Momentum.lr * p.grad[12:].double()
    assert backend.metrics()[1]["param_groups[0].params[0]"].sizes == expected_sizes(
        update, old, torch.bfloat16
    )


def test_a_step_that_is_captured_into_a_cuda_graph_is_refused() -> None:
    params, backend = parameters(shapes=[(64, 64)]), CollageBackend(metrics=True)
    step = torch.compile(torch.optim.AdamW(params).step, backend=backend)
    run_steps(step, params, range(2))
    before = [p.detach().clone() for p in params]
    with captured_into_a_cuda_graph(), pytest.raises(InvalidOptionError, match="would not be measured"):
        step()
    assert all(torch.equal(p, each) for p, each in zip(params, before, strict=True))
    assert len(backend.metrics()) == 2


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
def test_what_is_elementwise_is_computed_for_the_sample_alone(
    options: dict[str, Any],
) -> None:
    params, largest = parameters(shapes=[(64, 80)]), Largest()
    backend = CollageBackend(metrics=True, **options)
    step = torch.compile(torch.optim.AdamW(params, amsgrad=True).step, backend=backend)
    with observing_within(largest):
        run_steps(step, params, range(2))
    assert len(backend.metrics()) == 2
    assert largest.elements == len(places(64 * 80, CPU))


@pytest.mark.parametrize("elements", [1, 7, 1023, 2047, 2048, 2049, 5000, 1 << 20, (1 << 31) - 1])
def test_the_sample_is_spread_evenly(elements: int) -> None:
    run = -(-elements // SAMPLE)
    inside = places(elements, CPU).tolist()
    assert len(set(inside)) == len(inside)
    assert abs(len(inside) - elements / run) < TOGETHER
    assert elements > SAMPLE or inside == list(range(elements))
    groups = [inside[i : i + TOGETHER] for i in range(0, len(inside) - TOGETHER, TOGETHER)]
    assert all(group == list(range(group[0], group[0] + TOGETHER)) for group in groups)
    assert [group[0] // (TOGETHER * run) for group in groups] == list(range(len(groups)))
    if elements == 1 << 20:
        assert len({position % 1024 for position in inside}) == 1024, "every column of a 1024 x 1024 matrix"


def test_a_tensor_without_error_terms_is_one_whose_error_terms_are_zero() -> None:
    old, intended, hi = (torch.randn(3, 100, generator=torch.Generator().manual_seed(i)) for i in range(3))
    zeros = torch.zeros(100)
    rows = [
        rows_of([Sampled(*each) for each in samples], [100, 100, 300], torch.bfloat16)
        for samples in (
            zip(old, [None] * 3, intended, hi, [None] * 3, strict=True),
            zip(old, [zeros] * 3, intended, hi, [zeros] * 3, strict=True),
        )
    ]
    assert torch.equal(*rows)
    assert rows[0][2, SUMS.index("asked")] == 300


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_are_exact(dtype: torch.dtype) -> None:
    """For every hi, subnormals and zero too, and updates from the least float32 to infinity."""
    hi = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    hi = hi[hi.isfinite()][::61]
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 0x7F800000, (hi.numel(),), generator=generator, dtype=torch.int32)
    bits[::5] = torch.arange(0, 256)[torch.arange(bits[::5].numel()) % 256].int() << 23  # powers of two
    bits[1::50], bits[2::50] = 0, torch.arange(bits[2::50].numel(), dtype=torch.int32)
    near = hi * torch.exp2(torch.randint(-29, 9, hi.shape, generator=generator))
    updates = torch.where(torch.arange(hi.numel()) % 3 > 0, near, bits.view(torch.float32))
    # hi + lo = 0 leaves D as it is.
    found = size_bin(hi, -hi, updates, dtype)
    wanted = [bin_of(d, h, dtype) for d, h in zip(updates.tolist(), hi.tolist(), strict=True)]
    assert found.tolist() == wanted
    assert len(set(wanted)) == len(SIZES)
    assert size_bin(hi[:1], -hi[:1], torch.tensor([math.nan]), dtype).item() == len(OCTAVES)


class Scaled(Descent):
    """Each row by its own norm, the whole by the tensor's: elements, rows and a number are joined."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad / (p.grad.norm(dim=-1, keepdim=True) + 1e-3)
                p.sub_(group["lr"] * p.norm() / update.norm() * update + group["lr"] * p.t().contiguous().t())


class Stepwise(Descent):
    """By whole quarters: a division with a keyword."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * torch.div(p.grad, 0.25, rounding_mode="floor"))


#: Optimizers, and the relative error that their updates may have in float32 (Muon computes in bfloat16).
INTENDING: dict[type[Optimizer], float] = {
    **dict.fromkeys((torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam, torch.optim.Rprop), 1e-5),
    **dict.fromkeys((torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.ASGD), 1e-5),
    **dict.fromkeys((Scaled, Stepwise), 1e-5),
    torch.optim.Muon: 2e-2,
}


@pytest.mark.parametrize(
    ("kind", "strategy", "dtype"),
    [
        *((kind, "light", torch.bfloat16) for kind in INTENDING),
        *((torch.optim.AdamW, strategy, torch.float16) for strategy in ("none", "light", "plus")),
        (Scaled, "none", torch.bfloat16),
    ],
    ids=str,
)
def test_what_a_step_intends_is_what_it_does_in_float64(kind: Any, strategy: Any, dtype: torch.dtype) -> None:
    """The new value is rounded to float32, a few times."""
    runs, shapes, lr = {}, ((48, 60), (7, 9)), 2.0**-7
    for metrics in (False, True):
        params = parameters(dtype, seed=3, shapes=shapes)
        optimizer = kind(params, lr=lr)
        backend = CollageBackend(strategy=strategy, metrics=metrics)
        run_steps(torch.compile(optimizer.step, backend=backend), params, range(3))
        runs[metrics] = everything(optimizer)
    assert differences(*runs.values()) == [], "measuring a step has changed it"
    twins = [torch.nn.Parameter(p.detach().double()) for p in parameters(dtype, seed=3, shapes=shapes)]
    before = [p.detach().clone() for p in twins]
    params = parameters(dtype, seed=3, shapes=shapes)
    run_steps(lambda: None, params, range(1))
    for twin, p in zip(twins, params, strict=True):
        assert p.grad is not None
        twin.grad = p.grad.double()
    kind(twins, lr=lr).step()
    for i, (twin, old) in enumerate(zip(twins, before, strict=True)):
        at = places(old.numel(), CPU)
        update = (twin.detach() - old).flatten()[at]
        wanted, scale = update.norm().item(), old.numel() / len(at)
        found = math.sqrt(backend.metrics()[1][f"param_groups[0].params[{i}]"].intended / scale)
        roundings = 2.0**-22 * old.flatten()[at].norm().item()
        assert found == pytest.approx(wanted, rel=INTENDING[kind], abs=roundings)


@pytest.mark.parametrize("options", [{"state": "block8"}, {"bytes_per_parameter": 8}], ids=str)
def test_packed_state_is_read_as_the_step_reads_it(options: dict[str, Any]) -> None:
    params = parameters(shapes=[(64, 64), (64, 64), (64, 80)])
    backend = CollageBackend(metrics=True, **options)
    run_steps(torch.compile(torch.optim.AdamW(params).step, backend=backend), params, range(4))
    (graph, *_) = backend.report().graphs[-1:]
    assert any(tensor.packed for tensor in graph.tensors)
    for quality in backend.metrics()[4].values():
        assert quality.edq_ratio == pytest.approx(1, abs=0.01)


class Noisy(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch overloads it
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + torch.randn_like(p), alpha=-group["lr"])


def test_measuring_draws_no_numbers_of_the_step() -> None:
    found = []
    for metrics in (False, True):
        torch.manual_seed(0)
        params = parameters(shapes=[(9, 7)])
        step = torch.compile(Noisy(params).step, backend=CollageBackend(metrics=metrics))
        run_steps(step, params, range(3))
        found.append(torch.cat([params[0].detach().float().flatten(), torch.rand(1)]))
    assert torch.equal(*found)


@pytest.mark.parametrize("options", OPTIONS[:2], ids=lambda options: "-".join(options.values()))
def test_every_so_often(options: dict[str, Any]) -> None:
    backends = [CollageBackend(metrics=True, metrics_every=every, **options) for every in (1, 2)]
    results = []
    for backend in backends:
        params = parameters()
        optimizer = Descent(params)
        run_steps(torch.compile(optimizer.step, backend=backend), params, range(5))
        results.append(everything(optimizer))
    assert differences(*results) == []
    always, seldom = (backend.metrics() for backend in backends)
    assert list(always) == [1, 2, 3, 4, 5]
    assert list(seldom) == [2, 4]
    assert dict(seldom[4]) == dict(always[4])


def test_off_leaves_no_trace() -> None:
    with pytest.raises(InvalidOptionError, match="metrics=True"):
        CollageBackend(metrics=False).metrics()


@pytest.fixture(scope="module")
def trained() -> tuple[torch.nn.Module, CollageBackend]:
    """Two optimizers of one backend, one given names, and groups."""
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Sequential(torch.nn.Linear(4, 3)))
    second = torch.nn.Linear(3, 2)
    model = torch.nn.ModuleDict({"first": first, "second": second}).bfloat16()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    named = list(model["first"].named_parameters())
    groups: list[dict[str, Any]] = [{"params": named[:2]}, {"params": named[2:], "weight_decay": 0.1}]
    backend = CollageBackend(metrics=True)
    optimizers: list[Optimizer] = [torch.optim.AdamW(groups)]
    optimizers.append(torch.optim.SGD(model["second"].parameters(), lr=1e-3))
    for optimizer in optimizers:
        step = torch.compile(optimizer.step, backend=backend)
        for _ in range(2):
            step()
    return model, backend


def test_names_groups_and_modules(trained: tuple[torch.nn.Module, CollageBackend]) -> None:
    model, backend = trained
    metrics = backend.metrics()
    assert list(metrics) == [1, 2]
    name = "AdamW: 1.0.weight"
    assert metrics.tensors[name] == MeasuredTensor("1.0.weight", "parameter", "1.0", 1, "AdamW")
    assert metrics.tensors[f"{name}.exp_avg_sq"].kind == "exp_avg_sq"
    assert metrics.tensors["SGD: param_groups[0].params[1]"].module == ""
    assert backend.metrics(model).tensors["SGD: second.bias"].module == "second"
    assert "AdamW: first.1.0.weight.exp_avg_sq" in backend.metrics(model)[2]


def test_aggregates(trained: tuple[torch.nn.Module, CollageBackend]) -> None:
    model, backend = trained
    metrics = backend.metrics(model)
    elements = {name: p.numel() for name, p in model.named_parameters()}
    modules = metrics.by_module()[2]
    assert {module: quality.elements for module, quality in modules.items()} == {
        "first.0": 24,
        "first.1.0": 15,
        "second": 8,
    }
    whole = metrics.overall()[2]
    assert whole.elements == sum(elements.values())
    assert whole.along == pytest.approx(sum(quality.along for quality in modules.values()))
    assert set(metrics.by_module(1)[2]) == {"first", "second"}
    assert {group: quality.elements for group, quality in metrics.by_group()[2].items()} == {0: 32, 1: 15}
    assert metrics.by_kind()[2]["exp_avg_sq"].elements == 39
    assert metrics.overall("exp_avg_sq")[2].elements == 39
    with pytest.raises(InvalidOptionError, match="no tensor of kind 'exp_avg'"):
        metrics.overall("exp_avg")


def test_files_and_scalars(trained: tuple[torch.nn.Module, CollageBackend], tmp_path: Path) -> None:
    model, backend = trained
    metrics = backend.metrics(model)
    rows = json.loads(metrics.to_json(tmp_path / "m.json").read_text())
    with metrics.to_csv(tmp_path / "m.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(rows) == len(table) == sum(map(len, metrics.values()))
    quality = metrics[1]["AdamW: first.0.weight"]
    (row,) = (row for row in rows if (row["step"], row["tensor"]) == (1, "AdamW: first.0.weight"))
    (line,) = (row for row in table if (row["step"], row["tensor"]) == ("1", "AdamW: first.0.weight"))
    assert row["edq_ratio"] == float(line["edq_ratio"]) == quality.edq_ratio
    assert [row[name] for name in SIZES] == [float(line[name]) for name in SIZES] == list(quality.sizes)
    assert (row["module"], row["group"], row["kind"]) == ("first.0", 0, "parameter")
    scalars = metrics.scalars()
    assert scalars["collage/edq_ratio"] == metrics.overall()[2].edq_ratio
    assert scalars["collage/second/lost_share"] == metrics.by_module()[2]["second"].lost_share


def test_plot(trained: tuple[torch.nn.Module, CollageBackend], tmp_path: Path) -> None:
    model, backend = trained
    text = backend.plot(tmp_path / "m.svg", model).read_text()
    assert text.startswith("<?xml")
    # matplotlib draws text as outlines, with the text itself as a comment
    assert all(f"<!-- {module} -->" in text for module in ("first.0", "first.1.0", "second"))
    assert "<!-- a plain bf16 or fp16 weight loses these -->" in text
    for step, quality in backend.metrics(model).overall().items():
        assert f"<!-- step {step}: {quality.small_share:.0%} are less than half an ulp -->" in text
    assert "first.0" not in backend.plot(tmp_path / "m.svg", model, depth=1).read_text()
    assert "<!-- hi alone -->" in text
    with pytest.raises(InvalidOptionError, match="nothing has been measured"):
        CollageBackend(metrics=True).plot(tmp_path / "m.svg")


@pytest.mark.parametrize("held", [0.0, 1.0])
def test_without_error_terms_hi_is_all_there_is_to_plot(held: float, tmp_path: Path) -> None:
    quality = UpdateQuality(
        1, **{**dict.fromkeys(SUMS, 0.0), "held": held}, sizes=(1.0, *[0.0] * len(OCTAVES))
    )
    metrics = Metrics({1: {"p": quality}}, {"p": MeasuredTensor("p", "parameter", "", 0, "SGD")})
    text = plot(metrics, tmp_path / "m.svg").read_text()
    assert ("<!-- hi alone -->" in text) == ("<!-- as stored -->" not in text) == bool(held)


def test_the_page_has_the_last_step(trained: tuple[torch.nn.Module, CollageBackend]) -> None:
    _, backend = trained
    page = backend.report().to_html()
    assert page.count("<h3>Updates of step 2</h3>") == 2
    quality = backend.metrics().by_module()[2]["1.0"]
    row = rf"<tr><td>parameter *</td><td>1.0 *</td><td[^>]*> *{quality.edq_ratio:.4f}</td>"
    assert len(re.findall(row, page)) == 1
    assert "Updates of step" not in CollageBackend().report().to_html()


def test_derived_values() -> None:
    """D = (3, 4), D̂ = (3, 0) for hi and (3, 3) for hi + lo; two elements more have no update."""
    sizes = (2.0, *(float(k in (-1, 0)) for k in OCTAVES))
    quality = UpdateQuality(
        4, 25, 9, 9, 21, 18, 9, asked=2, lost_hi=1, lost=0, unchanged=3, held=1, sizes=sizes
    )
    assert quality.small_share == 1 / 2
    assert (quality.size_edges[0], quality.size_edges[-1]) == (2.0**-16, 2.0**16)
    assert quality.size_edges[OCTAVES.index(0)] == 1
    assert len(quality.size_edges) == len(quality.sizes)
    assert (quality + quality).sizes == tuple(2 * count for count in sizes)
    assert (quality.edq_hi, quality.edq_ratio_hi) == (9 / 5, 9 / 25)
    assert (quality.edq, quality.edq_ratio) == (21 / 5, 21 / 25)
    assert (quality.intended_norm, quality.effective_norm_hi, quality.error_norm) == (5, 3, 3)
    assert quality.effective_norm == math.sqrt(18)
    assert (quality.lost_share_hi, quality.lost_share) == (1 / 2, 0)
    assert (quality.imprecision, quality.error_share) == (3 / 4, 1 / 4)
    shown = "edq_ratio=0.84, lost_share=0, lost_share_hi=0.5, small_share=0.5, error_share=0.25"
    assert repr(quality) == f"UpdateQuality(elements=4, {shown})"
    measured = Metrics({7: {"p": quality}}, {"p": MeasuredTensor("p", "parameter", "", 0, "SGD")})
    assert repr(measured) == f"Metrics(1 steps, 7 to 7, of 1 tensors; the last of parameters: {quality})"
    of_state = Metrics({7: {"p": quality}}, {"p": MeasuredTensor("p", "exp_avg", "", 0, "Adam")})
    assert repr(of_state) == "Metrics(1 steps, 7 to 7, of 1 tensors)"
    nothing = UpdateQuality(2, **dict.fromkeys(SUMS, 0.0), sizes=(2.0, *[0.0] * len(OCTAVES)))
    assert math.isnan(nothing.small_share)
    assert math.isnan(nothing.edq_ratio)
    assert math.isnan(nothing.lost_share)
    assert Metrics({}, {}).scalars() == {}


def test_forgetting_goes_on_counting() -> None:
    params = parameters()
    backend = CollageBackend(metrics=True)
    step = torch.compile(Descent(params).step, backend=backend)
    run_steps(step, params, range(2))
    backend.forget_metrics()
    assert not backend.metrics()
    run_steps(step, params, range(1))
    assert list(backend.metrics()) == [3]


class Branching(Descent):
    """Recorded: whether it steps depends on a value."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad.abs().max() > 0:
                    p.add_(p.grad, alpha=-group["lr"])


def test_recorded_steps_count_once() -> None:
    params = parameters(shapes=((4, 6), (5,), (4, 6)))
    backend = CollageBackend(metrics=True)
    run_steps(torch.compile(Branching(params).step, backend=backend), params, range(2))
    metrics = backend.metrics()
    assert list(metrics) == [1, 2]
    assert {name: quality.elements for name, quality in metrics[2].items()} == {
        "param_groups[0].params[0]": 24,
        "param_groups[0].params[1]": 5,
        "param_groups[0].params[2]": 24,
    }
    assert all(quality.lost_share < 0.2 < quality.lost_share_hi for quality in metrics[2].values())


def test_recorded_steps_of_other_sizes_are_measured() -> None:
    """Code of recorded steps takes any size once sizes change; the places of a sample depend on it."""
    sizes = ((4, 6), (3, 5), (70, 20), (2, 2))
    params = parameters(shapes=sizes)
    optimizer, backend = Branching(params[:1]), CollageBackend(metrics=True)
    step = torch.compile(optimizer.step, backend=backend)
    for i, added in enumerate(params[1:], 1):
        run_steps(step, params[:i], [i])
        optimizer.add_param_group({"params": [added]})
    run_steps(step, params, range(2))
    last = backend.metrics()[5]
    assert [quality.elements for quality in last.values()] == [math.prod(size) for size in sizes]
    assert all(quality.lost_share < 0.2 < quality.lost_share_hi for quality in last.values())


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_is_a_whole_number(every: Any) -> None:
    with pytest.raises(InvalidOptionError, match="metrics_every"):
        CollageBackend(metrics=True, metrics_every=every)


@pytest.mark.parametrize("every", [1, 2])
def test_a_measured_step_leaves_parameters_without_a_gradient_alone(every: int) -> None:
    """Bits are those of the steps without metrics, whichever gradients are absent."""
    shapes = [(8, 4), (8, 4), (5,)]
    measured, expected = parameters(shapes=shapes), parameters(shapes=shapes)
    made = [torch.optim.AdamW(params, lr=1e-3) for params in (measured, expected)]
    install(made[0], metrics=True, metrics_every=every)
    install(made[1])
    for i in range(6):
        for optimizer, params in zip(made, (measured, expected), strict=True):
            set_gradients(params, seed=i)
            if i % 3:
                params[i % 3].grad = None
            optimizer.step()
    assert not differences(everything(made[0]), everything(made[1]))
