"""Installed steps with masks, written in many ways: frozen elements keep all bits, others move as in float64.

A step changes a parameter, its state, or both where a mask is true. Half way, all masks are turned around, so
that what is frozen from then on has error terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx import error_terms, full_value, install
from collage_fx.state.packed import is_packed
from tests.support.float_bits import same_bits
from tests.support.substitutes import lowered_as

SHAPE = (64, 64)  # enough elements to be packed
STEPS = 12
LR = 2.0**-10

#: Ways to add u to t where k, a mask, is true: functions of t, u and k.
WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "where": lambda t, u, k: t.copy_(torch.where(k, t + u, t)),
    "where not": lambda t, u, k: t.copy_(torch.where(~k, t, t + u)),
    "where, a method": lambda t, u, k: t.copy_((t + u).where(k, t)),
    "where, written out": lambda t, u, k: torch.where(k, t + u, t, out=t),
    "where, of the change": lambda t, u, k: t.add_(torch.where(k, u, 0.0)),
    "where, of the change, by zeros": lambda t, u, k: t.add_(torch.where(k, u, torch.zeros_like(u))),
    "masked_fill of the change": lambda t, u, k: t.sub_(u.masked_fill(~k, 0.0), alpha=-1),
    "a product": lambda t, u, k: t.add_(u * k),
    "a product of casts": lambda t, u, k: t.add_(u * k.to(u.dtype)),
    "addcmul": lambda t, u, k: t.addcmul_(u, k.to(u.dtype).expand_as(u)),
    "two products": lambda t, u, k: t.copy_(t * ~k + (t + u) * k),
    "two masked_fills": lambda t, u, k: t.copy_(t.masked_fill(k, 0.0) + (t + u).masked_fill(~k, 0.0)),
    "lerp": lambda t, u, k: t.lerp_(t + u, k.to(t.dtype).expand_as(t)),
    "undone": lambda t, u, k: t.copy_(torch.where(k, t.clone().add_(u), t)),
    "where twice": lambda t, u, k: t.copy_(torch.where(k, torch.where(k, t + u, t), t)),
    "index_put": lambda t, u, k: t.index_put_((k.expand_as(t),), (t + u)[k.expand_as(t)]),
    "index_put of the change": lambda t, u, k: t.index_put_(
        (k.expand_as(t),), u[k.expand_as(u)], accumulate=True
    ),
    "masked_scatter": lambda t, u, k: t.masked_scatter_(k, (t + u).masked_select(k)),
    "rows by number": lambda t, u, k: t.index_copy_(0, rows(k, t), (t + u)[rows(k, t)]),
    "rows by number, added": lambda t, u, k: t.index_add_(0, rows(k, t), u[rows(k, t)]),
}
#: Ways that are for conditions of rows alone.
OF_ROWS = ("rows by number", "rows by number, added")
#: Ways of which Dynamo captures no graph: how many elements are taken depends on values. They are recorded.
RECORDED = ("index_put", "index_put of the change", "masked_scatter", *OF_ROWS)


def rows(mask: Tensor, tensor: Tensor) -> Tensor:
    """Return the numbers of the rows for which a mask is true."""
    return mask.expand_as(tensor)[:, 0].nonzero().flatten()


#: Sizes of masks.
CONDITIONS = {"a number": (), "rows": (SHAPE[0], 1), "columns": (SHAPE[1],), "elements": SHAPE}

#: Options; the rounding of a parameter, relative to it, and of a state, relative to its largest element.
FORMATS: dict[str, tuple[dict[str, str], float, float]] = {
    "exact": ({}, 2.0**-23, 2.0**-7),
    "full": ({"strategy": "full"}, 2.0**-23, 2.0**-23),
    "byte": ({"error_format": "byte"}, 2.0**-15, 2.0**-7),
    "nearest": ({"rounding": "nearest"}, 2.0**-23, 2.0**-8),
    # Integers up to 32767, or squares of them up to 127; a scale is 1.5 times the largest number at most.
    "block16": ({"strategy": "light", "state": "block16"}, 2.0**-23, 1.5 / 32767),
    "block8": ({"strategy": "light", "state": "block8", "error_format": "byte"}, 2.0**-15, 1.5 * 2 / 127),
}
NAMES = ("p", "m", "p m")


class Masked(torch.optim.Optimizer):
    """Momentum, of which the parameter or the moment changes only where a mask is true."""

    def __init__(self, params: Sequence[Tensor], masks: Sequence[Tensor], way: str, names: str) -> None:
        super().__init__(params, {})
        self.masks, self.way, self.names = masks, WAYS[way], names.split()
        for p in params:
            self.state[p]["m"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p, mask in zip(self.param_groups[0]["params"], self.masks, strict=True):
            m = self.state[p]["m"]
            for name, tensor in (("m", m), ("p", p)):
                change = p.grad - 0.5 * m if name == "m" else -LR * m
                if name in self.names:
                    self.way(tensor, change, mask)
                else:
                    tensor.add_(change)


CASES = [
    (way, condition, options, NAMES[(i + j) % 3])
    for i, way in enumerate(WAYS)
    for j, condition in enumerate(CONDITIONS)
    if way not in OF_ROWS or condition == "rows"
    for options in ([*FORMATS][: 4 if way in RECORDED else 6][(i * 5 + j) % (4 if way in RECORDED else 6)],)
]


def test_cases_have_each_pair() -> None:
    """Each format meets each condition, and each kind of tensor that is masked."""
    assert {(case[1], case[2]) for case in CASES} == {(c, f) for c in CONDITIONS for f in FORMATS}
    assert {(case[2], case[3]) for case in CASES} == {(f, n) for f in FORMATS for n in NAMES}


@pytest.mark.parametrize(("way", "condition", "options", "names"), CASES)
def test_frozen_elements_keep_all_bits_and_others_move(
    way: str, condition: str, options: str, names: str
) -> None:
    given, of_parameter, of_state = FORMATS[options]
    draw = torch.Generator().manual_seed(len(way) * len(condition))
    mask = torch.rand(CONDITIONS[condition], generator=draw) > 0.5
    start = torch.randn(SHAPE, generator=draw).bfloat16()
    p, exact = (torch.nn.Parameter(start.to(dtype, copy=True)) for dtype in (start.dtype, torch.float64))
    ours, theirs = (Masked([each], [mask], way, names) for each in (p, exact))
    options_: dict[str, Any] = given
    install(ours, **options_)
    largest = 0.0
    before: list[Tensor] = []
    with lowered_as("operation by operation"):
        for i in range(STEPS):
            if i == STEPS // 2:
                before = bits(ours, p)
                mask.logical_not_()
            p.grad = torch.randn(SHAPE, generator=draw).bfloat16()
            exact.grad = p.grad.double()
            ours.step()
            theirs.step()
            largest = max(largest, float(theirs.state[exact]["m"].abs().max()))
    packed = is_packed(ours.state[p]["m"])
    if "state" in given and not packed:
        assert "m" in names
        assert not way.startswith("where") or condition in ("columns", "elements")
        of_state = 2.0**-7
    # Half of the moment's error is left after each step: two roundings are the most. Each step adds that to
    # the parameter, and rounds the sum.
    bound = STEPS * (LR * 2 * of_state * largest + of_parameter * float(exact.detach().abs().max()))
    error = float((full_value(p) - exact.detach()).abs().max())
    way_moved = float((exact.detach() - start).abs().max())
    print(f"error {error:.2g} of {way_moved:.2g}, bound {bound:.2g}")
    assert error <= bound < way_moved / 2
    frozen = ~mask.expand(SHAPE)
    for name, old, new in zip(("p", "p", "m", "m"), before, bits(ours, p), strict=False):
        if name in names.split() and not (name == "m" and packed and condition in ("columns", "elements")):
            assert same_bits(old, new)[frozen].all(), name


def bits(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> list[Tensor]:
    """Return copies of a parameter, its error term, its moment, and an error term of that."""
    m = optimizer.state[p]["m"]
    tensors = (p, *error_terms(p)[:1], m, *error_terms(m)[:1])
    return [each.detach().clone() for each in tensors]
