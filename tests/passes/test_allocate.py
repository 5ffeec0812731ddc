"""Error terms become inputs behind the captured ones."""

import pytest
import torch

from collage_fx.graph.nodes import placeholders
from tests.support.programs import after, captured, sgd


@pytest.mark.parametrize(
    ("error_format", "names", "dtype"),
    [
        ("mcf", ["p_lo"], torch.bfloat16),
        ("exact", ["p_rest", "p_count", "p_start"], torch.int16),
        ("fp32", ["p_lo"], torch.float32),
    ],
)
def test_inputs_are_appended(error_format: str, names: list[str], dtype: torch.dtype) -> None:
    program = after(captured(sgd, "p g", error_format=error_format), "allocate")
    inputs = placeholders(program.gm.graph)
    assert [node.name for node in inputs] == ["p", "g", *names]
    assert inputs[2].meta["val"].dtype == dtype
    assert inputs[2].meta["val"].shape == inputs[0].meta["val"].shape


def test_nothing_to_allocate() -> None:
    program = after(captured(sgd, "m g"), "analyze")
    program.states[0].chosen_format = None
    before = str(program.gm.graph)
    from collage_fx.passes.allocate import Allocate

    Allocate().run(program)
    assert str(program.gm.graph) == before
