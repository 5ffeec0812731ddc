"""Error terms in an optimizer's state dict, and in its copies and pickles.

Note [Owning the round trip]
----------------------------
Two facts force the design. A checkpoint is often loaded *before* the first step, when no backend has seen the
optimizer, so per-instance hooks registered while compiling come too late. And ``Optimizer.load_state_dict``
casts every tensor in ``state`` to its parameter's dtype (pytorch#43706), which ruins any error term of
another dtype. So importing collage_fx wraps the two methods of the base class, once: ``state_dict`` adds the
error terms to each parameter's entry under keys of ours, and ``load_state_dict`` takes them out again before
torch sees them, lets torch load the rest, and puts them beside the tensors that torch has made. A checkpoint
written with error terms is an ordinary one to a process without collage_fx, and the other way round. An
optimizer class that overrides the two methods is covered as far as it calls those of the base class.

Keys: ``collage_fx.<slot>.<format>.<auxiliary>``, where the slot is ``parameter`` or the name of the state,
for example ``collage_fx.exp_avg_sq.mcf.lo``. Tensors that belong to no single parameter (in ``param_groups``,
or in ``state`` under a key of the optimizer's own) have theirs in one more entry of the state dict,
``"collage_fx"``. What torch's state dict doesn't hold, an attribute of the optimizer, has none in it either:
``state_dict`` warns.

Note [Loaded by plain torch]
----------------------------
With ``backend="collage"`` found by its entry point, this package is imported by the line that says
``torch.compile``. A checkpoint loaded above it has gone through torch's own ``load_state_dict``: keys of ours
stand in ``optimizer.state``, cast to the parameter's dtype, and the entry of what belongs to no single
parameter is gone. So when a step is first to be compiled or recorded, :func:`adopt` makes error terms of
what it finds there, as if it had been loaded now. What a cast has cut bits from starts from zero; this and
what may be gone is warned about by name.

Note [Copies and pickles]
-------------------------
``copy.deepcopy(opt)`` and ``pickle`` go through ``__getstate__`` and ``__setstate__``, which are wrapped in
the same way: the state takes along a :class:`Carried` of each tensor that has error terms, and the memo of
the copy or the pickle sees to it that these tensors are the copy's own parameters and states. A pickle
thereby names a class of ours, so that unpickling it imports collage_fx, or fails where there is none. So
``copy.deepcopy((model, opt))`` is a pair that trains on like the first. A model copied or saved *alone* is
made of the tensors that the user sees: its parameters have no error terms, the values are hi. Here too a
class that overrides the methods is covered as far as it calls those of the base class.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.errors import CheckpointMismatchError, ConflictingErrorFormatError
from collage_fx.graph import Role
from collage_fx.numerics import ERROR_FORMATS, ErrorFormat, is_low_precision
from collage_fx.runtime.error_terms import allocate, expansion_of
from collage_fx.runtime.optimizers import known_tensors, parameter_names, shared_tensors, state_tensors
from collage_fx.torch_compat import distributed_like, local_tensor, pieces_of, wrap_states

__all__ = ["Carried", "adopt", "install", "note_compiled"]

PREFIX = "collage_fx."
#: Entry of a state dict for tensors that belong to no single parameter, and of what a pickle carries.
SHARED = "collage_fx"
PARAMETER_SLOT = "parameter"

_compiled: WeakSet[Optimizer] = WeakSet()
_loaded_without_error_terms: WeakSet[Optimizer] = WeakSet()

StateDict = dict[str, Any]

#: (format, auxiliary) -> tensor, of one state tensor.
Saved = dict[tuple[str, str], Tensor]


@dataclass(frozen=True, eq=False)
class Carried:
    """What a pickle of an optimizer holds for one tensor with error terms."""

    tensor: Tensor
    format_name: str
    auxiliaries: tuple[Tensor, ...]


def install() -> None:
    """Wrap the methods of ``Optimizer`` that save, load, copy and pickle it."""
    wrap_states(_saving, _loading, _packing, _unpacking)


def note_compiled(optimizer: Optimizer) -> None:
    """The backend has compiled a step of ``optimizer``.

    Warn if its checkpoint had no error terms to go on with.
    """
    _compiled.add(optimizer)
    if optimizer in _loaded_without_error_terms:
        _loaded_without_error_terms.discard(optimizer)
        _warn_zeros(optimizer)


def _saving(state_dict: Callable[..., StateDict]) -> Callable[..., StateDict]:
    def with_error_terms(self: Optimizer, *args: Any, **kwargs: Any) -> StateDict:
        saved = state_dict(self, *args, **kwargs)
        state = dict(saved["state"])
        for key, _, parameter in _keyed_parameters(self, saved):
            if entries := _entries(self, parameter):
                # A new dictionary: the one in ``saved`` is the optimizer's own.
                state[key] = {**(state.get(key) or {}), **entries}
        shared = dict(_keyed_auxiliaries(_shared(self)))
        _warn_unsaved(self)
        return {**saved, "state": state, **({SHARED: shared} if shared else {})}

    return with_error_terms


def _entries(optimizer: Optimizer, parameter: Tensor) -> StateDict:
    """The error terms that belong to one parameter, under their keys."""
    return {PREFIX + key: tensor for key, tensor in _keyed_auxiliaries(_slots(optimizer, parameter))}


def _keyed_auxiliaries(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """``(name.format.auxiliary, buffer)`` of those that have error terms."""
    for name, tensor in tensors:
        if (expansion := expansion_of(tensor)) is not None:
            specs = expansion.format.auxiliaries(tensor)
            for spec, auxiliary in zip(specs, expansion.auxiliaries, strict=True):
                yield f"{name}.{expansion.format.name}.{spec.name}", distributed_like(tensor, auxiliary)


def _warn_unsaved(optimizer: Optimizer) -> None:
    attributes = {
        name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")
    }
    held = {id(entry.tensor) for entry in known_tensors({"self": optimizer}).values()}
    for name, tensor in state_tensors(attributes):
        if id(tensor) not in held and expansion_of(tensor) is not None:
            warnings.warn(
                f"collage_fx: the error terms of {type(optimizer).__name__}.{name} are not in its "
                "state_dict (it holds what is in param_groups and state); they start from zero once loaded",
                stacklevel=3,
            )


def _packing(getstate: Callable[..., StateDict]) -> Callable[..., StateDict]:
    def with_error_terms(self: Optimizer) -> StateDict:
        carried = [
            Carried(entry.tensor, expansion.format.name, expansion.auxiliaries)
            for entry in known_tensors({"self": self}).values()
            if entry.role is not Role.GRADIENT and (expansion := expansion_of(entry.tensor)) is not None
        ]
        return {**getstate(self), **({SHARED: carried} if carried else {})}

    return with_error_terms


def _unpacking(setstate: Callable[..., None]) -> Callable[..., None]:
    def with_error_terms(self: Optimizer, state: StateDict) -> None:
        setstate(self, {key: value for key, value in state.items() if key != SHARED})
        for each in state.get(SHARED, ()):
            name = f"{type(self).__name__} in a pickle"
            expansion = allocate(each.tensor, _known_format(each.format_name, name), name=name)
            expansion.replace_contents(each.auxiliaries)

    return with_error_terms


def _loading(load_state_dict: Callable[..., None]) -> Callable[..., None]:
    def with_error_terms(self: Optimizer, state_dict: StateDict, *args: Any, **kwargs: Any) -> None:
        plain, saved, shared = _separated(state_dict)
        _refuse_mismatches(self, plain, saved)
        _refuse_shared_mismatches(plain, shared)
        load_state_dict(self, plain, *args, **kwargs)
        _restore(self, plain, saved, shared)

    return with_error_terms


def adopt(optimizer: Optimizer) -> None:
    """Make error terms of what plain torch has loaded into ``state``: Note [Loaded by plain torch].

    Raises:
        CheckpointMismatchError: they do not fit; nothing has been changed then.
        ConflictingErrorFormatError: likewise.
    """
    held = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    plain, saved, _ = _separated(held)
    if not saved:
        return
    lost = []
    for _, name, parameter in _keyed_parameters(optimizer, plain):
        for slot, tensor in _slots(optimizer, parameter):
            if is_low_precision(tensor.dtype) and (cast := saved.get(parameter, {}).get(slot)):
                if (auxiliaries := _as_before_the_cast(cast, tensor)) is None:
                    lost.append(f"{name}.{slot}")
                    del saved[parameter][slot]
                else:
                    saved[parameter][slot] = auxiliaries
    lost += [
        f"{name} (if there were any)" for name, each in _shared(optimizer) if is_low_precision(each.dtype)
    ]
    _refuse_mismatches(optimizer, plain, saved)
    for parameter in saved:
        for key in [key for key in optimizer.state[parameter] if str(key).startswith(PREFIX)]:
            del optimizer.state[parameter][key]
        if not optimizer.state[parameter]:
            del optimizer.state[parameter]
    _restore(optimizer, plain, saved, {})
    if lost:
        _warn_lost(optimizer, lost)


def _as_before_the_cast(auxiliaries: Saved, hi: Tensor) -> Saved | None:
    """What torch has cast to hi's dtype, in its own again; None where the cast has cut bits off."""
    found = dict(auxiliaries)
    for format_name in {format_name for format_name, _ in auxiliaries} & ERROR_FORMATS.keys():
        for spec in ERROR_FORMATS[format_name].auxiliaries(hi):
            key = format_name, spec.name
            if key in found and found[key].dtype != spec.dtype:
                if spec.dtype not in (torch.int8, torch.uint8):  # whose values hi's format holds
                    return None
                found[key] = found[key].to(spec.dtype)
    return found


def _separated(state_dict: StateDict) -> tuple[StateDict, dict[Any, dict[str, Saved]], dict[str, Saved]]:
    """A state dict without our keys, and what stood under them.

    Of each parameter: key -> slot -> :data:`Saved`. Of what they share: name -> :data:`Saved`.
    """
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
        if ours:
            saved[key] = _by_name({name.removeprefix(PREFIX): value for name, value in ours.items()})
    rest = {name: value for name, value in state_dict.items() if name != SHARED}
    return {**rest, "state": plain}, saved, _by_name(state_dict.get(SHARED, {}))


def _by_name(keyed: Mapping[str, Tensor]) -> dict[str, Saved]:
    """The inverse of :func:`_keyed_auxiliaries`."""
    saved: dict[str, Saved] = {}
    for key, value in keyed.items():
        name, format_name, auxiliary = key.rsplit(".", 2)
        saved.setdefault(name, {})[format_name, auxiliary] = value
    return saved


def _refuse_mismatches(optimizer: Optimizer, plain: StateDict, saved: dict[Any, dict[str, Saved]]) -> None:
    """Raise before anything is loaded if an error term doesn't fit the tensor it belongs to."""
    for key, name, parameter in _keyed_parameters(optimizer, plain):
        owners = {PARAMETER_SLOT: parameter, **dict(state_tensors(plain["state"].get(key, {})))}
        for slot, auxiliaries in saved.get(key, {}).items():
            where = f"{name}.{slot}"
            if slot not in owners:
                raise _mismatch("error terms of a state that the checkpoint does not hold", where)
            if is_low_precision(parameter.dtype):
                _refuse_mismatch(auxiliaries, owners[slot], parameter.dtype, where)
        _refuse_other_format(
            parameter, saved.get(key, {}).get(PARAMETER_SLOT, {}), f"{name}.{PARAMETER_SLOT}"
        )


def _refuse_shared_mismatches(plain: StateDict, shared: dict[str, Saved]) -> None:
    owners = dict(_shared_in(plain))
    for name, auxiliaries in shared.items():
        if name not in owners:
            raise _mismatch("error terms of a state that the checkpoint does not hold", name)
        _refuse_mismatch(auxiliaries, owners[name], owners[name].dtype, name)


def _refuse_mismatch(saved: Saved, owner: Tensor, dtype: torch.dtype, where: str) -> None:
    """Raise unless ``saved`` is what one format keeps for a tensor of ``owner``'s shape and of ``dtype``."""
    name = next(format_name for format_name, _ in saved)
    hi = torch.empty_strided(owner.size(), owner.stride(), dtype=dtype, device="meta")
    specs = _known_format(name, where).auxiliaries(hi)
    expected = {(name, spec.name) for spec in specs}
    if set(saved) != expected:
        raise _mismatch(f"error terms {sorted(saved)} where {sorted(expected)} belong together", where)
    for spec in specs:
        tensor = saved[name, spec.name]
        if tensor.shape != spec.shape:
            raise _mismatch(
                f"an error term of shape {tuple(tensor.shape)} where a tensor of shape {tuple(owner.shape)} "
                f"has one of {tuple(spec.shape)}",
                where,
            )
        if tensor.dtype != spec.dtype:
            raise _mismatch(
                f"an error term of {tensor.dtype} where a {dtype} tensor has one of {spec.dtype}", where
            )


def _known_format(name: str, where: str) -> ErrorFormat:
    if name not in ERROR_FORMATS:
        raise _mismatch(f"error terms in the unknown format {name!r}", where)
    return ERROR_FORMATS[name]


def _refuse_other_format(parameter: Tensor, saved: Saved, where: str) -> None:
    """Raise if a compiled step of this process keeps the parameter's error terms in another format."""
    live = expansion_of(parameter)
    for format_name, _ in saved:
        if live is not None and format_name != live.format.name:
            raise ConflictingErrorFormatError(
                f"a checkpoint with error terms in the format {format_name!r} for a tensor whose own are "
                f"{live.format.name!r}",
                where=where,
                remedy=f"compile the step with error_format={format_name!r}, or drop the live error terms "
                "first with collage_fx.reset_error_terms(tensor)",
            )


def _mismatch(met: str, where: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        met,
        where=where,
        remedy="load the checkpoint that belongs to this model, or delete its keys that start with "
        "'collage_fx.' to start from zero error terms",
    )


def _restore(
    optimizer: Optimizer, plain: StateDict, saved: dict[Any, dict[str, Saved]], shared: dict[str, Saved]
) -> None:
    """Put saved error terms beside the loaded tensors; where there are none, live ones become zero."""
    had_live = False
    unused: list[str] = []
    pairs = [(name, tensor, shared.get(name)) for name, tensor in _shared(optimizer)]
    for key, name, parameter in _keyed_parameters(optimizer, plain):
        for slot, tensor in _slots(optimizer, parameter):
            pairs.append((f"{name}.{slot}", tensor, saved.get(key, {}).get(slot)))
    for name, tensor, auxiliaries in pairs:
        if auxiliaries and is_low_precision(tensor.dtype):
            _put(tensor, auxiliaries, name)
        elif auxiliaries:
            unused.append(f"{name} ({tensor.dtype})")
        elif (live := expansion_of(tensor)) is not None:
            had_live = True
            live.clear()
    if unused:
        _warn_unused(optimizer, unused)
    if saved or shared:
        _loaded_without_error_terms.discard(optimizer)
    elif had_live or optimizer in _compiled:
        _warn_zeros(optimizer)
    else:
        _loaded_without_error_terms.add(optimizer)


def _put(tensor: Tensor, saved: Saved, name: str) -> None:
    error_format = ERROR_FORMATS[next(format_name for format_name, _ in saved)]
    expansion = allocate(tensor, error_format, name=name)
    pieces = pieces_of(tensor)
    expansion.replace_contents(
        [
            local_tensor(saved[error_format.name, spec.name], pieces)
            for spec in error_format.auxiliaries(tensor)
        ]
    )


def _warn_unused(optimizer: Optimizer, names: list[str]) -> None:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    warnings.warn(
        f"collage_fx: the checkpoint loaded into {type(optimizer).__name__} holds error terms for "
        f"{names[0]}{others}, which "
        "needs none; they are left out",
        stacklevel=2,
    )


def _warn_lost(optimizer: Optimizer, names: list[str]) -> None:
    warnings.warn(
        f"collage_fx: torch loaded a checkpoint into {type(optimizer).__name__} before collage_fx was "
        f"imported, which has cost the error terms of {', '.join(names)}; they start from zero. To keep "
        "them, import collage_fx above load_state_dict",
        stacklevel=2,
    )


def _warn_zeros(optimizer: Optimizer) -> None:
    warnings.warn(
        f"collage_fx: the checkpoint loaded into {type(optimizer).__name__} holds no error terms (it was "
        "saved by a plain "
        "optimizer); they start from zero",
        stacklevel=2,
    )


def _keyed_parameters(optimizer: Optimizer, state_dict: StateDict) -> Iterator[tuple[Any, str, Tensor]]:
    """``(key in the state dict, name, parameter)`` of every parameter that both sides have."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    # Not strict: torch checks the lengths, in its own words.
    for key, (name, parameter) in zip(keys, parameter_names(optimizer), strict=False):
        yield key, name, parameter


def _slots(optimizer: Optimizer, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that an optimizer keeps for one parameter: itself, then its state."""
    yield PARAMETER_SLOT, parameter
    yield from state_tensors(optimizer.state.get(parameter, {}))


def _shared(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The tensors that an optimizer keeps for no single parameter."""
    parameters = (parameter for _, parameter in parameter_names(optimizer))
    return shared_tensors(optimizer.param_groups, optimizer.state, parameters)


def _shared_in(state_dict: StateDict) -> Iterator[tuple[str, Tensor]]:
    """``(name, tensor)`` of what belongs to no single parameter in a state dict."""
    keys = (key for group in state_dict["param_groups"] for key in group["params"])
    return shared_tensors(state_dict["param_groups"], state_dict["state"], keys)
