"""One variant of the compatibility table, measured as ``collage_fx.audit`` measures optimizers."""

from __future__ import annotations

from functools import partial

from collage_fx.tools.audit import Measurement, Trial, measure_trial
from tests.compatibility.catalog import DTYPES, STEPS, Variant

__all__ = ["measure"]

#: Python-side options without which eager execution on the CPU gives the same numbers, and with which it
#: refuses.
COMPILED_ONLY = ("capturable", "fused")


def measure(variant: Variant) -> Measurement:
    """Measure one variant."""
    subject = variant.row.subject
    trial = Trial(
        variant.optimizer,
        subject.shapes,
        DTYPES[variant.row.dtype],
        subject.steps,
        make_eager=partial(variant.optimizer, without=COMPILED_ONLY),
        sparse=subject.sparse,
        closure=subject.closure,
        why_inaccurate=subject.why_inaccurate,
        options={} if variant.budget is None else {"bytes_per_parameter": variant.budget},
    )
    measured = measure_trial(trial)
    if subject.steps != STEPS:
        measured.notes.insert(0, f"{subject.steps} steps")
    return measured
