"""The contract of packed formats: bounds, rows, zeros, and what is not finite; and what two of them are."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from collage_fx.examples import peer_formats  # registers two of the formats
from collage_fx.numerics import PACKED_FORMATS, ErrorFormat
from tests.support.float_bits import same_bits

FORMATS = {fmt.name: fmt for pair in PACKED_FORMATS.values() for fmt in pair}
each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
#: How many elements have a scale in common; those of other formats are all of a tensor's.
TOGETHER = {
    "bf16": 1,
    "coat": peer_formats.Coat.GROUP,
    **dict.fromkeys((name for name in FORMATS if name.startswith("block")), 32),
}


def values(fmt: ErrorFormat) -> Tensor:
    """Lognormal magnitudes, as gradients have them, float32 [64, 256]; of either sign if they may be."""
    generator = torch.Generator().manual_seed(0)
    value = (torch.randn(64, 256, generator=generator) * 3).exp() * 1e-4
    return value * torch.randn(64, 256, generator=generator).sign() if may_be_negative(fmt) else value


def may_be_negative(fmt: ErrorFormat) -> bool:
    return any(fmt is signed for signed, _ in PACKED_FORMATS.values())


def kept(fmt: ErrorFormat, value: Tensor) -> Tensor:
    return fmt.join(*fmt.split(value, torch.bfloat16))


def largest(fmt: ErrorFormat, value: Tensor) -> Tensor:
    """The largest magnitude that has a scale in common with each element, float64."""
    size = TOGETHER.get(fmt.name, value.numel())
    groups = value.double().abs().reshape(-1, size)
    return groups.amax(1, True).expand_as(groups).reshape(value.shape)


@each_format
def test_error_bound(fmt: ErrorFormat) -> None:
    """It holds, and something comes within a quarter of it."""
    even = torch.rand(64, 256, generator=torch.Generator().manual_seed(0)) * 1e10
    even[:, ::128] = 0
    relative, absolute, of_largest = map(float, fmt.error_bound(torch.bfloat16))
    is_near = False
    for value in (values(fmt), even, even * 1e-40):
        off = (kept(fmt, value).double() - value.double()).abs()
        bound = torch.maximum(relative * value.double().abs(), of_largest * largest(fmt, value))
        assert (off <= bound.clamp(absolute)).all()
        is_near |= bool((off >= 0.75 * bound)[off > 0].any())
    assert is_near


@each_format
def test_rows_are_kept_as_they_are_in_the_whole(fmt: ErrorFormat) -> None:
    value = values(fmt)
    _, *whole = fmt.split(value, torch.bfloat16)
    _, *some = fmt.split(value[17:40], torch.bfloat16)
    same = [
        same_bits(of_some, of_whole[17:40]).all()
        for of_some, of_whole in zip(some, whole, strict=True)
        if of_whole.shape[:1] == value.shape[:1]
    ]
    assert fmt.by_rows == (all(same) and len(same) == sum(each.dim() > 0 for each in whole))


@each_format
def test_a_layout_has_the_bits_of_its_elements_in_memory(fmt: ErrorFormat) -> None:
    value = values(fmt)
    strided = value.unflatten(1, (8, 8, 4)).permute(0, 3, 1, 2)  # channels last
    assert torch.equal(kept(fmt, strided).permute(0, 2, 3, 1).flatten(1), kept(fmt, value))
    assert fmt.why_not(strided) == ""
    specs = fmt.auxiliaries(strided)
    assert specs[0].stride == strided.stride()


@each_format
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_not_finite_again_and_spoils_those_with_its_scale(
    fmt: ErrorFormat, number: float
) -> None:
    value = values(fmt)
    value[7, 5] = number
    stored = kept(fmt, value)
    size = TOGETHER.get(fmt.name, value.numel())
    is_spoilt = torch.zeros(value.numel(), dtype=torch.bool)
    first = (7 * 256 + 5) // size * size
    is_spoilt[first : first + size] = True
    if fmt.is_elementwise:  # no other number shares a scale: it comes back
        assert same_bits(stored[7, 5], value[7, 5]).all()
        assert torch.equal(~stored.isfinite().flatten(), is_spoilt)
    else:
        assert torch.equal(stored.isnan().flatten(), is_spoilt)


@each_format
@pytest.mark.parametrize("number", [0.0, 1e-30, 1.0, 3e38])
def test_equal_numbers_are_kept(fmt: ErrorFormat, number: float) -> None:
    relative, absolute, of_largest = map(float, fmt.error_bound(torch.bfloat16))
    stored = kept(fmt, torch.full((2, 256), number)).double()
    if fmt.name.startswith("block") and number == 3e38:
        assert stored.isnan().all()  # blocks take such numbers, and those with such roots, for infinite
        return
    assert ((stored - number).abs() <= max(absolute, number * max(relative, of_largest))).all()
    assert number != 0 or not stored.any()


@each_format
def test_fresh_buffers_are_zeros(fmt: ErrorFormat) -> None:
    hi = torch.empty(2, 256, dtype=torch.bfloat16)
    assert not fmt.join(hi, *(spec.zeros(hi.device) for spec in fmt.auxiliaries(hi))).any()


@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_saved_survives_what_plain_torch_does_to_state(fmt: ErrorFormat, dtype: torch.dtype) -> None:
    """``Optimizer.load_state_dict`` casts everything to the parameter's dtype; a NaN is there, too."""
    value = values(fmt)
    value[7, 5] = math.nan
    hi, *auxiliaries = fmt.split(value, dtype)
    for spec, buffer in zip(fmt.auxiliaries(hi), auxiliaries, strict=True):
        saved = spec.saved(buffer)
        assert (saved.dtype, saved.shape) == (spec.saved_dtype, spec.saved_shape)
        assert saved.data_ptr() == buffer.data_ptr()
        assert saved.isfinite().all()
        for each in (saved, saved.to(dtype), pickle.loads(pickle.dumps(saved))):
            assert torch.equal(spec.saved(spec.loaded(each)), saved)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp8_lm", torch.float8_e4m3fn), ("fp8_lm_positive", torch.float16)]
)
def test_the_scale_of_a_tensor_is_the_largest_power_of_two_that_fits(name: str, dtype: torch.dtype) -> None:
    fmt = FORMATS[name]
    for size in (1e-30, 1.0, 448.0, 65504.0, 65505.0):
        value = torch.tensor([[size, size / 3]])
        _, codes, scale = fmt.split(value, torch.bfloat16)
        assert codes.dtype == dtype
        assert math.frexp(float(scale))[0] == 0.5
        most = Fraction(torch.finfo(dtype).max)
        assert most / 2 < Fraction(float(value[0, 0])) / Fraction(float(scale)) <= most


def test_the_range_of_a_group_is_expanded_to_that_of_e4m3() -> None:
    fmt = FORMATS["coat"]
    value = values(fmt)[1::2]
    _, codes, scales, powers = fmt.split(value, torch.bfloat16)
    groups = value.double().abs().reshape(-1, 128)
    assert torch.equal(scales.flatten().double(), groups.amax(1))
    assert (codes.float().abs().reshape(-1, 128).amax(1) == 448).all()
    # No multiple of 1/16 more would leave the range of a group within e4m3's. A logarithm is off by an ulp.
    sixteenths = powers.flatten().double() * 16
    wanted = math.log2(448**2 / 2) * 16 / (groups.amax(1) / groups.amin(1)).log2()
    assert torch.equal(sixteenths, sixteenths.floor())
    assert ((sixteenths <= wanted * (1 + 2**-20)) & (sixteenths + 1 > wanted * (1 - 2**-20))).all()
    # Half an ulp of e4m3's, 2**-4 of a number or 2**-10, in the power.
    expanded = 448 * (groups / groups.amax(1, True)) ** (sixteenths[:, None] / 16)
    ratio = torch.maximum(torch.tensor(2.0**-4), 2.0**-10 / expanded) + 2**-16
    error = (kept(fmt, value).double().abs().reshape(-1, 128) / groups).log().abs()
    assert (error <= -(1 - ratio).log() / (sixteenths[:, None] / 16)).all()
