"""Memory for values that cross between the kernels of a step, and are gone after it.

Note [Members take turns]
-------------------------
A kernel is called for all tensors at once (Note [One call for all tensors]), so a value as large as a
parameter that crosses from one kernel to the next is held for all parameters. Above the limit of a device the
members of a step are divided into rounds that hold no more (or one member), and take turns in one memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from collage_fx.runtime.kernels import HOST, NO_MEMBER, Call

#: Bytes that the values between kernels may take without rounds: on the host, where caches are small, and on
#: other devices, where a round takes launches of its own.
LIMIT, LIMIT_OF_DEVICES = 1 << 26, 1 << 31

#: Buffers begin at multiples of so many bytes: a cache line, and the widest vector.
ALIGNMENT = 64


class Lifetime(NamedTuple):
    """First and last wave in which a buffer is used, and its bytes."""

    first: int
    last: int
    bytes: int


def limit_on(device: torch.device) -> int:
    """Return the bytes that the values between kernels may take on a device without rounds."""
    return LIMIT if device == HOST else LIMIT_OF_DEVICES


def in_rounds(calls: Sequence[Call], shares: Mapping[int, float]) -> list[Call]:
    """Return a step's calls, in the waves of members that take turns if they have to.

    ``shares`` has, for each value that crosses between kernels, its share of the limit on its device.
    """
    of_member: dict[int, dict[int, float]] = defaultdict(dict)
    kernels: dict[int, tuple[int, ...]] = defaultdict(tuple)
    for call in calls:
        of_member[call.member].update({index: shares[index] for index in call.values if index in shares})
        kernels[call.member] += (id(call.kernel),)
    # Members of one shape are in one round, where their tensors can be stacked.
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(kernels.values()))}
    rounds: dict[int, int] = {}
    held = 0.0
    for member in sorted(of_member, key=lambda member: (kinds[kernels[member]], member)):
        size = sum(of_member[member].values())
        if member != NO_MEMBER:
            last = max(rounds.values(), default=0)
            rounds[member] = last + (held > 0 and held + size > 1)
            held = size + held * (rounds[member] == last)
    number = 1 + max(rounds.values(), default=0)
    late = _after_members(calls)
    if number == 1 or late is None:
        return list(calls)
    waves = 1 + max(call.wave for call in calls)
    chosen = (rounds.get(call.member, number - 1 if i in late else 0) for i, call in enumerate(calls))
    return [replace(call, wave=call.wave + waves * i) for i, call in zip(chosen, calls, strict=True)]


def _after_members(calls: Sequence[Call]) -> set[int] | None:
    """Return the calls for no single member that write to values which members read before.

    None if a member reads a result of such a call: then members cannot take turns.
    """
    read: dict[int, int] = {}
    for call in calls:
        if call.member != NO_MEMBER:
            read |= {index: min(call.wave, read.get(index, call.wave)) for index in call.values}
    late = set()
    for i, call in enumerate(calls):
        if call.member == NO_MEMBER and any(read.get(index, call.wave) < call.wave for index in call.writes):
            late.add(i)
            if any(read.get(index, 0) > call.wave for index in call.writes):
                return None
    return late


def first_fit(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Return an offset for each buffer in common memory, and the bytes of that memory.

    Buffers that are used in the same wave do not overlap. Each has the lowest offset free in its lifetime.
    """
    offsets = [0] * len(lifetimes)
    placed: list[tuple[int, int, int]] = []  # offset, end, last wave
    most = 0
    for i in sorted(range(len(lifetimes)), key=lambda i: lifetimes[i].first):
        first, last, size = lifetimes[i]
        placed = sorted(each for each in placed if each[2] >= first)
        at = 0
        for offset, end, _ in placed:
            if at + size <= offset:
                break
            at = max(at, -(-end // ALIGNMENT) * ALIGNMENT)
        offsets[i] = at
        placed.append((at, at + size, last))
        most = max(most, at + size)
    return offsets, most
