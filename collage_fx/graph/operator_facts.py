"""Table of operator properties that torch's own metadata lacks, one row per operator.

torch itself says whether an overload is elementwise, a reduction or a view, draws random numbers or writes to
its arguments (``torch.Tag``, its schema). The functions below ask torch first; :data:`OPERATORS` holds the
rest. To support another operator, add a line there.

An operator without a row and without such a tag is *opaque*: its operands and results keep the dtypes that it
was captured with, and no error term passes through it. ``tests/graph/test_operator_facts.py`` runs each row
on the samples of torch's own tests, and lists the opaque operators that a step may contain.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from collage_fx.graph.nodes import has_elements, is_copy_to_input, is_number, tensor_value, unconverted
from collage_fx.numerics import FloatFormat
from collage_fx.torch_compat import OpOverload, schema_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Facts:
    """Properties of an operator: a row of :data:`OPERATORS`.

    Attributes:
        moves: Whether each element of the result is an element of an operand, its negative, or zero, at an
            index that no element's value decides. Always True for views, which need no row.
        passes: Position of the argument whose elements the result has, in another shape, dtype or memory.
        exact: Whether results are on the operands' storage grid, although something is computed.
        transparent: Whether it means the same on float32 operands as on low-precision ones, except rounding.
            None: True if it is elementwise, moves elements, reduces or factorizes.
        fills: Name of the argument that every element of the result equals.
        composite: Eager function of elementary operations that equals it in exact arithmetic.
        with_number: The same for a call with a symbolic number, which torch would turn into a constant.
        each: Function that ``_foreach_NAME`` applies to an element of its lists, if it is neither the
            composite of ``aten.NAME`` nor ``torch.NAME``. A ``partial`` of an operator is called for every
            element: its work depends on the element's shape, so that a single trace does not serve all.
        product: Operator of the product in a sum ``beta x + alpha product(a, b)``.
        function: The same function for SymPy expressions, if it is elementwise.
        sign: The infix operator of Python and C++, such as ``+``.
        divides: Whether it raises an exception if an integer divisor is zero.
        cuts_bits: Whether bits of an integer operand may be missing from its result.
    """

    moves: bool = False
    passes: int | None = None
    exact: bool = False
    transparent: bool | None = None
    fills: str | None = None
    composite: Callable[..., Any] | None = None
    with_number: Callable[..., Any] | None = None
    each: Callable[..., Any] | None = None
    product: Callable[..., Any] | None = None
    function: Callable[..., sympy.Expr] | None = None
    sign: str = ""
    divides: bool = False
    cuts_bits: bool = False


OPAQUE, MOVES, TRANSPARENT = Facts(), Facts(moves=True), Facts(transparent=True)
#: Facts of operators that return their operand, in another shape or in memory of its own.
SAME = Facts(moves=True, passes=0)


def _scaled(x: Any, factor: Any) -> Any:
    return x if _is_one(factor) else x * factor


def _is_one(number: Any) -> bool:
    """Return whether a value is the Python number 1, not a symbol that happens to be 1."""
    return isinstance(number, (int, float)) and number == 1


def _as_tensor(number: Any, like: Tensor) -> Tensor:
    """Return a number as a 0-d tensor, made by an operation that accepts a symbolic float."""
    return torch.zeros((), dtype=torch.float64, device=like.device) + number


def _clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    if min is not None:
        x = torch.maximum(x, _as_tensor(min, x).to(x.dtype))
    return x if max is None else torch.minimum(x, _as_tensor(max, x).to(x.dtype))


def _pow(base: Any, exponent: Any) -> Tensor:
    if isinstance(base, Tensor):
        return torch.pow(base, _as_tensor(exponent, base))
    return torch.pow(_as_tensor(base, exponent), exponent)


def _maximum(x: Tensor, y: Any) -> Tensor:
    return torch.maximum(x, y) if isinstance(y, Tensor) else torch.clamp(x, min=y)


def _minimum(x: Tensor, y: Any) -> Tensor:
    return torch.minimum(x, y) if isinstance(y, Tensor) else torch.clamp(x, max=y)


def _rows(facts: Facts, names: str) -> dict[str, Facts]:
    return dict.fromkeys(names.split(), facts)


#: Rows by the name of an operator, or of an overload that differs from the operator's others.
OPERATORS: dict[str, Facts] = {
    # arithmetic
    "aten.add": Facts(composite=lambda x, y, alpha=1: x + _scaled(y, alpha), function=operator.add, sign="+"),
    "aten.sub": Facts(composite=lambda x, y, alpha=1: x - _scaled(y, alpha), function=operator.sub, sign="-"),
    "aten.mul": Facts(function=operator.mul, sign="*"),
    "aten.div": Facts(function=operator.truediv, sign="/"),
    "aten.true_divide": Facts(function=operator.truediv, sign="/"),
    **_rows(Facts(divides=True), "aten.div.Scalar_mode aten.div.Tensor_mode aten.floor_divide aten.fmod"),
    **_rows(Facts(divides=True), "aten.remainder prims.div prims.fmod prims.remainder"),
    "aten.neg": Facts(moves=True, function=operator.neg),
    "aten.abs": Facts(exact=True, function=sympy.Abs),
    "aten.sign": Facts(function=sympy.sign),
    "aten.reciprocal": Facts(function=lambda x: 1 / x),
    "aten.sqrt": Facts(function=sympy.sqrt),
    "aten.rsqrt": Facts(function=lambda x: 1 / sympy.sqrt(x)),
    "aten.exp": Facts(function=sympy.exp),
    "aten.log": Facts(function=sympy.log),
    "aten.pow": Facts(function=operator.pow, with_number=_pow),
    "aten.maximum": Facts(function=sympy.Max),
    "aten.minimum": Facts(function=sympy.Min),
    "aten.nextafter": Facts(transparent=False),
    "collage_fx.phases": Facts(transparent=False),  # depends on indices in memory, which a cast loses
    "aten.clamp": Facts(with_number=_clamp),
    "aten.clamp_min": Facts(with_number=lambda x, bound: _clamp(x, min=bound)),
    "aten.clamp_max": Facts(with_number=lambda x, bound: _clamp(x, max=bound)),
    # composites (y - x in rsub would be rsub again, of a number y)
    "aten.rsub": Facts(composite=lambda x, y, alpha=1: -_scaled(x, alpha) + y),
    "aten.addcmul": Facts(composite=lambda x, a, b, value=1: x + _scaled(a * b, value)),
    "aten.addcdiv": Facts(composite=lambda x, a, b, value=1: x + _scaled(a / b, value)),
    "aten.lerp": Facts(composite=lambda x, end, w: x + _scaled(end - x, w)),
    "prims.fma": Facts(composite=lambda a, b, c: a * b + c),
    "aten.addmm.default": Facts(product=aten.mm.default),
    "aten.addmv.default": Facts(product=aten.mv.default),
    "aten.baddbmm.default": Facts(product=aten.bmm.default),
    # bits
    **_rows(Facts(cuts_bits=True), "aten.bitwise_and aten.bitwise_right_shift"),
    "aten.__lshift__": Facts(composite=torch.bitwise_left_shift),
    "aten.__rshift__": Facts(composite=torch.bitwise_right_shift),
    "aten.view.dtype": OPAQUE,
    # elements at other indices
    **_rows(SAME, "aten.alias aten.clone aten.detach aten.lift_fresh aten.lift_fresh_copy"),
    **_rows(SAME, "aten.expand aten.squeeze aten.unsqueeze aten.view aten._unsafe_view"),
    **_rows(Facts(passes=0), "aten._to_copy prims.convert_element_type prims.copy_strided prims.device_put"),
    "aten.copy": Facts(passes=1),
    **_rows(MOVES, "aten.cat aten.constant_pad_nd aten.flip aten.gather aten.index aten.index_select"),
    **_rows(MOVES, "aten.embedding aten.repeat aten.roll aten.stack aten._unsafe_index prims.rev"),
    **_rows(MOVES, "aten.as_strided_scatter aten.diagonal_scatter aten.select_scatter"),
    **_rows(TRANSPARENT, "aten.index_add aten.index_copy aten.index_put aten._unsafe_index_put"),
    **_rows(TRANSPARENT, "aten.index_reduce aten.masked_scatter"),
    **_rows(TRANSPARENT, "aten.scatter aten.scatter_add aten.scatter_reduce"),
    # running sums and the like, elements in order
    **_rows(TRANSPARENT, "aten.cummax aten.cummin aten.cumprod aten.cumsum aten.logcumsumexp"),
    **_rows(TRANSPARENT, "aten.kthvalue aten.median aten.mode aten.nanmedian aten.sort aten.topk"),
    # tensors made from numbers
    "aten.full": Facts(fills="fill_value", with_number=lambda size, x, **k: torch.zeros(size, **k) + x),
    "aten.full_like": Facts(fills="fill_value", with_number=lambda y, x, **k: torch.zeros_like(y, **k) + x),
    "aten.scalar_tensor": Facts(fills="s", with_number=lambda x, **k: torch.zeros((), **k) + x),
    "aten.fill": Facts(with_number=lambda y, x: torch.zeros_like(y) + x),
    "aten.masked_fill": Facts(with_number=lambda y, m, x: torch.where(m, _as_tensor(x, y).to(y.dtype), y)),
    # lists
    "aten._foreach_copy": Facts(each=partial(aten.copy.default)),
    "aten._foreach_max": Facts(each=torch.amax),
    "aten._foreach_maximum": Facts(each=_maximum),
    "aten._foreach_minimum": Facts(each=_minimum),
    "aten._foreach_mm": Facts(each=partial(aten.mm.default)),
    "aten._foreach_norm": Facts(
        each=lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype)
    ),
    "aten._foreach_powsum": Facts(each=lambda x, ord=2, dtype=None: (x.abs() ** ord).sum(dtype=dtype)),
    "aten._foreach_zero": Facts(each=partial(aten.full_like.default, fill_value=0)),
}


@functools.cache
def facts_of(target: Any) -> Facts:
    """Return the row of an operator, or of any other target of a node."""
    row = OPERATORS.get(str(target)) or OPERATORS.get(str(getattr(target, "overloadpacket", target)))
    if row is not None or not isinstance(target, OpOverload):
        return row or OPAQUE
    return MOVES if target.is_view or torch.Tag.view_copy in target.tags else OPAQUE


def named_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an overload, by name."""
    names = (argument.name for argument in schema_of(target).arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


# Elements of results. ---------------------------------------------------------------------------------------


@functools.cache
def is_pointwise(target: Any) -> bool:
    """Return whether each element of the result depends only on the operands' elements at the same index.

    torch tags the operators of ATen but not ``prims``, so a ``prims`` operator has the tag of its namesake.
    """
    if not isinstance(target, OpOverload):
        return False
    namespace, name = schema_of(target).name.split("::")
    of_aten = getattr(aten, name, None) if namespace == "prims" else None
    same = [] if of_aten is None else [getattr(of_aten, overload) for overload in of_aten.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in (target, *same))


def is_elementwise(node: Node) -> bool:
    """Return whether each element of the result depends only on numbers and on elements at the same index.

    Assumes that operands and result have equal shapes and strides.
    """
    if is_number(node):  # computed from numbers; a reduction's operand is not a number
        return all(map(is_number, node.all_input_nodes))
    if node.target in (aten.view.default, aten._unsafe_view.default):  # of a number: a single element
        return not is_number(node.all_input_nodes[0])
    facts = facts_of(node.target)
    is_same = facts.moves and facts.passes is not None
    return is_same or facts.fills is not None or is_pointwise(node.target)


def first_not_elementwise(nodes: Iterable[Node]) -> Node | None:
    """Return the first operation of a functional graph's nodes that cannot be run on pieces of its tensors.

    It combines elements at different indices, or tensors of different shapes.
    """
    for node in nodes:
        if node.op != "call_function" or is_copy_to_input(node):
            continue
        values = [each.meta["val"] for each in (node, *node.all_input_nodes) if has_elements(each)]
        # As text: symbolic sizes cannot be hashed, but equal expressions have equal text.
        layouts = {(str(value.shape), str(value.stride())) for value in values}
        shapes = {shape for shape, _ in layouts}
        if not is_elementwise(node) or len(layouts if facts_of(node.target).moves else shapes) > 1:
            return node
    return None


_MATRIX_PRODUCTS = {row.product for row in OPERATORS.values() if row.product is not None}


def is_matrix_product(target: Any) -> bool:
    """Return whether an operator is a product of matrices, alone or inside a sum."""
    return target in _MATRIX_PRODUCTS or facts_of(target).product is not None


def is_movement(node: Node) -> bool:
    """Return whether an operation only moves elements or their negatives; padding with a number does not."""
    return facts_of(node.target).moves and not any(
        named_arguments(node.target, node.args, node.kwargs).get(name) for name in _scalars(node.target)
    )


@functools.cache
def _scalars(target: Any) -> tuple[str, ...]:
    """Return the names of an overload's arguments that are numbers to calculate with, not dimensions."""
    return tuple(each.name for each in schema_of(target).arguments if "number" in str(each.type))


def keeps_grid(node: Node) -> bool:
    """Return whether results need no rounding: they are on the storage grid if operands and numbers are."""
    is_filled = isinstance(number_filling(node), (int, float))
    return is_filled or facts_of(node.target).exact or is_movement(node)


def filled_on_grid(node: Node, fmt: FloatFormat) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an operation's arguments with the number that fills its result rounded to a storage grid."""

    def on_grid(name: str, value: Any) -> Any:
        is_filling = name == facts_of(node.target).fills and isinstance(value, (int, float))
        return fmt.round(value) if is_filling else value

    target: Any = node.target
    names = (argument.name for argument in schema_of(target).arguments)
    kwargs = {name: on_grid(name, value) for name, value in node.kwargs.items()}
    return tuple(map(on_grid, names, node.args)), kwargs


def is_transparent(target: Any) -> bool:
    """Return whether an operation on float32 operands means the same as on low precision, except rounding."""
    facts = facts_of(target)
    if facts.transparent is not None or not isinstance(target, OpOverload):
        return bool(facts.transparent)
    if facts.moves or facts.fills is not None or is_pointwise(target):
        return True
    return torch.Tag.reduction in target.tags or factorizes(target)


def passed_operand(node: Any) -> Node | None:
    """Return the operand whose elements a node has, in another shape, dtype or memory; None if there is none.

    None for a cast of floats to integers or to an 8-bit format, which changes the values. (A cast to another
    16-bit format and back is ignored, as Inductor does.)
    """
    position = facts_of(node.target).passes if isinstance(node, Node) else None
    operand = None if position is None else node.args[position]
    value, source = tensor_value(node), tensor_value(operand)
    if value is None or source is None:
        return None
    is_wide = value.is_floating_point() and value.itemsize >= 2
    return operand if is_wide or value.dtype == source.dtype or not source.is_floating_point() else None


def source_of(node: Any) -> Any:
    """Return the node that a node's elements come from, through casts, copies, views and ``-(-x)``."""
    while (operand := passed_operand(node) or _twice_negated(node)) is not None:
        node = operand
    return node


def _twice_negated(node: Any) -> Node | None:
    """Return x for a node ``-(-x)``, which ``normalize`` inserts to keep an old value; otherwise None."""
    for _ in range(2):
        if not isinstance(node, Node) or node.target is not aten.neg.default:
            return None
        node = node.args[0]
    return cast("Node", node)


def number_filling(node: Node) -> Any:
    """Return the number that every element of a node equals; None if no such number is known."""
    name = facts_of(node.target).fills
    return None if name is None else named_arguments(node.target, node.args, node.kwargs)[name]


def known_number(value: Any) -> float | None:
    """Return the number that a value is at compile time; None if it is not known."""
    if isinstance(value, Node):
        value = number_filling(unconverted(value))
    return float(value) if isinstance(value, (int, float)) else None


@functools.cache
def ignores_values(target: Any) -> bool:
    """Return whether an operator's result does not depend on the elements of any tensor."""
    if not isinstance(target, OpOverload):
        return False
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema_of(target).arguments)
    return not takes_tensors or schema_of(target).name.endswith("_like")


@functools.cache
def size_argument(target: Any) -> int | None:
    """Return the position of the argument that is the result's shape; None if there is none."""
    names = [argument.name for argument in schema_of(target).arguments]
    return names.index("size") if "size" in names else None


def takes_strides(target: Any) -> bool:
    """Return whether an operator is told the strides of its result."""
    return any(argument.name == "stride" for argument in schema_of(target).arguments)


# Effects beyond the result. ---------------------------------------------------------------------------------


def may_raise(node: Node) -> bool:
    """Return whether an operation on elements raises an exception for some values."""
    value = tensor_value(node)
    return facts_of(node.target).divides and value is not None and not value.is_floating_point()


def draws(target: Any) -> bool:
    """Return whether an operator draws random numbers from a generator."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def drawn_range(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return ``(low, high)`` of a uniform draw of integers in ``[low, high)``; None for other calls."""
    if not isinstance(target, OpOverload) or "randint" not in schema_of(target).name:
        return None
    given = named_arguments(target, args, kwargs)
    return given.get("low") or 0, given.get("high")


def factorizes(target: Any) -> bool:
    """Return whether an operator factorizes matrices, or reads factors; both may fail.

    torch has none of them for 16-bit formats on the CPU.
    """
    if not isinstance(target, OpOverload):
        return False
    name = schema_of(target).name.partition("::")[2].lstrip("_")
    is_sum = torch.Tag.reduction in target.tags or name in ("linalg_cross", "linalg_matrix_exp")
    factorizing = ("linalg_", "cholesky", "geqrf", "ormqr", "svd", "triangular_solve")
    return name.startswith(factorizing) and not is_sum


#: Tags of operators for which :func:`depends_on_values` is true.
_OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


def depends_on_values(target: Any) -> bool:
    """Return whether its arguments' elements decide more of an operator than the elements of its result.

    Examples: the result's shape, a returned Python number, or failure, as of matrix factorizations. Also true
    for operators that draw random numbers, or change a tensor's shape or strides in place.
    """
    return not _OF_VALUES.isdisjoint(target.tags) or draws(target) or factorizes(target)


# Decompositions of an operator. -----------------------------------------------------------------------------


def composite_of(target: Any, kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return a function of elementary operations that equals a call; None for an elementary call."""
    facts = facts_of(target)
    return None if facts.sign and _is_one(kwargs.get("alpha", 1)) else facts.composite


def weighted_sum(x: Any, y: Any, beta: Any, alpha: Any) -> Any:
    """Return ``beta x + alpha y``; ``beta == 0`` ignores x, even NaN and infinities, as torch does."""
    ignores_x = isinstance(beta, (int, float)) and beta == 0
    return _scaled(y, alpha) if ignores_x else _scaled(x, beta) + _scaled(y, alpha)


def foreach_name(target: Any) -> str:
    """Return NAME of an operator ``aten::_foreach_NAME``; empty for other operators."""
    if not isinstance(target, OpOverload):
        return ""
    namespace, _, name = schema_of(target).name.partition("::_foreach_")
    return name if namespace == "aten" else ""


def foreach_rule(name: str) -> Callable[..., Any] | None:
    """Return the function that ``_foreach_NAME`` applies to each element of its lists: see ``Facts.each``."""
    of_lists, of_element = (OPERATORS.get(f"aten.{prefix}{name}", OPAQUE) for prefix in ("_foreach_", ""))
    return of_lists.each or of_element.composite or getattr(torch, name, None)


def _has_an_element_for_each(argument: Any) -> bool:
    """Return whether an argument is a list, or the 1-d tensor that ``_foreach_addcmul`` accepts."""
    return isinstance(argument, (list, tuple)) or (isinstance(argument, Tensor) and argument.dim() == 1)


def foreach_calls(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the arguments of a ``_foreach_`` operator per element, as :func:`foreach_rule` takes them."""
    arguments = [*args, *kwargs.values()]
    length = next(len(argument) for argument in arguments if isinstance(argument, (list, tuple)))
    names = ["value" if name == "scalars" else name for name in kwargs]
    for i in range(length):
        given = [each[i] if _has_an_element_for_each(each) else each for each in arguments]
        yield tuple(given[: len(args)]), dict(zip(names, given[len(args) :], strict=True))
