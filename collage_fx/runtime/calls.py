"""A step as a schedule: kernels, called in sequence with tensors from a list.

The host time of a step is a loop over the schedule: it gathers the address of each argument, and makes a call
for each rule that is a C++ function. Other rules need a call of Inductor's generated code for each part.
``layouts.py`` has checked before that the arguments have the layouts that the code expects.
"""

from __future__ import annotations

import functools
import itertools
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collage_fx.codegen import CELL, Gather
from collage_fx.runtime.batches import Batch
from collage_fx.runtime.kernels import HOST, NO_MEMBER, Call, Kernel
from collage_fx.runtime.launches import Launch, Launches
from collage_fx.runtime.temporaries import ALIGNMENT, Lifetime, first_fit, limit_on
from collage_fx.torch_compat import boxed_call

#: Scratch memory of a step without scalars on the host.
NO_SCRATCH = torch.empty(0, dtype=torch.uint8, device="cpu")


class Present(NamedTuple):
    """Members of a step that take part in a call: their parameters have a gradient."""

    members: array[int]  # for each of ``Repetition.members`` a byte, nonzero if the member takes part
    absent: frozenset[int]  # indices of the whole graph's inputs that belong to the other members


@dataclass(frozen=True)
class Stack:
    """Tensor of one dimension more whose members are values of the step: Note [Stacks of tensors]."""

    index: int  # of the stack among the results of its plan
    members: tuple[int, ...]  # indices of the values, results without memory of their own
    #: Whether the members are numbers of the host, with own memory: the stack is in the uploaded table.
    of_host: bool = False


@dataclass(frozen=True)
class Plan:
    """Calls of kernels that make up a step, and the values that they read and write.

    A step works on a list of values: its arguments, then constants, then memory for results. Everything else
    refers to values by their indices in this list.
    """

    arguments: int
    #: Lengths, tensors that are attributes of the graph, and functions that create tensors at the first call.
    constants: Sequence[Any]
    results: Sequence[tuple[Any, ...]]  # size, stride, dtype and device of tensors to be allocated
    calls: Sequence[Call]  # in a valid order
    outputs: Sequence[int | None]  # indices of the returned values, None for None
    stacks: Sequence[Stack] = ()  # of which the tensors are results

    @property
    def first_result(self) -> int:
        """Index of the first result among the values."""
        return self.arguments + len(self.constants)

    def result(self, index: int) -> tuple[Any, ...]:
        """Return size, stride, dtype and device of a result."""
        return tuple(self.results[index - self.first_result])


@boxed_call
class StepInParts:
    """Step that calls the kernels of its parts, in AOTAutograd's calling convention.

    The caller ensures that the arguments have the layouts that the kernels were compiled for.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        calls, outputs = plan.calls, plan.outputs
        #: Constants, which are made at the first call.
        self._constants: Sequence[Any] | None = None
        results = dict(enumerate(plan.results, plan.first_result))
        end = plan.first_result + len(results)
        #: Indices of tensors that are returned again: equal scalars, of which each parameter gets a copy.
        places = [end if index is None else index for index in outputs]
        self._returned_before = [i for i, k in enumerate(places) if k < end and k in places[:i]]
        in_python = {index for index in outputs if index is not None}
        in_python |= {index for index, (size, *_) in results.items() if size}
        in_python.update(index for call in calls if call.kernel.function is None for index in call.values)
        self._stacks = [stack for stack in plan.stacks if not stack.of_host]
        of_host = [stack for stack in plan.stacks if stack.of_host]
        in_stacks = {index for stack in self._stacks for index in stack.members}
        in_tables = {stack.index for stack in of_host}
        of_their_own = in_python - in_stacks - in_tables
        allocated = {i: each for i, each in results.items() if i in of_their_own}
        self._temporaries = _Temporaries(plan, allocated)
        self._allocated = [each for each in allocated.items() if each[0] not in self._temporaries.offsets]
        cells: dict[torch.device, list[int]] = defaultdict(list)
        for index, (_, _, _, device) in results.items():
            if index not in in_python and index not in in_stacks:
                cells[device].append(index)
        self._addresses = _Addresses(cells[HOST])
        devices = dict.fromkeys(call.kernel.device for call in calls if call.kernel.function is not None)
        devices |= dict.fromkeys(plan.result(index)[3] for index in in_tables)
        devices.pop(HOST, None)
        self._launches = {each: Launches(each, cells[each], self._addresses.place_of) for each in devices}
        by_wave: dict[tuple[int, int], list[Call]] = defaultdict(list)
        for call in calls:
            by_wave[call.wave, id(call.kernel)].append(call)
        groups = [(group[0].kernel, group) for _, group in sorted(by_wave.items(), key=lambda x: x[0][0])]
        #: Calls on the host, whose results devices read; they come before the calls on devices.
        self.on_host = [
            group if kernel.function is None else Batch(group, self._addresses.place_of)
            for kernel, group in groups
            if kernel.device == HOST
        ]
        self.on_devices: list[Sequence[Call] | Launch] = []
        on_devices = [group for kernel, group in groups if kernel.device != HOST]
        for _, of_wave in itertools.groupby(on_devices, key=lambda group: group[0].wave):
            for group in of_wave:
                kernel = group[0].kernel
                called = group if kernel.function is None else self._launches[kernel.device].add(group)
                self.on_devices.append(called)
            for launches in self._launches.values():
                self.on_devices += launches.add_totals()
        #: Index of each stack of numbers of the host, and a function that returns the stack.
        self._numbers: list[tuple[int, Callable[[], Tensor]]] = []
        for stack in of_host:
            _, _, dtype, device = plan.result(stack.index)
            self._numbers.append((stack.index, self._launches[device].add_numbers(stack.members, dtype)))

    @property
    def kernels(self) -> list[Kernel]:
        """Kernels of the step, each once."""
        return list({id(call.kernel): call.kernel for call in self.plan.calls}.values())

    def __call__(self, arguments: list[Any], present: array[int] | None = None) -> Any:
        """Make the calls of all members, or of the present members, whose bytes are not zero."""
        plan = self.plan
        if self._constants is None:
            self._constants = [each() if callable(each) else each for each in plan.constants]
        values = [*arguments, *self._constants, *[None] * len(plan.results)]
        arguments.clear()
        for index, (size, stride, dtype, device) in self._allocated:
            values[index] = torch.empty_strided(size, stride, dtype=dtype, device=device)
        self._temporaries.allocate(values)
        for stack in self._stacks:
            for index, member in zip(stack.members, values[stack.index].unbind(), strict=True):
                values[index] = member
        addresses, scratch = self._addresses.of(values)
        for stage in self.on_host:
            if isinstance(stage, Batch):
                stage(addresses, scratch, present)
            else:
                _call(stage, values, present)
        for launches in self._launches.values():
            launches.update(addresses, scratch, present)
        for index, numbers in self._numbers:
            values[index] = numbers()
        for group in self.on_devices:
            if isinstance(group, Launch):
                group()
            else:
                _call(group, values, present)
        returned: list[Any] = [None if index is None else values[index] for index in plan.outputs]
        for place in self._returned_before:
            returned[place] = returned[place].clone()
        return tuple(returned)


class _Temporaries:
    """Values that cross between kernels, in common memory of their device if they are large.

    ``allocated`` has size, stride, dtype and device of the values that are allocated, by index.
    """

    def __init__(self, plan: Plan, allocated: Mapping[int, tuple[Any, ...]]) -> None:
        found = defaultdict[torch.device, dict[int, tuple[Any, ...]]](dict)
        for index, result in allocated.items():
            if index not in plan.outputs and math.prod(result[0]):
                found[result[3]][index] = result
        waves: dict[int, list[int]] = defaultdict(list)
        for call in plan.calls:
            for index in call.values:
                waves[index].append(call.wave)
        for stack in plan.stacks:
            waves[stack.index] += [wave for index in stack.members for wave in waves[index]]
        #: Offset of each value in the common memory.
        self.offsets: dict[int, int] = {}
        self._memory: list[tuple[torch.device, int, dict[int, tuple[Any, ...]]]] = []
        for device, here in found.items():
            sizes = {index: bytes_of(result) for index, result in here.items()}
            if sum(sizes.values()) <= limit_on(device):
                continue
            spans = [Lifetime(min(waves[index]), max(waves[index]), size) for index, size in sizes.items()]
            offsets, count = first_fit(spans)
            self.offsets |= zip(sizes, offsets, strict=True)
            self._memory.append((device, count, here))

    def allocate(self, values: list[Any]) -> None:
        """Put the tensors into the list of a step's values."""
        for device, count, results in self._memory:
            memory = torch.empty(count + ALIGNMENT, dtype=torch.uint8, device=device)
            memory = memory[-memory.data_ptr() % ALIGNMENT :]
            for index, (size, stride, dtype, _) in results.items():
                offset = self.offsets[index]
                part = memory[offset : offset + bytes_of(results[index])].view(dtype)
                values[index] = part.as_strided(size, stride)


def bytes_of(result: tuple[Any, ...]) -> int:
    """Return the bytes of a dense tensor, given its size, stride, dtype and device."""
    size, _, dtype, _ = result
    return math.prod(size) * int(dtype.itemsize)


def _call(calls: Sequence[Call], values: Sequence[Any], present: array[int] | None) -> None:
    for call in calls:
        if present is None or call.member == NO_MEMBER or present[call.member]:
            assert call.kernel.call is not None
            call.kernel.call([values[index] for index in call.values])


class _Addresses:
    """Numbering of the operands in tables: indices in a step's addresses, and scratch cells.

    The cells are for ``results``, the indices of the values that only batches use, scalars.
    """

    def __init__(self, results: Iterable[int]) -> None:
        self._cells = {index: -2 - cell for cell, index in enumerate(results)}
        self._numbers: dict[int, int] = {}

    def place_of(self, index: int) -> int:
        """Return the operand code of a value: n = index in the addresses, -2-k = scratch cell k."""
        if index in self._cells:
            return self._cells[index]
        return self._numbers.setdefault(index, len(self._numbers))

    def of(self, values: list[Any]) -> tuple[array[int], Tensor]:
        """Return the address table of a step, and its scratch memory, which is another in each thread."""
        size = len(self._cells) * CELL
        scratch = torch.empty(size, dtype=torch.uint8, device="cpu") if size else NO_SCRATCH
        return self._gather(values), scratch

    @functools.cached_property
    def _gather(self) -> Gather:
        return Gather([*self._numbers])
