"""The pass that notes which elements of a parameter a step changes: ``collage_fx.changes``.

It compares the old and the new hi, both of which the kernel has in registers, and sets a bit for each element
that differs: Note [Changed elements] in ``state/changed_elements.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from collage_fx.graph import GraphEditor, StepProgram, differs, mark_changed, stored
from collage_fx.passes.base import Pass


@dataclass(frozen=True)
class TrackChanges(Pass):
    """Pass that sets the bits of changed elements in the bitmap that ``allocate`` has added."""

    name = "track-changes"
    after = ("allocate", "compensate-wide", "compensate-native")

    def applies_to(self, program: StepProgram) -> bool:
        return any(state.changed is not None for state in program.states)

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        stores = editor.move_stores_last()
        first_store = next(iter(stores.values()))
        tracked = [state for state in program.states if state.changed is not None]
        for state in tracked:
            assert state.changed is not None
            with editor.graph.inserting_before(first_store):
                old = editor.convert(state.placeholder, torch.float32)
                new = editor.convert(stored(stores[state.placeholder]), torch.float32)
                words = editor.call(mark_changed, state.changed, editor.call(differs, old, new))
            with editor.graph.inserting_before(editor.graph.output_node()):
                editor.store(state.changed, words)
        editor.finish()
        return f"{len(tracked)} tensors"
