"""The pass that drops the error terms of values that were overwritten since the last step.

Programs overwrite state between steps: they zero an accumulated gradient, reset or scale optimizer state.
The tensor's version counter does not show all of these writes. But hi does: an error term is at most half an
ulp of hi, so a larger one belongs to another value. Added to a second moment that was zeroed, it could make
the moment negative. The test is made for sums that are not parameters, and for all state in formats whose
error terms are independent numbers; in the other formats the error is a fraction of hi's ulp, whatever hi is.
Not detected: a value overwritten by another of about the same size, which starts with the old error term.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch import Tensor

from collage_fx.graph import GraphEditor, Kind, Role, StateTensor, StepProgram, placeholders, readers_of
from collage_fx.numerics import ErrorFormat
from collage_fx.passes.base import Pass


class DropStale(Pass):
    """Pass that reads error terms of state and sums as zero if they exceed half an ulp of hi."""

    name = "drop-stale"
    after = ("compensate-wide", "compensate-native")

    def applies_to(self, program: StepProgram) -> bool:
        return any(_is_overwritten(state) for state in program.compensated)

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        overwritten = [state for state in program.compensated if _is_overwritten(state)]
        first_operation = placeholders(editor.graph)[-1].next
        for state in overwritten:
            fmt = state.error_format
            limits = float(state.format.unit_roundoff), float(state.format.quantum / 2)
            readers = [(user, each) for each in state.auxiliaries for user in readers_of(each)]
            with editor.graph.inserting_before(first_operation):
                operands = (fmt, *limits, state.placeholder, *state.auxiliaries)
                current = editor.inline(_current, *operands, elementwise=fmt.is_elementwise)
            replacements = dict(zip(state.auxiliaries, current, strict=True))
            for reader, auxiliary in readers:
                reader.replace_input_with(auxiliary, replacements[auxiliary])
        return f"{len(overwritten)} tensors"


def _is_overwritten(state: StateTensor) -> bool:
    """Return whether programs may overwrite the tensor between steps, leaving stale error terms."""
    specs = state.error_format.auxiliaries(state.placeholder.meta["val"])
    has_terms = any(spec.is_error_term for spec in specs)
    is_sum = state.recurrence.kind is Kind.ACCUMULATION
    return state.info.role is not Role.PARAMETER and (is_sum or has_terms)


def _current(
    fmt: ErrorFormat, unit_roundoff: float, half_quantum: float, hi: Tensor, *auxiliaries: Tensor
) -> tuple[Tensor, ...]:
    """Return the auxiliaries as the step reads them: zero error for the elements that are stale."""
    error = functools.reduce(operator.add, fmt.error_terms(hi, *auxiliaries))
    # Half an ulp of hi is at most its product with the unit roundoff, or half the smallest number.
    limit = hi.to(torch.float32).abs() * unit_roundoff + half_quantum
    stale = error.to(torch.float32).abs() > limit
    if fmt.is_elementwise:
        return tuple(
            torch.where(stale, _zero(auxiliary), auxiliary) if auxiliary.dim() == hi.dim() else auxiliary
            for auxiliary in auxiliaries
        )
    value = fmt.join(hi, *auxiliaries)
    return fmt.split(torch.where(stale, _zero(value), value), hi.dtype)[1:]


def _zero(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device)
