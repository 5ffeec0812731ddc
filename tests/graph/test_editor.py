"""The editor of a graph: how often it traces the functions that it puts there."""

from __future__ import annotations

import pytest
import torch
from functorch import make_fx
from torch import Tensor

from collage_fx.graph import GraphEditor, placeholders


@pytest.mark.parametrize(("is_elementwise", "expected"), [(True, 2), (False, 3)])
def test_an_elementwise_function_is_traced_once_for_all_shapes(
    *, is_elementwise: bool, expected: int
) -> None:
    """Once for each dtype, which takes time; any other function once for each layout, too."""
    traced = []

    def doubled(x: Tensor) -> Tensor:
        traced.append((x.shape, x.dtype))
        return x + x

    tensors = torch.ones(4), torch.ones(2, 3), torch.ones(4), torch.ones(4, dtype=torch.float64)
    gm = make_fx(lambda *given: tuple(each + 1 for each in given), tracing_mode="fake")(*tensors)
    editor = GraphEditor(gm, "doubling")
    with gm.graph.inserting_before(gm.graph.output_node()):
        for node in placeholders(gm.graph):
            if is_elementwise:
                editor.inline(doubled, node)  # as functions are by default
            else:
                editor.inline(doubled, node, elementwise=False)
    assert len(traced) == expected
