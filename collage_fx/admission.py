"""What is refused, before anything is rewritten or run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from collage_fx.errors import AliasedStateError, UnsupportedTensorError
from collage_fx.formats import is_low_precision
from collage_fx.graph import copies_to_inputs, placeholders
from collage_fx.program import InputInfo, Role
from collage_fx.torch_compat import aot_input_of

__all__ = ["refuse_sparse", "refuse_unsupported"]

#: Devices whose generated code's roundings are tested.
DEVICES = ("cpu", "cuda")


def refuse_sparse(gm: GraphModule, arguments: Sequence[Any]) -> None:
    """Raise :class:`~collage_fx.errors.UnsupportedTensorError` for sparse tensors among a captured graph's inputs."""
    tensors = {node.name: value for node, value in zip(gm.graph.find_nodes(op="placeholder"), arguments, strict=True)}
    for name, value in {**tensors, **dict(gm.named_parameters()), **dict(gm.named_buffers())}.items():
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise UnsupportedTensorError(
                f"a tensor of layout {value.layout} takes part in the step; compensated updates are defined for dense "
                "tensors",
                where=name,
                remedy="make the gradient dense (nn.Embedding(sparse=False), grad.to_dense()), or step that parameter "
                "with an optimizer of its own that is not compiled with this backend",
            )


def refuse_unsupported(gm: GraphModule, inputs: Sequence[InputInfo]) -> None:
    """Raise for the first mutated input that compensated arithmetic is not defined for.

    Raises:
        AliasedStateError: it shares memory with another input.
        UnsupportedTensorError: a complex or integer parameter, or low-precision state on an untested device.
    """
    stores = copies_to_inputs(gm.graph)
    for node, info in zip(placeholders(gm.graph), inputs, strict=True):
        if node not in stores:
            continue
        value: torch.Tensor = node.meta["val"]
        origin = aot_input_of(node)
        if origin is not None and origin[0] == "alias" and is_low_precision(value.dtype):
            raise AliasedStateError(
                "several tensors of this step share memory and at least one of them is updated, so that an error term would "
                "belong to two tensors at once",
                where=info.name,
                remedy="give each parameter and state its own memory (tensor.clone()), or pass the common base tensor to "
                "the optimizer",
            )
        if info.role is Role.PARAMETER and not value.dtype.is_floating_point:
            raise UnsupportedTensorError(
                f"a parameter of dtype {value.dtype}; error terms are defined for real floating-point tensors",
                where=info.name,
                remedy="keep it out of the compiled optimizer (view complex parameters as real with torch.view_as_real)",
            )
        if is_low_precision(value.dtype) and value.device.type not in DEVICES:
            raise UnsupportedTensorError(
                f"low-precision state on device {value.device}; supported: {', '.join(DEVICES)}",
                where=info.name,
                remedy="move the model to a supported device, or compile this step with backend='inductor'",
            )
