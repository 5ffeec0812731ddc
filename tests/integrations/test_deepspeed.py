"""DeepSpeed's ZeRO without float32 masters: nearly the weights of masters, read through flat buffers."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys

import pytest

from tests.support.processes import environment

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="pip install deepspeed (the extra 'bench')"
)

#: A program of its own: DeepSpeed initializes processes, and changes torch for good.
PROGRAM = """
import json, sys
import deepspeed, torch
import collage_fx
from collage_fx.integrations.deepspeed import full_value

stage, keeps_masters, is_installed = json.loads(sys.argv[1])
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
layers = torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)
model = torch.nn.Sequential(*layers)
start = [p.detach().bfloat16().double() for p in model.parameters()]
bf16 = {} if keeps_masters else {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
engine, optimizer, _, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1),
    config={
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True, **bf16},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    },
)
if is_installed:
    collage_fx.install(optimizer)
generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
for _ in range(16):
    batch = torch.randn(8, 64, generator=generator).bfloat16()
    engine.backward(engine(batch).float().square().mean())
    engine.step()
if keeps_masters:
    ends = [deepspeed.utils.safe_get_full_fp32_param(p).double() for p in model.parameters()]
else:
    ends = [full_value(p) for p in model.parameters()]
ways = [(end - begin).flatten().tolist() for end, begin in zip(ends, start)]
if torch.distributed.get_rank() == 0:
    print("ways:" + json.dumps(sum(ways, [])))
"""


def way(
    stage: int, *, keeps_masters: bool = False, is_installed: bool = False, processes: int = 1
) -> list[float]:
    """Return the way of all weights in 16 steps."""
    given = json.dumps([stage, keeps_masters, is_installed])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, given],
            env={
                **environment(),
                **world,
                **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                "DS_ACCELERATOR": "cpu",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    told = [each.communicate() for each in running]
    assert all(each.returncode == 0 for each in running), told[0][1]
    found = next(line for line in told[0][0].splitlines() if line.startswith("ways:"))
    return list(json.loads(found.removeprefix("ways:")))


def off(one: list[float], other: list[float]) -> float:
    """Return the distance of two ends, relative to the way to the second."""
    distance = sum((a - b) ** 2 for a, b in zip(one, other, strict=True))
    return float((distance / sum(b * b for b in other)) ** 0.5)


@pytest.mark.parametrize(("stage", "processes"), [(1, 1), (2, 1), (3, 1), (1, 2), (3, 2)])
def test_weights_without_masters(stage: int, processes: int) -> None:
    masters = way(1, keeps_masters=True, processes=processes)
    assert off(way(stage, is_installed=True, processes=processes), masters) < 0.02
    assert off(way(stage, processes=processes), masters) > 0.5
