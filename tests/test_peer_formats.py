"""State in the formats of other systems, ``state="fp8_lm"`` and ``"coat"``: compiled, trained, in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

from collage_fx import CollageBackend, full_value
from collage_fx.graph import Reason, Unit
from collage_fx.numerics import PACKED_FORMATS
from tests.support.agreement import differences
from tests.support.optimizers import CompiledOptimizer, gradients
from tests.support.processes import Processes
from tests.support.training import compiled, parameters, set_gradients
from tests.support.twin import TwinBackend
from tests.support.whole import pipeline

SHAPES = ((32, 256), (32, 256), (16, 4, 128), (5,))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


@pytest.mark.parametrize("unit", ["by family", "in parts", "whole"])
@pytest.mark.parametrize("state", ["fp8_lm", "coat"])
def test_compiled_bits_are_eager_bits(state: str, unit: Unit) -> None:
    not_in_parts = mock.patch("collage_fx.lowering.lower.lower_in_parts", return_value=Reason("of the test"))
    ends = []
    for engine in ("compiled", "eager"):
        backend = TwinBackend(strategy="plus", state=state, passes=pipeline(by_family=unit == "by family"))
        rig = CompiledOptimizer(SHAPES, adamw, backend)
        backend.engine = engine  # type: ignore[assignment]
        with not_in_parts if unit == "whole" else nullcontext():
            for grads in gradients(SHAPES, 4):
                rig.step(grads)
        (graph,) = backend.report().graphs
        assert graph.route.unit == unit
        formats = {row.name.rpartition(".")[2]: row.error_format for row in graph.tensors[:3]}
        signed, positive = PACKED_FORMATS[state]
        assert (formats["exp_avg"], formats["exp_avg_sq"]) == (signed.name, positive.name)
        assert "has less than" in next(
            row.selection for row in graph.tensors if row.name.endswith("params[3].exp_avg")
        )
        ends.append(dict(rig.tensors()))
    assert not differences(*ends)
    assert {f"0.exp_avg.{spec.name}" for spec in signed.auxiliaries(rig.parameters[0])} < ends[0].keys()


def off(state: str) -> float:
    """How far off the way of a matrix is under AdamW, relative to that with float32 state."""
    start, steps = parameters(shapes=[(64, 256)]), 50
    mine = [Parameter(p.detach().clone()) for p in start]
    step = compiled(adamw(mine), strategy="plus", state=state)
    reference = [Parameter(p.detach().float()) for p in start]
    optimizer = adamw(reference)
    for seed in range(steps):
        set_gradients(mine, seed)
        step()
        for p, q in zip(reference, mine, strict=True):
            assert q.grad is not None
            p.grad = q.grad.float()
        optimizer.step()
    moved = reference[0].detach().double() - start[0].detach().double()
    return float((full_value(mine[0]) - reference[0].double()).norm() / moved.norm())


def test_a_run() -> None:
    print({s: off(s) for s in ("block16", "block8", "fp8_lm", "coat")})
    assert 0
