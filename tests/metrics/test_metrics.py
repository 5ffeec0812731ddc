"""What ``CollageBackend(metrics=True)`` measures, against the same computed from saved tensors in float64."""

from __future__ import annotations

import csv
import functools
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
from torch._inductor.utils import fresh_cache
from torch.optim import Optimizer

from collage_fx import CollageBackend, full_value
from collage_fx.codegen.kernels import CHUNK
from collage_fx.codegen.sums import LANES
from collage_fx.errors import InvalidOptionError
from collage_fx.graph.nodes import PASS_MARK, placeholders
from collage_fx.graph.operators import update_sizes, update_sums
from collage_fx.metrics.quality import MeasuredTensor, Metrics, UpdateQuality
from collage_fx.numerics.formats import storage_format
from collage_fx.numerics.update_sums import (
    COUNTS,
    OCTAVES,
    SAMPLE,
    SIZES,
    SUMS,
    TOGETHER,
    nearest_sampled,
    sampled,
    size_bin,
    sizes,
    sums,
)
from collage_fx.torch_compat import inductor_config
from collage_tools.pages.plots import plot
from tests.support import triton_offline as offline
from tests.support.substitutes import captured_into_a_cuda_graph
from tests.support.training import Descent, compiled, differences, everything, parameters, run_steps

DTYPES = (torch.bfloat16, torch.float16)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"strategy": "none"},
    {"strategy": "light"},
    {"strategy": "plus"},
    {"strategy": "full"},
    {"strategy": "full", "arithmetic": "native"},
    {"strategy": "full", "error_format": "fp32"},
)


#: Bound of Note [Sums in lanes], 9 u, with room for the float64 additions of 2**28 chunks.
LOSS = (CHUNK // LANES + 2) * 2.0**-24


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
    """The sums, from tensors that the test has saved; all exact in float64 but for the additions."""
    moved_hi = tensor.double() - old.double()
    moved = full_value(tensor) - old_full
    error = full_value(tensor) - tensor.double()
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
    return {name: value.sum().item() for name, value in zip(SUMS, values, strict=True)}


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
    sample = [i for i in (sampled(i, hi.numel()) for i in range(SAMPLE)) if i < hi.numel()]
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

    Those are off by at most LOSS of the sum of absolute values; asked for is 1e-5.
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
                        assert getattr(measured[name], key) == pytest.approx(value, rel=0, abs=tolerance)
                    assert measured[name].sizes == expected_sizes(update, before[slot][i][0], dtype)
                    lost += wanted["lost_hi"]
    assert lost > 0, "nothing was lost, so that losses were not counted"


@pytest.mark.parametrize(
    ("scale", "settings"),
    [
        (1.0, {}),
        (2.0**-80, {}),  # squares that float32 does not have
        (2.0**75, {}),  # likewise, at the other end
        (1.0, {"cpp.threads": 2}),
        (2.0**-80, {"cpp.simdlen": 256}),
        (1.0, {"cpp.simdlen": 1}),
    ],
    ids=str,
)
def test_sums_of_many_elements(scale: float, settings: dict[str, Any]) -> None:
    """In blocks, of which the first has no updates, and the last is not full; scaling is exact."""
    params, set_gradients = with_few_bits(torch.bfloat16, [(40, 70)])
    (p,) = params
    p.data.mul_(scale)
    backend = CollageBackend(strategy="light", metrics=True)
    step = torch.compile(Momentum(params).step, backend=backend)
    with inductor_config.patch(settings):
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
                tolerance = 0 if key in COUNTS else LOSS * sum_of_sizes(wanted, key)
                assert getattr(measured, key) == pytest.approx(value, rel=0, abs=tolerance), key
            assert wanted["error"] > 0


def test_sums_are_added_up_in_the_loop_of_the_step() -> None:
    """Nothing is read once more for them."""
    codes: list[str] = []
    for metrics in (False, True):
        params = parameters(shapes=[(64, 64)])
        backend = CollageBackend(strategy="plus", metrics=metrics)
        run_steps(torch.compile(torch.optim.AdamW(params).step, backend=backend), params, range(1))
        (graph,) = backend.report().graphs
        codes.append(graph.code[-1])  # that of the elements, behind that of the numbers
    loops = [len(re.findall(r"for \(.*at", code)) for code in codes]
    assert loops[0] == loops[1]
    assert [len(re.findall(r"sums_of_\w+\.add\(", code)) for code in codes] == [0, 2], (
        "of p and the 2nd moment"
    )


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


LARGE_RULES: list[Callable[[Any], Optimizer]] = [
    functools.partial(torch.optim.AdamW, amsgrad=True),
    functools.partial(torch.optim.RMSprop, centered=True, momentum=0.9),
]


def test_a_step_that_is_captured_into_a_cuda_graph_is_refused() -> None:
    params, backend = parameters(shapes=[(64, 64)]), CollageBackend(metrics=True)
    step = torch.compile(torch.optim.AdamW(params).step, backend=backend)
    run_steps(step, params, range(2))
    before = [p.detach().clone() for p in params]
    with captured_into_a_cuda_graph(), pytest.raises(InvalidOptionError, match="would not be measured"):
        step()
    assert all(torch.equal(p, each) for p, each in zip(params, before, strict=True))
    assert len(backend.metrics()) == 2


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, options) for kind in (Descent, torch.optim.AdamW) for options in OPTIONS]
    + [(kind, {"strategy": "full"}) for kind in LARGE_RULES],
    ids=str,
)
def test_no_tensor_is_kept_in_memory_to_be_measured(
    options: dict[str, Any], kind: Callable[[Any], Optimizer]
) -> None:
    """Sums are computed in the loop that stores what is measured, and the sample is computed anew."""
    params = parameters(shapes=[(64, 64)])
    backend = CollageBackend(metrics=True, **options)
    run_steps(torch.compile(kind(params).step, backend=backend), params, range(1))
    (graph,) = backend.report().graphs
    allocated = re.findall(r"empty_strided_cpu\(\((.*?)\), .*torch.(\w+)\)", "".join(graph.code))
    assert {size for size, _ in allocated} <= {"", "1024, ", f"{len(SIZES)}, ", f"{len(SUMS)}, "}


@pytest.mark.parametrize("elements", [1, 7, 1023, 1024, 1025, 2048, 5000, 1 << 20, (1 << 31) - 1])
def test_the_sample_is_spread_evenly(elements: int) -> None:
    run = -(-elements // SAMPLE)
    positions = [sampled(i, elements) for i in range(SAMPLE)]
    groups = [positions[i : i + TOGETHER] for i in range(0, SAMPLE, TOGETHER)]
    assert all(group == list(range(group[0], group[0] + TOGETHER)) for group in groups)
    assert [group[0] // (TOGETHER * run) for group in groups] == list(range(len(groups)))
    inside = [position for position in positions if position < elements]
    assert abs(len(inside) - elements / run) < TOGETHER
    assert [nearest_sampled(position, elements) for position in inside] == [
        i for i, position in enumerate(positions) if position < elements
    ]
    others = {*range(min(elements, 1 << 16))} - {*inside}
    assert all(sampled(nearest_sampled(place, elements), elements) != place for place in others)
    if elements == 1 << 20:
        assert len({position % 1024 for position in inside}) == SAMPLE, "every column of a 1024 x 1024 matrix"


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


@pytest.mark.parametrize("shape", [(1,), (0,), (37, 29), (40, 70)])
def test_compiled_sizes_are_those_of_the_definition(shape: tuple[int, ...]) -> None:
    hi, lo, intended = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(3))
    intended = torch.where(intended > 0, hi * (1 + intended * 1e-3), hi)
    compiled_operator = torch.compile(lambda *x: update_sizes(x[0], x[1], x[2] + 0, torch.bfloat16))
    for term in (lo * 1e-3, None):
        wanted = sizes(hi, torch.zeros(shape) if term is None else term, intended, torch.bfloat16)
        with fresh_cache():  # which knows an operator by its name alone
            assert torch.equal(compiled_operator(hi, term, intended), wanted)
        assert torch.equal(update_sizes(hi, term, intended, torch.bfloat16), wanted)


@pytest.mark.skipif(not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy")
def test_a_row_in_triton() -> None:
    """The operators as Triton code, interpreted: sums of few bits are exact in any order."""

    def row(hi: Tensor, lo: Tensor, update: Tensor, totals: Tensor, counts: Tensor) -> None:
        old, old_lo = hi.float(), lo.float()
        intended = old + old_lo + update
        totals.copy_(update_sums(old, old_lo, intended, old + update, old_lo))
        counts.copy_(update_sizes(old, old_lo, intended, torch.bfloat16))

    shape, generator = (40, 70), torch.Generator().manual_seed(0)
    hi, lo, update = (torch.randint(-99, 100, shape, generator=generator).float() for _ in range(3))
    inputs = [hi.bfloat16(), (lo * 2.0**-8).bfloat16(), update * 2.0**-12]
    inputs += [torch.zeros(len(columns)).double() for columns in (SUMS, SIZES)]
    source = offline.triton_source(offline.to_cuda(offline.functional_graph(row, *inputs)))
    wanted, found = ([each.clone() for each in inputs] for _ in range(2))
    row(*wanted)
    offline.run_in_interpreter(source, found)
    assert torch.equal(found[3], wanted[3])
    assert torch.equal(found[4], wanted[4])
    assert offline.compile_to_ptx(source)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", ["none", "light", "plus"])
def test_adamw_is_not_changed_and_its_updates_are_those_of_float32(strategy: Any, dtype: torch.dtype) -> None:
    """The intended update is that of an optimizer with float32 masters of the same values.

    Both compute the new value in float32 from the same old one; the master keeps it as it is.
    """
    runs = {}
    for metrics in (False, True):
        params = parameters(dtype, seed=3)
        optimizer = torch.optim.AdamW(params, lr=1e-3)
        backend = CollageBackend(strategy=strategy, metrics=metrics)
        run_steps(torch.compile(optimizer.step, backend=backend), params, range(3))
        runs[metrics] = everything(optimizer)
    assert differences(*runs.values()) == []
    masters = parameters(dtype, seed=3)
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    step = compiled(optimizer, strategy="full", error_format="fp32")
    before = [full_value(p) for p in masters]
    run_steps(step, masters, range(1))
    measured = backend.metrics()[1]
    for i, (p, old) in enumerate(zip(masters, before, strict=True)):
        # The difference of the two float32 numbers is rounded once: 2**-24 of each element's update.
        update = (full_value(p) - old).square().sum().item()
        assert measured[f"param_groups[0].params[{i}]"].intended == pytest.approx(update, rel=2.0**-22)


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
    graphs, inputs = [], []
    for metrics in (False, True):
        params = parameters()
        backend = CollageBackend(metrics=metrics)
        run_steps(torch.compile(Descent(params).step, backend=backend), params, range(1))
        (report,) = backend.report().graphs
        graphs.append(report.after.graph)
        inputs.append(len(placeholders(report.after.graph)))
        assert ("measure" in [name for name, _ in report.passes]) == metrics
    # Parameter, gradient, error term, count and start; sums, sizes.
    assert inputs == [5 * len(params), 7 * len(params)]
    assert not [node for node in graphs[0].nodes if node.meta.get(PASS_MARK) == "measure"]
    for operator in (update_sums, update_sizes):
        assert not graphs[0].find_nodes(op="call_function", target=operator)
        assert len(graphs[1].find_nodes(op="call_function", target=operator)) == len(params)
    with pytest.raises(InvalidOptionError, match="metrics=True"):
        CollageBackend(metrics=False).metrics()


def test_the_operator_is_its_definition() -> None:
    tensors = [torch.randn(100, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    tensors[2][::3] = tensors[0][::3] + tensors[1][::3]
    tensors[3][::2] = tensors[0][::2]
    assert torch.equal(update_sums(*tensors), sums(*tensors))
    old, _, new, hi, _ = tensors
    zeros = torch.zeros(100)
    assert torch.equal(update_sums(old, None, new, hi, None), sums(old, zeros, new, hi, zeros))


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
    assert quality.size_edges[OCTAVES.index(0)] == 1
    assert len(quality.size_edges) == len(quality.sizes)
    assert (quality + quality).sizes == tuple(2 * count for count in sizes)
    assert (quality.edq_hi, quality.edq_ratio_hi) == (9 / 5, 9 / 25)
    assert (quality.edq, quality.edq_ratio) == (21 / 5, 21 / 25)
    assert (quality.intended_norm, quality.effective_norm_hi, quality.error_norm) == (5, 3, 3)
    assert quality.effective_norm == math.sqrt(18)
    assert (quality.lost_share_hi, quality.lost_share) == (1 / 2, 0)
    assert (quality.imprecision, quality.error_share) == (3 / 4, 1 / 4)
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


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_is_a_whole_number(every: Any) -> None:
    with pytest.raises(InvalidOptionError, match="metrics_every"):
        CollageBackend(metrics=True, metrics_every=every)
