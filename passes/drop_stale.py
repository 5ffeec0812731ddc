"""The pass that drops error terms of values that have been overwritten since the last step.

Gradients that are accumulated in place (``p.grad += g``) are zeroed between two sums by ``zero_grad``,
``p.grad.zero_()`` or ``p.grad.data.zero_()``; programs reset or scale optimizer state. Nobody tells us, and
not all of it is seen in the tensor's version counter. But hi tells: an error term is half an ulp of it at
most, so that a larger one is one of another value. Added to a second moment that has been zeroed, it could be
negative. The test costs some operations an element in a kernel that waits for memory, and looks at nothing
outside the step. It is made for sums that are not parameters, and for all state in formats whose error terms
are numbers of their own; in others the error is a fraction of hi's ulp whatever hi is. What it can't see is a
value overwritten by another one of its size: that begins with the last one's error term.
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
    """Error terms of state and sums are read as zero where they are larger than half an ulp of hi."""

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
            readers = [
                (user, auxiliary)
                for auxiliary in state.auxiliaries
                for user in auxiliary.users
                if not is_copy_to_input(user)
            ]
            with editor.graph.inserting_before(first_operation):
                operands = (fmt, *limits, state.placeholder, *state.auxiliaries)
                current = editor.inline(_current, *operands, elementwise=fmt.is_elementwise)
            replacements = dict(zip(state.auxiliaries, current, strict=True))
            for reader, auxiliary in readers:
                reader.replace_input_with(auxiliary, replacements[auxiliary])
        editor.finish()
        return f"{len(overwritten)} tensors"


def _is_overwritten(state: StateTensor) -> bool:
    """Whether programs overwrite the tensor between steps, and its error terms do not depend on hi."""
    specs = state.error_format.auxiliaries(state.placeholder.meta["val"])
    has_terms = any(spec.is_error_term for spec in specs)
    is_sum = state.recurrence.kind is Kind.ACCUMULATION
    return state.info.role is not Role.PARAMETER and (is_sum or has_terms)


def _current(
    fmt: ErrorFormat, unit_roundoff: float, half_quantum: float, hi: Tensor, *auxiliaries: Tensor
) -> tuple[Tensor, ...]:
    """The auxiliaries as they are to be read: where an element is stale, they say that its value is hi."""
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
