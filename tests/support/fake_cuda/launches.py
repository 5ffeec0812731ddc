"""Launches: the values of parameters when a kernel is launched, its execution when its turn has come."""

from __future__ import annotations

import ctypes
import functools
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.fake_cuda import driver
from tests.support.fake_cuda.emulator import Kernel

__all__ = ["Launch", "errors", "launched", "queue"]


class Launch(NamedTuple):
    """A launch.

    Attributes:
        name: the kernel's.
        grid: numbers of blocks.
        stream: handle of the stream, None for the default one.
        device: index of the device.
    """

    name: str
    grid: tuple[int, int, int]
    stream: int | None
    device: int


#: Since the last test, or the start.
launched: list[Launch] = []
#: Errors of queued kernels and operators; the next wait for the device fails as well.
errors: list[str] = []

_queued: dict[int, Callable[[], Any]] = {}


def queue(work: Callable[[], Any]) -> int:
    """Return a token by which the driver executes work. Replayed graphs execute theirs again: all is kept."""
    token = len(_queued) + 1
    _queued[token] = work
    return token


def _fail(error: Exception) -> None:
    traceback.print_exception(error)
    errors.append(f"{type(error).__name__}: {error}")
    driver.fault()


def _prepare(
    path: bytes, image: int, size: int, name: bytes, parameters: Any, x: int, y: int, z: int, *rest: Any
) -> int:
    threads, shared, stream, device = rest
    try:
        kernel = _kernel(path.decode(), ctypes.string_at(image, size), name.decode())
        if threads != kernel.threads:
            raise RuntimeError(f"{name.decode()}: {threads} threads, compiled for {kernel.threads}")
        values = [
            int.from_bytes(ctypes.string_at(parameters[i], n), "little") for i, n in enumerate(kernel.sizes)
        ]
        launched.append(Launch(name.decode(), (x, y, z), stream, device))
        return queue(lambda: kernel.run(values, (x, y, z), shared))
    except Exception as error:  # which C++ could not catch
        _fail(error)
        return 0


def _execute(token: int) -> None:
    if not token:
        return
    try:
        _queued[token]()
    except Exception as error:
        _fail(error)


@functools.cache
def _kernel(path: str, image: bytes, name: str) -> Kernel:
    return Kernel(_ptx(path, image, name), name)


def _ptx(path: str, image: bytes, name: str) -> str:
    """Return the PTX beside machine code: beside its file, or beside one with the same contents."""
    beside = Path(path).with_suffix(".ptx")
    if path and beside.exists():
        return beside.read_text()
    image = image or (Path(path).read_bytes() if path and Path(path).exists() else b"")
    folders = map(os.environ.get, ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_HOME"))
    for folder in filter(None, folders):
        for found in Path(folder).rglob(f"{name}.cubin"):
            ptx = found.with_suffix(".ptx")
            if ptx.exists() and found.read_bytes() == image:
                return ptx.read_text()
    raise FileNotFoundError(f"no PTX of {name}")


#: Kept: the driver has their addresses.
_CALLBACKS = driver.PREPARE(_prepare), driver.EXECUTE(_execute)
driver.LIBRARY.fake_callbacks(*_CALLBACKS)
