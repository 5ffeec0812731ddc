"""Python's numbers as symbols: rests on Dynamo's rules for functions and on how floats become tensors."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.decorators import substitute_in_graph
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.trace_rules import get_torch_obj_rule_map, torch_name_rule_map
from torch._functorch._aot_autograd import graph_compile

from collage_fx.torch_compat.patching import wrap_method
from collage_fx.torch_compat.version import version

__all__ = ["keep_numbers_symbolic", "trace_instead"]


def keep_numbers_symbolic() -> None:
    """Before torch 2.13: have AOTAutograd keep a symbolic float that it has replaced by a tensor everywhere.

    It does replace ``-lr`` or ``1 - lr`` by tensor operations there, but then looks only for ``lr`` itself
    among what it has replaced, doesn't find it, and starts over with the number burned in.
    """
    if version() < (2, 13):
        wrap_method(graph_compile, "tensorify_python_scalars", _restarting_only_if_burned_in)


def _restarting_only_if_burned_in(original: Callable[..., None]) -> Callable[..., None]:
    def tensorify(gm: torch.fx.GraphModule, shape_env: Any, fake_mode: Any) -> None:
        asked: list[str] = []
        burned_in: set[str] = set()
        with unittest.mock.patch.object(TensorifyState, "specialize", asked.append):
            try:
                original(gm, shape_env, fake_mode)
            except TensorifyScalarRestartAnalysis:
                burned_in = {str(symbol) for symbol in shape_env.replacements}.intersection(asked)
        for name in burned_in:
            TensorifyState.specialize(name)
        if burned_in:
            raise TensorifyScalarRestartAnalysis

    return tensorify


def trace_instead(function: Callable[..., Any], traceable: Callable[..., Any]) -> None:
    """Have Dynamo inline ``traceable`` where a traced program calls ``function``, which may be a builtin.

    For every backend: Dynamo has one table of rules. A second call for the same function changes nothing.
    """
    name = f"{function.__module__}.{function.__name__}"
    if name in _traced_otherwise:
        return
    _traced_otherwise.add(name)
    maps: list[dict[str, Any]] = list(torch_name_rule_map)  # type: ignore[arg-type]
    for rules in maps:
        rules.pop(name, None)
    get_torch_obj_rule_map.cache_clear()
    substitute_in_graph(function)(traceable)


_traced_otherwise: set[str] = set()
