"""Backends of torch.compile for functions with operators of ours: Inductor alone, or printed kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

from collage_fx.graph import Reason
from collage_fx.lowering.elementary import in_elementary_operations
from collage_fx.lowering.lower import inductor_settings
from collage_fx.lowering.schedule import lower_in_parts
from collage_fx.runtime import StepInParts
from collage_fx.torch_compat import inductor_compile_as_it_is

__all__ = ["BACKENDS", "by_inductor", "in_parts"]


def in_parts(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph as steps on a CPU are: our operators are printed, Inductor has the rest."""

    def inner(gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        plan = lower_in_parts(gm, always=True)
        assert not isinstance(plan, Reason), plan
        return StepInParts(plan)

    return _compiled(gm, inputs, inner)


def by_inductor(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph by Inductor, with the settings that a step which is compiled as one graph has."""

    def inner(gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        return inductor_compile_as_it_is(in_elementary_operations(gm), inputs, **options)

    return _compiled(gm, inputs, inner, inductor_settings("wide"))


def _compiled(
    gm: GraphModule, inputs: Sequence[Any], inner: Any, settings: dict[str, Any] | None = None
) -> Callable[..., Any]:
    with torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = compile_fx(gm, list(inputs), inner_compile=inner, config_patches=settings)
    return cast("Callable[..., Any]", compiled)


#: What a test may have its kernels compiled by.
BACKENDS: dict[str, Any] = {"inductor": by_inductor, "in parts": in_parts}
