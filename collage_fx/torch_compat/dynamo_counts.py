"""Dynamo's records of the functions that it has converted."""

from __future__ import annotations

from torch._dynamo import utils

RELIED_ON = ("torch._dynamo:utils has clear_compilation_metrics, get_compilation_metrics",)


def forget_counts() -> None:
    """Forget the conversions so far."""
    utils.clear_compilation_metrics()


def conversions() -> int:
    """Return the number of conversions so far."""
    return len(utils.get_compilation_metrics())


def recompile_reasons() -> list[str]:
    """Return the reason of each repeated conversion of the same function."""
    reasons = (metrics.recompile_reason for metrics in utils.get_compilation_metrics())
    return [reason for reason in reasons if reason]
