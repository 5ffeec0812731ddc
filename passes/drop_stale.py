"""The pass that drops the error terms of sums that have been zeroed since the last step.

Gradients that are accumulated in place (``p.grad += g``) are zeroed between two sums by ``zero_grad``,
``p.grad.zero_()`` or ``p.grad.data.zero_()``, of which nobody tells us and not all of which the tensor's
version counter does. But hi tells: where it is zero, a rounding error is at most half the smallest subnormal,
so that a larger error term is one of another sum. (In the storage format itself there is no smaller number:
every error term but zero is stale.) The test costs two operations an element in a kernel that waits for
memory, and looks at nothing outside the step. What it can't see is a sum overwritten by another value than
zero: ``p.grad.copy_(g)`` begins with the last sum's error term, at most half an ulp of that sum.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from collage_fx.graph import GraphEditor, Kind, Role, StateTensor, StepProgram, is_copy_to_input, placeholders
from collage_fx.numerics import ErrorFormat
from collage_fx.passes.base import Pass


@dataclass(frozen=True)
class DropStale(Pass):
    """Error terms of accumulations other than parameters are read as zero where hi has been zeroed."""

    name = "drop-stale"
    after = ("compensate-wide", "compensate-native")

    def applies_to(self, program: StepProgram) -> bool:
        return any(_is_sum(state) for state in program.compensated)

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        sums = [state for state in program.compensated if _is_sum(state)]
        first_operation = placeholders(editor.graph)[-1].next
        for state in sums:
            fmt, half_quantum = state.error_format, float(state.format.quantum / 2)
            readers = [
                (user, auxiliary)
                for auxiliary in state.auxiliaries
                for user in auxiliary.users
                if not is_copy_to_input(user)
            ]
            with editor.graph.inserting_before(first_operation):
                operands = (fmt, half_quantum, state.placeholder, *state.auxiliaries)
                current = editor.inline(_current, *operands, elementwise=fmt.is_elementwise)
            replacements = dict(zip(state.auxiliaries, current, strict=True))
            for reader, auxiliary in readers:
                reader.replace_input_with(auxiliary, replacements[auxiliary])
        editor.finish()
        return f"{len(sums)} tensors"


def _is_sum(state: StateTensor) -> bool:
    return state.recurrence.kind is Kind.ACCUMULATION and state.info.role is not Role.PARAMETER


def _current(fmt: ErrorFormat, half_quantum: float, hi: Tensor, *auxiliaries: Tensor) -> tuple[Tensor, ...]:
    """The auxiliaries as they are to be read: where an element is stale, they say that its value is hi."""
    error = functools.reduce(operator.add, fmt.error_terms(hi, *auxiliaries))
    stale = (hi == 0) & (error.abs() > half_quantum)
    if fmt.is_elementwise:
        return tuple(
            torch.where(stale, _zero(auxiliary), auxiliary) if auxiliary.dim() == hi.dim() else auxiliary
            for auxiliary in auxiliaries
        )
    value = fmt.join(hi, *auxiliaries)
    return fmt.split(torch.where(stale, _zero(value), value), hi.dtype)[1:]


def _zero(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device)
