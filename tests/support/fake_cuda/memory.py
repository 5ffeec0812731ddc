"""Instructions that access memory, or other threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.fake_cuda import driver
from tests.support.fake_cuda.floats import UNSIGNED, Values, dtype_of, size_of
from tests.support.fake_cuda.ptx import Instruction, Program, split
from tests.support.fake_cuda.threads import (
    WARP,
    Action,
    Fault,
    Threads,
    read_address,
    read_operand,
    write_operand,
)

_WHY = {1: "invalid", 2: "misaligned"}


def _access(function: Any, threads: Threads, addresses: Values, size: int, values: Values) -> None:
    """Load or store ``size`` bytes at each address; each has to be aligned, and in an allocation."""
    why = ctypes.c_long()
    addresses = np.ascontiguousarray(addresses)
    bad = function(addresses.ctypes.data, len(addresses), size, values.ctypes.data, ctypes.byref(why))
    if bad >= 0:
        what = "load" if function is driver.load else "store"
        raise Fault(
            f"{threads.program.name}: {_WHY[why.value]} {what} of {size} bytes at {int(addresses[bad]):#x}"
        )


def load_or_store(program: Program, instruction: Instruction) -> Action:
    name, *flags = instruction.opcode.split(".")
    is_load = name == "ld"
    first, second, *_ = instruction.operands  # then a policy of the cache
    where, what = (second, first) if is_load else (first, second)
    if "param" in flags:
        return _parameter(program, where, what, flags[-1], is_load=is_load)
    kind, address, names = flags[-1], read_address(program, where), split(what.strip("{} "))
    size = size_of(kind)
    total = size * len(names)
    is_shared = any(flag.startswith("shared") for flag in flags)

    def places(threads: Threads) -> Values:
        offsets = address(threads).astype(np.int64)
        if int(offsets.max(initial=0)) + total > threads.shared_size:
            raise Fault(f"{program.name}: shared memory is accessed behind its end")
        return (threads.shared_start[threads.active] + offsets)[:, None] + np.arange(total)

    if is_load:
        writers = [write_operand(program, each) for each in names]

        def load(threads: Threads) -> None:
            if is_shared:
                values = np.ascontiguousarray(threads.shared[places(threads)]).view(UNSIGNED[size])
            else:
                values = np.empty((threads.active_count, len(names)), UNSIGNED[size])
                _access(driver.load, threads, address(threads), total, values)
            for i, write in enumerate(writers):
                write(threads, values[:, i].view(dtype_of(kind)))

        return load

    readers = [read_operand(program, each, kind) for each in names]

    def store(threads: Threads) -> None:
        values = np.empty((threads.active_count, len(names)), UNSIGNED[size])
        for i, read in enumerate(readers):
            values[:, i] = read(threads).view(UNSIGNED[size])
        if is_shared:
            threads.shared[places(threads)] = values.view(np.uint8)
        else:
            _access(driver.store, threads, address(threads), total, values)

    return store


def _parameter(program: Program, where: str, what: str, kind: str, *, is_load: bool) -> Action:
    """Access a parameter: of the kernel, or of a function, which is like a register."""
    name, _, offset = where.strip("[] ").partition("+")
    assert not offset, where
    if not is_load:
        read, into = read_operand(program, what, kind), write_operand(program, name)
        return lambda threads: into(threads, read(threads))
    write = write_operand(program, what)
    if name not in program.parameters:
        given = read_operand(program, name, kind)
        return lambda threads: write(threads, given(threads))
    dtype = UNSIGNED[program.parameters[name]]
    return lambda threads: write(threads, np.array([threads.parameters[name]], dtype))


_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "max": max,
    "min": min,
    "exch": lambda old, new: new,
}


def atomic(program: Program, instruction: Instruction) -> Action:
    """Take one thread after another."""
    name, *flags = instruction.opcode.split(".")
    kind = flags[-1]
    action = next((_ATOMIC[flag] for flag in flags if flag in _ATOMIC), None)
    if action is None or kind.endswith("x2") or not any(flag.startswith("global") for flag in flags):
        raise NotImplementedError(instruction.text)
    to, place, value, *_ = instruction.operands if name == "atom" else ("_", *instruction.operands)
    write = write_operand(program, to)
    address, read = read_address(program, place), read_operand(program, value, kind)

    def update(threads: Threads) -> None:
        values = threads.each(read(threads))
        places, which = np.unique(address(threads), return_inverse=True)
        held, old = np.empty(len(places), values.dtype), np.empty_like(values)
        _access(driver.load, threads, places, values.itemsize, held)
        for i, (place, value) in enumerate(zip(which, values, strict=True)):
            old[i] = held[place]
            held[place] = action(held[place], value)
        _access(driver.store, threads, places, values.itemsize, held)
        write(threads, old)

    return update


def shuffle(program: Program, instruction: Instruction) -> Action:
    """Exchange registers within warps of 32 threads."""
    to, value, distance, *_ = instruction.operands
    read, by = read_operand(program, value, "b32"), read_operand(program, distance, "u32")
    write = write_operand(program, to.partition("|")[0])
    mode = next(each for each in instruction.opcode.split(".") if each in ("bfly", "up", "down", "idx"))

    def exchange(threads: Threads) -> None:
        indices = np.arange(threads.count)[threads.active]
        values = np.zeros(threads.count, np.uint32)
        values[threads.active] = read(threads)
        own, n = indices % WARP, by(threads).astype(np.int64)
        other = {"bfly": own ^ n, "up": own - n, "down": own + n, "idx": 0 * own + n}[mode]
        other = np.where((other < 0) | (other >= WARP), own, other)
        write(threads, values[indices - own + other])

    return exchange


def matrix(program: Program, instruction: Instruction) -> Action:
    """Move 8 x 8 halves at a time between shared memory and registers.

    Threads 8i to 8i+7 of a warp say where the rows of the i-th matrix are; each thread has two of its
    elements.
    """
    name, *flags = instruction.opcode.split(".")
    is_load = name == "ldmatrix"
    what, where = instruction.operands if is_load else instruction.operands[::-1]
    address, names = read_address(program, where), split(what.strip("{} "))
    writers = [write_operand(program, each) for each in names]
    readers = [read_operand(program, each, "b32") for each in names]
    row, column = np.arange(WARP) // 4, np.arange(WARP) % 4 * 2

    def places(rows: Values) -> Values:
        """Return the four bytes of each thread, of the begins of 8 rows of each warp."""
        if "trans" in flags:
            elements = [rows[:, column + j] + 2 * row for j in (0, 1)]
        else:
            elements = [rows[:, row] + 2 * (column + j) for j in (0, 1)]
        return np.stack([elements[0], elements[0] + 1, elements[1], elements[1] + 1], -1)

    def move(threads: Threads) -> None:
        starts = threads.shared_start[threads.active] + address(threads).astype(np.int64)
        for i, (write, read) in enumerate(zip(writers, readers, strict=True)):
            at = places(starts.reshape(-1, WARP)[:, 8 * i : 8 * i + 8])
            if is_load:
                write(threads, np.ascontiguousarray(threads.shared[at]).view(np.uint32).reshape(-1))
            else:
                threads.shared[at] = threads.each(read(threads)).view(np.uint8).reshape(at.shape)

    return move
