"""Calls of one kernel for tensors of one shape, made as one call for a stack of them.

Note [Stacks of tensors]
------------------------
On a GPU a rule that is not flat (products of matrices, reductions) is called for each tensor: Muon needs 26
launches for each matrix, most of them too small for the device. So calls of one wave and one rule are made as
one call for *stacks*, tensors with a first dimension more. The rule is traced once more with functorch's
``vmap``, with a symbolic number of members. Elementwise operations, ours among them, are kept.

* A value that such a call writes has its memory in a stack, and so has a value of the step that only such
  calls read: the flat kernels before and after write and read the members where they are. Nothing is copied.
* Any other operand is copied into a stack by a call of its own, unless all calls read the same tensor.

Members without a gradient are computed from whatever is in their memory; nobody reads the results. A round of
members (Note [Members take turns]) has stacks of its own, which bounds the memory.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from functorch import make_fx
from torch import Tensor
from torch.fx import GraphModule, Node

from collage_fx.graph import Reason, is_elementwise, placeholders
from collage_fx.lowering.rule_graphs import graph_of
from collage_fx.lowering.rules import LONGEST, Rule
from collage_fx.runtime import WORD, Call, Kernel, Plan, Stack
from collage_fx.torch_compat import SymbolicScope, functional_decompositions, pytree

aten = torch.ops.aten

#: Number of members that the compiler assumes: it only decides how loops are cut.
MEMBERS = 8

#: Products of matrices as products of their stacks. ``vmap`` of torch 2.11 binds them to a number of members.
_OF_STACKS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: aten.bmm,
    aten.mv.default: lambda a, v: aten.bmm(a, v.unsqueeze(2)).squeeze(2),
    aten.addmm.default: lambda x, *ab, **numbers: aten.baddbmm(_of_rank(x, 3), *ab, **numbers),
}


def stacked_graph(rule: Rule, scope: SymbolicScope, stacked: Sequence[bool]) -> tuple[GraphModule, int]:
    """Return the graph of a rule for stacks of its tensors, and the most members that it holds for.

    With as many, each value has fewer than 2**31 elements, the words of the host's numbers among them. The
    compiler knows, and so has no question whose answer would bind the graph to one number of members. The
    rule is not flat, and stores into no input. ``stacked`` tells of each operand whether it is a stack.
    """
    single = graph_of(rule, scope, MEMBERS)
    operands = placeholders(single.graph)[: len(stacked)]
    results = [node.all_input_nodes[1] for node in single.graph.nodes if node.target is aten.copy_.default]
    values = pytree.tree_leaves([node.meta.get("val") for node in single.graph.nodes])
    most = (LONGEST - 1) // max(WORD, *(each.numel() for each in values if isinstance(each, Tensor)))
    members = scope.length("m", MEMBERS, max(2, most))

    def stack_of(node: Node) -> Tensor:
        value = node.meta["val"]
        single = tuple(value.shape), tuple(value.stride()), value.dtype, value.device
        return scope.tensor(*_layout_of_stack(members, single, rule.device))

    def of_stacks(*inputs: Any) -> list[Any]:
        values = dict(zip(operands, inputs, strict=True))
        are_stacks = {node for node, is_stack in zip(operands, stacked, strict=True) if is_stack}
        for node in single.graph.nodes:
            if node.op == "call_function" and node.target is not aten.copy_.default:
                values[node] = _called(node, values, are_stacks)
                if not are_stacks.isdisjoint(node.all_input_nodes):
                    are_stacks.add(node)
        return [values[result] for result in results]

    pairs = zip(operands, stacked, strict=True)
    examples = [stack_of(node) if is_stack else node.meta["val"] for node, is_stack in pairs]
    with scope.fake_mode:
        gm = make_fx(of_stacks, decomposition_table=functional_decompositions())(*examples)
    (output,) = gm.graph.find_nodes(op="output")
    for result, value in zip(results, list(output.args[0]), strict=True):
        with gm.graph.inserting_after(placeholders(gm.graph)[-1]):
            into = gm.graph.placeholder(f"out_{result.name}")
        with gm.graph.inserting_before(output):
            store = gm.graph.call_function(aten.copy_.default, (into, value))
        into.meta["val"] = store.meta["val"] = stack_of(result)
    output.args = ((),)
    gm.recompile()
    return gm, most


def _called(node: Node, values: Mapping[Node, Any], are_stacks: Set[Node]) -> Any:
    """Return the value of an operation of single tensors, for stacks of some of its operands."""
    operands = node.all_input_nodes

    def called(*given: Any, function: Any = node.target) -> Any:
        of_operands = dict(zip(operands, given, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), of_operands.__getitem__)
        return function(*args, **kwargs)

    given = [values[each] for each in operands]
    if node.target is operator.getitem or are_stacks.isdisjoint(operands):
        return called(*given)
    if node.target in _OF_STACKS:
        members = next(values[each].shape[0] for each in operands if each in are_stacks)
        shared = (() if each in are_stacks else (members, *values[each].shape) for each in operands)
        stacks = (x.expand(size) if size else x for x, size in zip(given, shared, strict=True))
        return called(*stacks, function=_OF_STACKS[node.target])
    if _broadcasts(node):
        rank = node.meta["val"].dim()
        ranks = [rank + 1 if each in are_stacks else 0 for each in operands]
        return called(*(_of_rank(value, least) for value, least in zip(given, ranks, strict=True)))
    return torch.vmap(called, in_dims=tuple(0 if each in are_stacks else None for each in operands))(*given)


def _broadcasts(node: Node) -> bool:
    """Return whether an operation is elementwise, with operands of the result's shape or broadcast to it."""
    if not is_elementwise(node):
        return False
    shapes = [each.meta["val"].shape for each in node.all_input_nodes]
    return bool(torch.broadcast_shapes(*shapes) == node.meta["val"].shape)


def _of_rank(stack: Any, least: int) -> Any:
    """Return a stack with at least so many dimensions; further dimensions come behind the first."""
    return _of_rank(stack.unsqueeze(1), least) if least and stack.dim() < least else stack


def in_stacks(plan: Plan) -> Plan:
    """Return a plan in which calls of one kernel, for tensors of one shape, are one call for stacks."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, call in enumerate(plan.calls):
        if call.kernel.stackable is not None:
            groups[call.wave, id(call.kernel)].append(i)
    stacking = _Stacking(plan)
    for _, group in sorted(groups.items(), key=lambda each: each[0][0]):
        if len(group) > 1:
            stacking.stack(group)
    return stacking.plan()


class _Stacking:
    """Stacks of a plan, and the calls for them.

    Waves are counted double: between those of the plan, operands are copied into stacks.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._end = plan.first_result + len(plan.results)
        self._stacks: dict[tuple[int, ...], Stack] = {}
        self._members = set[int]()
        self._memory: list[tuple[Any, ...]] = []
        #: Replacements of the plan's calls, by index.
        self._instead: dict[int, list[Call]] = {}

    def plan(self) -> Plan:
        """Return the plan with the stacks so far."""
        if not self._instead:
            return self._plan
        calls: list[Call] = []
        for i, call in enumerate(self._plan.calls):
            calls += self._instead.get(i, [replace(call, wave=2 * call.wave)])
        results = [*self._plan.results, *self._memory]
        stacks = [stack for stack in self._stacks.values() if stack.members]
        return replace(self._plan, calls=calls, results=results, stacks=stacks)

    def stack(self, group: Sequence[int]) -> None:
        """Make one call of several, if their kernel can be compiled for stacks."""
        calls = [self._plan.calls[i] for i in group]
        kernel, wave, written = calls[0].kernel, 2 * calls[0].wave, len(calls[0].writes)
        columns = list(zip(*(call.values for call in calls), strict=True))
        operands = len(columns) - written
        results = [index for column in columns[operands:] for index in column]
        if any(self._is_kept(index) for index in results) or len({*results}) < len(results):
            return
        are_stacks = [i >= operands or len({*column}) > 1 for i, column in enumerate(columns)]
        assert kernel.stackable is not None
        of_stacks = kernel.stackable.compiled(tuple(are_stacks[:operands]))
        if isinstance(of_stacks, Reason):
            of_each = replace(kernel, reasons=((kernel.reasons[0][0], of_stacks), *kernel.reasons[1:]))
            self._instead |= {i: [replace(self._plan.calls[i], wave=wave, kernel=of_each)] for i in group}
            return
        if len(group) > of_stacks.most_members:
            return
        instead: list[Call] = []
        values = []
        for i, column in enumerate(columns):
            if not are_stacks[i]:
                values.append(column[0])
                continue
            is_new = column not in self._stacks
            layout = kernel.stackable.operands[i] if i < operands else self._plan.result(column[0])
            stack = self._stack_of(column, layout, kernel.device)
            values.append(stack.index)
            if is_new and not stack.members:
                copying = Kernel(lambda v: torch.stack(v[:-1], out=v[-1]), device=kernel.device)
                instead.append(Call(copying, (*column, stack.index), wave - 1, 0, (stack.index,)))
        instead.append(Call(of_stacks, tuple(values), wave, 0, tuple(values[operands:])))
        self._instead |= {**{i: [] for i in group}, group[0]: instead}

    def _stack_of(self, column: tuple[int, ...], layout: tuple[Any, ...], device: torch.device) -> Stack:
        """Return the stack, on a device, of some values of a layout."""
        if column not in self._stacks:
            of_host = layout[3] != device
            is_copy = len({*column}) < len(column)
            is_copy |= any(self._is_kept(index) or index in self._members for index in column)
            members = column if of_host or not is_copy else ()
            stack = Stack(self._end + len(self._memory), members, of_host)
            self._stacks[column] = stack
            if not of_host:
                self._members.update(members)
            self._memory.append(_layout_of_stack(len(column), layout, device))
        return self._stacks[column]

    def _is_kept(self, index: int) -> bool:
        """Return whether the memory of a value is not a step's own: that of an input or an output."""
        return index < self._plan.first_result or index in self._plan.outputs


def _layout_of_stack(members: Any, layout: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """Return size, stride, dtype and device of a stack of so many members, each of a layout.

    The members are neighbours in memory; numbers of the host are words of the device's table.
    """
    size, stride, dtype, at = layout
    apart = max(1, math.prod(size)) if at == device else WORD // dtype.itemsize
    return (members, *size), (apart, *stride), dtype, device
