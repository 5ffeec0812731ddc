"""Elementary operations, which Inductor is given in the place of our operators, and its code for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config, metrics
from torch.fx import GraphModule

from collage_fx import CollageBackend, graph
from collage_fx.lowering.elementary import in_elementary_operations
from collage_fx.lowering.kernels import HINT, INLINED, forget_kernels
from collage_fx.lowering.lower import inductor_settings
from collage_fx.lowering.rule_graphs import graph_of
from collage_fx.lowering.schedule import lower_in_parts
from collage_fx.torch_compat import SymbolicScope
from tests.support import triton_offline as offline
from tests.support.printed import by_inductor
from tests.support.substitutes import no_kernel_over_a_table, rules_compiled, settings_given_to_inductor
from tests.support.training import Descent, parameters, set_gradients


def test_facts_of_the_cache_stay_with_a_graph() -> None:
    """A graph made for another length has another key, before and after our operators are replaced."""
    params = parameters(shapes=[(3,), (3,)])
    set_gradients(params)
    forget_kernels()
    with rules_compiled() as rules:
        torch.compile(Descent(params).step, backend=CollageBackend())()
    rule = next(each for each in rules if each.flat)
    with SymbolicScope() as scope:
        for hint in (HINT, 8):
            given = graph_of(rule, scope, hint)
            made = in_elementary_operations(given)
            assert [vars(each)["collage_fx_hint"] for each in (given, made)] == [hint, hint]
            assert has_ours(given)
            assert not has_ours(made)
            assert in_elementary_operations(made) is made


def has_ours(gm: GraphModule) -> bool:
    """Whether a graph has operators of ours."""
    return any("collage_fx" in str(node.target) for node in gm.graph.nodes)


def nodes_of(function: Any) -> int:
    """Return how many nodes a function of a vector has in Inductor, before they are fused."""
    torch._dynamo.reset()
    metrics.reset()
    with config.patch(fx_graph_cache=False):
        torch.compile(function, backend=by_inductor)(torch.ones(64))
    return metrics.ir_nodes_pre_fusion


@pytest.mark.parametrize(("operations", "is_node"), [(8, False), (9, True)])
def test_a_value_of_more_than_eight_operations_is_computed_once(operations: int, is_node: bool) -> None:
    """A load counts."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        for i in range(operations - 1):
            x = x * x if i == 0 else x.neg() if i % 2 else x.abs()
        return x + 1.0, x + 2.0

    assert nodes_of(function) == 2 + is_node


def test_a_value_that_is_kept_is_a_node() -> None:
    assert nodes_of(lambda x: (graph.once(x.exp()) + 1.0,)) == 2


def test_only_native_arithmetic_asks_for_divisions_that_are_rounded_to_nearest() -> None:
    native, wide = inductor_settings("native"), inductor_settings("wide")
    assert native == {**wide, "eager_numerics.division_rounding": True}


@pytest.mark.parametrize(("state", "recomputes"), [("block8", True), ("bf16", False)])
def test_kernels_with_blocks_recompute_their_values_on_a_gpu(state: Any, recomputes: bool) -> None:
    """Their largest magnitudes need a loop of their own. No kernel is combined with another."""

    class Backend(CollageBackend):
        def lower(self, program: Any, example_inputs: Any, inductor_options: Any) -> Any:
            with offline.imaginary_cuda():
                lower_in_parts(offline.to_cuda(program.gm), always=True)
            return super().lower(program, example_inputs, inductor_options)

    params = parameters(shapes=[(128, 64), (128, 64)])
    set_gradients(params)
    optimizer = torch.optim.AdamW(params, lr=0.1, capturable=True)
    with no_kernel_over_a_table(), settings_given_to_inductor() as seen:
        torch.compile(optimizer.step, backend=Backend(strategy="light", state=state))()
    settings = seen[-1]
    assert settings["combo_kernels"] is False
    assert (INLINED.items() <= settings.items()) is recomputes
