"""The compiled step at run time: it finds the error terms, checks the layouts, and calls the code."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from collage_fx.errors import LostErrorTermsError
from collage_fx.graph import InputInfo, Role
from collage_fx.numerics import ErrorFormat
from collage_fx.runtime.calls import Present
from collage_fx.runtime.layouts import Expected, Layouts, picking, refuse_layout
from collage_fx.state import (
    ErrorTermRecord,
    ensure_record,
    holds_more,
    note_new,
    only_in_state,
    records_version,
)
from collage_fx.torch_compat import Sharding, boxed_call, local_tensor

#: Patterns of gradients that a step remembers.
MOST_PATTERNS = 256

#: ``id`` of each tensor that stands for a gradient that is absent from the current step.
STAND_INS: ContextVar[frozenset[int]] = ContextVar("stand_ins", default=frozenset())

#: Function that returns some values of a list.
Picking = Callable[[Sequence[Any]], tuple[Any, ...]]


@boxed_call
class CompensatedStep:
    """Compiled graph that is called with error terms after its arguments.

    Note [Error terms of the last call]: looking up the record of each tensor takes some microseconds. So the
    buffers are remembered as long as no record has changed, of each tensor and for each set of arguments, by
    weak references, because the tensor owns them. A tensor's death is such a change, unless a step has made
    it for itself.

    The graph has AOTAutograd's convention. ``expected`` are the layouts of arguments, and of error terms.
    """

    _buffers: dict[Sequence[int], Sequence[weakref.ref[Tensor]]]  # by ``id`` of the arguments
    _of_each: dict[tuple[int, int], Sequence[weakref.ref[Tensor]]]  # by index and ``id``

    def __init__(
        self,
        compiled: Any,
        bindings: Sequence[Binding],
        expected: tuple[Sequence[Expected], Sequence[Expected]] = ((), ()),
    ) -> None:
        self.compiled = compiled
        self.bindings = bindings
        self.given, self.added = map(Layouts, expected)
        self._passed = picking([each.index for each in bindings if each.bound is None])
        self._version: object = None  # of the records at the last call, whose buffers are remembered

    def __call__(self, arguments: list[Any], present: Present | None = None) -> Any:
        is_alike = self.given.fit(arguments)
        passed = tuple(map(id, self._passed(arguments)))
        version = records_version()
        if version is not self._version or (passed and not is_alike) or len(self._buffers) > MOST_PATTERNS:
            self._version, self._buffers, self._of_each = version, {}, {}
        if (buffers := self._buffers.get(passed)) is not None:
            arguments += [buffer() for buffer in buffers]
        else:
            self._add_error_terms(arguments, passed)
        return self.compiled(arguments) if present is None else self.compiled(arguments, present.members)

    def _add_error_terms(self, arguments: list[Any], passed: Sequence[int]) -> None:
        found: list[Any] = []
        for binding in self.bindings:
            key = binding.index, binding.bound is None and id(arguments[binding.index])
            if (known := self._of_each.get(key)) is not None:
                found += [auxiliary() for auxiliary in known]
                continue
            found += (added := binding.added_to(arguments))
            if binding.is_lasting:
                self._of_each[key] = [weakref.ref(auxiliary) for auxiliary in added]
        arguments += found
        self.added.fit(arguments)
        if all(binding.is_lasting for binding in self.bindings):
            self._buffers[passed] = [weakref.ref(auxiliary) for auxiliary in found]


class Member(NamedTuple):
    """Parameter that a step skips if it has no gradient: Note [Members that come and go]."""

    gradient: int  # index among the inputs of the whole graph, as is the parameter's
    parameter: int
    inputs: frozenset[int]  # indices of all inputs that belong to the member
    dtype: torch.dtype

    def stand_in(self, parameter: Tensor) -> Tensor:
        """Return a tensor of the layout and dtype of the absent gradient, which is not read."""
        is_alike = parameter.dtype is self.dtype
        return parameter.detach() if is_alike else torch.empty_like(parameter, dtype=self.dtype)


class WholeStep:
    """Step that Dynamo calls instead of AOTAutograd's wrapper around the compiled graph.

    ``step`` takes the list of the whole graph's inputs, and, if some members have no gradient, a ``Present``.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        bound: Sequence[Tensor],  # the first inputs, which are the same in every call
        passed: int,
        updated: Sequence[int],  # indices of inputs whose version counters are incremented
        gradients: Mapping[int, int],  # index of a gradient that Dynamo does not pass -> of its parameter
        members: Sequence[Member],  # in the order of ``Repetition.members``, if members come and go
        distributed: Mapping[int, Sharding],  # of DTensors by index; the step takes this process's shards
    ) -> None:
        self.step = step
        self.bound = bound
        self.owners = [bound[parameter] for parameter in gradients.values()]
        behind = range(len(bound), len(bound) + passed + len(gradients))
        known = [*(index for index in behind if index not in gradients), *gradients]
        order = {index: i for i, index in enumerate(known)}
        self.in_order = picking([order[index] for index in behind])
        self.updated = updated
        self.members = members
        #: Members by the index of their gradient, which may be None. Members that share it stand in alike.
        self.by_gradient = {each.gradient: each for each in members}
        #: Present members, and a function that picks the inputs that they update, by the absent gradients.
        self._known: dict[tuple[int, ...], tuple[Present | None, Picking]] = {(): (None, picking(updated))}
        # The sharding of a bound DTensor cannot have changed since the capture.
        self.distributed = [(i, pieces if i >= len(bound) else None) for i, pieces in distributed.items()]

    def __call__(self, *arguments: Any) -> Any:
        gradients = [parameter.grad for parameter in self.owners]
        values = [*self.bound, *self.in_order([*arguments, *gradients])]
        stand_ins = STAND_INS.get()
        absent = tuple([i for i in self.by_gradient if values[i] is None or id(values[i]) in stand_ins])
        present, updated = self._known.get(absent) or self._without(absent)
        if present is not None and not any(present.members):
            return ()
        for index in absent:
            if values[index] is None:
                member = self.by_gradient[index]
                values[index] = member.stand_in(values[member.parameter])
        with torch.no_grad():
            torch.autograd.graph.increment_version(updated(values))
            for index, pieces in self.distributed:
                values[index] = local_tensor(values[index], pieces)
            return self.step(values) if present is None else self.step(values, present)

    def _without(self, absent: tuple[int, ...]) -> tuple[Present | None, Picking]:
        if len(self._known) > MOST_PATTERNS:
            self._known = {(): self._known[()]}
        present = array("b", [each.gradient not in absent for each in self.members])
        inputs = frozenset().union(*(each.inputs for each in self.members if each.gradient in absent))
        updated = picking([index for index in self.updated if index not in inputs])
        self._known[absent] = Present(present, inputs), updated
        return self._known[absent]


@boxed_call
class MakingStep:
    """Step that is given memory for the state that it makes: Note [State is born with its error term].

    ``step`` takes a list with its inputs and then the new tensors. ``made`` has, for each result that is a
    new tensor, a tensor of its layout, in the order of the inputs. A tensor that the last call has made, and
    that is in the state of one of the ``optimizers`` alone, is made again if the step does not read it.
    """

    def __init__(
        self,
        step: Callable[[list[Any]], Any],
        made: Mapping[int, Tensor],
        optimizers: Iterable[Optimizer],
    ) -> None:
        self.step = step
        self._optimizers = [*map(weakref.ref, optimizers)]
        self._last: dict[int, TensorWeakRef] = {}
        self.made = {
            i: partial(torch.empty_strided, like.shape, like.stride(), dtype=like.dtype, device=like.device)
            for i, like in made.items()
        }

    def __call__(self, arguments: list[Any]) -> Any:
        known = only_in_state(self._last, self._optimizers)
        given = set(map(id, arguments)) if known else ()
        again = {result: tensor for result, tensor in known.items() if id(tensor) not in given}
        new = {i: again[i] if i in again else empty() for i, empty in self.made.items()}
        results = list(self.step([*arguments, *new.values()]))
        arguments.clear()
        for result, tensor in new.items():
            if result not in again:
                note_new(tensor)
                self._last[result] = TensorWeakRef(tensor)
            results[result] = tensor
        return tuple(results)


def with_numbers(step: Callable[..., Any], numbers: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that returns numbers, too: ``numbers`` of its arguments, with None for each tensor."""

    def stepped(*arguments: Any) -> Any:
        tensors = iter(step(*arguments))
        return tuple([next(tensors) if each is None else each for each in numbers(*arguments)])

    return stepped


def bind(index: int, info: InputInfo, error_format: ErrorFormat, *, reads: bool) -> Binding:
    """Return a binding that finds the error terms of an input; create them now if it is bound and updated."""
    is_made, is_kept = info.is_made and not info.bound, reads or info.role is Role.NEW
    binding = Binding(index, error_format, info.name, reads, is_made, is_kept)
    if info.bound and info.tensor is not None:
        binding.bound = TensorWeakRef(info.tensor)
        if not reads or holds_more(info.tensor):
            binding.record = weakref.ref(ensure_record(info.tensor, error_format, name=info.name))
    return binding


@dataclass
class Binding:
    """Lookup of the error terms of an input of a step.

    The record of an argument is looked up in each call by the tensor's identity, and created at its first
    step. That of an attribute of the captured module, the same tensor in every call, is remembered, and
    created anew if it has been dropped (``reset_error_terms``). Neither tensor nor record is kept alive.
    """

    index: int
    error_format: ErrorFormat
    name: str
    reads: bool  # whether the step only reads the error terms; zeros if there are none
    is_made: bool  # whether the step makes the tensor in each call
    is_kept: bool = True  # whether terms that the tensor was made with stay a later step's to choose
    bound: TensorWeakRef | None = None  # the tensor, if it is an attribute of the module
    record: Callable[[], ErrorTermRecord | None] = lambda: None  # the remembered record of a bound tensor
    #: Whether the last argument was the object that its record belongs to, for longer than a step.
    is_owner: bool = False

    @property
    def is_lasting(self) -> bool:
        """Whether the error terms stay the same as long as no record is dropped."""
        return self.is_owner if self.bound is None else not self.reads or self.record() is not None

    def added_to(self, arguments: Sequence[Any]) -> Sequence[Tensor]:
        """Return the tensors that a step takes beside the input in a call."""
        if (record := self.record()) is None:
            tensor: Tensor | None = arguments[self.index] if self.bound is None else self.bound()
            if tensor is None:
                met = "the tensor that this compiled step updates is gone, and its error terms with it"
                remedy = "compile the step of the optimizer in use: torch.compile(opt.step, backend=...)"
                raise LostErrorTermsError(met, where=self.name, remedy=remedy)
            if self.reads and not holds_more(tensor):
                self.is_owner = False
                return self.error_format.zeros(local_tensor(tensor))
            refuse_layout(tensor, self.name)
            record = ensure_record(tensor, self.error_format, name=self.name, is_passing=self.is_made)
            if self.bound is not None:
                self.record = weakref.ref(record)
            is_plain = type(tensor) in (Tensor, torch.nn.Parameter)  # not made of others, which may change
            self.is_owner = is_plain and record.owner() is tensor and not record.is_passing
        added = record.use(self.name)
        record.is_new &= self.is_kept
        return added
