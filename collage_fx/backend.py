"""The ``torch.compile`` backend. What happens in one compilation is in ``compilation.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim import Optimizer

from collage_fx.capture import (
    forget_new_state,
    give_up_rows,
    has_stand_ins,
    members_come_and_go,
    not_compiled_yet,
    rows_to_trace,
    watch,
)
from collage_fx.codegen import prepare_compiler
from collage_fx.compilation import Backend, Compilation
from collage_fx.errors import InvalidOptionError
from collage_fx.graph import Arithmetic, Rounding, Strategy, device_facts
from collage_fx.lowering import JOINT_GRAPH_SETTINGS, forget_kernels
from collage_fx.metrics import Metrics
from collage_fx.options import (
    DEFAULT_FORMATS,
    DEFAULT_ROUNDINGS,
    MODES,
    Options,
    refuse_unknown,
    refuse_unless,
)
from collage_fx.pipeline import PIPELINE, Pass
from collage_fx.report import CollageReport, plot
from collage_fx.torch_compat import (
    TracedRows,
    TraceWhole,
    backend_being_traced_for,
    mode_options,
    trace_unfused,
)


class CollageBackend(Backend):
    """A ``torch.compile`` backend that makes low-precision optimizer steps precise.

    ``step = torch.compile(opt.step, backend=CollageBackend())``

    Args:
        strategy: which bfloat16 and float16 state tensors get error terms (the names are the paper's).
            ``"none"``: none, plain Inductor. ``"light"``: parameters, and sums of either sign beside them.
            ``"plus"``: those, and optimizer state whose recurrence loses bits in its storage format.
            ``"full"``: every one that carries something from step to step.
        error_format: ``"exact"``: the other 16 bits of a float32 number, the default. ``"mcf"``: an error
            term of the tensor's own dtype, in as many bytes (the paper's; the default of ``native``).
            ``"byte"``: eight more bits of fraction in a byte, rounded up or down by dither. ``"fp32"``: a
            float32 master copy, for comparison.
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
        rounding: of state that carries something from step to step and has no error terms. ``"dither"``: up
            or down, so that what is below an ulp arrives on average; the same in every run, and no byte more
            but a count for each tensor. The default of ``wide``. ``"nearest"``: what is below half an ulp is
            lost at every step. That of ``native``, and the only one there.
        state: how state is kept that carries something from step to step. ``None``: as the optimizer makes
            it. ``"block16"``, ``"block8"``: packed, as integers of so many bits, 32 neighbours with a scale;
            which state is, follows from its recurrence. Errors are those of
            :class:`~collage_fx.numerics.Blocks`. Others are registered by plug-ins, such as
            ``examples/peer_formats.py``. Needs ``wide``, and a step that Dynamo captures: recorded steps
            pack nothing.
        bytes_per_parameter: a budget in the place of ``strategy``, ``error_format``, ``rounding`` and
            ``state``: the most precise combination of these that takes no more, to 1.5 %, counting
            parameters, state and error terms (5.1 to 12 for AdamW). The report shows it beside the others.
            The order is that of AdamW's errors in docs/formats.md. For a recorded step, of which no part
            shows all state, the bytes are those of AdamW without packed state (7 to 12).
        passes: the pipeline, with passes of your own in it: see :func:`collage_fx.pipeline.inserted`. They
            run on steps that update a bfloat16 or float16 tensor; other graphs are lowered as they are.

    Raises:
        ValueError: an option has a value that is not allowed; the message names those that are.
    """

    def __init__(
        self,
        strategy: Strategy = "plus",
        error_format: str | None = None,
        arithmetic: Arithmetic = "wide",
        metrics: bool = False,
        metrics_every: int = 1,
        strict: bool = True,
        mode: str | None = None,
        rounding: Rounding | None = None,
        state: str | None = None,
        bytes_per_parameter: float | None = None,
        passes: Sequence[Pass] = PIPELINE,
    ) -> None:
        known: Arithmetic = "native" if arithmetic == "native" else "wide"  # what else it is, Options refuses
        error_format = DEFAULT_FORMATS[known] if error_format is None else error_format
        rounding = DEFAULT_ROUNDINGS[known] if rounding is None else rounding
        options = strategy, error_format, arithmetic, metrics, metrics_every, strict, mode, rounding, state
        super().__init__(Options(*options, bytes_per_parameter, tuple(passes)))

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self.options).items() if value is not PIPELINE}
        options = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"CollageBackend({options})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle has the options, not the reports; a deep copy is the backend itself: see below."""
        return CollageBackend, tuple(vars(self.options).values())

    def __deepcopy__(self, memo: dict[int, Any]) -> CollageBackend:
        """The backend itself, in whose report copies of an optimizer are too."""
        return self

    def report(self) -> CollageReport:
        """The report of all compilations so far: a table when printed, and the graphs before and after.

        With what has been measured, for which it waits for the device.
        """
        waiting = not_compiled_yet(lambda *given: _compensating(*given) is self)
        return CollageReport(list(self.reports), self.meter.metrics(), waiting)

    def metrics(self, model: torch.nn.Module | None = None) -> Metrics:
        """The measurements so far: step -> tensor -> values, and their aggregates.

        Steps are counted from 1, those of each optimizer by themselves. This waits for the device; nothing
        does until then. What has been measured is kept, 512 bytes a tensor and step, until
        :meth:`forget_metrics`.

        Args:
            model: whose names for the parameters are used. Without it they are those that the optimizer was
                given (``AdamW(model.named_parameters())``), or else positions, which name no modules.

        Raises:
            CollageError: nothing is measured, for want of ``metrics=True``.
        """
        if not self.options.metrics:
            raise InvalidOptionError(
                "nothing is measured: metrics=False is the default",
                where="metrics",
                remedy="give metrics=True to install or CollageBackend, before the first step",
            )
        return self.meter.metrics(model)

    def plot(
        self, path: str | Path, model: torch.nn.Module | None = None, *, depth: int | None = None
    ) -> Path:
        """Plot EDQ ratio, lost updates and sizes of updates into a file: see ``report/plots.py``."""
        return plot(self.metrics(model), path, depth=depth)

    def forget_metrics(self) -> None:
        """Drop all measurements. The count of steps goes on."""
        self.meter.forget()

    def reset(self) -> None:
        """Forget compiled kernels, which all optimizers' steps share. ``torch.compiler.reset()`` does it."""
        forget_kernels()

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
        if any(device_facts(tensor.device).compiles_cpp for tensor in (*gm.parameters(), *gm.buffers())):
            prepare_compiler()
        return Compilation(self, gm, tuple(example_inputs), mode, patches).run()


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
    """The function behind ``torch.compile(..., backend="collage", options={...})``.

    Options are those of :class:`CollageBackend`.
    """
    return backend_for(**(options or {}))(gm, example_inputs, mode=mode)


def backend_for(**options: Any) -> CollageBackend:
    """The backend that ``backend="collage", options=options`` uses, for its report.

    Raises:
        ValueError: an unknown option, or a value that is not allowed.
    """
    refuse_unknown(options)
    backend = CollageBackend(**options)
    return _by_options.setdefault(backend.options, backend)


vars(collage)["stands_for"] = backend_for  # what a recorded step calls in its place


def _compensating(compiler: Any, keywords: dict[str, Any]) -> CollageBackend | None:
    """The backend that ``torch.compile`` was given, if it is one of ours that compensates something."""
    backend = backend_for(**(keywords.get("options") or {})) if compiler is collage else compiler
    compensates = isinstance(backend, CollageBackend) and backend.options.strategy != "none"
    return backend if compensates else None


def _is_ours(compiler: Any) -> bool:
    return compiler is collage or isinstance(compiler, CollageBackend)


def _strictness(compiler: Any, keywords: dict[str, Any]) -> bool | None:
    backend = _compensating(compiler, keywords)
    return None if backend is None else backend.options.strict


def _rows_to_trace(
    optimizer: Optimizer, compiler: Any, keywords: dict[str, Any], rows: Sequence[tuple[Any, ...]]
) -> TracedRows | None:
    backend = _compensating(compiler, keywords)
    by_family = backend is not None and backend.options.not_by_family() is None
    come_and_go = has_stand_ins(optimizer) or members_come_and_go(optimizer)
    traced = rows_to_trace(rows, come_and_go=come_and_go) if by_family else None
    if traced is None and has_stand_ins(optimizer):
        give_up_rows(optimizer)
        forget_new_state(optimizer)
        raise TraceWhole
    return traced


def _is_compensated_now() -> bool:
    """Whether the step that is being traced is compensated."""
    return _compensating(*backend_being_traced_for()) is not None


watch.start_watch(_is_ours, _strictness, _rows_to_trace)
trace_unfused(_is_compensated_now)
