"""Printed kernels: spellings against eager torch, the limits of ``Finite``, and the text of a kernel."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from collage_fx import backend_of, install
from collage_fx.codegen import FLAGS, NoSpelling, flat_kernel, number_kernel
from collage_fx.codegen.elements import JOINS
from collage_fx.codegen.functions import function_of
from collage_fx.codegen.kernels import LIMITS, PRELUDE, PRELUDE_F16
from collage_fx.codegen.spellings import CPP
from collage_fx.numerics import ELEMENTWISE, arithmetic, dithered, dithered_sum, dithered_upper, with_byte
from collage_fx.numerics.dither import phase
from collage_fx.numerics.float24 import dithered_byte
from collage_fx.torch_compat import load_cpp_library
from tests.printed_kernel import PAGE, page

aten, prims = torch.ops.aten, torch.ops.prims

F32, I32, I64, BF16 = torch.float32, torch.int32, torch.int64, torch.bfloat16

#: No multiple of a chunk, and more than one.
LENGTH = 333


def patterns(dtype: torch.dtype, seed: int, length: int = LENGTH) -> Tensor:
    """Random bits, and numbers at which roundings and conversions are special."""
    if dtype is torch.bool:
        return torch.arange(length) % 3 == seed % 3
    generator = torch.Generator().manual_seed(seed)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = torch.randint(-(2**62), 2**62, (length,), generator=generator, dtype=torch.int64)
    found = bits.to(integers[dtype.itemsize]).view(dtype)
    if dtype.is_floating_point:
        some = [0.0, -0.0, 1.0, -1.5, 0.5, 2.5, -3.5, 1e-40, 65504.0, 65520.0, float("inf"), float("nan")]
        found[: len(some)] = torch.tensor(some).to(dtype).roll(seed)
    return found


def called(source: str, *arguments: Tensor | int) -> None:
    """Compile a kernel and call it."""
    kernel = load_cpp_library(source, FLAGS).kernel
    words = (x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
    kernel(*map(ctypes.c_int64, words))


def graph_of(target: Any, operands: list[Any], into: Tensor, *, length: bool = False) -> Graph:
    """The graph of one operation, whose tensors are inputs, and all else constants.

    Args:
        target: the operation.
        operands: its operands.
        into: the last input, for the result.
        length: whether the first input is the length.
    """
    graph = Graph()
    if length:
        graph.placeholder("n").meta["val"] = LENGTH
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    nodes = []
    for i, operand in enumerate(tensors):
        node = graph.placeholder(f"x{i}")
        node.meta["val"] = operand
        nodes.append(node)
    given = iter(nodes)
    result = graph.call_function(
        target, tuple(next(given) if isinstance(each, Tensor) else each for each in operands)
    )
    result.meta["val"] = into
    out = graph.placeholder("out")
    out.meta["val"] = into
    store = graph.call_function(aten.copy_.default, (out, result))
    store.meta["val"] = into
    graph.output(())
    return graph


def computed(target: Any, operands: list[Any], *, is_number: bool = False) -> tuple[Tensor, Tensor]:
    """Run an operation by a printed kernel and by eager torch."""
    expected = target(*operands)
    into = torch.zeros_like(expected)
    graph = graph_of(target, operands, into)
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    if is_number:
        called(number_kernel(graph), *tensors, into)
    else:
        called(flat_kernel(graph, 1), *tensors, into, LENGTH)
    return into, expected


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits; one NaN is like another."""
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    nan = one.isnan() & other.isnan()
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.dtype.itemsize]
    return bool(((one.view(integer) == other.view(integer)) | nan).all())


x, y = (patterns(F32, seed) for seed in (1, 2))
i, j = (patterns(I32, seed) for seed in (3, 4))

OPERATIONS: dict[str, tuple[Any, list[Any]]] = {
    **{
        str(target): (target, [x, y])
        for target in (
            *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
            *(aten.maximum.default, aten.minimum.default, aten.eq.Tensor, aten.lt.Tensor, aten.ge.Tensor),
        )
    },
    **{
        str(target): (target, [x])
        for target in (
            *(aten.neg.default, aten.abs.default, aten.reciprocal.default, aten.floor.default),
            *(aten.ceil.default, aten.trunc.default, aten.round.default, aten.sign.default),
            *(aten.isnan.default, aten.logical_not.default),
        )
    },
    "a number": (aten.mul.Tensor, [x, 0.1]),
    "a number first": (aten.sub.Tensor, [1.0, x]),
    "a 0-d number": (aten.mul.Tensor, [x, torch.tensor(0.1)]),
    "clamp_min": (aten.clamp_min.default, [x, 0.25]),
    "clamp_max": (aten.clamp_max.default, [x, 0.25]),
    "a comparison with a number": (aten.le.Scalar, [x, 0.5]),
    "a comparison of integers": (aten.gt.Scalar, [i, 7]),
    "where": (aten.where.self, [patterns(torch.bool, 0), x, y]),
    "the bits": (aten.view.dtype, [x, I32]),
    "sums wrap around": (aten.add.Tensor, [i, j]),
    "products wrap around": (aten.mul.Tensor, [i, -0x4AFB0CCD]),
    "bytes wrap around": (aten.add.Tensor, [patterns(torch.int8, 5), patterns(torch.int8, 6)]),
    "and": (aten.bitwise_and.Scalar, [i, 0xFFFF]),
    "xor": (aten.bitwise_xor.Tensor, [i, j]),
    "right shift": (aten.__rshift__.Scalar, [i, 5]),
    "left shift": (aten.__lshift__.Scalar, [i, 5]),
    "bfloat16 to float32": (prims.convert_element_type.default, [patterns(BF16, 7), F32]),
    "float16 to float32": (prims.convert_element_type.default, [patterns(torch.float16, 8), F32]),
    "float32 to bfloat16": (prims.convert_element_type.default, [x, BF16]),
    "float32 to float16": (prims.convert_element_type.default, [x, torch.float16]),
    "int16 to int32": (prims.convert_element_type.default, [patterns(torch.int16, 9), I32]),
    "int32 to int16": (prims.convert_element_type.default, [i, torch.int16]),
    "int32 to float32": (prims.convert_element_type.default, [i, F32]),
    "int32 to int64": (prims.convert_element_type.default, [i, I64]),
    "uint8 to float32": (prims.convert_element_type.default, [patterns(torch.uint8, 10), F32]),
    "a square": (aten.pow.Tensor_Scalar, [x, 2]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_bits_of_eager_torch(name: str) -> None:
    found, expected = computed(*OPERATIONS[name])
    assert same_bits(found, expected)


def test_a_root_is_correctly_rounded() -> None:
    found, _ = computed(aten.sqrt.default, [x])
    assert same_bits(found, x.double().sqrt().float())


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-8, 2.0**-126, 1e-45, 3.4028234e38, 1e39, 16777217.0, -0.0])
@pytest.mark.parametrize("dtype", [F32, torch.float64])
def test_constants_are_those_of_torch(value: float, dtype: torch.dtype) -> None:
    found, expected = computed(aten.add.Tensor, [torch.full((LENGTH,), -0.0, dtype=dtype), value])
    assert same_bits(found, expected)


def test_a_store_of_a_dtype_without_a_type_in_cpp_is_left_to_inductor() -> None:
    graph = Graph()
    operands = [graph.placeholder(name) for name in ("x", "out")]
    store = graph.call_function(aten.copy_.default, (operands[1], operands[0]))
    for node in (*operands, store):
        node.meta["val"] = x.to(torch.float8_e4m3fn)
    graph.output(())
    with pytest.raises(NoSpelling, match=r"type for torch\.float8_e4m3fn"):
        flat_kernel(graph, 1)


@pytest.mark.parametrize("target", [aten.exp.default, aten.tanh.default])
def test_functions_without_a_spelling_are_left_to_inductor_in_loops_alone(target: Any) -> None:
    with pytest.raises(NoSpelling):
        computed(target, [x])
    found, expected = computed(target, [torch.tensor(0.3, dtype=torch.float64)], is_number=True)
    assert float(found) == pytest.approx(float(expected), rel=2**-51)


def test_powers_of_integers_are_left_to_inductor() -> None:
    """C's ``pow`` is one of doubles, which do not have all numbers of 64 bits."""
    base, exponent, power = torch.tensor(3), torch.tensor(39), torch.tensor(3**39)
    assert int(power.double()) != int(power)
    with pytest.raises(NoSpelling, match=r"pow of torch\.int64"):
        number_kernel(graph_of(aten.pow.Tensor_Tensor, [base, exponent], power))


@pytest.mark.parametrize("dtype", [F32, BF16, torch.int8])
def test_what_is_overwritten_is_read_before(dtype: torch.dtype) -> None:
    """Two tensors change places, and a third gets the first's old values."""
    graph = Graph()
    nodes = [graph.placeholder(name) for name in "abc"]
    tensors = [patterns(dtype, seed) for seed in range(3)]
    old = [each.clone() for each in tensors]
    for node, tensor in zip(nodes, tensors, strict=True):
        node.meta["val"] = tensor
    for into, value in ((0, 1), (1, 0), (2, 0)):
        graph.call_function(aten.copy_.default, (nodes[into], nodes[value])).meta["val"] = tensors[into]
    graph.output(())
    called(flat_kernel(graph, 1), *tensors, LENGTH)
    assert all(same_bits(tensors[into], old[value]) for into, value in ((0, 1), (1, 0), (2, 0)))


# Finite. ----------------------------------------------------------------------------------------------------

COUNT = """
extern "C" void kernel(int64_t* different, int64_t first, int64_t end, int64_t step) {
  int64_t found = 0;
#pragma omp simd reduction(+ : found)
  for (int64_t i = first; i < end; i += step) {
    for (uint32_t sign = 0; sign < 2; ++sign) {
      const float x = bits<float>(uint32_t(i) | sign << 31);
      found += CONDITION && bits<TYPE>(FUNCTION<true>(ARGUMENTS)) != bits<TYPE>(FUNCTION<false>(ARGUMENTS));
    }
  }
  different[0] = found;
}
"""


def differing(
    function: Callable[..., Any],
    dtypes: tuple[torch.dtype, ...],
    constants: tuple[Any, ...],
    limit: int,
    others: str,
    *,
    step: int,
) -> int:
    """Count the float32 numbers below a limit for which ``Finite`` changes a function's result.

    Of a function that joins, those are meant for which what it returns then is below the limit.
    """
    written = function_of(CPP, function, dtypes, constants)
    is_float = written.definition.split("inline ")[1].startswith("float")
    source = COUNT.replace("TYPE", "uint32_t" if is_float else "int32_t").replace("FUNCTION", written.name)
    condition = "true"
    if function in JOINS:
        condition = f"magnitude({written.name}<true>(ARGUMENTS)) < {limit:#x}u"
    source = source.replace("CONDITION", condition).replace("ARGUMENTS", f"x{others}")
    different = torch.zeros(1, dtype=torch.int64)
    text = f"{PRELUDE}\n{PRELUDE_F16}\nnamespace {{\n{written.definition}\n}}\n{source}"
    called(text, different, 0, 0x7F800000 if function in JOINS else limit, step)
    return int(different)


ROUNDINGS: list[Any] = [
    (arithmetic.round_to_storage, (F32,), (BF16,), ""),
    (arithmetic.upper_half, (F32,), (), ""),
    (arithmetic.lower_half, (F32,), (), ""),
    *((dithered, (F32, I32), (BF16,), f", {phase}") for phase in ("0", "0x7fffffff", "-1", "INT32_MIN")),
    *((dithered_upper, (F32, I32), (BF16,), f", {phase}") for phase in ("0", "-1", "0x7fffffff")),
    *((dithered_byte, (F32, I32), (BF16,), f", {phase}") for phase in ("0", "-1", "0x7fffffff")),
]


@pytest.mark.parametrize("case", ROUNDINGS, ids=lambda case: f"{case[0].__name__}{case[2]}{case[3]}")
def test_below_its_limit_a_rounding_needs_no_question(case: Any) -> None:
    """For a hundredth of all float32 numbers. Those to float16 ask nothing."""
    function, dtypes, constants, others = case
    assert differing(function, dtypes, constants, LIMITS[BF16], others, step=97) == 0


@pytest.mark.parametrize("rest", ["0", "1", "-1", "32767", "-32768", "255", "-256"])
def test_where_what_is_joined_is_below_the_limit_no_question_is_needed(rest: str) -> None:
    """Try every bfloat16 number with some rests."""
    case = arithmetic.with_lower_half, (F32, torch.int16), ()
    assert differing(*case, LIMITS[BF16], f", {rest}", step=1 << 16) == 0
    small = str(int(rest) % 256 - 128)
    assert differing(with_byte, (F32, torch.int8), (BF16,), LIMITS[BF16], f", {small}", step=1 << 16) == 0


def test_every_operator_with_a_question_is_tested_here() -> None:
    tested = {case[0] for case in ROUNDINGS} | {*JOINS}
    asking = {arithmetic.rest, arithmetic.ulp_parts}  # of hi, which is rounded
    asks_nothing = {dithered_sum: (F32, F32, I32), phase: (I32, I32)}
    assert tested | asking | {*asks_nothing} == {*ELEMENTWISE.values()}
    assert not any(function_of(CPP, *each).tests for each in asks_nothing.items())


# A kernel. --------------------------------------------------------------------------------------------------


def test_a_small_kernel() -> None:
    """``p -= 0.5 g`` with an error term: what is computed, kept, asked and stored."""
    graph = Graph()
    values = {"p": BF16, "rest": torch.int16, "g": BF16}
    p, rest, g = (graph.placeholder(name) for name in values)
    for node, dtype in zip((p, rest, g), values.values(), strict=True):
        node.meta["val"] = torch.empty(LENGTH, dtype=dtype)

    def call(target: Any, *args: Any, dtype: torch.dtype = F32) -> Any:
        node = graph.call_function(target, args)
        node.meta["val"] = torch.empty(LENGTH, dtype=dtype)
        return node

    ours = torch.ops.collage_fx
    widened, step = (call(prims.convert_element_type.default, node, F32) for node in (p, g))
    whole = call(ours.with_lower_half.default, widened, rest)
    new = call(aten.sub.Tensor, whole, call(aten.mul.Tensor, step, 0.5))
    hi = call(prims.convert_element_type.default, call(ours.upper_half.default, new), BF16, dtype=BF16)
    call(aten.copy_.default, rest, call(ours.lower_half.default, new, dtype=torch.int16), dtype=torch.int16)
    call(aten.copy_.default, p, hi, dtype=BF16)
    graph.output(())
    source = flat_kernel(graph, 1)
    assert "for (; at + 128 <= elements; at += 128) {" in source
    chunk = source[source.index("    uint32_t largest = 0;") : source.index("    } else {")]
    assert (
        chunk
        == """\
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int j = 0; j < count; ++j) {
      const float t1 = with_lower_half<true>(bf16_to_float(p[at + j]), rest[at + j]);
      const float t0 = t1 - (bf16_to_float(g[at + j]) * 0.5f);
      t0_kept[j] = t0;
      largest = larger(larger(largest, magnitude(t1)), magnitude(t0));
    }
    if (__builtin_expect(largest < 0x7f000000u, 1)) {
#pragma omp simd
      for (int j = 0; j < count; ++j) {
        rest[at + j] = lower_half<true>(t0_kept[j]);
        p[at + j] = float_to_bf16<true>(upper_half<true>(t0_kept[j]));
      }
"""
    )


def early_loops(options: dict[str, Any]) -> str:
    """The kernel of AdamW's step up to the loop that stores."""
    parameters = [torch.nn.Parameter(torch.ones(64, 64, dtype=BF16)) for _ in range(2)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = install(torch.optim.AdamW(parameters), **options)
    optimizer.step()
    code = backend_of(optimizer).report().graphs[-1].code[-1]
    return code[code.index('extern "C"') : code.index("if (__builtin_expect")]


@pytest.mark.parametrize(
    ("options", "loops"),
    [
        ({"strategy": "light"}, 2),
        ({"strategy": "light", "rounding": "nearest"}, 1),  # too little is computed from the quotient
        ({"strategy": "light", "error_format": "byte"}, 1),
        ({"strategy": "light", "state": "block16"}, 2),
    ],
    ids=str,
)
def test_a_long_chain_behind_a_quotient_has_a_loop_of_its_own(options: dict[str, Any], loops: int) -> None:
    before_stores = early_loops(options)
    noting = [loop for loop in before_stores.split("#pragma omp simd") if "magnitude(" in loop]
    assert len(noting) == loops
    assert "square_root" not in before_stores[before_stores.rindex("#pragma omp simd") :] or loops == 1


def test_vectors_are_wide_but_for_codes_of_16_bits() -> None:
    """And for numbers of a block, which all loops over its elements read, there is one statement."""
    parameters = [torch.nn.Parameter(torch.ones(64, 64, dtype=BF16))]
    parameters[0].grad = torch.ones_like(parameters[0])
    texts = {}
    for state in (None, "block16", "block8"):
        optimizer = install(torch.optim.AdamW(parameters), strategy="light", state=state)
        optimizer.step()
        texts[state] = backend_of(optimizer).report().graphs[-1].code[-1]
    wide = [state for state, text in texts.items() if text.startswith("#if defined(__AVX512F__)")]
    assert wide == [None, "block8"]
    kernel = texts["block8"][texts["block8"].index('extern "C"') :]
    assert kernel.count("= block_unit_8_signed(") == 1
    assert kernel.count("block_scale(") == 2  # of two moments


def test_a_packed_moment_is_read_once_by_all_loops_before_the_stores() -> None:
    """The values behind its new value are not computed again for the new scale, nor for the update."""
    before_stores = early_loops({"strategy": "light", "state": "block16"})
    assert len(re.findall(r"number_of_code_16_signed\(in\d", before_stores)) == 1


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the page has torch 2.13's graph")
def test_the_page_shows_the_kernel() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.printed_kernel writes it"
