"""``python -m benchmarks.offload``: measure optimizers in host memory, for docs/memory.md.

There is no card here. The device is host memory behind a link that is simulated: a copy is made at once, and
counts as arrived when a link of that speed would have delivered it, one copy after another in each direction.
Gradients come as from a backward pass of a GPU, at even intervals. The steps are real.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.table import markdown, place, put_between
from collage_fx.installation import InstallOptions
from collage_fx.state import bytes_held
from collage_fx.wings.offload import Link, Offload

PLACE = place("memory.md", "offload")

TENSORS, SHAPE, ROUNDS = 64, (1024, 2048), 6
#: Bytes in a second.
LINKS = {"PCIe 4, 25 GB/s": 25e9, "NVLink-C2C, 450 GB/s": 450e9}
OPTIONS: dict[str, InstallOptions] = {
    "`plus`": {},
    "`light`": {"strategy": "light"},
    "8 bytes": {"bytes_per_parameter": 8.1},
    "5.1 bytes": {"bytes_per_parameter": 5.1},
}


class SimulatedLink(Link):
    """Link with a time of arrival for each copy."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._free = {"down": 0.0, "up": 0.0}

    def _arrival(self, direction: str, tensor: Tensor) -> float:
        start = max(self._free[direction], time.perf_counter())
        self._free[direction] = start + tensor.nbytes / self.speed
        return self._free[direction]

    def download(self, into: Tensor, tensor: Tensor) -> Callable[[], None]:
        super().download(into, tensor)
        return partial(_wait_until, self._arrival("down", tensor))

    def upload(self, into: Tensor, tensor: Tensor) -> None:
        super().upload(into, tensor)
        self._arrival("up", tensor)

    def settle(self) -> None:
        _wait_until(self._free["up"])


def _wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def measured(speed: float, options: InstallOptions, seconds: float) -> tuple[float, float]:
    """Return the host's bytes for each parameter, and the time from the first gradient to the last weight.

    Args:
        speed: bytes of the link in a second.
        options: options of ``install``.
        seconds: time of the backward pass.
    """
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter((torch.randn(*SHAPE, generator=generator) * 0.02).bfloat16())
        for _ in range(TENSORS)
    ]
    gradients = [torch.randn(*SHAPE, generator=generator).bfloat16() for _ in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    release = Offload(optimizer, options=options, connect=lambda device: SimulatedLink(speed))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for i, ((p, twin), gradient) in enumerate(zip(release.twins, gradients, strict=True), 1):
            _wait_until(start + seconds * i / TENSORS)
            p.grad = gradient
            release.begin(p, twin)
        optimizer.step()
        times.append(time.perf_counter() - start)
    held: Sequence[Tensor] = [
        each for _, twin in release.twins for each in (twin, *optimizer.state[twin].values())
    ]
    count = sum(p.numel() for p in parameters)
    release.remove()
    return bytes_held(held) / count, min(times[2:]) / count * 1e9


def cpu_adam() -> float:
    """Return the time of DeepSpeed's CPUAdam, with gradients from bfloat16 and weights to it."""
    adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    generator = torch.Generator().manual_seed(0)
    weights = [(torch.randn(*SHAPE, generator=generator) * 0.02).bfloat16() for _ in range(TENSORS)]
    gradients = [torch.randn(*SHAPE, generator=generator).bfloat16() for _ in weights]
    masters = [torch.nn.Parameter(weight.float()) for weight in weights]
    given = [torch.empty_like(master) for master in masters]
    for master, into in zip(masters, given, strict=True):
        master.grad = into
    optimizer = adam(masters, lr=1e-4)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for into, gradient in zip(given, gradients, strict=True):
            into.copy_(gradient)
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master.detach())
        times.append(time.perf_counter() - start)
    return min(times[2:]) / sum(master.numel() for master in masters) * 1e9


def table() -> str:
    count = TENSORS * SHAPE[0] * SHAPE[1]
    rows = []
    for title, options in OPTIONS.items():
        times = []
        for speed in LINKS.values():
            host, alone = measured(speed, options, 0.0)
            _, beside = measured(speed, options, 2 * alone * count / 1e9)
            times += [f"{alone:.2f}", f"{beside - 2 * alone:.2f}"]
        rows.append([title, f"{host:.2f}", *times])  # the same behind each link
    if importlib.util.find_spec("deepspeed") is not None:
        rows.append(["DeepSpeed's CPUAdam, float32", "14 to 18", f"{cpu_adam():.2f}", "", "", ""])
    headers = ["", "bytes on the host"]
    for link in LINKS:
        headers += [f"{link}: step", "left after a backward pass"]
    return (
        f"AdamW on {count / 1e6:.0f} million parameters, {torch.get_num_threads()} threads on this machine's "
        f"cores, torch {torch.__version__.partition('+')[0]}, in nanoseconds for each parameter. *Step*: all "
        "gradients are there at once. *Left*: what remains to be done when a backward pass of twice that "
        "time has ended. The device holds 2 bytes for each parameter, and a part of the gradients.\n\n"
        + markdown(headers, rows)
    )


if __name__ == "__main__":
    put_between(*PLACE, table())
