"""The pass that adds the error terms of the selected tensors to the graph's inputs.

Only the graph's side of the allocation is done here: new placeholders come behind the existing ones, so that
the positions that AOTAutograd and Dynamo know do not change. ``state/error_terms.py`` owns the real buffers.
"""

from __future__ import annotations

from collections.abc import Iterator

from collage_fx import graph
from collage_fx.graph import Expansion, GraphEditor, StepProgram
from collage_fx.passes.base import Pass


class Allocate(Pass):
    """Pass that adds a placeholder for each auxiliary tensor of each selected state tensor, in their order.

    A tensor in a dithered format gets an additional placeholder, for the index of its first element.

    Then follow those of tensors that have error terms and are only read. (``native`` reads their hi.)
    """

    name = "allocate"
    after = ("analyze", "pack-state")

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        last = graph.placeholders(editor.graph)[-1]
        program.reads = list(_reads(program)) if program.arithmetic == "wide" else []
        for state in program.expansions:
            hi = state.placeholder.meta["val"]
            added = []
            for spec in state.error_format.inputs(hi):
                with editor.graph.inserting_after(last):
                    last = editor.graph.placeholder(f"{state.placeholder.name}_{spec.name}")
                with editor.fake_mode:
                    last.meta["val"] = spec.zeros(hi.device)
                last.meta[graph.PASS_MARK] = self.name
                added.append(last)
            count = len(state.error_format.auxiliaries(hi))
            state.auxiliaries, state.start = tuple(added[:count]), next(iter(added[count:]), None)
        return f"{sum(len(state.added_inputs) for state in program.expansions)} inputs added"


def _reads(program: StepProgram) -> Iterator[Expansion]:
    whole = program.already_compensated | program.may_get_terms
    read = whole.difference(state.position for state in program.states)
    for position, node in enumerate(graph.placeholders(program.gm.graph)):
        if position in read and graph.is_low_precision_tensor(node):
            fmt = program.known_formats.get(position, program.error_format)
            yield Expansion(node, position, program.inputs[position], chosen_format=fmt)
