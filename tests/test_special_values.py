"""Numbers that are 0 or tiny, and tensors with zeros, make no NaN or infinity where float32 has none.

One compiled step of each optimizer of torch.optim sees many numbers. Before each step its tensors are given
the values that eager torch's float32 twin has, so that every step is one from common values. The rewritten
graph is run operation by operation: that Inductor's code has its bits, other tests say.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import CollageBackend, error_terms
from collage_fx.choices import Arithmetic
from collage_fx.state.error_terms import record_of
from collage_fx.state.optimizers import state_tensors
from tests.support.twin import TwinBackend

STEPS = 10
SHAPE = (4, 6)
#: The last is no normal number, neither of float32 nor of bfloat16.
TINY = (1e-12, 1e-20, 1e-30, 1e-39)

#: The ordinary values of what an optimizer calculates with.
ORDINARY: dict[str, tuple[float, ...]] = {
    "lr": (1e-3, 1e-4),
    "eps": (1e-8, 1e-5),
    "betas": (0.9, 0.999),
    "weight_decay": (0.1, 0.01),
    "momentum": (0.9, 0.5),
    "dampening": (0.1, 0.9),
    "rho": (0.9, 0.999),
    "alpha": (0.9, 0.99),
    "lambd": (1e-4, 1e-2),
    "lr_decay": (0.01, 0.1),
    "momentum_decay": (4e-3, 1e-2),
}

#: Numbers of which a step asks whether they are 0: where they are, others are compiled for that.
BRANCHED_ON = ("weight_decay", "momentum")

#: Not ``RMSprop(centered=True)``: its variance is a difference of states that agree, at an alpha of 0 to the
#: last bit, and a rounding decides whether its root is a number, in float32 too.
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ASGD", {}),
    ("Adadelta", {}),
    ("Adafactor", {}),
    ("Adagrad", {}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("Adamax", {}),
    ("NAdam", {"decoupled_weight_decay": True}),
    ("RAdam", {}),
    ("RMSprop", {"momentum": 0.9}),
    ("Rprop", {}),
    ("SGD", {"momentum": 0.9}),
    ("Muon", {}),
)


def _forms() -> Iterator[tuple[str, dict[str, Any], Arithmetic]]:
    for name, options in CASES:
        cls = getattr(torch.optim, name, None)  # Muon is not in every torch
        if cls is None:
            continue
        if "foreach" not in inspect.signature(cls).parameters:
            yield name, options, "wide"
            continue
        yield name, {**options, "foreach": False}, "wide"
        yield name, {**options, "foreach": True}, "wide"
    for name in ("AdamW", "SGD"):
        yield name, {"foreach": False, "lr": torch.tensor(0.1)}, "wide"
    for name in ("Adadelta", "AdamW", "RAdam", "RMSprop"):
        yield name, {"foreach": False}, "native"


class Pair:
    """An optimizer of a bfloat16 parameter with a compiled step, and its eager float32 twin."""

    def __init__(self, name: str, options: dict[str, Any], arithmetic: Arithmetic) -> None:
        self.random = random.Random(name)
        self.generator = torch.Generator().manual_seed(0)
        values = self._drawn(rows=1)
        self.parameters = [torch.nn.Parameter(values), torch.nn.Parameter(values.float())]
        cls = getattr(torch.optim, name)
        if "weight_decay" in inspect.signature(cls).parameters:
            options = {"weight_decay": 0.1, **options}
        self.optimizers: list[Optimizer] = []
        for parameter in self.parameters:
            own = {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}
            self.optimizers.append(cls([parameter], **own))
        backend: CollageBackend = TwinBackend(compiles=False, arithmetic=arithmetic)
        backend.engine = "eager"  # type: ignore[attr-defined]
        self.step = torch.compile(self.optimizers[0].step, backend=backend)

    def _drawn(self, rows: int) -> Tensor:
        """Ordinary numbers, with zeros in the first rows and the first column."""
        tensor = torch.randn(SHAPE, generator=self.generator).bfloat16()
        tensor[:rows], tensor[:, 0] = 0, 0
        return tensor

    def draw(self, step: int) -> None:
        """Gradients, and numbers for both; the learning rate begins and ends at 0, as schedules have it."""
        gradient = self._drawn(rows=self.random.choice((1, 2, 4)))
        for p in self.parameters:
            p.grad = gradient.to(p.dtype)
        groups = [optimizer.param_groups[0] for optimizer in self.optimizers]
        for key in ORDINARY.keys() & groups[0].keys():
            if key in BRANCHED_ON and groups[0][key] == 0:
                continue
            numbers = [self._number(key, step) for _ in range(2)]
            for group in groups:
                self._set(group, key, numbers)

    def _number(self, key: str, step: int) -> float:
        if key == "lr" and step in (0, STEPS - 1):
            return 0.0
        if step < 2:  # all of them differ once, and are inputs from then on
            return ORDINARY[key][step]
        extremes = (self.random.choice(TINY), *(() if key in BRANCHED_ON else (0.0,)))
        return self.random.choice((*extremes, *ORDINARY[key]))

    def _set(self, group: dict[str, Any], key: str, numbers: list[float]) -> None:
        first, second = numbers
        match group[key]:
            case Tensor() as tensor:
                tensor.fill_(first)
            case (None, _) as pair:  # Adafactor's eps
                group[key] = (None, pair[1])
            case (_, _):
                group[key] = (first, second)
            case _:
                group[key] = first

    def tensors(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """The parameter and its state: their names, ours, float32's, and where ours should be numbers."""
        ours, theirs = (
            {"p": p.detach(), **dict(state_tensors(optimizer.state[p]))}
            for optimizer, p in zip(self.optimizers, self.parameters, strict=True)
        )
        smallest = torch.finfo(torch.bfloat16).tiny
        held = [(t == 0) | (t.abs() >= smallest) for t in theirs.values() if t.shape == SHAPE]
        are_held = torch.stack(held).all(0)
        for name, tensor in theirs.items():
            where = are_held if tensor.shape == SHAPE else are_held.all()
            yield name, ours[name], tensor, tensor.isfinite() & where

    def check(self, step: int) -> None:
        for name, ours, _, is_number in self.tensors():
            for each in (ours, *error_terms(ours)):
                wrong = is_number & ~each.isfinite()
                assert not wrong.any(), f"step {step}: {name} is {each[wrong][0]}: {self._numbers()}"

    def _numbers(self) -> dict[str, Any]:
        group = self.optimizers[0].param_groups[0]
        return {key: group[key] for key in ORDINARY.keys() & group.keys()}

    @torch.no_grad()
    def equalise(self) -> None:
        """Give both what float32 has, 0 for what is no number."""
        for _, ours, theirs, _ in self.tensors():
            theirs.nan_to_num_(0, 0, 0)
            expansion = record_of(ours)
            if expansion is None:
                ours.copy_(theirs)
            else:
                hi, *auxiliaries = expansion.format.split(theirs, ours.dtype)
                ours.copy_(hi)
                expansion.replace_contents(auxiliaries)


@pytest.mark.filterwarnings("ignore:collage_fx.* written to between two steps")  # by equalise()
@pytest.mark.parametrize(("name", "options", "arithmetic"), list(_forms()), ids=str)
def test_there_is_a_number_where_float32_has_one(
    name: str, options: dict[str, Any], arithmetic: Arithmetic
) -> None:
    pair = Pair(name, options, arithmetic)
    for step in range(STEPS):
        pair.draw(step)
        pair.step()
        pair.optimizers[1].step()
        pair.check(step)
        pair.equalise()
