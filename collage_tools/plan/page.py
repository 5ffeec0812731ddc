"""Plans as text, JSON, and a page with bars."""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape

from tabulate import tabulate

from collage_tools.pages import COLOURS, html_document, html_table
from collage_tools.plan.jobs import GB, Budget, Plan

#: Kinds of memory, as columns and as parts of bars.
KINDS = ("parameters", "gradients", "state", "gathered", "activations")


def _sizes(plan: Plan, budget: Budget, checkpointing: bool) -> dict[str, int]:
    """Return kind of memory -> bytes, without kinds that are 0 for all budgets."""
    activations = plan.activations[checkpointing].at(plan.micro_batch)
    sizes = {kind: {**vars(budget), "activations": activations}[kind] for kind in KINDS}
    return sizes if plan.fsdp > 1 else {kind: size for kind, size in sizes.items() if kind != "gathered"}


def _title(checkpointing: bool) -> str:
    return f"With{'' if checkpointing else 'out'} activation checkpointing"


def _subject(plan: Plan) -> str:
    gpus = "1 GPU" if plan.fsdp == 1 else f"each of {plan.fsdp} GPUs"
    return (
        f"{plan.name}: {plan.count / 1e9:.3g} billion parameters, sequences of {plan.sequence:,} tokens. GB "
        f"on {gpus} of {plan.gpu / GB:g} GB, {plan.usable / GB:.4g} of them for tensors, with micro-batches "
        f"of {plan.micro_batch}. 8 bytes: bytes_per_parameter=8."
    )


def _table(plan: Plan, checkpointing: bool) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows: bytes by kind, peak, largest micro-batch."""
    rows, masters = [], None
    for budget in plan.budgets:
        sizes = _sizes(plan, budget, checkpointing)
        peak = sum(sizes.values())
        masters = masters or peak
        largest = plan.largest(budget, checkpointing=checkpointing)
        cells = [f"{size / GB:.2f}" for size in (*sizes.values(), peak)]
        fits = [f"{largest:,}", f"{largest * plan.sequence * plan.fsdp:,}"] if largest else ["none", ""]
        rows.append([budget.options, *cells, f"{peak / masters - 1:+.0%}" if peak != masters else "", *fits])
    headers = ["budget", *sizes, "peak", "to masters", "largest micro-batch", "tokens in flight"]
    return headers, rows


def text_of(plan: Plan) -> str:
    """Write a table for each way of checkpointing."""
    parts = [_subject(plan)]
    for each in plan.activations:
        headers, rows = _table(plan, each)
        broken = [header.replace(" ", "\n") for header in headers]
        table = tabulate(
            rows, broken, colalign=["left"] + ["right"] * (len(headers) - 1), disable_numparse=True
        )
        parts.append(f"{_title(each)}:\n\n{table}")
    return "\n\n".join(parts)


def json_of(plan: Plan) -> str:
    """Write all numbers as JSON; sizes are bytes."""
    found = asdict(plan)
    found["activations"] = {}
    for each, activations in plan.activations.items():
        found["activations"]["with checkpointing" if each else "without checkpointing"] = {
            **asdict(activations),
            "largest_micro_batches": [plan.largest(budget, checkpointing=each) for budget in plan.budgets],
        }
    return json.dumps(found, indent=1)


def page_of(plan: Plan) -> str:
    """Write a page: tables, and a bar for each budget."""
    body = f"<p>{escape(_subject(plan))}</p>"
    for each in plan.activations:
        headers, rows = _table(plan, each)
        every = [_sizes(plan, budget, each) for budget in plan.budgets]
        scale = 100 / max(plan.gpu, *(sum(sizes.values()) for sizes in every))
        body += f"<h2>{_title(each)}</h2>{html_table(rows, headers, len(headers) - 1)}<p>"
        colours = dict(zip(every[0], COLOURS, strict=False))
        swatches = (f"<span class='swatch' style='background: {c}'></span> {k} " for k, c in colours.items())
        body += "".join(swatches) + f"| the line: {plan.usable / GB:.4g} GB</p>"
        for budget, sizes in zip(plan.budgets, every, strict=True):
            parts = "".join(
                f"<span title='{kind}: {size / GB:.2f} GB' style='width: {size * scale:.2f}%; "
                f"background: {colours[kind]}'></span>"
                for kind, size in sizes.items()
            )
            body += (
                f"<p class='names'>{escape(budget.options)}</p><div style='display: flex; height: 1rem; "
                f"background: linear-gradient(#000, #000) {plan.usable * scale:.2f}% / 2px 100% no-repeat "
                f"#eee'>{parts}</div>"
            )
    return html_document(plan.name, "Memory of a training job", body)
