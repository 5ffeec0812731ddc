"""The pass that makes the error terms of the selected tensors inputs of the graph.

Only the graph's side of the allocation is done here: placeholders behind the existing ones, so that no
position that AOTAutograd and Dynamo know of moves. The real buffers belong to ``state/error_terms.py``,
which knows how long they live.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from collage_fx.graph import (
    PASS_MARK,
    GraphEditor,
    ReadExpansion,
    StepProgram,
    is_low_precision_tensor,
    placeholders,
    tensor_value,
)
from collage_fx.numerics import AuxiliarySpec
from collage_fx.passes.base import Pass

#: The index of the first element of a piece.
START = AuxiliarySpec("start", torch.int32, ())


@dataclass(frozen=True)
class Allocate(Pass):
    """Adds one placeholder per auxiliary tensor of each selected state tensor, in their order.

    Behind those of a dithered one, one for the index of its first element.

    After them those of tensors that have error terms already and are only read. (``native`` reads their hi.)
    """

    name = "allocate"
    after = ("analyze", "pack-state")

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        last = placeholders(editor.graph)[-1]
        program.reads = list(_reads(program)) if program.arithmetic == "wide" else []
        for state in program.expansions:
            hi = tensor_value(state.placeholder)
            assert hi is not None
            specs = list(state.error_format.auxiliaries(hi))
            added = []
            for spec in [*specs, START] if state.error_format.is_dithered else specs:
                with editor.graph.inserting_after(last):
                    last = editor.graph.placeholder(f"{state.placeholder.name}_{spec.name}")
                with editor.fake_mode:
                    last.meta["val"] = spec.zeros(hi.device)
                last.meta[PASS_MARK] = self.name
                added.append(last)
            state.auxiliaries = tuple(added[: len(specs)])
            if len(added) > len(specs):
                state.start = added[-1]
        editor.finish()
        return f"{sum(len(state.added) for state in program.expansions)} inputs added"


def _reads(program: StepProgram) -> Iterator[ReadExpansion]:
    mutated = {state.position for state in program.states}
    for position, node in enumerate(placeholders(program.gm.graph)):
        is_read = position in program.already_compensated and position not in mutated
        if is_read and is_low_precision_tensor(node):
            yield ReadExpansion(node, position, program.inputs[position], program.error_format)
