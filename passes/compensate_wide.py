"""The pass for ``wide`` compensation: load ``hi + lo`` into float32, compute, split the result again.

Theorem. Let x' be the float32 result of the step. ``hi' = RN(x')`` and ``lo' = RN(x' - hi')``; the difference
is exact in float32 (Sterbenz-like: hi' is x' rounded), so ``|hi' + lo' - x'| <= u |lo'| <= u**2 |x'|``, and
``|lo'| <= ulp(hi')/2``.

Whoever reads the new value reads x', except where an optimizer compensates by hand and has to see what has
been rounded: Note [Kahan's own term] in ``graph/feedback.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from collage_fx.graph import (
    GraphEditor,
    ReadExpansion,
    Role,
    StateTensor,
    StepProgram,
    fed_back,
    intend,
    is_conversion,
    is_copy_to_input,
    is_low_precision_tensor,
    new_value,
    operands_of,
    operator_of,
    placeholders,
    reached,
    restore,
    set_aside,
    unconverted,
)
from collage_fx.passes.base import Pass


@dataclass(frozen=True)
class CompensateWide(Pass):
    """Each selected tensor's load becomes the error format's ``join``, its store the format's ``store``.

    The load of a tensor that has error terms and is only read likewise.
    """

    name = "compensate-wide"
    after = ("widen",)

    def applies_to(self, program: StepProgram) -> bool:
        return program.arithmetic == "wide"

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        for state in program.expanded:
            _load_moved_expansion(editor, state)
        order = {node: i for i, node in enumerate(editor.graph.nodes)}
        skips = [set_aside(state) for state in program.expanded]
        for state in program.compensated:
            _refuse_lost_value(program, state, order)
        for expansion in program.expansions:
            _load_expansion(editor, expansion)
        terms = [
            # State, beside which nobody keeps a term, is read as it was computed.
            fed_back(state, program.states) if state.info.role is Role.PARAMETER else set[Node]()
            for state in program.expanded
        ]
        for state, own_term in zip(program.expanded, terms, strict=True):
            _store_expansion(editor, state, own_term)
        for state, skip in zip(program.expanded, skips, strict=True):
            restore(editor, state, skip)
        editor.finish()
        for state, skip in zip(program.expanded, skips, strict=True):
            intend(editor, state, skip)
        for state in program.expanded:
            if state.packed:
                editor.graph.erase_node(state.store)
        for expansion in program.expansions:
            if expansion.packed:
                _give_up_hi(editor, expansion.placeholder)
        return program.compensation


def _load_moved_expansion(editor: GraphEditor, state: StateTensor) -> None:
    """Read another tensor's whole value where its old one is stored as it is."""
    source = state.stored
    if source.op == "placeholder":
        with editor.graph.inserting_before(state.store):
            state.store.args = (
                state.placeholder,
                editor.convert(source, torch.float32),
                *state.store.args[2:],
            )


def _load_expansion(editor: GraphEditor, state: StateTensor | ReadExpansion) -> None:
    """Have every reader of hi as float32 read the whole value, hi and its error terms joined."""
    fmt = state.error_format
    readers = [user for user in state.placeholder.users if not is_copy_to_input(user)]
    loads = [user for user in readers if is_conversion(user)]
    if not (loads if fmt.keeps_hi else readers):
        return
    first = loads[0] if fmt.keeps_hi else placeholders(editor.graph)[-1].next
    with editor.graph.inserting_before(first):
        (value,) = editor.inline(
            fmt.join, state.placeholder, *state.auxiliaries, elementwise=fmt.is_elementwise
        )
        rounded = value if fmt.keeps_hi else editor.convert(value, state.placeholder.meta["val"].dtype)
    for load in loads:
        load.replace_all_uses_with(value)
    if not fmt.keeps_hi:
        for reader in readers:
            reader.replace_input_with(state.placeholder, rounded)


def _give_up_hi(editor: GraphEditor, placeholder: Node) -> None:
    """Note that a packed tensor, which is neither read nor written any more, has no memory in a step."""
    value = placeholder.meta["val"]
    with editor.fake_mode:
        placeholder.meta["val"] = value.new_empty(()).expand(value.shape)


def _refuse_lost_value(program: StepProgram, state: StateTensor, order: Mapping[Node, int]) -> None:
    """Set ``state.refusal`` if every way from load to store leads through an operator that reads hi alone.

    Such an operator takes the storage dtype, as written, of the tensor or of what was made of it in float32:
    the error term does not pass. What a parameter was may come by way of another part of a recorded step.
    """
    sources, path = {state.placeholder}, set(state.recurrence.path)
    if not path and program.is_recorded and state.info.role is Role.PARAMETER:
        path = {new_value(state), *reached([new_value(state)], operands_of)}
        read = [each for each in program.expansions if each.placeholder in path]
        if any(each.info.role is Role.CARRIED for each in read):
            sources.update(each.placeholder for each in read)
    whole, rounded, opaque = set[Node](), set(sources), None
    for node in sorted(reached(sources, lambda node: node.users), key=order.__getitem__):
        if is_copy_to_input(node):
            continue
        if is_conversion(node):
            reads_it = not (whole | sources).isdisjoint(node.all_input_nodes)
            if reads_it:
                (rounded if is_low_precision_tensor(node) else whole).add(node)
        elif not rounded.isdisjoint(node.all_input_nodes):
            opaque = opaque or (node if node in path else None)
        elif not whole.isdisjoint(node.all_input_nodes):
            whole.add(node)
    if opaque is not None and new_value(state) not in whole:
        state.refusal = (
            f"{opaque.name} ({operator_of(opaque)}) reads it in {state.format.name}, without its error term"
        )


def _store_expansion(editor: GraphEditor, state: StateTensor, own_term: Collection[Node]) -> None:
    """Replace the rounding cast in front of the store by the split; nodes in ``own_term`` read its result."""
    fmt, value = state.error_format, new_value(state)
    readers = [user for user in value.users if user in own_term]
    with editor.graph.inserting_before(value.next if readers else state.store):
        opaque = _rounded_on_the_way(value)
        if opaque is not None and state.compensated and state.carries_its_old_value:
            state.refusal = (
                f"{opaque.name} ({operator_of(opaque)}) gives its result in {state.format.name}, already "
                "rounded"
            )
        state.intended = editor.convert(value, torch.float32)
        before = (state.placeholder, *state.added)
        hi, *auxiliaries = editor.inline(fmt.store, state.intended, *before, elementwise=fmt.is_elementwise)
        if readers:
            (whole,) = editor.inline(fmt.join, hi, *auxiliaries, elementwise=fmt.is_elementwise)
            for reader in readers:
                reader.replace_input_with(value, whole)
    with editor.graph.inserting_before(state.store):
        state.store.args = (state.placeholder, hi, *state.store.args[2:])
        for placeholder, auxiliary in zip(state.auxiliaries, auxiliaries, strict=True):
            editor.store(placeholder, auxiliary)


def _rounded_on_the_way(value: Node) -> Node | None:
    """The operator that made ``value`` in the storage dtype, if one did: its rounding cannot be undone."""
    source = unconverted(value)
    return source if source.op == "call_function" and is_low_precision_tensor(source) else None
