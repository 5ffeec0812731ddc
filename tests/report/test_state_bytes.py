"""Bytes of state that a step's tables have no rows for: other dtypes, and tensors that others quantized."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx import backend_of, install
from collage_fx.errors import InvalidOptionError
from tests.support.substitutes import lowered_as
from tests.support.training import Descent, parameters, set_gradients

SHAPE = (16, 32)
ELEMENTS = 16 * 32


class Quantized(Tensor):
    """Codes and scales that look like a bf16 tensor, as torchao's and bitsandbytes' state does."""

    parts: dict[str, Tensor]

    @staticmethod
    def __new__(cls, **parts: Tensor) -> Quantized:
        made: Quantized = Tensor._make_wrapper_subclass(cls, SHAPE, dtype=torch.bfloat16)
        made.parts = parts
        for name, part in parts.items():
            setattr(made, name, part)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return list(self.parts), None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, meta: Any, size: Any, stride: Any) -> Quantized:
        return cls(**parts)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(**args[0].parts)
        raise NotImplementedError(f"{func} of a quantized tensor")


def drawn_state(draw: random.Random) -> tuple[Tensor, int]:
    """A tensor of state, and the bytes that it holds."""
    kind = draw.choice(("float32", "float64", "int8", "uint8", "bool", "quantized", "nested"))
    if kind == "quantized":
        blocks = draw.choice((1, 4, 16))
        made = Quantized(codes=torch.zeros(SHAPE, dtype=torch.int8), scales=torch.ones(blocks))
        return made, ELEMENTS + 4 * blocks
    if kind == "nested":
        inner, held = drawn_state(draw)
        return Quantized(inner=inner, table=torch.zeros(256)), held + 1024
    dtype = getattr(torch, kind)
    rows = draw.choice((1, 16))
    return torch.zeros(rows, 32, dtype=dtype), rows * 32 * dtype.itemsize


class Branching(Descent):
    """A step that is recorded: it branches on a value."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["params"][0].grad.norm() > 1e9:
            raise AssertionError
        super().step(closure)


def drawn_optimizer(cls: type[Descent], seed: int) -> tuple[Descent, int]:
    """An optimizer with drawn state, and the state's bytes."""
    draw = random.Random(seed)
    optimizer, held = cls(parameters(shapes=(SHAPE,))), 0
    for i in range(draw.randint(1, 3)):
        state, of_state = drawn_state(draw)
        optimizer.state[optimizer.param_groups[0]["params"][0]][f"state{i}"] = state
        held += of_state
    return optimizer, held


def step(optimizer: Descent) -> None:
    set_gradients(optimizer.param_groups[0]["params"])
    with lowered_as("operation by operation"):
        optimizer.step()


@pytest.mark.parametrize("cls", [Descent, Branching])
@pytest.mark.parametrize("seed", range(6))
def test_a_report_counts_all_state(cls: type[Descent], seed: int) -> None:
    optimizer, held = drawn_optimizer(cls, seed)
    install(optimizer)
    step(optimizer)
    report = backend_of(optimizer).report()
    per = report.bytes_per_parameter()
    assert per["state"] == held / ELEMENTS
    assert per["total"] == sum(per.values()) - per["total"]
    shown = f"state {held / ELEMENTS:.4g}"
    assert shown in " ".join(report.to_text().split())
    assert shown in report.to_markdown()
    assert shown in report.to_html()
    assert shown in repr(report)


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_a_budget_counts_quantized_state_as_it_is_held(blocks: int) -> None:
    """Parameters take 2 bytes; error terms 1 byte, the least, and 4 bytes for the count of steps."""

    def quantized() -> Branching:
        optimizer = Branching(parameters(shapes=(SHAPE,)))
        codes = Quantized(codes=torch.zeros(SHAPE, dtype=torch.int8), scales=torch.ones(blocks))
        optimizer.state[optimizer.param_groups[0]["params"][0]]["codes"] = codes
        return optimizer

    least = 2 + 1 + 1 + (4 + 4 * blocks) / ELEMENTS
    enough = install(quantized(), bytes_per_parameter=least)
    step(enough)
    step(enough)
    optimizer = install(quantized(), bytes_per_parameter=0.95 * least)
    step(optimizer)  # the first step makes error terms
    with pytest.raises(InvalidOptionError, match=f"where this optimizer holds {least:.3g}: "):
        step(optimizer)
