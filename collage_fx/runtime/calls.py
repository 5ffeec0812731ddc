"""A step as a plan: kernels, called one after another with tensors out of one list.

A step's host time is that of a loop over the plan: the address of each argument, and a call for each rule
that is one C++ function. What is not costs a call of Inductor's generated code for each part. That the
arguments are laid out as the code expects is looked at before: ``layouts.py``.
"""

from __future__ import annotations

import functools
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collage_fx.codegen import ADDED, CELL, Gather
from collage_fx.graph import Reasons
from collage_fx.runtime.batches import Batch
from collage_fx.runtime.launches import Column, Launch, Launches, Member, Summed
from collage_fx.torch_compat import CFunction, TableKernel, boxed_call

#: The turn of a call that is made whichever members are there.
EVERY_TURN = -1


HOST = torch.device("cpu")


@dataclass(frozen=True)
class Kernel:
    """The compiled code of a rule.

    Attributes:
        call: takes, as one list, the length if the rule is flat, the inputs, and memory for the results. None
            where nothing but the function is called.
        function: the C++ function that this comes down to, or the kernel over a table of a GPU's, where the
            rule is independent and that is so.
        kinds: of a C++ function's arguments, as in :class:`~collage_fx.runtime.batches.Batch`.
        columns: of the rows of a kernel's table.
        device: where it runs.
        sums: what a kernel over a table leaves parts of.
        divisible: whether the function may be called for a piece of the tensors.
        width: elements of a unit of length of its tensors.
        reasons: why it is not made, or not called, in a faster way.
    """

    call: Callable[[list[Any]], Any] | None
    function: CFunction | TableKernel | None = None
    kinds: tuple[int, ...] = ()
    columns: tuple[Column, ...] = ()
    device: torch.device = HOST
    sums: tuple[Summed, ...] = ()
    divisible: bool = False
    width: int = 1
    reasons: Reasons = ()


@dataclass(frozen=True)
class Call:
    """A call of a kernel in a step.

    Attributes:
        kernel: what is called.
        values: its arguments, as indices into the list of the step's values.
        wave: calls of one wave need no results of each other, only of earlier ones, and write to nothing that
            another one reads.
        length: of its tensors, if the kernel's rule is flat.
        turn: the number of the member for which it is made, in the order of a repetition's turns.
    """

    kernel: Kernel
    values: tuple[int, ...]
    wave: int
    length: int
    turn: int = EVERY_TURN


class Present(NamedTuple):
    """The members of a step that are there in a call: those whose parameters have a gradient.

    Attributes:
        turns: for each turn of the repetition a byte, which is not zero if its member is there.
        absent: the indices of inputs of the whole graph that belong to the others.
    """

    turns: array[int]
    absent: frozenset[int]


@boxed_call
class StepInParts:
    """Calls the kernels of a step's parts, in AOTAutograd's calling convention.

    That the arguments have the layouts that the kernels were made for is the caller's to see to.

    A step works on a list of values: its arguments, then constants, then memory for results, then numbers
    that are computed in Python. All else names indices of that list.

    Args:
        arguments: how many there are.
        constants: lengths, tensors that are attributes of the graph, and functions that make tensors when
            the step is called first.
        results: size, stride, dtype and device of tensors to be allocated.
        numbers: functions and their operands: ``ValueIndex`` or constant.
        calls: what is called, in an order in which it can be.
        outputs: indices of what is returned, None for None.
    """

    def __init__(
        self,
        arguments: int,
        constants: Sequence[Any],
        results: Sequence[tuple[Any, ...]],
        numbers: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]],
        calls: Sequence[Call],
        outputs: Sequence[int | None],
    ) -> None:
        self.constants = constants
        self.results = results
        self.numbers = numbers
        self.calls = calls
        self.outputs = outputs
        #: Where a result is returned once more: equal numbers, of which each parameter has its own.
        self._returned_before = [
            i for i, index in enumerate(outputs) if index is not None and index in outputs[:i]
        ]
        self._is_called = False
        first_result = arguments + len(constants)
        indices = range(first_result, first_result + len(results))
        in_python = {index for index in outputs if index is not None}
        in_python |= {index for index, (size, *_) in zip(indices, results, strict=True) if size}
        in_python.update(index for call in calls if call.kernel.function is None for index in call.values)
        self._allocated = [each for each in zip(indices, results, strict=True) if each[0] in in_python]
        cells: dict[torch.device, list[int]] = defaultdict(list)
        for index, (_, _, _, device) in zip(indices, results, strict=True):
            if index not in in_python:
                cells[device].append(index)
        self._table = _Table(cells[HOST])
        self._launches = {
            device: Launches(device, cells[device], self._table.of_value)
            for device in dict.fromkeys(call.kernel.device for call in calls if call.kernel.columns)
        }
        groups = _grouped(calls)
        #: What the host computes, which devices read; then what runs on those.
        self.on_host = [
            self._table.batch(group) or group for group in groups if group[0].kernel.device == HOST
        ]
        self.on_devices = [self._launch(group) or group for group in groups if group[0].kernel.device != HOST]
        for device, launches in self._launches.items():
            functions = (call.kernel.function for call in calls if call.kernel.device == device)
            adding = (each.adding for each in functions if isinstance(each, TableKernel))
            if (kernel := next(filter(None, adding), None)) is not None:
                self.on_devices.append(launches.add_sums(kernel))

    def _launch(self, calls: Sequence[Call]) -> Launch | None:
        """Calls of one kernel as a launch, if it is one over a table."""
        kernel = calls[0].kernel
        if not isinstance(kernel.function, TableKernel):
            return None
        members = [Member(call.values, call.length, call.turn) for call in calls]
        return self._launches[kernel.device].add(
            kernel.function, kernel.columns, members, kernel.width, kernel.sums
        )

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels that the step calls, each once."""
        return list({id(call.kernel): call.kernel for call in self.calls}.values())

    def __call__(self, arguments: list[Any], present: array[int] | None = None) -> Any:
        """Make the calls: those of all turns, or of the turns that are present, whose bytes are not zero."""
        if not self._is_called:
            self.constants = [each() if callable(each) else each for each in self.constants]
            self._is_called = True
        values = [*arguments, *self.constants, *[None] * len(self.results)]
        arguments.clear()
        for index, (size, stride, dtype, device) in self._allocated:
            values[index] = torch.empty_strided(size, stride, dtype=dtype, device=device)
        for function, operands in self.numbers:
            values.append(function(*(values[o.index] if isinstance(o, ValueIndex) else o for o in operands)))
        addresses, scratch = self._table.of(values)
        for stage in self.on_host:
            if isinstance(stage, Batch):
                stage(addresses, scratch, present)
            else:
                _call(stage, values, present)
        for launches in self._launches.values():
            launches.update(addresses, scratch, present)
        for group in self.on_devices:
            if isinstance(group, Launch):
                group()
            else:
                _call(group, values, present)
        returned: list[Any] = [None if index is None else values[index] for index in self.outputs]
        for place in self._returned_before:
            returned[place] = returned[place].clone()
        return tuple(returned)


def _call(calls: Sequence[Call], values: Sequence[Any], present: array[int] | None) -> None:
    for call in calls:
        if present is None or call.turn == EVERY_TURN or present[call.turn]:
            assert call.kernel.call is not None
            call.kernel.call([values[index] for index in call.values])


def _grouped(calls: Sequence[Call]) -> list[list[Call]]:
    """The calls of one wave and one kernel together, in an order in which the groups can run."""
    groups: dict[tuple[int, int], list[Call]] = defaultdict(list)
    for call in calls:
        groups[call.wave, id(call.kernel)].append(call)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


class _Table:
    """The numbering of what batches read: addresses of a step's values, and cells of scratch memory.

    Args:
        results: indices of the values that are numbers for batches alone: cells of scratch memory.
    """

    def __init__(self, results: Iterable[int]) -> None:
        self._cells = {index: ~cell for cell, index in enumerate(results)}
        self._numbers: dict[int, int] = {}

    def batch(self, calls: Sequence[Call]) -> Batch | None:
        """Calls of one kernel as a batch, if the kernel is a C++ function."""
        kernel = calls[0].kernel
        if not isinstance(kernel.function, CFunction):
            return None

        def entry(call: Call, argument: int, kind: int) -> int:
            # Neither a length nor a buffer is in the table.
            is_address = kind >= 0 or kind in ADDED
            return self.of_value(call.values[argument]) if is_address else 0

        arguments = list(zip(kernel.function.arguments, kernel.kinds, strict=True))
        return Batch(
            kernel.function,
            [[entry(call, *argument) for argument in arguments] for call in calls],
            [call.length for call in calls],
            kernel.kinds,
            [call.turn for call in calls],
            divisible=kernel.divisible,
            width=kernel.width,
        )

    def of_value(self, index: int) -> int:
        """Where the address of a value is: a number in the table, or, negative, a cell."""
        if index in self._cells:
            return self._cells[index]
        return self._numbers.setdefault(index, len(self._numbers))

    def of(self, values: list[Any]) -> tuple[array[int], Tensor]:
        """The table of a step, and its scratch memory."""
        return self._gather(values), torch.empty(len(self._cells) * CELL, dtype=torch.uint8, device="cpu")

    @functools.cached_property
    def _gather(self) -> Gather:
        return Gather([*self._numbers])


@dataclass(frozen=True)
class ValueIndex:
    """An operand that is one of a step's values, by its index in their list, and not a constant."""

    index: int
