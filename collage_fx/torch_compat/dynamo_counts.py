"""Dynamo's counters: functions that it has converted, and reasons of graph breaks."""

from __future__ import annotations

from torch._dynamo import utils

RELIED_ON = ("torch._dynamo:utils has clear_compilation_metrics, counters, get_compilation_metrics",)

#: Beginning of the reason of the graph break that torch itself puts around every optimizer's step.
OWN_BREAK = "Call to `torch._dynamo.graph_break()`"


def forget_counts() -> None:
    """Reset the counters."""
    utils.counters.clear()
    utils.clear_compilation_metrics()


def conversions() -> int:
    """Return the number of conversions so far."""
    return len(utils.get_compilation_metrics())


def recompile_reasons() -> list[str]:
    """Return the reason of each repeated conversion of the same function."""
    reasons = (metrics.recompile_reason for metrics in utils.get_compilation_metrics())
    return [reason for reason in reasons if reason]


def graph_breaks() -> list[str]:
    """Return the reason of each graph break; breaks that torch itself puts around a step are left out."""
    return [reason for reason in utils.counters["graph_break"] if not reason.startswith(OWN_BREAK)]
