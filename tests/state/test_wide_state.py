"""State that an optimizer keeps wider than its parameters: saved, loaded, and gone on with."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import collage_fx
from collage_fx.errors import CheckpointMismatchError
from tests.state.test_checkpoint import copied, loaded_by_plain_torch, without_ours
from tests.support.training import Descent, compiled, differences, everything, parameters, run_steps
from tests.support.warned import warned


class Wide(Descent):
    """A float32 matrix, a float64 number, a counter and a mask, in containers too, beside 16-bit moments."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["second"] = torch.zeros_like(p, dtype=torch.float32)
                state["decay"] = {"powers": [torch.ones((), dtype=torch.float64)], "step": torch.zeros(())}
                state["seen"] = torch.full((), 1000, dtype=torch.int64)
                state["signs"] = torch.zeros_like(p, dtype=torch.bool)
                state["moment"] = torch.zeros_like(p)
            (power,) = state["decay"]["powers"]
            power.mul_(0.999)
            state["seen"].add_(1)
            state["signs"].copy_(p.grad > 0)
            state["second"].mul_(0.999).addcmul_(p.grad.float(), p.grad.float(), value=0.001)
            state["moment"].lerp_(p.grad, 0.01)
            p.addcdiv_(state["moment"], (state["second"] / (1 - power)).sqrt() + 1e-8, value=-1e-3)


def asgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.ASGD(params, lr=1e-3, lambd=0.01, t0=1)


def nadam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=1e-3)


MADE = pytest.mark.parametrize("make", [asgd, nadam, Wide])
#: Names of the wide state.
NAMES: dict[Any, list[str]] = {
    asgd: ["eta", "mu"],
    nadam: ["mu_product"],
    Wide: ["second", "decay.powers.0", "seen", "signs"],
}


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return optimizer.param_groups[0]["params"]


def written(state_dict: dict[str, Any]) -> Any:
    """A state dict, once it has been in a file."""
    torch.save(state_dict, file := io.BytesIO())
    file.seek(0)
    return torch.load(file)


def after_three_steps(make: Callable[..., Any]) -> tuple[torch.optim.Optimizer, Any, Any]:
    """An optimizer, its step, and its checkpoint; and three more steps."""
    optimizer = make(parameters(shapes=[(24, 24), (5,)]))
    step = compiled(optimizer)
    run_steps(step, params_of(optimizer), range(3))
    saved = written(optimizer.state_dict()), copied(params_of(optimizer))
    run_steps(step, params_of(optimizer), range(3, 6))
    return optimizer, *saved


@MADE
def test_a_run_that_is_resumed_is_the_run_that_goes_on(make: Callable[..., Any]) -> None:
    expected, saved, params = after_three_steps(make)
    for key in saved["state"]:
        kept = [name for name in saved["state"][key] if ".kept." in str(name)]
        assert [name.split(".", 1)[1].rsplit(".", 2)[0] for name in kept] == NAMES[make]
    optimizer = make(params)
    step = compiled(optimizer)
    start = copied(params)
    for _ in range(2):  # into a new optimizer, and into one that has gone on
        for p, value in zip(params, start, strict=True):
            p.data.copy_(value)
        assert warned(lambda: optimizer.load_state_dict(copy.deepcopy(saved))) == []
        run_steps(step, params, range(3, 6))
        assert differences(everything(expected), everything(optimizer)) == []


@MADE
def test_plain_torch_may_have_loaded_the_checkpoint(make: Callable[..., Any]) -> None:
    """Numbers come back from their bytes, the state of more elements with its dtype, and with a warning."""
    expected, saved, params = after_three_steps(make)
    optimizer = make(params)
    loaded_by_plain_torch(optimizer, saved)
    step: Any = None

    def compile_it() -> None:
        nonlocal step
        step = compiled(optimizer)

    told = warned(compile_it)
    assert ["second (torch.float32)" in each for each in told] == [True] * (make is Wide)
    run_steps(step, params, range(3, 6))
    found, wanted = everything(optimizer), everything(expected)
    assert {name: each.dtype for name, each in found.items()} == {
        name: each.dtype for name, each in wanted.items()
    }
    if make is not Wide:
        assert differences(found, wanted) == []


def test_a_number_that_plain_torch_has_changed_since_is_not_brought_back() -> None:
    _, saved, params = after_three_steps(asgd)
    optimizer = asgd(params)
    optimizer.load_state_dict(saved)
    eta = torch.tensor(0.25, dtype=torch.bfloat16)
    optimizer.state[params[0]]["eta"] = eta
    compiled(optimizer)
    found = optimizer.state[params[0]]["eta"]
    assert (found.dtype, float(found)) == (torch.float32, 0.25)


@MADE
def test_a_checkpoint_of_plain_torch_shows_16_bit_parameters_by_other_state(make: Callable[..., Any]) -> None:
    expected, saved, params = after_three_steps(make)
    optimizer = make(params)
    compiled(optimizer)
    warned(lambda: optimizer.load_state_dict(without_ours(saved)))
    of_state = {name: each for name, each in everything(optimizer).items() if "error" not in name}
    assert {name: each.dtype for name, each in of_state.items()} == {
        name: each.dtype for name, each in everything(expected).items() if "error" not in name
    }


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("make", [asgd, nadam])
def test_of_a_float32_run_numbers_are_kept_and_moments_cast(
    make: Callable[..., Any], is_running: bool
) -> None:
    plain = make(wide := parameters(torch.float32))
    run_steps(plain.step, wide, range(3))
    params = [torch.nn.Parameter(p.detach().bfloat16()) for p in wide]
    optimizer = make(params)
    step = compiled(optimizer)
    if is_running:
        run_steps(step, params, [0])
    warned(lambda: optimizer.load_state_dict(plain.state_dict()))
    for p, q in zip(params, wide, strict=True):
        for name, value in optimizer.state[p].items():
            is_number = not value.dim()
            assert value.dtype is (torch.float32 if is_number else torch.bfloat16)
            assert not is_number or torch.equal(value, plain.state[q][name])


def test_a_running_optimizer_keeps_what_16_bits_do_not_hold_of_float32_moments() -> None:
    """Torch makes new state tensors: those of a compiled step get the error terms that the old ones had."""
    plain = nadam(wide := parameters(torch.float32))
    run_steps(plain.step, wide, range(3))
    params = [torch.nn.Parameter(p.detach().bfloat16()) for p in wide]
    optimizer = nadam(params)
    run_steps(compiled(optimizer), params, [0])
    warned(lambda: optimizer.load_state_dict(plain.state_dict()))
    for p, q in zip(params, wide, strict=True):
        square, expected = optimizer.state[p]["exp_avg_sq"], plain.state[q]["exp_avg_sq"]
        assert torch.equal(collage_fx.full_value(square), expected)
        assert not torch.equal(square.float(), expected)


class AllWide(Descent):
    """A moment in float32, and nothing that shows that the parameter has 16 bits."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            moment = self.state[p].setdefault("moment", torch.zeros_like(p, dtype=torch.float32))
            moment.lerp_(p.grad.float(), 0.01)
            p.add_(moment, alpha=-1e-3)


@pytest.mark.parametrize("is_running", [True, False])
def test_without_our_keys_the_state_of_the_loaded_optimizer_tells(is_running: bool) -> None:
    optimizer = AllWide(parameters())
    run_steps(optimizer.step, params_of(optimizer), range(3))
    again = AllWide(parameters())
    step = compiled(again)
    if is_running:
        run_steps(step, params_of(again), [0])
    warned(lambda: again.load_state_dict(copy.deepcopy(optimizer.state_dict())))
    dtypes = {each["moment"].dtype for each in again.state.values()}
    assert dtypes == {torch.float32 if is_running else torch.bfloat16}


def test_wide_state_is_the_checkpoints_own_memory_where_that_of_the_parameter_is() -> None:
    _, saved, params = after_three_steps(Wide)
    optimizer = Wide(params)
    compiled(optimizer)
    optimizer.load_state_dict(saved)
    state, held = optimizer.state[params[0]], saved["state"][0]

    def is_the_same(one: Tensor, other: Tensor) -> bool:
        return one.data_ptr() == other.data_ptr()

    assert is_the_same(state["moment"], held["moment"])
    assert is_the_same(state["second"], held["second"])
    assert not is_the_same(state["seen"], held["seen"])


def test_a_key_of_an_unknown_dtype_is_refused_before_anything_is_loaded() -> None:
    _, saved, params = after_three_steps(nadam)
    saved["state"][0]["collage_fx.mu_product.kept.float99"] = saved["state"][0].pop(
        "collage_fx.mu_product.kept.float32"
    )
    optimizer = nadam(params)
    compiled(optimizer)
    with pytest.raises(CheckpointMismatchError, match="float99"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state


def test_a_plain_state_dict_has_none_of_it(tmp_path: Path) -> None:
    _, saved, _ = after_three_steps(Wide)
    plain = collage_fx.plain_state_dict(saved)
    assert not any("collage_fx" in str(name) for each in plain["state"].values() for name in each)
