"""``python -m tests.support.gpu_host``: measure what a step on a GPU costs its host, with the real launcher.

For a card on which kernels do nothing (``COLLAGE_FX_FAKE_CUDA_IDLE=1``): all that the host does is a card's,
from the optimizer's ``step`` to the driver. Prints a :class:`HostCost` as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from types import FrameType
from typing import Any

import torch

import collage_fx
from benchmarks.sizes import gpt

#: The tensors of GPT-2, 124M, smaller: the host does the same for all lengths.
SHAPES = tuple(tuple(max(1, size // 96) for size in shape) for shape in gpt(12, 768))
ROUNDS = 100

#: Python calls of a step, and of a step whose gradients have moved, by the version of torch.
CALLS = {"2.13": (183, 229), "2.11": (177, 223)}


@dataclass(frozen=True)
class HostCost:
    """Cost of a step of AdamW.

    Attributes:
        calls: of Python functions, with gradients where they were.
        calls_moved: the same, with gradients that have moved.
        microseconds: of the processor, the median of steps, each beside the others in turn.
        microseconds_moved: the same, with gradients that have moved.
        microseconds_fused: of torch's own AdamW, ``fused=True``.
        microseconds_foreach: of torch's own AdamW, ``foreach=True``.
    """

    calls: int
    calls_moved: int
    microseconds: float
    microseconds_moved: float
    microseconds_fused: float
    microseconds_foreach: float


def _parameters() -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.empty(s, dtype=torch.bfloat16, device="cuda")) for s in SHAPES]
    for p in parameters:
        p.grad = torch.empty_like(p)
    return parameters


def _moved(parameters: list[torch.nn.Parameter]) -> Callable[[], None]:
    """Return a function that gives all parameters one of two sets of gradients in turn."""
    sets = [[torch.empty_like(p) for p in parameters] for _ in range(2)]

    def move() -> None:
        sets.reverse()
        for p, grad in zip(parameters, sets[0], strict=True):
            p.grad = grad

    return move


def _calls(step: Callable[[], Any]) -> int:
    """Count calls of Python functions."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def measured() -> HostCost:
    torch.set_num_threads(1)
    parameters = _parameters()
    ours = collage_fx.install(torch.optim.AdamW(parameters))
    move = _moved(parameters)
    fused = torch.optim.AdamW(_parameters(), fused=True)
    foreach = torch.optim.AdamW(_parameters(), foreach=True)
    nothing: Callable[[], object] = lambda: None  # noqa: E731
    steps: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "fused": (nothing, fused.step),
        "kept": (nothing, ours.step),
        "foreach": (nothing, foreach.step),
        "moved": (move, ours.step),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(ROUNDS + 10):
        for name, (prepare, step) in steps.items():
            prepare()
            if name == "kept":
                step()  # which has found what "moved" has left
            started = time.process_time_ns()
            step()
            if i >= 10:
                times[name].append((time.process_time_ns() - started) / 1e3)
    torch.cuda.synchronize()
    ours.step()
    calls = _calls(ours.step)
    move()
    return HostCost(
        calls, _calls(ours.step), *(median(times[each]) for each in ("kept", "moved", "fused", "foreach"))
    )


if __name__ == "__main__":
    print(json.dumps(asdict(measured())))
