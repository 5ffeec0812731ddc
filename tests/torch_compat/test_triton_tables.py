"""What is read off Inductor's Triton code, and what is not."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile

from collage_fx.torch_compat import TableKernel, table_kernel
from collage_fx.torch_compat.patch_inductor import without_contraction
from tests.support import triton_offline as offline

pytestmark = pytest.mark.skipif(
    not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy: pip install triton numpy"
)


def update(weight: Tensor, grad: Tensor) -> None:
    weight.copy_(weight - 0.5 * grad)


@pytest.fixture(scope="module")
def code() -> str:
    graph = offline.functional_graph(update, torch.zeros(5000), torch.zeros(5000))
    return offline.triton_source(offline.to_cuda(graph))


def test_arguments_are_columns_each_once(code: str) -> None:
    """What is updated in place has two names in Inductor's kernel, and one address."""
    kernel = table_kernel(code, 2, None, [0, 1])
    assert isinstance(kernel, TableKernel)
    assert sorted(kernel.arguments) == [0, 1]
    assert "tl.load(row + 1)" in kernel.source[True]
    assert "tl.load(row + 3)" not in kernel.source[True]


@pytest.mark.parametrize(
    ("edited", "by", "why"),
    [
        (r"\.run\(", "run_twice(", "uses"),
        (r", 5000, stream", ", int(arg0_1), stream", "uses int"),
        (r", 5000, stream", ", 2 * arg0_1, stream", "computes a number"),
        (r"'grid_type': 'Grid1D'", "'grid_type': 'Grid2D'", "more than one dimension"),
        (r"tl\.program_id\(0\)", "tl.program_id(1)", "an unknown frame"),
    ],
)
def test_other_code_is_not_taken(code: str, edited: str, by: str, why: str) -> None:
    changed = re.sub(edited, by, code)
    assert changed != code
    told = table_kernel(changed, 2, None, [0, 1])
    assert isinstance(told, str)
    assert why in told


def test_kernels_of_one_length_become_one() -> None:
    """Updates of two tensors that have nothing in common are two kernels of Inductor's."""

    def updates(a: Tensor, b: Tensor) -> None:
        a.mul_(0.5)
        b.add_(1)

    given = torch.zeros(5000), torch.zeros(5000)
    code = offline.triton_source(offline.to_cuda(offline.functional_graph(updates, *given)))
    assert len(re.findall(r"\.run\(", code)) == 2
    assert table_kernel(code, 2, 0, [0, 1]) == (
        "Inductor's 2 Triton kernels for each tensor have different lengths"
    )
    edits = {"arg0_1, arg1_1 = args": "arg0_1, arg1_1, arg2_1 = args", ", 5000, stream": ", arg2_1, stream"}
    for old, new in edits.items():
        assert old in code
        code = code.replace(old, new)
    kernel = table_kernel(code, 3, 2, [0, 1])
    assert isinstance(kernel, TableKernel)
    assert len(kernel.accesses) == 4
    assert "tl.debug_barrier()" in kernel.source[True]


@pytest.mark.parametrize(("size", "warps"), [(32, 4), (64, 2)])
def test_a_thread_has_as_many_elements_whatever_the_size_of_a_warp(code: str, size: int, warps: int) -> None:
    edits = {
        "warp_size=32": f"warp_size={size}",
        "arg0_1, arg1_1 = args": "arg0_1, arg1_1, arg2_1 = args",
        ", 5000, stream": ", arg2_1, stream",
    }
    for old, new in edits.items():
        assert old in code
        code = code.replace(old, new)
    kernel = table_kernel(code, 3, 2, [0, 1])
    assert isinstance(kernel, TableKernel)
    assert f"'num_warps': {warps}" in kernel.source[True]


def test_no_product_goes_into_an_fma(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in kernels over tables nor in those that Inductor's code launches for each tensor."""
    loaded = []

    def triton(self: object, kernel_name: str, source_code: str, device_str: str) -> None:
        loaded.append(source_code)

    monkeypatch.setattr(AsyncCompile, "triton", triton)
    assert "'enable_fp_fusion': True" in code
    with without_contraction():
        AsyncCompile().triton("kernel", code, device_str="cuda")
    kernel = table_kernel(code, 2, None, [0, 1])
    assert isinstance(kernel, TableKernel)
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
    kernel.begin()
    for aligned in (True, False):
        assert len({id(kernel.loaded(aligned=aligned)) for _ in range(50)}) == 1
    assert {source: future.asked for source, future in futures.items()} == {"aligned": 1, "unaligned": 1}
