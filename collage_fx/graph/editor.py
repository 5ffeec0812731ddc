"""The graph editor: adds nodes by tracing ordinary functions of tensors; and the operator ``once``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch import make_fx
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Target, map_arg

from collage_fx.graph import nodes
from collage_fx.graph.operator_facts import passed_operand
from collage_fx.numerics import ErrorFormat, define_operator
from collage_fx.torch_compat import (
    FakeTensorMode,
    detect_fake_mode,
    functional_decompositions,
    pytree,
    real_tensors,
)

#: ``once(x)``: ``x``, computed once and kept in memory, rather than in every place that reads it.
once = define_operator("once(Tensor x) -> Tensor", torch.clone)


@functools.cache
def trace_of(
    function: Callable[..., Any], dtypes: tuple[torch.dtype, ...], constants: tuple[Any, ...] = ()
) -> GraphModule:
    """Trace a function of tensors of these dtypes, and of constants, into elementary operations."""
    tracer = make_fx(lambda *x: function(*x, *constants), decomposition_table=functional_decompositions())
    with FakeTensorMode(), torch.no_grad():
        return tracer(*(torch.empty(2, dtype=dtype) for dtype in dtypes))


@dataclass
class GraphEditor:
    """Editor that adds nodes with a correct ``meta["val"]`` and the mark of the pass, ``made_by``."""

    #: Context manager: operations on real tensors, for numbers known at compile time.
    real_tensors = staticmethod(real_tensors)

    gm: GraphModule
    made_by: str
    _traces: dict[Any, GraphModule] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.gm.graph

    def __post_init__(self) -> None:
        values = [node.meta.get("val") for node in nodes.placeholders(self.gm.graph)]
        fake_mode = detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])
        assert fake_mode is not None, "a captured graph's inputs are fake tensors"
        self.fake_mode = fake_mode

    def call(self, target: Target, *args: Any, **kwargs: Any) -> Node:
        """Add a ``call_function`` node at the graph's insertion point; compute its value on fake tensors."""
        is_cast = target is nodes.prims.convert_element_type.default
        name = f"to_{args[1]}".replace("torch.", "") if is_cast else nodes.operator_name(target).strip("_")
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta["val"] = self._run(target, args, kwargs)
        node.meta[nodes.PASS_MARK] = self.made_by
        return node

    def _run(self, target: Target, args: Any, kwargs: Any) -> Any:
        assert callable(target), f"{target} is no operator"
        fake_args, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode:
            return target(*fake_args, **fake_kwargs)

    def convert(self, node: Node, dtype: torch.dtype) -> Node:
        """Return a node's value in ``dtype``: the node itself if it has that dtype, otherwise a cast."""
        value = nodes.tensor_value(node)
        if value is None or value.dtype == dtype:
            return node
        return self.call(nodes.prims.convert_element_type.default, node, dtype)

    def store(self, placeholder: Node, value: Node) -> Node:
        """Add a store to the epilogue: ``copy_(placeholder, value)``."""
        given = (placeholder, value)
        node = self.graph.create_node("call_function", nodes.aten.copy_.default, given, name="store")
        node.meta["val"] = placeholder.meta["val"]
        node.meta[nodes.PASS_MARK] = self.made_by
        return node

    def inline(
        self, function: Callable[..., Any], *args: Any, elementwise: bool = True, **kwargs: Any
    ) -> tuple[Node, ...]:
        """Trace an eager function, put its operations at the insertion point, and return a node per result.

        The function returns a tensor or a flat tuple of tensors. Its arguments are nodes and constants; a
        symbolic number (a ``lr`` that a scheduler changes) becomes a 0-d tensor. An ``elementwise`` function
        ignores shapes: it is traced once per dtype and device of its arguments and replayed for every tensor.
        Any other function is traced once per layout.
        """
        values = [self._as_tensor(value) for value in (*args, *kwargs.values())]
        traced = self._trace(function, values, tuple(kwargs), elementwise=elementwise)
        tensors = iter(value for value in values if isinstance(value, Node))
        replayed: dict[Node, Node] = {}
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                replayed[node] = next(tensors)
            elif node.op == "call_function":
                new_args, new_kwargs = map_arg((node.args, node.kwargs), replayed.__getitem__)
                replayed[node] = self.call(node.target, *new_args, **new_kwargs)
            else:
                assert node.op == "output", f"a traced function is operations alone, not {node.format_node()}"
        return tuple(replayed[result] for result in pytree.tree_leaves(traced.graph.output_node().args))

    def _as_tensor(self, arg: Any) -> Any:
        if not isinstance(arg, Node) or nodes.tensor_value(arg) is not None:
            return arg
        value = arg.meta["val"]
        dtype = torch.float64 if isinstance(value, (float, torch.SymFloat)) else torch.int64
        return self.call(nodes.aten.scalar_tensor.default, arg, dtype=dtype)

    def _trace(
        self, function: Callable[..., Any], values: Sequence[Any], names: Sequence[str], *, elementwise: bool
    ) -> GraphModule:
        """Trace a function of values, the last of them keyword arguments."""
        signatures = [_signature(value, elementwise=elementwise) for value in values]
        key = (function, names, *signatures)
        if key not in self._traces:

            def of_tensors(*tensors: torch.Tensor) -> Any:
                remaining, first = iter(tensors), len(values) - len(names)
                given = [next(remaining) if isinstance(value, Node) else value for value in values]
                return function(*given[:first], **dict(zip(names, given[first:], strict=True)))

            tracer = make_fx(of_tensors, decomposition_table=functional_decompositions())
            with self.fake_mode, torch.no_grad():
                # Fresh tensors: make_fx merges the placeholders of one tensor that is passed twice.
                pairs = zip(signatures, values, strict=True)
                kinds = (kind for kind, value in pairs if isinstance(value, Node))
                samples = [
                    torch.empty_strided(size, stride, dtype=dtype, device=device)
                    for dtype, device, size, stride in kinds
                ]
                self._traces[key] = tracer(*samples)
        return self._traces[key]

    def replace(self, node: Node, result: Node) -> None:
        """Replace a node, for all that read it, by a result whose strides may differ."""
        node.replace_all_uses_with(result)
        if result.meta["val"].stride() != node.meta["val"].stride():
            self.propagate_from(result)

    def propagate_from(self, changed: Node) -> None:
        """Recompute the values of all nodes computed from ``changed``, whose strides have changed."""
        stale = {changed}
        for node in self.graph.nodes:
            is_stale = node.op == "call_function" and not stale.isdisjoint(node.all_input_nodes)
            if is_stale and not nodes.is_copy_to_input(node):
                node.meta["val"] = self._run(node.target, node.args, node.kwargs)
                stale.add(node)


def _signature(arg: Any, *, elementwise: bool) -> Any:
    """Return ``(dtype, device, sizes, strides)`` of a node's stand-in for a trace; a constant unchanged."""
    value = nodes.tensor_value(arg)
    if value is None:
        return arg
    if elementwise:
        return value.dtype, value.device, (2,) * (value.dim() > 0), (1,) * (value.dim() > 0)
    return value.dtype, value.device, tuple(map(int, value.shape)), tuple(map(int, value.stride()))


def read_whole(editor: GraphEditor, hi: Node, auxiliaries: Sequence[Node], fmt: ErrorFormat) -> None:
    """Make every float32 reader of an input read its whole value: hi and its error terms joined.

    If hi is not kept, all other readers read the whole value in the input's dtype.
    """
    readers = nodes.readers_of(hi)
    # float32 state may be converted to other dtypes, too.
    loads = [user for user in readers if nodes.is_conversion(user) and nodes.is_float32_tensor(user)]
    if not (loads if fmt.keeps_hi else readers):
        return
    first = loads[0] if fmt.keeps_hi else nodes.placeholders(editor.graph)[-1].next
    with editor.graph.inserting_before(first):
        (value,) = editor.inline(fmt.join, hi, *auxiliaries, elementwise=fmt.is_elementwise)
        rounded = value if fmt.keeps_hi else editor.convert(value, hi.meta["val"].dtype)
    for load in loads:
        load.replace_all_uses_with(value)
    if not fmt.keeps_hi:
        for reader in readers:
            reader.replace_input_with(hi, rounded)


def read_before_overwriting(editor: GraphEditor) -> None:
    """Keep stores and results of an input's old value from reading the new value.

    ``old = s1.clone(); s1.add_(g); s2.copy_(old)`` is captured as ``copy_(s1, add); copy_(s2, s1)``.
    Inductor's passes would remove a clone (and plain Inductor of torch 2.13 stores the new value), so the old
    value is kept as two negations, which Inductor does not remove.
    """
    stores = list(nodes.copies_to_inputs(editor.graph).values())
    overwritten: set[Node] = set()
    for store in stores:
        destination, source = store.args[:2]
        assert isinstance(destination, Node)
        if isinstance(source, Node) and memory_read(source) in overwritten:
            with editor.graph.inserting_before(stores[0]):
                store.update_arg(1, _twice_negated(editor, source))
        overwritten.add(destination)
    output = editor.graph.output_node()
    for result in output.all_input_nodes:
        if memory_read(result) in overwritten:
            with editor.graph.inserting_before(stores[0]):
                output.replace_input_with(result, _twice_negated(editor, result))


def memory_read(node: Any) -> Any:
    """Return the node whose memory a compiler may read for a node: copies and views are its operand's."""
    while (operand := passed_operand(node)) is not None:
        node = operand
    return node


def _twice_negated(editor: GraphEditor, node: Node) -> Node:
    """Add ``-(-x)``, in integers for a mask."""
    is_mask = node.meta["val"].dtype is torch.bool
    negate = nodes.aten.logical_not.default if is_mask else nodes.aten.neg.default
    return editor.call(negate, editor.call(negate, node))
