"""Loads become hi + lo, stores become splits."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from collage_fx.graph.nodes import graph_text, placeholders
from tests.support.programs import after, captured, sgd


def test_sgd() -> None:
    program = after(captured(sgd, "p g"), "compensate-wide")
    made_here = [
        line.split("  #")[0] for line in graph_text(program.gm.graph).splitlines() if "# compensate" in line
    ]
    assert_expected_inline(
        "\n".join(made_here),
        """\
to_float32_2: float32[4] = convert_element_type(p, float32)
to_float32_3: float32[4] = convert_element_type(p_lo, float32)
add_3: float32[4] = add(to_float32_2, to_float32_3)
to_bfloat16_1: bfloat16[4] = convert_element_type(add_2, bfloat16)
to_float32_4: float32[4] = convert_element_type(to_bfloat16_1, float32)
rest: float32[4] = rest(add_2, to_float32_4)
to_bfloat16_2: bfloat16[4] = convert_element_type(rest, bfloat16)
store: bfloat16[4] = copy_(p_lo, to_bfloat16_2)""",
    )


@pytest.mark.parametrize("error_format", ["mcf", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_are_kept(error_format: str, dtype: torch.dtype) -> None:
    program = after(captured(sgd, "p g", dtypes=dtype, error_format=error_format), "pin-roundings")
    p, g = torch.ones(4, dtype=dtype), torch.full((4,), 2.0**-13, dtype=dtype)
    lo = torch.zeros(4, dtype=torch.float32 if error_format == "fp32" else dtype)
    for _ in range(3):
        program.gm(p, g, lo)
    # The sum of the moves is below half an ulp (2**-12 for float16 just below 1), so p stays; all values are
    # exact.
    assert p.tolist() == [1.0] * 4
    assert lo.tolist() == [-3 * 2.0**-14] * 4


def test_the_stored_value_is_read_for_an_optimizers_own_term_alone() -> None:
    """Kahan's term and a float32 sum of the weights both have the 2**-17 that the stored pair cannot hold."""

    def step(p: Tensor, g: Tensor, c: Tensor, total: Tensor) -> None:
        c.add_(g)
        old = p.clone()
        p.add_(c)
        c.add_(old - p)
        total.add_(p)

    dtypes = (*[torch.bfloat16] * 3, torch.float32)
    program = after(captured(step, "p g c total", dtypes=dtypes, strategy="light"), "pin-roundings")
    values = (1.0, 2.0**-8 + 2.0**-15, 2.0**-17, 0.0)
    p, g, c, lo = (torch.full((4,), value).bfloat16() for value in values)
    program.gm(p, g, c, total := torch.zeros(4), lo)
    assert (p.double() + lo.double()).tolist() == [1 + 2.0**-8 + 2.0**-15] * 4
    assert c.tolist() == [2.0**-17] * 4
    assert total.tolist() == [1 + 2.0**-8 + 2.0**-15 + 2.0**-17] * 4


def add(m: torch.Tensor, p: torch.Tensor) -> None:
    m.add_(p)


def test_a_tensor_that_is_only_read_is_read_with_its_error_term() -> None:
    program = captured(add, "m p")
    program.already_compensated = frozenset({1})
    after(program, "pin-roundings")
    assert [node.name for node in placeholders(program.gm.graph)] == ["m", "p", "m_lo", "p_lo"]
    m, p, m_lo = torch.ones(4).bfloat16(), torch.ones(4).bfloat16(), torch.zeros(4).bfloat16()
    p_lo = torch.full((4,), 2.0**-12).bfloat16()
    program.gm(m, p, m_lo, p_lo)
    assert torch.equal(m.double() + m_lo.double(), torch.full((4,), 2 + 2.0**-12, dtype=torch.float64))
    assert torch.equal(p_lo, torch.full((4,), 2.0**-12).bfloat16())


def test_in_native_arithmetic_a_tensor_that_is_only_read_is_its_hi() -> None:
    program = captured(add, "m p", arithmetic="native")
    program.already_compensated = frozenset({1})
    after(program, "pin-roundings")
    assert [node.name for node in placeholders(program.gm.graph)] == ["m", "p", "m_lo"]
