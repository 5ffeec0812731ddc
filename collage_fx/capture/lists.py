"""Operations on lists of tensors, and on stacks of them, as operations for each element.

Note [Lists are no families]
----------------------------
torch.optim gives lists of a model's tensors to ``_foreach_`` functions on a GPU: one operation on all of
them, which makes all updates one component. A rule (:func:`~collage_fx.graph.foreach_rule`) writes it as an
operation for each element. Then updates are components of their own, and equal ones are a family.

Others stack the norms of all tensors, calculate with the stack, and take it apart: ``torch.stack(norms)``,
``ratios = torch.where(...)``, ``ratios.unbind()``. If all that is done to a stack is done to each element by
itself, and only single elements are read, it is written as stacks of one element each.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product, takewhile
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from collage_fx import graph, torch_compat

#: Prefix of the names of torch's functions on lists.
PREFIX = "_foreach_"


def with_lists_apart(gm: GraphModule) -> GraphModule:
    """Return a graph with operations for the elements of lists, if a function has a rule, and of stacks."""
    if not any(_foreach_name(node) or node.target is torch.stack for node in gm.graph.nodes):
        return gm
    apart = graph.copy_of(gm)
    for node in list(apart.graph.nodes):
        if name := _foreach_name(node):
            _take_apart(node, name)
    _take_stacks_apart(apart.graph)
    apart.recompile()
    return apart


def _foreach_name(node: Node) -> str:
    """Return NAME, or NAME_, of a call of ``torch._foreach_NAME``; empty for other nodes."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else ""


def _take_apart(node: Node, name: str) -> None:
    rule, body = graph.foreach_rule(name.removesuffix("_")), node.graph
    readers = [user for user in node.users if getattr(user.target, "__name__", "") == "getitem"]
    if rule is None or len(readers) < len(node.users):
        return
    function, fixed = (rule.func, rule.keywords) if isinstance(rule, partial) else (rule, {})
    made = []
    with body.inserting_before(node):
        for args, kwargs in graph.foreach_calls(*_by_position(name, node.args, node.kwargs)):
            result = body.call_function(function, args, {**fixed, **kwargs})
            result.meta = {**node.meta, "example_value": _value(rule, args, kwargs)}
            if name.endswith("_"):
                written = cast("Node", args[0])
                result = body.call_method("copy_", (written, result))
                result.meta = {**node.meta, "example_value": written.meta["example_value"]}
            made.append(result)
    for reader in readers:
        reader.replace_all_uses_with(made[cast("int", reader.args[1])])
        body.erase_node(reader)
    body.erase_node(node)


def _take_stacks_apart(body: Graph) -> None:
    """Write operations on stacks as operations on stacks of one element each."""
    stacked: dict[Node, int] = {}  # node that is a stack, or made of some -> number of elements
    for node in body.nodes:
        count = _stacked(node)
        of = {stacked[operand] for operand in node.all_input_nodes if operand in stacked}
        if count > 1:
            stacked[node] = count
        elif len(of) == 1 and _is_of_each_element(node, min(of), stacked):
            stacked[node] = min(of)

    def connected(node: Node) -> list[Node]:
        return [node, *(operand for operand in node.all_input_nodes if operand in stacked)]

    for nodes in graph.components(stacked, connected):
        readers = {user: _elements_read(user) for node in nodes for user in node.users if user not in stacked}
        if all(found is not None for found in readers.values()):
            _take_elements_apart(nodes, stacked[nodes[0]], cast("Mapping[Node, Mapping[Node, int]]", readers))


def _stacked(node: Node) -> int:
    """Return the number of tensors that a node stacks, in a first dimension of their own; 0 if none."""
    how = (*node.args[1:], *node.kwargs.items())
    is_first = node.target is torch.stack and how in ((), (0,), (("dim", 0),))
    return len(cast("Sequence[Node]", node.args[0])) if is_first and node.args else 0


def _is_of_each_element(node: Node, count: int, stacked: Mapping[Node, int]) -> bool:
    """Return whether an operation on stacks does the same to each element by itself, and to nothing else."""
    value, first = node.meta.get("example_value"), next(iter(node.args), None)
    if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != count:
        return False
    if isinstance(first, Node) and first not in stacked:
        return False  # it may be written to
    for operand in node.all_input_nodes:
        given = operand.meta.get("example_value")
        rank = given.dim() if isinstance(given, Tensor) else 0
        if rank != value.dim() if operand in stacked else rank >= value.dim():
            return False
    function = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta["example_value"])
    with _mode_of(value), _Called() as called:
        function(*args, **kwargs)
    return called.are_apart


class _Called(torch_compat.TorchDispatchMode):
    """Mode that finds out whether all operators that are called do the same to each index of dimension 0."""

    are_apart = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
        is_reduction = torch.Tag.reduction in func.tags and 0 not in {i % args[0].dim() for i in others}
        reads_tensors = func.namespace != "prim" and any(isinstance(each, Tensor) for each in args)
        self.are_apart &= graph.is_pointwise(func) or (is_reduction and bool(others)) or not reads_tensors
        return func(*args, **(kwargs or {}))


def _elements_read(reader: Node) -> dict[Node, int] | None:
    """Return nodes that are single elements of a stack, with their indices; None if more is read of it."""
    name = reader.target if isinstance(reader.target, str) else getattr(reader.target, "__name__", "")
    is_all = name == "unbind" and len(reader.args) == 1 and not reader.kwargs
    found = dict.fromkeys(reader.users if is_all else [reader])
    indices = {node: node.args[1] for node in found if node.target is operator.getitem}
    is_read = bool(found) and len(indices) == len(found) and all(type(i) is int for i in indices.values())
    return cast("dict[Node, int]", indices) if is_read else None


def _take_elements_apart(
    nodes: Sequence[Node], count: int, readers: Mapping[Node, Mapping[Node, int]]
) -> None:
    """Replace nodes by nodes for single elements, and the readers of their elements by readers of these."""
    body, of = nodes[0].graph, defaultdict[Node, list[Node]](list)
    for node, i in product(nodes, range(count)):

        def single_of(operand: Node, i: int = i) -> Node:
            return of[operand][i] if operand in of else operand

        with body.inserting_before(node):
            single = body.node_copy(node, single_of)
        if node.target is torch.stack:
            single.args = ([cast("Sequence[Node]", node.args[0])[i]],)
        value = node.meta["example_value"]
        with _mode_of(value):
            single.meta = {**node.meta, "example_value": value.new_empty((1, *value.shape[1:]))}
        of[node].append(single)
    for reader, found in readers.items():
        for node, i in found.items():
            with body.inserting_before(node):
                single = body.call_function(operator.getitem, (of[reader.all_input_nodes[0]][i], 0))
            single.meta = node.meta
            node.replace_all_uses_with(single)
    read = dict.fromkeys(each for found in readers.values() for each in found)
    for node in dict.fromkeys([*read, *readers, *reversed(nodes)]):
        body.erase_node(node)


def _by_position(name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return a call's arguments by position, up to the first one left out: rules have names of their own."""
    packet = getattr(torch.ops.aten, PREFIX + name)
    overloads = (torch_compat.schema_of(getattr(packet, each)).arguments for each in packet.overloads())
    arguments = next(each for each in overloads if kwargs.keys() <= {argument.name for argument in each})
    names = [each.name for each in arguments if not each.kwarg_only]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [given.pop(each) for each in takewhile(given.__contains__, names)], given


def _value(rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    args, kwargs = map_arg((args, kwargs), lambda operand: operand.meta["example_value"])
    with _mode_of(*args):
        return rule(*args, **kwargs)


def _mode_of(*values: Any) -> Any:
    mode = torch_compat.detect_fake_mode(each for each in values if isinstance(each, Tensor))
    assert mode is not None, "what Dynamo captures are fake tensors"
    return mode
