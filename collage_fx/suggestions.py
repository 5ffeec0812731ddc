"""``Did you mean``: what to say of a name that nothing has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known names that look like ``name``; all of them where none does and they are few."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    lower = {each.lower(): each for each in known}
    if not near and name.lower() in lower:
        near = [lower[name.lower()]]
    if near:
        return f"did you mean {' or '.join(near)}?"
    if not known:
        return "there are none"
    return f"known are {', '.join(known[:20])}{', …' if len(known) > 20 else ''}"
