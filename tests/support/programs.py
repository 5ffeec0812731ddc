"""Small captured steps for the passes' tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch import make_fx
from torch import Tensor

from collage_fx.choices import Arithmetic, Strategy
from collage_fx.graph import Reason
from collage_fx.graph.program import InputInfo, Role, StepProgram
from collage_fx.lowering.parts import parts_of
from collage_fx.lowering.rules import Rule, rule_of
from collage_fx.numerics.error_formats import ERROR_FORMATS
from collage_fx.passes.base import Pass
from collage_fx.pipeline import PIPELINE, run_pipeline
from tests.support.triton_offline import functional_graph

ROLES = {"p": Role.PARAMETER, "g": Role.GRADIENT}


def captured(
    step: Callable[..., Any],
    symbols: str,
    *,
    dtypes: Sequence[torch.dtype] | torch.dtype = torch.bfloat16,
    shape: tuple[int, ...] = (4,),
    strategy: Strategy = "plus",
    arithmetic: Arithmetic = "wide",
    error_format: str = "mcf",
) -> StepProgram:
    """Capture ``step`` as a program that no pass has seen.

    Args:
        step: mutates its tensors in place, as an optimizer does.
        symbols: the inputs' names, such as ``"p g m"``; ``p`` is the parameter, ``g`` its gradient, the
            others are state; ``lr`` and ``t`` are 0-d float32.
        dtypes: one per input that isn't 0-d, or one for all.
        shape: of all that are not 0-d.
        strategy: as in ``CollageBackend``.
        arithmetic: as in ``CollageBackend``.
        error_format: as in ``CollageBackend``.
    """
    names = symbols.split()
    remaining = iter([dtypes] * len(names) if isinstance(dtypes, torch.dtype) else dtypes)
    tensors = [
        torch.ones(()) if name in ("lr", "t") else torch.ones(shape, dtype=next(remaining)) for name in names
    ]
    program = captured_of(step, *tensors, strategy=strategy, arithmetic=arithmetic, error_format=error_format)
    for node, name in zip(program.gm.graph.find_nodes(op="placeholder"), names, strict=True):
        node._rename(name)
    program.gm.recompile()
    program.infos = [InputInfo(name, name, ROLES.get(name, Role.STATE)) for name in names]
    return program


def captured_of(
    step: Callable[..., Any],
    *tensors: Tensor,
    strategy: Strategy = "plus",
    arithmetic: Arithmetic = "wide",
    error_format: str = "mcf",
) -> StepProgram:
    """Capture ``step`` of these tensors, all of them state, as a program that no pass has seen."""
    gm = functional_graph(step, *tensors)
    infos = [InputInfo(node.name, node.name, Role.STATE) for node in gm.graph.find_nodes(op="placeholder")]
    return StepProgram(gm, infos, strategy, arithmetic, ERROR_FORMATS[error_format])


def after(program: StepProgram, last: str) -> StepProgram:
    """Run a program through every pass of the pipeline up to and including the one named ``last``."""
    names = [each.name for each in PIPELINE]
    run_pipeline(program, PIPELINE[: names.index(last) + 1])
    return program


def only(program: StepProgram, *passes: Pass) -> StepProgram:
    """Run a program through just these passes."""
    run_pipeline(program, passes)
    return program


def sgd(p: Tensor, g: Tensor) -> None:
    p.add_(g, alpha=-0.5)


def moving_average(m: Tensor, g: Tensor) -> None:
    m.mul_(0.5).add_(g)


def rule_for(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Rule:
    """Return the rule of a function whose graph is one part."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    parts = parts_of(gm.graph)
    assert not isinstance(parts, Reason), parts
    (part,) = parts
    return rule_of(part)
