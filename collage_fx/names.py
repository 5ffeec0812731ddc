"""What the inputs of a captured step are to the user.

Names, short symbols for recurrences, roles, real tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from collage_fx.program import InputInfo, Role
from collage_fx.torch_compat import aot_input_of, symbol_source

__all__ = [
    "KnownTensor",
    "carried",
    "describe_input",
    "describe_inputs",
    "known_tensors",
    "optimizers_among",
    "parameter_names",
    "shared_tensors",
    "state_tensors",
]

#: The tensors that recorded steps hand from one compiled graph to the next.
carried = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class KnownTensor:
    """A tensor that an optimizer holds, and what the user calls it.

    Attributes:
        name, symbol, role: as in :class:`~collage_fx.program.InputInfo`.
        tensor: itself.
    """

    name: str
    symbol: str
    role: Role
    tensor: Tensor


def optimizers_among(variables: Mapping[str, Any]) -> dict[str, Optimizer]:
    """The optimizers among a frame's variables, by variable.

    Itself, an element of ``*args``, or what a wrapper (a scheduler, a trainer) holds as ``.optimizer``.
    """
    found: dict[str, Optimizer] = {}
    for variable, value in variables.items():
        for candidate in value if isinstance(value, (tuple, list)) else (value,):
            if not isinstance(candidate, Optimizer):
                candidate = getattr(candidate, "__dict__", {}).get("optimizer")
            if isinstance(candidate, Optimizer) and not any(candidate is known for known in found.values()):
                found[variable if variable not in found else f"{variable}_{len(found)}"] = candidate
    return found


def parameter_names(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """``(name, parameter)``: the module's own names where the optimizer was given them, else positions."""
    for i, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", ())
        for j, parameter in enumerate(group["params"]):
            yield (names[j] if j < len(names) else f"param_groups[{i}].params[{j}]"), parameter


def state_tensors(state: Mapping[Any, Any] | None) -> Iterator[tuple[str, Tensor]]:
    """``(slot, tensor)`` of one parameter's optimizer state, containers within it included.

    None is the state of a parameter that another process steps (``ZeroRedundancyOptimizer``).
    """
    for path, leaf in pytree.tree_flatten_with_path(dict(state or {}))[0]:
        if isinstance(leaf, Tensor):
            yield ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), leaf


def shared_tensors(
    groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], parameter_keys: Iterable[Any]
) -> Iterator[tuple[str, Tensor]]:
    """``(name, tensor)`` of what belongs to no single parameter: in groups, and in state under other keys.

    Args:
        groups: an optimizer's own, or those of its state dict.
        state: likewise.
        parameter_keys: the keys of ``state`` that stand for parameters.
    """
    for i, group in enumerate(groups):
        for slot, tensor in state_tensors({key: group[key] for key in group if key != "params"}):
            yield f"param_groups[{i}].{slot}", tensor
    of_parameters = set(parameter_keys)
    named = {key: state[key] for key in state if key not in of_parameters and not isinstance(key, Tensor)}
    for slot, tensor in state_tensors(named):
        yield f"state.{slot}", tensor


def describe_inputs(
    inputs: Sequence[Node],
    dynamo_module: GraphModule,
    arguments: Sequence[Any],
    known: Mapping[int, KnownTensor],
) -> list[InputInfo]:
    """One :class:`~collage_fx.program.InputInfo` per input of an AOTAutograd graph.

    Args:
        inputs: its placeholders.
        dynamo_module: the module Dynamo captured: its attributes are the tensors bound to the graph.
        arguments: what Dynamo passed to the backend for the module's own inputs.
        known: see :func:`known_tensors`.
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
                tensor, fallback = _attribute(dynamo_module, str(where)), str(where)
            else:
                tensor, fallback = arguments[int(where)], argument_names[int(where)]
            described.append(_describe_tensor(tensor, fallback, known, bound=kind == "attribute"))
    return described


def describe_input(value: Any, fallback: str, known: Mapping[int, KnownTensor], *, bound: bool) -> InputInfo:
    """What an input of a Dynamo graph is.

    Args:
        value: a real tensor, or a number.
        fallback: its name in the graph.
        known: see :func:`known_tensors`.
        bound: whether it is an attribute of the graph's module.
    """
    if isinstance(value, Tensor):
        return _describe_tensor(value, fallback, known, bound=bound)
    return _describe_number(fallback, value)


def known_tensors(optimizers: Mapping[str, Optimizer]) -> dict[int, KnownTensor]:
    """What the optimizers hold, by ``id``, in their order: a parameter, its gradient, its state, the next.

    Args:
        optimizers: by variable; with more than one of them, names begin with the variable.
    """
    known: dict[int, KnownTensor] = {}
    for variable, optimizer in optimizers.items():
        prefix = f"{variable}." if len(optimizers) > 1 else ""
        parameters = [parameter for _, parameter in parameter_names(optimizer)]
        for name, tensor in shared_tensors(optimizer.param_groups, optimizer.state, parameters):
            role = Role.STATE if name.startswith("state.") else Role.OTHER
            known[id(tensor)] = KnownTensor(prefix + name, name.rpartition(".")[2], role, tensor)
        for name, parameter in parameter_names(optimizer):
            known.setdefault(id(parameter), KnownTensor(prefix + name, "p", Role.PARAMETER, parameter))
            if parameter.grad is not None:
                known[id(parameter.grad)] = KnownTensor(
                    f"{prefix}{name}.grad", "g", Role.GRADIENT, parameter.grad
                )
            for slot, tensor in state_tensors(optimizer.state.get(parameter, {})):
                symbol = slot.rpartition(".")[2]
                known[id(tensor)] = KnownTensor(f"{prefix}{name}.{slot}", symbol, Role.STATE, tensor)
    return known


def _describe_tensor(
    tensor: Tensor, fallback: str, known: Mapping[int, KnownTensor], *, bound: bool
) -> InputInfo:
    if id(tensor) in known:
        entry = known[id(tensor)]
        return InputInfo(entry.name, entry.symbol, entry.role, tensor, bound)
    name = re.sub(r"^L_+|_+$", "", fallback, flags=re.IGNORECASE)
    if isinstance(tensor, torch.nn.Parameter):
        role = Role.PARAMETER
    else:
        role = Role.CARRIED if tensor in carried else Role.STATE
    return InputInfo(name, name.rpartition("___")[2] or name, role, tensor, bound)


def _describe_number(fallback: str, value: Any) -> InputInfo:
    source = symbol_source(value) if isinstance(value, (torch.SymInt, torch.SymFloat)) else fallback
    words = re.findall(r"\w+", source)
    return InputInfo(source, words[-1] if words else fallback, Role.OTHER)


def _attribute(module: GraphModule, target: str) -> Tensor:
    owner, _, name = target.rpartition(".")
    tensor = getattr(module.get_submodule(owner), name)
    assert isinstance(tensor, Tensor)
    return tensor
