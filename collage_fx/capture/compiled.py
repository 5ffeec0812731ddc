"""Code of a component of a recorded step, compiled for its numbers and sizes until they change.

Note [Constants and inputs]
---------------------------
A number that is always the same (a decay, an exponent) is a constant of the code: from it, the passes know
what a recurrence loses, and Inductor writes ``x * x`` for ``x ** 2``. A number that has been seen to change
(a learning rate) is an input, a 0-d float64 tensor: Note [Numbers that change] in ``numbers.py``. A number
for which an operator takes no tensor is *burned in*: compiled as a constant each time, a few times.
Checkpoints tell which numbers have changed, so that a resumed run has the same constants.

Once sizes change, all are symbols. Decisions of the trace by sizes or numbers are checked before each call.

Note [Stale code]
-----------------
A step that branches, on its count for instance, is several graphs. One may store a moving average without
error terms, until another adds to it what rounding would lose. From then on each graph has to keep its error
terms up to date: the code of the first is dropped before its next call, and compiled anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.optim import Optimizer

from collage_fx.capture.segment import RecordedFunction
from collage_fx.state import choose_new, has_error_terms, stored_as
from collage_fx.torch_compat import BurnedIn, SymbolicScope, compiling, records


@dataclass(eq=False)
class CompiledCode:
    """Code that has been compiled for a call of ``torch.compile``, or for a part of a recorded step.

    It is stale once a tensor that it writes without error terms has got some, or one of the numbers that it
    has as constants has been seen to change.
    """

    codes: dict[int, CodeType] = field(default_factory=dict)  # of functions that Dynamo converted, by ``id``
    #: Optimizers that it steps, by ``id``; not a ``WeakSet``, of which each step would call eight functions.
    stepped: dict[int, ref[Optimizer]] = field(default_factory=dict)
    is_stale: bool = False
    within: list[CompiledCode] = field(default_factory=list)  # that is made of it, and is stale when it is

    def end(self) -> None:
        """Note that neither it nor code that is made of it may be called again."""
        self.is_stale = True
        for each in self.within:
            each.end()


class _WrittenBy(WeakSet[CompiledCode]):
    """Part of a tensor's record: the code that writes it without error terms."""


#: Owner of the code that this thread is compiling.
_owner: ContextVar[CompiledCode | None] = ContextVar("_owner", default=None)


@contextmanager
def compiling_for(owner: CompiledCode) -> Iterator[None]:
    """Context manager: what is compiled belongs to ``owner``."""
    token = _owner.set(owner)
    try:
        yield
    finally:
        _owner.reset(token)


def note_write(tensor: Tensor, *, compensated: bool) -> None:
    """Note that the graph that is being compiled writes a tensor, with or without error terms."""
    if compensated:
        for owner in records.drop(tensor, _WrittenBy) or ():
            owner.end()
    elif (compiled_for := _owner.get()) is not None:
        records.of(tensor, _WrittenBy).add(compiled_for)


class NotByFamily(Exception):
    """A graph of several components cannot be compiled by family."""


#: Function that compiles a graph, given example values of its inputs, to a callable of such values. If the
#: last argument is true, equal updates become one, or it raises :class:`NotByFamily`.
CompileGraph = Callable[[GraphModule, Sequence[Any], bool], Callable[..., Any]]


@dataclass(frozen=True)
class Compiled:
    """Code for functions that differ in tensors, in some numbers, and perhaps in sizes."""

    code: Callable[..., Any]  # takes the tensors, then the input numbers as 0-d tensors, then the sizes
    constants: dict[int, float]  # position -> number that the code has as a constant
    inputs: tuple[int, ...]  # positions of the other numbers
    burned_in: frozenset[int]  # positions of numbers that could not be made inputs
    takes_sizes: bool
    holds: Callable[[Sequence[Any]], bool] | None  # whether decisions of the trace hold for other inputs
    owner: CompiledCode  # says when it is stale
    drops: Sequence[int] = ()  # indices of new tensors whose error terms it does not keep up to date
    names: set[str] = field(default_factory=set)  # of the recorder's functions that it has been compiled for

    def fits(self, function: RecordedFunction) -> bool:
        """Return whether the code computes a function."""
        numbers = function.numbers
        for i, constant in self.constants.items():
            if numbers[i] != constant and not (math.isnan(numbers[i]) and math.isnan(constant)):
                return False
        if self.holds is None:
            return True
        inputs = [numbers[i] for i in self.inputs]
        return self.holds([*function.tensors(), *inputs, *(function.sizes if self.takes_sizes else ())])

    def __call__(self, function: RecordedFunction) -> Any:
        """Call the code on a function's tensors, numbers and sizes; return its results."""
        tensors = function.tensors()
        for i in self.drops:
            choose_new(tensors[i], keep=False)
        numbers: Sequence[Tensor] = ()
        if self.inputs:
            known = function.numbers
            numbers = torch.tensor([known[i] for i in self.inputs], dtype=torch.float64).unbind()
        return self.code(*tensors, *numbers, *(function.sizes if self.takes_sizes else ()))


class Part(NamedTuple):
    """Component of a segment, or several as one graph."""

    function: RecordedFunction
    compiled: Compiled


def compiled_for(
    function: RecordedFunction, compile_graph: CompileGraph, changed: Collection[int], *, takes_sizes: bool
) -> Compiled:
    """Compile a function, and with it all functions that differ in the same numbers.

    ``changed`` are the positions of the numbers that have been seen to change, which become inputs. If
    ``takes_sizes``, the code is to take any sizes.
    """
    numbers, shared = function.numbers, function.shared
    burned_in: frozenset[int] = frozenset()
    owner = CompiledCode()
    written = () if function.returned else function.tensors()
    new = [i for i, tensor in enumerate(written) if stored_as(tensor).is_new]
    while True:
        candidates = {shared.get(i, i) for i in changed} - burned_in
        inputs = tuple(i for i in sorted(candidates) if math.isfinite(numbers[i]))
        scope = SymbolicScope()
        values = [*(numbers[i] for i in inputs), *(function.sizes if takes_sizes else ())]
        try:
            with compiling(), scope, compiling_for(owner):
                tensors = [scope.input(tensor, has_symbols=takes_sizes) for tensor in function.tensors()]
                examples = [*tensors, *map(scope.input, values)]
                module = function.module(inputs, takes_sizes=takes_sizes, scope=scope)
                code = compile_graph(module, examples, function.is_together)
        except BurnedIn as found:
            found_here = {i for i, s in zip(inputs, scope.symbols, strict=True) if s in found.symbols}
            assert found_here, "only inputs can be burned in"
            burned_in |= found_here
            continue
        constants = {i: value for i, value in enumerate(numbers) if shared.get(i, i) not in inputs}
        drops = [i for i in new if not has_error_terms(function.tensors()[i])]
        return Compiled(code, constants, inputs, burned_in, takes_sizes, scope.guard(), owner, drops)
