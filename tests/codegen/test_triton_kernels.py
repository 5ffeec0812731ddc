"""Printed Triton kernels: spellings against eager torch in an interpreter, and what goes around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch.fx import Graph

from collage_fx import CollageBackend
from collage_fx.codegen import NoSpelling, table_kernel
from collage_fx.torch_compat import TableKernel, no_kernels_ahead
from collage_fx.torch_compat.patch_inductor import without_contraction
from collage_tools.gpu_code.imaginary_cuda import CUDA, imaginary_cuda, machine_code
from tests.codegen.test_kernels import F32, LENGTH, OPERATIONS, graph_of, patterns, same_bits
from tests.support import triton_offline as offline
from tests.support.launched import step_on_cuda
from tests.support.substitutes import threads_of_a_warp
from tests.support.training import parameters, set_gradients

pytestmark = pytest.mark.skipif(
    not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy: pip install triton numpy"
)

aten, prims = torch.ops.aten, torch.ops.prims


def printed(graph: Graph, width: int = 1) -> TableKernel:
    with imaginary_cuda():
        return table_kernel(graph, width, CUDA)


def computed(target: Any, operands: list[Any]) -> tuple[Tensor, Tensor]:
    """Run an operation by a printed kernel in Triton's interpreter, and by eager torch."""
    expected = target(*operands)
    into = torch.zeros_like(expected)
    kernel = printed(graph_of(target, operands, into, length=True))
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    offline.run_table_kernel(kernel, [LENGTH, *tensors, into], LENGTH)
    return into, expected


MORE: dict[str, tuple[Any, list[Any]]] = {
    "an integer to a truth value": (
        prims.convert_element_type.default,
        [patterns(torch.int32, 3), torch.bool],
    ),
    "a truth value to float32": (prims.convert_element_type.default, [patterns(torch.bool, 1), F32]),
    "not": (aten.bitwise_not.default, [patterns(torch.bool, 1)]),
    "not, of integers": (aten.bitwise_not.default, [patterns(torch.int32, 3)]),
    "and, of truth values": (aten.logical_and.default, [patterns(torch.bool, 1), patterns(torch.bool, 2)]),
    "or, of numbers": (aten.logical_or.default, [patterns(F32, 1), patterns(F32, 2)]),
    "the larger of integers": (aten.maximum.default, [patterns(torch.int32, 3), patterns(torch.int32, 4)]),
    "the bits of halves": (aten.view.dtype, [patterns(torch.bfloat16, 7), torch.int16]),
    "float64 to bfloat16": (prims.convert_element_type.default, [patterns(torch.float64, 1), torch.bfloat16]),
}


@pytest.mark.parametrize("name", [*OPERATIONS, *MORE])
def test_an_operation_has_the_bits_of_eager_torch(name: str) -> None:
    found, expected = computed(*{**OPERATIONS, **MORE}[name])
    assert same_bits(found, expected)


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "atan", "sinh", "cosh", "asin", "acos"])
def test_functions_of_the_library_are_within_an_ulp(name: str) -> None:
    """The interpreter rounds them once, a card may err by an ulp."""
    x, target = patterns(F32, 1), getattr(aten, name).default
    found, _ = computed(target, [x])
    exact = target(x.double())
    wrong = (found.double() - exact).abs() > exact.abs() * 2.0**-23 + 2.0**-149
    assert not wrong[exact.isfinite() & (exact.abs() < 3.4e38)].any()


def test_eight_bits_of_peers_are_loaded_and_stored() -> None:
    """Numbers below the largest of e4m3: above it, a card converts to the largest, and torch to NaN."""
    x = patterns(F32, 1).clamp(-400, 400)
    for given, to in ((x, torch.float8_e4m3fn), (x.to(torch.float8_e4m3fn), F32)):
        found, expected = computed(prims.convert_element_type.default, [given, to])
        assert same_bits(found.float(), expected.float())


def test_a_dtype_that_triton_lacks_is_refused() -> None:
    x = torch.zeros(LENGTH, dtype=torch.complex64)
    graph = Graph()
    n, into, given = (graph.placeholder(name) for name in ("n", "into", "given"))
    store = graph.call_function(aten.copy_.default, (into, given))
    n.meta["val"] = LENGTH
    into.meta["val"] = given.meta["val"] = store.meta["val"] = x
    graph.output(())
    with pytest.raises(NoSpelling, match=r"type for torch\.complex64"):
        printed(graph)


def test_a_sigmoid_is_a_quotient() -> None:
    """1 and an exponential are added with an error of an ulp, as are the exponential and the quotient."""
    x = patterns(F32, 1)
    found, _ = computed(aten.sigmoid.default, [x])
    exact = torch.sigmoid(x.double())
    assert not ((found.double() - exact).abs() > exact * 3 * 2.0**-23 + 2.0**-126)[~x.isnan()].any()


@pytest.mark.parametrize("rounds", [False, True])
def test_quotients_are_rounded_where_inductor_is_told_to(rounds: bool) -> None:
    """Otherwise a card's quotient is within 2 ulps, in fewer instructions."""
    x, y = (patterns(F32, seed) for seed in (1, 2))
    with torch._inductor.config.patch({"eager_numerics.division_rounding": rounds}):
        source = printed(graph_of(aten.div.Tensor, [x, y], x, length=True)).source[True]
    assert ("tl.div_rn(" in source) is rounds


@pytest.mark.parametrize(
    ("target", "usual", "fast"),
    [
        (aten.sqrt.default, "sqrt.rn.f32", "sqrt.approx.ftz.f32"),
        (aten.div.Tensor, "div.full.f32", "div.approx"),
    ],
    ids=["root", "quotient"],
)
def test_roots_and_quotients_are_approximate_where_inductor_is_told_to_be_fast(
    target: Any, usual: str, fast: str
) -> None:
    """The interpreter rounds both once; a card's errors are those that the instructions state."""
    x, y = (patterns(F32, seed).abs().clamp(2.0**-60, 2.0**60) for seed in (1, 2))
    operands = [x] if target is aten.sqrt.default else [x, y]
    for is_fast, instruction in ((False, usual), (True, fast)):
        with torch._inductor.config.patch(use_fast_math=is_fast):
            kernel = printed(graph_of(target, operands, x, length=True))
            found, _ = computed(target, operands)
        exact = target(*(each.double() for each in operands))
        assert not ((found - exact).abs() > 2.0**-23 * exact).any()
        assert instruction in str(machine_code(kernel.name, kernel.source[True]).stages["ptx"])


@pytest.mark.parametrize(
    ("target", "instruction"),
    [(aten.maximum.default, "max.NaN.f32"), (aten.minimum.default, "min.NaN.f32")],
    ids=["larger", "smaller"],
)
def test_the_larger_or_smaller_of_a_number_and_nan_is_nan_on_a_card(target: Any, instruction: str) -> None:
    """A card's instruction leaves NaN out unless it is told not to; the interpreter never does."""
    x, y = (patterns(F32, seed) for seed in (1, 2))
    kernel = printed(graph_of(target, [x, y], x, length=True))
    assert instruction in str(machine_code(kernel.name, kernel.source[True]).stages["ptx"])


def test_operations_without_a_spelling_are_refused() -> None:
    x = patterns(F32, 1)
    with pytest.raises(NoSpelling, match="erfinv"):
        computed(aten.erfinv.default, [x])


def test_an_input_is_a_column_once_and_accessed_as_often_as_it_is() -> None:
    """A row has one address for a tensor that is loaded and stored; its last word is the length."""
    x = patterns(F32, 1)
    graph = Graph()
    for name, value in {"n": LENGTH, "x": x, "y": x, "unused": x}.items():
        graph.placeholder(name).meta["val"] = value
    _, into, given, _ = graph.find_nodes(op="placeholder")
    added = graph.call_function(aten.add.Tensor, (into, given))
    store = graph.call_function(aten.copy_.default, (into, added))
    added.meta["val"] = store.meta["val"] = x
    graph.output(())
    kernel = printed(graph)
    assert kernel.arguments == (1, 2, 0)
    assert kernel.accesses == (1, 2, 1)


@pytest.mark.parametrize(("size", "warps"), [(32, 4), (64, 2)])
def test_a_thread_has_as_many_elements_whatever_the_size_of_a_warp(size: int, warps: int) -> None:
    x = patterns(F32, 1)
    with threads_of_a_warp(size):
        kernel = printed(graph_of(aten.neg.default, [x], x, length=True))
    assert f"'num_warps': {warps}" in kernel.source[True]
    assert kernel.threads == 128


def kernels_of(arch: str, **options: Any) -> list[TableKernel]:
    """The kernels of AdamW's step on a card."""
    found: list[TableKernel] = []

    class Backend(CollageBackend):
        def lower(self, program: Any, example_inputs: Any, inductor_options: Any) -> Any:
            found.extend(kernel.function for kernel in step_on_cuda(program).kernels)
            return super().lower(program, example_inputs, inductor_options)

    params = parameters(shapes=((64, 128), (64, 128)))
    set_gradients(params)
    torch.compile(torch.optim.AdamW(params).step, backend=Backend(**options))()
    return found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_compile_for_each_card(arch: str) -> None:
    """Kernels of the smallest formats have all operators of blocks and bytes; none spills."""
    for kernel in kernels_of(arch, strategy="light", error_format="byte", state="block8"):
        for source in kernel.source.values():
            assert machine_code(kernel.name, source, arch).spilled == 0


def test_no_product_goes_into_an_fma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in kernels over tables nor in those that Inductor's code launches for each tensor."""
    loaded = []

    def triton(self: object, kernel_name: str, source_code: str, device_str: str) -> None:
        loaded.append(source_code)

    monkeypatch.setattr(AsyncCompile, "triton", triton)
    with without_contraction():
        AsyncCompile().triton("kernel", "triton_meta={'enable_fp_fusion': True}", device_str="cuda")
    x = patterns(F32, 1)
    kernel = printed(graph_of(aten.neg.default, [x], x, length=True))
    for text in (*loaded, *kernel.source.values()):
        assert "'enable_fp_fusion': False" in text
        assert "'enable_fp_fusion': True" not in text


class Future:
    """A kernel that a worker process compiles; like Inductor's, it is made anew at each ``result()``."""

    def __init__(self) -> None:
        self.asked = 0

    def result(self) -> object:
        self.asked += 1
        return object()


def test_a_kernel_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    futures: dict[str, Future] = {}
    monkeypatch.setattr(
        AsyncCompile, "triton", lambda self, name, source, device_str: futures.setdefault(source, Future())
    )
    kernel = TableKernel("waited_for_once", (), 1024, {True: "aligned", False: "unaligned"})
    with no_kernels_ahead():
        kernel.begin()
    assert not futures
    kernel.begin()
    assert list(futures) == ["aligned"]  # while the step's other kernels are printed
    for aligned in (True, False):
        assert len({id(kernel.loaded(aligned=aligned)) for _ in range(50)}) == 1
    assert {source: future.asked for source, future in futures.items()} == {"aligned": 1, "unaligned": 1}


def test_a_kernel_says_of_its_pointers_what_inductor_says_of_aligned_ones() -> None:
    """Triton takes them for multiples of 16 bytes: with less, loads are narrow; with more, wrong."""
    from torch._inductor.runtime.hints import AttrsDescriptorWrapper

    operands = [patterns(F32, 1), patterns(F32, 2)]
    kernel = printed(graph_of(aten.add.Tensor, operands, torch.zeros(LENGTH), length=True))
    assert f"'configs': [{AttrsDescriptorWrapper(divisible_by_16=(0, 1))}]" in kernel.source[True]
