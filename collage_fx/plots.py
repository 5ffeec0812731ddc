"""Metrics as a picture; needs matplotlib (``pip install collage-fx[plot]``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from collage_fx.errors import InvalidOptionError
from collage_fx.metrics import Metrics, UpdateQuality

__all__ = ["COLOURS", "LINES", "plot"]

#: Okabe and Ito's, for colour-blind readers; line styles tell the curves apart without any.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":", "-.")


def plot(metrics: Metrics, path: str | Path, *, depth: int | None = None) -> Path:
    """EDQ ratio and share of lost updates over the steps, of parameters, by module prefix.

    Above hi + lo, which the optimizer goes on from, below hi alone, which the model computes with.

    Args:
        metrics: what has been measured.
        path: its ending says what is written: .png, .svg or .pdf.
        depth: how many parts of module names tell curves apart. If None, as many as leave seven curves.

    Returns:
        the path.

    Raises:
        ImportError: matplotlib is not there.
        ValueError: nothing has been measured.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'collage-fx[plot]'") from error
    if not metrics:
        raise InvalidOptionError(
            "nothing has been measured",
            where="plot",
            remedy="use CollageBackend(metrics=True), and plot after a step that is measured",
        )
    figure = Figure(figsize=(12, 8), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    columns = (
        ("EDQ ratio: how much of each update arrives", "edq_ratio"),
        ("Lost: share of the updates that changed nothing", "lost_share"),
    )
    for row, (suffix, whose) in enumerate((("", "hi + lo"), ("_hi", "hi alone"))):
        for column, (title, name) in enumerate(columns):
            axes = panels[row][column]
            _draw(axes, metrics, name + suffix, _depth(metrics) if depth is None else depth)
            axes.set_title(f"{title}\n{whose}", fontsize=13)
            if row:
                axes.set_xlabel("step", fontsize=12)
    panels[0][0].legend(fontsize=11)
    figure.savefig(path, dpi=100)
    return Path(path)


def _depth(metrics: Metrics) -> int:
    """The most parts of module names that leave no more curves than colours."""
    modules = {t.module for t in metrics.tensors.values() if t.kind == "parameter"}
    deepest = max((module.count(".") + 1 for module in modules), default=1)
    prefixes = [{".".join(m.split(".")[:depth]) for m in modules} for depth in range(deepest, 0, -1)]
    found = (deepest - i for i, names in enumerate(prefixes) if len(names) <= len(COLOURS))
    return next(found, 0)


def _draw(axes: Any, metrics: Metrics, name: str, depth: int) -> None:
    curves: dict[str, list[tuple[int, UpdateQuality]]] = {}
    for step, modules in metrics.by_module(depth).items():
        for module, quality in modules.items():
            curves.setdefault(module, []).append((step, quality))
    for i, (module, points) in enumerate(curves.items()):
        axes.plot(
            [step for step, _ in points],
            [getattr(quality, name) for _, quality in points],
            label=module or "all parameters",
            color=COLOURS[i % len(COLOURS)],
            linestyle=LINES[i % len(LINES)],
            linewidth=2,
            marker="o" if len(points) < 3 else None,
        )
    axes.set_ylim(-0.02, 1.05 if name.startswith("lost") else None)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=11)
