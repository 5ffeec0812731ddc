"""The table that launches read: what is uploaded, and when."""

from __future__ import annotations

from array import array
from unittest import mock

import pytest
import torch

from collage_fx.errors import ChangedTensorError
from collage_fx.runtime import launches
from collage_fx.runtime.launches import Column, Launches, Member
from collage_fx.torch_compat import TableKernel

NOTHING = torch.empty(0, dtype=torch.uint8)


def test_a_captured_graph_uploads_nothing() -> None:
    """What it would upload in every replay is refused, and uploaded by the next step that is not captured."""
    table = Launches(torch.device("cpu"), [], lambda index: index)
    table.add(TableKernel("kernel", (0,), 1024, {}), [Column(unit=2)], [Member([0], 10)], 1)
    here, there = array("q", [1 << 12]), array("q", [1 << 13])
    table.update(here, NOTHING)
    assert table.table[:2].tolist() == [1 << 12, 10]
    with mock.patch.object(launches, "is_captured", return_value=True):
        table.update(here, NOTHING)
        with pytest.raises(ChangedTensorError, match="at another address"):
            table.update(there, NOTHING)
        with pytest.raises(ChangedTensorError, match="at another address"):
            table.update(there, NOTHING)
    assert table.table[:2].tolist() == [1 << 12, 10]
    table.update(there, NOTHING)
    assert table.table[:2].tolist() == [1 << 13, 10]
