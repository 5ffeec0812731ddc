from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import pytest
import torch
from torch.fx import GraphModule

from collage_fx import CollageBackend, CollageReport, explain
from collage_fx.choices import Strategy
from collage_fx.graph.program import Kind, Role
from collage_fx.report.tables import TEXT_WIDTH, section
from collage_fx.report.tensors import TensorReport, treated, treatments
from tests.support.training import Descent, parameters, run_steps

NAMES = [
    "blocks.0.attention.weight",
    "blocks.0.attention.bias",
    "blocks.0.mlp.weight",
    "blocks.0.mlp.bias",
    "head.weight",
]
SHAPES = [(8, 8), (8,), (16, 8), (16,), (32, 8)]

EXPECTED = """\
AdamW

tensor          shape     kind            plain bf16         here      bytes
--------------  --------  --------------  -----------------  ------  -------
5 parameters    472 bf16  accumulation    loses updates (1)  exact     1,908
5 × exp_avg     472 bf16  moving average  fine (2)           dither      964
5 × exp_avg_sq  472 bf16  moving average  loses updates (3)  exact     1,908

(1) p' = -0.001*exp_avg'*sqrt(1 - 0.999**step')/((1 - 0.9**step')*(sqrt(exp_avg_sq') + 1.0e-8*sqrt(1
    - 0.999**step'))) + 0.99999*p
    plain bf16: accumulates: moves below ulp/2 (up to 2**-8 of the value) are lost, and its decay of
    1e-05 a step rounds to none; here: error terms (plus: every parameter)
    of blocks.0.attention.weight, blocks.0.attention.bias, blocks.0.mlp.weight, blocks.0.mlp.bias,
    head.weight
(2) exp_avg' = 0.9*exp_avg + 0.1*g
    plain bf16: tolerable: u/(1-a) = 0.039, rate off by 0.016, for a = 0.9; here: no error terms
    (not lossy; rounded to nearest, which each update repays)
    of blocks.0.attention.weight.exp_avg, blocks.0.attention.bias.exp_avg,
    blocks.0.mlp.weight.exp_avg, blocks.0.mlp.bias.exp_avg, head.weight.exp_avg
(3) exp_avg_sq' = 0.999*exp_avg_sq + 0.001*g**2
    plain bf16: stalls: u/(1-a) = 3.9, rate off by 1, for a = 0.999; here: error terms (plus: lossy
    state; dither would leave noise of at most 7.1 %)
    of blocks.0.attention.weight.exp_avg_sq, blocks.0.attention.bias.exp_avg_sq,
    blocks.0.mlp.weight.exp_avg_sq, blocks.0.mlp.bias.exp_avg_sq, head.weight.exp_avg_sq

10 of 15 tensors have error terms. Bytes per parameter: 10.13 (parameters 2, state 4, error terms
4.127)."""


def adamw(dtype: torch.dtype = torch.bfloat16) -> torch.optim.Optimizer:
    named = list(zip(NAMES, parameters(dtype, SHAPES), strict=True))
    return torch.optim.AdamW(named, lr=1e-3, betas=(0.9, 0.999))


@pytest.fixture(scope="module")
def reports() -> dict[str, CollageReport]:
    return {strategy: explain(adamw(), strategy=strategy) for strategy in get_args(Strategy)}


@pytest.mark.parametrize(("strategy", "terms"), [("none", 0), ("light", 2), ("plus", 4), ("full", 6)])
def test_bytes_per_parameter_of_adamw_are_the_papers(
    reports: dict[str, CollageReport], strategy: str, terms: int
) -> None:
    """And a count of four bytes for each of three tensors a parameter."""
    counts = 3 * len(SHAPES) * 4 / sum(map(math.prod, SHAPES)) if terms else 0
    assert reports[strategy].bytes_per_parameter() == pytest.approx(
        {"parameters": 2, "state": 4, "error terms": terms + counts, "total": 6 + terms + counts}
    )


def test_a_master_copy_is_four_bytes_a_tensor() -> None:
    report = explain(torch.optim.SGD(parameters()), error_format="fp32")
    assert report.bytes_per_parameter() == {"parameters": 2, "state": 0, "error terms": 4, "total": 6}


def test_a_gradient_that_a_step_overwrites_is_not_what_the_optimizer_keeps() -> None:
    class Scaled(Descent):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.grad.mul_(0.5)
            super().step(closure)

    report = explain(Scaled(parameters()), error_format="mcf")
    assert [row.role for row in report.tensors].count(Role.GRADIENT) == 2
    assert report.bytes_per_parameter() == {"parameters": 2, "state": 0, "error terms": 2, "total": 4}


def test_the_error_terms_of_a_gradient_that_accumulates_are_kept() -> None:
    class Accumulating(Descent):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.grad.add_(2.0**-12)
            super().step(closure)

    report = explain(Accumulating(parameters()), bytes_per_parameter=8)
    counts = 2 * 2 * 4 / sum(row.numel for row in report.tensors if row.symbol == "p")
    held = {"parameters": 2, "state": 0, "error terms": 4 + counts, "total": 6 + counts}
    assert report.bytes_per_parameter() == pytest.approx(held)
    assert report.graphs[0].budgets[0].bytes <= 6 + counts


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
    assert second.error_format == "exact"
    assert (second.numel, second.bytes, second.error_bytes) == (128, 256, 260)
    first = rows[f"{NAMES[2]}.exp_avg"]
    assert not first.lossy
    assert not first.compensated
    assert (first.error_format, first.error_bytes) == ("dither", 4)
    plain = next(row for row in reports["none"].tensors if row.name == first.name)
    assert (plain.error_format, plain.error_bytes) == ("", 0)
    assert rows[NAMES[2]].role is Role.PARAMETER
    assert rows[NAMES[2]].kind is Kind.ACCUMULATION


def test_graphs_before_and_after_are_modules(reports: dict[str, CollageReport]) -> None:
    (graph,) = reports["plus"].graphs
    assert isinstance(graph.before, GraphModule)
    assert isinstance(graph.after, GraphModule)
    assert graph.before.code != graph.after.code
    inputs = [sum(node.op == "placeholder" for node in gm.graph.nodes) for gm in (graph.before, graph.after)]
    assert inputs[1] == inputs[0] + 10 + 15 * 2  # error terms; a count and an index for each tensor
    assert [name for name, _ in graph.passes][:3] == ["normalize", "clear-denominators", "analyze"]
    assert graph.subject == "AdamW"
    (plain,) = reports["none"].graphs
    assert plain.after.code == plain.before.code


def test_equal_treatment_is_one_row(reports: dict[str, CollageReport]) -> None:
    assert str(reports["plus"]) == reports["plus"].to_text()
    assert reports["plus"].to_text() == EXPECTED


def test_a_report_in_a_program_is_a_line(reports: dict[str, CollageReport]) -> None:
    assert repr(reports["plus"]) == (
        "<CollageReport: AdamW: 10 of 15 tensors have error terms. Bytes per parameter: 10.13 "
        "(parameters 2, state 4, error terms 4.127).>"
    )
    assert repr(CollageReport()) == "<CollageReport: no tensors>"


def test_verdicts_and_what_is_done_are_told_apart(reports: dict[str, CollageReport]) -> None:
    """A tensor that is protected is not said to be lost."""
    p, first, second = ({name: report.tensors[i] for name, report in reports.items()} for i in range(3))
    assert [(each.verdict, each.here) for each in p.values()] == [
        ("loses updates", "loses updates"),
        *[("loses updates", "exact")] * 3,
    ]
    assert (first["plus"].verdict, first["plus"].here) == ("fine", "dither")
    assert (first["none"].verdict, first["none"].here) == ("fine", "fine")
    wide = [dataclasses.replace(first["none"], dtype=torch.float32, lossy=lossy) for lossy in (True, False)]
    assert [each.verdict for each in wide] == ["loses little", "fine"]
    assert [second[name].here for name in ("light", "plus")] == ["dither", "exact"]


def test_unfolded_every_tensor_has_a_row(reports: dict[str, CollageReport]) -> None:
    lines = reports["plus"].to_text(full=True).splitlines()
    assert max(map(len, lines)) <= TEXT_WIDTH
    assert lines[0] == "AdamW"
    assert lines[2].split() == ["tensor", "shape", "kind", "plain", "bf16", "here", "bytes"]
    body = lines[4 : 4 + 15]
    assert [line.split()[0] for line in body] == [row.name for row in reports["plus"].tensors]
    assert "bf16[16,8]" in body[8]
    assert "loses updates (3)" in body[8]
    assert body[8].split()[-2:] == ["exact", "516"]
    assert body[7].split()[-2:] == ["dither", "260"]
    notes = [line for line in lines if line.startswith("(")]
    assert len(notes) == 3  # parameters, first moments, second moments: each once
    assert "of blocks" not in "\n".join(lines)


def many(count: int = 300) -> list[TensorReport]:
    """Rows as of a large model, without capturing its step."""
    rows = explain(adamw()).tensors[:3]
    return [
        dataclasses.replace(
            row, name=f"model.layers.{i}.self_attention.projection.{row.symbol}", shape=(4096, 4096 + i)
        )
        for i in range(count)
        for row in rows
    ]


def test_hundreds_of_tensors_fit_the_screen() -> None:
    text = section("AdamW", many(), full=False, markdown=False)
    lines = text.splitlines()
    assert max(map(len, lines)) <= TEXT_WIDTH == 100
    assert len(lines) < 25
    assert [line.split("  ")[0] for line in lines[4:7]] == [
        "300 parameters",
        "300 × exp_avg",
        "300 × exp_avg_sq",
    ]
    assert "of model.layers.*.self_attention.projection.exp_avg_sq" in text
    unfolded = section("AdamW", many(), full=True, markdown=False).splitlines()
    assert max(map(len, unfolded)) <= TEXT_WIDTH
    assert len(unfolded) > 900


def test_different_settings_are_different_treatments() -> None:
    groups: list[dict[str, Any]] = [
        {"params": [("decayed", parameters()[0])]},
        {"params": [("plain", parameters()[0])], "weight_decay": 0.0},
    ]
    rows = explain(torch.optim.AdamW(groups, lr=1e-3), strategy="light").tensors
    assert [group.what for group in treatments(rows)] == ["decayed", "2 × exp_avg", "2 × exp_avg_sq", "plain"]


def test_markdown_has_the_same_rows(reports: dict[str, CollageReport]) -> None:
    lines = reports["plus"].to_markdown().splitlines()
    assert lines[0] == "## AdamW"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert {len(row) for row in cells} == {6}
    assert [row[0] for row in cells[2:]] == ["5 parameters", "5 × exp_avg", "5 × exp_avg_sq"]
    assert [line[:3] for line in lines if line[:1].isdigit()][:3] == ["1. ", "2. ", "3. "]
    assert lines[-1].endswith("Bytes per parameter: 10.13 (parameters 2, state 4, error terms 4.127).")


def test_long_names_and_shapes_keep_the_width() -> None:
    name = "model.layers.31.self_attention.query_key_value_projection.weight"
    p = torch.nn.Parameter(torch.zeros(1024, 1, 1, 1024, dtype=torch.float16))
    text = str(explain(torch.optim.AdamW([(name, p)])))
    assert max(map(len, text.splitlines())) <= TEXT_WIDTH
    assert "f16[1024,1,1,1024]" in text
    names = [line.split(" ")[0] for line in text.splitlines()]
    assert all(part in names for part in (".self_attention", ".weight")), (
        "lines begin with dots, not in words"
    )


def test_budgets_of_float32_parameters_name_no_format_of_error_terms() -> None:
    p = torch.nn.Parameter(torch.zeros(64, 64))
    text = str(explain(torch.optim.AdamW([p]), bytes_per_parameter=8))
    assert "state='block8'" in text
    assert "error_format" not in text


def test_a_scalar_parameter() -> None:
    assert "bf16[]" in str(explain(Descent([torch.nn.Parameter(torch.tensor(1.0).bfloat16())])))


def test_an_empty_report_says_when_it_fills() -> None:
    backend = CollageBackend()
    assert "first call" in str(backend.report())
    assert math.isnan(backend.report().bytes_per_parameter()["total"]), "unknown, not 0"


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


def test_rows_are_counted_by_what_is_done_to_them(reports: dict[str, CollageReport]) -> None:
    parameters_of, moments, squares = (rows.rows for rows in treatments(reports["plus"].tensors))
    packed = [dataclasses.replace(row, packed=True, error_bytes=0) for row in moments]
    done = "5 parameters and 5 × exp_avg_sq compensated"
    alone = [dataclasses.replace(row, error_bytes=0) for row in (*parameters_of, *squares)]
    assert treated([*parameters_of, *squares]).startswith(f"{done}, 4.")
    assert treated(alone) == done
    assert treated([*alone, *packed]) == f"{done}, 5 state tensors packed"
    assert treated(packed) == "5 state tensors packed"
    assert treated(moments) == treated([]) == "nothing compensated"
