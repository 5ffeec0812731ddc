"""Every way of torch's to train with several processes: four of them leave the bits that one leaves alone.

In the four, ``install`` makes the compiled step the optimizer's own; in the one, ``torch.compile`` is called.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from collage_fx import (
    CollageBackend,
    CollageError,
    error_terms,
    full_state_dict,
    full_value,
    install,
    load_full_state_dict,
    save_full_state_dict,
)
from collage_fx.choices import Rounding
from collage_fx.state.optimizers import state_tensors
from tests.support.processes import Processes
from tests.support.training import compiled, differences, everything, run_steps

WORLD = 4


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    processes = Processes(WORLD, tmp_path_factory.mktemp("store"))
    yield processes
    processes.stop()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(4, width)
        self.down = nn.Linear(width, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x * self.scale).relu())


def model(seed: int = 0) -> nn.Sequential:
    """Shapes that four processes cannot share evenly, and some with less than a row for each."""
    torch.manual_seed(seed)
    return nn.Sequential(Block(6), Block(6), nn.Linear(4, 3)).bfloat16()


def adamw(of: nn.Module) -> Optimizer:
    return torch.optim.AdamW(of.named_parameters(), lr=1e-3, weight_decay=0.1)


def each_and_all(of: nn.Sequential, **options: Any) -> nn.Module:
    for block in of:
        fully_shard(block, **options)
    fully_shard(of, **options)
    return of


def hsdp(of: nn.Sequential) -> nn.Module:
    return each_and_all(of, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "pieces")))


def fsdp2_and_tp(of: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    for block in (of[0], of[1]):
        parallelize_module(block, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return each_and_all(of, mesh=mesh["data"])


def ddp(of: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(of)


def fsdp1(of: nn.Sequential) -> nn.Module:
    return FullyShardedDataParallel(of, device_id=torch.device("cpu"), use_orig_params=False)


def fsdp1_with_original_parameters(of: nn.Sequential) -> nn.Module:
    return FullyShardedDataParallel(of, device_id=torch.device("cpu"), use_orig_params=True)


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def of_each(optimizer: Optimizer, read: Callable[[Tensor], Any]) -> dict[str, Any]:
    """What is read of each parameter and state tensor of an optimizer, by name."""
    (group,) = optimizer.param_groups
    found = {}
    for name, p in zip(group["param_names"], group["params"], strict=True):
        for slot, tensor in (("parameter", p), *state_tensors(optimizer.state[p])):
            found[f"{name}.{slot}"] = read(tensor)
    return found


def left_by(optimizer: Optimizer) -> dict[str, list[Tensor]]:
    return of_each(optimizer, lambda tensor: [whole(each) for each in (tensor, *error_terms(tensor))])


def measured_by(backend: CollageBackend) -> list[dict[str, tuple[int, float, float]]]:
    """Return the measurements of each step, by tensor."""
    if not backend.options.metrics:
        return []
    return [
        {name: (each.elements, each.along, each.lost_hi) for name, each in of_step.items()}
        for of_step in backend.metrics().values()
    ]


def trained(parallel: Callable[[nn.Sequential], nn.Module], path: Path | None = None) -> dict[str, Any]:
    """What some steps start from, are given and leave; of FSDP1 in this process, else in one piece.

    With a path also metrics, and what full state dicts and a file of them hold.
    """
    torch._dynamo.reset()
    made = parallel(model())
    optimizer = adamw(made)
    start = of_each(optimizer, whole)
    # Dither goes by places in memory, which are others where columns are shared out.
    rounding: Rounding = "nearest" if parallel is fsdp2_and_tp else "dither"
    backend = CollageBackend(metrics=path is not None, rounding=rounding)
    install(optimizer, backend=backend)
    gradients = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed + 10 * (torch.distributed.get_rank() // 2))
        made(torch.randn(8, 4, generator=generator).bfloat16()).square().mean().backward()
        params = optimizer.param_groups[0]["params"]
        gradients.append([None if p.grad is None else whole(p.grad) for p in params])
        optimizer.step()
        optimizer.zero_grad()
    found = {
        "start": start,
        "rounding": rounding,
        "gradients": gradients,
        "left": left_by(optimizer),
        "full": of_each(optimizer, lambda tensor: whole(full_value(tensor))),
        "names": [row.name for row in backend.report().graphs[-1].tensors],
        "metrics": measured_by(backend),
    }
    if path is not None:
        save_full_state_dict(made, path)
        found["file"] = dict(full_state_dict(made, gather=True))
        other = parallel(model(seed=1))
        other_optimizer = adamw(other)
        load_full_state_dict(other, other_optimizer, path)
        found["loaded"] = of_each(other_optimizer, lambda tensor: whole(full_value(tensor)))
        kept = full_state_dict(made)
        assert all(isinstance(each, DTensor) for each in kept.values())
    return found


def replayed(found: dict[str, Any]) -> dict[str, Any]:
    """What is left of ordinary tensors in one process, from the same start and gradients."""
    torch._dynamo.reset()
    params = {
        name.removesuffix(".parameter"): nn.Parameter(tensor.clone())
        for name, tensor in found["start"].items()
    }
    optimizer = torch.optim.AdamW(params.items(), lr=1e-3, weight_decay=0.1)
    backend = CollageBackend(metrics=bool(found["metrics"]), rounding=found["rounding"])
    step: Callable[[], Any] = torch.compile(optimizer.step, backend=backend)
    for of_step in found["gradients"]:
        for p, gradient in zip(params.values(), of_step, strict=True):
            p.grad = gradient
        step()
    return {
        "left": left_by(optimizer),
        "names": [row.name for row in backend.report().graphs[-1].tensors],
        "metrics": measured_by(backend),
    }


def assert_same(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> None:
    assert one.keys() == other.keys()
    for name, tensors in one.items():
        for mine, theirs in zip(tensors, other[name], strict=True):
            assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("parallel", [hsdp, fsdp2_and_tp, ddp])
def test_they_leave_the_bits_of_one_process(four_processes: Processes, parallel: Any, tmp_path: Path) -> None:
    is_sharded = parallel is not ddp
    path = tmp_path / "model.safetensors" if is_sharded else None
    first, *others = four_processes.run(trained, parallel, path)
    alone = replayed(first)
    for found in (first, *others):
        assert_same(found["left"], alone["left"])
        assert any(term.any() for _, term in (each for each in found["left"].values() if len(each) > 1))
        assert found["names"] == alone["names"]
        for name, (hi, *terms) in found["left"].items():
            assert torch.equal(found["full"][name], sum(map(Tensor.double, terms), hi.double())), name
        assert len(found["metrics"]) == 3 * is_sharded
        for one, other in zip(alone["metrics"], found["metrics"], strict=True):
            assert one.keys() == other.keys()
            for name, numbers in one.items():
                assert numbers == pytest.approx(other[name], rel=2 * 2.1e-6), name  # each to 2.1e-6
        if is_sharded:
            for name, tensor in found["file"].items():
                assert torch.equal(tensor, found["full"][f"{name}.parameter"].float())
            for name, value in found["loaded"].items():
                assert torch.equal(value, found["full"][name]), name
    if is_sharded:
        assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]


#: Steps of a run in which the buffers of gradients move once, behind the first of them.
LONG = 25


def trained_in_buckets() -> dict[str, Any]:
    """Train with gradients that are views of DDP's buckets, beside float64 given the same gradients.

    Returns the error, its bound, and the units of what has been compiled.
    """
    torch._dynamo.reset()
    made = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    optimizer = adamw(made)
    params = [*made.parameters()]
    reference = [nn.Parameter(p.detach().double()) for p in params]
    start = torch.cat([p.detach().flatten() for p in reference])
    of_reference = torch.optim.AdamW(reference, lr=1e-3, weight_decay=0.1)
    backend = CollageBackend(strategy="full")
    install(optimizer, backend=backend)
    places = set()
    for seed in range(LONG):
        generator = torch.Generator().manual_seed(seed + 100 * torch.distributed.get_rank())
        made(torch.randn(8, 4, generator=generator).bfloat16()).square().mean().backward()
        for p, wide in zip(params, reference, strict=True):
            assert p.grad is not None
            assert p.grad._is_view()
            wide.grad = p.grad.double()
        places.add(tuple(p.grad.data_ptr() for p in params if p.grad is not None))
        optimizer.step()
        of_reference.step()
        optimizer.zero_grad()
    assert len(places) > 1
    expected = torch.cat([p.detach().flatten() for p in reference])
    met = torch.cat([full_value(p).flatten() for p in params]).double()
    moved = (expected - start).norm()
    return {
        "error": float((met - expected).norm() / moved),
        # float32: a parameter is rounded in each step, and beta2 in the first correction of bias.
        "bound": float(LONG * 2.0**-24 * expected.norm() / moved) + 2.0**-24 / (1 - 0.999),
        "units": [graph.route.unit for graph in backend.report().graphs],
    }


def test_gradients_in_buckets_against_float64(four_processes: Processes) -> None:
    """``gradient_as_bucket_view=True``: compiled once, by family."""
    for found in four_processes.run(trained_in_buckets):
        print(found)
        assert found["units"] == ["by family"]
        assert found["error"] <= found["bound"]


def trained_by_fsdp1(parallel: Callable[[nn.Sequential], nn.Module]) -> dict[str, Any]:
    """Likewise, and what full state dicts say."""
    found = trained(parallel)
    made = parallel(model())
    optimizer = adamw(made)
    made(torch.ones(8, 4).bfloat16()).sum().backward()
    compiled(optimizer)()
    found["refused"] = []
    weights = {name: p.detach() for name, p in model().named_parameters()}
    for use in (lambda: full_state_dict(made), lambda: load_full_state_dict(made, optimizer, weights)):
        try:
            use()
        except CollageError as refusal:
            found["refused"].append(str(refusal))
    return found


@pytest.mark.parametrize("parallel", [fsdp1, fsdp1_with_original_parameters])
def test_flat_parameters(four_processes: Processes, parallel: Any) -> None:
    results = four_processes.run(trained_by_fsdp1, parallel)
    for found in results:
        assert [text.count("fully_shard") for text in found["refused"]] == [1, 1]
    for found in (results[0], results[-1]):
        assert_same(found["left"], replayed(found)["left"])


def gone_on_under_fsdp1(parallel: Callable[[nn.Sequential], nn.Module], fmt: Any) -> list[Any]:
    """Results in this process of a run, and of another that goes on from its gathered state."""
    torch._dynamo.reset()
    made = [parallel(model(seed)) for seed in (0, 1)]
    optimizers = [install(adamw(each), error_format=fmt) for each in made]
    for seed in range(6):
        if seed == 3:
            weights, state = get_state_dict(made[0], optimizers[0])
            set_state_dict(made[1], optimizers[1], model_state_dict=weights, optim_state_dict=state)
        for each, optimizer in zip(made, optimizers, strict=True):
            torch.manual_seed(seed)
            each(torch.randn(8, 4).bfloat16()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [left_by(optimizer) for optimizer in optimizers]


@pytest.mark.parametrize("fmt", ["exact", "mcf", "byte"])
@pytest.mark.parametrize("parallel", [fsdp1, fsdp1_with_original_parameters])
def test_gathered_state_of_flat_parameters(four_processes: Processes, parallel: Any, fmt: str) -> None:
    """``FSDP.optim_state_dict`` gathers tensors of one dtype, and of the sizes of parameters."""
    for found, resumed in four_processes.run(gone_on_under_fsdp1, parallel, fmt):
        assert any(len(tensors) > 1 for tensors in found.values())
        assert_same(found, resumed)


def zero1(of: nn.Module) -> ZeroRedundancyOptimizer:
    """Each process steps some parameters, and sends them to the others."""
    return install(ZeroRedundancyOptimizer(of.parameters(), torch.optim.AdamW, lr=1e-3, weight_decay=0.1))


def trained_by_zero1() -> list[dict[str, Any]]:
    """What an uninterrupted run leaves in this process, and two that go on: a fresh one, and a warm one."""
    torch._dynamo.reset()
    made = [model(), model(seed=1), model(seed=2)]
    first, fresh, warm = optimizers = [zero1(each) for each in made]
    run_steps(first.step, list(made[0].parameters()), range(2))
    run_steps(warm.step, list(made[2].parameters()), [7])
    first.consolidate_state_dict()
    saved: list[Any] = [first.state_dict() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(saved)
    for each, optimizer in ((made[1], fresh), (made[2], warm)):
        each.load_state_dict(made[0].state_dict())
        optimizer.load_state_dict(copy.deepcopy(saved[0]))
    left = []
    for each, optimizer in zip(made, optimizers, strict=True):
        run_steps(optimizer.step, list(each.parameters()), range(2, 4))
        names = {id(p): name for name, p in each.named_parameters()}
        found = {f"{name}.parameter": [whole(p)] for name, p in each.named_parameters()}
        for p in optimizer.optim.param_groups[0]["params"]:
            for slot, tensor in (("parameter", p), *state_tensors(optimizer.optim.state[p])):
                found[f"{names[id(p)]}.{slot}"] = [whole(t) for t in (tensor, *error_terms(tensor))]
        left.append(found)
    return left


def test_zero1(four_processes: Processes) -> None:
    """Stepped, consolidated, and loaded by an optimizer that has stepped, and by one that has not."""
    torch._dynamo.reset()
    alone = model()
    optimizer = adamw(alone)
    run_steps(compiled(optimizer), list(alone.parameters()), range(4))
    expected = left_by(optimizer)
    seen: set[str] = set()
    for of_process in four_processes.run(trained_by_zero1):
        for found in of_process:
            for name, tensors in found.items():
                for one, other in zip(tensors, expected[name], strict=False):  # others' error terms are there
                    assert torch.equal(one, other), name
                    seen |= {name} if len(tensors) == len(expected[name]) else set()
    assert seen == expected.keys()


# Checkpoints. -----------------------------------------------------------------------------------------------


def give_gradients(of: nn.Module, seed: int) -> None:
    """The same to each process, which takes its pieces."""
    generator = torch.Generator().manual_seed(seed)
    for p in of.parameters():
        gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
        if isinstance(p, DTensor):
            gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = gradient


def steps(of: nn.Module, optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        give_gradients(of, seed)
        optimizer.step()
        optimizer.zero_grad()


def loaded(of: nn.Module, folder: Path, group: Any = None) -> Optimizer:
    optimizer = install(adamw(of))
    states, optimizer_states = get_state_dict(of, optimizer)
    found: dict[str, Any] = {"model": states, "optimizer": optimizer_states}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        checkpoint.load(found, checkpoint_id=folder, process_group=group)
    set_state_dict(of, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return optimizer


def saved_while_it_goes_on(
    of: nn.Module, optimizer: Optimizer, folder: Path, seeds: range, group: Any = None
) -> None:
    states, optimizer_states = get_state_dict(of, optimizer)
    writing = checkpoint.async_save(
        {"model": states, "optimizer": optimizer_states}, checkpoint_id=folder, process_group=group
    )
    steps(of, optimizer, seeds)  # which the file must not have
    assert isinstance(writing, Future)
    writing.result()


def run_of_two(folder: Path) -> None:
    torch._dynamo.reset()
    mesh = DeviceMesh("cpu", [0, 1])
    if torch.distributed.get_rank() < 2:
        of = model()
        each_and_all(of, mesh=mesh)
        optimizer = install(adamw(of))
        steps(of, optimizer, range(2))
        saved_while_it_goes_on(of, optimizer, folder, range(2, 4), mesh.get_group())


def run_of_four(of_two: Path, folder: Path) -> None:
    torch._dynamo.reset()
    of = model(seed=1)
    each_and_all(of)
    optimizer = loaded(of, of_two)
    steps(of, optimizer, range(2, 4))
    saved_while_it_goes_on(of, optimizer, folder, range(4, 6))


def test_a_run_goes_on_in_two_then_four_processes_then_one(four_processes: Processes, tmp_path: Path) -> None:
    four_processes.run(run_of_two, tmp_path / "two")
    four_processes.run(run_of_four, tmp_path / "two", tmp_path / "four")
    torch._dynamo.reset()
    alone = model()
    uninterrupted = install(adamw(alone))
    steps(alone, uninterrupted, range(6))
    last = model(seed=2)
    resumed = loaded(last, tmp_path / "four")
    steps(last, resumed, range(4, 6))
    assert not differences(everything(uninterrupted), everything(resumed))
    assert any(".error." in name for name in everything(resumed))
