"""Dither in whole steps: state without error terms (``rounding="dither"``), and ``error_format="byte"``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.nn import Parameter

from collage_fx import CollageBackend, error_terms, explain, full_value
from collage_fx.graph import Unit
from collage_fx.lowering.lower import inductor_settings
from collage_fx.numerics.dither import dithered, phase, phases
from collage_fx.state.error_terms import record_of
from collage_fx.torch_compat import local_tensor
from tests.support import triton_offline as offline
from tests.support.agreement import assert_same, trajectory
from tests.support.exact import fractions
from tests.support.float24 import nearest, rounded
from tests.support.float24 import phase as phase_of
from tests.support.optimizers import CompiledOptimizer, gradients
from tests.support.processes import Processes
from tests.support.substitutes import lowered_as
from tests.support.training import (
    compiled,
    everything,
    live_error_terms,
    parameters,
    run_steps,
    set_gradients,
)
from tests.support.twin import TwinBackend
from tests.support.whole import pipeline
from tests.test_sharded import SHAPES as SHARED_OUT
from tests.test_sharded import in_one_piece, in_pieces, set_gradients_in_pieces

#: The last is so large that threads share it out.
SHAPES = ((33, 17), (33, 17), (37,), (300, 500))


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, **options)


#: Moments that have no error terms; parameters, one moment or both with a byte; and both together.
OPTIONS: dict[str, dict[str, Any]] = {
    "dither": {"strategy": "light", "rounding": "dither"},
    "byte": {"strategy": "full", "error_format": "byte"},
    "both": {"strategy": "light", "rounding": "dither", "error_format": "byte"},
}
each_kind = pytest.mark.parametrize("kind", OPTIONS)


def counts(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the counts of all state that is rounded by dither where it is stored, parameters first."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [*params, *(each for state in optimizer.state.values() for each in state.values())]
    found = [record_of(tensor) for tensor in tensors if tensor.dim()]
    formats = [(each, each.format) for each in found if each is not None]
    return [int(each.auxiliaries[-1]) for each, fmt in formats if fmt.is_dithered and not fmt.dithers_sums]


# The bits. ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["by family", "in parts", "whole"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_kind
def test_compiled_bits_are_eager_bits(kind: str, dtype: torch.dtype, unit: Unit) -> None:
    backend = TwinBackend(**OPTIONS[kind], passes=pipeline(by_family=unit == "by family"))
    rig = CompiledOptimizer(SHAPES, adamw, backend, dtype=dtype)
    with lowered_as(unit):
        start = rig.start()
    assert rig.backend.report().graphs[-1].route.unit == unit
    grads = list(gradients(SHAPES, 4, scale=0.01))
    states = trajectory(rig, start, grads)
    assert_same(states, trajectory(rig, start, grads, engine="eager"))
    assert int(states[-1]["3.exp_avg.count"]) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_state_is_that_of_the_recurrence_rounded_by_the_definition(dtype: torch.dtype) -> None:
    """Momentum, whose float32 arithmetic is one multiplication and one addition; strides of many kinds."""
    params = parameters(dtype, shapes=((30, 40), (5000,), (6, 4, 4, 2)))
    params[0].data = params[0].data.t().contiguous().t()
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    step = compiled(optimizer, strategy="light", rounding="dither")
    expected: list[Tensor] = []
    for count in range(5):
        set_gradients(params, count)
        step()
        grads = [p.grad.float() for p in params if p.grad is not None]
        if not expected:  # it is born as a copy of the gradient, and has no count before
            expected = [grad.to(dtype) for grad in grads]
            continue
        for i, grad in enumerate(grads):
            value = expected[i].float() * torch.tensor(0.9) + grad
            turn = phase(torch.tensor(count - 1).int(), torch.tensor(0).int())
            buffer = optimizer.state[params[i]]["momentum_buffer"]
            expected[i] = dithered(value, phases(buffer, turn), dtype).to(dtype)
            assert torch.equal(buffer, expected[i]), (count, i)
    assert counts(optimizer) == [4, 4, 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_are_those_of_the_recurrence_rounded_by_the_definition(dtype: torch.dtype) -> None:
    """SGD, whose float32 arithmetic is one addition: each element is followed in exact numbers."""
    params = parameters(dtype, shapes=((30, 20), (6, 4, 4, 2), (7,)))
    params[0].data = params[0].data.t().contiguous().t()
    params[1].data = params[1].data.to(memory_format=torch.channels_last)
    step = compiled(torch.optim.SGD(params, lr=2.0**-10), error_format="byte")
    values = [fractions(_in_memory(p)) for p in params]
    for count in range(4):
        set_gradients(params, count)
        step()
        for i, p in enumerate(params):
            assert p.grad is not None
            grad = torch.empty_like(p).copy_(p.grad)  # in the parameter's layout
            changes = [-each / 2**10 for each in fractions(_in_memory(grad))]
            values[i] = [
                rounded(_as_float32(value + change), phase_of(place, count), dtype)
                for place, (value, change) in enumerate(zip(values[i], changes, strict=True))
            ]
            assert fractions(_in_memory(p)) == [nearest(value, dtype) for value in values[i]]
            (term,) = error_terms(p)
            assert fractions(_in_memory(p.detach().float() + term)) == values[i]
    assert [int(live_error_terms(p)[-1]) for p in params] == [4, 4, 4]


def _in_memory(tensor: Tensor) -> Tensor:
    """The elements in their order in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _as_float32(value: Fraction) -> Fraction:
    """Float64 holds the sum of two numbers that are less than 2**29 apart."""
    assert Fraction(float(value)) == value
    return Fraction(float(torch.tensor(float(value), dtype=torch.float64).float()))


@pytest.mark.skipif(not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_kind
def test_triton_gives_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    shapes = ((33, 17), (70,))
    backend = TwinBackend(**OPTIONS[kind], passes=pipeline(by_family=False))
    rig = CompiledOptimizer(
        shapes, lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9), backend, dtype=dtype
    )
    start = rig.start()
    rig.step([torch.ones(shape) for shape in shapes])  # the step with momentum
    start = {**rig.tensors(), **start}
    with torch._inductor.config.patch(inductor_settings("wide")):
        source = offline.triton_source(offline.to_cuda(backend.graphs[-1]))
    grads = list(gradients(shapes, 2))
    interpreted = trajectory(
        rig, start, grads, engine=lambda arguments: offline.run_in_interpreter(source, arguments)
    )
    assert_same(interpreted, trajectory(rig, start, grads, engine="eager"))


# What is rounded so. --------------------------------------------------------------------------------------


def formats(optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, str]:
    rows = explain(optimizer, **options).tensors
    return {row.symbol: row.error_format for row in rows}


def test_state_that_carries_something_and_has_no_error_terms_is_dithered() -> None:
    made = adamw(parameters())
    assert formats(made, strategy="light", rounding="dither") == {
        "p": "exact",
        "exp_avg": "dither",
        "exp_avg_sq": "dither",
    }
    assert formats(made, strategy="plus", rounding="dither")["exp_avg_sq"] == "exact"
    assert set(formats(made, strategy="full", rounding="dither").values()) == {"exact"}
    assert set(formats(made, strategy="none", rounding="dither").values()) == {""}
    report = explain(made, strategy="light", rounding="dither")
    assert "rounded by dither" in str(report)
    assert not any(row.compensated for row in report.tensors if row.symbol != "p")


def test_the_default_has_its_formats_but_in_native_arithmetic() -> None:
    made = adamw(parameters())
    assert formats(made, strategy="light") == formats(made, strategy="light", rounding="dither")
    assert CollageBackend().options.rounding == "repay"
    assert CollageBackend(arithmetic="native").options.rounding == "nearest"
    assert set(formats(made, strategy="light", rounding="nearest").values()) == {"exact", ""}


class Masked(torch.optim.Optimizer):
    """Moves what has had a positive gradient, as a mask of its state says; and counts, by element."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["seen"], state["count"] = torch.zeros_like(p), torch.zeros_like(p)
            state["seen"].copy_(torch.maximum(state["seen"], (p.grad > 0).to(p.dtype)))
            state["count"].add_(state["seen"])
            p.sub_(1e-3 * state["seen"] * p.grad)


def test_what_needs_no_rounding_is_as_it_is() -> None:
    """Masks, and counts as long as the format has them, also where the program rewrites them."""
    (p,) = params = parameters(shapes=((64, 3),))
    optimizer = Masked(params)
    step = compiled(optimizer, strategy="light")
    seen, count = torch.zeros(64, 3), torch.zeros(64, 3)
    for seed in range(20):
        set_gradients(params, seed)
        if seed == 10:
            seen.zero_()
            optimizer.state[p]["seen"].zero_()
        step()
        assert p.grad is not None
        seen = torch.maximum(seen, (p.grad > 0).float())
        count += seen
        assert torch.equal(optimizer.state[p]["seen"].float(), seen)
        assert torch.equal(optimizer.state[p]["count"].float(), count)
    assert counts(optimizer) == [19] * 2  # the state is born in the first step


@each_kind
def test_metrics_change_no_bit(kind: str) -> None:
    grads = list(gradients(SHAPES, 2))
    ends = []
    for metrics in (False, True):
        backend = TwinBackend(**OPTIONS[kind], metrics=metrics)
        rig = CompiledOptimizer(SHAPES, adamw, backend)
        ends.append(trajectory(rig, rig.start(), grads))
    assert_same(*ends)


def test_parameters_may_be_dithered_too() -> None:
    """A weight of 1 moved by a tenth of its ulp, 100 times: nearest leaves it where it is."""
    (p,) = params = [Parameter(torch.ones(4096).bfloat16())]
    optimizer = torch.optim.SGD(params, lr=1.0)
    step = compiled(optimizer, strategy="light", error_format="dither")
    p.grad = torch.full_like(p, -0.1 * 2.0**-7)
    for _ in range(100):
        step()
    moved = (p.detach().float() - 1) * 2.0**7
    assert abs(float(moved.mean()) - 10) < 0.1
    assert (moved - 10).abs().max() < 5  # random choices would be off by sqrt(100 / 4) of them, at most, each
    assert error_terms(p) == ()


def test_it_is_refused_in_native_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"native[\s\S]*where: rounding\n"):
        CollageBackend(arithmetic="native", rounding="dither")
    with pytest.raises(ValueError, match=r"rounding='up' is not allowed"):
        CollageBackend(rounding="up")  # type: ignore[arg-type]


def test_sums_may_be_in_bytes() -> None:
    """Gradients are summed in place and zeroed by somebody else; the count goes on."""
    total = torch.zeros(3, 1000).bfloat16()
    grad = torch.full_like(total, 2.0**-17)  # a quarter of the byte's unit at 1

    @torch.compile(backend=CollageBackend(error_format="byte"))
    def accumulate(total: Tensor, grad: Tensor) -> None:
        total.add_(grad)

    for rounds in (1, 2):
        total.zero_()
        accumulate(total, torch.ones_like(total))
        for _ in range(64):
            accumulate(total, grad)
        off = full_value(total) - (1 + 64 * 2.0**-17)
        assert abs(float(off.mean())) < 2.0**-15 * (64 / off.numel()) ** 0.5  # of independent choices
        assert int(live_error_terms(total)[-1]) == 65 * rounds


@pytest.mark.filterwarnings("ignore:.*exp_avg_sq of AdamW has been written to")
def take(step: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        step()


def test_a_decay_goes_on_where_nearest_stands_still() -> None:
    """V' = 0.999 v is v in bfloat16. From 1, 500 steps of zero gradients are to leave 0.606."""
    left = {}
    for rounding in ("nearest", "dither"):
        (p,) = params = [Parameter(torch.zeros(1000).bfloat16())]
        optimizer = adamw(params)
        step = compiled(optimizer, strategy="light", rounding=rounding)
        p.grad = torch.zeros_like(p)
        step()
        optimizer.state[p]["exp_avg_sq"].fill_(1)
        with pytest.warns(UserWarning, match="exp_avg_sq of AdamW: written to between two steps"):
            take(step, 500)
        left[rounding] = optimizer.state[p]["exp_avg_sq"].float()
    assert (left["nearest"] == 1).all()
    expected = 0.999**500
    # An ulp is 2**-8 at most. Random roundings would be off by sqrt(500 / 4) of them, at most, each.
    assert (left["dither"] - expected).abs().max() < (500 / 4) ** 0.5 * 2.0**-8
    assert abs(float(left["dither"].mean()) - expected) < 2.0**-8 / 4


# Over and over. -------------------------------------------------------------------------------------------


def interrupted(kind: str, detour: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What an uninterrupted run leaves, and one that goes on with other objects."""
    left = []
    for resumed in (False, True):
        params = parameters()
        optimizer = adamw(params)
        step = compiled(optimizer, **OPTIONS[kind])
        run_steps(step, params, range(40))
        if resumed:
            saved = copy.deepcopy(optimizer.state_dict())
            params = [Parameter(p.detach().clone()) for p in params]
            if detour == "plain torch":
                optimizer = adamw(params)
                load = torch.optim.Optimizer.load_state_dict.__wrapped__  # type: ignore[attr-defined]
                load(optimizer, saved)
            elif detour == "deep copy":
                optimizer = copy.deepcopy(optimizer)
                params = optimizer.param_groups[0]["params"]
            else:
                optimizer = adamw(params)
                optimizer.load_state_dict(saved)
            step = compiled(optimizer, **OPTIONS[kind])
        run_steps(step, params, range(40, 45))
        assert set(counts(optimizer)) == {45}
        left.append(everything(optimizer))
    return left[0], left[1]


@pytest.mark.parametrize("detour", ["state dict", "plain torch", "deep copy"])
@each_kind
def test_a_resumed_run_is_the_uninterrupted_one(kind: str, detour: str) -> None:
    """The count is beyond what bfloat16 holds, to which plain torch casts what it loads."""
    one, other = interrupted(kind, detour)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_torchs_random_numbers_are_left_alone() -> None:
    params = parameters()
    step = compiled(adamw(params), strategy="light", rounding="dither")
    run_steps(step, params, range(2))
    set_gradients(params)
    before = torch.get_rng_state()
    step()
    assert torch.equal(before, torch.get_rng_state())


@each_kind
def test_a_skipped_step_is_not_counted(kind: str) -> None:
    params = parameters()
    optimizer = adamw(params, fused=True)
    step = compiled(optimizer, **OPTIONS[kind])
    run_steps(step, params, range(3))
    before = everything(optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())  # type: ignore[attr-defined]
    run_steps(step, params, [3])
    assert set(counts(optimizer)) == {3}
    after = everything(optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_other_strategies_take_over() -> None:
    """State that was dithered gets error terms; then those are kept up."""
    params = parameters()
    optimizer = adamw(params)
    run_steps(compiled(optimizer, strategy="light", rounding="dither"), params, range(3))
    squares = [optimizer.state[p]["exp_avg_sq"] for p in params]
    assert all(error_terms(each) == () for each in squares)
    run_steps(compiled(optimizer, strategy="plus", rounding="dither"), params, range(3, 5))
    assert all(error_terms(each)[0].any() for each in squares)
    assert counts(optimizer) == [5] * 2  # of first moments
    terms = [live_error_terms(each)[0].clone() for each in squares]
    run_steps(compiled(optimizer, strategy="light", rounding="dither"), params, [5])
    assert all((live_error_terms(each)[0] != term).any() for each, term in zip(squares, terms, strict=True))


# In pieces. -----------------------------------------------------------------------------------------------


def trained(kind: str, placement: Placement | None) -> tuple[dict[str, Tensor], list[int]]:
    """All that some steps leave, in one piece each, with a save and a load in the middle; and the starts."""
    torch._dynamo.reset()
    mesh = None if placement is None else init_device_mesh("cpu", (2,))
    params = parameters(shapes=SHARED_OUT)
    if mesh is not None and placement is not None:
        params = [Parameter(in_pieces(p.detach(), mesh, placement)) for p in params]
    optimizer = adamw(params)
    for seed in range(6):
        if seed in (0, 3):
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = adamw(params)
            optimizer.load_state_dict(saved)
            backend = CollageBackend(**OPTIONS[kind])
            step: Any = torch.compile(optimizer.step, backend=backend)
        if mesh is None or placement is None:
            set_gradients(params, seed)
        else:
            set_gradients_in_pieces(params, mesh, placement, seed)
        step()
    left = {
        f"{i}.{name}.{part}": in_one_piece(each.detach())
        for i, p in enumerate(params)
        for name, tensor in {"p": p, **optimizer.state[p]}.items()
        for part, each in enumerate((tensor, *error_terms(tensor)))
    }
    first = [record_of(optimizer.state[p]["exp_avg"]) for p in params]
    assert all(found is not None and int(found.auxiliaries[-1]) == 6 for found in first)
    starts = [int(found.start) for found in first if found is not None]
    assert all(local_tensor(each).dtype == torch.bfloat16 for each in params)
    return left, starts


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
@each_kind
def test_pieces_have_the_bits_of_the_whole(two_processes: Processes, kind: str, placement: Placement) -> None:
    """Rows that two processes share, unevenly too, are dithered as those of one tensor."""
    alone, starts = trained(kind, None)
    assert not any(starts)
    found = two_processes.run(trained, kind, placement)
    for left, _ in found:
        assert left.keys() == alone.keys()
        assert all(torch.equal(left[name], alone[name]) for name in alone)
    if placement.is_shard():
        assert [starts for _, starts in found] == [[0] * 6, [12, 12, 12, 12, 3, 4]]
