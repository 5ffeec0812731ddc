"""docs/formats.md and its picture, of the results."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.formats import asked
from benchmarks.formats.asked import ASKED, HIGH, LOW, Results, score
from benchmarks.formats.labels import leader, placed
from benchmarks.formats.peers import SOURCES
from benchmarks.formats.rows import CANDIDATE, OURS, TORCH
from benchmarks.table import markdown

PEER = "peer, simulated"

#: Recorded gradients whose columns are in the file of results alone.
LEFT_OUT = "lr 1e-3"

#: Okabe-Ito, for colour-blind readers.
COLOURS = {OURS: "#0072B2", TORCH: "#000000", PEER: "#D55E00"}

#: Ends of the axis of bytes.
XMIN, XMAX = 3.5, 15.8

INTRODUCTION = """\
# Storage formats, measured

How much does AdamW lose if its state is stored in fewer bytes between two steps? In short:

- **12 bytes** (`full`): float32 numbers in 16-bit tensors. The largest error on recorded gradients is
  {full}, float32's {float32}.
- **8 bytes** (`block16`): at most {block16}. Only gradients of kind {hard_worst} are hard for it.
- **5.1 bytes** (`block8` and `byte`): at most {block8}. Plain bf16, with 6 bytes, has {none}.

All rows replay the same gradients from the same weights. They differ only in how they store the state. The
**error** is ‖d − d64‖ / ‖d64‖, with d the displacement of the weights and d64 that in float64: 0 is
perfect, 1 is as good as not moving at all, and more is noise. It is not a training loss: a larger error
need not mean a worse model.

This is about formats alone: first moments are dithered in all rows of ours, as by `rounding="dither"`. The
default rounding [repays](strategies.md#what-has-no-error-terms) their errors, so that those of 10 bytes are
smaller ([measured](beyond-fp32.md))."""

METHOD = """\
- **Recorded** gradients: {recorded_steps} steps of a byte-level GPT that trains in bfloat16 on the sources
  of Python's standard library, {recorded_pieces} pieces of {recorded_length} elements, two from each
  matrix; replayed on weights N(0, 1) and N(0, 0.02), with learning rates of 1e-5, 1e-4 and 1e-3.
- **Hard** gradients: {hard_steps} steps of nine kinds that are hard for few bits ({kinds}), {hard_length}
  elements each, seeds {hard_seeds}. Weights N(0, 0.02), learning rate 1e-3. Shown is the worst of kinds and
  seeds.
- AdamW has beta1 = 0.9, beta2 = 0.999, a weight decay of 0.1, a warm-up of 50 steps and a cosine down to 0.
  A step loads the state, computes in float32 and stores the state again.
- **bytes** count everything that a row stores per parameter, scales included, without the gradient. The
  **largest update** is the largest magnitude of m / sqrt(v): it explodes if a second moment is rounded to
  zero and its first moment is not. **v: rms** is the relative error of stored second moments in the second
  half of a run.
- Rows of other projects are simulated in float32 on a CPU, from published papers and code: none of their
  kernels has run. The moments of COAT and FP8-LM are the plug-in `examples/peer_formats.py`. Real
  optimizers, those of other projects included, are measured in [float32 parameters](float32.md).
- Learning rates of 1e-3, beta2 = 0.95, candidates of formats, each kind of hard gradients, and further
  numbers are in `benchmarks/results/formats/results.json`."""


def page(results: Results, picture_name: str | None = None) -> str:
    """The page; without a picture if there is none."""
    settings = _settings(results)
    sections = [
        INTRODUCTION.format(**settings),
        "## States by bytes",
        "A star marks a row if no row with as many or fewer bytes has a smaller geometric mean of the errors "
        "on recorded gradients, those with a learning rate of 1e-3 included.",
        _table_of(results, "states", starred=True),
        *([f"![Error against bytes a parameter]({picture_name})"] if picture_name else []),
        "## Weights alone",
        "Moments are float32. beta2 = " + f"{results['beta2s'][LOW]}.",
        _table_of(results, "weights", LOW),
        "## Weights over longer runs",
        "2048 weights N(0, 1), a learning rate of 1e-5 and a cosine down to 0, no weight decay. Updates are "
        "correlated in time and have a drift (`correlated_updates` in `benchmarks/formats/traces.py`).",
        _lengths(results),
        "## Moments alone",
        "Weights are float32.",
        _table_of(results, "moments"),
        "## What is promised, and what is reached",
        _asked(results),
        "Where `light` misses its figure, `block16` reaches it: the same bytes, with scales.",
        "## How it is measured",
        METHOD.format(**settings),
        f"{results['about']}, {results['machine']}, torch {results['torch']}, Python {results['python']}; "
        f"{results['seconds'] / 60:.0f} minutes. Written by `./dev formats`; not to be edited.",
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
        "kinds": ", ".join(hard["pieces"]),
        "hard_worst": _worst_kind(results, "block16, exact"),
        **{
            key: _number(
                max(found for (found,) in asked.row(results, "states", name)["recorded"]["whole"][HIGH])
            )
            for key, name in {
                "full": "full, exact",
                "float32": "float32",
                "block16": "block16, exact",
                "block8": "block8, byte",
                "none": "none",
            }.items()
        },
    }


def _number(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:.0e}"


def _asked(results: Results) -> str:
    rows = []
    for each in ASKED:
        reached = each.reached(results)
        verdict = "no such row yet" if reached is None else "yes" if reached <= each.most else "**no**"
        rows.append([each.what, f"{each.most:g}", "" if reached is None else _number(reached), verdict])
    return markdown(["figure", "at most", "measured", "reached"], rows, 1)


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
            f"[{row['whose']}]" if row["whose"] in SOURCES else row["whose"],
        ]
        for row in rows
    ]


def _sorted(rows: Sequence[dict[str, Any]], trace: str, beta2: int) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["bytes"], score(row[trace], beta2)))


def _worst_of_kinds(state: dict[str, Any]) -> list[float]:
    """The error of each kind of hard gradients, the worst of the seeds."""
    (seeds,) = state["hard"]["pieces"][HIGH]
    return [max(errors) for errors in zip(*seeds, strict=True)]


def _worst_kind(results: Results, name: str) -> str:
    """Return the hard gradients with which a state loses most."""
    found = _worst_of_kinds(asked.row(results, "states", name))
    errors = dict(zip(results["traces"]["hard"]["pieces"], found, strict=True))
    kind = max(errors, key=lambda each: errors[each])
    return f'"{kind}" (error {_number(errors[kind])})'


def _table_of(results: Results, kind: str, beta2: int = HIGH, *, starred: bool = False) -> str:
    """Errors on recorded gradients; of moments also the worst on hard ones."""
    rows = [row for row in _sorted(results[kind], "recorded", beta2) if row["whose"] != CANDIDATE]
    stars = undominated(rows, "recorded", beta2) if starred else set()
    cells = results["traces"]["recorded"]["cells"]
    shown = [i for i, cell in enumerate(cells) if not cell.endswith(LEFT_OUT)]
    headers = ["bytes", "stored as", "whose", *(cells[i] for i in shown)]
    headers += {
        "weights": [],
        "states": ["hard: worst"],
        "moments": ["hard: worst", "largest update", "v: rms"],
    }[kind]
    table = []
    for row, name in zip(rows, _names(rows, stars), strict=True):
        found = row["recorded"]
        line = [*name, *(_number(found["whole"][beta2][i][0]) for i in shown)]
        if kind != "weights":
            line.append(_number(max(_worst_of_kinds(row))))
        if kind == "moments":
            line.append(_number(max(row["hard"]["largest_update"][HIGH])))
            line.append(_number(found["second_rms"][beta2]))
        table.append(line)
    return markdown(headers, table, 3)


def _lengths(results: Results) -> str:
    steps = results["lengths"]["steps"]
    rows = [[name, *map(_number, found)] for name, found in results["lengths"].items() if name != "steps"]
    return markdown(["weights", *(f"{each} steps" for each in steps)], rows, 1)


def picture(results: Results, path: Path) -> None:
    """Write the picture of a run to a file."""
    with matplotlib.rc_context({"svg.hashsalt": "formats", "svg.fonttype": "none"}):
        drawing(results).savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def drawing(results: Results) -> Figure:
    """Error against bytes on both traces, one point a row, at the higher beta2."""
    figure = Figure(figsize=(10, 15), layout="constrained")
    rows = results["states"]
    for axes, trace in zip(figure.subplots(2, 1), ("recorded", "hard"), strict=True):
        for whose, colour in COLOURS.items():
            of = [row for row in rows if whose == (PEER if row["whose"] in SOURCES else row["whose"])]
            places = [(row["bytes"], score(row[trace], HIGH)) for row in of]
            axes.scatter(*zip(*places, strict=True), color=colour, label=whose, s=24)
        _label(axes, rows, trace)
        axes.set(yscale="log", xlabel="bytes a parameter", xlim=(XMIN, XMAX))
        axes.set_title(f"{trace} gradients, beta2 = {results['beta2s'][HIGH]}")
        axes.grid(alpha=0.3)
        axes.set_ylabel("error of the displacement, geometric mean")
    figure.axes[0].legend(loc="lower left", fontsize=10)
    return figure


def _label(axes: Any, rows: Sequence[dict[str, Any]], trace: str) -> None:
    """Write names beside points, in bold if starred: clear of points, names and lines."""
    scores = {row["name"]: score(row[trace], HIGH) for row in rows}
    front = undominated(rows, trace, HIGH)
    line, character = math.log(max(scores.values()) / min(scores.values())) / 42, 0.115
    points = {row["name"]: (row["bytes"], math.log(scores[row["name"]]) / line) for row in rows}
    places = placed(points, {name: character * len(name) for name in points}, XMIN)
    for row in rows:
        name, place = row["name"], places[row["name"]]
        whose = PEER if row["whose"] in SOURCES else row["whose"]
        axes.annotate(
            name,
            (row["bytes"], scores[name]),
            (place.end, math.exp(place.y * line)),
            fontsize=9.5,
            weight="bold" if name in front else "normal",
            color=COLOURS[whose],
            ha="left" if place.is_right else "right",
            va="center",
            # White, so that lines of the grid end at names.
            bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none"},
            arrowprops={
                "arrowstyle": "-",
                "color": COLOURS[whose],
                "linewidth": 0.5,
                "shrinkA": 0,
                "shrinkB": 2,
                "relpos": (0 if place.is_right else 1, 0.5),
            }
            if leader(points[name], place)
            else None,
        )
    ends = [y for _, y in points.values()] + [place.y for place in places.values()]
    axes.set_ylim(math.exp((min(ends) - 2) * line), math.exp((max(ends) + 2) * line))
