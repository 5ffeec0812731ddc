"""Split operations on lists of tensors, such as ``torch._foreach_add_``, into operations on tensors.

Note [Lists are no families]
----------------------------
torch.optim gives lists of a model's tensors to ``_foreach_`` functions on a GPU: one operation on all of
them, which makes all updates one component. A rule (:func:`~collage_fx.graph.foreach_rule`) writes it as an
operation for each element. Then updates are components of their own, and equal ones are a family.
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
    overloads = (schema_of(getattr(packet, each)).arguments for each in packet.overloads())
    arguments = next(each for each in overloads if kwargs.keys() <= {argument.name for argument in each})
    names = [each.name for each in arguments if not each.kwarg_only]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [given.pop(each) for each in takewhile(given.__contains__, names)], given


def _value(rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    args, kwargs = map_arg((args, kwargs), lambda operand: operand.meta["example_value"])
    mode = detect_fake_mode(each for each in args if isinstance(each, Tensor))
    assert mode is not None, "what Dynamo captures are fake tensors"
    with mode:
        return rule(*args, **kwargs)
