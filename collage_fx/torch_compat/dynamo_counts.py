"""What Dynamo counts: functions that it has converted, and why it has broken graphs."""

from __future__ import annotations

from torch._dynamo import utils

RELIED_ON = ("torch._dynamo:utils has clear_compilation_metrics, counters, get_compilation_metrics",)

#: How the reason begins of the graph break that torch itself puts around every optimizer's step.
OWN_BREAK = "Call to `torch._dynamo.graph_break()`"


def forget_counts() -> None:
    """Count from zero."""
    utils.counters.clear()
    utils.clear_compilation_metrics()


def conversions() -> int:
    """The number of conversions so far."""
    return len(utils.get_compilation_metrics())


def recompile_reasons() -> list[str]:
    """The reason for each conversion of something that had been converted before."""
    reasons = (metrics.recompile_reason for metrics in utils.get_compilation_metrics())
    return [reason for reason in reasons if reason]


def graph_breaks() -> list[str]:
    """The reason for each graph break, but for those that torch itself puts around a step."""
    return [reason for reason in utils.counters["graph_break"] if not reason.startswith(OWN_BREAK)]
