"""Plans as text, JSON, and a page with bars."""

from __future__ import annotations

import json
import math
from html import escape

from tabulate import tabulate

from collage_tools.pages import bars, html_document, html_table
from collage_tools.plan.jobs import AFTER, GB, LARGEST, SHARE, TOKENS, Plan


def _title(checkpointing: bool) -> str:
    return f"With{'' if checkpointing else 'out'} activation checkpointing"


def _subject(plan: Plan) -> str:
    gpus = "1 GPU" if plan.fsdp == 1 else f"each of {plan.fsdp} GPUs"
    return (
        f"{plan.source.name}: {plan.count / 1e9:.3g} billion parameters, sequences of {plan.sequence:,} "
        f"tokens. GB on {gpus} of {plan.gpu:g} GB, {plan.usable / GB:.4g} of them for tensors, with "
        f"micro-batches of {plan.micro_batch}. A budget of 8.06 bytes is bytes_per_parameter=8.06."
    )


def _cell(column: str, value: float) -> str:
    if column == SHARE:
        return f"{value:+.0%}" if value else ""
    return (f"{value:,}" if value else "none") if column in (LARGEST, TOKENS) else f"{value / GB:.2f}"


def _table(plan: Plan, checkpointing: bool) -> tuple[list[list[str]], list[str]]:
    """Return rows and headers."""
    table = plan.table(checkpointing)
    rows = [[options, *(_cell(*each) for each in row.items())] for options, row in table.items()]
    return rows, ["budget", *table["default"]]


def text_of(plan: Plan) -> str:
    """Write a table for each way of checkpointing."""
    parts = [_subject(plan)]
    for each in plan.activations:
        rows, headers = _table(plan, each)
        broken = [header.replace(" ", "\n") for header in headers]
        align = ["left"] + ["right"] * (len(headers) - 1)
        parts += [f"{_title(each)}:", tabulate(rows, broken, colalign=align, disable_numparse=True)]
    return "\n\n".join(parts)


def shortage_of(plan: Plan) -> str:
    """Describe by how much a GPU is too small for a single sequence; empty if it fits."""
    least = min(plan.budgets, key=plan.total)
    room = plan.usable - min(each.first for each in plan.activations.values())
    if (lacking := plan.total(least) - room) <= 0:
        return ""
    remedy = "--fsdp alone is not enough: take a larger GPU or shorter sequences"
    if room > plan.whole:
        shards = plan.fsdp * (plan.total(least) - plan.budgets[least].get("gathered", 0))
        remedy = f"shard the model with --fsdp {2 ** math.ceil(math.log2(shards / (room - plan.whole)))}"
    return (
        f"a GPU of {plan.gpu:g} GB is too small for a sequence of {plan.sequence} tokens: "
        f"{lacking / GB:.3g} GB more are needed with {least}, the least; {remedy}"
    )


def json_of(plan: Plan) -> str:
    """Write all numbers as JSON; sizes are bytes."""
    found = {"name": plan.source.name, "gpu": plan.gpu * GB}
    found |= {key: getattr(plan, key) for key in ("count", "usable", "sequence", "fsdp", "micro_batch")}
    return json.dumps(found | {_title(each): plan.table(each) for each in plan.activations}, indent=1)


def page_of(plan: Plan) -> str:
    """Write a page: tables, and a bar for each budget."""
    body = f"<p>{escape(_subject(plan))}</p>"
    for each in plan.activations:
        rows, headers = _table(plan, each)
        sizes = {
            options: {column: size / GB for column, size in row.items() if column not in AFTER}
            for options, row in plan.table(each).items()
        }
        body += f"<h2>{_title(each)}</h2>{html_table(rows, headers, len(headers) - 1)}"
        body += bars(sizes, line=plan.usable / GB, width=plan.gpu, unit="GB")
    return html_document(plan.source.name, "Memory of a training job", body)
