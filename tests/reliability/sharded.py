"""Drawn cases of several processes: other numbers of them, other pieces, and processes that are killed."""

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import Parameter, ParameterList
from torch.optim import Optimizer

from collage_fx.torch_compat import sharding_of
from tests.reliability.cases import Outcome
from tests.reliability.runs import SETUPS, STEPS, Setup, different_elements, params_of, uninterrupted
from tests.support.processes import Processes
from tests.support.training import compiled, everything, set_as_own_step

ELEMENTWISE = tuple(
    setup for setup in SETUPS if setup.name in ("AdamW, plus", "AdamW, light", "SGD, momentum")
)
PLACEMENTS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate())


def in_pieces(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    fits = not placement.is_shard(1) or tensor.dim() > 1
    return distribute_tensor(tensor, mesh, [placement if fits else Shard(0)], src_data_rank=None)


def started(setup: Setup, mesh: DeviceMesh, placement: Placement) -> Optimizer:
    """An optimizer whose own step is the compiled one, so that torch makes state to be loaded by it."""
    torch._dynamo.reset()
    optimizer = setup.make([Parameter(in_pieces(value, mesh, placement)) for value in setup.start()])
    set_as_own_step(optimizer, compiled(optimizer, **setup.options))
    return optimizer


def stepped(optimizer: Optimizer, seeds: range) -> None:
    """The gradients of ``run_steps``, in pieces."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in params_of(optimizer):
            gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
            assert isinstance(p, DTensor)
            p.grad = in_pieces(gradient, p.device_mesh, p.placements[0])
        optimizer.step()


def states(optimizer: Optimizer) -> dict[str, Any]:
    model, of_optimizer = get_state_dict(ParameterList(params_of(optimizer)), optimizer)
    return {"model": model, "optimizer": of_optimizer}


def group_of(optimizer: Optimizer) -> Any:
    pieces = sharding_of(params_of(optimizer)[0])
    assert pieces is not None
    return pieces.mesh.get_group()


def load(optimizer: Optimizer, folder: Path) -> None:
    found = states(optimizer)
    checkpoint.load(found, checkpoint_id=folder, process_group=group_of(optimizer))
    set_state_dict(
        ParameterList(params_of(optimizer)),
        optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
    )


def save(optimizer: Optimizer, folder: Path) -> None:
    checkpoint.save(states(optimizer), checkpoint_id=folder, process_group=group_of(optimizer))


def lost(setup: Setup, taken: int, optimizer: Optimizer) -> int:
    found = {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in everything(optimizer).items()
    }
    return different_elements(uninterrupted(setup)[taken].everything, found)


def resharded(seed: int, folder: Path) -> Outcome:
    """In each of four processes: a run of some of them in some pieces goes on in others."""
    random = Random(seed)
    setup, taken, steps = random.choice(ELEMENTWISE), random.randrange(2, STEPS - 3), random.randint(1, 3)
    counts = random.sample((1, 2, 4), 2)
    before, after = random.choice(PLACEMENTS), random.choice(PLACEMENTS)
    if before.is_shard(1) or after.is_shard(1):  # dither goes by places in memory: docs/limits.md
        setup = replace(setup, options={**setup.options, "rounding": "nearest"})
    one, other = (DeviceMesh("cpu", list(range(count))) for count in counts)
    rank, different = torch.distributed.get_rank(), 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank < counts[0]:
            optimizer = started(setup, one, before)
            stepped(optimizer, range(taken))
            save(optimizer, folder)
        torch.distributed.barrier()
        if rank < counts[1]:
            optimizer = started(setup, other, after)
            stepped(optimizer, range(77, 79))  # for what it has to have to be loaded into
            load(optimizer, folder)
            stepped(optimizer, range(taken, taken + steps))
            different = lost(setup, taken + steps, optimizer)
    told = tuple(str(each.message) for each in caught if "collage_fx" in str(each.message))
    return Outcome((f"DTensors of {counts[0]}, then {counts[1]} processes",), different, told)


def saved_until_killed(setup: Setup, folder: Path) -> None:
    """In each of two processes: saves after each step, and says so when all of it is there."""
    optimizer = started(setup, DeviceMesh("cpu", [0, 1]), Shard(0))
    for taken in range(STEPS - 3):
        stepped(optimizer, range(taken, taken + 1))
        if taken >= 1:
            save(optimizer, folder / str(taken + 1))
            torch.distributed.barrier()
            (folder / f"{taken + 1}.done").touch()
    time.sleep(600)


def resumed(setup: Setup, folder: Path, taken: int) -> int:
    """In each of four processes: elements that differ in two of them, two steps after the last checkpoint."""
    mesh = DeviceMesh("cpu", [0, 1])
    if torch.distributed.get_rank() > 1:
        return 0
    optimizer = started(setup, mesh, Shard(0))
    stepped(optimizer, range(77, 79))
    load(optimizer, folder / str(taken))
    stepped(optimizer, range(taken, taken + 2))
    return lost(setup, taken + 2, optimizer)


def killed(seed: int, others: Processes) -> Outcome:
    """Two processes are killed (SIGKILL) at some time while they step and save, and two others go on."""
    random = Random(seed)
    setup = random.choice(ELEMENTWISE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = Processes(2, _made(folder / "first"))
        first.start(saved_until_killed, setup, folder)
        while not list(folder.glob("*.done")):
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.5))
        first.kill()
        taken = max(int(path.stem) for path in folder.glob("*.done"))
        different = max(others.run(resumed, setup, folder, taken))
    return Outcome(("two processes killed (SIGKILL) while they step and save",), different, ())


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def taken(seeds: range) -> list[Outcome]:
    """The outcomes of some seeds: one in four of processes that are killed."""
    outcomes = []
    with tempfile.TemporaryDirectory() as name:
        processes = Processes(4, _made(Path(name) / "store"))
        for seed in seeds:
            if seed % 4 == 0:
                outcomes.append(killed(seed, processes))
            else:
                of_each = processes.run(resharded, seed, _made(Path(name) / str(seed)))
                outcomes.append(max(of_each, key=lambda outcome: (outcome.lost, len(outcome.told))))
        processes.stop()
    return outcomes
