"""Steps whose graphs disagree on what needs error terms: the code without them is compiled anew."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import CollageBackend, error_terms, full_value, install
from collage_fx.capture.compiled import Compiled, CompiledCode, compiling_for, note_write
from tests.support.training import parameters, set_gradients, set_gradients_of_both

STEPS = 24

Rule = Callable[[Tensor, Tensor], object]

#: Ways to follow the gradient with a moving average of the share .1, which rounding does not hurt ...
FINE: tuple[Rule, ...] = (
    lambda m, g: m.lerp_(g, 0.1),
    lambda m, g: m.mul_(0.9).add_(g, alpha=0.1),
    lambda m, g: torch._foreach_lerp_([m], [g], 0.1),
)
#: ... and ways to change it by less than its last bit.
LOSSY: tuple[Rule, ...] = (
    lambda m, g: m.lerp_(g, 2e-4),
    lambda m, g: m.add_(g, alpha=1e-4),
    lambda m, g: m.mul_(0.9999).addcmul_(g, g, value=1e-4),
)


class Turns(Optimizer):
    """Steps of several kinds by turns, of all parameters or of each ``apart``.

    ``records``: with a branch on a value, so that they are recorded.
    """

    def __init__(self, params: Any, kinds: list[Rule], *, records: bool, apart: bool) -> None:
        super().__init__(params, {"t": 0})
        self.kinds = kinds
        self.records = records
        self.apart = apart
        self.start: Callable[[Tensor], Tensor] = torch.zeros_like

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if self.records and not float(p.grad.float().norm()) > 0:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = self.start(p)
                self.kinds[(group["t"] + i * self.apart) % len(self.kinds)](state["m"], p.grad)
                p.add_(state["m"], alpha=-1e-4)
            group["t"] += 1


def _drawn(seed: int) -> list[Rule]:
    draw = random.Random(seed)
    return [
        draw.choice(FINE),
        *(draw.choice(draw.choice((FINE, LOSSY))) for _ in range(2)),
        draw.choice(LOSSY),
    ]


def _values(optimizer: Turns) -> list[Tensor]:
    params = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        return [full_value(x).double() for p in params for x in (p, optimizer.state[p]["m"])]


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("rounding", [None, "nearest"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_each_graph_keeps_the_error_terms_that_another_needs(
    seed: int, apart: bool, rounding: Any, records: bool
) -> None:
    kinds, params = _drawn(seed), parameters(shapes=[(16, 8), (7,), *[(4, 3)] * 3])
    optimizer = Turns(params, kinds, records=records, apart=apart)
    if records:
        step = install(optimizer, rounding=rounding).step
    else:
        step = torch.compile(optimizer.step, backend=CollageBackend(rounding=rounding))
    for i in range(2 * len(kinds)):  # by now each graph knows of the error terms
        set_gradients(params, i)
        step()
    assert all(error_terms(optimizer.state[p]["m"]) for p in params)

    exact = [torch.nn.Parameter(value) for value in _values(optimizer)[::2]]
    wide = Turns(exact, kinds, records=False, apart=apart)
    for q, value in zip(exact, _values(optimizer)[1::2], strict=True):
        wide.state[q]["m"] = value
    for i in range(STEPS):
        set_gradients_of_both(params, exact, i)
        step()
        wide.step()
    for value, right in zip(_values(optimizer), _values(wide), strict=True):
        # Each step rounds to a bf16 number and its error term, 16 bits, and computes in float32.
        assert float((value - right).norm() / right.norm()) < STEPS * 2**-17


@pytest.mark.parametrize("records", [False, True])
def test_error_terms_that_a_step_does_not_keep_are_dropped_for_all_its_tensors(records: bool) -> None:
    """Tensors that were met after its compilation kept the error terms of the first step's values."""
    params = parameters(shapes=[(4, 3)] * 3)
    optimizer = Turns(params, [FINE[0]], records=records, apart=False)
    optimizer.start = lambda p: 0.3 * cast(Tensor, p.grad)
    step, held = install(optimizer, rounding="nearest").step, []
    for i in range(2):
        set_gradients(params, i)
        step()
        held.append([bool(error_terms(optimizer.state[p]["m"])) for p in params])
    assert held == [[True] * 3, [False] * 3]


@pytest.mark.parametrize("constant", [1.0, math.nan])
@pytest.mark.parametrize("number", [1.0, 2.0, math.nan])
def test_code_fits_the_numbers_that_it_has_as_constants(constant: float, number: float) -> None:
    code: Any = Compiled(lambda: None, {0: constant}, (), frozenset(), False, None, cast(Any, None))
    fits = code.fits(SimpleNamespace(numbers=[number]))
    assert fits is (struct.pack("d", constant) == struct.pack("d", number))


def test_what_is_compiled_afterwards_is_not_the_same_code() -> None:
    """Such as the graphs of a report, which are of no step."""
    code = CompiledCode()
    (p,) = parameters(shapes=[(4,)])
    with compiling_for(code):
        note_write(torch.zeros(4), compensated=False)
    note_write(p, compensated=False)
    note_write(p, compensated=True)
    assert not code.is_stale
