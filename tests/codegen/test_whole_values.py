"""Hashes and values of whole tensors by C++, against integers of Python and against torch's operators."""

import pytest
import torch
from torch import Tensor

import collage_fx
from collage_fx import full_value, install
from collage_fx.choices import ErrorFormatName
from collage_fx.codegen import are_halves, decode_blocks, hash_sum, join_halves, load_library
from collage_fx.numerics import Weights, arithmetic
from collage_fx.state import fingerprints
from tests.support.substitutes import no_fast_passes

WORD = 1 << 32


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    load_library()


def signed(number: int, bits: int) -> int:
    """The number of so many bits, with a sign, that a number is modulo a power of two."""
    return (number + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def hashed(tensors: list[Tensor]) -> int:
    """The definition in Note [Fingerprints], with Python's integers."""
    total = 0
    for bits in zip(*(each.tolist() for each in tensors), strict=True):
        word = 0
        for each in bits:
            word = (word * 0x9E3779B1 + each) % WORD
        word = word * 0x7FEB352D % WORD
        word ^= word >> 15
        total += signed(word * 0x846CA68B, 32)
    return signed(total, 64)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", [0, 1, 31, 1024, 2500])
def test_a_hash_is_that_of_its_definition(n: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(n)
    kinds = [torch.int16, torch.int32, torch.int8]
    given = [
        torch.randint(torch.iinfo(kind).min, torch.iinfo(kind).max, (n,), generator=generator, dtype=kind)
        for kind in kinds
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for tensors in (given[:1], given[:2], given, given[::-1]):
            assert hash_sum(tensors) == hashed(tensors)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x.T, lambda x: x[:, ::2], lambda x: x[0, 0]])
def test_fingerprints_are_those_of_earlier_versions(layout: object) -> None:
    """Which torch's operators have computed."""
    assert callable(layout)
    hi = layout(torch.randn(40, 60).bfloat16())
    terms = [layout(torch.randint(-9, 9, (40, 60), dtype=torch.int16)), layout(torch.randn(40, 60))]
    fast = fingerprints.fingerprint(hi, terms)
    with no_fast_passes():
        assert torch.equal(fingerprints.fingerprint(hi, terms), fast)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rest", [-32768, -1, 0, 1, 32767])
def test_values_of_all_halves_are_those_of_the_eager_function(rest: int, dtype: torch.dtype) -> None:
    hi = torch.arange(-32768, 32768, dtype=torch.int16).view(torch.bfloat16)
    rests = torch.full((len(hi),), rest, dtype=torch.int16)
    values = torch.full((len(hi),), 7.0, dtype=dtype)
    assert are_halves(hi, rests, values)
    join_halves(hi, rests, values)
    expected = arithmetic.with_lower_half(hi.float(), rests).to(dtype)
    assert torch.equal(values.isnan(), expected.isnan())
    integers = torch.int32 if dtype is torch.float32 else torch.int64
    of_numbers = ~values.isnan()  # also the sign of a zero
    assert torch.equal(values.view(integers)[of_numbers], expected.view(integers)[of_numbers])


@pytest.mark.parametrize("seed", range(3))
def test_decoded_weights_are_those_of_the_format(seed: int) -> None:
    """Every scale, with drawn codes: numbers that are not finite, ties, and zeros among them."""
    torch.manual_seed(seed)
    codes = torch.randint(-32768, 32768, (4 * 256, 32), dtype=torch.int16)
    codes[:, :3] = torch.tensor([0, 32767, -32767], dtype=torch.int16)
    scales = torch.arange(256, dtype=torch.uint8).repeat(4).reshape(-1, 1)
    hi, count = torch.empty_like(codes, dtype=torch.bfloat16), torch.zeros((), dtype=torch.int32)
    found = decode_blocks(codes, scales)
    fmt = Weights()
    expected = fmt.join(hi, codes, scales, count).bfloat16()
    for other in (expected, fmt.decoded(hi, codes, scales, count)):
        assert torch.equal(found.isnan(), other.isnan())
        numbers = ~found.isnan()
        assert torch.equal(found.view(torch.int16)[numbers], other.view(torch.int16)[numbers])
    image = torch.randint(-99, 99, (8, 32, 3, 5), dtype=torch.int16).contiguous(
        memory_format=torch.channels_last
    )
    of_image = torch.full((8, 15), 160, dtype=torch.uint8)
    assert torch.equal(decode_blocks(image, of_image), fmt.join(image, image, of_image, count).bfloat16())


def test_halves_of_other_layouts_and_dtypes_are_not_taken() -> None:
    """They have one order in memory without gaps: the pass goes through memory, whatever the dimensions."""
    halves = torch.zeros(4, 4, dtype=torch.bfloat16), torch.zeros(4, 4, dtype=torch.int16), torch.zeros(4, 4)
    hi, rest, values = halves
    assert are_halves(hi, rest, values)
    assert are_halves(hi.t(), rest.t(), values.t())
    assert not are_halves(hi.t(), rest, values)
    assert not are_halves(hi, rest.t(), values)
    assert not are_halves(hi, rest, values.t())
    assert not are_halves(*(each[:, ::2] for each in halves))
    assert not are_halves(hi.half(), rest, values)
    assert not are_halves(hi, rest.int(), values)
    assert not are_halves(hi, rest, values.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("error_format", ["exact", "mcf"])
def test_a_whole_value_is_the_sum_of_hi_and_its_error_terms(
    error_format: ErrorFormatName, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)  # a scalar's error term may be zero with another
    for shape, is_turned in (((), False), ((3, 5), False), ((64, 48), True)):
        start = torch.randn(shape).bfloat16()
        p = torch.nn.Parameter(start.T if is_turned else start)
        optimizer = install(torch.optim.SGD([p], lr=2.0**-9), error_format=error_format)
        for _ in range(3):
            p.grad = torch.randn_like(p)
            optimizer.step()
        (term,) = collage_fx.error_terms(p)
        assert bool(term.any())
        value = full_value(p, dtype)
        assert torch.equal(value, (p.double() + term.double()).to(dtype))
        assert value.stride() == p.stride()
        with no_fast_passes():
            assert torch.equal(full_value(p, dtype), value)
