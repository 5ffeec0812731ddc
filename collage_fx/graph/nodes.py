"""Predicates of, and queries for, the nodes of a functional ATen graph.

The graphs are AOTAutograd's inference graphs: functional, every ``meta["val"]`` a FakeTensor (or a symbolic
number), and mutation only in the epilogue, ``copy_(placeholder, new_value)``, one per mutated input.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from collage_fx.numerics import is_low_precision
from collage_fx.torch_compat import DATA_ASSIGNMENTS, OpOverload, copy_cache_facts

aten = torch.ops.aten
prims = torch.ops.prims

#: Key in ``node.meta``: the name of the pass that made the node.
PASS_MARK = "collage_fx.pass"


def placeholders(graph: Graph) -> list[Node]:
    """The graph's inputs, in order."""
    return list(graph.find_nodes(op="placeholder"))


def tensor_value(node: Any) -> torch.Tensor | None:
    """The FakeTensor that a node stands for; None for a value that is no node, or no tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def is_low_precision_tensor(node: Any) -> bool:
    """Whether ``node`` is a tensor of bfloat16 or float16."""
    value = tensor_value(node)
    return value is not None and is_low_precision(value.dtype)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill a region of memory, in any order, each of them once."""
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dimensions if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_copy_to_input(node: Node) -> bool:
    """Whether ``node`` is one of the epilogue's ``copy_(placeholder, value)``."""
    return (
        node.op == "call_function"
        and node.target is aten.copy_.default
        and isinstance(node.args[0], Node)
        and node.args[0].op == "placeholder"
    )


def is_conversion(node: Node) -> bool:
    """Whether ``node`` is a cast, ``convert_element_type(x, dtype)``."""
    return node.op == "call_function" and node.target is prims.convert_element_type.default


def unconverted(node: Node) -> Node:
    """The operand of a cast; any other node itself."""
    if not is_conversion(node):
        return node
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def operator_of(node: Node) -> Any:
    """The operator that computes a node, also where the node is one of several results of it."""
    if node.target is operator.getitem:
        return operator_of(node.all_input_nodes[0])
    return node.args[0] if node.args and isinstance(node.args[0], OpOverload) else node.target


def copies_to_inputs(graph: Graph) -> dict[Node, Node]:
    """The epilogue as a mapping: mutated placeholder -> its ``copy_`` node."""
    return {node.args[0]: node for node in graph.nodes if is_copy_to_input(node)}


def stored(store: Node) -> Node:
    """The node whose value a ``copy_`` of the epilogue stores."""
    value = store.args[1]
    assert isinstance(value, Node)
    return value


def reached(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """The nodes that some nodes lead to in one step or more: by ``node.users``, or another relation."""
    found, waiting = set[Node](), [*starts]
    while waiting:
        fresh = set(following(waiting.pop())) - found
        found |= fresh
        waiting += fresh
    return found


def operands_of(node: Node) -> list[Node]:
    """The nodes that a node is computed from, as a relation for :func:`reached`."""
    return node.all_input_nodes


def operator_name(target: Any) -> str:
    """The name of what a node calls, without the overload: ``add`` of ``aten.add.Tensor``."""
    return str(getattr(getattr(target, "overloadpacket", target), "__name__", target))


def has_elements(node: Any) -> bool:
    """Whether a node is a tensor of one dimension or more, and so no number."""
    value = tensor_value(node)
    return value is not None and value.dim() > 0


def mark_new_nodes(graph: Graph, earlier: Collection[Node], *, made_by: str) -> None:
    """Mark the nodes that were not there earlier and that no :class:`GraphEditor` has marked."""
    for node in graph.nodes:
        if node not in earlier and node.op != "output":
            node.meta.setdefault(PASS_MARK, made_by)


def assignments(graph: Graph) -> list[Node]:
    """The nodes that ``p.data = value`` has been captured as."""
    find = graph.find_nodes
    return [node for target in DATA_ASSIGNMENTS for node in find(op="call_function", target=target)]


def assignments_to_stores(gm: GraphModule) -> None:
    """Replace ``p.data = value`` by ``copy_(p, value)``: the tensor keeps its memory, with the value in it.

    Left alone where that would be another thing: an input that is assigned as it is shares its memory from
    then on, and a value of another dtype or shape does not fit.
    """
    for node in assignments(gm.graph):
        destination, source = node.args
        to, value = tensor_value(destination), tensor_value(source)
        assert to is not None
        assert value is not None
        assert isinstance(source, Node)
        if source is destination:
            gm.graph.erase_node(node)
        elif source.op != "placeholder" and to.dtype == value.dtype and to.shape == value.shape:
            node.target = aten.copy_.default
            node.meta["val"] = to
    gm.recompile()


def is_number(node: Node) -> bool:
    """Whether a node stands for one number: a 0-d tensor or a symbolic int or float."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def copy_of(gm: GraphModule) -> GraphModule:
    """A copy of a module: a graph of its own over the same constants, with the same metadata.

    ``copy.deepcopy`` would copy the constants too, which newer versions refuse in a fake tensor mode.
    """
    copied = GraphModule(gm, copy.deepcopy(gm.graph))
    copied.meta.update(gm.meta)
    copy_cache_facts(gm, copied)
    return copied
