"""docs/formats.md and its picture, of the results."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from tabulate import tabulate

from benchmarks.formats.asked import ASKED, HIGH, LOW, Results, score
from benchmarks.formats.peers import SOURCES
from benchmarks.formats.rows import OURS, TORCH

PEER = "peer, simulated"

#: Okabe-Ito, for colour-blind readers.
COLOURS = {OURS: "#0072B2", TORCH: "#000000", PEER: "#D55E00"}

INTRODUCTION = """\
# Storage formats, measured

This study measures how much AdamW loses if its state is stored in fewer bytes between two steps. It
compares the formats of this library with the formats of other projects. Written by `./dev formats`; not
to be edited.

All rows replay the same gradients from the same weights. A step loads the state, computes in float32 and
stores the state again; rows differ only in how they store it. The **error** of a row is ‖d − d64‖ /
‖d64‖: d is the net displacement of the weights from start to end, and d64 the displacement in float64. An
error of 0 is perfect, and 1 is as good as not moving at all.

- **Recorded** gradients: {recorded_steps} steps of a byte-level GPT that trains in bfloat16 on the
  sources of Python's standard library, {recorded_pieces} pieces of {recorded_length} elements, two from
  each matrix. They are replayed on weights N(0, 1) and N(0, 0.02), with learning rates of 1e-5, 1e-4 and
  1e-3.
- **Hard** gradients: {hard_steps} steps with gradients that are hard for quantised moments: nine kinds,
  with {hard_length} elements each, for each of the seeds {hard_seeds}. Weights N(0, 0.02), learning rate
  1e-3.

AdamW has beta1 = 0.9, beta2 = 0.95 or 0.999, a weight decay of 0.1, a warm-up of 50 steps and a cosine
down to 0. **Bytes** count everything that a row stores per parameter, scales included, but not the
gradient. The **largest update** is the largest magnitude of m / sqrt(v), bias corrections included: it
explodes if a second moment is rounded to zero and its first moment is not. **v: rms** and **v: mean** are
the relative errors of stored second moments in the second half of a run.

Rows of other projects are simulated in float32 on a CPU, from published papers and code: none of their
kernels has run. The moments of COAT and FP8-LM come from the plug-in `examples/peer_formats.py`. If a
program imports it, `state="coat"` and `state="fp8_lm"` work with any optimizer. Candidates are formats
that this library does not have. The study has one small model and one optimizer, and its error is not a
training loss: a larger error need not mean a worse model. Real optimizers with float32 weights, those of
other projects included, are measured in [float32 parameters](float32.md).
"""


def page(results: Results, picture_name: str | None = None) -> str:
    """The page; without a picture if there is none."""
    sections = [
        INTRODUCTION.format(**_settings(results)),
        f"{results['about']}, {results['machine']}, torch {results['torch']}, Python {results['python']}; "
        f"{results['seconds'] / 60:.0f} minutes. To reproduce it: `./dev formats`. Further numbers are "
        "in `benchmarks/results/formats/results.json`.",
        "## What is asked, and what is reached",
        _asked(results),
        "## States by bytes",
        *([f"![Error against bytes a parameter]({picture_name})"] if picture_name else []),
        "Rows are sorted by bytes. A star marks a row if no row with as many or fewer bytes has a smaller "
        "geometric mean of the errors.",
    ]
    for i, beta2 in enumerate(results["beta2s"]):
        sections += [
            f"### Recorded gradients, beta2 = {beta2}",
            _recorded(results, "states", i, starred=True),
        ]
    sections += [
        f"### Hard gradients, beta2 = {results['beta2s'][HIGH]}, the worst of the seeds",
        _hard(results, "states", starred=True),
        "## Weights alone",
        f"Moments are float32. Recorded gradients, beta2 = {results['beta2s'][LOW]}.",
        _recorded(results, "weights", LOW, starred=False),
        "## Weights over longer runs",
        "2048 weights N(0, 1), a learning rate of 1e-5 and a cosine down to 0, no weight decay. Updates are "
        "correlated in time and have a drift (`correlated_updates` in `benchmarks/formats/traces.py`).",
        _lengths(results),
        "## Moments alone",
        f"Weights are float32. beta2 = {results['beta2s'][HIGH]}.",
        "### Recorded gradients",
        _recorded(results, "moments", HIGH, starred=False),
        "### Hard gradients, the worst of the seeds",
        _hard(results, "moments", starred=False),
        "## Sources",
        "\n".join(f"- [{name}] {source}." for name, source in SOURCES.items()),
    ]
    return "\n\n".join(filled(section.strip()) for section in sections) + "\n"


def filled(text: str) -> str:
    """Paragraphs and items of lists in lines of 120 characters; tables, headings and pictures as they are."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith(("#", "|", "![")):
            paragraphs.append(paragraph)
            continue
        is_list = paragraph.startswith("- ")
        parts = paragraph[2:].split("\n- ") if is_list else [paragraph]
        first, rest = ("- ", "  ") if is_list else ("", "")
        lines = (
            textwrap.fill(
                " ".join(part.split()),
                120,
                initial_indent=first,
                subsequent_indent=rest,
                break_on_hyphens=False,
            )
            for part in parts
        )
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def _settings(results: Results) -> dict[str, Any]:
    recorded, hard = results["traces"]["recorded"], results["traces"]["hard"]
    return {
        "recorded_steps": recorded["steps"],
        "recorded_pieces": len(recorded["pieces"]),
        "recorded_length": recorded["length"],
        "hard_steps": hard["steps"],
        "hard_length": hard["length"],
        "hard_seeds": ", ".join(hard["batch"]),
    }


def _number(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:.0e}"


def _signed(value: float) -> str:
    return f"{value:+.1g}"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], texts: int) -> str:
    """Of which the first columns are texts, and the others numbers."""
    align = ["left"] * texts + ["right"] * (len(headers) - texts)
    return tabulate(list(rows), headers, tablefmt="github", disable_numparse=True, colalign=align)


def _asked(results: Results) -> str:
    rows = []
    for each in ASKED:
        reached = each.reached(results)
        verdict = "no such row yet" if reached is None else "yes" if reached <= each.most else "**no**"
        rows.append([each.what, f"{each.most:g}", "" if reached is None else _number(reached), verdict])
    return _table(["figure", "at most", "measured", "reached"], rows, 1)


def undominated(rows: Sequence[dict[str, Any]], trace: str, beta2: int) -> set[str]:
    """Names of rows whose score none of as many bytes or fewer comes below."""
    scores = {row["name"]: score(row[trace], beta2) for row in rows}
    return {
        row["name"]
        for row in rows
        if all(
            scores[other["name"]] >= scores[row["name"]] for other in rows if other["bytes"] <= row["bytes"]
        )
    }


def _names(rows: Sequence[dict[str, Any]], starred: set[str]) -> list[list[str]]:
    return [
        [
            f"{row['bytes']:.4g}",
            row["name"] + (" ★" if row["name"] in starred else ""),
            f"{PEER} [{row['whose']}]" if row["whose"] in SOURCES else row["whose"],
        ]
        for row in rows
    ]


def _sorted(rows: Sequence[dict[str, Any]], trace: str, beta2: int) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["bytes"], score(row[trace], beta2)))


def _recorded(results: Results, kind: str, beta2: int, *, starred: bool) -> str:
    rows = _sorted(results[kind], "recorded", beta2)
    stars = undominated(rows, "recorded", beta2) if starred else set()
    headers = ["bytes", "stored as", "whose", *results["traces"]["recorded"]["cells"]]
    with_moments = kind != "weights"
    if with_moments:
        headers += ["v: rms", "v: mean", "largest update"]
    table = []
    for row, name in zip(rows, _names(rows, stars), strict=True):
        found = row["recorded"]
        line = [*name, *(_number(error) for (error,) in found["whole"][beta2])]
        if with_moments:
            line += [_number(found["second_rms"][beta2]), _signed(found["second_bias"][beta2])]
            line.append(_number(max(found["largest_update"][beta2])))
        table.append(line)
    return _table(headers, table, 3)


def _hard(results: Results, kind: str, *, starred: bool) -> str:
    rows = _sorted(results[kind], "hard", HIGH)
    stars = undominated(rows, "hard", HIGH) if starred else set()
    table = []
    for row, name in zip(rows, _names(rows, stars), strict=True):
        (seeds,) = row["hard"]["pieces"][HIGH]
        worst = [max(errors) for errors in zip(*seeds, strict=True)]
        largest = max(row["hard"]["largest_update"][HIGH])
        table.append([*name, *map(_number, worst), _number(largest)])
    headers = ["bytes", "stored as", "whose", *results["traces"]["hard"]["pieces"], "largest update"]
    return _table(headers, table, 3)


def _lengths(results: Results) -> str:
    steps = results["lengths"]["steps"]
    rows = [[name, *map(_number, found)] for name, found in results["lengths"].items() if name != "steps"]
    return _table(["weights", *(f"{each} steps" for each in steps)], rows, 1)


def picture(results: Results, path: Path) -> None:
    """Error against bytes on both traces, one point a row, at the higher beta2."""
    figure = Figure(figsize=(14, 6), layout="constrained")
    rows = results["states"]
    for axes, trace in zip(figure.subplots(1, 2), ("recorded", "hard"), strict=True):
        for whose, colour in COLOURS.items():
            of = [row for row in rows if whose == (PEER if row["whose"] in SOURCES else row["whose"])]
            places = [(row["bytes"], score(row[trace], HIGH)) for row in of]
            axes.scatter(*zip(*places, strict=True), color=colour, label=whose, s=18)
        _label(axes, rows, trace)
        axes.set(yscale="log", xlabel="bytes a parameter", xlim=(3.5, 15.5))
        axes.set_title(f"{trace} gradients, beta2 = {results['beta2s'][HIGH]}")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("error of the displacement, geometric mean")
    figure.axes[0].legend(loc="lower left", fontsize=8)
    with matplotlib.rc_context({"svg.hashsalt": "formats", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _label(axes: Any, rows: Sequence[dict[str, Any]], trace: str) -> None:
    """Names beside points, in bold if starred, moved down until they cover none of those above them."""
    scores = {row["name"]: score(row[trace], HIGH) for row in rows}
    front = undominated(rows, trace, HIGH)
    line, character = (max(scores.values()) / min(scores.values())) ** (1 / 40), 0.11
    placed: list[tuple[float, float, float]] = []  # left, right and height
    for row in sorted(rows, key=lambda row: -scores[row["name"]]):
        left = row["bytes"] + 0.1
        right, height = left + character * len(row["name"]), scores[row["name"]]
        for start, end, above in sorted(placed, key=lambda each: -each[2]):
            if start < right and left < end and height / line < above < height * line:
                height = above / line
        placed.append((left, right, height))
        weight = "bold" if row["name"] in front else "normal"
        axes.text(left, height, row["name"], fontsize=7, weight=weight, va="center")
    axes.set_ylim(min(height for _, _, height in placed) / line**2, max(scores.values()) * line**2)
