"""An optimizer's life besides its steps: copies, pickles, state in unusual places, memory."""

from __future__ import annotations

import copy
import copyreg
import gc
import io
import os
import pickle
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import collage_fx
from collage_fx import CollageBackend, error_terms, full_value
from collage_fx.errors import CheckpointMismatchError
from collage_fx.lowering.kernels import _made
from collage_fx.state.checkpoint import PREFIX, SHARED, PickledRecord, _carried
from tests.support import resume
from tests.support.race import Race
from tests.support.substitutes import error_terms_pickled_as_they_are
from tests.support.training import (
    LateMomentum,
    compiled,
    differences,
    everything,
    parameters,
    run_steps,
    set_gradients,
)

ROOT = Path(__file__).parents[1]


def saved_and_loaded(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


COPIES: dict[str, Any] = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved_and_loaded}


def params_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# Copies and pickles. --------------------------------------------------------------------------------------


def rmsprop(params: Any) -> Optimizer:
    return torch.optim.RMSprop(params, lr=1e-3, alpha=0.999)


@pytest.fixture(scope="module", params=["mcf", "exact", "fp32", "byte"])
def running(request: pytest.FixtureRequest) -> tuple[Optimizer, str]:
    torch._dynamo.reset()
    optimizer = rmsprop(params := parameters(shapes=[(4, 6)]))
    run_steps(compiled(optimizer, error_format=request.param), params, range(3))
    assert len([name for name in everything(optimizer) if "error" in name]) == 2
    return optimizer, request.param


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_error_terms_of_its_own(running: tuple[Optimizer, str], how: str) -> None:
    optimizer, error_format = running
    before = everything(optimizer)
    twin = COPIES[how](optimizer)
    assert differences(before, everything(twin)) == []
    run_steps(compiled(twin, error_format=error_format), params_of(twin), [3])
    assert len(differences(before, everything(twin))) > 2
    assert differences(before, everything(optimizer)) == []  # the original has not been touched
    assert "collage_fx" not in vars(twin)


def test_a_copy_trains_on_like_the_original() -> None:
    model = torch.nn.Linear(6, 4).bfloat16()
    optimizer = rmsprop(model.parameters())
    step = compiled(optimizer)
    run_steps(step, list(model.parameters()), range(3))
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert all(p is q for p, q in zip(twin_model.parameters(), params_of(twin), strict=True))
    run_steps(step, list(model.parameters()), range(3, 6))
    run_steps(compiled(twin), list(twin_model.parameters()), range(3, 6))
    assert differences(everything(optimizer), everything(twin)) == []


def test_a_model_copied_alone_is_what_the_user_sees() -> None:
    model = torch.nn.Linear(6, 4).bfloat16()
    run_steps(compiled(rmsprop(model.parameters())), list(model.parameters()), range(3))
    assert error_terms(model.weight)[0].any()
    alone = copy.deepcopy(model)
    assert error_terms(alone.weight) == ()
    assert torch.equal(full_value(alone.weight), model.weight.detach().double())


def test_a_shallow_copy_shares_everything(running: tuple[Optimizer, str]) -> None:
    optimizer, error_format = running
    before = everything(optimizer)
    again = copy.copy(optimizer)
    (p,), (q,) = params_of(optimizer), params_of(again)
    assert p is q
    if error_format in (
        "mcf",
        "fp32",
    ):  # whose error terms are the live buffers; those of others are computed
        assert error_terms(p)[0] is error_terms(q)[0]
    assert differences(before, everything(again)) == []


def test_an_optimizer_without_error_terms_pickles_as_before() -> None:
    optimizer = rmsprop(params := parameters(shapes=[(3,)]))
    set_gradients(params)
    optimizer.step()
    assert set(optimizer.__getstate__()) == {"defaults", "state", "param_groups"}


def test_the_pickle_of_a_gradient_in_accumulation_is_the_optimizers_alone() -> None:
    """Torch pickles no gradients, so their error terms stay behind too."""
    optimizer = rmsprop(params := parameters(shapes=[(3,)]))
    set_gradients(params)

    @torch.compile(backend=CollageBackend())
    def accumulate(grads: list[Tensor], more: list[Tensor]) -> None:
        torch._foreach_add_(grads, more)

    grads = [p.grad for p in params if p.grad is not None]
    accumulate(grads, [torch.full_like(g, 2.0**-12) for g in grads])
    assert all(error_terms(g) for g in grads)
    assert set(optimizer.__getstate__()) == {"defaults", "state", "param_groups"}


UNPICKLE = """
import pickle, sys
optimizer = pickle.load(open(sys.argv[1], "rb"))
p = optimizer.param_groups[0]["params"][0]
terms = sys.modules["collage_fx"].error_terms(p)
pickle.dump(terms[0].float().tolist(), open(sys.argv[1], "wb"))
"""


def test_a_process_that_unpickles_before_it_imports_collage_fx(
    running: tuple[Optimizer, str], tmp_path: Path
) -> None:
    optimizer, _ = running
    path = tmp_path / "pickle"
    path.write_bytes(pickle.dumps(optimizer))
    subprocess.run([sys.executable, "-c", UNPICKLE, str(path)], check=True, cwd=ROOT)
    (lo,) = error_terms(params_of(optimizer)[0])
    assert pickle.loads(path.read_bytes()) == lo.float().tolist()


class OfAnEarlierVersion(pickle.Pickler):
    """Writes an optimizer as earlier versions did: ours beside the attributes that torch pickles."""

    def reducer_override(self, obj: Any) -> Any:
        if obj is PickledRecord:
            return "Carried"
        if not isinstance(obj, Optimizer):
            return NotImplemented
        along = _carried(obj).items()
        ours = {name if name == SHARED else PREFIX + name: value for name, value in along}
        return copyreg.__newobj__, (type(obj),), {**obj.__getstate__(), **ours}  # type: ignore[attr-defined]


def test_a_pickle_of_an_earlier_version_is_read(running: tuple[Optimizer, str]) -> None:
    """Such pickles have error terms in them as they are, and not as a checkpoint holds them."""
    optimizer, _ = running
    with error_terms_pickled_as_they_are():
        OfAnEarlierVersion(written := io.BytesIO()).dump(optimizer)
    assert b"Carried" in written.getvalue()
    assert b"_made_anew" not in written.getvalue()
    read = pickle.loads(written.getvalue())
    compiled(read)
    assert differences(everything(optimizer), everything(read)) == []


# State that belongs to no single parameter. ---------------------------------------------------------------


class Shared(Optimizer):
    """Low-precision state in its group, under a key of its own, and in an attribute."""

    state: Any  # a mapping with keys of every kind, which torch's annotation leaves out

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 2.0**-12})
        (p,) = self.param_groups[0]["params"]
        self.param_groups[0]["in_group"] = torch.zeros_like(p).detach()
        self.state["own"] = {"key": torch.zeros_like(p).detach()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        (p,) = group["params"]
        for average in (group["in_group"], self.state["own"]["key"]):
            average.mul_(0.999).add_(p.grad, alpha=0.001)
            p.add_(average, alpha=-group["lr"])


class InAttribute(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.average = torch.zeros(3).bfloat16()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.average.mul_(0.999).add_(self.param_groups[0]["params"][0].grad, alpha=0.001)


def shared_values(optimizer: Shared) -> list[Tensor]:
    tensors = [optimizer.param_groups[0]["in_group"], optimizer.state["own"]["key"], *params_of(optimizer)]
    return [full_value(tensor) for tensor in tensors]


def test_state_in_groups_and_under_own_keys_round_trips() -> None:
    optimizer = Shared(params := parameters(shapes=[(3,)]))
    step = compiled(optimizer)
    run_steps(step, params, range(3))
    saved = saved_and_loaded(optimizer.state_dict())
    slots = ("param_groups[0].in_group", "state.own.key")
    keys = [f"{slot}.exact.{name}" for slot in slots for name in ("count", "rest")]
    assert sorted(key for key in saved["collage_fx"] if not key.endswith("fingerprint")) == keys
    assert saved["collage_fx"]["state.own.key.exact.rest"].any()
    before = [p.detach().clone() for p in params]
    run_steps(step, params, range(3, 6))

    again = Shared(other := parameters(shapes=[(3,)]))
    other[0].data.copy_(before[0])
    compiled(again)
    again.load_state_dict(saved)
    assert error_terms(again.state["own"]["key"])[0].any()
    run_steps(compiled(again), other, range(3, 6))
    for one, two in zip(shared_values(optimizer), shared_values(again), strict=True):
        assert torch.equal(one, two)


def test_state_in_groups_and_under_own_keys_is_copied() -> None:
    optimizer = Shared(params := parameters(shapes=[(3,)]))
    run_steps(compiled(optimizer), params, range(3))
    for one, two in zip(shared_values(optimizer), shared_values(copy.deepcopy(optimizer)), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("key", "value", "met"),
    [
        ("state.own.key.exact.rest", torch.zeros(4).bfloat16(), r"shape \(4,\)[\s\S]*where: state.own.key"),
        ("param_groups[0].other.exact.rest", torch.zeros(3).bfloat16(), "does not hold"),
    ],
)
def test_shared_error_terms_that_do_not_fit_are_refused(key: str, value: Tensor, met: str) -> None:
    optimizer = Shared(params := parameters(shapes=[(3,)]))
    run_steps(compiled(optimizer), params, [0])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["collage_fx"][key] = value
    before = shared_values(optimizer)
    with pytest.raises(CheckpointMismatchError, match=met):
        optimizer.load_state_dict(saved)
    assert all(torch.equal(x, y) for x, y in zip(before, shared_values(optimizer), strict=True))


def test_attributes_that_no_checkpoint_holds_are_warned_of() -> None:
    optimizer = InAttribute(params := parameters(shapes=[(3,)]))
    run_steps(compiled(optimizer), params, range(2))
    assert error_terms(optimizer.average)
    with pytest.warns(UserWarning, match=r"InAttribute\.average are not in its state_dict"):
        optimizer.state_dict()


def test_no_warning_for_an_optimizer_that_keeps_its_state_where_torch_looks() -> None:
    optimizer = LateMomentum(params := parameters(shapes=[(3,)]))
    run_steps(compiled(optimizer), params, [0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()


# A process without collage_fx. ----------------------------------------------------------------------------

RESAVE = """
import sys, torch
checkpoint = torch.load(sys.argv[1], weights_only=True)
params = [torch.nn.Parameter(p) for p in checkpoint["parameters"]]
optimizer = torch.optim.RMSprop(params, alpha=0.999)
optimizer.load_state_dict(checkpoint["optimizer"])
assert not any(name.startswith("collage_fx") for name in sys.modules)
torch.save({"parameters": [p.data for p in params], "optimizer": optimizer.state_dict()}, sys.argv[1])
"""


def test_fp32_terms_that_another_process_has_cast_are_whole(tmp_path: Path) -> None:
    """Torch casts what it finds in a parameter's state to the parameter's dtype: bytes survive that."""
    optimizer = rmsprop(params := parameters(shapes=[(4, 6)]))
    step = compiled(optimizer, error_format="fp32")
    run_steps(step, params, range(2))
    before = everything(optimizer)
    resume.save(optimizer, path := tmp_path / "checkpoint")
    subprocess.run([sys.executable, "-c", RESAVE, str(path)], check=True, cwd=tmp_path)
    for p in params:
        collage_fx.reset_error_terms(p)
    optimizer.load_state_dict(torch.load(path, weights_only=True)["optimizer"])
    assert differences(before, everything(optimizer)) == []
    set_gradients(params, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()


# A long run. ----------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_resetting_the_compiler_forgets_kernels() -> None:
    """Steps share them, which makes a second optimizer's quick: whoever measures compilations resets them."""
    params = parameters()
    step = compiled(torch.optim.SGD(params, lr=1e-3))
    run_steps(step, params, range(1))
    assert _made
    torch.compiler.reset()
    assert not _made
    run_steps(step, params, range(1))
    assert _made


@pytest.mark.parametrize("same_shapes", [True, False])
def test_optimizers_that_are_gone_leave_no_backend(same_shapes: bool) -> None:
    """But for the last one: torch keeps its last trace."""
    backends = []
    for i in range(4):
        params = parameters(shapes=((4, 6 if same_shapes else 6 + i),))
        optimizer = collage_fx.install(LateMomentum(params))
        run_steps(optimizer.step, params, range(2))
        backends.append(weakref.ref(collage_fx.backend_of(optimizer)))
    del optimizer, params
    gc.collect()
    assert sum(backend() is not None for backend in backends) <= 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_five_thousand_steps_compile_a_handful_of_times_and_leak_nothing() -> None:
    """AdamW, a cosine schedule on a float learning rate, and four sets of gradients that come in turn."""
    steps, settled = 5000, 500
    race = Race(parameters(shapes=[(8,)] * 4), lambda params: torch.optim.AdamW(params, lr=1e-4))
    schedulers = [CosineAnnealingLR(optimizer, T_max=steps) for optimizer in race.optimizers]
    sets = [(0, 1, 2, 3), (0, 1), (2, 3), (1, 2)]
    used = {}
    for turn in range(steps):
        race.draw_gradients(sets[turn % 4])
        race.step()
        race.step_twins()
        for scheduler in schedulers:
            scheduler.step()
        if turn + 1 in (settled, steps):
            used[turn + 1] = resident_bytes(), race.compilations
    race.assert_compensated()
    assert race.compilations <= 12
    assert used[steps][0] - used[settled][0] < 2 * 2**20
