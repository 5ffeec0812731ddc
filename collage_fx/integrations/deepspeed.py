"""Integration with DeepSpeed: whole values of ZeRO's parameters.

``collage_fx.install(engine.optimizer)`` installs the optimizer behind ZeRO 1, 2 and 3, whose parameters are
flat buffers. They are bfloat16 with ``"bf16": {"enabled": true, "bf16_master_weights_and_grads": true,
"bf16_optimizer_states": true}``; otherwise they are float32 masters, which have no error terms. The model's
parameters are copies of the buffers, rounded to hi: :func:`full_value` reads the buffers.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor
from torch.nn import Parameter

from collage_fx.errors import UnsupportedTensorError
from collage_fx.state import full_value as _full_value

__all__ = ["full_value"]


def full_value(parameter: Parameter) -> Tensor:
    """Return the value of a model's parameter with its error terms, in float64, on every process.

    All processes have to call it, as DeepSpeed's ``safe_get_full_fp32_param``.

    Args:
        parameter: a parameter of a model that ``deepspeed.initialize`` has been given, with ZeRO 1, 2 or 3.

    Raises:
        CollageError: DeepSpeed does not keep the parameter in a flat buffer.
    """
    if hasattr(parameter, "ds_id"):
        return _of_stage_3(parameter)
    mapping, group = (getattr(parameter, name, None) for name in ("_hp_mapping", "_dp_group"))
    if group is None:
        raise UnsupportedTensorError(
            "a parameter that DeepSpeed keeps in no flat buffer",
            where=f"a parameter of shape {tuple(parameter.shape)}",
            remedy="use collage_fx.full_value(parameter), or ZeRO stage 1, 2 or 3",
        )
    whole = torch.zeros(parameter.numel(), dtype=torch.float64, device=parameter.device)
    if mapping is not None:  # this process has some of the elements, or all
        here = mapping.lp_fragment_address
        whole[here.start : here.start + here.numel] = _full_value(mapping.get_hp_fragment())
    torch.distributed.all_reduce(whole, group=group)
    return whole.view(parameter.shape)


def _of_stage_3(parameter: Parameter) -> Tensor:
    """Return the value of a parameter of which each process has an equal part, the last one padded."""
    local = importlib.import_module("deepspeed.utils").safe_get_local_fp32_param(parameter)
    part = _full_value(local).flatten()
    group = parameter.ds_process_group  # type: ignore[attr-defined]
    parts = torch.empty(part.numel() * group.size(), dtype=part.dtype, device=part.device)
    torch.distributed.all_gather_into_tensor(parts, part, group=group)
    whole: Tensor = parts[: parameter.ds_numel].view(parameter.ds_shape)  # type: ignore[attr-defined]
    return whole
