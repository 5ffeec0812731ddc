"""The numbers behind a verdict."""

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import sympy
import torch
from functorch import make_fx
from torch import Tensor

from collage_fx.graph.program import Kind
from collage_fx.graph.recurrence import (
    LONGEST_EXPRESSION,
    TOLERATED_STALL,
    read_recurrence,
    representation_error,
    rms_noise,
    stall_band,
)
from collage_fx.numerics.dither import dithered, phase, phases
from collage_fx.numerics.formats import BFLOAT16, FLOAT16, FloatFormat
from tests.support.programs import after, captured


@pytest.mark.parametrize(
    ("fmt", "decay"), [(f, a) for f in (BFLOAT16, FLOAT16) for a in (0.9, 0.95, 0.99, 0.999)]
)
def test_representation_error_is_that_of_a_cast(fmt: FloatFormat, decay: float) -> None:
    stored = Fraction(torch.tensor(decay, dtype=torch.float64).to(fmt.dtype).item())
    assert representation_error(Fraction(decay), fmt) == abs(stored - Fraction(decay)) / (1 - Fraction(decay))


@pytest.mark.parametrize("fmt", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("decay", [0.9, 0.95, 0.99, 0.999])
def test_a_moving_average_stalls_within_its_band(fmt: FloatFormat, decay: float) -> None:
    """Pull v from 2 towards 1, each step rounded to storage: it stops no further away than the band says."""
    v = torch.tensor(2.0, dtype=fmt.dtype)
    for _ in range(20_000):
        moved = torch.tensor(decay * v.item() + (1 - decay) * 1.0, dtype=torch.float64).to(fmt.dtype)
        if moved == v:
            break
        v = moved
    stalled_at = abs(v.item() - 1.0)
    band = float(stall_band(Fraction(decay), fmt))
    # The move (1 - a)(v - 1) is lost below half an ulp of v, and ulp(v)/2 <= u v: v - 1 <= band v, that is v
    # - 1 <= band/(1 - band) where the band is below 1; above, nothing may move at all.
    assert stalled_at <= (min(1.0, band / (1 - band)) if band < 1 else 1.0)
    # And the band is not idle: a quarter of it is reached. (ulp(v)/2 is at least u v/2, and v starts within a
    # step of it.)
    assert stalled_at >= min(band, 1.0) / 4


def test_where_the_line_falls() -> None:
    assert stall_band(Fraction(9, 10), BFLOAT16) < TOLERATED_STALL < stall_band(Fraction(95, 100), BFLOAT16)
    assert stall_band(Fraction(99, 100), FLOAT16) < TOLERATED_STALL < stall_band(Fraction(995, 1000), FLOAT16)


@pytest.mark.parametrize("fmt", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("decay", [0.9, 0.95, 0.99, 0.999])
def test_dither_leaves_the_noise_that_is_predicted_at_most(fmt: FloatFormat, decay: float) -> None:
    """Averages of squares, 1500 steps: 0.39 (a = 0.999) to 0.60 of it, the model being choices at random."""
    generator = torch.Generator().manual_seed(0)
    scale = 2.0 ** torch.linspace(-2, 2, 4096)
    v, exact = torch.zeros(4096), torch.zeros(4096, dtype=torch.float64)
    start = torch.zeros((), dtype=torch.int32)
    for count in range(1500):
        x = (1 - decay) * (torch.randn(4096, generator=generator) * scale) ** 2
        turns = phases(v, phase(torch.tensor(count).int(), start))
        v, exact = dithered(decay * v + x, turns, fmt.dtype), decay * exact + x
    error = (v - exact) / exact
    noise = rms_noise(Fraction(decay), fmt)
    assert noise / 3 < error.square().mean().sqrt() < noise
    # It is right on average: of 4096 values the mean is within five of its standard deviations.
    assert error.mean().abs() < 5 * noise / 4096**0.5


def test_noise_without_an_end() -> None:
    assert rms_noise(Fraction(1), BFLOAT16) == rms_noise(Fraction(3, 2), BFLOAT16) == math.inf
    # Of what is computed anew: one rounding.
    assert rms_noise(Fraction(0), BFLOAT16) == pytest.approx(2 * 2.0**-8 / 6**0.5)


def iterated(x: Tensor, g: Tensor) -> Tensor:
    """A matrix polynomial of itself, thirty times: 3**30 operations, were it written out."""
    update = polynomial(g)
    return x - 0.5 * update - update


def polynomial(update: Tensor) -> Tensor:
    for _ in range(30):
        update = update @ update + update
    return update


def test_an_expression_has_an_end() -> None:
    graph = make_fx(iterated)(torch.zeros(2, 2), torch.zeros(2, 2)).graph
    x, g = graph.find_nodes(op="placeholder")
    (result,) = graph.output_node().all_input_nodes
    found = read_recurrence(x, result, {x: "x", g: "g"}, {}, is_parameter=True)
    assert found.kind is Kind.ACCUMULATION
    assert sympy.count_ops(found.expression, visual=False) < LONGEST_EXPRESSION
    assert "(…)" in str(found.expression)


def test_different_values_that_are_cut_off_are_different_symbols() -> None:
    def step(x: Tensor, g: Tensor) -> Tensor:
        return x + polynomial(g) - polynomial(2 * g)

    graph = make_fx(step)(torch.zeros(2, 2), torch.zeros(2, 2)).graph
    x, g = graph.find_nodes(op="placeholder")
    (result,) = graph.output_node().all_input_nodes
    found = read_recurrence(x, result, {x: "x", g: "g"}, {}, is_parameter=True)
    cut = [symbol for symbol in found.expression.free_symbols if "(…)" in str(symbol)]
    assert len(cut) > 10
    assert {abs(found.expression.coeff(symbol)) for symbol in cut} == {1}


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (lambda m, g: m.copy_((m.unsqueeze(0) * 0.5).squeeze(0) + g), Kind.MOVING_AVERAGE),
        (lambda m, g: m.copy_(torch.div(m, 2, rounding_mode="floor") + g), Kind.OTHER),
        (lambda m, g: m.copy_(m.int() + g), Kind.OTHER),
        (lambda m, g: m.copy_(torch.zeros_like(m) + g), Kind.OVERWRITE),
    ],
    ids=["reshaped", "rounded division", "truncated", "of no value"],
)
def test_a_recurrence_is_read_through_what_keeps_the_value_alone(
    step: Callable[..., object], kind: Kind
) -> None:
    (state,) = after(captured(step, "m g"), "analyze").states
    assert state.recurrence.kind is kind
