"""Instructions of a full block, counted in the machine code of NVIDIA GPUs, and the facts of these GPUs.

Note [Instructions of a full block]
-----------------------------------
Most programs of a step compute a full block, without masks. Its instructions are those on the *shortest path*
through the machine code, from the first instruction to an ``EXIT`` without a condition:

* The path goes through an access of 16 bytes, if there is one: only a full block has them.
* Each branch goes to the side with fewer instructions left.
* A path that calls is none: the slow paths of square roots and divisions, for subnormal numbers and NaN,
  are the only subroutines. So is a path that returns.
* An instruction with a condition counts, whether the condition is true or not: it is issued.
* A program with several tiles goes through a loop. A backward branch to an instruction on the path closes a
  loop; its shortest turn counts as often as there are tiles.

Loops with another number of turns are not known: the kernel that adds sums is counted as if each had one.

An instruction takes one issue slot of one of the four schedulers of a multiprocessor; and its pipe takes so
many of its threads a clock, by NVIDIA's "CUDA C++ Programming Guide", "Throughput of Native Arithmetic
Instructions". :func:`issue` is the time of the busier: issue slots or a pipe. It is a bound from below: it
supposes that the schedulers never wait.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Card:
    """Facts of a GPU, from its data sheet.

    Attributes:
        name: name of the GPU.
        multiprocessors: number of multiprocessors.
        clock: clocks per second, boosted.
        bandwidth: bytes per second that a copy moves: 90 % of the data sheet's number.
        threads: threads per clock and multiprocessor that each pipe takes; "issue" = all schedulers.
    """

    name: str
    multiprocessors: int
    clock: float
    bandwidth: float
    threads: Mapping[str, int]


_THREADS = {"issue": 128, "FMA": 128, "ALU": 64, "FP64": 64, "LSU": 32, "XU": 16}

#: GPUs by the compilers' names of their architectures.
CARDS: Mapping[str, Card] = {
    "sm_80": Card("A100", 108, 1.41e9, 1.8e12, {**_THREADS, "FMA": 64, "FP64": 32}),
    "sm_90": Card("H100", 132, 1.755e9, 3.0e12, _THREADS),
    "sm_100": Card("B200", 148, 1.965e9, 7.2e12, _THREADS),
}

#: Pipes by the first part of an instruction's name. Others take an issue slot alone.
_PIPES: Mapping[str, str] = {
    **dict.fromkeys(("FADD", "FMUL", "FFMA", "IMAD", "HFMA2", "FSWZADD"), "FMA"),
    **dict.fromkeys(("FSETP", "FSET", "FSEL", "FMNMX", "ISETP", "SEL", "IADD3", "VIADD", "LEA"), "ALU"),
    **dict.fromkeys(("LOP3", "SHF", "PRMT", "MOV", "IABS", "VIMNMX", "VIMNMX3", "SGXT", "BMSK"), "ALU"),
    **dict.fromkeys(("PLOP3", "P2R", "R2P", "I2FP", "F2FP", "CS2R"), "ALU"),
    **dict.fromkeys(("DADD", "DMUL", "DFMA", "DSETP"), "FP64"),
    **dict.fromkeys(("LDG", "STG", "LDS", "STS", "SHFL", "ATOMG", "RED", "LDL", "STL"), "LSU"),
    **dict.fromkeys(("MUFU", "F2F", "F2I", "I2F", "FRND", "POPC", "FLO"), "XU"),
}


class _Instruction(NamedTuple):
    """Instruction: its address, its condition, its name and its operands."""

    address: int
    condition: str
    name: str
    operands: str


_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE)

#: Name of an access of 16 bytes for each thread.
_WIDE = re.compile(r"(?:LDG|STG)\..*\b128\b")


def full_block(sass: str, tiles: int = 1) -> Counter[str]:
    """Return how often a warp executes each instruction, by name, for a full block: see the Note.

    Args:
        sass: text of a kernel by ``cuobjdump -sass``.
        tiles: number of turns of the loops of a full block.
    """
    code = [_Instruction(int(each[1], 16), each[2] or "", each[3], each[4]) for each in _LINE.finditer(sass)]
    place = {each.address: i for i, each in enumerate(code)}
    first = next((i for i, each in enumerate(code) if _WIDE.match(each.name)), 0)
    path = _shortest(code, place, 0, lambda i: i == first)[:-1]
    path += _shortest(code, place, first, lambda i: code[i].name == "EXIT" and not code[i].condition)
    executed = Counter(code[i].name for i in path)
    for i, each in enumerate(code):
        target = _target(each, place)
        if target is not None and target <= i and target in path:
            turn = _shortest(code, place, target, lambda j, last=i: j == last)  # type: ignore[misc]
            executed.update(
                {name: (tiles - 1) * n for name, n in Counter(code[j].name for j in turn).items()}
            )
    return executed


def _target(instruction: _Instruction, place: Mapping[int, int]) -> int | None:
    """Return the index of the instruction that a branch goes to; None for other instructions."""
    if instruction.name.partition(".")[0] != "BRA":
        return None
    address = re.search(r"0x([0-9a-f]+)", instruction.operands)
    return None if address is None else place[int(address[1], 16)]


def _shortest(
    code: Sequence[_Instruction], place: Mapping[int, int], start: int, is_last: Callable[[int], bool]
) -> list[int]:
    """Return the shortest path through code without calls; empty if there is none."""
    length, before, waiting = {start: 0}, dict[int, int](), [(0, start)]
    while waiting:
        so_far, i = heapq.heappop(waiting)
        if is_last(i):
            path = [i]
            while path[-1] in before:
                path.append(before[path[-1]])
            return path[::-1]
        each = code[i]
        kind = each.name.partition(".")[0]
        if so_far > length[i] or kind in ("CALL", "RET", "BRX") or (kind == "EXIT" and not each.condition):
            continue
        target = _target(each, place)
        is_conditional = each.condition or re.match(r"!?U?P\d", each.operands)
        following = [] if target is None else [target]
        if (target is None or is_conditional) and i + 1 < len(code):
            following.append(i + 1)
        for j in following:
            if so_far + 1 < length.get(j, len(code) + 1):
                length[j], before[j] = so_far + 1, i
                heapq.heappush(waiting, (so_far + 1, j))
    return []


def by_pipe(executed: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of instructions by pipe, and that of all as "issue"."""
    counts = Counter[str]()
    for name, number in executed.items():
        counts["issue"] += number  # type: ignore[assignment]
        if (pipe := _PIPES.get(name.partition(".")[0])) is not None:
            counts[pipe] += number  # type: ignore[assignment]
    return dict(counts)


def busiest(pipes: Mapping[str, float], card: Card) -> tuple[str, float]:
    """Return the pipe that needs the most time, and the seconds that it needs on all multiprocessors."""
    seconds = {
        pipe: number / (card.threads[pipe] * card.multiprocessors * card.clock)
        for pipe, number in pipes.items()
    }
    return max(seconds.items(), key=lambda item: item[1], default=("issue", 0.0))
