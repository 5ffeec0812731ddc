"""Fingerprints against one that is computed in Python's integers."""

from __future__ import annotations

import copy
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collage_fx.state import fingerprints
from collage_fx.state.fingerprints import BYTES, ROWS, fingerprint, number_in, table_of
from tests.support.memory import peak
from tests.support.substitutes import fingerprints_of_elements
from tests.support.training import compiled, run_steps

FORMATS = {torch.bfloat16: "h", torch.float16: "h", torch.float32: "i"}


def bits(tensor: Tensor) -> list[int]:
    integers = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    found: list[int] = tensor.flatten().view(integers).tolist()
    return found


def by_hand(*tensors: Tensor) -> int:
    """The sum of the hashes of each element's bits, as a signed number of 64 bits."""
    total = 0
    for elements in zip(*map(bits, tensors), strict=True):
        word = 0
        for each in elements:
            word = (word * 0x9E3779B1 + each) % 2**32
        word = word * 0x7FEB352D % 2**32
        word ^= word >> 15
        word = word * 0x846CA68B % 2**32
        total += word - 2**32 * (word >> 31)
    (signed,) = struct.unpack("q", struct.pack("Q", total % 2**64))
    return int(signed)


def pair(dtype: torch.dtype, lo: torch.dtype, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).to(each) for each in (dtype, lo))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lo", [torch.bfloat16, torch.float32])
def test_it_is_that_of_the_definition(dtype: torch.dtype, lo: torch.dtype) -> None:
    hi, term = pair(dtype, lo, 7, 5)
    assert fingerprint(hi, [term]).item() == by_hand(hi, term)
    assert fingerprint(hi, []).item() == by_hand(hi)
    assert fingerprint(hi, [torch.ones(())]).item() == by_hand(hi)  # a scale of the tensor, say
    assert fingerprint(hi[0, 0], [term[0, 0]]).item() == by_hand(hi[:1, :1], term[:1, :1])
    assert fingerprint(hi[:0], [term[:0]]).item() == 0


def test_parts_add_up_however_they_lie() -> None:
    hi, lo = pair(torch.bfloat16, torch.bfloat16, 8, 6, 5)
    whole = fingerprint(hi, [lo]).item()
    assert fingerprint(hi.permute(2, 0, 1), [lo.permute(2, 0, 1)]).item() == whole
    assert fingerprint(hi[:, ::2], [lo[:, ::2]]) + fingerprint(hi[:, 1::2], [lo[:, 1::2]]) == whole
    with fingerprints_of_elements(7):
        assert fingerprint(hi, [lo]).item() == whole


@given(st.integers(0, 34), st.integers(0, 15), st.booleans())
def test_any_bit_changes_it(element: int, bit: int, of_hi: bool) -> None:
    hi, lo = pair(torch.bfloat16, torch.bfloat16, 7, 5)
    before = fingerprint(hi, [lo]).item()
    flipped = (hi if of_hi else lo).view(-1).view(torch.int16)
    flipped[element] ^= -(2**15) if bit == 15 else 2**bit
    assert fingerprint(hi, [lo]).item() != before


def test_error_terms_that_have_changed_places_change_it() -> None:
    hi, lo = pair(torch.bfloat16, torch.bfloat16, 64)
    assert fingerprint(hi, [lo]) == fingerprint(hi.flip(0), [lo.flip(0)])
    assert fingerprint(hi, [lo]) != fingerprint(hi, [lo.flip(0)])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
def test_a_table_survives_what_plain_torch_casts_it_to(dtype: torch.dtype) -> None:
    hi, lo = pair(torch.bfloat16, torch.bfloat16, 9)
    number = fingerprint(hi, [lo])
    table = table_of(number, hi)
    assert table.shape == (ROWS, BYTES)
    assert number_in(table.to(dtype).to(torch.uint8), hi) == number


def test_saving_and_loading_take_no_memory_but_a_part_and_the_tables() -> None:
    params = [
        torch.nn.Parameter(torch.randn(1 << 22).bfloat16()),
        torch.nn.Parameter(torch.ones(4, 4).bfloat16()),
    ]
    optimizer = torch.optim.AdamW(params)
    run_steps(compiled(optimizer), params, [0])
    part = 5 * 4 * fingerprints._CHUNK_ON_CPU  # words of 4 bytes, and what is made of them
    tables = 4 * ROWS * BYTES  # of two parameters and two second moments
    assert peak(optimizer.state_dict) <= part + tables + 1024  # 0-d tensors
    saved = copy.deepcopy(optimizer.state_dict())
    # It takes over what there is, and compares the second moments with their fingerprints.
    assert peak(lambda: optimizer.load_state_dict(saved)) <= part + tables + 1024
    assert peak(lambda: copy.deepcopy(saved)) >= 1 << 23  # a copy is seen
