"""Functions that Dynamo has converted: its records of them, and their code."""

from __future__ import annotations

from types import CodeType

from torch._dynamo import eval_frame, utils

RELIED_ON = (
    "torch._dynamo:utils has clear_compilation_metrics, get_compilation_metrics",
    "torch._dynamo:eval_frame has reset_code",
)


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


def drop_code(code: CodeType) -> None:
    """Drop everything that a function has been converted to: its next call is converted again."""
    eval_frame.reset_code(code)
