"""Graph tools: reading functional ATen graphs, and tracing ordinary functions into them.

The graphs are AOTAutograd's inference graphs: functional, every ``meta["val"]`` a FakeTensor (or a symbolic
number), and mutation only in the epilogue, ``copy_(placeholder, new_value)``, one per mutated input.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Target, map_arg
from torch.utils import _pytree as pytree

from collage_fx.formats import is_low_precision
from collage_fx.torch_compat import (
    DATA_ASSIGNMENTS,
    another_fake,
    detect_fake_mode,
    functional_decompositions,
    make_fx,
)

__all__ = [
    "IDENTITIES",
    "PASS_MARK",
    "GraphEditor",
    "assignments",
    "assignments_to_stores",
    "copies_to_inputs",
    "graph_text",
    "is_conversion",
    "is_copy_to_input",
    "is_dense",
    "is_identity",
    "is_low_precision_tensor",
    "mark_new_nodes",
    "operator_of",
    "placeholders",
    "tensor_value",
    "unconverted",
]

aten = torch.ops.aten
prims = torch.ops.prims

#: Operators that pass their first operand through unchanged, but for its dtype and shape.
IDENTITIES = frozenset(
    {
        aten.alias, aten.clone, aten.detach, aten.expand, aten.lift_fresh_copy, aten.view,
        aten.reshape, aten._unsafe_view, prims.convert_element_type, aten._to_copy,
    }
)  # fmt: skip

#: Key in ``node.meta``: the name of the pass that made the node.
PASS_MARK = "collage_fx.pass"


def placeholders(graph: Graph) -> list[Node]:
    """The graph's inputs, in order."""
    return list(graph.find_nodes(op="placeholder"))


def tensor_value(node: Any) -> torch.Tensor | None:
    """The FakeTensor a node stands for, or None if it is not a node or not a tensor."""
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
    """What a cast converts; any other node itself."""
    if not is_conversion(node):
        return node
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def is_identity(node: Node) -> bool:
    """Whether ``node`` has the values of its first operand. ``view.dtype`` reinterprets them."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet in IDENTITIES and node.target is not aten.view.dtype


def operator_of(node: Node) -> Any:
    """The operator that computes ``node``, where that is one of its results, or is wrapped for writing."""
    if node.target is operator.getitem:
        return operator_of(node.all_input_nodes[0])
    return node.args[0] if isinstance(node.target, torch._ops.HigherOrderOperator) else node.target


def copies_to_inputs(graph: Graph) -> dict[Node, Node]:
    """The epilogue: mutated placeholder -> its ``copy_`` node."""
    return {node.args[0]: node for node in graph.nodes if is_copy_to_input(node)}


def mark_new_nodes(graph: Graph, earlier: Collection[Node], *, made_by: str) -> None:
    """Mark the nodes that were not there earlier and that no :class:`GraphEditor` has marked."""
    for node in graph.nodes:
        if node not in earlier and node.op != "output":
            node.meta.setdefault(PASS_MARK, made_by)


def assignments(graph: Graph) -> list[Node]:
    """``p.data = value``, captured as an operation on both."""
    find = graph.find_nodes
    return [node for target in DATA_ASSIGNMENTS for node in find(op="call_function", target=target)]


def assignments_to_stores(gm: GraphModule) -> None:
    """``p.data = value`` becomes ``copy_(p, value)``: the tensor keeps its memory, with the value in it.

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


@dataclass
class GraphEditor:
    """Adds nodes to a graph, with a true ``meta["val"]`` and the mark of the pass that made them.

    Attributes:
        gm: the module whose graph is edited in place.
        made_by: name of the pass.
    """

    gm: GraphModule
    made_by: str
    _traces: dict[Any, GraphModule] = field(default_factory=dict)
    _values: dict[Any, torch.Tensor] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.gm.graph

    def __post_init__(self) -> None:
        values = [node.meta.get("val") for node in placeholders(self.gm.graph)]
        fake_mode = detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])
        assert fake_mode is not None, "a captured graph's inputs are fake tensors"
        self.fake_mode = fake_mode

    def call(self, target: Target, *args: Any, **kwargs: Any) -> Node:
        """One ``call_function`` node at the graph's insertion point, its value computed on fake tensors."""
        node = self.graph.create_node(
            "call_function", target, args, kwargs, name=_readable_name(target, args)
        )
        node.meta["val"] = self._value(target, args, kwargs)
        node.meta[PASS_MARK] = self.made_by
        return node

    def _value(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of an operation on fake tensors; of equal ones, a tensor like the first one's."""
        kind = _kind_of_call(target, args, kwargs)
        if kind is not None and kind in self._values:
            return another_fake(self._values[kind])
        value = self._run(target, args, kwargs)
        if kind is not None and not _is_view(value, args):
            self._values[kind] = value
        return value

    def _run(self, target: Target, args: Any, kwargs: Any) -> Any:
        fake_args, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode:
            return _callable(target)(*fake_args, **fake_kwargs)

    def convert(self, node: Node, dtype: torch.dtype) -> Node:
        """``node`` in ``dtype``: itself where it already is, a cast otherwise."""
        value = tensor_value(node)
        if value is None or value.dtype == dtype:
            return node
        return self.call(prims.convert_element_type.default, node, dtype)

    def store(self, placeholder: Node, value: Node) -> Node:
        """``copy_(placeholder, value)``: a store of the epilogue."""
        node = self.graph.create_node("call_function", aten.copy_.default, (placeholder, value), name="store")
        node.meta["val"] = placeholder.meta["val"]
        node.meta[PASS_MARK] = self.made_by
        return node

    def inline(self, function: Callable[..., Any], *args: Any) -> tuple[Node, ...]:
        """Trace an eager function of tensors and put its operations at the insertion point.

        Args:
            function: takes the tensors that ``args`` stand for and returns a tensor or a flat tuple of
                tensors. It must not look at shapes: it is traced once per kind of argument (dtype, device)
                and replayed for every tensor.
            args: nodes and Python constants. A symbolic number (a ``lr`` that a scheduler changes) becomes a
                0-d tensor.

        Returns:
            one node per tensor returned.
        """
        args = tuple(self._as_tensor(arg) for arg in args)
        traced = self._trace(function, args)
        tensors = iter(arg for arg in args if isinstance(arg, Node))
        replayed: dict[Node, Node] = {}
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                replayed[node] = next(tensors)
            elif node.op == "call_function":
                new_args, new_kwargs = map_arg((node.args, node.kwargs), replayed.__getitem__)
                replayed[node] = self.call(node.target, *new_args, **new_kwargs)
            elif node.op == "output":
                return tuple(replayed[result] for result in pytree.tree_leaves(node.args))
            else:
                raise AssertionError(
                    f"a traced function must be made of operations alone, found {node.format_node()}"
                )
        raise AssertionError("a graph without an output node")

    def _as_tensor(self, arg: Any) -> Any:
        if not isinstance(arg, Node) or tensor_value(arg) is not None:
            return arg
        value = arg.meta["val"]
        dtype = torch.float64 if isinstance(value, (float, torch.SymFloat)) else torch.int64
        return self.call(aten.scalar_tensor.default, arg, dtype=dtype)

    def _trace(self, function: Callable[..., Any], args: Sequence[Any]) -> GraphModule:
        key = (function, *(_signature(arg) for arg in args))
        if key not in self._traces:

            def of_tensors(*tensors: torch.Tensor) -> Any:
                remaining = iter(tensors)
                return function(*(next(remaining) if isinstance(arg, Node) else arg for arg in args))

            tracer = make_fx(of_tensors, decomposition_table=functional_decompositions())
            with self.fake_mode, torch.no_grad():
                # Fresh tensors: make_fx merges the placeholders of one tensor that is passed twice.
                samples = [_sample(arg) for arg in args if isinstance(arg, Node)]
                self._traces[key] = tracer(*samples)
        return self._traces[key]

    def propagate_from(self, changed: Node) -> None:
        """Recompute the values of everything computed from ``changed``, whose strides have changed."""
        stale = {changed}
        for node in self.graph.nodes:
            if (
                node.op == "call_function"
                and not stale.isdisjoint(node.all_input_nodes)
                and not is_copy_to_input(node)
            ):
                node.meta["val"] = self._run(node.target, node.args, node.kwargs)
                stale.add(node)

    def finish(self) -> None:
        """Drop what nobody reads any more.

        The pipeline checks the graph after each pass, and recompiles the module at its end.
        """
        self.graph.eliminate_dead_code()


def _kind_of_call(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the shape, strides and dtype of an elementwise result depend on; None if that is not known."""
    if kwargs or not isinstance(target, torch._ops.OpOverload):
        return None
    if torch.Tag.pointwise not in target.tags and target is not prims.convert_element_type.default:
        return None
    kind: list[Any] = [target]
    for arg in args:
        value = arg.meta["val"] if isinstance(arg, Node) else arg
        if isinstance(value, torch.Tensor):
            numbers = (*value.shape, *value.stride())
            if not all(type(number) is int for number in numbers):
                return None
            kind.append((value.dtype, value.device, value.dim(), numbers))
        elif isinstance(value, torch.dtype):
            kind.append(value)
        else:
            kind.append(type(value))
    return tuple(kind)


def _is_view(value: Any, args: tuple[Any, ...]) -> bool:
    operands = [tensor_value(arg) for arg in args]
    storages = [operand.untyped_storage()._cdata for operand in operands if operand is not None]
    return not isinstance(value, torch.Tensor) or value.untyped_storage()._cdata in storages


def _callable(target: Target) -> Callable[..., Any]:
    assert callable(target), f"{target} is no operator"
    return target


def _readable_name(target: Any, args: tuple[Any, ...]) -> str:
    """``add`` rather than ``add_tensor``, ``to_float32`` rather than ``convert_element_type_default``."""
    if target is prims.convert_element_type.default:
        return f"to_{str(args[1]).removeprefix('torch.')}"
    packet = getattr(target, "overloadpacket", target)
    return str(packet.__name__).strip("_")


def graph_text(graph: Graph) -> str:
    """A graph for people: one line a node, new nodes marked with the pass that made them."""
    return "\n".join(_node_text(node) for node in graph.nodes)


def _node_text(node: Node) -> str:
    value = tensor_value(node)
    kind = "" if value is None else f": {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    mark = f"  # {node.meta[PASS_MARK]}" if PASS_MARK in node.meta else ""
    if node.op == "placeholder":
        return f"{node.name}{kind} = input(){mark}"
    if node.op == "output":
        return f"return {', '.join(str(leaf) for leaf in pytree.tree_leaves(node.args))}".rstrip()
    operands = [_operand_text(arg) for arg in node.args]
    operands += [f"{name}={_operand_text(arg)}" for name, arg in node.kwargs.items()]
    operator_name = getattr(getattr(node.target, "overloadpacket", node.target), "__name__", str(node.target))
    return f"{node.name}{kind} = {operator_name}({', '.join(operands)}){mark}"


def _operand_text(arg: Any) -> str:
    return str(arg).removeprefix("torch.")


def _signature(arg: Any) -> Any:
    value = tensor_value(arg)
    return arg if value is None else (value.dtype, value.device, value.dim() == 0)


def _sample(arg: Node) -> torch.Tensor:
    value = tensor_value(arg)
    assert value is not None, f"not a tensor: {arg}"
    shape = () if value.dim() == 0 else (2,)
    return torch.empty(shape, dtype=value.dtype, device=value.device)
