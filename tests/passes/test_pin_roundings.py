"""Roundings that are read back are explicit, roundings that are only stored are not."""

from typing import Any

import pytest
import torch

from collage_fx.graph import GraphEditor, Retyper, placeholders
from collage_fx.numerics import ROUND_TO_STORAGE
from tests.support.programs import after, captured, moving_average, sgd

aten = torch.ops.aten


def _roundings(program_after: torch.fx.GraphModule) -> int:
    return sum(node.target is ROUND_TO_STORAGE for node in program_after.graph.nodes)


def test_wide_rounds_hi_once() -> None:
    assert _roundings(after(captured(sgd, "p g"), "pin-roundings").gm) == 1


def test_a_plain_state_rounds_at_its_store() -> None:
    assert _roundings(after(captured(moving_average, "m g", strategy="light"), "pin-roundings").gm) == 0


def test_native_rounds_every_operation_of_a_plain_state_but_the_stored_one() -> None:
    program = after(captured(moving_average, "m g", strategy="light", arithmetic="native"), "pin-roundings")
    assert _roundings(program.gm) == 1
    m, g = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    expected = m.clone().mul_(0.5).add_(g)  # eager bfloat16 rounds every operation
    program.gm(m, g)
    assert torch.equal(m, expected)


def test_no_low_precision_value_is_computed_with() -> None:
    for arithmetic in ("wide", "native"):
        graph = after(captured(sgd, "p g", arithmetic=arithmetic), "pin-roundings").gm.graph
        for node in graph.nodes:
            low = node.op == "call_function" and node.meta["val"].dtype == torch.bfloat16
            assert not low or node.target in (
                torch.ops.prims.convert_element_type.default,
                torch.ops.aten.copy_.default,
            )


@pytest.mark.parametrize("number", [1.01, 257])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_tensor_of_one_number_has_the_number_as_it_is_stored(number: Any, is_named: bool) -> None:
    gm = captured(lambda p, g: p.add_(g), "p g").gm
    editor, (p, g) = GraphEditor(gm, "test"), placeholders(gm.graph)
    (total,) = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    with gm.graph.inserting_before(total):
        arguments = ((), {"fill_value": number}) if is_named else ((number,), {})
        total.replace_input_with(g, editor.call(aten.full_like.default, p, *arguments[0], **arguments[1]))
    Retyper(editor, rounding=True).run()
    gm.recompile()
    values = torch.full((4,), -1.0, dtype=torch.bfloat16)
    expected = values + torch.full_like(values, number)
    gm(values, values)
    assert torch.equal(values, expected)
