"""Progress of a compilation: a line in the log, and a clock in a terminal.

The line that ends it is the report's headline: number of compensated tensors, and seconds.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar

logger = logging.getLogger("collage_fx")

#: Seconds before the clock appears, and between two updates of it.
PATIENCE, PERIOD = 2.0, 0.5

#: Whether progress is shown already, or hidden.
_is_shown: ContextVar[bool] = ContextVar("_is_shown", default=False)


@contextlib.contextmanager
def show_progress(subject: str, *, log: bool = True) -> Iterator[None]:
    """Context manager: show that a step is compiled; nested uses in the same thread show nothing.

    Args:
        subject: class name of the optimizer.
        log: whether to write a line into the log, too.
    """
    if _is_shown.get():
        yield
        return
    if log:
        logger.info("%s: compiling its step: about 10 s, or 2 s with a warm Inductor cache", subject)
    with hide_progress(), _clock(f"collage_fx: compiling the step of {subject}"):
        yield


@contextlib.contextmanager
def hide_progress() -> Iterator[None]:
    """Context manager: no "compiling" messages, for traces that are not compiled."""
    token = _is_shown.set(True)
    try:
        yield
    finally:
        _is_shown.reset(token)


@contextlib.contextmanager
def _clock(text: str) -> Iterator[None]:
    """Context manager: show a text and the elapsed seconds in a terminal, from the third second on."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    clock = threading.Thread(target=_show, args=(text, done), daemon=True)
    clock.start()
    try:
        yield
    finally:
        done.set()
        clock.join()


def _show(text: str, done: threading.Event) -> None:
    """Print and update the text until ``done`` is set; then erase it."""
    seconds = PATIENCE
    shown = ""
    while not done.wait(PERIOD if shown else PATIENCE):
        shown = f"{text}, {seconds:.0f} s"
        print(f"\r{shown}", end="", file=sys.stderr, flush=True)
        seconds += PERIOD
    if shown:
        print(f"\r{' ' * len(shown)}\r", end="", file=sys.stderr, flush=True)
