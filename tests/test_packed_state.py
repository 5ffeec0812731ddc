"""Packed state: integers with a scale for each 32 of them, or bfloat16 in place of float32."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.nn import Parameter

import collage_fx
from collage_fx import CollageBackend, explain, full_value
from collage_fx.choices import Rounding
from collage_fx.errors import CheckpointMismatchError, UncompensatedParameterError
from collage_fx.graph import Unit
from collage_fx.numerics import format_named
from collage_fx.state import adopt
from collage_fx.state.error_terms import record_of
from collage_fx.state.packed import is_packed
from tests.support import triton_offline as offline
from tests.support.agreement import assert_same, trajectory
from tests.support.detours import DETOURS, direct_and_by, saved_and_loaded, through_a_file
from tests.support.optimizers import CompiledOptimizer, gradients
from tests.support.processes import Processes
from tests.support.substitutes import lowered_as
from tests.support.training import (
    Descent,
    Lion,
    compiled,
    differences,
    errors_beside_float64,
    everything,
    parameters,
    run_steps,
    set_gradients,
)
from tests.support.triton_steps import triton_trajectory
from tests.support.twin import TwinBackend
from tests.support.whole import pipeline
from tests.test_sharded import in_one_piece, in_pieces, set_gradients_in_pieces

#: Two alike, two whose rows aren't of whole blocks or are few, and one so large that threads share it out, of
#: no whole number of a kernel's chunks.
SHAPES = ((64, 96), (64, 96), (65, 65), (37,), (301, 544))
PACKED = (0, 1, 4)

STATES = ("block16", "block8")
each_state = pytest.mark.parametrize("state", STATES)
#: Dtypes of parameters, and the formats that their state may have.
KINDS = [(dtype, state) for dtype in (torch.bfloat16, torch.float32) for state in STATES]
KINDS.append((torch.float32, "bf16"))
each_kind = pytest.mark.parametrize(("dtype", "state"), KINDS, ids=str)


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **options)


def is_to_be_packed(i: int, state: str) -> bool:
    """Whether the state of a parameter of :data:`SHAPES` is packed: ``bf16`` needs no rows of blocks."""
    return i in PACKED or (i == 2 and state == "bf16")


def is_all_packed(optimizer: torch.optim.Optimizer) -> bool:
    states = [*optimizer.state.values()]
    return all(is_packed(states[i][name]) for i in PACKED for name in ("exp_avg", "exp_avg_sq"))


# The bits. ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["by family", "in parts", "whole"])
@pytest.mark.parametrize(("dtype", "state"), [*KINDS, *((torch.float16, state) for state in STATES)], ids=str)
def test_compiled_bits_are_eager_bits(state: str, dtype: torch.dtype, unit: Unit) -> None:
    backend = TwinBackend(strategy="light", state=state, passes=pipeline(by_family=unit == "by family"))
    rig = CompiledOptimizer(SHAPES, adamw, backend, dtype=dtype)
    with lowered_as(unit):
        start = rig.start()
    assert rig.backend.report().graphs[-1].route.unit == unit
    grads = list(gradients(SHAPES, 4, scale=0.01))
    states = trajectory(rig, start, grads)
    assert_same(states, trajectory(rig, start, grads, engine="eager"))
    counts = [int(states[-1][f"4.{name}.count"]) for name in ("exp_avg", "exp_avg_sq")]
    assert counts == [4 if state == "block8" else 0, 4]  # roundings of block8 are too coarse to be repaid
    assert states[-1]["4.exp_avg_sq.rounded" if state == "bf16" else "4.exp_avg_sq.codes"].any()


@pytest.mark.skipif(not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("make", "state"),
    [(adamw, "block8"), (adamw, "block16"), (Lion, "block8"), (adamw, "bf16")],
    ids=["AdamW-block8", "AdamW-block16", "Lion-block8", "AdamW-bf16"],
)
def test_triton_gives_the_same_bits(make: Any, state: str, dtype: torch.dtype) -> None:
    """With blocks of zeros, one that a NaN spoils, and tensors that are not packed."""
    if state == "bf16" and dtype is not torch.float32:
        pytest.skip("such state has 16 bits as it is")
    shapes = ((64, 96), (3, 2048), (65, 65), (70,))
    backend = TwinBackend(strategy="light", state=state, passes=pipeline(by_family=False))
    rig = CompiledOptimizer(shapes, make, backend, dtype=dtype)
    start = rig.start()
    for _ in range(
        2
    ):  # state that is born in the first step is packed with the second, and compiled once more
        rig.step([torch.ones(shape) for shape in shapes])
    start = {**rig.tensors(), **start}
    grads = list(gradients(shapes, 3))
    for step in grads:
        step[0][10:12] = 0
    grads[0][1][1, :64] = 0
    grads[1][0][3, 40] = torch.nan

    found = triton_trajectory(rig, start, grads)
    assert_same(found, trajectory(rig, start, grads, engine="eager"))
    first, second, *_ = (rig.optimizer.state[parameter]["exp_avg"] for parameter in rig.parameters)
    assert is_packed(first)
    assert is_packed(second)
    spoilt = first.isnan()
    together = 1 if state == "bf16" else 32
    assert spoilt[3, 40 if together == 1 else slice(32, 64)].all()
    assert int(spoilt.sum()) == together


@pytest.mark.parametrize("rounding", ["dither", "repay"])
@each_kind
def test_state_is_that_of_the_recurrence_encoded_by_the_definition(
    dtype: torch.dtype, state: str, rounding: Rounding
) -> None:
    """Momentum, whose float32 arithmetic is one multiplication and one addition."""
    params = parameters(dtype, shapes=((64, 96), (16, 4, 8, 8)))
    params[1].data = params[1].data.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    step = compiled(optimizer, strategy="light", state=state, rounding=rounding)
    fmt = format_named(state)
    assert fmt is not None
    store = fmt.store if rounding == "dither" else fmt.store_nearest
    later = torch.tensor(0.0 if rounding == "dither" else 0.9 / (1 - 0.9))
    expected: list[tuple[Tensor, ...]] = []
    for count in range(4):
        set_gradients(params, count)
        step()
        grads = [p.grad.float() for p in params if p.grad is not None]
        if not expected:  # it is born as a copy of the gradient, and is packed with the next step
            expected = [fmt.split(grad, dtype)[1:] for grad in grads]
            weights = [p.detach().clone() for p in params]
            continue
        for i, grad in enumerate(grads):
            buffer = optimizer.state[params[i]]["momentum_buffer"]
            value = fmt.join(grad, *expected[i]) * torch.tensor(0.9) + grad
            expected[i] = store(value, grad, *expected[i], torch.zeros((), dtype=torch.int32))[1:]
            found = record_of(buffer)
            assert found is not None
            assert all(map(torch.equal, found.auxiliaries, expected[i])), (count, i)
            if dtype is torch.float32:  # the weights have no error terms, and read the moment unrounded
                repaid = value - (fmt.join(grad, *expected[i]) - value) * later
                weights[i] = weights[i] + repaid * torch.tensor(-1e-3)
                assert torch.equal(params[i], weights[i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("state", "most"), [("block16", 2e-3), ("block8", 0.02), ("bf16", 0.005)])
def test_error_against_float64(state: str, most: float, dtype: torch.dtype) -> None:
    """Figures of docs/formats.md: 1.1e-4 and .021 at most, of longer runs; here few steps weigh more."""
    if state == "bf16" and dtype is torch.bfloat16:
        pytest.skip("such state has 16 bits as it is")
    optimizer, errors = errors_beside_float64(
        adamw,
        lambda optimizer: compiled(optimizer, strategy="light", state=state),
        parameters(dtype, shapes=SHAPES),
        steps=30,
    )
    assert is_all_packed(optimizer)
    assert all(errors[i] < most for i in PACKED)


# What becomes of memory. ----------------------------------------------------------------------------------


@each_kind
def test_reports_count_what_is_there(dtype: torch.dtype, state: Any) -> None:
    params = parameters(dtype, shapes=SHAPES)
    optimizer = adamw(params)
    backend = CollageBackend(strategy="light", state=state)
    step: Any = torch.compile(optimizer.step, backend=backend)
    run_steps(step, params, range(2))
    rows = {row.name: row for row in backend.report().tensors}
    held = 0
    for i, p in enumerate(params):
        for name in ("exp_avg", "exp_avg_sq"):
            tensor, row = optimizer.state[p][name], rows[f"param_groups[0].params[{i}].{name}"]
            assert row.packed == is_packed(tensor) == is_to_be_packed(i, state)
            found = record_of(tensor)
            bytes_held = sum(each.nbytes for each in found.auxiliaries) if found else 0
            bytes_held += 0 if row.packed else tensor.nbytes
            assert row.bytes + row.error_bytes == bytes_held
            held += bytes_held
    per = backend.report().bytes_per_parameter()
    counters = sum(row.error_bytes for row in rows.values() if row.role.value != "parameter")
    assert per["state"] == pytest.approx((held - counters) / sum(p.numel() for p in params))
    text = str(backend.report())
    assert (state if state == "bf16" else f"{state}_positive") in text
    number = 8 if state == "bf16" else 6
    assert f"{number} state tensors packed" in backend.report().graphs[-1].headline


# Saved, loaded, copied. -----------------------------------------------------------------------------------


@pytest.mark.parametrize("detour", DETOURS)
@each_kind
def test_a_resumed_run_is_the_uninterrupted_one(dtype: torch.dtype, state: str, detour: str) -> None:
    one, other, resumed = direct_and_by(detour, adamw, SHAPES, (20, 4), dtype, strategy="light", state=state)
    assert is_all_packed(resumed)
    assert not differences(one, other)


@pytest.mark.parametrize("other", [None, *STATES, "bf16"])
@each_kind
def test_it_loads_into_other_formats(dtype: torch.dtype, state: str, other: str | None) -> None:
    if other == "bf16" and dtype is torch.bfloat16:
        pytest.skip("such state has 16 bits as it is")
    params = parameters(dtype, shapes=SHAPES)
    optimizer = adamw(params)
    run_steps(compiled(optimizer, strategy="light", state=state), params, range(3))
    loaded = through_a_file(optimizer, adamw)
    mine = loaded.param_groups[0]["params"]
    for p, q in zip(params, mine, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(full_value(loaded.state[q][name]), full_value(optimizer.state[p][name]))
    run_steps(compiled(loaded, strategy="light", state=other), mine, [3])
    run_steps(compiled(optimizer, strategy="light", state=state), params, [3])
    assert is_all_packed(loaded) == (other is not None)
    for i in PACKED:
        ours, theirs = (
            full_value(o.state[p[i]]["exp_avg"]) for o, p in ((loaded, mine), (optimizer, params))
        )
        # Two encodings, half a distance of the coarser grid each, where the scale is 1.5 times the largest.
        assert float((ours - theirs).abs().max()) <= 2 * 3 / 127 * float(theirs.abs().max())


def test_state_loaded_from_plain_torch_is_packed() -> None:
    params, others = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    plain = adamw(others)
    run_steps(plain.step, others, range(3))
    optimizer = adamw(params)
    step = compiled(optimizer, strategy="light", state="block16")
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    with pytest.warns(UserWarning, match="no error terms of"):
        run_steps(step, params, [3, 4])
    run_steps(plain.step, others, [3, 4])
    assert is_all_packed(optimizer)
    both = ((optimizer, params[0]), (plain, others[0]))
    ours, theirs = (each.state[p]["exp_avg_sq"].float() for each, p in both)
    assert float((ours - theirs).abs().max()) < 2.0**-7 * float(theirs.abs().max())


def test_codes_beside_another_value_are_not_taken() -> None:
    """Plain torch has gone on with the decoded value, and carried our entries along."""
    params = parameters(shapes=((64, 96),))
    optimizer = adamw(params)
    run_steps(compiled(optimizer, strategy="light", state="block8"), params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    tripled = saved["state"][0]["exp_avg"] * 3
    saved["state"][0]["exp_avg"] = tripled.clone()
    other = adamw(params)
    other.load_state_dict(saved)
    with pytest.warns(UserWarning, match=r"of other values than .*params\[0\]\.exp_avg: load"):
        run_steps(compiled(other, strategy="light", state="block8"), params, [2])
    moment = full_value(other.state[params[0]]["exp_avg"])
    assert params[0].grad is not None
    expected = tripled.double() * 0.9 + params[0].grad.double() * 0.1
    assert float((moment - expected).norm() / expected.norm()) < 0.02


def test_codes_that_do_not_fit_are_refused() -> None:
    params = parameters(shapes=((64, 96),))
    optimizer = adamw(params)
    run_steps(compiled(optimizer, strategy="light", state="block8"), params, range(2))
    saved = optimizer.state_dict()
    saved["state"][0]["collage_fx.exp_avg.block8.scales"] = torch.zeros(64, 4, dtype=torch.uint8)
    other = adamw(parameters(shapes=((64, 96),)))
    adopt(other)
    with pytest.raises(CheckpointMismatchError, match="shape"):
        other.load_state_dict(saved)
    assert not other.state


def packed_moment(state: str = "block8") -> Tensor:
    params = parameters(shapes=((64, 96),))
    optimizer = adamw(params)
    run_steps(compiled(optimizer, strategy="light", state=state), params, range(2))
    moment: Tensor = optimizer.state[params[0]]["exp_avg"]
    assert is_packed(moment)
    return moment


def kept_of(tensor: Tensor) -> tuple[Tensor, ...]:
    found = record_of(tensor)
    assert found is not None
    return found.auxiliaries


REMADE: dict[str, Callable[[Tensor], Tensor]] = {
    "deep copy": copy.deepcopy,
    "file": saved_and_loaded,
    "moved": lambda tensor: tensor.to("cpu", copy=True),
}


@pytest.mark.parametrize("remade", REMADE.values(), ids=REMADE)
@each_state
def test_what_is_made_of_a_packed_tensor_is_packed(state: str, remade: Callable[[Tensor], Tensor]) -> None:
    moment = packed_moment(state)
    other = remade(moment)
    assert is_packed(other)
    assert is_packed(moment)
    assert (other.shape, other.stride(), other.dtype) == (moment.shape, (96, 1), moment.dtype)
    assert all(map(torch.equal, kept_of(other), kept_of(moment)))
    value = moment.clone()
    assert torch.equal(other, value)
    other.zero_()
    assert not is_packed(other)
    assert is_packed(moment)
    assert torch.equal(moment, value)


def test_a_packed_tensor_that_is_moved_to_where_it_is_is_itself() -> None:
    moment = packed_moment()
    assert moment.to("cpu") is moment
    assert moment.to(torch.bfloat16) is moment
    assert is_packed(moment)
    single = moment.to(torch.float32)
    assert type(single) is Tensor
    assert torch.equal(single, moment.float())


def test_a_copy_on_the_cpu_is_decoded_and_leaves_it_packed() -> None:
    moment = packed_moment()
    copied = moment.cpu()
    assert type(copied) is Tensor
    assert is_packed(moment)
    assert torch.equal(copied, moment)


def test_a_tensor_that_had_got_memory_is_saved_as_it_is() -> None:
    moment = packed_moment()
    alias = moment.detach()
    moment.mul_(2)
    assert not is_packed(moment)
    for remade in REMADE.values():
        assert torch.equal(remade(alias), moment)


@pytest.mark.parametrize(
    ("change", "met"),
    [
        ({0: "block4"}, "is not registered"),
        ({0: "exact"}, "is not registered"),
        ({1: torch.float64}, r"torch\.float64"),
        ({2: (96, 64), 3: (64, 1)}, "belong together"),
        ({2: (8, 8, 96), 3: (768, 96, 1)}, "belong together"),
        ({3: (1, 64)}, "no rows"),
    ],
)
def test_a_file_whose_parts_do_not_belong_together_is_refused(change: dict[int, Any], met: str) -> None:
    make, arguments = packed_moment().__reduce_ex__(2)
    with pytest.raises(CheckpointMismatchError, match=met):
        make(*(change.get(i, each) for i, each in enumerate(arguments)))


WITHOUT_US = """
import sys, torch
for path in sys.argv[1:]:
    try:
        print(sorted(torch.load(path, weights_only=True)["state"][0]))
    except Exception as error:
        print(error)
assert "collage_fx" not in sys.modules
"""


def test_plain_torch_is_told_what_it_lacks_or_given_what_it_knows(tmp_path: Path) -> None:
    params = parameters(shapes=((64, 96),))
    optimizer = adamw(params)
    run_steps(compiled(optimizer, strategy="light", state="block8"), params, range(2))
    moment = optimizer.state[params[0]]["exp_avg"]
    torch.save(optimizer.state_dict(), tmp_path / "ours.pt")
    torch.save(collage_fx.plain_state_dict(optimizer.state_dict()), tmp_path / "plain.pt")
    files = [str(tmp_path / name) for name in ("ours.pt", "plain.pt")]
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_US, *files], capture_output=True, text=True, check=True
    )
    refused, names = told.stdout.rsplit("\n", 2)[:2]
    assert "GLOBAL collage_fx.state.error_terms.packed_tensor" in refused
    assert names == "['exp_avg', 'exp_avg_sq', 'step']"
    plain = torch.load(files[1], weights_only=True)
    assert type(plain["state"][0]["exp_avg"]) is Tensor
    assert torch.equal(plain["state"][0]["exp_avg"], moment)
    assert is_packed(moment)


def test_eager_steps_go_on_from_the_decoded_values() -> None:
    params = parameters(shapes=((64, 96),))
    optimizer = adamw(params)
    run_steps(compiled(optimizer, strategy="light", state="block16"), params, range(2))
    weight = params[0].detach().clone()
    both = []
    for saved in (optimizer.state_dict(), collage_fx.plain_state_dict(optimizer.state_dict())):
        mine = Parameter(weight.clone())
        other = adamw([mine])
        other.load_state_dict(saved_and_loaded(saved))
        adopt(other)
        set_gradients([mine], 2)
        collage_fx.reset_error_terms(mine)  # or an eager step is refused
        other.step()
        assert type(other.state[mine]["exp_avg"]) is Tensor
        both.append((mine.detach(), other.state[mine]["exp_avg"], other.state[mine]["exp_avg_sq"]))
    assert all(map(torch.equal, *both))


def test_two_optimizers_of_one_state_dict_have_error_terms_of_their_own() -> None:
    params = parameters(shapes=((64, 96),))
    optimizer = adamw(params)
    step = compiled(optimizer, strategy="light", state="block8")
    run_steps(step, params, range(2))
    mine = [Parameter(p.detach().clone()) for p in params]
    other = adamw(mine)
    adopt(other)
    other.load_state_dict(optimizer.state_dict())
    before = [each.clone() for each in kept_of(mine[0])]
    assert all(map(torch.equal, before, kept_of(params[0])))
    run_steps(step, params, [2])
    assert all(map(torch.equal, before, kept_of(mine[0])))
    assert not all(map(torch.equal, before, kept_of(params[0])))


def test_error_terms_of_parameters_without_state_can_be_loaded_again() -> None:
    """Torch takes nothing of the state dict over then."""
    params = parameters(shapes=((64, 96),))
    optimizer = torch.optim.SGD(params, lr=1e-3)
    run_steps(compiled(optimizer, strategy="light"), params, range(2))
    saved = saved_and_loaded(optimizer.state_dict())
    mine = [Parameter(p.detach().clone()) for p in params]
    other = torch.optim.SGD(mine, lr=1e-3)
    adopt(other)
    other.load_state_dict(saved)
    kept = [each.clone() for each in kept_of(mine[0])]
    run_steps(compiled(other, strategy="light"), mine, [2])
    with torch.no_grad():
        mine[0].copy_(params[0])
    other.load_state_dict(saved)
    assert all(map(torch.equal, kept, kept_of(mine[0])))


# In programs. ---------------------------------------------------------------------------------------------


def test_what_a_program_writes_between_steps_counts() -> None:
    params = parameters(shapes=((64, 96),))
    optimizer = adamw(params)
    step = compiled(optimizer, strategy="light", state="block8")
    run_steps(step, params, range(2))
    moment = optimizer.state[params[0]]["exp_avg"]
    moment.zero_()
    assert not is_packed(moment)
    run_steps(step, params, [2])
    assert is_packed(moment)
    assert params[0].grad is not None
    expected = params[0].grad.float() * 0.1
    assert float((moment.float() - expected).norm() / expected.norm()) < 0.02


def test_a_skipped_step_changes_nothing() -> None:
    params = parameters(shapes=SHAPES)
    optimizer = adamw(params, fused=True)
    step = compiled(optimizer, strategy="light", state="block8")
    run_steps(step, params, range(3))
    assert is_all_packed(optimizer)
    before = everything(optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())  # type: ignore[attr-defined]
    run_steps(step, params, [3])
    after = everything(optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_gradient_that_is_not_finite_spoils_its_own_block() -> None:
    params = parameters(shapes=((64, 96),))
    optimizer = adamw(params)
    step = compiled(optimizer, strategy="light", state="block8")
    run_steps(step, params, range(2))
    set_gradients(params, 2)
    assert params[0].grad is not None
    params[0].grad[3, 40] = float("nan")
    step()
    for name in ("exp_avg", "exp_avg_sq"):
        spoilt = optimizer.state[params[0]][name].isnan()
        assert spoilt[3, 32:64].all()
        assert int(spoilt.sum()) == 32


def test_a_learning_rate_that_is_scheduled_compiles_nothing_more() -> None:
    params = parameters(shapes=SHAPES)
    optimizer = adamw(params)
    backend = CollageBackend(strategy="light", state="block8")
    step: Any = torch.compile(optimizer.step, backend=backend)
    for seed in range(5):
        optimizer.param_groups[0]["lr"] = 1e-3 * seed
        run_steps(step, params, [seed])
    assert len(backend.reports) == 1
    assert is_all_packed(optimizer)


class Momentum(Descent):
    """An optimizer as most outside torch.optim are: Dynamo goes by the class of the tensors in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"] = torch.zeros_like(p)
            torch._foreach_mul_([state["m"]], 0.9)
            state["m"].add_(p.grad.to(state["m"].dtype), alpha=0.1)
            p.add_(state["m"], alpha=-1e-3)


def test_a_step_that_is_not_torchs_is_not_compiled_over_and_over() -> None:
    """State is born in the first step, packed with the second, and taken for the same from the third on.

    Torch 2.11 takes it for the same from the second on.
    """
    params = parameters(shapes=((64, 96),))
    optimizer = Momentum(params)
    backend = CollageBackend(strategy="light", state="block8")
    step: Any = torch.compile(optimizer.step, backend=backend)
    run_steps(step, params, range(torch._dynamo.config.recompile_limit + 2))
    assert is_packed(optimizer.state[params[0]]["m"])
    assert len(backend.reports) <= 3


def test_a_refused_step_leaves_state_as_it_is() -> None:
    class Opaque(Descent):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.ones_like(p)
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.copy_(torch.nextafter(p, state["m"]))

    params = parameters(shapes=((64, 96),))
    optimizer = Opaque(params)
    set_gradients(params)
    step: Any = torch.compile(optimizer.step, backend=CollageBackend(strategy="light", state="block8"))
    with pytest.raises(UncompensatedParameterError):
        step()
    assert not any(is_packed(each) for state in optimizer.state.values() for each in state.values())


@each_state
def test_state_that_is_zeroed_by_a_step_is_packed(state: str) -> None:
    class Forgets(Momentum):
        """Momentum that each step leaves at a constant, or at zero."""

        constant = 0.0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for p in self.param_groups[0]["params"]:
                self.state[p]["m"].fill_(self.constant)

    for constant in (0.0, 0.5):
        params = parameters(shapes=((64, 96),))
        optimizer = Forgets(params)
        optimizer.constant = constant
        run_steps(compiled(optimizer, strategy="light", state=state), params, range(3))
        moment = optimizer.state[params[0]]["m"]
        assert is_packed(moment)
        assert float((moment - constant).abs().max()) < 0.01


@pytest.mark.parametrize("rounding", ["nearest", "dither"])
def test_two_compiled_steps_of_which_one_packs_take_turns(rounding: str) -> None:
    """Code of the other one, which goes by addresses, is given tensors with memory."""
    options = ({"state": "block16"}, {"rounding": rounding})
    met: list[bool] = []

    def in_turns(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        turns = itertools.cycle([compiled(optimizer, strategy="light", **each) for each in options])

        def step() -> None:
            next(turns)()
            *_, last = optimizer.state.values()
            met.append(is_packed(last["exp_avg"]))

        return step

    _, errors = errors_beside_float64(adamw, in_turns, parameters(shapes=((64, 96), (300, 512))), steps=6)
    assert met[2:] == [True, False, True, False]
    assert all(error < 2.0**-7 for error in errors)


def test_options_that_exclude_each_other() -> None:
    for others in ({"arithmetic": "native"}, {"strategy": "none"}):
        with pytest.raises(ValueError, match=r"state='block8' packs[\s\S]*where: state\n"):
            CollageBackend(state="block8", **others)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"state='block4' is not allowed"):
        CollageBackend(state="block4")  # type: ignore[arg-type]


def test_explain_says_what_would_be_packed() -> None:
    report = explain(adamw(parameters(shapes=SHAPES)), strategy="light", state="block8")
    rows = {row.name: row for row in report.tensors}
    assert rows["param_groups[0].params[0].exp_avg_sq"].why.endswith("packed (never negative)")
    assert "no multiples of 32" in rows["param_groups[0].params[2].exp_avg"].why or "multiples" in str(report)


# In pieces. -----------------------------------------------------------------------------------------------


#: Rows that two processes have in equal and in unequal shares.
SHARED_OUT = ((192, 64), (131, 64), (70, 2, 64), (37,))


def trained(
    placement: Placement | None, dtype: torch.dtype, state: Any
) -> tuple[dict[str, Tensor], list[bool]]:
    """All that some steps leave, in one piece each, with a save and a load in the middle."""
    torch._dynamo.reset()
    mesh = None if placement is None else init_device_mesh("cpu", (2,))
    params = parameters(dtype, shapes=SHARED_OUT)
    if mesh is not None and placement is not None:
        params = [Parameter(in_pieces(p.detach(), mesh, placement)) for p in params]
    optimizer = adamw(params)
    for seed in range(6):
        if seed in (0, 3):
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = adamw(params)
            optimizer.load_state_dict(saved)
            step: Any = torch.compile(optimizer.step, backend=CollageBackend(strategy="light", state=state))
        if mesh is None or placement is None:
            set_gradients(params, seed)
        else:
            set_gradients_in_pieces(params, mesh, placement, seed)
        step()
    left = {
        f"{i}.{name}": in_one_piece(tensor.detach().clone())
        for i, p in enumerate(params)
        for name, tensor in {"p": p, **optimizer.state[p]}.items()
    }
    return left, [is_packed(optimizer.state[p]["exp_avg"]) for p in params]


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
@each_kind
def test_pieces_have_the_bits_of_the_whole(
    two_processes: Processes, placement: Placement, dtype: torch.dtype, state: str
) -> None:
    alone, packed = trained(None, dtype, state)
    assert packed == [True, True, True, False]
    for left, packed_there in two_processes.run(trained, placement, dtype, state):
        assert packed_there == packed
        assert left.keys() == alone.keys()
        assert all(torch.equal(left[name], alone[name]) for name in alone)
