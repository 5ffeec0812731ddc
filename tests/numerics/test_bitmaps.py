"""Bitmaps of elements, beside sets of numbers."""

from __future__ import annotations

import random

import pytest
import torch

from collage_fx.codegen import load_library, taken_elements
from collage_fx.numerics import BITS, elements_of, with_bits, words_for


def python_words(indices: set[int], elements: int) -> list[int]:
    """The words as Python numbers: the sign bit of an int32 is bit 31."""
    words = [sum(1 << i - 32 * w for i in indices if i // 32 == w) for w in range(max(1, -(-elements // 32)))]
    return [word - (word >> 31 << 32) for word in words]


@pytest.mark.parametrize("elements", [1, 31, 32, 33, 64, 100, 1000])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_bits_are_those_of_a_set(elements: int, share: float) -> None:
    draw = random.Random(elements)
    first, second = ({i for i in range(elements) if draw.random() < share} for _ in range(2))
    words = words_for(elements).zeros(torch.device("cpu"))
    for chosen in (first, second):
        words = with_bits(words, torch.tensor([int(i in chosen) for i in range(elements)], dtype=torch.int32))
    assert words.tolist() == python_words(first | second, elements)
    assert elements_of(words).tolist() == sorted(first | second)


@pytest.mark.parametrize("elements", [1, 33, 300_001])
@pytest.mark.parametrize("is_printed", [True, False])
def test_taken_elements(elements: int, is_printed: bool) -> None:
    load_library()
    values = torch.randn(elements).bfloat16()
    words = torch.randint(-(2**31), 2**31, words_for(elements).shape, dtype=torch.int64).to(torch.int32)
    if elements % BITS:
        words[-1] &= (1 << elements % BITS) - 1
    indices, taken = taken_elements(words, values if is_printed else values.float())
    found = [i for i in range(elements) if int(words[i // 32]) >> i % 32 & 1] if elements < 1000 else None
    assert indices.dtype is torch.int32
    assert found is None or indices.tolist() == found
    assert torch.equal(indices.long(), elements_of(words))
    assert torch.equal(taken, (values if is_printed else values.float())[indices.long()])
