"""The report of what was done to an optimizer's state tensors, and why.

The answer of ``backend.report()`` and ``explain()``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from collage_fx.graph import Route
from collage_fx.metrics import Metrics
from collage_fx.report.graphs import GraphReport
from collage_fx.report.page import html_page
from collage_fx.report.tables import BUDGET_CAPTION, budget_table, markdown_section, text_section
from collage_fx.report.tensors import TensorReport, bytes_per_parameter


@dataclass
class CollageReport:
    """The report of every compilation of a backend so far. ``str()`` of it is :meth:`to_text`, folded.

    Attributes:
        graphs: one per compilation, oldest first.
        metrics: what has been measured so far; shown by :meth:`to_html`.
        waiting: the classes of optimizers whose steps are to be compiled, and have not been called.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    metrics: Metrics = field(default_factory=lambda: Metrics({}, {}))
    waiting: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> list[TensorReport]:
        """One row per state tensor, as it was treated by the newest compilation that updates it."""
        return [row for rows in self.by_subject().values() for row in rows]

    def by_subject(self) -> dict[str, list[TensorReport]]:
        """The :attr:`tensors` by whose step it is (:attr:`GraphReport.subject`)."""
        newest: dict[str, dict[str, TensorReport]] = {graph.subject: {} for graph in self.graphs}
        for graph in reversed(self.graphs):
            for row in graph.tensors:
                newest[graph.subject].setdefault(row.name, row)
        return {subject: list(rows.values()) for subject, rows in newest.items() if rows}

    def routes(self) -> dict[str, Route]:
        """The way that the newest compilation of each subject took through the compiler."""
        return {graph.subject: graph.route for graph in self.graphs}

    def why(self) -> str:
        """Every compilation's way through the compiler, and why it did not take each faster one."""
        ways = [
            "\n".join([f"{graph.subject}: {graph.route}", *(f"  {line}" for line in graph.route.explained())])
            for graph in self.graphs
        ]
        return "\n".join(ways)

    def bytes_per_parameter(self) -> dict[str, float]:
        """Bytes per element of the low-precision parameters, by what they are for, and in ``total``.

        ``state`` counts the low-precision state, without gradients, which some steps overwrite; wider state
        tensors are not collage_fx's to report on, apart from their sum in :attr:`GraphReport.wider_bytes`.
        """
        return bytes_per_parameter(self.tensors)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, full: bool = False) -> str:
        """A table of at most 100 columns.

        Args:
            full: one row per tensor and every recurrence to its end. Otherwise tensors that differ in name
                and shape alone share a row, and what takes more than three lines is cut.
        """
        return self._in_sections(text_section, full=full, markdown=False)

    def to_markdown(self, *, full: bool = False) -> str:
        """The table as Markdown, for an issue or a pull request."""
        return self._in_sections(markdown_section, full=full, markdown=True)

    def to_html(self, *, kernels: bool = False) -> str:
        """One HTML file that needs no network: tables, typeset recurrences, graphs before and after.

        Of tensors that were treated alike, one is drawn, with what each pass changed in its update.

        Args:
            kernels: show the code that Inductor generated too. A report of ``explain`` has none.
        """
        return html_page(self.graphs, self.by_subject(), self._notes(), kernels=kernels, metrics=self.metrics)

    def save_html(self, path: str | Path, *, kernels: bool = False) -> Path:
        """Write :meth:`to_html` into a file; returns its path."""
        path = Path(path)
        path.write_text(self.to_html(kernels=kernels), encoding="utf-8")
        return path

    def _notes(self) -> list[str]:
        waiting = (f"{name}: not compiled yet: call what torch.compile returned" for name in self.waiting)
        return list(dict.fromkeys([*(graph.note for graph in self.graphs if graph.note), *waiting]))

    def _in_sections(self, section: Callable[..., str], *, full: bool, markdown: bool) -> str:
        routes = self.routes()
        budgets = {graph.subject: graph.budgets for graph in self.graphs}
        sections = []
        for subject, rows in self.by_subject().items():
            parts = [section(subject, rows, full=full)]
            if budgets[subject]:
                table = budget_table(budgets[subject], "github" if markdown else "simple")
                parts += [table, BUDGET_CAPTION]
            sections.append("\n\n".join([*parts, routes[subject].sentence()]))
        nothing = "nothing has been compiled yet: the report fills at the first call of the step"
        return "\n\n".join([*sections, *self._notes()]) or nothing
