"""Our own code in Inductor's C++ kernels: rests on ``torch._inductor.codegen.cpp``.

In Inductor's language for one element it stands as inline assembly, which C++ kernels have no other use for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.codegen import cpp as cpp_module
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.virtualized import V, ops

from collage_fx.torch_compat.cpp_blocks import code_in_block, value_in_block
from collage_fx.torch_compat.cpp_bytes import dithered_byte, dithered_upper, with_byte
from collage_fx.torch_compat.cpp_dither import dithered, phases
from collage_fx.torch_compat.cpp_halves import (
    lower_half,
    ulp_parts,
    upper_half,
    with_lower_half,
    with_ulp_parts,
)
from collage_fx.torch_compat.patch_cpp_conversions import bfloat16_by_instruction, rest, rounded
from collage_fx.torch_compat.patch_cpp_loads import fetching_ahead
from collage_fx.torch_compat.patch_cpp_sums import SUM, summand, summing
from collage_fx.torch_compat.patching import Patch

INLINE_CODE = Patch(
    name="inline-code",
    target="torch._inductor.codegen.cpp:CppOverrides.inline_asm_elementwise",
    why="C++ kernels round, and compute what a rounding leaves",
    during="lowerings",
    relies_on=(
        "torch._inductor.codegen.cpp:CppCSEVariable has is_vec, update_on_args",
        "torch._inductor.codegen.cpp:CppVecKernel.broadcast",
    ),
)

TILINGS = Patch(
    name="tilings",
    target="torch._inductor.codegen.cpp:TilingSelect.select_tiling(self, fn_list)",
    why="loops with such code handle as many elements at a time as fit a vector of what they store, but in "
    "transposed tiles no more than GCC gets right",
    during="lowerings",
)

FORMATS_OF_LOOPS = Patch(
    name="formats-of-loops",
    target="torch._inductor.codegen.cpp:get_loop_body_lowp_fp(_body)",
    why="the same: it is by this that Inductor counts",
    needed_for="speed",
    during="lowerings",
    relies_on=("torch._inductor.codegen.cpp:TilingSelect.select_tiling has get_loop_body_lowp_fp",),
)


DTYPES_OF_LOOPS = Patch(
    name="dtypes-of-loops",
    target="torch._inductor.codegen.cpp:_get_dtype_from_loopbodies(loop_bodies)",
    why="loops with such code may have vectors of 16-bit integers",
    needed_for="speed",
    during="lowerings",
    relies_on=(
        "torch._inductor.codegen.cpp:TilingSelect.select_tiling has _get_dtype_from_loopbodies",
        *FORMATS_OF_LOOPS.shapes,
    ),
)

TILE_STORES = Patch(
    name="tile-stores",
    target="torch._inductor.codegen.cpp:CppTile2DKernel.store(self, name, index, value, mode)",
    why="and store as many of them in a tile as they have computed, not the whole vector",
    during="lowerings",
    relies_on=("torch._inductor.codegen.cpp:CppTile2DKernel.store has tail_size, num_elems",),
)


def writes_cpp(device: torch.device) -> bool:
    """Whether Inductor writes C++ for the device."""
    return device.type == "cpu" and inductor_config.cpu_backend == "cpp"


def takes_our_cpp(device: torch.device) -> bool:
    """Whether what is being compiled for the device is written in C++ that may contain code of ours."""
    return INLINE_CODE.is_entered and writes_cpp(device)


@contextlib.contextmanager
def writing_our_cpp() -> Iterator[None]:
    """Within, C++ kernels may contain code of ours."""
    with (
        INLINE_CODE.entered(_with_our_code),
        TILINGS.entered(_as_wide_as_stores),
        TILE_STORES.entered(_told_how_many_integers),
        summing(),
        bfloat16_by_instruction(),
        fetching_ahead(),
    ):
        yield


#: The texts that stand for roundings to a storage dtype, in the place of inline assembly.
_ROUNDINGS = {f"collage_fx: round to {dtype}": dtype for dtype in (torch.bfloat16, torch.float16)}


def rounded_in_cpp(value: Any, storage_dtype: torch.dtype) -> Any:
    """A float32 element rounded to a storage dtype and returned as float32, in a C++ kernel.

    Written as two conversions that Inductor does not know to be conversions: the text of the code is all that
    it gets, in the place of inline assembly, which C++ kernels have no other use for.
    """
    (name,) = (name for name, dtype in _ROUNDINGS.items() if dtype == storage_dtype)
    return ops.inline_asm_elementwise(value, asm=name, dtype=torch.float32)


#: The text that stands for :func:`rest_in_cpp`.
_REST = "collage_fx: rest"


def rest_in_cpp(value: Any, hi: Any) -> Any:
    """``value - hi`` where ``hi`` is finite, zero elsewhere, of float32 elements in a C++ kernel."""
    return ops.inline_asm_elementwise(value, hi, asm=_REST, dtype=torch.float32)


#: The texts that stand for the halves of a float32 number, and for what puts them together.
_UPPER, _LOWER, _WHOLE = (f"collage_fx: {what}" for what in ("upper half", "lower half", "with lower half"))


def upper_half_in_cpp(value: Any) -> Any:
    """A float32 element rounded to bfloat16, ties away from zero, as float32, in a C++ kernel."""
    return ops.inline_asm_elementwise(value, asm=_UPPER, dtype=torch.float32)


def lower_half_in_cpp(value: Any) -> Any:
    """The lower 16 bits of a float32 element in a C++ kernel, as an integer; zero where none are kept."""
    return ops.inline_asm_elementwise(value, asm=_LOWER, dtype=torch.int16)


def with_lower_half_in_cpp(hi: Any, rest: Any) -> Any:
    """The float32 element in a C++ kernel of which ``hi`` and a 16-bit integer are the halves."""
    return ops.inline_asm_elementwise(hi, rest, asm=_WHOLE, dtype=torch.float32)


#: The texts that stand for parts of a float16 number's ulp, and for a number with them.
_PARTS, _WITH_PARTS = "collage_fx: ulp parts", "collage_fx: with ulp parts"


def ulp_parts_in_cpp(value: Any, hi: Any) -> Any:
    """``value - hi`` of float32 elements in a C++ kernel, as an integer, in 2**-15 of hi's ulp in float16."""
    return ops.inline_asm_elementwise(value, hi, asm=_PARTS, dtype=torch.int16)


def with_ulp_parts_in_cpp(hi: Any, parts: Any) -> Any:
    """The float32 element in a C++ kernel that is so many parts of an ulp from ``hi``."""
    return ops.inline_asm_elementwise(hi, parts, asm=_WITH_PARTS, dtype=torch.float32)


#: The texts that stand for :func:`phases_in_cpp` and for what depends on a storage dtype, less what follows.
_PHASES, _DITHERED, _DITHERED_UPPER, _DITHERED_BYTE, _WITH_BYTE = (
    f"collage_fx: {what} " for what in ("phases", "dither to", "dithered upper", "dithered byte", "with byte")
)


def phases_in_cpp(place: Any, *phase_and_first: Any, spacing: int) -> Any:
    """``(place + first) * spacing + phase`` modulo 2**32, of int32 numbers in a C++ kernel."""
    return ops.inline_asm_elementwise(place, *phase_and_first, asm=f"{_PHASES}{spacing}", dtype=torch.int32)


def dithered_in_cpp(value: Any, phases: Any, storage_dtype: torch.dtype) -> Any:
    """A float32 element rounded by its phase to a storage dtype, and returned as float32, in a C++ kernel."""
    return ops.inline_asm_elementwise(value, phases, asm=f"{_DITHERED}{storage_dtype}", dtype=torch.float32)


def dithered_upper_in_cpp(value: Any, phases: Any, storage_dtype: torch.dtype) -> Any:
    """The same rounded to eight more bits and then to nearest."""
    return ops.inline_asm_elementwise(
        value, phases, asm=f"{_DITHERED_UPPER}{storage_dtype}", dtype=torch.float32
    )


def dithered_byte_in_cpp(value: Any, phases: Any, storage_dtype: torch.dtype) -> Any:
    """What the second of those roundings leaves, as an integer of 8 bits, in a C++ kernel."""
    return ops.inline_asm_elementwise(value, phases, asm=f"{_DITHERED_BYTE}{storage_dtype}", dtype=torch.int8)


def with_byte_in_cpp(hi: Any, rest: Any, storage_dtype: torch.dtype) -> Any:
    """The float32 element in a C++ kernel that both of them make."""
    return ops.inline_asm_elementwise(hi, rest, asm=f"{_WITH_BYTE}{storage_dtype}", dtype=torch.float32)


#: The texts that stand for integers in blocks and for their values, less how many bits and whether signed.
_BLOCK_CODE, _BLOCK_VALUE = "collage_fx: code in a block ", "collage_fx: value in a block "

#: By bits and whether they may be negative: their dtype, and what follows.
_BLOCKS = {
    (8, True): (torch.int8, "8 signed"),
    (8, False): (torch.uint8, "8"),
    (16, True): (torch.int16, "16 signed"),
    (16, False): (torch.int16, "16"),
}


def block_code_in_cpp(root: Any, byte: Any, phases: Any, bits: int, signed: bool) -> Any:
    """The integer of an element in a C++ kernel, or of its root if it isn't signed, by its phase."""
    dtype, kind = _BLOCKS[bits, signed]
    return ops.inline_asm_elementwise(root, byte, phases, asm=f"{_BLOCK_CODE}{kind}", dtype=dtype)


def block_value_in_cpp(code: Any, byte: Any, bits: int, signed: bool) -> Any:
    """The float32 number in a C++ kernel of an integer and the byte of its block's scale."""
    _, kind = _BLOCKS[bits, signed]
    return ops.inline_asm_elementwise(code, byte, asm=f"{_BLOCK_VALUE}{kind}", dtype=torch.float32)


_WRITERS: dict[str, Callable[..., Any]] = {
    _REST: rest,
    _UPPER: upper_half,
    _LOWER: lower_half,
    _WHOLE: with_lower_half,
    _PARTS: ulp_parts,
    _WITH_PARTS: with_ulp_parts,
    **{
        f"{name}{dtype}": partial(writer, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float16)
        for name, writer in (
            (_DITHERED, dithered),
            (_DITHERED_UPPER, dithered_upper),
            (_DITHERED_BYTE, dithered_byte),
            (_WITH_BYTE, with_byte),
        )
    },
}


def _with_our_code(original: Callable[..., Any]) -> Callable[..., Any]:
    """``inline_asm_elementwise`` that knows :func:`rounded_in_cpp`, :func:`rest_in_cpp` and sums."""

    def inline_asm_elementwise(self: Any, *inputs: Any, asm: str, **options: Any) -> Any:
        if asm in _WRITERS:
            return _WRITERS[asm](*_all_vectors_or_none(inputs))
        if asm.startswith(_PHASES):
            return phases(*inputs, spacing=int(asm.removeprefix(_PHASES)))
        for text, write in ((_BLOCK_CODE, _any_code_in_block), (_BLOCK_VALUE, value_in_block)):
            if asm.startswith(text):
                bits, *sign = asm.removeprefix(text).split()
                return write(*inputs, bits=int(bits), signed=bool(sign))
        if asm.startswith(SUM):
            return summand(_all_vectors_or_none(inputs), asm)
        if asm in _ROUNDINGS:
            (value,) = inputs
            return rounded(value, _ROUNDINGS[asm])
        return original(self, *inputs, asm=asm, **options)

    return inline_asm_elementwise


def _any_code_in_block(root: Any, byte: Any, phases: Any, **kind: Any) -> Any:
    """:func:`code_in_block` of a number that may be a constant, the phases of which are no constants."""
    root, phases = _all_vectors_or_none((root, phases))
    return code_in_block(root, byte, phases, **kind)


def _all_vectors_or_none(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make vectors of single numbers that are used together with vectors."""
    if not any(x.is_vec for x in inputs):
        return inputs
    return tuple(x if x.is_vec else V.kernel.broadcast(x) for x in inputs)


def _as_wide_as_stores(original: Callable[..., Any]) -> Callable[..., Any]:
    """``select_tiling`` that gives a loop with code of ours a vector's worth of what it stores at a time.

    Inductor itself counts by float32 as soon as one node of the loop has nothing else: as those of sums, and
    the rounding of a value where Inductor keeps both apart, as torch 2.15 does. And it makes no vectors at
    all where there are 16-bit integers, which code of ours takes as they are.

    A loop that goes through transposed tiles handles a vector's worth of float32 at a time: what GCC 12 makes
    of two of ATen's transpositions of 32 times 32 elements of 16 bits in a kernel (AVX-512) leaves NaNs.
    """

    def select_tiling(*args: Any) -> Any:
        found: set[torch.dtype] = set()

        def dtypes(original: Callable[..., Any]) -> Callable[..., Any]:
            def of_loops(bodies: Any) -> Any:
                if not any(map(_has_our_code, bodies)):
                    return original(bodies)
                stored = (cpp_module.get_loop_body_lowp_fp(body)[0] for body in bodies)
                found.update(dtype for dtype in stored if dtype is not None)
                return original(bodies) - {torch.int16}

            return of_loops

        def formats(original: Callable[..., Any]) -> Callable[..., Any]:
            return lambda body: (*found, True) if len(found) == 1 else original(body)

        with DTYPES_OF_LOOPS.entered(dtypes), FORMATS_OF_LOOPS.entered(formats):
            factors, *others = original(*args)
        if len(factors) > 1:
            factors = [min(factor, pick_vec_isa().nelements(torch.float32)) for factor in factors]
        return factors, *others

    return select_tiling


def _told_how_many_integers(original: Callable[..., Any]) -> Callable[..., Any]:
    """``store`` into a tile to be transposed, which tells how many 16-bit integers of a vector are numbers.

    Inductor tells it of the dtypes of 8 and 16 bits that it makes vectors of itself, and at a loop's tail.
    Of others it stores whole vectors: in a loop that counts by float32, as many again behind the tile's end.
    """

    def store(kernel: Any, name: str, *args: Any, **kwargs: Any) -> None:
        tail = kernel.tail_size
        if V.graph.get_dtype(name) == torch.int16:
            kernel.tail_size = kernel.num_elems
        try:
            original(kernel, name, *args, **kwargs)
        finally:
            kernel.tail_size = tail

    return store


def _has_our_code(body: Any) -> bool:
    return bool(body.root_block.graph.find_nodes(op="call_method", target="inline_asm_elementwise"))
