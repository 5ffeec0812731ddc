"""Expressions for single numbers in C++ and in Triton: dtypes, constants, conversions, elementary operations.

An operation has a spelling in C++ if IEEE 754 or integer arithmetic defines its result, so that a scalar
loop, a vector and eager torch agree in all bits. Functions that every library rounds in its own way (``exp``,
``pow``) are spelled in C++ for single numbers alone, where they are C's; a loop with one of them is left to
Inductor, which calls a library of vectors. In Triton they are ``libdevice``'s, as in Inductor's kernels.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from collage_fx.torch_compat import inductor_config

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

#: Triton's name of a dtype.
TRITON_TYPES: Mapping[torch.dtype, str] = {
    **{dtype: str(dtype).removeprefix("torch.") for dtype in CPP_TYPES},
    **{torch.uint64: "uint64", torch.uint32: "uint32", torch.uint16: "uint16"},
    torch.float8_e4m3fn: "float8e4nv",
    torch.float8_e5m2: "float8e5",
    torch.bool: "int1",
}

#: Low-precision floats that C++ has as their bits. No arithmetic is spelled for any float below 4 bytes.
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


def _cpp_constant(value: Any, dtype: torch.dtype) -> str:
    """Write a Python number as a C++ constant of a dtype."""
    if dtype is torch.bool:
        return "true" if value else "false"
    if dtype in STORED_AS_BITS:
        return hex(int(torch.tensor(value, dtype=dtype).view(torch.int16)) & 0xFFFF)
    if not dtype.is_floating_point:
        number = int(value)
        text = hex(number) if abs(number) >= 256 else str(number)
        if dtype is torch.int64:
            return f"int64_t({text})"
        return "INT32_MIN" if number == -(1 << 31) else text  # C++ takes -0x80000000 for an unsigned number
    if dtype is torch.float32:
        value = torch.tensor(value, dtype=torch.float64).to(torch.float32).item()
    if math.isnan(value):
        return "NotANumber"
    if math.isinf(value):
        return "-Infinity" if value < 0 else "Infinity"
    text = repr(float(value)) if dtype is torch.float64 else _shortest(value)
    with_point = text if any(mark in text for mark in ".e") else f"{text}.0"
    return with_point if dtype is torch.float64 else f"{with_point}f"


def _shortest(value: float) -> str:
    """Write a float32 number in the fewest decimal digits that a compiler reads as it."""
    texts = (f"{value:.{digits}g}" for digits in range(1, 10))
    return next(text for text in texts if struct.pack("f", float(text)) == struct.pack("f", value))


def _cpp_converted(text: str, source: torch.dtype, to: torch.dtype) -> str:
    if source is to:
        return text
    if source in STORED_AS_BITS:
        name = "bf16_to_float" if source is torch.bfloat16 else "f16_to_float"
        return _cpp_converted(f"{name}({bare(text)})", torch.float32, to)
    if to in STORED_AS_BITS:
        raise NoSpelling(f"a rounding to {to}")
    if to is torch.bool:
        return f"({text} != 0)"
    if is_small_integer(source) and to is torch.int32:
        return text
    return f"{CPP_TYPES[to]}({bare(text)})"


def _cpp_bits(text: str, source: torch.dtype, to: torch.dtype) -> str:
    if source.itemsize != 4:
        raise NoSpelling(f"the bits of {source}")
    return text if source is to else f"bits<{CPP_TYPES[to]}>({bare(text)})"


def _triton_constant(value: Any, dtype: torch.dtype) -> str:
    """Write a Python number as a scalar of a dtype in Triton."""
    number = torch.tensor(value, dtype=dtype).item() if dtype.is_floating_point else value
    text = repr(number if dtype.is_floating_point else bool(value) if dtype is torch.bool else int(value))
    if dtype.is_floating_point and not math.isfinite(number):
        text = f"float({text!r})"
    return f"tl.full((), {text}, tl.{TRITON_TYPES[dtype]})"


def _triton_converted(text: str, source: torch.dtype, to: torch.dtype) -> str:
    if source is to:
        return text
    return f"({text} != 0)" if to is torch.bool else f"{text}.to(tl.{TRITON_TYPES[to]})"


def _triton_bits(text: str, source: torch.dtype, to: torch.dtype) -> str:
    return text if source is to else f"{text}.to(tl.{TRITON_TYPES[to]}, bitcast=True)"


@dataclass(frozen=True, eq=False)
class Language:
    """Language that kernels are printed in.

    Attributes:
        column: index of its writers in the rows of the table of spellings.
        converted: writes the conversion of an expression of one dtype to another, as ``Tensor.to``; raises
            :class:`NoSpelling` if it is not known to be exact, and the result a low-precision float.
        multiply_add: writes ``x * y + sum`` of float32 numbers whose result is exact.
    """

    column: int
    types: Mapping[torch.dtype, str]
    constant: Callable[[Any, torch.dtype], str]
    converted: Callable[[str, torch.dtype, torch.dtype], str]
    bits: Callable[[str, torch.dtype, torch.dtype], str]
    where: Callable[[str, str, str], str]
    multiply_add: Callable[[str, str, str], str]


CPP = Language(
    0,
    CPP_TYPES,
    _cpp_constant,
    _cpp_converted,
    _cpp_bits,
    where=lambda condition, yes, no: f"({bare(condition)} ? {yes} : {no})",
    multiply_add=lambda x, y, total: f"multiply_add({bare(x)}, {bare(y)}, {bare(total)})",
)
TRITON = Language(
    1,
    TRITON_TYPES,
    _triton_constant,
    _triton_converted,
    _triton_bits,
    where=lambda condition, yes, no: f"tl.where({bare(condition)}, {bare(yes)}, {bare(no)})",
    multiply_add=lambda x, y, total: f"tl.fma({bare(x)}, {bare(y)}, {bare(total)})",
)

Writer = Callable[..., str]


def _between(sign: str) -> Writer:
    return lambda dtype, x, y: f"({x} {sign} {y})"


def _arithmetic(sign: str) -> Writer:
    """Write arithmetic; that of small integers is ``int``'s, and cut off again."""

    def written(dtype: torch.dtype, x: str, y: str) -> str:
        text = f"({x} {sign} {y})"
        return f"{CPP_TYPES[dtype]}{text}" if is_small_integer(dtype) else text

    return written


def _of_prelude(name: str) -> Writer:
    """Write a call of a function of ``prelude.h``."""
    return lambda dtype, *operands: f"{name}<{in_register(dtype)}>({', '.join(map(bare, operands))})"


def _of_library(name: str) -> Writer:
    """Write a call of a function of C's library."""
    return lambda dtype, *operands: (
        f"__builtin_{name}{'f' if dtype is torch.float32 else ''}({', '.join(map(bare, operands))})"
    )


def _of_device(name: str) -> Writer:
    """Write a call of a function of Triton's library."""
    return lambda dtype, *operands: f"libdevice.{name}({', '.join(map(bare, operands))})"


def _cpp_root(dtype: torch.dtype, x: str) -> str:
    return f"square_root({bare(x)})"


def _triton_root(dtype: torch.dtype, x: str) -> str:
    """Write a square root, rounded once; in float32 it is within an ulp if Inductor is told to be fast."""
    if dtype is not torch.float32:
        return f"libdevice.sqrt({bare(x)})"
    return f"tl.sqrt({bare(x)})" if inductor_config.use_fast_math else f"tl.sqrt_rn({bare(x)})"


def _triton_quotient(dtype: torch.dtype, x: str, y: str) -> str:
    """Write a quotient; in float32 it is within 2 ulps, unless Inductor is told to round it.

    If Inductor is told to be fast, these are 2 ulps for denominators from 2**-126 to 2**126; larger ones make
    it zero, smaller ones infinite.
    """
    if dtype is torch.float32 and inductor_config.eager_numerics.division_rounding:
        return f"tl.div_rn({bare(x)}, {bare(y)})"
    if dtype is torch.float32 and inductor_config.use_fast_math:
        return f"libdevice.fast_dividef({bare(x)}, {bare(y)})"
    return f"({x} / {y})"


def _negative(dtype: torch.dtype, x: str) -> str:
    text = f"-{x}" if x.isidentifier() else f"-({bare(x)})"
    return f"{CPP_TYPES[dtype]}({text})" if is_small_integer(dtype) else text


def _absolute(dtype: torch.dtype, x: str) -> str:
    if not dtype.is_floating_point:
        return f"({x} < 0 ? {_negative(dtype, x)} : {x})"
    return f"absolute({bare(x)})"


def _inverse(cpp: Writer, triton: Writer) -> _Spelling:
    """Write one divided by a function's result."""
    writers = (
        lambda dtype, x: f"({CPP.constant(1, dtype)} / {cpp(dtype, x)})",
        lambda dtype, x: _triton_quotient(dtype, TRITON.constant(1, dtype), triton(dtype, x)),
    )
    return _Spelling(writers, of_floats=True)


def _triton_extreme(name: str) -> Writer:
    """Write the larger or smaller of two numbers, NaN if one of them is."""

    def written(dtype: torch.dtype, x: str, y: str) -> str:
        return f"tl.{name}({bare(x)}, {bare(y)}, propagate_nan=tl.PropagateNan.ALL)"

    return written


def _triton_negative(dtype: torch.dtype, x: str) -> str:
    """Write the negative of a number. Triton's minus subtracts from zero, which has no sign then."""
    return f"({x} * {_triton_constant(-1, dtype)})" if dtype.is_floating_point else f"(-{x})"


def _triton_sign(dtype: torch.dtype, x: str) -> str:
    above, below = (f"({x} {sign} {_triton_constant(0, dtype)})" for sign in "><")
    return f"({above}.to(tl.{TRITON_TYPES[dtype]}) - {below}.to(tl.{TRITON_TYPES[dtype]}))"


class _Spelling(NamedTuple):
    """Row of the table of spellings.

    Attributes:
        writers: functions that write the operation on operands of equal dtype, one for each language.
        of_floats: whether there is none for integers.
        of_numbers: whether C++ has it for single numbers alone.
    """

    writers: tuple[Writer, Writer]
    of_floats: bool = False
    of_numbers: bool = False


def _in_both(sign: str) -> _Spelling:
    return _Spelling((_between(sign), _between(sign)))


def _rounded(name: str, *, of_numbers: bool = False) -> _Spelling:
    return _Spelling((_of_library(name), _of_device(name)), of_floats=True, of_numbers=of_numbers)


_RIGHT = _in_both(">>")
_LEFT = _Spelling((_arithmetic("<<"), _between("<<")))
_QUOTIENT = _Spelling((_between("/"), _triton_quotient), of_floats=True)

#: The spellings of operations, by the name of the ATen operator.
_SPELLINGS: Mapping[str, _Spelling] = {
    "add": _Spelling((_arithmetic("+"), _between("+"))),
    "sub": _Spelling((_arithmetic("-"), _between("-"))),
    "mul": _Spelling((_arithmetic("*"), _between("*"))),
    "div": _QUOTIENT,
    "true_divide": _QUOTIENT,
    "reciprocal": _inverse(lambda dtype, x: x, lambda dtype, x: x),
    "sqrt": _Spelling((_cpp_root, _triton_root), of_floats=True),
    "rsqrt": _inverse(_cpp_root, _triton_root),
    "sigmoid": _inverse(
        lambda dtype, x: f"({CPP.constant(1, dtype)} + {_of_library('exp')(dtype, _negative(dtype, x))})",
        lambda dtype, x: (
            f"({TRITON.constant(1, dtype)} + {_of_device('exp')(dtype, _triton_negative(dtype, x))})"
        ),
    )._replace(of_numbers=True),
    "fma": _rounded("fma"),
    "floor": _rounded("floor"),
    "ceil": _rounded("ceil"),
    "trunc": _rounded("trunc"),
    "round": _rounded("nearbyint"),
    "neg": _Spelling((_negative, _triton_negative)),
    "abs": _Spelling((_absolute, lambda dtype, x: f"tl.abs({bare(x)})")),
    "maximum": _Spelling((_of_prelude("maximum"), _triton_extreme("maximum"))),
    "minimum": _Spelling((_of_prelude("minimum"), _triton_extreme("minimum"))),
    "clamp_min": _Spelling((_of_prelude("clamp_min"), _triton_extreme("maximum"))),
    "clamp_max": _Spelling((_of_prelude("clamp_max"), _triton_extreme("minimum"))),
    "sign": _Spelling((_of_prelude("sign"), _triton_sign)),
    "bitwise_and": _in_both("&"),
    "bitwise_or": _in_both("|"),
    "bitwise_xor": _in_both("^"),
    "logical_and": _Spelling((_between("&&"), _between("&"))),
    "logical_or": _Spelling((_between("||"), _between("|"))),
    "logical_not": _Spelling((lambda dtype, x: f"!{x}", lambda dtype, x: f"({x} == 0)")),
    "bitwise_not": _Spelling(
        (lambda dtype, x: f"!{x}" if dtype is torch.bool else f"~{x}", lambda dtype, x: f"(~{x})")
    ),
    "bitwise_right_shift": _RIGHT,
    "__rshift__": _RIGHT,
    "bitwise_left_shift": _LEFT,
    "__lshift__": _LEFT,
    **{
        name: _rounded(name, of_numbers=True)
        for name in (
            *("pow", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p"),
            *("sin", "cos", "tan", "tanh", "atan", "sinh", "cosh", "asin", "acos", "atan2", "erf", "erfc"),
        )
    },
}

#: The spellings of operations whose result is a truth value, and whose operands are of another dtype.
_COMPARISONS: Mapping[str, _Spelling] = {
    "eq": _in_both("=="),
    "ne": _in_both("!="),
    "lt": _in_both("<"),
    "le": _in_both("<="),
    "gt": _in_both(">"),
    "ge": _in_both(">="),
    "isnan": _Spelling((lambda dtype, x: f"({x} != {x})",) * 2),
}


def spelled(
    language: Language, name: str, dtype: torch.dtype, operands: Sequence[Operand], *, is_number: bool = False
) -> str:
    """Write an elementary operation as an expression.

    ``name`` is that of the ATen operator, without an overload, and ``dtype`` that of the result.
    ``is_number``: whether it is computed once, and not for each element.

    Raises:
        NoSpelling: the operation, or one of the dtypes, has none.
    """
    spelling = _COMPARISONS.get(name) or _SPELLINGS.get(name)
    if spelling is None or (spelling.of_numbers and language is CPP and not is_number):
        raise NoSpelling(name)
    computed_in = _compared_in(operands) if name in _COMPARISONS else dtype
    is_float = computed_in.is_floating_point
    is_stored_alone = is_float and computed_in.itemsize < 4
    if is_stored_alone or (spelling.of_floats and not is_float) or computed_in not in language.types:
        raise NoSpelling(f"{name} of {computed_in}")
    texts = [
        language.converted(*operand[:2], computed_in)
        if isinstance(operand, tuple)
        else language.constant(operand, computed_in)
        for operand in operands
    ]
    return spelling.writers[language.column](computed_in, *texts)


def _compared_in(operands: Sequence[Operand]) -> torch.dtype:
    like: list[Any] = [
        torch.empty(() if each[2] else 2, dtype=each[1]) if isinstance(each, tuple) else each
        for each in operands
    ]
    found: torch.dtype = torch.result_type(*like) if len(like) == 2 else like[0].dtype
    return found
