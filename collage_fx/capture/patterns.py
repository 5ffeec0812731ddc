"""Patterns, which recorded segments leave behind for later steps: Note [Matched steps] in ``matching.py``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

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
    """Call of a torch function, with templates in place of tensors and numbers."""

    function: Any
    arguments: list[Any]
    names: tuple[str, ...]  # of the last arguments, which are keyword arguments
    is_executed: bool = False  # at once
    result: Any = None


@dataclass(slots=True)
class Input:
    """Real tensor that a pattern's operations read or write."""

    value: int  # its number in the segment
    place: int | None  # among the tensors that calls are given; None if they are given its views alone
    tensor: TensorWeakRef  # that was recorded
    spec: Spec
    storage: int  # identifier of its memory
    kind: Any  # other facts that code depends on
    is_written: bool
    views: list[tuple[int, Any]] = field(default_factory=list)  # places and layouts of its views

    @property
    def is_plain_gradient(self) -> bool:
        """Whether it is a gradient without error terms, and no view."""
        return self.place is not None and self.kind == _PLAIN_GRADIENT


class Part(NamedTuple):
    """Component of a segment, or several as one graph."""

    function: RecordedFunction
    compiled: Compiled

    def fill(self, tensor_of: Callable[[int], Tensor | None], operands: Sequence[float]) -> None:
        """Give the function the tensors of a step, by their numbers, and the numbers of all operations."""
        self.function.numbers = [operands[position] for position in self.function.positions]
        self.function.tensors = [cast(Tensor, real(tensor_of(value))) for value in self.function.values]


@dataclass(eq=False)
class Pattern:
    """Segment that has been recorded, with which later steps are compared."""

    calls: list[Call]
    end: Call | None  # that asks for a value; None at the end of a step
    segment: Segment  # without tensors
    kept: Sequence[int]  # numbers of the results that outlive it
    lasting: Sequence[int]  # these, and the numbers of the results that they are views of
    inputs: list[Input]
    others: list[tuple[int, TensorWeakRef]]  # other real tensors that recorded calls are given, with places
    specs: list[Spec]  # of all real tensors that calls are given or return, by place
    numbers: list[float]  # among the calls' arguments, as recorded
    is_constant: list[bool]  # for each of them whether the code has it as a constant
    sources: list[int | None]  # for each of the operations' numbers its index; None if it is always the same
    parts: Sequence[Part]
    objects: list[Deferred | None]  # for the results that do not outlive it, by number
    passing: list[int]  # numbers of these results
    bound: Collection[int] = ()  # numbers of the inputs that the code has as its own tensors
    equal: list[tuple[int, int]] = field(default_factory=list)  # of numbers that are one input of the code
    has_matched: bool = False
    version: object = None  # state of all error terms at the last match

    def takes(self, index: int, number: object) -> bool:
        """Return whether the code can be given a number in the place of a recorded number."""
        known = self.numbers[index]
        return type(number) is type(known) and (number == known or not self.is_constant[index])

    def renew(self, number: int) -> None:
        """Make a new deferred tensor for a result, as a step has taken over the old tensor."""
        if self.objects[number] is not None:
            self.objects[number] = Deferred.of(self.segment.values[number].spec, number)


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
