from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

import collage_fx
from collage_fx import CollageBackend, backend_of, error_terms, full_value, install, load_full_state_dict
from collage_fx.capture.recording import Request, record
from collage_fx.errors import CheckpointMismatchError
from collage_fx.state.checkpoint import adopt, files_of
from collage_fx.state.optimizers import known_tensors
from tests.support import resume
from tests.support.training import (
    Descent,
    LateMomentum,
    compiled,
    differences,
    everything,
    live_error_terms,
    parameters,
    run_steps,
    set_gradients,
)
from tests.support.warned import tensors_in, warned

ROOT = Path(__file__).parents[2]

LO, COUNT, FINGERPRINT = (f"collage_fx.parameter.exact.{name}" for name in ("rest", "count", "fingerprint"))


def ours(state_dict: dict[str, Any]) -> dict[Any, list[str]]:
    """Our keys in a state dict, by parameter, less those of the fingerprints beside them."""
    found = {}
    for key, entries in state_dict["state"].items():
        keys = [name for name in entries if str(name).startswith("collage_fx.")]
        found[key] = [name for name in keys if not name.endswith(".fingerprint")]
        assert {name.rpartition(".")[0] + ".fingerprint" for name in found[key]} == {*keys} - {*found[key]}
    return found


def copied(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Other parameters of the same values, as a model's own checkpoint brings them."""
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def without_ours(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint of a plain optimizer."""
    state = {
        key: {name: value for name, value in entries.items() if not str(name).startswith("collage_fx.")}
        for key, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": {key: entries for key, entries in state.items() if entries}}


# The round trip. ------------------------------------------------------------------------------------------


def test_a_run_continued_in_another_process_is_the_uninterrupted_run(tmp_path: Path) -> None:
    uninterrupted = {}
    for dtype, error_format in resume.RUNS:
        optimizer, step = resume.start(dtype, error_format)
        params = optimizer.param_groups[0]["params"]
        run_steps(step, params, resume.FIRST)
        resume.save(optimizer, tmp_path / f"{resume.name_of(dtype, error_format)}.checkpoint")
        run_steps(step, params, resume.REST)
        uninterrupted[resume.name_of(dtype, error_format)] = everything(optimizer)
    subprocess.run([sys.executable, "-m", "tests.support.resume", str(tmp_path)], check=True, cwd=ROOT)
    for name, expected in uninterrupted.items():
        assert sum("error" in key for key in expected) == 4  # of parameters and second moments
        assert differences(expected, torch.load(tmp_path / f"{name}.result")) == []


def test_state_dict_holds_the_error_terms_under_keys_of_ours() -> None:
    params = parameters()
    optimizer = torch.optim.RMSprop(params, alpha=0.999)
    assert ours(optimizer.state_dict()) == {}
    run_steps(compiled(optimizer), params, [0])
    saved = optimizer.state_dict()
    slots = ("parameter", "square_avg")
    keys = [f"collage_fx.{slot}.exact.{name}" for slot in slots for name in ("rest", "count")]
    assert ours(saved) == {0: keys, 1: keys}
    live, _ = live_error_terms(params[0])
    entry = saved["state"][0][keys[0]]
    assert (entry.data_ptr(), entry.dtype, entry.shape) == (live.data_ptr(), torch.uint8, (*live.shape, 2))
    assert all(
        "collage_fx" not in str(list(state)) for state in optimizer.state.values()
    )  # nothing in the live state


def test_loading_into_a_running_process_replaces_the_live_error_terms() -> None:
    params = parameters()
    optimizer = torch.optim.RMSprop(params, alpha=0.999)
    step = compiled(optimizer)
    run_steps(step, params, range(2))
    buffers = [live_error_terms(p)[0] for p in params]
    checkpoint = copy.deepcopy(optimizer.state_dict())
    saved = [p.detach().clone() for p in params]
    run_steps(step, params, range(2, 5))
    expected = everything(optimizer)

    for p, value in zip(params, saved, strict=True):
        p.data.copy_(value)
    assert warned(lambda: optimizer.load_state_dict(checkpoint)) == []
    assert all(live_error_terms(p)[0] is buffer for p, buffer in zip(params, buffers, strict=True))
    run_steps(step, params, range(2, 5))
    assert differences(expected, everything(optimizer)) == []


def test_loading_ones_own_state_dict_changes_nothing() -> None:
    params = parameters()
    optimizer = torch.optim.RMSprop(params, alpha=0.999)
    run_steps(compiled(optimizer), params, range(2))
    before = everything(optimizer)
    assert warned(lambda: optimizer.load_state_dict(optimizer.state_dict())) == []
    assert differences(before, everything(optimizer)) == []


def test_an_optimizer_without_state_round_trips() -> None:
    """SGD: the only entry of a parameter is ours, and torch must not see it."""
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=2.0**-12)
    run_steps(compiled(optimizer), params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    assert ours(saved) == {i: [LO, COUNT] for i in range(2)}
    again = torch.optim.SGD(other := parameters(), lr=2.0**-12)
    for p, value in zip(other, params, strict=True):
        p.data.copy_(value)
    compiled(again)  # adopts it
    again.load_state_dict(saved)
    assert all(not state for state in again.state.values())
    assert differences(everything(optimizer), everything(again)) == []
    for each in (optimizer, again):
        run_steps(compiled(each), each.param_groups[0]["params"], [2])
    assert differences(everything(optimizer), everything(again)) == []


def test_state_inside_containers_round_trips() -> None:
    params = parameters()
    optimizer = LateMomentum(params)
    run_steps(compiled(optimizer), params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    keys = [f"collage_fx.moments.second.0.exact.{name}" for name in ("rest", "count")]
    assert ours(saved)[0] == [LO, COUNT, *keys]
    again = LateMomentum(parameters())
    compiled(again)
    again.load_state_dict(saved)
    moment = again.state[again.param_groups[0]["params"][0]]["moments"]["second"][0]
    assert torch.equal(as_saved(moment), saved["state"][0][keys[0]])


def test_a_checkpoint_of_an_earlier_version_has_no_count() -> None:
    """Which starts at zero; the error terms are those of the file."""
    params = parameters()
    optimizer = Descent(params)
    run_steps(compiled(optimizer), params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for entries in saved["state"].values():
        del entries[COUNT]
    again = Descent(other := copied(params))
    step = compiled(again)
    again.load_state_dict(saved)
    assert [int(live_error_terms(p)[1]) for p in other] == [0, 0]
    assert all(torch.equal(as_saved(p), saved["state"][i][LO]) for i, p in enumerate(other))
    run_steps(step, other, [2])
    assert [int(live_error_terms(p)[1]) for p in other] == [1, 1]


def test_several_groups_and_parameters_without_gradients() -> None:
    params = parameters(shapes=[(2,), (3,), (4,)])
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 2.0**-10}]
    optimizer = Descent(groups)
    run_steps(compiled(optimizer), [params[0], params[2]], range(2))  # the second never takes part
    saved = copy.deepcopy(optimizer.state_dict())
    assert list(ours(saved)) == [0, 2]
    other = copied(params)
    again = Descent([{"params": other[:2]}, {"params": other[2:]}])
    compiled(again)
    again.load_state_dict(saved)
    assert [len(error_terms(p)) for p in other] == [1, 0, 1]
    assert torch.equal(error_terms(other[2])[0], error_terms(params[2])[0])


class Versioned(Descent):
    """A class with a format of its own, as third parties have them."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "version": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        assert rest.pop("version") == 3
        super().load_state_dict(rest)


def test_classes_that_override_and_call_super_are_covered() -> None:
    params, other = parameters(), parameters()
    optimizer, again = Versioned(params), Versioned(other)
    run_steps(compiled(optimizer), params, range(2))
    for p, q in zip(params, other, strict=True):
        q.data.copy_(p)
    compiled(again)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(torch.equal(error_terms(p)[0], error_terms(q)[0]) for p, q in zip(params, other, strict=True))


def test_torchs_own_state_dict_has_the_error_terms_after_that_of_a_class() -> None:
    params = parameters()
    optimizer = Versioned(params)
    install(optimizer)
    run_steps(optimizer.step, params, range(2))
    made, saved = optimizer.state_dict(), torch.optim.Optimizer.state_dict(optimizer)
    assert made["version"] == 3
    for number, entries in made["state"].items():
        assert any(name.startswith("collage_fx.") for name in entries)
        assert saved["state"][number].keys() == entries.keys()


@pytest.mark.parametrize("is_adopted_first", [True, False])
def test_hooks_of_the_user_see_error_terms(*, is_adopted_first: bool) -> None:
    """A pair of hooks that packs a state dict and unpacks it does so with ours, too."""
    params, other = parameters(), parameters()
    optimizer, again = Descent(params), Descent(other)
    run_steps(compiled(optimizer), params, [0])
    loaded: list[tuple[Tensor, ...]] = []
    if is_adopted_first:
        compiled(again)
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "state": pickle.dumps(saved["state"])})
    again.register_load_state_dict_pre_hook(lambda _, saved: {**saved, "state": pickle.loads(saved["state"])})
    again.register_load_state_dict_post_hook(lambda optimizer: loaded.append(error_terms(other[0])))
    for p, q in zip(params, other, strict=True):
        q.data.copy_(p)
    if not is_adopted_first:
        compiled(again)
    saved = optimizer.state_dict()
    assert isinstance(saved["state"], bytes)
    again.load_state_dict(saved)
    assert error_terms(params[0])[0].any()
    assert torch.equal(loaded[0][0], error_terms(params[0])[0])
    assert ours(again.state_dict()) == {0: [LO, COUNT], 1: [LO, COUNT]}


class Sharding(Descent):
    """Keeps state dicts of an optimizer within, as ``ZeroRedundancyOptimizer`` does to put them together."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.optim = torch.optim.RMSprop(params, alpha=0.999)
        self.collected: list[dict[str, Any]] = []


def test_state_dicts_that_an_optimizer_collects_are_not_taken_for_state_of_its_own() -> None:
    optimizer = Sharding(params := parameters())
    run_steps(compiled(optimizer.optim), params, range(2))
    optimizer.collected.append(optimizer.optim.state_dict())
    assert warned(optimizer.state_dict) == []


# Checkpoints without error terms. -------------------------------------------------------------------------


def test_a_plain_checkpoint_loaded_before_the_first_step_warns_once() -> None:
    plain = torch.optim.RMSprop(params := parameters(), alpha=0.999)
    run_steps(plain.step, params, range(2))
    saved = plain.state_dict()
    optimizer = torch.optim.RMSprop(other := parameters(), alpha=0.999)
    step = compiled(optimizer)
    assert warned(lambda: optimizer.load_state_dict(saved)) == []  # it may well stay a plain optimizer
    set_gradients(other)
    (warning,) = warned(step)
    assert "have been loaded into RMSprop" in warning
    assert "start from zero" in warning
    first, second = (f"param_groups[0].params[{i}]" for i in range(2))
    named = [f"{first}.parameter", f"{first}.square_avg", f"{second}.parameter"]
    assert tensors_in(warning) == (named, 1)
    assert warned(step) == []


def test_a_plain_checkpoint_loaded_into_a_running_process_zeroes_and_warns_once() -> None:
    params = parameters()
    optimizer = torch.optim.RMSprop(params, alpha=0.999)
    step = compiled(optimizer)
    run_steps(step, params, range(2))
    buffers = [live_error_terms(p)[0] for p in params]
    saved = without_ours(copy.deepcopy(optimizer.state_dict()))
    (warning,) = warned(lambda: optimizer.load_state_dict(saved))
    assert "have been loaded into RMSprop" in warning
    assert all(not buffer.any() for buffer in buffers)
    assert all(torch.equal(full_value(p), p.double()) for p in params)
    assert warned(step) == []
    assert all(live_error_terms(p)[0] is buffer for p, buffer in zip(params, buffers, strict=True))


@pytest.mark.parametrize("count", [None, "two", [2], torch.tensor([1.0, 2.0])], ids=repr)
def test_state_whose_count_of_steps_is_no_number_is_taken_as_it_is(count: Any) -> None:
    """Without a count of steps nothing says that a checkpoint has been loaded."""
    optimizer = Descent(params := parameters())
    for p in params:
        optimizer.state[p]["step"] = copy.deepcopy(count)
    set_gradients(params)
    assert warned(collage_fx.install(optimizer).step) == []
    assert all(str(optimizer.state[p]["step"]) == str(count) for p in params)
    assert all(error_terms(p)[0].any() for p in params)


def test_a_plain_state_dict_of_parameters_without_state_is_empty() -> None:
    optimizer = collage_fx.install(torch.optim.SGD(params := parameters(), lr=0.1))
    run_steps(optimizer.step, params, range(2))
    saved = optimizer.state_dict()
    assert ours(saved) == {i: [LO, COUNT] for i in range(2)}
    assert collage_fx.plain_state_dict(saved)["state"] == {}
    again = torch.optim.SGD(other := parameters(), lr=0.1)
    again.load_state_dict(saved)
    compiled(again)
    assert not any(map(again.state.get, other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_terms_of_16_bits_are_saved_as_they_are(dtype: torch.dtype) -> None:
    """Programs that read a file add them to the parameter; a cast to its dtype keeps them."""
    optimizer = Descent(params := parameters(dtype))
    saved = checkpoint_of_two_steps(optimizer, error_format="mcf")
    for i, p in enumerate(params):
        term = saved["state"][i]["collage_fx.parameter.mcf.lo"]
        assert (term.dtype, term.shape) == (dtype, p.shape)
        assert torch.equal(p.detach().double() + term.double(), full_value(p))


def test_a_checkpoint_that_is_loaded_into_another_dtype_is_left_as_it_is() -> None:
    """Its error terms belong to other values: they begin from zero here, not in the checkpoint."""
    saved = checkpoint_of_two_steps(torch.optim.RMSprop(params := parameters(), alpha=0.999))
    before = copy.deepcopy(saved["state"])
    optimizer = torch.optim.RMSprop([torch.nn.Parameter(p.detach().half()) for p in params], alpha=0.999)
    step = compiled(optimizer)
    set_gradients(params_of(optimizer))
    told = warned(
        lambda: optimizer.load_state_dict(saved), step
    )  # of state at the load, of weights at the step
    assert ["holds error terms of other values than" in each for each in told] == [True] * 2
    for i, entries in before.items():
        changed = [key for key, value in entries.items() if not torch.equal(value, saved["state"][i][key])]
        assert changed == ["step"]  # a counter that torch takes over itself


def test_no_warning_where_nothing_of_ours_is_in_play() -> None:
    optimizer = torch.optim.RMSprop(params := parameters())
    run_steps(optimizer.step, params, [0])
    again = torch.optim.RMSprop(other := parameters())
    set_gradients(other)

    def continue_plain() -> None:
        again.load_state_dict(optimizer.state_dict())
        again.step()
        compiled(again, strategy="none")()

    assert warned(continue_plain) == []


# Checkpoints whose parts do not belong together. ------------------------------------------------------------


def trained(steps: int = 3, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.RMSprop(params := parameters(), alpha=0.999)
    run_steps(compiled(optimizer, **options), params, range(steps))
    return optimizer


def continued(saved: dict[str, Any], params: list[torch.nn.Parameter], **options: Any) -> Any:
    """An optimizer of these parameters that has loaded a checkpoint and taken a step, and its warnings."""
    optimizer = torch.optim.RMSprop(params, alpha=0.999)
    told = warned(lambda: optimizer.load_state_dict(copy.deepcopy(saved)))
    set_gradients(params, 3)
    steps: list[Any] = []
    told += warned(lambda: steps.append(compiled(optimizer, **options)))
    told += warned(steps[0])
    return optimizer, told


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    params: list[torch.nn.Parameter] = optimizer.param_groups[0]["params"]
    return params


def zero_lo(saved: dict[str, Any], *of: tuple[int, str]) -> dict[str, Any]:
    """A checkpoint as it would be if these had had no error terms."""
    changed = copy.deepcopy(saved)
    for parameter, slot in of:
        changed["state"][parameter][f"collage_fx.{slot}.exact.rest"].zero_()
        changed["state"][parameter][f"collage_fx.{slot}.exact.fingerprint"].zero_()
    return changed


def names(*of: tuple[int, str]) -> str:
    return ", ".join(f"param_groups[0].params[{parameter}].{slot}" for parameter, slot in of)


@pytest.mark.parametrize("model_first", [True, False])
def test_a_model_may_be_loaded_before_its_optimizer_or_after_it(model_first: bool) -> None:
    optimizer = trained()
    saved, values = copy.deepcopy(optimizer.state_dict()), copied(params_of(optimizer))
    run_steps(compiled(optimizer), params_of(optimizer), [3])
    model = torch.nn.ParameterList(parameters(seed=1))
    again = torch.optim.RMSprop(model, alpha=0.999)
    for loads_model in (model_first, not model_first):
        if loads_model:
            model.load_state_dict(torch.nn.ParameterList(values).state_dict())
        else:
            again.load_state_dict(saved)
    run_steps(compiled(again), list(model), [3])
    assert differences(everything(optimizer), everything(again)) == []


def changed_by_plain_torch(saved: dict[str, Any], params: list[torch.nn.Parameter]) -> dict[str, Any]:
    plain = torch.optim.RMSprop(params, alpha=0.999)
    loaded_by_plain_torch(plain, saved)
    for p in params[:1]:
        p.grad = torch.ones_like(p)
    torch.optim.RMSprop.step.__wrapped__(plain)  # type: ignore[attr-defined]
    return torch.optim.Optimizer.state_dict.__wrapped__(plain)  # type: ignore[attr-defined]


def swapped(saved: dict[str, Any], params: list[torch.nn.Parameter]) -> dict[str, Any]:
    other = copy.deepcopy(trained(steps=4).state_dict())
    saved["state"][0] |= {key: value for key, value in other["state"][0].items() if ".parameter." in key}
    return saved


def damaged(saved: dict[str, Any], params: list[torch.nn.Parameter]) -> dict[str, Any]:
    saved["state"][0][LO][0, 0] = 100.0
    return saved


BOTH = (0, "parameter"), (0, "square_avg")


@pytest.mark.parametrize(
    ("change", "stale"), [(changed_by_plain_torch, BOTH), (swapped, BOTH[:1]), (damaged, BOTH[:1])]
)
def test_what_no_longer_belongs_to_its_value_starts_from_zero_and_is_named(change: Any, stale: Any) -> None:
    """As if it had not been saved; the others go on, bit for bit."""
    optimizer = trained()
    saved, params = copy.deepcopy(optimizer.state_dict()), copied(params_of(optimizer))
    changed = change(copy.deepcopy(saved), params)
    again, told = continued(changed, copied(params))
    assert len(told) == len(stale)  # of the state at the load, of the weights at the step
    for each in stale:
        wanted = f"RMSprop holds error terms of other values than {names(each)}: load the weights that"
        assert any(wanted in message for message in told)
    expected, others = continued(zero_lo(changed, *stale), copied(params))
    assert differences(everything(expected), everything(again)) == []
    assert others == []
    with pytest.raises(AssertionError):  # that is not what these would have come to
        assert differences(everything(continued(saved, copied(params))[0]), everything(again)) == []


def test_error_terms_of_other_values_are_not_given_to_a_tensor_that_replaces_theirs() -> None:
    """An optimizer is loaded alone, and then its parameters are replaced by others of equal values."""
    saved, optimizer = copy.deepcopy(trained().state_dict()), torch.optim.RMSprop(parameters(), alpha=0.999)
    run_steps(step := compiled(optimizer), params := params_of(optimizer), [0])
    optimizer.load_state_dict(copy.deepcopy(saved))
    expected, _ = continued(zero_lo(saved, (0, "parameter"), (1, "parameter")), copied(params))
    for i, (old, new) in enumerate(zip([*params], copied(params), strict=True)):
        params[i] = new
        optimizer.state[new] = optimizer.state.pop(old)
    set_gradients(params, 3)
    (told,) = warned(step)
    assert "of other values than param_groups[0].params[0].parameter, param_groups[0].params[1]" in told
    assert differences(everything(expected), everything(optimizer)) == []


def test_a_detour_through_plain_torch_without_a_step_costs_nothing() -> None:
    optimizer = trained()
    saved, params = copy.deepcopy(optimizer.state_dict()), copied(params_of(optimizer))
    plain = torch.optim.RMSprop(parameters(), alpha=0.999)
    loaded_by_plain_torch(plain, saved)
    carried = torch.optim.Optimizer.state_dict.__wrapped__(plain)  # type: ignore[attr-defined]
    assert carried["state"][0][FINGERPRINT].dtype is torch.bfloat16
    again, told = continued(carried, params)
    assert told == []
    run_steps(compiled(optimizer), params_of(optimizer), [3])
    assert differences(everything(optimizer), everything(again)) == []


def test_a_checkpoint_that_is_saved_again_before_a_step_still_says_what_its_terms_belong_to() -> None:
    optimizer = trained()
    other = torch.optim.RMSprop(parameters(seed=1), alpha=0.999)  # not the values they belong to
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again, told = continued(other.state_dict(), copied(params_of(optimizer)))
    assert told == []
    run_steps(compiled(optimizer), params_of(optimizer), [3])
    assert differences(everything(optimizer), everything(again)) == []


def test_a_checkpoint_that_another_is_loaded_over_is_not_warned_about() -> None:
    saved = copy.deepcopy(trained().state_dict())
    optimizer = torch.optim.RMSprop(params := parameters(seed=1), alpha=0.999)
    step = compiled(optimizer)
    optimizer.load_state_dict(copy.deepcopy(saved))
    optimizer.load_state_dict(without_ours(saved))
    set_gradients(params)
    (told,) = warned(step)
    assert "no error terms of" in told


def test_an_optimizer_that_has_loaded_and_takes_no_step_is_freed() -> None:
    params, saved = parameters(), copy.deepcopy(trained().state_dict())
    optimizer = torch.optim.RMSprop(params, alpha=0.999)
    optimizer.load_state_dict(saved)
    alive: list[weakref.ref[Any]] = [weakref.ref(optimizer), weakref.ref(params[0])]
    del optimizer, params
    gc.collect()
    assert all(each() is None for each in alive)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_of_what_no_step_has_used_say_what_their_terms_belong_to(copy_of: Any) -> None:
    saved, values = copy.deepcopy(trained().state_dict()), copied(params_of(trained()))
    expected, _ = continued(saved, copied(values))
    optimizer = torch.optim.RMSprop(parameters(seed=1), alpha=0.999)
    compiled(optimizer)
    optimizer.load_state_dict(saved)
    for is_model_loaded in (True, False):
        again = copy_of(optimizer)
        if is_model_loaded:
            for p, value in zip(params_of(again), values, strict=True):
                p.data.copy_(value)
        set_gradients(params_of(again), 3)
        told = warned(compiled(again))
        assert len(told) == (not is_model_loaded)
        assert is_model_loaded == (differences(everything(expected), everything(again)) == [])
    assert "of other values than param_groups[0].params[0], param_groups[0].params[1]: load" in told[0]


@pytest.mark.parametrize("is_compiled_first", [False, True])
@pytest.mark.parametrize("make", [torch.optim.Adagrad, partial(torch.optim.SGD, momentum=0.9)])
def test_an_optimizer_that_loads_its_own_fresh_state_is_told_nothing(
    make: Any, is_compiled_first: bool
) -> None:
    """As accelerate does when it prepares one; Adagrad has state before its first step."""
    optimizer = make(params := parameters())
    step = compiled(optimizer) if is_compiled_first else None
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    set_gradients(params)
    assert warned(step or compiled(optimizer)) == []


@pytest.mark.parametrize("is_running", [True, False])
def test_what_is_missing_is_named(is_running: bool) -> None:
    optimizer = trained()
    saved, params = copy.deepcopy(optimizer.state_dict()), copied(params_of(optimizer))
    for key in (LO, COUNT, FINGERPRINT):
        del saved["state"][1][key]
    if is_running:
        (told,) = warned(lambda: optimizer.load_state_dict(saved))
    else:
        _, (told,) = continued(saved, params)
    assert f"no error terms of {names((1, 'parameter'))} have been loaded into RMSprop" in told


def test_a_missing_term_of_a_weight_is_named_at_the_load() -> None:
    optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    for key in (LO, COUNT, FINGERPRINT):
        del saved["state"][1][key]
    again = torch.optim.RMSprop(copied(params_of(optimizer)), alpha=0.999)
    compiled(again)
    (told,) = warned(lambda: again.load_state_dict(saved))
    assert f"no error terms of {names((1, 'parameter'))} have been loaded into RMSprop" in told


def test_weights_loaded_in_the_middle_of_a_run_have_no_error_terms() -> None:
    """Those that are not loaded, or loaded as they were, keep theirs."""
    model = torch.nn.ParameterDict(dict(zip("abc", parameters(shapes=[(4, 6), (5,), (3,)]), strict=True)))
    optimizer = Descent(params := list(model.values()))
    step = compiled(optimizer)
    run_steps(step, params, range(3))
    before = [error_terms(p)[0].clone() for p in params]
    best = {"a": torch.ones(4, 6).bfloat16(), "b": model["b"].detach().clone()}
    model.load_state_dict(best, strict=False)
    set_gradients(params, 3)
    for p in params:
        assert p.grad is not None
        p.grad.zero_()
    step()
    assert torch.equal(full_value(model["a"]), torch.ones(4, 6).double())
    assert [torch.equal(error_terms(p)[0], lo) for p, lo in zip(params, before, strict=True)] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("saved_as", "goes_on_as"),
    [
        ("mcf", "fp32"),
        ("fp32", "mcf"),
        ("mcf", "exact"),
        ("exact", "mcf"),
        ("exact", "fp32"),
        ("fp32", "exact"),
        ("byte", "mcf"),
        ("mcf", "byte"),
        ("byte", "exact"),
        ("exact", "byte"),
        ("byte", "fp32"),
        ("fp32", "byte"),
    ],
)
def test_another_error_format_is_converted(saved_as: str, goes_on_as: str) -> None:
    optimizer = trained(error_format=saved_as)
    params = copied(params_of(optimizer))
    values = [full_value(p) for p in params_of(optimizer)]
    again = torch.optim.RMSprop(params, alpha=0.999)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in again.param_groups:
        group["lr"] = 0.0
    run_steps(compiled(again, error_format=goes_on_as), params, [3])
    for p, value in zip(params, values, strict=True):
        (lo,) = error_terms(p)
        assert lo.dtype is {"mcf": torch.bfloat16}.get(goes_on_as, torch.float32)
        # Of a float32 error term bfloat16 holds the first 8 bits, of which one is in hi's last.
        bound = {"mcf": 2.0**-17, "byte": 2.0**-15}.get(goes_on_as, 0)
        assert torch.all((full_value(p) - value).abs() <= value.abs() * bound)


def test_a_running_step_takes_up_a_checkpoint_of_another_error_format() -> None:
    saved = copy.deepcopy(trained(error_format="fp32").state_dict())
    values = copied(params_of(trained(error_format="fp32")))
    expected, _ = continued(saved, copied(values))
    optimizer = torch.optim.RMSprop(params := parameters(), alpha=0.999)
    step = compiled(optimizer)
    run_steps(step, params, [0])
    for p, value in zip(params, values, strict=True):
        p.data.copy_(value.detach())
    assert warned(lambda: optimizer.load_state_dict(saved)) == []
    run_steps(step, params, [3])
    assert differences(everything(expected), everything(optimizer)) == []


def test_a_float32_model_gets_all_of_what_was_saved_in_16_bits() -> None:
    optimizer = trained()
    state = [optimizer.state[p]["square_avg"] for p in params_of(optimizer)]
    values = [full_value(x) for x in (*params_of(optimizer), *state)]
    wide = [torch.nn.Parameter(p.detach().float()) for p in params_of(optimizer)]
    again = torch.optim.RMSprop(wide, alpha=0.999)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert warned(again.step) == []  # without gradients: of a plain optimizer's first step we are told
    found = [*wide, *(again.state[p]["square_avg"] for p in wide)]
    assert all(torch.equal(x.double(), value) for x, value in zip(found, values, strict=True))


def test_error_terms_of_other_values_than_a_float32_models_are_left_out() -> None:
    saved = copy.deepcopy(trained().state_dict())
    again = torch.optim.RMSprop(wide := parameters(torch.float32), alpha=0.999)
    again.load_state_dict(saved)
    (told,) = warned(again.step)
    assert f"RMSprop holds error terms of {names((0, 'parameter'))} (torch.float32)" in told
    assert "load the weights of a model before its optimizer" in told
    assert [error_terms(p) for p in wide] == [(), ()]


@pytest.mark.parametrize("is_running", [True, False])
def test_float32_state_leaves_its_rest_in_error_terms(is_running: bool) -> None:
    plain = torch.optim.RMSprop(wide := parameters(torch.float32), alpha=0.999)
    run_steps(plain.step, wide, range(3))
    params = [torch.nn.Parameter(p.detach().bfloat16()) for p in wide]
    optimizer = torch.optim.RMSprop(params, alpha=0.999, lr=0.0)
    step = compiled(optimizer)
    if is_running:
        run_steps(step, params, [0])
    told = warned(lambda: optimizer.load_state_dict(copy.deepcopy(plain.state_dict())))
    for p in params:
        p.grad = torch.zeros_like(p)
    told += warned(step)
    both = names((0, "parameter"), (1, "parameter"))
    assert f"no error terms of {both} have been loaded into RMSprop" in told[0]
    for p, q in zip(params, wide, strict=True):
        exact = plain.state[q]["square_avg"].double() * 0.999
        error = (full_value(optimizer.state[p]["square_avg"]) - exact).abs()
        assert torch.all(
            error <= exact * 2.0**-16
        )  # the pair's precision, which the step rounds to once more


@pytest.mark.parametrize("is_running", [True, False])
def test_packed_state_is_made_of_the_float32_state_of_a_checkpoint(is_running: bool) -> None:
    plain = torch.optim.AdamW(wide := [torch.nn.Parameter(torch.randn(64, 96))])
    run_steps(plain.step, wide, range(3))
    params = [torch.nn.Parameter(p.detach().bfloat16()) for p in wide]
    optimizer = install(torch.optim.AdamW(params), bytes_per_parameter=8)
    if is_running:
        run_steps(optimizer.step, params, [0])
    told = warned(lambda: optimizer.load_state_dict(copy.deepcopy(plain.state_dict())))
    params[0].grad = torch.zeros_like(params[0])
    told += warned(optimizer.step)
    assert [f"no error terms of {names((0, 'parameter'))} have been loaded" in each for each in told] == [
        True
    ]
    assert "block16" in str(backend_of(optimizer).report())
    for name, decay in (("exp_avg", 0.9), ("exp_avg_sq", 0.999)):
        now, before = optimizer.state[params[0]][name], plain.state[wide[0]][name].double()
        # 15 bits of fraction, and a scale of at most twice the largest of 32 neighbours, rounded to nearest
        # twice, in packing and in the step: 2 * 2**-16 * 2. bfloat16 would round by 2**-9 of a value.
        largest = before.reshape(-1, 32).abs().amax(1, keepdim=True).expand(-1, 32).reshape(now.shape)
        assert ((full_value(now) - decay * before).abs() <= 2**-14 * largest).all()


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state_dict"])
def test_a_copy_before_the_first_step_has_the_rest_of_float32_state(way: str) -> None:
    plain = torch.optim.RMSprop(wide := parameters(torch.float32), alpha=0.999)
    run_steps(plain.step, wide, range(3))
    optimizer = torch.optim.RMSprop([torch.nn.Parameter(p.detach().bfloat16()) for p in wide], alpha=0.999)
    compiled(optimizer)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    if way == "state_dict":
        other = torch.optim.RMSprop(copied(params_of(optimizer)), alpha=0.999)
        compiled(other)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        other = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    for each in (optimizer, other):
        warned(partial(run_steps, compiled(each), params_of(each), [3]))
    assert differences(everything(optimizer), everything(other)) == []


@pytest.mark.parametrize("way", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_a_plain_optimizer_has_the_error_terms_of_its_parameters(way: Callable[[Any], Any]) -> None:
    """Another optimizer of its class has stepped them."""
    params = params_of(trained())
    other = way(torch.optim.RMSprop(params))
    assert any((full_value(p) != p).any() for p in params)
    for p, of_copy in zip(params, params_of(other), strict=True):
        assert torch.equal(full_value(p), full_value(of_copy))


def test_wider_state_is_not_kept_for_an_optimizer_that_stays_plain() -> None:
    plain = torch.optim.RMSprop(wide := parameters(torch.float32), alpha=0.999)
    run_steps(plain.step, wide, range(3))
    params = [torch.nn.Parameter(p.detach().bfloat16()) for p in wide]
    optimizer = torch.optim.RMSprop(params, alpha=0.999)
    compiled(optimizer)  # which is not called
    saved = copy.deepcopy(plain.state_dict())
    kept = weakref.ref(saved["state"][0]["square_avg"])
    optimizer.load_state_dict(saved)
    del saved
    assert kept() is not None
    run_steps(optimizer.step, params, [3])
    assert kept() is None


def test_float32_state_from_which_eager_steps_have_gone_on_is_not_brought_back() -> None:
    plain = torch.optim.RMSprop(wide := parameters(torch.float32), alpha=0.5)
    run_steps(plain.step, wide, range(3))
    params = [torch.nn.Parameter(p.detach().bfloat16()) for p in wide]
    optimizer = torch.optim.RMSprop(params, alpha=0.5)
    step = compiled(optimizer, strategy="full", strict=False)
    optimizer.load_state_dict(plain.state_dict())
    warned(lambda: run_steps(optimizer.step, params, range(3, 6)))
    state = [optimizer.state[p]["square_avg"].double() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    warned(step)
    for p, before in zip(params, state, strict=True):
        # Half an ulp of bfloat16, where an eager step has come back to the very hi that was loaded.
        error = (full_value(optimizer.state[p]["square_avg"]) - before / 2).abs()
        assert torch.all(error <= before / 2 * 2.0**-8)


def test_state_that_is_moved_away_and_back_keeps_its_error_terms() -> None:
    optimizer, expected = trained(), trained()
    step = compiled(optimizer)
    run_steps(step, params_of(optimizer), [3])
    for p in params_of(optimizer):
        optimizer.state[p]["square_avg"].data = optimizer.state[p]["square_avg"].clone()
    run_steps(step, params_of(optimizer), [4])
    run_steps(compiled(expected), params_of(expected), [3, 4])
    assert differences(everything(expected), everything(optimizer)) == []


def test_state_that_is_replaced_by_other_values_is_named() -> None:
    optimizer = trained()
    step = compiled(optimizer)
    run_steps(step, params_of(optimizer), [3])
    p = params_of(optimizer)[0]
    optimizer.state[p]["square_avg"] = optimizer.state[p]["square_avg"] * 2
    set_gradients(params_of(optimizer), 4)
    (told,) = warned(step)
    assert f"{names((0, 'square_avg'))} of RMSprop has been replaced by another tensor" in told
    assert "collage_fx.assign" in told
    assert warned(step) == []
    optimizer.state.clear()  # to begin anew
    assert warned(step) == []


# Checkpoints that don't fit. ------------------------------------------------------------------------------


@pytest.fixture
def run() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer, dict[str, Any]]:
    params = parameters()
    optimizer = Descent(params)
    run_steps(compiled(optimizer), params, [0])
    return params, optimizer, copy.deepcopy(optimizer.state_dict())


def as_saved(tensor: Tensor) -> Tensor:
    """What a state dict has of the live error term of the format ``exact``."""
    live, _ = live_error_terms(tensor)
    return live.unsqueeze(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({LO: torch.zeros(3).bfloat16()}, r"shape \(3,\) where a tensor of shape \(4, 6\)"),
        (
            {LO: torch.zeros(8, 6, 2).byte()},
            r"of a tensor of shape \(8, 6\); this one is \(4, 6\)",
        ),
        ({LO: torch.zeros(4, 6).to(torch.int16)}, r"shape \(4, 6\) where .* has one of \(4, 6, 2\)"),
        ({LO: torch.zeros(4, 6, 2)}, r"torch.float32 where a torch.bfloat16 tensor has one of torch.uint8"),
        (
            {LO: torch.zeros(4, 6, 2).long(), FINGERPRINT: None},
            r"torch.int64 where a torch.bfloat16 tensor has one of torch.uint8",
        ),
        (
            {
                LO: None,
                COUNT: None,
                FINGERPRINT: None,
                "collage_fx.parameter.tripled.lo": torch.zeros(4, 6).bfloat16(),
            },
            r"unknown format 'tripled'",
        ),
        ({"collage_fx.parameter.mcf.high": torch.zeros(4, 6).bfloat16()}, r"belong together"),
        ({"collage_fx.momentum.exact.rest": torch.zeros(4, 6).bfloat16()}, r"does not hold"),
        (
            {
                LO: None,
                COUNT: None,
                FINGERPRINT: None,
                "collage_fx.parameter.mcf.lo": torch.full((4, 6), torch.nan).bfloat16(),
            },
            r"that is not finite",
        ),
        ({FINGERPRINT: torch.zeros(8, dtype=torch.uint8)}, r"a fingerprint of shape \(8,\), not \(256, 8\)"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    run: Any, changes: dict[str, Tensor | None], met: str
) -> None:
    _, optimizer, saved = run
    before = everything(optimizer)
    entries = saved["state"][0]
    entries |= {name: value for name, value in changes.items() if value is not None}
    for name in [name for name, value in changes.items() if value is None]:
        del entries[name]
    saved["param_groups"][0]["lr"] = 5.0
    with pytest.raises(
        CheckpointMismatchError, match=met + r"[\s\S]*param_groups\[0\].params\[0\][\s\S]*delete its keys"
    ):
        optimizer.load_state_dict(saved)
    assert differences(before, everything(optimizer)) == []
    assert optimizer.param_groups[0]["lr"] != 5.0
    fresh = Descent(parameters())
    compiled(fresh)
    with pytest.raises(CheckpointMismatchError):
        fresh.load_state_dict(saved)
    assert all(error_terms(p) == () for p in fresh.param_groups[0]["params"])


def test_torchs_own_refusals_come_through(run: Any) -> None:
    *_, saved = run
    with pytest.raises(ValueError, match="doesn't match the size"):
        Descent(parameters(shapes=[(4, 6)])).load_state_dict(saved)


@pytest.fixture
def first_of_two_processes() -> Iterator[None]:
    """This process in a group with one that is not there."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("first_of_two_processes")
def test_a_parameter_that_another_process_steps_has_no_state() -> None:
    """To ``ZeroRedundancyOptimizer`` its state is None: it passes that to torch, and keeps it."""
    params = parameters(torch.float32, shapes=[(4,), (4,)])
    set_gradients(params)
    whole = torch.optim.Adam(params)
    whole.step()
    part = ZeroRedundancyOptimizer(params, torch.optim.Adam)
    part.load_state_dict(whole.state_dict())
    states = [part.state[p] for p in params]
    assert None in states
    assert all(state is None or state.keys() == whole.state[params[0]].keys() for state in states)
    assert known_tensors({"self": part}).keys() >= {id(p) for p in params}


# Processes without collage_fx. ----------------------------------------------------------------------------

PLAIN = """
import sys, torch
checkpoint = torch.load(sys.argv[1], weights_only=True)
params = [torch.nn.Parameter(p) for p in checkpoint["parameters"]]
for p in params:
    p.grad = torch.ones_like(p)
optimizer = torch.optim.RMSprop(params, alpha=0.999)
optimizer.load_state_dict(checkpoint["optimizer"])
optimizer.step()
assert not any(name.startswith("collage_fx") for name in sys.modules)
torch.save({"parameters": [p.data for p in params], "optimizer": optimizer.state_dict()}, sys.argv[1])
"""


def test_a_process_without_collage_fx_can_use_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    optimizer = torch.optim.RMSprop(params := parameters(), alpha=0.999)
    run_steps(compiled(optimizer), params, range(2))
    resume.save(optimizer, path)
    expected = torch.optim.RMSprop(
        plain := [torch.nn.Parameter(p.detach().clone()) for p in params], alpha=0.999
    )
    expected.load_state_dict(without_ours(copy.deepcopy(optimizer.state_dict())))
    for p in plain:
        p.grad = torch.ones_like(p)
    expected.step()
    subprocess.run([sys.executable, "-c", PLAIN, str(path)], check=True, cwd=tmp_path)
    written = torch.load(path, weights_only=True)
    assert all(torch.equal(p, q) for p, q in zip(written["parameters"], plain, strict=True))
    again = torch.optim.RMSprop(map(torch.nn.Parameter, written["parameters"]), alpha=0.999)
    compiled(again)
    # The keys have survived there, and are understood here.
    told = warned(
        lambda: again.load_state_dict(written["optimizer"]),
        lambda: [error_terms(p) for p in params_of(again)],
    )
    assert all("holds error terms of other values than" in each for each in told)
    slots = [
        [f"param_groups[0].params[{i}].{slot}" for i in range(2)] for slot in ("square_avg", "parameter")
    ]
    assert [*map(tensors_in, told)] == [(each, 0) for each in slots]
    assert all(error_terms(p) for p in params_of(again))


def test_the_report_of_a_loaded_optimizer_says_why_its_state_is_compensated() -> None:
    optimizer = torch.optim.RMSprop(params := parameters(), alpha=0.999)
    run_steps(compiled(optimizer), params, [0])
    again = torch.optim.RMSprop(other := copied(params), alpha=0.999)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    backend = CollageBackend(strategy="light")
    run_steps(torch.compile(again.step, backend=backend), other, [1])
    assert all(row.compensated for row in backend.report().tensors)


# Loaded before collage_fx was imported. ---------------------------------------------------------------------

RESUMED_BY_PLAIN_TORCH = """
import sys
from pathlib import Path

import torch

directory = Path(sys.argv[1])
checkpoint = torch.load(directory / "checkpoint", weights_only=True)
params = [torch.nn.Parameter(p) for p in checkpoint["parameters"]]
optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)
optimizer.load_state_dict(checkpoint["optimizer"])
assert "collage_fx" not in sys.modules
step = torch.compile(optimizer.step, backend="collage")

from tests.support.resume import REST
from tests.support.training import everything, run_steps

run_steps(step, params, REST)
torch.save(everything(optimizer), directory / "result")
"""


def test_a_run_whose_checkpoint_plain_torch_has_loaded_is_the_uninterrupted_run(tmp_path: Path) -> None:
    optimizer, step = resume.start(torch.bfloat16, "exact")
    params = optimizer.param_groups[0]["params"]
    run_steps(step, params, resume.FIRST)
    resume.save(optimizer, tmp_path / "checkpoint")
    run_steps(step, params, resume.REST)
    command = [sys.executable, "-W", "error::UserWarning:collage_fx", "-c", RESUMED_BY_PLAIN_TORCH]
    subprocess.run([*command, str(tmp_path)], check=True, cwd=ROOT)
    assert differences(everything(optimizer), torch.load(tmp_path / "result")) == []


def loaded_by_plain_torch(optimizer: torch.optim.Optimizer, checkpoint: dict[str, Any]) -> None:
    """Load a state dict into an optimizer that nobody has adopted, as a process without collage_fx does."""
    assert not files_of(optimizer).is_adopted
    optimizer.load_state_dict(checkpoint)


def checkpoint_of_two_steps(optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    params = optimizer.param_groups[0]["params"]
    run_steps(compiled(optimizer, **options), params, range(2))
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("error_format", ["exact", "mcf", "fp32", "byte", "dither"])
def test_error_terms_loaded_before_a_step_is_compiled_are_restored_to_the_bit(
    error_format: str, dtype: torch.dtype
) -> None:
    saved = torch.optim.RMSprop(params := parameters(dtype, [(4, 300)]), alpha=0.999)
    checkpoint = checkpoint_of_two_steps(saved, error_format=error_format)
    late, early = (torch.optim.RMSprop(copied(params), alpha=0.999) for _ in range(2))
    loaded_by_plain_torch(late, copy.deepcopy(checkpoint))
    assert not any(error_terms(p) for p in params_of(late))
    steps = [compiled(each, error_format=error_format) for each in (late, early)]
    early.load_state_dict(checkpoint)
    for each in (late, early):  # as soon as the step is given to torch.compile, or loaded after that
        assert differences(everything(saved), everything(each)) == []
        assert warned(functools.partial(run_steps, steps.pop(0), params_of(each), [2])) == []
    assert differences(everything(late), everything(early)) == []


class InAList(Descent):
    """Its state is no dictionary."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p] = [torch.zeros_like(p)]
            p.sub_(self.state[p][0].lerp_(p.grad, 0.001), alpha=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.RMSprop(params, alpha=0.999),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),  # its state counts no steps
        InAList,
    ],
    ids=["RMSprop", "SGD", "InAList"],
)
def test_a_plain_checkpoint_loaded_above_torch_compile_warns_once(make: Any, dtype: torch.dtype) -> None:
    plain = make(params := parameters(dtype))
    run_steps(plain.step, params, range(2))
    optimizer = make(other := parameters())
    loaded_by_plain_torch(optimizer, plain.state_dict())
    step = compiled(optimizer)
    set_gradients(other)
    (told,) = warned(step)
    assert f"have been loaded into {type(optimizer).__name__}; they start from zero" in told
    assert "call load_state_dict below that line" in told
    assert warned(step) == []


class Anchored(Descent):
    """An optimizer that pulls its parameters to where they were when it was constructed."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for p in self.param_groups[0]["params"]:
            self.state[p]["anchor"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch overloads it
        for p in self.param_groups[0]["params"]:
            p.lerp_(self.state[p]["anchor"], 0.1).sub_(p.grad, alpha=0.01)


@pytest.mark.parametrize("eager_steps", [0, 1, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.RMSprop(params, alpha=0.999),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.1),
        Anchored,
    ],
    ids=["RMSprop", "SGD", "Adagrad", "Anchored"],
)
def test_no_warning_where_no_checkpoint_has_been_loaded(make: Any, eager_steps: int) -> None:
    optimizer = make(params := parameters())
    run_steps(optimizer.step, params, range(eager_steps))
    step = compiled(optimizer)
    set_gradients(params)
    assert warned(step) == []


def test_what_earlier_versions_saved_in_float32_is_loaded() -> None:
    saved = torch.optim.RMSprop(params := parameters(), alpha=0.999)
    checkpoint = checkpoint_of_two_steps(saved, error_format="fp32")
    for i, p in enumerate(params):
        for slot, tensor in ("parameter", p), ("square_avg", saved.state[p]["square_avg"]):
            key = f"collage_fx.{slot}.fp32.lo"
            assert checkpoint["state"][i][key].dtype is torch.uint8
            checkpoint["state"][i][key] = error_terms(tensor)[0].clone()
    again, cast = (torch.optim.RMSprop(copied(params), alpha=0.999) for _ in range(2))
    compiled(again, error_format="fp32")
    again.load_state_dict(copy.deepcopy(checkpoint))
    assert differences(everything(saved), everything(again)) == []
    loaded_by_plain_torch(cast, checkpoint)
    set_gradients(params_of(cast), 2)
    told = warned(lambda: compiled(cast, error_format="fp32")())
    for each, slot in zip(told, ("square_avg", "parameter"), strict=True):
        lost = ", ".join(f"param_groups[0].params[{i}].{slot}" for i in range(2))
        assert f"holds error terms of other values than {lost}: load the" in each


def test_what_torch_drops_is_named() -> None:
    params = parameters()
    checkpoint = checkpoint_of_two_steps(torch.optim.RMSprop(params, alpha=0.999))
    lr = torch.tensor(0.01).bfloat16()
    optimizer = torch.optim.RMSprop(copied(params), alpha=0.999, lr=lr)
    loaded_by_plain_torch(optimizer, checkpoint)
    optimizer.param_groups[0]["lr"] = lr
    (told,) = warned(lambda: adopt(optimizer))
    assert "cost the error terms of param_groups[0].lr (if there were any); they start from zero" in told
    assert "call load_state_dict below that line" in told
    assert ours({"state": optimizer.state}).popitem()[1] == []


def test_what_does_not_fit_is_refused_and_left_where_it_was() -> None:
    optimizer = torch.optim.RMSprop(parameters(), alpha=0.999)
    loaded_by_plain_torch(optimizer, checkpoint_of_two_steps(torch.optim.RMSprop(parameters(), alpha=0.999)))
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state[LO] = state[LO][:1]
    before = {key: dict(entries) for key, entries in optimizer.state.items()}
    with pytest.raises(CheckpointMismatchError, match=r"of a tensor of shape \(1, 6\); this one is \(4, 6\)"):
        run_steps(compiled(optimizer), optimizer.param_groups[0]["params"], [0])
    assert {key: dict(entries) for key, entries in optimizer.state.items()} == before


def test_a_recorded_step_takes_up_what_plain_torch_has_loaded() -> None:
    checkpoint = checkpoint_of_two_steps(Descent(params := parameters()))
    optimizer = Descent(other := copied(params))
    loaded_by_plain_torch(optimizer, checkpoint)
    record(optimizer, Request(CollageBackend(), {}, strict=True), "the test asks for it")
    for p in other:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for i, p in enumerate(other):
        assert torch.equal(as_saved(p), checkpoint["state"][i][LO].to(torch.uint8))
    assert not optimizer.state


# What is wrong is said at the load. -----------------------------------------------------------------------


@functools.cache
def packed_and_saved() -> tuple[list[torch.nn.Parameter], bytes]:
    params = parameters(shapes=((128, 32), (5,)))
    optimizer = install(torch.optim.AdamW(params, lr=1e-4), bytes_per_parameter=5.1)
    for seed in range(2):
        set_gradients(params, seed)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return params, file.getvalue()


@pytest.mark.parametrize("seed", range(6))
def test_packed_state_with_another_byte_is_refused_at_the_load(seed: int) -> None:
    params, content = packed_and_saved()
    saved = torch.load(io.BytesIO(content))
    again = install(torch.optim.AdamW(copied(params), lr=1e-4), bytes_per_parameter=5.1)
    again.load_state_dict(copy.deepcopy(saved))  # as it was saved
    drawn = random.Random(seed)
    packed = [key for key in saved["state"][0] if key.endswith((".codes", ".scales"))]
    assert len(packed) == 4
    key = drawn.choice(packed)
    memory = saved["state"][0][key].view(torch.uint8).reshape(-1)
    memory[drawn.randrange(len(memory))] ^= 1 << drawn.randrange(8)
    before = everything(again)
    with pytest.raises(
        CheckpointMismatchError, match=r"packed state in the format 'block8.* with other bytes"
    ):
        again.load_state_dict(saved)
    assert differences(before, everything(again)) == []


class Centering(Descent):
    """State of few elements, which is not packed, before a moment."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["means"], state["moment"] = torch.zeros_like(p[:, :1]), torch.zeros_like(p)
            state["means"].lerp_(p.grad.mean(1, keepdim=True), 0.1)
            state["moment"].mul_(0.9).add_(p.grad - state["means"], alpha=0.1)
            p.sub_(state["moment"], alpha=1e-4)


def test_packed_state_is_compared_with_what_was_saved_beside_other_state() -> None:
    params = parameters(shapes=((128, 32),))
    optimizer = install(Centering(params), strategy="light", state="block8")
    run_steps(optimizer.step, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    assert [key for key in saved["state"][0] if key.endswith(".codes")] == ["collage_fx.moment.block8.codes"]
    saved["state"][0]["collage_fx.moment.block8.codes"][3, 5] ^= 1
    again = install(Centering(copied(params)), strategy="light", state="block8")
    with pytest.raises(CheckpointMismatchError, match=r"block8' with other bytes[^\n]*\n *where: .*moment"):
        again.load_state_dict(saved)


def test_error_terms_of_other_state_are_named_at_the_load() -> None:
    optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["square_avg"][0, 0] += 1
    again = torch.optim.RMSprop(copied(params_of(optimizer)), alpha=0.999)
    step = compiled(again)
    (told,) = warned(lambda: again.load_state_dict(saved))
    assert f"holds error terms of other values than {names((0, 'square_avg'))}: load" in told
    set_gradients(params_of(again), 3)
    assert warned(step) == []


@pytest.mark.parametrize("is_first", [True, False])
def test_whole_weights_stay_whole_when_a_float32_optimizer_is_loaded(*, is_first: bool) -> None:
    """Before the optimizer or after it: the bits of the other order, and no warning."""
    wide = [torch.nn.Parameter(p.detach().float() + 0.001) for p in parameters()]
    optimizer = torch.optim.AdamW(wide, lr=1e-4)
    set_gradients(wide)
    optimizer.step()
    model = torch.nn.ParameterList(parameters(seed=1))
    # By dither, whose moments are rounded behind the update.
    again = install(torch.optim.AdamW(model.parameters(), lr=1e-4), rounding="dither")
    weights = torch.nn.ParameterList(wide).state_dict()

    def load() -> None:
        for is_weights in (is_first, not is_first):
            if is_weights:
                load_full_state_dict(model, again, weights)
            else:
                again.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def step() -> None:
        set_gradients(params_of(again), 1)
        again.step()

    assert warned(load) == []
    assert all(torch.equal(full_value(p).float(), q.detach()) for p, q in zip(model, wide, strict=True))
    assert warned(step) == []
    set_gradients(wide, 1)
    for p in wide:
        assert p.grad is not None
        p.grad = p.grad.bfloat16().float()
    optimizer.step()
    for p, q in zip(model, wide, strict=True):  # sums of some float32 operations, in another order
        assert torch.allclose(full_value(p).float(), q.detach(), rtol=4 * 2.0**-23, atol=1e-4 * 2.0**-8)


def test_whole_weights_that_others_replace_are_not_kept() -> None:
    model = torch.nn.ParameterList(parameters())
    again = install(torch.optim.AdamW(model.parameters(), lr=1e-4))
    load_full_state_dict(
        model, again, {name: each.float() + 0.001 for name, each in model.state_dict().items()}
    )
    assert error_terms(model[0])[0].any()
    model.load_state_dict(torch.nn.ParameterList(parameters(seed=1)).state_dict())
    assert torch.equal(full_value(model[0]).float(), model[0].detach().float())


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_plain_optimizer_with_a_checkpoint_of_ours_is_warned(*, is_gone: bool) -> None:
    """Whether a strict optimizer has been installed in the process, and lives, or not."""
    optimizer = trained(strict=True)
    saved, params = copy.deepcopy(optimizer.state_dict()), copied(params_of(optimizer))
    if is_gone:
        del optimizer
        gc.collect()
    plain = torch.optim.RMSprop(params, alpha=0.999)
    plain.load_state_dict(saved)
    set_gradients(params, 3)
    (told,) = warned(plain.step)
    assert "the error terms that they have from a checkpoint, or from" in told


class WithAllAttributes(Descent):
    """Class whose pickles have all attributes, where torch's have three."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


def _unpickled(optimizer: Any) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("copied", [copy.deepcopy, _unpickled])
def test_copies_with_all_attributes_have_steps_and_hooks_of_their_own(copied: Callable[[Any], Any]) -> None:
    """The step of this object was to be pickled, too, which failed."""
    (p,) = params = parameters(shapes=[(8, 4)])
    optimizer = install(WithAllAttributes(params, lr=1e-4))
    set_gradients(params, 0)
    optimizer.step()
    other = copied(optimizer)
    (q,) = others = other.param_groups[0]["params"]
    assert torch.equal(full_value(p), full_value(q))
    for each, of in ((optimizer, params), (other, others)):
        set_gradients(of, 1)
        each.step()
    assert torch.equal(full_value(p), full_value(q))
    assert not torch.equal(full_value(q), q.double())
    for name, hooks in vars(optimizer).items():
        if name.startswith("_optimizer_"):
            assert len(vars(other)[name]) == len(hooks)
