"""The pass that finds the state tensors, reads their recurrences and selects which become expansions.

The decision depends on the recurrence alone, never on a name such as ``exp_avg_sq``: ``plus`` selects Adam's
second moment for beta2 >= 0.95, and not its first moment for beta1 = 0.9.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import sympy
import torch
from torch.fx import Node

from collage_fx import graph
from collage_fx.graph import InputInfo, Kind, Recurrence, Role, StateTensor, StepProgram
from collage_fx.numerics import ERROR_FORMATS, SUM, storage_format
from collage_fx.passes.base import Pass

aten = torch.ops.aten

DITHER = ERROR_FORMATS["dither"]

#: Reason why an update that rounds by operations on bits is refused, and remedy.
ROUNDED_BITS = (
    "its new value has been rounded by operations on its bits",
    "round by x.to(p.dtype) in the optimizer, which is read as a rounding",
)


class Analyze(Pass):
    """Pass that fills ``program.states``: recurrences, verdicts, and the strategy's choice with reasons."""

    name = "analyze"
    after = ("normalize", "undo-stochastic-rounding")

    def run(self, program: StepProgram) -> str:
        step = program.gm.graph
        infos = dict(zip(graph.placeholders(step), program.inputs, strict=True))
        stores = graph.copies_to_inputs(step)
        symbols = {node: info.symbol for node, info in infos.items()}
        new_values: dict[Node, str] = {}
        for placeholder, store in stores.items():
            if infos[placeholder].role is Role.NEW:
                continue  # a new tensor's value is no other state's old value
            for value in (graph.stored(store), graph.unless_skipped(placeholder, graph.stored(store))):
                new_values.setdefault(value, f"{symbols[placeholder]}'")
        kept_up = [node for i, node in enumerate(infos) if i in program.already_compensated]
        low = filter(graph.is_low_precision_tensor, infos)
        parameters = [node for node in low if infos[node].role is Role.PARAMETER]
        read = dict.fromkeys(node for node in (*kept_up, *parameters) if node not in stores)
        flow = _Flow(step.nodes, stores, [*read])
        float32 = _float32_states(infos) if program.takes_float32 else set[Node]()
        updated = {node for node in stores if graph.is_low_precision_tensor(node) or node in float32}
        program.states = []
        for position, (placeholder, info) in enumerate(infos.items()):
            if placeholder not in updated:
                continue
            store, is_parameter = stores[placeholder], info.role is Role.PARAMETER
            read_from = placeholder, graph.stored(store), symbols
            of = partial(graph.read_recurrence, *read_from, is_parameter=is_parameter)
            recurrence = of(new_values)
            if recurrence.kind is Kind.OVERWRITE and flow.returns_to(placeholder):
                # It depends on its old value through other tensors' new values: read those, too.
                recurrence = of({})
                if recurrence.kind is Kind.OVERWRITE:
                    recurrence = replace(recurrence, kind=Kind.OTHER)
            fmt = storage_format(placeholder.meta["val"].dtype)
            keeps_terms = False
            if recurrence.kind is Kind.OVERWRITE and info.is_made and info.role is Role.STATE:
                others = list(_recurrences_of_replaced(program, placeholder, stores, symbols))
                keeps_terms = any(keeps for _, keeps in others)
                found = (each for each, _ in others)
                recurrence = max(found, key=lambda each: graph.judge(each, fmt).lossy, default=recurrence)
            verdict = graph.judge(recurrence, fmt)
            made = StateTensor(placeholder, position, info, store, recurrence, verdict, keeps_terms)
            program.states.append(made)
        graph.find_cancellation(program)
        gradients = {node for node, info in infos.items() if info.role is Role.GRADIENT}
        exact = gradients.difference(stores, kept_up)
        moved = {node for parameter in program.parameters for node in parameter.recurrence.path}
        for state in program.states:
            state.is_unbounded = graph.is_unbounded(state, exact, moved)
            selected, state.selection = _select(program, state, flow)
            if selected:
                state.chosen_format = program.error_format
        lasting = [state for state in program.compensated if state.info.role is not Role.NEW]
        sources = [*kept_up, *(state.placeholder for state in lasting)]
        whole = {*sources, *map(_stored, lasting)}
        for state in program.states:
            if state.is_float32:
                continue
            is_parameter = _is_overwritten_parameter(state)
            if is_parameter and any(flow.is_read(source, state.placeholder) for source in sources):
                _compensate(program, state, "computed from state that is compensated")
            elif program.strategy == "none":
                continue
            elif is_parameter and _is_computed_from_float32(state):
                _compensate(program, state, "computed from float32 values, as from master weights")
            elif is_parameter and program.is_recorded:
                _compensate(program, state, "a parameter, in a part of a recorded step")
                if any(node.target is aten.view.dtype for node in graph.made_of(_stored(state))):
                    state.refusal, state.remedy = ROUNDED_BITS
            elif state.info.role is not Role.STATE or state.compensated:
                continue
            elif _stored(state) in whole:
                _compensate(program, state, "a copy of a tensor with error terms")
            elif state.recurrence.kind is Kind.OVERWRITE and any(
                _is_set_to(program, state, source, symbols)
                for source in dict.fromkeys((*sources, *parameters))
                if flow.is_read(source, state.placeholder)
            ):
                _compensate(program, state, "set to the value of a tensor with error terms")
        for state in program.compensated:
            if _is_rounded_in_bits(state):
                state.refusal, state.remedy = ROUNDED_BITS
        for state in program.parameters if program.sums_float32 else ():
            if state.is_float32 and state.value.dim():
                state.chosen_format, state.selection = SUM, "float32; its last sum is rounded by dither"
        if program.rounding != "nearest" and program.strategy != "none":
            for state in program.states:
                if _may_be_dithered(program, state):
                    _dither_unless_compensated(state)
        count = sum(not state.is_float32 for state in program.states)
        return f"{len(program.compensated)} of {count} low-precision state tensors selected"


def _float32_states(infos: Mapping[Node, InputInfo]) -> set[Node]:
    """Return the float32 parameters among the inputs, and their state, without numbers (0-d)."""
    parameters = {info.name: node for node, info in infos.items() if info.role is Role.PARAMETER}
    any_low = any(map(graph.is_low_precision_tensor, parameters.values()))
    found = set()
    for node, info in infos.items():
        if not graph.is_float32_tensor(node):
            continue
        # A tensor of the state "a.b" of the parameter "w" is named "w.a.b".
        prefixes = accumulate(info.name.split("."), "{}.{}".format)
        owners = [parameters[prefix] for prefix in prefixes if prefix in parameters]
        is_beside_low = any(map(graph.is_low_precision_tensor, owners)) if owners else any_low
        is_state = info.role is Role.STATE and graph.has_elements(node) and not is_beside_low
        if is_state or info.role is Role.PARAMETER:
            found.add(node)
    return found


def _recurrences_of_replaced(
    program: StepProgram, placeholder: Node, stores: Mapping[Node, Node], symbols: Mapping[Node, str]
) -> Iterator[tuple[Recurrence, bool]]:
    """Yield the recurrences of a state that a recorded step creates, for each tensor it may replace.

    With each comes whether the replaced tensor has error terms, chosen by a step or loaded.
    """
    inputs = zip(graph.placeholders(program.gm.graph), program.inputs, strict=True)
    for position, (node, info) in enumerate(inputs):
        old = graph.tensor_value(node)
        if node in stores or info.role is not Role.STATE or old is None:
            continue
        if old.shape == placeholder.meta["val"].shape and graph.is_low_precision_tensor(node):
            named = {**symbols, node: symbols[placeholder]}
            value = graph.stored(stores[placeholder])
            found = graph.read_recurrence(node, value, named, {}, is_parameter=False)
            if found.kind is not Kind.OVERWRITE:
                yield found, position in program.has_lasting_terms


class _Flow:
    """Data flow of a graph: the inputs, mutated or ``constant``, that each new value is computed from."""

    def __init__(self, nodes: Iterable[Node], stores: Mapping[Node, Node], constant: Sequence[Node]) -> None:
        self.inputs = [*stores, *constant]
        self.bit = {placeholder: 1 << i for i, placeholder in enumerate(self.inputs)}
        self.reads: dict[Node, int] = {}
        for node in nodes:
            self.reads[node] = self.bit.get(node, 0)
            for operand in () if graph.ignores_values(node.target) else node.all_input_nodes:
                self.reads[node] |= self.reads[operand]
        self.new_values = {placeholder: placeholder for placeholder in constant}
        self.new_values |= {placeholder: graph.stored(store) for placeholder, store in stores.items()}

    def is_read(self, placeholder: Node, target: Node) -> bool:
        """Return whether the new value of ``target`` is computed from the old value of ``placeholder``."""
        return bool(self.reads[self.new_values[target]] & self.bit[placeholder])

    def returns_to(self, placeholder: Node) -> bool:
        """Return whether a tensor's new value depends on its old value, after one step or several."""
        seen, waiting = 0, [placeholder]
        while waiting:
            fresh = self.reads[self.new_values[waiting.pop()]] & ~seen
            seen |= fresh
            while fresh:
                waiting.append(self.inputs[fresh.bit_length() - 1])
                fresh ^= 1 << (fresh.bit_length() - 1)
        return bool(seen & self.bit[placeholder])


def _select(program: StepProgram, state: StateTensor, flow: _Flow) -> tuple[bool, str]:
    """Return whether ``state`` becomes an expansion under the program's strategy, and why."""
    if program.strategy == "none":
        return False, "none: plain low precision"
    if state.is_float32:
        return False, "float32"
    if state.placeholder in program.rounded_at_random:
        return True, "an error term replaces stochastic rounding"
    if state.position in program.already_compensated:
        return True, "it has error terms from another compiled step, which this step has to update"
    if state.replaces_terms:
        return True, "it replaces state that has error terms"
    is_filled = state.info.is_born and state.recurrence.kind is Kind.OVERWRITE
    if state.info.role is Role.NEW or is_filled:
        return True, "created by this step: the next step decides whether it keeps its error term"
    if state.info.role is Role.CARRIED:
        return True, "a value between two graphs of a recorded step"
    if state.info.spans_closure and (state.recurrence.kind is Kind.OVERWRITE or state.info.is_made):
        return True, "a value that a recorded step keeps while its closure runs"
    if state.is_weight_sized:
        return True, f"{program.strategy}: made of weights, which move by less than its last bit"
    if state.recurrence.kind is Kind.OVERWRITE and _moves_a_parameter(program, state):
        return True, "added to a parameter, and another compiled function may subtract it again"
    if state.is_unbounded:
        return True, f"{program.strategy}: no bound is known for what its rounding does"
    is_chosen = program.strategy == "full" and state.info.role is Role.STATE
    if state.recurrence.kind is Kind.OVERWRITE and not is_chosen:
        return False, "overwritten: nothing is carried from step to step"
    if state.info.role is Role.GRADIENT:
        return _select_gradient(program, state, flow)
    if program.strategy == "full":
        return True, "full: every state tensor"
    if state.info.role is Role.PARAMETER:
        return True, f"{program.strategy}: every parameter"
    if program.strategy == "plus" and state.verdict.lossy:
        return True, "plus: lossy state"
    if graph.moves_as_a_parameter(program, state):
        return True, f"{program.strategy}: it accumulates numbers of either sign, as a parameter does"
    if graph.spoils_an_update(state):
        return True, f"{program.strategy}: an update is a small difference between it and a parameter"
    # Such a state (Lookahead's slow weights) is a parameter itself, however fast it decays towards another: a
    # rounding error that is small relative to an average can be large relative to a parameter's update.
    if any(_stored(parameter) is _stored(state) for parameter in program.parameters):
        return True, f"{program.strategy}: a parameter is overwritten with it"
    overwritten = filter(_is_overwritten_parameter, program.states)
    if state.verdict.lossy and any(flow.is_read(state.placeholder, each.placeholder) for each in overwritten):
        return True, f"{program.strategy}: a parameter is overwritten with a value computed from it"
    return False, "not lossy" if program.strategy == "plus" else f"{program.strategy}: parameters only"


def _moves_a_parameter(program: StepProgram, state: StateTensor) -> bool:
    """Return whether a state's new value is added to a parameter with a coefficient of 1/2 or more."""
    if program.is_recorded or state.info.role is not Role.STATE:
        return False
    new = sympy.Symbol(f"{state.info.symbol}'")
    coefficients = (sympy.diff(each.recurrence.expression, new) for each in program.parameters)
    return any(each.is_number and abs(each) >= 0.5 for each in coefficients)


def _may_be_dithered(program: StepProgram, state: StateTensor) -> bool:
    """Return whether dither may round a state: a tensor whose rounding errors would add up.

    Rounded to nearest are numbers (0-d tensors), state whose dependence on its old value is unknown, as
    Rprop's step sizes, and state that a recorded step creates anew, whose count of steps would start again.
    State that a part of a recorded step overwrites may be computed from its old value in another part.
    """
    if state.info.is_made or state.is_float32:
        return False
    kind = state.recurrence.kind
    carries = program.is_recorded if kind is Kind.OVERWRITE else kind is not Kind.OTHER or state.verdict.noise
    return state.info.role is Role.STATE and bool(carries) and state.value.dim() > 0


def _dither_unless_compensated(state: StateTensor) -> None:
    """Choose dither for a state without error terms; note the noise in ``selection``."""
    noise = None if state.recurrence.kind is Kind.OVERWRITE else state.verdict.noise
    if noise is None:
        text = "noise without a known bound"
    elif noise == math.inf:
        text = "noise that adds up"
    else:
        text = f"noise of at most {100 * noise:.2g} %"
    if state.chosen_format is None:
        state.chosen_format = DITHER
        state.selection += f"; rounded by dither: {text}"
    else:
        state.selection += f"; dither would leave {text}"


def _compensate(program: StepProgram, state: StateTensor, why: str) -> None:
    state.chosen_format, state.selection = program.error_format, why


def _is_set_to(program: StepProgram, state: StateTensor, source: Node, symbols: Mapping[Node, str]) -> bool:
    """Return whether a state is set to a parameter's value, or most of it, like an extrapolated point.

    False for a small share of the parameter, as weight decay in a gradient, and for a value computed from a
    moving average of moments: each step computes it anew, and rounding it has no lasting effect.
    """
    known = next((each for each in program.states if each.placeholder is source), None)
    if known is not None and known.info.role is Role.STATE and known.recurrence.kind is Kind.MOVING_AVERAGE:
        return False
    found = graph.read_recurrence(source, _stored(state), symbols, {}, is_parameter=False)
    is_small = bool(found.slopes) and all(each.is_number and abs(each) < 0.5 for each in found.slopes)
    return bool(found.path or source is _stored(state)) and not is_small


def _is_overwritten_parameter(state: StateTensor) -> bool:
    """Return whether a state is a parameter without memory of its own."""
    return state.recurrence.kind is Kind.OVERWRITE and state.info.role is Role.PARAMETER


def _is_rounded_in_bits(state: StateTensor) -> bool:
    """Return whether bits of the new value were cut off, as stochastic rounding does."""
    node = _stored(state)
    if node.target is not aten.view.dtype:
        return False

    def operands(node: Node) -> list[Node]:
        values = ((each, graph.tensor_value(each)) for each in node.all_input_nodes)
        return [each for each, value in values if value is not None and not value.dtype.is_floating_point]

    integers = graph.reached([node], operands)
    return any(graph.facts_of(each.target).cuts_bits for each in integers)


def _is_computed_from_float32(target: StateTensor) -> bool:
    """Return whether a new value is computed from float32 inputs other than numbers."""
    inputs = (node for node in graph.made_of(_stored(target)) if node.op == "placeholder")
    return any(graph.is_float32_tensor(node) and graph.has_elements(node) for node in inputs)


def _stored(state: StateTensor) -> Node:
    """Return the node that computes the new value, looking through casts and copies."""
    return graph.source_of(state.store.args[1])


def _select_gradient(program: StepProgram, state: StateTensor, flow: _Flow) -> tuple[bool, str]:
    """Return whether a gradient is state because gradients accumulate in it, and why."""
    path = (node for node in state.recurrence.path if graph.passed_operand(node) is None)
    signs = {graph.facts_of(node.target).sign for node in path}
    accumulates = state.recurrence.slopes == (1,) and signs <= {"+", "-"}
    if accumulates and not any(flow.is_read(p.placeholder, state.placeholder) for p in program.parameters):
        return True, "gradients accumulate in it"
    return False, "a gradient, computed anew for every step"
