"""The card, which torch has from the import of this module on: ``startup/sitecustomize.py`` imports it."""

from __future__ import annotations

import os

from tests.support.fake_cuda import IDLE

__all__ = ["LIBRARY"]

#: torch's operators on the host, as long as this object lives.
LIBRARY: object = None

if not os.environ.get(IDLE):
    from tests.support.fake_cuda.operators import replace_operators

    LIBRARY = replace_operators()
