"""Tensors that the program puts, between two steps, in the place of those that an optimizer held.

Note [Replaced between two steps]
---------------------------------
Programs that make room on a device write ``state[p][key] = state[p][key].cpu()``, and the way back before
the next step. That leaves another tensor object, where compiled code and error terms belong to the object.
So before each step the tensors are compared, by identity, with those that the last step knew. A new state
tensor of the same layout gives its memory to the old object, which is put back into its place: nothing is
compiled, and error terms stay with elements whose bits are the same. Not where the program still holds the
old object, as a backup for instance, which would change with the state: reference counts tell. There, and
for parameters and tensors of other sizes, the new object is given the error terms of the elements that it has
in common with the old one. What has other values is what the program has written, without error terms.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import getitem, is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from collage_fx.numerics import ErrorFormat, is_low_precision
from collage_fx.state.claims import some
from collage_fx.state.error_terms import expansion_of, hand_over, move_into, record_memory
from collage_fx.state.optimizers import parameter_names
from collage_fx.state.packed import is_packed, plain_class, stride_of
from collage_fx.state.written import Written
from collage_fx.torch_compat import local_tensor, real_tensors, sharding_of


class _Place(NamedTuple):
    """A list or dictionary of an optimizer, a key of it, and what is found there.

    Attributes:
        name: of a tensor; empty for another list or dictionary.
    """

    name: str
    container: Any
    key: Any
    value: Any


class _Held:
    """What an optimizer holds, by place.

    Attributes:
        places: of its parameters and its state.
        counts: the references to each of their values, for :func:`sys.getrefcount`.
        formats: of the error terms of those that have some, by name.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.places = list(_places_of(optimizer))
        found = ((place.name, expansion_of(place.value)) for place in self.places if place.name)
        self.formats = {
            name: each.format for name, each in found if each is not None and each.format.keeps_error
        }
        low = ((place.name, place.value) for place in self.places if isinstance(place.value, Parameter))
        parameters = [each for each in low if each[0] in self.formats]
        named = ((place.name, place.value) for place in self.places if place.name)
        state = [each for each in named if _is_plain_state(each[1])]
        self.written = Written(parameters, state, type(optimizer).__name__)
        self._entries = list(optimizer.state.values())
        looked_at = [place for place in self.places if type(place.container) is not type(optimizer.state)]
        self._look = [place.container for place in looked_at], [place.key for place in looked_at]
        self._values = [place.value for place in looked_at]
        self.counts = [sys.getrefcount(place.value) for place in self.places]

    def is_complete(self, optimizer: Optimizer) -> bool:
        """Whether all that was held is where it was. It takes some 50 ns for each tensor."""
        entries = optimizer.state.values()
        try:
            return (
                len(entries) == len(self._entries)
                and all(map(is_, entries, self._entries))
                and all(map(is_, map(getitem, *self._look), self._values))
            )
        except (KeyError, IndexError):
            return False

    def is_free_of_others(self, optimizer: Optimizer) -> bool:
        """Whether the program has let go of the dictionaries and lists that it has replaced."""
        now = {id(place.value) for place in _places_of(optimizer) if not place.name}
        return all(
            place.name or id(place.value) in now or sys.getrefcount(place.value) < count
            for place, count in zip(self.places, self.counts, strict=True)
        )


def _is_plain_state(value: Tensor) -> bool:
    is_state = not isinstance(value, Parameter) and is_low_precision(value.dtype)
    return is_state and not is_packed(value)


def _places_of(optimizer: Optimizer) -> Iterator[_Place]:
    for group in optimizer.param_groups:
        yield _Place("", group, "params", group["params"])
    positions = (
        (group["params"], i) for group in optimizer.param_groups for i in range(len(group["params"]))
    )
    for (container, i), (name, parameter) in zip(positions, parameter_names(optimizer), strict=True):
        yield _Place(name, container, i, parameter)
        if parameter in optimizer.state:
            yield _Place("", optimizer.state, parameter, optimizer.state[parameter])
        yield from _places_within(name, optimizer.state.get(parameter))
    for key, entries in optimizer.state.items():
        if not isinstance(key, Tensor):
            yield from _places_within(f"state.{key}", entries)


def _places_within(name: str, container: Any) -> Iterator[_Place]:
    if not isinstance(container, (dict, list)):
        return
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        if isinstance(value, Tensor):
            yield _Place(f"{name}.{key}", container, key, value)
        elif isinstance(value, (dict, list)):
            yield _Place("", container, key, value)
            yield from _places_within(f"{name}.{key}", value)


#: By optimizer, what it held when a step was compiled or recorded, or a checkpoint loaded.
_held: WeakKeyDictionary[Optimizer, _Held] = WeakKeyDictionary()


def note_held(optimizer: Optimizer) -> None:
    """Note what an optimizer holds now."""
    before = _held.pop(optimizer, None)
    written = None if before is None else before.written
    del before  # whose references would be counted
    _held[optimizer] = held = _Held(optimizer)
    if written is not None:
        held.written.take_over(written)


def note_step(optimizer: Optimizer) -> None:
    """Note that a compensated step of an optimizer has ended, which has left its parameters as they are."""
    if (held := _held.get(optimizer)) is not None:
        held.written.note()


def noting_steps(step: Callable[..., Any], optimizers: Sequence[Optimizer]) -> Callable[..., Any]:
    """Have :func:`note_step` called whenever a compiled step has ended, if it is of any optimizer."""
    references = [*map(weakref.ref, optimizers)]

    def noting(*arguments: Any) -> Any:
        try:
            return step(*arguments)
        finally:  # a refused step has counted versions, too
            for reference in references:
                if (optimizer := reference()) is not None:
                    note_step(optimizer)

    return noting if references else step


def format_before(name: str, optimizer: Optimizer) -> ErrorFormat | None:
    """The format of the error terms that an optimizer's tensor of that name had; None if it had none."""
    held = _held.get(optimizer)
    return None if held is None else held.formats.get(name)


#: By optimizer, the devices of what has been moved away from there: of its parameters' error terms, of state.
_moved_away: WeakKeyDictionary[Optimizer, list[tuple[Tensor, torch.device]]] = WeakKeyDictionary()


def move_state(optimizer: Optimizer, device: torch.device | str = "cpu") -> None:
    """Move an optimizer's state and all of its error terms to another device until its next step.

    That step brings them back. Tensors stay the same objects, so nothing is compiled anew; packed state is
    moved as it is kept. Parameters are the model's: move them by ``model.to(device)`` and back.

    Args:
        optimizer: one whose step is compensated, whether by :func:`install` or by ``torch.compile``.
        device: for what is moved.
    """
    there, moved = torch.device(device), _moved_away.setdefault(optimizer, [])
    for place in _places_of(optimizer):
        if place.name:
            is_state = not isinstance(place.value, Parameter)
            if place.value.device != there and is_state:
                moved.append((place.value, place.value.device))
            _move(place.value, there, is_state=is_state)


def _move(tensor: Tensor, device: torch.device, *, is_state: bool) -> None:
    expansion = expansion_of(tensor)
    with real_tensors(), torch.no_grad():
        if is_state and not is_packed(tensor):
            piece = local_tensor(tensor)
            piece.data = piece.data.to(device)
        if expansion is not None:
            expansion.move(device)
            record_memory(local_tensor(tensor), expansion)


def settle_replaced(optimizer: Optimizer) -> None:
    """Have what the program has put in the place of an optimizer's tensors take over what belongs to them.

    Warn of tensors that had error terms, and have other values now; not of those that begin with zeros.
    """
    for tensor, device in _moved_away.pop(optimizer, ()):
        _move(tensor, device, is_state=True)
    held = _held.get(optimizer)
    if held is None:
        return
    is_complete = held.is_complete(optimizer)
    held.written.settle(lambda tensor: _may_be_of_another(tensor, optimizer), is_in_place=is_complete)
    if is_complete:
        return
    now = {place.name: place for place in _places_of(optimizer) if place.name}
    there, known = ({id(place.value) for place in places} for places in (now.values(), held.places))
    replaced = [
        (old, now[old.name], count)
        for old, count in zip(held.places, held.counts, strict=True)
        if old.name in now and id(old.value) not in there and id(now[old.name].value) not in known
    ]
    taken_over = _in_the_same_object(replaced) if held.is_free_of_others(optimizer) else set()
    written = []
    for i, (old, new, _) in enumerate(replaced):
        if i in taken_over:
            keeps_all = move_into(old.value, new.value)
            new.container[new.key] = old.value
        else:
            keeps_all = hand_over(old.value, new.value, name=new.name)
        if not keeps_all and old.name in held.formats:
            written.append(new)
    note_held(optimizer)
    _warn(optimizer, written)


def _may_be_of_another(tensor: Tensor, optimizer: Optimizer) -> bool:
    return any(held.written.may_have_left(tensor) for other, held in _held.items() if other is not optimizer)


def _in_the_same_object(replaced: Sequence[tuple[_Place, _Place, int]]) -> set[int]:
    """Which new tensors give their memory to the old objects; none if the program holds one of these."""
    alike = {
        i
        for i, (old, new, _) in enumerate(replaced)
        if new.container is not None
        and _layout(old.value) == _layout(new.value)
        and not old.value.requires_grad
    }
    # One reference less than there were, that of the place: the old list or dictionary is known to us alone.
    is_free = all(
        sys.getrefcount(old.value) - (old.container is not new.container) < count
        for old, new, count in (replaced[i] for i in alike)
    )
    return alike if is_free else set()


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    piece = local_tensor(tensor)
    shapes = tuple(tensor.shape), tuple(piece.shape), stride_of(piece)
    return plain_class(tensor), tensor.dtype, tensor.requires_grad, sharding_of(tensor), shapes


def _warn(optimizer: Optimizer, written: Sequence[_Place]) -> None:
    with real_tensors():
        names = [place.name for place in written if local_tensor(place.value.detach()).any()]
    if names:
        warnings.warn(
            f"collage_fx: {some(names)} of {type(optimizer).__name__} has been replaced by another tensor of "
            "other values, which begins without error terms; collage_fx.assign(tensor, value) writes a value "
            "with all its bits",
            stacklevel=2,
        )
