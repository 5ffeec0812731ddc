"""The child process of :func:`tests.support.triton_offline.run_in_interpreter`: Triton code on CPU tensors.

Triton decides at import time whether ``@triton.jit`` interprets, so this runs in a process of its own, with
``TRITON_INTERPRET=1``. It reads one JSON request a line from stdin (where to find the generated module and
the pickled inputs, where to put the results) and answers with one JSON line on stdout.

Everything of the generated module is executed as it is, but for the following.

* ``async_compile.triton(name, source)`` gives a :class:`_Kernel` over Triton's interpreter, with the block
  sizes that Inductor's own heuristics put first and Inductor's own grid for them.
* The wrapper's ``call`` gets stand-ins for streams, device guards and ``empty_strided_cuda``.
* ``libdevice`` functions, which the interpreter does not have, are NumPy functions.

Note [Triton's interpreter rounds bf16 wrongly]

Measured on Triton 3.6.0, 3.7.1 and 3.9.0 (those of torch 2.11, 2.13 and 2.15), which agree bit for bit:

* fp32 to bf16, by ``.to(tl.bfloat16)`` as by a store to a bf16 pointer, *truncates*, and
  ``fp_downcast_rounding="rtne"`` changes nothing: half of all normal values come out an ulp too small in
  magnitude, 99.6 % of fp32's subnormals come out as other numbers, and a NaN whose payload is in the low 16
  bits comes out as infinity;
* bf16 to fp32, which is exact on hardware, is wrong for all 254 subnormal bf16 values;
* bf16 arithmetic, and casts between bf16 and int, fp16 or fp64, take the 16 *bits* as an integer: 1 + 1 =
  1.7e38.

fp32 to e4m3 and back it converts in its own way, and computes with the bits as it does with those of bf16.
fp32 to fp16 and back are right (NumPy's). Hardware rounds to nearest even (``cvt.rn.bf16.f32``; Triton's PTX
says so), so this module replaces the casts by correct ones and refuses bf16 arithmetic (Inductor emits none:
it computes in fp32 registers). All of it is held to torch's conversions by
``tests/lowering/test_triton_offline.py``.

Note [What the interpreter cannot say about the card]

Add, subtract, multiply, divide, square root and fma are rounded here as IEEE 754 says. On the card ``a * b +
c`` may be contracted to one fma (LLVM does, unless the kernel's ``triton_meta`` says ``enable_fp_fusion:
False``), plain ``/`` in Triton (not ``div_rn``) is ``div.full.f32`` (2 ulp;
``config.eager_numerics.division_rounding`` makes it ``div_rn``), and ``exp``, ``log``, ``pow``, ``rsqrt``
differ in their last bits: here they are evaluated in fp64 and rounded once. The PTX of ``compile_to_ptx`` is
where to look for those.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import triton.language.extra.cuda.libdevice as nvidia_libdevice
import triton.language.extra.libdevice as generic_libdevice
from torch._inductor import async_compile
from torch._inductor.runtime import triton_helpers, triton_heuristics
from triton.runtime import interpreter

Array = Any  # np.ndarray; NumPy's generic parameters say nothing here
TensorHandle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder

# ---------------------------------------------------------------- conversions


def bf16_bits(x: Array) -> Array:
    """Round fp32 to bf16, to nearest, ties to even; the result's bits as uint16. NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)


def bf16_values(bits: Array) -> Array:
    """The fp32 values of bf16 bit patterns; exact."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def e4m3_values(bits: Array) -> Array:
    """The fp32 values of e4m3 bit patterns: exact."""
    exponent, fraction = (bits >> 3) & 15, bits & 7
    sizes = np.ldexp(
        np.where(exponent == 0, fraction, fraction + 8), np.maximum(exponent, 1).astype(int) - 10
    )
    sizes = np.where(bits & 0x7F == 0x7F, np.nan, sizes).astype(np.float32)
    return np.copysign(sizes, np.where(bits & 0x80, -1, 1).astype(np.float32))


#: The finite e4m3 numbers that are not negative, by their bits, fp64.
E4M3 = e4m3_values(np.arange(127, dtype=np.uint8)).astype(np.float64)


def e4m3_bits(x: Array) -> Array:
    """Round fp16, fp32 or fp64 to e4m3, to nearest, ties to even; the result's bits as uint8.

    As ``cvt.rn.satfinite.e4m3x2.f32`` does: what is too large becomes the largest finite number.
    """
    sizes = np.abs(x.astype(np.float64))
    above = np.minimum(np.searchsorted(E4M3, sizes), len(E4M3) - 1)
    below = np.maximum(above - 1, 0)
    middle = (E4M3[below] + E4M3[above]) / 2
    nearest = np.where(sizes > middle, above, below)
    nearest = np.where((sizes == middle) & (above % 2 == 0), above, nearest)
    bits = np.where(np.isnan(x), 0x7F, nearest | np.where(np.signbit(x), 0x80, 0))
    return bits.astype(np.uint8)


def to_odd_f32(x: Array) -> Array:
    """Round fp64 to fp32, to odd: rounding that once more, to at most 22 bits, is then a single rounding.

    Boldo and Melquiond, "Emulation of a FMA and Correctly Rounded Sums: Proved Algorithms Using Rounding to
    Odd", 2008.
    """
    nearest = x.astype(np.float32)
    back = nearest.astype(np.float64)
    bits = nearest.view(np.uint32)
    # Step down in magnitude where the nearest value is too large: that is truncation, and it keeps the sign.
    truncated = np.where(np.abs(back) > np.abs(x), bits - np.uint32(1), bits)
    inexact = (back != x) & ~np.isnan(x)
    return np.where(inexact, truncated | np.uint32(1), bits).astype(np.uint32).view(np.float32)


def cast(self: Any, src: Any, dst_type: Any) -> Any:
    """A ``cast_impl`` that does what it should: see Note [Triton's interpreter rounds bf16 wrongly]."""
    source, target = src.dtype.scalar, dst_type.scalar
    if source == target and src.data.dtype != np.bool_:  # a comparison of floats says that it is one
        return src
    if any(kind.is_fp8() and kind != tl.float8e4nv for kind in (source, target)):
        raise NotImplementedError(f"cast from {source} to {target}: add it to {__file__}")
    decode = {tl.bfloat16: bf16_values, tl.float8e4nv: e4m3_values}.get(source)
    data = src.data if decode is None else decode(src.data)
    if target == tl.float8e4nv:
        return TensorHandle(e4m3_bits(data), target)
    if target == tl.bfloat16:
        if data.dtype != np.float32:
            data = (
                to_odd_f32(data.astype(np.float64)) if data.dtype != np.float16 else data.astype(np.float32)
            )
        return TensorHandle(bf16_bits(data), target)
    return TensorHandle(data.astype(interpreter._get_np_dtype(dst_type)), target)


def fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
    if rounding is not None and rounding != interpreter._ir.ROUNDING_MODE.RTNE:
        raise NotImplementedError(f"cast to {dst_type} with rounding mode {rounding}")
    return cast(self, src, dst_type)


# ----------------------------------------------------------------- arithmetic


def fma(x: Array, y: Array, z: Array) -> Array:
    """x·y + z with one rounding, for fp16 and fp32, and for fp64 if x and y are numbers of fp32.

    The product is exact in fp64; its sum with z, rounded there to odd, keeps 53 ≥ 2·24 + 2 bits, so the last
    rounding is the only one that counts.
    """
    x, y, z = np.broadcast_arrays(x, y, z)
    if x.dtype == np.float64 and all(np.array_equal(a, a.astype(np.float32), equal_nan=True) for a in (x, y)):
        return x * y + z
    if x.dtype not in (np.float16, np.float32):
        raise NotImplementedError(f"fma of {x.dtype} in the interpreter")
    product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)  # TwoSum: exact
    bits = total.view(np.int64)
    odd = (bits & 1) == 1
    # Towards the error: away from zero if it has the sum's sign, towards zero otherwise.
    step = np.where((error > 0) == (total > 0), 1, -1)
    nudge = np.isfinite(total) & np.isfinite(error) & (error != 0) & (total != 0) & ~odd
    return np.where(nudge, bits + step, bits).view(np.float64).astype(x.dtype)


def wide(function: Callable[..., Array]) -> Callable[..., Array]:
    """Evaluate in fp64 and round once: nearer to the true value than the card's, not the card's bits."""

    def evaluate(*arguments: Array) -> Array:
        kind = arguments[0].dtype
        return function(*(a.astype(np.float64) for a in arguments)).astype(kind)

    return evaluate


def as_int(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: function(x).astype(np.int32)


# NVIDIA's names (libdevice.10.bc), without "__nv_" and without the "f" of the fp32 variants.
LIBDEVICE: dict[str, Callable[..., Array]] = {
    **{n: wide(getattr(np, n)) for n in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p")},
    **{n: wide(getattr(np, n)) for n in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **{n: wide(getattr(np, "arc" + n[1:])) for n in ("asin", "acos", "atan", "asinh", "acosh", "atanh")},
    **{n: getattr(np, n) for n in ("floor", "ceil", "trunc", "rint", "copysign", "nextafter", "fmod")},
    "hypot": wide(np.hypot),
    "pow": wide(np.power),
    "atan2": wide(np.arctan2),
    "rsqrt": wide(lambda x: 1.0 / np.sqrt(x)),
    "sqrt": np.sqrt,
    "nearbyint": np.rint,
    "fabs": np.fabs,
    "fmin": np.fmin,
    "fmax": np.fmax,
    "ldexp": lambda x, n: np.ldexp(x, n).astype(x.dtype),
    "fma": fma,
    "isinf": as_int(np.isinf),
    "isnan": as_int(np.isnan),
    "signbit": as_int(np.signbit),
    "signbitd": as_int(np.signbit),
    "llrint": lambda x: np.rint(x).astype(np.int64),
    # Correctly rounded operations: __nv_fadd_rn, __nv_dadd_rn, __nv_fma_rn, ...
    "add_rn": np.add,
    "sub_rn": np.subtract,
    "mul_rn": np.multiply,
    "div_rn": np.divide,
    "fast_fdivide": np.divide,
    "sqrt_rn": np.sqrt,
    "rcp_rn": lambda x: x.dtype.type(1) / x,
    "fma_rn": fma,
}


def libdevice_function(symbol: str) -> Callable[..., Array]:
    name = symbol.removeprefix("__nv_")
    rounded = re.fullmatch(r"[fd]?(add|sub|mul|div|sqrt|rcp|ma)f?_rn", name)
    if rounded:
        name = {"ma": "fma"}.get(rounded[1], rounded[1]) + "_rn"
    for candidate in (name, name.removesuffix("f")):
        if candidate in LIBDEVICE:
            return LIBDEVICE[candidate]
    raise NotImplementedError(f"libdevice function {symbol}: add it to LIBDEVICE in {__file__}")


def extern_elementwise(
    self: Any, lib: str, path: str, symbol: str, arguments: Sequence[Any], result: Any, pure: bool
) -> Any:
    return TensorHandle(libdevice_function(symbol)(*(a.data for a in arguments)), result.scalar)


class _AsmResult:
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def get_result(self, index: int) -> Any:
        return self.handle


PTX_F32: dict[str, Callable[..., Array]] = {
    "fma": fma,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "sqrt": np.sqrt,
}


def inline_asm(
    self: Any, asm: str, constraints: str, values: Sequence[Any], kinds: Any, pure: bool, pack: int
) -> Any:
    """One correctly rounded fp32 instruction, such as ``fma.rn.f32 $0, $1, $2, $3;``, and nothing else."""
    form = re.fullmatch(r"\s*(\w+)\.rn\.f32 \$0((?:, \$\d)+);?\s*", asm)
    if form is None or form[1] not in PTX_F32 or pack != 1:
        raise NotImplementedError(f"inline assembly {asm!r}")
    operands = [values[int(n) - 1].data for n in re.findall(r"\$(\d)", form[2])]
    return _AsmResult(TensorHandle(PTX_F32[form[1]](*operands), tl.float32))


def refuse_bits(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        kinds = [a.dtype.scalar for a in arguments if isinstance(a, TensorHandle)]
        if any(kind == tl.bfloat16 or kind.is_fp8() for kind in kinds):
            raise NotImplementedError(
                f"{name} on {kinds}: the interpreter would compute with the bits as integers"
            )
        return method(self, *arguments, **options)

    return checked


def largest(x: Any, dim: int) -> Any:
    """``triton_helpers.max2``, NaN if one is, at once: the interpreter goes by pairs of elements."""
    values = x.handle.data.max(axis=dim)
    kind = tl.block_type(x.dtype.scalar, list(values.shape))
    return tl.tensor(TensorHandle(values, x.dtype.scalar), kind)


def mend_interpreter() -> None:
    """Put the correct casts, fma and the libdevice functions into Triton's interpreter."""
    triton_helpers.max2 = largest
    allowed = {"create_fp_to_si", "create_fp_to_ui", "create_fp_ext", "create_fp_trunc", "create_fp_to_fp"}
    allowed |= {"create_fabs"}  # masks the sign bit, which is right for bf16 too
    names = {n for n in vars(Builder) if n.startswith("create_f")} - allowed
    names |= {
        f"create_{n}" for n in ("precise_divf", "approx_divf", "clampf", "minimumf", "maximumf", "minnumf")
    }
    names |= {
        f"create_{n}" for n in ("maxnumf", "precise_sqrt", "sqrt", "rsqrt", "exp", "exp2", "log", "log2")
    }
    names |= {f"create_{n}" for n in ("cos", "sin", "erf", "ceil")}
    for name in sorted(names & set(vars(Builder))):
        setattr(Builder, name, refuse_bits(name, getattr(Builder, name)))
    Builder.cast_impl = cast
    Builder.create_fp_to_fp = fp_to_fp
    Builder.create_fma = refuse_bits(
        "create_fma", lambda self, x, y, z: TensorHandle(fma(x.data, y.data, z.data), z.dtype.scalar)
    )
    Builder.create_extern_elementwise = extern_elementwise
    Builder.create_inline_asm = inline_asm

    # Triton 3.6 uses int() of an array of one element, which NumPy 2.5 refuses; later versions do this
    # themselves.
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_tensor_and_index

    # triton.language.extra.libdevice is a list of names without bodies, which the compiler maps to a vendor's
    # module.
    for name, function in vars(nvidia_libdevice).items():
        if callable(function) and hasattr(generic_libdevice, name) and not name.startswith("_"):
            setattr(generic_libdevice, name, _bound(function))


def _bound(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return function(*arguments, _semantic=_semantic())

    return call


def _semantic() -> Any:
    return interpreter.interpreter_semantic  # Triton 3.6 and later


# -------------------------------------------------------------------- kernels

SCALARS = {
    "i1": (np.bool_, tl.int1),
    "i8": (np.int8, tl.int8),
    "i16": (np.int16, tl.int16),
    "i32": (np.int32, tl.int32),
    "i64": (np.int64, tl.int64),
    "u32": (np.uint32, tl.uint32),
    "u64": (np.uint64, tl.uint64),
    "fp16": (np.float16, tl.float16),
    "fp32": (np.float32, tl.float32),
    "fp64": (np.float64, tl.float64),
}
LARGEST_BLOCK = (
    8192  # a kernel of one index gives the same numbers at every block size, and large ones take fewer steps
)


class _Kernel:
    """Stands for Inductor's ``CachingAutotuner``: the wrapper calls ``run`` on it."""

    def __init__(
        self, fn: Any, config: Any, triton_meta: dict[str, Any], inductor_meta: dict[str, Any]
    ) -> None:
        self.fn = fn
        self.blocks = {n: v for n, v in config.kwargs.items() if n in fn.arg_names}
        self.signature = triton_meta["signature"]
        self.constants = triton_meta.get("constants", {})
        self.inductor_meta = inductor_meta

    def _argument(self, name: str, value: Any) -> Any:
        kind = SCALARS.get(self.signature.get(name, ""))
        if kind is not None and isinstance(value, torch.Tensor):
            value = value.item()  # a 0-d tensor of the host, which the launcher takes for a number
        if kind is None or not isinstance(value, (bool, int, float)):
            return value
        array_type, triton_type = kind
        return tl.tensor(TensorHandle(np.array([value], dtype=array_type), triton_type), triton_type)

    def run(self, *arguments: Any, stream: Any = None, **named: Any) -> None:
        names = [n for n in self.fn.arg_names if n not in self.blocks]
        grid_names = list(self.inductor_meta.get("extra_launcher_args", ()))
        if len(arguments) + len(named) != len(names) + len(grid_names):
            names = [n for n in names if n not in self.constants]
        values = {**self.constants, **dict(zip(names + grid_names, arguments, strict=True)), **named}
        blocks = dict(self.blocks)
        if self.inductor_meta["grid_type"] == "Grid1D" and list(blocks) == ["XBLOCK"]:
            length, of_each = (max(int(values.get(name, 1)), 1) for name in ("xnumel", "r0_numel"))
            largest = 1 << (LARGEST_BLOCK // of_each).bit_length() - 1
            blocks["XBLOCK"] = min(max(largest, 1), 1 << (length - 1).bit_length())
        grid_of = triton_heuristics.GridExpr.from_meta(self.inductor_meta, blocks)
        grid = grid_of.eval_slow({**blocks, **{n: v for n, v in values.items() if isinstance(v, int)}})
        bound = {n: self._argument(n, values[n]) for n in self.fn.arg_names if n in values}
        with np.errstate(all="ignore"):
            self.fn.run(grid=tuple(int(g) for g in grid), warmup=False, **bound, **blocks)


def interpreted(
    size_hints: Any,
    configs: Sequence[Any],
    triton_meta: dict[str, Any],
    heuristic_type: Any = None,
    filename: str | None = None,
    inductor_meta: dict[str, Any] | None = None,
    **unused: Any,
) -> Callable[[Any], _Kernel]:
    """Stand in for ``triton_heuristics.cached_autotune``: takes the first configuration, tunes nothing."""
    return lambda fn: _Kernel(fn, configs[0], triton_meta, inductor_meta or {})


_kernels: dict[str, _Kernel] = {}
_folder = tempfile.TemporaryDirectory(prefix="triton_offline_")


def load_module(source: str) -> types.ModuleType:
    """Import Python source from a file: Triton reads a kernel's source through ``inspect``."""
    handle, path = tempfile.mkstemp(suffix=".py", dir=_folder.name)
    with os.fdopen(handle, "w") as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_kernel(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> _Kernel:
    if source_code not in _kernels:
        _kernels[source_code] = getattr(load_module(source_code), kernel_name)
    return _kernels[source_code]


class _Nothing(contextlib.AbstractContextManager[None]):
    """A device guard where there is no device."""

    def __init__(self, *arguments: Any) -> None: ...

    def __exit__(self, *arguments: Any) -> None: ...


def mend_runtime() -> None:
    """Let the generated wrapper run where there is no card, on CPU tensors."""
    guards: Any = torch._C._dynamo.guards
    replacements: list[tuple[Any, str, Any]] = [
        (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
        (guards, "_empty_strided_cuda", guards._empty_strided_cpu),
        (torch.cuda, "_DeviceGuard", _Nothing),
        (torch.cuda, "device", _Nothing),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0)),
        (async_compile.AsyncCompile, "triton", load_kernel),
        (async_compile.AsyncCompile, "wait", lambda self, scope: None),
        (triton_heuristics, "cached_autotune", interpreted),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
    ]
    for owner, name, value in replacements:
        setattr(owner, name, value)


def on_cpu(source: str) -> str:
    """Redirect the tensors that the wrapper makes; ``DeviceProperties(...)`` in kernels is left alone."""
    return re.sub(r"(?<!\w)device\(type='cuda', index=\d+\)", "device(type='cpu')", source)


def serve(requests: Iterator[str], reply: Callable[[dict[str, Any]], None]) -> None:
    for line in requests:
        request = json.loads(line)
        try:
            with open(request["source"]) as file:
                module = load_module(on_cpu(file.read()))
            inputs = torch.load(request["inputs"], weights_only=True)
            outputs = list(module.call(list(inputs)))
            torch.save((inputs, outputs), request["results"])
            reply({"ok": True})
        except Exception:
            reply({"ok": False, "error": traceback.format_exc()})


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a kernel's prints must not be taken for answers

    def reply(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 must be set before Triton is imported"
    mend_interpreter()
    mend_runtime()
    reply({"ok": True})
    serve(iter(sys.stdin.readline, ""), reply)


if __name__ == "__main__":
    main()
