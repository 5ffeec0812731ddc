"""Changes of parameters and groups by a program whose steps are taken in the backward pass, or on the host.

Each case is compared, bit by bit, with the same program that steps after the backward pass.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import collage_fx
from collage_fx import full_value, install, offload, step_in_backward
from collage_fx.errors import GradientReleaseError, UnsupportedOptimizerError
from tests.test_gradient_release import adamw, assert_same

Way = Callable[[nn.Module, Optimizer], object]

WAYS: dict[str, Way] = {
    "in backward": lambda of, optimizer: step_in_backward(of, optimizer, bucket_bytes=256),
    "offload": lambda of, optimizer: offload(optimizer, bucket_bytes=256),
}


def plainly(of: nn.Module, optimizer: Optimizer) -> object:
    return install(optimizer)


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))).bfloat16()


def backward(of: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    of(torch.randn(8, 16, generator=generator).bfloat16()).float().square().mean().backward()


def take_steps(of: nn.Module, optimizer: Optimizer, count: int = 3) -> None:
    for step in range(count):
        backward(of, step)
        optimizer.step()
        optimizer.zero_grad()


def whole(of: nn.Module) -> dict[str, Tensor]:
    return {name: full_value(p) for name, p in of.named_parameters()}


def assert_same_step(of: nn.Module, optimizer: Optimizer, other: nn.Module, others: Optimizer) -> None:
    """One more step of both leaves the same bits."""
    for each, its in ((of, optimizer), (other, others)):
        backward(each, 3)
        its.step()
    assert_same(whole(of), whole(other))


class Program:
    """A training, some of whose lines are replaced."""

    def __init__(self) -> None:
        self.of = network()

    def make(self) -> Optimizer:
        return adamw(self.of.parameters())

    def before_backward(self, optimizer: Optimizer, step: int) -> None:
        """Do what a program does before the backward pass."""

    def before_step(self, optimizer: Optimizer, step: int) -> None:
        """Do what a program does before the step."""

    def result(self) -> dict[str, Tensor]:
        return whole(self.of)

    def run(self, way: Way) -> dict[str, Tensor]:
        optimizer = self.make()
        way(self.of, optimizer)
        for step in range(8):
            self.before_backward(optimizer, step)
            backward(self.of, step)
            self.before_step(optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
        return self.result()


class Thawed(Program):
    """The upper half is trained from the fourth step on."""

    def make(self) -> Optimizer:
        self.of[3:].requires_grad_(False)
        return adamw(self.of.parameters())

    def before_backward(self, optimizer: Optimizer, step: int) -> None:
        if step == 4:
            self.of[3:].requires_grad_(True)


class Frozen(Program):
    def before_backward(self, optimizer: Optimizer, step: int) -> None:
        self.of[3:].requires_grad_(step % 3 == 0)


class Added(Program):
    """A group is added before the fourth backward pass."""

    def make(self) -> Optimizer:
        return adamw(self.of[:3].parameters())

    def before_backward(self, optimizer: Optimizer, step: int) -> None:
        if step == 4:
            self.of.zero_grad()
            optimizer.add_param_group({"params": list(self.of[3:].parameters()), "lr": 1e-2})


class AddedLate(Added):
    """A group is added when its gradients are there."""

    def before_backward(self, optimizer: Optimizer, step: int) -> None:
        if step < 4:
            self.of[3:].zero_grad()

    def before_step(self, optimizer: Optimizer, step: int) -> None:
        if step == 4:
            optimizer.add_param_group({"params": list(self.of[3:].parameters()), "lr": 1e-2})


class Replaced(Program):
    """A layer gets a new weight, which takes the place of the old one."""

    def before_backward(self, optimizer: Optimizer, step: int) -> None:
        if step == 4:
            params = optimizer.param_groups[0]["params"]
            torch.manual_seed(3)
            self.of[2].weight = nn.Parameter(torch.randn(16, 16).bfloat16())
            params[4] = self.of[2].weight


class Removed(Program):
    """A layer is no longer trained: its parameters leave the optimizer."""

    def before_backward(self, optimizer: Optimizer, step: int) -> None:
        if step == 4:
            del optimizer.param_groups[0]["params"][8:]
        self.of[4:].zero_grad()


class Scheduled(Program):
    """Rates that touch 0, set before the backward pass or after the step."""

    def before_backward(self, optimizer: Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step % 4)


PROGRAMS: list[type[Program]] = [Program, Thawed, Frozen, Added, AddedLate, Replaced, Removed, Scheduled]


@pytest.mark.filterwarnings("ignore:.*has been replaced by another tensor:UserWarning")
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("program", PROGRAMS)
def test_bits_of_steps_after_the_backward_pass(program: type[Program], way: str) -> None:
    assert_same(program().run(WAYS[way]), program().run(plainly))


class SetLate(Program):
    def before_step(self, optimizer: Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + step)


class ScheduledLate(Program):
    def make(self) -> Optimizer:
        optimizer = adamw(self.of.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return optimizer

    def before_step(self, optimizer: Optimizer, step: int) -> None:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or the scheduler warns of its order
        self.scheduler.step()


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("program", [SetLate, ScheduledLate])
def test_numbers_that_come_too_late_are_refused(program: type[Program], way: str) -> None:
    with pytest.raises(GradientReleaseError, match=r"'lr' from .*\n  where: .*\n.*before backward"):
        program().run(WAYS[way])


def test_the_remedy_for_a_late_number() -> None:
    class SetEarly(SetLate):
        before_backward, before_step = SetLate.before_step, Program.before_step

    assert_same(SetEarly().run(WAYS["in backward"]), SetLate().run(plainly))


def test_the_program_is_asked_in_its_own_thread() -> None:
    of, threads = network(), set[int]()
    optimizer = adamw(of.parameters())
    is_last = False

    def asked() -> bool:
        threads.add(threading.get_ident())
        return is_last

    offload(optimizer, accumulate=asked, bucket_bytes=256)
    for step in range(6):
        is_last = step % 2 == 1
        backward(of, step)
        is_last = not is_last  # whoever asks later is told wrongly
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    other = network()
    expected = install(adamw(other.parameters()))
    for step in range(6):
        backward(other, step)
        if step % 2:
            expected.step()
            expected.zero_grad()
    assert threads == {threading.get_ident()}
    assert_same(whole(of), whole(other))


# Weights that are perturbed for a backward pass, and come back. ---------------------------------------------


def back_by_loading(of: nn.Module, saved: dict[str, Tensor]) -> None:
    of.load_state_dict(saved)


def back_by_copies(of: nn.Module, saved: dict[str, Tensor]) -> None:
    for name, p in of.named_parameters():
        p.data.copy_(saved[name])


def moved_by(dtype: torch.dtype, back: Any, way: Way, steps: int = 20) -> Tensor:
    """Train as FGM and AWP do; return how far the weights have moved."""
    of = network().to(dtype)
    start = [p.detach().double().clone() for p in of.parameters()]
    optimizer = torch.optim.AdamW(of.parameters(), lr=1e-4)
    way(of, optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        saved = {name: tensor.clone() for name, tensor in of.state_dict().items()}
        for p in of.parameters():
            p.data.add_(torch.randn(p.shape, generator=generator), alpha=1e-2)
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(dtype)
        back(of, saved)
        optimizer.step()
    ended = [full_value(p) for p in of.parameters()]
    return torch.cat([(one - other).flatten() for one, other in zip(ended, start, strict=True)])


@pytest.mark.filterwarnings("ignore:collage_fx:UserWarning")
@pytest.mark.parametrize("back", [back_by_loading, back_by_copies])
def test_values_that_come_back_keep_their_error_terms(back: Any) -> None:
    """The first load finds no copy of what they were, and costs the terms of the first step."""
    exact = moved_by(torch.float64, back, lambda of, optimizer: None)
    plain = moved_by(torch.bfloat16, back, lambda of, optimizer: None)
    found = moved_by(torch.bfloat16, back, plainly)
    assert (plain - exact).norm() > 0.5 * exact.norm()
    first = moved_by(torch.float64, back, lambda of, optimizer: None, steps=1)
    lost = first.norm() if back is back_by_loading else 0.0
    assert (found - exact).norm() < lost + 0.01 * exact.norm()


# Weights that are two tensors. ------------------------------------------------------------------------------


def times(p: Tensor) -> None:
    p.mul_(1.5)


def replaced(p: Tensor) -> None:
    p.data = p.data * 1.5


def loaded(p: Tensor) -> None:
    nn.ParameterList([p]).load_state_dict({"0": p * 1.5})


WRITES = [times, replaced, loaded]


@pytest.mark.filterwarnings("ignore:collage_fx:UserWarning")
@pytest.mark.parametrize("write", WRITES)
def test_reads_of_an_offloaded_weight_see_what_was_written(write: Callable[[Tensor], None]) -> None:
    of = network()
    optimizer = adamw(of.parameters())
    collage_fx.forget_changes(of)
    offload(install(optimizer))
    take_steps(of, optimizer)
    collage_fx.changes(of)
    copied = {name: tensor.clone() for name, tensor in of.state_dict().items()}
    weight = of[1].weight
    with torch.no_grad():
        write(weight)
    written = weight.detach().double()
    assert torch.equal(full_value(weight), written)
    assert torch.equal(collage_fx.full_state_dict(of)["1.weight"].double(), written)
    collage_fx.apply_changes(copied, collage_fx.changes(of))
    assert all(torch.equal(tensor, copied[name]) for name, tensor in of.state_dict().items())


@pytest.mark.parametrize("reads", [False, True])
def test_a_resume_that_is_read_before_its_first_step(reads: bool) -> None:
    """Weights are loaded first, then the optimizer: error terms belong to what the device holds now."""
    of = network()
    optimizer = adamw(of.parameters())
    offload(optimizer)
    take_steps(of, optimizer)
    saved = copy.deepcopy((of.state_dict(), optimizer.state_dict()))
    expected = whole(of)
    other = network()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    resumed = adamw(other.parameters())
    offload(resumed)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    if reads:
        assert_same(whole(other), expected)
    assert_same_step(of, optimizer, other, resumed)


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_copies_of_offloaded_optimizers_are_refused_with_a_way_out(how: Callable[[Any], Any]) -> None:
    of = network()
    optimizer = adamw(of.parameters())
    offload(optimizer)
    take_steps(of, optimizer)
    with pytest.raises(UnsupportedOptimizerError, match=r"load_state_dict\(copy\.deepcopy\(optimizer"):
        how((of, optimizer))
    other = copy.deepcopy(of)
    copied = install(adamw(other.parameters()))
    copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_step(of, optimizer, other, copied)


# Wrappers that hold an older step, or an optimizer (S8, S24). ----------------------------------------------


def error_of(of: nn.Module) -> float:
    """Return how far whole weights are from those of float64 steps, over what these have moved."""
    exact = network().double()
    optimizer = adamw(exact.parameters())
    begun, steps = [p.detach().clone() for p in exact.parameters()], 20
    for step in range(steps):
        set_gradients(exact, step)
        optimizer.step()
    pairs = zip(exact.parameters(), of.parameters(), strict=True)
    off = sum(float((p.detach() - full_value(q).double()).square().sum()) for p, q in pairs)
    moved = sum(
        float((p.detach() - q).square().sum()) for p, q in zip(exact.parameters(), begun, strict=True)
    )
    return (off / moved) ** 0.5


def set_gradients(of: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in of.parameters():
        p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)


def held_step(optimizer: Optimizer) -> Callable[[], object]:
    step = optimizer.step
    install(optimizer)
    return step


def accelerated(optimizer: Optimizer) -> Callable[[], object]:
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate (the extra 'dev')")
    accelerate.Accelerator(cpu=True)
    wrapper = accelerate.optimizer.AcceleratedOptimizer(
        optimizer, device_placement=False, scaler=torch.amp.GradScaler("cpu", enabled=False)
    )
    wrapper.losses = numpy.zeros(2)  # attributes of any kind
    install(wrapper)
    return lambda: wrapper.step()


@pytest.mark.parametrize("wrap", [held_step, accelerated])
def test_a_wrapper_that_holds_the_step_of_before(wrap: Callable[[Optimizer], Callable[[], object]]) -> None:
    of = network()
    step = wrap(adamw(of.parameters()))
    for seed in range(20):
        set_gradients(of, seed)
        step()
    assert error_of(of) < 0.01


def test_fabrics_optimizer_saves_and_loads_error_terms() -> None:
    fabric = pytest.importorskip("lightning.fabric", reason="pip install lightning (the extra 'dev')")
    saved = None
    for steps in (range(10), range(10, 20)):
        launched = fabric.Fabric(accelerator="cpu", devices=1)
        of = network()
        _, optimizer = launched.setup(of, adamw(of.parameters()))
        install(optimizer)
        if saved is not None:
            of.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for seed in steps:
            set_gradients(of, seed)
            optimizer.step()
        saved = copy.deepcopy((of.state_dict(), optimizer.state_dict()))
    assert error_of(of) < 0.01


# Compiled autograd (S17). -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_steps_in_a_backward_pass_of_compiled_autograd(way: str) -> None:
    """Its graph calls our hooks, and does not trace them. Rounding by dither is another draw."""
    of, plain, begun = network(), network(), whole(network())
    optimizer, expected = install(adamw(of.parameters())), install(adamw(plain.parameters()))
    take_steps(plain, expected)
    WAYS[way](of, optimizer)
    model: Any = torch.compile(of, backend="aot_eager")
    with torch._dynamo.utils.maybe_enable_compiled_autograd(True, fullgraph=False):
        take_steps(model, optimizer)
    now, right = whole(of), whole(plain)
    off, moved = (
        sum(float((x[k] - y[k]).square().sum()) for k in x) for x, y in ((now, right), (right, begun))
    )
    assert off < 1e-4 * moved
