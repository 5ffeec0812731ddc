"""What recording a step costs beside capturing it: ``python -m benchmarks.recording``.

The same AdamW, tensor by tensor (``foreach=False``), and on tensors so small that nearly all of it is
Python's time: run eagerly, captured, and recorded, as steps are that cannot be captured: the first of them,
and each in which something is new. Steps that make the calls of an earlier one are matched. They take turns;
the median of many steps is printed, whole and for each operation that is recorded, and what the first steps
took, in which they were compiled (but for what Inductor has in its cache). It is time on the cores, whatever
else the machine does.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from collage_fx import CollageBackend
from collage_fx.capture.matching import Matcher
from collage_fx.capture.recorder import Recorder
from collage_fx.capture.recording import Request, record

ELEMENTS = 16
WARM_UP = 5


def adamw(tensors: int) -> torch.optim.AdamW:
    parameters = [torch.nn.Parameter(torch.randn(ELEMENTS).bfloat16()) for _ in range(tensors)]
    for p in parameters:
        p.grad = torch.randn(ELEMENTS).bfloat16()
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=False)


def steps(tensors: int) -> dict[str, Callable[[], Any]]:
    captured, recorded, matched = (adamw(tensors) for _ in range(3))
    for each in (recorded, matched):
        record(each, Request(CollageBackend(), {}, strict=True), "to be timed")
    return {
        "eager": adamw(tensors).step,
        "captured": torch.compile(captured.step, backend=CollageBackend()),
        "recorded": never_matched(recorded.step),
        "matched": matched.step,
    }


def never_matched(step: Callable[[], Any]) -> Callable[[], Any]:
    begin = Matcher.begin

    def run() -> None:
        with mock.patch.object(Matcher, "begin", lambda self, *, is_matching: begin(self, is_matching=False)):
            step()

    return run


def operations(step: Callable[[], Any]) -> int:
    """How many operations one step records."""
    with mock.patch.object(Recorder, "_record", autospec=True, side_effect=Recorder._record) as recording:
        step()
    return int(recording.call_count)


def timed(step: Callable[[], Any]) -> float:
    started = seconds_used()
    step()
    return seconds_used() - started


def seconds_used() -> float:
    """Of this process, and of the compilers that it has run."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recording", description=__doc__)
    parser.add_argument("--tensors", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    of = steps(options.tensors)
    compiling = {name: sum(timed(step) for _ in range(WARM_UP)) for name, step in of.items()}
    count = operations(of["recorded"])
    seconds: dict[str, list[float]] = {name: [] for name in of}
    for _ in range(options.repeats):
        for name, step in of.items():
            seconds[name].append(timed(step))
    print(f"AdamW, {options.tensors} tensors of {ELEMENTS} elements, {count} operations a step")
    for name, measured in seconds.items():
        median = statistics.median(measured)
        per_operation = f"{median / count * 1e6:5.1f} µs an operation"
        print(f"{name:9} {median * 1e3:6.2f} ms, {per_operation}; compiled in {compiling[name]:.1f} s")


if __name__ == "__main__":
    main()
