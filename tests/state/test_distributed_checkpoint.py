"""Error terms in checkpoints of ``torch.distributed.checkpoint``, nested and flattened, of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from collage_fx import full_value, install
from tests.support.training import compiled, differences, everything, run_steps, set_as_own_step
from tests.support.warned import tensors_in, warned


def model(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).bfloat16()


def adamw(of: nn.Module, **options: Any) -> tuple[Optimizer, Callable[[], Any]]:
    optimizer = torch.optim.AdamW(of.parameters(), lr=1e-3)
    return optimizer, compiled(optimizer, **{"strategy": "plus", **options})


def save(of: nn.Module, optimizer: Optimizer, options: StateDictOptions, directory: Path) -> None:
    states, optimizer_states = get_state_dict(of, optimizer, options=options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        checkpoint.save({"model": states, "optimizer": optimizer_states}, checkpoint_id=directory)


def load(
    into: nn.Module, optimizer: Optimizer, options: StateDictOptions, directory: Path, planner: Any = None
) -> None:
    states, optimizer_states = get_state_dict(into, optimizer, options=options)
    found: dict[str, Any] = {"model": states, "optimizer": optimizer_states}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        checkpoint.load(found, checkpoint_id=directory, planner=planner)
    set_state_dict(
        into,
        optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
        options=options,
    )


def saved_run(steps: int, options: StateDictOptions, directory: Path) -> tuple[nn.Module, Optimizer, Any]:
    """A model, its optimizer and compiled step, after some steps, and saved."""
    torch._dynamo.reset()
    of = model()
    optimizer, step = adamw(of)
    run_steps(step, list(of.parameters()), range(steps))
    save(of, optimizer, options, directory)
    return of, optimizer, step


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("has_stepped", [True, False])
def test_a_run_goes_on_to_the_bit(*, flatten: bool, has_stepped: bool, tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    first, optimizer, step = saved_run(3, options, tmp_path)
    run_steps(step, list(first.parameters()), range(3, 5))

    second = model()
    other, other_step = adamw(second)
    # torch makes state to be loaded by a step, without gradients and a learning rate: by the compiled one.
    set_as_own_step(other, other_step)
    if has_stepped:
        run_steps(other_step, list(second.parameters()), range(7, 9))
    load(second, other, options, tmp_path)
    run_steps(other_step, list(second.parameters()), range(3, 5))
    left = everything(optimizer)
    assert sum(".error." in name for name in left) == 8  # of four parameters and their second moments
    assert not differences(left, everything(other))


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize(
    ("dtype", "state"),
    [(torch.bfloat16, "block8"), (torch.float32, "block8"), (torch.float32, "bf16")],
    ids=str,
)
def test_packed_state_goes_on_to_the_bit(
    *, flatten: bool, dtype: torch.dtype, state: str, tmp_path: Path
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    packed = {"strategy": "light", "state": state}
    first = model(64).to(dtype)
    optimizer, step = adamw(first, **packed)
    run_steps(step, list(first.parameters()), range(3))
    save(first, optimizer, options, tmp_path)
    run_steps(step, list(first.parameters()), range(3, 5))

    second = model(64).to(dtype)
    other, other_step = adamw(second, **packed)
    set_as_own_step(other, other_step)
    run_steps(other_step, list(second.parameters()), range(7, 9))
    load(second, other, options, tmp_path)
    run_steps(other_step, list(second.parameters()), range(3, 5))
    moments = [state["exp_avg"] for state in other.state.values()]
    assert [type(each).__name__ for each in moments] == ["PackedTensor", "Tensor"] * 2  # weights, biases
    assert not differences(everything(optimizer), everything(other))


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
def test_an_optimizer_without_error_terms_to_load_says_so(*, flatten: bool, tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    saved_run(2, options, tmp_path)
    second = model()
    other, other_step = adamw(second)
    load(second, other, options, tmp_path)
    (told,) = warned(lambda: run_steps(other_step, list(second.parameters()), [2]))
    assert "had not taken a compiled step" in told


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
def test_a_plain_checkpoint_is_loaded_in_part(*, flatten: bool, tmp_path: Path) -> None:
    """What the optimizer that it is loaded into had for error terms is not added to the new values."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    plain = model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    run_steps(plain_optimizer.step, list(plain.parameters()), range(2))
    save(plain, plain_optimizer, options, tmp_path)
    second = model()
    other, other_step = adamw(second)
    run_steps(other_step, list(second.parameters()), range(7, 9))
    at_load = warned(
        lambda: load(second, other, options, tmp_path, DefaultLoadPlanner(allow_partial_load=True))
    )
    for p in second.parameters():
        p.grad = torch.zeros_like(p)
    other.param_groups[0]["lr"] = 0.0
    told = at_load + warned(other_step)
    assert all("holds error terms of other values than" in each for each in told)
    named = [tensors_in(each) for each in told]
    assert [(len(names), more) for names, more in named] == [(3, 1)] * 2  # of state, of weights
    for p, q in zip(second.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full_value(p), q.double())


@pytest.mark.parametrize(
    ("of", "into"),
    [
        ({}, {"bytes_per_parameter": 5.1}),
        ({"bytes_per_parameter": 5.1}, {}),
        ({"error_format": "mcf"}, {"strategy": "full", "error_format": "exact"}),
    ],
    ids=["to 5.1", "from 5.1", "mcf to exact"],
)
def test_a_full_state_dict_goes_into_an_optimizer_with_other_formats(
    of: dict[str, Any], into: dict[str, Any]
) -> None:
    options = StateDictOptions(full_state_dict=True)
    jobs = []
    for each in (of, into):
        network = model(64)
        jobs.append((network, install(torch.optim.AdamW(network.parameters(), lr=1e-3), **each)))
    (first, optimizer), (second, other) = jobs
    run_steps(optimizer.step, list(first.parameters()), range(3))
    weights, state = get_state_dict(first, optimizer, options=options)
    set_state_dict(second, other, model_state_dict=weights, optim_state_dict=state, options=options)
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(full_value(one), full_value(two))
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(full_value(optimizer.state[one][key]), full_value(other.state[two][key]))
