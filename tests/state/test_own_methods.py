"""Classes with methods of their own for a state dict: what they load is what was saved, to the bit.

Each class is drawn: what its methods do before torch's, after torch's, or in its place. All of it is legal in
plain PyTorch, and most of it walks the entries of a state dict, among which ours would be met.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import random
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import error_terms, full_value, install
from collage_fx.errors import CheckpointMismatchError
from collage_fx.state.checkpoint import SHARED
from tests.support.training import compiled, differences, everything, parameters, run_steps
from tests.support.warned import warned

NAMES = {"average": "m", "square": "v"}
BACK = {"m": "average", "v": "square"}


class Averaging(Optimizer):
    """Moments in the parameter's dtype and in float32, a count in a tensor, a number and a text."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch overloads it
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state |= {"average": torch.zeros_like(p), "square": torch.zeros_like(p, dtype=torch.float32)}
                state |= {"seen": torch.zeros((), dtype=torch.int64), "kind": "dense", "numbers": [1, 2.5]}
            state["average"].lerp_(p.grad, 0.001)
            state["square"].mul_(0.99).add_(p.grad.float().square(), alpha=0.01)
            state["seen"] += 1
            p.addcdiv_(state["average"], state["square"].sqrt().to(p.dtype) + 1e-8, value=-0.1)


def walked(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Look at each entry as a class does that knows its own, and return the state dict."""
    params = optimizer.param_groups[0]["params"]
    for p, entries in zip(params, state_dict["state"].values(), strict=True):
        assert len(entries) == 5
        for value in entries.values():
            assert not isinstance(value, Tensor) or value.shape in ((), p.shape)
    return state_dict


def renamed(state: dict[Any, dict[str, Any]], names: dict[str, str]) -> dict[Any, dict[str, Any]]:
    return {key: {names.get(n, n): v for n, v in each.items()} for key, each in state.items()}


def restored_types(value: Any, saved: Any) -> Any:
    """Give what torch's load has cast its type back, by the entries of the saved dict."""
    if isinstance(saved, dict):
        return {key: restored_types(value[key], each) for key, each in saved.items()}
    return saved if isinstance(saved, (str, list)) or getattr(saved, "dtype", None) is torch.int64 else value


# What a method does, by name. Each is a function of the optimizer and a state dict.
SAVES = {
    "torch's": lambda o, d: d,
    "walks": walked,
    "picks": lambda o, d: {**d, "state": {k: {n: e[n] for n in sorted(e)} for k, e in d["state"].items()}},
    "clones": lambda o, d: copy.deepcopy(d),
    "adds a version": lambda o, d: {**d, "version": 3},
    "renames": lambda o, d: {**d, "state": renamed(d["state"], NAMES)},
    "in a list": lambda o, d: {"of": [*d["state"].values()], "groups": d["param_groups"]},
}
BEFORE = {
    "passes on": lambda o, d: d,
    "walks": walked,
    "copies": lambda o, d: copy.deepcopy(d),
    "picks": lambda o, d: {**d, "state": {k: {n: e[n] for n in sorted(e)} for k, e in d["state"].items()}},
    "renames for itself": lambda o, d: {**d, "state": renamed(d["state"], NAMES)},
}
AFTER = {
    "nothing": lambda o, d: None,
    "restores types": lambda o, d: each_state(o, d, restored_types),
    "widens": lambda o, d: each_state(o, d, lambda s, _: {**s, "square": s["square"].float()}),
    "clones": lambda o, d: each_state(o, d, lambda s, _: copy.deepcopy(s)),
    "pairs": lambda o, d: each_state(o, d, lambda s, e: dict(zip(e, s.values(), strict=True))),
    "renames back": lambda o, d: each_state(o, d, lambda s, _: renamed({0: s}, BACK)[0]),
}


def each_state(optimizer: Optimizer, given: dict[str, Any], change: Any) -> None:
    """Replace the state of each parameter by ``change`` of it and of the entries of the given dict."""
    keys = given["param_groups"][0]["params"]
    for p, key in zip(optimizer.param_groups[0]["params"], keys, strict=True):
        optimizer.state[p] = change(optimizer.state[p], given["state"][key])


def drawn(save: str, before: str, after: str, *, calls_torchs: bool) -> type[Averaging]:
    """Make a class whose methods do what the names say."""

    class Drawn(Averaging):
        def state_dict(self) -> dict[str, Any]:
            made: dict[str, Any] = SAVES[save](self, super().state_dict())
            return made

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            given = state_dict
            if save == "in a list":
                given = {"state": dict(enumerate(given["of"])), "param_groups": given["groups"]}
            if save == "renames":
                given = {**given, "state": renamed(given["state"], BACK)}
            given = BEFORE[before](self, given)
            if calls_torchs:
                super().load_state_dict(given)
            else:
                params = self.param_groups[0]["params"]
                state = {p: dict(given["state"][i]) for i, p in enumerate(params)}
                self.state = defaultdict(dict, state)
            AFTER[after](self, given)

    return Drawn


WAYS = [
    way
    for way in itertools.product(SAVES, BEFORE, AFTER, (True, False))
    if (way[1] == "renames for itself") is (way[2] == "renames back")  # else the class forgets its own state
]


@functools.cache
def trained() -> tuple[list[torch.nn.Parameter], dict[str, Any]]:
    """Weights and the state dict of a run that has taken some steps, of torch's own methods."""
    params = parameters()
    optimizer = Averaging(params)
    run_steps(compiled(optimizer, strategy="full"), params, range(3))
    assert all(error_terms(optimizer.state[p]["average"])[0].any() for p in params)
    return params, optimizer.state_dict()


def at_that_point(make: Any) -> Any:
    """Make an optimizer in that state, as if it had taken the steps."""
    params, saved = trained()
    optimizer = install(make([torch.nn.Parameter(p.detach().clone()) for p in params]), strategy="full")
    Optimizer.load_state_dict(optimizer, copy.deepcopy(saved))
    return optimizer


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def as_it_stands(value: Any) -> Any:
    """Return a container with the tensors' identities, to tell whether anybody has changed it."""
    if isinstance(value, dict):
        return [(key, as_it_stands(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [as_it_stands(each) for each in value]
    return (id(value), value._version) if isinstance(value, Tensor) else value


@pytest.mark.filterwarnings("error:collage_fx")
@pytest.mark.parametrize("seed", range(4))
def test_drawn_classes_load_what_they_have_saved(seed: int) -> None:
    wrong = {}
    for way in random.Random(seed).sample(WAYS, 20):
        save, before, after, calls_torchs = way
        optimizer = at_that_point(cls := drawn(save, before, after, calls_torchs=calls_torchs))
        try:
            given = through_a_file(optimizer.state_dict())
            before_load = as_it_stands(given)
            params = optimizer.param_groups[0]["params"]
            again = install(cls([torch.nn.Parameter(p.detach().clone()) for p in params]), strategy="full")
            again.load_state_dict(given)
            assert as_it_stands(given) == before_load, "the given dict has changed"
            assert differences(everything(optimizer), everything(again)) == []
        except Exception as error:  # any fault of a drawn class is listed below
            wrong[way] = f"{type(error).__name__}: {error}".partition("\n")[0]
    assert not wrong, wrong


class InOneBuffer(Averaging):
    """Keeps the float32 state of all parameters in one buffer, once it has been loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        squares = [entries["square"] for entries in state_dict["state"].values()]
        self.buffer = torch.cat([each.flatten() for each in squares])
        views = self.buffer.split([each.numel() for each in squares])
        for state, square, view in zip(self.state.values(), squares, views, strict=True):
            state["square"] = view.view_as(square)


def test_float32_state_stays_in_the_memory_that_a_load_has_put_it_in() -> None:
    """Nothing of it has been rounded, so that a copy would cost memory, and part it from the buffer."""
    params, saved = trained()
    optimizer = install(InOneBuffer([torch.nn.Parameter(p.detach().clone()) for p in params]))
    optimizer.load_state_dict(copy.deepcopy(saved))
    squares = [state["square"] for state in optimizer.state.values()]
    of_buffer = optimizer.buffer.untyped_storage().data_ptr()
    assert [each.untyped_storage().data_ptr() for each in squares] == [of_buffer] * len(params)
    assert all(map(torch.equal, squares, [entries["square"] for entries in saved["state"].values()]))


class LaterVersion(Averaging):
    """Loads files of an earlier version, under whose names it keeps its state no longer."""

    drops: tuple[str, ...] = ()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        entries = renamed(state_dict["state"], {"average": "mean"})
        kept = {key: {n: v for n, v in each.items() if n not in self.drops} for key, each in entries.items()}
        super().load_state_dict({**state_dict, "state": kept})


@pytest.mark.parametrize("drops", [(), ("mean",)])
def test_state_that_a_load_renames_keeps_its_error_terms(drops: tuple[str, ...]) -> None:
    """If the load drops the state, a warning says that its error terms are left out."""
    params, saved = trained()
    earlier = at_that_point(Averaging)
    optimizer = install(
        LaterVersion([torch.nn.Parameter(p.detach().clone()) for p in params]), strategy="full"
    )
    optimizer.drops = drops
    told = warned(lambda: optimizer.load_state_dict(copy.deepcopy(saved)))
    assert len(told) == len(drops) * len(params)
    assert all("error terms of 'average' of parameter" in each for each in told)
    for p, q in zip(optimizer.param_groups[0]["params"], earlier.param_groups[0]["params"], strict=True):
        if not drops:
            assert error_terms(optimizer.state[p]["mean"])[0].any()
            expected = full_value(earlier.state[q]["average"])
            assert torch.equal(full_value(optimizer.state[p]["mean"]), expected)


@pytest.mark.parametrize("calls_torchs", [True, False])
def test_error_terms_beside_another_layout_are_refused_if_they_fit_no_tensor(*, calls_torchs: bool) -> None:
    cls = drawn("in a list", "passes on", "nothing", calls_torchs=calls_torchs)
    given = through_a_file(at_that_point(cls).state_dict())
    name = next(key for key, each in given[SHARED].items() if each.dim() == 2)
    given[SHARED][name] = given[SHARED][name][:1]
    params, _ = trained()
    again = install(cls([torch.nn.Parameter(p.detach().clone()) for p in params]), strategy="full")
    with pytest.raises(CheckpointMismatchError):
        again.load_state_dict(given)
