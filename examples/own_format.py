"""An error format of one's own: a byte beside each element, in units of 1/256 of its last place.

``byte`` keeps as much and rounds it up or down by dither, so that nothing is lost on average; this one rounds
to nearest, which takes fewer instructions. What that costs is what the example measures: how far weights end
from where float64 would have put them, after 400 steps of AdamW at a learning rate of 1e-5.

    python examples/own_format.py [--device cpu] [--steps 400]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from collage_fx import CollageBackend, full_value
from collage_fx.numerics import storage_format
from collage_fx.numerics.error_formats import ERROR_FORMATS, AuxiliarySpec, ErrorBound, ErrorFormat


class NearestByte(ErrorFormat):
    """A byte beside bfloat16: what is left of the value, in units of 1/256 of hi's last place."""

    name = "nearest-byte"
    precision = "one byte: 16 bits, rounded to nearest"
    is_elementwise = True

    def auxiliaries(self, hi: Tensor) -> Sequence[AuxiliarySpec]:
        return (AuxiliarySpec.like(hi, "units", torch.int8),)

    def error_bound(self, dtype: torch.dtype) -> ErrorBound:
        """A unit, where 128 of them have to be 127; half of hi's last place where hi is subnormal."""
        fmt = storage_format(dtype)
        return ErrorBound(fmt.unit_roundoff / 2**7, fmt.quantum / 2)

    def unit(self, hi: Tensor) -> Tensor:
        """Of a normal float32 number its power of two, 2⁻⁷ of which is bfloat16's last place; else 0."""
        return (hi.view(torch.int32) & 0x7F800000).view(torch.float32) * 2.0**-15

    def join(self, hi: Tensor, *auxiliaries: Tensor) -> Tensor:
        (units,) = auxiliaries
        near = hi.to(torch.float32)
        return torch.where(near.abs() < torch.inf, near + units.to(torch.float32) * self.unit(near), near)

    def split(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        hi = value.to(dtype)
        near = hi.to(torch.float32)
        unit = self.unit(near)
        is_kept = (unit > 0) & (near.abs() < torch.inf)
        units = torch.where(is_kept, (value - near) / unit, 0.0).round().clamp(-127, 127)
        return hi, units.to(torch.int8)


def displacement_error(error_format: Any, steps: int, device: str) -> float:
    """‖Δ − Δ64‖ / ‖Δ64‖, with Δ how far the weights are from their start, and Δ64 the same in float64."""
    torch.manual_seed(0)
    start = torch.randn(64, 64, device=device).bfloat16()
    compensated, exact = (torch.nn.Parameter(start.clone().to(dtype)) for dtype in (None, torch.float64))
    backend = CollageBackend(strategy="full", error_format=error_format)
    ours = torch.optim.AdamW([compensated], lr=1e-5)
    step = torch.compile(ours.step, backend=backend)
    reference = torch.optim.AdamW([exact], lr=1e-5, foreach=False)
    for _ in range(steps):
        compensated.grad = (torch.randn(64, 64, device=device) + 0.5).bfloat16()
        exact.grad = compensated.grad.double()
        step()
        reference.step()
    moved, should = full_value(compensated) - start.double(), exact.detach() - start.double()
    return float((moved - should).norm() / should.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    ERROR_FORMATS[NearestByte.name] = NearestByte()
    weight = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    rows = [
        (name, ERROR_FORMATS[name].nbytes(weight) / weight.numel(), displacement_error(name, *steps_on))
        for name in ("exact", "mcf", "byte", NearestByte.name)
        for steps_on in [(options.steps, options.device)]
    ]
    print(tabulate(rows, headers=("error format", "bytes beside hi", "displacement error"), floatfmt=".2g"))


if __name__ == "__main__":
    main()
