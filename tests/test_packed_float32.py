"""Packed state of float32 parameters, without error terms: bits, mixed models, budgets and refusals."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

import collage_fx
from collage_fx import CollageBackend, audit, error_terms, explain, full_value, install
from collage_fx.choices import Strategy
from collage_fx.errors import InvalidOptionError
from collage_fx.numerics import PACKED_FORMATS
from collage_fx.options.budgets import TOLERANCE
from collage_fx.state.error_terms import record_of
from collage_fx.state.packed import is_packed
from tests.support.detours import saved_and_loaded, through_a_file
from tests.support.processes import Processes
from tests.support.training import (
    Descent,
    compiled,
    differences,
    errors_beside_float64,
    everything,
    parameters,
    run_steps,
    set_gradients,
)
from tests.support.warned import warned

STATES = ("block16", "block8", "bf16")
each_state = pytest.mark.parametrize("state", STATES)
SHAPES = ((64, 96), (37,), (128, 64))
LARGE = (0, 2)


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **options)


def singles(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Parameter]:
    return parameters(torch.float32, shapes=shapes)


# What does not change. --------------------------------------------------------------------------------------


def test_without_the_option_the_step_is_plain_torchs() -> None:
    left = []
    strategies: tuple[Strategy, ...] = ("plus", "full")
    as_written = [CollageBackend(strategy=each, changes="as written") for each in strategies]
    backends: tuple[str | CollageBackend, ...] = ("inductor", *as_written)
    for backend in backends:
        torch._dynamo.reset()
        params = singles()
        optimizer = adamw(params)
        run_steps(torch.compile(optimizer.step, backend=backend), params, range(4))
        left.append(everything(optimizer))
        assert not any(map(record_of, params))
        if isinstance(backend, CollageBackend):
            assert not backend.report().tensors
            assert "updates no bfloat16 or float16 tensor" in backend.reports[-1].note
    assert not differences(left[0], left[1])
    assert not differences(left[0], left[2])


def test_a_step_of_small_tensors_is_plain_torchs() -> None:
    """Nothing is large enough to be packed; the report says so."""
    left = []
    for backend in ("inductor", CollageBackend(state="block8", changes="as written")):
        torch._dynamo.reset()
        params = singles([(16, 16), (5,)])
        optimizer = adamw(params)
        run_steps(torch.compile(optimizer.step, backend=backend), params, range(3))
        left.append(everything(optimizer))
    assert not differences(*left)
    assert isinstance(backend, CollageBackend)
    rows = {row.name: row.why for row in backend.report().tensors}
    assert "fewer than 4096 elements" in rows["param_groups[0].params[0].exp_avg"]
    assert backend.report().bytes_per_parameter()["total"] == 12


# The bits. ------------------------------------------------------------------------------------------------


@each_state
def test_adamw_is_its_definition_with_state_rounded_in_between(state: str) -> None:
    """Moments in float32 operations of torch, to the bit; a weight, whose scalars are rounded, to an ulp."""
    params = singles([(64, 96)])
    optimizer = adamw(params)
    step = compiled(optimizer, state=state, rounding="dither")
    signed, positive = PACKED_FORMATS[state]
    (p,) = params
    start, weight = torch.zeros((), dtype=torch.int32), p.detach().double()
    like = torch.empty_like(p)
    m, v = ([spec.zeros(p.device) for spec in fmt.auxiliaries(like)] for fmt in (signed, positive))
    for t in range(1, 6):
        set_gradients(params, t)
        assert p.grad is not None
        step()
        g, old_m, old_v = p.grad, signed.join(like, *m), positive.join(like, *v)
        new_m = old_m + (g - old_m) * torch.tensor(0.1)
        new_v = old_v * torch.tensor(0.95) + (g * g) * torch.tensor(0.05)
        m, v = (
            list(fmt.store(value, like, *before, start)[1:])
            for fmt, value, before in ((signed, new_m, m), (positive, new_v, v))
        )
        for name, expected in (("exp_avg", m), ("exp_avg_sq", v)):
            found = record_of(optimizer.state[p][name])
            assert found is not None
            assert all(map(torch.equal, found.auxiliaries, expected)), (t, name)
        unbiased = (new_m.double() / (1 - 0.9**t), new_v.double() / (1 - 0.95**t))
        exact = weight * (1 - 1e-4) - 1e-3 * unbiased[0] / (unbiased[1].sqrt() + 1e-8)
        # Three roundings, of the weight, its decay and its factor; 1 - 0.95 in float32 is off by 1.2e-6.
        most = 1.5 * torch.finfo(torch.float32).eps * exact.abs() + 2e-6 * (exact - weight).abs()
        assert ((p.double() - exact).abs() <= most).all()
        weight = p.detach().double()
    assert error_terms(p) == ()
    assert torch.equal(full_value(p), p.detach().double())


@each_state
def test_parameters_of_two_dtypes_in_one_group_have_the_bits_of_two_optimizers(state: str) -> None:
    dtypes = (torch.bfloat16, torch.float32)
    shapes = ((64, 96), (64,), (128, 64))

    def made(of: Sequence[torch.dtype]) -> tuple[torch.optim.Optimizer, list[Parameter]]:
        params = [p for dtype in of for p in parameters(dtype, shapes=shapes)]
        return adamw(params), params

    def trained(optimizer: torch.optim.Optimizer, params: list[Parameter]) -> dict[str, Tensor]:
        torch._dynamo.reset()
        step = compiled(optimizer, state=state)
        for seed in range(4):
            for some in (params[:3], params[3:]):
                set_gradients(some, seed)
            step()
        return everything(optimizer)

    mixed, params = made(dtypes)
    left = trained(mixed, params)
    alone = [trained(*made([dtype])) for dtype in dtypes]
    renamed = {
        f"0.{3 * i + int(name[2])}{name[3:]}": tensor
        for i, each in enumerate(alone)
        for name, tensor in each.items()
    }
    assert not differences(left, renamed)
    packed = [is_packed(mixed.state[p]["exp_avg"]) for p in params]
    assert packed == [state != "bf16", False, state != "bf16", True, False, True]
    assert [bool(error_terms(p)) for p in params] == [True] * 3 + [False] * 3


@each_state
def test_gradients_that_come_and_go(state: Any) -> None:
    """A parameter without a gradient keeps its state and its phase: the bits of an optimizer of its own."""
    shapes = ((64, 96), (64, 96), (128, 64), (64, 96))
    given = [[0, 1, 2, 3], [0, 2], [1, 2, 3], [], [0, 1, 3], [2], [0, 1, 2, 3], [0], [3, 1]]
    params, optimizer = singles(shapes), None
    optimizer = adamw(params)
    backend = CollageBackend(state=state)
    install(optimizer, backend=backend)
    alone = [singles(shapes)[i] for i in range(4)]
    others = [adamw([p]) for p in alone]
    for each in others:
        install(each, state=state)
    for seed, present in enumerate(given):
        set_gradients(params, seed)
        for i, p in enumerate(params):
            if i in present:
                assert p.grad is not None
                alone[i].grad = p.grad.clone()
                others[i].step()
            else:
                p.grad = None
        optimizer.step()
    for i, other in enumerate(others):
        mine = {name: tensor for name, tensor in everything(optimizer).items() if name.startswith(f"0.{i}.")}
        theirs = {name.replace("0.0.", f"0.{i}."): each for name, each in everything(other).items()}
        assert not differences(mine, theirs)
    assert len(backend.reports) <= 3


def test_a_learning_rate_that_begins_at_zero_is_no_nan() -> None:
    params = singles()
    optimizer = adamw(params)
    backend = CollageBackend(state="block8")
    step: Any = torch.compile(optimizer.step, backend=backend)
    before = [p.detach().clone() for p in params]
    for seed in range(5):
        optimizer.param_groups[0]["lr"] = 1e-3 * seed
        run_steps(step, params, [seed])
        for p in params if seed == 0 else ():
            assert p.grad is not None
            p.grad[0] = 0
        if seed == 0:
            assert all(map(torch.equal, params, before))
    assert all(bool(p.isfinite().all()) for p in params)
    assert len(backend.reports) == 1


def test_a_step_that_a_scaler_skips_changes_nothing() -> None:
    params = singles()
    optimizer = adamw(params, fused=True)
    step = compiled(optimizer, state="block8")
    run_steps(step, params, range(3))
    assert all(is_packed(optimizer.state[params[i]]["exp_avg"]) for i in LARGE)
    before = everything(optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())  # type: ignore[attr-defined]
    run_steps(step, params, [3])
    assert not differences(before, everything(optimizer))


def test_summed_changes_are_summed_beside_packed_state() -> None:
    """A decay that float32 does not do as written; the update is subtracted in one rounding."""
    params = singles([(64, 96)])
    optimizer = torch.optim.AdamW(params, lr=1e-7, weight_decay=0.1)
    backend = CollageBackend(state="block16", changes="summed")
    step: Any = torch.compile(optimizer.step, backend=backend)
    run_steps(step, params, range(3))
    assert is_packed(optimizer.state[params[0]]["exp_avg"])
    assert "sum-changes" in dict(backend.reports[-1].passes)


# Which state. -----------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], set[str]]] = {
    "AdamW, amsgrad": (lambda p: adamw(p, amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    "SGD": (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), {"momentum_buffer"}),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=1e-3), {"square_avg"}),
    "RMSprop, centered": (lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True), set()),
    "Rprop": (lambda p: torch.optim.Rprop(p, lr=1e-3), set()),
    "NAdam": (lambda p: torch.optim.NAdam(p, lr=1e-3), {"exp_avg", "exp_avg_sq"}),
    "RAdam": (lambda p: torch.optim.RAdam(p, lr=1e-3), {"exp_avg", "exp_avg_sq"}),
    "Adamax": (lambda p: torch.optim.Adamax(p, lr=1e-3), {"exp_avg", "exp_inf"}),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=1e-3), {"sum"}),
    "Adadelta": (lambda p: torch.optim.Adadelta(p, lr=1e-3), {"square_avg"}),
    "Muon": (lambda p: torch.optim.Muon(p, lr=1e-3), {"momentum_buffer"}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_packed_by_its_recurrence(name: str) -> None:
    make, expected = OPTIMIZERS[name]
    report = explain(make(singles([(64, 96)])), state="block8")
    rows = {row.symbol: row for row in report.tensors if row.role.value == "state"}
    assert {symbol for symbol, row in rows.items() if row.packed} == expected
    (parameter,) = {row.name: row for row in report.tensors if row.role.value == "parameter"}.values()
    assert (parameter.dtype, parameter.error_format, parameter.bytes) == (torch.float32, "", 4 * 64 * 96)


@pytest.mark.parametrize("name", ["AdamW, amsgrad", "SGD", "RMSprop", "NAdam", "Muon"])
@pytest.mark.parametrize(("state", "most"), [("block16", 0.002), ("block8", 0.03), ("bf16", 0.006)])
def test_errors_of_optimizers_against_float64(name: str, state: str, most: float) -> None:
    """Bounds as of AdamW in test_packed_state.py; products of matrices, as Muon's, pass noise on."""
    torch._dynamo.reset()
    make, _ = OPTIMIZERS[name]
    optimizer, (error,) = errors_beside_float64(
        make, lambda optimizer: compiled(optimizer, state=state), singles([(64, 96)]), steps=12
    )
    assert any(is_packed(each) for each in next(iter(optimizer.state.values())).values())
    assert error < (0.1 if name == "Muon" else most)


class InTheWeightsDtype(Descent):
    """State of float32 beside bfloat16 parameters, which is the optimizer's choice, and is left alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"] = torch.zeros_like(p, dtype=torch.float32)
            state["m"].lerp_(p.grad.float(), 0.1)
            p.add_(state["m"].to(p.dtype), alpha=-1e-3)


def test_float32_state_of_16_bit_parameters_is_left_alone() -> None:
    for dtype, packed in ((torch.bfloat16, False), (torch.float32, True)):
        params = parameters(dtype, shapes=[(64, 96)])
        optimizer = InTheWeightsDtype(params)
        run_steps(compiled(optimizer, state="block8"), params, range(3))
        assert is_packed(optimizer.state[params[0]]["m"]) == packed


# A budget. --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "limit", "expected"),
    [
        (adamw, 6.1, "block8"),
        (adamw, 8, "block16"),
        (adamw, 7.9, "bf16"),
        (adamw, 10, "block16"),
        (adamw, 12, None),
        (OPTIMIZERS["SGD"][0], 5.1, "block8"),
        (OPTIMIZERS["SGD"][0], 6.1, "block16"),
        (OPTIMIZERS["SGD"][0], 8, None),
    ],
)
def test_the_most_precise_state_within_a_limit(
    make: Callable[[Any], torch.optim.Optimizer], limit: float, expected: str | None
) -> None:
    params = singles([(256, 256), (256,)])
    optimizer = make(params)
    backend = CollageBackend(bytes_per_parameter=limit)
    run_steps(torch.compile(optimizer.step, backend=backend), params, range(3))
    used = backend.report().graphs[-1].budgets[0]
    if limit == 7.9:
        assert used.bytes > 7.9  # within the tolerance
    assert used.state == expected
    total = backend.report().bytes_per_parameter()["total"]
    assert total <= limit * (1 + TOLERANCE)
    assert used.bytes == pytest.approx(total, rel=1e-3)


def test_a_limit_below_the_least_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match=r"bytes_per_parameter=5, where this step takes 6\.06 at le"):
        explain(adamw(singles([(256, 256)])), bytes_per_parameter=5)
    with pytest.raises(InvalidOptionError, match=r"takes 12 at least[\s\S]*fewer than 4096 elements"):
        explain(adamw(singles([(8, 8)])), bytes_per_parameter=8)


@pytest.mark.parametrize(
    ("limit", "state"), [(4.9, None), (5.1, "block8"), (5.6, "block8"), (8, "block16"), (12, None)]
)
def test_a_budget_is_of_all_parameters(limit: float, state: str | None) -> None:
    params = [*parameters(shapes=[(256, 256)]), *singles([(256, 256)])]
    optimizer = adamw(params)
    if limit < 5:
        with pytest.raises(InvalidOptionError, match=r"takes 5\.08 at least"):  # the mean of 4.09 and 6.06
            explain(optimizer, bytes_per_parameter=limit)
        return
    backend = CollageBackend(bytes_per_parameter=limit)
    run_steps(torch.compile(optimizer.step, backend=backend), params, range(2))
    assert backend.reports[-1].budgets[0].state == state
    assert backend.report().bytes_per_parameter()["total"] <= limit * (1 + TOLERANCE)
    assert is_packed(optimizer.state[params[1]]["exp_avg"]) == (state is not None)


# Recorded, eager, and other steps. --------------------------------------------------------------------------


class Branching(Descent):
    """Dynamo cannot capture it: it branches on a value."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"] = torch.zeros_like(p)
            state["m"].lerp_(p.grad, 0.1)
            if float(state["m"].norm()) > 0:
                p.add_(state["m"], alpha=-1e-3)


def test_what_dynamo_cannot_capture_is_refused() -> None:
    params = singles()
    optimizer = install(Branching(params), state="block8")
    set_gradients(params)
    before = [p.detach().clone() for p in params]
    with pytest.raises(
        InvalidOptionError, match=r"state='block8' packs state, which needs a step that is ca"
    ):
        optimizer.step()
    assert all(map(torch.equal, params, before))


def test_what_dynamo_cannot_capture_exceeds_a_budget() -> None:
    params = singles([(64, 96)])
    optimizer = install(Branching(params), bytes_per_parameter=6.1)
    set_gradients(params)
    optimizer.step()
    with pytest.raises(InvalidOptionError, match=r"bytes_per_parameter=6\.1, where this optimizer holds 8"):
        optimizer.step()
    optimizer = install(Branching(params), bytes_per_parameter=8)
    for _ in range(3):
        optimizer.step()


def test_an_eager_step_goes_on_from_the_decoded_values() -> None:
    """float32 weights have no error terms that it would lose: nothing is refused."""
    params = singles([(64, 96)])
    optimizer = adamw(params)
    step = compiled(optimizer, state="block16")
    run_steps(step, params, range(2))
    (p,) = params
    twin = Parameter(p.detach().clone())
    other = adamw([twin])
    other.load_state_dict(collage_fx.plain_state_dict(copy.deepcopy(optimizer.state_dict())))
    assert type(other.state[twin]["exp_avg"]) is Tensor
    for each, of in ((optimizer, p), (other, twin)):
        set_gradients([of], 2)
        each.step()
    assert torch.equal(p, twin)
    assert not is_packed(optimizer.state[p]["exp_avg"])
    run_steps(step, params, [3])
    assert is_packed(optimizer.state[p]["exp_avg"])


def test_two_steps_of_which_one_packs_take_turns_and_codes_are_dropped() -> None:
    params = singles([(64, 96)])
    optimizer = adamw(params)
    steps = itertools.cycle([compiled(optimizer, state="block16"), compiled(optimizer)])
    met = []
    for seed in range(6):
        run_steps(next(steps), params, [seed])
        met.append(is_packed(optimizer.state[params[0]]["exp_avg"]))
        if seed == 1:
            assert all(record_of(each) is None for each in optimizer.state[params[0]].values())
    assert met[2:] == [True, False] * 2
    other = adamw([Parameter(params[0].detach().clone())])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run_steps(compiled(other), other.param_groups[0]["params"], range(1))
    assert all(record_of(each) is None for each in next(iter(other.state.values())).values())


@pytest.mark.parametrize("state", ["block16", "block8"])
@pytest.mark.parametrize("start", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.filterwarnings("ignore:collage_fx. no error terms of")  # of float32 weights, as it should be
def test_a_checkpoint_of_another_dtype(start: torch.dtype, state: str) -> None:
    """Moments of the other run, to the rounding of 16-bit state that its codes do not hold."""
    end = torch.float32 if start is torch.bfloat16 else torch.bfloat16
    params = parameters(start, shapes=[(64, 96)])
    optimizer = adamw(params)
    run_steps(compiled(optimizer, state=state), params, range(3))
    others = [Parameter(p.detach().to(end)) for p in params]
    other = adamw(others)
    step = compiled(other, state=state)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    ours, theirs = (
        full_value(each.state[p[0]]["exp_avg"]) for each, p in ((optimizer, params), (other, others))
    )
    assert float((ours - theirs).abs().max()) <= 2.0**-8 * float(ours.abs().max())
    run_steps(step, others, [3])
    assert is_packed(other.state[others[0]]["exp_avg"])


@pytest.mark.parametrize("state", ["block16", "bf16"])
def test_codes_of_float32_state_are_not_taken_for_those_of_16_bits(state: Any) -> None:
    """Float32 state is rounded where it is loaded into bfloat16 state; the one warning is of parameters."""
    wide, narrow = singles([(64, 96)]), parameters(shapes=[(64, 96)])
    optimizer, other = install(adamw(wide), state=state), install(adamw(narrow))
    run_steps(optimizer.step, wide, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    moments = {name: full_value(optimizer.state[wide[0]][name]) for name in ("exp_avg", "exp_avg_sq")}
    assert not warned(lambda: other.load_state_dict(saved))
    for name, value in moments.items():
        assert torch.equal(other.state[narrow[0]][name], value.bfloat16())
    (told,) = warned(lambda: run_steps(other.step, narrow, [3]))
    assert "no error terms of param_groups[0].params[0].parameter have been loaded" in told


def test_zeros_keep_their_count_in_a_checkpoint() -> None:
    """Zeros are the same in bfloat16, and their codes, too: they are taken for those of float32."""
    params = singles([(64, 96)])
    optimizer = adamw(params)
    step = compiled(optimizer, state="block8")
    for _ in range(5):
        params[0].grad = torch.zeros_like(params[0])
        step()
    other = through_a_file(optimizer, adamw)
    run_steps(compiled(other, state="block8"), other.param_groups[0]["params"], [5, 6])
    run_steps(step, params, [5, 6])
    assert not differences(everything(optimizer), everything(other))


# In processes. ----------------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    """Weights that two processes share out, equally or not, a norm, and layers in bfloat16."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 131), nn.LayerNorm(131), nn.Linear(131, 64), nn.Linear(64, 64))


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def parallel(kind: str, state: Any) -> tuple[list[Any], dict[str, Tensor], list[bool]]:
    """Gradients of each step, all that is left, and what is packed; with a save and a load in the middle."""
    torch._dynamo.reset()
    made: nn.Module = model()
    if kind == "ddp":
        made = DistributedDataParallel(made)
    else:
        fully_shard(made)
    params = list(made.parameters())
    optimizer = install(adamw(params), state=state)
    gradients = []
    for seed in range(5):
        if seed == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = install(adamw(params), state=state)
            optimizer.load_state_dict(saved)
        generator = torch.Generator().manual_seed(2 * seed + torch.distributed.get_rank())
        with torch.autocast("cpu", torch.bfloat16):
            made(torch.randn(8, 64, generator=generator)).square().mean().backward()
        gradients.append([whole(p.grad) for p in params if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    left = {
        f"{i}.{name}": whole(each)
        for i, p in enumerate(params)
        for name, each in {"p": p, **optimizer.state[p]}.items()
    }
    return gradients, left, [is_packed(optimizer.state[p]["exp_avg"]) for p in params]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("state", ["block8", "bf16"])
def test_processes_leave_the_bits_of_one(two_processes: Processes, kind: str, state: Any) -> None:
    first, *others = two_processes.run(parallel, kind, state)
    gradients, left, packed = first
    torch._dynamo.reset()
    params = list(model().parameters())
    optimizer = install(adamw(params), state=state)
    for of_step in gradients:
        for p, gradient in zip(params, of_step, strict=True):
            p.grad = gradient
        optimizer.step()
    alone = {
        f"{i}.{name}": each.detach().clone()
        for i, p in enumerate(params)
        for name, each in {"p": p, **optimizer.state[p]}.items()
    }
    assert packed == [is_packed(optimizer.state[p]["exp_avg"]) for p in params]
    assert sum(packed) == (3 if state == "bf16" else 2)  # 131 elements are no whole blocks
    for _, there, packed_there in (first, *others):
        assert packed_there == packed
        assert not differences(there, alone)
    assert not differences(left, alone)


# Tools. -----------------------------------------------------------------------------------------------------


def test_an_audit_measures_packed_state() -> None:
    found = audit(
        adamw, shapes=[(64, 96)], dtype=torch.float32, steps=12, schedules={"constant": None}, state="block8"
    )
    assert found.is_good, str(found)
    assert found.verdict.startswith("packed: the error is 0.0")
    (measured,) = found.measured.values()
    assert sorted(measured.packed) == ["exp_avg", "exp_avg_sq"]
    assert measured.bytes == pytest.approx(6.07, abs=0.02)
    with pytest.raises(InvalidOptionError, match=r"torch\.float32 with state= or"):
        audit(adamw, dtype=torch.float32)
    nothing = audit(
        adamw, shapes=[(8, 8)], dtype=torch.float32, steps=6, schedules={"constant": None}, state="block8"
    )
    assert "no state is packed" in str(nothing)


def test_measured_steps_have_nothing_to_measure(tmp_path: Path) -> None:
    """Metrics are of what error terms hold: of the bfloat16 parameters of a mixed model."""
    params = [*parameters(shapes=[(64, 96)]), *singles([(64, 96)])]
    backend = CollageBackend(state="block8", metrics=True)
    optimizer = install(adamw(params), backend=backend)
    for seed in range(2):
        set_gradients(params, seed)
        optimizer.step()
    (first, *_) = backend.metrics().values()
    assert list(first) == ["param_groups[0].params[0]"]
    assert is_packed(optimizer.state[params[1]]["exp_avg"])
