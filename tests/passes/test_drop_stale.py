"""Error terms of sums that have been zeroed are not read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.programs import after, captured, moving_average, sgd
from tests.support.twin import ExactInterpreter


def accumulate(s: Tensor, g: Tensor) -> None:
    s.add_(g)


@pytest.mark.parametrize("arithmetic", ["wide", "native"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_zeroed_sum_starts_from_zero(arithmetic: str, dtype: torch.dtype) -> None:
    program = after(captured(accumulate, "s g", dtypes=dtype, arithmetic=arithmetic), "pin-roundings")  # type: ignore[arg-type]
    total = torch.tensor([0, -0.0, 1, 1], dtype=dtype)
    error = torch.tensor([2.0**-12, -(2.0**-12), 2.0**-13, 0], dtype=dtype)
    gradient = torch.full((4,), 0.5, dtype=dtype)
    ExactInterpreter(program.gm).run(total, gradient, error)
    assert (total.double() + error.double()).tolist() == [0.5, 0.5, 1.5 + 2.0**-13, 1.5]


def test_what_hi_is_too_coarse_for_is_kept_with_fp32_terms() -> None:
    """float16 sums below its smallest subnormal are all in the error term."""
    program = after(captured(accumulate, "s g", dtypes=torch.float16, error_format="fp32"), "pin-roundings")
    half_quantum = 2.0**-25
    total, error = torch.zeros(4).half(), torch.tensor([half_quantum, -half_quantum / 3, 2.0**-24, -1])
    ExactInterpreter(program.gm).run(total, torch.zeros(4).half(), kept := error.clone())
    assert (total.double() + kept.double()).tolist() == [*error[:2].tolist(), 0, 0]


def test_parameters_and_averages_whose_error_is_a_fraction_of_hi_are_left_alone() -> None:
    for step, symbols, error_format in ((sgd, "p g", "mcf"), (moving_average, "m g", "exact")):
        program = captured(step, symbols, strategy="full", error_format=error_format)
        before = str(after(program, "compensate-wide").gm.graph)
        program = captured(step, symbols, strategy="full", error_format=error_format)
        assert str(after(program, "drop-stale").gm.graph) == before
