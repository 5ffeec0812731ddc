"""Memory for values that cross between kernels: no overlap, and no more than a round of members needs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collage_fx import CollageBackend
from collage_fx.runtime import temporaries
from collage_fx.runtime.temporaries import ALIGNMENT, Lifetime, first_fit
from tests.support.substitutes import temporaries_of_bytes
from tests.support.training import Descent, differences, everything, parameters, run_steps

LIFETIMES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(1, 300)).map(
        lambda drawn: Lifetime(drawn[0], drawn[0] + drawn[1], drawn[2])
    ),
    max_size=12,
)


@given(LIFETIMES)
def test_buffers_of_one_wave_do_not_overlap(lifetimes: list[Lifetime]) -> None:
    offsets, size = first_fit(lifetimes)
    for wave in range(15):
        used = sorted(
            (offset, offset + each.bytes)
            for offset, each in zip(offsets, lifetimes, strict=True)
            if each.first <= wave <= each.last
        )
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(used))
        assert all(end <= size for _, end in used)
    assert all(offset % ALIGNMENT == 0 for offset in offsets)


def test_buffers_of_later_waves_take_the_place_of_earlier_ones() -> None:
    lifetimes = [Lifetime(wave, wave + 1, 640) for wave in (0, 2, 4, 6)]
    assert first_fit(lifetimes) == ([0, 0, 0, 0], 640)


class Squashed(Descent):
    """Descent by a function that Inductor compiles, of averaged gradients that are printed."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["average"] = torch.zeros_like(p)
            state["average"].lerp_(p.grad, 0.1)
            p.sub_(torch.tanh(state["average"] * 4) + p.grad.mean(), alpha=2.0**-10)


SHAPES: Sequence[tuple[int, ...]] = [(8, 16), (8, 16), (130,), (8, 16), (1,), (3, 5)]


@pytest.mark.parametrize("limit", [1, 600, 2000])
def test_members_that_take_turns_compute_the_same(limit: int) -> None:
    found = []
    for least in (temporaries.LIMIT, limit):
        torch.compiler.reset()
        params = parameters(shapes=SHAPES)
        optimizer = Squashed(params)
        with temporaries_of_bytes(least):
            backend = CollageBackend()
            run_steps(torch.compile(optimizer.step, backend=backend), params, range(3))
        assert {graph.route.unit for graph in backend.report().graphs} == {"by family"}
        found.append(everything(optimizer))
    assert differences(*found) == []
