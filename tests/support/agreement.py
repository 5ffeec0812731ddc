"""Compiled against eager, step by step: what both leave in every tensor, and how far apart it may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from collage_fx.numerics import ERROR_FORMATS
from tests.support.float_bits import same_bits, ulp, unit_roundoff
from tests.support.optimizers import CompiledOptimizer, Tensors
from tests.support.twin import Engine, TwinBackend

__all__ = [
    "AdamW",
    "assert_half_ulp",
    "assert_same",
    "assert_within_an_ulp_of_lo",
    "differences",
    "lockstep",
    "trajectory",
]

LOW = (torch.bfloat16, torch.float16)


def trajectory(
    rig: CompiledOptimizer,
    start: Tensors,
    grads: Sequence[Sequence[Tensor]],
    *,
    engine: Literal["compiled", "eager"] | Engine = "compiled",
) -> list[Tensors]:
    """Every tensor after each step from ``start``."""
    assert isinstance(rig.backend, TwinBackend)
    rig.restore(start)
    rig.backend.engine = engine
    states = []
    for grad in grads:
        rig.step(grad)
        states.append(rig.tensors())
    return states


def lockstep(
    rig: CompiledOptimizer, start: Tensors, grads: Sequence[Sequence[Tensor]]
) -> list[tuple[Tensors, Tensors, Tensors]]:
    """(before, compiled, eager) for each step, both run from the tensors that the compiled steps led to."""
    states, before = [], start
    for grad in grads:
        (eager,) = trajectory(rig, before, [grad], engine="eager")
        (compiled,) = trajectory(rig, before, [grad])
        states.append((before, compiled, eager))
        before = compiled
    return states


def differences(a: Tensors, b: Tensors) -> dict[str, int]:
    """Tensor -> how many of its elements have different bits, those with any."""
    counts = {name: int((~same_bits(a[name], b[name])).sum()) for name in a}
    return {name: count for name, count in counts.items() if count}


def assert_same(compiled: Sequence[Tensors], eager: Sequence[Tensors]) -> None:
    """Equal bits of everything after every step."""
    for i, (a, b) in enumerate(zip(compiled, eager, strict=True), 1):
        assert not differences(a, b), (
            f"after step {i} of {len(compiled)}, elements that differ: {differences(a, b)}"
        )


def assert_half_ulp(tensors: Tensors) -> None:
    """Assert ``|lo| <= ulp(hi)/2`` for every expansion, and lo = 0 where hi is not finite.

    The integers of ``exact`` beside bfloat16 and of ``byte`` cannot be more; of ``exact`` beside float16 half
    an ulp is 2**14.
    """
    for name, lo in tensors.items():
        if not name.endswith((".lo", ".rest")):
            continue
        hi = tensors[name.rpartition(".")[0]]
        finite = hi.isfinite()
        assert bool((lo[~finite] == 0).all()), f"{name}: garbage beside a value that is not finite"
        if name.endswith(".rest"):
            assert hi.dtype == torch.bfloat16 or int(lo.int().abs().max()) <= 2**14, name
            continue
        excess = lo[finite].abs().double() / ulp(hi[finite])
        assert bool((excess <= 0.5).all()), f"{name}: |lo| reaches {float(excess.max()):.3g} ulp(hi)"


@dataclass(frozen=True)
class AdamW:
    """Its numbers, for the bounds."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1


def assert_within_an_ulp_of_lo(
    before: Tensors,
    compiled: Tensors,
    eager: Tensors,
    grads: Sequence[Tensor],
    numbers: AdamW,
    powf_ulps: int,
) -> None:
    """Assert that two implementations of a ``wide`` step, from the same tensors, agree but for p's last bits.

    Neither makes an fma of a product and a sum, so moments, of products and sums alone, have the same bits.

    Let v and w be the float32 values of p that the two split or round at the store, and |v - w| <= d. A value
    is stored with an error of at most half an ulp of its last component, so the stored values differ by at
    most d + ulp(last), where the last component's largest ulp is ulp(hi) for a tensor without error term,
    2u ulp(hi)/2 for an error term of hi's dtype, the integers' unit for ``exact`` and ``byte``, and 0 where
    the float32 number is kept.

    d comes from division within 2 ulps, from pow within k = ``powf_ulps``, which 1 - beta**t = bc amplifies
    by 1/bc, and from the rounding of the last sum. With e = 2**-23 >= ulp(x)/|x|:

        d = e |p| + e (12 + k/bc1 + k/bc2) U, where U bounds the update and its operands:
        U = lr (|m| + |g|) / (bc1 (sqrt(v'/bc2) + eps))
    """
    moments = [name for name in eager if ".exp_avg" in name]
    assert_same([{name: compiled[name] for name in moments}], [{name: eager[name] for name in moments}])
    e, (beta1, beta2) = 2.0**-23, numbers.betas
    for i, grad in enumerate(grads):

        def old(slot: str, index: int = i) -> Tensor:
            return _value(before, f"{index}.{slot}")

        t = float(eager[f"{i}.step"])
        g = grad.to(before[f"{i}.p"]).double()
        moment, bc1, bc2 = old("exp_avg").abs() + g.abs(), 1 - beta1**t, 1 - beta2**t
        root = (_value(eager, f"{i}.exp_avg_sq") / bc2).clamp(min=0).sqrt()
        update = numbers.lr * moment / (bc1 * (root + numbers.eps))
        d = e * old("p").abs() + e * (12 + powf_ulps / bc1 + powf_ulps / bc2) * update
        name = f"{i}.p"
        apart = (_value(compiled, name) - _value(eager, name)).abs()
        worst = float((apart / (d + _last_ulp(eager, name))).nan_to_num(0).max())
        assert worst <= 1, f"{name} at step {t:g}: {worst:.3g} times the bound"


#: The parts of an ulp of hi that the integers of ``exact`` and of ``byte`` count, by their dtype.
PARTS = {torch.int16: 2.0**-15, torch.int8: 2.0**-8}


def _value(tensors: Tensors, name: str) -> Tensor:
    hi, lo, rest = tensors[name], tensors.get(f"{name}.lo"), tensors.get(f"{name}.rest")
    if rest is not None:
        count = tensors.get(f"{name}.count")
        joined = (
            ERROR_FORMATS["exact"].join(hi, rest)
            if count is None
            else ERROR_FORMATS["byte"].join(hi, rest, count)
        )
        return joined.double()
    return hi.double() if lo is None else hi.double() + lo.double()


def _last_ulp(tensors: Tensors, name: str) -> Tensor:
    hi, lo, rest = tensors[name], tensors.get(f"{name}.lo"), tensors.get(f"{name}.rest")
    if rest is not None:
        return ulp(hi) * PARTS[rest.dtype]
    if lo is None:
        return ulp(hi)
    if lo.dtype == torch.float32:
        return torch.zeros_like(ulp(hi))
    # Not below the format's smallest subnormal, which is the ulp of zero.
    return (unit_roundoff(hi.dtype) * ulp(hi)).clamp(min=float(ulp(torch.zeros((), dtype=hi.dtype))))
