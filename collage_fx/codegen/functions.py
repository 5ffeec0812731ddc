"""Functions of our operators, written from the traces of their eager definitions in ``numerics/``."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from collage_fx.codegen import spellings
from collage_fx.codegen.spellings import Language, NoSpelling
from collage_fx.graph import trace_of
from collage_fx.numerics import FIRST_INFINITE, code_of_number
from collage_fx.torch_compat import OpOverload

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default

#: Functions whose square roots may be approximate: they say why.
WITH_APPROXIMATE_ROOTS = (code_of_number,)


class Function(NamedTuple):
    """Function of scalars.

    Attributes:
        tests: whether it tests if a number is finite, or a NaN: then in C++ it is a template,
            ``name<Finite>``, that omits the test if the answer is known.
        is_cut: False if the caller must cut off bits beyond the dtype of the result, a small integer.
    """

    name: str
    definition: str
    tests: bool
    is_cut: bool


@functools.cache
def function_of(
    language: Language,
    function: Callable[..., Any],
    dtypes: tuple[torch.dtype, ...],
    constants: tuple[Any, ...] = (),
) -> Function:
    """Write an elementwise function of tensors of equal shape, and of constants, as a function of scalars.

    Raises:
        NoSpelling: an operation of the function has none.
    """
    trace, is_cpp = trace_of(function, dtypes, constants), language is spellings.CPP
    parameters = list(inspect.signature(function).parameters)[: len(dtypes)]
    (result,) = trace.graph.output_node().all_input_nodes
    is_small = spellings.is_small_integer(result.meta["val"].dtype)
    is_cut = not (is_cpp and is_small and result.target is CONVERT)
    if not is_cut:
        (result,) = result.all_input_nodes
    texts = dict(zip(trace.graph.find_nodes(op="placeholder"), parameters, strict=True))
    lines, tests = list[str](), False
    for node in (each for each in trace.graph.nodes if each.op == "call_function"):
        if node.target is aten.addcmul.default and not node.kwargs:
            # In our functions its results are exact, so it is fused.
            total, x, y = (texts[each] if isinstance(each, Node) else "" for each in node.args)
            text = language.multiply_add(x, y, total)
        else:
            text = expression(node, texts, language)
        if is_cpp and _is_test(node):
            tests, text = True, f"(Finite || {spellings.bare(text)})"
        if not is_cpp and function in WITH_APPROXIMATE_ROOTS and node.target is aten.sqrt.default:
            text = f"tl.sqrt({spellings.bare(texts[node.all_input_nodes[0]])})"
        if len(node.users) > 1 and node.all_input_nodes:
            name = f"t{len(lines)}"
            kind = f"const {spellings.in_register(node.meta['val'].dtype)} " if is_cpp else ""
            lines.append(f"{kind}{name} = {spellings.bare(text)}")
            text = name
        texts[node] = text
    lines.append(f"return {spellings.bare(texts[result])}")
    if not is_cpp:
        name = "_".join([function.__name__, *map(_word, (*constants, *dtypes))])
        body = "\n".join(f"    {line}" for line in lines)
        return Function(name, f"@triton.jit\ndef {name}({', '.join(parameters)}):\n{body}\n", tests, is_cut)
    name = "_".join([function.__name__, *map(_word, constants)])
    arguments = ", ".join(f"{spellings.in_register(d)} {x}" for d, x in zip(dtypes, parameters, strict=True))
    body = "\n".join(f"  {line};" for line in lines)
    head = f"inline {spellings.in_register(result.meta['val'].dtype)} {name}({arguments})"
    template = "template <bool Finite>\n" if tests else ""
    return Function(name, f"{template}{head} {{\n{body}\n}}\n", tests, is_cut)


def _word(value: Any) -> str:
    """Write a constant as a part of a function's name."""
    if isinstance(value, bool):
        return "signed" if value else "unsigned"
    if value is None:
        return "nearest"
    return str(value).removeprefix("torch.")


def _is_test(node: Node) -> bool:
    """Return whether a node asks if a float is finite (``abs(x) < inf``), also in 16 bits, or no NaN."""
    first, *others = node.args
    if node.target is aten.eq.Tensor:
        return others == [first]
    is_below_infinity = node.target is aten.lt.Scalar and others in ([math.inf], [FIRST_INFINITE])
    return is_below_infinity and isinstance(first, Node) and first.target is aten.abs.default


def expression(node: Node, texts: Mapping[Node, str], language: Language, *, is_number: bool = False) -> str:
    """Write an elementary operation on the expressions of its operands; ``is_number`` as :func:`spelled`.

    Raises:
        NoSpelling: there is none.
    """
    target, dtype = node.target, node.meta["val"].dtype
    if not isinstance(target, OpOverload) or dtype not in language.types:
        raise NoSpelling(str(target))
    name = target.overloadpacket.__name__

    def operand(value: Any) -> Any:
        if isinstance(value, Node):
            return texts[value], value.meta["val"].dtype, value.meta["val"].dim() == 0
        if not isinstance(value, (bool, int, float)):
            raise NoSpelling(f"{target} of {value}")
        return value

    if name in ("full", "scalar_tensor", "full_like") and not isinstance(node.args[-1], Node):
        return language.constant(node.args[-1], dtype)
    if name in ("alias", "clone", "once", "expand") and node.args[0].meta["val"].dtype is dtype:  # type: ignore[union-attr]
        return texts[node.all_input_nodes[0]]
    if target is CONVERT:
        text, source, _ = operand(node.args[0])
        return language.converted(text, source, dtype)
    if target is aten.view.dtype:
        text, source, _ = operand(node.args[0])
        return language.bits(text, source, dtype)
    if target is aten.where.self:
        condition, *choices = map(operand, node.args)
        yes, no = (language.converted(text, source, dtype) for text, source, _ in choices)
        return language.where(condition[0], yes, no)
    if target is aten.pow.Tensor_Scalar and node.args[1] in (0.5, 2):
        base = operand(node.args[0])
        name, operands = ("mul", [base, base]) if node.args[1] == 2 else ("sqrt", [base])
        return spellings.spelled(language, name, dtype, operands)
    if node.kwargs:
        raise NoSpelling(f"{target} with {', '.join(node.kwargs)}")
    operands = [operand(value) for value in node.args]
    return spellings.spelled(language, name, dtype, operands, is_number=is_number)
