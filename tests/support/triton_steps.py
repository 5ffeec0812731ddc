"""Whole steps in the code that Inductor writes for a GPU, run by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collage_fx.lowering.lower import inductor_settings
from collage_fx.state.packed import is_packed
from tests.support import triton_offline as offline
from tests.support.agreement import trajectory
from tests.support.optimizers import CompiledOptimizer, Tensors
from tests.support.twin import TwinBackend

__all__ = ["triton_trajectory"]

#: Namespace of operators -> the module whose import defines them.
OPERATORS = {"collage_fx": "collage_fx", "collage_fx_examples": "collage_fx.examples.peer_formats"}


def triton_trajectory(
    rig: CompiledOptimizer, start: Tensors, grads: Sequence[Sequence[Tensor]]
) -> list[Tensors]:
    """Every tensor after each step from ``start``, by the code for the graph compiled last, in ``wide``."""
    assert isinstance(rig.backend, TwinBackend)
    with torch._inductor.config.patch(inductor_settings("wide", [torch.device("cuda")])):
        source = offline.triton_source(offline.to_cuda(rig.backend.graphs[-1]))
    for namespace, module in OPERATORS.items():
        if f"torch.ops.{namespace}." in source:
            source = f"import {module}\n{source}"

    def interpreted(arguments: list[Any]) -> Any:
        """What is packed has no memory in the code, which may look at its shape."""
        given = [
            torch.empty((), dtype=each.dtype).expand(each.shape)
            if isinstance(each, Tensor) and is_packed(each)
            else each
            for each in arguments
        ]
        return offline.run_in_interpreter(source, given)

    return trajectory(rig, start, grads, engine=interpreted)
