"""Patches for Python numbers as symbols: rests on Dynamo's calls and on AOTAutograd's treatment of floats."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch._dynamo import source as sources
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.variables.base import VariableTracker

from collage_fx.torch_compat.patching import Patch
from collage_fx.torch_compat.version import version

POWERS = Patch(
    name="powers",
    target="torch._dynamo.variables.torch:TorchInGraphFunctionVariable.call_function(self, tx, args, kwargs)",
    why="math.pow of a changing number is traced; Dynamo would make the number a constant",
    waits_for="math.pow of a symbolic float, traced by Dynamo like **",
    needed_for="speed",
    relies_on=(
        "torch._dynamo.symbolic_convert:InstructionTranslatorBase.inline_user_function_return(self, fn)",
        "torch._dynamo.variables.base:VariableTracker.build(tx, value)",
        "torch._dynamo.variables.base:VariableTracker.is_python_constant",
    ),
)

SCALARS = Patch(
    name="scalars",
    target="torch._dynamo.variables.builder:VariableBuilder._wrap(self, value)",
    why="a NumPy number in an optimizer, np.float64(0.1), is treated as a Python number",
    waits_for="NumPy numbers in param_groups treated as Python numbers",
    relies_on=(
        "torch._dynamo.variables.builder:VariableBuilder.__init__(self, tx, source)",
        "torch._dynamo:source has AttrSource, CallFunctionNoArgsSource, is_from_optimizer_source",
    ),
)

SYMBOLIC_FLOATS = Patch(
    name="symbolic-floats",
    target="torch._functorch._aot_autograd.graph_compile:tensorify_python_scalars(gm, shape_env, fake_mode)",
    why="a float that tensor operations have replaced everywhere, or that a graph leaves out because another "
    "stands for it, does not become a constant",
    needed_for="speed",
    waits_for="the floats that are to stay symbols, named by the caller",
    during="lowerings",
    relies_on=("torch._dynamo.symbolic_convert:TensorifyState has clear, force_specializations, specialize",),
)


@contextlib.contextmanager
def tracing_numbers() -> Iterator[None]:
    """Context manager: Dynamo traces ``math.pow`` of symbolic numbers, and takes NumPy's for Python's."""
    with POWERS.entered(_inlining), SCALARS.entered(_as_numbers_of_python):
        yield


def _as_numbers_of_python(wrap: Callable[..., Any], self: Any, value: Any) -> Any:
    numpy = sys.modules.get("numpy")  # it need not be installed
    is_of_numpy = numpy is not None and isinstance(value, (numpy.number, numpy.bool_))
    if is_of_numpy and sources.is_from_optimizer_source(self.source):
        source = sources.CallFunctionNoArgsSource(sources.AttrSource(self.source, "item"))
        return type(self)(self.tx, source)(value.item())
    return wrap(self, value)


def _inlining(original: Callable[..., Any], self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    is_symbolic = self.value is math.pow and not all(arg.is_python_constant() for arg in args)
    if not is_symbolic or tx.f_code is _power.__code__:
        return original(self, tx, args, kwargs)
    return tx.inline_user_function_return(VariableTracker.build(tx, _power), list(args), kwargs)


def _power(x: float, y: float, /) -> float:
    """Compute ``math.pow``, in Python's ``**`` if both are sure to agree, which Dynamo traces."""
    return float(x) ** float(y) if x > 0 else math.pow(x, y)


def keeping_numbers_symbolic(left_out: Set[str]) -> contextlib.AbstractContextManager[None]:
    """Context manager: AOTAutograd keeps a symbolic float that tensors have replaced everywhere.

    Before torch 2.13, AOTAutograd replaces ``-lr`` or ``1 - lr`` by tensor operations, then looks only for
    ``lr`` itself among the replaced symbols, does not find it, and restarts with the number as a constant.
    In all versions it does so with symbols that are not in the graph, because others stand for them: those
    ``left_out``, which become constants only if a symbol of the graph does.
    """

    def tensorify(
        original: Callable[..., None], gm: torch.fx.GraphModule, shape_env: Any, fake_mode: Any
    ) -> None:
        burned_in_before = set(TensorifyState.force_specializations)
        try:
            original(gm, shape_env, fake_mode)
        except TensorifyScalarRestartAnalysis:
            asked = TensorifyState.force_specializations - burned_in_before
            burned_in = asked - left_out
            if version() < (2, 13):
                burned_in &= {str(symbol) for symbol in shape_env.replacements}
            kept = asked - burned_in - left_out if burned_in else asked
            TensorifyState.force_specializations.difference_update(kept)
            if burned_in:
                raise

    return SYMBOLIC_FLOATS.entered(tensorify)


class BurnedIn(Exception):
    """Error of a compilation without Dynamo that would turn numbers with these symbols into constants."""

    def __init__(self, symbols: frozenset[str]) -> None:
        super().__init__(", ".join(symbols))
        self.symbols = symbols


@contextlib.contextmanager
def noticing_burned_in() -> Iterator[None]:
    """Context manager: raise :class:`BurnedIn` where Dynamo would restart with numbers as constants."""
    TensorifyState.clear()
    try:
        yield
    except TensorifyScalarRestartAnalysis:
        raise BurnedIn(frozenset(TensorifyState.force_specializations)) from None
    finally:
        TensorifyState.clear()
