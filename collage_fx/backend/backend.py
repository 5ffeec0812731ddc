"""The ``torch.compile`` backend. ``compilation.py`` shows the course of one compilation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule
from typing_extensions import Unpack

from collage_fx.backend.compilation import Backend, Compilation
from collage_fx.capture import not_compiled_yet, start_watch
from collage_fx.choices import names_of, takes_options
from collage_fx.errors import InvalidOptionError
from collage_fx.lowering import JOINT_GRAPH_SETTINGS, forget_kernels
from collage_fx.metrics import Metrics
from collage_fx.options import GivenOptions, Options, refuse_unless
from collage_fx.pipeline import PIPELINE
from collage_fx.report import CollageReport
from collage_fx.torch_compat import mode_options


@takes_options
class CollageBackend(Backend):
    """A ``torch.compile`` backend that makes low-precision optimizer steps precise.

    ``step = torch.compile(opt.step, backend=CollageBackend())``

    Args:
        options: by name; docs/options.md has them all.

    Raises:
        ValueError: an option has a value that is not allowed; the message names those that are.
    """

    def __init__(self, **options: Unpack[GivenOptions]) -> None:
        super().__init__(Options.of(**options))
        self._scalars: tuple[tuple[int, int], dict[str, float]] = (0, 0), {}

    def __repr__(self) -> str:
        shown = {name: value for name, value in self.options.given.items() if value != PIPELINE}
        options = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"CollageBackend({options})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce to the options, without the reports; a deep copy is the backend itself: see below."""
        return partial(CollageBackend, **self.options.given), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> CollageBackend:
        """Return the backend itself, whose report includes copies of an optimizer."""
        return self

    def report(self) -> CollageReport:
        """Return the report of all compilations so far: a table if printed, and graphs before and after.

        It includes the measurements, for which this waits for the device.
        """
        waiting, other_state = not_compiled_yet(self), self.other_state()
        return CollageReport([*self.reports], self.meter.metrics(), waiting, other_state)

    def metrics(self, model: torch.nn.Module | None = None) -> Metrics:
        """Return the measurements so far: step -> tensor -> values, and their aggregates.

        Steps are counted from 1, separately for each optimizer. This waits for the device; nothing does until
        then. Measurements are kept, 360 bytes per tensor and step, until :meth:`forget_metrics`.

        Args:
            model: the model whose names for the parameters are used. Without it they are the names that the
                optimizer was given (``AdamW(model.named_parameters())``), or else positions, without modules.

        Raises:
            CollageError: nothing is measured, because ``metrics=False``.
        """
        if not self.options.metrics:
            met = "nothing is measured: metrics=False is the default"
            remedy = "give metrics=True to install or CollageBackend, before the first step"
            raise InvalidOptionError(met, where="metrics", remedy=remedy)
        return self.meter.metrics(model)

    def scalars(self) -> dict[str, float]:
        """Return a few numbers on the last measured step of all parameters, for the log of a trainer.

        ``collage/edq_ratio`` and ``collage/lost_share`` (:class:`UpdateQuality`),
        ``collage/bytes_per_parameter``: parameters, state and error terms, and ``collage/predicted_error``
        (:meth:`CollageReport.predicted_error`). A number that is not defined, such as the ratio where no
        update is asked for, or not known yet, is left out. Empty without ``metrics=True``, and before a
        measured step. Where tensors are sharded (DTensors), all processes must call it, and get the numbers
        of whole tensors; the predicted error is each process's own.
        """
        if not self.options.metrics or not self.meter.taken:
            return {}
        if self._scalars[0] != (known := (self.meter.taken, len(self.reports))):
            last = self.meter.metrics(only_last=True).by_kind()
            quality = next((each["parameter"] for each in last.values() if "parameter" in each), None)
            found = {name: getattr(quality, name, None) for name in ("edq_ratio", "lost_share")}
            report = CollageReport(list(self.reports), other_state=self.other_state())
            found["bytes_per_parameter"] = report.bytes_per_parameter()["total"]
            found["predicted_error"] = report.predicted_error()
            defined = {name: x for name, x in found.items() if x is not None and not math.isnan(x)}
            self._scalars = known, {f"collage/{name}": value for name, value in defined.items()}
        return dict(self._scalars[1])

    def plot(
        self, path: str | Path, model: torch.nn.Module | None = None, *, depth: int | None = None
    ) -> Path:
        """Plot EDQ ratio, lost updates and sizes of updates into a file: see ``collage_tools.pages``."""
        from collage_tools.pages import plot

        return plot(self.metrics(model), path, depth=depth)

    def forget_metrics(self) -> None:
        """Drop all measurements. The count of steps goes on."""
        self.meter.forget()
        self._scalars = (0, 0), {}

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
            met = "torch.compile(options=...) goes with backend='collage', found by name"
            remedy = "give them to the backend: torch.compile(..., backend=CollageBackend(strategy=...))"
            raise InvalidOptionError(met, where="options", remedy=remedy)
        mode = mode or self.options.mode
        refuse_unless("mode", mode, (None, *names_of("mode")))
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
    """Compile for ``torch.compile(..., backend="collage", options=...)`` by a :class:`CollageBackend`."""
    return backend_for(**(options or {}))(gm, example_inputs, mode=mode)


@takes_options
def backend_for(**options: Unpack[GivenOptions]) -> CollageBackend:
    """Return the backend that ``backend="collage", options=options`` uses, for its report.

    Raises:
        ValueError: an unknown option, or a value that is not allowed.
    """
    backend = CollageBackend(**options)
    return _by_options.setdefault(backend.options, backend)


vars(collage)["stands_for"] = backend_for  # of which Request.of makes the backend

start_watch()
