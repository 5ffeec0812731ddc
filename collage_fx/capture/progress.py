"""Progress of a compilation: a line in the log, and a clock in a terminal.

The line that ends it is the report's headline: number of compensated tensors, and seconds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from collage_fx.clock import clock, is_taken

logger = logging.getLogger("collage_fx")


@contextlib.contextmanager
def show_progress(subject: str, *, log: bool = True) -> Iterator[None]:
    """Context manager: show that a step of a class is compiled, in the log, too, if ``log``.

    Nested uses in the same thread show nothing.
    """
    if log and not is_taken.get():
        logger.info("%s: compiling its step: about 10 s, or 2 s with a warm Inductor cache", subject)
    with clock(f"collage_fx: compiling the step of {subject}"):
        yield
