"""Error terms in an optimizer's state dict, and in its copies and pickles.

Note [Owning the round trip]
----------------------------
An optimizer is adopted (:func:`adopt`) when its step is given to ``torch.compile`` or to ``install``, and at
the latest when a step is first compiled or recorded. From then on ``state_dict`` adds the error terms to each
parameter's entry under keys of ours, and ``load_state_dict`` takes them out before torch loads the rest, and
puts them beside the tensors that torch has made. (torch casts every tensor in ``state`` to its parameter's
dtype, pytorch#43706.) Hooks that the user has registered before see our keys, and error terms. To a process
without collage_fx such a checkpoint is an ordinary one, and the other way round, unless state is packed.

A class with methods of its own for the two may rename the entries, or have another layout. So such an
optimizer has methods of ours around its class's (:class:`OwnMethod`), which give the class a state dict
without our keys, and put ours beside what it has left. A renamed slot is found by the fingerprint. A layout
without ``state`` and ``param_groups`` gets one more entry, ``"collage_fx"``, with the error terms that are
not in it yet: those of an optimizer within are.

Keys: ``collage_fx.<slot>.<format>.<auxiliary>``, where the slot is ``parameter`` or the name of the state, as
``collage_fx.exp_avg_sq.exact.rest``: :func:`state_tensors`. Beside them,
``collage_fx.<slot>.<format>.fingerprint`` tells which values they belong to: Note [Fingerprints]. Error terms
of tensors that belong to no single parameter (in ``param_groups``, or in ``state`` under a key of the
optimizer's own) are in one more entry of the state dict, ``"collage_fx"``. Those of attributes of the
optimizer, which torch's state dict does not hold, are not saved: ``state_dict`` warns. State of another dtype
than its parameter has a key of its own: Note [Wide state]. Entries named ``"collage_fx.<name>"`` beside
``state`` (:func:`carry_along`) let a resumed run decide as the interrupted run would have.

Note [Memory of a loaded state dict]
------------------------------------
Torch uses the tensors of a state dict as ``optimizer.state``, if dtype and device fit. Their error terms are
used as buffers likewise, so that loading takes no memory beside that of the state dict. They are copied where
torch copies all state of a parameter, as a program may load such a state dict once more, and where they are
the buffers of another record.

Note [Packed state in files]
----------------------------
A packed tensor in a state dict is the optimizer's own; it is decoded when it is read. Its pickle is a call of
:func:`packed_tensor` with its auxiliaries, the same memory as under our keys, which are for programs that
handle tensors alone, such as torch.distributed.checkpoint. So a file holds them once, and names a function of
ours, which is registered with ``torch.load`` (``add_safe_globals``). In a process without collage_fx the
error of ``torch.load`` names it: use :func:`plain_state_dict`.

Note [Loaded by plain torch]
----------------------------
A checkpoint that is loaded before the optimizer is adopted leaves our keys in ``optimizer.state``, cast to
the parameter's dtype. Error terms of that dtype and bytes survive the cast, and all others are saved as bytes
(:meth:`AuxiliarySpec.saved`). So :func:`adopt` makes error terms of them, to the bit. Five things are gone:

* the entry of what belongs to no single parameter, which torch drops: named by a warning;
* what torch.distributed.checkpoint has left out of its file, which it loads into what an optimizer holds
  already: told by the same sign, with the same warning;
* what a float32 checkpoint holds beyond 16 bits, and whether a plain optimizer has saved it: the state
  counts more steps than the optimizer has taken here, or it counts none, is not zero, and the groups are
  those of a state dict. The compiled step warns of it;
* bits of wide state that is not 0-d, which has its dtype again (Note [Wide state]): named by a warning;
* error terms in float32, as earlier versions saved those of fp32: they start from zero, named by
  a warning, as the cast has cut bits from them.

An optimizer that nobody compiles is looked at before its first step, which torch's global hook tells of
(:func:`note_eager_step`): a float32 model gets what was saved of a 16-bit one.

Note [A checkpoint that is not what it says]
--------------------------------------------
Plain PyTorch takes steps and leaves our entries unchanged; files are swapped and damaged; a model is loaded
in the middle of a run. So loaded error terms, and those of a module whose ``load_state_dict`` has been
called, are checked before the first step that uses them (:class:`Claims`): if the fingerprint is not that of
the pair, they become zero, with one warning that names the tensors. An entry that cannot be an error term at
all (of another shape, not finite) is refused, and nothing is loaded. Error terms in another format than the
step's are converted at that first step. Error terms loaded beside a float32 tensor are added to it, and a
float32 tensor loaded into 16 bits leaves its rest as an error term, if the step has an error term for it.

Note [Copies and pickles]
-------------------------
``copy.deepcopy(opt)`` and ``pickle`` ask ``copyreg`` for a function that takes objects of a class apart.
Ours, for the class of each adopted optimizer, adds a :class:`PickledRecord` of each tensor that has error
terms; the memo sees to it that these tensors are the copy's own. The copy is adopted, as torch copies no
hooks. A pickle thereby names functions of ours: unpickling imports collage_fx, or fails where there is none.
So ``copy.deepcopy((model, opt))`` is a pair that trains on like the first. A model copied or saved *alone*
has no error terms: its values are hi.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

import collage_fx
from collage_fx import torch_compat
from collage_fx.errors import CheckpointMismatchError, warn
from collage_fx.graph import Role
from collage_fx.numerics import (
    COUNT,
    STORAGE_FORMATS,
    SUM,
    AuxiliarySpec,
    ErrorFormat,
    Exact,
    format_named,
    is_low_precision,
)
from collage_fx.state import error_terms, optimizers, wide_state
from collage_fx.state.claims import Claims, some
from collage_fx.state.error_terms import ErrorTermRecord
from collage_fx.state.fingerprints import BYTES, ROWS, chunk_on, differences, fingerprint, number_in, table_of
from collage_fx.state.optimizers import KnownTensor
from collage_fx.state.packed import decoded, is_packed
from collage_fx.state.replaced_state import format_before, note_held
from collage_fx.torch_compat import has_storage, local_tensor, pytree, records, sharding_of, storage_of

PREFIX = "collage_fx."
#: Entry of a state dict for tensors that belong to no single parameter; in a pickle, for all records.
SHARED = "collage_fx"
#: Entry of a parameter in a state dict for state that is no dictionary, beside our entries.
WHOLE = PREFIX + "state"
PARAMETER_SLOT = "parameter"
#: Name of the fingerprint, beside the names of a format's auxiliaries.
FINGERPRINT = "fingerprint"

#: Name of a value that copies take along -> (function that returns it, function that restores it).
_carried_along: dict[str, tuple[Callable[[Optimizer], Any], Callable[[Optimizer, Any], object]]] = {}

StateDict = dict[str, Any]

#: ``(key of a parameter in the state dict, slot)``; ``(None, name)`` for a tensor of no single parameter.
Owner = tuple[Any, str]

#: (format, auxiliary) -> buffer, for one state tensor.
Auxiliaries = dict[tuple[str, str], Tensor]
Saved = dict[Owner, Auxiliaries]

#: Owner of wide or narrow state -> its dtype, and the value of its key: Note [Wide state].
Kept = dict[Owner, tuple[torch.dtype, Tensor]]


@dataclass(eq=False)
class _Load:
    """State dict that is being loaded.

    Attributes:
        plain: the state dict without our keys.
        saved: error terms in it. In the load of a class's own method they, and ``kept``, become empty when
            torch's load takes them over: of this optimizer, or of one within that is given the same entries.
        kept: state in it of another dtype than its parameter.
        live: dtypes of the optimizer's state before the load.
        along: values of :func:`carry_along` in it.
    """

    plain: StateDict
    saved: Saved = field(default_factory=dict)
    kept: Kept = field(default_factory=dict)
    live: Mapping[Owner, torch.dtype] = field(default_factory=dict)
    along: StateDict = field(default_factory=dict)


@dataclass(eq=False)
class Files:
    """Facts about an optimizer's files: a part of its record.

    Attributes:
        is_adopted: whether it saves and loads error terms.
        is_compiled: whether a step has been compiled, so that a checkpoint needs error terms.
        eager_steps: number of steps that it has taken without being compiled.
        loads: number of times that ``load_state_dict`` has given it other state tensors.
        loading: state dict between torch's two hooks; one that torch refuses stays until the next load.
        left_out: while it is loaded, error terms for it that the given state dict lacks.
        waiting: state that a checkpoint had without error terms.
    """

    is_adopted: bool = False
    is_compiled: bool = False
    eager_steps: int = 0
    loads: int = 0
    loading: _Load | None = None
    left_out: Saved = field(default_factory=dict)
    waiting: list[_Waiting] = field(default_factory=list)


#: Class's own methods that run, the innermost last; a load is given a state dict without our keys.
_own_loads: list[tuple[Optimizer, _Load]] = []
_own_saves: list[Optimizer] = []


@dataclass(frozen=True, eq=False)
class PickledRecord:
    """Record of a tensor's auxiliaries in the pickle of an optimizer.

    Attributes:
        auxiliaries: buffers in the form of a checkpoint, as ``pickle`` does not know every dtype.
        claim: fingerprint that they were loaded with, if no step has checked it yet.
    """

    tensor: Tensor
    format_name: str
    auxiliaries: tuple[Tensor, ...]
    claim: Tensor | None = None


#: Names of the class in pickles of earlier versions.
Carried = PickledExpansion = PickledRecord


@dataclass(frozen=True, eq=False)
class PickledWider:
    """Tensor of a state that was wider in a checkpoint, in the pickle of an optimizer."""

    name: str
    tensor: Tensor
    wider: Tensor


def note_compiled(optimizer: Optimizer) -> None:
    """Note that a step has been compiled: fill error terms from wider state of the checkpoint, or warn."""
    files, missing = files_of(optimizer), []
    files.is_compiled = True
    waiting, files.waiting = files.waiting, []
    for name, reference, wider in waiting:
        if (tensor := reference()) is None:
            continue
        if (before := format_before(name, optimizer)) is not None:  # torch has replaced this state tensor
            error_terms.ensure_record(tensor, before, name=name)
        record = error_terms.record_of(tensor)
        if record is None or not record.format.holds_more or record.is_whole or is_packed(tensor):
            continue  # it needs no error terms, or its whole value has been loaded since
        if wider is not None:
            with torch_compat.real_tensors():
                rest = _as_loaded(tensor, wider) - local_tensor(tensor.detach())
                error_terms.fill(record, tensor, rest.float())
        elif record.format.keeps_error:
            missing.append(name)
    _warn_of_missing(type(optimizer), missing)


def files_of(optimizer: Optimizer) -> Files:
    """Return the facts about an optimizer's files, which may be changed."""
    return records.of(optimizer, Files)


def carry_along(
    name: str, value: Callable[[Optimizer], Any], restore: Callable[[Optimizer, Any], object]
) -> None:
    """Register a value, not in an optimizer's state, that its copies and pickles take along, by its name.

    ``value`` returns it, or None; ``restore`` gets the copy, with its state and error terms, and the value. A
    name that begins with our prefix is a key in state dicts, too.
    """
    _carried_along[name] = value, restore


def _save_by_own(optimizer: Optimizer, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a class's own ``state_dict``; add the error terms to its result."""
    _own_saves.append(optimizer)
    try:
        made = method(*args, **kwargs)
    finally:
        _own_saves.pop()
    if not isinstance(made, dict):
        return made
    if _is_torchs_layout(made):
        return _after_save(optimizer, made)
    _, saved = _separated(_after_save(optimizer, _numbered(optimizer)))
    present = {storage_of(each) for each in pytree.tree_leaves(made) if isinstance(each, Tensor)}
    table: StateDict = {}
    for (key, slot), auxiliaries in saved.items():
        if any(
            kind == wide_state.KEPT
            or (each.dim() and name != FINGERPRINT and storage_of(each) not in present)
            for (kind, name), each in auxiliaries.items()
        ):
            table |= {f"{key}.{slot}.{kind}.{name}": each for (kind, name), each in auxiliaries.items()}
    along = _along(optimizer, PREFIX)
    return {**made, **({SHARED: table} if table else {}), **along} if table or along else made


def _is_torchs_layout(state_dict: Mapping[str, Any]) -> bool:
    """Return whether a state dict has state by parameter, and groups that list the parameters."""
    return isinstance(state_dict.get("state"), Mapping) and "param_groups" in state_dict


def _numbered(optimizer: Optimizer) -> StateDict:
    """Return an optimizer's state with numbers in the place of parameters, as torch's state dict has them."""
    numbers = {id(parameter): i for i, (_, parameter) in enumerate(optimizers.parameter_names(optimizer))}
    state = {numbers.get(id(key), key): value for key, value in optimizer.state.items()}
    groups = [{**each, "params": [numbers[id(p)] for p in each["params"]]} for each in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def _after_save(optimizer: Optimizer, saved: StateDict) -> StateDict:
    """Add the error terms to a state dict of torch's, unless the class's own method will change it."""
    if any(each is optimizer for each in _own_saves):
        return saved
    _warn_unsaved(optimizer)
    state, wider = dict(saved["state"]), {id(each.tensor): each for each in _still_wider(optimizer)}
    for key, _, parameter in _keyed_parameters(optimizer, saved):
        entry = optimizer.state.get(parameter)
        unpacked = (each for each in _state_slots(entry) if not is_packed(each[1]))
        kept = wide_state.kept_entries(parameter, unpacked)
        are_flat = torch_compat.is_flattened(parameter)
        auxiliaries = _keyed_auxiliaries(_slots(parameter, entry), are_flat=are_flat)
        ours = {PREFIX + name: tensor for name, tensor in itertools.chain(auxiliaries, kept)}
        waiting = ((name, each) for name, each in _as_dictionary(entry).items() if id(each) in wider)
        loaded = ((name, each, _as_loaded(each, wider[id(each)].wider)) for name, each in waiting)
        unchanged = {name: torch_compat.distributed_like(each, value) for name, each, value in loaded}
        if unchanged or ours:  # a new dictionary, as the one in ``saved`` is the optimizer's own
            state[key] = {**_as_dictionary(state.get(key)), **unchanged, **ours}
    shared = dict(_keyed_auxiliaries(optimizers.shared_tensors(optimizer.param_groups, optimizer.state)))
    along = _along(optimizer, PREFIX)
    return {**saved, "state": state, **({SHARED: shared} if shared else {}), **along}


def _as_dictionary(entry: Any) -> StateDict:
    """Return the state of a parameter as a dictionary that has room for our entries."""
    return entry if isinstance(entry, dict) else {} if entry is None else {WHOLE: entry}


def _keyed_auxiliaries(
    tensors: Iterable[tuple[str, Tensor]], *, are_flat: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name.format.auxiliary, buffer)`` for tensors that have a record.

    Those of flat tensors are what FSDP1 gathers: numbers, and tensors of the same shape and dtype, without a
    fingerprint. A byte is exact in each dtype.
    """
    for name, tensor in tensors:
        if (record := error_terms.record_of(tensor)) is not None and record.is_current:
            record.settle_written()
            specs, is_state = record.format.auxiliaries(tensor), are_flat and record.format.keeps_hi
            for spec, auxiliary in zip(specs, record.auxiliaries, strict=True):
                saved = spec.as_state(auxiliary, tensor.dtype) if is_state else spec.saved(auxiliary)
                if auxiliary.dim():  # a 0-d auxiliary is the same in all processes
                    saved = torch_compat.distributed_like(tensor, saved, spec.saved_shape)
                yield f"{name}.{record.format.name}.{spec.name}", saved
            if record.format.holds_more and not is_state:
                table = table_of(_fingerprint_of(tensor, record), tensor)
                yield f"{name}.{record.format.name}.{FINGERPRINT}", table


def _fingerprint_of(tensor: Tensor, record: ErrorTermRecord, *, earlier: bool = False) -> Tensor:
    """Return this process's part of a fingerprint; as it was loaded, if no step has used the error terms."""
    if is_packed(tensor):
        parts = record.decoded_parts(chunk_on(tensor.device))
        return torch.stack([fingerprint(*part, earlier=earlier) for part in parts]).sum()
    return fingerprint(local_tensor(tensor), record.auxiliaries) if record.claim is None else record.claim


def _warn_unsaved(optimizer: Optimizer) -> None:
    """Warn of error terms that a state dict does not hold, as their tensors are attributes."""
    attributes = {n: each for n, each in vars(optimizer).items() if n not in ("state", "param_groups")}
    with_inner = {"self": optimizer, **optimizers.optimizers_among(vars(optimizer))}
    held = {id(entry.tensor) for entry in optimizers.known_tensors(with_inner).values()}
    for name, tensor in optimizers.state_tensors(attributes):
        if id(tensor) not in held and error_terms.has_error_terms(tensor):
            warn(
                f"the error terms of {type(optimizer).__name__}.{name} are not in its "
                "state_dict (it holds what is in param_groups and state); they start from zero once loaded"
            )


def _taken_apart(optimizer: Optimizer) -> Any:
    """Reduce an optimizer for ``copyreg``: with torch's reduction, and with our values last."""
    before = _reducers[type(optimizer)]
    reduced = optimizer.__reduce_ex__(4) if before is None else before(optimizer)
    along = _carried(optimizer)
    if isinstance(reduced, str) or not (along or files_of(optimizer).is_adopted):
        return reduced
    make, args, state, *rest = reduced
    if isinstance(state, dict):
        state = optimizers.without_own_methods(torch_compat.without_own_step(state).items())
        for name, hooks in state.items():
            if name.startswith("_optimizer_") and isinstance(hooks, dict):  # the copy has ours anew
                modules = {i: str(getattr(hook, "__module__", "")) for i, hook in hooks.items()}
                theirs = (i for i, module in modules.items() if not module.startswith("collage_fx."))
                state[name] = OrderedDict((i, hooks[i]) for i in theirs)
    return _made_anew, (make, args), (state, along), *rest


#: Class for which :func:`_taken_apart` is registered -> the function registered before, if any.
_reducers: dict[type[Optimizer], Callable[[Any], Any] | None] = {}


def _carried(optimizer: Optimizer) -> StateDict:
    pickled: list[PickledRecord | PickledWider] = [
        PickledRecord(entry.tensor, record.format.name, _as_saved(entry.tensor, record), record.claim)
        for entry in optimizers.known_tensors({"self": optimizer}).values()
        if entry.role is not Role.GRADIENT
        and (record := error_terms.record_of(entry.tensor)) is not None
        and record.is_current
    ]
    pickled += _still_wider(optimizer)
    return {**({SHARED: pickled} if pickled else {}), **_along(optimizer)}


def _along(optimizer: Optimizer, prefix: str = "") -> StateDict:
    """Return the values of :func:`carry_along` whose names have a prefix, as in state dicts."""
    found = {name: value(optimizer) for name, (value, _) in _carried_along.items() if name.startswith(prefix)}
    return {name: value for name, value in found.items() if value is not None}


def _for_files(values: Mapping[str, Any]) -> StateDict:
    """Return the values of :func:`carry_along` that a state dict holds."""
    return {name: values[name] for name in _carried_along if name in values and name.startswith(PREFIX)}


def _give_along(optimizer: Optimizer, along: Mapping[str, Any]) -> None:
    collage_fx._complete()  # a pickle may be the first use of the library: now all are registered
    for name, (_, restore) in _carried_along.items():
        if (value := along.get(name)) is not None:
            restore(optimizer, value)


def _as_saved(tensor: Tensor, record: ErrorTermRecord) -> tuple[Tensor, ...]:
    specs = record.format.auxiliaries(local_tensor(tensor))
    return tuple(spec.saved(each) for spec, each in zip(specs, record.auxiliaries, strict=True))


def _made_anew(make: Callable[..., Optimizer], args: tuple[Any, ...]) -> Optimizer:
    """Make an object for a copy or a pickle, with a method for its state that serves once."""
    optimizer = make(*args)
    vars(optimizer)["__setstate__"] = functools.partial(_set_state, optimizer)
    return optimizer


def _set_state(optimizer: Any, state_and_ours: tuple[Any, StateDict]) -> None:
    """Restore the state of an optimizer made by :func:`_made_anew`; serves once as its ``__setstate__``."""
    del vars(optimizer)["__setstate__"]
    state, along = state_and_ours
    optimizer.__setstate__(state)
    _register(optimizer)
    _give(optimizer, along)


def _give(optimizer: Optimizer, along: StateDict) -> None:
    """Restore the content that :func:`_carried` took from an optimizer, in a copy of the optimizer."""
    pickled: Sequence[PickledRecord | PickledWider] = along.get(SHARED, ())
    known = optimizers.known_tensors({"self": optimizer} if pickled else {})
    claims = _claims_in(type(optimizer))
    for each in pickled:
        if isinstance(each, PickledWider):
            waiting = _Waiting(each.name, TensorWeakRef(each.tensor), each.wider)
            files_of(optimizer).waiting.append(waiting)
            continue
        name = f"{type(optimizer).__name__} in a pickle"
        record = error_terms.ensure_record(each.tensor, _known_format(each.format_name, name), name=name)
        specs = record.format.auxiliaries(local_tensor(each.tensor))
        counts = (_saved_zero(),)[: len(specs) - len(each.auxiliaries)]
        saved = (*each.auxiliaries, *counts)  # earlier versions had no count in exact
        record.replace_contents([spec.loaded(one) for spec, one in zip(specs, saved, strict=True)])
        if each.claim is not None:
            claims.add(known[id(each.tensor)].name, record, each.claim)
    _give_along(optimizer, along)


def _before_load(optimizer: Optimizer, given: StateDict) -> StateDict | None:
    """Separate our keys from a state dict, check them, and return the rest for torch to load."""
    if not isinstance(given.get("state"), Mapping):
        return None  # what a later hook of the user's understands: error terms in it are adopted once loaded
    files_of(optimizer).loading = load = _read(optimizer, given)
    return load.plain


def _read(optimizer: Optimizer, given: Mapping[str, Any], *, may_rename: bool = False) -> _Load:
    """Separate a state dict from our keys; refuse keys that do not fit.

    A class's own load is given none of our keys: they are those that the class was given.
    """
    plain, saved = _separated(dict(given))
    saved |= files_of(optimizer).left_out
    _, outer = _own_loads[-1] if _own_loads else (None, None)
    if not saved and outer is not None and _keys_in(outer.plain) == _keys_in(plain):
        saved, kept, outer.saved, outer.kept = outer.saved, outer.kept, {}, {}
    else:
        kept = _kept_among(saved)
        _drop_present_formats(optimizer, plain, saved)
        _refuse_mismatches(optimizer, plain, saved, kept, may_rename=may_rename)
        _refuse_damaged(optimizer, plain, saved)
    live = {owner: tensor.dtype for owner, _, tensor in _held(optimizer, plain)}
    return _Load(plain, saved, kept, live, _for_files(given))


def _keys_in(state_dict: StateDict) -> list[Any]:
    return [key for group in state_dict.get("param_groups", ()) for key in group["params"]]


def _after_load(optimizer: Optimizer, along: StateDict | None = None) -> None:
    """Restore the error terms after torch has loaded the rest, and the class's own method has ended.

    ``along`` has the values of :func:`carry_along` that the class's own method was given.
    """
    if any(each is optimizer for each, _ in _own_loads):
        return
    files = files_of(optimizer)
    files.loads += 1
    loading, files.loading = files.loading, None
    along = along or ({} if loading is None else loading.along)
    if loading is not None:
        loading.along = along
        _restore(optimizer, loading)
    _give_along(optimizer, along)
    adopt(optimizer)


def _load_by_own(optimizer: Optimizer, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a class's own ``load_state_dict`` with a state dict without our keys, then restore error terms."""
    bound = inspect.signature(method).bind(*args, **kwargs)
    name, given = next(iter(bound.arguments.items()), ("", None))
    if not isinstance(given, Mapping):
        return method(*args, **kwargs)
    table: Saved = {}
    if _is_torchs_layout(given):
        load = _read(optimizer, given, may_rename=True)
    else:
        keyed = ((*key.partition("."), tensor) for key, tensor in given.get(SHARED, {}).items())
        table = _by_owner((int(n) if n.isdigit() else None, rest, tensor) for n, _, rest, tensor in keyed)
        load = _Load(_without_ours(given))
    _own_loads.append((optimizer, load))
    bound.arguments[name] = load.plain
    files = files_of(optimizer)
    files.loading = None
    try:
        result = method(*bound.args, **bound.kwargs)
    finally:
        _own_loads.pop()
    if not _is_torchs_layout(given):
        loading, files.loading = files.loading, None
        _restore_table(optimizer, table, loading)
    elif load.saved or load.kept:  # the class has not called torch's load
        files.loading = load
    _after_load(optimizer, _for_files(given))
    return result


def _restore_table(optimizer: Optimizer, saved: Saved, load: _Load | None) -> None:
    """Put the error terms of a table beside the tensors that the class's own load has left.

    ``load`` has what torch's load of this optimizer was given, if the class has called it.
    """
    plain, kept = _numbered(optimizer), _kept_among(saved)
    _refuse_mismatches(optimizer, plain, saved, kept)
    if load is not None:
        keys = dict(enumerate(_keys_in(load.plain)))
        of_keys = {(keys.get(number, number), slot): each for (number, slot), each in kept.items()}
        load.kept = load.kept | of_keys
        _restore_wide(optimizer, load, set())
    claims = _claims_in(type(optimizer))
    for owner, name, tensor in _held(optimizer, plain):
        if (auxiliaries := saved.get(owner)) and is_low_precision(tensor.dtype):
            _put_beside(tensor, auxiliaries, name, claims, None)


def _unflattening(
    unflatten: Callable[..., StateDict], optim: Optimizer, state_dict: StateDict, *args: Any, **kwargs: Any
) -> StateDict:
    """Replace torch's function for flat state dicts, which looks only for names of existing state."""
    unflattened = unflatten(optim, state_dict, *args, **kwargs)
    for name, entries in unflattened["state"].items():
        prefix = f"state.{name}."
        ours = (key for key in state_dict if key.startswith(prefix + PREFIX))
        entries.update({key.removeprefix(prefix): state_dict[key] for key in ours})
    return unflattened


torch_compat.wrap_flat_states(_unflattening)


def plain_state_dict(state_dict: Mapping[str, Any]) -> StateDict:
    """Return an optimizer's state dict for plain PyTorch: without our entries, packed state decoded.

    Args:
        state_dict: state dict of an optimizer, its own or loaded from a file. It is not changed.

    Returns:
        a state dict with tensors of PyTorch's own classes alone, which a process without collage_fx can load.
        It lacks the values of error terms; decoded state has the parameter's 16 bits.
    """
    plain, _ = _separated(dict(state_dict))
    return cast(StateDict, pytree.tree_map_only(Tensor, decoded, plain))


def load_flat(
    optimizer: Optimizer, flat: Mapping[str, Any], load: Callable[[Optimizer, Mapping[str, Any]], None]
) -> None:
    """Load a flat state dict with our keys, by a function that loads only names that ``optimizer.state`` has.

    ``flat`` maps ``state.<name of a parameter>.<key>`` to values; the parameters have names, and state.

    Raises:
        CheckpointMismatchError: error terms do not fit; nothing has been loaded then.
    """
    adopt(optimizer)
    keyed = _keyed_parameters(optimizer, optimizer.state_dict())
    prefixes = [(key, f"state.{name}.{PREFIX}") for key, name, _ in keyed]
    files = files_of(optimizer)
    files.left_out = _by_owner(
        (key, name.removeprefix(prefix), value)
        for key, prefix in prefixes
        for name, value in flat.items()
        if name.startswith(prefix)
    )
    try:
        load(optimizer, flat)
    finally:
        files.left_out = {}


def adopt(optimizer: Optimizer) -> None:
    """Make an optimizer, and the optimizers in it, save, load and copy error terms from now on.

    Entries that plain torch has loaded into ``state`` become error terms: Note [Loaded by plain torch].

    Raises:
        CheckpointMismatchError: the entries do not fit; nothing has been changed then.
    """
    for each in (optimizer, *optimizers.optimizers_among(vars(optimizer)).values()):
        is_new = not files_of(each).is_adopted
        if is_new:
            _register(each)
            of_pickle = [name for name in vars(each) if name.startswith(SHARED)]  # of an earlier version
            if found := {name.removeprefix(PREFIX): vars(each).pop(name) for name in of_pickle}:
                _give(each, found)
        if not _take_up(each) and is_new:
            _note_left_out(each)


def adopted_by_storage() -> dict[int, list[KnownTensor]]:
    """Map storages to the low-precision parameters and states, not packed, of all adopted optimizers."""
    found: dict[int, list[KnownTensor]] = {}
    adopted = (each for each, files in records.all_of(Files) if files.is_adopted)
    for known in (known for each in adopted for known in optimizers.known_tensors({"self": each}).values()):
        is_low = known.role is not Role.GRADIENT and is_low_precision(known.tensor.dtype)
        if is_low and not is_packed(known.tensor) and has_storage(piece := local_tensor(known.tensor)):
            found.setdefault(storage_of(piece), []).append(known)
    return found


def _register(optimizer: Optimizer) -> None:
    files_of(optimizer).is_adopted = True
    optimizers.wrap_own_method(optimizer, "state_dict", _save_by_own)
    optimizers.wrap_own_method(optimizer, "load_state_dict", _load_by_own)
    try:
        optimizer.register_state_dict_post_hook(_after_save, prepend=True)
    except AttributeError:  # of a class that does not call Optimizer.__init__: torch saves and loads none
        return
    optimizer.register_load_state_dict_pre_hook(_before_load)
    optimizer.register_load_state_dict_post_hook(_after_load, prepend=True)
    kind = type(optimizer)
    if (registered := copyreg.dispatch_table.get(kind)) is not _taken_apart:
        _reducers[kind] = registered
        copyreg.pickle(kind, _taken_apart)


def _take_up(optimizer: Optimizer) -> bool:
    """Make error terms of our keys in an optimizer's state; return whether there are any."""
    plain, saved = _separated(_contents(optimizer))
    if not saved:
        return False
    of_ours, kept = {parameter for parameter, _ in saved}, _kept_among(saved)
    shared = (each for each in _held(optimizer, plain) if each[0][0] is None)
    lost = [f"{name} (if there were any)" for _, name, each in shared if is_low_precision(each.dtype)]
    _refuse_mismatches(optimizer, plain, saved, kept)
    for parameter in of_ours:
        entries = optimizer.state[parameter]
        for key in [key for key in entries if key != WHOLE and str(key).startswith(PREFIX)]:
            del entries[key]
        if WHOLE in entries:
            optimizer.state[parameter] = entries[WHOLE]
        elif not entries:
            del optimizer.state[parameter]
    _restore(optimizer, _Load(plain, saved, kept))
    if lost:
        warn(
            f"a checkpoint was loaded into {type(optimizer).__name__} before its step was given "
            f"to torch.compile or install, which has cost the error terms of {', '.join(lost)}; they start "
            "from zero. To keep them, call load_state_dict below that line"
        )
    return True


def _contents(optimizer: Optimizer) -> StateDict:
    return {"state": optimizer.state, "param_groups": optimizer.param_groups}


def _new_names(optimizer: Optimizer) -> list[str] | None:
    """Return the names of the tensors of which no step has chosen yet whether they keep their error terms."""
    known = optimizers.known_tensors({"self": optimizer}).values()
    records = ((each.name, error_terms.record_of(each.tensor)) for each in known)
    return [name for name, record in records if record is not None and record.is_new] or None


def _note_new(optimizer: Optimizer, names: Sequence[str]) -> None:
    for each in optimizers.known_tensors({"self": optimizer}).values():
        if each.name in names:
            error_terms.note_new(each.tensor)


carry_along(PREFIX + "new", _new_names, _note_new)


def _note_left_out(optimizer: Optimizer) -> None:
    """Note state that was loaded before the optimizer was adopted, without error terms.

    It counts more steps than the optimizer has taken here. State that counts none was loaded if it is not
    zero before the first step, and the groups are those of a state dict, in which the parameters stand last.
    Without the latter the optimizer has made it when it was constructed.
    """
    files, contents = files_of(optimizer), _contents(optimizer)
    steps = files.eager_steps
    may_be_loaded = not steps and all(
        len(group) > 1 and [*group][-1] == "params" for group in optimizer.param_groups
    )
    loaded = {
        key: counted > steps
        if isinstance(entries, dict) and (counted := _counted_steps(entries)) is not None
        else may_be_loaded and any(bool(tensor.any()) for _, tensor in _state_slots(entries))
        for key, entries in optimizer.state.items()
        if isinstance(key, Tensor) or isinstance(entries, dict)
    }
    if any(loaded.values()):
        files.waiting = [
            _Waiting(name, TensorWeakRef(tensor), None)
            for (key, _), name, tensor in _held(optimizer, contents)
            if loaded.get(key, key is None)
            and is_low_precision(tensor.dtype)
            and error_terms.record_of(tensor) is None
        ]


def _counted_steps(entries: StateDict) -> float | None:
    """Return the number of steps that the state of a parameter counts; None if it counts no steps."""
    count = entries.get("step")
    is_number = count.numel() == 1 if isinstance(count, Tensor) else isinstance(count, (int, float))
    return float(cast(float, count)) if is_number else None


def _separated(state_dict: StateDict) -> tuple[StateDict, Saved]:
    """Separate a state dict from the values under our keys."""
    plain: dict[Any, Any] = {}
    keyed = [(None, name, value) for name, value in state_dict.get(SHARED, {}).items()]
    for key, entries in state_dict["state"].items():
        if not isinstance(entries, dict):
            plain[key] = entries
            continue
        ours = {name: value for name, value in entries.items() if str(name).startswith(PREFIX)}
        rest = {name: value for name, value in entries.items() if name not in ours}
        if WHOLE in ours:
            plain[key] = ours.pop(WHOLE)
        elif rest or not ours:
            plain[key] = rest
        keyed += ((key, name.removeprefix(PREFIX), value) for name, value in ours.items())
    return {**_without_ours(state_dict), "state": plain}, _by_owner(keyed)


def _without_ours(values: Mapping[str, Any]) -> StateDict:
    return {key: value for key, value in values.items() if not str(key).startswith(SHARED)}


def _by_owner(keyed: Iterable[tuple[Any, str, Tensor]]) -> Saved:
    """Group ``(parameter, key, auxiliary)`` by owner: the inverse of :func:`_keyed_auxiliaries`."""
    saved: Saved = {}
    for parameter, key, value in keyed:
        slot, format_name, auxiliary = key.rsplit(".", 2)
        saved.setdefault((parameter, slot), {})[format_name, auxiliary] = value
    for auxiliaries in saved.values():
        if (Exact.name, "rest") in auxiliaries:  # without a count of steps in earlier versions
            auxiliaries.setdefault((Exact.name, COUNT.name), _saved_zero())
    return saved


def _saved_zero() -> Tensor:
    return COUNT.saved(COUNT.zeros(torch.device("cpu")))


def _drop_present_formats(optimizer: Optimizer, plain: StateDict, saved: Saved) -> None:
    """Drop entries of the optimizer's formats, which torch's ``set_optimizer_state_dict`` adds to others."""
    for owner, _, tensor in _held(optimizer, plain):
        auxiliaries, record = saved.get(owner, {}), error_terms.record_of(tensor)
        if record is not None and len({name for name, _ in auxiliaries}) > 1:
            saved[owner] = {key: each for key, each in auxiliaries.items() if key[0] != record.format.name}


def _refuse_mismatches(
    optimizer: Optimizer, plain: StateDict, saved: Saved, kept: Kept, *, may_rename: bool = False
) -> None:
    """Raise before anything is loaded if an error term does not fit the tensor it belongs to.

    State of another name is looked for after the load if the class's own method may rename it.
    """
    owners = {owner: tensor for owner, _, tensor in _held(optimizer, plain, in_file=True)}
    names = {None: "", **{key: f"{name}." for key, name, _ in _keyed_parameters(optimizer, plain)}}
    for (key, slot), auxiliaries in saved.items():
        if key in names and auxiliaries:  # torch refuses other numbers of parameters, in its own words
            where, tensor = f"{names[key]}{slot}", owners.get((key, slot))
            if tensor is None:
                if may_rename:
                    continue
                fault = "the checkpoint has error terms of a state tensor that it does not hold"
                raise _mismatch(fault, where)
            dtype, _ = kept.get((key, slot), (owners.get((key, PARAMETER_SLOT), tensor).dtype, None))
            if _is_of_float32(auxiliaries):
                dtype = tensor.dtype  # codes are those of the saved tensor, which torch may cast
            if is_low_precision(dtype) or (dtype is torch.float32 and _is_of_float32(auxiliaries)):
                _refuse_mismatch(auxiliaries, tensor, dtype, where)


def _refuse_damaged(optimizer: Optimizer, plain: StateDict, saved: Saved) -> None:
    """Raise before anything is loaded if packed state has not the bytes that were saved."""
    for owner, where, tensor in _held(optimizer, plain, in_file=True):
        auxiliaries, record = saved.get(owner, {}), error_terms.record_of(tensor)
        is_of_file = is_packed(tensor) and owner[1] != PARAMETER_SLOT
        if record is None or not is_of_file or all(name != FINGERPRINT for _, name in auxiliaries):
            continue
        actual = torch.stack([_fingerprint_of(tensor, record, earlier=each) for each in (False, True)])
        pieces, far = sharding_of(tensor), _number_in(auxiliaries, tensor).to(actual.device) - actual
        if all((far if pieces is None else pieces.sum(far)).tolist()):
            raise CheckpointMismatchError(
                f"packed state in the format {record.format.name!r} with other bytes than were saved: the "
                "file is damaged, or values have been changed since",
                where=where,
                remedy="load another copy of the file, or an older checkpoint",
            )


def _of_another_shape(saved: Tensor, owner: Tensor, spec: AuxiliarySpec) -> str:
    """Return the fault that a saved auxiliary is not of the shape that ``owner`` needs."""
    shape, expected, found = tuple(owner.shape), tuple(spec.saved_shape), tuple(saved.shape)
    if expected[: len(shape)] == shape and len(found) == len(expected):
        return f"the checkpoint is of a tensor of shape {found[: len(shape)]}; this one is {shape}"
    return f"an error term of shape {found} where a tensor of shape {shape} has one of {expected}"


def _refuse_mismatch(saved: Auxiliaries, owner: Tensor, dtype: torch.dtype, where: str) -> None:
    name = _format_name(saved)
    hi = torch.empty_strided(owner.size(), owner.stride(), dtype=dtype, device="meta")
    error_format = _known_format(name, where)
    if why_not := error_format.why_not(hi):
        raise _mismatch(f"a tensor in the format {name!r}, of which {why_not}", where)
    specs = error_format.auxiliaries(hi)
    expected = {(name, spec.name) for spec in specs}
    if set(saved) - {(name, FINGERPRINT)} != expected:
        raise _mismatch(f"error terms {sorted(saved)} where {sorted(expected)} belong together", where)
    for spec in specs:
        tensor = saved[name, spec.name]
        if (dtype_of_saved := spec.dtype_of(tensor)) is None:
            raise _mismatch(_of_another_shape(tensor, owner, spec), where)
        if tensor.dtype is not dtype_of_saved and not _is_cast(saved):
            raise _mismatch(
                f"an error term of {tensor.dtype} where a {dtype} tensor has one of {dtype_of_saved}", where
            )
        is_error = error_format.keeps_hi and spec.dtype.is_floating_point and spec.is_error_term
        if is_error and not spec.loaded(local_tensor(tensor)).isfinite().all():
            raise _mismatch("an error term that is not finite", where)
    table = saved.get((name, FINGERPRINT))
    if table is not None and table.shape != (ROWS, BYTES):
        raise _mismatch(f"a fingerprint of shape {tuple(table.shape)}, not {(ROWS, BYTES)}", where)


def _is_cast(saved: Auxiliaries) -> bool:
    """Return whether plain torch has loaded auxiliaries, which casts them to the parameter's dtype.

    A fingerprint is bytes, and so are the auxiliaries of a format without one, as FSDP1 is given them.
    """
    fingerprints = [each for (_, name), each in saved.items() if name == FINGERPRINT]
    return all(each.is_floating_point() for each in fingerprints or saved.values() if each.dim())


def _known_format(name: str, where: str) -> ErrorFormat:
    if (found := format_named(name)) is None:
        raise _mismatch(
            f"error terms in the unknown format {name!r} (import the module that registers it, if it is a "
            "plug-in)",
            where,
        )
    return found


def _mismatch(met: str, where: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        met,
        where=where,
        remedy="load the checkpoint that belongs to this model, or delete its keys that start with "
        "'collage_fx' to start from zero error terms",
    )


def _restore(optimizer: Optimizer, load: _Load) -> None:
    """Put saved error terms beside the loaded tensors; live error terms become zero if none are saved."""
    plain, saved = load.plain, load.saved
    kind, in_use = type(optimizer), error_terms.memory_of_records()
    claims, of_state = _claims_in(kind), _claims_in(kind)
    filed = {owner: tensor for owner, _, tensor in _held(optimizer, plain, in_file=True)}
    # Parameters for which torch uses the checkpoint's state tensors, not copies.
    loaded = {id(each) for each in filed.values() if each.dim()}
    held = (owner for owner, _, tensor in _held(optimizer, plain) if id(tensor) in loaded)
    taken_over = {key for key, slot in held if key is not None and slot != PARAMETER_SLOT}
    _restore_wide(optimizer, load, taken_over)
    saved = saved | _of_renamed(optimizer, plain, saved)
    waiting, unused, missing = list[_Waiting](), list[str](), list[str]()
    has_terms = any(slot == PARAMETER_SLOT for _, slot in saved)
    for owner, name, tensor in _held(optimizer, plain):
        live, auxiliaries, wider = error_terms.record_of(tensor), saved.get(owner), filed.get(owner)
        if wider is not None and (not wider.is_floating_point() or is_low_precision(wider.dtype)):
            wider = None
        if (
            auxiliaries
            and is_low_precision(tensor.dtype)
            and _is_of_float32(auxiliaries)
            and (wider is not None or _counts_sums(auxiliaries))
        ):
            auxiliaries = None  # codes of a float32 tensor, read decoded: not those of its rounded value
        if is_packed(tensor) and live is not None:
            live.drop_claim()  # it was loaded packed, with its buffers
        elif auxiliaries and (is_low_precision(tensor.dtype) or _belong_to_float32(tensor, auxiliaries)):
            of_slot = of_state if owner[1] != PARAMETER_SLOT and is_low_precision(tensor.dtype) else claims
            _put_beside(tensor, auxiliaries, name, of_slot, in_use if owner[0] in taken_over else None)
        elif auxiliaries:
            if not _add_to(tensor, auxiliaries):
                unused.append(f"{name} ({tensor.dtype})")
        elif live is not None and live.is_whole and live.claim is not None:
            continue  # its whole value has just been loaded
        elif is_low_precision(tensor.dtype):
            if live is not None:
                live.is_whole = False
                live.clear()
            # With ``along``, the run has chosen which state has none; it may get some when numbers change.
            may_wait = owner[1] == PARAMETER_SLOT or not load.along
            if has_terms and owner[1] == PARAMETER_SLOT and plain["state"].get(owner[0]):
                missing.append(name)  # others have theirs
            elif wider is not None or (may_wait and _has_been_stepped(plain, owner)):
                waiting.append(_Waiting(name, TensorWeakRef(tensor), wider))
    if unused:
        _warn_of_checkpoint(
            kind,
            f"error terms of {some(unused)}, which have other values than those were saved beside (load the "
            "weights of a model before its optimizer); they are left out",
        )
    _warn_of_missing(kind, missing)
    of_state.settle()  # its values have been loaded, too; those of parameters may be loaded later
    files = files_of(optimizer)
    files.waiting = waiting
    if files.is_compiled:
        note_compiled(optimizer)
    note_held(optimizer)


def _of_renamed(optimizer: Optimizer, plain: StateDict, saved: Saved) -> Saved:
    """Return error terms of state that a class's own load has renamed, by its new name."""
    held = {owner: tensor for owner, _, tensor in _held(optimizer, plain)}
    keys, found = {key for key, _ in held}, Saved()
    lost = {owner: each for owner, each in saved.items() if owner not in held and owner[0] in keys and each}
    for (key, slot), auxiliaries in lost.items():
        for owner, tensor in held.items():
            is_free = owner[0] == key and owner not in saved and owner not in found
            is_alike = is_free and is_low_precision(tensor.dtype)
            if is_alike and _fitting_terms(tensor, auxiliaries, tensor.dtype) is not None:
                found[owner] = auxiliaries
                break
        else:
            _warn_of_checkpoint(
                type(optimizer),
                f"error terms of {slot!r} of parameter {key}, which its load_state_dict has not loaded; they "
                "are left out",
            )
    return found


def _kept_among(saved: Saved) -> Kept:
    """Remove the entries of wide and narrow state from the values under our keys, and return them."""
    kept: Kept = {}
    for owner, entries in list(saved.items()):
        for key in [key for key in entries if key[0] == wide_state.KEPT]:
            if not isinstance(dtype := getattr(torch, key[1], None), torch.dtype):
                raise _mismatch(f"state of the unknown dtype {key[1]!r}", owner[1])
            kept[owner] = dtype, entries.pop(key)
        if not entries:
            del saved[owner]
    return kept


def _restore_wide(optimizer: Optimizer, load: _Load, taken_over: set[Any]) -> None:
    """Give wide and narrow state the dtype and value back that torch's load has cast: Note [Wide state]."""
    rounded: list[str] = []
    for key, name, parameter in _keyed_parameters(optimizer, load.plain):
        slots = dict(_state_slots(load.plain["state"].get(key)))
        was_low_precision = (key, PARAMETER_SLOT) in load.saved or any(
            is_low_precision(each.dtype) for each in slots.values()
        )
        new: dict[int, Tensor] = {}
        for slot, tensor in _state_slots(optimizer.state.get(parameter)):
            dtype, held = load.kept.get((key, slot), (None, None))
            saved = slots.get(slot, None if dtype is None else _renamed_from(tensor, dtype, slots.values()))
            if saved is None or is_packed(tensor):
                continue
            live = load.live.get((key, slot))
            is_kept = wide_state.is_kept(saved, parameter, live, was_low_precision=was_low_precision)
            dtype = saved.dtype if dtype is None and is_kept else dtype
            if dtype is None or dtype is parameter.dtype:
                continue
            if tensor.dtype is dtype and not _is_rounding_of(saved, tensor, parameter.dtype):
                continue
            value, is_whole = wide_state.value_kept(saved, dtype, held)
            if not is_whole:
                rounded.append(f"{name}.{slot} ({dtype})")
            value = value.to(tensor.device)
            is_saved = value is saved and (not value.dim() or key not in taken_over)
            new[id(tensor)] = value.clone() if is_saved else value
        if new:
            entries = optimizer.state[parameter]
            wide_state.replace_tensors(entries if isinstance(entries, dict) else optimizer.state, new)
    if rounded:
        _warn_of_checkpoint(
            type(optimizer),
            f"state that plain PyTorch has rounded to the parameter's dtype: {some(rounded)}. To keep its "
            "bits, call load_state_dict below the line that gives the step to torch.compile or install",
        )


def _renamed_from(loaded: Tensor, dtype: torch.dtype, saved: Iterable[Tensor]) -> Tensor | None:
    """Find the saved tensor of a dtype whose cast a loaded tensor is, by its values."""
    here = local_tensor(loaded)
    alike = ((each, local_tensor(each)) for each in saved if each.dtype is dtype)
    return next((each for each, value in alike if torch.equal(value.to(here.device, here.dtype), here)), None)


def _is_rounding_of(saved: Tensor, loaded: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a loaded tensor has lost bits of the saved tensor by a cast to a dtype."""
    value = local_tensor(saved).to(loaded.device)
    if saved.dtype is not loaded.dtype or torch.equal(value, here := local_tensor(loaded)):
        return False
    return torch.equal(value.to(dtype).to(loaded.dtype), here)


def _claims_in(kind: type[Optimizer]) -> Claims:
    """Make the claims of loaded error terms; they do not keep the optimizer alive."""
    return Claims(
        lambda names: _warn_of_checkpoint(
            kind,
            f"error terms of other values than {some(names)}: load the weights that it was saved with, too "
            "(or a file is damaged, or values have been changed since). These error terms start from zero",
        )
    )


def _put_beside(
    hi: Tensor, auxiliaries: Auxiliaries, name: str, claims: Claims, in_use: set[int] | None
) -> None:
    """Make saved auxiliaries the buffers of a tensor, until a step finds that they belong to other values.

    They are used, not copied, if they are not in the storages ``in_use``, and added there; None to copy all.
    """
    error_format = _known_format(_format_name(auxiliaries), name)
    if (live := error_terms.record_of(hi)) is not None and live.format is not error_format:
        error_terms.reset_error_terms(hi)
    loaded = _loaded_buffers(error_format.auxiliaries(hi), auxiliaries, hi)
    memory = {storage_of(each) for each in loaded}
    is_taken_over = in_use is not None and in_use.isdisjoint(memory)
    record = error_terms.ensure_record(hi, error_format, name=name, buffers=loaded if is_taken_over else None)
    record.replace_contents(loaded)
    if in_use is not None:
        in_use |= memory
    claims.add(name, record, _number_in(auxiliaries, hi))


def _loaded_buffers(
    specs: Sequence[AuxiliarySpec], auxiliaries: Auxiliaries, tensor: Tensor
) -> tuple[Tensor, ...]:
    """Return this process's buffers of the saved auxiliaries of a tensor."""
    name, pieces = _format_name(auxiliaries), sharding_of(tensor)
    saved = (local_tensor(auxiliaries[name, spec.name], pieces if spec.shape else None) for spec in specs)
    return tuple(spec.loaded(each) for spec, each in zip(specs, saved, strict=True))


def _number_in(auxiliaries: Auxiliaries, hi: Tensor) -> Tensor:
    """Return this process's part of the saved fingerprint; zero if there is none."""
    table = auxiliaries.get((_format_name(auxiliaries), FINGERPRINT))
    return torch.zeros((), dtype=torch.int64) if table is None else number_in(table.to(torch.uint8), hi)


def _is_of_float32(auxiliaries: Auxiliaries) -> bool:
    """Return whether auxiliaries may belong to a float32 tensor, or belong to an unknown format."""
    error_format = format_named(_format_name(auxiliaries))
    return error_format is None or not error_format.keeps_hi or _counts_sums(auxiliaries)


def _counts_sums(auxiliaries: Auxiliaries) -> bool:
    """Return whether auxiliaries count the sums of a float32 parameter that dither has rounded."""
    return _format_name(auxiliaries) == SUM.name


def _format_name(auxiliaries: Auxiliaries) -> str:
    return next(format_name for format_name, _ in auxiliaries)


def _belong_to_float32(value: Tensor, auxiliaries: Auxiliaries) -> bool:
    """Return whether auxiliaries count the steps of a float32 tensor, or hold its value: it was packed."""
    if value.dtype is not torch.float32 or not _is_of_float32(auxiliaries):
        return False
    return _counts_sums(auxiliaries) or _fitting_terms(value, auxiliaries, torch.float32) is not None


def _fitting_terms(value: Tensor, auxiliaries: Auxiliaries, dtype: torch.dtype) -> tuple[Tensor, ...] | None:
    """Return this process's buffers of auxiliaries that were saved beside a value in ``dtype``; else None."""
    if (error_format := format_named(_format_name(auxiliaries))) is None:
        return None
    number, pieces, here = _number_in(auxiliaries, value), sharding_of(value), local_tensor(value.detach())
    hi = here.to(dtype)
    specs = error_format.auxiliaries(torch.empty(value.shape, dtype=dtype, device="meta"))
    saved = [auxiliaries.get((error_format.name, spec.name)) for spec in specs]
    if any(each is None or spec.dtype_of(each) is None for spec, each in zip(specs, saved, strict=True)):
        return None
    terms = _loaded_buffers(specs, auxiliaries, value)
    far = torch.stack([(hi.to(here.dtype) != here).sum(), *differences(number, hi, terms)])
    other, *numbers = (far if pieces is None else pieces.sum(far)).tolist()
    return None if other or all(numbers) else terms


def _add_to(value: Tensor, auxiliaries: Auxiliaries) -> bool:
    """Add error terms to a wider tensor, if its value is that of the hi that they were saved beside."""
    if (error_format := format_named(_format_name(auxiliaries))) is None:
        return False
    if error_format.keeps_hi and not error_format.keeps_error:
        return True
    for dtype in STORAGE_FORMATS:
        if (terms := _fitting_terms(value, auxiliaries, dtype)) is not None:
            here = local_tensor(value.detach())
            for term in error_format.error_terms(here.to(dtype), *terms):
                here += term
            return True
    return False


def _has_been_stepped(plain: StateDict, owner: Owner) -> bool:
    """Return whether a parameter has been stepped in a checkpoint; Adagrad, say, has state with 0 steps."""
    if owner[0] is None:
        return True
    entries = plain["state"].get(owner[0])
    return entries is not None and not (isinstance(entries, dict) and _counted_steps(entries) == 0)


class _Waiting(NamedTuple):
    """Tensor that waits for error terms, and its value in the checkpoint, if that is wider."""

    name: str
    tensor: TensorWeakRef
    wider: Tensor | None


def note_eager_step(optimizer: Optimizer) -> None:
    """Note that an optimizer is about to take an eager step: wider state of its checkpoint is dropped.

    Before the first eager step, error terms are made of entries that plain torch has loaded.
    """
    files = files_of(optimizer)
    entries = () if files.eager_steps else optimizer.state.values()
    if any(str(key).startswith(PREFIX) for each in entries if isinstance(each, dict) for key in each):
        adopt(optimizer)
    files.eager_steps += 1
    files.waiting = [each._replace(wider=None) for each in files.waiting]


def _still_wider(optimizer: Optimizer) -> Iterator[PickledWider]:
    """Yield state that was wider in a checkpoint, until a step is compiled."""
    for name, reference, wider in files_of(optimizer).waiting:
        if wider is not None and (tensor := reference()) is not None:
            yield PickledWider(name, tensor, wider)


def _as_loaded(tensor: Tensor, wider: Tensor) -> Tensor:
    """Return the local shard of a wider value; elements that eager steps have changed are the tensor's."""
    with torch_compat.real_tensors(), torch.no_grad():
        hi = local_tensor(tensor.detach())
        whole = local_tensor(wider, sharding_of(tensor)).to(hi.device)
        return torch.where(whole.to(hi.dtype) == hi, whole, hi.to(whole.dtype))


def _warn_of_missing(kind: type[Optimizer], names: Sequence[str]) -> None:
    """Warn of tensors, if there are any, for which a checkpoint holds no error terms."""
    if names:
        warn(
            f"no error terms of {some(names)} have been loaded into {kind.__name__}; they start from zero. "
            "Either a plain optimizer has saved the checkpoint; or it was loaded before the step was given "
            "to torch.compile or collage_fx.install, and plain PyTorch has rounded float32 state in it (call "
            "load_state_dict below that line: the rest becomes error terms); or torch.distributed.checkpoint "
            "has left out those in the file: it loads only what an optimizer holds already, and this one had "
            "not taken a compiled step (collage_fx.install makes it take one)"
        )


def _warn_of_checkpoint(kind: type[Optimizer], holds: str) -> None:
    warn(f"the checkpoint loaded into {kind.__name__} holds {holds}")


def _keyed_parameters(optimizer: Optimizer, state_dict: StateDict) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield ``(key in the state dict, name, parameter)`` for every parameter that both sides have."""
    # Not strict: torch checks the lengths, with its own message.
    pairs = zip(_keys_in(state_dict), optimizers.parameter_names(optimizer), strict=False)
    return ((key, name, parameter) for key, (name, parameter) in pairs)


def _held(
    optimizer: Optimizer, state_dict: StateDict, *, in_file: bool = False
) -> Iterator[tuple[Owner, str, Tensor]]:
    """Yield ``(owner, name, tensor)`` for parameters, and for the state of an optimizer, or ``in_file``."""
    held = state_dict if in_file else _contents(optimizer)
    for key, name, parameter in _keyed_parameters(optimizer, state_dict):
        for slot, tensor in _slots(parameter, held["state"].get(key if in_file else parameter)):
            yield (key, slot), f"{name}.{slot}", tensor
    for name, tensor in optimizers.shared_tensors(held["param_groups"], held["state"]):
        yield (None, name), name, tensor


def _slots(parameter: Tensor, state: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter and the tensors of its state."""
    yield PARAMETER_SLOT, parameter
    yield from _state_slots(state)


def _state_slots(state: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one parameter's state, none of them in the slot of the parameter."""
    return optimizers.state_tensors(state, taken=[PARAMETER_SLOT])
