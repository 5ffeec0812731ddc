"""Warnings of the library: their texts, their order and their number, and that there are no others."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable


def warned(*actions: Callable[[], object]) -> list[str]:
    """Run actions; return the text of each warning of the library, in order, repeated ones too."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        for action in actions:
            action()
    return [str(each.message) for each in recorded if "collage_fx" in str(each.message)]


def tensors_in(text: str) -> tuple[list[str], int]:
    """Return the names of tensors in a warning, in order, and how many more it says there are."""
    more = re.search(r" and (\d+) more", text)
    return re.findall(r"param_groups\[\d+\]\.[\w.\[\]]*[\w\]]", text), int(more[1]) if more else 0
