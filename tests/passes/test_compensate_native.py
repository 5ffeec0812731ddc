"""Double-word algorithms along the path, float32 where there is none, nothing dropped."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx.arithmetic import double_word_constant, grow, multiply_double_words
from collage_fx.formats import storage_format
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
    constant = [torch.tensor(x, dtype=dtype) for x in double_word_constant(0.999, dtype)]
    expected = multiply_double_words(v, lo, *constant)
    program.gm(v, g, lo)
    assert torch.equal(v, expected[0])
    assert torch.equal(lo, expected[1])


STEPS: dict[str, Callable[..., Any]] = {
    "lerp": lambda v, g: v.lerp_(g, 0.01),
    "maximum of the decayed": lambda v, g: v.copy_(torch.maximum(v * 0.999, g)),
    "clamped sum": lambda v, g: v.add_(g, alpha=1e-3).clamp_(-4, 4),
    "through float32": lambda v, g: v.copy_((v.float() + 1e-3 * g.float()).to(v.dtype)),
    "divided": lambda v, g: v.div_(1.001).add_(g, alpha=1e-3),
    "subtracted from": lambda v, g: v.copy_(g * 1e-3 - v).neg_(),
    "reshaped on the way": lambda v, g: v.copy_((v.view(2, -1) * 0.999).view(-1) + g * 1e-3),
    "wide update": lambda v, g: v.add_(g.float().mul(1e-3).to(v.dtype)),
    "number added": lambda v, g: v.add_(1e-3),
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


def test_a_matrix_on_the_path_is_reported() -> None:
    def step(v: Tensor, g: Tensor) -> None:
        v.copy_(v @ g)

    program = after(
        captured(step, "v g", arithmetic="native", shape=(4, 4), strategy="full"), "compensate-native"
    )
    assert "no double-word algorithm" in program.states[0].refusal
