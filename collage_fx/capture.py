"""One compilation: from what Dynamo captured to what AOTAutograd calls, and the report of it."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule
from torch.optim import Optimizer

from collage_fx import eager, scalars
from collage_fx.admission import (
    forget_new_state,
    refuse_aliases,
    refuse_fused_operators,
    refuse_overlaps,
    refuse_unsupported,
)
from collage_fx.checkpoint import note_compiled
from collage_fx.compilations import GraphReport, Rewritten
from collage_fx.dumps import open_dump
from collage_fx.error_formats import ERROR_FORMATS
from collage_fx.error_terms import Expansion, expansion_of, require_format
from collage_fx.errors import (
    AliasedStateError,
    CollageError,
    ConflictingErrorFormatError,
    UncompensatedParameterError,
    UnsupportedTensorError,
    warn,
)
from collage_fx.families import Families
from collage_fx.formats import short_name
from collage_fx.graph import (
    assignments_to_stores,
    copies_to_inputs,
    is_low_precision_tensor,
    placeholders,
    tensor_value,
)
from collage_fx.lowering import WholeStep
from collage_fx.metering import MeasuredInput, Meter, MeteredStep, Rows, without_sums
from collage_fx.names import KnownTensor, describe_input, describe_inputs, known_tensors, optimizers_among
from collage_fx.options import Options
from collage_fx.pipeline import (
    ANALYSIS,
    MEASUREMENT,
    PIPELINE,
    Stage,
    run_pipeline,
)
from collage_fx.program import InputInfo, Role, StepProgram
from collage_fx.recording import is_recorded
from collage_fx.repetition import Repetition, input_name, repeated_graph
from collage_fx.torch_compat import (
    aot_input_of,
    compile_with_inductor,
    factorizes,
    generated_code,
    graph_module,
    optimizer_being_stepped,
    traced_frame_name,
    traced_frame_variables,
    versions_to_increment,
)
from collage_fx.treatments import TensorReport, tensor_report, treatments

__all__ = ["Capture", "CaptureOfFamilies"]

log = logging.getLogger("collage_fx")

#: Of an update that an operation makes in the storage format, by the arithmetic in use.
REMEDIES = {
    "native": "use arithmetic='wide', which computes elementwise operations in float32",
    "wide": "give that operation float32 tensors, x.float(), in the optimizer",
}


class Backend(Protocol):
    """What a compilation wants of the backend that it is for.

    Attributes:
        verb: what is done, in the log.
        meter: counts and measures the steps that are compiled with ``metrics``.
    """

    verb: str

    @property
    def options(self) -> Options: ...

    @property
    def meter(self) -> Meter: ...

    def label(self, optimizers: Sequence[Optimizer]) -> str:
        """What a report calls the step of these optimizers."""

    def lower(
        self,
        graph: StepProgram | GraphModule,
        example_inputs: Sequence[Any],
        inductor_options: dict[str, Any],
    ) -> Any:
        """A rewritten step, or a graph that is left as it is, to a callable in AOTAutograd's convention."""

    def lower_families(self, program: StepProgram, families: Families, repetition: Repetition) -> Any:
        """The whole step, a function of a list, from the rewritten step of one of each family, or None."""

    def keep(self, report: GraphReport) -> None:
        """Put a compilation into the backend's report."""


class Capture:
    """One compilation.

    What Dynamo captured, and the inner compiler that AOTAutograd calls with the functional graph.
    """

    def __init__(
        self,
        backend: Backend,
        dynamo_module: GraphModule,
        arguments: tuple[Any, ...],
        mode: str | None,
    ) -> None:
        self.backend = backend
        self.mode = mode
        self.options = backend.options
        self.dynamo_module = dynamo_module
        self.arguments = arguments
        # A helper that a step calls, or what is left of it after a graph break, need not have the optimizer.
        variables = {**traced_frame_variables(), "stepped": optimizer_being_stepped()}
        self.optimizers = optimizers_among(variables)
        self.subject = backend.label(list(self.optimizers.values())) or traced_frame_name() or "step"
        self.left_alone = False

    def run(self, patches: dict[str, Any]) -> Callable[..., Any]:
        """Compile the graph with these changes to Inductor's configuration."""
        return compile_with_inductor(
            self.dynamo_module,
            self.arguments,
            inner_compile=self.compile,
            decompositions=scalars.decompositions(),
            config_patches=patches,
        )

    def describe(
        self, inputs: Sequence[Any], names: Sequence[str], bound: int
    ) -> list[tuple[InputInfo, Hashable]]:
        """What inputs of the graph are to the user, and whether they have error terms already."""
        known = known_tensors(self.optimizers)
        infos = (
            describe_input(value, name, known, bound=i < bound)
            for i, (value, name) in enumerate(zip(inputs, names, strict=True))
        )
        return [(info, info.tensor is not None and expansion_of(info.tensor) is not None) for info in infos]

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any], **inductor_options: Any) -> Any:
        """Rewrite and lower the functional graph.

        A graph that is none of our business is lowered as it is.
        """
        try:
            return self._compile(gm, example_inputs, inductor_options)
        finally:
            self._let_go()

    def _compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], inductor_options: dict[str, Any]
    ) -> Any:
        if self.options.strategy != "none":
            assignments_to_stores(gm)
            self._record_factorizations(gm)
        reason = self._reason_to_leave_alone(gm, inductor_options)
        if reason is not None:
            return self._lower_as_is(gm, example_inputs, inductor_options, reason)
        try:
            program = self._program(gm)
            return self._lower_compensated(gm, program, example_inputs, inductor_options)
        except AliasedStateError as refusal:
            self._refused(refusal)
            return self._lower_as_is(gm, example_inputs, inductor_options, refusal.met)
        except CollageError:
            self.forget_newborn_state()
            raise

    def _record_factorizations(self, gm: GraphModule) -> None:
        """Begin again, recording, where eager torch would raise what the step may catch.

        Dynamo traces past it: a tensor without values has a factorization in every format.
        """
        for node in gm.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and factorizes(node.target):
                low = next(filter(is_low_precision_tensor, node.all_input_nodes), None)
                if low is not None:
                    dtype = short_name(low.meta["val"].dtype)
                    reason = f"{node.target} is not implemented for {dtype}"
                    eager.record_instead(
                        self.optimizers.values(),
                        self.backend,
                        {"mode": self.mode},
                        reason,
                        strict=self.options.strict,
                    )

    def _reason_to_leave_alone(self, gm: GraphModule, inductor_options: dict[str, Any]) -> str | None:
        if not inductor_options.get("is_inference", False):
            return "the graph needs autograd, so it is no optimizer step"
        updated = copies_to_inputs(gm.graph)
        if any(is_low_precision_tensor(node) for node in updated):
            return None
        if updated and any(
            info.tensor is not None and expansion_of(info.tensor) for info in self._inputs(gm)
        ):
            return None  # a float32 average of compensated parameters, say
        return "the graph updates no bfloat16 or float16 tensor"

    def refuse_fused_operators(self) -> None:
        """Refuse, before AOTAutograd fails at it, an update that is one operator of torch's."""
        if self.options.strategy != "none":
            try:
                refuse_fused_operators(self.dynamo_module)
            except CollageError:
                self.forget_newborn_state()
                raise

    def refuse_overlaps(self) -> None:
        """Refuse, before AOTAutograd does it in its own words, parameters and state that share memory."""
        if self.options.strategy != "none":
            try:
                refuse_overlaps(known_tensors(self.optimizers).values())
            except AliasedStateError as refusal:
                self._refused(refusal)

    def _refused(self, refusal: CollageError) -> None:
        """Raise a refusal, and leave no trace of the step, or warn of it."""
        if self.options.strict:
            self.forget_newborn_state()
            raise refusal
        warn(refusal)

    def forget_newborn_state(self) -> None:
        """Undo what the trace has done to the optimizers' state: no step has been taken."""
        for optimizer in self.optimizers.values():
            forget_new_state(optimizer)

    def _let_go(self) -> None:
        """Forget the real tensors.

        AOTAutograd keeps ``compile`` for a backward graph, as long as the compiled code lives.
        """
        self.dynamo_module = GraphModule({}, Graph())
        self.arguments = ()
        self.optimizers = {}

    def _lower_compensated(
        self,
        gm: GraphModule,
        program: StepProgram,
        example_inputs: Sequence[Any],
        inductor_options: dict[str, Any],
    ) -> Any:
        started = time.perf_counter()
        before = _copy_of(gm)
        passes = self.options.passes if self.options.strategy != "none" else ANALYSIS
        stages = _Stages(self.subject, before)
        run_pipeline(program, passes, observe=stages)
        if self.options.strategy == "none" and program.captured is not None:
            program.move_to(_copy_of(gm))
            run_pipeline(program, MEASUREMENT, observe=stages)
        self._refuse_uncompensated(program)
        after = _copy_of(program.gm)
        is_rewritten = bool(program.expansions or program.measured) or passes not in (PIPELINE, ANALYSIS)

        def lower(graph: StepProgram | GraphModule) -> Any:
            return self.backend.lower(graph, example_inputs, inductor_options)

        with generated_code() as code:
            if program.measured:
                measured = [MeasuredInput.of(each, each.position, each.info) for each in program.measured]
                step = self._metered(program, measured, lower, gm if program.strategy == "none" else None)
            else:
                step = lower(program if is_rewritten else gm)
        rewritten = (after if is_rewritten else before), tuple(stages.passes)
        report = GraphReport(
            capture=lambda: before,
            rewrite=lambda: rewritten,
            subject=self.subject,
            tensors=self._in_order(tensor_report(program, state) for state in program.states),
            wider_bytes=_wider_bytes(before),
            code=tuple(code),
            program=program.unrun(before),
            pipeline=passes,
        )
        stages.lowered(report.code)
        self._done(report, compensated=bool(program.compensated), started=started)
        return step

    def _done(self, report: GraphReport, *, compensated: bool, started: float) -> None:
        if compensated:
            for optimizer in self.optimizers.values():
                note_compiled(optimizer)
                eager.note_compiled_step(optimizer, strict=self.options.strict)
        self.backend.keep(report)
        log.info("%s, %s in %.1f s", report.headline, self.backend.verb, time.perf_counter() - started)
        for group in treatments(report.tensors):
            row = group.example
            log.debug("%s: %s: %s; %s", self.subject, group.what, row.recurrence, row.why)

    def _metered(
        self,
        program: StepProgram,
        inputs: Sequence[MeasuredInput],
        lower: Callable[[Any], Any],
        unmeasured: GraphModule | None = None,
    ) -> MeteredStep | None:
        """The step with the sums, and without if not every step is measured; None if lowering gives none.

        Args:
            program: with the sums.
            inputs: what is measured, in the order of the rows.
            lower: takes a program, or a graph, to a step.
            unmeasured: the graph of the step without, where it is not what the program is without the sums.
        """
        meter = self.backend.meter
        meter.learn(self.optimizers)
        rows = Rows(inputs)
        plain = None
        if meter.every > 1:
            plain = lower(unmeasured or replace(program, gm=without_sums(program.gm)))
            if plain is None:
                return None
        program.rows = rows.inputs
        measured = lower(program)
        return None if measured is None else MeteredStep(meter, self.subject, inputs, rows, measured, plain)

    def _refuse_uncompensated(self, program: StepProgram) -> None:
        for state in program.compensated:
            if not state.refusal:
                continue
            refusal = UncompensatedParameterError(
                f"{state.refusal} ({state.info.role.value} of dtype {state.format.name})",
                where=state.info.name,
                remedy=f"{REMEDIES[program.arithmetic]}, or leave it to plain low precision with "
                "strict=False",
            )
            if self.options.strict and state.info.role is Role.PARAMETER:
                raise refusal
            warn(refusal)

    def _lower_as_is(
        self, gm: GraphModule, example_inputs: Sequence[Any], inductor_options: dict[str, Any], reason: str
    ) -> Any:
        if self.left_alone:  # forward and backward of one capture come here one after the other
            return self.backend.lower(gm, example_inputs, inductor_options)
        self.left_alone = True
        note = f"{self.subject}: {reason}; lowered by Inductor as it is"
        log.info(note)
        graph = _copy_of(gm)
        stages = _Stages(self.subject, graph)
        with generated_code() as code:
            step = self.backend.lower(gm, example_inputs, inductor_options)
        stages.lowered(tuple(code))
        self.backend.keep(
            GraphReport(
                lambda: graph,
                lambda: (graph, ()),
                subject=self.subject,
                tensors=(),
                code=tuple(code),
                note=note,
            )
        )
        return step

    def _inputs(self, gm: GraphModule) -> list[InputInfo]:
        return describe_inputs(
            placeholders(gm.graph), self.dynamo_module, self.arguments, known_tensors(self.optimizers)
        )

    def _program(self, gm: GraphModule) -> StepProgram:
        inputs = self._inputs(gm)
        if self.options.strategy != "none":
            self._refuse(gm, inputs, known_tensors(self.optimizers))
        return self._program_of(_copy_of(gm), inputs, frozenset(self._existing_expansions(inputs)))

    def _program_of(
        self, gm: GraphModule, inputs: Sequence[InputInfo], already_compensated: frozenset[int]
    ) -> StepProgram:
        return StepProgram(
            gm,
            inputs,
            self.options.strategy,
            self.options.arithmetic,
            ERROR_FORMATS[self.options.error_format],
            already_compensated=already_compensated,
            is_recorded=any(map(is_recorded, self.optimizers.values())),
            captured=_copy_of(gm) if self.options.metrics else None,
        )

    def _existing_expansions(self, inputs: Sequence[InputInfo]) -> dict[int, Expansion]:
        """By position; refused where this backend could not keep them up."""
        existing: dict[int, Expansion] = {}
        for i, info in enumerate(inputs):
            expansion = None if info.tensor is None else expansion_of(info.tensor)
            if expansion is None:
                continue
            if self.options.strategy == "none":
                raise ConflictingErrorFormatError(
                    "strategy='none' was asked for a tensor that has error terms, which a plain step would "
                    "leave behind stale",
                    where=info.name,
                    remedy="use the strategy the other compiled step uses, or drop the error terms first "
                    "with collage_fx.reset_error_terms(tensor)",
                )
            require_format(expansion, ERROR_FORMATS[self.options.error_format], name=info.name)
            existing[i] = expansion
        return existing

    def _refuse(self, gm: GraphModule, inputs: Sequence[InputInfo], known: Mapping[int, KnownTensor]) -> None:
        refuse_aliases(gm, inputs, known.values())
        try:
            refuse_unsupported(gm, inputs)
        except UnsupportedTensorError as refusal:
            self._refused(refusal)

    def _in_order(self, rows: Iterable[TensorReport]) -> tuple[TensorReport, ...]:
        """In the optimizers' order, each parameter before its state; what they don't hold comes last."""
        rank = {entry.name: i for i, entry in enumerate(known_tensors(self.optimizers).values())}
        return tuple(sorted(rows, key=lambda row: rank.get(row.name, len(rank))))


class CaptureOfFamilies(Capture):
    """The compilation of one of each family: Note [One of each family] in ``families.py``.

    Attributes:
        step: the whole step, once the small graph has been compiled; None where it has to be compiled whole.
    """

    def __init__(self, backend: Backend, families: Families, mode: str | None) -> None:
        super().__init__(backend, families.module, families.arguments, mode)
        self.families = families
        self.step: WholeStep | None = None

    def _compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], inductor_options: dict[str, Any]
    ) -> Any:
        """Set ``step``. What AOTAutograd makes of the small graph is not called."""
        assignments_to_stores(gm)
        self._record_factorizations(gm)
        updated = versions_to_increment()
        repetition = self._repetition(gm)
        reason = self._reason_to_leave_alone(gm, inductor_options)
        if updated is not None and repetition is not None and reason is None:
            # A refusal is met again when the graph is compiled whole, and raised there by its names.
            with contextlib.suppress(CollageError):
                self.step = self._step(gm, repetition, updated)
        return _never_called

    def _refused(self, refusal: CollageError) -> None:
        raise refusal

    def _repetition(self, gm: GraphModule) -> Repetition | None:
        """For the inputs as AOTAutograd has them; None if one is not known, or shared and written to."""
        inputs = placeholders(gm.graph)
        known: dict[Any, int] = {origin: i for i, origin in enumerate(self.families.origins)}
        order = [known.get(aot_input_of(node), -1) for node in inputs]
        if sorted(order) != list(range(len(known))):
            return None
        repetition = self.families.repetition.reordered(order)
        stores = copies_to_inputs(gm.graph)
        common = (node for node, owner in zip(inputs, repetition.owners, strict=True) if owner is None)
        return None if any(node in stores for node in common) else repetition

    def _step(self, gm: GraphModule, repetition: Repetition, updated: Sequence[int]) -> WholeStep | None:
        started = time.perf_counter()
        families = self.families
        inputs = [families.infos[copies[0]] for copies in repetition.copies]
        self._refuse(gm, inputs, known_tensors(self.optimizers))
        existing = frozenset(self._existing_expansions(families.infos))
        small = frozenset(i for i, copies in enumerate(repetition.copies) if copies[0] in existing)
        program = self._program_of(_copy_of(gm), inputs, small)
        run_pipeline(program)
        if not program.expansions or any(state.refusal for state in program.compensated):
            return None
        with generated_code() as code:
            step = self._lower(program, repetition)
        if step is None:
            return None
        graphs = _RepeatedGraphs(_copy_of(gm), repetition, self._program_of(gm, families.infos, existing))
        report = GraphReport(
            capture=graphs.before,
            rewrite=graphs.rewritten,
            subject=self.subject,
            tensors=self._in_order(_rows(program, families.infos, repetition)),
            wider_bytes=_wider_bytes(gm, repetition),
            code=tuple(code),
            program=graphs.program,
            pipeline=PIPELINE,
        )
        self._done(report, compensated=bool(program.compensated), started=started)
        copies = [repetition.copies[position] for position in updated]
        places = sorted(place for each in copies for place in each)
        bound, gradients = families.inputs[: families.bound], families.gradients
        passed = len(families.inputs) - len(bound) - len(gradients)
        return WholeStep(step, bound, passed, places, gradients)

    def _lower(self, program: StepProgram, repetition: Repetition) -> Any:
        """The whole step, a function of a list; None if it can't be lowered in this way."""
        families = self.families

        def lower(each: StepProgram) -> Any:
            return self.backend.lower_families(each, families, repetition)

        if not program.measured:
            return lower(program)
        inputs = [
            MeasuredInput.of(state, place, families.infos[place])
            for state in program.measured
            for place in repetition.copies[state.position]
        ]
        return self._metered(program, sorted(inputs, key=lambda each: each.position), lower)


def _never_called(*arguments: Any) -> Any:
    raise AssertionError("the graph of one of each family is compiled, never run")


def _rows(program: StepProgram, infos: Sequence[InputInfo], repetition: Repetition) -> list[TensorReport]:
    """Of the tensors of all members, in the order of the whole graph's inputs."""
    rows: dict[int, TensorReport] = {}
    for state in program.states:
        row = tensor_report(program, state)
        suffixes = [name.removeprefix(state.placeholder.name) for name in row.inputs]
        for place in repetition.copies[state.position]:
            inputs = tuple(input_name(place) + suffix for suffix in suffixes)
            rows[place] = replace(row, name=infos[place].name, inputs=inputs)
    return [rows[place] for place in sorted(rows)]


class _RepeatedGraphs:
    """Makes the whole graph, and the rewritten one, when they are asked for.

    Args:
        small: the functional graph of one of each family.
        repetition: how it recurs.
        program: the whole step.
    """

    def __init__(self, small: GraphModule, repetition: Repetition, program: StepProgram) -> None:
        self.small = small
        self.repetition = repetition
        self.program = program.unrun(GraphModule({}, Graph()))

    def before(self) -> GraphModule:
        return repeated_graph(self.small, self.repetition)

    def rewritten(self) -> Rewritten:
        program = self.program.unrun(self.before())
        passes: list[tuple[str, str]] = []
        with torch.no_grad():
            run_pipeline(program, observe=lambda stage: passes.append((stage.name, stage.summary)))
        return program.gm, tuple(passes)


class _Stages:
    """Takes down what each pass says, and writes the stages where a dump is asked for."""

    def __init__(self, subject: str, captured: GraphModule) -> None:
        self.passes: list[tuple[str, str]] = []
        self._dump = open_dump(subject)
        if self._dump is not None:
            self._dump.stage("captured", f"{subject}, {len(captured.graph.nodes)} nodes", captured.graph)

    def __call__(self, stage: Stage) -> None:
        self.passes.append((stage.name, stage.summary))
        if self._dump is not None:
            self._dump.stage(stage.name, stage.summary, stage.graph)

    def lowered(self, code: Sequence[str]) -> None:
        if self._dump is not None:
            self._dump.code(code)


def _copy_of(gm: GraphModule) -> GraphModule:
    """A module with a graph of its own over the same constants.

    ``copy.deepcopy`` would copy the constants too, which newer versions refuse in a fake tensor mode.
    """
    copied = graph_module(gm, copy.deepcopy(gm.graph))
    copied.meta.update(gm.meta)
    return copied


def _wider_bytes(gm: GraphModule, repetition: Repetition | None = None) -> int:
    """Bytes of the mutated floating-point inputs that are wider than the formats compensated here."""
    stores, total = copies_to_inputs(gm.graph), 0
    for position, node in enumerate(placeholders(gm.graph)):
        value = tensor_value(node)
        wider = value is not None and value.dtype.is_floating_point and not is_low_precision_tensor(node)
        if value is not None and wider and node in stores:
            times = 1 if repetition is None else len(repetition.copies[position])
            total += times * int(value.numel()) * value.dtype.itemsize
    return total
