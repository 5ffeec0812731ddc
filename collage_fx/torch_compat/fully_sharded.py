"""DTensors, and modules of FSDP2, whose dtype changes: rests on attributes of FSDP2's groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch


def _groups(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters that FSDP2 gathers together, after ``reshard()`` of their modules."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            # Groups are found by what they hold: the attribute has another name in torch 2.11 than in 2.13.
            for value in vars(cast(Any, fully_shard).state(module)).values():
                found = value if isinstance(value, (list, tuple)) else [value]
                yield from (each for each in found if hasattr(each, "fsdp_params"))


def gathers_other_dtype(model: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Return whether a module has buffers, from a forward pass, that parameters of ``dtype`` do not fit."""
    pairs = ((group.mp_policy.param_dtype or dtype, p) for group in _groups(model) for p in group.fsdp_params)
    return any(each.dtype is not wanted for wanted, p in pairs for each in p.all_gather_outputs)


@torch.no_grad()
def note_new_dtypes(model: torch.nn.Module) -> None:
    """Make FSDP2 gather and reduce a module's parameters in the dtypes that they have now."""
    for group in _groups(model):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()
        if hasattr(group.comm_ctx, "device_handle"):  # after the first forward pass, which does this itself
            group.lazy_init()


def take_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give a tensor the data of another, of any dtype: ``tensor.data = other``, for DTensors, too."""
    tensor.data = other
    for name in getattr(type(tensor), "__slots__", ()):  # of a DTensor: its shard and its placement
        setattr(tensor, name, getattr(other, name))
