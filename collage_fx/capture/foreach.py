"""Split operations on lists of tensors, such as ``torch._foreach_add_``, into operations on tensors.

Note [Lists are no families]
----------------------------
torch.optim loops over a model's tensors on the CPU, and gives lists of them to ``_foreach_`` functions on a
GPU. Such a function is one operation on all tensors, which makes all updates one component. A rule
(:func:`~collage_fx.graph.foreach_rule`) says what the function does to each element, so that it can be
written as one operation for each. Then updates are components of their own, and equal ones are a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from collage_fx.graph import copy_of, foreach_calls, foreach_rule
from collage_fx.torch_compat import detect_fake_mode, schema_of

PREFIX = "_foreach_"


def with_lists_apart(gm: GraphModule) -> GraphModule:
    """Return a copy of a captured graph with an operation for each element of its lists.

    Without lists, it is the graph itself. A function that has no rule is kept.
    """
    if not any(_foreach_name(node) for node in gm.graph.nodes):
        return gm
    apart = copy_of(gm)
    for node in list(apart.graph.nodes):
        if name := _foreach_name(node):
            _take_apart(node, name)
    apart.recompile()
    return apart


def _foreach_name(node: Node) -> str:
    """Return NAME, or NAME_, of a call of ``torch._foreach_NAME``; empty for other nodes."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else ""


def _take_apart(node: Node, name: str) -> None:
    """Replace a ``_foreach_`` node by an operation for each element, if there is a rule."""
    rule, graph = foreach_rule(name.removesuffix("_")), node.graph
    readers = [user for user in node.users if getattr(user.target, "__name__", "") == "getitem"]
    if rule is None or len(readers) < len(node.users):
        return
    function, fixed = (rule.func, rule.keywords) if isinstance(rule, partial) else (rule, {})
    made = []
    with graph.inserting_before(node):
        for args, kwargs in foreach_calls(*_by_position(name, node.args, node.kwargs)):
            result = graph.call_function(function, args, {**fixed, **kwargs})
            result.meta = {**node.meta, "example_value": _value(rule, args, kwargs)}
            if name.endswith("_"):
                written = cast("Node", args[0])
                result = graph.call_method("copy_", (written, result))
                result.meta = {**node.meta, "example_value": written.meta["example_value"]}
            made.append(result)
    for reader in readers:
        reader.replace_all_uses_with(made[cast("int", reader.args[1])])
        graph.erase_node(reader)
    graph.erase_node(node)


def _by_position(name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return a call's arguments by position, up to the first one left out: rules have names of their own."""
    packet = getattr(torch.ops.aten, PREFIX + name)
    for overload in packet.overloads():
        arguments = schema_of(getattr(packet, overload)).arguments
        if kwargs.keys() <= {each.name for each in arguments}:
            names = [each.name for each in arguments if not each.kwarg_only]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            return [given.pop(each) for each in takewhile(given.__contains__, names)], given
    return args, kwargs


def _value(rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Compute the fake value of a rule's result from the fake values of its operands."""
    args, kwargs = map_arg((args, kwargs), lambda operand: operand.meta["example_value"])
    mode = detect_fake_mode(each for each in args if isinstance(each, Tensor))
    assert mode is not None, "what Dynamo captures are fake tensors"
    with mode:
        return rule(*args, **kwargs)
