"""What arrives of a long run of small updates. ``pytest -rP`` shows the measured figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collage_fx import CollageBackend
from collage_fx.choices import ErrorFormatName
from tests.support.figures import Record, note
from tests.support.update_error import decay_achieved, displacement, second_moment_errors

DTYPES = (torch.bfloat16, torch.float16)
BETAS = (0.95, 0.98, 0.99, 0.999)

# ------------------------------------------------------------ net displacement
#
# 300 steps of at most 1e-5 = 2**-16.6. Plain bfloat16 keeps a step only where ulp(p)/2 is smaller than it,
# that is for |p| < 2**-8. The last bit of a pair is worth 2**-8 ulp(p)/2 * 2 at most, 2**-15 for p between
# 1 and 2: a single step is rounded to that, in a random direction as long as the gradients are noisy, so
# that 300 of them leave an error of the order of sqrt(300/12) 2**-15 / 2e-3 = 8 % for the largest weights,
# and less for others.


def test_plain_bfloat16_hardly_moves(record_property: Record) -> None:
    error = displacement(CollageBackend(strategy="none")).error
    note(record_property, "displacement error, plain bfloat16", error)
    assert error >= 0.9


@pytest.mark.parametrize(
    ("strategy", "error_format", "dtype", "bound"),
    [
        ("light", "mcf", torch.bfloat16, 0.08),
        ("full", "mcf", torch.bfloat16, 0.08),
        ("full", "exact", torch.bfloat16, 0.006),
        ("full", "fp32", torch.bfloat16, 0.006),
        ("light", "mcf", torch.float16, 0.006),  # 22 bits, nearly float32's 24
    ],
)
def test_displacement(
    strategy: Any, error_format: ErrorFormatName, dtype: torch.dtype, bound: float, record_property: Record
) -> None:
    met = displacement(CollageBackend(strategy=strategy, error_format=error_format), dtype=dtype)
    note(record_property, f"displacement error, {strategy} {error_format} wide {dtype}", met.error)
    note(
        record_property,
        f"displacement error of hi alone, {strategy} {error_format} wide {dtype}",
        met.error_of_hi,
    )
    assert met.error <= bound


@pytest.mark.parametrize("strategy", ["light", "full"])
def test_displacement_native(strategy: Any, record_property: Record) -> None:
    """The bound is that of ``wide``; a step that lost its weight decay would miss it."""
    met = displacement(CollageBackend(strategy=strategy, arithmetic="native"))
    note(record_property, f"displacement error, {strategy} mcf native", met.error)
    note(record_property, "share of weight decay in the displacement", met.decay)
    assert met.error <= 0.08 < met.decay


# --------------------------------------------------------------- second moment

WITHIN = 2e-3


def test_second_moment(record_property: Record) -> None:
    errors = second_moment_errors(CollageBackend(strategy="plus"), BETAS)
    for beta2, values in errors.items():
        note(record_property, f"second moment error, plus wide, beta2 = {beta2}", values[-1])
        assert max(values) <= WITHIN


def test_second_moment_native(record_property: Record) -> None:
    """1 - beta2 is rounded to a pair, (1 - beta2) g**2 to u by itself, of which v averages many."""
    errors = second_moment_errors(CollageBackend(strategy="plus", arithmetic="native"), (0.95, 0.999))
    for beta2, values in errors.items():
        note(record_property, f"second moment error, plus native, beta2 = {beta2}", values[-1])
        assert max(values) <= WITHIN


def test_second_moment_in_plain_bfloat16(record_property: Record) -> None:
    """It cannot decay where (1 - beta2) v is below half an ulp of v: at beta2 = 0.999, never."""
    errors = second_moment_errors(CollageBackend(strategy="none"), BETAS)
    for beta2, values in errors.items():
        note(record_property, f"second moment error, plain bfloat16, beta2 = {beta2}", values[-1])
        assert min(values) > WITHIN
    assert errors[0.999][-1] >= 1


# ---------------------------------------------------------------- weight decay


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arithmetic", ["wide", "native"])
def test_weight_decay_arrives(arithmetic: Any, dtype: torch.dtype, record_property: Record) -> None:
    share = decay_achieved(CollageBackend(strategy="light", arithmetic=arithmetic), dtype=dtype)
    note(record_property, f"weight decay achieved, light {arithmetic} {dtype}", share)
    assert abs(share - 1) <= 0.005


def test_weight_decay_of_plain_bfloat16_does_not_arrive(record_property: Record) -> None:
    """0.9999 p rounds to p = 1: the tie to its neighbour below is at 1 - 2**-9 = 0.998."""
    share = decay_achieved(CollageBackend(strategy="none"))
    note(record_property, "weight decay achieved, plain bfloat16", share)
    assert share == 0
