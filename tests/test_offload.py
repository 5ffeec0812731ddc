"""Optimizers in host memory: the bits of a model on the CPU, and parameters that stand for their twins.

Without a GPU the device is the CPU: copies are made, and what is done in which memory is looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from collage_fx import (
    CollageBackend,
    assign,
    backend_of,
    error_terms,
    full_value,
    install,
    load_full_state_dict,
    offload,
    save_full_state_dict,
)
from collage_fx.errors import GradientReleaseError, InvalidOptionError, UnsupportedOptimizerError
from collage_fx.wings.offload import Link, Offload
from tests.test_gradient_release import adamw, assert_same, batches, loss_of, model

Left = dict[str, Any]


def take_steps(of: nn.Module, optimizer: Optimizer, found: Any) -> None:
    for batch in found:
        loss_of(of, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(of: nn.Module) -> Left:
    return {name: full_value(p) for name, p in of.named_parameters()}


def state(of: nn.Module, optimizer: Optimizer) -> Left:
    """Return whole values of state, by position: the optimizer's parameters may be twins."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{i}.{key}": full_value(each) for i, p in enumerate(held) for key, each in optimizer.state[p].items()
    }


def plain(steps: int = 6, make: Callable[[Any], Optimizer] = adamw, **options: Any) -> Left:
    of = model()
    optimizer = install(make(of.parameters()), **options)
    take_steps(of, optimizer, batches(steps))
    return {**weights(of), **state(of, optimizer)}


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("options", [{}, {"bytes_per_parameter": 8}], ids=str)
def test_bits_of_no_offload(begin: int, options: dict[str, Any]) -> None:
    """From the start, and from the middle of a training; also after it has been removed."""
    of = model()
    optimizer = install(adamw(of.parameters()), **options)
    found = list(batches(6))
    take_steps(of, optimizer, found[:begin])
    release = offload(optimizer, **options)
    take_steps(of, optimizer, found[begin:5])
    assert all(p.grad is None for p in of.parameters())
    release.remove()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in of.parameters()]
    release.remove()  # which there is nothing left of
    take_steps(of, optimizer, found[5:])
    assert_same({**weights(of), **state(of, optimizer)}, plain(**options))


def test_other_optimizers() -> None:
    for make in (
        lambda p: torch.optim.NAdam(p, lr=1e-3),
        lambda p: torch.optim.SGD(p, lr=1e-2),
    ):
        of = model()
        optimizer = make(of.parameters())
        offload(optimizer)
        take_steps(of, optimizer, batches(6))
        assert_same({**weights(of), **state(of, optimizer)}, plain(make=make))


def test_a_parameter_stands_for_its_twin() -> None:
    of = model()
    optimizer = adamw(of.parameters())
    release = offload(optimizer)
    take_steps(of, optimizer, batches(3))
    for p, twin in release.twins:
        assert torch.equal(p, twin)
        assert torch.equal(full_value(p), full_value(twin))
        assert any(bool(term.any()) for term in error_terms(p))
    weight, twin = release.twins[0]
    assign(weight, torch.full((), 1.0 + 2.0**-12))
    assert torch.equal(full_value(twin), torch.full_like(twin, 1.0 + 2.0**-12, dtype=torch.float64))
    assert torch.equal(weight, torch.ones_like(weight))


def test_checkpoints_do_not_tell_the_difference(tmp_path: Path) -> None:
    of = model()
    optimizer = adamw(of.parameters())
    offload(optimizer)
    found = list(batches(6))
    take_steps(of, optimizer, found[:3])
    torch.save((of.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint.pt")
    for is_offloaded in (True, False):
        saved = torch.load(tmp_path / "checkpoint.pt")
        other = model(seed=7)
        resumed = install(adamw(other.parameters()))
        if is_offloaded:
            offload(resumed)
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        take_steps(other, resumed, found[3:])
        assert_same({**weights(other), **state(other, resumed)}, plain())


def test_float32_weights_are_saved(tmp_path: Path) -> None:
    of = model()
    optimizer = adamw(of.parameters())
    release = offload(optimizer)
    take_steps(of, optimizer, batches(3))
    save_full_state_dict(of, tmp_path / "weights.safetensors")
    release.remove()
    other = model(seed=7)
    load_full_state_dict(other, adamw(other.parameters()), tmp_path / "weights.safetensors")
    assert_same(weights(other), weights(of))


@pytest.mark.filterwarnings("ignore:collage_fx:UserWarning")
def test_writes_between_steps_count() -> None:
    def run(is_offloaded: bool) -> Left:
        of = model()
        optimizer = install(adamw(of.parameters()))
        if is_offloaded:
            offload(optimizer)
        found = list(batches(4))
        take_steps(of, optimizer, found[:2])
        with torch.no_grad():
            of.get_parameter("2.0.weight").mul_(0.5)
        take_steps(of, optimizer, found[2:])
        return weights(of)

    assert_same(run(True), run(False))


def move_data(of: nn.Module) -> None:
    for p in of.parameters():
        p.data = p.data.clone()


def load_itself(of: nn.Module) -> None:
    of.load_state_dict(of.state_dict())


def load_a_copy(of: nn.Module) -> None:
    of.load_state_dict({name: each.clone() for name, each in of.state_dict().items()})


@pytest.mark.parametrize("move", [move_data, load_itself, load_a_copy], ids=lambda each: each.__name__)
def test_values_that_are_moved_keep_all_bits(move: Callable[[nn.Module], None]) -> None:
    """Twins have the values of the last step: a parameter with the same bits has not been written to."""
    of = model()
    optimizer = adamw(of.parameters())
    offload(optimizer)
    found = list(batches(6))
    take_steps(of, optimizer, found[:3])
    move(of)
    take_steps(of, optimizer, found[3:])
    assert_same({**weights(of), **state(of, optimizer)}, plain())


def test_several_backward_passes() -> None:
    ways = []
    for is_offloaded in (True, False):
        of = model()
        optimizer = install(adamw(of.parameters()))
        if is_offloaded:
            offload(optimizer, accumulate=2)
        for i, batch in enumerate(batches(6)):
            loss_of(of, batch).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        ways.append(weights(of))
    assert_same(*ways)


def test_a_parameter_that_is_added_after_its_gradient_has_come_is_stepped() -> None:
    ways = []
    for is_offloaded in (True, False):
        of = model()
        *others, last = of.parameters()
        optimizer = install(torch.optim.SGD(others, lr=0.1))
        if is_offloaded:
            offload(optimizer)
        loss_of(of, next(batches(1))).backward()
        optimizer.add_param_group({"params": [last]})
        optimizer.step()
        assert last.grad is None or not is_offloaded
        ways.append(weights(of))
    assert_same(*ways)


def test_float32_gradients_of_bfloat16_weights() -> None:
    """They are summed over two backward passes, and reach the host, without being rounded."""
    ways = []
    for is_offloaded in (True, False):
        of = model()
        for p in of.parameters():
            p.grad_dtype = torch.float32
        optimizer = install(adamw(of.parameters()))
        if is_offloaded:
            offload(optimizer, accumulate=2)
        for batch in batches(2):
            loss_of(of, batch).backward()
        optimizer.step()
        ways.append(weights(of))
    assert_same(*ways)


def test_the_step_runs_in_a_thread_beside_the_backward_pass() -> None:
    class Watched(Link):
        def __init__(self) -> None:
            self.uploaded_by: set[str] = set()

        def upload(self, into: Tensor, tensor: Tensor) -> None:
            self.uploaded_by.add(threading.current_thread().name)
            super().upload(into, tensor)

    of, link = model(), Watched()
    optimizer = adamw(of.parameters())
    Offload(optimizer, connect=lambda device: link)
    take_steps(of, optimizer, batches(2))
    assert {name.rpartition("_")[0] for name in link.uploaded_by} == {"collage_fx_offload"}


def test_an_error_of_the_thread_is_raised() -> None:
    class Broken(Link):
        def upload(self, into: Tensor, tensor: Tensor) -> None:
            raise RuntimeError("the link is broken")

    of = model()
    optimizer = adamw(of.parameters())
    Offload(optimizer, connect=lambda device: Broken())
    with pytest.raises(RuntimeError, match="the link is broken"):
        take_steps(of, optimizer, batches(1))


def test_numbers_are_those_of_the_backward_pass_when_the_thread_is_late() -> None:
    class Late(Link):
        def __init__(self) -> None:
            self.goes_on = threading.Event()

        def download(self, into: Tensor, tensor: Tensor) -> Callable[[], None]:
            wait = super().download(into, tensor)

            def late() -> None:
                self.goes_on.wait()
                wait()

            return late

    of, link = model(), Late()
    optimizer = adamw(of.parameters())
    Offload(optimizer, connect=lambda device: link)
    loss_of(of, next(batches(1))).backward()
    optimizer.param_groups[0]["lr"] *= 2
    link.goes_on.set()
    with pytest.raises(GradientReleaseError, match="the program has changed 'lr' from"):
        optimizer.step()


def test_options_and_what_is_refused() -> None:
    of = model()
    optimizer = adamw(of.parameters())
    offload(optimizer, strategy="light")
    assert backend_of(optimizer).options == CollageBackend(strategy="light").options
    with pytest.raises(InvalidOptionError, match="accumulate"):
        offload(adamw(model().parameters()), accumulate=0)
    other = model()
    with pytest.raises(UnsupportedOptimizerError, match=r"closure(.|\n)*where: offload"):
        offload(torch.optim.LBFGS(other.parameters()))
    assert all(p.grad_fn is None for p in other.parameters())


def test_fewer_bytes_on_the_device() -> None:
    """The optimizer's parameters, state and error terms are other memory than the model's parameters."""
    of = model()
    optimizer = adamw(of.parameters())
    offload(optimizer)
    take_steps(of, optimizer, batches(2))
    on_device = {p.untyped_storage().data_ptr() for p in of.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    on_host = {p.untyped_storage().data_ptr() for p in held}
    assert on_device.isdisjoint(on_host)
