"""The pass by which numbers that divide within a denominator multiply the quotient instead.

    x / (a/(c s) + e/s)   ->   x / (a + e c) * (c s)          x, a: tensors; c, e, s: numbers, 0-d
    1 / (a/(c s) + e/s)   ->   (c s) / (a + e c)

Theorem. Where none of them is 0 or infinite the two are equal: the denominator has been multiplied by c s.
Where s is 0 the first is 0/0 if a is 0; the second is 0, as what both stand for, ``x / (a/c + e) * s``. Where
c is 0 they are the same for finite e, NaN included. Terms of which each is divided by a number that the other
is not, a/c + b/s, are left as they are: where both numbers are 0 there would be a new 0/0.

That is how torch.optim's Adam divides by its learning rate in compiled steps, eagerly it multiplies by it:
``sqrt(v) / (c * s) + eps / s``, with the step size s and a bias correction c. A warm-up begins at 0, and v is
0 where there has been no gradient yet.

It is also less work: of the two or three divisions of an element one is left, and a multiplication. Operands
in a 16-bit format are read in float32 and the quotient is rounded once, like that of torch's ``addcdiv``:
float16 holds no number as small as e c.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from collage_fx.graph import GraphEditor, StepProgram, has_elements, is_conversion, tensor_value
from collage_fx.numerics import is_low_precision
from collage_fx.passes.base import Pass

aten = torch.ops.aten

#: Operators that divide, by their last argument.
DIVISIONS = (aten.div.Tensor, aten.reciprocal.default)

#: Factors of a number, with their multiplicities: 0-d nodes and Python numbers.
Factors = Counter[Any]


@dataclass(frozen=True)
class ClearDenominators(Pass):
    """Rewrites ``x / (a/c + e)`` as ``x / (a + e c) * c``, for numbers c that the graph computes."""

    name = "clear-denominators"
    after = ("normalize",)

    def applies_to(self, program: StepProgram) -> bool:
        return any(map(_divisor, program.gm.graph.nodes))

    def run(self, program: StepProgram) -> str:
        editor = GraphEditor(program.gm, self.name)
        reader = _Reader(editor)
        cleared = sum(_clear(editor, reader, node) for node in list(editor.graph.nodes))
        editor.finish()
        return f"{cleared} denominators"


def _divisor(node: Node) -> Node | None:
    """The tensor that a division divides by, if it is one and has elements."""
    if node.target not in DIVISIONS or not has_elements(node.args[-1]):
        return None
    divisor = node.args[-1]
    assert isinstance(divisor, Node)
    return divisor


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
    node.replace_all_uses_with(result)
    editor.graph.erase_node(node)
    return True


@dataclass(frozen=True)
class _Scaled:
    """A value as ``core * numerators / denominators``, or minus that; a number has no core."""

    core: Node | None = None
    numerators: Factors = field(default_factory=Counter)
    denominators: Factors = field(default_factory=Counter)
    is_negative: bool = False

    def __neg__(self) -> _Scaled:
        return replace(self, is_negative=not self.is_negative)

    def __mul__(self, other: _Scaled) -> _Scaled:
        return _Scaled(
            self.core or other.core,
            self.numerators + other.numerators,
            self.denominators + other.denominators,
            self.is_negative != other.is_negative,
        )

    def inverse(self) -> _Scaled:
        assert self.core is None
        return replace(self, numerators=self.denominators, denominators=self.numerators)


class _Reader:
    """Takes the numbers out of a denominator: out of products, quotients and sums of them."""

    def __init__(self, editor: GraphEditor) -> None:
        self.editor = editor
        self._read: dict[Node, _Scaled] = {}

    def read(self, value: Any) -> _Scaled:
        if not isinstance(value, Node):
            factors: Factors = Counter() if abs(value) == 1 else Counter([abs(value)])
            return _Scaled(numerators=factors, is_negative=math.copysign(1, value) < 0)
        if value not in self._read:
            self._read[value] = self._operation(value) or self._whole(value)
        return self._read[value]

    def _whole(self, node: Node) -> _Scaled:
        return _Scaled(core=node) if has_elements(node) else _Scaled(numerators=Counter([node]))

    def _operation(self, node: Node) -> _Scaled | None:
        """The core and the factors of an operation with a number; None for any other operation."""
        operands = node.args
        if node.target is aten.neg.default:
            return -self.read(operands[0])
        if has_elements(node) and node.target in (aten.add.Tensor, aten.sub.Tensor):
            return None if node.kwargs else self._sum(node)
        if node.target is aten.mul.Tensor and any(map(_is_number, operands)):
            return self.read(operands[0]) * self.read(operands[1])
        if node.target is aten.div.Tensor and _is_number(operands[1]):
            return self.read(operands[0]) * self.read(operands[1]).inverse()
        if _is_number(node) and node.target is aten.reciprocal.default:
            return self.read(operands[0]).inverse()
        if is_conversion(node) and (_is_number(operands[0]) or _is_widened(node)):
            return self.read(operands[0])
        return None

    def _sum(self, node: Node) -> _Scaled | None:
        """The sum ``a/c + e`` as ``(a + e c) / c``; None for a sum that is left as it is.

        That is also a sum which is more than a denominator: there would be two of it to compute.
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
    """The product of factors: a 0-d node, or a Python number where all factors are Python numbers.

    It is computed in the dtype of the elements that it goes with: a number that a scheduler changes, float64
    in the graph, gives the same bits as one that is known while compiling.
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
    """A node of a 16-bit format converted to float32; any other node as it is."""
    return editor.convert(node, _float32_or_wider(node))


def _float32_or_wider(node: Any) -> torch.dtype:
    value = tensor_value(node)
    assert value is not None
    return torch.float32 if is_low_precision(value.dtype) else value.dtype


def _are_computed(factors: Factors) -> bool:
    """Whether one of the factors is a node, so that their product is not known while compiling."""
    return any(isinstance(factor, Node) for factor in factors)


def _is_widened(conversion: Node) -> bool:
    """Whether a conversion is of a 16-bit format to a wider one, which holds all its values."""
    source, target = (tensor_value(value) for value in (conversion.args[0], conversion))
    assert source is not None
    assert target is not None
    return is_low_precision(source.dtype) and target.dtype in (torch.float32, torch.float64)


def _is_number(value: Any) -> bool:
    """Whether a value is a Python number or a 0-d tensor of floating-point numbers."""
    tensor = tensor_value(value)
    if tensor is None:
        return isinstance(value, (int, float))
    return tensor.dim() == 0 and tensor.is_floating_point()
