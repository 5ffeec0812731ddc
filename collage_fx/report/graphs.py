"""Report of one compilation: graphs before and after, pictures, and rows of tables."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.fx import Graph, GraphModule

from collage_fx import graph
from collage_fx.choices import Strategy, did_you_mean
from collage_fx.errors import InvalidOptionError
from collage_fx.numerics import ERROR_FORMATS
from collage_fx.options.budgets import Budget
from collage_fx.pipeline import Pass, Stage, run_pipeline, up_to_choosing
from collage_fx.report.prediction import Updates
from collage_fx.report.tensors import TensorReport, tensor_report, treated

if TYPE_CHECKING:
    from collage_tools.pages import Picture


@dataclass(frozen=True)
class GraphReport:
    """Record of one compilation.

    Attributes:
        captured: functional graph with one update of each family of equal updates, before any pass.
        repetition: how the updates recur in the whole graph.
        subject: the class of the optimizer, numbered if the backend serves several, or the name of the
            function.
        route: the way through the compiler, and the reasons against faster ways.
        is_rewritten: whether the graph that was lowered is that of the passes.
        tensors: rows of the low-precision state tensors; of float32 ones too if state is to be packed.
        note: why the graph was lowered without changes, what was done if no tensor has a row, and what
            float32 would do to its weight decay; else empty.
        code: code that Inductor generated: Python with C++ or Triton kernels. Empty after ``explain``.
        program: the whole step before any pass, on another graph; None if nothing was rewritten.
        budgets: with a limit on bytes, the budget that is used, then all, the smallest first.
        updates: updates of the optimizer, from which errors are predicted.
    """

    captured: GraphModule = field(repr=False)
    repetition: graph.Repetition = field(repr=False)
    subject: str
    route: graph.Route
    tensors: tuple[TensorReport, ...]
    is_rewritten: bool = False
    note: str = ""
    code: tuple[str, ...] = field(default=(), repr=False)
    program: graph.StepProgram | None = field(default=None, repr=False)
    pipeline: tuple[Pass, ...] = field(default=(), repr=False)
    budgets: tuple[Budget, ...] = field(default=(), repr=False)
    updates: Updates = field(default_factory=Updates, repr=False)

    @functools.cached_property
    def before(self) -> GraphModule:
        """Whole graph as captured."""
        return graph.repeated_graph(self.captured, self.repetition)

    @property
    def after(self) -> GraphModule:
        """Whole graph after the passes, which are run again on the first request."""
        return self._rewritten[0]

    @property
    def passes(self) -> tuple[tuple[str, str], ...]:
        """Pairs of name and summary of every pass that ran."""
        return self._rewritten[1]

    @functools.cached_property
    def _rewritten(self) -> tuple[GraphModule, tuple[tuple[str, str], ...]]:
        if self.program is None:
            return self.captured, ()
        passes: list[tuple[str, str]] = []
        program = self._run(lambda stage: passes.append((stage.name, stage.summary)))
        return program.gm if self.is_rewritten else self.before, tuple(passes)

    def _run(self, observe: Callable[[Stage], None]) -> graph.StepProgram:
        """Run the passes on the whole graph once more."""
        assert self.program is not None
        program = self.program.before_passes(graph.copy_of(self.before))
        graph.results_to_inputs(program)
        with torch.no_grad():
            run_pipeline(program, self.pipeline, observe=observe)
        return program

    @property
    def headline(self) -> str:
        """Headline: ``AdamW: 148 parameters and 148 exp_avg_sq compensated, 4.0 extra bytes/param``."""
        return f"{self.subject}: {treated(self.tensors)}"

    def stages(self) -> list[Stage]:
        """Run the passes again on :attr:`before`, and return the graph after each."""
        stages: list[Stage] = []
        if self.program is not None:
            self._run(lambda stage: stages.append(replace(stage, graph=copy.deepcopy(stage.graph))))
        return stages

    def rows_under(self, choices: Sequence[tuple[Strategy, str]]) -> list[list[TensorReport]]:
        """Return the rows of :attr:`tensors` for each of some strategies and error formats."""
        assert self.program is not None
        program = self.program.before_passes(graph.copy_of(self.before))
        preparation, choosing = up_to_choosing(self.pipeline)
        rows = []
        with torch.no_grad():
            run_pipeline(program, preparation)
            for strategy, error_format in choices:
                program.strategy, program.error_format = strategy, ERROR_FORMATS[error_format]
                run_pipeline(program, choosing)
                rows.append([tensor_report(state) for state in program.states])
        return rows

    def pictures(self, tensor: str | None = None) -> tuple[Picture, Picture]:
        """Return pictures of a tensor's update before and after; by default the first of :attr:`tensors`."""
        inputs = self._row(tensor).inputs
        return self.picture_of(self.before.graph, inputs), self.picture_of(self.after.graph, inputs)

    def picture_of(self, stage: Graph, inputs: tuple[str, ...]) -> Picture:
        """Return a picture of the update of some inputs in a stage's graph."""
        from collage_tools.pages import picture

        return picture(stage, inputs, self._input_names())

    def to_text(self, tensor: str | None = None) -> str:
        """Describe the update of :meth:`pictures`, in a line for each node with the pass that made it."""
        pictures = zip(("before", "after"), self.pictures(tensor), strict=True)
        return "\n\n".join(f"{when}\n{drawn.to_text()}" for when, drawn in pictures)

    def draw(self, path: str | Path, tensor: str | None = None) -> Path:
        """Draw the :meth:`pictures` into an SVG file, whose path ends in ``.svg``; return the path.

        Raises:
            ValueError: there is no tensor of that name, or the path has another ending.
        """
        from collage_tools.pages import svg

        path = Path(path)
        if path.suffix != ".svg":
            met = f"no way to draw a {path.suffix or 'nameless'} file"
            remedy = "let the path end in .svg; a browser prints such a file as PDF"
            raise InvalidOptionError(met, where=str(path), remedy=remedy)
        row = self._row(tensor)
        titles = [f"{row.name} before", f"{row.name} after"]
        passes = [name for name, _ in self.passes]
        path.write_text(svg(self.pictures(row.name), titles, passes), encoding="utf-8")
        return path

    def _row(self, tensor: str | None) -> TensorReport:
        rows = {row.name: row for row in self.tensors}
        if tensor is None and rows:
            return self.tensors[0]
        if tensor not in rows:
            met = f"no state tensor {tensor!r} in this graph" if rows else "this graph was lowered as it was"
            remedy = did_you_mean(str(tensor), rows) if rows else self.note
            raise InvalidOptionError(met, where=self.subject, remedy=remedy)
        return rows[tensor]

    def _input_names(self) -> dict[str, str]:
        """Map graph inputs to their names in recurrences: ``p``, and ``p.lo`` for an error term."""
        names: dict[str, str] = {}
        if self.program is not None:
            inputs = zip(graph.placeholders(self.before.graph), self.program.inputs, strict=True)
            names = {node.name: info.symbol for node, info in inputs}
        for row in self.tensors:
            hi, *errors = row.inputs
            names.update({error: f"{names[hi]}{error.removeprefix(hi)}" for error in errors})
        return names
