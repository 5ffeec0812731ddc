"""Whole programs of examples/trainers: compensated, and resumed half-way to the bit."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import backend_of, error_terms, full_value
from tests.support.processes import Processes
from tests.support.training import differences, everything

pytest.importorskip("transformers", reason="pip install 'collage-fx[trainers]'")

STEPS = 4
ROOT = Path(__file__).parents[2]
FOLDER, PAGE = ROOT / "examples" / "trainers", ROOT / "docs" / "trainers.md"

#: Program -> what a test takes of what it returns, and the checkpoint that is not there after a crash.
PROGRAMS = {
    "transformers_trainer": ("optimizer", f"checkpoint-{STEPS}"),
    "trl_sft": ("optimizer", f"checkpoint-{STEPS}"),
    "accelerate_loop": (None, None),
    "lightning_trainer": ("optimizers", "epoch=1.ckpt"),
    "torchtitan_containers": ("optimizers", None),
}


def optimizer_of(trained: Any, attribute: str | None) -> Optimizer:
    found = trained if attribute is None else getattr(trained, attribute)
    found = found[0] if isinstance(found, list) else found
    inner: Optimizer = getattr(found, "optimizer", found)
    return inner


def run(name: str, folder: Path, **arguments: Any) -> Optimizer:
    torch._dynamo.reset()
    program = importlib.import_module(f"examples.trainers.{name}")
    return optimizer_of(program.train(folder, STEPS, **arguments), PROGRAMS[name][0])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_compensated_and_resumed_to_the_bit(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name.partition("_")[0], reason="pip install 'collage-fx[trainers]'")
    trained = run(name, tmp_path)
    assert_compensated(trained)
    whole = everything(trained)
    if (last := PROGRAMS[name][1]) is not None:
        path = tmp_path / last
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not differences(everything(run(name, tmp_path, resume=True)), whole)


def assert_compensated(optimizer: Optimizer) -> None:
    """All parameters are bfloat16 with error terms that are not zero, in as many bytes as is asked for."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    assert all(any(bool(term.any()) for term in error_terms(p)) for p in parameters)
    scalars = backend_of(optimizer).scalars()
    assert 0.9 < scalars["collage/edq_ratio"] < 1.1
    assert scalars["collage/lost_share"] < 0.5
    assert 8 <= scalars["collage/bytes_per_parameter"] < 8.3  # small tensors are not packed


def sharded(folder: Path, resume: bool) -> list[Tensor]:
    """Run the program for FSDP2 in one of its processes; return whole values of its shards."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    from examples.trainers import fsdp2_loop

    optimizer = fsdp2_loop.train(folder, STEPS, resume=resume)
    values: list[Any] = [full_value(p) for group in optimizer.param_groups for p in group["params"]]
    return [each.to_local() for each in values]


def test_shards_are_compensated_and_resumed_to_the_bit(tmp_path: Path) -> None:
    processes = Processes(2, tmp_path)
    try:
        whole = processes.run(sharded, tmp_path / "run", False)
        resumed = processes.run(sharded, tmp_path / "run", True)
    finally:
        processes.stop()
    for one, other in zip(whole, resumed, strict=True):
        assert all(map(torch.equal, one, other))
        assert any(bool((each != each.bfloat16()).any()) for each in one)  # values that only hi + lo has


#: Programs that the page shows in part, with a link to the file.
IN_PART = {"trl_sft", "lightning_trainer", "torchtitan_containers"}


@pytest.mark.parametrize("name", [*PROGRAMS, "fsdp2_loop"])
def test_the_page_shows_a_program_of_at_most_sixty_lines(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 60
    title = f'```python title="examples/trainers/{name}.py"\n'
    shown = PAGE.read_text().partition(title)[2].partition("```\n")[0]
    assert shown
    assert shown in text if name in IN_PART else shown == text
