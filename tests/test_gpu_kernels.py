"""What a GPU is given is what ``docs/gpu.md`` says, and what a step of that many bytes needs."""

from __future__ import annotations

import pytest
import torch

from tests import gpu_kernels
from tests.support import triton_offline as offline

pytestmark = pytest.mark.skipif(
    not offline.HAVE_TRITON, reason="needs triton (Linux only) and numpy: pip install triton numpy"
)


@pytest.mark.parametrize("row", gpu_kernels.ROWS, ids=lambda row: f"{row.optimizer}, {row.words}")
def test_a_kernel_moves_what_is_held_once(row: gpu_kernels.Row) -> None:
    found = gpu_kernels.measured(row)
    print(found)
    assert found.launches <= 2
    assert found.calls == 0
    assert found.moved == pytest.approx(found.held, abs=0.01)  # but for scales of blocks, a byte for each 32
    assert all(used["STACK"] == used["LOCAL"] == 0 for used in found.used.values())
    if "state" not in row.options and row.options.get("error_format") != "byte":
        assert found.wide[0] == found.wide[1]
    told = gpu_kernels.PATH.read_text(encoding="utf-8")
    if torch.__version__.partition("+")[0] in told:  # registers are those of a version
        line = gpu_kernels.table([(row, found)]).splitlines()[-1]
        assert " ".join(line.split()) in " ".join(told.split())
