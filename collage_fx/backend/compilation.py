"""Course of a compilation, from top to bottom: capture, pipeline, lowering, report.

Dynamo hands over a graph. :meth:`Compilation.run` splits it into families of equal updates or, if it has
none, treats it as a family of one. AOTAutograd makes a functional graph of one member of each. That graph is
rewritten and lowered for all members, and a report is kept. A graph that updates nothing to compensate is
lowered unchanged. What goes a slower way says why: :class:`~collage_fx.graph.Route`.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, GraphModule, Node
from torch.optim import Optimizer

from collage_fx import capture, errors, graph, report, state, torch_compat
from collage_fx.capture import Families, describe_input, is_of_concern, refuse_overlaps
from collage_fx.graph import Reason, Role, is_float32_tensor, is_low_precision_tensor, placeholders
from collage_fx.lowering import Lowered, interpreted, lower, why_not_compiled
from collage_fx.metrics import Meter, MeteredStep
from collage_fx.numerics import ERROR_FORMATS, WEIGHT_FORMATS, ErrorFormat, short_name
from collage_fx.options import Options
from collage_fx.options.budgets import TOLERANCE, Budget, best_budget, budgets_for, budgets_for_parts
from collage_fx.pipeline import ANALYSIS, SUMMING, in_float32, run_pipeline
from collage_fx.runtime import STAND_INS, MakingStep, Member, WholeStep, with_numbers
from collage_fx.torch_compat import local_tensor, needs_autograd, storage_of, traced_frame_name

log = logging.getLogger("collage_fx")

#: Arithmetic -> advice for an update that an operation computes in the storage format.
REMEDIES = {
    "native": "use arithmetic='wide', which computes elementwise operations in float32",
    "wide": "give that operation float32 tensors, x.float(), in the optimizer",
}


class Backend:
    """Part of a backend that its compilations use: options, reports, and the lowering of graphs."""

    #: Verb for the log.
    verb = "compiled"

    def __init__(self, options: Options) -> None:
        self.options = options
        self.meter = Meter(options.metrics_every)
        self.reports: list[report.GraphReport] = []  # one for each compilation, oldest first
        #: Optimizer with a limit on bytes -> the budget that is used, then all budgets.
        self.budgets: WeakKeyDictionary[Optimizer, tuple[Budget, ...]] = WeakKeyDictionary()
        self._labels: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        self._labeled = Counter[str]()

    @property
    def compensates(self) -> bool:
        """Whether steps that are compiled get error terms."""
        return self.options.strategy != "none"

    def label(self, optimizers: Sequence[Optimizer]) -> str:
        """Return the name of these optimizers' step in reports: classes, numbered from the second on."""
        for optimizer in optimizers:
            if optimizer not in self._labels:
                name = type(optimizer).__name__
                self._labeled[name] += 1
                number = self._labeled[name]
                self._labels[optimizer] = f"{name} #{number}" if number > 1 else name
        return ", ".join(self._labels[optimizer] for optimizer in optimizers)

    def other_state(self) -> dict[str, int]:
        """Return, for the label of each optimizer, the bytes of its state that has no rows in reports."""
        return {label: state.other_state_bytes(optimizer) for optimizer, label in list(self._labels.items())}

    def refuse_excess(self, optimizer: Optimizer) -> None:
        """Raise if there is a budget, and an optimizer with recorded steps holds more."""
        limit = self.options.bytes_per_parameter
        if not isinstance(limit, float | int):
            return
        if (held := state.held_per_parameter(optimizer)) > limit * (1 + TOLERANCE):
            raise errors.InvalidOptionError(
                f"bytes_per_parameter={limit:g}, where this optimizer holds {held:.3g}: its steps are "
                "recorded, operation by operation, and pack no state",
                where="bytes_per_parameter",
                remedy=f"give it {held:.3g}, or strategy and error_format in its place",
            )

    def lower(
        self, program: graph.StepProgram, example_inputs: Sequence[Any], inductor_options: dict[str, Any]
    ) -> Lowered | Reason:
        """Lower a rewritten step of one member of each family to a callable of the inputs of all members."""
        return lower(program, example_inputs, inductor_options)

    def lower_as_captured(
        self, gm: GraphModule, example_inputs: Sequence[Any], inductor_options: dict[str, Any]
    ) -> Callable[[list[Any]], Any]:
        """Lower a graph that is not rewritten to a callable in AOTAutograd's convention."""
        return torch_compat.inductor_compile_as_it_is(gm, example_inputs, **inductor_options)


@dataclass(eq=False)
class Compilation:
    """A single compilation, from the graph that Dynamo captured to the callable that Dynamo calls.

    Parameters and state are attributes of ``module``; ``arguments`` are real tensors and symbolic numbers.
    ``settings`` are changes to Inductor's configuration during the compilation.
    """

    backend: Backend
    module: GraphModule
    arguments: tuple[Any, ...]
    mode: str | None
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        self.options = self.backend.options
        # A helper that a step calls, or the rest of a step after a graph break, may not name the optimizer.
        self.recorded, self.is_compiled, stepped, self.only_by_family = capture.RecordedPart.of(self.module)
        self.is_recorded = bool(self.recorded)
        being_stepped = torch_compat.optimizer_being_stepped() or stepped()
        variables = {**torch_compat.traced_frame_variables(), "stepped": being_stepped}
        self.optimizers = state.optimizers_among(variables)
        self.known = state.known_tensors(self.optimizers)
        self.subject = self.backend.label([*self.optimizers.values()]) or traced_frame_name() or "step"
        self.request = capture.Request(self.backend, {"mode": self.mode}, self.options.strict)
        self.left_alone = False
        #: Function of the arguments, if Dynamo's graph returns numbers, which ``module`` does not.
        self.returned_numbers: Callable[..., Any] | None = None
        #: Parameters that the step updates.
        self.updated: list[torch.Tensor] = []
        #: Positions of arguments that may be weights of optimizers not known yet, and are read without terms.
        self.read_rounded: list[int] = []
        self.budgets: tuple[Budget, ...] = ()

    # -- From what Dynamo captured to what it calls

    def run(self) -> Callable[..., Any]:
        """Compile one member of each family of equal updates, or the whole graph if it has no families."""
        # Plain Inductor takes an update of what requires gradients for something to be differentiated.
        is_plain = self.options.strategy == "none" and not self.options.metrics
        needs_grad = torch.is_grad_enabled() if is_plain else needs_autograd(self.module, self.arguments)
        optimizers = list(self.optimizers.values())
        try:
            if not is_plain:
                capture.refuse_unknown_torch()
                capture.refuse_fused_operators(self.module)  # AOTAutograd fails at them
                if needs_grad:
                    capture.note_forward((*self.module.parameters(), *self.arguments))
                elif torch.is_grad_enabled():
                    torch_compat.remove_gradient_modes(self.module)
            if any([*map(state.unpack, (*self.module.parameters(), *self.arguments))]):
                raise torch_compat.ConvertAgain  # weights that the trace of a function has decoded
            self._read_numbers_in_python()
            self.module, self.returned_numbers = capture.without_numbers(self.module)
            step = self._by_family(needs_grad=needs_grad)
            if self.only_by_family and isinstance(step, Reason):
                raise capture.NotByFamily(str(step))
            rows = [*map(capture.Rows.of, optimizers)]
            stand_in = any(each.standing_in for each in rows)
            by_members = isinstance(step, WholeStep) and step.members
            if STAND_INS.get() and not torch_compat.thinned_lists() and not by_members:
                why = step if isinstance(step, Reason) else "it does not consist of rows"
                raise errors.UnsupportedOptimizerError(  # it would read the stand-ins, which have no memory
                    f"{self.subject} cannot be stepped for some parameters at a time if they are DTensors: "
                    f"{why}",
                    where=self.subject,
                    remedy="step it after the backward pass: collage_fx.install(optimizer)",
                )
            if not isinstance(step, Reason) and (torch_compat.thinned_lists() or not stand_in):
                return self._noting(step, optimizers)
            if torch_compat.thinned_lists() or stand_in:
                for each in rows:
                    each.are_understood = False
                raise torch_compat.ConvertAgain(whole=True)
            assert isinstance(step, Reason)
            if not is_plain:
                try:
                    refuse_overlaps(self.known.values())  # AOTAutograd refuses them with another message
                except errors.AliasedStateError as refusal:
                    refusal.raise_or_warn(self, strict=self.options.strict)
            with torch.set_grad_enabled(needs_grad):
                return self._noting(self._whole(step), optimizers)
        except (errors.CollageError, torch_compat.ConvertAgain):
            for optimizer in optimizers:  # no step has been taken: remove state that the trace has made
                capture.forget_new_state(optimizer)
            raise

    def _read_numbers_in_python(self) -> None:
        """Record a step that Dynamo has captured with a number of the past, or refuse it."""
        if (number := capture.number_of_the_past(self.module)) is None:
            return
        reason = "a float64 tensor is read as a number after it has been written"
        capture.record_instead(self.optimizers.values(), self.request, reason)
        raise errors.UnsupportedOptimizerError(
            f"{reason}, for which Dynamo takes its value before the step",
            where=graph.statement_of([number, *number.users]) or self.subject,
            remedy="make the counter a float32 or integer tensor, or a Python number",
        )

    def _noting(self, step: Callable[..., Any], optimizers: Sequence[Optimizer]) -> Callable[..., Any]:
        """Wrap a step so that its writes are known to be its own; a recorded step does so as a whole."""
        updated, self.updated = self.updated, []
        step = step if self.returned_numbers is None else with_numbers(step, self.returned_numbers)
        step = step if self.recorded else state.noting_steps(step, optimizers, updated)
        return _warning_of_terms(step, self.read_rounded, self.subject) if self.read_rounded else step

    def _by_family(
        self, *, needs_grad: bool, own_numbers: bool = True, any_size: bool = True
    ) -> WholeStep | Reason:
        """Compile the whole step from a graph of one member of each family; return a reason if impossible.

        Code that depends on a number of one member is not the code of others with ``own_numbers``: then
        members of a family read the same numbers. So it is with sizes and ``any_size``.
        """
        if needs_grad:
            return Reason("it computes something that is to be differentiated")
        if (reason := self.options.not_by_family()) is not None:
            return reason
        lists = torch_compat.thinned_lists()
        rows = [*map(capture.Rows.of, (*self.optimizers.values(), *(each.optimizer for each in lists)))]
        any_size = any_size and not (self.recorded or self.options.asks_for_sizes)
        any_size = any_size and not any(each.depend_on_sizes for each in rows)
        families = capture.families_of(
            self.module, self.arguments, self._describe, lists, own_numbers=own_numbers, any_size=any_size
        )
        made = self._of_families(families) if isinstance(families, Families) else families
        if made is None:
            return self._by_family(needs_grad=needs_grad, own_numbers=False, any_size=any_size)
        is_for_several = isinstance(families, Families) and any(families.repetition.shapes)
        if isinstance(made, Reason) and (is_for_several or (any_size and capture.have_other_sizes(lists))):
            for each in rows:
                each.depend_on_sizes = True
            if lists:
                raise torch_compat.ConvertAgain  # Dynamo has not seen rows of all sizes
            return self._by_family(needs_grad=needs_grad, any_size=False)
        return made

    def _of_families(self, families: Families) -> WholeStep | Reason | None:
        """Compile the step of some families; return None if code depends on a number of one member."""
        made: WholeStep | Reason = Reason("AOTAutograd made no graph of it")

        def inner_compile(gm: GraphModule, example_inputs: Sequence[Any], **inductor_options: Any) -> Any:
            nonlocal made
            made = self._step_of_members(families, gm, example_inputs, **inductor_options)
            return _never_called

        decisions = torch_compat.decisions_by(families.own_numbers)
        try:
            with torch.no_grad():
                self._trace(families.module, families.arguments, inner_compile, families.symbols_left_out)
        finally:  # the module stays for a while: what it holds would seem to be held by the program
            families.module._parameters.clear()
            families.module._buffers.clear()
        return None if torch_compat.decisions_by(families.own_numbers) > decisions else made

    def _whole(self, not_by_family: Reason) -> Callable[..., Any]:
        """Compile the whole graph, as a single family, inside AOTAutograd's wrapper."""
        try:
            return self._trace(self.module, self.arguments, partial(self._step_of_one, not_by_family))
        finally:  # release the real tensors: AOTAutograd keeps this object as long as the compiled code
            self.module, self.arguments = GraphModule({}, Graph()), ()
            self.optimizers, self.known = {}, {}

    def _trace(
        self,
        module: GraphModule,
        arguments: tuple[Any, ...],
        inner_compile: Callable[..., Any],
        symbols_left_out: Set[str] = frozenset(),
    ) -> Callable[..., Any]:
        """Make the graph functional by AOTAutograd, and pass it to ``inner_compile``."""
        table = capture.decompositions() if self.options.strategy != "none" else None
        return torch_compat.compile_with_inductor(
            module,
            arguments,
            inner_compile=inner_compile,
            decompositions=table,
            config_patches=self.settings,
            symbols_left_out=symbols_left_out,
        )

    # -- The functional graph, and what its inputs are to the user

    def _step_of_members(
        self, families: Families, gm: GraphModule, example_inputs: Sequence[Any], **inductor_options: Any
    ) -> WholeStep | Reason:
        """Make the step of all members from the functional graph of the first member of each family."""
        self._prepare(gm)
        updated = torch_compat.versions_to_increment()
        if updated is None:
            return Reason("AOTAutograd has more to do around the graph than to count versions")
        if families.distributed and (node := graph.first_not_elementwise(gm.graph.nodes)) is not None:
            return Reason.at(node, "of a DTensor it takes more than this process's own elements")
        inputs = placeholders(gm.graph)
        known: dict[Any, int] = {origin: i for i, origin in enumerate(families.origins)}
        order = [known.get(torch_compat.aot_input_of(node), -1) for node in inputs]
        if sorted(order) != list(range(len(known))):
            return Reason("AOTAutograd has other inputs than Dynamo")
        repetition = families.repetition.reordered(order)
        if (node := graph.first_of_one_size(gm.graph, repetition)) is not None:
            return Reason.at(node, "it depends on the sizes of tensors")
        stores = graph.copies_to_inputs(gm.graph)
        readers = Counter(index for copies in repetition.copies for index in copies)
        for node, owner, copies in zip(inputs, repetition.owners, repetition.copies, strict=True):
            if node in stores and (owner is None or any(readers[index] > 1 for index in copies)):
                return Reason.at(stores[node], "it writes to what several updates have in common")
        traced = _Traced(gm, example_inputs, inductor_options, families.infos, repetition)
        if (note := self._reason_to_leave_alone(traced)) is not None:
            return Reason(note)
        try:
            step = self._compensated(traced)
        except errors.AliasedStateError as refusal:
            return Reason(refusal.met)  # the whole graph is refused for it again, by names
        if isinstance(step, Reason):
            return step
        indices = sorted(index for position in updated for index in repetition.copies[position])
        bound, gradients = families.inputs[: families.bound], families.gradients
        passed = len(families.inputs) - len(bound) - len(gradients)
        places = zip(families.members, repetition.members, strict=bool(families.members))
        members = [
            Member(*pair, frozenset(repetition.inputs_of(*place)), families.inputs[pair[0]].dtype)
            for pair, place in places
        ]
        return WholeStep(step, bound, passed, indices, gradients, members, families.distributed)

    def _step_of_one(
        self, not_by_family: Reason, gm: GraphModule, example_inputs: Sequence[Any], **inductor_options: Any
    ) -> Callable[[list[Any]], Any]:
        """Make the step of the whole functional graph, compensated or unchanged."""
        self._prepare(gm)
        if not inductor_options.get("is_inference", False):  # for a backward graph, the rest is forgotten
            self._refuse_uncompensated_update(gm)
            traced = _Traced(gm, example_inputs, inductor_options, (), graph.Repetition.whole(0))
            return self._as_captured(traced, "the graph needs autograd, so it is no optimizer step")
        infos = capture.describe_inputs(placeholders(gm.graph), self.module, self.arguments, self.known)
        traced = _Traced(gm, example_inputs, inductor_options, infos, graph.Repetition.whole(len(infos)))
        if (note := self._reason_to_leave_alone(traced)) is not None:
            return self._as_captured(traced, note)
        try:
            step = self._compensated(traced, not_by_family)
        except errors.AliasedStateError as refusal:
            refusal.raise_or_warn(self, strict=self.options.strict)
            return self._as_captured(traced, refusal.met)
        assert not isinstance(step, Reason), "a graph of one is compiled as one, if need be"
        return step

    def _refuse_uncompensated_update(self, gm: GraphModule) -> None:
        """Record the step, or raise or warn, if a graph that needs autograd updates parameters.

        It is a step with a closure that computes a loss and calls no backward pass, or a step that reads
        gradients with a graph where autograd is on.
        """
        inputs = placeholders(gm.graph)
        written = [inputs[i] for i in torch_compat.inputs_written() if i < len(inputs)]
        for info in capture.describe_inputs(written, self.module, self.arguments, self.known):
            is_updated = info.tensor is not None and is_of_concern(info.tensor, self.options.takes_float32)
            if self.options.strategy != "none" and info.role is Role.PARAMETER and is_updated:
                reason = (
                    "the step that updates it also computes something that is to be differentiated, such as "
                    "the loss of a closure that calls no backward pass"
                )
                capture.record_instead(self.optimizers.values(), self.request, reason)
                errors.UncompensatedParameterError(
                    reason,
                    where=info.name,
                    remedy="collage_fx.install(optimizer), which records such a step; or call backward() in "
                    "the closure",
                ).raise_or_warn(self, strict=self.options.strict)

    def _prepare(self, gm: GraphModule) -> None:
        """Put reads before writes, assignments into stores; record the step if eager torch would raise in it.

        Dynamo traces past operations that raise for a dtype, where the step catches the error: a tensor
        without values has a factorization in every format.
        """
        if self.options.strategy != "none":
            graph.assignments_to_stores(gm)
        if graph.copies_to_inputs(gm.graph):
            graph.read_before_overwriting(graph.GraphEditor(gm, "capture"))
            gm.recompile()
        if self.options.strategy == "none":
            return
        for node in gm.graph.nodes:
            if isinstance(node.target, torch_compat.OpOverload) and graph.factorizes(node.target):
                low = next(filter(is_low_precision_tensor, node.all_input_nodes), None)
                if low is not None:
                    reason = f"{node.target} is not implemented for {short_name(low.meta['val'].dtype)}"
                    capture.record_instead(self.optimizers.values(), self.request, reason)

    def _describe(
        self, values: Sequence[Any], names: Sequence[str], bound: int
    ) -> list[tuple[graph.InputInfo, Hashable]]:
        """Describe inputs; add facts about their records that must be equal in a family."""
        named = enumerate(zip(values, names, strict=True))
        infos = [describe_input(value, name, self.known, bound=i < bound) for i, (value, name) in named]
        return [(info, info.tensor is not None and state.stored_as(info.tensor)) for info in infos]

    def _sums_changes(self, gm: GraphModule) -> bool:
        """Return whether a graph has an update whose changes are summed."""
        infos = [graph.InputInfo(node.name, node.name, Role.STATE) for node in placeholders(gm.graph)]
        program = graph.StepProgram(
            graph.copy_of(gm), infos, "plus", "wide", ERROR_FORMATS["exact"], changes="summed"
        )
        run_pipeline(program, SUMMING)
        return program.summed > 0

    def _other_parameters(self, program: graph.StepProgram) -> list[graph.StateTensor]:
        """Return the float32 parameters of a step that are not among the states of its program."""
        inputs = zip(placeholders(program.gm.graph), program.inputs, strict=True)
        wide = (info for node, info in inputs if is_float32_tensor(node) and info.role is Role.PARAMETER)
        if program.takes_float32 or not any(wide):
            return []
        whole = replace(program, gm=graph.copy_of(program.gm), rounded_at_random=set(), takes_float32=True)
        run_pipeline(whole, ANALYSIS[:-1])
        return [entry for entry in whole.parameters if entry.is_float32]

    def _note_of_decay(self, program: graph.StepProgram, others: Sequence[graph.StateTensor]) -> str:
        """Return the note on a weight decay that float32 cannot apply, and on whether this step does."""
        parameters = [*program.parameters, *others]
        slopes = (slope for each in parameters for slope in each.recurrence.slopes if slope.is_number)
        decays = {decay for slope in slopes if 0 < (decay := float(1 - slope)) < 0.5}
        rounded = ((decay, 1 - float(torch.tensor(1 - decay, dtype=torch.float32))) for decay in decays)
        wrong = [(decay, applied) for decay, applied in rounded if abs(applied - decay) > decay / 10]
        if not wrong:
            return ""
        decay, applied = min(wrong)
        is_applied = program.sums and program.strategy != "none"
        # A float32 sum is rounded to nearest: what is below half a unit in the last place is lost.
        lost = (entry for entry in parameters if decay < 2**-24 and not entry.keeps_small_updates)
        kinds = (f"{str(each.value.dtype)[6:]} parameters, such as {each.info.name}" for each in lost)
        remedy = "error_format='exact'" + ", rounding='repay'" * (program.rounding == "nearest")
        but_not = "".join(f", but little or nothing of it to {kind}: use {remedy}" for kind in [*kinds][:1])
        return (
            f"{self.subject}: its weight decay is {decay:.3g} in a step (lr * weight_decay). With float32 "
            f"weights, or float32 master weights, it would be {applied:.3g}. "
            + (f"Here it is applied{but_not}." if is_applied else "So it is here: it needs changes='summed'.")
        )

    def _reason_to_leave_alone(self, traced: _Traced) -> str | None:
        """Return the reason to leave a graph to plain Inductor; None if it updates or hands on weights."""
        updated = traced.stores
        self._refuse_out_of_reach(traced)
        self.read_rounded = self._read_rounded(traced)
        if any(is_low_precision_tensor(node) for node in updated):
            return None
        if updated and (any(map(_holds_more, traced.infos)) or self._may_get_terms(traced)):
            return None  # for example a float32 average of compensated parameters
        computed = set(traced.gm.graph.nodes) - set(placeholders(traced.gm.graph))
        if updated and self.recorded and any(map(is_low_precision_tensor, computed)):
            return None  # a float32 tensor that outlives the part, from 16-bit results
        sums = self.options.strategy != "none" and self.options.changes == "summed"
        if updated and sums and self._sums_changes(traced.gm):
            return None
        if (
            self.recorded
            and self.options.strategy != "none"
            and traced.gm.graph.output_node().all_input_nodes
        ):
            return None  # a function by which a step's question is answered
        is_step = any(info.role in (Role.PARAMETER, Role.STATE) for info in traced.infos)
        if is_step and self.options.takes_float32 and any(map(is_float32_tensor, updated)):
            return None
        if self.options.strategy != "none" and not updated:
            may_get, inputs = self._may_get_terms(traced), enumerate(traced.inputs)
            whole = {node for i, (node, info) in inputs if i in may_get or _input_has_error_terms(info)}
            if not graph.values_of_weights(traced.gm.graph, whole).isdisjoint(traced.kept):
                return None  # a result is a value of weights, as a copy is: Note [Values that leave a graph]
        return "the graph updates no bfloat16 or float16 tensor"

    def _refuse_out_of_reach(self, traced: _Traced) -> None:
        """Raise, or warn, if a graph keeps values of offloaded weights, or of views: without error terms."""
        if self.options.strategy == "none":
            return
        for node, info in traced.inputs:
            if info.tensor is not None and state.host_twin(info.tensor) is not info.tensor:
                name = info.name
                what = "a weight of an offloaded optimizer, whose error terms are in host memory"
                remedy = (
                    "leave the function to eager torch, with collage_fx.full_value(p, torch.float32) "
                    "where it reads p and collage_fx.assign(p, value) where it writes p"
                )
            elif name := self._viewed(node, info):
                what = "a view of a weight, to which the error terms of the weight do not belong"
                remedy = "give the function the weight itself, and take the view in the function"
            else:
                continue
            used = {*traced.stores, *traced.kept} & {node, *graph.values_of_weights(traced.gm.graph, {node})}
            if any((value := graph.tensor_value(each)) is not None and value.dim() for each in used):
                errors.UncompensatedParameterError(
                    f"a compiled function reads or writes {what}", where=name, remedy=remedy
                ).raise_or_warn(self, strict=self.options.strict)

    def _viewed(self, node: Node, info: graph.InputInfo) -> str:
        """Return the name of the weight, or state, that an input is a view of; empty if it is none."""
        if self.recorded or info.tensor is None or not is_low_precision_tensor(node):
            return ""
        adopted = self._adopted_around(info.tensor)
        is_view = adopted and self._owner(info.tensor) is None and state.record_of(info.tensor) is None
        return adopted[0].name if is_view else ""

    def _owner(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the weight, or state, of which a tensor is the memory; None if there is none."""
        piece, adopted = local_tensor(tensor), self._adopted_around(tensor)
        owners = (each.tensor for each in adopted if state.is_same_memory(local_tensor(each.tensor), piece))
        return next(owners, None)

    def _read_rounded(self, traced: _Traced) -> list[int]:
        """Return the positions of arguments that may be detached weights whose values outlive the graph."""
        if self.recorded or self.options.strategy == "none":
            return []
        known = self._may_get_terms(traced)
        unknown = {}
        for position, (node, info) in enumerate(traced.inputs):
            is_read = is_low_precision_tensor(node) and node not in traced.stores and position not in known
            if is_read and not _input_has_error_terms(info):
                members = traced.repetition.copies[position]
                unknown[node] = {id(traced.infos[index].tensor) for index in members} - self.known.keys()
        values = {*unknown, *graph.values_of_weights(traced.gm.graph, unknown)}
        read = set() if traced.kept.isdisjoint(values) else set().union(*unknown.values())
        return [i for i, argument in enumerate(self.arguments) if id(argument) in read]

    def _may_get_terms(self, traced: _Traced) -> frozenset[int]:
        """Return the positions of inputs that are read alone, and may get error terms in another graph.

        These are states of known optimizers, and all parameters: their optimizer may come later.
        """
        if self.recorded or self.options.strategy == "none":
            return frozenset()
        found = []
        for i, (node, info) in enumerate(traced.inputs):
            if info.tensor is None or node in traced.stores or not is_low_precision_tensor(node):
                continue
            # State that is packed has no error terms.
            if info.role is Role.PARAMETER or not self.options.packs:
                is_parameter = isinstance(info.tensor, torch.nn.Parameter)
                found += [i] if is_parameter or self._adopted_around(info.tensor) else []
        return frozenset(found)

    @cached_property
    def _adopted(self) -> dict[int, list[state.KnownTensor]]:
        """Parameters and states of all adopted optimizers, by storage: takes long with many."""
        return state.adopted_by_storage()

    def _adopted_around(self, tensor: torch.Tensor) -> Sequence[state.KnownTensor]:
        """Return the parameters and states of adopted optimizers in the storage that a tensor lies in."""
        piece = local_tensor(tensor)
        return self._adopted.get(storage_of(piece), ()) if torch_compat.has_storage(piece) else ()

    # -- Refused, rewritten, lowered, reported

    def _compensated(
        self, traced: _Traced, not_by_family: Reason | None = None
    ) -> Callable[[list[Any]], Any] | Reason:
        """Rewrite, lower and report the functional graph of one member of each family.

        Return the step of all members, or the reason why it cannot be made. A family of one always has a
        step; ``not_by_family`` is the reason why the graph is whole.
        """
        started = time.perf_counter()
        repetition = traced.repetition
        program = self._accepted(traced)
        before = graph.copy_of(traced.gm)
        as_captured = program.before_passes(before)
        made_anew = graph.results_to_inputs(program)
        others = self._other_parameters(program)
        program.captured = graph.copy_of(program.gm) if self.options.metrics else None
        self._refuse_lost_values(program)
        added = placeholders(program.gm.graph)[len(traced.example_inputs) :]
        example_inputs = [*traced.example_inputs, *(node.meta["val"] for node in added)]
        pass_log = report.PassLog(self.subject, before)
        pipeline = self.options.passes if self.options.strategy != "none" else ANALYSIS
        run_pipeline(program, pipeline, observe=pass_log)
        if self.options.strategy == "none" and program.captured is not None:
            program.move_to(graph.copy_of(program.captured))
        self._refuse_uncompensated(program)
        is_rewritten = bool(program.expansions or program.measured or program.summed)
        is_rewritten |= bool(self.options.own_passes or (self.recorded and program.strategy != "none"))
        if not (is_rewritten or repetition.is_whole):
            return Reason("no tensor of it needs an error term")
        self.updated = []
        for entry in program.states:
            for index in repetition.copies[entry.position] if entry.info.role is not Role.NEW else ():
                if (tensor := program.infos[index].tensor) is not None:
                    state.choose_new(tensor, keep=entry.holds_more)
                    capture.note_write(tensor, compensated=entry.compensated)
                    owner = self._owner(tensor)
                    owner = tensor if owner is None else owner
                    if not self.recorded and isinstance(owner, torch.nn.Parameter):
                        self.updated.append(owner)
        holds_more = any(map(_holds_more, traced.infos))
        self._drop_codes(program)
        with torch_compat.generated_code() as code:
            if is_rewritten:
                made = self.backend.lower(program, example_inputs, traced.inductor_options)
            else:
                made = self._lower_as_captured(traced)
                if holds_more:
                    made = made._replace(step=_with_memory(made.step))
        if isinstance(made, Reason):
            return made
        if program.measured:
            meter = self.backend.meter
            meter.learn(self.optimizers, without=capture.Deferred)
            measured = MeteredStep(meter, self.subject, program, in_float32(program), made.step)
            made = made._replace(step=measured)
        if made_anew:
            inputs = enumerate(placeholders(program.gm.graph)[: len(program.repetition.copies)])
            copies_of = program.repetition.copies_of
            layouts = {index: value for i, node in inputs for index, value in copies_of(i, node.meta["val"])}
            in_order = sorted(made_anew.items(), key=lambda each: each[1])
            of_results = {result: layouts[index] for result, index in in_order}
            made = made._replace(step=MakingStep(made.step, of_results, self.optimizers.values()))
        left_out = {str(failed): failed for failed in program.left_out}.values()
        for failed in left_out:
            failed.raise_or_warn(self.backend, strict=False)
        without: graph.Reasons = tuple(("with every pass", Reason(each.met, each.where)) for each in left_out)
        why = (*graph.not_taken(("by family", not_by_family)), *made.reasons, *without)
        sums = "updates of float32 tensors, without error terms; their changes are summed"
        note_of_sums = f"{self.subject}: {sums}" if program.summed and not program.states else ""
        told = report.GraphReport(
            captured=before,
            repetition=repetition,
            subject=self.subject,
            tensors=self._rows(program),
            is_rewritten=is_rewritten and (self.options.strategy != "none" or bool(program.summed)),
            code=tuple(dict.fromkeys(code)),  # the code of a kernel for several parts once
            program=as_captured,
            pipeline=pipeline,
            route=graph.Route(made.unit, self.recorded, bool(program.measured), why),
            budgets=self.budgets,
            updates=report.updates_of(self.optimizers.values()),
            note=" ".join(filter(None, (note_of_sums, self._note_of_decay(program, others)))),
        )
        pass_log.lowered(told.code)
        is_kept = any(entry.holds_more for entry in program.states)
        self._keep(told, compensated=is_kept, started=started)
        return made.step

    def _refuse_lost_values(self, program: graph.StepProgram) -> None:
        """Record the step, or raise, or warn, if a rounded value of weights leaves the graph.

        Its memory is part of another result's, or has sizes that change, so that it has no error term.
        """
        if program.strategy == "none" or self.recorded:
            return
        nodes, inputs = program.gm.graph, placeholders(program.gm.graph)
        of_inputs = {storage_of(value) for node in inputs if (value := graph.tensor_value(node)) is not None}
        low = filter(is_low_precision_tensor, nodes.output_node().all_input_nodes)
        left = [node for node in low if storage_of(node.meta["val"]) not in of_inputs]
        if not left:
            return
        read_whole = program.already_compensated | program.may_get_terms
        values = graph.values_of_weights(nodes, {node for i, node in enumerate(inputs) if i in read_whole})
        lost = next(filter(values.__contains__, left), None)
        if lost is None:
            return
        what = "a value computed from parameters leaves a compiled part of the step in memory that it shares"
        capture.record_instead(self.optimizers.values(), self.request, what)
        errors.UncompensatedParameterError(
            f"{what}, so without an error term",
            where=graph.statement_of([lost]) or self.subject,
            remedy="give the value memory of its own: value.clone()",
        ).raise_or_warn(self, strict=self.options.strict)

    def _drop_codes(self, program: graph.StepProgram) -> None:
        """Release the codes of float32 state that this step, by other options, does not pack."""
        copies = program.repetition.copies
        kept = {i for entry in program.states if entry.holds_more for i in copies[entry.position]}
        for tensor in (info.tensor for i, info in enumerate(program.infos) if i not in kept):
            if tensor is not None and tensor.dtype is torch.float32 and state.holds_more(tensor):
                state.reset_error_terms(tensor)

    def _accepted(self, traced: _Traced) -> graph.StepProgram:
        """Make the program that enters the pipeline; raise if the step cannot be compensated."""
        options, packs = self.options, self.options.packs and not self.recorded
        asked = Budget(options.strategy, options.error_format)
        if not self.recorded:
            weights = options.weights if self.optimizers else None
            asked = replace(asked, state=options.state, weights=weights)
        program = graph.StepProgram(
            graph.copy_of(traced.gm),
            traced.infos,
            options.strategy,
            # Values that one graph of a recorded step hands to another are on no path from a state to it.
            "wide" if self.recorded else options.arithmetic,
            ERROR_FORMATS[options.error_format],
            traced.repetition,
            is_recorded=self.is_recorded,
            is_compiled=self.is_compiled,
            rounding=options.rounding,
            changes=options.changes,
            takes_float32=packs or options.sums_float32,
            sums_float32=options.sums_float32,
        )
        program = asked.applied_to(program)
        inputs = enumerate(traced.inputs)
        having = [(i, node, _record(info)) for i, (node, info) in inputs if _input_has_error_terms(info)]
        new = {i for i, _, record in having if record is not None and record.is_new}
        program.already_compensated = frozenset(
            i for i, node, _ in having if i not in new or node not in traced.stores
        )
        program.has_lasting_terms = frozenset(i for i, _, _ in having if i not in new)
        program.may_get_terms = self._may_get_terms(traced) - program.already_compensated
        records = ((i, _record(info)) for i, (_, info) in enumerate(traced.inputs) if not self.optimizers)
        formats = ((i, record.format) for i, record in records if record is not None)
        program.known_formats = {i: each for i, each in formats if each in WEIGHT_FORMATS.values()}
        program.already_compensated |= program.known_formats.keys()
        if any(node not in traced.stores for _, node, _ in having):
            program.arithmetic = "wide"  # "native" reads only hi of tensors that it does not update
        if self.options.bytes_per_parameter is not None:
            program = self._within_budget(program)
        if self.options.strategy != "none":
            capture.refuse_aliases(traced.gm, program.inputs, self.known.values())
            try:
                capture.refuse_unsupported(traced.gm, program.inputs, packs=packs)
            except errors.UnsupportedTensorError as refusal:
                about = next(iter(self.optimizers.values()), self)  # an optimizer is compiled more than once
                refusal.raise_or_warn(about, strict=self.options.strict)
        self._refuse_other_error_terms(traced.infos, program.error_format)
        return program

    def _within_budget(self, program: graph.StepProgram) -> graph.StepProgram:
        """Return the program with the options of the best budget, judged by the largest state so far."""
        if self.recorded:
            self.budgets = self._budgets_for_part(program)
            return self.budgets[0].applied_to(program)
        budgets = budgets_for(program, self.options.passes)
        records = [record for info in program.infos if (record := _record(info)) is not None]
        held = {record.format.name for record in records if record.format.keeps_error}
        is_beside = bool(held) and not self.optimizers  # a function beside the steps, which have chosen
        if is_beside:
            budgets = [budget for budget in budgets if held.issuperset(budget.formats)] or budgets
        budgets, others = self._budgets_beside(budgets, program)
        self.budgets = (self._best_budget(budgets, takes_least=is_beside, others=others), *budgets)
        limit = self.options.bytes_per_parameter
        for optimizer in self.optimizers.values():
            known = self.backend.budgets.get(optimizer, self.budgets)
            alike = (each for each in budgets if each.rank() == known[0].rank())
            is_within = not isinstance(limit, float | int) or all(each.is_within(limit) for each in alike)
            # Most optimizers make their state in the first step, which holds less.
            if known[-1].bytes >= budgets[-1].bytes and is_within:
                self.budgets = known
            self.backend.budgets[optimizer] = self.budgets
        program = self.budgets[0].applied_to(program)
        for record in records:
            if self.optimizers and (program.weights or record.format is not program.error_format):
                record.is_used = False  # used by a step that held less: converted now
        return program

    def _budgets_beside(self, budgets: list[Budget], program: graph.StepProgram) -> tuple[list[Budget], str]:
        """Return the budgets with the formats of other optimizers' steps, and the label of these optimizers.

        Others, an inner one say, have a budget for the same parameters. Bytes include state that this step
        does not touch, of the same parameters or of no single one.
        """
        optimizers, met = [*self.optimizers.values()], {id(info.tensor) for info in program.infos}
        known = [each for each in self.backend.budgets if optimizers and each not in optimizers]
        others = [each for each in known if any(id(p) in met for _, p in state.parameter_names(each))]
        optimizers += others
        named = (each for optimizer in optimizers for each in state.parameter_names(optimizer))
        stepped = {id(p): p for _, p in named if id(p) in met}.values()
        states = (each for optimizer in optimizers for each in state.states_of(optimizer, stepped))
        left = {id(each): each for each in states if id(each) not in met}
        held = state.bytes_held(t for t in left.values() if not torch_compat.is_wrapper(local_tensor(t)))
        if others:
            used = set[str]().union(*(self.backend.budgets[other][0].formats for other in others))
            budgets = [each for each in budgets if used.issuperset(each.formats)] or budgets
        if held and stepped:
            of_element = held / sum(local_tensor(p).numel() for p in stepped)
            budgets = [replace(each, bytes=each.bytes + of_element) for each in budgets]
        return budgets, self.backend.label(others)

    def _budgets_for_part(self, program: graph.StepProgram) -> tuple[Budget, ...]:
        """Return the budget for a part of a recorded step, as in captured steps before it, then all budgets.

        If Adam would exceed the limit with all budgets, it is the smallest. :meth:`Backend.refuse_excess`
        checks how much this optimizer holds, once its state is known.
        """
        values = map(graph.tensor_value, filter(is_low_precision_tensor, placeholders(program.gm.graph)))
        dtype = next((value.dtype for value in values if value is not None), torch.bfloat16)
        budgets = budgets_for_parts(dtype, self.options.passes)
        known = self.backend.budgets
        before = [known[optimizer][0] for optimizer in self.optimizers.values() if optimizer in known]
        terms = {(budget.strategy, budget.error_format) for budget in before}
        as_before = [budget for budget in budgets if (budget.strategy, budget.error_format) in terms]
        return (as_before or [self._best_budget(budgets, takes_least=True)])[0], *budgets

    def _best_budget(self, budgets: Sequence[Budget], *, takes_least: bool, others: str = "") -> Budget:
        """Return the most precise budget within the limit, or the smallest that is predicted to be enough."""
        limit, least = self.options.bytes_per_parameter, budgets[0].bytes
        if not isinstance(limit, float | int):
            return report.enough(report.updates_of(self.optimizers.values()), budgets) or budgets[-1]
        return best_budget(budgets, max(limit, least) if takes_least else limit, others)

    def _refuse_other_error_terms(self, infos: Sequence[graph.InputInfo], error_format: ErrorFormat) -> None:
        """Raise for error terms that this backend cannot keep up to date."""
        for info in infos:
            if (record := _record(info)) is None or not record.format.keeps_error:
                continue
            if self.options.strategy == "none":
                raise errors.ConflictingErrorFormatError(
                    "strategy='none' was asked for a tensor that has error terms: a plain step would change "
                    "the tensor and not its error terms",
                    where=info.name,
                    remedy="use the strategy of the other compiled step, or drop the error terms first "
                    "with collage_fx.reset_error_terms(tensor)",
                )
            state.require_format(record, error_format, name=info.name)

    def _refuse_uncompensated(self, program: graph.StepProgram) -> None:
        """Raise, or warn, for tensors that the passes could not compensate."""
        for entry in program.compensated:
            if not entry.refusal:
                continue
            statement = graph.statement_of(entry.recurrence.path)
            for index in program.repetition.copies[entry.position]:
                refusal = errors.UncompensatedParameterError(
                    f"{entry.refusal} ({entry.info.role.value} of dtype {entry.format.name})",
                    where=", at ".join(filter(None, (program.infos[index].name, statement))),
                    remedy=f"{entry.remedy or REMEDIES[program.arithmetic]}, or leave it to plain low "
                    "precision with strict=False",
                )
                if self.options.strict and entry.info.role is Role.PARAMETER:
                    raise refusal
                errors.warn(refusal)

    def _lower_as_captured(self, traced: _Traced) -> Lowered:
        """Lower a graph in which nothing is rewritten."""
        gm = traced.gm
        if (reason := why_not_compiled(gm.graph, self)) is not None:
            return Lowered(interpreted(gm), "operation by operation", graph.not_taken(("in parts", reason)))
        step = self.backend.lower_as_captured(gm, traced.example_inputs, traced.inductor_options)
        return Lowered(step, "as captured")

    def _rows(self, program: graph.StepProgram) -> tuple[report.TensorReport, ...]:
        """Return the report's rows: the optimizers' tensors in their order, then all others."""
        rows: list[report.TensorReport] = []
        repetition, infos = program.repetition, program.infos
        for entry in program.states:
            if entry.info.role is Role.NEW:
                continue
            row = report.tensor_report(entry)
            of_shape = functools.cache(partial(report.tensor_report, entry))
            suffixes = [name.removeprefix(entry.placeholder.name) for name in row.inputs]
            owner = repetition.owners[entry.position]
            copied = zip(repetition.copies, repetition.owners, strict=True)
            symbols = [[infos[index].symbol for index in copies] for copies, of in copied if of == owner]
            own_numbers = [each for each in symbols if len({*each}) > 1]
            for member, (index, value) in enumerate(repetition.copies_of(entry.position, entry.value)):
                hi = entry.placeholder.name if repetition.is_whole else graph.input_name(index)
                inputs = tuple(hi + each for each in suffixes)
                own = row if value is entry.value else of_shape(value.shape)
                own = own.with_symbols({each[0]: each[member] for each in own_numbers})
                rows.append(replace(own, name=infos[index].name, inputs=inputs))
        rank = {entry.name: i for i, entry in enumerate(self.known.values())}
        return tuple(sorted(rows, key=lambda row: rank.get(row.name, len(rank))))

    def _as_captured(self, traced: _Traced, why: str) -> Callable[[list[Any]], Any]:
        """Lower the captured graph unchanged, and report why."""
        is_empty = not any(node.op == "call_function" for node in traced.gm.graph.nodes)
        if self.left_alone or is_empty:  # a second call is for the backward graph of the same capture
            return self._lower_as_captured(traced).step
        self.left_alone = True
        captured = graph.copy_of(traced.gm)
        pass_log = report.PassLog(self.subject, captured)
        with torch_compat.generated_code() as code:
            made = self._lower_as_captured(traced)
        pass_log.lowered(tuple(code))
        lowered = "lowered by Inductor" if made.unit == "as captured" else "run by torch"
        note = f"{self.subject}: {why}; {lowered} as it is"
        log.info(note)
        told = report.GraphReport(
            captured=captured,
            repetition=graph.Repetition.whole(len(placeholders(captured.graph))),
            subject=self.subject,
            tensors=(),
            code=tuple(code),
            note=note,
            route=graph.Route(made.unit, self.recorded, reasons=made.reasons),
        )
        self.backend.reports.append(told)
        return made.step

    def _keep(self, told: report.GraphReport, *, compensated: bool, started: float) -> None:
        """Keep and log a report; note that the optimizers have a compiled step."""
        if compensated:
            for optimizer in self.optimizers.values():
                state.note_compiled(optimizer)
                capture.note_compiled_step(optimizer, self.request)
        self.backend.reports.append(told)
        log.info("%s, %s in %.1f s", told.headline, self.backend.verb, time.perf_counter() - started)
        for line in (str(told.route), *told.route.explained()):
            log.debug("%s: %s", self.subject, line)
        for group in report.treatments(told.tensors):
            row = group.example
            log.debug("%s: %s: %s; %s", self.subject, group.what, row.recurrence, row.why)


@dataclass(frozen=True, eq=False)
class _Traced:
    """Functional graph of one member of each family, as AOTAutograd hands it over."""

    gm: GraphModule
    example_inputs: Sequence[Any]  # as the next, an argument of ``compile_fx`` for its inner compiler
    inductor_options: dict[str, Any]
    infos: Sequence[graph.InputInfo]  # of the inputs of the whole graph; empty if it is not looked into
    repetition: graph.Repetition  # of the graph's own inputs among these

    @cached_property
    def inputs(self) -> list[tuple[Node, graph.InputInfo]]:
        """The graph's own inputs, each with the description of its first copy."""
        infos = (self.infos[copies[0]] for copies in self.repetition.copies)
        return list(zip(placeholders(self.gm.graph), infos, strict=True))

    @cached_property
    def stores(self) -> dict[Node, Node]:
        """Stores by the inputs that they write to."""
        return graph.copies_to_inputs(self.gm.graph)

    @cached_property
    def kept(self) -> set[Node]:
        """Values that outlive the graph: stored values, and results."""
        return {*map(graph.stored, self.stores.values()), *self.gm.graph.output_node().all_input_nodes}


def _input_has_error_terms(info: graph.InputInfo) -> bool:
    return info.tensor is not None and state.has_error_terms(info.tensor)


def _record(info: graph.InputInfo) -> state.ErrorTermRecord | None:
    return None if info.tensor is None else state.record_of(info.tensor)


def _holds_more(info: graph.InputInfo) -> bool:
    return info.tensor is not None and state.holds_more(info.tensor)


def _with_memory(step: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return a step that unpacks its arguments: another compiled step of the optimizer packs them."""

    def run(arguments: list[Any]) -> Any:
        for each in arguments:
            if isinstance(each, torch.Tensor):
                state.unpack(each)
        return step(arguments)

    return torch_compat.boxed_call(run)


def _warning_of_terms(step: Callable[..., Any], positions: Sequence[int], subject: str) -> Callable[..., Any]:
    """Wrap code that reads arguments without error terms: warn, once, if they have some by now."""
    is_told = False

    def warning(*arguments: Any) -> Any:
        nonlocal is_told
        if not is_told and any(state.has_error_terms(arguments[i]) for i in positions):
            is_told = True
            errors.warn(
                errors.UncompensatedParameterError(
                    "it was compiled before the optimizer of the detached parameters that it is given, and "
                    "reads these without their error terms",
                    where=subject,
                    remedy="call collage_fx.install(optimizer), or torch.compile, before the first call of "
                    "this function; or call torch.compiler.reset() once, so that all is compiled anew",
                )
            )
        return step(*arguments)

    return warning


def _never_called(*arguments: Any) -> Any:
    raise AssertionError("the graph of one of each family is compiled, never run")
