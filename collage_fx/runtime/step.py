"""The compiled step at run time: it finds the error terms, checks the layouts, and calls the code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from collage_fx.errors import LostErrorTermsError
from collage_fx.graph import InputInfo
from collage_fx.numerics import ErrorFormat
from collage_fx.runtime.error_terms import Expansion, ensure_expansion, state_of_records
from collage_fx.runtime.layouts import Expected, Layouts, picking, refuse_layout
from collage_fx.torch_compat import Pieces, local_tensor, takes_a_list

__all__ = ["CompensatedStep", "WholeStep", "bind"]


@takes_a_list
class CompensatedStep:
    """Calls the compiled graph with the error terms, and the rows of sums, behind its arguments.

    Note [Error terms of the last call]: looking up the record of each tensor takes a microsecond where its
    objects have been evicted from the processor's caches. So the buffers are remembered as long as no record
    has changed; weakly, because they are to go with the tensor.

    Args:
        compiled: the graph, in AOTAutograd's calling convention.
        bindings: where to find the error terms.
        expected: what its arguments have to be, and those behind them.
        rows: further arguments behind these, the same in every call.
    """

    def __init__(
        self,
        compiled: Any,
        bindings: Sequence[Binding],
        expected: tuple[Sequence[Expected], Sequence[Expected]] = ((), ()),
        rows: Sequence[Tensor] = (),
    ) -> None:
        self.compiled = compiled
        self.bindings = bindings
        self.given, self.added = map(Layouts, expected)
        self.rows = rows
        self._buffers: Sequence[weakref.ref[Tensor]] = ()
        self._state: object = None

    def __call__(self, arguments: list[Any]) -> Any:
        self.given.fit(arguments)
        state = state_of_records()
        if state is self._state:
            arguments += [buffer() for buffer in self._buffers]
        else:
            self._add_error_terms(arguments, state)
        arguments += self.rows
        return self.compiled(arguments)

    def _add_error_terms(self, arguments: list[Any], state: object) -> None:
        found = [
            auxiliary
            for binding in self.bindings
            for auxiliary in binding.expansion(arguments).use(binding.name)
        ]
        arguments += found
        self.added.fit(arguments)
        if all(binding.bound is not None for binding in self.bindings):
            self._buffers, self._state = [weakref.ref(auxiliary) for auxiliary in found], state


class WholeStep:
    """A step for Dynamo to call, in place of AOTAutograd's wrapper around the compiled graph.

    Args:
        step: takes the inputs of the whole graph as one list.
        bound: the first of them, which are the same in every call.
        passed: how many of them Dynamo passes.
        updated: indices of those whose version counters have to say so.
        gradients: indices of those that it does not pass, and of the parameters that have them.
        distributed: indices of DTensors, and how they are in pieces; the step takes this process's pieces.
    """

    def __init__(
        self,
        step: Callable[[list[Any]], Any],
        bound: Sequence[Tensor],
        passed: int,
        updated: Sequence[int],
        gradients: Mapping[int, int],
        distributed: Mapping[int, Pieces],
    ) -> None:
        self.step = step
        self.bound = bound
        self.owners = [bound[parameter] for parameter in gradients.values()]
        behind = range(len(bound), len(bound) + passed + len(gradients))
        known = [*(index for index in behind if index not in gradients), *gradients]
        order = {index: i for i, index in enumerate(known)}
        self.in_order = picking([order[index] for index in behind])
        self.updated = picking(updated)
        # A bound one is in pieces as it was when it was captured.
        self.distributed = [(i, pieces if i >= len(bound) else None) for i, pieces in distributed.items()]

    def __call__(self, *arguments: Any) -> Any:
        gradients = [parameter.grad for parameter in self.owners]
        values = [*self.bound, *self.in_order([*arguments, *gradients])]
        torch.autograd.graph.increment_version(self.updated(values))
        with torch.no_grad():
            for index, pieces in self.distributed:
                values[index] = local_tensor(values[index], pieces)
            return self.step(values)


def bind(index: int, info: InputInfo, error_format: ErrorFormat) -> Binding:
    """The way for a compiled step to find the error terms of an input; those of a bound one are made now."""
    if not info.bound or info.tensor is None:
        return Binding(index, error_format, info.name)
    expansion = ensure_expansion(info.tensor, error_format, name=info.name)
    return Binding(index, error_format, info.name, TensorWeakRef(info.tensor), weakref.ref(expansion))


@dataclass
class Binding:
    """Finds the error terms of one of a step's inputs.

    Those of an argument are looked up in each call by its identity, and made at its first step. An attribute
    of the captured module is the same tensor in every call: its record is remembered, so that a step costs no
    lookup; where that has been dropped (``reset_error_terms``) while the tensor lives, the tensor gets a new
    one. Neither the tensor nor its error terms are kept alive.

    Attributes:
        index: the input's, among the arguments.
        error_format: of its error terms.
        name: as the user knows it.
        bound: the tensor, if it is an attribute of the module.
        record: and where its error terms were found last.
    """

    index: int
    error_format: ErrorFormat
    name: str
    bound: TensorWeakRef | None = None
    record: Callable[[], Expansion | None] = lambda: None

    def expansion(self, arguments: Sequence[Any]) -> Expansion:
        """The record of the input in a call."""
        if (known := self.record()) is not None:
            return known
        tensor = arguments[self.index] if self.bound is None else self.bound()
        if tensor is None:
            raise LostErrorTermsError(
                "the tensor that this compiled step updates is gone, and its error terms with it",
                where=self.name,
                remedy="compile the step of the optimizer in use: torch.compile(opt.step, backend=...)",
            )
        refuse_layout(tensor, self.name)
        expansion = ensure_expansion(tensor, self.error_format, name=self.name)
        if self.bound is not None:
            self.record = weakref.ref(expansion)
        return expansion
