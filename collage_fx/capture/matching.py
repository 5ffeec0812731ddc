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
* Most calls that ask for a value end no segment: Note [Questions] in ``recorder.py``.
* At a pattern's first match, its components are compiled again as one graph: equal updates become one call.
  Of patterns that differ in answers to questions, the others wait for that, as compiling takes long.
* Steps with a closure or under autocast are never matched, nor are segments with operations that no mode for
  torch functions sees (scripted functions), or that enable gradients.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from inspect import isgetsetdescriptor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from collage_fx.capture.compiled import NotByFamily, Part, compiled_for
from collage_fx.capture.recorder import QUESTIONS, Recorder
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
from collage_fx.state import StoredAs, records_version
from collage_fx.torch_compat import fused_operator, has_storage, is_wrapper, run_unfused, storage_of

#: Types of arguments that are compared by their values.
CONSTANTS = frozenset(
    (
        bool, str, complex, slice, type(None), type(Ellipsis), torch.device, torch.dtype, torch.layout,
        torch.memory_format, torch.Generator, torch.Size,
    )
)  # fmt: skip

#: Kind of a gradient without error terms.
_PLAIN_GRADIENT = Tensor, ("gradient", (False, False, False), StoredAs())

#: Limit for answering all questions of a segment at once: at the first, and when more numbers are known.
MOST_EARLY_RUNS = 3

#: Number of patterns for a segment of a step.
MOST_PATTERNS = 16

#: Matches of a pattern before it is compiled as one graph, for each sibling that is compiled so already.
JOINED_AFTER = 100


@dataclass(slots=True, eq=False)
class Place:
    """Template of a tensor. All calls of a pattern that are given or return the tensor share it."""

    number: int  # of a deferred tensor: its number in the segment; else how many real tensors are met before
    spec: Spec
    is_real: bool
    tensor: Any = None  # that stands there in the step under way; a deferred tensor also before


class Number(int):
    """Template of a number: its index among the numbers of a segment."""


class Other:
    """Template of a result of a call that is executed, if it is neither a tensor nor a list of results."""


@dataclass(slots=True)
class Call:
    """Call of a torch function, with templates in place of tensors and numbers."""

    function: Any
    arguments: list[Any]
    names: tuple[str, ...]  # of the last arguments, which are keyword arguments
    is_executed: bool = False  # at once
    question: int | None = None  # its number among those that the segment answers
    result: Any = None


@dataclass(slots=True)
class Input:
    """Real tensor that a pattern's operations read or write."""

    value: int  # its number in the segment
    place: Place | None  # None if calls are given its views alone
    tensor: TensorWeakRef  # that was recorded, or that the optimizer holds in its place
    storage: int  # identifier of its memory
    kind: Any  # other facts that code depends on
    expected: Callable[[], Tensor | None]  # returns the tensor that should stand for it in the next step
    views: list[tuple[Place, Any]] = field(default_factory=list)  # with their layouts


class Question(NamedTuple):
    """Value that a step asks for, and that does not end its segment."""

    part: Part
    inputs: Sequence[Input]
    is_early: bool  # whether it can be computed before the calls that precede it

    @property
    def value(self) -> int:
        return self.part.function.returned[0]


@dataclass(eq=False)
class Pattern:
    """Segment that has been recorded, with which later steps are compared."""

    calls: list[Call]  # the last ends the segment, or is the end of a step: a call of None
    segment: Segment  # without tensors
    kept: Sequence[int]  # numbers of the results that outlive it
    lasting: Sequence[Place]  # these, and the results that they are views of
    passing: Sequence[Place]  # other results: their deferred tensors are the same in each step
    inputs: list[Input]
    numbers: list[float]  # among the calls' arguments, as recorded
    changing: Collection[int | None]  # indices of numbers that are inputs of the code alone, no constants
    sources: list[int | None]  # for each of the operations' numbers its index; None if it is always the same
    parts: Sequence[Part]
    questions: Sequence[Question]
    early: Sequence[Part] = ()  # that answer questions before they are asked
    bound: set[int] = field(default_factory=set)  # numbers of the inputs that the code has as its own tensors
    equal: set[tuple[int, int]] = field(default_factory=set)  # of numbers that are one input of the code
    version: object = None  # state of all error terms at the last match; None before the first
    matches: int = 0
    is_joined: bool = False  # whether its components have been compiled as one graph, as far as possible

    def takes(self, index: int, number: object) -> bool:
        """Return whether the code can be given a number in the place of a recorded number."""
        known = self.numbers[index]
        return type(number) is type(known) and (number == known or index in self.changing)

    def is_stale(self) -> bool:
        parts = itertools.chain(self.parts, self.early, (each.part for each in self.questions))
        return any(part.compiled.owner.is_stale for part in parts)


class Matcher(TorchFunctionMode):
    """Mode that matches the calls of a step with the calls of earlier steps, or has them recorded.

    It also handles torch functions that are no operators, and torch's fused operators. Before the memory of
    tensors is read or their layout changed, they are brought up to date. An assignment to ``.data`` is
    recorded like an update, a deep copy like a clone. Note [A wish for speed] in
    ``torch_compat/fused_updates.py``.

    The ``recorder`` is entered before. ``binds``: code may hold the optimizer's tensors, and dies with it.
    """

    def __init__(
        self,
        recorder: Recorder,
        is_gradient: Callable[[Tensor], bool],
        expected: Callable[[], Mapping[int, Callable[[], Tensor | None]]],  # by storage: see :class:`Input`
        *,
        binds: bool,
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self._is_gradient = is_gradient
        self._expected = expected
        self._binds = binds
        #: Default dtype and number of a segment in a step -> its patterns.
        self._patterns: dict[tuple[torch.dtype, int], list[Pattern]] = defaultdict(list)
        self._added: list[Pattern] = []
        self._segments = 0
        self._strayed = 0  # rises when a step asks other questions than steps before, falls when it does not
        self.has_matched = False  # whether all calls of the last step have been matched
        self._is_in_step = False
        self._is_matching = False
        self._pattern: Pattern | None = None
        recorder.interrupted = lambda: self._record() if self._pattern is not None else None
        self._given: dict[int, Place] = {}  # real tensors that calls are given or return, by ``id``
        self._begin_segment(is_matchable=False)

    # -- a step

    def begin(self, *, is_matching: bool) -> None:
        is_matching &= not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        self.has_matched = self._is_matching = is_matching
        self._is_in_step = True
        self._added.clear()
        self._segments = 0
        if self._strayed > MOST_PATTERNS:
            self._recorder.answers, self._strayed = False, 0
            self._patterns.clear()
        self._begin_segment()

    @torch.compiler.disable
    def finish(self, *, successfully: bool) -> None:
        recorder, self._is_in_step = self._recorder, False
        if not successfully:
            for result in self._results_so_far().values():
                result.tensor = None
        elif self._pattern is not None and not (self._matched(None, (), ()) and self._run()):
            self._record()
        if successfully and recorder.segment.operations:
            recorder.flushed.clear()
            recorder.flush()
            self._add_pattern(Call(None, [], ()))
        recorder.flushed.clear()  # views in segments keep tensors from being settled
        recorder.finish(successfully=successfully)
        self._begin_segment(is_matchable=False)

    def forget_step(self) -> None:
        """Forget the patterns of the step that has just ended, which has made state that will be there."""
        for siblings in self._patterns.values():
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
        if isinstance(alpha := kwargs.get("alpha"), Tensor):  # its value is asked for by a call of its own
            kwargs = {**kwargs, "alpha": self.__torch_function__(Tensor.item, (), (alpha,))}
        if self._pattern is not None:
            values = (*args, *kwargs.values()) if kwargs else args
            if not torch.is_grad_enabled() and (call := self._matched(func, values, tuple(kwargs))):
                if call.question is not None:
                    if (answer := self._answer(call.question)) is not None:
                        self._next += 1
                        return QUESTIONS[func](answer)
                elif call is not self._pattern.calls[-1]:
                    return self._result_of(call, args, kwargs)
                elif self._run():
                    result = self._called(func, args, kwargs)
                    self._begin_after(result)
                    return result
            self._record()
        return self._recorded(func, args, kwargs)

    def _begin_segment(self, *, is_matchable: bool = True) -> None:
        self._recorder.flushed.clear()
        self._is_noting = is_matchable and self._is_matching
        segment = torch.get_default_dtype(), self._segments
        self._siblings = self._patterns[segment] if self._is_noting else []
        self._segments += 1
        for place in self._given.values():
            place.tensor = None
        self._given.clear()
        self._results: dict[int, Place] = {}
        self._numbers: list[float] = []
        self._calls: list[Call] = []
        self._sources: list[int | None] = []
        self._next = 0
        self._operations = 0
        self._answered: Pattern | None = None
        self._answers: dict[int, Any] = {}
        self._assumed: dict[
            int, Tensor
        ] = {}  # number of an input -> the tensor that was read for the answers
        self._early_runs = 0
        self._pattern = next(iter(self._siblings), None)

    # -- calls that are matched

    def _matched(self, func: Any, values: Any, names: tuple[str, ...]) -> Call | None:
        """Return a pattern's next call if it is this call; go on with that pattern.

        Other patterns than the last begin with the same calls, and take the numbers so far.
        """
        first, i = self._pattern, self._next
        assert first is not None
        if self._is_same(first, first.calls[i], func, values, names):
            return first.calls[i]  # as most calls do
        for pattern in self._siblings:
            if (
                pattern is not first
                and len(pattern.calls) > i
                and pattern.calls[:i] == first.calls[:i]
                and all(pattern.takes(j, number) for j, number in enumerate(self._numbers))
                and self._is_same(pattern, pattern.calls[i], func, values, names)
            ):
                self._pattern = pattern
                return pattern.calls[i]
        return None

    def _is_same(self, pattern: Pattern, call: Call, func: Any, values: Any, names: tuple[str, ...]) -> bool:
        """Return whether a call is that of a pattern, whose numbers and tensors are noted then."""
        if call.function != func or len(values) != len(call.arguments) or names != call.names:
            return False
        numbers, given = len(self._numbers), len(self._given)
        for template, value in zip(call.arguments, values, strict=True):
            if type(template) is Place and template.tensor is value is not None:
                continue  # as most arguments, without a call
            if not self._is_alike(pattern, template, value):
                del self._numbers[numbers:]
                while len(self._given) > given:
                    self._given.popitem()[1].tensor = None
                return False
        return True

    def _is_alike(self, pattern: Pattern, template: Any, value: Any) -> bool:
        kind = type(template)
        if kind is Place:
            value = real(value)
            if type(value) is Deferred or not template.is_real or not isinstance(value, Tensor):
                return value is template.tensor is not None
            if id(value) in self._given or template.number != len(self._given):
                return self._given.get(id(value)) is template
            return Spec.of(value) == template.spec and self._meet(value, template) is template
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
        if template is Other:
            return not isinstance(value, Tensor) and type(value) not in (list, tuple)
        return type(value) is kind and bool(value == template)

    def _meet(self, tensor: Tensor, place: Place | None = None) -> Place:
        """Return the place of a real tensor, which is noted if it is new."""
        if id(tensor) not in self._given:
            place = place or Place(len(self._given), Spec.of(tensor), is_real=True)
            place.tensor, self._given[id(tensor)] = tensor, place
        return self._given[id(tensor)]

    def _result_of(self, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        pattern = self._pattern
        assert pattern is not None
        self._next += 1
        if not call.is_executed:
            return self._value(call.result)
        self._pattern = None
        try:
            result = self._called(call.function, args, kwargs)
        finally:
            self._pattern = pattern
        is_alike = self._is_alike(pattern, call.result, result) and all(
            each.tensor is None or Spec.of(each.tensor) == each.spec for each in found_in(Place, call.result)
        )
        if not is_alike:
            self._record()
            self._is_noting = False
        return result

    def _value(self, template: Any) -> Any:
        kind = type(template)
        if kind is Place:
            if template.tensor is None:
                template.tensor = Deferred.of(template.spec, template.number)
            return template.tensor
        if kind is Number:
            return self._numbers[template]
        if kind is list:
            return template[0]([*map(self._value, template[1:])])
        return template

    def _results_so_far(self) -> dict[int, Place]:
        calls = self._pattern.calls[: self._next] if self._pattern is not None else ()
        results = found_in(Place, [call.result for call in calls])
        return {each.number: each for each in results if not each.is_real}

    # -- questions of a matched segment

    def _answer(self, index: int) -> Any:
        """Return the value that a question asks for; None if the code of the pattern does not fit."""
        pattern = self._pattern
        assert pattern is not None
        question = pattern.questions[index]
        if self._answered is not pattern:
            self._answered, self._answers, self._early_runs = pattern, self._early_answers(pattern), 1
        while question.value in self._answers:
            if self._is_as_expected(pattern, question):
                return self._answers[question.value]
            if self._early_runs == MOST_EARLY_RUNS:
                break
            self._early_runs += 1
            self._answers = self._early_answers(pattern)
        return self._answer_alone(pattern, question)

    def _answer_alone(self, pattern: Pattern, question: Question) -> Any:
        function, compiled = question.part
        with self._recorder.paused(), torch.no_grad():
            is_current = records_version() == pattern.version
            for each in question.inputs:
                if not self._fit(pattern, each, self._found(each), is_current=is_current):
                    return None
            self._give_numbers(pattern, function)
            is_fit = compiled.fits(function) and not compiled.owner.is_stale
            return compiled(function)[0].item() if is_fit else None

    def _early_answers(self, pattern: Pattern) -> dict[int, Any]:
        """Return the answers to a step's questions, for the tensors and numbers that are expected."""
        answers: dict[int, Any] = {}
        read = {value for part in pattern.early for value in part.function.inputs}
        is_current = records_version() == pattern.version
        with self._recorder.paused(), torch.no_grad():
            for each in [each for each in pattern.inputs if each.value in read]:
                found = self._found(each)
                found = each.expected() if found is None else found
                if not self._fit(pattern, each, found, is_current=is_current):
                    return {}
                self._assumed[each.value] = pattern.segment.values[each.value].tensor
            for function, compiled in pattern.early:
                self._give_numbers(pattern, function)
                if compiled.owner.is_stale or not compiled.fits(function):
                    return {}
                answers |= zip(function.returned, compiled(function), strict=True)
            return _numbers_in(answers)

    def _is_as_expected(self, pattern: Pattern, question: Question) -> bool:
        """Return whether a question that has been answered before is about the tensors and numbers met."""
        for each in question.inputs:
            given, found = self._assumed[each.value], self._found(each)
            if found is None or (each.views and not _has_views(each, storage_of(given))):
                return False
            if found is not given and (
                storage_of(found) != storage_of(given) or layout_of(found) != layout_of(given)
            ):
                return False
        numbers, known, sources = self._numbers, pattern.segment.numbers, pattern.sources
        for position in question.part.function.positions:
            if (source := sources[position]) is not None and known[position] != float(numbers[source]):
                return False
        return True

    def _give_numbers(self, pattern: Pattern, function: RecordedFunction) -> None:
        """Give the segment a function's numbers, and for numbers not met yet the values expected."""
        known, positions = pattern.segment.numbers, function.positions
        for i, position in enumerate(positions):
            source = pattern.sources[position]
            if source is not None and source < len(self._numbers):
                known[position] = float(self._numbers[source])
            elif source is not None:
                known[position] = known[positions[function.shared.get(i, i)]]

    # -- the end of a matched segment

    def _found(self, each: Input) -> Tensor | None:
        """Return the tensor that stands for an input in the step under way; None if it is not met yet."""
        if each.place is not None:
            return each.place.tensor
        if not each.views:
            return each.tensor()
        view = each.views[0][0].tensor
        return None if view is None else self._recorder.owner(view)

    def _fit(self, pattern: Pattern, each: Input, found: Tensor | None, *, is_current: bool) -> bool:
        """Return whether the code of a pattern fits a tensor, which is given to its segment.

        ``is_current``: no error terms have changed since the last match.
        """
        recorded = each.tensor()
        if found is None or (found is not recorded and not has_storage(found)):
            return False
        storage, segment = storage_of(found), pattern.segment
        if each.views and not _has_views(each, storage):
            return False
        if found is not recorded and recorded is not None and storage == each.storage:
            found = recorded if layout_of(found) == layout_of(recorded) else found
        segment.values[each.value].tensor = found
        if found is recorded:
            if storage != each.storage:
                return False
            if is_current or self._kind(found, each.value in segment.written) == each.kind:
                return True
        elif each.value in pattern.bound:
            return False
        elif is_current and each.kind == _PLAIN_GRADIENT and self._is_gradient(found) and is_whole(found):
            return True
        if not is_whole(found) or Spec.of(found) != segment.values[each.value].spec:
            return False
        return bool(self._kind(found, each.value in segment.written) == each.kind)

    def _fits(self, pattern: Pattern) -> bool:
        """Return whether the code of a pattern fits; give its segment the tensors and numbers of the step."""
        numbers, segment = self._numbers, pattern.segment
        if any(sys.getrefcount(place.tensor) > UNREFERENCED for place in pattern.passing):
            return False
        if pattern.is_stale() or any(numbers[i] != numbers[j] for i, j in pattern.equal):
            return False
        is_current = records_version() == pattern.version
        for each in pattern.inputs:
            if not self._fit(pattern, each, self._found(each), is_current=is_current):
                return False
        memory = {storage_of(segment.values[each.value].tensor) for each in pattern.inputs}
        if len(memory) != len(pattern.inputs):
            return False
        segment.numbers = [
            known if source is None else float(numbers[source])
            for known, source in zip(segment.numbers, pattern.sources, strict=True)
        ]
        for place in pattern.lasting:
            segment.values[place.number].tensor = self._value(place)
        return all(part.compiled.holds is None or part.compiled.fits(part.function) for part in pattern.parts)

    def _kind(self, tensor: Tensor, is_written: bool) -> Any:
        """Return the facts about a tensor that code depends on."""
        return type(tensor), self._recorder.kind_of(tensor, is_written)

    @torch.compiler.disable
    def _run(self) -> bool:
        """Run the code of a pattern, all of whose calls are matched, if it computes the same."""
        recorder, pattern = self._recorder, self._pattern
        assert pattern is not None
        segment = pattern.segment
        try:
            with recorder.paused(), torch.no_grad():
                if not self._fits(pattern):
                    return False
                self._pattern = None
                recorder.settle()
                for number in dict.fromkeys(map(segment.base, pattern.kept)):
                    if not segment.is_input(number):
                        recorder.take_over(segment.values[number].tensor)
                if not pattern.is_joined and self._is_worth_joining(pattern):
                    pattern.is_joined = True
                    early = [each.part for each in pattern.questions if each.is_early]
                    if len(together := self._together(pattern, early)) < len(early):
                        pattern.early = together
                    pattern.parts = self._together(pattern, pattern.parts)
                for part in pattern.parts:
                    part.compiled(part.function)
                recorder.make_views(segment, pattern.kept)
        finally:
            segment.forget_tensors()
            for place in () if self._pattern is pattern else pattern.lasting:
                place.tensor = None
        pattern.version = records_version()
        pattern.matches += 1
        self._strayed = max(self._strayed - 1, 0)
        return True

    def _is_worth_joining(self, pattern: Pattern) -> bool:
        """Return whether a pattern has been met often enough: answers may lead to ever other patterns."""
        joined = sum(each.is_joined for each in self._siblings) if pattern.questions else 0
        return pattern.matches >= JOINED_AFTER * joined

    def _together(self, pattern: Pattern, parts: Iterable[Part]) -> list[Part]:
        """Compile components of a pattern as one graph, if that is possible."""
        segment = pattern.segment
        single: list[Part] = []
        several: list[Part] = []
        for part in parts:
            written = segment.written.intersection(part.function.inputs)  # 0-d tensors belong to no row
            is_alone = any(map(segment.has_product, part.function.operations)) or any(
                not segment.values[value].spec.size for value in written
            )
            (single if is_alone else several).append(part)
        if len(several) < 2:
            return [*single, *several]
        joined = [part.function for part in several]
        function = RecordedFunction(
            segment,
            [operation for each in joined for operation in each.operations],
            [value for each in joined for value in each.kept],
            self._recorder.kind_of,
            [value for each in joined for value in each.returned],
        )
        positions = function.positions
        changing = {part.function.positions[i] for part in several for i in part.compiled.inputs}
        changed = [i for i, position in enumerate(positions) if position in changing]
        first: dict[Any, int] = {}
        shared: dict[int, int] = {}
        for i in changed:
            source, now = pattern.sources[positions[i]], segment.numbers[positions[i]]
            shared[i] = first.setdefault((now if source is None else pattern.numbers[source], now), i)
            other = pattern.sources[positions[shared[i]]]
            if source is not None and other is not None and source != other:
                pattern.equal.add((source, other))
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
            return [*single, *several]
        if not {*shared.values()}.issubset(compiled.inputs):
            return [*single, *several]  # only components are compiled anew for other numbers
        for part in several:
            part.compiled.owner.within.append(compiled.owner)
        pattern.bound |= function.bound.keys()
        return [*single, Part(function, compiled)]

    # -- calls that are recorded

    @torch.compiler.disable
    def _record(self) -> None:
        if (pattern := self._pattern) is None:
            return
        recorder, self.has_matched = self._recorder, False
        self._calls, self._sources = pattern.calls[: self._next], []
        self._strayed += 2 * any(call.question is not None for call in self._calls)
        self._results, self._pattern = self._results_so_far(), None
        try:
            with recorder if recorder.is_dispatching else nullcontext():
                for call in self._calls:
                    if call.is_executed and call.question is None:
                        continue
                    values = [*map(self._value, call.arguments)]
                    named = len(values) - len(call.names)
                    kwargs = dict(zip(call.names, values[named:], strict=True))
                    self._take_over(call.result, self._called(call.function, values[:named], kwargs))
                    del values, kwargs
                    self._note_sources(call)
        finally:
            for result in self._results.values():
                result.tensor = None  # later steps get others
            pattern.segment.forget_tensors()
        self._is_noting = self._is_noting and not recorder.flushed
        self._operations = len(recorder.segment.operations)

    def _take_over(self, template: Any, made: Any) -> None:
        """Replace the deferred tensors just recorded by the deferred tensors that the step has."""
        if type(template) is list:
            for each in zip(template[1:], made, strict=True):
                self._take_over(*each)
        elif type(template) is Place and not template.is_real and (given := template.tensor) is not made:
            if type(made) is not Deferred:  # its operator is executed at once by now
                self._is_noting = False
                self._recorder.take_over(given, made.detach())
                return
            self._is_noting = self._is_noting and made.value == template.number
            self._recorder.segment.values[made.value].tensor = given
            given.value = made.value

    def _recorded(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        recorder, self.has_matched = self._recorder, False
        first, executed, questions = (
            len(recorder.segment.operations), recorder.executed, len(recorder.questions)
        )  # fmt: skip
        recorder.flushed.clear()
        call = Call(func, [], tuple(kwargs))
        self._is_noting = self._is_noting and first == self._operations and not torch.is_grad_enabled()
        if self._is_noting:
            call.arguments = [self._template(each, self._constant) for each in (*args, *kwargs.values())]
        result = self._called(func, args, kwargs)
        if recorder.flushed:
            if len(recorder.flushed) == 1 and len(recorder.flushed[0][0].operations) == first:
                self._add_pattern(call)
            self._begin_after(result)
        elif self._is_noting:
            self._operations = len(recorder.segment.operations)
            call.is_executed, given = self._operations == first, len(self._given)
            call.question = questions if len(recorder.questions) > questions else None
            call.result = self._template(result, partial(self._other, call))
            if not call.is_executed and (recorder.executed > executed or len(self._given) > given):
                self._is_noting = False
            self._note_sources(call)
            self._calls.append(call)
        return result

    def _called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self._recorder.called, self._recorder.called_at = func, len(self._recorder.segment.operations)
        if func == _SET_DATA and Spec.of(args[0]) == Spec.of(args[1]):
            return args[0].copy_(args[1])
        if (fused := fused_operator(func)) is not None:
            return run_unfused(fused, args, kwargs)
        if func is Tensor.__deepcopy__ and type(args[0]) in (Tensor, Deferred):
            return args[0].detach().clone()
        if func in _MATMUL and [each.dim() for each in found_in(Tensor, args)] == [1, 2] and not kwargs:
            return (args[0].unsqueeze(0) @ args[1]).squeeze(0)  # torch would change the result's layout
        if func == _SET_DATA or (func in _OF_MEMORY and self._is_in_segment(func, args)):
            self._recorder.flush()
        return func(*args, **kwargs)

    def _is_in_segment(self, func: Any, args: Any) -> bool:
        """Return whether a function of a tensor's memory depends on recorded operations.

        The address of a tensor that no recorded operation reads or writes does not: a kernel may be given it.
        """
        if func is not Tensor.data_ptr or type(tensor := real(args[0])) is Deferred:
            return True
        if not has_storage(tensor):
            return True
        self._recorder.written_at_once.add(storage_of(tensor))
        return storage_of(tensor) in self._recorder.segment.of_storage

    def _template(self, value: Any, of_other: Callable[[Any], Any]) -> Any:
        """Return the template of tensors, also in lists; ``of_other`` returns templates of other values.

        For what has no template, nothing of the segment is noted any more.
        """
        kind = type(value)
        if isinstance(value, Tensor):
            value = real(value)
            if type(value) is Deferred and self._recorder.segment.has(value):
                number = value.value
                return self._results.setdefault(number, Place(number, value.spec, is_real=False))
            if type(value) is not Deferred and not is_wrapper(kind) and has_storage(value):
                return self._meet(value)
            self._is_noting = False
            return None
        if kind is list or kind is tuple or kind.__module__ == "torch.return_types":
            return [kind, *(self._template(each, of_other) for each in value)]
        return of_other(value)

    def _constant(self, value: Any) -> Any:
        kind = type(value)
        if kind is float or kind is int:
            self._numbers.append(value)
            return Number(len(self._numbers) - 1)
        self._is_noting &= kind in CONSTANTS
        return value

    def _other(self, call: Call, result: Any) -> Any:
        """Return the template of a result of a call that is neither a tensor nor a list."""
        is_any = call.is_executed and not isinstance(result, (list, tuple, dict))
        self._is_noting &= is_any or result is None
        return Other if call.is_executed else None

    def _note_sources(self, call: Call) -> None:
        """Note which of a call's numbers the numbers of its operations are."""
        operands = self._recorder.segment.numbers[len(self._sources) :]
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
        returned = [each for each in found_in(Tensor, result) if type(each) is not Deferred]
        if not (returned and self._is_noting):
            return
        if self._pattern is not None and self._matched(None, returned, ()) is not None:
            self._next += 1
        else:
            self._pattern = None
            self._calls.append(Call(None, [*map(self._meet, returned)], (), is_executed=True))

    def _add_pattern(self, end: Call) -> None:
        """Make a pattern of the segment that has just been executed, and add it to its siblings."""
        calls, siblings, flushed = [*self._calls, end], self._siblings, self._recorder.flushed
        if not self._is_noting or not flushed:
            return
        segment, kept, found, questions = flushed[-1]
        if len(segment.operations) != self._operations or len(segment.numbers) != len(self._sources):
            return
        for function, _ in questions:
            asked_of = function.form
            function.look_at(self._recorder.kind_of, len(function.inputs))
            if function.form != asked_of:
                return  # the segment has given tensors error terms, which the code does not read
        lasting = {*kept}.union(*(each.function.kept for each in found))
        used = {value for each in (*found, *questions) for value in each.function.inputs}
        used |= {base for value in kept if segment.is_input(base := segment.base(value))}
        expected = self._expected()
        inputs = []
        for number in sorted(used):
            tensor = segment.values[number].tensor
            place, storage = self._given.get(id(tensor)), storage_of(tensor)
            next_one = expected.get(storage, TensorWeakRef(tensor))
            if (held := next_one()) is not None and layout_of(held) == layout_of(tensor):
                tensor = held  # where the step has met its ``.data``
            kind = self._kind(tensor, number in segment.written)
            inputs.append(Input(number, place, TensorWeakRef(tensor), storage, kind, next_one))
        direct = [each.place for each in inputs]
        of_storage = {each.storage: each for each in inputs}
        recorded = found_in(Place, [call.arguments for call in self._calls if not call.is_executed])
        for place in dict.fromkeys(each for each in recorded if each.is_real and each not in direct):
            if (viewed := of_storage.get(storage_of(place.tensor))) is not None:
                viewed.views.append((place, layout_of(place.tensor)))
        parts = (*found, *questions)
        constants_at = {each.function.positions[i] for each in parts for i in each.compiled.constants}
        changing = {*self._sources}.difference(self._sources[at] for at in constants_at)
        results = {number: each for number, each in self._results.items() if number not in lasting}
        places = [
            self._results.get(number) or Place(number, segment.values[number].spec, is_real=False)
            for number in sorted(lasting)
        ]
        segment.forget_tensors()
        pattern = Pattern(
            calls, segment, kept, places, [*results.values()], inputs, self._numbers, changing,
            self._sources, found, [*map(partial(self._question, inputs), questions)],
        )  # fmt: skip
        kept_on = [each for each in siblings if each.calls != calls and not each.is_stale()]
        kept_on.sort(key=lambda each: not each.is_joined)
        siblings[:] = [pattern, *kept_on[: MOST_PATTERNS - 1]]
        self._added.append(pattern)

    def _question(self, inputs: Sequence[Input], part: Part) -> Question:
        read = [each for each in inputs if each.value in part.function.inputs]
        return Question(part, read, self._recorder.written_at_once.isdisjoint(each.storage for each in read))


def _numbers_in(answers: Mapping[int, Tensor]) -> dict[int, Any]:
    """Return the only element of each tensor; all of a kind are read at once."""
    of_kind: dict[Any, list[int]] = defaultdict(list)
    for value, answer in answers.items():
        of_kind[answer.dtype, answer.device].append(value)
    read = [(each, torch.stack([answers[i].reshape(()) for i in each]).tolist()) for each in of_kind.values()]
    return {value: number for values, numbers in read for value, number in zip(values, numbers, strict=True)}


def _has_views(each: Input, storage: int) -> bool:
    """Return whether the views of an input that have been met lie in a memory as they were recorded."""
    for place, layout in each.views:
        view = place.tensor
        if view is not None and (storage_of(view) != storage or layout_of(view) != layout):
            return False
    return True


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_MATMUL = frozenset((torch.matmul, Tensor.matmul, Tensor.__matmul__))
_OF_MEMORY = frozenset(
    getattr(Tensor, name)
    for name in (
        "__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "as_strided_", "data_ptr", "detach_",
        "numpy", "resize_", "resize_as_", "share_memory_", "squeeze_", "storage", "swapaxes_", "swapdims_",
        "t_", "tolist", "transpose_", "unsqueeze_", "untyped_storage",
    )
)  # fmt: skip

_METHODS = (
    "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
    "is_floating_point", "ndimension", "numel", "size", "storage_offset", "stride",
)  # fmt: skip
#: Attributes that are tensors, of the same elements.
_VIEWS = frozenset(("H", "T", "_base", "data", "imag", "mH", "mT", "real"))
#: Functions that read no elements, and leave tensors as they are.
METADATA = frozenset(
    (
        torch.is_complex, torch.is_floating_point, torch.is_tensor, torch.numel,
        *(getattr(Tensor, name) for name in _METHODS),
        *(v.__get__ for k, v in vars(Tensor.__base__).items() if isgetsetdescriptor(v) and k not in _VIEWS),
    )
)  # fmt: skip
