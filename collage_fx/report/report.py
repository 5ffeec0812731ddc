"""Report of the treatment of state tensors, with reasons, from ``backend.report()`` or ``explain()``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from collage_fx.graph import Route
from collage_fx.metrics import Metrics
from collage_fx.report.graphs import GraphReport
from collage_fx.report.prediction import SHOWN, Updates, predicted_error
from collage_fx.report.tables import BUDGET_CAPTION, TEXT_WIDTH, budget_table, section, summary_line
from collage_fx.report.tensors import TensorReport, bytes_per_parameter


@dataclass(repr=False)
class CollageReport:
    """Report of every compilation of a backend so far. ``str(report)`` is ``report.to_text()``.

    Attributes:
        graphs: a report for each compilation, oldest first.
        metrics: metrics measured so far, which :meth:`to_html` shows.
        waiting: classes of optimizers whose steps will be compiled when they are first called.
        other_state: label of an optimizer -> bytes of its low-precision parameters' state that has no rows:
            float32 state, and state that the optimizer has quantized itself.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    metrics: Metrics = field(default_factory=lambda: Metrics({}, {}))
    waiting: list[str] = field(default_factory=list)
    other_state: dict[str, int] = field(default_factory=dict)

    @property
    def tensors(self) -> list[TensorReport]:
        """Rows of all state tensors, a row each, from the newest compilation that updates the tensor."""
        return [row for rows in self.by_subject().values() for row in rows]

    def by_subject(self) -> dict[str, list[TensorReport]]:
        """Group :attr:`tensors` by :attr:`GraphReport.subject`."""
        newest: dict[str, dict[str, TensorReport]] = {graph.subject: {} for graph in self.graphs}
        for graph in reversed(self.graphs):
            for row in graph.tensors:
                newest[graph.subject].setdefault(row.name, row)
        return {subject: list(rows.values()) for subject, rows in newest.items() if rows}

    def routes(self) -> dict[str, Route]:
        """Return the way of each subject's newest compilation through the compiler."""
        return {graph.subject: graph.route for graph in self.graphs}

    def why(self) -> str:
        """Describe the way of every compilation through the compiler, and the reasons against faster ways."""
        ways = ([f"{graph.subject}: {graph.route}", *graph.route.explained()] for graph in self.graphs)
        return "\n".join("\n  ".join(lines) for lines in ways)

    def bytes_per_parameter(self) -> dict[str, float]:
        """Compute bytes per element of low-precision parameters: parameters, state, error terms, and total.

        NaN without parameters in the report: before the first step, or float32 without packed state.
        ``state`` is all state of these parameters, without gradients, which some steps overwrite.
        """
        return bytes_per_parameter(self.tensors, sum(self.other_state.values()))

    def predicted_error(self) -> float | None:
        """Return the largest error of an optimizer's weights that is predicted for the next 600 steps.

        The error is ``|p - p64| / |p64 - p0|`` after these steps, with p64 the weights of the step in
        float64, and no error of steps before them. It follows from the formats, a sample of the weights, and
        the sizes of their updates: of the run, once an installed optimizer has taken 56 steps with a learning
        rate that does not rise, or of a trial by ``explain`` or ``bytes_per_parameter="auto"``. None if no
        sizes are known.
        """
        return max((error for error, _ in self._predictions()), default=None)

    def predictions(self) -> list[str]:
        """Describe the predicted errors of optimizers from 0.0001 on, and the sizes that they follow from."""
        return [updates.described(error) for error, updates in self._predictions() if error >= SHOWN]

    def _predictions(self) -> Iterator[tuple[float, Updates]]:
        updates = {graph.subject: graph.updates for graph in self.graphs if graph.tensors}
        for subject, rows in self.by_subject().items():
            if (error := predicted_error(updates[subject], rows)) is not None:
                yield error, updates[subject]

    def _other_state_of(self, subject: str) -> int:
        """Sum the bytes without rows of the optimizers that a subject names."""
        return sum(self.other_state.get(label, 0) for label in subject.split(", "))

    def __repr__(self) -> str:
        """Return a line; ``print(report)`` shows the tables."""
        subjects = self.by_subject().items()
        parts = [f"{name}: {summary_line(rows, self._other_state_of(name))}" for name, rows in subjects]
        return f"<CollageReport: {' '.join(parts) or 'no tensors'}>"

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, full: bool = False) -> str:
        """Write the report as text of at most 100 columns.

        Args:
            full: whether each tensor has a row and no text is cut. Otherwise tensors that differ only in name
                and shape share a row, and texts of more than three lines are cut.
        """
        return self._in_sections(full=full, markdown=False)

    def to_markdown(self, *, full: bool = False) -> str:
        """Write the report as Markdown, for an issue or a pull request."""
        return self._in_sections(full=full, markdown=True)

    def to_html(self, *, kernels: bool = False) -> str:
        """Write a page without network access: tables, typeset recurrences, graphs before and after.

        Tensors that were treated alike share a drawing and the changes by each pass.

        Args:
            kernels: whether to show the C++ and Triton code of the kernels. A report of ``explain`` has none.
        """
        from collage_tools.pages import html_page

        subjects = {name: (rows, self._other_state_of(name)) for name, rows in self.by_subject().items()}
        return html_page(self.graphs, subjects, self._notes(), kernels=kernels, metrics=self.metrics)

    def save_html(self, path: str | Path, *, kernels: bool = False) -> Path:
        """Write :meth:`to_html` into a file and return its path."""
        (path := Path(path)).write_text(self.to_html(kernels=kernels), encoding="utf-8")
        return path

    def _notes(self) -> list[str]:
        remedy = "call optimizer.step() if it is installed, else what torch.compile returned"
        waiting = (f"{name}: not compiled yet: {remedy}" for name in self.waiting)
        return list(dict.fromkeys([*(graph.note for graph in self.graphs if graph.note), *waiting]))

    def _in_sections(self, *, full: bool, markdown: bool) -> str:
        routes = self.routes()
        budgets = {graph.subject: graph.budgets for graph in self.graphs}
        sections = []
        for subject, rows in self.by_subject().items():
            parts = [section(subject, rows, self._other_state_of(subject), full=full, markdown=markdown)]
            if budgets[subject]:
                compensates = any(row.compensated for row in rows)
                style = "github" if markdown else "simple"
                table = budget_table(budgets[subject], style, compensates=compensates)
                parts += [table, BUDGET_CAPTION]
            if routes[subject].unit == "operation by operation":
                parts.append(routes[subject].sentence())
            sections.append("\n\n".join(parts))
        nothing = "nothing has been compiled yet: the report fills at the first call of the step"
        predictions = [textwrap.fill(each, TEXT_WIDTH) for each in self.predictions()]
        return "\n\n".join([*sections, *predictions, *self._notes()]) or nothing
