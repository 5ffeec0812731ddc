"""``COLLAGE_FX_DUMP``, what is logged, and the stages that a report makes again."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from collage_fx import CollageBackend, explain
from collage_fx.graph.nodes import graph_text
from collage_fx.graph.program import StepProgram
from collage_fx.pipeline import Pass, inserted, run_pipeline
from tests.support.programs import captured, sgd
from tests.support.training import Descent, parameters, run_steps
from tests.support.warned import warned

ROOT = Path(__file__).resolve().parents[2]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_per_compilation_and_two_files_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLAGE_FX_DUMP", str(tmp_path / "dumps"))
    backend = CollageBackend()
    optimizer = Descent(params := parameters())
    step = torch.compile(optimizer.step, backend=backend)
    run_steps(step, params, [0])
    optimizer.param_groups[0]["lr"] *= 2
    run_steps(step, params, [1])
    explain(torch.optim.SGD(parameters(torch.float32)))
    assert names(tmp_path / "dumps") == ["Descent-1", "Descent-2", "SGD-1"]
    folder = tmp_path / "dumps" / "Descent-1"
    stages = [
        *("00-captured", "01-normalize", "02-analyze", "03-allocate", "04-widen"),
        *(
            "05-refine-numbers",
            "06-sum-changes",
            "07-compensate-wide",
            "08-pin-roundings",
            "09-hoist-scalars",
        ),
    ]
    assert names(folder) == [
        *(f"{each}.{end}" for each in stages for end in ("svg", "txt")),
        "10-inductor.py",
        "11-inductor.py",
    ]
    first = {each: (folder / f"{each}.txt").read_text().splitlines()[0] for each in stages}
    assert first["07-compensate-wide"] == "compensate-wide: 2 tensors"
    assert first["02-analyze"] == "analyze: 2 of 2 low-precision state tensors selected"
    graph = backend.report().graphs[0]
    for stage, module in (("00-captured", graph.before), ("09-hoist-scalars", graph.after)):
        assert (folder / f"{stage}.txt").read_text().split("\n\n", 1)[1] == graph_text(module.graph) + "\n"
    drawn = ElementTree.parse(folder / "07-compensate-wide.svg").getroot()
    texts = {element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"compensate-wide: 2 tensors", "made by compensate-wide"} <= texts
    assert graph.code
    assert graph.code[0] in (folder / "10-inductor.py").read_text()
    assert names(tmp_path / "dumps" / "SGD-1") == ["00-captured.svg", "00-captured.txt"]


def test_refusals_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix product of 16 bits has lost the error terms of its operands."""

    class Rotating(Descent):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.copy_(p.add(p.grad, alpha=-1e-3) @ torch.eye(p.shape[-1], dtype=p.dtype))

    monkeypatch.setenv("COLLAGE_FX_DUMP", str(tmp_path))
    told = warned(lambda: explain(Rotating(parameters()), strict=False))
    assert "returns its result rounded" in told[0]
    assert (
        (tmp_path / "Rotating-1" / "07-compensate-wide.txt")
        .read_text()
        .startswith("compensate-wide: 2 tensors, 2 refused\n")
    )


def test_what_led_to_a_failing_pass_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Pass):
        name = "failing"

        def run(self, program: StepProgram) -> str:
            raise ZeroDivisionError

    monkeypatch.setenv("COLLAGE_FX_DUMP", str(tmp_path))
    with pytest.raises(Exception, match="ZeroDivisionError"):
        explain(Descent(parameters()), passes=inserted(Failing(), before="compensate-wide"))
    assert names(tmp_path / "Descent-1")[-1] == "06-sum-changes.txt"


def test_without_the_variable_stages_are_neither_written_nor_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLLAGE_FX_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    assert explain(Descent(parameters())).graphs[0].passes
    assert not names(tmp_path)
    seen: list[torch.fx.Graph] = []
    program = captured(sgd, "p g")
    run_pipeline(program, observe=lambda stage: seen.append(stage.graph))
    assert all(graph is program.gm.graph for graph in seen)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"rounding": "nearest"}, {"arithmetic": "native"}),
        *({"error_format": "fp32"}, {"strategy": "none"}),
    ],
)
def test_stages_made_again_are_those_of_the_compilation(options: dict[str, Any]) -> None:
    (graph,) = explain(torch.optim.RMSprop(parameters(), lr=1e-3, momentum=0.9), **options).graphs
    stages = graph.stages()
    assert [(stage.name, stage.summary) for stage in stages] == list(graph.passes)
    if options.get("strategy") != "none":
        assert graph_text(stages[-1].graph) == graph_text(graph.after.graph)
    # There are no numbers to take out of a denominator, or to hoist but the phases of dither.
    is_dithered = "phases" in graph_text(graph.after.graph)
    only_look = {"clear-denominators", "analyze"} | (set() if is_dithered else {"hoist-scalars"})
    looked = only_look & {stage.name for stage in stages}
    assert len({graph_text(stage.graph) for stage in stages}) == len(stages) - len(looked)


def test_one_line_per_compilation_and_reasons_on_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="collage_fx")
    explain(torch.optim.RMSprop(parameters(), lr=1e-3, alpha=0.999, weight_decay=0.1))
    lines = [
        (record.levelname, record.getMessage()) for record in caplog.records if record.name == "collage_fx"
    ]
    assert [level for level, _ in lines] == ["INFO", *["DEBUG"] * 3]
    told = lines[0][1].rpartition(" in ")
    assert told[0] == "RMSprop: 2 parameters and 2 × square_avg compensated, 4.6 extra bytes/param, explained"
    assert told[2].endswith(" s")
    assert lines[1][1] == "RMSprop: captured, compiled by family"
    assert lines[3][1].startswith("RMSprop: 2 × square_avg: square_avg' = ")
    assert "stalls: u/(1-a) = 3.9" in lines[3][1]


def test_torchs_own_switch_turns_it_on() -> None:
    program = (
        "import torch, collage_fx\n"
        "p = torch.nn.Parameter(torch.ones(2).bfloat16())\n"
        "collage_fx.explain(torch.optim.SGD([p]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_LOGS": "+collage_fx"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert "SGD: 1 parameter compensated, 4.0 extra bytes/param" in done.stderr
    assert "every parameter" in done.stderr
