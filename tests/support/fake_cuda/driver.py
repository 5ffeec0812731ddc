"""The fake driver, loaded: its counters and callbacks."""

from __future__ import annotations

import ctypes as c

#: The runtime, of which the driver, libcuda.so.1, is another name.
LIBRARY = c.CDLL("libcudart.so.13")

PREPARE = c.CFUNCTYPE(
    c.c_long,
    *(c.c_char_p, c.c_void_p, c.c_long, c.c_char_p, c.POINTER(c.c_void_p)),
    *([c.c_uint] * 5),
    *(c.c_void_p, c.c_int),
)
EXECUTE = c.CFUNCTYPE(None, c.c_long)

load, store = LIBRARY.fake_load, LIBRARY.fake_store
for _access in (load, store):
    _access.argtypes = [c.c_void_p, c.c_long, c.c_int, c.c_void_p, c.c_void_p]
    _access.restype = c.c_long

push = LIBRARY.fake_push
push.argtypes, push.restype = [c.c_void_p, c.c_long], None

copy = LIBRARY.cudaMemcpyAsync
copy.argtypes = [c.c_void_p, c.c_void_p, c.c_size_t, c.c_int, c.c_void_p]

LIBRARY.fake_counter_name.argtypes, LIBRARY.fake_counter_name.restype = [c.c_int], c.c_char_p


def _names() -> list[str]:
    found: list[str] = []
    while (name := LIBRARY.fake_counter_name(len(found))) is not None:
        found.append(name.decode())
    return found


NAMES = _names()

#: Counters of calls that wait for the device.
WAITS = ("event waits", "stream waits", "device waits")


def counters() -> dict[str, int]:
    """Return what has been counted since the last call, by name, without zeros."""
    counts = (c.c_long * len(NAMES))()
    LIBRARY.fake_counters(counts, 1)
    return {name: count for name, count in zip(NAMES, counts, strict=True) if count}


def drain() -> None:
    """Execute all that is queued."""
    LIBRARY.fake_drain()


def fault() -> None:
    """Make the next wait return an error."""
    LIBRARY.fake_fault()


def forget_faults() -> None:
    LIBRARY.fake_forget_faults()
