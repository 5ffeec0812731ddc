"""The pass that sums intended and actual updates: Note [Metrics] in ``numerics/update_sums.py``.

The intended update is the update of the step computed in float32 from the whole old values. ``wide``
arithmetic computes exactly that. ``native`` arithmetic rounds intermediate values, and a step without
compensation computes in the storage format: for these the step is added to the graph a second time, in
float32, for the sums alone. The actual update is read from the stores, which stay unchanged like all other
nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from collage_fx.graph import (
    PASS_MARK,
    GraphEditor,
    Role,
    StateTensor,
    StepProgram,
    copies_to_inputs,
    is_conversion,
    is_copy_to_input,
    placeholders,
    round_to_storage,
    stored,
    unconverted,
    update_sizes,
    update_sums,
)
from collage_fx.numerics import SIZES, SUMS, ErrorFormat
from collage_fx.passes.base import Pass
from collage_fx.passes.normalize import Normalize
from collage_fx.passes.widen import Widen

aten = torch.ops.aten


@dataclass(frozen=True)
class Measure(Pass):
    """Pass that adds a row of sums per compensated tensor (strategy "none": per low-precision state)."""

    name = "measure"
    after = ("analyze", "compensate-wide", "compensate-native")

    def applies_to(self, program: StepProgram) -> bool:
        return program.captured is not None

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        states = program.compensated or (program.states if program.strategy == "none" else [])
        states = [state for state in states if state.info.role is not Role.NEW]
        if any(state.intended is None for state in states):
            _intend(editor, program, states)
        last = placeholders(editor.graph)[-1]
        for state in states:
            for what, columns in (("sums", SUMS), ("sizes", SIZES)):
                with editor.graph.inserting_after(last):
                    last = editor.graph.placeholder(f"{state.placeholder.name}_{what}")
                with editor.fake_mode:
                    last.meta["val"] = torch.empty(
                        len(columns), dtype=torch.float64, device=state.value.device
                    )
                last.meta[PASS_MARK] = self.name
                state.row += (last,)
        stores = editor.move_stores_last()
        first_store = next(iter(stores.values()))
        for state in states:
            _sum(editor, program, state, stores, first_store)
        editor.finish()
        return f"{len(states)} tensors"


def _sum(
    editor: GraphEditor,
    program: StepProgram,
    state: StateTensor,
    stores: Mapping[Node, Node],
    first_store: Node,
) -> None:
    before = (state.placeholder, *state.auxiliaries)
    after = [stored(stores[into]) if into in stores else into for into in before]
    with editor.graph.inserting_before(first_store):
        old = editor.convert(state.placeholder, torch.float32)
        old_lo, new_lo = (_error(editor, state.chosen_format, each) for each in (before, after))
        new = editor.convert(after[0], torch.float32)
        if program.strategy == "none" and new is not after[0]:
            # Compiled code may hold the value before rounding: Note [Rounding must survive lowering].
            new = editor.call(round_to_storage, new, state.value.dtype)
        sums = editor.call(update_sums, old, old_lo, state.intended, new, new_lo)
        sizes = editor.call(update_sizes, old, old_lo, state.intended, state.value.dtype)
    with editor.graph.inserting_before(editor.graph.output_node()):
        for into, values in zip(state.row, (sums, sizes), strict=True):
            editor.store(into, values)


def _error(editor: GraphEditor, fmt: ErrorFormat | None, expansion: Sequence[Node]) -> Node | None:
    """Return the float32 sum of an expansion's error terms; None if there is hi alone."""
    if fmt is None:
        return None
    terms = editor.inline(fmt.error_terms, *expansion, elementwise=fmt.is_elementwise)
    wide = (editor.convert(term, torch.float32) for term in terms)
    return functools.reduce(lambda one, other: editor.call(aten.add.Tensor, one, other), wide)


def _intend(editor: GraphEditor, program: StepProgram, states: list[StateTensor]) -> None:
    """Add the step to the graph a second time, in float32, for the new values that it intends."""
    assert program.captured is not None
    reference = replace(program, gm=program.captured, strategy="none", arithmetic="wide", states=[], reads=[])
    Normalize().run(reference)
    Widen().run(reference)
    joined = {state.position: state for state in program.expansions if state.auxiliaries}
    graph = reference.gm.graph
    stores = copies_to_inputs(graph)
    position_of = {node: i for i, node in enumerate(placeholders(graph))}
    copied = dict(zip(position_of, placeholders(program.gm.graph), strict=False))
    first_store = next(node for node in program.gm.graph.nodes if is_copy_to_input(node))
    with program.gm.graph.inserting_before(first_store):
        for node in graph.nodes:
            if node.op == "call_function" and not is_copy_to_input(node):
                source = node.args[0] if is_conversion(node) else None
                if source in position_of and position_of[source] in joined:
                    owner = joined[position_of[source]]
                    expansion = (owner.placeholder, *owner.auxiliaries)
                    fmt = owner.error_format
                    (copied[node],) = editor.inline(fmt.join, *expansion, elementwise=fmt.is_elementwise)
                else:
                    args, kwargs = map_arg((node.args, node.kwargs), copied.__getitem__)
                    copied[node] = editor.call(node.target, *args, **kwargs)
        for state in states:
            value = unconverted(stored(stores[placeholders(graph)[state.position]]))
            state.intended = editor.convert(copied[value], torch.float32)
