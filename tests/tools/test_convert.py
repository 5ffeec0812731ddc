"""``collage-fx convert``: no bit is lost in any form of a checkpoint; jobs go on as if converted in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict

import collage_fx
from collage_fx import CollageError
from collage_fx.errors import CheckpointMismatchError
from collage_tools.cli import main
from collage_tools.conversion import convert_checkpoint
from tests.test_conversion import Job


def _file_of(job: Job, path: Path) -> Path:
    contents = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "epoch": 3}
    torch.save({"run": contents}, path)
    return path


def _trained(make: Any = torch.optim.AdamW) -> Job:
    job = Job(make)
    job.train(3)
    return job


def _is_same(one: Any, other: Any) -> bool:
    """Whether nested containers hold the same values, and tensors of the same dtype and bits."""
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return {*one} == {*other} and all(_is_same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize(
    "options", [{}, {"bytes_per_parameter": 5.1}, {"strategy": "full"}], ids=["default", "5.1", "full"]
)
def test_a_job_goes_on_with_the_bits_of_a_conversion_in_place(
    options: dict[str, Any], tmp_path: Path
) -> None:
    job = _trained()
    convert_checkpoint(_file_of(job, tmp_path / "in.pt"), tmp_path / "out.pt", torch.bfloat16)
    collage_fx.convert(job.model, job.optimizer, **options)
    saved = torch.load(tmp_path / "out.pt")["run"]
    resumed = Job()
    collage_fx.install(resumed.optimizer, **options)
    resumed.model.to(torch.bfloat16).load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    for each in (job, resumed):
        each.optimizer.param_groups[0]["lr"] = 1e-3
        for _ in range(3):
            for i, parameter in enumerate(each.model.parameters()):
                generator = torch.Generator().manual_seed(i)
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(torch.bfloat16)
            each.optimizer.step()
    assert saved["epoch"] == 3
    assert _is_same(resumed.values(), job.values())


@pytest.mark.parametrize("options", [{}, {"bytes_per_parameter": 5.1}], ids=["default", "5.1"])
def test_the_way_back_has_the_whole_values(options: dict[str, Any], tmp_path: Path) -> None:
    job = _trained()
    collage_fx.convert(job.model, job.optimizer, **options)
    job.train(2)
    before = job.values()
    convert_checkpoint(_file_of(job, tmp_path / "in.pt"), tmp_path / "out.pt", torch.float32)
    saved = torch.load(tmp_path / "out.pt")["run"]
    plain = Job()
    plain.model.load_state_dict(saved["model"])
    plain.optimizer.load_state_dict(saved["optimizer"])
    assert not any(
        str(key).startswith("collage_fx") for each in saved["optimizer"]["state"].values() for key in each
    )
    assert _is_same(plain.values(), before)


@pytest.mark.parametrize("is_safetensors", [True, False])
def test_a_folder_of_accelerate_there_and_back(*, is_safetensors: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
    job = _trained(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(job.model, job.optimizer)
    accelerator.save_state(str(tmp_path / "in"), safe_serialization=is_safetensors)
    program = tmp_path / "job.py"
    program.write_text(
        "import torch\nfrom tests.test_conversion import Job\n"
        "model = lambda: Job().model\n"
        "optimizer = lambda model: torch.optim.AdamW(model.parameters())\n"
    )
    files = (tmp_path / "in", tmp_path / "between", tmp_path / "out")
    for source, target, dtype in zip(files[:2], files[1:], ("bfloat16", "float32"), strict=True):
        given = ["convert", str(source), str(target), "--dtype", dtype]
        assert main([*given, "--job", str(program)]) == 0
    for name in ("optimizer.bin", "pytorch_model.bin"):
        if (files[0] / name).exists():
            one, other = (torch.load(each / name) for each in (files[0], files[2]))
            assert _is_same(one, other)
    assert {each.name for each in files[0].iterdir()} == {each.name for each in files[2].iterdir()}
    resumed = Job(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(resumed.model, resumed.optimizer)
    accelerator.load_state(str(files[2]))
    assert _is_same(resumed.values(), job.values())


def test_the_config_of_transformers_names_the_new_dtype(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'collage-fx[trainers]'")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    files = [tmp_path / name for name in ("in", "between", "out")]
    model.save_pretrained(files[0])
    torch.save(optimizer.state_dict(), files[0] / "optimizer.pt")
    for source, target, dtype in zip(files[:2], files[1:], (torch.bfloat16, torch.float32), strict=True):
        convert_checkpoint(source, target, dtype)
        loaded = transformers.GPT2LMHeadModel.from_pretrained(target, dtype="auto")
        assert {each.dtype for each in loaded.parameters()} == {dtype}
        assert loaded.config.dtype is dtype
    before, after = ((each / "config.json").read_text() for each in (files[0], files[2]))
    assert after == before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_distributed_checkpoint_becomes_a_file(tmp_path: Path) -> None:
    job = _trained()
    model, optimizer = get_state_dict(job.model, job.optimizer)
    checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "between.pt", torch.bfloat16)
    between = torch.load(tmp_path / "between.pt")
    assert between["model"]["2.weight"].dtype is torch.bfloat16
    assert "2.weight" in between["optimizer"]["state"]
    convert_checkpoint(tmp_path / "between.pt", tmp_path / "out.pt", torch.float32)
    back = torch.load(tmp_path / "out.pt")
    assert _is_same(back["model"], model)
    assert _is_same(back["optimizer"], optimizer)


def test_what_stays_is_written_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = _trained()
    source = _file_of(job, tmp_path / "in.pt")
    assert main(["convert", str(source), str(tmp_path / "out.pt"), "--keep", "1"]) == 0
    assert "not converted: 1.weight, 1.bias, frequencies" in capsys.readouterr().out
    saved = torch.load(tmp_path / "out.pt")["run"]
    for name in ("1.weight", "1.bias", "frequencies"):
        assert _is_same(saved["model"][name], job.model.state_dict()[name])
    assert saved["model"]["4.weight"].data_ptr() == saved["model"]["0.weight"].data_ptr()


def _no_optimizer(path: Path, job: Job) -> None:
    torch.save({"model": job.model.state_dict()}, path)


def _a_reordered_model(path: Path, job: Job) -> None:
    weights = dict(reversed(job.model.state_dict().items()))
    torch.save({"model": weights, "optimizer": job.optimizer.state_dict()}, path)


def _another_model(path: Path, job: Job) -> None:
    weights = {f"x.{name}": t for name, t in job.model.state_dict().items()}
    optimizer = get_state_dict(job.model, job.optimizer)[1]
    torch.save({"model": weights, "optimizer": optimizer}, path)


def _without_momentum(path: Path, job: Job) -> None:
    _file_of(_trained(lambda parameters: torch.optim.SGD(parameters, lr=0.1)), path)


def _an_object(path: Path, job: Job) -> None:
    torch.save({"model": job.model}, path)


def _a_text(path: Path, job: Job) -> None:
    path.write_text("no checkpoint")


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (_no_optimizer, "no state dict of an optimizer, where one is needed"),
        (_a_reordered_model, "could be several of the model's"),
        (_without_momentum, "give --job"),
        (_another_model, "no weight '0.weight', which the optimizer steps"),
        (
            _an_object,
            "the file holds an object of torch.nn.modules.container.Sequential, which is not loaded",
        ),
        (_a_text, "torch.save has not written this file"),
    ],
)
def test_a_checkpoint_that_cannot_be_converted_is_refused_and_nothing_written(
    write: Any, told: str, tmp_path: Path
) -> None:
    write(tmp_path / "in.pt", _trained())
    with pytest.raises(CheckpointMismatchError, match=told):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", torch.bfloat16)
    assert not (tmp_path / "out.pt").exists()


def test_a_job_with_other_groups_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(
        "import torch\nmodel = lambda: torch.nn.Linear(2, 2)\n"
        "optimizer = lambda model: torch.optim.AdamW(model.parameters())\n"
    )
    source = _file_of(_trained(), tmp_path / "in.pt")
    with pytest.raises(CollageError, match="no weight 'weight'"):
        convert_checkpoint(source, tmp_path / "out.pt", torch.bfloat16, job=program)
    program.write_text("model = lambda: None\n")
    with pytest.raises(CollageError, match="a file without 'optimizer'"):
        convert_checkpoint(source, tmp_path / "out.pt", torch.bfloat16, job=program)
    with pytest.raises(CollageError, match=r"in\.pt exists"):
        convert_checkpoint(source, source, torch.bfloat16)
