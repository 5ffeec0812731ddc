"""Packed formats of two other systems, as plug-ins: moments as FP8-LM and as COAT store them.

Importing the module registers both, for comparison with the formats of the library::

    import collage_fx.examples.peer_formats

    backend = CollageBackend(state="coat")  # or state="fp8_lm"

Run as a program it trains a matrix by AdamW with each format for its moments, and prints how far the weights
end from a run with float32 moments:

    python examples/peer_formats.py [--device cpu] [--steps 50]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from collage_fx import CollageBackend, full_value
from collage_fx.errors import UnsupportedTensorError
from collage_fx.numerics import (
    PACKED_FORMATS,
    AuxiliarySpec,
    ErrorBound,
    ErrorFormat,
    blocks_of,
    from_blocks,
    why_no_blocks,
)

E4M3 = torch.float8_e4m3fn

#: Least compute capability of NVIDIA's GPUs for which Triton converts e4m3 numbers.
E4M3_CAPABILITY = (8, 9)


def require_e4m3(device: torch.device) -> None:
    """Raise ``UnsupportedTensorError`` if compiled code cannot convert e4m3 numbers on a device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < E4M3_CAPABILITY:
        least, has = (".".join(map(str, each)) for each in (E4M3_CAPABILITY, capability))
        raise UnsupportedTensorError(
            f"Triton converts {E4M3} on GPUs of compute capability {least} or later, and {device} has {has}",
            where="CollageBackend(state=...)",
            remedy="use state='block8', which is of integers and more precise, or leave state= out",
        )


class TensorScaled(ErrorFormat):
    """Floats with one scale for the tensor, as the moments of FP8-LM [Peng23].

    The scale is the power of two that brings the largest magnitude as near to the dtype's largest number as
    possible from below. Numbers below the dtype's range become zero, also where a step divides by them. One
    number that is not finite makes the whole tensor NaN.

    Args:
        name: of the format.
        dtype: of the floats. FP8-LM has first moments in e4m3 and second moments in float16.

    [Peng23] Peng et al., *FP8-LM: Training FP8 Large Language Models*, arXiv 2310.18313, 2023, and
    github.com/Azure/MS-AMP.
    """

    keeps_hi = False
    keeps_error = False

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name  # type: ignore[misc]
        self.dtype = dtype
        bits = 8 * dtype.itemsize
        self.precision = f"floats of {bits} bits, a scale for the tensor: for comparison"  # type: ignore[misc]

    def why_not(self, hi: Tensor) -> str:
        if self.dtype == E4M3:
            require_e4m3(hi.device)
        return ""

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        return AuxiliarySpec.like(hi, "codes", self.dtype), AuxiliarySpec("scale", torch.float32, (1,))

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """Rounding error of the dtype, whose largest number is at most twice the tensor's largest in units.

        The absolute part is for tensors so small that their scale is the smallest, 2**-126.
        """
        info = torch.finfo(self.dtype)
        relative = Fraction(info.eps) / 2
        absolute = relative * Fraction(info.tiny)
        return ErrorBound(relative, absolute / 2**126, absolute / (Fraction(info.max) / 2))

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        codes, scale = auxiliaries
        return codes.to(torch.float32) * scale

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        largest = value.abs().amax()
        fits = (torch.finfo(self.dtype).max / largest).clamp(max=2.0**126)
        unit = (fits.view(torch.int32) & 0x7F800000).view(torch.float32)  # the power of two at or below
        scale = torch.where(largest < math.inf, 1 / unit, math.nan)
        return value.to(dtype), (value * unit).to(self.dtype), scale.reshape(1)


@torch.library.custom_op("collage_fx_examples::power", mutates_args=())
def power(base: Tensor, exponents: Tensor) -> Tensor:
    """``base ** exponents`` as one operator, which compiled code calls and does not fuse.

    Inductor would write the C library's function into some loops and vector functions into others, an ulp
    apart.
    """
    return torch.pow(base, exponents)


@power.register_fake
def _(base: Tensor, exponents: Tensor) -> Tensor:
    return torch.empty_like(base)


class Coat(ErrorFormat):
    """e4m3 numbers with dynamic range expansion, as the moments of COAT [Xi25].

    Each group of 128 elements has a scale, its largest magnitude, and a power. The power is the largest
    multiple of 1/16 that keeps the range of the group, ``(largest / smallest) ** power``, within that of
    e4m3, ``448**2 / 2``. One number that is not finite makes its group NaN. Groups are of elements that are
    neighbours in memory, within rows, as blocks are (Note [Blocks] in ``collage_fx/numerics/blocks.py``).

    COAT's own code stores a third number for each group, the middle of its range, which cancels.

    [Xi25] Xi et al., *COAT: Compressing Optimizer States and Activation for Memory-Efficient FP8 Training*,
    ICLR 2025, arXiv 2410.19313, and its kernel in github.com/NVlabs/VILA.
    """

    #: Number of elements in a group.
    GROUP = 128
    #: Magnitude that smaller ones count as where the range of a group is measured.
    LEAST = 1e-20
    #: Largest number of e4m3, and the range into which a group is brought: as in COAT.
    LARGEST = 448
    RANGE = LARGEST**2 / 2
    #: Largest power. With a larger one, float32's own roundings would show.
    LARGEST_POWER = 1024

    name = "coat"
    precision = f"floats of 8 bits, a power and a scale for {GROUP} of them: for comparison"
    keeps_hi = False
    keeps_error = False
    by_rows = True

    def why_not(self, hi: Tensor) -> str:
        require_e4m3(hi.device)
        return why_no_blocks(hi, self.GROUP)

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        groups = hi.shape[0], hi.numel() // (hi.shape[0] * self.GROUP)
        return (
            AuxiliarySpec.like(hi, "codes", E4M3),
            AuxiliarySpec("scales", torch.float32, groups),
            AuxiliarySpec("powers", torch.float32, groups),
        )

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """Half of e4m3's widest spacing (416 to 448), mapped back through the smallest power.

        The smallest power is 1/8: the range of a group is at most 2**127, that of e4m3 2**16.6. Other
        spacings are no wider in the group. Numbers below 1e-20 may be below e4m3's range. 2**-20 is for the
        roundings of float32.
        """
        of_largest = 1 - Fraction(432, 448) ** 8
        return ErrorBound(absolute=Fraction(self.LEAST), of_largest=of_largest + Fraction(1, 2**20))

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        codes, scales, powers = auxiliaries
        units = blocks_of(codes, codes, self.GROUP).to(torch.float32) * (
            1 / self.LARGEST
        )  # as Triton divides
        sizes = power(units.abs(), 1 / powers.reshape(-1, 1)) * scales.reshape(-1, 1)
        return from_blocks(units.sign() * sizes, codes)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        groups = blocks_of(value, value, self.GROUP)
        sizes = groups.abs()
        largest, least = (each.clamp(min=self.LEAST) for each in (sizes.amax(1, True), sizes.amin(1, True)))
        sixteenths = math.log2(self.RANGE) * 16 / (largest / least).clamp(max=2.0**127).log2()
        powers = sixteenths.floor().clamp(max=16.0 * self.LARGEST_POWER) / 16
        codes = groups.sign() * power(sizes / largest, powers) * self.LARGEST
        scales = torch.where(largest < math.inf, largest, math.nan)
        of_rows = value.shape[0], -1
        stored = from_blocks(codes.to(E4M3), value)
        return value.to(dtype), stored, scales.reshape(of_rows), powers.reshape(of_rows)


#: A pair for each value of the option ``state``: for numbers of either sign, and for non-negative numbers.
PACKED_FORMATS["fp8_lm"] = TensorScaled("fp8_lm", E4M3), TensorScaled("fp8_lm_positive", torch.float16)
PACKED_FORMATS["coat"] = (Coat(),) * 2


def displacement_error(state: Any, steps: int, device: str) -> float:
    """‖Δ − Δ32‖ / ‖Δ32‖: Δ is the displacement of the weights, Δ32 that with float32 weights and moments."""
    generator = torch.Generator(device).manual_seed(0)
    start = torch.randn(64, 256, device=device, generator=generator).bfloat16()
    packed, exact = (torch.nn.Parameter(start.clone().to(dtype)) for dtype in (None, torch.float32))
    ours, reference = (torch.optim.AdamW([p], lr=1e-3) for p in (packed, exact))
    step = torch.compile(ours.step, backend=CollageBackend(state=state))
    for _ in range(steps):
        packed.grad = torch.randn(64, 256, device=device, generator=generator).bfloat16()
        exact.grad = packed.grad.float()
        step()
        reference.step()
    should = exact.detach().double() - start.double()
    return float((full_value(packed) - start.double() - should).norm() / should.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    weight = torch.empty(64, 256, dtype=torch.bfloat16, device="meta")
    rows = []
    for state in ("block16", "block8", "coat", "fp8_lm"):
        stored = sum(fmt.nbytes(weight) for fmt in PACKED_FORMATS[state]) / weight.numel()
        rows.append((state, stored, displacement_error(state, options.steps, options.device)))
    print(tabulate(rows, headers=("state", "bytes of both moments", "displacement error"), floatfmt=".2g"))


if __name__ == "__main__":
    main()
