"""Progress of a compilation: a line in the log, and a clock in a terminal.

It is a warning the first time in a process if standard error is no terminal (a log file, a notebook), so that
a program which has configured no logging shows why its first step takes long.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

import torch

from collage_fx.clock import clock, is_taken

logger = logging.getLogger("collage_fx")

#: Whether this process has shown the line as a warning.
_has_warned = False


@contextlib.contextmanager
def show_progress(subject: str, *, log: bool = True) -> Iterator[None]:
    """Context manager: show that a step of a class is compiled, in the log, too, if ``log``.

    Nested uses in the same thread show nothing.
    """
    if log and not is_taken.get():
        logger.log(_level(), "%s: compiling its step: about 10 s, or 2 s with a warm Inductor cache", subject)
    with clock(f"collage_fx: compiling the step of {subject}"):
        yield


def _level() -> int:
    global _has_warned
    distributed = torch.distributed
    is_first = not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank())
    if _has_warned or not is_first or sys.stderr.isatty():
        return logging.INFO
    _has_warned = True
    return logging.WARNING
