"""Compare saving a run and reading whole weights with a pass over memory: ``python -m benchmarks.saving``.

``optimizer.state_dict()`` of AdamW with ``plus`` computes a fingerprint of each tensor with an error term,
and the first step after loading compares it. ``full_value`` makes float32 or float64 numbers of a parameter
and its error term. Medians, for each element, beside passes that read 16-bit numbers and make such numbers,
and beside ``torch.save`` of the whole state into memory. It is time on the cores, in rounds that alternate.
"""

from __future__ import annotations

import argparse
import io
import resource
import statistics
from collections.abc import Callable
from typing import Any

import torch

from collage_fx import CollageBackend, full_value
from collage_fx.state.fingerprints import fingerprint


def timed(function: Callable[[], Any]) -> float:
    """Return the seconds on the cores that a call takes."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    function()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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
    rows: dict[str, tuple[Callable[[], Any], int]] = {  # calls, and the tensors that each reads
        "a pass to float32": (lambda: hi.float(), 1),
        "a pass to float64": (lambda: hi.double(), 1),
        "one fingerprint": (lambda: fingerprint(hi, [lo]), 1),
        "state_dict()": (optimizer.state_dict, 2),
        "full_value(p, float32)": (lambda: full_value(p, torch.float32), 1),
        "full_value(p)": (lambda: full_value(p), 1),
        "torch.save of it": (lambda: torch.save(optimizer.state_dict(), io.BytesIO()), 2),
    }
    rounds = [{name: timed(call) for name, (call, _) in rows.items()} for _ in range(options.times)]
    seconds = {name: statistics.median(each[name] for each in rounds) / rows[name][1] for name in rows}
    for name, each in seconds.items():
        ratio = each / seconds["a pass to float32"]
        print(
            f"{name:22} {each / options.elements * 1e9:6.2f} ns an element, {ratio:5.2f} of a pass to float32"
        )


if __name__ == "__main__":
    main()
