"""The ``torch.compile`` backend."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, GraphModule
from torch.optim import Optimizer

from collage_fx import eager, scalars
from collage_fx.admission import (
    forget_new_state,
    refuse_aliases,
    refuse_overlaps,
    refuse_unsupported,
)
from collage_fx.checkpoint import note_compiled
from collage_fx.compilations import GraphReport
from collage_fx.dumps import open_dump
from collage_fx.error_formats import ERROR_FORMATS
from collage_fx.error_terms import Expansion, expansion_of, require_format
from collage_fx.errors import (
    AliasedStateError,
    CollageError,
    ConflictingErrorFormatError,
    InvalidOptionError,
    UncompensatedParameterError,
    UnsupportedTensorError,
)
from collage_fx.graph import (
    assignments_to_stores,
    copies_to_inputs,
    is_low_precision_tensor,
    placeholders,
    tensor_value,
)
from collage_fx.lowering import JOINT_GRAPH_SETTINGS, lower
from collage_fx.metering import Meter, MeteredStep, Rows, without_sums
from collage_fx.metrics import Metrics
from collage_fx.names import KnownTensor, describe_inputs, known_tensors, optimizers_among
from collage_fx.pipeline import (
    ANALYSIS,
    MEASUREMENT,
    PIPELINE,
    Pass,
    Stage,
    refuse_incomplete,
    run_pipeline,
)
from collage_fx.plots import plot
from collage_fx.program import Arithmetic, InputInfo, Role, StateTensor, StepProgram, Strategy
from collage_fx.recording import is_recorded
from collage_fx.report import CollageReport
from collage_fx.torch_compat import (
    compile_with_inductor,
    generated_code,
    graph_module,
    inductor_compile_inner,
    mode_options,
    needs_autograd,
    optimizer_being_stepped,
    prepare_cpp_compiler,
    traced_frame_name,
    traced_frame_variables,
)
from collage_fx.treatments import tensor_report, treatments

__all__ = ["CollageBackend", "backend_for", "collage", "collage_backend"]

log = logging.getLogger("collage_fx")

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Options:
    """A backend's options, checked."""

    strategy: Strategy
    error_format: str
    arithmetic: Arithmetic
    metrics: bool
    strict: bool
    mode: str | None
    passes: tuple[Pass, ...] = PIPELINE
    metrics_every: int = 1

    def __post_init__(self) -> None:
        _one_of("strategy", self.strategy, get_args(Strategy))
        _one_of("error_format", self.error_format, tuple(ERROR_FORMATS))
        _one_of("arithmetic", self.arithmetic, get_args(Arithmetic))
        _one_of("metrics", self.metrics, (True, False))
        if type(self.metrics_every) is not int or self.metrics_every < 1:
            raise InvalidOptionError(
                f"metrics_every={self.metrics_every!r} is not allowed",
                where="metrics_every",
                remedy="use a whole number: every how many steps the metrics are computed",
            )
        _one_of("strict", self.strict, (True, False))
        _one_of("mode", self.mode, (None, *MODES))
        if self.arithmetic == "native" and not ERROR_FORMATS[self.error_format].is_double_word:
            formats = ", ".join(repr(name) for name, fmt in ERROR_FORMATS.items() if fmt.is_double_word)
            raise InvalidOptionError(
                "arithmetic='native' computes with double words of the storage format, which error_format="
                f"{self.error_format!r} does not keep",
                where="error_format",
                remedy=f"use error_format={formats}, or arithmetic='wide'",
            )
        refuse_incomplete(self.passes)
        if self.strategy == "none" and self.passes != PIPELINE:
            raise InvalidOptionError(
                "strategy='none' lowers the graph as captured: no pass of yours would rewrite it",
                where="passes",
                remedy="use another strategy",
            )


def _one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
        raise InvalidOptionError(
            f"{name}={value!r} is not allowed",
            where=name,
            remedy=f"use one of {', '.join(map(repr, allowed))}",
        )


class CollageBackend:
    """A ``torch.compile`` backend that makes low-precision optimizer steps precise.

    ``step = torch.compile(opt.step, backend=CollageBackend())``

    Args:
        strategy: which bfloat16 and float16 state tensors get error terms (the names are the paper's).
            ``"none"``: none, plain Inductor. ``"light"``: parameters. ``"plus"``: parameters, and optimizer
            state whose recurrence loses bits in its storage format. ``"full"``: every one that carries
            something from step to step.
        error_format: ``"mcf"``: an error term of the tensor's own dtype (the paper's). ``"fp32"``: a float32
            master copy, for comparison.
        arithmetic: ``"wide"``: the step is computed on float32 values of ``hi + lo`` and split once at the
            store. ``"native"``: the paper's algorithms in the storage format, every operation rounded; needs
            ``"mcf"``.
        metrics: measure what becomes of each compensated tensor's updates, for :meth:`metrics`; with strategy
            ``"none"`` those of every bfloat16 and float16 parameter and state. It changes no bit of them.
        strict: refuse (raise) where a parameter cannot be compensated, rather than warn and leave it, or the
            whole step where one tensor cannot be told from the rest, to plain low precision.
        mode: as in ``torch.compile``; passed on to Inductor.
        passes: the pipeline, with passes of your own in it: see :func:`collage_fx.pipeline.inserted`. They
            run on steps that update a bfloat16 or float16 tensor; other graphs are lowered as they are.
        metrics_every: measure every so many steps. A measured step takes several times as long on a CPU; more
            than 1 compiles each step twice, with the sums and without.

    Raises:
        ValueError: an option has a value that is not allowed; the message names those that are.
    """

    #: What it does, in the log.
    verb = "compiled"

    def __init__(
        self,
        strategy: Strategy = "plus",
        error_format: str = "mcf",
        arithmetic: Arithmetic = "wide",
        metrics: bool = False,
        strict: bool = True,
        mode: str | None = None,
        passes: Sequence[Pass] = PIPELINE,
        metrics_every: int = 1,
    ) -> None:
        self.options = Options(
            strategy, error_format, arithmetic, metrics, strict, mode, tuple(passes), metrics_every
        )
        self._meter = Meter(metrics_every)
        self._report = CollageReport()
        self._used_labels: list[str] = []
        self._labels: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self.options).items() if value is not PIPELINE}
        options = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"CollageBackend({options})"

    def report(self) -> CollageReport:
        """What has been compiled so far: a table when printed, and the graphs before and after.

        With what has been measured, for which it waits for the device.
        """
        return CollageReport(list(self._report.graphs), self.metrics())

    def metrics(self, model: torch.nn.Module | None = None) -> Metrics:
        """What has been measured so far: step -> tensor -> values, and their aggregates.

        Steps are counted from 1, those of each optimizer by themselves. This waits for the device; nothing
        does until then. What has been measured is kept, 128 bytes a tensor and step, until
        :meth:`forget_metrics`.

        Args:
            model: whose names for the parameters are used. Without it they are those that the optimizer was
                given (``AdamW(model.named_parameters())``), or else positions, which name no modules.
        """
        return self._meter.metrics(model)

    def plot(
        self, path: str | Path, model: torch.nn.Module | None = None, *, depth: int | None = None
    ) -> Path:
        """EDQ ratio and lost updates over the steps, by module prefix: see :func:`collage_fx.plots.plot`."""
        return plot(self.metrics(model), path, depth=depth)

    def forget_metrics(self) -> None:
        """Drop what has been measured. The count of steps goes on."""
        self._meter.forget()

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile a graph that Dynamo captured; ``mode`` and ``options`` are what ``torch.compile`` got.

        Raises:
            CollageError: the step cannot be compensated. Nothing has been executed then.
        """
        if options:
            raise InvalidOptionError(
                "torch.compile(options=...) goes with backend='collage', found by name",
                where="options",
                remedy="give them to the backend: torch.compile(..., backend=CollageBackend(strategy=...))",
            )
        mode = mode or self.options.mode
        _one_of("mode", mode, (None, *MODES))
        patches = mode_options(mode) if mode is not None and mode != "default" else {}
        if self.options.strategy != "none":
            patches.update(JOINT_GRAPH_SETTINGS)
        if any(tensor.device.type == "cpu" for tensor in (*gm.parameters(), *gm.buffers())):
            prepare_cpp_compiler()
        capture = _Capture(self, gm, tuple(example_inputs))
        capture.refuse_overlaps()
        with torch.set_grad_enabled(needs_autograd(gm, example_inputs)):
            return compile_with_inductor(
                gm,
                example_inputs,
                inner_compile=capture.compile,
                decompositions=scalars.decompositions(),
                config_patches=patches,
            )

    def label(self, optimizers: Sequence[Optimizer]) -> str:
        """What a report calls the step of these optimizers.

        Their classes, numbered from the second of a class on.
        """
        for optimizer in optimizers:
            if optimizer not in self._labels:
                name = type(optimizer).__name__
                same = sum(label.partition(" ")[0] == name for label in self._used_labels)
                self._labels[optimizer] = f"{name} #{same + 1}" if same else name
                self._used_labels.append(self._labels[optimizer])
        return ", ".join(self._labels[optimizer] for optimizer in optimizers)

    def lower(
        self,
        graph: StepProgram | GraphModule,
        example_inputs: Sequence[Any],
        inductor_options: dict[str, Any],
    ) -> Any:
        """A rewritten step, or a graph that is left as it is, to a callable in AOTAutograd's convention."""
        if isinstance(graph, StepProgram):
            return lower(graph, example_inputs, inductor_options)
        return inductor_compile_inner(graph, example_inputs, **inductor_options)


class _Capture:
    """One compilation.

    What Dynamo captured, and the inner compiler that AOTAutograd calls with the functional graph.
    """

    def __init__(
        self, backend: CollageBackend, dynamo_module: GraphModule, arguments: tuple[Any, ...]
    ) -> None:
        self.backend = backend
        self.options = backend.options
        self.dynamo_module = dynamo_module
        self.arguments = arguments
        # A helper that a step calls, or what is left of it after a graph break, need not have the optimizer.
        variables = {**traced_frame_variables(), "stepped": optimizer_being_stepped()}
        self.optimizers = optimizers_among(variables)
        self.subject = backend.label(list(self.optimizers.values())) or traced_frame_name() or "step"
        self.left_alone = False

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
            self._forget_new_state()
            raise

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
            self._forget_new_state()
            raise refusal
        _warn(refusal)

    def _forget_new_state(self) -> None:
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
        with generated_code() as code:
            if program.measured:
                step = self._lower_measured(program, gm, example_inputs, inductor_options)
            else:
                step = self.backend.lower(program if is_rewritten else gm, example_inputs, inductor_options)
        if program.compensated:
            for optimizer in self.optimizers.values():
                note_compiled(optimizer)
                eager.note_compiled_step(optimizer, strict=self.options.strict)
        report = GraphReport(
            before=before,
            after=after if is_rewritten else before,
            subject=self.subject,
            tensors=tuple(tensor_report(program, state) for state in self._in_order(program.states)),
            wider_bytes=_wider_bytes(before),
            passes=tuple(stages.passes),
            code=tuple(code),
            program=program.unrun(before),
            pipeline=passes,
        )
        self.backend._report.graphs.append(report)
        stages.lowered(report.code)
        log.info("%s, %s in %.1f s", report.headline, self.backend.verb, time.perf_counter() - started)
        for group in treatments(report.tensors):
            row = group.example
            log.debug("%s: %s: %s; %s", self.subject, group.what, row.recurrence, row.why)
        return step

    def _lower_measured(
        self,
        program: StepProgram,
        captured: GraphModule,
        example_inputs: Sequence[Any],
        inductor_options: dict[str, Any],
    ) -> MeteredStep:
        """The step with the sums, and without if not every step is measured."""
        meter, lower = self.backend._meter, self.backend.lower
        meter.learn(self.optimizers)
        rows = Rows(program)
        plain = None
        if meter.every > 1:
            unmeasured = replace(program, gm=without_sums(program.gm))
            graph = captured if program.strategy == "none" else unmeasured
            plain = lower(graph, example_inputs, dict(inductor_options))
        program.rows = rows.inputs
        measured = lower(program, example_inputs, inductor_options)
        return MeteredStep(meter, self.subject, rows, measured, plain)

    def _refuse_uncompensated(self, program: StepProgram) -> None:
        for state in program.compensated:
            if not state.refusal:
                continue
            refusal = UncompensatedParameterError(
                f"{state.refusal} ({state.info.role.value} of dtype {state.format.name})",
                where=state.info.name,
                remedy="use arithmetic='wide', which computes the whole step in float32, or leave it to "
                "plain low precision with strict=False",
            )
            if self.options.strict and state.info.role is Role.PARAMETER:
                raise refusal
            _warn(refusal)

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
        self.backend._report.graphs.append(
            GraphReport(graph, graph, subject=self.subject, tensors=(), code=tuple(code), note=note)
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
        existing = self._existing_expansions(inputs)
        return StepProgram(
            _copy_of(gm),
            inputs,
            self.options.strategy,
            self.options.arithmetic,
            ERROR_FORMATS[self.options.error_format],
            already_compensated=frozenset(existing),
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

    def _in_order(self, states: Sequence[StateTensor]) -> list[StateTensor]:
        """In the optimizers' order, each parameter before its state; what they don't hold comes last."""
        rank = {entry.name: i for i, entry in enumerate(known_tensors(self.optimizers).values())}
        return sorted(states, key=lambda state: rank.get(state.info.name, len(rank)))


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


def _wider_bytes(gm: GraphModule) -> int:
    """Bytes of the mutated floating-point inputs that are wider than the formats compensated here."""
    values = [tensor_value(node) for node in copies_to_inputs(gm.graph) if not is_low_precision_tensor(node)]
    return sum(
        int(v.numel()) * v.dtype.itemsize for v in values if v is not None and v.dtype.is_floating_point
    )


def _warn(refusal: CollageError) -> None:
    warnings.warn(f"collage_fx: {refusal}", stacklevel=2)


#: The backend with default options.
collage_backend = CollageBackend()

_by_options: dict[Options, CollageBackend] = {collage_backend.options: collage_backend}


def collage(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """``torch.compile(..., backend="collage", options={...})``.

    Options are those of :class:`CollageBackend`.
    """
    return backend_for(**(options or {}))(gm, example_inputs, mode=mode)


def backend_for(**options: Any) -> CollageBackend:
    """The backend that ``backend="collage", options=options`` uses, for its report.

    Raises:
        ValueError: an unknown option, or a value that is not allowed.
    """
    allowed = list(Options.__dataclass_fields__)
    unknown = [name for name in options if name not in allowed]
    if unknown:
        raise InvalidOptionError(
            f"unknown option {unknown[0]!r}",
            where=unknown[0],
            remedy=f"options of the backend are {', '.join(allowed)}",
        )
    backend = CollageBackend(**options)
    return _by_options.setdefault(backend.options, backend)


def _strictness(compiler: Any, keywords: dict[str, Any]) -> bool | None:
    """Of what ``torch.compile`` was given; None unless it is a collage backend that compensates something."""
    backend = backend_for(**(keywords.get("options") or {})) if compiler is collage else compiler
    if not isinstance(backend, CollageBackend) or backend.options.strategy == "none":
        return None
    return backend.options.strict


scalars.install()
eager.install(_strictness)
