"""Find the state tensors, read their recurrences and decide which become expansions.

The decision rests on the recurrence alone: nothing here knows a name such as ``exp_avg_sq``. ``plus`` takes
Adam's second moment in at beta2 >= 0.95 and leaves the first out at beta1 = 0.9 because of what their decays
do in the storage format.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from collage_fx.graph import copies_to_inputs, is_low_precision_tensor, placeholders
from collage_fx.passes.base import Pass
from collage_fx.program import Kind, Role, StateTensor, StepProgram
from collage_fx.recurrence import judge, read_recurrence

__all__ = ["Analyze"]


@dataclass(frozen=True)
class Analyze(Pass):
    """Fills ``program.states``: recurrences, verdicts and what the strategy selects, with reasons."""

    name = "analyze"
    after = ("normalize",)

    def run(self, program: StepProgram) -> str:
        graph = program.gm.graph
        inputs = placeholders(graph)
        stores = copies_to_inputs(graph)
        symbols = {node: info.symbol for node, info in zip(inputs, program.inputs, strict=True)}
        new_values: dict[Node, str] = {}
        for placeholder, store in stores.items():
            new_value = store.args[1]
            assert isinstance(new_value, Node)
            new_values.setdefault(new_value, f"{symbols[placeholder]}'")
        program.states = []
        for position, (placeholder, info) in enumerate(zip(inputs, program.inputs, strict=True)):
            if placeholder not in stores or not is_low_precision_tensor(placeholder):
                continue
            state = StateTensor(placeholder, position, info, stores[placeholder])
            new_value = state.store.args[1]
            assert isinstance(new_value, Node)
            is_parameter = info.role is Role.PARAMETER
            state.recurrence = read_recurrence(
                placeholder, new_value, symbols, new_values, is_parameter=is_parameter
            )
            state.verdict = judge(state.recurrence, state.format)
            state.compensated, state.selection = _select(program, state)
            program.states.append(state)
        return f"{len(program.compensated)} of {len(program.states)} low-precision state tensors selected"


def _select(program: StepProgram, state: StateTensor) -> tuple[bool, str]:
    """Whether ``state`` becomes an expansion under the program's strategy, and why."""
    assert state.recurrence is not None
    assert state.verdict is not None
    if program.strategy == "none":
        return False, "none: plain low precision"
    if state.position in program.already_compensated:
        return True, "it has error terms from another compiled step, which have to be kept up"
    if state.recurrence.kind is Kind.OVERWRITE:
        return False, "overwritten: there is nothing to carry from step to step"
    if program.strategy == "full":
        return True, "full: every state tensor"
    if state.info.role is Role.PARAMETER:
        return True, f"{program.strategy}: every parameter"
    if program.strategy == "plus" and state.verdict.lossy:
        return True, "plus: lossy state"
    return False, "not lossy" if program.strategy == "plus" else f"{program.strategy}: parameters only"
