"""Replacing a method of a class that isn't ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["wrap_method"]

#: Attribute of a wrapped method: the method it wraps.
MARK = "__collage_fx__"


def wrap_method(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``wrapper(original)`` in a method's place. A second call replaces the first: one layer, not two."""
    current = getattr(owner, name)
    original = getattr(current, MARK, current)
    wrapped = functools.wraps(original)(wrapper(original))
    setattr(wrapped, MARK, original)
    setattr(owner, name, wrapped)
