"""Description of a captured step's inputs: names, symbols for recurrences, roles, real tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from collage_fx.graph import InputInfo, Role
from collage_fx.state import KnownTensor, note_bound
from collage_fx.torch_compat import aot_input_of, has_storage, records, sharding_of, storage_of, symbol_source


class MadeInStep:
    """Part of a low-precision tensor that the step being recorded has made, and may pass to another graph."""


class BornInStep:
    """Part of state that a parameter got in the step being recorded."""


class SpanningClosure:
    """Part of a tensor that the step being recorded has written before it calls its closure."""


def describe_inputs(
    inputs: Sequence[Node],
    dynamo_module: GraphModule,
    arguments: Sequence[Any],
    known: Mapping[int, KnownTensor],
) -> list[InputInfo]:
    """Describe the inputs of an AOTAutograd graph.

    The attributes of the module that Dynamo captured are the tensors bound to the graph; ``arguments`` are
    real arguments that Dynamo passed to the backend for the module's own inputs.
    """
    argument_names = [node.name for node in dynamo_module.graph.find_nodes(op="placeholder")]
    described = []
    for node in inputs:
        value = node.meta.get("val")
        origin = aot_input_of(node)
        if not isinstance(value, Tensor):
            described.append(_describe_number(node.name, value))
        elif origin is None or origin[0] == "alias":
            described.append(InputInfo(str(origin[1]) if origin else node.name, node.name, Role.OTHER))
        else:
            kind, where = origin
            if kind == "attribute":
                tensor, fallback = attrgetter(str(where))(dynamo_module), str(where)
            else:
                tensor, fallback = arguments[int(where)], argument_names[int(where)]
            described.append(describe_input(tensor, fallback, known, bound=kind == "attribute"))
    return described


def describe_input(value: Any, fallback: str, known: Mapping[int, KnownTensor], *, bound: bool) -> InputInfo:
    """Describe an input of a Dynamo graph.

    ``fallback``: name of a tensor that no optimizer holds. A ``bound`` input is an attribute of the module,
    which is noted of the tensor.
    """
    if not isinstance(value, Tensor):
        return _describe_number(fallback, value)
    if bound:
        note_bound(value)
    pieces = sharding_of(value)
    is_made = records.has(value, MadeInStep)
    facts: dict[str, Any] = {
        "cut_from": value.numel() if pieces is not None and pieces.is_cut else 0,
        "spans_closure": records.has(value, SpanningClosure),
        "is_made": is_made,
    }
    if (entry := known.get(id(value)) or (None if is_made else _gradient_around(value, known))) is not None:
        is_born = records.has(value, BornInStep)
        role = Role.CARRIED if is_born and is_made else entry.role
        return InputInfo(entry.name, entry.symbol, role, value, bound, **facts, is_born=is_born)
    name = re.sub(r"^L_+|_+$", "", fallback, flags=re.IGNORECASE)
    role = Role.CARRIED if is_made else Role.STATE
    if isinstance(value, torch.nn.Parameter):
        role = Role.PARAMETER
    symbol = name.rpartition("___")[2] or name  # the last part of an attribute path, or a key in a group
    if in_group := re.fullmatch(r"self_param_groups_(\d+)_(.+)", name):
        group, key = in_group.groups()
        symbol = key if group == "0" else f"{key}_{group}"
    return InputInfo(name, symbol, role, value, bound, **facts)


def _gradient_around(value: Tensor, known: Mapping[int, KnownTensor]) -> KnownTensor | None:
    """Return the gradient in whose memory a tensor lies, such as its ``data`` or a buffer of gradients."""
    held = (each for each in known.values() if each.role is Role.GRADIENT and has_storage(each.tensor))
    storage = storage_of(value) if has_storage(value) else None
    return next((each for each in held if storage_of(each.tensor) == storage), None)


def _describe_number(fallback: str, value: Any) -> InputInfo:
    source = symbol_source(value) if isinstance(value, (torch.SymInt, torch.SymFloat)) else fallback
    words = re.findall(r"\w+", source)
    return InputInfo(source, words[-1] if words else fallback, Role.OTHER)
