"""A state meets its change once, and weight decay is what was asked for, however small."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from collage_fx.choices import Rounding
from collage_fx.graph import graph_text
from collage_fx.graph.program import StepProgram
from collage_fx.numerics import DITHERED_SUM
from collage_fx.passes.normalize import Normalize
from collage_fx.passes.sum_changes import SumChanges
from collage_fx.passes.widen import Widen
from tests.support.float_bits import same_bits
from tests.support.programs import after, captured, only

Step = Callable[..., Any]

#: Unit roundoff of float32.
U = 2.0**-24


def summed(step: Step, dtype: torch.dtype = torch.float32) -> StepProgram:
    program = captured(step, "p v g lr", dtypes=dtype)
    program.changes = "summed"
    return only(program, Normalize(), Widen(), SumChanges())


def adamw(p: Tensor, v: Tensor, g: Tensor, lr: Tensor) -> None:
    """Decoupled weight decay, a moving average with a constant, and a term."""
    p.mul_(1 - lr * 0.01)
    v.mul_(0.999).add_(g * g, alpha=0.001)
    p.add_(g / (v.sqrt() + 1e-8), alpha=-0.125)


def text_of(step: Step, program: StepProgram | None = None) -> str:
    lines = graph_text((program or summed(step)).gm.graph).splitlines()
    return "\n".join(line.replace("  # sum-changes", "") for line in lines if "# sum-changes" in line)


def test_a_decay_and_a_term_are_one_change() -> None:
    assert_expected_inline(
        text_of(adamw),
        """\
mul_7: float32[4] = mul(v, 0.0010000000000000009)
sub_2: float32[4] = sub(mul_4, mul_7)
add_6: float32[4] = add(v, sub_2)
mul_6: float32[4] = mul(p, mul)
sub_1: float32[4] = sub(mul_5, mul_6)
add_5: float32[4] = add(p, sub_1)""",
    )


def dithered(step: Step, error_format: str = "exact", rounding: Rounding = "dither") -> StepProgram:
    program = captured(step, "p v g lr", error_format=error_format, strategy="full")
    program.rounding = rounding
    return after(program, "compensate-wide")


def small_and_slow(p: Tensor, v: Tensor, g: Tensor, lr: Tensor) -> None:
    """A term that is subtracted, and an average with a decay below 2**-16."""
    p.sub_(g)
    v.mul_(1 - 1e-6)


def elements_of(program: StepProgram) -> str:
    """Return the operations on all elements; those before them compute the phase of the first."""
    lines = text_of(adamw, program).splitlines()
    return "\n".join(line for line in lines if "[4]" in line)


def test_a_sum_that_keeps_its_errors_is_dithered_and_its_step_counted() -> None:
    """Not that of v, an average that forgets a thousandth: its count is neither read nor written."""
    program = dithered(adamw)
    assert_expected_inline(
        elements_of(program),
        """\
mul_13: float32[4] = mul(with_lower_half_1, 0.0010000000000000009)
sub_3: float32[4] = sub(mul_9, mul_13)
add_8: float32[4] = add(with_lower_half_1, sub_3)
mul_12: float32[4] = mul(with_lower_half, to_float32_4)
sub_2: float32[4] = sub(mul_10, mul_12)
phases: int32[4] = phases(p, phase)
dithered_sum: float32[4] = dithered_sum(with_lower_half, sub_2, phases)""",
    )
    assert [state.keeps_small_updates for state in program.states] == [True, False]
    assert [len(state.written) for state in program.states] == [2, 1]
    assert_expected_inline(
        elements_of(dithered(small_and_slow)),
        """\
neg: float32[4] = neg(to_float32_1)
phases: int32[4] = phases(p, phase)
dithered_sum: float32[4] = dithered_sum(with_lower_half, neg, phases)
mul_2: float32[4] = mul(with_lower_half_1, 1.0000000000287557e-06)
neg_1: float32[4] = neg(mul_2)
phases_1: int32[4] = phases(v, phase_1)
dithered_sum_1: float32[4] = dithered_sum(with_lower_half_1, neg_1, phases_1)""",
    )


@pytest.mark.parametrize(
    ("error_format", "rounding"), [("exact", "nearest"), ("mcf", "dither"), ("fp32", "dither")]
)
def test_other_sums_are_rounded_to_nearest(error_format: str, rounding: Rounding) -> None:
    assert "dithered_sum" not in text_of(adamw, dithered(adamw, error_format, rounding))


def unchanged_sum(p: Tensor, v: Tensor, g: Tensor, lr: Tensor) -> None:
    p.add_(g, alpha=-0.5)
    v.lerp_(g, 0.1)


def far_from_one(p: Tensor, v: Tensor, g: Tensor, lr: Tensor) -> None:
    p.mul_(0.25).add_(g)
    v.mul_(lr).add_(g)


def another_value(p: Tensor, v: Tensor, g: Tensor, lr: Tensor) -> None:
    p.copy_(v * 0.999)
    v.mul_(g)


@pytest.mark.parametrize("step", [unchanged_sum, far_from_one, another_value])
def test_other_updates_are_left_alone(step: Step) -> None:
    assert text_of(step) == ""


def test_a_conversion_to_the_same_dtype_does_not_end_the_chain() -> None:
    """Torch 2.11 leaves such conversions between two ``addcdiv_`` of bfloat16."""

    def step(p: Tensor, v: Tensor, g: Tensor, lr: Tensor) -> None:
        decayed = torch.ops.prims.convert_element_type.default(p * (1 - lr * 0.01), torch.float32)
        p.copy_(decayed + g)

    found = summed(step)
    assert "add(p, sub_1)" in text_of(step, found), graph_text(found.gm.graph)


def test_values_that_are_read_twice_are_walked_once() -> None:
    """Sixty sums, each of both operands: 2**60 ways back to x."""

    def step(p: Tensor, v: Tensor, g: Tensor, lr: Tensor) -> None:
        x = v * lr
        for _ in range(60):
            x = x + x
        p.copy_(x)

    assert text_of(step) == ""


def test_a_skipped_step_keeps_its_condition() -> None:
    def step(p: Tensor, v: Tensor, g: Tensor, lr: Tensor) -> None:
        p.copy_(torch.where(lr == 0.5, p, p * (1 - lr) + g))

    program = summed(step)
    p, v, g = torch.ones(4), torch.ones(4), torch.full((4,), 0.25)
    program.gm(p, v, g, torch.tensor(0.5))
    assert p.tolist() == [1.0] * 4
    program.gm(p, v, g, torch.tensor(0.125))
    assert p.tolist() == [1.125] * 4


#: 2**-10: a number of the program; factors that are multiplied by it are exact.
LR = 2.0**-10

#: Kinds of steps: how they are written, and what they do exactly.
KINDS: dict[
    str, tuple[Callable[[Tensor, float, Tensor, Tensor], Tensor], Callable[[Fraction, Any, Any], Any]]
] = {
    "constant": (lambda x, a, g, lr: x * (1 - a), lambda x, a, g: x * Fraction(1 - a)),
    "number": (lambda x, a, g, lr: x * (1 - lr * (a / LR)), lambda x, a, g: x * (1 - Fraction(a))),
    "number, the other way": (
        lambda x, a, g, lr: (1 + lr * (a / LR)) * x,
        lambda x, a, g: x * (1 + Fraction(a)),
    ),
    "number of float64": (
        lambda x, a, g, lr: x * (1 - lr.double() * (a / LR)).float(),
        lambda x, a, g: x * (1 - Fraction(a)),
    ),
    "divisor": (lambda x, a, g, lr: x / (1 + lr * (a / LR)), lambda x, a, g: x / (1 + Fraction(a))),
    "masked": (
        lambda x, a, g, lr: x * (1 - lr * (a / LR) * (g > 0)),
        lambda x, a, g: x * (1 - Fraction(a) * (g > 0)),
    ),
    "sum": (lambda x, a, g, lr: x + g * 0.5, lambda x, a, g: x + g / 2),
    "difference": (lambda x, a, g, lr: x - g * 0.5, lambda x, a, g: x - g / 2),
    "of itself": (lambda x, a, g, lr: torch.add(x, g * 0.25) + g * 0.5, lambda x, a, g: x + g * 3 / 4),
}


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4),
    exponents=st.lists(st.floats(-9, -2), min_size=4, max_size=4),
    scale=st.sampled_from([1.0, 1e-3, 1e-6, 1e-9]),
)
def test_a_chain_is_rounded_once(kinds: list[str], exponents: list[float], scale: float) -> None:
    """Against exact arithmetic: an ulp of the new value, and a few ulps of the changes."""
    # A float32 number: a multiple of lr is rounded to float32 as the optimizer has it.
    decays = [float(torch.tensor(10.0**e / LR)) * LR for e in exponents]

    def step(p: Tensor, v: Tensor, g: Tensor, lr: Tensor) -> None:
        x = p
        for kind, a in zip(kinds, decays, strict=False):
            x = KINDS[kind][0](x, a, g, lr)
        p.copy_(x)

    draw = torch.Generator().manual_seed(0)
    p, g = torch.randn(4, generator=draw), torch.randn(4, generator=draw) * scale
    before = p.tolist()
    summed(step).gm(p, torch.ones(4), g, torch.tensor(LR))
    for x, grad, found in zip(before, g.tolist(), p.tolist(), strict=True):
        exact, changes = Fraction(x), Fraction(0)
        for kind, a in zip(kinds, decays, strict=False):
            after = Fraction(KINDS[kind][1](exact, a, Fraction(grad)))
            exact, changes = after, changes + abs(after - exact)
        bound = U * abs(exact) + 16 * U * changes
        assert abs(Fraction(found) - exact) <= bound, (kinds, decays, x, grad)


def test_a_number_that_is_subtracted_has_elements_of_float32() -> None:
    """The number has float64; code for elements takes operands as they are."""
    program = captured(lambda p, g: p.sub_(g.abs().max() * 2.0**-7), "p g", error_format="exact")
    program.changes, program.rounding = "summed", "dither"
    (call,) = after(program, "hoist-scalars").gm.graph.find_nodes(op="call_function", target=DITHERED_SUM)
    x, change = (node.meta["val"] for node in call.args[:2])
    assert (change.dtype, change.shape) == (torch.float32, x.shape)


@pytest.mark.parametrize("value", [torch.nan, 3.4e38, 0.0, -0.0, 1e-45])
def test_special_values_stay_what_they_are(value: float) -> None:
    def step(p: Tensor, v: Tensor, g: Tensor, lr: Tensor) -> None:
        p.mul_(1 - lr).add_(g)

    p = torch.full((4,), value)
    expected = p * (1 - LR) + 0.0
    summed(step).gm(p, torch.ones(4), torch.zeros(4), torch.tensor(LR))
    assert same_bits(p, expected).all()  # lr is a power of two, so that each side is rounded once


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_what_overflows_in_float16_stays_infinite(value: float) -> None:
    """As second moments of gradients above 256 do."""

    def step(p: Tensor, v: Tensor, g: Tensor, lr: Tensor) -> None:
        v.mul_(0.999).add_(g)

    p, v, g = (torch.full((4,), each, dtype=torch.float16) for each in (1.0, value, 1.0))
    summed(step, torch.float16).gm(p, v, g, torch.tensor(LR))
    assert v.tolist() == [value] * 4


def test_what_is_not_a_number_arrives() -> None:
    def step(p: Tensor, v: Tensor, g: Tensor, lr: Tensor) -> None:
        p.mul_(1 - lr).add_(g)

    for value, grad in ((torch.inf, torch.nan), (torch.inf, -torch.inf), (1.0, torch.nan)):
        p = torch.full((4,), value)
        summed(step).gm(p, torch.ones(4), torch.full((4,), grad), torch.tensor(LR))
        assert p.isnan().all()
