"""Parameters that FSDP2 gathers: shards without memory are asked for their values then."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from collage_fx.torch_compat.patching import Patch
from collage_fx.torch_compat.tensors import local_tensor

_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"

GATHERED_SHARDS = Patch(
    name="gathered-shards",
    target="torch.distributed.fsdp._fully_shard._fsdp_collectives:_get_param_all_gather_inputs(fsdp_params)",
    why="FSDP2 asks for the value of a shard when it gathers it, and holds no memory for it itself",
    during="the process",
    needed_for="speed",
    waits_for="a hook of FSDP2 that is called before a shard is gathered, whenever it was sharded",
    is_there=torch.distributed.is_available(),
    relies_on=(
        f"{_PARAMETER} has padded_sharded_param_size, sharded_param",
        f"{_PARAMETER}.to_sharded(self) has sharded_state",
        f"{_PARAMETER}.reset_sharded_param(self) has local_tensor",
    ),
)

#: Attribute of parameters that FSDP2 gathers from themselves, not from memory that it has kept of them.
_GATHERED = "collage_fx_gathered"


def gather_from(parameter: torch.Tensor, whole: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make FSDP2 gather ``whole(parameter)``, a DTensor, in place of memory that it keeps of a parameter."""
    setattr(parameter, _GATHERED, True)
    GATHERED_SHARDS.install(functools.partial(_gathered, whole))


def _gathered(whole: Callable[[torch.Tensor], torch.Tensor], original: Any, parameters: Any) -> Any:
    marked = (each for each in parameters if hasattr(each.sharded_param, _GATHERED))
    changed = [each for each in marked if each.sharded_state.name == "SHARDED"]
    for each in changed:
        _hold(each, local_tensor(whole(each.sharded_param)))
    inputs = original(parameters)
    for each in changed:
        _hold(each, torch.full((), float("nan"), dtype=each.sharded_param.dtype, device=each.device))
    return inputs


@torch.no_grad()
def _hold(parameter: Any, value: torch.Tensor) -> None:
    """Make the memory from which FSDP2 gathers a parameter that of a value, of one element or of a shard.

    FSDP2 takes it from the parameter's shard itself, if that has the size with padding.
    """
    size, sharded = parameter.padded_sharded_param_size, parameter.sharded_param
    if value.dim() == 0:
        padded = value.expand(size)
    elif value.shape == size:
        padded = value.contiguous()
    else:
        padded = value.new_zeros(size)
        padded.narrow(0, 0, value.shape[0]).copy_(value)
    shard = local_tensor(sharded)
    sharded._local_tensor = padded
    try:
        parameter.reset_sharded_param()
    finally:
        sharded._local_tensor = shard
