"""Plots of metrics; they need matplotlib (``pip install collage-fx[plot]``)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from collage_fx.errors import InvalidOptionError
from collage_fx.metrics import Metrics, UpdateQuality

#: Okabe and Ito's, for colour-blind readers; line styles tell the curves apart without any.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":", "-.")


def plot(metrics: Metrics, path: str | Path, *, depth: int | None = None) -> Path:
    """Plot EDQ ratio and share of lost updates over the steps, and sizes of updates, of parameters.

    The curves are those of module prefixes: above for hi + lo, which the optimizer goes on from, below for hi
    alone, which the model computes with; without error terms these are one. Under them is how large the
    updates of the first and of the last measured step are against half an ulp of their weights: a plain
    low-precision weight loses what is less.

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
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3)  # what is written in it stands above the bars
    axes.legend(fontsize=11, loc="upper right")
    axes.set_title("Updates by size: share of them in each octave (of a sample)", fontsize=13)
    axes.set_xlabel("size of an update, in halves of an ulp of its weight", fontsize=12)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=11)
