"""Numbers that divide within a denominator multiply the quotient, so that one that is 0 makes no 0/0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from collage_fx import full_value
from collage_fx.choices import Arithmetic
from collage_fx.graph import graph_text
from collage_fx.graph.program import StepProgram
from collage_fx.passes.clear_denominators import ClearDenominators
from collage_fx.passes.normalize import Normalize
from tests.support.programs import after, captured, only
from tests.support.race import Race
from tests.support.training import parameters

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]


def adam(p: Tensor, m: Tensor, v: Tensor, lr: Tensor, t: Tensor) -> None:
    """Adam as torch.optim writes it for a compiled step; t is the bias correction."""
    step_size = -lr
    p.add_(m / (v.sqrt() / (t * step_size) + 1e-8 / step_size))


def cleared(step: Step, dtype: torch.dtype, *, clear: bool = True, **options: Any) -> StepProgram:
    program = captured(step, "p m v lr t", dtypes=dtype, **options)
    return only(program, Normalize(), *([ClearDenominators()] if clear else []))


def test_what_both_terms_are_divided_by_multiplies_the_quotient() -> None:
    graph = cleared(adam, torch.float32).gm.graph
    assert_expected_inline(
        "\n".join(line for line in graph_text(graph).splitlines() if "# clear-denominators" in line),
        """\
mul_2: float32[] = mul(t, 1e-08)  # clear-denominators
add_2: float32[4] = add(sqrt, mul_2)  # clear-denominators
mul_3: float32[] = mul(t, lr)  # clear-denominators
neg_1: float32[] = neg(mul_3)  # clear-denominators
div_2: float32[4] = div(m, add_2)  # clear-denominators
mul_4: float32[4] = mul(div_2, neg_1)  # clear-denominators""",
    )


#: Ways to write a denominator, with numbers that it is divided by.
DENOMINATORS: dict[str, Step] = {
    "one number of two terms": lambda p, m, v, lr, t: v / (t * lr) + 0.5 / lr,
    "of one": lambda p, m, v, lr, t: v / t + 0.5,
    "of one number twice": lambda p, m, v, lr, t: v / (t * lr) + m / (t * (lr * lr)),
    "a difference": lambda p, m, v, lr, t: v / -lr - 0.5 / lr,
    "a number less a tensor": lambda p, m, v, lr, t: 0.5 / lr - v / -lr,
    "a quotient of a sum": lambda p, m, v, lr, t: (v / t + 0.5) / (t / lr).reciprocal(),
    "a product with a quotient": lambda p, m, v, lr, t: (v + 0.5) * ((1 - t * 0.5) / lr),
    "negated": lambda p, m, v, lr, t: -(v / (-0.25 * lr) - 0.5 / lr),
    "a sum of three": lambda p, m, v, lr, t: v / lr + (m / (lr * lr) + t / lr),
    "common factors": lambda p, m, v, lr, t: v * t / lr + t * 0.5 / lr,
    "a sum in bfloat16, cast": lambda p, m, v, lr, t: (v.bfloat16() / (t * lr) + 0.5 / lr).double(),
    "cast numbers": lambda p, m, v, lr, t: v / lr.float() + 0.5 / lr,
}


#: Of either way.
ROUNDINGS = 2 * 10 * 2.0**-24


@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("name", DENOMINATORS)
def test_quotients_are_the_same(name: str, reciprocal: bool) -> None:
    """Up to the roundings of the ten operations that the longest of them has, of numbers in float32."""
    denominator = DENOMINATORS[name]

    def step(p: Tensor, m: Tensor, v: Tensor, lr: Tensor, t: Tensor) -> None:
        divisor = denominator(p, m, v, lr, t)
        p.copy_(divisor.reciprocal() if reciprocal else m / divisor)

    program = cleared(step, torch.float64)
    assert "# clear-denominators" in graph_text(program.gm.graph)
    p, m, v = torch.zeros(4).double(), torch.tensor([1.0, -2, 3, 0.5]).double(), torch.ones(4).double() / 3
    lr, t, expected = torch.tensor(2.0**-9), torch.tensor(0.75), p.clone()
    program.gm(p, m, v, lr, t)
    step(expected, m, v, lr, t)
    torch.testing.assert_close(p, expected, rtol=ROUNDINGS, atol=0)


@pytest.mark.parametrize("name", DENOMINATORS)
@pytest.mark.parametrize(("lr", "t"), [(0.0, 0.75), (2.0**-9, 0.0), (0.0, 0.0), (-0.0, 1.0)])
def test_numbers_that_are_0_leave_what_was_a_number_alone(name: str, lr: float, t: float) -> None:
    denominator = DENOMINATORS[name]

    def step(p: Tensor, m: Tensor, v: Tensor, lr: Tensor, t: Tensor) -> None:
        p.copy_(m / denominator(p, m, v, lr, t))

    m, v = torch.tensor([1.0, -2, 0, 0]).double(), torch.tensor([1.0, 0, 1, 0]).double()
    numbers = torch.tensor(lr), torch.tensor(t)
    got, expected = (torch.zeros(4).double() for _ in range(2))
    cleared(step, torch.float64).gm(got, m, v, *numbers)
    step(expected, m, v, *numbers)
    known = ~expected.isnan()
    torch.testing.assert_close(got[known], expected[known], rtol=ROUNDINGS, atol=0)


def test_a_step_size_of_0_is_a_step_of_0() -> None:
    p, m, v, lr, t = torch.ones(3), torch.tensor([0.0, 1, -1]), torch.tensor([0.0, 0, 4]), *torch.zeros(2)
    results = []
    for clear in (True, False):
        results.append(p.clone())
        cleared(adam, torch.float32, clear=clear).gm(results[-1], m, v, lr, t + 0.5)
    assert torch.equal(results[0], p)
    assert results[1].isnan().tolist() == [True, True, False]


def test_other_denominators_are_left_alone() -> None:
    def step(p: Tensor, m: Tensor, v: Tensor, lr: Tensor, t: Tensor) -> None:
        p.sub_(lr * m / (v.sqrt() / 0.5 + 1e-8))
        p.sub_(m / lr)
        p.sub_(m / (v + lr))
        p.sub_(m / (v / lr + m / t))
        v.copy_(v / lr + 1)
        m.div_(v)

    assert "# clear-denominators" not in graph_text(cleared(step, torch.float32).gm.graph)


@pytest.mark.parametrize("arithmetic", ["wide", "native"])
def test_an_epsilon_that_float16_does_not_hold_counts(arithmetic: Arithmetic) -> None:
    """1e-8 times a bias correction is below float16's smallest number, 6e-8."""
    program = after(
        captured(adam, "p m v lr t", dtypes=torch.float16, arithmetic=arithmetic, strategy="light"),
        "hoist-scalars",
    )
    p, m, v, lo = torch.ones(4).half(), torch.zeros(4).half(), torch.zeros(4).half(), torch.zeros(4).half()
    program.gm(p, m, v, torch.tensor(1e-3), torch.tensor(0.03), lo)
    assert (p == 1).all()
    assert (lo == 0).all()


# Whole steps. ---------------------------------------------------------------------------------------------


STEPS = 40


@pytest.mark.parametrize(
    ("in_tensor", "foreach", "amsgrad"),
    [(False, False, False), (True, False, True), (False, True, True)],
)
def test_adam_whose_learning_rate_begins_and_ends_at_0(in_tensor: bool, foreach: bool, amsgrad: bool) -> None:
    """Where there has been no gradient, in the first rows until the tenth step, v is 0."""
    schedulers = []

    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        lr = torch.tensor(1e-4) if in_tensor else 1e-4
        optimizer = torch.optim.AdamW(params, lr=lr, foreach=foreach, amsgrad=amsgrad)
        schedulers.append(LambdaLR(optimizer, lambda i: min(i, 4, STEPS - 1 - i) / 4))
        return optimizer

    race = Race([*parameters(shapes=[(4, 6), (3, 5)]), *parameters(torch.float32, [(4, 2)])], make)
    for i in range(STEPS):
        race.draw_gradients()
        for p in (p for twins in race.parameters for p in twins):
            assert p.grad is not None
            p.grad[0] *= i >= 10
        race.step()
        race.step_twins()
        for scheduler in schedulers:
            scheduler.step()
        if i == 0:
            for p, start in zip(race.parameters[0], race.start, strict=True):
                assert torch.equal(full_value(p), start)
    race.assert_compensated(0, 1)
    ours, _, exact = (params[2].detach().double() for params in race.parameters)
    # Each step rounds the sum; its update, lr / sqrt(1 - beta2) at most, has 16 operations; the averages that
    # it is computed from have had 5 in each step before.
    update = 1e-4 / (1 - 0.999) ** 0.5
    bound = STEPS * (exact.abs() + update * (16 + 5 * STEPS)) * 2.0**-24
    assert torch.all((ours - exact).abs() <= bound)
