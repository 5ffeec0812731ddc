"""Clock in a terminal, for work of more than two seconds. Imports no torch, whose import it times."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar

#: Seconds before the clock appears, and between two updates of it.
PATIENCE, PERIOD = 2.0, 0.5

#: Whether a clock is shown already, or hidden.
is_taken: ContextVar[bool] = ContextVar("is_taken", default=False)


@contextlib.contextmanager
def clock(text: str) -> Iterator[None]:
    """Context manager: show a text and the elapsed seconds in a terminal, from the third second on.

    Nested uses in the same thread show nothing. Nothing is written if standard error is not a terminal.
    """
    if is_taken.get():
        yield
        return
    with no_clock():
        if not sys.stderr.isatty():
            yield
            return
        done = threading.Event()
        shown = threading.Thread(target=_show, args=(text, done), daemon=True)
        shown.start()
        try:
            yield
        finally:
            done.set()
            shown.join()


@contextlib.contextmanager
def no_clock() -> Iterator[None]:
    """Context manager: no clock is shown."""
    token = is_taken.set(True)
    try:
        yield
    finally:
        is_taken.reset(token)


def _show(text: str, done: threading.Event) -> None:
    """Print and update the text until ``done`` is set; then erase it."""
    start = time.monotonic()
    shown = ""
    while not done.wait(PERIOD if shown else PATIENCE):
        shown = f"{text}, {int(time.monotonic() - start)} s"
        print(f"\r{shown}", end="", file=sys.stderr, flush=True)
    if shown:
        print(f"\r{' ' * len(shown)}\r", end="", file=sys.stderr, flush=True)
