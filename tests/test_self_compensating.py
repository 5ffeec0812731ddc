"""Optimizers that compensate themselves are at least as accurate compiled as they are eagerly."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from collage_fx import CollageBackend, full_value
from collage_fx.errors import InvalidOptionError
from collage_fx.numerics import ERROR_FORMATS
from collage_fx.options.budgets import TOLERANCE

optimi = pytest.importorskip("optimi", reason="torch-optimi, of the extra 'compat', is not installed")

STEPS = 40

#: Learning rates with which 16-bit weights lose most of a step, and the modules of the rules.
RATES = {"AdamW": 5e-5, "Lion": 5e-5, "SGD": 5e-5, "Ranger": 2e-4}
MODULES = {"AdamW": "adam", "Lion": "lion", "SGD": "sgd", "Ranger": "ranger"}
CASES = [("AdamW", False), ("Lion", False), ("SGD", True), ("Ranger", False), ("Ranger", True)]
cases = pytest.mark.parametrize(("name", "foreach"), CASES)

#: Dynamo does not capture their steps, which use an exception.
RECORDED = ("AdamW", "Ranger")

#: Of as many elements as are packed.
START = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def gradients() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(START.shape, generator=generator)
    for _ in range(STEPS):
        yield (direction + torch.randn(START.shape, generator=generator) / 3).bfloat16()


def displacement(
    name: str,
    dtype: torch.dtype,
    *,
    foreach: bool,
    backend: CollageBackend | None = None,
    with_own_term: bool = False,
) -> Tensor:
    """How far the parameter goes, with or without what the optimizer itself keeps beside it."""
    torch._dynamo.reset()
    p = torch.nn.Parameter(START.to(dtype, copy=True))
    options = {"lr": RATES[name], "kahan_sum": True, "triton": False, "foreach": foreach}
    optimizer = getattr(optimi, name)([p], **options)
    step: Any = optimizer.step if backend is None else torch.compile(optimizer.step, backend=backend)
    for gradient in gradients():
        p.grad = gradient.to(dtype)
        step()
    value = full_value(p).detach()
    if with_own_term:
        value = value + optimizer.state[p]["kahan_comp"].double()
    return value - START.double()


def in_float64(name: str, *, foreach: bool) -> Tensor:
    """The rule that the optimizer has for 16-bit parameters, as it is written, in float64."""
    as_if = SimpleNamespace(**{**vars(torch), "bfloat16": torch.float64})
    with mock.patch(f"optimi.{MODULES[name]}.torch", as_if):
        return displacement(name, torch.float64, foreach=foreach, with_own_term=False)


def error(moved: Tensor, exact: Tensor) -> float:
    return float((moved - exact).norm() / exact.norm())


def rounding(exact: Tensor) -> float:
    """Of one rounding to a pair: half a last bit of lo, which is u times a quarter of ulp(hi) at most."""
    exponents = torch.frexp(START.double())[1]  # |weight| < 2**exponent, and ulp(hi) = 2**(exponent - 8)
    return float((2.0**-8 * 2.0 ** (exponents - 8) / 4).norm() / exact.norm())


@cases
def test_compiled_is_what_its_rule_is_in_exact_arithmetic(name: str, foreach: bool) -> None:
    """To within one rounding in all, as what that leaves is in the optimizer's own term."""
    rule = in_float64(name, foreach=foreach)
    compiled = error(displacement(name, torch.bfloat16, foreach=foreach, backend=CollageBackend()), rule)
    print(f"{name}, foreach={foreach}: {compiled:.4f}, where one rounding is {rounding(rule):.4f}")
    assert compiled <= rounding(rule)


@pytest.mark.parametrize(
    ("name", "foreach", "arithmetic", "strategy"),
    [
        ("Lion", False, "wide", "plus"),
        ("Lion", False, "wide", "light"),
        ("Lion", False, "native", "light"),
        ("Lion", False, "native", "plus"),
        ("AdamW", False, "native", "plus"),
        ("SGD", True, "native", "plus"),
        ("Ranger", False, "native", "plus"),
    ],
)
def test_compiled_is_no_worse_than_eagerly(name: str, foreach: bool, arithmetic: Any, strategy: Any) -> None:
    """Nor than eagerly with the term that the optimizer itself keeps beside the parameter."""
    rule = in_float64(name, foreach=foreach)
    backend = CollageBackend(strategy=strategy, arithmetic=arithmetic)
    compiled = error(displacement(name, torch.bfloat16, foreach=foreach, backend=backend), rule)
    eager, eager_pair = (
        error(displacement(name, torch.bfloat16, foreach=foreach, with_own_term=own), rule)
        for own in (False, True)
    )
    print(f"{name}: {compiled:.4f}; eagerly {eager:.4f}, with its own term {eager_pair:.4f}")
    assert compiled <= min(eager, eager_pair)


@pytest.mark.parametrize(
    "options",
    [
        {"error_format": "mcf"},
        {"error_format": "byte"},
        {"strategy": "light", "error_format": "byte"},
        {"strategy": "light", "state": "block16"},
        {"strategy": "light", "state": "block8"},
    ],
    ids=lambda options: " ".join(options.values()),
)
@pytest.mark.parametrize(("name", "foreach"), [*CASES[:3], CASES[4]])
def test_formats_of_fewer_bytes_are_no_worse_than_eagerly(
    name: str, foreach: bool, options: dict[str, Any]
) -> None:
    """To within one rounding, to the pair or the byte, of which its own term has what is left."""
    backend = CollageBackend(**options)
    if name in RECORDED and "state" in options:
        with pytest.raises(InvalidOptionError, match="packs state, which needs a step"):
            displacement(name, torch.bfloat16, foreach=foreach, backend=backend)
        return
    rule = in_float64(name, foreach=foreach)
    compiled = error(displacement(name, torch.bfloat16, foreach=foreach, backend=backend), rule)
    eager = error(displacement(name, torch.bfloat16, foreach=foreach, with_own_term=True), rule)
    print(f"{name}, {options}: {compiled:.4f}; eagerly, with its own term, {eager:.4f}")
    last = rounding(rule)
    if options.get("error_format") == "byte":
        distance = 2 * float(ERROR_FORMATS["byte"].error_bound(torch.bfloat16).relative)
        last = float(distance * START.double().norm() / rule.norm())
    assert compiled <= math.hypot(eager, last)
    of_own_term = [row for row in backend.report().tensors if row.symbol == "kahan_comp"]
    assert of_own_term
    assert not any(row.packed for row in of_own_term)


@pytest.mark.parametrize("budget", [8, 5.1])
@pytest.mark.parametrize(("name", "foreach"), [("AdamW", False), ("Lion", False), ("SGD", True)])
def test_a_budget_counts_the_optimizers_own_term(name: str, foreach: bool, budget: float) -> None:
    """Which is not packed: a step is within the budget, or refused."""
    backend = CollageBackend(bytes_per_parameter=budget)
    try:
        displacement(name, torch.bfloat16, foreach=foreach, backend=backend)
    except InvalidOptionError as refusal:
        needed = float(re.search(r"(?:takes|holds) ([\d.]+)", str(refusal)).group(1))  # type: ignore[union-attr]
        assert needed > budget
    else:
        assert backend.report().bytes_per_parameter()["total"] <= budget * (1 + TOLERANCE)


def test_ranger_has_another_rule_for_16_bits_without_foreach() -> None:
    """What is compiled follows the one; its row in docs/compatibility.md compares it with the other."""
    exact = displacement("Ranger", torch.float64, foreach=False)
    one, other = (in_float64("Ranger", foreach=foreach) for foreach in (False, True))
    assert error(other, exact) < 1e-9
    compiled = displacement("Ranger", torch.bfloat16, foreach=False, backend=CollageBackend())
    print(f"from its own rule: {error(compiled, one):.4f}; from the other: {error(compiled, exact):.4f}")
    assert error(one, exact) > 0.2
    assert abs(error(compiled, exact) - error(one, exact)) <= STEPS * rounding(exact)
