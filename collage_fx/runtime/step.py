"""A compiled step at run time: it finds the error terms, looks at the layouts, and calls the code."""

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
from collage_fx.runtime.error_terms import Expansion, allocate, state_of_records
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
        bindings: Sequence[_Bound | _PerCall],
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
            for auxiliary in (binding.expansion() or binding.found(arguments)).auxiliaries
        ]
        arguments += found
        self.added.fit(arguments)
        if all(isinstance(binding, _Bound) for binding in self.bindings):
            self._buffers, self._state = [weakref.ref(auxiliary) for auxiliary in found], state


class WholeStep:
    """Calls a step as Dynamo calls what a backend returns: what AOTAutograd's wrapper would do for it.

    Args:
        step: takes the inputs of the whole graph as one list.
        bound: the first of them, which are the same in every call.
        passed: how many of them Dynamo passes.
        updated: places of those whose version counters have to say so.
        gradients: places of those that it does not pass, and of the parameters that have them.
        distributed: places of those that are DTensors, and how; the step takes this process's pieces of them.
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
        known = [*(place for place in behind if place not in gradients), *gradients]
        index = {place: i for i, place in enumerate(known)}
        self.in_order = picking([index[place] for place in behind])
        self.updated = picking(updated)
        # A bound one is in pieces as it was when it was captured.
        self.distributed = [(i, pieces if i >= len(bound) else None) for i, pieces in distributed.items()]

    def __call__(self, *arguments: Any) -> Any:
        gradients = [parameter.grad for parameter in self.owners]
        values = [*self.bound, *self.in_order([*arguments, *gradients])]
        torch.autograd.graph.increment_version(self.updated(values))
        for place, pieces in self.distributed:
            values[place] = local_tensor(values[place], pieces)
        with torch.no_grad():
            return self.step(values)


def bind(position: int, info: InputInfo, error_format: ErrorFormat) -> _Bound | _PerCall:
    """Where a compiled step finds the error terms of an input; those of a bound one are made now."""
    if not info.bound or info.tensor is None:
        return _PerCall(position, error_format, info.name)
    expansion = allocate(info.tensor, error_format, name=info.name)
    return _Bound(TensorWeakRef(info.tensor), weakref.ref(expansion), error_format, info.name)


@dataclass
class _Bound:
    """Error terms of a tensor that is an attribute of the captured module: the same one in every call.

    Neither the tensor nor its error terms are kept alive. The record is remembered, so that a step costs no
    lookup; where it has been dropped (``reset_error_terms``) while the tensor lives, the tensor gets a new
    one.
    """

    tensor: TensorWeakRef
    expansion: weakref.ref[Expansion]
    error_format: ErrorFormat
    name: str

    def found(self, arguments: Sequence[Any]) -> Expansion:
        tensor = self.tensor()
        if tensor is None:
            raise LostErrorTermsError(
                "the tensor that this compiled step updates is gone, and its error terms with it",
                where=self.name,
                remedy="compile the step of the optimizer in use: torch.compile(opt.step, backend=...)",
            )
        expansion = allocate(tensor, self.error_format, name=self.name)
        self.expansion = weakref.ref(expansion)
        return expansion


@dataclass
class _PerCall:
    """Error terms of a tensor that is an argument of each call.

    Looked up by identity, made at its first step.
    """

    position: int
    error_format: ErrorFormat
    name: str

    def expansion(self) -> None:
        """Not known before the call."""

    def found(self, arguments: Sequence[Any]) -> Expansion:
        tensor = arguments[self.position]
        refuse_layout(tensor, self.name)
        return allocate(tensor, self.error_format, name=self.name)
