"""Values of rows and columns in printed kernels: the bits of the eager twin, whatever is cut where."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from collage_fx.lowering.rules import Broadcast, broadcast
from tests.support.substitutes import given_to_inductor
from tests.support.training import parameters, set_gradients
from tests.support.twin import TwinBackend


@pytest.mark.parametrize(
    ("shape", "into", "expected"),
    [
        ((4, 1), (4, 6), Broadcast(of_rows=True, of_columns=False, columns=6)),
        ((1, 6), (4, 6), Broadcast(of_rows=False, of_columns=True, columns=6)),
        ((6,), (4, 6), Broadcast(of_rows=False, of_columns=True, columns=6)),
        ((1, 1), (4, 6), Broadcast(of_rows=False, of_columns=False, columns=0)),
        ((1,), (4, 6), Broadcast(of_rows=False, of_columns=False, columns=0)),
        ((2, 1, 1, 1), (2, 3, 4, 5), Broadcast(of_rows=True, of_columns=False, columns=60)),
        ((2, 3, 1, 1), (2, 3, 4, 5), Broadcast(of_rows=True, of_columns=False, columns=20)),
        ((1, 1, 4, 5), (2, 3, 4, 5), Broadcast(of_rows=False, of_columns=True, columns=20)),
        ((4, 1, 1), (4, 1, 6), Broadcast(of_rows=True, of_columns=False, columns=6)),
        ((1, 3, 1), (2, 3, 4), None),
        ((2, 1, 4), (2, 3, 4), None),
        ((4, 6), (4, 6), None),
        ((1, 4, 6), (4, 6), None),
    ],
)
def test_rows_and_columns(shape: Any, into: Any, expected: Broadcast | None) -> None:
    assert broadcast(shape, into) == expected


class Scaled(torch.optim.Optimizer):
    """Momentum that is scaled by states of other shapes, which each step may change."""

    def __init__(self, params: Any, smaller: Sequence[Sequence[int]], *, is_changed: bool) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.smaller, self.is_changed = smaller, is_changed
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum"] = torch.zeros_like(p)
            for k, shape in enumerate(smaller):
                generator = torch.Generator().manual_seed(k)
                self.state[p][f"scale{k}"] = torch.rand(shape, generator=generator).to(p.dtype)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch overloads it
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                scale: Any = 1.0
                for k, _ in enumerate(self.smaller):
                    each = state[f"scale{k}"]
                    scale = (each * 0.5 + 0.1).sqrt() * scale
                    if self.is_changed:
                        each.mul_(0.999).add_(0.01)
                state["momentum"].mul_(0.9).addcmul_(p.grad, scale, value=0.1)
                p.addcdiv_(state["momentum"], scale + 0.01, value=-group["lr"])


def differing(
    params: Sequence[Tensor], smaller: Sequence[Sequence[int]], *, is_changed: bool, **options: Any
) -> list[Any]:
    """Take three steps, and return the shapes of the arguments of which the twin has other bits."""
    backend = TwinBackend(**options)
    step = torch.compile(Scaled(params, smaller, is_changed=is_changed).step, backend=backend)
    found = []
    for seed in range(3):
        set_gradients(params, seed)
        backend.engine = "both"
        step()
        # Sums of metrics, in float64, are added up in another order.
        found += [each.shape for each in backend.different if each.dtype is not torch.float64]
    return found


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 5, 31, 128, 129, 300]), min_size=2, max_size=3)))
    cut = draw(st.integers(1, len(shape) - 1))
    of_rows = (*shape[:cut], *(1 for _ in shape[cut:]))
    of_columns = (*(1 for _ in shape[:cut]), *shape[cut:])
    kinds = st.sampled_from([of_rows, of_columns, of_columns[cut:], (1,)])
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    return {
        "params": parameters(dtype, [shape] * draw(st.integers(1, 2))),
        "smaller": draw(st.lists(kinds, min_size=1, max_size=3)),
        "is_changed": draw(st.booleans()),
        "strategy": draw(st.sampled_from(["light", "plus", "full"])),
        "error_format": draw(st.sampled_from(["exact", "byte"])),
        "metrics": draw(st.booleans()),
    }


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_bits_are_the_twins(case: dict[str, Any]) -> None:
    torch.compiler.reset()
    assert differing(**case) == []


@pytest.mark.parametrize("is_changed", [False, True], ids=["read", "stored"])
@pytest.mark.parametrize("smaller", [[(700, 1)], [(1, 300)], [(700, 1), (300,), (1, 1)]], ids=str)
def test_they_are_printed_and_cut_into_pieces(smaller: Any, is_changed: bool) -> None:
    """A tensor of 210,000 elements is cut in the middle of a row."""
    with given_to_inductor() as compiled, warnings.catch_warnings():
        warnings.filterwarnings("error", "Raw SymInt value")  # a size that is no node of the kernel's graph
        params = parameters(shapes=[(700, 300)])
        found = differing(params, smaller, is_changed=is_changed, strategy="light")
    assert found == []
    assert compiled == []


def test_a_smaller_tensor_that_is_neither_is_left_to_inductor() -> None:
    with given_to_inductor() as compiled:
        params = parameters(shapes=[(20, 30, 40)])
        found = differing(params, [(1, 30, 1)], is_changed=True, strategy="light")
    assert found == []
    assert compiled


def test_a_transposed_matrix() -> None:
    params = [torch.nn.Parameter(p.detach().t()) for p in parameters(shapes=[(40, 30)])]
    assert differing(params, [(30, 1), (40,)], is_changed=True, strategy="light") == []
