"""C++ expressions for single numbers: dtypes, constants, conversions and elementary operations.

An operation has a spelling if IEEE 754 or integer arithmetic defines its result, so that a scalar loop, a
vector and eager torch agree in all bits. Functions that every library rounds in its own way (``exp``,
``pow``) are spelled for single numbers alone, where they are C's, as in the code that Inductor writes; a loop
with one of them in it is left to Inductor, which calls a library of vectors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

#: The C++ type of one element in memory. Low-precision floats are their bits.
CPP_TYPES: Mapping[torch.dtype, str] = {
    torch.float64: "double",
    torch.float32: "float",
    torch.bfloat16: "uint16_t",
    torch.float16: "uint16_t",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}

#: Low-precision floats: no arithmetic is spelled for them.
STORED_AS_BITS = (torch.bfloat16, torch.float16)

#: An operand: its expression, its dtype, and whether it is a tensor of one number (0-d); or a Python number.
Operand = tuple[str, torch.dtype, bool] | bool | int | float


class NoSpelling(Exception):
    """Error for an operation, or a dtype of its operands, that has no spelling here."""


def is_small_integer(dtype: torch.dtype) -> bool:
    """Return whether C++ computes with ``int`` instead of this dtype."""
    return dtype in (torch.int8, torch.uint8, torch.int16)


def in_memory(dtype: torch.dtype) -> str:
    """Return the C++ type of one element in memory; raise :class:`NoSpelling` if there is none."""
    if dtype not in CPP_TYPES:
        raise NoSpelling(f"type for {dtype}")
    return CPP_TYPES[dtype]


def in_register(dtype: torch.dtype) -> str:
    """Return the C++ type in which a loop computes with numbers of a dtype."""
    return "int32_t" if is_small_integer(dtype) else in_memory(dtype)


def bare(text: str) -> str:
    """Take away the parentheses around all of an expression."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[1:-1] if i and i == len(text) - 1 else text
    return text


def constant(value: Any, dtype: torch.dtype) -> str:
    """Write a Python number as a C++ constant of a dtype."""
    if dtype is torch.bool:
        return "true" if value else "false"
    if dtype in STORED_AS_BITS:
        return hex(int(torch.tensor(value, dtype=dtype).view(torch.int16)) & 0xFFFF)
    if not dtype.is_floating_point:
        number = int(value)
        text = hex(number) if abs(number) >= 256 else str(number)
        return f"int64_t({text})" if dtype is torch.int64 else _MINIMUM if number == -(1 << 31) else text
    if dtype is torch.float32:
        value = torch.tensor(value, dtype=torch.float64).to(torch.float32).item()
    if math.isnan(value):
        return "NotANumber"
    if math.isinf(value):
        return "-Infinity" if value < 0 else "Infinity"
    text = repr(float(value)) if dtype is torch.float64 else _shortest(value)
    with_point = text if any(mark in text for mark in ".e") else f"{text}.0"
    return with_point if dtype is torch.float64 else f"{with_point}f"


#: The least 32-bit integer: C++ takes ``-0x80000000`` for an unsigned number.
_MINIMUM = "INT32_MIN"


def _shortest(value: float) -> str:
    """Write a float32 number in the fewest decimal digits that a compiler reads as it."""
    texts = (f"{value:.{digits}g}" for digits in range(1, 10))
    return next(text for text in texts if struct.pack("f", float(text)) == struct.pack("f", value))


def converted(text: str, source: torch.dtype, to: torch.dtype) -> str:
    """Convert an expression from one dtype to another, as ``Tensor.to``.

    Raises:
        NoSpelling: the result is a low-precision float, which needs a rounding.
    """
    if source is to:
        return text
    if source in STORED_AS_BITS:
        name = "bf16_to_float" if source is torch.bfloat16 else "f16_to_float"
        return converted(f"{name}({bare(text)})", torch.float32, to)
    if to in STORED_AS_BITS:
        raise NoSpelling(f"a rounding to {to}")
    if to is torch.bool:
        return f"({text} != 0)"
    if is_small_integer(source) and to is torch.int32:
        return text
    return f"{CPP_TYPES[to]}({bare(text)})"


Writer = Callable[..., str]


def _between(sign: str) -> Writer:
    return lambda dtype, x, y: f"({x} {sign} {y})"


def _arithmetic(sign: str) -> Writer:
    """Write arithmetic; that of small integers is ``int``'s, and cut off again."""

    def written(dtype: torch.dtype, x: str, y: str) -> str:
        text = f"({x} {sign} {y})"
        return f"{CPP_TYPES[dtype]}{text}" if is_small_integer(dtype) else text

    return written


def _called(name: str) -> Writer:
    """Write a call of a function of ``prelude.h``."""
    return lambda dtype, *operands: f"{name}<{in_register(dtype)}>({', '.join(map(bare, operands))})"


def _of_floats(name: str) -> Writer:
    """Write a call of a function of C's library."""

    def written(dtype: torch.dtype, *operands: str) -> str:
        if not dtype.is_floating_point:
            raise NoSpelling(f"{name} of {dtype}")
        function = f"__builtin_{name}{'f' if dtype is torch.float32 else ''}"
        return f"{function}({', '.join(map(bare, operands))})"

    return written


def _square_root(dtype: torch.dtype, x: str) -> str:
    if not dtype.is_floating_point:
        raise NoSpelling(f"a root of {dtype}")
    return f"square_root({bare(x)})"


def _divided(dtype: torch.dtype, x: str, y: str) -> str:
    if not dtype.is_floating_point:
        raise NoSpelling(f"a quotient of {dtype}")
    return f"({x} / {y})"


def _negative(dtype: torch.dtype, x: str) -> str:
    text = f"-{x}" if x.isidentifier() else f"-({bare(x)})"
    return f"{CPP_TYPES[dtype]}({text})" if is_small_integer(dtype) else text


def _absolute(dtype: torch.dtype, x: str) -> str:
    if not dtype.is_floating_point:
        return f"({x} < 0 ? {_negative(dtype, x)} : {x})"
    return f"absolute({bare(x)})"


#: Functions that write an operation on operands of equal dtype, by the name of its ATen operator.
_ARITHMETIC: Mapping[str, Writer] = {
    "add": _arithmetic("+"),
    "sub": _arithmetic("-"),
    "mul": _arithmetic("*"),
    **dict.fromkeys(("div", "true_divide"), _divided),
    "reciprocal": lambda dtype, x: _divided(dtype, constant(1, dtype), x),
    "sqrt": _square_root,
    "rsqrt": lambda dtype, x: _divided(dtype, constant(1, dtype), _square_root(dtype, x)),
    "fma": _of_floats("fma"),
    "floor": _of_floats("floor"),
    "ceil": _of_floats("ceil"),
    "trunc": _of_floats("trunc"),
    "round": _of_floats("nearbyint"),
    "neg": _negative,
    "abs": _absolute,
    **{name: _called(name) for name in ("maximum", "minimum", "clamp_min", "clamp_max", "sign")},
    "bitwise_and": _between("&"),
    "bitwise_or": _between("|"),
    "bitwise_xor": _between("^"),
    "logical_and": _between("&&"),
    "logical_or": _between("||"),
    "logical_not": lambda dtype, x: f"!{x}",
    "bitwise_not": lambda dtype, x: f"!{x}" if dtype is torch.bool else f"~{x}",
    **dict.fromkeys(("bitwise_right_shift", "__rshift__"), _between(">>")),
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), _arithmetic("<<")),
}

#: Functions of C's library that are written for single numbers alone, by the name of their ATen operator.
_OF_NUMBERS: Mapping[str, Writer] = {
    name: _of_floats(name)
    for name in (
        "pow",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sin",
        "cos",
        "tan",
        "tanh",
        "atan",
    )
}

_COMPARISONS: Mapping[str, Writer] = {
    "eq": _between("=="),
    "ne": _between("!="),
    "lt": _between("<"),
    "le": _between("<="),
    "gt": _between(">"),
    "ge": _between(">="),
    "isnan": lambda dtype, x: f"({x} != {x})",
}


def spelled(name: str, dtype: torch.dtype, operands: Sequence[Operand], *, is_number: bool = False) -> str:
    """Write an elementary operation as a C++ expression.

    Args:
        name: name of the ATen operator, without an overload.
        dtype: dtype of its result.
        operands: operands of the operation, in order.
        is_number: whether it is computed once, and not for each element.

    Raises:
        NoSpelling: the operation, or one of the dtypes, has none.
    """
    written = (
        _COMPARISONS.get(name) or _ARITHMETIC.get(name) or (_OF_NUMBERS.get(name) if is_number else None)
    )
    if written is None:
        raise NoSpelling(name)
    computed_in = _compared_in(operands) if name in _COMPARISONS else dtype
    if computed_in in STORED_AS_BITS or computed_in not in CPP_TYPES:
        raise NoSpelling(f"{name} of {computed_in}")
    texts = [
        converted(*operand[:2], computed_in) if isinstance(operand, tuple) else constant(operand, computed_in)
        for operand in operands
    ]
    return written(computed_in, *texts)


def _compared_in(operands: Sequence[Operand]) -> torch.dtype:
    like: list[Any] = [
        torch.empty(() if each[2] else 2, dtype=each[1]) if isinstance(each, tuple) else each
        for each in operands
    ]
    found: torch.dtype = torch.result_type(*like) if len(like) == 2 else like[0].dtype
    return found
