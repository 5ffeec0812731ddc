"""Optimizers drawn at random, compiled, against their own rules in float64.

Every optimizer of a bundle is a rule of :mod:`tests.support.rules`; one compiled function steps them all. After
each step two things are compared with the rule run on bounded numbers, elementwise and within the bound that
comes with them: the step itself, from the tensors as they really were, and all steps so far, from the start.

``COLLAGE_FX_RULES=1000`` draws about so many rules with a random seed, instead of the 300 that are always the
same.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from collage_fx import CollageBackend, error_terms, full_value
from collage_fx.formats import is_low_precision
from collage_fx.program import Kind
from tests.support.bounded import Bounded
from tests.support.rules import STEPS, DrawnOptimizer, Rule, rules

#: Optimizers of one compiled function; the first is what a counter-example shrinks to.
SIZES = (1, 5, *[12] * 16)
ASKED = os.environ.get("COLLAGE_FX_RULES")
EXAMPLES = int(ASKED) // 10 if ASKED else 30
drawn = 0


@st.composite
def bundles(draw: Any) -> tuple[str, str, list[Rule]]:
    """A strategy, how steps are counted, and the rules."""
    strategy = draw(st.sampled_from(["plus", "light", "full"]))
    counter = draw(st.sampled_from(["tensor"] * 7 + ["python"]))
    size = draw(st.sampled_from(SIZES))
    return strategy, counter, draw(st.lists(rules(), min_size=size, max_size=size))


def step_all(optimizers: Sequence[DrawnOptimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()


class Watched:
    """A drawn optimizer beside its float64 twin and its bounded numbers.

    Args:
        rule: what is drawn.
        counter: see :class:`DrawnOptimizer`.
    """

    def __init__(self, rule: Rule, counter: str) -> None:
        self.rule = rule
        self.optimizer = DrawnOptimizer(rule, counter=counter)
        self.exact = DrawnOptimizer(rule, counter=counter, float64=True)
        self.gradients = rule.gradients()
        self.bounded = rule.bounded()
        self.since_start = {
            name: Bounded(full_value(tensor)) for name, tensor in _tensors(self.exact).items()
        }
        self.told_apart = False

    def before(self, step: int) -> None:
        gradient = self.gradients[step]
        self.optimizer.parameter.grad, self.exact.parameter.grad = gradient.clone(), gradient.double()
        met = _tensors(self.optimizer)
        self.this_step = {name: Bounded(full_value(tensor)) for name, tensor in met.items()}
        self.since_start["g"] = Bounded(gradient)

    @torch.no_grad()
    def after(self, step: int) -> None:
        self.exact.step()
        exact, met = _tensors(self.exact), _tensors(self.optimizer)
        for numbers, since in ((self.this_step, "this step"), (self.since_start, "the start")):
            self.bounded(
                numbers["p"], numbers["g"], *(numbers[s] for s, _ in self.rule.states), Bounded(step + 1)
            )
            if since == "the start":
                # The two float64 runs, torch's and the bounded one, differ by less than float32 runs do.
                for name in numbers:
                    self._compare(exact[name], numbers[name], f"float64 {name} after step {step + 1}")
            for name, tensor in met.items():
                stored = numbers[name].stored(tensor.dtype, compensated=bool(error_terms(tensor)))
                numbers[name] = stored
                self._compare(full_value(tensor), stored, f"{name} after step {step + 1}, since {since}")
        self._tell_apart(met)

    def _compare(self, met: Tensor, wanted: Bounded, where: str) -> None:
        excess = (met - wanted.value).abs() > wanted.error
        if bool(excess.any()):
            i = tuple(excess.nonzero()[0].tolist())
            raise AssertionError(
                f"{where}: {met[i].item()!r} where {wanted.value[i].item()!r} was wanted, off by "
                f"{abs(met[i] - wanted.value[i]).item():.3g} and not {wanted.error[i].item():.3g}\n{self.rule!r}"
            )
        assert bool(met.isfinite().all()), f"{where}: {met}\n{self.rule!r}"

    def _tell_apart(self, met: dict[str, Tensor]) -> None:
        """Note whether this step would have shown a parameter that is stored without its error term."""
        wanted = self.this_step["p"]
        plain = (wanted.value.to(self.rule.dtype).double() - wanted.value).abs() > wanted.error
        self.told_apart |= bool(plain.any())
        if bool(plain.any()):
            assert any(bool((lo != 0).any()) for lo in error_terms(met["p"])), (
                f"silently plain:\n{self.rule!r}"
            )


def _tensors(optimizer: DrawnOptimizer) -> dict[str, Tensor]:
    p = optimizer.parameter
    states = {name: tensor for name, tensor in optimizer.state[p].items() if name != "t"}
    return {"p": p, **({} if p.grad is None else {"g": p.grad}), **states}


def check(strategy: str, counter: str, drawn_rules: Sequence[Rule]) -> None:
    """Compile, step and compare."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    watched = [Watched(rule, counter) for rule in drawn_rules]
    optimizers = [each.optimizer for each in watched]
    backend = CollageBackend(strategy)  # type: ignore[arg-type]
    compiled = torch.compile(step_all, backend=backend, fullgraph=True)
    for step in range(STEPS):
        for each in watched:
            each.before(step)
        compiled(optimizers)
        for each in watched:
            each.after(step)
    for each in watched:
        assert each.told_apart, f"a rule that tests nothing:\n{each.rule!r}"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if counter == "tensor" else 2)


@settings(
    max_examples=EXAMPLES,
    derandomize=not ASKED,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink) if ASKED else (Phase.generate,),
)
@given(bundles())
def _random_rules(bundle: tuple[str, str, list[Rule]]) -> None:
    global drawn
    check(*bundle)
    drawn += len(bundle[2])


@pytest.mark.slow
def test_random_rules() -> None:
    """300 drawn optimizers."""
    _random_rules()
    assert drawn >= 10 * EXAMPLES, drawn
