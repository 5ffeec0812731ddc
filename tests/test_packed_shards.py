"""Packed weights in pieces, by FSDP2 or tensor parallelism: two processes have the bits of one."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as recomputed

import collage_fx
from collage_fx import backend_of, full_state_dict, full_value, install, step_in_backward
from collage_fx.state.packed import is_packed
from collage_fx.torch_compat import local_tensor, whole_tensor, without_torch_function
from tests.support.memory import peak
from tests.support.processes import Processes

STEPS = 5

PLAIN, FEW = {"strategy": "none"}, {"bytes_per_parameter": 4.1}

#: Two of three weights: the rows of the other are not made of blocks. The first has an odd number of rows.
PACKED = ["0.weight", "4.weight"]


def network(way: str = "") -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 129), nn.GELU(), nn.Linear(129, 96, bias=False), nn.GELU(), nn.Linear(96, 64)]
    model = nn.Sequential(*layers).bfloat16()
    if "in parts" in way:
        wide = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mp_policy": wide} if "float32" in way else {}
        if "on the host" in way:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for each in (*layers[::2], model):
            fully_shard(each, reshard_after_forward="kept" not in way, **options)
    for layer in layers if "compiled" in way else ():
        layer.compile(backend="eager")
    return model


def optimizer_of(model: nn.Module, way: str = "") -> torch.optim.Optimizer:
    optimizer = install(torch.optim.AdamW(model.parameters(), lr=1e-3), weights="int16x32")
    if "in the backward pass" in way:
        step_in_backward(model, optimizer)
    return optimizer


def loss_of(model: nn.Module, seed: int, way: str) -> Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    if "float32" in way and "in parts" not in way:
        values = {name: p.float() for name, p in model.named_parameters()}
        return torch.func.functional_call(model, values, x.float()).square().mean()
    x = x.float() if "float32" in way else x
    for layer in model.children():
        x = recomputed(layer, x, use_reentrant=False) if "recomputed" in way else layer(x)
    return x.float().square().mean()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole_tensor(full_value(p)).detach() for name, p in model.named_parameters()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, way: str) -> float:
    for i in range(2 if "twice" in way else 1):
        loss = loss_of(model, 100 * i + seed, way)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if "loaded" in way:
        model.load_state_dict(model.state_dict())
    if "read" in way:  # values and copies of them
        sizes = [float(whole_tensor(p.detach()).float().norm()) for p in model.parameters()]
        assert sizes == [float(p.to(torch.bfloat16).float().norm()) for p in values_of(model).values()]
    if "written" in way:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
    if "assigned" in way:
        for p in model.parameters():
            collage_fx.assign(p, full_value(p) * (1 - 2.0**-12))
    return loss.item()


def trained(way: str, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Return losses, values and the names of packed weights of a training."""
    torch._dynamo.reset()
    model = network(way)
    optimizer = optimizer_of(model, way)
    losses = [step(model, optimizer, seed, way) for seed in range(steps)]
    return losses, values_of(model), [name for name, p in model.named_parameters() if is_packed(p)]


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.filterwarnings("ignore:collage_fx.*written to between two steps")
@pytest.mark.parametrize(
    "way",
    [
        "",
        "kept",
        "compiled",
        "in the backward pass",
        "recomputed",
        "twice",
        "float32",
        "on the host",
        "read",
        "loaded",
        "written",
        "assigned",
    ],
)
def test_shards_have_the_bits_of_one_process(two_processes: Processes, way: str) -> None:
    losses, values, names = trained(way)
    assert names == (PACKED if way not in ("loaded", "written") else [])  # these unpack after the step
    for found in two_processes.run(trained, f"in parts, {way}"):
        assert found[0] == losses
        compare(found[1], values)
        assert found[2] == names


def memory(**options: Any) -> tuple[float, float, float]:
    """Return bytes per element: held for parameters, reported of all, and the most in a pass more."""
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3))).bfloat16()
    for each in (*model, model):
        fully_shard(each)
    optimizer = install(torch.optim.AdamW(model.parameters(), lr=1e-3), **options)

    def take_a_pass() -> None:
        model(torch.ones(1, 512).bfloat16()).sum().backward()

    for _ in range(3):
        take_a_pass()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(torch.ones(1, 512).bfloat16())
    model.reshard()  # type: ignore[operator]  # which fully_shard() adds
    own = {id(p) for p in model.parameters()}
    held = [each for each in gc.get_objects() if type(each) is FSDPParam and id(each.sharded_param) in own]
    assert len(held) == 3
    storages = [each._sharded_param_data.untyped_storage() for each in held]
    with without_torch_function():
        storages += [local_tensor(p).untyped_storage() for p in model.parameters()]
    elements = 3 * 512 * 512 / 2
    size = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
    reported = backend_of(optimizer).report().bytes_per_parameter()["total"]
    # The profiler does not see what threads of gloo free.
    return size / elements, reported, min(peak(take_a_pass) for _ in range(5)) / elements


def test_shards_take_the_memory_of_their_codes(two_processes: Processes) -> None:
    """FSDP2 keeps none for them, and a pass decodes one layer at a time."""
    plain, packed = (two_processes.run(partial(memory, **options)) for options in (PLAIN, FEW))
    for (held, _, most), (held_packed, reported, most_packed) in zip(plain, packed, strict=True):
        assert held == 2
        assert held_packed < 0.001
        assert 4 < reported < 4.11
        assert most_packed < 1.01 * most


def resumed(way: str, folder: Path) -> None:
    """Save at the second of some steps, as torch.distributed.checkpoint does, and go on with new objects."""
    torch._dynamo.reset()
    options = StateDictOptions(cpu_offload=False)
    model = network("in parts")
    optimizer = optimizer_of(model)
    for seed in range(2):
        step(model, optimizer, seed, way)
    states, of_optimizer = get_state_dict(model, optimizer, options=options)
    checkpoint.save({"model": states, "optimizer": of_optimizer}, checkpoint_id=folder)


def gone_on(way: str, folder: Path) -> dict[str, Tensor]:
    """Load into new objects, whole or in parts, and take the steps that are left."""
    torch._dynamo.reset()
    model = network(way)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = optimizer_of(model)
    found: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    for seed in range(2, STEPS):
        step(model, optimizer, seed, way)
    return values_of(model)


@pytest.mark.parametrize("way", ["in parts", "whole"])
def test_a_checkpoint_goes_on_to_the_bit_in_parts_or_whole(
    two_processes: Processes, way: str, tmp_path: Path
) -> None:
    _, values, _ = trained("")
    two_processes.run(resumed, way, tmp_path)
    for found in two_processes.run(gone_on, way, tmp_path):
        compare(found, values)


def exported() -> dict[str, Tensor]:
    """Return what a model's state dicts hold, in one piece."""
    torch._dynamo.reset()
    model = network("in parts")
    optimizer = optimizer_of(model)
    for seed in range(2):
        step(model, optimizer, seed, "")
    values = values_of(model)
    compare({name: whole_tensor(value) for name, value in full_state_dict(model).items()}, values)
    rounded = {name: value.bfloat16() for name, value in values.items()}
    compare({name: whole_tensor(value) for name, value in model.state_dict().items()}, rounded)
    full: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return full


def test_state_dicts_hold_decoded_values(two_processes: Processes) -> None:
    _, values, _ = trained("", 2)
    found, _ = two_processes.run(exported)  # the first process alone gets a full state dict
    compare(found, {name: value.bfloat16() for name, value in values.items()})


def trained_by_tensor_parallelism(steps: int = STEPS) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Train with weights that each process has columns or rows of, and computes with."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False)
    model: nn.Module = nn.Sequential(*layers).bfloat16()
    if torch.distributed.is_initialized():
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    optimizer = optimizer_of(model)
    losses = [step(model, optimizer, seed, "") for seed in range(steps)]
    return losses, values_of(model), [name for name, p in model.named_parameters() if is_packed(p)]


def test_tensor_parallelism_has_the_weights_of_one_process(two_processes: Processes) -> None:
    """But for the order in which sums over columns are taken."""
    start = trained_by_tensor_parallelism(0)[1]
    losses, values, names = trained_by_tensor_parallelism()
    for found in two_processes.run(trained_by_tensor_parallelism):
        assert found[2] == names == ["0.weight", "2.weight"]
        assert found[0] == pytest.approx(losses, rel=0.02)
        for name in names:
            off, way = found[1][name] - values[name], values[name] - start[name]
            assert off.norm() < 0.1 * way.norm()
