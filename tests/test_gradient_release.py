"""Steps in the backward pass: the bits of steps after it, one bucket of gradients alive, what is refused."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim import Optimizer

import collage_fx
from collage_fx import CollageError, full_value, install, offload, step_in_backward
from collage_fx.errors import GradientReleaseError, InvalidOptionError, UnsupportedOptimizerError
from collage_fx.graph import StepProgram
from collage_fx.pipeline import Pass, inserted
from tests.support.processes import Processes
from tests.support.substitutes import lookups_of_parameters

Make = Callable[[Any], Optimizer]
#: State of an optimizer and a model's whole values, by name.
Left = dict[str, Any]

LAYERS, WIDTH = 6, 64


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).bfloat16()


def batches(count: int, seed: int = 1) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(8, WIDTH, generator=generator).bfloat16()


def adamw(of: Any) -> Optimizer:
    return torch.optim.AdamW(of, lr=1e-3, weight_decay=0.1)


def whole(tensor: Tensor) -> Tensor:
    value = full_value(tensor)
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def left_by(of: nn.Module, optimizer: Optimizer) -> Left:
    names = dict(of.named_parameters())
    values: Left = {name: whole(p) for name, p in names.items()}
    for name, p in names.items():
        for key, each in optimizer.state[p].items():
            values[f"{name}.{key}"] = whole(each) if isinstance(each, Tensor) else each
    return values


def test_a_handle_tells_what_it_is() -> None:
    of = model()
    released = step_in_backward(of, optimizer := adamw(of.parameters()))
    of(next(batches(1))).float().square().mean().backward()
    waited = released.largest
    assert waited > 0
    count = len(optimizer.param_groups[0]["params"])
    assert repr(released) == (
        f"<GradientRelease of AdamW: {count} parameters, at most {waited:,} bytes of gradients have waited>"
    )
    assert repr(offload(adamw(model().parameters()))).startswith(
        f"<Offload of AdamW: {count} parameters, at most 0 bytes"
    )


def assert_same(one: Left, other: Left) -> None:
    assert one.keys() == other.keys()
    differ = [
        name
        for name, value in one.items()
        if not (torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name])
    ]
    assert not differ


def loss_of(of: nn.Module, batch: Tensor) -> Tensor:
    return of(batch).float().square().mean()


def trained(make: Make, *, released: bool, steps: int = 5, options: Any = (), **keywords: Any) -> Left:
    """Train with a warm-up from 0, and return what is left."""
    of = model()
    optimizer = install(make(of.parameters()), **dict(options))
    if released:
        step_in_backward(of, optimizer, **keywords)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
    for batch in batches(steps):
        loss_of(of, batch).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return left_by(of, optimizer)


OPTIMIZERS: dict[str, Make] = {
    "AdamW": adamw,
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_of_steps_after_the_backward_pass(name: str) -> None:
    assert_same(trained(OPTIMIZERS[name], released=True), trained(OPTIMIZERS[name], released=False))


@pytest.mark.parametrize("bytes_per_parameter", [8, 5.1])
def test_bits_of_packed_state(bytes_per_parameter: float) -> None:
    options = {"bytes_per_parameter": bytes_per_parameter}
    ways = [trained(adamw, released=released, options=options) for released in (True, False)]
    assert_same(*ways)


@dataclass(frozen=True)
class Looking(Pass):
    """A pass that sees the whole graph, so that the step does not consist of rows."""

    name: ClassVar[str] = "looking"

    def run(self, program: StepProgram) -> str:
        return "seen"


def test_a_step_that_does_not_consist_of_rows() -> None:
    """Each set of gradients is compiled; a gradient that is absent is never read."""
    options = {"passes": inserted(Looking(), before="allocate")}
    size = sum(p.nbytes for p in model().parameters())
    found = trained(adamw, released=True, options=options, bucket_bytes=size // 3)
    assert_same(found, trained(adamw, released=False, options=options))


class Counting(Optimizer):
    """Counts steps in its groups, for all parameters, and in an attribute."""

    def __init__(self, params: Any) -> None:
        self.steps = 0
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.mul_(0.9).add_(p.grad)
                    p.add_(average, alpha=-group["lr"] / (group["k"] * self.steps))


def test_what_all_parameters_have_in_common_changes_once_in_a_step() -> None:
    ways: list[Left] = []
    for released in (True, False):
        of = model()
        optimizer = Counting(of.parameters())
        if released:
            step_in_backward(of, optimizer)
        else:
            install(optimizer)
        for batch in batches(4):
            loss_of(of, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (optimizer.steps, optimizer.param_groups[0]["k"]) == (4, 4)
        ways.append({name: whole(p) for name, p in of.named_parameters()})
    exact = model().double()
    moved = {name: ways[1][name] - p.detach() for name, p in exact.named_parameters()}
    for name, way in moved.items():  # recorded parts have other phases of dither than a captured step
        assert float((ways[0][name] - ways[1][name]).norm() / way.norm()) < 0.01


class CountingInTensors(Optimizer):
    """Counts steps in a tensor of its groups, which each step changes and then replaces by another."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"].add_(1)
            group["k"] = group["k"] + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (group["lr"] / group["k"]), alpha=-1)


def test_a_tensor_of_a_group_that_a_step_changes_and_replaces_counts_once_in_a_step() -> None:
    """Each part of a step begins with the tensor of before, in the same object."""
    of = model()
    optimizer = CountingInTensors(of.parameters(), {"lr": 1e-2, "k": torch.zeros(())})
    step_in_backward(of, optimizer)
    before = optimizer.param_groups[0]["k"]
    for i, batch in enumerate(batches(3), 1):
        loss_of(of, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        now = optimizer.param_groups[0]["k"]
        assert now is not before
        assert (int(before), int(now)) == (2 * i - 1, 2 * i)
        before = now


def test_gradients_are_freed_as_the_backward_pass_goes_on() -> None:
    of, alive = model(), []
    optimizer = adamw(of.parameters())
    release = step_in_backward(of, optimizer)
    for p in of.parameters():
        p.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(q.grad.nbytes for q in of.parameters() if q.grad is not None))
        )
    for batch in batches(2):
        loss_of(of, batch).backward()
        optimizer.step()
    layer = sum(p.nbytes for p in of[0].parameters())
    assert 0 < max(alive) <= layer
    assert release.largest <= layer


def test_the_last_gradient_of_a_backward_pass_is_known_from_the_step_before() -> None:
    of, unused = model(), nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([*of.parameters(), unused], lr=0.1)
    step_in_backward(of, optimizer, bucket_bytes=1 << 30)
    for is_freed in (False, True):
        loss_of(of, next(batches(1))).backward()
        assert all(p.grad is None for p in of.parameters()) is is_freed
        optimizer.step()


def test_a_step_left_out_means_gradients_that_come_twice() -> None:
    of = model()
    optimizer = adamw(of.parameters())
    step_in_backward(of, optimizer)
    first, second = batches(2)
    loss_of(of, first).backward()
    before = [whole(p) for p in of.parameters()]
    with pytest.raises(GradientReleaseError, match=r"a second time(.|\n)*where: 5\.1\."):
        loss_of(of, second).backward()
    assert all(map(torch.equal, before, [whole(p) for p in of.parameters()]))


def _is_third(passes: list[int]) -> bool:
    return passes[0] % 3 == 2


@pytest.mark.parametrize("by_function", [False, True])
def test_the_last_of_several_backward_passes_steps(by_function: bool) -> None:
    ways = []
    for released in (True, False):
        of = model()
        optimizer = install(adamw(of.parameters()))
        passes = [0]
        if released:
            accumulate = partial(_is_third, passes) if by_function else 3
            step_in_backward(of, optimizer, accumulate=accumulate)
        for batch in batches(9):
            loss_of(of, batch).backward()
            passes[0] += 1
            if passes[0] % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
        ways.append(left_by(of, optimizer))
    assert_same(*ways)


def test_parameters_are_looked_up_twice_in_a_step() -> None:
    """At the first complete gradient, and in ``optimizer.step()``: not at each gradient."""
    of = model()
    optimizer = torch.optim.SGD(of.parameters(), lr=0.1)
    step_in_backward(of, optimizer, accumulate=2)
    with lookups_of_parameters() as lookups:
        for i, batch in enumerate(batches(4)):
            loss_of(of, batch).backward()
            assert lookups.call_count == (0, 1, 2, 3)[i]
            if i % 2:
                optimizer.step()


def test_fewer_backward_passes_than_announced() -> None:
    """As at the end of an epoch: ``optimizer.step()`` steps what is left."""
    ways = []
    for released in (True, False):
        of = model()
        optimizer = install(adamw(of.parameters()))
        if released:
            step_in_backward(of, optimizer, accumulate=3)
        for batch in batches(2):
            loss_of(of, batch).backward()
        optimizer.step()
        ways.append(left_by(of, optimizer))
    assert_same(*ways)


class Branches(nn.Module):
    """Model of which a batch uses one of two branches, with an output that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, branch: int) -> Tensor:
        logits: Tensor = self.head(self.branches[branch](self.embed(tokens)))
        return logits * self.scale


def test_tied_weights_and_parameters_without_gradients() -> None:
    ways = []
    for released in (True, False):
        of = Branches().bfloat16()
        optimizer = install(adamw(of.parameters()))
        if released:
            step_in_backward(of, optimizer, bucket_bytes=0)  # each parameter by itself
        weight = of.get_parameter("branches.2.weight")
        untouched = whole(weight)
        for step in range(4):
            of(torch.arange(16), step % 2).float().logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(whole(weight), untouched)
        left = left_by(of, optimizer)
        ways.append({name: value for name, value in left.items() if not name.startswith("branches.2.")})
    assert_same(*ways)


def test_checkpoints_do_not_tell_the_difference(tmp_path: Path) -> None:
    """A run that steps in the backward pass is resumed by one that does not, and the other way around."""

    def run(released: list[bool]) -> Left:
        of = model()
        optimizer = install(adamw(of.parameters()))
        found = list(batches(3 * len(released)))
        for i, each in enumerate(released):
            if i:
                torch.save((of.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint.pt")
                of = model(seed=7)
                optimizer = install(adamw(of.parameters()))
                weights, state = torch.load(tmp_path / "checkpoint.pt")
                of.load_state_dict(weights)
                optimizer.load_state_dict(state)
            if each:
                step_in_backward(of, optimizer)
            for batch in found[3 * i : 3 * i + 3]:
                loss_of(of, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return left_by(of, optimizer)

    expected = run([False, False])
    for released in ([True, False], [False, True], [True, True]):
        assert_same(run(released), expected)


def test_removed() -> None:
    of = model()
    optimizer = adamw(of.parameters())
    release = step_in_backward(of, optimizer)
    first, second = batches(2)
    loss_of(of, first).backward()
    optimizer.step()
    release.remove()
    loss_of(of, second).backward()
    assert all(p.grad is not None for p in of.parameters())
    before = [whole(p) for p in of.parameters()]
    optimizer.step()
    assert not any(map(torch.equal, before, [whole(p) for p in of.parameters()]))


def test_uninstalling_and_installing_anew_remove_it() -> None:
    of = model()
    optimizer = adamw(of.parameters())
    for after in (collage_fx.uninstall, install):
        step_in_backward(of, optimizer)
        after(optimizer)
        loss_of(of, next(batches(1))).backward()
        assert all(p.grad is not None for p in of.parameters())
        optimizer.zero_grad()


def test_hooks_of_the_optimizer_run_once_in_a_step() -> None:
    of, calls = model(), []
    optimizer = adamw(of.parameters())
    step_in_backward(of, optimizer)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for batch in batches(2):
        loss_of(of, batch).backward()
        optimizer.step()
    assert calls == ["before", "after"] * 2


def _closure(of: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(of, batch)
    loss.backward()
    return loss


def test_a_closure_runs_the_backward_pass() -> None:
    """As in Lightning, whose optimizers are stepped with a closure."""
    ways = []
    for released in (True, False):
        of = model()
        optimizer = install(adamw(of.parameters()))
        if released:
            step_in_backward(of, optimizer)
        for batch in batches(3):
            closure: Any = partial(_closure, of, optimizer, batch)
            assert optimizer.step(closure) is not None
        ways.append(left_by(of, optimizer))
    assert_same(*ways)


# -- Clipping and loss scaling


def test_each_gradient_is_clipped() -> None:
    ways = []
    for released in (True, False):
        of = model()
        optimizer = install(adamw(of.parameters()))
        if released:
            step_in_backward(of, optimizer, max_norm=1e-3, clip="each tensor")
        for batch in batches(3):
            loss_of(of, batch).backward()
            if not released:
                for p in of.parameters():
                    nn.utils.clip_grad_norm_([p], 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        ways.append(left_by(of, optimizer))
    assert_same(*ways)


def test_gradients_are_clipped_by_the_norm_of_the_step_before() -> None:
    ways, norms = [], []
    for released in (True, False):
        of = model()
        optimizer = install(adamw(of.parameters()))
        release = step_in_backward(of, optimizer, max_norm=1e-3) if released else None
        before: Tensor | None = None
        for batch in batches(4):
            loss_of(of, batch).backward()
            if not released:
                norm = nn.utils.get_total_norm([p.grad for p in of.parameters() if p.grad is not None])
                if before is None:
                    for p in of.parameters():
                        nn.utils.clip_grad_norm_([p], 1e-3 / len(list(of.parameters())) ** 0.5)
                else:
                    nn.utils.clip_grads_with_norm_(of.parameters(), 1e-3, before)
                before = norm
            optimizer.step()
            optimizer.zero_grad()
            norms.append(before if release is None else release.norm)
        ways.append({name: whole(p) for name, p in of.named_parameters()})
    for one, other in zip(norms[:4], norms[4:], strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=0)  # norms of bfloat16
    exact = model().double()
    for name, p in exact.named_parameters():
        assert float((ways[0][name] - ways[1][name]).norm() / (ways[1][name] - p.detach()).norm()) < 0.02


def test_scaled_losses() -> None:
    """Gradients are divided by the scale; a part with an overflow is skipped, and the scale goes down."""
    of, plain = model(), model()
    optimizer, expected = (install(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (of, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step_in_backward(of, optimizer, scaler=scaler)
    for batch in batches(3):
        scaler.scale(loss_of(of, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        loss_of(plain, batch).backward()
        expected.step()
        expected.zero_grad()
    assert_same(left_by(of, optimizer), left_by(plain, expected))
    before = [whole(p) for p in of.parameters()]
    scaler.scale(loss_of(of, next(batches(1))) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert all(map(torch.equal, before, [whole(p) for p in of.parameters()]))


# -- What is refused


def test_a_number_that_is_changed_in_a_backward_pass_is_refused() -> None:
    """Between two buckets, where the values before the step are set again for the next one."""
    of = model()
    optimizer = adamw(of.parameters())
    step_in_backward(of, optimizer, bucket_bytes=0)

    def change(*_: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 2

    of[2].register_full_backward_hook(change)
    with pytest.raises(GradientReleaseError, match="the program has changed 'lr' from"):
        loss_of(of, next(batches(1))).backward()


@pytest.mark.parametrize("is_mean", [False, True])
def test_optimizers_that_need_all_gradients_at_once(is_mean: bool) -> None:
    class Norm(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.0})  # as at the start of a warm-up

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            squares = torch.cat([p.grad.flatten().square() for p in params])
            norm = (squares.mean() if is_mean else squares.sum()).sqrt()
            for p in params:
                p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])

    of = model()
    optimizer = Norm(of.parameters())
    with pytest.raises(UnsupportedOptimizerError, match="Norm computes an update from the gradients of all"):
        step_in_backward(of, optimizer)
    loss_of(of, next(batches(1))).backward()
    assert all(p.grad is not None for p in of.parameters())
    with pytest.raises(CollageError, match="not installed"):
        collage_fx.backend_of(optimizer)


def test_the_experiment_leaves_random_numbers_alone_and_needs_none() -> None:
    """Another thread draws random numbers meanwhile, and an optimizer adds noise to its updates."""

    class Noisy(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-3})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + torch.randn_like(p), alpha=self.param_groups[0]["lr"])

    of = model()
    state = torch.get_rng_state()
    step_in_backward(of, Noisy(of.parameters()))
    assert torch.equal(torch.get_rng_state(), state)

    ended = threading.Event()

    def draw() -> None:
        while not ended.is_set():
            torch.randn(1000)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(10):
            of = model()
            step_in_backward(of, adamw(of.parameters()))
    finally:
        ended.set()
        thread.join()


def test_optimizers_that_need_a_closure() -> None:
    of = model()
    with pytest.raises(UnsupportedOptimizerError, match="cannot take a step without a closure"):
        step_in_backward(of, torch.optim.LBFGS(of.parameters()))


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, True, "all"])
def test_counts_that_are_none(accumulate: Any) -> None:
    of = model()
    with pytest.raises(InvalidOptionError, match="accumulate="):
        step_in_backward(of, adamw(of.parameters()), accumulate=accumulate)


def test_a_copy_of_the_optimizer_steps_after_the_backward_pass() -> None:
    of = model()
    optimizer = adamw(of.parameters())
    step_in_backward(of, optimizer)
    of2, copied = copy.deepcopy((of, optimizer))
    for p in of2.parameters():
        p.grad = torch.ones_like(p)
    before = [whole(p) for p in of2.parameters()]
    copied.step()
    assert not any(map(torch.equal, before, [whole(p) for p in of2.parameters()]))


# -- Several processes


def sharded(released: bool, max_norm: float | None = None) -> tuple[Left, int]:
    of = model()
    for layer in of:
        fully_shard(layer)
    fully_shard(of)
    optimizer = install(adamw(of.parameters()))
    release = step_in_backward(of, optimizer, max_norm=max_norm) if released else None
    for batch in batches(4, seed=torch.distributed.get_rank()):
        loss_of(of, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return left_by(of, optimizer), 0 if release is None else release.largest


def test_shards_of_fsdp2(two_processes: Processes) -> None:
    expected = two_processes.run(sharded, False)
    found = two_processes.run(sharded, True)
    for (one, _), (other, largest) in zip(expected, found, strict=True):
        assert_same(one, other)
        assert 0 < largest <= WIDTH * WIDTH * 2
    (clipped, _), (same, _) = two_processes.run(sharded, True, 1e-3)
    assert_same(clipped, same)


def sharded_without_rows() -> str:
    of = model()
    fully_shard(of)
    optimizer = install(adamw(of.parameters()), passes=inserted(Looking(), before="allocate"))
    step_in_backward(of, optimizer)
    try:
        loss_of(of, next(batches(1))).backward()
    except UnsupportedOptimizerError as error:
        return str(error)
    return ""


def test_shards_of_a_step_that_does_not_consist_of_rows(two_processes: Processes) -> None:
    for said in two_processes.run(sharded_without_rows):
        assert "cannot be stepped for some parameters at a time if they are DTensors" in said


def release(how: str, of: nn.Module, optimizer: Optimizer) -> None:
    """Step in the backward pass, offload, or neither."""
    if how == "in backward":
        step_in_backward(of, optimizer)
    elif how == "offload":
        offload(optimizer)


def replicated(how: str, wrapped: str = "before") -> Left:
    inner = model()
    optimizer = install(adamw(inner.parameters()))
    if wrapped == "after":
        release(how, inner, optimizer)
    of = nn.parallel.DistributedDataParallel(inner)
    if wrapped == "before":
        release(how, of, optimizer)
    for batch in batches(4, seed=torch.distributed.get_rank()):
        loss_of(of, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"weight {name}": p.detach().clone() for name, p in of.named_parameters()}


@pytest.mark.parametrize("wrapped", ["before", "after"])
@pytest.mark.parametrize("how", ["in backward", "offload"])
def test_distributed_data_parallel(two_processes: Processes, how: str, wrapped: str) -> None:
    """Both processes have the weights of steps after the backward pass."""
    found = [*two_processes.run(replicated, ""), *two_processes.run(replicated, how, wrapped)]
    for each in found[1:]:
        assert_same(found[0], each)


def flat(how: str) -> str:
    of = FullyShardedDataParallel(model(), use_orig_params=True, device_id=torch.device("cpu"))
    try:
        release(how, of, adamw(of.parameters()))
    except GradientReleaseError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["in backward", "offload"])
def test_fsdp1_is_refused(two_processes: Processes, how: str) -> None:
    for said in two_processes.run(flat, how):
        assert "shard the model with fully_shard (FSDP2)" in said
