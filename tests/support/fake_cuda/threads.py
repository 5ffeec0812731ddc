"""State of threads that run at once, and access to operands."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from tests.support.fake_cuda.floats import SIGNED, UNSIGNED, Values, constant, dtype_of, size_of
from tests.support.fake_cuda.ptx import Body, Program

WARP = 32


class Fault(Exception):
    """An access that a card would not have survived, or might not have."""


class Threads:
    """Whole blocks of threads, and which of them are at the current instruction.

    Args:
        program: their kernel.
        parameters: bits of its parameters.
        blocks: numbers of the blocks.
        grid: size of the whole grid.
        shared: bytes of shared memory of a block.

    Attributes:
        active: indices of the threads that take the instruction, or all.
        registers: values of all threads, by name.
        shared: shared memory of all blocks, one after another.
        shared_start: where a thread's begins.
    """

    def __init__(
        self,
        program: Program,
        parameters: Sequence[int],
        blocks: Values,
        grid: tuple[int, int, int],
        shared: int,
    ) -> None:
        self.program = program
        self.parameters = dict(zip(program.parameters, parameters, strict=True))
        self.count = program.threads * len(blocks)
        self.active: slice | Values = slice(None)
        self.shared_size = max(shared, 16)
        self.shared = np.zeros(len(blocks) * self.shared_size, np.uint8)
        first = np.arange(len(blocks), dtype=np.int64) * self.shared_size
        self.shared_start = np.repeat(first, program.threads)
        self.registers = {
            name: np.broadcast_to(np.asarray(value, np.uint32), self.count)
            for name, value in self._special(blocks, grid).items()
        }

    def _special(self, blocks: Values, grid: tuple[int, int, int]) -> dict[str, Values | int]:
        thread = np.tile(np.arange(self.program.threads), len(blocks))
        block = np.repeat(blocks, self.program.threads)
        x, y, z = grid
        return {
            "%tid.x": thread,
            "%tid.y": 0,
            "%tid.z": 0,
            "%laneid": thread % WARP,
            "%warpid": thread // WARP,
            "%ctaid.x": block % x,
            "%ctaid.y": block // x % y,
            "%ctaid.z": block // (x * y),
            "%ntid.x": self.program.threads,
            "%ntid.y": 1,
            "%ntid.z": 1,
            "%nctaid.x": x,
            "%nctaid.y": y,
            "%nctaid.z": z,
        }

    @property
    def active_count(self) -> int:
        return self.count if isinstance(self.active, slice) else len(self.active)

    def register(self, name: str) -> Values:
        """Return a register of all threads."""
        if name not in self.registers:
            self.registers[name] = np.zeros(self.count, _dtype(self.program, name))
        return self.registers[name]

    def write(self, name: str, values: Values) -> None:
        """Give a register another value in each active thread."""
        if not isinstance(self.active, slice):
            self.register(name)[self.active] = values
        elif values.base is None and len(values) == self.count:
            self.registers[name] = values
        else:  # a value for all threads, or the array of another register
            self.registers[name] = np.array(np.broadcast_to(values, self.count))

    def each(self, values: Values) -> Values:
        """Return a value for each active thread, of one for all."""
        return np.ascontiguousarray(np.broadcast_to(values, self.active_count))


Reader: TypeAlias = Callable[[Threads], Values]
Writer: TypeAlias = Callable[[Threads, Values], None]
Action: TypeAlias = Callable[[Threads], None]


def _dtype(body: Body, name: str) -> np.dtype[np.generic]:
    width = body.width(name)
    return UNSIGNED[width] if width else np.dtype(bool)


def read_predicate(text: str) -> Reader:
    if text in ("0", "1", "-1"):
        return lambda threads: np.array([text != "0"])
    if text.startswith("!"):
        return lambda threads: ~threads.register(text[1:])[threads.active]
    return lambda threads: threads.register(text)[threads.active]


def read_operand(program: Program, text: str, kind: str) -> Reader:
    """Return a function that gives an operand, a register or a literal, as values of a type."""
    if kind == "pred":
        return read_predicate(text)
    size, dtype = size_of(kind), dtype_of(kind)
    if text in program.shared:
        zero = np.zeros(1, dtype)
        return lambda threads: zero
    if not text.startswith("%") and text not in program.passed:
        value = constant(text, kind)
        return lambda threads: value

    def read(threads: Threads) -> Values:
        found = threads.register(text)[threads.active]
        return (found if found.dtype.itemsize == size else found.astype(UNSIGNED[size])).view(dtype)

    return read


def write_operand(program: Program, text: str) -> Writer:
    """Return a function that writes a register: a signed value into a wider one with its sign."""
    if not text.startswith("%") and text not in program.passed:  # "_", and "tmp" in braces
        return lambda threads, values: None
    dtype = _dtype(program, text)

    def write(threads: Threads, values: Values) -> None:
        if values.dtype != dtype:
            if values.dtype.kind == "i" and values.dtype.itemsize < dtype.itemsize:
                values = values.astype(SIGNED[dtype.itemsize])
            values = np.ascontiguousarray(values).view(UNSIGNED[values.dtype.itemsize]).astype(dtype)
        threads.write(text, values)

    return write


def read_address(program: Program, text: str) -> Reader:
    """Return a function that gives ``[register + offset]`` of each active thread."""
    found = re.match(r"\[\s*([%\w.$]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
    assert found is not None, text
    base, offset = found[1], np.uint64(int(found[2] or "0", 0) & (1 << 64) - 1)
    if base in program.shared:
        return lambda threads: np.full(threads.active_count, offset)
    return lambda threads: threads.register(base)[threads.active].astype(np.uint64) + offset
