"""The code of a part of a recorded step: made for its numbers and sizes, until they are seen to change.

Note [What is burned in]
------------------------
A number that is always the same (a decay, an exponent) is a constant of the code: by it, the passes know what
a recurrence loses, and Inductor writes ``x * x`` for ``x ** 2``. One that has been another before (a learning
rate, a bias correction) is an input, a 0-d float64 tensor, and costs no compilation from then on: Note
[Numbers that change] in ``numbers.py``. A number that an operator takes no tensor for is burned in each
time, a few times.

With sizes that change, all sizes are symbols. What was decided by their values, or by those of numbers, while
the graph was traced is looked at before each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from collage_fx.capture.segment import Function
from collage_fx.torch_compat import BurnedIn, SymbolicScope, compiling

#: From a graph and the values of its inputs to a callable of such values.
CompileGraph = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Compiled:
    """Code for functions that differ in tensors, in some numbers, and perhaps in sizes.

    Attributes:
        code: takes the tensors, then the numbers that are inputs as 0-d tensors, then the sizes.
        constants: the numbers that are part of it, by position.
        inputs: the positions of the others.
        burned_in: the positions of numbers that could not be made inputs.
        takes_sizes: whether sizes are inputs.
        holds: whether what was decided while it was traced is so for other inputs; None if nothing was.
    """

    code: Callable[..., Any]
    constants: dict[int, float]
    inputs: tuple[int, ...]
    burned_in: frozenset[int]
    takes_sizes: bool
    holds: Callable[[Sequence[Any]], bool] | None

    def others_in(self, numbers: Sequence[float]) -> set[int]:
        """The positions of numbers that are others than the constants; NaN is NaN."""
        return {
            i
            for i, constant in self.constants.items()
            if numbers[i] != constant and not (math.isnan(numbers[i]) and math.isnan(constant))
        }

    def fits(self, function: Function) -> bool:
        numbers = function.numbers
        if self.others_in(numbers):
            return False
        if self.holds is None:
            return True
        return self.holds([*function.tensors, *(numbers[i] for i in self.inputs), *self._sizes(function)])

    def __call__(self, function: Function) -> None:
        numbers: Sequence[torch.Tensor] = ()
        if self.inputs:
            values = [function.numbers[i] for i in self.inputs]
            numbers = torch.tensor(values, dtype=torch.float64).unbind()
        self.code(*function.tensors, *numbers, *self._sizes(function))

    def _sizes(self, function: Function) -> Sequence[int]:
        return function.sizes if self.takes_sizes else ()


def compiled_for(
    function: Function, compile_graph: CompileGraph, last: Compiled | None, *, takes_sizes: bool
) -> Compiled:
    """Code for a function, and for all others whose numbers differ where its own do from ``last``'s.

    Args:
        function: to be compiled.
        compile_graph: how.
        last: what was compiled before for a function of the same form, if anything was.
        takes_sizes: whether to compile it for any sizes.
    """
    numbers = function.numbers
    changed: set[int] = set()
    burned_in: frozenset[int] = frozenset()
    if last is not None:
        changed = {*last.inputs, *last.others_in(numbers)}
        burned_in = last.burned_in
    while True:
        inputs = tuple(i for i in sorted(changed - burned_in) if math.isfinite(numbers[i]))
        scope = SymbolicScope()
        values = [*(numbers[i] for i in inputs), *(function.sizes if takes_sizes else ())]
        try:
            with compiling(), scope:
                tensors = [scope.input(tensor, has_symbols=takes_sizes) for tensor in function.tensors]
                module = function.module(inputs, takes_sizes=takes_sizes)
                code = compile_graph(module, [*tensors, *map(scope.input, values)])
        except BurnedIn as found:
            found_here = {i for i, s in zip(inputs, scope.floats, strict=True) if s in found.symbols}
            assert found_here, "only what is an input can be burned in"
            burned_in |= found_here
            continue
        constants = {i: value for i, value in enumerate(numbers) if i not in inputs}
        return Compiled(code, constants, inputs, burned_in, takes_sizes, scope.guard())
