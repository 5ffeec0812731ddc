"""The offline Triton harness, on graphs that have nothing to do with this library."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.support import triton_offline as offline

pytestmark = pytest.mark.skipif(
    not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy: pip install triton numpy"
)

BF16, FP16 = torch.bfloat16, torch.float16
INT_OF = {
    torch.float8_e4m3fn: torch.int8,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def random_bits(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bit pattern: subnormals, ±0, ±inf and NaN with the frequency of their encodings."""
    kind = INT_OF[dtype]
    info = torch.iinfo(kind)
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(info.min, info.max + 1, (size,), generator=generator, dtype=torch.int64)
        .to(kind)
        .view(dtype)
    )


def special_fp32() -> Tensor:
    """Around every bf16 value: exact, one fp32 bit more, a tie, a tie ± one bit, one bit less; NaNs too."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    return (high[:, None] | low).flatten().view(torch.float32)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bits, except that one NaN is as good as another."""
    assert actual.dtype == expected.dtype
    if not expected.dtype.is_floating_point:
        assert torch.equal(actual, expected)
        return
    bits = INT_OF[expected.dtype]
    wrong = (actual.view(bits) != expected.view(bits)) & ~(actual.isnan() & expected.isnan())
    first = wrong.flatten().nonzero()[:4].flatten()
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} differ, such as {actual.flatten()[first].tolist()} "
        f"for {expected.flatten()[first].tolist()} at {first.tolist()}"
    )


def generate(fn: Callable[..., None], *inputs: Tensor, keep_on_cpu: Sequence[str] = ()) -> str:
    return offline.triton_source(
        offline.to_cuda(offline.functional_graph(fn, *inputs), keep_on_cpu=keep_on_cpu)
    )


def check_against_eager(fn: Callable[..., None], *inputs: Tensor, source: str | None = None) -> list[Tensor]:
    """Assert that the interpreted kernels leave in the inputs what eager execution leaves, bit for bit."""
    expected, actual = [t.clone() for t in inputs], [t.clone() for t in inputs]
    fn(*expected)
    offline.run_in_interpreter(generate(fn, *inputs) if source is None else source, actual)
    for got, want in zip(actual, expected, strict=True):
        assert_same_bits(got, want)
    return actual


def body(source: str) -> str:
    """The statements of the only kernel."""
    (kernel,) = offline.kernels(source).values()
    return kernel[kernel.index("@triton.jit") :]


# ------------------------------------------------------------ graphs under test


def round_to_bf16(x: Tensor) -> Tensor:
    """Nearest-even rounding of fp32 to a bf16 value, by integer operations; NaN is kept."""
    bits = x.view(torch.int32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)


def pinned(hi: Tensor, lo: Tensor, update: Tensor) -> None:
    x = hi.float() + lo.float() + update.float()
    hi32 = round_to_bf16(x)
    hi.copy_(hi32.to(hi.dtype))
    lo.copy_((x - hi32).to(hi.dtype))


def naive(hi: Tensor, lo: Tensor, update: Tensor) -> None:
    x = hi.float() + lo.float() + update.float()
    new = x.to(hi.dtype)
    hi.copy_(new)
    lo.copy_((x - new.float()).to(hi.dtype))


def small_updates(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hi = torch.randn(size, generator=generator).to(dtype)
    return hi, torch.zeros_like(hi), (torch.randn(size, generator=generator) * 1e-3).to(dtype)


# ----------------------------------------------------------------- conversions


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_conversions_are_those_of_torch(dtype: torch.dtype) -> None:
    """From the format, every value; to it, from fp32 around every bf16 boundary and at random."""

    def fn(values: Tensor, low: Tensor, every: Tensor, wide: Tensor, signs: Tensor) -> None:
        low.copy_(values.to(low.dtype))
        wide.copy_(every.float())
        signs.copy_((-every).abs())

    values = torch.cat([special_fp32(), random_bits(2**18, torch.float32)])
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    check_against_eager(
        fn,
        values,
        torch.zeros(len(values), dtype=dtype),
        every,
        torch.zeros(2**16),
        torch.zeros(2**16, dtype=dtype),
    )


def test_conversions_of_e4m3_are_those_of_torch() -> None:
    """From the format, every value; to it, from fp32 around every number and every tie, and beyond."""

    def fn(values: Tensor, low: Tensor, every: Tensor, wide: Tensor) -> None:
        low.copy_(values.to(low.dtype))
        wide.copy_(every.float())

    e4m3 = torch.float8_e4m3fn
    every = torch.arange(256).to(torch.uint8).view(e4m3)
    numbers = every.float()[:127]
    ends = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    around = [torch.nextafter(ends, torch.full((), towards)) for towards in (math.inf, -math.inf)]
    values = torch.cat([ends, *around, torch.tensor([464.0, math.nan])])
    values = torch.cat([values, -values])
    low, wide = torch.zeros(len(values)).to(e4m3), torch.zeros(256)
    found = check_against_eager(fn, values, low, every, wide)
    beyond = torch.tensor([465.0, 1e30, -math.inf])  # which torch makes NaN, and a GPU the largest
    inputs = [beyond, torch.zeros(3).to(e4m3), *found[2:]]
    offline.run_in_interpreter(generate(fn, *inputs), inputs)
    assert inputs[1].float().tolist() == [448, 448, -448]


def test_fp64_and_integers_convert_to_bf16() -> None:
    def fn(ints: Tensor, doubles: Tensor, from_ints: Tensor, from_doubles: Tensor) -> None:
        from_ints.copy_(ints.to(BF16))
        from_doubles.copy_(doubles.float().to(BF16))

    ints = torch.arange(-(2**15), 2**15, dtype=torch.int32) * 517
    doubles = torch.randn(2**14, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    check_against_eager(fn, ints, doubles, torch.zeros(2**16, dtype=BF16), torch.zeros(2**14, dtype=BF16))


# ------------------------------------------------------------- the two splittings


def test_integer_rounding_survives_lowering() -> None:
    source = generate(pinned, *small_updates(5000, BF16))
    text = body(source)
    assert "bitcast=True" in text
    assert "32767" in text
    assert "-65536" in text

    hi, lo, _ = check_against_eager(pinned, *small_updates(5000, BF16), source=source)
    assert bool((lo != 0).float().mean() > 0.9)
    assert bool((lo.abs() <= hi.abs() * 2**-8).all())
    check_against_eager(pinned, *(random_bits(5000, BF16, seed) for seed in range(3)), source=source)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_naive_split_loses_the_error_term(dtype: torch.dtype) -> None:
    """What this harness is for: eager keeps the error term, Inductor's kernel computes x - x."""
    inputs = small_updates(5000, dtype)
    source = generate(naive, *inputs)
    assert "tl.bfloat16" not in body(source)
    assert "tl.float16" not in body(source)

    eager, compiled = [t.clone() for t in inputs], [t.clone() for t in inputs]
    naive(*eager)
    offline.run_in_interpreter(source, compiled)
    assert_same_bits(compiled[0], eager[0])
    assert bool((eager[1] != 0).float().mean() > 0.9)
    assert bool((compiled[1] == 0).all())


def test_config_of_the_caller_reaches_the_lowering() -> None:
    """With emulate_precision_casts Triton code keeps the explicit cast, on every version."""
    inputs = small_updates(5000, BF16)
    with torch._inductor.config.patch(emulate_precision_casts=True):
        source = generate(naive, *inputs)
    assert "tl.bfloat16" in body(source)
    assert "'enable_fp_fusion': False" in source
    check_against_eager(naive, *inputs, source=source)


# ------------------------------------------------------------------ operations


def test_square_root_and_division_round_correctly() -> None:
    """The oracle is Python's root: torch's eager CPU kernel is not correctly rounded on every machine."""

    def fn(a: Tensor, b: Tensor, root: Tensor, quotient: Tensor) -> None:
        root.copy_(a.sqrt())
        quotient.copy_(a / b)

    a, b = random_bits(20000, torch.float32, 5), random_bits(20000, torch.float32, 6)
    actual = [a, b, torch.zeros_like(a), torch.zeros_like(a)]
    source = generate(fn, *actual)
    assert "sqrt_rn" in body(source)
    offline.run_in_interpreter(source, actual)
    # Rounding the root to fp64 first is harmless, since 53 ≥ 2·24 + 2.
    roots = [math.sqrt(x) if x >= 0 else math.nan for x in a.tolist()]
    assert_same_bits(actual[2], torch.tensor(roots, dtype=torch.float64).float())
    assert_same_bits(actual[3], a / b)


def test_zero_dim_power_and_a_host_scalar() -> None:
    """β**t on 0-d tensors in a kernel, and a 0-d learning rate that stays on the host, passed by value."""

    def fn(weight: Tensor, gradient: Tensor, step: Tensor, rate: Tensor) -> None:
        step.add_(1)
        correction = 1 - 0.999**step
        weight.copy_((weight.float() - rate * gradient.float() / correction.sqrt()).to(BF16))

    weight, _, gradient = small_updates(3000, BF16)
    step, rate = torch.tensor(41.0), torch.tensor(1.0)
    source = generate(fn, weight, gradient, step, rate, keep_on_cpu=["arg3_1"])
    assert "libdevice.pow" in source
    assert re.search(r"arg3_1\.item\(\)", source)

    expected, actual = (
        [weight.clone(), gradient, step.clone(), rate],
        [weight.clone(), gradient, step.clone(), rate],
    )
    fn(*expected)
    offline.run_in_interpreter(source, actual)
    assert int(actual[2]) == 42
    # pow is not correctly rounded anywhere: 1 - 0.999**42 may be off by an ulp of 1, that is 2**-24 / 0.0411
    # = 1.5e-6 relatively, which moves a result of bf16 (u = 2**-9) by at most one ulp.
    assert torch.allclose(actual[0].float(), expected[0].float(), rtol=2**-7, atol=0)
    assert bool((actual[0] != weight).any())


def test_tensors_of_two_sizes_make_two_kernels() -> None:
    def fn(a: Tensor, b: Tensor, ua: Tensor, ub: Tensor) -> None:
        a.add_(ua)
        b.mul_(ub)

    a, b = random_bits(5000, BF16, 1), random_bits(70000, BF16, 2).view(700, 100)
    inputs = (a, b, random_bits(5000, BF16, 3), random_bits(70000, BF16, 4).view(700, 100))
    source = generate(fn, *inputs)
    assert len(offline.kernels(source)) == 2
    check_against_eager(fn, *inputs, source=source)


def test_foreach_kernel_and_strided_tensors() -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor) -> None:
        torch._foreach_mul_([a, b, c], 0.5)

    a, b, c = (
        random_bits(999, BF16, 1),
        random_bits(4096, FP16, 2),
        random_bits(600, BF16, 3).view(20, 30).t(),
    )
    check_against_eager(fn, a, b, c)


def test_reduction() -> None:
    def fn(a: Tensor, total: Tensor) -> None:
        total.copy_(a.float().sum(dim=1))

    a = torch.randint(-1000, 1000, (33, 3000), generator=torch.Generator().manual_seed(0)).to(BF16)
    check_against_eager(fn, a, torch.zeros(33))  # sums of integers below 2**24: exact in any order


def test_fma_is_rounded_once() -> None:
    """An addcmul with value=1 is an fma from torch 2.13 on; compare with exact arithmetic where it is."""

    def fn(a: Tensor, b: Tensor, c: Tensor) -> None:
        c.copy_(torch.addcmul(c, a, b))

    a, b, c = (random_bits(20000, torch.float32, seed) for seed in (7, 8, 9))
    c = -(a * b)  # so that only the product's rounding error is left
    source = generate(fn, a, b, c)
    actual = [a.clone(), b.clone(), c.clone()]
    offline.run_in_interpreter(source, actual)
    product, rounded = a.double() * b.double(), a * b
    usable = rounded.isfinite() & (product.abs() > 2.0**-100)
    residual = (product - rounded.double()).float()  # exact: 48 bits less their leading 24
    expected = residual if "fma" in source else torch.zeros_like(a)
    assert_same_bits(actual[2][usable], expected[usable])


# ----------------------------------------------------------- graphs and patches


def test_capture_leaves_the_inputs_alone_and_to_cuda_keeps_meta_true() -> None:
    def fn(a: Tensor) -> None:
        a.add_(torch.full((4,), 2.0, device="cpu"))

    a = torch.zeros(4)
    graph = offline.functional_graph(fn, a)
    assert bool((a == 0).all())
    moved = offline.to_cuda(graph)
    for node in moved.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            assert node.meta["val"].device == torch.device("cuda", 0), node
    for node in graph.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            assert node.meta["val"].device.type == "cpu", node


def test_source_needs_a_graph_on_cuda() -> None:
    graph = offline.functional_graph(naive, *small_updates(8, BF16))
    with pytest.raises(ValueError, match=r"to_cuda\(\)"):
        offline.triton_source(graph)
    with pytest.raises(ValueError, match="names no placeholders"):
        offline.to_cuda(graph, keep_on_cpu=["nobody"])


def test_hand_made_graph_with_fake_inputs() -> None:
    mode = torch._subclasses.FakeTensorMode()
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    total = graph.call_function(torch.ops.aten.add.Tensor, (a, b))
    graph.call_function(torch.ops.aten.copy_.default, (a, total))
    graph.output(())
    fakes = [offline.fake_cuda((300,), FP16, mode=mode) for _ in range(2)]
    source = offline.triton_source(GraphModule(torch.nn.Module(), graph), fakes)
    check_against_eager(
        lambda x, y: x.add_(y), random_bits(300, FP16, 1), random_bits(300, FP16, 2), source=source
    )


def test_pretending_is_undone() -> None:
    from torch._dynamo.device_interface import CudaInterface
    from torch.utils import _triton

    def answers() -> tuple[object, ...]:
        return (
            torch.cuda.is_available(),
            torch.cuda.device_count(),
            _triton.has_triton(),
            CudaInterface.is_available(),
        )

    before = answers()
    with offline.imaginary_cuda():
        assert answers() == (True, 1, True, True)
        assert torch.cuda.get_device_capability() == (9, 0)
    assert answers() == before


def test_an_error_in_the_kernel_is_reported() -> None:
    source = generate(lambda a: a.add_(1), torch.zeros(8))
    with pytest.raises(RuntimeError, match="failed in Triton's interpreter"):
        offline.run_in_interpreter(source, [torch.zeros(9)])
    inputs = [torch.zeros(8)]  # the process is still usable
    offline.run_in_interpreter(source, inputs)
    assert bool((inputs[0] == 1).all())


# ------------------------------------------------------------------------- PTX


def test_ptx_keeps_the_integer_rounding() -> None:
    (ptx,) = offline.compile_to_ptx(generate(pinned, *small_updates(5000, BF16))).values()
    assert ".target sm_90" in ptx
    assert "32767" in ptx
    assert re.search(r"and\.b32\s.*-65536", ptx)
    assert "cvt.rn.bf16" in ptx
    assert re.search(r"sub\.\S*f32", ptx)


def test_ptx_of_the_naive_split_subtracts_a_value_from_itself() -> None:
    (ptx,) = offline.compile_to_ptx(generate(naive, *small_updates(5000, BF16))).values()
    pairs = re.findall(r"sub\.\S*f32\s+%\w+, (%\w+), (%\w+);", ptx)
    assert pairs
    assert all(left == right for left, right in pairs)


def test_ptx_shows_contraction() -> None:
    """Inductor lets LLVM contract a product and a sum, unless emulate_precision_casts is set."""

    def fn(a: Tensor, b: Tensor, c: Tensor) -> None:
        c.copy_(a * b + c)

    inputs = [torch.ones(4096) for _ in range(3)]
    (fused,) = offline.compile_to_ptx(generate(fn, *inputs)).values()
    assert "fma.rn.f32" in fused
    with torch._inductor.config.patch(emulate_precision_casts=True):
        (separate,) = offline.compile_to_ptx(generate(fn, *inputs)).values()
    assert "fma.rn.f32" not in separate
    assert "mul.rn.f32" in separate


def test_ptx_of_division_is_approximate_and_of_the_square_root_is_not() -> None:
    def fn(a: Tensor, b: Tensor, root: Tensor) -> None:
        a.copy_(a / b)
        root.copy_(b.sqrt())

    (ptx,) = offline.compile_to_ptx(generate(fn, *(torch.ones(4096) for _ in range(3)))).values()
    assert "div.full.f32" in ptx
    assert "sqrt.rn.f32" in ptx
