"""Says that a step is being compiled: by a line of the log, and a clock in a terminal.

The line that ends it is the report's headline: what was compensated, compiled in how many seconds.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar

logger = logging.getLogger("collage_fx")

#: Seconds after which a terminal shows a clock, and between two looks at it.
PATIENCE, PERIOD = 2.0, 0.5

_is_telling: ContextVar[bool] = ContextVar("is_telling", default=False)


@contextlib.contextmanager
def telling(subject: str, *, log: bool = True) -> Iterator[None]:
    """Context manager: the step of ``subject`` is compiled. What is nested in it, in one thread, is not told.

    Args:
        subject: the optimizer's class.
        log: whether a line of the log says so, too; it has if torch's wrapper around the step came before.
    """
    if _is_telling.get():
        yield
        return
    if log:
        logger.info("%s: compiling its step, some 10 s, or 2 s of what Inductor's cache holds", subject)
    with untold(), _clock(f"collage_fx: compiling the step of {subject}"):
        yield


@contextlib.contextmanager
def untold() -> Iterator[None]:
    """Within, nothing is said: what is traced is not to be compiled."""
    token = _is_telling.set(True)
    try:
        yield
    finally:
        _is_telling.reset(token)


@contextlib.contextmanager
def _clock(text: str) -> Iterator[None]:
    """Within, a terminal shows a text and the seconds, once they are some."""
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
    seconds = PATIENCE
    shown = ""
    while not done.wait(PERIOD if shown else PATIENCE):
        shown = f"{text}, {seconds:.0f} s"
        print(f"\r{shown}", end="", file=sys.stderr, flush=True)
        seconds += PERIOD
    if shown:
        print(f"\r{' ' * len(shown)}\r", end="", file=sys.stderr, flush=True)
