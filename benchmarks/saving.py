"""What error terms cost when a run is saved and loaded: ``python -m benchmarks.saving``.

``optimizer.state_dict()`` of AdamW with ``plus`` computes a fingerprint of each tensor with an error term,
and the first step after loading compares it. Medians, for each element of the two tensors (a parameter and
its second moment), beside ``torch.save`` of the whole state into memory. It is time on the cores.
"""

from __future__ import annotations

import argparse
import io
import resource
import statistics
from collections.abc import Callable
from typing import Any

import torch

from collage_fx import CollageBackend
from collage_fx.state.fingerprints import fingerprint


def timed(function: Callable[[], Any], times: int) -> float:
    """Seconds on the cores, the median of some calls."""
    found = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_SELF)
        function()
        after = resource.getrusage(resource.RUSAGE_SELF)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--times", type=int, default=7)
    options = parser.parse_args()
    p = torch.nn.Parameter(torch.randn(options.elements).bfloat16())
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW([p])
    torch.compile(optimizer.step, backend=CollageBackend(strategy="plus"))()
    hi, lo = torch.randn(2, options.elements).bfloat16()
    rows = {
        "one fingerprint": timed(lambda: fingerprint(hi, [lo]), options.times) / options.elements,
        "state_dict()": timed(optimizer.state_dict, options.times) / (2 * options.elements),
        "torch.save of it": timed(lambda: torch.save(optimizer.state_dict(), io.BytesIO()), options.times)
        / (2 * options.elements),
    }
    for name, seconds in rows.items():
        print(f"{name:20} {seconds * 1e9:6.2f} ns an element")


if __name__ == "__main__":
    main()
