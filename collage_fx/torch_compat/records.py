"""Records of the program's objects: facts about an optimizer, a tensor or a module.

Note [Records]
--------------
An object has one record, which is gone when the object is. A record has parts: each is an object of a class
of the file that knows those facts, and its attributes say what they are. Whoever asks for a part by its class
gets the only one there is. Parts do not reference the object that they are of, or it would live for ever.

Each step asks for some parts. So they are found by the ``id`` of their object, in one call of Python, beside
a weak reference that removes them. Those of tensors, which can come to life again, are in torch's dictionary.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Part = TypeVar("Part")


class _Parts:
    """All parts of one class: of tensors, and of other objects by ``id``, with a reference to the object."""

    def __init__(self) -> None:
        self.of_tensors = WeakIdKeyDictionary()
        self.of_others: dict[int, tuple[weakref.ref[Any], Any]] = {}


#: Class of a part -> its parts.
_PARTS: defaultdict[type, _Parts] = defaultdict(_Parts)


def find(owner: object, kind: type[Part]) -> Part | None:
    """Return a part of an object's record; None if there is none."""
    parts = _PARTS[kind]
    if isinstance(owner, Tensor):
        part: Part | None = parts.of_tensors.get(owner)
        return part
    entry = parts.of_others.get(id(owner))
    return None if entry is None else entry[1]


def has(owner: object, kind: type[Part]) -> bool:
    """Return whether an object's record has a part, whose class may say everything."""
    return find(owner, kind) is not None


def of(owner: object, kind: type[Part]) -> Part:
    """Return a part of an object's record; make it, without arguments, if there is none."""
    part = find(owner, kind)
    return put(owner, kind()) if part is None else part


def put(owner: object, part: Part) -> Part:
    """Add a part to an object's record, or replace it; return the part."""
    parts = _PARTS[type(part)]
    if isinstance(owner, Tensor):
        parts.of_tensors[owner] = part
    else:
        identity = id(owner)
        reference = weakref.ref(owner, lambda _: parts.of_others.pop(identity, None))
        parts.of_others[identity] = reference, part
    return part


def drop(owner: object, kind: type[Part]) -> Part | None:
    """Remove a part from an object's record; return it, None if there was none."""
    parts = _PARTS[kind]
    if isinstance(owner, Tensor):
        part: Part | None = parts.of_tensors.pop(owner, None)
        return part
    _, part = parts.of_others.pop(id(owner), (None, None))
    return part


def clear(kind: type[Part]) -> None:
    """Remove a part from all records."""
    _PARTS.pop(kind, None)


def all_of(kind: type[Part]) -> list[tuple[Any, Part]]:
    """Return all objects whose records have a part, with the parts."""
    parts = _PARTS[kind]
    others = ((reference(), part) for reference, part in [*parts.of_others.values()])
    return [*parts.of_tensors.items(), *((each, part) for each, part in others if each is not None)]
