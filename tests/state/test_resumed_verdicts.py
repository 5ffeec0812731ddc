"""Resumes with numbers that change: the first step after a load does not decide by a number of that step.

Nor do its bits depend on whether a number is a constant of the code, as in that step, or an input. Nor does
state that a step has just made become state that has its error term for good.
"""

from __future__ import annotations

import copy
import io
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import install, plain_state_dict
from tests.support.training import differences, everything, parameters, set_gradients

#: Steps that are taken after the load.
STEPS = 3

NUMBERS: dict[str, Callable[[int], float]] = {
    "1/t": lambda t: 1 / t,
    "1 - (1 + t)/(10 + t)": lambda t: 1 - (1 + t) / (10 + t),
    "1 - min(.999, 1 - 1/t)": lambda t: 1 - min(0.999, 1 - 1 / t),
}


class Averaging(Optimizer):
    """Step with an average whose decay depends on the step; it is recorded, and makes its state anew.

    Args:
        params: the parameters.
        number: step -> weight of the gradient.
    """

    shapes: tuple[tuple[int, ...], ...] = ((8, 6),)

    def __init__(self, params: list[torch.nn.Parameter], number: Callable[[int], float]) -> None:
        super().__init__(params, {"t": 0})
        self.number = number

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["t"] += 1
            w = self.number(group["t"])
            for p in group["params"]:
                if float(p.grad.float().norm()) > 0:
                    state = self.state[p]
                    state["m"] = (1 - w) * state.get("m", torch.zeros_like(p)) + w * p.grad
                    p.add_(state["m"], alpha=-1e-3)


class InPlace(Averaging):
    """Step with an average that begins as the gradient; ``branches``: it is recorded."""

    branches = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["t"] += 1
            for p in group["params"]:
                if self.branches and not float(p.grad.float().norm()) > 0:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = p.grad.clone()
                elif group["t"] % 2:
                    state["m"].lerp_(p.grad, self.number(group["t"]))
                else:
                    torch._foreach_lerp_([state["m"]], [p.grad], self.number(group["t"]))
                p.add_(state["m"], alpha=-1e-3)


class Recorded(InPlace):
    branches = True


class LateWeight(Averaging):
    """Recorded step of two parameters, and of a third with another weight of its average, from a step on."""

    shapes = ((8, 6), (8, 6), (8, 6))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        group["t"] += 1
        *first, last = group["params"]
        for p in first:
            self.follow(p, self.number(group["t"]))
        if float(last.grad.float().norm()) > 0 and group["t"] > 3:
            self.follow(last, 0.75 * self.number(group["t"]))

    def follow(self, p: Tensor, weight: float) -> None:
        m = self.state[p].setdefault("m", torch.zeros_like(p))
        m.lerp_(p.grad, weight)
        p.add_(m, alpha=-1e-3)


class BreaksAtFirst(Averaging):
    """Step whose graph breaks as long as there is no state: Dynamo can capture it in a resumed run."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"] = torch.zeros_like(p)
                state["norm"] = float(p.grad.float().norm() > 0)
            state["m"].lerp_(p.grad, self.number(1))
            rate = 1e-3 / max(0.5, state["m"].square().mean().sqrt().item())
            p.add_(state["m"], alpha=-rate)


class BeginsRounded(Averaging):
    """Captured step whose average begins with a value that its dtype does not hold."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"] = p.grad * 0.3
            else:
                state["m"].lerp_(p.grad, self.number(1))
            p.add_(state["m"], alpha=-1e-3)


#: Weights below and from 1/2 on, where torch's ``lerp`` has two formulas.
WEIGHTS: dict[str, Callable[[int], float]] = {
    "9/(10 + t)": lambda t: 9 / (10 + t),
    "cosine": lambda t: 0.5 + 0.4 * math.cos(t),
}

FOLLOWED: dict[str, Callable[[int], float]] = {"1/t": lambda t: 1 / (1 + t), **WEIGHTS}


class Following(Averaging):
    """Captured step whose parameters follow an average with a share that depends on the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["z"] = p.clone()
                w = self.number(group["t"])
                p.lerp_(state["z"], w).add_(p.grad, alpha=1e-4 * (0.9 * (1 - w) - 1))
                state["z"].sub_(p.grad, alpha=1e-4)
            group["t"] += 1


class CountsInGroup(Averaging):
    """Captured step with bias corrections by a count that its first step adds to the group.

    In few of the elements do last bits of the corrections count.
    """

    shapes = ((128, 32),)

    def counted(self, group: dict[str, Any], p: Tensor) -> float:
        group["count"] = group.get("count", 0) + 1
        return group["count"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                count, state = self.counted(group, p), self.state[p]
                if "m" not in state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                size = state["v"].sqrt() / math.sqrt(1 - 0.999**count)
                p.addcdiv_(state["m"], size + 1e-8, value=-1e-3 / (1 - 0.9**count))


class CountsInState(CountsInGroup):
    def counted(self, group: dict[str, Any], p: Tensor) -> float:
        self.state[p]["count"] = self.state[p].get("count", 0) + 1
        return self.state[p]["count"]


class CountsInPairs(CountsInGroup):
    """The count is in a tuple of the state, as the bias corrections of QHAdam are."""

    def counted(self, group: dict[str, Any], p: Tensor) -> float:
        name, count = self.state[p].get("count", ("steps", 0.0))
        self.state[p]["count"] = name, 1.0 + 0.95 * count
        return 1.0 + 0.95 * count


class LoadsByItself(Recorded):
    """Class whose own load knows no keys but torch's."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict.keys() == {"state", "param_groups"}
        super().load_state_dict(state_dict)


class InAList(Recorded):
    """Class whose state dict has a layout of its own."""

    def state_dict(self) -> dict[str, Any]:
        made = super().state_dict()
        return {"of": [*made["state"].values()], "t": made["param_groups"][0]["t"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = Optimizer.state_dict(self)["param_groups"]
        super().load_state_dict({"state": dict(enumerate(state_dict["of"])), "param_groups": groups})
        self.param_groups[0]["t"] = state_dict["t"]


COUNTING = (CountsInGroup, CountsInState, CountsInPairs)

CASES = [
    *((Averaging, NUMBERS[name], stop) for name in NUMBERS for stop in (2, 3)),
    *((InPlace, number, stop) for number in WEIGHTS.values() for stop in (1, 2, 3)),
    *((Recorded, number, stop) for number in WEIGHTS.values() for stop in (1, 3)),
    *((Following, number, stop) for number in FOLLOWED.values() for stop in (1, 3)),
    *((kind, WEIGHTS["cosine"], stop) for kind in COUNTING for stop in (1, 2, 3, 9)),
    (BeginsRounded, lambda t: 0.1, 1),
    (BreaksAtFirst, lambda t: 0.1, 3),
    *((LateWeight, lambda t: 0.1, stop) for stop in (3, 4, 5)),
    *((kind, WEIGHTS["cosine"], 2) for kind in (LoadsByItself, InAList)),
]


@pytest.mark.parametrize(("kind", "number", "stop"), CASES)
def test_a_resumed_run_goes_on_bit_by_bit(
    kind: type[Averaging], number: Callable[[int], float], stop: int
) -> None:
    def made() -> tuple[Averaging, list[torch.nn.Parameter]]:
        torch._dynamo.reset()
        params = parameters(shapes=kind.shapes)
        return install(kind(params, number)), params

    def take(optimizer: Averaging, params: list[torch.nn.Parameter], first: int, last: int) -> None:
        for seed in range(first, last):
            set_gradients(params, seed)
            optimizer.step()

    going_on, params = made()
    take(going_on, params, 0, stop)
    saved, weights = copy.deepcopy(going_on.state_dict()), [p.detach().clone() for p in params]
    take(going_on, params, stop, stop + STEPS)
    resumed, loaded = made()
    with torch.no_grad():
        for p, weight in zip(loaded, weights, strict=True):
            p.copy_(weight)
    resumed.load_state_dict(saved)
    take(resumed, loaded, stop, stop + STEPS)
    assert not differences(everything(going_on), everything(resumed))


#: Weights of the gradient in drawn rules: that change, that do not, that change once.
DRAWN_WEIGHTS: dict[str, Callable[[int], float]] = {
    **WEIGHTS,
    "1/t": lambda t: 1 / t,
    "warm-up": lambda t: 1 - min(0.999, 1 - 1 / t),
    "rises": lambda t: min(0.9, 0.1 * t),
    "falls once": lambda t: 0.1 if t < 4 else 0.02,
    "0.1": lambda t: 0.1,
    "0.004": lambda t: 0.004,
}
BIRTHS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "zeros": lambda p, g, w: torch.zeros_like(p),
    "gradient": lambda p, g, w: g.clone(),
    "parameter": lambda p, g, w: p.clone(),
    "first step": lambda p, g, w: g * w,
}
AVERAGES = ("lerp", "multiplied", "list", "in turn", "anew")
UPDATES = ("average", "decaying rate", "normed", "difference")
#: Where a rule branches on a value, which ends a graph.
BRANCHES = ("before", "within")
#: A value made in the step; numbers that only constants can be; a second parameter of the same shape with
#: another weight, or one that has no gradient at first.
BESIDES = ("nothing", "temporary", "burned in", "twin", "late")


class Rule(NamedTuple):
    """Update of a parameter, drawn at random."""

    weight: str
    birth: str
    average: str
    update: str
    branch: str
    besides: str

    @staticmethod
    def drawn(by: random.Random) -> Rule:
        choices = ([*DRAWN_WEIGHTS], [*BIRTHS], AVERAGES, UPDATES, BRANCHES, BESIDES)
        return Rule(*map(by.choice, choices))


class Drawn(Optimizer):
    """Optimizer with a rule in each group, each for parameters of one shape; its steps are recorded."""

    def __init__(self, rules: list[Rule]) -> None:
        generator, groups = torch.Generator().manual_seed(0), []
        for i, rule in enumerate(rules):
            for scale in (1.0, 0.75) if rule.besides in ("twin", "late") else (1.0,):
                p = torch.nn.Parameter(torch.randn(3 + i, 4, generator=generator).bfloat16())
                groups.append({"params": [p], "rule": tuple(rule), "scale": scale})
        super().__init__(groups, {"t": 0})

    def take(self, first: int, last: int) -> None:
        for seed in range(first, last):
            params = [p for group in self.param_groups for p in group["params"]]
            set_gradients(params, seed)
            for group, p in zip(self.param_groups, params, strict=True):
                if seed < 3 and group["scale"] < 1 and Rule(*group["rule"]).besides == "late":
                    p.grad = None
            self.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["t"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, Rule(*group["rule"]), group["t"], group["scale"])

    def update(self, p: Tensor, g: Tensor, rule: Rule, t: int, scale: float) -> None:
        w, state = scale * DRAWN_WEIGHTS[rule.weight](t), self.state[p]
        if rule.branch == "before" and not float(g.float().norm()) > 0:
            return
        if not state:
            state["m"] = BIRTHS[rule.birth](p, g, w)
            if rule.birth == "first step":
                p.add_(state["m"], alpha=-1e-3)
                return
        if rule.besides == "temporary":
            made = torch.zeros_like(p).add_(g, alpha=0.5).add_(state["m"])
            if float(made.float().norm()) > 0:
                g = made
        elif rule.besides == "burned in":
            g = torch.renorm(torch.nn.functional.softplus(g, beta=1 + t), 2, 0, 1 + w)
        x = p if rule.birth == "parameter" else g
        if rule.average == "anew":
            state["m"] = state["m"] * (1 - w) + x * w
        elif rule.average == "multiplied":
            state["m"].mul_(1 - w).add_(x, alpha=w)
        elif rule.average == "list" or (rule.average == "in turn" and t % 2):
            torch._foreach_lerp_([state["m"]], [x], w)
        else:
            state["m"].lerp_(x, w)
        m = state["m"]
        if rule.branch == "within" and not float(m.float().norm()) > 0:
            return
        if rule.update == "normed":
            p.addcdiv_(m, m.abs() + 0.1, value=-1e-3)
        elif rule.update == "difference":
            p.add_(p - m + g, alpha=-1e-2)
        else:
            p.add_(m, alpha=-1e-3 if rule.update == "average" else -1e-2 / (3 + t))


def go_on_otherwise(rules: list[Rule], stop: int) -> dict[str, list[str]]:
    """Return what differs in runs that go on from a file, in a new optimizer and its own, and in a copy."""

    def made() -> Drawn:
        torch._dynamo.reset()
        return install(Drawn(rules))

    def load(optimizer: Drawn) -> Drawn:
        file.seek(0)
        saved = torch.load(file)
        assert plain_state_dict(saved["optimizer"]).keys() == {"state", "param_groups"}
        with torch.no_grad():
            for group, weight in zip(optimizer.param_groups, saved["weights"], strict=True):
                group["params"][0].copy_(weight)
        optimizer.load_state_dict(saved["optimizer"])
        return optimizer

    going_on, file = made(), io.BytesIO()
    going_on.take(0, stop)
    weights = [group["params"][0].detach() for group in going_on.param_groups]
    torch.save({"weights": weights, "optimizer": going_on.state_dict()}, file)
    copied = copy.deepcopy(going_on)
    going_on.take(stop, stop + STEPS)
    expected, wrong = everything(going_on), {}
    resumed = {"resumed": load(made()), "copied": copied, "loaded again": load(going_on)}
    for name, optimizer in resumed.items():
        optimizer.take(stop, stop + STEPS)
        if found := differences(expected, everything(optimizer)):
            wrong[name] = sorted(found)
    return wrong


@pytest.mark.parametrize("seed", range(4))
def test_drawn_rules_go_on_bit_by_bit(seed: int) -> None:
    by = random.Random(seed)
    rules = [Rule.drawn(by) for _ in range(4)]
    stop = by.choice((1, 1, 2, 2, 3, 4, 5, 6))  # most verdicts are made in the first steps
    assert not go_on_otherwise(rules, stop), (stop, rules)


def test_code_for_the_first_of_twins_ends_with_its_constants() -> None:
    """The second has another weight, which makes it an input for both."""
    rule = Rule("0.1", "first step", "lerp", "normed", "within", "twin")
    assert not go_on_otherwise([rule, rule._replace(birth="zeros", besides="nothing")], stop=2)
