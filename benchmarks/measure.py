"""Measurements of one size in a process of their own.

A request is a function's name and its arguments, an answer its result or what went wrong. Whoever asks kills
the process that takes too long, and what that process has started with it.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.compiling import compiled_step, make_optimizer
from benchmarks.peers import PEERS, Peer, Step, make_gradients, make_parameters
from benchmarks.sizes import SIZES, Shapes, elements
from benchmarks.timing import Clock, Traffic, launches, peak_extra_memory, ratio, rounds
from collage_fx import explain

#: After as many steps nothing is compiled any more.
STEPS_TO_SETTLE = 4
#: Beside which every other peer is measured.
OURS = ("light", "plus")
#: What only reads and writes.
FLOORS = ("copy", "rewriting")


class Failure(Exception):
    """Its text is the reason that a row has instead of numbers."""


class Process:
    """The other process, started when first asked."""

    def __init__(self) -> None:
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None

    def ask(self, request: str, *arguments: Any, time_limit: float) -> Any:
        """Have a method of :class:`Measurements` called.

        Raises:
            Failure: it raised, took longer than ``time_limit`` seconds, or took its process with it.
        """
        pipe = self._pipe or self._start()
        pipe.send((request, arguments))
        if not pipe.poll(time_limit):
            self.stop(patience=0)
            raise Failure(f"not done within {time_limit:.0f} s")
        try:
            result, reason = pipe.recv()
        except EOFError:
            process = self._process
            assert process is not None
            process.join()
            self.stop()
            raise Failure(f"its process ended with exit status {process.exitcode}") from None
        if reason:
            raise Failure(reason)
        return result

    def tell_if_running(self, request: str, *arguments: Any) -> None:
        """Have a method called, if there is a process that has anything to lose."""
        if self._process is not None:
            self.ask(request, *arguments, time_limit=60)

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        return self._pipe

    def stop(self, patience: float = 10) -> None:
        """End the process and the compilers that it started; the next request starts another."""
        if self._process is not None and self._pipe is not None:
            self._pipe.close()  # which ends it, unless it hangs
            self._process.join(patience)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.ident or 0, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None


def _serve(pipe: Connection) -> None:
    os.setsid()
    warnings.simplefilter("ignore")  # of packages; what matters is in the answers
    # Steps of many optimizers are one code object to Dynamo.
    torch._dynamo.config.recompile_limit = 64
    measurements = Measurements()
    while True:
        try:
            request, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[Any, str] = getattr(measurements, request)(*arguments), ""
        except Exception as error:
            traceback.print_exc()
            answer = (
                None,
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",
            )
        pipe.send(answer)


@dataclass
class Rig:
    """A peer with parameters to step.

    Attributes:
        first: seconds its first step took, everything that it compiled included.
        settled: seconds its first steps took together, as some compile again in the second.
    """

    peer: Peer
    step: Step
    first: float
    settled: float


@dataclass
class Measurements:
    """What the other process does and keeps."""

    size: str = ""
    device: str = "cpu"
    shapes: Shapes = ()
    gradients: dict[torch.dtype, list[Tensor]] = field(default_factory=dict)
    rigs: dict[str, Rig] = field(default_factory=dict)
    traffic: Traffic | None = None
    clock: Clock | None = None

    def open(self, size: str, device: str) -> None:
        """Choose the size, once."""
        if self.size == size:
            return
        memory = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
        self.size, self.device, self.shapes = size, device, SIZES[size].shapes(memory)

    def parameters(self) -> int:
        return elements(self.shapes)

    def build(self, name: str, cache: str) -> tuple[float, float]:
        """Make a peer, unless there is one, and take its first steps; see :class:`Rig`."""
        if name in self.rigs:
            return self.rigs[name].first, self.rigs[name].settled
        peer = PEERS[name]
        parameters = self._make_parameters(peer.dtype)
        with compile_cache(cache):
            step = peer.make(parameters)
            first, settled = self._first_steps(step)
        if any(parameter.grad is None for parameter in parameters):
            raise Failure("its step takes the gradients away, so later steps would do nothing")
        self.rigs[name] = Rig(peer, step, first, settled)
        return first, settled

    def compile(self, optimizer: str, cache: str) -> float:
        """Seconds of the first steps of one of torch.optim's classes, strategy ``plus``."""
        made = make_optimizer(optimizer, self._make_parameters(torch.bfloat16))
        with compile_cache(cache):
            return self._first_steps(compiled_step(made))[1]

    def explain(self, optimizer: str) -> float:
        """Seconds to the report of what :meth:`compile` compiles."""
        made = make_optimizer(optimizer, self._make_parameters(torch.bfloat16))
        started = time.perf_counter()
        str(explain(made, strategy="plus"))
        return time.perf_counter() - started

    def _make_parameters(self, dtype: torch.dtype) -> list[torch.nn.Parameter]:
        if dtype not in self.gradients:
            self.gradients[dtype] = make_gradients(self.shapes, dtype, self.device)
        return make_parameters(self.shapes, dtype, self.device, self.gradients[dtype])

    def _first_steps(self, step: Step) -> tuple[float, float]:
        """Seconds of the first step, and of as many as it takes until nothing is compiled any more."""
        started = time.perf_counter()
        seconds = []
        for _ in range(STEPS_TO_SETTLE):
            step()
            self._wait()
            seconds.append(time.perf_counter() - started)
        return seconds[0], seconds[-1]

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def drop(self, name: str) -> None:
        """Forget a peer and its memory."""
        self.rigs.pop(name, None)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def measure(self, name: str, at_most: int, at_least: int, seconds: float) -> dict[str, Any]:
        """Time a peer, in turn with ours, and with what only reads and writes as many bytes."""
        rig = self.rigs[name]
        steps = {ours: self.rigs[ours].step for ours in OURS if ours in self.rigs}
        steps[name] = rig.step
        self.clock = self.clock or Clock(self.device)
        most = max(peer.bytes for peer in PEERS.values())
        self.traffic = self.traffic or Traffic(self.shapes, most, self.device)
        steps["copy"] = self.traffic.copy(rig.peer.bytes)
        steps["rewriting"] = self.traffic.rewriting(rig.peer.bytes)
        times = rounds(self.clock, steps, at_most=at_most, at_least=at_least, seconds=seconds)
        device = {key: [sample[0] for sample in samples] for key, samples in times.items()}
        number = elements(self.shapes)
        return {
            **{f"{key}_ms": 1e3 * median(device[key]) for key in (*FLOORS, *OURS) if key in steps},
            "ms": 1e3 * median(device[name]),
            "host_ms": 1e3 * median(sample[1] for sample in times[name]),
            "rounds": len(device[name]),
            **{
                key: value
                for floor in FLOORS
                for key, value in _ratio(f"over_{floor}", device[name], device[floor]).items()
            },
            **{
                key: value
                for ours in OURS
                if ours in steps
                for key, value in _ratio(f"{ours}_over", device[ours], device[name]).items()
            },
            "extra_bytes_per_parameter": peak_extra_memory(rig.step, self.device) / number,
            "launches": launches(rig.step, self.device),
        }


def _ratio(key: str, over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    middle, spread = ratio(over, under)
    return {key: middle, f"{key}_spread": spread}


@contextlib.contextmanager
def compile_cache(folder: str) -> Iterator[None]:
    """Have Inductor and Triton keep what they compile in this folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
    try:
        yield
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]
