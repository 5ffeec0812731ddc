"""Order of reads and writes: a step that copies, writes and swaps leaves what eager torch leaves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from collage_fx import CollageBackend, full_value, install

SLOTS = ("a", "b", "c")
OPERATIONS_OF_EACH = 4


def copied_first(x: Tensor, y: Tensor, g: Tensor) -> None:
    x.copy_(y)
    y.add_(g)


def copied_aside(x: Tensor, y: Tensor, g: Tensor) -> None:
    old = y.clone()
    y.mul_(2)
    x.copy_(old)


def swapped(x: Tensor, y: Tensor, g: Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


def through_a_view(x: Tensor, y: Tensor, g: Tensor) -> None:
    old = y.view(-1).clone()
    y.sub_(g)
    x.data.copy_(old.view_as(x))


def turned_over(x: Tensor, y: Tensor, g: Tensor) -> None:
    old = y.flip(0)
    y.neg_()
    x.copy_(old)


def overwritten(x: Tensor, y: Tensor, g: Tensor) -> None:
    x.copy_(y)
    y.copy_(g)


MOVES: list[Callable[[Tensor, Tensor, Tensor], None]] = [
    copied_first,
    copied_aside,
    swapped,
    through_a_view,
    turned_over,
    overwritten,
]


class Moving(Optimizer):
    """Step that moves values among a parameter and its states, each parameter as drawn for it.

    Args:
        params: parameters of whole numbers, which each dtype holds exactly.
        seed: draws the operations.
        branches: whether the step looks at a value, so that it is recorded.
    """

    def __init__(self, params: list[torch.nn.Parameter], seed: int, *, branches: bool) -> None:
        super().__init__(params, {})
        draw = random.Random(seed)
        self.branches = branches
        self.left: list[Tensor] = []
        names = ("p", *SLOTS)
        self.drawn = [
            [(draw.choice(MOVES), draw.sample(names, 2)) for _ in range(OPERATIONS_OF_EACH)] for _ in params
        ]
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randint(-2, 3, p.shape, generator=generator).to(p.dtype)
            for name in SLOTS:
                self.state[p][name] = torch.randint(-8, 8, p.shape, generator=generator).to(p.dtype)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.left = []
        for p, moves in zip(self.param_groups[0]["params"], self.drawn, strict=True):
            if self.branches and float(p.grad.float().norm()) < 0:
                continue
            tensors = {"p": p, **self.state[p]}
            for move, (x, y) in moves:
                move(tensors[x], tensors[y], p.grad)
            self.left.append(tensors["a"].clone())
            tensors["a"].add_(1)


def values(optimizer: Moving) -> list[Tensor]:
    """Return all that a step leaves."""
    params = optimizer.param_groups[0]["params"]
    state = (optimizer.state[p][name] for p in params for name in SLOTS)
    return [full_value(each) for each in (*params, *state, *optimizer.left)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("way", ["install", "compile", "recorded"])
@pytest.mark.parametrize("seed", range(2))
def test_a_step_leaves_what_eager_torch_leaves(seed: int, way: str, dtype: torch.dtype) -> None:
    """The numbers are whole, and of at most 8 bits: exact in each dtype."""
    torch._dynamo.reset()
    pair = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randint(-8, 8, (4, 6), generator=generator).to(dtype) for _ in range(3)]
        pair.append(Moving([*map(torch.nn.Parameter, drawn)], seed, branches=way == "recorded"))
    ours, eager = pair
    step = torch.compile(ours.step, backend=CollageBackend()) if way == "compile" else install(ours).step
    step()
    eager.step()
    assert all(map(torch.equal, values(ours), values(eager)))


def result_of_copies(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    old = y.view(-1).clone()
    y.sub_(g)
    x.copy_(old.view_as(x))
    result = x.clone()
    x.add_(1)
    return result


def parameter_and_result(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    old = x.clone()
    x.add_(g)
    return x, old, old.t(), x.view(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", ["plus", "none"])
@pytest.mark.parametrize("function", [result_of_copies, parameter_and_result])
def test_what_a_function_returns_is_what_eager_torch_returns(
    function: Callable[..., Any], strategy: Any, dtype: torch.dtype
) -> None:
    """Inductor removes copies of copies: a result would be the input itself, which has been overwritten."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=CollageBackend(strategy=strategy))
    ours, eager = ([(torch.arange(24.0) + 3 * i).view(4, 6).to(dtype) for i in range(3)] for _ in range(2))
    with torch.no_grad():
        found, expected = compiled(*ours), function(*eager)
    assert all(map(torch.equal, tree_leaves((found, ours)), tree_leaves((expected, eager))))
