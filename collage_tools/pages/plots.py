"""Plots of metrics; they need matplotlib (``pip install collage-fx[plot]``)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from collage_fx.errors import InvalidOptionError
from collage_fx.metrics import Metrics, UpdateQuality

#: Okabe and Ito's palette, for colour-blind readers. Line styles differ, too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":", "-.")


def plot(metrics: Metrics, path: str | Path, *, depth: int | None = None) -> Path:
    """Plot EDQ ratio, share of lost updates and sizes of updates of parameters, over the steps.

    There is a curve for each module prefix: above for hi + lo, which the optimizer continues from, below for
    hi alone, which the model computes with (one row without error terms). A histogram below shows the sizes
    of updates in the first and the last measured step against half an ulp of their weights. A plain
    low-precision weight loses smaller updates.

    Args:
        metrics: metrics measured so far.
        path: path of the file; the ending gives its kind: .png, .svg or .pdf.
        depth: number of parts of module names that curves are grouped by; None = the most with up to seven
            curves.

    Returns:
        the path.

    Raises:
        ImportError: matplotlib is not installed.
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
    whose = {"": "hi + lo", "_hi": "hi alone"} if _has_error_terms(metrics) else {"": "as stored"}
    figure: Any = Figure(figsize=(12, 4 + 4 * len(whose)), layout="constrained")
    curves, histogram = figure.subfigures(2, 1, height_ratios=(len(whose), 1))
    panels = curves.subplots(len(whose), 2, sharex=True, squeeze=False)
    columns = (
        ("EDQ ratio: how much of each update arrives", "edq_ratio"),
        ("Lost: share of the updates that changed nothing", "lost_share"),
    )
    for row, (suffix, of_what) in enumerate(whose.items()):
        for column, (title, name) in enumerate(columns):
            axes = panels[row][column]
            _draw(axes, metrics, name + suffix, _depth(metrics) if depth is None else depth)
            axes.set_title(f"{title}\n{of_what}", fontsize=13)
    for axes in panels[-1]:
        axes.set_xlabel("step", fontsize=12)
    panels[0][0].legend(fontsize=11)
    _draw_sizes(histogram.subplots(), metrics)
    figure.savefig(path, dpi=100)
    return Path(path)


def _has_error_terms(metrics: Metrics) -> bool:
    return any(quality.held for values in metrics.values() for quality in values.values())


def _depth(metrics: Metrics) -> int:
    """Return the largest number of parts of module names with no more curves than colours."""
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
    axes.set_ylim(-0.02, max(1.05, 0 if name.startswith("lost") else axes.get_ylim()[1]))
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=11)


def _draw_sizes(axes: Any, metrics: Metrics) -> None:
    overall = metrics.overall()
    edges = UpdateQuality.size_edges
    for i, step in enumerate(dict.fromkeys((min(overall), max(overall)))):
        quality = overall[step]
        _, *octaves = quality.sizes
        shares = [count / max(math.fsum(octaves), 1) for count in octaves]
        colour = COLOURS[i]
        axes.stairs(shares, edges, color=colour, alpha=0.25, fill=True)
        axes.stairs(
            shares,
            edges,
            label=f"step {step}: {quality.small_share:.0%} are less than half an ulp",
            color=colour,
            linestyle=LINES[i],
            linewidth=2,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(edges[::4])
    axes.set_xlim(edges[0], edges[-1])
    axes.axvline(1, color="black", linewidth=2)
    top = {"transform": axes.get_xaxis_transform(), "va": "top", "fontsize": 12}
    axes.text(2**-0.3, 0.96, "a plain bf16 or fp16 weight loses these", ha="right", **top)
    axes.text(2**0.3, 0.96, "these change it", ha="left", **top)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3)  # room for text above the bars
    axes.legend(fontsize=11, loc="upper right")
    axes.set_title("Updates by size: share of them in each octave (of a sample)", fontsize=13)
    axes.set_xlabel("size of an update, in halves of an ulp of its weight", fontsize=12)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=11)
