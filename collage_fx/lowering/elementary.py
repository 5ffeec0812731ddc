"""Graphs for Inductor, which is given none of our operators: their eager functions are traced instead.

Inductor drops a conversion to low precision and back, but no operation on integers, which our roundings are:
Note [Rounding must survive lowering].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from functorch import make_fx
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from collage_fx.graph import GraphEditor, once, placeholders
from collage_fx.numerics import BLOCK_OPERATORS, ELEMENTWISE, PLACED, places
from collage_fx.torch_compat import (
    copy_cache_facts,
    enable_python_dispatcher,
    functional_decompositions,
    realize_results_of,
)

realize_results_of(once)


def _at_places(function: Callable[..., Tensor], like: Tensor, *numbers: Tensor | None) -> Tensor:
    """Compute a function of each element's place in memory, whose bits are taken, and of numbers.

    Of places as indices Inductor would compute with numbers beyond Triton's int32.
    """
    return function(places(like).view(torch.float32).view(torch.int32), *numbers)


#: Our operators, and functions that compute the same.
OUR_OPERATORS: dict[Any, Any] = {
    **ELEMENTWISE,
    **BLOCK_OPERATORS,
    **{operator: partial(_at_places, function) for operator, function in PLACED.items()},
}


def in_elementary_operations(gm: GraphModule) -> GraphModule:
    """Return a graph without our operators that computes the same; the graph itself if it has none."""
    if not any(node.target in OUR_OPERATORS for node in gm.graph.nodes):
        return gm
    inputs = [node.meta["val"] for node in placeholders(gm.graph)]
    with GraphEditor(gm, "elementary").fake_mode, enable_python_dispatcher(), torch.no_grad():
        made = make_fx(Interpreter(gm).run, functional_decompositions() | OUR_OPERATORS)(*inputs)
    copy_cache_facts(gm, made)
    return made
