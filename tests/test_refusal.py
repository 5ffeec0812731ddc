"""An update that cannot carry an error term is refused, not silently plain."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx import CollageBackend
from collage_fx.errors import UncompensatedParameterError


class Rotate(torch.optim.Optimizer):
    """Multiplies each parameter by a matrix: a matrix product rounds its result to the storage format."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.updated(p, p.grad))

    def updated(self, p: Tensor, g: Tensor) -> Tensor:
        return p @ g


class RotateInFloat32(Rotate):
    def updated(self, p: Tensor, g: Tensor) -> Tensor:
        return (p.float() @ g.float()).to(p.dtype)


class RotateAndAdd(Rotate):
    """Here the last operation is an addition, but it only gets what the matrix product has rounded."""

    def updated(self, p: Tensor, g: Tensor) -> Tensor:
        return (p @ g).add(g, alpha=0.0)


class ScaleAndRotateAndAdd(Rotate):
    """Here the product gets what has been computed in float32."""

    def updated(self, p: Tensor, g: Tensor) -> Tensor:
        return ((p * 0.5) @ g).add(g, alpha=0.0)


def _rotated(optimizer: type[Rotate] = Rotate, **options: Any) -> Tensor:
    p = torch.nn.Parameter(torch.eye(4, dtype=torch.bfloat16))
    p.grad = 2 * torch.eye(4, dtype=torch.bfloat16)
    step = torch.compile(optimizer([p]).step, backend=CollageBackend(**options))
    try:
        step()
    except UncompensatedParameterError:
        assert torch.equal(p, torch.eye(4, dtype=torch.bfloat16))
        raise
    return p.detach()


REASONS_ON_THE_WAY = {"native": "no double-word algorithm", "wide": "without its error term"}
REASONS = {"native": "no double-word algorithm", "wide": "returns its result rounded"}


@pytest.mark.parametrize("arithmetic", REASONS)
def test_strict_refuses_and_changes_nothing(arithmetic: str) -> None:
    with pytest.raises(UncompensatedParameterError, match=REASONS[arithmetic]):
        _rotated(arithmetic=arithmetic)


@pytest.mark.parametrize("arithmetic", REASONS)
def test_not_strict_warns(arithmetic: str) -> None:
    with pytest.warns(UserWarning, match=REASONS[arithmetic]):
        rotated = _rotated(arithmetic=arithmetic, strict=False)
    assert torch.equal(rotated, 2 * torch.eye(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("optimizer", [RotateAndAdd, ScaleAndRotateAndAdd])
@pytest.mark.parametrize("arithmetic", REASONS)
def test_an_error_term_that_is_lost_on_the_way_is_refused(arithmetic: str, optimizer: type[Rotate]) -> None:
    with pytest.raises(UncompensatedParameterError, match=REASONS_ON_THE_WAY[arithmetic]):
        _rotated(optimizer, arithmetic=arithmetic)


@pytest.mark.parametrize("arithmetic", REASONS)
def test_the_remedy_is_not_what_is_done_already(arithmetic: str) -> None:
    """And following the one for ``wide`` is enough."""
    with pytest.raises(UncompensatedParameterError) as refused:
        _rotated(arithmetic=arithmetic)
    assert ("use arithmetic='wide'" in str(refused.value)) == (arithmetic == "native")
    assert ("x.float()" in str(refused.value)) == (arithmetic == "wide")
    _rotated(RotateInFloat32)


class Replace(Rotate):
    """What the parameter was plays no part in what it becomes."""

    def updated(self, p: Tensor, g: Tensor) -> Tensor:
        return g @ g


@pytest.mark.parametrize("arithmetic", REASONS)
def test_a_matrix_product_that_replaces_a_tensor_loses_nothing_of_it(arithmetic: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        replaced = _rotated(Replace, arithmetic=arithmetic, strategy="full")
    assert torch.equal(replaced, 4 * torch.eye(4, dtype=torch.bfloat16))
