"""Double-word algorithms along the path, float32 where there is none, nothing dropped."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from collage_fx.numerics.arithmetic import (
    add_double_words,
    double_word_constant,
    grow,
    multiply_double_words,
)
from collage_fx.numerics.formats import storage_format
from collage_fx.numerics.operators import split
from tests.support.exact import ENCODINGS, fractions
from tests.support.programs import after, captured, sgd

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sgd_is_grow(dtype: torch.dtype) -> None:
    program = after(captured(sgd, "p g", dtypes=dtype, arithmetic="native"), "pin-roundings")
    p, g = torch.randn(64).to(dtype), torch.randn(64).to(dtype)
    lo = torch.zeros_like(p)
    expected = grow(p, lo, g * -0.5)
    program.gm(p, g, lo)
    assert torch.equal(p, expected[0])
    assert torch.equal(lo, expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_decay_by_a_number_that_the_format_lacks(dtype: torch.dtype) -> None:
    program = after(
        captured(lambda v, g: v.mul_(0.999), "v g", dtypes=dtype, arithmetic="native"), "pin-roundings"
    )
    v, g = torch.rand(64).to(dtype) + 1, torch.zeros(64, dtype=dtype)
    lo = torch.zeros_like(v)
    increment = [torch.tensor(x, dtype=dtype) for x in double_word_constant(0.999 - 1, dtype)]
    expected = add_double_words(v, lo, *multiply_double_words(v, lo, *increment))
    program.gm(v, g, lo)
    assert torch.equal(v, expected[0])
    assert torch.equal(lo, expected[1])


def scaled(v: Tensor, g: Tensor, lr: Tensor) -> None:
    v.mul_(lr)


def scaled_and_added(v: Tensor, g: Tensor, lr: Tensor) -> None:
    v.mul_(lr).add_(g)


def with_number(step: Callable[..., Any], number: float) -> Callable[..., Any]:
    """``step`` with its number in the graph."""
    return lambda v, g, lr: step(v, g, number)


def run(step: Callable[..., Any], number: float, size: int, dtype: torch.dtype) -> list[list[Fraction]]:
    """Exact values, an element each: of the word before the step, of what is added, and of the word after."""
    program = after(
        captured(step, "v g lr", dtypes=dtype, arithmetic="native", shape=(size,), strategy="full"),
        "pin-roundings",
    )
    torch.manual_seed(0)
    v, lo = split(torch.randn(size), dtype, dtype)
    g = (torch.randn(size) * 10 ** -(4 * torch.rand(size))).to(dtype)
    before = sums(v, lo)
    program.gm(v, g, torch.tensor(number), lo)
    return [before, fractions(g), sums(v, lo)]


def sums(hi: Tensor, lo: Tensor) -> list[Fraction]:
    return [high + low for high, low in zip(fractions(hi), fractions(lo), strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [False, True], ids=["in the graph", "given to it"])
@pytest.mark.parametrize("step", [scaled, scaled_and_added])
def test_error_of_what_is_scaled_by_a_number(
    step: Callable[..., Any], given: bool, dtype: torch.dtype
) -> None:
    """The bound of Note [Decay is an increment], and what underflows: a constant, three products."""
    u, quantum = ENCODINGS[dtype].unit_roundoff, ENCODINGS[dtype].quantum
    for number in (1 - 1e-6, 0.999, 0.9, 0.67, 0.66, 1.001, 1.99, 2.01, 10.0, 1e-3, -0.999):
        c = fractions(torch.tensor(number))[0] if given else Fraction(number)
        d = c - 1 if abs(c - 1) <= abs(c) / 2 else c
        results = run(step if given else with_number(step, number), number, 1000, dtype)
        for x, g, met in zip(*results, strict=True):
            y = g if step is scaled_and_added else 0
            bound = 3 * abs(c * x + y) + 3 * abs(d * x + y) + (8 + Fraction(2) ** -24 / u**2) * abs(d * x)
            underflow = (abs(x) + 3) * quantum / 2
            assert abs(met - (c * x + y)) <= u**2 * (1 + 16 * u) * bound + underflow


def scaled_and_added_in_float32(v: Tensor, g: Tensor, lr: Tensor) -> None:
    """A step that computes as torch 2.11 decomposes ``addcdiv``."""
    v.copy_((v * lr).float() + g.float())


@pytest.mark.parametrize("scaled_and_added", [scaled_and_added, scaled_and_added_in_float32])
@pytest.mark.parametrize("given", [False, True], ids=["in the graph", "given to it"])
def test_decay_below_the_last_bit_arrives_on_average(
    given: bool, scaled_and_added: Callable[..., Any]
) -> None:
    """A sum is rounded to its last bit, up or down alike: what is below it arrives on average.

    The last bit is at most u ulp(hi)/2 <= 4 u**2 for a value below 8, so that the mean over n elements is off
    by less than ``4 u**2 / sqrt(12 n)`` in its standard deviation, an eighth of the decay; five of them pass.
    A decay that is rounded before the update is added does not arrive at all.
    """
    number, n, u = 1 - 1e-6, 1 << 15, 2.0**-8
    step = scaled_and_added if given else with_number(scaled_and_added, number)
    before, added, after_step = run(step, number, n, torch.bfloat16)
    c = fractions(torch.tensor(number))[0] if given else Fraction(number)
    triples = list(zip(before, added, after_step, strict=True))
    meant = sum(abs((c - 1) * x) for x, _, _ in triples) / n
    arrived = sum((1 if x < 0 else -1) * (met - x - y) for x, y, met in triples) / n
    assert max(map(abs, after_step)) < 8
    assert abs(arrived - meant) <= 5 * 4 * u**2 / (12 * n) ** 0.5 < meant / 1.5


STEPS: dict[str, Callable[..., Any]] = {
    "lerp": lambda v, g: v.lerp_(g, 0.01),
    "maximum of the decayed": lambda v, g: v.copy_(torch.maximum(v * 0.999, g)),
    "clamped sum": lambda v, g: v.add_(g, alpha=1e-3).clamp_(-4, 4),
    "through float32": lambda v, g: v.copy_((v.float() + 1e-3 * g.float()).to(v.dtype)),
    "divided": lambda v, g: v.div_(1.001).add_(g, alpha=1e-3),
    "subtracted from": lambda v, g: v.copy_(g * 1e-3 - v).neg_(),
    "reshaped on the way": lambda v, g: v.copy_((v.view(2, -1) * 0.999).view(-1) + g * 1e-3),
    "in pieces on the way": lambda v, g: v.copy_(torch.cat(v.split([24, 40])) + g * 1e-3),
    "wide update": lambda v, g: v.add_(g.float().mul(1e-3).to(v.dtype)),
    "number added": lambda v, g: v.add_(1e-3),
    "padded on the way": lambda v, g: v.copy_(pad(v, (0, 1), value=1.0)[:-1] + g * 1e-3),
    "factor": lambda v, g: v.mul_(1 - 1e-3 * g),
    "divisor": lambda v, g: v.div_(1 + 1e-3 * g),
    "exponential": lambda v, g: v.mul_(torch.exp(-1e-3 * g)),
    "factor of a float32 value": lambda v, g: v.copy_((v.float() * (1 - 1e-3 * g)).to(v.dtype)),
    "old value among terms of its size": lambda v, g: v.copy_(0.5 * v + 0.5 * (v + g) - 0.499 * g),
    "elements that are set": lambda v, g: v.index_add_(0, torch.arange(64), g, alpha=1e-3),
    "absolute value": lambda v, g: v.sub_(g, alpha=1e-3).abs_(),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STEPS)
def test_no_operation_on_the_path_drops_the_error_term(name: str, dtype: torch.dtype) -> None:
    """Hi + lo follows the float64 recurrence to a few u**2 a step, where hi alone would lose u a step."""
    program = after(
        captured(STEPS[name], "v g", dtypes=dtype, arithmetic="native", shape=(64,), strategy="full"),
        "pin-roundings",
    )
    assert program.states[0].refusal == ""
    torch.manual_seed(0)
    v, g = torch.rand(64).add(1).to(dtype), torch.rand(64).add(0.5).to(dtype)
    lo = torch.zeros_like(v)
    exact, steps = v.double(), 100
    for _ in range(steps):
        program.gm(v, g, lo)
        STEPS[name](exact, g.double())
    u = float(storage_format(dtype).unit_roundoff)
    # Per step: at most three double-word operations of at most 7 u**2 each, relative to a value in [1/2, 4],
    # and an update of about 1e-3 whose own two roundings in the storage format are u each (float16: plus an
    # underflow of at most 2**-24).
    bound = steps * (3 * 7 * u**2 * 4 + 1.6e-3 * 2 * u + 2.0**-24)
    if name == "maximum of the decayed":
        bound += (
            steps * u
        )  # |g| itself is taken over at once; no error, but near-ties may fall either way within u
    assert (v.double() + lo.double() - exact).abs().max() <= bound


def anchored(p: Tensor, z: Tensor, a: Tensor, g: Tensor) -> None:
    z.add_(g)
    p.copy_(a - 1e-3 * z)


def anchored_by_a_factor(p: Tensor, z: Tensor, a: Tensor, g: Tensor) -> None:
    z.add_(g)
    p.copy_(a * torch.exp(-1e-3 * z))


def pulled(p: Tensor, z: Tensor, a: Tensor, g: Tensor) -> None:
    """Half of a number near p is added, whose own roundings are of the size of those of p."""
    z.add_(g)
    p.mul_(0.5).add_(0.5 * (a - 1e-3 * z))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [anchored, anchored_by_a_factor, pulled])
def test_a_value_that_is_not_added_to(step: Callable[..., None], dtype: torch.dtype) -> None:
    """The parameter is off by the rounding to a pair in each step, and by what z is off, which is hi + lo."""
    program = after(
        captured(step, "p z a g", dtypes=dtype, arithmetic="native", shape=(64,), strategy="plus"),
        "pin-roundings",
    )
    torch.manual_seed(0)
    p = torch.rand(64).add(1).to(dtype)
    z, a, g = torch.zeros_like(p), p.clone(), torch.rand(64).add(0.5).to(dtype)
    z_lo, p_lo = torch.zeros_like(p), torch.zeros_like(p)
    exact = [tensor.double() for tensor in (p, z, a, g)]
    assert [state.info.name for state in program.compensated] == ["p", "z"]
    for _ in range(20):
        program.gm(p, z, a, g, p_lo, z_lo)
        step(*exact)
    u = float(storage_format(dtype).unit_roundoff)
    # A pair of numbers below 4 is off by u**2 of them; z by 3 u**2 of up to 32 a step, and hi of it by u.
    off_z = 20 * 3 * u**2 * 32
    bound = 2 * 7 * u**2 * 4 + 1e-3 * off_z + 2.0**-23
    assert (z.double() + z_lo.double() - exact[1]).abs().max() <= off_z
    assert (p.double() + p_lo.double() - exact[0]).abs().max() <= bound
    assert (p.double() - exact[0]).abs().max() > bound  # which hi alone is not within


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_made_of_another_state_reads_the_whole_of_it(dtype: torch.dtype) -> None:
    """As the weights of a schedule-free optimizer do: both parts of z count, to the last bit of a pair."""

    def moved(p: Tensor, z: Tensor, a: Tensor, g: Tensor) -> None:
        z.add_(g)
        p.copy_(a - z)

    program = after(
        captured(moved, "p z a g", dtypes=dtype, arithmetic="native", shape=(64,), strategy="plus"),
        "pin-roundings",
    )
    torch.manual_seed(0)
    p, z, a, g = (torch.rand(64).add(1).to(dtype) for _ in range(4))
    z_lo, p_lo = torch.zeros_like(p), torch.zeros_like(p)
    for _ in range(5):
        program.gm(p, z, a, g, p_lo, z_lo)
    bound = 8 * 3 * float(storage_format(dtype).unit_roundoff) ** 2  # of a sum of two pairs, below 8
    off = p.double() + p_lo.double() - (a.double() - z.double() - z_lo.double())
    assert off.abs().max() <= bound < z_lo.abs().max()


@pytest.mark.parametrize(
    "operation",
    [lambda v, g: v @ g, lambda v, g: v @ g - 1e-3 * g, lambda v, g: (v @ g).float() - 1e-3 * g],
    ids=["product", "and a step", "and a float32 step"],
)
def test_an_operator_of_the_storage_format_on_the_path_is_reported(
    operation: Callable[..., Tensor],
) -> None:
    def step(v: Tensor, g: Tensor) -> None:
        v.copy_(operation(v, g))

    program = after(
        captured(step, "v g", arithmetic="native", shape=(4, 4), strategy="full"), "compensate-native"
    )
    assert "no double-word algorithm" in program.states[0].refusal
