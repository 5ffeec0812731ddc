"""The one-node operators: eager = definition, compiled = eager, whatever is fused around them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config

from collage_fx.numerics import ROUND_TO_STORAGE, UPPER_HALF, arithmetic
from collage_fx.numerics.operators import LOWER_HALF, REST, ULP_PARTS, WITH_LOWER_HALF, WITH_ULP_PARTS
from collage_fx.numerics.operators import split as split_number
from tests.support.printed import BACKENDS

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[*BACKENDS])
def backend(request: pytest.FixtureRequest) -> Any:
    """The operators are compiled by plain Inductor, or as in this library's own steps."""
    return BACKENDS[request.param]


def _patterns() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (50_003,), generator=generator).to(torch.int32)
    near_float16 = torch.randn(50_000, generator=generator) * 2.0 ** torch.randint(
        -28, 18, (50_000,), generator=generator
    )
    return torch.cat(
        [bits.view(torch.float32), near_float16, torch.tensor([0.0, -0.0, float("inf"), float("nan")])]
    )


def _bits(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_bits_equal_eager_bits(dtype: torch.dtype, backend: Any) -> None:
    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        hi = ROUND_TO_STORAGE(x * 1.5, dtype)
        return (
            hi,
            x * 1.5 - hi,
        )  # the trap: with casts in place of the operator this difference is zero when compiled

    x = _patterns()
    compiled = torch.compile(split, backend=backend)(x)
    eager = split(x)
    assert torch.equal(_bits(eager[0]), _bits((x * 1.5).to(dtype).float()))
    for mine, expected in zip(compiled, eager, strict=True):
        assert torch.equal(_bits(mine), _bits(expected))
    assert (compiled[1] != 0).float().mean() > 0.4


@pytest.mark.parametrize("dtype", DTYPES)
def test_operator_is_its_definition(dtype: torch.dtype) -> None:
    x = _patterns()
    assert torch.equal(_bits(ROUND_TO_STORAGE(x, dtype)), _bits(arithmetic.round_to_storage(x, dtype)))
    torch.library.opcheck(
        ROUND_TO_STORAGE, (torch.randn(7), dtype), test_utils=("test_schema", "test_faketensor")
    )


#: Values of Inductor's cpp.simdlen: scalar code, 256-bit vectors, and what the machine has.
VECTORS = [1, 256, None]


@pytest.mark.parametrize("simdlen", VECTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpp_rounds_in_every_vector_length(dtype: torch.dtype, simdlen: int | None, backend: Any) -> None:
    def split(x: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
        hi = ROUND_TO_STORAGE(x * 1.5, dtype)
        scalar = ROUND_TO_STORAGE(factor, dtype)  # not a vector in any of them
        return hi.to(dtype), x * 1.5 - hi, hi * scalar

    x, factor = _patterns(), torch.tensor(1.1)
    with config.patch({"cpp.simdlen": simdlen}):
        compiled = torch.compile(split, backend=backend)(x, factor)
    for mine, expected in zip(compiled, split(x, factor), strict=True):
        assert torch.equal(_bits(mine.float()), _bits(expected.float()))


def _halves() -> Tensor:
    """Every upper half, with the lower halves at which something changes; whole vectors, and mixed ones."""
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (torch.arange(1 << 16)[:, None] << 16 | lower).to(torch.int32)
    finite = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    return torch.cat([finite, bits.flatten().view(torch.float32)])


def _bfloat16_halves(value: Tensor) -> tuple[Tensor, Tensor]:
    return UPPER_HALF(value), LOWER_HALF(value)


def _float16_halves(value: Tensor) -> tuple[Tensor, Tensor]:
    hi = ROUND_TO_STORAGE(value, torch.float16)
    return hi, ULP_PARTS(value, hi)


@pytest.mark.parametrize("simdlen", VECTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpp_splits_and_joins_halves_in_every_vector_length(
    dtype: torch.dtype, simdlen: int | None, backend: Any
) -> None:
    join, split = {
        torch.bfloat16: (WITH_LOWER_HALF, _bfloat16_halves),
        torch.float16: (WITH_ULP_PARTS, _float16_halves),
    }[dtype]

    def step(x: Tensor, one: Tensor, hi: Tensor, rest: Tensor, again: Tensor, seen: Tensor) -> None:
        value = join(hi.float(), rest)
        again.copy_(value)
        new_hi, new_rest = split(x * one)
        seen.copy_(new_hi)
        hi.copy_(new_hi.to(dtype))
        rest.copy_(new_rest)

    def run(function: object) -> list[Tensor]:
        x = _halves()
        generator = torch.Generator().manual_seed(1)  # what somebody else may have left there
        hi = x[torch.randperm(len(x), generator=generator)].to(dtype)
        rest = torch.randint(-(2**15), 2**15, x.shape, generator=generator).to(torch.int16)
        outputs = [hi, rest, torch.zeros_like(x), torch.zeros_like(x)]
        assert callable(function)
        function(x, torch.ones(()), *outputs)
        return outputs

    with config.patch({"cpp.simdlen": simdlen}):
        compiled = run(torch.compile(step, backend=backend))
    for mine, expected in zip(compiled, run(step), strict=True):
        assert torch.equal(_bits(mine.float()), _bits(expected.float()))


def test_halves_are_the_number() -> None:
    x = _halves()
    hi, rest = UPPER_HALF(x), LOWER_HALF(x)
    assert torch.equal(hi[x.isnan()].isnan(), x.isnan()[x.isnan()])
    kept = hi.isfinite()
    assert torch.equal(WITH_LOWER_HALF(hi, rest).view(torch.int32)[kept], x.view(torch.int32)[kept])
    assert torch.equal(_bits(WITH_LOWER_HALF(hi, rest)[~kept]), _bits(hi[~kept]))
    assert not rest[~kept].any()
    off = (x.double() - hi.double()).abs()
    other = (x.double() - x.to(torch.bfloat16).double()).abs()
    assert torch.equal(off[kept], other[kept])
    differs = kept & (hi != x.to(torch.bfloat16))
    assert (rest[differs] == -(2**15)).all()  # ties alone
    for zero in (0.0, -0.0):
        assert not WITH_LOWER_HALF(torch.full((3,), zero), torch.tensor([-1, -(2**15), 0]).short()).any()
    for operator, given in (
        (UPPER_HALF, (x[:7],)),
        (LOWER_HALF, (x[:7],)),
        (WITH_LOWER_HALF, (x[:7], rest[:7])),
    ):
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


def test_ulp_parts_are_the_rest_of_the_number() -> None:
    """Exact where float32's numbers are multiples of a part, off by half a part of the smallest elsewhere."""
    x = torch.cat([_halves(), _patterns()])
    hi = x.half().float()
    parts = ULP_PARTS(x, hi)
    kept, exact = hi.isfinite(), x.abs() >= 2.0**-16
    whole = WITH_ULP_PARTS(hi, parts)
    assert torch.equal(whole[kept & exact], x[kept & exact])
    assert ((whole.double() - x.double()).abs()[kept & ~exact] <= 2.0**-40).all()
    assert torch.equal(_bits(whole[~kept]), _bits(hi[~kept]))
    assert not parts[~kept].any()
    assert parts.abs().max() == 2**14
    for operator, given in ((ULP_PARTS, (x[:7], hi[:7])), (WITH_ULP_PARTS, (hi[:7], parts[:7]))):
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plain_first", [True, False])
def test_a_number_stored_and_rounded_keeps_the_two_apart(
    dtype: torch.dtype, plain_first: bool, backend: Any
) -> None:
    """Inductor lets whoever reads a stored number again have it as it was before it was rounded."""

    def step(x: Tensor, plain: Tensor, stored: Tensor, lo: Tensor) -> None:
        y = x * 1.5
        if plain_first:
            plain.copy_(y.to(dtype))
        hi = ROUND_TO_STORAGE(y, dtype)
        stored.copy_(hi.to(dtype))
        if not plain_first:
            plain.copy_(y.to(dtype))
        lo.copy_(y - hi)
        lo.add_(y - stored.float())  # what has just been stored

    def run(function: object) -> list[Tensor]:
        x = _patterns()
        outputs = [torch.zeros(x.shape, dtype=dtype) for _ in range(2)] + [torch.zeros_like(x)]
        assert callable(function)
        function(x, *outputs)
        return outputs

    plain, stored, lo = run(torch.compile(step, backend=backend))
    expected = run(step)
    assert torch.equal(_bits(plain.float()), _bits(expected[0].float()))
    assert torch.equal(_bits(stored.float()), _bits(expected[1].float()))
    assert torch.equal(_bits(lo), _bits(expected[2]))


def test_operands_of_two_layouts(backend: Any) -> None:
    """Inductor's loop goes by the rows of most operands, what is printed by those of what it stores."""

    def step(x: Tensor, y: Tensor, z: Tensor, hi: Tensor, parts: Tensor) -> None:
        value = WITH_ULP_PARTS(hi.float(), parts) + (x.float() * y.float() + z.float()).t()
        rounded = ROUND_TO_STORAGE(value, torch.float16)
        hi.copy_(rounded)
        parts.copy_(ULP_PARTS(value, rounded))

    def run(function: Callable[..., None]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        operands = [torch.randn(16, 48, generator=generator).bfloat16() for _ in range(3)]
        outputs = [torch.ones(48, 16, dtype=torch.float16), torch.ones(48, 16, dtype=torch.int16)]
        function(*operands, *outputs)
        return outputs

    compiled = run(torch.compile(step, backend=backend))
    for mine, expected in zip(compiled, run(step), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("where", [0, 15, 16, 31])
def test_one_special_number_among_32(where: int, backend: Any) -> None:
    """Each place of the two vectors that are converted together; subnormal numbers, ties and NaN."""
    special = torch.tensor(
        [2.0**-149, -(2.0**-133) * 1.5, 2.0**-126, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, -0.0, float("nan")]
    )
    x = torch.randn(len(special), 32)
    x[:, where] = special

    def store(x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    out = torch.zeros(x.shape, dtype=torch.bfloat16)
    torch.compile(store, backend=backend)(x, out)
    assert torch.equal(_bits(out.float()), _bits(x.bfloat16().float()))
    assert _bits(out.float())[2:6, where].count_nonzero() == 4


@pytest.mark.parametrize("simdlen", VECTORS)
def test_rest_in_every_vector_length(simdlen: int | None, backend: Any) -> None:
    """As float32 and stored in bfloat16, of one vector after the other with a special number in it."""

    def split(x: Tensor) -> tuple[Tensor, ...]:
        hi = ROUND_TO_STORAGE(x, torch.bfloat16)
        lo = REST(x, hi)
        return hi, lo, lo.to(torch.bfloat16)

    x = _patterns()
    special = torch.tensor([1e-45, -1e-39, 3.4e38, float("inf"), float("-inf"), float("nan"), 0.0, -0.0])
    x = torch.cat([x, *(torch.cat([torch.full((31,), 0.3), each[None]]) for each in special)])
    with config.patch({"cpp.simdlen": simdlen}):
        compiled = torch.compile(split, backend=backend)(x)
    hi = x.to(torch.bfloat16).float()
    lo = torch.where(hi.isfinite(), x - hi, 0.0)
    for mine, eager, expected in zip(compiled, split(x), (hi, lo, lo.to(torch.bfloat16)), strict=True):
        assert torch.equal(_bits(mine.float()), _bits(expected.float()))
        assert torch.equal(_bits(eager.float()), _bits(expected.float()))


def test_rest_of_bfloat16_vectors(backend: Any) -> None:
    """Where memory has nothing but bfloat16, a vector with a special number in it takes another way."""

    def split(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        x = a.float() + b.float()
        hi = ROUND_TO_STORAGE(x, torch.bfloat16)
        return hi.to(torch.bfloat16), REST(x, hi).to(torch.bfloat16)

    x = torch.cat([_patterns(), torch.full((32 * 16,), 0.3)])
    a, b = split_number(x, torch.bfloat16, torch.bfloat16)
    largest = torch.finfo(torch.bfloat16).max
    special = torch.tensor([1e-39, largest, float("inf"), float("-inf"), float("nan"), 0.0, -0.0])
    where = slice(-32 * 8 + 5, -32, 32)  # seven vectors, one of the special numbers in each
    a[where], b[where] = special.bfloat16(), torch.tensor([1e-39, largest / 256, 1, 1, 1, 0, 0]).bfloat16()
    x = a.float() + b.float()
    hi = x.bfloat16()
    assert hi[where][1].isinf()
    assert x[where][1].isfinite()
    lo = torch.where(hi.isfinite(), x - hi.float(), 0.0).bfloat16()
    for mine, expected in zip(torch.compile(split, backend=backend)(a, b), (hi, lo), strict=True):
        assert torch.equal(_bits(mine.float()), _bits(expected.float()))


def test_bfloat16_is_read_as_it_is(backend: Any) -> None:
    """Every bit pattern, through the kernel's own conversion to float32."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    compiled = torch.compile(lambda x: (x.float() * 1.0, -x))(patterns)
    assert torch.equal(_bits(compiled[0]), _bits(patterns.float()))
    assert torch.equal(_bits(compiled[1].float()), _bits(-patterns.float()))
