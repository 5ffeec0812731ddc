"""What a trainer gave an optimizer at each step, and those steps again in float64 and low precision."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import error_terms, full_value

__all__ = ["DEFAULTS", "KEPT", "Kept", "Replay"]


class Kept(NamedTuple):
    """What an AdamW's parameters and moments are kept in.

    Attributes:
        options: of the backend.
        bits: of a parameter's significand.
        of_moments: the error of a displacement that comes from rounding the moments.
    """

    options: dict[str, Any]
    bits: int
    of_moments: float


#: Moments are rounded at each step and forget that at beta1 = 0.9. ``plus`` leaves the first in bfloat16:
#: they are rounded by u / sqrt(3) = 2**-8 / sqrt(3) in the mean at most and so are off by 0.005,
#: u / sqrt(3 * (1 - 0.9**2)). Some of that cancels in a displacement, the sum of many.
DEFAULTS = Kept({}, 24, 0.005)

#: Codes of 8 bits are rounded by 2**-7 / sqrt(12) of a block's largest element, three times the mean one in
#: blocks of 32, which gives 0.016 in the same way. Those of 16 bits by less than a hundredth of that.
KEPT = [
    pytest.param(DEFAULTS, id="defaults"),
    pytest.param(Kept({"bytes_per_parameter": 8}, 24, 0.001), id="8 bytes"),
    pytest.param(Kept({"bytes_per_parameter": 5.1}, 16, 0.016), id="5.1 bytes"),
]


class Replay:
    """A record of an optimizer's gradients and settings, each copied when the optimizer has used them.

    Args:
        optimizer: the one that the trainer steps, before its first step. Its steps are recorded from then on.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.start = [p.detach().clone() for p in self.parameters]
        self.gradients: list[list[Tensor | None]] = []
        self.settings: list[list[dict[str, Any]]] = []
        optimizer.register_step_post_hook(self._record)

    def _record(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.gradients.append([None if p.grad is None else p.grad.detach().clone() for p in self.parameters])
        self.settings.append(
            [
                {key: value for key, value in group.items() if key != "params"}
                | {"fused": None, "foreach": False}
                for group in optimizer.param_groups
            ]
        )

    @property
    def learning_rates(self) -> list[float]:
        """Those of the first group."""
        return [float(groups[0]["lr"]) for groups in self.settings]

    def assert_compensated(self, kept: Kept = DEFAULTS) -> None:
        """No parameter is NaN or has no error term, and nearly no displacement is lost, as plain would."""
        most = kept.of_moments + self._of_parameters(kept.bits)
        assert all(map(error_terms, self.parameters))
        assert not any(p.isnan().any() for p in self.parameters)
        ours = self._error([full_value(p) for p in self.parameters])
        plain = self._error(self._replayed(self.parameters[0].dtype))
        assert plain >= 10 * most, f"plain {plain:.2g} is no test"
        met = f"displacement error: {ours:.2g} (at most {most:.2g}), of plain steps {plain:.3g}"
        print(met)
        assert ours <= most, met

    def assert_near(self, most: float) -> None:
        """No parameter, of float32, is NaN or off by more than a share of the displacement in float64."""
        assert {p.dtype for p in self.parameters} == {torch.float32}
        assert not any(p.isnan().any() for p in self.parameters)
        ours = self._error([p.detach() for p in self.parameters])
        assert ours <= most, f"displacement error: {ours:.2g} (at most {most:.2g})"

    def assert_clipped(self, most: float) -> None:
        """Gradients came clipped: each step's norm is ``most`` or less, and that of some is ``most``.

        Up to four roundings to bfloat16: of each gradient's norm, of theirs, of the factor and the product.
        """
        norms = [
            math.sqrt(sum(float(g.double().square().sum()) for g in step if g is not None))
            for step in self.gradients
        ]
        assert most * (1 - 4 * 2**-8) <= max(norms) <= most * (1 + 4 * 2**-8), max(norms)

    def _replayed(self, dtype: torch.dtype) -> list[Tensor]:
        """Where the recorded steps lead the parameters in another dtype, eagerly."""
        twins = [torch.nn.Parameter(start.to(dtype, copy=True)) for start in self.start]
        remaining = iter(twins)
        groups = [
            {"params": [next(remaining) for _ in group["params"]]} for group in self.optimizer.param_groups
        ]
        optimizer_class: Any = type(self.optimizer)
        optimizer = optimizer_class(groups)
        for gradients, settings in zip(self.gradients, self.settings, strict=True):
            for twin, gradient in zip(twins, gradients, strict=True):
                twin.grad = None if gradient is None else gradient.to(dtype)
            for group, setting in zip(optimizer.param_groups, settings, strict=True):
                group.update(setting)
            optimizer.step()
        return [twin.detach() for twin in twins]

    def _of_parameters(self, bits: int) -> float:
        """The error of displacements that comes from rounding parameters by dither, a random walk at most.

        One to the unit in the last place is off by half of it in the mean at most.
        """
        exponents = [start.float().frexp().exponent for start in self.start]
        units = [torch.ldexp(torch.ones_like(each, dtype=torch.float32), each - bits) for each in exponents]
        exact = self._replayed(torch.float64)
        off, moved = (
            torch.cat([each.flatten() for each in many]).norm()
            for many in (units, [end - start for end, start in zip(exact, self.start, strict=True)])
        )
        return float(math.sqrt(len(self.gradients)) / 2 * off / moved)

    def _error(self, ends: list[Tensor]) -> float:
        """The norm of all differences from float64's displacements, relative to the norm of those."""
        exact = self._replayed(torch.float64)
        off, moved = (
            torch.cat([(a.double() - b.double()).flatten() for a, b in zip(end, other, strict=True)]).norm()
            for end, other in ((ends, exact), (exact, self.start))
        )
        return float(off / moved)
