"""Products of matrices, called as torch's operators.

Inductor's code on a CPU calls the same operators, copies their results, and takes seconds to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from collage_fx.lowering.rules import Rule
from collage_fx.lowering.transposes import TRANSPOSES

aten = torch.ops.aten

#: Products, and the operators that write them into given memory.
PRODUCTS: dict[Any, Any] = {aten.mm.default: aten.mm.out, aten.bmm.default: aten.bmm.out}

#: Operators that move elements and compute nothing.
MOVES = (*TRANSPOSES, aten.clone.default)


def has_products_alone(rule: Rule) -> bool:
    """Return whether a rule computes nothing but products."""
    return all(line.target in (None, *PRODUCTS, *MOVES) for line in rule.lines)


def called_products(gm: GraphModule) -> Callable[[list[Any]], Any]:
    """Return a function of a list of inputs that calls the products of a graph, which is changed."""
    for store in gm.graph.find_nodes(op="call_function", target=aten.copy_.default):
        into, product = store.args
        if product.target in PRODUCTS and set(into.users) == {store}:
            with gm.graph.inserting_before(product):
                made = gm.graph.call_function(PRODUCTS[product.target], product.args, {"out": into})
            product.replace_all_uses_with(made)
            gm.graph.erase_node(store)
            gm.graph.erase_node(product)
    gm.recompile()
    call = gm.forward
    return lambda inputs: call(*inputs)
