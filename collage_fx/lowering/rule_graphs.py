"""The graph of a rule, which Inductor is given.

It is made anew, in a shape environment of its own: names of symbols and nodes come out the same in every
process, which is what Inductor's cache goes by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from collage_fx.lowering.rules import Reference, Rule, Symbol
from collage_fx.torch_compat import SymbolicScope, add_to_cache_key, pytree

aten = torch.ops.aten


def graph_of(rule: Rule, scope: SymbolicScope, hint: int) -> GraphModule:
    """Return a rule as a graph."""
    graph = Graph()
    length = _input(graph, "n", scope.length("n", hint)) if rule.flat else None
    first = None
    if rule.is_placed:
        first = _input(graph, "first", scope.tensor((), (), torch.int32, rule.device))
    columns = scope.length("c", hint) if rule.columns else None
    if rule.columns:
        _input(graph, "columns", scope.tensor((), (), torch.int64, rule.device))
    sizes: dict[Symbol, Any] = {Symbol.LENGTH: length, Symbol.COLUMNS: columns, Symbol.FIRST: first}
    numbers = {kind: each.meta["val"] if isinstance(each, Node) else each for kind, each in sizes.items()}
    made: dict[int, Node] = {}
    for i, line in enumerate(rule.lines):
        if line.target is not None:
            continue
        if len(line.args) == 1:
            value = scope.number(f"s{i}", 3 if line.args[0] is torch.SymInt else 0.3)
        else:
            dtype, device, *layout = line.args
            if rule.independent and not layout[0]:
                device = rule.device  # where a number of the host is by then
            size, stride = pytree.tree_map_only(Symbol, numbers.__getitem__, layout)
            value = scope.tensor(size, stride, dtype, device)
        made[i] = _input(graph, f"in{i}", value)
    results = [_input(graph, f"out{i}", None) for i, store in enumerate(rule.stores) if store[0] is None]
    for i, line in enumerate(rule.lines):
        if line.target is None:
            continue
        given = (line.args, dict(line.kwargs))
        given = pytree.tree_map_only(Reference, lambda r: made[r.line], given)
        given = pytree.tree_map_only(Symbol, sizes.__getitem__, given)
        made[i] = graph.call_function(line.target, *given)
        made[i].meta["val"] = scope.run(made[i])
    for destination, value in ((into, made[value]) for into, value in rule.stores):
        stored = value.meta["val"]
        into = results.pop(0) if destination is None else made[destination]
        if destination is None:
            into.meta["val"] = scope.tensor(stored.shape, stored.stride(), stored.dtype, stored.device)
        store = graph.call_function(aten.copy_.default, (into, value))
        store.meta["val"] = into.meta["val"]
    graph.output(())
    gm = GraphModule({}, graph)
    add_to_cache_key(gm, hint=hint)
    return gm


def _input(graph: Graph, name: str, value: Any) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node
