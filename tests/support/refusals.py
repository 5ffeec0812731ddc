"""Checks that every refusal has to pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collage_fx import CollageError
from tests.support.training import compiled, differences, everything

__all__ = ["refused"]


def refused(optimizer: torch.optim.Optimizer, error: type[CollageError], step: Any = None) -> str:
    """Check that a step is refused, as itself, says what, where and what to do, and changes nothing."""
    before, state = everything(optimizer), {id(k): list(v) for k, v in optimizer.state.items()}
    with pytest.raises(error) as refusal:
        (step or compiled(optimizer))()
    assert type(refusal.value) is error
    assert differences(before, everything(optimizer)) == []
    assert {id(k): list(v) for k, v in optimizer.state.items()} == state
    text = str(refusal.value)
    assert "\n  where: " in text
    assert "\n  what to do: " in text
    return text
