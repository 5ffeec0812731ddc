"""The pass for ``wide`` compensation: load ``hi + lo`` into float32, compute, split the result again.

Theorem. Let x' be the float32 result of the step. ``hi' = RN(x')`` and ``lo' = RN(x' - hi')``; the difference
is exact in float32 (Sterbenz-like: hi' is x' rounded), so ``|hi' + lo' - x'| <= u |lo'| <= u**2 |x'|``, and
``|lo'| <= ulp(hi')/2``.

Readers of the new value read x', except in an optimizer that compensates by hand, which has to see the
rounded value: Note [Kahan's own term] in ``graph/feedback.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch.fx import Node

from collage_fx import graph
from collage_fx.graph import GraphEditor, Role, StateTensor, StepProgram
from collage_fx.passes.base import Pass

aten = torch.ops.aten


class CompensateWide(Pass):
    """Pass that loads each selected tensor by its error format's ``join`` and stores it by ``store``.

    The load of a tensor that has error terms and is only read becomes a ``join``, too.
    """

    name = "compensate-wide"
    after = ("widen",)

    def applies_to(self, program: StepProgram) -> bool:
        return program.arithmetic == "wide"

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        for state in program.expanded:
            if state.stored.op == "placeholder":  # convert a stored input, so that its whole value is read
                with editor.graph.inserting_before(state.store):
                    state.store.update_arg(1, editor.convert(state.stored, torch.float32))
        order = {node: i for i, node in enumerate(editor.graph.nodes)}
        skips = [graph.set_aside(state) for state in program.expanded]
        for state in program.compensated:
            _refuse_lost_value(program, state, order)
        for expansion in program.expansions:
            graph.read_whole(editor, expansion.placeholder, expansion.auxiliaries, expansion.error_format)
        terms = [
            # Optimizers keep a Kahan term for parameters only; readers of other state read it unrounded.
            graph.fed_back(state, program.states) if state.info.role is Role.PARAMETER else set[Node]()
            for state in program.expanded
        ]
        for state, own_term in zip(program.expanded, terms, strict=True):
            _store_expansion(editor, state, own_term)
        for state, skip in zip(program.expanded, skips, strict=True):
            graph.restore(editor, state, skip)
        for state in program.expanded:
            if not state.hi:
                editor.graph.erase_node(state.store)
        for expansion in program.expansions:
            if not expansion.hi:  # a value without memory, since the step does not use its hi
                value = expansion.placeholder.meta["val"]
                with editor.fake_mode:
                    expansion.placeholder.meta["val"] = value.new_empty(()).expand(value.shape)
        return program.compensation


def _refuse_lost_value(program: StepProgram, state: StateTensor, order: Mapping[Node, int]) -> None:
    """Set ``state.refusal`` if every path from load to store passes an operator that reads hi alone.

    Such an operator needs operands in the storage dtype: the tensor itself, or a value computed from it and
    cast back. In a recorded step, a parameter's old value may come from another part, as a carried input.
    """
    sources, path = {state.placeholder}, set(state.recurrence.path)
    if not path and program.is_recorded and state.info.role is Role.PARAMETER:
        path = graph.made_of(graph.new_value(state))
        read = [each for each in program.expansions if each.placeholder in path]
        if any(each.info.role is Role.CARRIED for each in read):
            sources.update(each.placeholder for each in read)
    whole, rounded, opaque = set[Node](), set(sources), None
    for node in sorted(graph.reached(sources, lambda node: node.users), key=order.__getitem__):
        if graph.is_copy_to_input(node):
            continue
        if graph.is_conversion(node):
            if not (whole | sources).isdisjoint(node.all_input_nodes):
                (rounded if graph.is_low_precision_tensor(node) else whole).add(node)
        elif not rounded.isdisjoint(node.all_input_nodes):
            opaque = opaque or (node if node in path else None)
        elif not whole.isdisjoint(node.all_input_nodes):
            whole.add(node)
    if opaque is not None and graph.new_value(state) not in whole:
        what = f"{opaque.name} ({graph.operator_of(opaque)})"
        state.refusal = f"{what} reads it in {state.format.name}, without its error term"


def _store_expansion(editor: GraphEditor, state: StateTensor, own_term: Collection[Node]) -> None:
    """Replace the cast in front of the store by the split; nodes in ``own_term`` read its result."""
    fmt, value = state.error_format, graph.new_value(state)
    readers = [user for user in value.users if user in own_term]
    with editor.graph.inserting_before(value.next if readers else state.store):
        source = graph.unconverted(value)
        is_rounded = source.op == "call_function" and graph.is_low_precision_tensor(source)  # for good
        if is_rounded and state.compensated and state.depends_on_old_value:
            what = f"{source.name} ({graph.operator_of(source)})"
            state.refusal = f"{what} returns its result rounded to {state.format.name}"
        given = (editor.convert(value, torch.float32), state.placeholder, *state.added_inputs)
        hi, *auxiliaries = state.rounded or editor.inline(fmt.store, *given, elementwise=fmt.is_elementwise)
        if state.keeps_small_updates or state.counts_steps:
            auxiliaries[-1] = editor.call(aten.add.Tensor, auxiliaries[-1], 1)
        if readers:
            (whole,) = editor.inline(fmt.join, hi, *auxiliaries, elementwise=fmt.is_elementwise)
            for reader in readers:
                reader.replace_input_with(value, whole)
    with editor.graph.inserting_before(state.store):
        state.store.update_arg(1, hi)
        for placeholder, auxiliary in zip(state.written, auxiliaries, strict=False):
            editor.store(placeholder, auxiliary)
