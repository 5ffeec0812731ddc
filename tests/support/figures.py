"""Measured figures, for people: printed (``pytest -rP`` shows them) and put into the JUnit report."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Record", "note"]

#: pytest's fixture ``record_property``.
Record = Callable[[str, object], None]


def note(record_property: Record, name: str, value: float) -> None:
    """Note one."""
    record_property(name, value)
    print(f"{name}: {value:.6g}")
