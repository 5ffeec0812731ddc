"""Error terms in ``optimizer.state_dict()`` and ``optimizer.load_state_dict()``.

Note [Owning the round trip]
----------------------------
Two facts force the design. A checkpoint is often loaded *before* the first step, when no backend has seen the optimizer, so
per-instance hooks registered while compiling come too late. And ``Optimizer.load_state_dict`` casts every tensor in
``state`` to its parameter's dtype (pytorch#43706), which ruins any error term of another dtype. So importing
collage_fx wraps the two methods of the base class, once: ``state_dict`` adds the error terms to each parameter's
entry under keys of ours, and ``load_state_dict`` takes them out again before torch sees them, lets torch load the rest,
and puts them beside the tensors that torch has made. A checkpoint written with error terms is an ordinary one to a
process without collage_fx, and the other way round.

Keys: ``collage_fx.<slot>.<format>.<auxiliary>``, where the slot is ``parameter`` or the name of the state,
for example ``collage_fx.exp_avg_sq.mcf.lo``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer

from collage_fx.error_formats import ERROR_FORMATS
from collage_fx.error_terms import allocate, expansion_of
from collage_fx.errors import CheckpointMismatchError
from collage_fx.names import parameter_names, state_tensors

__all__ = ["install", "note_compiled"]

PREFIX = "collage_fx."
PARAMETER_SLOT = "parameter"

_compiled: WeakSet[Optimizer] = WeakSet()
_loaded_without_error_terms: WeakSet[Optimizer] = WeakSet()

StateDict = dict[str, Any]

#: (format, auxiliary) -> tensor, of one state tensor.
Saved = dict[tuple[str, str], Tensor]


def install() -> None:
    """Wrap ``Optimizer.state_dict`` and ``Optimizer.load_state_dict``; a second call does nothing."""
    if hasattr(Optimizer.state_dict, "__collage_fx__"):
        return
    for name, wrapper in (("state_dict", _saving), ("load_state_dict", _loading)):
        wrapped = wrapper(getattr(Optimizer, name))
        wrapped.__collage_fx__ = True  # type: ignore[attr-defined]
        setattr(Optimizer, name, wrapped)


def note_compiled(optimizer: Optimizer) -> None:
    """The backend has compiled a step of ``optimizer``: warn if its checkpoint had no error terms to go on with."""
    _compiled.add(optimizer)
    if optimizer in _loaded_without_error_terms:
        _loaded_without_error_terms.discard(optimizer)
        _warn_zeros(optimizer)


def _saving(state_dict: Callable[..., StateDict]) -> Callable[..., StateDict]:
    @functools.wraps(state_dict)
    def with_error_terms(self: Optimizer, *args: Any, **kwargs: Any) -> StateDict:
        saved = state_dict(self, *args, **kwargs)
        state = dict(saved["state"])
        for key, _, parameter in _keyed_parameters(self, saved):
            entries: dict[str, Tensor] = {}
            for slot, tensor in _slots(self, parameter):
                expansion = expansion_of(tensor)
                if expansion is not None:
                    specs = expansion.format.auxiliaries(tensor.dtype)
                    for spec, auxiliary in zip(specs, expansion.auxiliaries, strict=True):
                        entries[f"{PREFIX}{slot}.{expansion.format.name}.{spec.name}"] = auxiliary
            if entries:  # a new dictionary: the one in ``saved`` is the live state of the optimizer
                state[key] = {**state.get(key, {}), **entries}
        return {**saved, "state": state}

    return with_error_terms


def _loading(load_state_dict: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load_state_dict)
    def with_error_terms(self: Optimizer, state_dict: StateDict, *args: Any, **kwargs: Any) -> None:
        plain, saved = _separated(state_dict)
        _refuse_mismatches(self, plain, saved)
        load_state_dict(self, plain, *args, **kwargs)
        _restore(self, plain, saved)

    return with_error_terms


def _separated(state_dict: StateDict) -> tuple[StateDict, dict[Any, dict[str, Saved]]]:
    """A state dict without our keys, and what stood under them: parameter key -> slot -> :data:`Saved`."""
    plain: dict[Any, Any] = {}
    saved: dict[Any, dict[str, Saved]] = {}
    for key, entries in state_dict["state"].items():
        if not isinstance(entries, dict):
            plain[key] = entries
            continue
        ours = {name: value for name, value in entries.items() if str(name).startswith(PREFIX)}
        rest = {name: value for name, value in entries.items() if name not in ours}
        if rest or not ours:
            plain[key] = rest
        for name, value in ours.items():
            slot, format_name, auxiliary = name.removeprefix(PREFIX).rsplit(".", 2)
            saved.setdefault(key, {}).setdefault(slot, {})[format_name, auxiliary] = value
    return {**state_dict, "state": plain}, saved


def _refuse_mismatches(optimizer: Optimizer, plain: StateDict, saved: dict[Any, dict[str, Saved]]) -> None:
    """Raise before anything is loaded if an error term doesn't fit the tensor it belongs to."""
    for key, name, parameter in _keyed_parameters(optimizer, plain):
        states = dict(state_tensors(plain["state"].get(key, {})))
        for slot, auxiliaries in saved.get(key, {}).items():
            owner = parameter if slot == PARAMETER_SLOT else states.get(slot)
            where = f"{name}.{slot}"
            if owner is None:
                raise CheckpointMismatchError(
                    "error terms of a state that the checkpoint does not hold", where=where, remedy=_REMEDY
                )
            for (format_name, auxiliary), tensor in auxiliaries.items():
                if format_name not in ERROR_FORMATS:
                    raise CheckpointMismatchError(
                        f"error terms in the unknown format {format_name!r}", where=where, remedy=_REMEDY
                    )
                specs = {spec.name: spec for spec in ERROR_FORMATS[format_name].auxiliaries(parameter.dtype)}
                if auxiliary not in specs:
                    raise CheckpointMismatchError(f"no such error term: {auxiliary!r}", where=where, remedy=_REMEDY)
                shape = specs[auxiliary].shape or tuple(owner.shape)
                if tuple(tensor.shape) != tuple(shape):
                    raise CheckpointMismatchError(
                        f"an error term of shape {tuple(tensor.shape)} for a tensor of shape {tuple(shape)}",
                        where=where,
                        remedy=_REMEDY,
                    )


_REMEDY = (
    "load the checkpoint that belongs to this model, or delete its keys that start with 'collage_fx.' to start from zero "
    "error terms"
)


def _restore(optimizer: Optimizer, plain: StateDict, saved: dict[Any, dict[str, Saved]]) -> None:
    """Put saved error terms beside the loaded tensors; where there are none, live ones become zero."""
    had_live = False
    for key, name, parameter in _keyed_parameters(optimizer, plain):
        for slot, tensor in _slots(optimizer, parameter):
            auxiliaries = saved.get(key, {}).get(slot)
            if auxiliaries:
                error_format = ERROR_FORMATS[next(iter(auxiliaries))[0]]
                specs = error_format.auxiliaries(tensor.dtype)
                expansion = allocate(tensor, error_format, name=f"{name}.{slot}")
                expansion.replace_contents([auxiliaries[error_format.name, spec.name] for spec in specs])
            elif (live := expansion_of(tensor)) is not None:
                had_live = True
                live.clear()
    if saved:
        _loaded_without_error_terms.discard(optimizer)
    elif had_live or optimizer in _compiled:
        _warn_zeros(optimizer)
    else:
        _loaded_without_error_terms.add(optimizer)


def _warn_zeros(optimizer: Optimizer) -> None:
    warnings.warn(
        f"collage_fx: the checkpoint loaded into {type(optimizer).__name__} holds no error terms (it was saved by a plain "
        "optimizer); they start from zero",
        stacklevel=2,
    )


def _keyed_parameters(optimizer: Optimizer, state_dict: StateDict) -> Iterator[tuple[Any, str, Tensor]]:
    """``(key in the state dict, name, parameter)`` of every parameter that both sides have."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    for key, (name, parameter) in zip(keys, parameter_names(optimizer), strict=False):  # torch checks the lengths
        yield key, name, parameter


def _slots(optimizer: Optimizer, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that an optimizer keeps for one parameter: itself, then its state."""
    yield PARAMETER_SLOT, parameter
    yield from state_tensors(optimizer.state.get(parameter, {}))
