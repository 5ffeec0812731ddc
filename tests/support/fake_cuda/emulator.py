"""Execution of a kernel: an instruction at a time, for all threads of many blocks at once.

Threads that have come to different places wait for those that are behind, so that a barrier is no operation.
Threads that wait for each other in a loop are not emulated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.support.fake_cuda.floats import Values
from tests.support.fake_cuda.instructions import compiled
from tests.support.fake_cuda.ptx import Instruction, parse
from tests.support.fake_cuda.threads import Action, Fault, Threads, read_predicate

#: Threads that are executed at once.
AT_ONCE = 1 << 18

#: Begins of opcodes after which threads may be in other places.
_JUMPS = ("bra", "brx", "ret", "exit", "trap")


class Kernel:
    """Kernel of a module, ready to run.

    Args:
        text: PTX of the module.
        name: the kernel's.

    Attributes:
        sizes: bytes of each parameter.
        threads: of a block.
    """

    def __init__(self, text: str, name: str) -> None:
        self.program = parse(text, name)
        self.sizes = list(self.program.parameters.values())
        self.threads = self.program.threads
        self._targets = frozenset(self.program.labels.values())
        self._actions: dict[int, Action] = {}

    def run(self, parameters: Sequence[int], grid: tuple[int, int, int], shared: int) -> None:
        """Execute all blocks, given the bits of the parameters."""
        x, y, z = grid
        at_once = max(1, AT_ONCE // self.threads)
        for first in range(0, x * y * z, at_once):
            blocks = np.arange(first, min(x * y * z, first + at_once))
            with np.errstate(all="ignore"):
                self._run(Threads(self.program, parameters, blocks, grid, shared))

    def _run(self, threads: Threads) -> None:
        end = len(self.program.code)
        places = np.zeros(threads.count, np.int64)
        while (place := int(places.min())) < end:
            chosen = np.nonzero(places == place)[0]
            places[chosen] = self._advance(threads, chosen, place)

    def _advance(self, threads: Threads, chosen: Values, place: int) -> Values | int:
        """Take these threads to the next jump, or to where others may come in; return where they then are."""
        is_everyone = len(chosen) == threads.count
        code = self.program.code
        while place < len(code):
            instruction = code[place]
            threads.active = slice(None) if is_everyone else chosen
            if instruction.opcode.startswith(_JUMPS):
                return self._jump(threads, instruction, place)
            if instruction.guard:
                threads.active = chosen[read_predicate(instruction.guard)(threads) ^ instruction.negated]
            if not instruction.guard or threads.active_count:
                self._do(threads, instruction, place)
            place += 1
            if place in self._targets and not is_everyone:
                break
        return place

    def _do(self, threads: Threads, instruction: Instruction, place: int) -> None:
        try:
            if place not in self._actions:
                self._actions[place] = compiled(self.program, instruction)
            self._actions[place](threads)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise RuntimeError(f"{self.program.name}: {instruction.text!r}: {error!r}") from error

    def _jump(self, threads: Threads, instruction: Instruction, place: int) -> Values:
        """Return where each active thread goes."""
        count, operands = threads.active_count, instruction.operands
        is_taken = np.ones(count, bool)
        if instruction.guard:
            is_taken = read_predicate(instruction.guard)(threads) ^ instruction.negated
        kind = instruction.opcode.partition(".")[0]
        if kind == "trap" and is_taken.any():
            raise Fault(f"{self.program.name}: trap, as of a failed device assertion")
        goals = np.full(count, len(self.program.code))
        if kind == "brx":
            table = [self.program.labels[label] for label in self.program.tables[operands[1]]]
            goals = np.array(table)[threads.register(operands[0])[threads.active]]
        elif kind == "bra":
            goals[:] = self.program.labels[operands[0]]
        return np.where(is_taken, goals, place + 1)
