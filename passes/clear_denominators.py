"""The pass that moves numbers that divide within a denominator out of it, as factors of the quotient.

    x / (a/(c s) + e/s)   ->   x / (a + e c) * (c s)          x, a: tensors; c, e, s: numbers, 0-d
    1 / (a/(c s) + e/s)   ->   (c s) / (a + e c)

Theorem. If no number is 0 or infinite, both sides are equal: the denominator was multiplied by c s. If s is 0
and a is 0, the left side is 0/0, and the right side is 0, like the intended value ``x / (a/c + e) * s``. If c
is 0, both sides are equal for finite e, NaN included. A sum whose terms are divided by different numbers, a/c
+ b/s, is left unchanged: with both numbers 0 the rewrite would introduce a 0/0.

torch.optim's Adam divides by its learning rate like this in compiled steps (eagerly it multiplies by it):
``sqrt(v) / (c * s) + eps / s``, with the step size s and a bias correction c. A warm-up begins at s = 0, and
v is 0 for elements without a gradient so far.

The result also needs less work: per element one division and one multiplication instead of two or three
divisions. Operands in a 16-bit format are read in float32 and the quotient is rounded once, as by torch's
``addcdiv``: float16 holds no number as small as e c.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from collage_fx import graph
from collage_fx.graph import GraphEditor, StepProgram
from collage_fx.passes.base import Pass

aten = torch.ops.aten

#: Operators that divide, by their last argument.
DIVISIONS = (aten.div.Tensor, aten.reciprocal.default)

#: Factors of a number, with their multiplicities: 0-d nodes and Python numbers.
Factors = Counter[Any]


class ClearDenominators(Pass):
    """Pass that rewrites ``x / (a/c + e)`` as ``x / (a + e c) * c``, for numbers c computed in the graph."""

    name = "clear-denominators"
    after = ("normalize",)

    def applies_to(self, program: StepProgram) -> bool:
        return any(map(_divisor, program.gm.graph.nodes))

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        reader = _Reader(editor)
        cleared = sum(_clear(editor, reader, node) for node in list(editor.graph.nodes))
        return f"{cleared} denominators"


def _divisor(node: Node) -> Node | None:
    """Return the tensor with elements that a division divides by; None for other nodes."""
    divisor: Any = node.args[-1] if node.target in DIVISIONS else None
    return divisor if graph.has_elements(divisor) else None


def _clear(editor: GraphEditor, reader: _Reader, node: Node) -> bool:
    divisor = _divisor(node)
    if divisor is None:
        return False
    with editor.graph.inserting_before(node):
        read = reader.read(divisor)
        if not _are_computed(read.denominators):
            return False
        core = _in_float32(editor, read.core)
        dividend = [_in_float32(editor, operand) for operand in node.args[:-1]]
        dtype = core.meta["val"].dtype
        scale = _product(editor, read.denominators, dtype)
        if read.numerators:
            scale = editor.call(aten.div.Tensor, scale, _product(editor, read.numerators, dtype))
        if read.is_negative:
            scale = editor.call(aten.neg.default, scale)
        if dividend:
            quotient = editor.call(aten.div.Tensor, *dividend, core)
            result = editor.call(aten.mul.Tensor, quotient, scale)
        else:
            result = editor.call(aten.div.Tensor, scale, core)
        result = editor.convert(result, node.meta["val"].dtype)
    editor.replace(node, result)
    editor.graph.erase_node(node)
    return True


@dataclass(frozen=True)
class _Scaled:
    """Value ``core * numerators / denominators``, or its negative; a number has no core."""

    core: Node | None = None
    numerators: Factors = field(default_factory=Counter)
    denominators: Factors = field(default_factory=Counter)
    is_negative: bool = False

    def __neg__(self) -> _Scaled:
        return replace(self, is_negative=not self.is_negative)

    def __mul__(self, other: _Scaled) -> _Scaled:
        factors = self.numerators + other.numerators, self.denominators + other.denominators
        return _Scaled(self.core or other.core, *factors, self.is_negative != other.is_negative)

    def inverse(self) -> _Scaled:
        assert self.core is None
        return replace(self, numerators=self.denominators, denominators=self.numerators)


class _Reader:
    """Reader that takes numbers out of a denominator: out of its products, quotients and sums."""

    def __init__(self, editor: GraphEditor) -> None:
        self.editor = editor
        self._read: dict[Node, _Scaled] = {}

    def read(self, value: Any) -> _Scaled:
        if not isinstance(value, Node):
            factors: Factors = Counter() if abs(value) == 1 else Counter([abs(value)])
            return _Scaled(numerators=factors, is_negative=math.copysign(1, value) < 0)
        if value not in self._read:
            whole = _Scaled(core=value) if graph.has_elements(value) else _Scaled(numerators=Counter([value]))
            self._read[value] = self._operation(value) or whole
        return self._read[value]

    def _operation(self, node: Node) -> _Scaled | None:
        """Return the core and the factors of an operation with a number; None for other operations."""
        operands = node.args
        if node.target is aten.neg.default:
            return -self.read(operands[0])
        if graph.has_elements(node) and node.target in (aten.add.Tensor, aten.sub.Tensor):
            return None if node.kwargs else self._sum(node)
        if node.target is aten.mul.Tensor and any(map(_is_number, operands)):
            return self.read(operands[0]) * self.read(operands[1])
        if node.target is aten.div.Tensor and _is_number(operands[1]):
            return self.read(operands[0]) * self.read(operands[1]).inverse()
        if _is_number(node) and node.target is aten.reciprocal.default:
            return self.read(operands[0]).inverse()
        if graph.is_conversion(node):
            # From a 16-bit format to a wider format, which holds all its values.
            is_wide = node.meta["val"].dtype in (torch.float32, torch.float64)
            is_widened = is_wide and graph.is_low_precision_tensor(operands[0])
            return self.read(operands[0]) if is_widened or _is_number(operands[0]) else None
        return None

    def _sum(self, node: Node) -> _Scaled | None:
        """Return the sum ``a/c + e`` as ``(a + e c) / c``; None for a sum that is left unchanged.

        A sum that is also used outside of denominators is left unchanged: it would have to be computed twice.
        """
        is_denominator = all(_divisor(user) is node for user in node.users)
        if len(node.users) > 1 and not is_denominator:
            return None
        left, right = (self.read(operand) for operand in node.args)
        if node.target is aten.sub.Tensor:
            right = -right
        denominators = left.denominators | right.denominators
        if denominators not in (left.denominators, right.denominators) or not _are_computed(denominators):
            return None
        numerators = left.numerators & right.numerators
        terms = []
        for term in (left, right):
            factors = (term.numerators - numerators) + (denominators - term.denominators)
            terms.append(self._term(term.core, factors, _float32_or_wider(node)))
        signs_agree = left.is_negative == right.is_negative
        core = self.editor.call(aten.add.Tensor if signs_agree else aten.sub.Tensor, *terms)
        return _Scaled(core, numerators, denominators, left.is_negative)

    def _term(self, core: Node | None, factors: Factors, dtype: torch.dtype) -> Any:
        if core is None:
            return _product(self.editor, factors, dtype)
        tensor = _in_float32(self.editor, core)
        if not factors:
            return tensor
        return self.editor.call(aten.mul.Tensor, tensor, _product(self.editor, factors, dtype))


def _product(editor: GraphEditor, factors: Factors, dtype: torch.dtype) -> Any:
    """Return the product of factors: a 0-d node, or a Python number if all factors are Python numbers.

    It is computed in the dtype of the elements that it multiplies: a number that a scheduler changes (float64
    in the graph) then gives the same bits as a number known at compile time.
    """
    each = list(factors.elements())
    number = math.prod(factor for factor in each if not isinstance(factor, Node))
    nodes = [editor.convert(factor, dtype) for factor in each if isinstance(factor, Node)]
    if not nodes:
        return number
    product, *others = nodes
    for other in others if number == 1 else (*others, number):
        product = editor.call(aten.mul.Tensor, product, other)
    return product


def _in_float32(editor: GraphEditor, node: Any) -> Node:
    """Return a node of a 16-bit format converted to float32; any other node unchanged."""
    return editor.convert(node, _float32_or_wider(node))


def _float32_or_wider(node: Any) -> torch.dtype:
    return torch.float32 if graph.is_low_precision_tensor(node) else node.meta["val"].dtype


def _are_computed(factors: Factors) -> bool:
    """Return whether a factor is a node, so that the product is unknown at compile time."""
    return any(isinstance(factor, Node) for factor in factors)


def _is_number(value: Any) -> bool:
    """Return whether a value is a Python number or a 0-d tensor of floating-point numbers."""
    tensor = graph.tensor_value(value)
    if tensor is None:
        return isinstance(value, (int, float))
    return tensor.dim() == 0 and tensor.is_floating_point()
