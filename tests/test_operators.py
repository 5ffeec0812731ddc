"""The one-node operators: eager = definition, compiled = eager, whatever is fused around them."""

import pytest
import torch
from torch import Tensor

from collage_fx import arithmetic
from collage_fx.operators import round_to_storage

DTYPES = [torch.bfloat16, torch.float16]


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
def test_compiled_bits_equal_eager_bits(dtype: torch.dtype) -> None:
    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        hi = round_to_storage(x * 1.5, dtype)
        return (
            hi,
            x * 1.5 - hi,
        )  # the trap: with casts in place of the operator this difference is zero when compiled

    x = _patterns()
    compiled = torch.compile(split)(x)
    eager = split(x)
    assert torch.equal(_bits(eager[0]), _bits((x * 1.5).to(dtype).float()))
    for mine, expected in zip(compiled, eager, strict=True):
        assert torch.equal(_bits(mine), _bits(expected))
    assert (compiled[1] != 0).float().mean() > 0.4


@pytest.mark.parametrize("dtype", DTYPES)
def test_operator_is_its_definition(dtype: torch.dtype) -> None:
    x = _patterns()
    assert torch.equal(_bits(round_to_storage(x, dtype)), _bits(arithmetic.round_to_storage(x, dtype)))
    torch.library.opcheck(
        round_to_storage, (torch.randn(7), dtype), test_utils=("test_schema", "test_faketensor")
    )
