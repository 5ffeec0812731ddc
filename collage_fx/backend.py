"""The ``torch.compile`` backend. What happens in one compilation is in ``capture.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule
from torch.optim import Optimizer

from collage_fx import eager, fused, scalars
from collage_fx.admission import forget_new_state
from collage_fx.batches import prepare_compiler
from collage_fx.capture import Capture, CaptureOfFamilies
from collage_fx.compilations import GraphReport
from collage_fx.dumps import is_dumping
from collage_fx.errors import (
    InvalidOptionError,
)
from collage_fx.families import Families, families_of, rows_to_trace
from collage_fx.lowering import JOINT_GRAPH_SETTINGS, lower, lower_repeatedly
from collage_fx.metering import Meter
from collage_fx.metrics import Metrics
from collage_fx.options import MODES, Options, refuse_unless
from collage_fx.pipeline import (
    PIPELINE,
    Pass,
)
from collage_fx.plots import plot
from collage_fx.program import Arithmetic, StepProgram, Strategy
from collage_fx.recording import is_recording
from collage_fx.repetition import Repetition
from collage_fx.report import CollageReport
from collage_fx.torch_compat import (
    ThinnedLists,
    TraceWhole,
    backend_being_traced_for,
    inductor_compile_inner,
    mode_options,
    needs_autograd,
    thin_lists,
    thinned_lists,
)

__all__ = ["CollageBackend", "backend_for", "collage", "collage_backend"]


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
        metrics_every: measure every so many steps. A measured step takes several times as long on a CPU; more
            than 1 compiles each step twice, with the sums and without.
        strict: refuse (raise) where a parameter cannot be compensated, rather than warn and leave it, or the
            whole step where one tensor cannot be told from the rest, to plain low precision.
        mode: as in ``torch.compile``; passed on to Inductor.
        passes: the pipeline, with passes of your own in it: see :func:`collage_fx.pipeline.inserted`. They
            run on steps that update a bfloat16 or float16 tensor; other graphs are lowered as they are.

    Raises:
        ValueError: an option has a value that is not allowed; the message names those that are.
    """

    #: What it does, in the log.
    verb = "compiled"

    #: Whether equal updates are traced and rewritten once.
    by_family = True

    def __init__(
        self,
        strategy: Strategy = "plus",
        error_format: str = "mcf",
        arithmetic: Arithmetic = "wide",
        metrics: bool = False,
        metrics_every: int = 1,
        strict: bool = True,
        mode: str | None = None,
        passes: Sequence[Pass] = PIPELINE,
    ) -> None:
        self.options = Options(
            strategy, error_format, arithmetic, metrics, metrics_every, strict, mode, tuple(passes)
        )
        self.meter = Meter(metrics_every)
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
        does until then. What has been measured is kept, 384 bytes a tensor and step, until
        :meth:`forget_metrics`.

        Args:
            model: whose names for the parameters are used. Without it they are those that the optimizer was
                given (``AdamW(model.named_parameters())``), or else positions, which name no modules.
        """
        return self.meter.metrics(model)

    def plot(
        self, path: str | Path, model: torch.nn.Module | None = None, *, depth: int | None = None
    ) -> Path:
        """EDQ ratio, lost updates and sizes of updates as a picture: see :func:`collage_fx.plots.plot`."""
        return plot(self.metrics(model), path, depth=depth)

    def forget_metrics(self) -> None:
        """Drop what has been measured. The count of steps goes on."""
        self.meter.forget()

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
        refuse_unless("mode", mode, (None, *MODES))
        patches = mode_options(mode) if mode is not None and mode != "default" else {}
        if self.options.strategy != "none":
            patches.update(JOINT_GRAPH_SETTINGS)
        if any(tensor.device.type == "cpu" for tensor in (*gm.parameters(), *gm.buffers())):
            prepare_compiler()
        capture = Capture(self, gm, tuple(example_inputs), mode)
        capture.refuse_fused_operators()
        needs_grad = needs_autograd(gm, example_inputs)
        thinned = thinned_lists()
        if not needs_grad and (step := self._by_family(capture, patches, thinned)) is not None:
            return step
        if thinned:
            capture.forget_newborn_state()
            raise TraceWhole
        capture.refuse_overlaps()
        with torch.set_grad_enabled(needs_grad):
            return capture.run(patches)

    def _by_family(
        self, capture: Capture, patches: dict[str, Any], thinned: Sequence[ThinnedLists]
    ) -> Callable[..., Any] | None:
        """The step, compiled for one of each family of updates; None where it has to be compiled whole."""
        if not self.finds_families():
            return None
        families = families_of(capture.dynamo_module, capture.arguments, capture.describe, thinned)
        if families is None:
            return None
        of_families = CaptureOfFamilies(self, families, capture.mode)
        with torch.no_grad():
            of_families.run(patches)
        return of_families.step

    def finds_families(self) -> bool:
        """Whether of equal updates one is compiled for all."""
        options = self.options
        is_usual = options.strategy != "none" and options.passes == PIPELINE
        return is_usual and self.by_family and not is_dumping()

    def keep(self, report: GraphReport) -> None:
        """Put a compilation into the report."""
        self._report.graphs.append(report)

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

    def lower_families(self, program: StepProgram, families: Families, repetition: Repetition) -> Any:
        """The whole step, a function of a list, from the rewritten step of one of each family.

        None where that can't be done.
        """
        return lower_repeatedly(program, families.infos, repetition)


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


def _compensating(compiler: Any, keywords: dict[str, Any]) -> CollageBackend | None:
    """What ``torch.compile`` was given, if it is a collage backend that compensates something."""
    backend = backend_for(**(keywords.get("options") or {})) if compiler is collage else compiler
    compensates = isinstance(backend, CollageBackend) and backend.options.strategy != "none"
    return backend if compensates else None


def _strictness(compiler: Any, keywords: dict[str, Any]) -> bool | None:
    backend = _compensating(compiler, keywords)
    return None if backend is None else backend.options.strict


def _rows_to_trace(
    optimizer: Optimizer, compiler: Any, keywords: dict[str, Any], rows: Sequence[tuple[Any, ...]]
) -> Sequence[int] | None:
    backend = _compensating(compiler, keywords)
    return rows_to_trace(rows) if backend is not None and backend.finds_families() else None


def _is_compensated_now() -> bool:
    """Whether what is being traced, or run, is a step that is compensated."""
    return is_recording() or _compensating(*backend_being_traced_for()) is not None


scalars.install()
thin_lists(_rows_to_trace, forget_new_state)
eager.install(_strictness)
fused.install(_is_compensated_now)
