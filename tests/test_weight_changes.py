"""Changed weights: patches, applied to a copy of the model, give the model, bit for bit."""

from __future__ import annotations

import importlib.util
import itertools
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import collage_fx
from collage_fx import WeightChanges, WeightPatch, apply_changes, changes, forget_changes
from collage_fx.errors import CheckpointMismatchError, InvalidOptionError
from collage_fx.graph import StepProgram
from collage_fx.pipeline import Pass, inserted
from collage_fx.state.safetensors_file import SafetensorsFile
from tests.support.processes import Processes

State = dict[str, Tensor]


class Net(Module):
    """Odd and even sizes, a tied weight, a parameter without gradients, averages of a batch norm."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(33, 96)
        self.norm = torch.nn.LayerNorm(96)
        self.tied = torch.nn.Linear(96, 96, bias=False)
        self.again = torch.nn.Linear(96, 96, bias=False)
        self.again.weight = self.tied.weight
        self.unused = torch.nn.Linear(32, 5)
        self.last = torch.nn.Linear(96, 7)
        self.to(dtype)
        self.averages = torch.nn.BatchNorm1d(96, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.tied(self.norm(self.first(x))))
        y: Tensor = self.last(self.averages(x.float()).to(x.dtype))
        return y


def backward(model: Module) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.randn(16, 33).to(dtype)).float().square().mean().backward()


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def copied(model: Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def wrong(model: Module, copy: State) -> list[str]:
    return [
        name for name, tensor in model.state_dict().items() if not torch.equal(bits(tensor), bits(copy[name]))
    ]


def trained(make: Callable[[Any], Optimizer], model: Module, **options: Any) -> Callable[[], None]:
    """A function that takes a step of an installed optimizer of a model's parameters."""
    optimizer = make(model.parameters())
    collage_fx.install(optimizer, **options)

    def step() -> None:
        backward(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1)


def muon(parameters: Any) -> Optimizer:
    return torch.optim.Muon([each for each in parameters if each.dim() == 2], lr=1e-3)


def named(name: str, **arguments: Any) -> Callable[[Any], Optimizer]:
    def make(parameters: Any) -> Optimizer:
        optimizer: Optimizer = getattr(torch.optim, name)(parameters, **arguments)
        return optimizer

    return make


OTHERS = {
    "Muon": muon,
    "SGD": named("SGD", lr=1e-3, momentum=0.9),
    "Adafactor": named("Adafactor", lr=1e-3),
    "Rprop": named("Rprop", lr=1e-4),
}

OPTIONS: list[dict[str, Any]] = [
    {},
    {"strategy": "light", "error_format": "byte", "state": "block8"},
    {"strategy": "full", "error_format": "fp32"},
    {"arithmetic": "native"},
    {"metrics": True, "metrics_every": 2},
]


CASES = [
    *(pytest.param(adamw, options, torch.bfloat16, id=f"AdamW {options}") for options in OPTIONS),
    *(pytest.param(adamw, options, torch.float16, id=f"AdamW {options} float16") for options in OPTIONS[::3]),
    *(pytest.param(make, {}, torch.bfloat16, id=name) for name, make in OTHERS.items()),
]


@pytest.mark.parametrize(("make", "options", "dtype"), CASES)
def test_patches_are_the_changed_elements(
    make: Callable[[Any], Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = Net(dtype)
    step = trained(make, model, **options)
    step()
    forget_changes(model)
    before = copied(model)
    for _ in range(3):
        step()
        found = changes(model)
        after = copied(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for patch in found:
            if patch.name in parameters:
                differ = bits(before[patch.name]).view(torch.int16) != bits(after[patch.name]).view(
                    torch.int16
                )
                expected = differ.nonzero()[:, 0].tolist()
                if patch.indices is None:
                    assert len(expected) * (2 + 4) >= len(differ) * 2, "fewer bytes with indices"
                else:
                    assert patch.indices.tolist() == expected
        apply_changes(before, found)
        assert not wrong(model, before)
        assert "unused.weight" not in [patch.name for patch in found]


class Scaled(torch.nn.Linear):
    """A layer whose state dict holds an object beside its tensors."""

    def get_extra_state(self) -> Any:
        return {"scale": 2.0}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


def test_extra_state_of_a_module_is_in_no_patch() -> None:
    model = Scaled(33, 8).bfloat16()
    assert [*model.state_dict()] == ["weight", "bias", "_extra_state"]
    step = trained(adamw, model)
    forget_changes(model)
    copy = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    step()
    found = changes(model)
    assert {patch.name for patch in found} <= {"weight", "bias"}
    apply_changes(copy, found)
    assert all(torch.equal(bits(p), bits(copy[name])) for name, p in model.named_parameters())


def test_a_value_that_has_changed_back_is_in_no_patch() -> None:
    model = torch.nn.Linear(512, 512, bias=False).bfloat16()
    forget_changes(model)
    with torch.no_grad():
        for factor in (2.0, 0.5):
            model.weight.mul_(factor)
        model.weight[3, 5] += 1
    (patch,) = changes(model)
    assert patch.indices is not None
    assert patch.indices.tolist() == [3 * 512 + 5]


def test_a_tensor_is_whole_where_that_takes_fewer_bytes() -> None:
    model = torch.nn.Linear(30, 100, bias=False).bfloat16()
    forget_changes(model)
    for rows in (30, 40):  # of 6 bytes an element with its index; 2 without
        with torch.no_grad():
            model.weight[:rows] += 1
        (patch,) = changes(model)
        assert patch.values.numel() == (rows if rows == 30 else 100) * 30
        assert patch.nbytes == min(rows * 30 * 6, 3000 * 2)


def rewritten(model: Any) -> None:
    with torch.no_grad():
        model.first.weight.mul_(1.01)


def through_data(model: Any) -> None:
    model.last.weight.data.mul_(1.1)


def other_memory(model: Any) -> None:
    model.tied.weight.data = model.tied.weight.data * 1.1


def others(model: Any) -> State:
    return {name: tensor + tensor.sign().to(tensor.dtype) for name, tensor in copied(model).items()}


def loaded(model: Any) -> None:
    model.load_state_dict(others(model))


def loaded_and_assigned(model: Any) -> None:
    model.load_state_dict(others(model), assign=True)


def assigned(model: Any) -> None:
    collage_fx.assign(model.norm.weight, torch.rand(96))


def of_no_optimizer(model: Any) -> None:
    with torch.no_grad():
        model.unused.bias.add_(1)


def stepped_by_another(model: Any) -> None:
    optimizer = torch.optim.SGD([model.first.bias], lr=0.1)
    collage_fx.install(optimizer)
    backward(model)
    optimizer.step()
    model.zero_grad()


def one_element_of_no_optimizer(model: Any) -> None:
    """As a broadcast of another process does: no version is counted."""
    model.unused.weight.data.view(-1)[37] += 1


def of_no_optimizer_through_data(model: Any) -> None:
    model.unused.weight.data.mul_(1.1)


def evaluated(model: Any) -> None:
    model(torch.randn(16, 33).bfloat16())  # which writes the averages


WRITES = (
    rewritten,
    through_data,
    other_memory,
    loaded,
    assigned,
    of_no_optimizer,
    one_element_of_no_optimizer,
    of_no_optimizer_through_data,
    stepped_by_another,
    evaluated,
)


@pytest.mark.parametrize("write", [*WRITES, loaded_and_assigned], ids=lambda write: str(write.__name__))
def test_what_others_write_is_sent(write: Callable[[Any], None]) -> None:
    model = Net()
    step = trained(adamw, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            step()
        forget_changes(model)
        copy = copied(model)
        write(model)
        assert wrong(model, copy)
        apply_changes(copy, changes(model))
        assert not wrong(model, copy)
        if write is not loaded_and_assigned:  # whose parameters are no longer the optimizer's
            write(model)
            step()
            apply_changes(copy, changes(model))
            assert not wrong(model, copy)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [adamw, muon])
def test_two_readers_of_a_program_that_writes_to_its_weights(make: Callable[[Any], Optimizer]) -> None:
    model = Net()
    step = trained(make, model)
    draw = random.Random(0)
    readers = {
        name: {key: torch.zeros_like(tensor) for key, tensor in copied(model).items()} for name in "ab"
    }
    for _ in range(40):
        step()
        if draw.random() < 0.3:
            draw.choice(WRITES)(model)
        for name, copy in readers.items():
            if draw.random() < 0.5:
                apply_changes(copy, changes(model, name))
                assert not wrong(model, copy)


def test_the_first_time_everything_is_sent() -> None:
    model = Net()
    found = changes(model)
    assert len(found.dense) == len(model.state_dict()) == len(found)
    assert found.changed == found.elements == sum(t.numel() for t in model.state_dict().values())
    assert not len(changes(model))


@dataclass(frozen=True)
class SeesAll(Pass):
    """Pass that asks for the whole graph."""

    name = "sees-all"

    def run(self, program: StepProgram) -> str:
        return "nothing"


@pytest.mark.parametrize("route", ["by family", "whole", "eager"])
def test_on_every_route(route: str) -> None:
    model = Net()
    options = {"passes": inserted(SeesAll(), before="analyze")} if route == "whole" else {}
    step = trained(adamw, model, **options)
    with torch.compiler.set_stance("force_eager" if route == "eager" else "default"):
        step()
        forget_changes(model)
        copy = copied(model)
        step()
        found = changes(model)
    assert found.sparse
    apply_changes(copy, found)
    assert not wrong(model, copy)


def test_where_gradients_come_and_go_and_steps_are_skipped() -> None:
    model = Net()
    optimizer = adamw(model.parameters())
    collage_fx.install(optimizer)
    copy = {name: torch.zeros_like(tensor) for name, tensor in copied(model).items()}
    for i in range(12):
        backward(model)
        for k, parameter in enumerate(model.parameters()):
            if (i + k) % 3 == 0:
                parameter.grad = None
        if i % 4 != 3:  # as a scaler skips it
            optimizer.step()
        optimizer.zero_grad()
        found = changes(model)
        apply_changes(copy, found)
        assert not wrong(model, copy)


def test_in_the_backward_pass() -> None:
    model = Net()
    optimizer = adamw([each for name, each in model.named_parameters() if "unused" not in name])
    collage_fx.install(optimizer)
    collage_fx.step_in_backward(model, optimizer)
    copy = {name: torch.zeros_like(tensor) for name, tensor in copied(model).items()}
    for i in range(4):
        backward(model)
        optimizer.step()
        found = changes(model)
        assert not i or found.sparse
        apply_changes(copy, found)
        assert not wrong(model, copy)


def test_signs_of_zeros_and_nans_are_changes() -> None:
    weight = Parameter(torch.tensor([0.0, -0.0, 1.0, 1.0] * 32).bfloat16())
    model = Module()
    model.weight = weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    collage_fx.install(optimizer)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    forget_changes(model)
    copy = copied(model)
    weight.grad = torch.tensor([0.0, 0.0, float("nan"), 1.0] * 32).bfloat16()
    optimizer.step()
    apply_changes(copy, changes(model))
    assert not wrong(model, copy)


# Files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["gap_delta", "raw"])
def test_incremental_checkpoints(tmp_path: Path, encoding: Any) -> None:
    model = Net()
    step = trained(adamw, model)
    step()
    torch.save(model.state_dict(), tmp_path / "full.pt")
    forget_changes(model, "checkpoint")
    for i in range(3):
        step()
        changes(model)  # of another reader
        written = collage_fx.save_changes(model, tmp_path / f"{i}.safetensors", encoding=encoding)
        assert written.sparse
    resumed = Net()
    resumed.load_state_dict(torch.load(tmp_path / "full.pt"))
    for i in range(3):
        apply_changes(resumed, collage_fx.load_changes(tmp_path / f"{i}.safetensors"))
    assert not wrong(model, copied(resumed))


def test_gaps_of_all_sizes(tmp_path: Path) -> None:
    indices = torch.tensor([0, 1, 65536, 65537, 65536 * 3 + 5], dtype=torch.int32)
    shape = (65536, 4)
    patches = [
        WeightPatch("wide", shape, torch.bfloat16, torch.rand(5).bfloat16(), indices),
        WeightPatch("near", shape, torch.bfloat16, torch.rand(3).bfloat16(), indices[:3]),
        WeightPatch("none", shape, torch.bfloat16, torch.rand(0).bfloat16(), indices[:0]),
    ]
    WeightChanges(tuple(patches), 3 * 65536 * 4).save(tmp_path / "file")
    file = SafetensorsFile(tmp_path / "file")
    assert (file["wide.idx"].dtype, file["near.idx"].dtype) == (torch.uint32, torch.uint16)
    for patch, loaded in zip(patches, collage_fx.load_changes(tmp_path / "file"), strict=True):
        assert patch[:3] == loaded[:3]
        assert torch.equal(bits(patch.values), bits(loaded.values))
        assert patch.indices is not None
        assert loaded.indices is not None
        assert torch.equal(patch.indices, loaded.indices)


def decoded_as_trl_does(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Name -> indices and values of a sparse file of TRL's layout: see Note [Layout of patches]."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = [key.removesuffix(".val") for key in file.keys() if key.endswith(".val")]  # noqa: SIM118
        is_gaps = file.metadata()["encoding"] == "gap_delta"
        found = {}
        for name in names:
            indices, values = file.get_tensor(f"{name}.idx"), file.get_tensor(f"{name}.val")
            found[name] = ((indices.long() + 1).cumsum(0) - 1 if is_gaps else indices), values
        return found


@pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="needs safetensors")
@pytest.mark.parametrize("encoding", ["gap_delta", "raw"])
def test_a_reader_of_trls_layout_gets_every_change(tmp_path: Path, encoding: Any) -> None:
    """Also of tensors that are whole, beside others that are not."""
    model = Net()
    step = trained(adamw, model)
    step()
    forget_changes(model)
    copy = copied(model)
    step()
    of_no_optimizer(model)
    found = changes(model)
    assert found.dense
    assert found.sparse
    found.save(tmp_path / "file", encoding)
    for name, (indices, values) in decoded_as_trl_does(tmp_path / "file").items():
        copy[name].view(-1)[indices.long()] = values
    assert not wrong(model, copy)


def test_a_file_of_whole_tensors_is_a_checkpoint(tmp_path: Path) -> None:
    model = Net()
    changes(model).save(tmp_path / "file")
    assert not wrong(model, dict(SafetensorsFile(tmp_path / "file")))
    assert len(collage_fx.load_changes(tmp_path / "file").dense) == len(model.state_dict())


class NamedModel(Module):
    """Model as vLLM's loader sees it: ``load_weights`` copies checkpoint tensors into parameters."""

    def __init__(self, held: State) -> None:
        super().__init__()
        self.held = held

    def load_weights(self, weights: Any) -> set[str]:
        for name, tensor in weights:
            self.held[name].copy_(tensor)
        return {name for name, _ in weights}


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vllm with checkpoint_weight_patch.py"
)
def test_vllms_loader_takes_the_patches() -> None:
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (  # type: ignore[import-not-found]
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    model = Net()
    step = trained(adamw, model)
    step()
    forget_changes(model)
    engine = NamedModel(copied(model))
    for _ in range(3):
        step()
        found = changes(model)
        for patches in (found.dense, found.sparse):
            load_checkpoint_weight_patches(engine, [CheckpointWeightPatch(*patch) for patch in patches])
        assert not wrong(model, engine.held)


# Refusals ---------------------------------------------------------------------------------------------------


def test_refusals(tmp_path: Path) -> None:
    optimizer = adamw(Net().parameters())
    with pytest.raises(InvalidOptionError, match=r"collage_fx\.changes\(model\)"):
        collage_fx.install(optimizer, changes=True)  # type: ignore[arg-type]
    model = Net()
    found = changes(model)
    with pytest.raises(InvalidOptionError, match="encoding"):
        found.save(tmp_path / "file", "zip")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="use one of 'gap_delta', 'raw'"):
        collage_fx.save_changes(model, tmp_path / "file", encoding="zip")  # type: ignore[arg-type]
    (tmp_path / "other").write_bytes(b"no such file")
    with pytest.raises(CheckpointMismatchError):
        collage_fx.load_changes(tmp_path / "other")


def test_a_torch_without_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ``torch.distributed`` has no ``is_initialized``."""
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_initialized")
    model = Net()
    collage_fx.save_changes(model, tmp_path / "file")
    assert len(collage_fx.load_changes(tmp_path / "file")) == len(model.state_dict())


@pytest.mark.parametrize("change", ["name", "shape", "dtype"])
def test_changes_of_another_model_write_nothing(change: str) -> None:
    model = Net()
    copy = {name: torch.zeros_like(tensor) for name, tensor in copied(model).items()}
    if change == "name":
        del copy["tied.weight"]
    else:
        copy["tied.weight"] = torch.zeros(2) if change == "shape" else copy["tied.weight"].float()
    with pytest.raises(CheckpointMismatchError, match=r"tied\.weight"):
        apply_changes(copy, changes(model))
    assert not any(tensor.any() for tensor in copy.values())


class FailsAt(TorchDispatchMode):
    """The n-th operator fails, as one does when memory runs out."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise MemoryError
        return func(*args, **(kwargs or {}))


def numbers_of_values(found: WeightChanges) -> dict[str, int]:
    return {patch.name: patch.values.numel() for patch in found.sparse}


@pytest.mark.parametrize("call", ["changes", "save_changes"])
def test_a_call_that_fails_takes_nothing(tmp_path: Path, call: str) -> None:
    """After an exception at every seventh operator the next call gives what has changed, or everything."""
    model = Net()
    step = trained(adamw, model)
    for reader in ("engine", "another", "third"):
        forget_changes(model, reader)
    copy = copied(model)
    step()
    expected = numbers_of_values(changes(model, "third"))
    assert expected
    fails = 0
    for n in itertools.count(1, step=7):
        try:
            with FailsAt(n):
                if call == "changes":
                    found = changes(model)
                else:
                    found = collage_fx.save_changes(model, tmp_path / "file", "engine")
        except MemoryError:
            fails += 1
            continue
        break
    assert fails > 15
    apply_changes(copy, found)
    assert not wrong(model, copy)
    assert numbers_of_values(changes(model, "another")) == expected
    assert numbers_of_values(found) == expected or not found.sparse


@pytest.mark.parametrize("encoding", ["gap_delta", "raw"])
def test_damaged_files_are_refused(tmp_path: Path, encoding: Any) -> None:
    """Files in which one bit has changed, in 200 places that are drawn."""
    model = Net()
    step = trained(adamw, model)
    forget_changes(model)
    step()
    path = tmp_path / "file"
    written = changes(model)
    written.save(path, encoding)
    data, draw = path.read_bytes(), random.Random(0)
    for _ in range(200):
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointMismatchError):
            collage_fx.load_changes(path)
    path.write_bytes(data)
    assert len(collage_fx.load_changes(path)) == len(written)


@pytest.mark.parametrize(
    ("indices", "values"),
    [
        ([0, 16], 2),
        ([-1, 3], 2),
        ([3, 2], 2),
        ([2, 2], 2),
        ([1, 2, 3], 2),
        ([[1, 2]], 2),
        ([1.0, 2.0], 2),
        (None, 15),
        (None, 17),
    ],
)
def test_damaged_patches_write_nothing(indices: Any, values: int) -> None:
    held = {name: torch.zeros(4, 4).bfloat16() for name in "ab"}
    right = WeightPatch("a", (4, 4), torch.bfloat16, torch.ones(1).bfloat16(), torch.tensor([3]))
    at = None if indices is None else torch.tensor(indices)
    damaged = WeightPatch("b", (4, 4), torch.bfloat16, torch.ones(values).bfloat16(), at)
    with pytest.raises(CheckpointMismatchError, match=r"where: b\n"):
        apply_changes(held, [right, damaged])
    assert not any(tensor.any() for tensor in held.values())
    other = damaged._replace(values=torch.ones(2), indices=torch.tensor([1, 2]))
    with pytest.raises(CheckpointMismatchError, match="float32"):
        apply_changes(held, [right, other])
    assert not any(tensor.any() for tensor in held.values())


# DTensors ---------------------------------------------------------------------------------------------------


def sharded(placement: Any) -> list[int]:
    """Numbers of wrong, sparse and dense tensors of a model in pieces, after steps and foreign writes."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model: Any = Module()
    shapes = {"even": (64, 32), "odd": (7, 33), "vector": (96,), "row": (1, 40)}
    for name, shape in shapes.items():
        fits = not placement.is_shard(1) or len(shape) > 1
        whole = torch.randn(shape).bfloat16()
        piece = distribute_tensor(whole, mesh, [placement if fits else Replicate()])
        model.register_parameter(name, Parameter(piece))
    optimizer = adamw(model.parameters())
    collage_fx.install(optimizer)
    copy = {name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()}
    counts = [0, 0, 0]
    for i in range(4):
        torch.manual_seed(i)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape).bfloat16()
            parameter.grad = distribute_tensor(gradient, mesh, parameter.placements)
        optimizer.step()
        if i == 2:
            with torch.no_grad():
                model.odd.mul_(2)
        found = changes(model).gathered()
        counts[1] += len(found.sparse) if i else 0
        counts[2] += len(found.dense) if i else 0
        apply_changes(copy, found)
        pieces: dict[str, Any] = dict(model.named_parameters())
        counts[0] += sum(
            not torch.equal(bits(pieces[name].detach().full_tensor()), bits(copy[name])) for name in shapes
        )
    again: Any = Module()
    for name, parameter in model.named_parameters():
        again.register_parameter(name, Parameter(torch.zeros_like(parameter)))
    apply_changes(again, changes(model, "another").gathered())
    for name, parameter in again.named_parameters():
        counts[0] += not torch.equal(bits(parameter.detach().full_tensor()), bits(copy[name]))
    return counts


def differing_copies() -> list[float]:
    """Gather the changes of a tensor that both processes hold, with different values."""
    rank = torch.distributed.get_rank()
    values = torch.tensor([1.0, 2.0]) + 10 * rank
    indices = torch.tensor([rank, 2], dtype=torch.int32)
    patch = WeightPatch("weight", (4,), torch.float32, values, indices)
    (found,) = WeightChanges((patch,), 4).gathered()
    assert found.indices is not None
    return [*found.indices.tolist(), *found.values.tolist()]


def test_of_copies_that_differ_the_first_process_counts(two_processes: Processes) -> None:
    for found in two_processes.run(differing_copies):
        assert found == [0, 1, 2, 1.0, 11.0, 2.0]


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_dtensors(two_processes: Processes, placement: Any) -> None:
    for wrong_tensors, sparse, dense in two_processes.run(sharded, placement):
        assert not wrong_tensors
        assert sparse > dense


def sharded_files(folder: str) -> list[str]:
    """Names of the tensors that an incremental checkpoint of an FSDP2 model restores wrongly."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 64), torch.nn.Linear(64, 7)).bfloat16()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = adamw(model.parameters())
    collage_fx.install(optimizer)
    copy: State = {}
    for i in range(3):
        model(torch.randn(4, 33).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        collage_fx.save_changes(model, Path(folder) / f"{i}.safetensors")
        torch.distributed.barrier()
        found = collage_fx.load_changes(Path(folder) / f"{i}.safetensors")
        assert bool(found.sparse) == (i > 0)
        if not copy:
            copy = {patch.name: torch.zeros(patch.shape, dtype=patch.dtype) for patch in found}
        apply_changes(copy, found)
    return [
        name
        for name, tensor in model.state_dict().items()
        if not torch.equal(bits(tensor.full_tensor()), bits(copy[name]))
    ]


def test_incremental_checkpoints_of_fsdp2(two_processes: Processes, tmp_path: Path) -> None:
    assert two_processes.run(sharded_files, str(tmp_path)) == [[], []]


FULL = StateDictOptions(full_state_dict=True)


def stage(saved: Any, copy: State, first: int) -> tuple[Any, State, list[str]]:
    """Train a model from a checkpoint, in pieces where there are processes, and keep a copy by patches.

    Returns:
        the checkpoint after it, the copy, and the tensors in which the copy has been wrong.
    """
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(33, 64), torch.nn.Linear(64, 7)).bfloat16()
    is_cut = torch.distributed.is_initialized()
    for each in (*model, model) if is_cut else ():
        fully_shard(each)
    optimizer = adamw(model.parameters())
    collage_fx.install(optimizer)
    if saved is not None:
        set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1], options=FULL)
    found_wrong = []
    for i in range(first, first + 3):
        torch.manual_seed(i)
        model(torch.randn(4, 33).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found = changes(model)
        found = found.gathered() if is_cut else found
        assert bool(found.sparse) == (i > first)
        copy = copy or {patch.name: torch.zeros(patch.shape, dtype=patch.dtype) for patch in found}
        apply_changes(copy, found)
        for name, tensor in model.state_dict().items():
            whole = tensor.full_tensor() if is_cut else tensor
            found_wrong += [] if torch.equal(bits(whole), bits(copy[name])) else [name]
    return get_state_dict(model, optimizer, options=FULL), copy, found_wrong


def test_resumed_in_two_processes_in_one_and_in_two(two_processes: Processes) -> None:
    (saved, copy, is_wrong), _ = two_processes.run(stage, None, {}, 0)
    assert not is_wrong
    saved, copy, is_wrong = stage(saved, copy, 3)
    assert not is_wrong
    _, (_, _, is_wrong) = two_processes.run(stage, saved, copy, 6)
    assert not is_wrong
