"""Patterns, which recorded segments leave behind for later steps: Note [Matched steps] in ``matching.py``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from collage_fx.capture.compiled import Compiled
from collage_fx.capture.segment import Deferred, RecordedFunction, Segment, Spec, real

#: Types of arguments that are compared by their values.
CONSTANTS = frozenset(
    (
        bool, str, complex, slice, type(None), type(Ellipsis), torch.device, torch.dtype, torch.layout,
        torch.memory_format, torch.Generator, torch.Size,
    )
)  # fmt: skip

_PLAIN_GRADIENT = Tensor, ("gradient", (False, False, False), False), False

#: Number of patterns for a segment of a step.
MOST_PATTERNS = 16


class Given(int):
    """Template of a real tensor: its index among the tensors that a segment's calls are given or return."""


class Value(int):
    """Template of a deferred tensor: its number in the segment."""


class Number(int):
    """Template of a number: its index among the numbers of a segment."""


class Unmatchable(Exception):
    """An argument, or a result, for which there is no template."""


@dataclass(slots=True)
class Call:
    """Call of a torch function, with templates in place of tensors and numbers.

    Attributes:
        function: the function.
        arguments: its arguments.
        names: names of the last of them, which are keyword arguments.
        is_executed: whether it is executed at once.
        result: its result.
    """

    function: Any
    arguments: list[Any]
    names: tuple[str, ...]
    is_executed: bool = False
    result: Any = None


@dataclass(slots=True)
class Input:
    """Real tensor that a pattern's operations read or write.

    Attributes:
        value: its number in the segment.
        place: its index among the tensors that calls are given; None if they are given its views alone.
        views: places and layouts of its views among these tensors.
        tensor: the tensor that was recorded.
        spec: its specification.
        storage: identifier of its memory.
        kind: other facts that code depends on.
        is_written: whether the operations write to it.
    """

    value: int
    place: int | None
    tensor: TensorWeakRef
    spec: Spec
    storage: int
    kind: Any
    is_written: bool
    views: list[tuple[int, Any]] = field(default_factory=list)

    @property
    def is_plain_gradient(self) -> bool:
        """Whether it is a gradient without error terms, and no view."""
        return self.place is not None and self.kind == _PLAIN_GRADIENT


@dataclass(eq=False)
class Part:
    """Component of a pattern, or several as one graph.

    Attributes:
        function: its operations.
        compiled: its code.
        numbers: for each of its numbers the position among those of all the segment's operations.
    """

    function: RecordedFunction
    compiled: Compiled
    numbers: list[int]

    def fill(self, tensor_of: Callable[[int], Tensor | None], operands: Sequence[float]) -> None:
        """Give the function the tensors of a step, by their numbers, and the numbers of all operations."""
        self.function.numbers = [operands[position] for position in self.numbers]
        self.function.tensors = [cast(Tensor, real(tensor_of(value))) for value in self.function.values]


@dataclass(eq=False)
class Pattern:
    """Segment that has been recorded, with which later steps are compared.

    Attributes:
        calls: its calls.
        end: the call that asks for a value; None at the end of a step.
        segment: its operations, without tensors.
        kept: numbers of the results that outlive it.
        lasting: these, and the numbers of the results that they are views of.
        inputs: real tensors that its operations use.
        others: other real tensors that recorded calls are given, and their places.
        specs: specifications of all real tensors that calls are given or return, by place.
        numbers: the numbers among the calls' arguments, as recorded.
        is_constant: for each of them whether the code has it as a constant.
        equal: pairs of them that have always been equal, and are one input of the code.
        operands: the numbers of all operations, as recorded.
        sources: for each operand the index of the number that it is; None if it is always the same.
        parts: code of the operations.
        objects: deferred tensors for the results that do not outlive it, by number.
        passing: numbers of these results.
        bound: numbers of the inputs that the code has as its own tensors.
        has_matched: whether a step has been matched.
        version: state of all error terms at the last match.
    """

    calls: list[Call]
    end: Call | None
    segment: Segment
    kept: Sequence[int]
    lasting: Sequence[int]
    inputs: list[Input]
    others: list[tuple[int, TensorWeakRef]]
    specs: list[Spec]
    numbers: list[float]
    is_constant: list[bool]
    operands: list[float]
    sources: list[int | None]
    parts: list[Part]
    objects: list[Deferred | None]
    passing: list[int]
    bound: Collection[int] = ()
    equal: list[tuple[int, int]] = field(default_factory=list)
    has_matched: bool = False
    version: object = None

    def takes(self, index: int, number: object) -> bool:
        """Return whether the code can be given a number in the place of a recorded number."""
        known = self.numbers[index]
        return type(number) is type(known) and (number == known or not self.is_constant[index])

    def renew(self, number: int) -> None:
        """Make a new deferred tensor for a result, as a step has taken over the old tensor."""
        if self.objects[number] is not None:
            self.objects[number] = Deferred.of(self.segment.values[number].spec, number)


def positions_in(segment: Segment) -> dict[int, int]:
    """Return the position of each operation's first number among the numbers of all operations, by ``id``."""
    first, total = {}, 0
    for operation in segment.operations:
        first[id(operation)] = total
        total += len(operation.numbers)
    return first


def positions_of(function: RecordedFunction, first: Mapping[int, int]) -> list[int]:
    """Return the positions of a function's numbers; ``first`` is the result of :func:`positions_in`."""
    return [first[id(each)] + i for each in function.operations for i in range(len(each.numbers))]


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return where in its memory the elements of a tensor are, and their dtype."""
    return (*Spec.of(tensor), tensor.storage_offset())


def found_in(kind: type[Any], template: Any) -> Iterator[Any]:
    """Yield the templates of a kind, or the tensors of a class, in lists and tuples."""
    if isinstance(template, kind):
        yield template
    elif isinstance(template, (list, tuple)):
        for each in template:
            yield from found_in(kind, each)
