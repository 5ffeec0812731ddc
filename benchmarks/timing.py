"""Clocks, the memory traffic that everything is compared with, memory and counts."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from math import ceil, prod
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor
from torch.profiler import DeviceType, ProfilerActivity, profile

from benchmarks.sizes import Shapes, elements

Step = Callable[[], Any]


class Clock:
    """Seconds that a call takes on the device, and those until it has returned.

    On a CPU the two are one. On a GPU the call is queued behind a kernel that does nothing for as long as
    the host needs to queue it, as a training loop has queued the backward pass before: what is measured is
    the device's own time, its waits between kernels included, unless the call waits for the device.
    """

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.host_seconds = 1e-3
        self.cycles_a_second = self._calibrate() if self.cuda else 0.0

    def _calibrate(self) -> float:
        cycles = 100_000_000
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        started = time.perf_counter()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        return cycles / (time.perf_counter() - started)

    def __call__(self, step: Step, head_start: float = 0.0) -> tuple[float, float]:
        """Time one call.

        Args:
            step: to be called.
            head_start: seconds that the host needs to queue the call.
        """
        if not self.cuda:
            started = time.perf_counter()
            step()
            elapsed = time.perf_counter() - started
            return elapsed, elapsed
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(int((2 * head_start + 2e-4) * self.cycles_a_second))
        first.record()
        started = time.perf_counter()
        step()
        host = time.perf_counter() - started
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1e3, host


def rounds(
    clock: Clock, steps: dict[str, Step], *, at_most: int, at_least: int, seconds: float
) -> dict[str, list[tuple[float, float]]]:
    """Every step once a round, again and again; the first round is only for warmth.

    What a step finds in the caches, and what is still being written back, is the work of the one before it.
    So each round has another order, and no step is always the one after the largest.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    head_start = {name: clock(step)[1] for name, step in steps.items()}
    order, shuffler, started = list(steps), random.Random(0), time.perf_counter()
    for i in range(at_most):
        if i >= at_least and time.perf_counter() - started > seconds:
            break
        shuffler.shuffle(order)
        for name in order:
            times[name].append(clock(steps[name], head_start[name]))
    return times


def ratio(over: Sequence[float], under: Sequence[float]) -> tuple[float, float]:
    """The median of the rounds' own ratios, and half the distance between their quartiles.

    What slows a whole round down cancels.
    """
    low, middle, high = quantiles((a / b for a, b in zip(over, under, strict=True)), method="inclusive")
    return middle, (high - low) / 2


class Traffic:
    """Nothing but reading and writing, as many bytes together as a step must.

    On a CPU tensor by tensor, each with all threads. On a GPU all at once: that a model has many tensors
    costs launches, which are the step's to avoid. All share their memory.
    """

    def __init__(self, shapes: Shapes, most_bytes_per_parameter: float, device: str) -> None:
        self.lengths = [elements(shapes)] if device == "cuda" else [prod(shape) for shape in shapes]
        halves = [ceil(n * most_bytes_per_parameter / 2) for n in self.lengths]
        self.sources = [torch.randint(0, 100, (n,), dtype=torch.int8, device=device) for n in halves]
        self.targets: list[Tensor] = [torch.empty_like(source) for source in self.sources]

    def copy(self, bytes_per_parameter: float) -> Step:
        """Half of the bytes are read, and written elsewhere."""
        pairs = list(
            zip(
                self._halves(self.targets, bytes_per_parameter),
                self._halves(self.sources, bytes_per_parameter),
                strict=True,
            )
        )

        def step() -> None:
            for target, source in pairs:
                target.copy_(source)

        return step

    def rewriting(self, bytes_per_parameter: float) -> Step:
        """Half of the bytes are read, and written where they were."""
        tensors = self._halves(self.targets, bytes_per_parameter)

        def step() -> None:
            for tensor in tensors:
                tensor.bitwise_not_()

        return step

    def _halves(self, tensors: Sequence[Tensor], bytes_per_parameter: float) -> list[Tensor]:
        lengths = (ceil(n * bytes_per_parameter / 2) for n in self.lengths)
        return [tensor[:n] for tensor, n in zip(tensors, lengths, strict=True)]


def peak_extra_memory(step: Step, device: str) -> int:
    """Bytes allocated at the worst moment of a step beyond those at its start."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()  # tensors of earlier steps, which would be subtracted if they were freed in this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    kineto = profiler.profiler.kineto_results if profiler.profiler is not None else None
    assert kineto is not None
    allocated = peak = 0
    for event in kineto.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


def launches(step: Step, device: str) -> int:
    """Kernels on a GPU; on a CPU operators called from outside of operators, compiled kernels not counted."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    events = profiler.events() or []
    if device == "cuda":
        on_device = [event for event in events if event.device_type == DeviceType.CUDA]
        of_others = ("Memcpy", "Memset")
        return sum(not (e.is_user_annotation or e.name.startswith(of_others)) for e in on_device)
    return sum(event.name.startswith("aten::") and not _inside_operator(event) for event in events)


def _inside_operator(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith("aten::"):
            return True
        parent = parent.cpu_parent
    return False
