"""Records of the program's objects: facts about an optimizer, a tensor or a module.

Note [Records]
--------------
An object has one record, which is gone when the object is. A record has parts: each is an object of a class
of the file that knows those facts, and its attributes say what they are. Whoever asks for a part by its class
gets the only one there is. Parts do not reference the object that they are of, or it would live for ever.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, TypeVar

from torch.utils.weak import WeakIdKeyDictionary

Part = TypeVar("Part")

#: Class of a part -> object -> its part.
_PARTS: defaultdict[type, WeakIdKeyDictionary] = defaultdict(WeakIdKeyDictionary)


def find(owner: object, kind: type[Part]) -> Part | None:
    """Return a part of an object's record; None if there is none."""
    part: Part | None = _PARTS[kind].get(owner)
    return part


def has(owner: object, kind: type[Part]) -> bool:
    """Return whether an object's record has a part, whose class may say everything."""
    return owner in _PARTS[kind]


def of(owner: object, kind: type[Part]) -> Part:
    """Return a part of an object's record; make it, without arguments, if there is none."""
    part = find(owner, kind)
    return put(owner, kind()) if part is None else part


def put(owner: object, part: Part) -> Part:
    """Add a part to an object's record, or replace it; return the part."""
    _PARTS[type(part)][owner] = part
    return part


def drop(owner: object, kind: type[Part]) -> Part | None:
    """Remove a part from an object's record; return it, None if there was none."""
    table = _PARTS[kind]
    part: Part | None = table.pop(owner, None) if table else None
    return part


def clear(kind: type[Part]) -> None:
    """Remove a part from all records."""
    _PARTS[kind].clear()


def all_of(kind: type[Part]) -> list[tuple[Any, Part]]:
    """Return all objects whose records have a part, with the parts."""
    return list(_PARTS[kind].items())
