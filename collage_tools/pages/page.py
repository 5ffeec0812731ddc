"""Report as one HTML file, without network, scripts or fonts, which is also well-formed XML.

Tensors that were treated alike share a drawing, that of the first: hundreds of tensors make a page of a few
drawings.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import get_args

import torch
from tabulate import tabulate

from collage_fx.choices import Strategy
from collage_fx.metrics import Metrics, UpdateQuality
from collage_fx.numerics import ERROR_FORMATS, format_named
from collage_fx.pipeline import Stage
from collage_fx.report import (
    BUDGET_CAPTION,
    GraphReport,
    TensorReport,
    Treatment,
    budget_table,
    bytes_per_parameter,
    plainly,
    summary_line,
    treatments,
)
from collage_tools.pages.mathml import recurrence_mathml
from collage_tools.pages.pictures import Picture, pass_color
from collage_tools.pages.plots import COLOURS
from collage_tools.pages.svg import svg

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; margin: 1.5rem auto; max-width: 1500px;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.25rem; margin-top: 2.2rem; }
h3 { font-size: 1.05rem; margin-bottom: .2rem; }
h4 { font-size: .95rem; margin: .3rem 0; }
table { border-collapse: collapse; display: block; max-width: 100%; overflow-x: auto; }
td, th { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
td[style*="right"] { font-variant-numeric: tabular-nums; white-space: nowrap; }
td:first-child:has(+ td[style*="right"]) { white-space: nowrap; }
.treated td { border-bottom: none; overflow-wrap: anywhere; }
.treated td:first-child { font-weight: bold; }
.why td { color: #444; font-size: .9rem; padding-top: 0; }
.formula { overflow-x: auto; padding: .4rem 0; }
.formula math { font-size: 1.3rem; width: fit-content; margin: 0; }
details { overflow-x: auto; }
details svg { max-width: 100%; height: auto; }
.names { color: #555; font-size: .9rem; }
.swatch { border: 1px solid #444; padding: 0 .4rem; }
.key { display: inline-block; margin-right: 1rem; }
.key .swatch { margin-right: .3rem; }
.bar { display: grid; grid-template-columns: 6.5rem 1fr 5rem; gap: .6rem; align-items: center;
       margin: .3rem 0; }
.bar > div { display: flex; height: 1.1rem; }
.bar > :last-child { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f6f6f6; padding: .6rem; overflow: auto; max-height: 40rem; font-size: 12px;
      line-height: 1.35; }
ins { background: #d9f2df; text-decoration: none; }
del { background: #fbdcdc; text-decoration: none; }
summary { cursor: pointer; padding: .2rem 0; }
@media (max-width: 700px) {
  body { font-size: 14px; margin: .5rem auto; padding: 0 .6rem; }
  details svg { max-width: none; }
  .treatments, .treatments tbody, .treatments tr, .treatments td { display: block; }
  .treatments thead { display: none; }
  .treatments td { padding: .1rem .3rem; border: none; text-align: left; }
  .treatments .treated td:not(:first-child)::before { content: attr(data-head) ": "; color: #666; }
  .treatments .why { border-bottom: 1px solid #ddd; padding-bottom: .4rem; margin-bottom: .4rem; }
}
"""

#: Content security policy: browsers load and run nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(
    graphs: Sequence[GraphReport],
    by_subject: Mapping[str, tuple[Sequence[TensorReport], int]],
    notes: Sequence[str],
    *,
    kernels: bool,
    metrics: Metrics,
) -> str:
    """Write the report as an HTML page.

    Args:
        graphs: reports of compilations, oldest first.
        by_subject: rows of tables, and bytes of state without rows, by subject.
        notes: why other graphs were lowered without changes.
        kernels: whether to show the generated code.
        metrics: metrics measured so far.
    """
    body = "".join(
        part
        for subject, (rows, other_state) in by_subject.items()
        for part in _section(graphs, subject, rows, other_state, kernels=kernels, metrics=metrics)
    )
    body += "".join(f"<p>{escape(note)}</p>" for note in notes)
    return html_document(
        ", ".join(by_subject) or "report",
        "What collage_fx did",
        body or "<p>Nothing has been compiled yet.</p>",
    )


def html_document(title: str, heading: str, body: str) -> str:
    """Put the body of a page, as HTML, into a document that needs nothing else."""
    return (
        '<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml" lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"/>'
        '<meta name="viewport" content="width=device-width"/>'
        f"<title>collage_fx: {escape(title)}</title>"
        f"<style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(heading)}</h1>{body}"
        f"<p class='names'>torch {escape(torch.__version__)}</p></body></html>\n"
    )


def _section(
    graphs: Sequence[GraphReport],
    subject: str,
    rows: Sequence[TensorReport],
    other_state: int,
    *,
    kernels: bool,
    metrics: Metrics,
) -> Iterator[str]:
    """Write the section of one subject: table, bytes, metrics, passes, each treatment, code."""
    own = [graph for graph in graphs if graph.subject == subject and graph.tensors]
    groups = treatments(rows)
    newest = own[-1]
    yield f"<h2>{escape(subject)}</h2><p>{escape(summary_line(rows, other_state))}</p>"
    yield _treatment_table(groups)
    formats = [row.error_format for row in rows]
    if newest.budgets:
        compensates = any(row.compensated for row in rows)
        table = budget_table(newest.budgets, "html", compensates=compensates)
        yield f"<h3>Budgets</h3><p class='names'>{BUDGET_CAPTION}</p>{table}"
    else:
        yield f"<h3>Bytes per parameter</h3>{_memory_table(own, rows, other_state)}"
        formats += ERROR_FORMATS
    yield _legend(formats)
    yield from _metrics(metrics, subject)
    yield f"<h3>Passes</h3>{_passes(newest)}"
    stages = {id(graph): [Stage("captured", "", graph.before.graph), *graph.stages()] for graph in own}
    for number, group in enumerate(groups, 1):
        graph = next(
            graph for graph in reversed(own) if group.example.name in {row.name for row in graph.tensors}
        )
        yield from _treatment(number, group, graph, stages[id(graph)], is_open=number == 1)
    if kernels:
        yield from _code(newest)


def html_table(rows: Iterable[Sequence[object]], headers: Sequence[str], numbers: int) -> str:
    """Write a table, of which the last ``numbers`` columns are numbers."""
    align = ["left"] * (len(headers) - numbers) + ["right"] * numbers
    return tabulate(rows, headers=headers, tablefmt="html", colalign=align, disable_numparse=True)


def bars(sizes: Mapping[str, Mapping[str, float]], *, line: float, width: float, unit: str) -> str:
    """Draw a bar of the same parts for each name, with their sum, a limit as a line, and a legend of colours.

    Args:
        sizes: name of a bar -> name of a part -> its size.
        line: size at which all bars have a line.
        width: least size that is as wide as the page.
        unit: unit of the sizes.
    """
    scale = 100 / max(width, *(sum(parts.values()) for parts in sizes.values()))
    colours = dict(zip(next(iter(sizes.values())), COLOURS, strict=False))
    legend = "".join(
        f"<span class='key'><span class='swatch' style='background: {colour}'></span>{escape(part)}</span>"
        for part, colour in colours.items()
    )
    body = f"<p>{legend}<span class='key'>black line: {line:.4g} {unit}</span></p>"
    marked = f"linear-gradient(#000, #000) {line * scale:.2f}% / 2px 100% no-repeat #eee"
    for name, parts in sizes.items():
        body += f"<div class='bar'><span>{escape(name)}</span><div style='background: {marked}'>"
        for part, size in parts.items():
            style = f"width: {size * scale:.2f}%; background: {colours[part]}"
            body += f"<span title='{escape(part)}: {size:.2f} {unit}' style='{style}'></span>"
        body += f"</div><span>{sum(parts.values()):.2f} {unit}</span></div>"
    return body


def _treatment_table(groups: Sequence[Treatment]) -> str:
    """Write two rows for each treatment: its cells, and the reasons below them, as wide as the table."""
    plain = plainly([row for group in groups for row in group.rows])
    heads = ("", "tensor", "shape", "kind", plain, "here", "bytes")
    body = ""
    for i, group in enumerate(groups, 1):
        row = group.example
        cells = i, group.what, group.layout, row.kind.value, row.verdict, row.here, f"{group.bytes:,}"
        named = zip(heads, cells, strict=True)
        shown = "".join(f"<td data-head='{head}'>{escape(str(cell))}</td>" for head, cell in named)
        why = f"{plain}: {escape(row.reason)}<br/>here: {escape(row.selection)}"
        body += f"<tr class='treated'>{shown}</tr><tr class='why'><td></td>"
        body += f"<td colspan='{len(heads) - 1}'>{why}</td></tr>"
    head = "".join(f"<th>{head}</th>" for head in heads)
    return f"<table class='treatments'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _memory_table(graphs: Sequence[GraphReport], rows: Sequence[TensorReport], other_state: int) -> str:
    """Write a table of bytes per parameter: as compiled, and under every strategy."""
    lines = [("as compiled", f"{bytes_per_parameter(rows, other_state)['total']:.4g}")]
    default, *others = ERROR_FORMATS
    choices: dict[str, tuple[Strategy, str]] = {
        strategy: (strategy, default) for strategy in get_args(Strategy)
    }
    choices |= {f"full, in {name}": ("full", name) for name in others}
    of_graphs = [graph.rows_under(list(choices.values())) for graph in graphs]
    for label, *of_choice in zip(choices, *of_graphs, strict=True):
        newest = {row.name: row for of_graph in of_choice for row in of_graph}
        total = bytes_per_parameter(list(newest.values()), other_state)["total"]
        lines.append((label, f"{total:.4g}"))
    return html_table(lines, ("strategy", "bytes"), 1)


def _legend(names: Iterable[str]) -> str:
    """Say what formats hold, of which the empty name is none."""
    formats = [each for each in map(format_named, dict.fromkeys(names)) if each is not None]
    text = "; ".join(f"{each.name}: {each.precision}" for each in formats)
    return f"<p class='names'>{escape(text)}</p>"


#: Columns of the table of updates: heading -> attribute, a share or a ratio.
MEASURED = {
    "EDQ ratio": "edq_ratio",
    "of hi alone": "edq_ratio_hi",
    "less than half an ulp": "small_share",
    "updates lost": "lost_share",
    "from hi alone": "lost_share_hi",
    "error terms not zero": "error_share",
}


def _metrics(metrics: Metrics, subject: str) -> Iterator[str]:
    """Write the metrics of the last measured step as a table by kind of tensor and module."""
    by_step = metrics.by(lambda tensor: (tensor.step_of == subject, tensor.kind, tensor.module), None)
    measured = [step for step, values in by_step.items() if any(key[0] for key in values)]
    if not measured:
        return
    rows = [
        (kind, module or "-", *_measured(quality))
        for (is_own, kind, module), quality in by_step[measured[-1]].items()
        if is_own
    ]
    yield f"<h3>Updates of step {measured[-1]}</h3>"
    yield html_table(rows, ("tensors", "module", *MEASURED), len(MEASURED))


def _measured(quality: UpdateQuality) -> Iterator[str]:
    for name, attribute in MEASURED.items():
        is_ratio = name.startswith(("EDQ", "of"))
        yield format(getattr(quality, attribute), ".4f" if is_ratio else ".1%")


def _passes(graph: GraphReport) -> str:
    names = [name for name, _ in graph.passes]
    items = "".join(
        f"<li><span class='swatch' style='background: {pass_color(name, names)}'>{escape(name)}</span> "
        f"{escape(summary)}</li>"
        for name, summary in graph.passes
    )
    return f"<ol>{items}</ol>"


def _treatment(
    number: int, group: Treatment, graph: GraphReport, stages: Sequence[Stage], *, is_open: bool
) -> Iterator[str]:
    row = group.example
    passes = [name for name, _ in graph.passes]
    names = ", ".join(group.names)
    yield f"<h2>{number}. {escape(group.what)}</h2>"
    yield f"<div class='formula'>{recurrence_mathml(row.symbol, row.expression)}</div>"
    yield f"<p>{escape(row.why)}</p>"
    if len(group.rows) > 1:
        yield f"<p class='names'>{escape(names)}; drawn here: {escape(row.name)}</p>"
    opened = " open='open'" if is_open else ""
    drawn, titles = list(graph.pictures(row.name)), ["before", "after"]
    if len({tuple(_lines(each)) for each in drawn}) == 1:  # left as it is
        drawn, titles = drawn[:1], ["unchanged"]
    yield f"<details{opened}><summary>Its update, {' and '.join(titles)}</summary>"
    yield f"{svg(drawn, titles, passes)}</details>"
    yield "<details><summary>What each pass changed</summary>"
    pictures = [graph.picture_of(stage.graph, row.inputs) for stage in stages]
    for stage, earlier, later in zip(stages[1:], pictures, pictures[1:], strict=False):
        yield _difference(stage, earlier, later)
    yield "</details>"


def _difference(stage: Stage, earlier: Picture, later: Picture) -> str:
    lines = list(difflib.ndiff(_lines(earlier), _lines(later)))
    added = sum(line.startswith("+ ") for line in lines)
    removed = sum(line.startswith("- ") for line in lines)
    marked = "\n".join(
        {"+ ": f"<ins>{escape(line)}</ins>", "- ": f"<del>{escape(line)}</del>"}.get(line[:2], escape(line))
        for line in lines
        if not line.startswith("? ")
    )
    title = f"{escape(stage.name)}: {escape(stage.summary)} (here +{added} −{removed})"
    return f"<h4>{title}</h4>" + (f"<pre>{marked}</pre>" if added or removed else "")


def _lines(drawn: Picture) -> list[str]:
    return [f"{box.layout:>12}  {box.text}" for box in drawn.boxes]


def _code(graph: GraphReport) -> Iterator[str]:
    yield "<h2>Generated code</h2>"
    if not graph.code:
        yield "<p>None: the step was captured, not compiled.</p>"
    for source in graph.code:
        lines = len(source.splitlines())
        yield f"<details><summary>{lines:,} lines</summary><pre>{escape(source)}</pre></details>"
