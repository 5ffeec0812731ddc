"""Numbers of a step are computed in float64, and rounded to float32 where elements read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from collage_fx.choices import Changes
from collage_fx.graph import graph_text
from collage_fx.graph.program import StepProgram
from collage_fx.passes.normalize import Normalize
from collage_fx.passes.refine_numbers import RefineNumbers
from collage_fx.passes.widen import Widen
from tests.support.programs import captured, only

#: A beta for which ``1 - beta ** t`` has three digits in float32 at the first step.
BETA = 0.99999


def refined(step: Callable[..., Any], symbols: str, changes: Changes = "summed") -> StepProgram:
    program = captured(step, symbols, dtypes=torch.float32)
    program.changes = changes
    return only(program, Normalize(), Widen(), RefineNumbers())


def corrected(p: Tensor, g: Tensor, t: Tensor) -> None:
    t.add_(1)
    p.copy_(g / (1 - BETA**t))


def test_a_bias_correction_is_computed_in_float64() -> None:
    assert_expected_inline(
        graph_text(refined(corrected, "p g t").gm.graph),
        """\
p: float32[4] = input()
g: float32[4] = input()
t: float32[] = input()
to_float64: float64[] = convert_element_type(t, float64)  # refine-numbers
add_1: float64[] = add(to_float64, 1)  # refine-numbers
pow_2: float64[] = pow(0.99999, add_1)  # refine-numbers
sub_1: float64[] = sub(1, pow_2)  # refine-numbers
to_float32: float32[] = convert_element_type(sub_1, float32)  # refine-numbers
div: float32[4] = div(g, to_float32)
copy_: float32[4] = copy_(p, div)
to_float32_1: float32[] = convert_element_type(add_1, float32)  # refine-numbers
copy__1: float32[] = copy_(t, to_float32_1)
return None""",
    )


@pytest.mark.parametrize(("changes", "bound"), [("summed", 2.0**-23), ("as written", 1.0)])
def test_it_is_right_in_the_first_step(changes: Changes, bound: float) -> None:
    """Float32 is off by up to an ulp of beta, relative to 1 - beta: three thousandths here."""
    p, g, t = torch.zeros(4), torch.ones(4), torch.tensor(0.0)
    refined(corrected, "p g t", changes).gm(p, g, t)
    error = (p.double() * (1 - BETA) - 1).abs().max()
    assert error < bound
    assert t == 1
    assert changes == "summed" or error > 1e-4


def test_conditions_are_of_numbers_in_float64() -> None:
    """2**-24 beside 1 is nothing in float32."""

    def step(p: Tensor, g: Tensor, lr: Tensor) -> None:
        p.copy_(torch.where(1 + lr > 1, g, p))

    expected: dict[Changes, float] = {"summed": 1.0, "as written": 0.0}
    for changes, value in expected.items():
        p = torch.zeros(4)
        refined(step, "p g lr", changes).gm(p, torch.ones(4), torch.tensor(2.0**-24))
        assert p.tolist() == [value] * 4


def test_a_constant_stays_where_it_is() -> None:
    """In float64 it would be converted, and computed by a kernel that has no tensor to know its device by."""

    def step(p: Tensor, g: Tensor, t: Tensor) -> None:
        tenth = torch.full((), 0.1)
        p.copy_(g * tenth / (t + tenth))

    graph = refined(step, "p g t").gm.graph
    (product,) = (node for node in graph.nodes if node.target is torch.ops.aten.mul.Tensor)
    (constant,) = (each for each in product.all_input_nodes if not each.meta["val"].dim())
    assert not constant.all_input_nodes
    assert constant.meta["val"].dtype is torch.float32
    (total,) = (node for node in graph.nodes if node.target is torch.ops.aten.add.Tensor)
    assert total.meta["val"].dtype is torch.float64


def test_sums_of_elements_stay_float32() -> None:
    """The norm is what it was; what is made of it is not."""

    def step(p: Tensor, g: Tensor, lr: Tensor) -> None:
        p.mul_(1 - lr * g.norm())

    graph = refined(step, "p g lr").gm.graph
    dtypes = {node.name: node.meta["val"].dtype for node in graph.nodes if node.op == "call_function"}
    norms = [name for name in dtypes if "norm" in name or "sum" in name]
    assert norms
    assert all(dtypes[name] is torch.float32 for name in norms)
    assert any(dtype is torch.float64 for dtype in dtypes.values())
