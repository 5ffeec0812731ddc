"""Recorded steps put together at random: no value leaves a compiled graph and comes back without error term.

Each program takes a parameter through several pieces, by masks, by places that values decide, and over
branches on values. What one piece hands to the next has the parameter's dtype.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx.capture.recording import is_recorded
from tests.capture.test_recording import LR, Recorded, give_gradients, largest_error, params_of, twins
from tests.support.training import compiled

STEPS = 2
PIECES_OF_EACH = 4

#: From a tensor and the gradient to the tensor, somewhat moved.
Piece = Callable[[Tensor, Tensor], Tensor]


def assigned_by_a_mask(t: Tensor, g: Tensor) -> Tensor:
    t, mask = t.clone(), g * t > 0
    t[mask] = t[mask] - LR * g[mask]
    return t


def scaled_by_a_mask(t: Tensor, g: Tensor) -> Tensor:
    t = t.clone()
    t[g > 0] *= 1 - LR
    return t


def selected_and_scattered(t: Tensor, g: Tensor) -> Tensor:
    mask = t.abs() > 0.5
    return t.masked_scatter(mask, torch.masked_select(t, mask) * (1 - LR))


def chosen_by_a_condition(t: Tensor, g: Tensor) -> Tensor:
    return torch.where(g > 0, t - LR * g, t)


def in_two_parts(t: Tensor, g: Tensor) -> Tensor:
    mask, made = g > t, torch.empty_like(t)
    made[mask], made[~mask] = t[mask] - LR * g[mask], t[~mask]
    return made


def rows_selected(t: Tensor, g: Tensor) -> Tensor:
    order = g.abs().amax(1).argsort()
    return (t.index_select(0, order) - LR * g.index_select(0, order)).index_select(0, order.argsort())


def rows_looked_up(t: Tensor, g: Tensor) -> Tensor:
    rows = torch.nonzero(g.abs().amax(1) > 0.5).view(-1)
    return t.index_copy(0, rows, torch.nn.functional.embedding(rows, t) - LR * g[rows])


def taken(t: Tensor, g: Tensor) -> Tensor:
    places = torch.arange(t.numel()).flip(0)
    return (torch.take(t, places) - LR * torch.take(g, places))[places].view(t.shape)


def gathered_and_scattered(t: Tensor, g: Tensor) -> Tensor:
    places = g.argsort(1)
    return torch.empty_like(t).scatter_(1, places, t.gather(1, places) - LR * g.gather(1, places))


def added_at_nonzeros(t: Tensor, g: Tensor) -> Tensor:
    places = torch.nonzero(g > 0, as_tuple=True)
    return t.index_put(places, -LR * g[places], accumulate=True)


def repeated_and_picked(t: Tensor, g: Tensor) -> Tensor:
    counts = (g.view(-1) > 0).long() + 1
    return t.reshape(-1).repeat_interleave(counts)[counts.cumsum(0) - 1].view(t.shape) - LR * g


def split_at_a_value(t: Tensor, g: Tensor) -> Tensor:
    count = int((g > 0).sum())
    flat = (t - LR * g).reshape(-1)
    return torch.cat([flat[:count], flat[count:]]).view(t.shape)


def branched_on_an_item(t: Tensor, g: Tensor) -> Tensor:
    return t * (1 - LR) if t.norm().item() > 0 else t


def scaled_by_a_number(t: Tensor, g: Tensor) -> Tensor:
    return t - g * (LR / (1 + float(g.float().norm())))


def scaled_by_a_list(t: Tensor, g: Tensor) -> Tensor:
    large = [each for each in g.abs().amax(1).tolist() if each > 0.5]
    return t - LR * len(large) / len(g) * g


def row_by_row(t: Tensor, g: Tensor) -> Tensor:
    rows = zip(t, g, strict=True)
    return torch.stack([row - LR * slope if slope.sum() > 0 else row for row, slope in rows])


def one_row(t: Tensor, g: Tensor) -> Tensor:
    t, row = t.clone(), int(g.abs().amax(1).argmax())
    t[row] -= LR * g[row]
    return t


def sorted_and_scattered(t: Tensor, g: Tensor) -> Tensor:
    values, places = (t - LR * g).view(-1).sort()
    return torch.empty_like(values).scatter_(0, places, values).view(t.shape)


def found_among_distinct_values(t: Tensor, g: Tensor) -> Tensor:
    values, places = torch.unique(t - LR * g, return_inverse=True)
    return values[places]


PIECES: tuple[Piece, ...] = (
    assigned_by_a_mask,
    scaled_by_a_mask,
    selected_and_scattered,
    chosen_by_a_condition,
    in_two_parts,
    rows_selected,
    rows_looked_up,
    taken,
    gathered_and_scattered,
    added_at_nonzeros,
    repeated_and_picked,
    split_at_a_value,
    branched_on_an_item,
    scaled_by_a_number,
    scaled_by_a_list,
    row_by_row,
    one_row,
    sorted_and_scattered,
    found_among_distinct_values,
)


def programs() -> list[Any]:
    """Each piece in one program of some, in an order that is drawn, and how the parameter is updated."""
    drawn = random.Random(0)
    order = drawn.sample(PIECES, len(PIECES))
    cases = []
    for i in range(0, len(order), PIECES_OF_EACH):
        pieces, way = order[i : i + PIECES_OF_EACH], drawn.choice(["copied", "assigned", "added"])
        cases.append(pytest.param(pieces, way, id="-".join([*(each.__name__ for each in pieces), way])))
    return cases


def assert_near_float64(low: Any, high: Any) -> None:
    """A recorded step stays near the same step in float64."""
    start = [q.detach().clone() for q in params_of(high)]
    step = compiled(low)
    for seed in range(STEPS):
        give_gradients(low, high, seed)
        step()
        high.step()
    assert is_recorded(low)
    assert largest_error(low, high, start) < 0.02


@pytest.mark.parametrize(("pieces", "way"), programs())
def test_a_program_moves_its_parameter_as_in_float64(pieces: Sequence[Piece], way: str) -> None:
    """Error terms are all that moves here: as in ``test_recording.py``, a value that loses its own shows."""

    class Drawn(Recorded):
        def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
            moved: Tensor = p
            for piece in pieces:
                moved = piece(moved, g)
            if way == "copied":
                p.copy_(moved)
            elif way == "assigned":
                p.data = moved
            else:
                p.add_(moved - p)
            if p.norm() > 1e9:
                p.zero_()

    low, high = twins(Drawn, [(4, 3)])
    assert_near_float64(low, high)


#: Operations made of others, which torch hands on as they are in inference mode.
TESTS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "if": lambda t, g: torch.logical_or(g.amax() > 1e9, t.norm() < 0),
    "is_nonzero": lambda t, g: torch.is_nonzero(g.amax() > 1e9),
    "float": lambda t, g: float(torch.linalg.norm(g)) > 1e9,
    "item": lambda t, g: (g.reshape(-1) @ t.reshape(-1)).item() > 1e9,
    "allclose": torch.allclose,
    "equal": torch.equal,
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("test", TESTS)
def test_a_value_is_asked_for_in_inference_mode_or_not(test: str, mode: Callable[[], Any]) -> None:
    @mode()
    def change(p: Tensor, g: Tensor) -> Tensor:
        return g * 1e3 if TESTS[test](p, g) else torch.chunk(p @ p.t() @ g, 1)[0]

    class Asked(Recorded):
        def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
            p.sub_(change(p, g), alpha=LR)

    low, high = twins(Asked, [(4, 3)])
    assert_near_float64(low, high)
