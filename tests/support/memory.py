"""The memory that torch hands out on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak(function: Callable[[], Any]) -> int:
    """The most bytes that torch's allocator has handed out while a function runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        function()
    most = held = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
