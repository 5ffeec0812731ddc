"""Tensors that an optimizer holds, with the names that the user knows them by, and methods of its own."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.graph import Role
from collage_fx.numerics import STORAGE_FORMATS, is_low_precision
from collage_fx.state.error_terms import record_of, reset_error_terms
from collage_fx.state.packed import is_packed, unpack
from collage_fx.torch_compat import bytes_of, detect_fake_mode, is_wrapper, pytree, sharding_of


@dataclass(frozen=True)
class KnownTensor:
    """A tensor that an optimizer holds, with a name, symbol and role as :class:`InputInfo` has them."""

    name: str
    symbol: str
    role: Role
    tensor: Tensor


def optimizers_among(variables: Mapping[str, Any]) -> dict[str, Optimizer]:
    """Find the optimizers among a frame's variables, by variable.

    An optimizer is the value of a variable, an element of ``*args``, the owner of a method, the target of a
    weak reference (in the function that schedulers put around ``step``), or the ``.optimizer`` of a wrapper.
    """
    found: dict[str, Optimizer] = {}
    for variable, value in variables.items():
        for candidate in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(candidate, weakref.ReferenceType):
                candidate = candidate()
            if isinstance(candidate, MethodType):
                candidate = candidate.__self__
            if not isinstance(candidate, Optimizer):
                candidate = getattr(candidate, "__dict__", {}).get("optimizer")
            if isinstance(candidate, Optimizer) and not any(candidate is known for known in found.values()):
                found[variable if variable not in found else f"{variable}_{len(found)}"] = candidate
    return found


def held_optimizers(optimizer: Any) -> list[Optimizer]:
    """Find the optimizers that an optimizer, or a wrapper around it, has as attributes, at any depth."""
    found: list[Optimizer] = []
    waiting = [optimizer]
    while waiting:
        for value in vars(waiting.pop()).values():
            inside = value.values() if isinstance(value, dict) else value
            for each in inside if isinstance(inside, (list, tuple, ValuesView)) else (inside,):
                if isinstance(each, Optimizer) and all(each is not known for known in (optimizer, *found)):
                    found.append(each)
                    waiting.append(each)
    return found


def parameter_names(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, parameter)``, with the names that the optimizer was given, or else positions."""
    for i, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", ())
        for j, parameter in enumerate(group["params"]):
            yield (names[j] if j < len(names) else f"param_groups[{i}].params[{j}]"), parameter


def has_state(optimizer: Optimizer, key: Any) -> bool:
    """Return whether an optimizer's state has an entry for a key: anything but None or an empty container."""
    entry = optimizer.state.get(key)
    return bool(entry) if isinstance(entry, (Mapping, list, tuple)) else entry is not None


def state_tensors(state: Any, taken: Iterable[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(slot, tensor)`` for one parameter's optimizer state, including containers and objects in it.

    State that is no dictionary, such as a tensor or a list, is in the slot ``state``. None is the state of a
    parameter that another process steps (``ZeroRedundancyOptimizer``). Parameters that are keys are numbered,
    as in a state dict. If two tensors would have one slot, as those of ``"a.b"`` and of ``{"a": {"b":
    ...}}``, or a tensor one that is ``taken``, the later one gets a number: ``a.b#2``.
    """
    used = Counter(taken)
    entries = dict(state) if isinstance(state, Mapping) else {"state": state}
    for slot, tensor in _tensors_inside(entries, set()):
        used[slot] += 1
        yield slot if used[slot] == 1 else f"{slot}#{used[slot]}", tensor


def _tensors_inside(container: Any, met: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(path, tensor)`` for a container, including objects in it that are not in ``met``."""
    numbers: dict[int, int] = {}

    def text(key: Any) -> str:
        value = getattr(key, "key", getattr(key, "idx", key))
        return str(numbers.setdefault(id(value), len(numbers)) if isinstance(value, Tensor) else value)

    for path, leaf in pytree.tree_flatten_with_path(container)[0]:
        slot = ".".join(map(text, path))
        if isinstance(leaf, Tensor):
            yield slot, leaf
        elif id(leaf) not in met and (attributes := _attributes(leaf)):
            met.add(id(leaf))
            yield from ((f"{slot}.{name}", tensor) for name, tensor in _tensors_inside(attributes, met))


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes by which an object may hold tensors; an optimizer has a state dict of its own."""
    if isinstance(value, torch.nn.Module):
        return {**dict(value.named_parameters()), **dict(value.named_buffers())}
    is_ours = type(value).__module__.startswith("collage_fx.")  # as the step of an installed optimizer
    if is_ours or isinstance(value, (type, Optimizer, ModuleType)):
        return {}
    of_classes = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    slots = (name for names in of_classes for name in ([names] if isinstance(names, str) else names))
    of_slots = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**of_slots, **getattr(value, "__dict__", {})}


def shared_tensors(
    groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, tensor)`` for tensors of no single parameter, in groups or under other keys of state."""
    for i, group in enumerate(groups):
        for slot, tensor in state_tensors({key: group[key] for key in group if key != "params"}):
            yield f"param_groups[{i}].{slot}", tensor
    of_parameters = {key for group in groups for key in group["params"]}
    named = {key: state[key] for key in state if key not in of_parameters and not isinstance(key, Tensor)}
    for slot, tensor in state_tensors(named):
        yield f"state.{slot}", tensor


def known_tensors(optimizers: Mapping[str, Optimizer]) -> dict[int, KnownTensor]:
    """Map ``id`` to the tensors of optimizers: of each parameter itself, its gradient, its state.

    A parameter is one also where a group or a state refers to it. With several optimizers, names begin with
    the variable.
    """
    parameters = {id(p) for optimizer in optimizers.values() for _, p in parameter_names(optimizer)}
    known: dict[int, KnownTensor] = {}
    for variable, optimizer in optimizers.items():
        prefix = f"{variable}." if len(optimizers) > 1 else ""
        for name, tensor in shared_tensors(optimizer.param_groups, optimizer.state):
            role = Role.STATE if name.startswith("state.") else Role.OTHER
            if id(tensor) not in parameters:
                known[id(tensor)] = KnownTensor(prefix + name, name.rpartition(".")[2], role, tensor)
        for name, parameter in parameter_names(optimizer):
            known.setdefault(id(parameter), KnownTensor(prefix + name, "p", Role.PARAMETER, parameter))
            if (gradient := parameter.grad) is not None:
                where = f"{prefix}{name}.grad"
                known[id(gradient)] = KnownTensor(where, "g", Role.GRADIENT, gradient)
            for slot, tensor in state_tensors(optimizer.state.get(parameter, {})):
                symbol = slot.rpartition(".")[2]
                if id(tensor) not in parameters:
                    known[id(tensor)] = KnownTensor(f"{prefix}{name}.{slot}", symbol, Role.STATE, tensor)
    return known


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of tensors and of their auxiliaries; packed tensors have auxiliaries alone.

    Error terms of new tensors, which the next step may drop, are not counted.
    """
    beside = [(tensor, record_of(tensor)) for tensor in tensors]
    own = (tensor for tensor, found in beside if found is None or found.format.keeps_hi)
    records = (found for _, found in beside if found is not None)
    kept = (each.auxiliaries for each in records if not (each.is_new and each.format.keeps_hi))
    return sum(bytes_of(tensor) for tensor in itertools.chain(own, *kept))


def states_of(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the state of some parameters, and the state of no single parameter; no numbers (0-d)."""
    own = (each for p in parameters for _, each in state_tensors(optimizer.state.get(p)))
    shared = (each for _, each in shared_tensors(optimizer.param_groups, optimizer.state))
    found = {id(each): each for each in itertools.chain(own, shared) if each.dim()}
    for _, parameter in parameter_names(optimizer):
        found.pop(id(parameter), None)
    return list(found.values())


def other_state_bytes(optimizer: Optimizer) -> int:
    """Count the bytes of low-precision parameters' state without rows: of other dtypes, and quantized."""
    parameters = (p for _, p in parameter_names(optimizer) if is_low_precision(p.dtype))
    others = (
        each
        for each in states_of(optimizer, parameters)
        if not is_low_precision(each.dtype) or (is_wrapper(each) and sharding_of(each) is None)
    )
    return sum(bytes_of(each) for each in others if not is_packed(each))


def held_per_parameter(optimizer: Optimizer) -> float:
    """Count bytes per element of parameters of 16 and 32 bits, their state unpacked, and all error terms."""
    dtypes = {*STORAGE_FORMATS, torch.float32}
    parameters = [p for _, p in parameter_names(optimizer) if p.dtype in dtypes]
    held = [*parameters, *states_of(optimizer, parameters)]
    packed = [each for each in held if is_packed(each)]
    unpacked = sum(each.numel() * each.itemsize for each in packed)
    return (bytes_held(held) - bytes_held(packed) + unpacked) / max(1, sum(p.numel() for p in parameters))


def unpack_all(optimizer: Optimizer, *, for_good: bool = False) -> None:
    """Unpack an optimizer's packed tensors, for code that has to see ordinary tensors, or for good."""
    for known in known_tensors({"self": optimizer}).values():
        unpack(known.tensor)
        record = record_of(known.tensor) if for_good else None
        if record is not None and not record.format.keeps_hi:
            reset_error_terms(known.tensor)


def clone_of(optimizer: Optimizer, replaced: Mapping[int, Any] | None = None) -> Optimizer:
    """Return a deep copy of an optimizer without hooks; ``replaced``: ``id`` of an object -> its substitute.

    ``copy.deepcopy(optimizer)`` does not suffice: ``Optimizer`` pickles only some attributes, and a
    subclass's step may need others. An attribute that cannot be copied is shared.
    """
    clone = object.__new__(type(optimizer))
    memo = {id(optimizer): clone, **(replaced or {})}  # an attribute may lead back to the optimizer
    for _, p in parameter_names(optimizer):  # torch 2.13 crashes later if it has copied the memory of a fake
        if id(p) not in memo and detect_fake_mode([p]) is not None:
            memo[id(p)] = torch.nn.Parameter(p.detach().clone(), p.requires_grad)
    for name, value in without_own_methods(vars(optimizer).items()).items():
        if name.startswith("_optimizer_") and isinstance(value, dict):
            value = OrderedDict()
        if name != "step":
            try:
                vars(clone)[name] = copy.deepcopy(value, memo)
            except (TypeError, RuntimeError, NotImplementedError):  # locks, handles, tensors with a history
                vars(clone)[name] = value
    return clone


class OwnMethod:
    """Method of one optimizer: calls ``around(optimizer, method, ...)``, where ``method`` is its class's.

    The method does not keep the optimizer alive, and stays behind when the optimizer is copied or pickled.
    """

    def __init__(self, optimizer: Optimizer, name: str, around: Callable[..., Any]) -> None:
        self._optimizer, self._name, self._around = weakref.ref(optimizer), name, around
        self._before = vars(optimizer).get(name)  # what other code had given to the instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError(f"the optimizer of this {self._name} is gone")
        method = self._before or MethodType(getattr(type(optimizer), self._name), optimizer)
        return self._around(optimizer, method, *args, **kwargs)


def wrap_own_method(optimizer: Optimizer, name: str, around: Callable[..., Any]) -> None:
    """Put a function around a method of an optimizer, unless the method is torch's own."""
    is_torchs = getattr(type(optimizer), name) is getattr(Optimizer, name)
    if name in vars(optimizer) or not is_torchs:
        vars(optimizer)[name] = OwnMethod(optimizer, name, around)


def without_own_methods(attributes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return attributes of an optimizer without the methods that belong to this one instance."""
    return {name: value for name, value in attributes if not isinstance(value, OwnMethod)}
