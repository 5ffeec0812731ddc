"""The memory that torch hands out on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch


def peak(function: Callable[[], Any]) -> int:
    """The most bytes that torch's allocator has handed out while a function runs."""
    return max(_handed_out(function))


def left(function: Callable[[], Any]) -> int:
    """The bytes that torch's allocator has handed out when a function has run; it returns what has them."""
    return _handed_out(function)[-1]


def _handed_out(function: Callable[[], Any]) -> list[int]:
    gc.collect()  # or what others have left is freed while this is measured
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        kept = function()
    events = run.profiler.kineto_results.events()
    held = [0, *accumulate(event.nbytes() for event in events if event.name() == "[memory]")]
    del kept
    return held
