"""Launches, copies and waits of a step, counted by the driver, and the time of its host.

The driver that counts is the fake one (``tests/support/fake_cuda``): a real one has no such counters. All
above it is real, launchers included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import fresh_cache

import collage_fx
from collage_fx import CollageBackend
from tests.support import fake_cuda
from tests.support.figures import Record, note
from tests.support.gpu_host import CALLS, SHAPES, HostCost
from tests.support.optimizers import CompiledOptimizer, gradients

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not fake_cuda.IS_HERE, reason="asks the fake driver for its counters: ./dev test --fake-gpu"
    ),
]

#: Steps whose uploads need no wait: the ring of pinned buffers has as many.
UPLOADS = 4


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def counted(call: Callable[[], object]) -> dict[str, int]:
    """Return what the driver counts of a call; torch's operators, and what is allocated, left out."""
    from tests.support.fake_cuda import driver

    torch.cuda.synchronize()
    driver.counters()
    call()
    left_out = ("allocations", "pinned allocations")
    return {name: count for name, count in driver.counters().items() if name not in left_out}


def begun(**options: Any) -> CompiledOptimizer:
    """Return 148 tensors that have taken two steps."""
    rig = CompiledOptimizer(SHAPES, adamw, CollageBackend(**options), device="cuda")
    for grads in gradients(SHAPES, 2):
        rig.step(grads)
    return rig


def move_gradients(rig: CompiledOptimizer, grads: list[torch.Tensor]) -> None:
    for parameter, grad in zip(rig.parameters, grads, strict=True):
        parameter.grad = grad.to(parameter.device, parameter.dtype)


def test_the_tensors_are_those_of_a_model() -> None:
    assert len(SHAPES) == 148


def test_a_step_is_two_launches() -> None:
    """No copy, and nothing is waited for."""
    rig = begun()
    for _ in range(3):
        assert counted(rig.compiled) == {"launches": 2}


def test_gradients_that_have_moved_are_one_upload() -> None:
    """Until the ring of pinned buffers has gone round, nothing is waited for; then the upload 4 steps ago."""
    rig = begun()
    waits = []
    for grads in gradients(SHAPES, 2 * UPLOADS):
        move_gradients(rig, grads)
        found = counted(rig.compiled)
        waits.append(found.pop("event waits", 0))
        assert found == {"launches": 2, "uploads": 1}
    before = UPLOADS - 2  # the first steps have uploaded as well
    assert waits == [0] * before + [1] * (len(waits) - before)


def test_parts_of_a_backward_pass_are_an_upload_each() -> None:
    """In the second pass, where each part has been met, nothing is waited for, and no program is written."""
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(12))).to("cuda", torch.bfloat16)
    optimizer = adamw(model.parameters())
    collage_fx.step_in_backward(model, optimizer, bucket_bytes=1)
    data = torch.ones(2, 16, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()

    found = [counted(step) for _ in range(UPLOADS)]
    parts = found[-1]["launches"] // 2
    assert parts == 24
    assert found[1:] == [{"launches": 2 * parts, "uploads": parts}] * (UPLOADS - 1)


def test_tensors_whose_gradients_come_and_go_are_an_upload_a_step() -> None:
    """Each third has none in turn; the first rounds compile."""
    rig, found = begun(), []
    for i, grads in enumerate(gradients(SHAPES, 15)):
        move_gradients(rig, grads)
        for p in rig.parameters[i % 3 :: 3]:
            p.grad = None
        found.append(counted(rig.compiled))
    for each in found[9:]:
        each.pop("event waits", None)  # for an upload a few steps ago
        assert each == {"launches": 2, "uploads": 1}


def test_the_first_step_waits_for_nothing(record_property: Record) -> None:
    """And copies nothing to the host, whatever the number of tensors."""
    waits = []
    for count in (48, 48, 148):  # Inductor makes its patterns once a process, with waits of their own
        rig = CompiledOptimizer(SHAPES[:count], adamw, CollageBackend(), device="cuda")
        (grads,) = gradients(SHAPES[:count], 1)
        move_gradients(rig, grads)
        found = counted(rig.compiled)
        assert found["launches"] == 2
        assert "downloads" not in found
        waits.append(found.get("stream waits", 0))
        note(record_property, f"waits of the first step of {count} tensors", waits[-1])
    assert waits[1:] == [0, 0]


@pytest.fixture(scope="module")
def host() -> HostCost:
    """Measured in a process of its own, where kernels do nothing."""
    command = [sys.executable, "-m", "tests.support.gpu_host"]
    env = {**os.environ, fake_cuda.IDLE: "1"}
    done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return HostCost(**json.loads(done.stdout.splitlines()[-1]))


def test_python_calls_of_a_step(host: HostCost, record_property: Record) -> None:
    """Whatever the number of tensors: all that is done for each is in C++."""
    kept, moved = next(calls for version, calls in CALLS.items() if torch.__version__.startswith(version))
    note(record_property, "Python calls of a step", host.calls)
    note(record_property, "Python calls of a step with moved gradients", host.calls_moved)
    assert host.calls <= kept
    assert host.calls_moved <= moved


def test_host_time_of_a_step(host: HostCost, record_property: Record) -> None:
    """The time is less than that of torch's fastest AdamW, one operator: 0.7 to 0.8 of it when written."""
    for name in ("microseconds", "microseconds_moved", "microseconds_fused", "microseconds_foreach"):
        note(record_property, name, getattr(host, name))
    assert host.microseconds <= host.microseconds_fused


class Lamb(torch.optim.Optimizer):
    """LAMB of You et al. (2020), without its clipping."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
            state["m"].lerp_(p.grad, 0.1)
            state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            update = state["m"] / (state["v"].sqrt() + 1e-6) + 0.01 * p
            p.add_(update * (p.norm() / update.norm().clamp(min=1e-6)), alpha=-1e-3)


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (Lamb, 5),
        (lambda params: torch.optim.Muon(params, lr=1e-2), 120),
        (lambda params: torch.optim.Adafactor(params, lr=1e-2), 40),
    ],
    ids=["LAMB", "Muon", "Adafactor"],
)
def test_products_and_sums_are_launched_for_each_shape(make: Any, most: int) -> None:
    """Launches do not depend on the number of tensors. Shapes are GPT-2's, smaller."""
    from tests.support.fake_cuda.operators import used

    shapes = [(36, 12), (12, 12), (48, 12), (12, 48)]
    found = []
    for layers in (2, 5):
        rig = CompiledOptimizer(shapes * layers, make, CollageBackend(strategy="plus"), device="cuda")
        (grads,) = gradients(shapes * layers, 1)
        with fresh_cache():  # kernels that are found there have been asked no questions
            for _ in range(3):
                rig.step(grads)
        for _ in range(4):
            used.clear()
            launches = counted(rig.compiled)["launches"]
            found.append(launches + used.total())  # torch's operators are launches, too: products
    assert len({*found}) == 1
    assert found[0] <= most
