"""Names that options may have as values, and their types. Imports no torch, so that ``--help`` is quick."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal

Strategy = Literal["none", "light", "plus", "full"]
Arithmetic = Literal["wide", "native"]
Rounding = Literal["nearest", "dither"]
Changes = Literal["summed", "as written"]
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

#: Formats that the package brings. A plug-in registers others, whose names a type checker does not know.
ErrorFormatName = Literal["exact", "mcf", "fp32", "byte", "dither"]
PackedFormatName = Literal["block16", "block8", "bf16"]

#: Dtypes of parameters, and GPUs, that the command line offers.
Dtype = Literal["bfloat16", "float16", "float32"]
Architecture = Literal["sm_80", "sm_90", "sm_100", "gfx942"]

#: Default number of steps of an audit: enough for scheduled numbers to change, and for work done in every
#: fifth step.
AUDIT_STEPS = 40


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint: the known names similar to ``name``; if none is similar, the first 20 known names."""
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
