"""A step lowered part by part, equal parts by one kernel: ``share-kernels``.

The phase between the passes and Inductor. What a part is, and why parts may run one after another, is in
Note [Parts of a step] (``partition.py``); when two of them are one kernel in Note [One kernel for equal
parts] (``kernels.py``). Reports show the whole graph. It is no pass: its result is
no graph but a plan of calls.

A step's host time is that of a loop over the plan: a call of Inductor's generated code for each part, about
3 microseconds a tensor for AdamW. That the arguments are laid out as the code expects is looked at before:
``layouts.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from collage_fx.graph import is_copy_to_input, placeholders
from collage_fx.kernels import MANY, Rule, compile_rule, rule_of
from collage_fx.partition import Part, parts_of
from collage_fx.torch_compat import (
    inductor_compile_inner,
    innermost_callable,
    prepare_cpp_compiler,
)

__all__ = ["Kernel", "StepInParts", "lower_in_parts"]

#: A compiled function of one list of arguments.
Kernel = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class _Call:
    """A part of the step, its rule and the rule's kernel."""

    part: Part
    rule: Rule
    kernel: Kernel


def lower_in_parts(gm: GraphModule, *, always: bool = False) -> StepInParts | None:
    """Compile a graph a part at a time, equal parts once; None where that can't be done or saves nothing.

    On the CPU. On a GPU each part would be a launch of its own: there the graph is compiled as one, in which
    Inductor can combine them, and CUDA graphs (``mode="reduce-overhead"``) record it as one.

    Args:
        gm: the rewritten graph.
        always: also where no two parts of the graph are equal.
    """
    values = [node.meta["val"] for node in placeholders(gm.graph)]
    if any(isinstance(value, Tensor) and not _is_plain(value) for value in values):
        return None
    parts = parts_of(gm.graph)
    if parts is None:
        return None
    rules = [rule_of(part) for part in parts]
    if not (always or any(rule.flat for rule in rules) or len({rule.key for rule in rules}) < len(rules)):
        return None
    kernels: dict[Hashable, Kernel] = {}
    calls: list[_Call] = []
    for part, rule in zip(parts, rules, strict=True):
        many = rule.elements >= MANY and torch.get_num_threads() > 1
        key = (rule.key, many)
        if key not in kernels:
            kernel = compile_rule(rule, _compile, many=many)
            if kernel is None:
                return None
            kernels[key] = kernel
        calls.append(_Call(part, rule, kernels[key]))
    return _Planner(gm, calls).step()


def _is_plain(value: Tensor) -> bool:
    """Whether a tensor is on the CPU and its sizes and strides are known numbers."""
    return value.device.type == "cpu" and all(
        isinstance(number, int) for number in (*value.shape, *value.stride())
    )


def _compile(gm: GraphModule, inputs: Sequence[Any]) -> Kernel:
    prepare_cpp_compiler().result()
    return innermost_callable(inductor_compile_inner(gm, inputs, is_inference=True))


class StepInParts:
    """Calls the kernels of a step's parts, in AOTAutograd's calling convention.

    That the arguments have the layouts that the kernels were made for is the caller's to see to.

    A step works on a list of values: its arguments, then constants, then memory for results, then numbers
    that are computed in Python. All else names places in that list.

    Args:
        constants: lengths, and tensors that are attributes of the graph.
        results: size, stride, dtype and device of tensors to be allocated.
        numbers: functions and their operands: ``_Place`` or constant.
        calls: kernels, and the places of their arguments.
        outputs: places of what is returned, None for None.
    """

    _boxed_call = True

    def __init__(
        self,
        constants: Sequence[Any],
        results: Sequence[tuple[Any, ...]],
        numbers: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]],
        calls: Sequence[tuple[Kernel, tuple[int, ...]]],
        outputs: Sequence[int | None],
    ) -> None:
        self.constants = constants
        self.results = results
        self.numbers = numbers
        self.calls = calls
        self.outputs = outputs

    def __call__(self, arguments: list[Any]) -> Any:
        values = [*arguments, *self.constants]
        arguments.clear()
        for size, stride, dtype, device in self.results:
            values.append(torch.empty_strided(size, stride, dtype=dtype, device=device))
        for function, operands in self.numbers:
            values.append(function(*(values[o.index] if isinstance(o, _Place) else o for o in operands)))
        for kernel, places in self.calls:
            kernel([values[place] for place in places])
        return tuple(None if place is None else values[place] for place in self.outputs)


@dataclass(frozen=True)
class _Place:
    """A place in the list of a step's values, where a constant could stand."""

    index: int


class _Planner:
    """Gives the values of a step their places."""

    def __init__(self, gm: GraphModule, calls: Sequence[_Call]) -> None:
        self.gm = gm
        self.calls = calls
        self.arguments = placeholders(gm.graph)
        self.places: dict[Node | int, int] = {}
        keys: list[Node | int] = [*self.arguments, *self._lengths(), *self._attributes()]
        keys += [*self._results(), *self._numbers()]
        for key in keys:
            self.places.setdefault(key, len(self.places))

    def step(self) -> StepInParts:
        attributes = [getattr(self.gm, str(node.target)) for node in self._attributes()]
        results = [node.meta["val"] for node in self._results()]
        return StepInParts(
            [*self._lengths(), *attributes],
            [(tuple(v.shape), tuple(v.stride()), v.dtype, v.device) for v in results],
            [(node.target, tuple(map(self._operand, node.args))) for node in self._numbers()],  # type: ignore[misc]
            [(call.kernel, self._places_of(call)) for call in self.calls],
            [self._output(value) for value in _outputs(self.gm.graph)],
        )

    def _lengths(self) -> list[int]:
        return list(dict.fromkeys(call.rule.elements for call in self.calls if call.rule.flat))

    def _attributes(self) -> list[Node]:
        return list(self.gm.graph.find_nodes(op="get_attr"))

    def _results(self) -> list[Node]:
        return list(dict.fromkeys(value for call in self.calls for value in call.part.results))

    def _numbers(self) -> list[Node]:
        """What is computed on the way to the symbolic numbers that are returned, operands first."""
        wanted = {value for value in _outputs(self.gm.graph) if _is_computed_in_python(value)}
        for node in reversed(self.gm.graph.nodes):
            if node in wanted:
                wanted.update(filter(_is_computed_in_python, node.all_input_nodes))
        return [node for node in self.gm.graph.nodes if node in wanted]

    def _operand(self, argument: Any) -> Any:
        return _Place(self.places[argument]) if isinstance(argument, Node) else argument

    def _places_of(self, call: _Call) -> tuple[int, ...]:
        length = [self.places[call.rule.elements]] if call.rule.flat else []
        inputs = [self.places[node] for node in (*call.rule.operands, *call.part.results)]
        return (*length, *inputs)

    def _output(self, value: Any) -> int | None:
        if value is None:
            return None
        return self.places[value.args[0] if is_copy_to_input(value) else value]


def _outputs(graph: Graph) -> list[Any]:
    return list(pytree.tree_leaves(graph.output_node().args))


def _is_computed_in_python(value: Any) -> bool:
    return (
        isinstance(value, Node)
        and value.op == "call_function"
        and isinstance(value.meta["val"], (torch.SymInt, torch.SymFloat))
    )
