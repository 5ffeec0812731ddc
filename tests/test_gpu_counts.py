"""What a step asks of a card, counted by the driver: launches, copies, waits; and what it costs its host.

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

from collage_fx import CollageBackend
from tests.support import fake_cuda
from tests.support.figures import Record, note
from tests.support.gpu_host import SHAPES, HostCost
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


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_step_is_launches_alone(is_measured: bool) -> None:
    """Two, or three if it is measured: no copy, no wait."""
    rig = begun(metrics=is_measured)
    expected = {"launches": 2 + is_measured}
    if is_measured:  # the row of this step, to pinned memory
        expected |= {"downloads": 1}
    for _ in range(3):
        assert counted(rig.compiled) == expected


def test_gradients_that_have_moved_are_one_upload() -> None:
    """Until the ring of pinned buffers has gone round, nothing is waited for; then an upload 4 steps ago."""
    rig = begun()
    sets = list(gradients(SHAPES, 2 * UPLOADS))
    waits = []
    for grads in sets:
        move_gradients(rig, grads)
        found = counted(rig.compiled)
        waits.append(found.pop("event waits", 0))
        assert found == {"launches": 2, "uploads": 1}
    assert waits == sorted(waits)  # none, and one from some step on
    assert max(waits) <= 1


def test_the_first_step(record_property: Record) -> None:
    """It waits for the device a constant number of times, not for each tensor."""
    found = []
    for shapes in (SHAPES, SHAPES[:48]):
        rig = CompiledOptimizer(shapes, adamw, CollageBackend(), device="cuda")
        (grads,) = gradients(shapes, 1)
        move_gradients(rig, grads)
        found.append(counted(rig.compiled))
        for name, count in found[-1].items():
            note(record_property, f"first step of {len(shapes)} tensors, {name}", count)


@pytest.fixture(scope="module")
def host() -> HostCost:
    """Measured in a process of its own, where kernels do nothing."""
    command = [sys.executable, "-m", "tests.support.gpu_host"]
    env = {**os.environ, fake_cuda.IDLE: "1"}
    done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return HostCost(**json.loads(done.stdout.splitlines()[-1]))


def test_python_calls_of_a_step(host: HostCost, record_property: Record) -> None:
    """Whatever the number of tensors: all that is done for each is in C++."""
    note(record_property, "Python calls of a step", host.calls)
    note(record_property, "Python calls of a step with moved gradients", host.calls_moved)


def test_host_time_of_a_step(host: HostCost, record_property: Record) -> None:
    """Beside torch's own, of which torch's fused AdamW is the fastest."""
    for name in ("microseconds", "microseconds_moved", "microseconds_fused", "microseconds_foreach"):
        note(record_property, name, getattr(host, name))
