"""Roundings of the fake card's emulator against fractions, and its parser, without the card."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

np = pytest.importorskip("numpy", reason="needs numpy, as the fake card does")

from tests.support.fake_cuda import environment, floats, ptx  # noqa: E402

#: A module as Triton writes it: a kernel that calls a function, branches by a table, and declares in braces.
MODULE = """
.version 8.7
.func (.param .b64 func_retval0) twice
(
    .param .b64 twice_param_0
)
;
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .f32 kernel_param_1
)
.reqntid 128
{
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [kernel_param_0];   // a comment
    @!%p1 bra $L__BB0_2;
    { // callseq 0, 0
    .param .b64 param0;
    .param .b64 retval0;
    st.param.b64 [param0], %rd1;
    call.uni (retval0), twice, (param0);
    ld.param.b64 %rd2, [retval0];
    } // callseq 0
$L__BB0_2:
    st.global.v2.b32 [ %rd1 + 8 ], { %r1, %r2 };
    ret;
}
.func (.param .b64 func_retval0) twice(
    .param .b64 twice_param_0
)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<3>;
    ld.param.b64 %rd1, [twice_param_0];
    @%p1 bra $L__BB1_1;
    add.f64 %rd1, %rd1, %rd1;
$L__BB1_1:
    st.param.b64 [func_retval0], %rd1;
    ret;
}
"""


def test_functions_are_put_in_place_of_calls() -> None:
    program = ptx.parse(MODULE, "kernel")
    assert list(program.parameters.values()) == [8, 4]
    assert program.threads == 128
    opcodes = [each.opcode for each in program.code]
    assert opcodes == [
        *("ld.param.b64", "bra", "st.param.b64"),
        *("ld.param.b64", "bra", "add.f64", "st.param.b64", "bra"),
        *("ld.param.b64", "st.global.v2.b32", "ret"),
    ]
    function = program.code[3:8]
    assert function[0].operands == ("%call3_rd1", "[param0]")
    assert function[3].operands == ("[retval0]", "%call3_rd1")
    assert function[1].guard == "%call3_p1"
    assert program.width("%call3_rd1") == program.width("retval0") == 8
    goals = [program.labels[each.operands[0]] for each in program.code if each.opcode == "bra"]
    assert goals == [9, 6, 8]
    assert program.code[9].operands == ("[ %rd1 + 8 ]", "{ %r1, %r2 }")


def test_a_function_that_is_not_there() -> None:
    with pytest.raises(NotImplementedError, match="a call of twice"):
        ptx.parse(MODULE[: MODULE.rindex(".func")], "kernel")


def _exact(kind: str, value: Fraction) -> float:
    """Return a value rounded to nearest, even in a tie, in a format without its limits."""
    bits = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}[kind]
    if not value:
        return 0.0
    exponent = abs(value).numerator.bit_length() - abs(value).denominator.bit_length() - bits
    while abs(value) >= Fraction(2) ** (exponent + bits):
        exponent += 1
    return float(round(value / Fraction(2) ** exponent) * Fraction(2) ** exponent)


@pytest.mark.parametrize(
    ("kind", "fma"),
    [
        ("f64", floats.fma64),
        ("f32", floats.fma32),
        ("f16", floats.fma_of_halves("f16")),
        ("bf16", floats.fma_of_halves("bf16")),
    ],
)
def test_a_fused_multiply_add_rounds_once(kind: str, fma: Callable[..., floats.Values]) -> None:
    """Also where the sum cancels, and where a product is just beside a tie."""
    draw = np.random.default_rng(0)
    bits = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}[kind]
    dtype = np.float64 if kind == "f64" else np.float32
    x, y = (draw.integers(2 ** (bits - 1), 2**bits, 3000).astype(dtype) / 2 ** (bits - 1) for _ in range(2))
    product = [_exact(kind, Fraction(float(a)) * Fraction(float(b))) for a, b in zip(x, y, strict=True)]
    scales = np.array([-1, 1, 0.5, 2.0 ** -(bits + 1)], dtype)[draw.integers(0, 4, 3000)]
    z = np.array(product, dtype) * scales
    met = fma(x, y, z)
    if kind in ("f16", "bf16"):
        met = floats.from_half(kind, floats.to_half(kind, met))
    for a, b, c, result in zip(x, y, z, met, strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        if kind == "f16" and abs(exact) < 2**-14:
            continue  # a subnormal has fewer bits
        assert float(result) == _exact(kind, exact), (a, b, c)


def test_versions() -> None:
    assert environment.version("2.11") == "2.11.0"
    with pytest.raises(ValueError, match=r"torch 2\.1: there are"):
        environment.version("2.1")
