"""Predicates and queries for the nodes of a functional ATen graph.

The graphs are AOTAutograd's inference graphs: functional, every ``meta["val"]`` a FakeTensor (or a symbolic
number), and mutation only in the epilogue, ``copy_(placeholder, new_value)``, one per mutated input.
"""

from __future__ import annotations

import copy
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, TypeVar

import torch
from torch.fx import Graph, GraphModule, Node

from collage_fx.numerics import is_low_precision
from collage_fx.torch_compat import DATA_ASSIGNMENTS, OpOverload, copy_cache_facts, pytree

aten = torch.ops.aten
prims = torch.ops.prims

#: Key in ``node.meta``: the name of the pass that made the node.
PASS_MARK = "collage_fx.pass"

_Item = TypeVar("_Item")


def placeholders(graph: Graph) -> list[Node]:
    """Return the graph's inputs, in order."""
    return list(graph.find_nodes(op="placeholder"))


def tensor_value(node: Any) -> torch.Tensor | None:
    """Return the FakeTensor that a node stands for; None if it is not a node or not a tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def statement_of(nodes: Iterable[Node]) -> str:
    """Return the first statement known of nodes, ``file:line in name: text``; empty if there is none."""
    for node in nodes:
        stack = node.meta.get("stack_trace") or ""
        found = re.findall(r'^ *File "(.+)", line (\d+), in (.+)(?:\n    (.+))?', stack, re.MULTILINE)
        if found:
            file, line, name, text = found[-1]
            return f"{file}:{line} in {name}" + (f": {text}" if text else "")
    return ""


def is_low_precision_tensor(node: Any) -> bool:
    """Return whether ``node`` is a tensor of bfloat16 or float16."""
    value = tensor_value(node)
    return value is not None and is_low_precision(value.dtype)


def is_float32_tensor(node: Any) -> bool:
    """Return whether ``node`` is a float32 tensor."""
    value = tensor_value(node)
    return value is not None and value.dtype is torch.float32


def is_copy_to_input(node: Node) -> bool:
    """Return whether ``node`` is a store of the epilogue: ``copy_(placeholder, value)``."""
    destination = node.args[0] if node.target is aten.copy_.default else None
    return isinstance(destination, Node) and destination.op == "placeholder"


def is_conversion(node: Node) -> bool:
    """Return whether ``node`` is a cast, ``convert_element_type(x, dtype)``."""
    return node.op == "call_function" and node.target is prims.convert_element_type.default


def unconverted(node: Node) -> Node:
    """Return the operand of a cast; any other node unchanged."""
    return node.all_input_nodes[0] if is_conversion(node) else node


def operator_of(node: Node) -> Any:
    """Return the operator that computes a node, also if the node is only a part of its result."""
    if node.target is operator.getitem:
        return operator_of(node.all_input_nodes[0])
    return node.args[0] if node.args and isinstance(node.args[0], OpOverload) else node.target


def copies_to_inputs(graph: Graph) -> dict[Node, Node]:
    """Return the epilogue as a mapping from each mutated placeholder to its ``copy_`` node."""
    return {node.args[0]: node for node in graph.nodes if is_copy_to_input(node)}


def stored(store: Node) -> Node:
    """Return the node whose value a ``copy_`` of the epilogue stores."""
    value = store.args[1]
    assert isinstance(value, Node)
    return value


def reached(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return the nodes reached from ``starts`` by applying ``following`` at least once."""
    found, waiting = set[Node](), [*starts]
    while waiting:
        fresh = set(following(waiting.pop())) - found
        found |= fresh
        waiting += fresh
    return found


def operands_of(node: Node) -> list[Node]:
    """Return the nodes that a node is computed from; a relation for :func:`reached`."""
    return node.all_input_nodes


def readers_of(node: Node) -> list[Node]:
    """Return the nodes that read a value, without stores; a relation for :func:`reached`."""
    return [user for user in node.users if not is_copy_to_input(user)]


def made_of(*values: Node, up_to: Collection[Node] = ()) -> set[Node]:
    """Return values and the nodes that they are computed from; ``up_to``: nodes not to look behind."""
    return {*values, *reached(values, lambda node: [] if node in up_to else operands_of(node))}


def components(items: Iterable[_Item], values_of: Callable[[_Item], Iterable[Hashable]]) -> list[list[_Item]]:
    """Split items into connected components: two items are connected if they have a value in common.

    The components are in the order of their first items, and each one's items in the order given. An item
    without values is a component by itself. ``values_of`` gives an operation's operands and results, without
    values that updates share without being one update, such as a learning rate.
    """
    items = list(items)
    above = [*range(len(items))]  # union-find: a chain of items to the one that stands for a component

    def root(number: int) -> int:
        while above[number] != number:
            above[number] = number = above[above[number]]
        return number

    first: dict[Hashable, int] = {}
    for number, item in enumerate(items):
        for value in values_of(item):
            above[root(number)] = root(first.setdefault(value, number))
    found: dict[int, list[_Item]] = defaultdict(list)
    for number, item in enumerate(items):
        found[root(number)].append(item)
    return list(found.values())


def operator_name(target: Any) -> str:
    """Return the name of a node's target without the overload: ``add`` for ``aten.add.Tensor``."""
    return str(getattr(getattr(target, "overloadpacket", target), "__name__", target))


def has_elements(node: Any) -> bool:
    """Return whether a node is a tensor of at least one dimension, so not a number."""
    value = tensor_value(node)
    return value is not None and value.dim() > 0


def assignments(graph: Graph) -> list[Node]:
    """Return the nodes that ``p.data = value`` was captured as."""
    find = graph.find_nodes
    return [node for target in DATA_ASSIGNMENTS for node in find(op="call_function", target=target)]


def assignments_to_stores(gm: GraphModule) -> None:
    """Replace ``p.data = value`` by ``copy_(p, value)``: the tensor keeps its memory and takes the value.

    Not where the meaning would change: ``p.data = input`` shares memory, and a dtype or shape may be another.
    """
    for node in assignments(gm.graph):
        operands: tuple[Any, ...] = node.args
        destination, source = operands
        to, value = destination.meta["val"], source.meta["val"]
        if source is destination:
            gm.graph.erase_node(node)
        elif source.op != "placeholder" and to.dtype == value.dtype and to.shape == value.shape:
            node.target = aten.copy_.default
            node.meta["val"] = to
    gm.recompile()


def is_number(node: Node) -> bool:
    """Return whether a node stands for one number: a 0-d tensor or a symbolic int or float."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def copy_of(gm: GraphModule) -> GraphModule:
    """Return a copy of a module: its own graph over the same constants, with the same metadata.

    ``copy.deepcopy`` would copy the constants too, which newer versions refuse in a fake tensor mode.
    """
    copied = GraphModule(gm, copy.deepcopy(gm.graph))
    copied.meta.update(gm.meta)
    copy_cache_facts(gm, copied)
    return copied


def graph_text(graph: Graph) -> str:
    """Return a readable text of a graph: one line per node, new nodes marked with the pass that made them."""
    return "\n".join(_node_text(node) for node in graph.nodes)


def _node_text(node: Node) -> str:
    value = tensor_value(node)
    kind = "" if value is None else f": {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    mark = f"  # {node.meta[PASS_MARK]}" if PASS_MARK in node.meta else ""
    if node.op == "placeholder":
        return f"{node.name}{kind} = input(){mark}"
    if node.op == "output":
        return f"return {', '.join(str(leaf) for leaf in pytree.tree_leaves(node.args))}".rstrip()
    given = [*(("", arg) for arg in node.args), *((f"{name}=", arg) for name, arg in node.kwargs.items())]
    operands = [name + str(arg).removeprefix("torch.") for name, arg in given]
    return f"{node.name}{kind} = {operator_name(node.target)}({', '.join(operands)}){mark}"
