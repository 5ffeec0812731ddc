"""Steps that make the same calls as an earlier recorded step: they are matched, not recorded again.

Note [Matched steps]
--------------------
Recording an operation takes ten times as long as executing it on a small tensor, and nearly all steps of a
training are the same. So a recorded step leaves a :class:`Pattern` behind for each of its segments: its calls
of torch functions, and the code that was compiled for them. The calls of a later step are compared with a
pattern's one by one. Where the segment ends, the code is called.

* The same call is the same function with the same arguments: tensors that stand at the same place in the
  segment, results of the same earlier calls, equal constants. A new tensor, such as a gradient, may stand for
  the recorded one if it differs in nothing that code depends on. Numbers are constants until they have been
  seen to change: Note [Constants and inputs] in ``compiled.py``.
* The results are deferred tensors of the pattern, the same in each step; those that outlived the segment when
  it was recorded are new objects in each step. If one of the others outlives it now, the segment is recorded.
* Where a call differs, another pattern with the same calls so far goes on. If there is none, the calls so
  far, which have not been executed, are recorded, and the rest of the segment.
* Calls that are executed at once (counters, views of whole tensors) are executed when they are matched.
* At a pattern's first match, its components are compiled again as one graph: equal updates become one call.
* Steps with a closure or under autocast are never matched, nor are segments with operations that no mode for
  torch functions sees (scripted functions), or that enable gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from collage_fx.capture.compiled import NotByFamily, Part, compiled_for
from collage_fx.capture.recorder import Recorder
from collage_fx.capture.segment import (
    UNREFERENCED,
    Deferred,
    RecordedFunction,
    Segment,
    Spec,
    found_in,
    is_whole,
    layout_of,
    real,
)
from collage_fx.graph import is_matrix_product
from collage_fx.state import has_error_terms, records_version
from collage_fx.torch_compat import fused_operator, has_storage, is_wrapper, run_unfused, storage_of

#: Types of arguments that are compared by their values.
CONSTANTS = frozenset(
    (
        bool, str, complex, slice, type(None), type(Ellipsis), torch.device, torch.dtype, torch.layout,
        torch.memory_format, torch.Generator, torch.Size,
    )
)  # fmt: skip

#: Kind of a gradient without error terms.
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
    is_plain_gradient: bool  # without error terms, and no view
    views: list[tuple[int, Any]] = field(default_factory=list)  # places and layouts of its views


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


class Matcher(TorchFunctionMode):
    """Mode that matches the calls of a step with the calls of earlier steps, or has them recorded.

    It also handles torch functions that are no operators, and torch's fused operators. Before the memory of
    tensors is read or their layout changed, they are brought up to date. An assignment to ``.data`` is
    recorded like an update, a deep copy like a clone. Note [A wish for speed] in
    ``torch_compat/fused_updates.py``.

    The ``recorder`` is entered before. ``binds``: code may hold the optimizer's tensors, and dies with it.
    """

    def __init__(self, recorder: Recorder, is_gradient: Callable[[Tensor], bool], *, binds: bool) -> None:
        super().__init__()
        self._recorder = recorder
        self._is_gradient = is_gradient
        self._binds = binds
        self._patterns: list[list[Pattern]] = []
        self._added: list[Pattern] = []
        self._segments = 0
        self._default_dtype = torch.get_default_dtype()
        self.has_matched = False  # whether all calls of the last step have been matched
        self._is_in_step = False
        self._is_matching = False
        self._begin_segment(is_matchable=False)

    # -- a step

    def begin(self, *, is_matching: bool) -> None:
        if self._default_dtype != torch.get_default_dtype():
            self._default_dtype = torch.get_default_dtype()
            self._patterns.clear()
        is_matching &= not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        self.has_matched = self._is_matching = is_matching
        self._is_in_step = True
        self._added.clear()
        self._segments = 0
        self._begin_segment()

    @torch.compiler.disable
    def finish(self, *, successfully: bool) -> None:
        recorder, self._is_in_step = self._recorder, False
        if successfully and self._pattern is not None:
            if self._is_at_end(None):
                self._run(self._pattern)
            else:
                self._record()
        if successfully and recorder.segment.operations:
            recorder.flushed.clear()
            recorder.flush()
            self._add_pattern(None)
        recorder.flushed.clear()  # views in segments keep tensors from being settled
        recorder.finish(successfully=successfully)
        self._begin_segment(is_matchable=False)

    def forget_step(self) -> None:
        """Forget the patterns of the step that has just ended, which has made state that will be there."""
        for siblings in self._patterns:
            siblings[:] = [each for each in siblings if each not in self._added]

    @torch.compiler.disable
    def flush(self) -> None:
        self._record()
        self._recorder.flush()
        self._begin_segment()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_in_step or self._recorder.is_dispatching or func in METADATA:
            return func(*args, **kwargs)
        if self._pattern is not None:
            called = (func, (*args, *kwargs.values()), tuple(kwargs)) if kwargs else (func, args, ())
            if not torch.is_grad_enabled() and (call := self._matched(*called)) is not None:
                return self._result_of(call, args, kwargs)
            if self._is_at_end(called):
                self._run(self._pattern)
                result = self._called(func, args, kwargs)
                self._begin_after(result)
                return result
            self._record()
        return self._recorded(func, args, kwargs)

    def _begin_segment(self, *, is_matchable: bool = True) -> None:
        self._recorder.flushed.clear()
        self._is_noting = is_matchable and self._is_matching
        self._siblings: list[Pattern] = []
        if self._is_noting:
            while len(self._patterns) <= self._segments:
                self._patterns.append([])
            self._siblings = self._patterns[self._segments]
        self._segments += 1
        self._given: list[Tensor] = []
        self._places: dict[int, int] = {}
        self._made: set[int] = set()
        self._numbers: list[float] = []
        self._calls: list[Call] = []
        self._sources: list[int | None] = []
        self._next = 0
        self._operations = 0
        self._objects: list[Deferred | None] = []
        self._go_on_with(next(iter(self._siblings), None))

    def _go_on_with(self, pattern: Pattern | None) -> None:
        self._pattern = pattern
        self._recorder.interrupted = None if pattern is None else self._record
        if pattern is not None:
            self._objects = pattern.objects.copy()

    # -- calls that are matched

    def _matched(self, func: Any, values: Any, names: tuple[str, ...]) -> Call | None:
        """Return a pattern's next call if it is this call; go on with that pattern."""
        first, i = self._pattern, self._next
        assert first is not None
        if i < len(first.calls) and self._is_same(first, first.calls[i], func, values, names):
            return first.calls[i]  # as most calls do
        for pattern in self._alike():
            if i < len(pattern.calls) and self._is_same(pattern, pattern.calls[i], func, values, names):
                self._change_to(pattern)
                return pattern.calls[i]
        return None

    def _is_at_end(self, called: tuple[Any, Any, tuple[str, ...]] | None) -> bool:
        """Return whether a pattern ends here, and its code fits; go on with that pattern."""
        for pattern in self._alike():
            if self._next != len(pattern.calls) or (pattern.end is None) != (called is None):
                continue
            if pattern.end is None or called is None or self._is_same(pattern, pattern.end, *called):
                self._change_to(pattern)
                return self._fits(pattern)
        return False

    def _is_same(self, pattern: Pattern, call: Call, func: Any, values: Any, names: tuple[str, ...]) -> bool:
        """Return whether a call is that of a pattern, whose numbers and tensors are noted then."""
        if call.function != func or len(values) != len(call.arguments) or names != call.names:
            return False
        numbers, given = len(self._numbers), len(self._given)
        objects, places = self._objects, self._places
        for template, value in zip(call.arguments, values, strict=True):
            kind = type(template)
            if kind is Value:  # the two most frequent kinds of arguments, without a call
                is_alike = value is objects[template]
            elif kind is Given and (place := places.get(id(value))) is not None:
                is_alike = place == template
            else:
                is_alike = self._is_alike(pattern, template, value)
            if not is_alike:
                del self._numbers[numbers:]
                for tensor in self._given[given:]:
                    del self._places[id(tensor)]
                del self._given[given:]
                return False
        return True

    def _is_alike(self, pattern: Pattern, template: Any, value: Any) -> bool:
        kind = type(template)
        if kind is Value:
            return value is self._objects[template]
        if kind is Given:
            value = real(value)
            if template == len(self._given) and id(value) not in self._places and isinstance(value, Tensor):
                return Spec.of(value) == pattern.specs[template] and self._meet(value) == template
            return self._places.get(id(value)) == template
        if kind is Number:
            if not pattern.takes(template, value):
                return False
            self._numbers.append(value)
            return True
        if kind is list:
            return (
                type(value) is template[0]
                and len(value) == len(template) - 1
                and all(self._is_alike(pattern, *each) for each in zip(template[1:], value, strict=True))
            )
        return type(value) is kind and bool(value == template)

    def _meet(self, tensor: Tensor) -> int:
        """Return the place of a real tensor, which is noted if it is new."""
        if id(tensor) not in self._places:
            self._places[id(tensor)] = len(self._given)
            self._given.append(tensor)
        return self._places[id(tensor)]

    def _result_of(self, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        pattern = self._pattern
        assert pattern is not None
        self._next += 1
        if not call.is_executed:
            return self._value(call.result, pattern, self._objects)
        self._recorder.interrupted = None
        try:
            result = self._called(call.function, args, kwargs)
        finally:
            if self._pattern is not None:
                self._recorder.interrupted = self._record
        if not self._is_result(pattern, call.result, result):
            self._record()
            self._is_noting = False
        return result

    def _value(self, template: Any, pattern: Pattern, objects: list[Deferred | None]) -> Any:
        kind = type(template)
        if kind is Value:
            if objects[template] is None:
                objects[template] = Deferred.of(pattern.segment.values[template].spec, int(template))
            return objects[template]
        if kind is Given:
            return self._given[template]
        if kind is Number:
            return self._numbers[template]
        if kind is list:
            return template[0](self._value(each, pattern, objects) for each in template[1:])
        return template

    def _is_result(self, pattern: Pattern, template: Any, result: Any) -> bool:
        """Return whether an executed call has returned tensors as the pattern's has."""
        if isinstance(result, Tensor):
            if type(result) is Deferred and result.executed is None:
                return type(template) is Value and result is self._objects[template]
            place = self._meet(result)
            return type(template) is Given and template == place and Spec.of(result) == pattern.specs[place]
        if type(result) in (list, tuple):
            return (
                type(template) is list
                and len(template) == len(result) + 1
                and all(self._is_result(pattern, *each) for each in zip(template[1:], result, strict=True))
            )
        return type(template) not in (Value, Given, list)

    def _alike(self) -> Iterator[Pattern]:
        """Yield the pattern, and others that begin with the same calls and fit the numbers so far."""
        first, i = self._pattern, self._next
        assert first is not None
        yield first
        for pattern in self._siblings:
            if (
                pattern is not first
                and pattern.calls[:i] == first.calls[:i]
                and pattern.specs[: len(self._given)] == first.specs[: len(self._given)]
                and all(pattern.takes(j, number) for j, number in enumerate(self._numbers))
            ):
                yield pattern

    def _change_to(self, pattern: Pattern) -> None:
        """Go on with a pattern that has the same calls so far."""
        before, objects = self._pattern, self._objects
        if before is None or before is pattern:
            return
        self._go_on_with(pattern)
        for call in pattern.calls[: self._next]:
            for number in found_in(Value, call.result):
                if (found := objects[number]) is not None:
                    self._objects[number] = found
                    if pattern.objects[number] is not None:
                        pattern.objects[number] = found
                    before.renew(number)

    # -- the end of a matched segment

    def _fits(self, pattern: Pattern) -> bool:
        """Return whether the code of a pattern, all of whose calls are matched, computes the same."""
        objects, is_current = self._objects, records_version() == pattern.version
        # The pattern and the step reference them.
        if any(sys.getrefcount(objects[number]) > UNREFERENCED + 1 for number in pattern.passing):
            return False
        numbers, given = self._numbers, self._given
        if any(numbers[i] != numbers[j] for i, j in pattern.equal):
            return False
        if any(tensor() is not given[place] for place, tensor in pattern.others):
            return False
        memory = set()
        for each in pattern.inputs:
            recorded, found = each.tensor(), self._tensor_of(each)
            if found is None or (found is not recorded and not has_storage(found)):
                return False
            storage = storage_of(found)
            memory.add(storage)
            for place, layout in each.views:
                if storage_of(given[place]) != storage or layout_of(given[place]) != layout:
                    return False
            if found is recorded:
                if storage != each.storage:
                    return False
                # Code for a tensor that it writes is stale once another graph gives it error terms.
                if each.is_written or is_current or has_error_terms(found) == each.kind[-1]:
                    continue
            elif each.value in pattern.bound:
                return False
            elif is_current and each.is_plain_gradient and self._is_gradient(found) and is_whole(found):
                continue
            if not is_whole(found) or (each.place is None and Spec.of(found) != each.spec):
                return False
            if self._kind(found, each.is_written) != each.kind:
                return False
        if len(memory) != len(pattern.inputs) or any(p.compiled.owner.is_stale for p in pattern.parts):
            return False
        return all(part.compiled.holds is None or self._holds(pattern, part) for part in pattern.parts)

    def _holds(self, pattern: Pattern, part: Part) -> bool:
        tensors = {each.value: self._tensor_of(each) for each in pattern.inputs}
        tensors |= {n: self._value(Value(n), pattern, self._objects) for n in pattern.lasting}
        part.fill(tensors.__getitem__, self._operands(pattern))
        try:
            return part.compiled.fits(part.function)
        finally:
            part.function.tensors = []

    def _operands(self, pattern: Pattern) -> list[float]:
        return [
            known if source is None else float(self._numbers[source])
            for known, source in zip(pattern.segment.numbers, pattern.sources, strict=True)
        ]

    def _tensor_of(self, each: Input) -> Tensor | None:
        if each.place is not None:
            return self._given[each.place]
        return self._recorder.owner(self._given[each.views[0][0]]) if each.views else each.tensor()

    def _kind(self, tensor: Tensor, is_written: bool) -> Any:
        """Return the facts about a tensor that code depends on; the last is whether it has error terms."""
        return type(tensor), self._recorder.kind_of(tensor, is_written), has_error_terms(tensor)

    @torch.compiler.disable
    def _run(self, pattern: Pattern) -> None:
        recorder, segment, values = self._recorder, pattern.segment, pattern.segment.values
        self._pattern = recorder.interrupted = None
        operands = self._operands(pattern)
        for each in pattern.inputs:
            values[each.value].tensor = self._tensor_of(each)
        for number in pattern.lasting:
            values[number].tensor = self._value(Value(number), pattern, self._objects)
        self._objects = []
        try:
            with recorder.paused(), torch.no_grad():
                recorder.settle()
                for number in dict.fromkeys(map(segment.base, pattern.kept)):
                    if not segment.is_input(number):
                        recorder.take_over(values[number].tensor)
                if not pattern.has_matched:
                    self._put_together(pattern, operands)
                for part in pattern.parts:
                    part.fill(lambda number: values[number].tensor, operands)
                    part.compiled(part.function)
                    part.function.tensors = []
                recorder.make_views(segment, pattern.kept)
        finally:
            for number in (*(each.value for each in pattern.inputs), *pattern.lasting):
                values[number].tensor = None
        pattern.version = records_version()

    def _put_together(self, pattern: Pattern, operands: Sequence[float]) -> None:
        """Compile the components of a pattern as one graph at its first match, if that is possible."""
        pattern.has_matched = True
        segment = pattern.segment
        single: list[Part] = []
        several: list[Part] = []
        for part in pattern.parts:
            has_product = any(is_matrix_product(each.signature.operator) for each in part.function.operations)
            written = segment.written.intersection(part.function.inputs)  # 0-d tensors belong to no row
            is_alone = has_product or any(not segment.values[value].spec.size for value in written)
            (single if is_alone else several).append(part)
        if len(several) < 2:
            return
        chosen = {id(operation) for part in several for operation in part.function.operations}
        operations = [each for each in segment.operations if id(each) in chosen]
        kept = [number for part in several for number in part.function.kept]
        function = RecordedFunction(segment, operations, kept, self._recorder.kind_of)
        positions = function.positions
        function.numbers = [operands[position] for position in positions]
        changing = {part.function.positions[i] for part in several for i in part.compiled.inputs}
        changed = [i for i, position in enumerate(positions) if position in changing]
        first: dict[Any, int] = {}
        shared: dict[int, int] = {}
        equal: dict[tuple[int, int], None] = {}
        for i in changed:
            source = pattern.sources[positions[i]]
            always = segment.numbers[positions[i]], operands[positions[i]]
            shared[i] = first.setdefault(always, i)
            other = pattern.sources[positions[shared[i]]]
            if source is not None and other is not None and source != other:
                equal[source, other] = None
        pattern.equal.extend(equal)
        function.is_together, function.shared = True, shared
        function.bound = {
            each.value: tensor
            for each in pattern.inputs
            if self._binds
            and each.value in function.values
            and (tensor := segment.values[each.value].tensor) is each.tensor()
            and each.kind[1][0] != "gradient"
        }
        try:
            compiled = compiled_for(function, self._recorder.compile_graph, changed, takes_sizes=False)
        except NotByFamily:
            return
        if not {*shared.values()}.issubset(compiled.inputs):
            return  # only components are compiled anew for other numbers
        for part in several:
            part.compiled.owner.within.append(compiled.owner)
        pattern.bound = function.bound
        pattern.parts = [*single, Part(function, compiled)]

    # -- calls that are recorded

    @torch.compiler.disable
    def _record(self) -> None:
        if (pattern := self._pattern) is None:
            return
        recorder, self.has_matched = self._recorder, False
        self._pattern = recorder.interrupted = None
        objects, self._objects = self._objects, []
        self._calls = pattern.calls[: self._next]
        self._made.update(*(found_in(Given, call.result) for call in self._calls if call.is_executed))
        self._sources = []
        with recorder if recorder.is_dispatching else nullcontext():
            for call in self._calls:
                if call.is_executed:
                    continue
                first = len(recorder.segment.operations)
                values = [self._value(template, pattern, objects) for template in call.arguments]
                named = len(values) - len(call.names)
                kwargs = dict(zip(call.names, values[named:], strict=True))
                made = self._called(call.function, values[:named], kwargs)
                self._take_over(call.result, made, objects, pattern)
                del values, kwargs, made
                self._note_sources(call, first)
        self._operations = len(recorder.segment.operations)

    def _take_over(
        self, template: Any, made: Any, objects: Sequence[Deferred | None], pattern: Pattern
    ) -> None:
        """Replace the deferred tensors just recorded by the deferred tensors that the step has."""
        if type(template) is list:
            for each in zip(template[1:], made, strict=True):
                self._take_over(*each, objects, pattern)
        elif type(template) is Value and (given := objects[template]) is not made:
            assert given is not None
            if pattern.objects[template] is given:
                pattern.renew(template)
            if type(made) is not Deferred:  # its operator is executed at once by now
                self._is_noting = False
                self._recorder.take_over(given, made.detach())
                return
            self._is_noting = self._is_noting and made.value == template
            self._recorder.segment.values[made.value].tensor = given
            given.value = made.value

    def _recorded(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        recorder, self.has_matched = self._recorder, False
        first, executed = len(recorder.segment.operations), recorder.executed
        recorder.flushed.clear()
        call = None
        self._is_noting = self._is_noting and first == self._operations and not torch.is_grad_enabled()
        if self._is_noting:
            try:
                call = Call(func, [*map(self._template, (*args, *kwargs.values()))], tuple(kwargs))
            except Unmatchable:
                self._is_noting = False
        result = self._called(func, args, kwargs)
        if recorder.flushed:
            is_alone = len(recorder.flushed) == 1 and len(recorder.flushed[0][0].operations) == first
            if is_alone and call is not None:
                self._add_pattern(call)
            self._begin_after(result)
        elif call is not None:
            self._operations = len(recorder.segment.operations)
            call.is_executed = self._operations == first
            try:
                if recorder.executed > executed and not call.is_executed:
                    raise Unmatchable
                call.result = self._template_of(result, is_executed=call.is_executed)
                self._note_sources(call, first)
                self._calls.append(call)
            except Unmatchable:
                self._is_noting = False
        return result

    def _called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self._recorder.called_at = len(self._recorder.segment.operations)
        if func == _SET_DATA and Spec.of(args[0]) == Spec.of(args[1]):
            return args[0].copy_(args[1])
        if (fused := fused_operator(func)) is not None:
            return run_unfused(fused, args, kwargs)
        if func is Tensor.__deepcopy__ and type(args[0]) in (Tensor, Deferred):
            return args[0].detach().clone()
        if func == _SET_DATA or (func in _OF_MEMORY and self._is_in_segment(func, args)):
            self._recorder.flush()
        return func(*args, **kwargs)

    def _is_in_segment(self, func: Any, args: Any) -> bool:
        """Return whether a function of a tensor's memory depends on recorded operations.

        The address of a tensor that no recorded operation reads or writes does not: a kernel may be given it.
        """
        if func is not Tensor.data_ptr or type(tensor := real(args[0])) is Deferred:
            return True
        return not has_storage(tensor) or storage_of(tensor) in self._recorder.segment.of_storage

    def _template(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            value = real(value)
            if type(value) is Deferred:
                if not self._recorder.segment.has(value):
                    raise Unmatchable
                return Value(value.value)
            if is_wrapper(kind) or not has_storage(value):
                raise Unmatchable
            return Given(self._meet(value))
        if kind is float or kind is int:
            self._numbers.append(value)
            return Number(len(self._numbers) - 1)
        if kind is list or kind is tuple:
            return [kind, *map(self._template, value)]
        if kind not in CONSTANTS:
            raise Unmatchable
        return value

    def _template_of(self, result: Any, *, is_executed: bool) -> Any:
        if isinstance(result, Tensor):
            if type(result) is Deferred and result.executed is None:
                return self._template(result)
            if (place := self._places.get(id(result))) is None:
                if not is_executed or not has_storage(result):
                    raise Unmatchable
                place = self._meet(result)
                self._made.add(place)
            return Given(place)
        if type(result) in (list, tuple):
            return [type(result), *(self._template_of(each, is_executed=is_executed) for each in result)]
        if isinstance(result, (list, tuple, dict)) or (result is not None and not is_executed):
            raise Unmatchable
        return None

    def _note_sources(self, call: Call, first: int) -> None:
        """Note which of a call's numbers the numbers of its operations are."""
        operands = [n for each in self._recorder.segment.operations[first:] for n in each.numbers]
        numbers = [*found_in(Number, call.arguments)]
        sources: Sequence[int | None] = [None] * len(operands)
        for chosen in ([i for i in numbers if type(self._numbers[i]) is float], numbers):
            values = [float(self._numbers[i]) for i in chosen]
            if values == operands:
                sources = chosen
                break
            if len(values) == 1 and operands == values * len(operands):
                sources = chosen * len(operands)
                break
        self._sources += sources

    # -- the end of a segment

    def _begin_after(self, result: Any) -> None:
        """Begin a segment after a call that has ended a segment, and returned ``result``."""
        has_begun = len(self._recorder.segment.operations) > 0  # by that call
        self._begin_segment(is_matchable=not has_begun)
        for tensor in found_in(Tensor, result):
            if type(tensor) is not Deferred and id(tensor) not in self._places:
                self._made.add(self._meet(tensor))
        met = [*map(Spec.of, self._given)]
        self._go_on_with(next((each for each in self._siblings if each.specs[: len(met)] == met), None))

    def _add_pattern(self, end: Call | None) -> None:
        """Make a pattern of the segment that has just been executed, and add it to its siblings."""
        siblings, flushed = self._siblings, self._recorder.flushed
        if not self._is_noting or not flushed:
            return
        segment, kept, found = flushed[-1]
        if len(segment.operations) != self._operations or len(segment.numbers) != len(self._sources):
            return
        lasting = {*kept}.union(*(each.function.kept for each in found))
        used = {value for each in found for value in each.function.inputs}
        used |= {base for value in kept if segment.is_input(base := segment.base(value))}
        inputs = []
        for number, each in ((number, segment.values[number]) for number in sorted(used)):
            kind = self._kind(each.tensor, is_written := number in segment.written)
            known = self._places.get(id(each.tensor)), TensorWeakRef(each.tensor), each.spec
            is_plain = known[0] is not None and kind == _PLAIN_GRADIENT
            inputs.append(Input(number, *known, storage_of(each.tensor), kind, is_written, is_plain))
        inputs_at = {each.place for each in inputs}
        calls = [call.arguments for call in self._calls if not call.is_executed]
        recorded = {*found_in(Given, calls)}
        of_storage = {each.storage: each for each in inputs}
        others: list[tuple[int, TensorWeakRef]] = []
        for place, tensor in enumerate(self._given):
            if place in recorded and place not in inputs_at:
                if (viewed := of_storage.get(storage_of(tensor))) is not None:
                    viewed.views.append((place, layout_of(tensor)))
                elif place not in self._made:
                    others.append((place, TensorWeakRef(tensor)))
        changing = {each.function.positions[i] for each in found for i in each.compiled.inputs}
        is_constant = [True] * len(self._numbers)
        at = [(source, position) for position, source in enumerate(self._sources) if source is not None]
        for i, positions in groupby(sorted(at), itemgetter(0)):
            is_constant[i] = not changing.issuperset(position for _, position in positions)
        objects: list[Deferred | None] = [None] * len(segment.values)
        for call in self._calls:
            for number in found_in(Value, call.result):
                if number not in lasting and objects[number] is None:
                    objects[number] = Deferred.of(segment.values[number].spec, number)
        specs = [*map(Spec.of, self._given)]
        passing = [number for number, each in enumerate(objects) if each is not None]
        for value in segment.values:
            value.tensor = None
        pattern = Pattern(
            self._calls, end, segment, kept, sorted(lasting), inputs, others, specs,
            self._numbers, is_constant, self._sources, found, objects, passing,
        )  # fmt: skip
        others_than = pattern.end, pattern.calls, specs  # one with the same has other constants or tensors
        kept_on = [each for each in siblings if (each.end, each.calls, each.specs) != others_than]
        siblings[:] = [pattern, *kept_on[: MOST_PATTERNS - 1]]
        self._added.append(pattern)


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_OF_MEMORY = frozenset(
    getattr(Tensor, name)
    for name in (
        "__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "as_strided_", "data_ptr", "detach_",
        "numpy", "resize_", "resize_as_", "share_memory_", "squeeze_", "swapaxes_", "swapdims_", "t_",
        "tolist", "transpose_", "unsqueeze_", "untyped_storage",
    )
)  # fmt: skip

_METHODS = (
    "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
    "is_floating_point", "ndimension", "numel", "size", "storage_offset", "stride",
)  # fmt: skip
_ATTRIBUTES = (
    "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mps", "is_nested",
    "is_quantized", "is_sparse", "is_sparse_csr", "is_xpu", "itemsize", "layout", "ndim", "requires_grad",
    "shape",
)  # fmt: skip
#: Functions that read no elements, and leave tensors as they are.
METADATA = frozenset(
    (
        torch.is_complex, torch.is_floating_point, torch.is_tensor, torch.numel,
        *(getattr(Tensor, name) for name in _METHODS),
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    )
)  # fmt: skip
