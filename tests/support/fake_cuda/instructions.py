"""Instructions that compute, each as a function of the threads that take it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.fake_cuda import memory
from tests.support.fake_cuda.floats import (
    UNSIGNED,
    Values,
    dtype_of,
    fma32,
    fma64,
    fma_of_halves,
    from_bf16,
    from_fp8,
    from_half,
    size_of,
    to_bf16,
    to_fp8,
    to_half,
)
from tests.support.fake_cuda.ptx import Instruction, Program, split
from tests.support.fake_cuda.threads import Action, Reader, Threads, Writer, read_operand, write_operand


@dataclass(frozen=True)
class _Form:
    """An instruction, taken apart.

    Attributes:
        program: its kernel.
        name: the opcode without modifiers.
        flags: the modifiers.
        kind: the last of those, its type.
        operands: as they are written, the result first.
    """

    program: Program
    name: str
    flags: tuple[str, ...]
    kind: str
    operands: tuple[str, ...]

    @property
    def is_float(self) -> bool:
        return self.kind[0] == "f"

    @property
    def bits(self) -> int:
        return 8 * size_of(self.kind)

    def read(self, i: int, kind: str = "") -> Reader:
        return read_operand(self.program, self.operands[i], kind or self.kind)

    def inputs(self) -> list[Reader]:
        return [self.read(i) for i in range(1, len(self.operands))]


def compiled(program: Program, instruction: Instruction) -> Action:
    """Return a function that does an instruction for the active threads."""
    name, *flags = instruction.opcode.split(".")
    if name in _ACTIONS:
        return _ACTIONS[name](program, instruction)
    form = _Form(program, name, tuple(flags), flags[-1] if flags else "", instruction.operands)
    if name == "mov" and any("{" in each for each in form.operands):
        return _packing(form)
    is_half = form.kind.startswith(("bf16", "f16"))
    compute = None
    if is_half and name not in ("mov", "selp", "cvt"):
        compute = _of_halves(form)
    elif name in _COMPUTED:
        compute = _COMPUTED[name](form)
    if compute is None:
        raise NotImplementedError(instruction.text)
    first, _, second = form.operands[0].partition("|")
    if is_half and second and form.kind.endswith("x2"):  # a predicate for each half
        return _into_two(compute, write_operand(program, first), write_operand(program, second))
    write = write_operand(program, first)
    return lambda threads: write(threads, compute(threads))


def _into_two(compute: Reader, first: Writer, second: Writer) -> Action:
    """Write what is computed of the lower and of the upper halves of registers."""

    def act(threads: Threads) -> None:
        values = compute(threads)
        first(threads, values[::2])
        second(threads, values[1::2])

    return act


_ACTIONS: dict[str, Callable[[Program, Instruction], Action]] = {
    "ld": memory.load_or_store,
    "st": memory.load_or_store,
    "atom": memory.atomic,
    "red": memory.atomic,
    "shfl": memory.shuffle,
    "ldmatrix": memory.matrix,
    "stmatrix": memory.matrix,
}

# Moves. -----------------------------------------------------------------------------------------------------


def _packing(form: _Form) -> Action:
    """Put parts together, or take them apart: ``mov.b64 {%r1, %r2}, %rd1``."""
    to, of = form.operands
    program, dtype = form.program, UNSIGNED[size_of(form.kind)]
    parts = split((to if to.startswith("{") else of).strip("{} "))
    part = size_of(form.kind) // len(parts)
    shifts = [dtype.type(8 * part * i) for i in range(len(parts))]
    if to.startswith("{"):
        writers, whole = [write_operand(program, each) for each in parts], form.read(1)

        def take_apart(threads: Threads) -> None:
            value = whole(threads).view(dtype)
            for write, shift in zip(writers, shifts, strict=True):
                write(threads, (value >> shift).astype(UNSIGNED[part]))

        return take_apart
    readers = [read_operand(program, each, f"b{8 * part}") for each in parts]
    write = write_operand(program, to)

    def put_together(threads: Threads) -> None:
        value = np.zeros(threads.active_count, dtype)
        for read, shift in zip(readers, shifts, strict=True):
            value |= read(threads).astype(dtype) << shift
        write(threads, value)

    return put_together


def _selection(form: _Form) -> Reader:
    a, b, which = form.read(1), form.read(2), form.read(3, "pred")
    return lambda threads: np.where(which(threads), a(threads), b(threads))


def _conversion(form: _Form) -> Reader | None:
    to, of = form.flags[-2:]
    if "sat" in form.flags:
        return None
    if to.endswith("x2") and of == "f32":  # the first operand is the upper half
        a, b = form.read(1, "f32"), form.read(2, "f32")
        if to.startswith(("bf16", "f16")):
            half = to.removesuffix("x2")
            return lambda threads: _joined(to_half(half, a(threads)), to_half(half, b(threads)))
        fp8 = to.removesuffix("x2")
        return lambda threads: _joined(to_fp8(fp8, a(threads)), to_fp8(fp8, b(threads)))
    if to in ("e4m3x2", "e5m2x2"):
        pair = form.read(1, "b32")
        return lambda threads: to_fp8(to[:4], from_half("f16", _parts(threads, pair, np.uint16))).view("u2")
    if of in ("e4m3x2", "e5m2x2"):
        pair = form.read(1, "b16")
        return lambda threads: to_half("f16", from_fp8(of[:4], _parts(threads, pair, np.uint8))).view("u4")
    return _conversion_of_one(form, to, of)


def _joined(high: Values, low: Values) -> Values:
    dtype, shift = UNSIGNED[2 * low.itemsize], 8 * low.itemsize
    return high.astype(dtype) << dtype.type(shift) | low


def _parts(threads: Threads, read: Reader, dtype: Any) -> Values:
    return threads.each(read(threads)).view(dtype)


_ROUNDINGS = {"rzi": np.trunc, "rmi": np.floor, "rni": np.rint, "rpi": np.ceil}


def _conversion_of_one(form: _Form, to: str, of: str) -> Reader:
    bits = form.read(1, "b16" if of == "bf16" else of)
    rounding = next((_ROUNDINGS[flag] for flag in form.flags if flag in _ROUNDINGS), None)

    def value(threads: Threads) -> Values:
        found = from_bf16(bits(threads)) if of == "bf16" else bits(threads)
        return found if rounding is None else rounding(found)

    if to == "bf16":
        return lambda threads: to_bf16(value(threads).astype(np.float32))
    dtype = dtype_of(to)
    if to[0] == "f" or of[0] not in "fb":
        return lambda threads: value(threads).astype(dtype)
    limits = np.iinfo(dtype)

    def bounded(threads: Threads) -> Values:
        exact = np.nan_to_num(value(threads).astype(np.longdouble), nan=0.0)
        return np.clip(exact, limits.min, limits.max).astype(dtype)

    return bounded


# Comparisons. -----------------------------------------------------------------------------------------------

_RELATIONS = {
    **{"lt": np.less, "lo": np.less, "le": np.less_equal, "ls": np.less_equal, "eq": np.equal},
    **{
        "gt": np.greater,
        "hi": np.greater,
        "ge": np.greater_equal,
        "hs": np.greater_equal,
        "ne": np.not_equal,
    },
}


def _relation(name: str, *, is_float: bool) -> Callable[[Values, Values], Values]:
    """Return a comparison; that of floats is false beside NaN, or true if its name ends in "u"."""
    if not is_float:
        return _RELATIONS[name]

    def compare(x: Values, y: Values) -> Values:
        is_nan = np.isnan(x) | np.isnan(y)
        if name in ("num", "nan"):
            return is_nan if name == "nan" else ~is_nan
        if name in _RELATIONS:
            return _RELATIONS[name](x, y) & ~is_nan
        return _RELATIONS[name.removesuffix("u")](x, y) | is_nan

    return compare


def _comparison(form: _Form) -> Reader | None:
    relation, *combined = form.flags[:-1]
    combined = [each for each in combined if each != "ftz"]
    compare, a, b = _relation(relation, is_float=form.is_float), form.read(1), form.read(2)
    if "|" in form.operands[0]:
        return None
    if not combined:
        return lambda threads: compare(a(threads), b(threads))
    combine, c = _LOGICAL[combined[0]], form.read(3, "pred")
    return lambda threads: combine(compare(a(threads), b(threads)), c(threads))


# Arithmetic. ------------------------------------------------------------------------------------------------

_LOGICAL: Mapping[str, Any] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_BINARY: Mapping[str, Any] = {"add": np.add, "sub": np.subtract, **_LOGICAL}


def _in_float64(function: Any) -> Callable[[Values], Values]:
    """Return a function that rounds once: approximations of the card's are not known to the last bit."""
    return lambda x: function(x.astype(np.float64)).astype(x.dtype)


_UNARY: Mapping[str, Callable[[Values], Values]] = {
    "sqrt": np.sqrt,
    "abs": np.abs,
    "rsqrt": _in_float64(lambda x: 1 / np.sqrt(x)),
    "rcp": _in_float64(lambda x: 1 / x),
    "ex2": _in_float64(np.exp2),
    "lg2": _in_float64(np.log2),
    "sin": _in_float64(np.sin),
    "cos": _in_float64(np.cos),
    "tanh": _in_float64(np.tanh),
}


def _binary(form: _Form) -> Reader:
    operate = _BINARY[form.name]
    if form.kind in ("s16x2", "u16x2"):
        x, y = form.read(1, "b32"), form.read(2, "b32")
        return lambda threads: operate(_parts(threads, x, np.uint16), _parts(threads, y, np.uint16)).view(
            np.uint32
        )
    a, b = form.inputs()
    return lambda threads: operate(a(threads), b(threads))


def _unary(form: _Form) -> Reader:
    operate, a = _UNARY[form.name], form.read(1)
    return lambda threads: operate(a(threads))


def _negative(form: _Form) -> Reader:
    a = form.read(1, form.kind if form.is_float else f"s{form.bits}")
    return lambda threads: -a(threads)


def _inverted(form: _Form) -> Reader:
    a = form.read(1)
    return lambda threads: ~a(threads)


def _product(form: _Form) -> Reader | None:
    """Multiply, and add: ``mul``, ``mad`` and ``fma``."""
    if form.is_float:
        if form.name == "mul":
            x, y = form.inputs()
            return lambda threads: x(threads) * y(threads)
        fused, operands = fma32 if form.kind == "f32" else fma64, form.inputs()
        return lambda threads: fused(*(threads.each(each(threads)) for each in operands))
    a, b, size = form.read(1), form.read(2), size_of(form.kind)
    is_wide, is_high = "wide" in form.flags, "hi" in form.flags
    if size == 8 and is_high:
        return None
    larger = f"{form.kind[0]}{16 * size}" if is_wide or is_high else form.kind
    c = form.read(3, larger if is_wide else form.kind) if form.name == "mad" else None

    def multiply(threads: Threads) -> Values:
        dtype = dtype_of(larger)
        result = a(threads).astype(dtype) * b(threads).astype(dtype)
        if is_high:
            result = (result >> dtype.type(8 * size)).astype(dtype_of(form.kind))
        return result if c is None else result + c(threads)

    return multiply


def _quotient(form: _Form) -> Reader:
    a, b = form.inputs()
    if form.is_float:
        return lambda threads: a(threads) / b(threads)
    return lambda threads: (a(threads) - np.fmod(a(threads), b(threads))) // b(threads)


def _remainder(form: _Form) -> Reader:
    a, b = form.inputs()
    return lambda threads: np.fmod(a(threads), b(threads))


_EXTREMES = {
    ("max", True): np.fmax,
    ("max", False): np.maximum,
    ("min", True): np.fmin,
    ("min", False): np.minimum,
}


def _extreme(form: _Form) -> Reader:
    operate = _EXTREMES[form.name, form.is_float and "NaN" not in form.flags]
    a, b = form.inputs()
    return lambda threads: operate(a(threads), b(threads))


def _with_sign(form: _Form) -> Reader:
    sign, value = form.inputs()
    return lambda threads: np.copysign(value(threads), sign(threads))


def _is_finite(form: _Form) -> Reader | None:
    value = form.read(1)
    return (lambda threads: np.isfinite(value(threads))) if "finite" in form.flags else None


def _of_halves(form: _Form) -> Reader | None:
    """Compute in bfloat16 or float16, of which a register has one or two, with one rounding."""
    half, is_pair = form.kind.removesuffix("x2"), form.kind.endswith("x2")

    def read(i: int) -> Reader:
        bits = form.read(i, "b32" if is_pair else "b16")
        return lambda threads: from_half(half, _parts(threads, bits, np.uint16))

    if form.name == "setp":
        a, b, compare = read(1), read(2), _relation(form.flags[0], is_float=True)
        return lambda threads: compare(a(threads), b(threads))
    functions: dict[str, Any] = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "neg": np.negative,
        "fma": fma_of_halves(half),
        "max": np.maximum if "NaN" in form.flags else np.fmax,
        "min": np.minimum if "NaN" in form.flags else np.fmin,
        **{name: _UNARY[name] for name in ("abs", "ex2", "tanh")},
    }
    operands = [read(i) for i in range(1, len(form.operands))]
    operate = functions.get(form.name)
    if operate is None:
        return None
    dtype = UNSIGNED[size_of(form.kind)]
    return lambda threads: to_half(half, operate(*(each(threads) for each in operands))).view(dtype)


# Bits. ------------------------------------------------------------------------------------------------------


def _shift(form: _Form) -> Reader:
    """Shift; by more than all bits, nothing or the sign is left."""
    a, by, bits = form.read(1), form.read(2, "u32"), form.bits

    def shift(threads: Threads) -> Values:
        value, n = a(threads), by(threads)
        bounded = np.minimum(n, bits - 1).astype(value.dtype)
        if form.name == "shr" and value.dtype.kind == "i":
            return value >> bounded
        shifted = value << bounded if form.name == "shl" else value >> bounded
        return np.where(n >= bits, 0, shifted).astype(value.dtype)

    return shift


def _funnel(form: _Form) -> Reader:
    low, high, by = (form.read(i, "b32") for i in (1, 2, 3))

    def shift(threads: Threads) -> Values:
        n = by(threads) & np.uint32(31) if "wrap" in form.flags else np.minimum(by(threads), 32)
        both = low(threads).astype(np.uint64) | high(threads).astype(np.uint64) << np.uint64(32)
        n = n.astype(np.uint64)
        return (both >> n if form.flags[0] == "r" else both << n >> np.uint64(32)).astype(np.uint32)

    return shift


def _ones(form: _Form) -> Reader:
    a = form.read(1)
    return lambda threads: np.unpackbits(a(threads)[:, None].view(np.uint8), axis=1).sum(1).astype(np.uint32)


def _leading(form: _Form) -> Reader:
    """Count leading zeros, or find the highest bit: ``clz`` and ``bfind``."""
    a = form.read(1, f"u{form.bits}")
    counts_zeros = form.name == "clz" or "shiftamt" in form.flags

    def find(threads: Threads) -> Values:
        value = a(threads)
        highest = np.full(value.shape, -1, np.int32)
        for bit in range(form.bits):
            highest[value >> value.dtype.type(bit) != 0] = bit
        return form.bits - 1 - highest if counts_zeros else highest

    return find


def _extracted(form: _Form) -> Reader:
    a, start, length = form.read(1), int(form.operands[2]), int(form.operands[3])
    left, right = (dtype_of(form.kind).type(n) for n in (form.bits - start - length, form.bits - length))
    return lambda threads: a(threads) << left >> right


def _inserted(form: _Form) -> Reader:
    a, b, (start, length) = form.read(1), form.read(2), map(int, form.operands[3:])
    dtype = dtype_of(form.kind)
    mask = dtype.type(((1 << length) - 1) << start)
    return lambda threads: (b(threads) & ~mask) | (a(threads) << dtype.type(start) & mask)


def _permutation(form: _Form) -> Reader:
    """Choose four of eight bytes, or of their signs."""
    a, b, selector = (form.read(i, "b32") for i in (1, 2, 3))

    def permute(threads: Threads) -> Values:
        both = a(threads).astype(np.uint64) | b(threads).astype(np.uint64) << np.uint64(32)
        which = selector(threads).astype(np.uint64)
        result = np.zeros(threads.active_count, np.uint64)
        for i in range(4):
            chosen = which >> np.uint64(4 * i) & np.uint64(15)
            byte = both >> (chosen & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            result |= np.where(chosen & np.uint64(8), sign, byte) << np.uint64(8 * i)
        return result.astype(np.uint32)

    return permute


def _truth_table(form: _Form) -> Reader:
    """Look up three bits in a table of eight."""
    a, b, c = (form.read(i, "b32") for i in (1, 2, 3))
    table = int(form.operands[4], 0)

    def look_up(threads: Threads) -> Values:
        x, y, z = a(threads), b(threads), c(threads)
        result = np.zeros(threads.active_count, np.uint32)
        for i in range(8):
            if table >> i & 1:
                result |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        return result

    return look_up


_COMPUTED: dict[str, Callable[[_Form], Reader | None]] = {
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(("mul", "mad", "fma"), _product),
    **dict.fromkeys(("max", "min"), _extreme),
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("clz", "bfind"), _leading),
    **dict.fromkeys(("mov", "cvta"), lambda form: form.read(1)),
    "activemask": lambda form: lambda threads: np.array([0xFFFFFFFF], np.uint32),
    "bfe": _extracted,
    "bfi": _inserted,
    "copysign": _with_sign,
    "cvt": _conversion,
    "div": _quotient,
    "lop3": _truth_table,
    "neg": _negative,
    "not": _inverted,
    "popc": _ones,
    "prmt": _permutation,
    "rem": _remainder,
    "selp": _selection,
    "setp": _comparison,
    "shf": _funnel,
    "testp": _is_finite,
}
