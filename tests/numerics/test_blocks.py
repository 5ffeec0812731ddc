"""Blocks: integers with a scale in common, by the definition in ``numerics/blocks.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch.overrides import TorchFunctionMode

from collage_fx.numerics import BLOCK, BLOCK_CODES, BLOCK_SCALES, BLOCK_VALUES
from collage_fx.numerics.arithmetic import scalar_like
from collage_fx.numerics.blocks import CODES, LARGEST, block_code, block_scale, most_of_block, units_of_block
from collage_fx.numerics.dither import phase, phases
from collage_fx.numerics.error_formats.blocks import Blocks
from tests.support.float_bits import same_bits
from tests.support.printed import BACKENDS

KINDS = list(CODES)
each_kind = pytest.mark.parametrize(("bits", "signed"), KINDS, ids=lambda x: str(x))


def numbers(signed: bool, seed: int = 0) -> Tensor:
    """Rows of blocks of every size, [64, 64]: with zeros, subnormals, and what is too large or no number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 64, generator=generator) * 2.0 ** torch.linspace(-140, 120, 64).reshape(64, 1)
    x = x * torch.rand(64, 64, generator=generator) ** 8
    x[0] = 0.0
    x[1, :5] = -0.0
    x[2] = 2.0**-149
    x[3, 3], x[3, 40] = torch.inf, torch.nan
    x[4, 33] = -torch.inf
    x[5] = 3.4e38
    x[6] = 1.0
    x[7, :32] = 1e-30
    x[7, 0] = 1.0
    return x if signed else x.abs()


def some_phases(shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
    drawn.view(-1)[::7], drawn.view(-1)[1::7] = 0, -1  # the least phase and the largest
    return drawn


# The bits. ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("simdlen", [1, 256, None])
@pytest.mark.parametrize("code", [*BACKENDS])
@pytest.mark.parametrize("rows", ["of a block", "of many"])
@each_kind
def test_compiled_bits_are_eager_bits(
    bits: int, signed: bool, rows: str, code: str, simdlen: int | None
) -> None:
    """Decoded, changed and encoded in one kernel, as a step does it."""

    def step(codes: Tensor, scales: Tensor, x: Tensor, phases: Tensor, seen: Tensor, near: Tensor) -> None:
        value = BLOCK_VALUES(codes, scales, bits, signed)
        value = value * 0.5 + x.float()
        made = BLOCK_SCALES(value, codes, signed)
        near.copy_(value)
        seen.copy_(BLOCK_CODES(value, made, phases, codes, bits, signed))
        scales.copy_(made)

    x = numbers(signed).to(torch.bfloat16)
    shape = x.shape if rows == "of many" else torch.Size((x.numel() // BLOCK, BLOCK))
    scales = torch.arange(256, dtype=torch.uint8)[: x.numel() // BLOCK]

    def run(function: Callable[..., None]) -> list[Tensor]:
        codes = some_phases(shape).to(CODES[bits, signed])
        of_blocks = scales.reshape(shape[0], -1).clone()
        seen, near = torch.zeros_like(codes), torch.zeros(shape, dtype=torch.bfloat16)
        function(codes, of_blocks, x.reshape(shape), some_phases(shape), seen, near)
        return [seen, of_blocks, near]

    with config.patch({"cpp.simdlen": simdlen}):
        compiled = run(torch.compile(step, backend=BACKENDS[code]))
    for mine, expected in zip(compiled, run(step), strict=True):
        assert same_bits(mine.float(), expected.float()).all()


# The definition. ------------------------------------------------------------------------------------------


def in_float64(codes: Tensor, scale: float | Tensor, bits: int, signed: bool) -> Tensor:
    """The numbers of integers by Note [Blocks], without a rounding."""
    code = codes.double()
    if (bits, signed) == (16, False):
        code = code % 65536
    share = code / LARGEST[bits, signed]
    size = (share * share.abs() if bits == 8 else share) * scale
    return size if signed else size * size


@each_kind
def test_every_integer_at_every_scale(bits: int, signed: bool) -> None:
    """It is the number of the note, to four roundings of float32, and comes back rounded to nearest."""
    info = torch.iinfo(CODES[bits, signed])
    codes = torch.arange(info.min, info.max + 1, dtype=torch.int32).to(CODES[bits, signed])
    if signed:
        codes = codes[1:]  # the smallest of all is nobody's
    largest = LARGEST[bits, signed]
    top = largest - 65536 if (bits, signed) == (16, False) else largest
    lines = torch.nn.functional.pad(codes, (0, -len(codes) % (BLOCK - 1))).reshape(-1, BLOCK - 1)
    # The first of each block is the largest, which makes the scale.
    lines = torch.cat([torch.full((len(lines), 1), top, dtype=codes.dtype), lines], 1)
    for byte in range(1, 255):
        scales = torch.full((len(lines), 1), byte, dtype=torch.uint8)
        values = BLOCK_VALUES(lines, scales, bits, signed)
        scale = 2.0 ** ((byte + 93) // 2 - 127) * (1.5 if byte % 2 == 0 else 1.0)
        exact = in_float64(lines, scale, bits, signed)
        normal = exact.abs() > 2.0**-126
        assert ((values - exact).abs()[normal] <= 2.0**-21 * exact.abs()[normal]).all()
        least = scale / (largest**2 if bits == 8 else largest)
        if (least if signed else least**2) >= 2.0**-126:
            assert torch.equal(BLOCK_CODES(values, scales, None, lines, bits, signed), lines)
            made = BLOCK_SCALES(values, lines, signed)
            assert ((made == byte) | (made == byte + 1)).all()  # where the largest was rounded up


@each_kind
def test_rounding_to_nearest_keeps_the_bound(bits: int, signed: bool) -> None:
    x = numbers(signed)
    fmt = Blocks(bits, signed=signed)
    _, codes, scales, _ = fmt.split(x, torch.bfloat16)
    blocks, found = x.reshape(-1, BLOCK), BLOCK_VALUES(codes, scales, bits, signed).reshape(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True)
    in_range = ((scales != 255) & (scales > 1)).reshape(-1)
    bound = float(fmt.error_bound(torch.bfloat16).of_largest)
    assert ((found - blocks).abs() <= bound * largest)[in_range].all()
    assert in_range.sum() > 60


@each_kind
def test_special_numbers(bits: int, signed: bool) -> None:
    x = numbers(signed)
    scales = BLOCK_SCALES(x, x, signed)
    blocks = x.reshape(-1, BLOCK)
    for drawn in (None, some_phases(x.shape)):
        codes = BLOCK_CODES(x, scales, drawn, x, bits, signed)
        found = BLOCK_VALUES(codes, scales, bits, signed).reshape(-1, BLOCK)
        lost = (scales == 255).reshape(-1)
        limit = (1.5 * 2.0**46) ** (1 if signed else 2)
        too_large = (~(blocks.abs() <= limit)).any(1)
        assert torch.equal(lost, too_large)
        assert found[lost].isnan().all()
        assert found[~lost].isfinite().all()
        assert (found[~lost][blocks[~lost] == 0] == 0).all()
        assert (codes.reshape(-1, BLOCK)[lost] == 0).all()
        if not signed:
            integers = codes.reshape(-1, BLOCK)[~lost]
            assert (integers[blocks[~lost] > 0] != 0).all()


@pytest.mark.parametrize("payload", [0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000 - 2**31])
def test_any_nan_is_one(payload: int) -> None:
    """Those of a GPU, and of vectors' comparisons, have all bits set; an integer sum would overflow."""
    x = torch.ones(2, BLOCK)
    x.view(torch.int32)[1, 7] = payload
    for signed in (True, False):
        assert BLOCK_SCALES(x, x, signed).flatten().tolist() == [BLOCK_SCALES(x, x, signed)[0, 0], 255]
        largest = torch.tensor([payload], dtype=torch.int32).view(torch.float32)
        assert block_scale(largest).tolist() == [255]


class ApproximateRoots(TorchFunctionMode):
    """Square roots that are off by a relative error, as a GPU's approximate ones are by up to 2**-22."""

    def __init__(self, error: float) -> None:
        self.error = error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * (1 + self.error) if func is torch.sqrt else result


def by_definition(
    root: Tensor, units: Tensor, most: Tensor, phases: Tensor | None, bits: int, signed: bool
) -> Tensor:
    """The definition of `code_of_number`, operation by operation."""
    size = root.abs() * units
    without = scalar_like(0.5, size)
    if phases is not None:
        without = 1.0 - ((phases >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24
    if bits == 8:
        # The largest integer whose square is at most size. The root may be off by less than a half.
        near = torch.floor(torch.sqrt(size) + 0.5)
        below = torch.where(near * near > size, near - 1.0, near)
        up = size - below * below >= without * (2.0 * below + 1.0)
    else:
        below = torch.floor(size)
        up = size - below >= without
    code = torch.where(up, below + 1.0, below)
    if not signed:
        code = torch.where(root > 0, torch.maximum(code, scalar_like(1.0, code)), code)
    code = torch.where(code < most, code, most)  # most replaces a NaN, too
    if signed:
        code = torch.where(root < 0, -code, code)
    return code.to(torch.int32).to(CODES[bits, signed])  # of 16 bits without a sign, modulo 2**16


@pytest.mark.parametrize("error", [0.0, 2.0**-10, -(2.0**-10)])
@each_kind
def test_the_integer_is_that_of_the_definition(bits: int, signed: bool, error: float) -> None:
    """Next to every integer at every scale, for the least and largest phases; and for patterns drawn."""
    most = LARGEST[bits, signed]
    codes = torch.cat([torch.arange(min(most, 300)), most - torch.arange(300)]).clamp(0, most).float()
    near = (codes / most) ** (2 if bits == 8 else 1)
    steps = torch.arange(-3, 4).reshape(-1, 1, 1)
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(-(2**31), 2**31, (2000,), generator=generator).to(torch.int32)
    special = torch.tensor([0, -(2**31), 1, 0x7F800000, -0x800000, 0x7FC00000, 0x7F800001, -1])
    specials = torch.cat([drawn, special.to(torch.int32)]).view(torch.float32)
    edges = torch.tensor([0, -1, 255, 256, -256, 2**31 - 1, -(2**31), *drawn[:5]]).to(torch.int32)
    for byte in (*range(8), 60, 61, 128, 129, *range(250, 256)):
        power = 2.0 ** ((byte + 93) // 2 - 127) * (1.5 if byte % 2 == 0 else 1.0)
        roots = (near * power).view(torch.int32) + steps
        root = torch.cat([roots.view(torch.float32).flatten(), specials])
        if byte != 255:  # no number of a block is larger than its scale
            root = torch.where(root.abs() <= (power if byte else 0.0), root, power if byte else -0.0)
        root = torch.cat([root, -root]) if signed else root.abs()
        scale = torch.tensor(byte, dtype=torch.uint8)
        given = root.reshape(-1, 1), scale, edges.reshape(1, -1), bits, signed
        units, largest = units_of_block(scale, bits, signed), most_of_block(scale, bits, signed)
        expected = by_definition(given[0], units, largest, *given[2:])
        with ApproximateRoots(error):
            assert torch.equal(block_code(*given), expected)


@each_kind
def test_nothing_is_lost_on_average(bits: int, signed: bool) -> None:
    """In the number, or in its root: of 32 steps of a window, off by less than 2/32 of a distance."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, BLOCK, generator=generator)
    x = x if signed else x.square()
    scales, steps = BLOCK_SCALES(x, x, signed), 32
    total, start = torch.zeros_like(x, dtype=torch.float64), torch.tensor(0, dtype=torch.int32)
    for count in range(steps):
        turns = phases(x, phase(torch.tensor(count, dtype=torch.int32), start))
        value = BLOCK_VALUES(BLOCK_CODES(x, scales, turns, x, bits, signed), scales, bits, signed).double()
        total += value if signed else value.sqrt()
    expected = x.double() if signed else x.double().sqrt()
    byte = scales.double()
    scale = 2.0 ** ((byte + 93).div(2, rounding_mode="floor") - 127) * torch.where(byte % 2 == 0, 1.5, 1.0)
    share = expected.abs() / scale
    at_most = LARGEST[bits, signed]
    distance = scale * ((2 * share.sqrt() * at_most + 1) / at_most**2 if bits == 8 else 1 / at_most)
    # Beside that, a rounding or two of float32; the smallest numbers of one sign do not become zero.
    error = (total / steps - expected).abs()
    kept = share > 2 / (at_most**2 if bits == 8 else at_most)
    assert (error <= 2 / steps * distance + 2.0**-21 * scale)[kept].all()
