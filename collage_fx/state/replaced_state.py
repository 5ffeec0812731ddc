"""Tensors with which the program replaces, between two steps, tensors that an optimizer held.

Note [Replaced between two steps]
---------------------------------
Programs that make room on a device write ``state[p][key] = state[p][key].cpu()``, and move the state back
before the next step. That leaves another tensor object, although compiled code and error terms belong to the
object. So before each step the tensors are compared, by identity, with those of the last step. A new state
tensor of the same layout gives its memory to the old object, which is put back: nothing is compiled, and
elements whose bits are the same keep their error terms. Where the program still holds the old object, as a
backup for instance (reference counts tell), and for parameters and tensors of other sizes, the new object
gets the error terms of the elements that it has in common with the old one.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import getitem, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from collage_fx import torch_compat
from collage_fx.errors import warn
from collage_fx.numerics import ErrorFormat, is_low_precision
from collage_fx.state.claims import Claims, some
from collage_fx.state.error_terms import hand_over, move_into, record_memory, record_of, settle_before_reading
from collage_fx.state.fingerprints import fingerprint
from collage_fx.state.optimizers import parameter_names
from collage_fx.state.packed import is_packed, laid_out, plain_class
from collage_fx.state.written import WriteDetector


class _Slot(NamedTuple):
    """Slot of a list or dictionary of an optimizer: its value, and a name if that is a tensor."""

    name: str
    container: Any
    key: Any
    value: Any


#: References to a state tensor, as counted: of a snapshot's slot and list of values, and of the slot itself.
_lonely = _Slot("", None, None, object())
_REFERENCES = sys.getrefcount(_lonely.value) + 2


class _Held:
    """Snapshot of the values that an optimizer holds.

    Attributes:
        slots: slots of its parameters and its state.
        counts: reference counts of the values.
        formats: name of a tensor with error terms, or packed -> the format.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.slots = list(_slots_of(optimizer))
        found = ((slot.name, record_of(slot.value)) for slot in self.slots if slot.name)
        formats = ((name, each.format) for name, each in found if each is not None)
        self.formats = {name: each for name, each in formats if each.holds_more}
        self.written = _write_detector(self.slots, type(optimizer).__name__)
        self._entries = list(optimizer.state.values())
        looked_at = [slot for slot in self.slots if type(slot.container) is not type(optimizer.state)]
        self._look = [slot.container for slot in looked_at], [slot.key for slot in looked_at]
        self._values = [slot.value for slot in looked_at]
        self.counts: list[int] = []

    def count_references(self) -> None:
        """Count the references to the values; local lists, and earlier snapshots, would be counted."""
        self.counts = [sys.getrefcount(slot.value) for slot in self.slots]

    @functools.cached_property
    def alone(self) -> dict[int, int]:
        """``id`` of each state tensor that only its slot and the snapshot reference -> index of the slot."""
        checked = {id(tensor) for part in self.written.state for tensor in part}
        slots = enumerate(zip(map(id, (slot.value for slot in self.slots)), self.counts, strict=True))
        return {each: i for i, (each, count) in slots if count == _REFERENCES + (each in checked)}

    def is_complete(self, optimizer: Optimizer) -> bool:
        """Return whether all values are still in their slots. It takes some 50 ns for each tensor."""
        entries = optimizer.state.values()
        try:
            are_same = len(entries) == len(self._entries) and all(map(is_, entries, self._entries))
            return are_same and all(map(is_, map(getitem, *self._look), self._values))
        except (KeyError, IndexError):
            return False

    def is_free_of_others(self, optimizer: Optimizer) -> bool:
        """Return whether the program has released the dictionaries and lists that it has replaced."""
        now = {id(slot.value) for slot in _slots_of(optimizer) if not slot.name}
        return all(
            slot.name or id(slot.value) in now or sys.getrefcount(slot.value) < count
            for slot, count in zip(self.slots, self.counts, strict=True)
        )


def _write_detector(slots: Sequence[_Slot], optimizer: str) -> WriteDetector:
    """Return a detector of writes to low-precision parameters and state that have memory."""
    parameters, state = [], []
    named = ((slot.name, slot.value) for slot in slots if slot.name and is_low_precision(slot.value.dtype))
    for name, value in named:
        piece = torch_compat.local_tensor(value)
        if is_packed(value):
            continue  # written to, it is unpacked, and compared with its codes
        if not isinstance(value, Parameter):
            state.append((name, value))
        # Another optimizer's step may give a parameter its error terms. Wrappers are made of other tensors.
        elif torch_compat.has_storage(piece) and not torch_compat.is_wrapper(piece):
            parameters.append((name, value))
    return WriteDetector(parameters, state, optimizer, _detectors)


def _detectors() -> Iterator[WriteDetector]:
    return (held.written for _, held in torch_compat.records.all_of(_Held))


def _slots_of(optimizer: Optimizer) -> Iterator[_Slot]:
    for group in optimizer.param_groups:
        yield _Slot("", group, "params", group["params"])
    lists = (group["params"] for group in optimizer.param_groups)
    positions = ((each, i) for each in lists for i in range(len(each)))
    for (container, i), (name, parameter) in zip(positions, parameter_names(optimizer), strict=True):
        yield _Slot(name, container, i, parameter)
        if parameter in optimizer.state:
            is_dictionary = isinstance(optimizer.state[parameter], dict)
            yield from _slots_at(name if is_dictionary else f"{name}.state", optimizer.state, parameter)
    for key in optimizer.state:
        if not isinstance(key, Tensor):
            yield from _slots_at(f"state.{key}", optimizer.state, key)


def _slots_at(name: str, container: Any, key: Any) -> Iterator[_Slot]:
    """Yield the slot of a tensor, a list or a dictionary, and the slots within."""
    value = container[key]
    if isinstance(value, (Tensor, dict, list)):
        yield _Slot(name if isinstance(value, Tensor) else "", container, key, value)
    if isinstance(value, (dict, list)):
        for inner in value if isinstance(value, dict) else range(len(value)):
            yield from _slots_at(f"{name}.{inner}", value, inner)


def only_in_state(
    tensors: Mapping[int, TensorWeakRef], optimizers: Iterable[weakref.ref[Optimizer]]
) -> dict[int, Tensor]:
    """Return the tensors, by key, that are state, and that nothing else references, nor their memory."""
    found = {}
    for optimizer in (each for reference in optimizers if (each := reference()) is not None):
        held = torch_compat.records.find(optimizer, _Held)
        if held is None or not held.alone or not held.is_complete(optimizer):
            continue
        for key, reference in tensors.items():
            i = held.alone.get(id(reference()), -1)
            if i < 0 or sys.getrefcount(held.slots[i].value) != held.counts[i]:  # as it was counted before
                continue
            if not torch_compat.shares_memory(held.slots[i].value):
                found[key] = held.slots[i].value
    return found


class _Bound:
    """Part of the record of a tensor that compiled code holds: a new object would be none to the code."""


def note_bound(tensor: Tensor) -> None:
    """Note that compiled code holds a tensor as its own."""
    torch_compat.records.put(tensor, _Bound())


class _Parameters:
    """Parameters in all snapshots: ``version`` is replaced when a snapshot has others than before."""

    version = object()


def note_held(optimizer: Optimizer) -> None:
    """Take a snapshot of the values that an optimizer holds now."""
    before = torch_compat.records.drop(optimizer, _Held)
    held = torch_compat.records.put(optimizer, _Held(optimizer))
    if before is None or not held.written.take_over(before.written):
        _Parameters.version = object()
    del before
    held.count_references()


def holds_the_same(optimizer: Optimizer) -> bool:
    """Return whether an optimizer holds the values of its last snapshot."""
    held = torch_compat.records.find(optimizer, _Held)
    return held is not None and held.is_complete(optimizer)


def note_step(optimizer: Optimizer) -> None:
    """Note that a compensated step of an optimizer has ended, with its parameters as they are."""
    if (held := torch_compat.records.find(optimizer, _Held)) is not None:
        held.written.note()


def noting_steps(
    step: Callable[..., Any], optimizers: Sequence[Optimizer], updated: Sequence[Tensor] = ()
) -> Callable[..., Any]:
    """Wrap a compiled step so that :func:`note_step` is called after it, for each optimizer.

    If another optimizer holds a tensor that the step updates, its parameters are checked before and noted
    after, too.
    """
    references, written = [*map(weakref.ref, optimizers)], [*map(TensorWeakRef, updated)]
    others: list[weakref.ref[Optimizer]] = []
    version: object = None

    def noting(*arguments: Any) -> Any:
        nonlocal others, version
        if written and version is not _Parameters.version:
            living = {id(tensor) for reference in written if (tensor := reference()) is not None}
            known = {reference() for reference in references}
            others = [
                weakref.ref(each)
                for each, held in torch_compat.records.all_of(_Held)
                if each not in known and not living.isdisjoint(map(id, held.written.tensors))
            ]
            version = _Parameters.version
        for reference in others:
            other = reference()
            if other is not None and (held := torch_compat.records.find(other, _Held)) is not None:
                held.written.settle(is_in_place=False)
        try:
            return step(*arguments)
        finally:  # a refused step has increased version counters, too
            for reference in (*references, *others):
                if (optimizer := reference()) is not None:
                    note_step(optimizer)

    return noting if references or written else step


def stepped_optimizers() -> list[Optimizer]:
    """Return all optimizers that have been stepped with error terms."""
    return [optimizer for optimizer, _ in torch_compat.records.all_of(_Held)]


def format_before(name: str, optimizer: Optimizer) -> ErrorFormat | None:
    """Return the format of a named tensor at the last snapshot; None for a plain tensor."""
    held = torch_compat.records.find(optimizer, _Held)
    return None if held is None else held.formats.get(name)


class _MovedAway(list[tuple[Tensor, torch.device]]):
    """Tensors of an optimizer that :func:`move_state` has moved, with their devices before."""


def move_state(optimizer: Optimizer, device: torch.device | str = "cpu") -> None:
    """Move an optimizer's state and all of its error terms to another device until its next step.

    The next step moves them back. Tensors stay the same objects, so nothing is compiled again; packed state
    is moved packed. Parameters belong to the model: move them by ``model.to(device)`` and back.

    Args:
        optimizer: an optimizer whose step is compensated, by :func:`install` or by ``torch.compile``.
        device: the device to move to.
    """
    there, moved = torch.device(device), torch_compat.records.of(optimizer, _MovedAway)
    for slot in _slots_of(optimizer):
        if slot.name:
            is_state = not isinstance(slot.value, Parameter)
            if slot.value.device != there and is_state:
                moved.append((slot.value, slot.value.device))
            _move(slot.value, there, is_state=is_state)


def _move(tensor: Tensor, device: torch.device, *, is_state: bool) -> None:
    """Move a tensor's error terms, and the tensor itself if it is state."""
    record = record_of(tensor)
    with torch_compat.real_tensors(), torch.no_grad():
        if is_state and not is_packed(tensor):
            piece = torch_compat.local_tensor(tensor)
            piece.data = piece.data.to(device)
        if record is not None:
            record.move(device)
            record_memory(torch_compat.local_tensor(tensor), record)


def settle_replaced(optimizer: Optimizer) -> None:
    """Move memory and error terms between an optimizer's old tensors and tensors that replace them.

    Warn of tensors that had error terms, and have other values now, unless all values are zero.
    """
    for tensor, device in torch_compat.records.drop(optimizer, _MovedAway) or ():
        _move(tensor, device, is_state=True)
    if (names := _names_of_lost(optimizer)) is None:
        return
    note_held(optimizer)  # counts references: no variable here may hold a value
    if names:
        warn(
            f"{some(names)} of {type(optimizer).__name__} has been replaced by another tensor of other "
            "values, which begins without error terms; collage_fx.assign(tensor, value) writes a value with "
            "all its bits"
        )


def _names_of_lost(optimizer: Optimizer) -> list[str] | None:
    """Return the names of replaced tensors to warn of, None if there are none; move their memory before."""
    held = torch_compat.records.find(optimizer, _Held)
    if held is None:
        return None
    is_complete = held.is_complete(optimizer)
    held.written.settle(is_in_place=is_complete)
    if is_complete:
        return None
    now = {slot.name: slot for slot in _slots_of(optimizer) if slot.name}
    there, known = ({id(slot.value) for slot in slots} for slots in (now.values(), held.slots))
    replaced = [
        (old, now[old.name], count)
        for old, count in zip(held.slots, held.counts, strict=True)
        if old.name in now and id(old.value) not in there and id(now[old.name].value) not in known
    ]
    replaced = [each for each in replaced if not _is_step_made(each[0].value, each[1].value)]
    taken_over = _in_the_same_object(replaced) if held.is_free_of_others(optimizer) else set()
    lost = []
    for i, (old, new, _) in enumerate(replaced):
        if i in taken_over:
            keeps_all = move_into(old.value, new.value)
            new.container[new.key] = old.value
        else:
            keeps_all = hand_over(old.value, new.value, name=new.name)
        if not keeps_all and old.name in held.formats:
            with torch_compat.real_tensors():
                lost += [new.name] if torch_compat.local_tensor(new.value.detach()).any() else []
    return lost


def _is_step_made(old: Tensor, new: Tensor) -> bool:
    """Return whether a new tensor can stay: a step has made it, with its own error terms."""
    is_bound = torch_compat.records.has(old, _Bound) or is_packed(old)
    return not is_bound and (record_of(old) is None or record_of(new) is not None)


def _settle_read(tensor: Tensor) -> None:
    """Drop a tensor's error terms if the program has written to it since the last step."""
    for written in _detectors():
        written.settle_one(tensor)


settle_before_reading(_settle_read)


def _with_claims(load_state_dict: Callable[..., Any], self: Module, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Module.load_state_dict``: error terms are kept beside the values of the last step alone."""
    claims = Claims()
    for name, tensor in chain(self.named_parameters(), self.named_buffers()):
        record = record_of(tensor)
        if record is not None and record.claim is None:
            known = (written.hi_of_last_step(tensor) for written in _detectors())
            hi = next((each for each in known if each is not None), torch_compat.local_tensor(tensor))
            claims.add(name, record, fingerprint(hi, record.auxiliaries))
    return load_state_dict(self, *args, **kwargs)


torch_compat.wrap_loading_of_modules(_with_claims)


def _in_the_same_object(replaced: Sequence[tuple[_Slot, _Slot, int]]) -> set[int]:
    """Return the indices of new tensors that can give their memory to the old objects."""
    alike = {
        i
        for i, (old, new, _) in enumerate(replaced)
        if _full_layout(old.value) == _full_layout(new.value) and not old.value.requires_grad
    }
    # One reference less than before, the slot's: only the snapshot references an old list or dictionary.
    is_free = all(
        sys.getrefcount(old.value) - (old.container is not new.container) < count
        for old, new, count in (replaced[i] for i in alike)
    )
    return alike if is_free else set()


def _full_layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return class, dtype, sharding, sizes and strides of a tensor, as it is when unpacked."""
    piece = torch_compat.local_tensor(tensor)
    shapes = tuple(tensor.shape), tuple(piece.shape), laid_out(piece).stride()
    return plain_class(tensor), tensor.dtype, tensor.requires_grad, torch_compat.sharding_of(tensor), shapes
