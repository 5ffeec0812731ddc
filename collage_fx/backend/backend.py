"""The ``torch.compile`` backend. ``compilation.py`` shows the course of one compilation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule
from typing_extensions import Unpack

from collage_fx.backend.compilation import Backend, Compilation
from collage_fx.capture import not_compiled_yet, start_watch
from collage_fx.choices import (
    Arithmetic,
    Changes,
    ErrorFormatName,
    Mode,
    PackedFormatName,
    Rounding,
    Strategy,
)
from collage_fx.errors import InvalidOptionError
from collage_fx.lowering import JOINT_GRAPH_SETTINGS, forget_kernels
from collage_fx.metrics import Metrics
from collage_fx.options import (
    DEFAULT_FORMATS,
    DEFAULT_ROUNDINGS,
    MODES,
    GivenOptions,
    Options,
    refuse_unknown,
    refuse_unless,
)
from collage_fx.pipeline import PIPELINE, Pass
from collage_fx.report import CollageReport
from collage_fx.torch_compat import mode_options


class CollageBackend(Backend):
    """A ``torch.compile`` backend that makes low-precision optimizer steps precise.

    ``step = torch.compile(opt.step, backend=CollageBackend())``

    Args:
        strategy: selects the bfloat16 and float16 tensors that get error terms (the names are the paper's).
            ``"none"``: none, plain Inductor. ``"light"``: parameters, and sums of either sign beside them.
            ``"plus"``: also optimizer state whose recurrence loses bits in its storage format.
            ``"full"``: all tensors that carry something from step to step.
        error_format: ``"exact"``: the other 16 bits of a float32 number, the default. ``"mcf"``: an error
            term of the tensor's own dtype, in as many bytes (the paper's; the default of ``native``).
            ``"byte"``: eight more bits of fraction in a byte, rounded up or down by dither. ``"fp32"``: a
            float32 master copy, for comparison.
        arithmetic: ``"wide"``: the step is computed on float32 values of ``hi + lo`` and split once at the
            store. ``"native"``: the paper's algorithms in the storage format, every operation rounded; needs
            ``"mcf"``.
        metrics: measure the fate of each compensated tensor's updates, for :meth:`metrics`; with strategy
            ``"none"``, of every bfloat16 and float16 parameter and state. No bit of a tensor changes.
        metrics_every: measure every so many steps. A measured step takes several times as long on a CPU; more
            than 1 compiles each step twice, with the sums and without.
        strict: refuse (raise) where a parameter cannot be compensated, rather than warn and leave it, or the
            whole step where one tensor cannot be told from the rest, to plain low precision.
        mode: as in ``torch.compile``; passed on to Inductor.
        rounding: rounding of state that carries something from step to step and has no error terms, and of
            sums next to the old value in ``"exact"``. ``"dither"``, the default of ``wide``: up or down, so
            that changes below an ulp arrive on average; the same in every run, and no byte more than a count
            for each tensor. ``"nearest"``, the default of ``native`` and its only rounding: changes below
            half an ulp are lost at every step, with error terms below half an ulp of float32.
        state: format of state that carries something from step to step. ``None``: as the optimizer makes it.
            ``"block16"``, ``"block8"``: packed, as integers of 16 or 8 bits, 32 neighbours with a scale; the
            recurrence of a state decides whether it is packed. Errors are those of
            :class:`~collage_fx.numerics.Blocks`. Plug-ins register others, such as
            ``examples/peer_formats.py``. Needs ``wide``, and a step that Dynamo captures: recorded steps
            pack nothing.
        bytes_per_parameter: a budget instead of ``strategy``, ``error_format``, ``rounding`` and ``state``:
            the most precise combination of these within it, to 1.5 %, counting parameters, state and error
            terms (5.1 to 12 for AdamW). The report shows it beside the others. The order is that of AdamW's
            errors in docs/formats.md. A recorded step, of which no part shows all state, gets a combination
            for AdamW without packed state (7 to 12).
        changes: ``"summed"``: what a step adds to a tensor is summed first, and a factor near one (weight
            decay, a moving average) is taken as what it takes away: ``x + (t - a x)`` for ``x (1 - a) + t``.
            So there is decay where float32 cannot tell its factor from 1 (lr * weight_decay below 6e-8), in
            float32 tensors, too. Numbers, such as bias corrections, are computed in float64. ``"as
            written"``: in the optimizer's operations; with ``"full"`` and ``rounding="nearest"`` in the bits
            of float32. ``native`` arithmetic computes as written.
        passes: the pipeline, with passes of your own in it: see :func:`collage_fx.pipeline.inserted`. They
            run on steps that update a bfloat16 or float16 tensor, or sum changes of a float32 tensor; other
            graphs are lowered as they are.

    Raises:
        ValueError: an option has a value that is not allowed; the message names those that are.
    """

    def __init__(
        self,
        strategy: Strategy = "plus",
        error_format: ErrorFormatName | None = None,
        arithmetic: Arithmetic = "wide",
        metrics: bool = False,
        metrics_every: int = 1,
        strict: bool = True,
        mode: Mode | None = None,
        rounding: Rounding | None = None,
        state: PackedFormatName | None = None,
        bytes_per_parameter: float | None = None,
        changes: Changes = "summed",
        passes: Sequence[Pass] = PIPELINE,
    ) -> None:
        known: Arithmetic = "native" if arithmetic == "native" else "wide"  # Options refuses other values
        fmt = DEFAULT_FORMATS[known] if error_format is None else error_format
        rounding = DEFAULT_ROUNDINGS[known] if rounding is None else rounding
        options = strategy, fmt, arithmetic, metrics, metrics_every, strict, mode, rounding, state
        super().__init__(Options(*options, bytes_per_parameter, changes, tuple(passes)))

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self.options).items() if value is not PIPELINE}
        options = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"CollageBackend({options})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce to the options, without the reports; a deep copy is the backend itself: see below."""
        return CollageBackend, tuple(vars(self.options).values())

    def __deepcopy__(self, memo: dict[int, Any]) -> CollageBackend:
        """Return the backend itself, whose report includes copies of an optimizer."""
        return self

    def report(self) -> CollageReport:
        """Return the report of all compilations so far: a table if printed, and graphs before and after.

        It includes the measurements, for which this waits for the device.
        """
        return CollageReport(
            list(self.reports), self.meter.metrics(), not_compiled_yet(self), self.other_state()
        )

    def metrics(self, model: torch.nn.Module | None = None) -> Metrics:
        """Return the measurements so far: step -> tensor -> values, and their aggregates.

        Steps are counted from 1, separately for each optimizer. This waits for the device; nothing does until
        then. Measurements are kept, 512 bytes per tensor and step, until :meth:`forget_metrics`.

        Args:
            model: the model whose names for the parameters are used. Without it they are the names that the
                optimizer was given (``AdamW(model.named_parameters())``), or else positions, which name no
                modules.

        Raises:
            CollageError: nothing is measured, because ``metrics=False``.
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
        """Plot EDQ ratio, lost updates and sizes of updates into a file: see ``collage_tools.pages``."""
        from collage_tools.pages import plot

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
        """Compile a graph that Dynamo captured, with ``mode`` and ``options`` of ``torch.compile``.

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
    """Compile for ``torch.compile(..., backend="collage", options={...})``.

    Options are those of :class:`CollageBackend`.
    """
    return backend_for(**(options or {}))(gm, example_inputs, mode=mode)


def backend_for(**options: Unpack[GivenOptions]) -> CollageBackend:
    """Return the backend that ``backend="collage", options=options`` uses, for its report.

    Raises:
        ValueError: an unknown option, or a value that is not allowed.
    """
    refuse_unknown(options)
    backend = CollageBackend(**options)
    return _by_options.setdefault(backend.options, backend)


vars(collage)["stands_for"] = backend_for  # of which Request.of makes the backend

start_watch()
