"""Elements whose bits differ from a copy's, beside those that torch finds in other ways."""

from __future__ import annotations

import contextlib

import pytest
import torch

from collage_fx.codegen import differing_elements, load_library
from tests.support.substitutes import comparing_by_torch


@pytest.mark.parametrize("elements", [1, 31, 32, 33, 300_001])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("is_printed", [True, False])
def test_what_differs(elements: int, share: float, *, is_printed: bool) -> None:
    load_library()
    before = torch.randn(elements).bfloat16()
    is_changed = torch.rand(elements) < share
    now = torch.where(is_changed, before.view(torch.int16) ^ 1 << 7, before.view(torch.int16))
    with contextlib.nullcontext() if is_printed else comparing_by_torch(1 << 12):
        indices, values = differing_elements(now.view(torch.bfloat16), before)
    assert indices.dtype is torch.int32
    assert torch.equal(indices.long(), is_changed.nonzero()[:, 0])
    assert torch.equal(values.view(torch.int16), now[is_changed])


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float8_e5m2, torch.float16, torch.float32, torch.int64, torch.complex128]
)
def test_every_dtype(dtype: torch.dtype) -> None:
    before = torch.zeros(1000).to(dtype)
    now = before.clone()
    now.view(torch.uint8)[dtype.itemsize * 999] = 1
    indices, values = differing_elements(now, before)
    assert indices.tolist() == [999]
    assert torch.equal(values.view(torch.uint8), now[999:].view(torch.uint8))


def test_signs_of_zeros_and_bits_of_nans() -> None:
    before = torch.tensor([0.0, 0.0, float("nan"), float("nan"), 1.0]).bfloat16()
    now = before.clone()
    now[0] = -0.0
    now.view(torch.int16)[3] += 1
    assert differing_elements(now, before)[0].tolist() == [0, 3]
