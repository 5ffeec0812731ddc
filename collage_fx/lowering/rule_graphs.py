"""The graph of a rule, which Inductor is given.

It is made anew, in a shape environment of its own: names of symbols and nodes come out the same in every
process, which is what Inductor's cache goes by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from collage_fx.codegen import REVISION
from collage_fx.lowering.rules import Reference, Rule, Symbol
from collage_fx.numerics import REST
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
    made: dict[int, Node] = {}
    for i, line in enumerate(rule.lines):
        if line.target is None:
            made[i] = _input(graph, f"in{i}", _value_of_input(rule, line.args, scope, f"s{i}", sizes))
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
    _use_rest(graph)
    gm = GraphModule({}, graph)
    add_to_cache_key(gm, revision=REVISION, hint=hint)
    return gm


def _use_rest(graph: Graph) -> None:
    """Replace traces of ``arithmetic.rest`` by the operator ``rest``, whose code is shorter."""
    for node in graph.find_nodes(op="call_function", target=aten.where.self):
        if (operands := _operands_of_rest(*node.args)) is not None:
            with graph.inserting_before(node):
                made = graph.call_function(REST, operands)
            made.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(made)
    graph.eliminate_dead_code()


def _operands_of_rest(finite: Any, difference: Any, zero: Any) -> tuple[Node, Node] | None:
    """Return ``value`` and ``hi`` of ``where(abs(hi) < inf, value - hi, 0)``; None for another ``where``."""
    if not all(isinstance(node, Node) for node in (finite, difference, zero)):
        return None
    if difference.target is not aten.sub.Tensor or difference.kwargs:
        return None
    value, hi = difference.args
    is_rest = (
        (finite.target, finite.args[1:]) == (aten.lt.Scalar, (math.inf,))
        and isinstance(magnitude := finite.args[0], Node)
        and (magnitude.target, magnitude.args) == (aten.abs.default, (hi,))
        and zero.target is aten.full.default
        and zero.args[1] == 0
        and all(isinstance(each, Node) and each.meta["val"].dtype == torch.float32 for each in (value, hi))
        and value.meta["val"].shape == hi.meta["val"].shape
    )
    return (value, hi) if is_rest else None


def _input(graph: Graph, name: str, value: Any) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def _value_of_input(
    rule: Rule, layout: tuple[Any, ...], scope: SymbolicScope, name: str, sizes: Mapping[Symbol, Any]
) -> Any:
    if len(layout) == 1:
        return scope.number(name, 3 if layout[0] is torch.SymInt else 0.3)
    dtype, device, *size_and_stride = layout
    if rule.independent and not layout[2]:
        device = rule.device  # where a number of the host is by then
    numbers = {kind: each.meta["val"] if isinstance(each, Node) else each for kind, each in sizes.items()}
    size, stride = pytree.tree_map_only(Symbol, numbers.__getitem__, size_and_stride)
    return scope.tensor(size, stride, dtype, device)
