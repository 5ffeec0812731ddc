"""The lowering of a step part by part, with one kernel for equal parts.

It is no pass: its result is a plan of calls (``runtime/calls.py``). Note [Parts of a step] (``parts.py``) and
Note [One kernel for equal parts] (``rules.py``) say what parts and equal parts are.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from collage_fx.errors import FailedLoweringError, warn
from collage_fx.graph import ONCE, Reason, Repetition, device_facts, is_copy_to_input, placeholders
from collage_fx.lowering.islands import cut
from collage_fx.lowering.kernels import fault_of_library, kernel_of
from collage_fx.lowering.parts import Part, parts_of
from collage_fx.lowering.rules import Rule, rule_of
from collage_fx.runtime import HOST, NO_MEMBER, Call, Kernel, Plan, bytes_of, in_rounds, limit_on
from collage_fx.torch_compat import inductor_config, pytree

#: Stands, with a device, for the place of the first element of tensors as a whole in a plan's values.
FIRST = "first"

#: Stands, with the number, for a number of columns in a plan's values.
COLUMNS = "columns"


def lower_in_parts(gm: GraphModule, *, always: bool = False) -> Plan | Reason:
    """Compile a graph part by part, equal parts once, or return why that is impossible or useless.

    With ``always`` it is not useless where no two parts are equal.
    """
    rules = rules_of(gm, always=always)
    if isinstance(rules, Reason):
        return rules
    is_launched = any(device_facts(rule.device).is_launched for _, rule in rules)
    if is_launched and (fault := fault_of_library()) is not None:
        met = f"the C++ that writes tables of addresses is not compiled: {fault}"
        remedy = "install g++ and Python's headers, or set CXX; otherwise please report this message"
        warn(FailedLoweringError(f"{met}. Each step is slower", where="a step on a GPU", remedy=remedy))
        return Reason(met)
    for value in pytree.tree_leaves(gm.graph.output_node().args):
        is_computed = isinstance(value, Node) and value.op == "call_function"
        if is_computed and isinstance(value.meta["val"], (torch.SymInt, torch.SymFloat)):
            return Reason.at(value, "the step returns a number that follows from a tensor")
    planned: list[_Planned] = []
    made: dict[Node, int] = {}
    last_read: dict[Node, int] = {}
    for part, rule in rules:
        kernel = kernel_of(rule)
        if isinstance(kernel, Reason):
            return kernel
        if kernel.device != HOST and kernel.function is None and inductor_config.triton.cudagraphs:
            return Reason("a CUDA graph (mode='reduce-overhead') records kernels for single tensors as one")
        if rule.device == HOST and any(given.meta["val"].device != HOST for given in part.given):
            return Reason.at(next(iter(part.given)), "the host computes with a number that a device has made")
        earlier = [made[result] for result in part.given]
        earlier += [last_read.get(store.all_input_nodes[0], -1) for store in part.stores]
        wave = 1 + max(earlier, default=-1)
        made |= dict.fromkeys(part.results, wave)
        last_read |= dict.fromkeys(rule.operands, wave)
        planned.append((part, rule, kernel, wave))
    return _plan(gm, planned)


def rules_of(gm: GraphModule, *, always: bool = False) -> list[tuple[Part, Rule]] | Reason:
    """Return the parts of a graph, in a valid order, each with its rule.

    Equal parts are one kernel, which a CPU calls, and a GPU launches, once for all of them.
    """
    for node in placeholders(gm.graph):
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            continue
        if not device_facts(value.device).in_parts:
            return Reason.at(node, f"on {value.device.type} a step is compiled as one")
        if not all(isinstance(number, int) for number in (*value.shape, *value.stride())):
            return Reason.at(node, "its sizes or strides are not known when it is compiled")
    parts = parts_of(gm.graph)
    if isinstance(parts, Reason):
        return parts
    rules = [(part, rule_of(part)) for each in parts for part in cut(each)]
    is_worth_it = any(rule.flat for _, rule in rules) or len({rule.key for _, rule in rules}) < len(rules)
    if not (always or is_worth_it):
        return Reason("no two of its parts are equal, and none serves every length")
    return rules


#: Part of a step with its rule, the rule's kernel, and the wave in which it is called.
_Planned = tuple[Part, Rule, Kernel, int]


def _plan(gm: GraphModule, planned: Sequence[_Planned]) -> Plan:
    """Give each value of a step an index in one list, and write the calls in terms of these indices."""
    outputs = list(pytree.tree_leaves(gm.graph.output_node().args))
    arguments = placeholders(gm.graph)
    lengths = list(dict.fromkeys(rule.length for _, rule, *_ in planned if rule.flat))
    placed = list(dict.fromkeys(rule.device for _, rule, *_ in planned if rule.is_placed))
    attributes = list(gm.graph.find_nodes(op="get_attr"))
    results = list(dict.fromkeys(value for part, *_ in planned for value in part.results))
    columns = list(dict.fromkeys(rule.columns for _, rule, *_ in planned if rule.columns))
    given = [*((FIRST, device) for device in placed), *((COLUMNS, number) for number in columns)]
    values: list[Any] = [*arguments, *lengths, *given, *attributes, *results]
    indices = {value: index for index, value in enumerate(values)}

    def call(part: Part, rule: Rule, kernel: Kernel, wave: int) -> Call:
        length = [indices[rule.length]] if rule.flat else []
        place = [indices[FIRST, rule.device]] if rule.is_placed else []
        place += [indices[COLUMNS, rule.columns]] if rule.columns else []
        inputs = [indices[node] for node in (*rule.operands, *part.results)]
        stored = [indices[store.all_input_nodes[0]] for store in part.stores]
        written = (*stored, *(indices[value] for value in part.results))
        return Call(kernel, (*length, *place, *inputs), wave, rule.length, written)

    returned = [node.args[0] if node is not None and is_copy_to_input(node) else node for node in outputs]
    memory = [result.meta["val"] for result in results]
    return Plan(
        len(arguments),
        [
            *lengths,
            *(partial(torch.zeros, (), dtype=torch.int32, device=device) for device in placed),
            *(partial(torch.full, (), number, dtype=torch.int64, device=HOST) for number in columns),
            *(getattr(gm, str(node.target)) for node in attributes),
        ],
        [(tuple(v.shape), tuple(v.stride()), v.dtype, v.device) for v in memory],
        list(itertools.starmap(call, planned)),
        [None if value is None else indices[value] for value in returned],
    )


def repeated(plan: Plan, repetition: Repetition) -> Plan | Reason:
    """Repeat the calls of a plan for every member of each family, or return why that is impossible."""
    if repetition.is_whole:
        return plan
    first_constant = len(repetition.copies)
    first_result = plan.first_result
    calls = _calls_by_family(plan, repetition)
    if calls is None:
        return Reason("one kernel computes something of several families")
    if any(index is not None and index < first_result for index in plan.outputs):
        return Reason("it returns something else than new tensors")
    families, owners = calls
    results: dict[tuple[int, int], int] = {}
    lengths = sorted({shape.numel() for shapes in repetition.shapes for shape in shapes})
    constants = [*plan.constants, *lengths]
    index_of_length = {length: i for i, length in enumerate(lengths, repetition.inputs + len(plan.constants))}

    def index_of(index: int, member: int) -> int:
        if index < first_constant:
            return repetition.input_of(index, member)
        if index < first_result:
            return repetition.inputs + index - first_constant
        key = (index, 0 if owners[index] is None else member)
        return results.setdefault(key, repetition.inputs + len(constants) + len(results))

    planned: list[Call] = []
    for i, (family, member) in enumerate((ONCE, *repetition.members), NO_MEMBER):
        shape = repetition.shape_of(family, member)
        for call in families[family]:
            values = tuple(index_of(index, member) for index in call.values)
            writes = tuple(index_of(index, member) for index in call.writes)
            made = replace(call, values=values, writes=writes, member=i)
            if shape is not None and call.length:  # the first value is the length
                length = shape.numel()
                made = replace(made, values=(index_of_length[length], *values[1:]), length=length)
            planned.append(made)
    memory = [_memory(plan.result(i), repetition.shape_of(owners[i], member)) for i, member in results]
    outputs = ((plan.outputs[k], member) for k, member in repetition.outputs)
    returned = [None if index is None else index_of(index, member) for index, member in outputs]
    sized = zip(results.values(), memory, strict=True)
    crossing = {i: bytes_of(each) / limit_on(each[3]) for i, each in sized if each[0] and i not in returned}
    return Plan(repetition.inputs, constants, memory, in_rounds(planned, crossing), returned)


def _memory(result: tuple[Any, ...], shape: torch.Size | None) -> tuple[Any, ...]:
    """Return the description of a result for a member of some shape; None is the first member's."""
    size, _, *others = result
    if shape is None or not size:
        return result
    return tuple(shape), torch.empty(shape, device="meta").stride(), *others


def _calls_by_family(
    plan: Plan, repetition: Repetition
) -> tuple[dict[int | None, list[Call]], dict[int, int | None]] | None:
    """Return the calls of each family, and the family of each result; None if a call is of several.

    A result is made by the first call that names it.
    """
    calls: dict[int | None, list[Call]] = defaultdict(list)
    results: dict[int, int | None] = {}
    for call in plan.calls:
        owners = {repetition.owners[index] for index in call.values if index < len(repetition.owners)}
        owners |= {results[index] for index in call.values if index in results}
        owners.discard(None)
        if len(owners) > 1:
            return None
        family = next(iter(owners), None)
        calls[family].append(call)
        for index in call.values:
            if index >= plan.first_result:
                results.setdefault(index, family)
    return calls, results
