from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch.fx import GraphModule

from collage_fx import CollageBackend, CollageReport, explain
from collage_fx.program import Kind, Role, Strategy
from collage_fx.report import TABLE_WIDTH
from tests.support.training import Descent, parameters, run_steps

NAMES = [
    "blocks.0.attention.weight",
    "blocks.0.attention.bias",
    "blocks.0.mlp.weight",
    "blocks.0.mlp.bias",
    "head.weight",
]
SHAPES = [(8, 8), (8,), (16, 8), (16,), (32, 8)]


def adamw(dtype: torch.dtype = torch.bfloat16) -> torch.optim.Optimizer:
    named = list(zip(NAMES, parameters(dtype, SHAPES), strict=True))
    return torch.optim.AdamW(named, lr=1e-3, betas=(0.9, 0.999))


@pytest.fixture(scope="module")
def reports() -> dict[str, CollageReport]:
    return {strategy: explain(adamw(), strategy=strategy) for strategy in get_args(Strategy)}


@pytest.mark.parametrize(("strategy", "extra"), [("none", 0), ("light", 2), ("plus", 4), ("full", 6)])
def test_bytes_per_parameter_of_adamw_are_the_papers(
    reports: dict[str, CollageReport], strategy: str, extra: int
) -> None:
    assert reports[strategy].bytes_per_parameter() == {
        "parameters": 2,
        "state": 4,
        "error terms": extra,
        "total": 6 + extra,
    }


def test_a_master_copy_is_four_bytes_a_tensor() -> None:
    report = explain(torch.optim.SGD(parameters()), error_format="fp32")
    assert report.bytes_per_parameter() == {"parameters": 2, "state": 0, "error terms": 4, "total": 6}


def test_a_row_says_all_of_a_tensor(reports: dict[str, CollageReport]) -> None:
    rows = {row.name: row for row in reports["plus"].tensors}
    assert list(rows)[:4] == [NAMES[0], f"{NAMES[0]}.exp_avg", f"{NAMES[0]}.exp_avg_sq", NAMES[1]]
    second = rows[f"{NAMES[2]}.exp_avg_sq"]
    assert (second.shape, second.dtype, second.role) == ((16, 8), torch.bfloat16, Role.STATE)
    assert second.kind is Kind.MOVING_AVERAGE
    assert second.recurrence.startswith("exp_avg_sq' = ")
    assert "0.999*exp_avg_sq" in second.recurrence
    assert second.lossy
    assert second.compensated
    assert second.error_format == "mcf"
    assert (second.numel, second.bytes, second.error_bytes) == (128, 256, 256)
    first = rows[f"{NAMES[2]}.exp_avg"]
    assert not first.lossy
    assert not first.compensated
    assert (first.error_format, first.error_bytes) == ("", 0)
    assert rows[NAMES[2]].role is Role.PARAMETER
    assert rows[NAMES[2]].kind is Kind.ACCUMULATION


def test_graphs_before_and_after_are_modules(reports: dict[str, CollageReport]) -> None:
    (graph,) = reports["plus"].graphs
    assert isinstance(graph.before, GraphModule)
    assert isinstance(graph.after, GraphModule)
    assert graph.before.code != graph.after.code
    inputs = [sum(node.op == "placeholder" for node in gm.graph.nodes) for gm in (graph.before, graph.after)]
    assert inputs[1] == inputs[0] + 10
    assert [name for name, _ in graph.passes][:2] == ["normalize", "analyze"]
    assert graph.subject == "AdamW"
    (plain,) = reports["none"].graphs
    assert plain.after.code == plain.before.code


def test_the_printed_table_is_readable(reports: dict[str, CollageReport]) -> None:
    text = str(reports["plus"])
    lines = text.splitlines()
    assert max(map(len, lines)) <= TABLE_WIDTH <= 140
    assert lines[0] == "AdamW"
    assert lines[2].split() == ["tensor", "shape", "kind", "recurrence", "verdict", "error", "bytes"]
    body = lines[4 : 4 + 15]
    assert [line.split()[0] for line in body] == [
        row.name for row in reports["plus"].tensors
    ]  # a line a tensor
    assert "bf16[16,8]" in body[8]
    assert "lossy (3)" in body[8]
    assert body[8].split()[-2:] == ["mcf", "512"]
    assert body[7].split()[-2:] == ["-", "256"]
    notes = [line for line in lines if line.startswith("(")]
    assert len(notes) == 3  # parameters, first moments, second moments: each reason once
    assert "no error terms (not lossy)" in notes[1]
    assert lines[-1] == (
        "10 of 15 tensors have error terms. Bytes per parameter: parameters 2, state 4, error terms 4, total "
        "10."
    )


def test_long_names_and_shapes_keep_the_width() -> None:
    name = "model.layers.31.self_attention.query_key_value_projection.weight"
    p = torch.nn.Parameter(torch.zeros(1024, 1, 1, 1024, dtype=torch.float16))
    text = str(explain(torch.optim.AdamW([(name, p)])))
    assert max(map(len, text.splitlines())) <= TABLE_WIDTH
    assert "f16[1024,1,1,1024]" in text


def test_a_scalar_parameter() -> None:
    assert "bf16[]" in str(explain(Descent([torch.nn.Parameter(torch.tensor(1.0).bfloat16())])))


def test_an_empty_report_says_when_it_fills() -> None:
    backend = CollageBackend()
    assert "first call" in str(backend.report())
    assert backend.report().bytes_per_parameter()["total"] == 0


def test_a_recompilation_replaces_rows_and_a_report_is_a_snapshot() -> None:
    backend = CollageBackend()
    optimizer = Descent(params := parameters())
    step = torch.compile(optimizer.step, backend=backend)
    run_steps(step, params, [0])
    early = backend.report()
    optimizer.param_groups[0]["lr"] *= 2
    run_steps(step, params, [1])
    assert (len(early.graphs), len(backend.report().graphs)) == (1, 2)
    assert [row.name for row in backend.report().tensors] == [row.name for row in early.tensors]
    assert all("lr" in row.recurrence for row in backend.report().tensors)
    assert all("0.000244141" in row.recurrence for row in early.tensors)
