"""The eager twin of a compiled step: the same rewritten graph, run operation by operation instead of lowered."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule, Interpreter

import collage_fx.backend
from collage_fx import CollageBackend
from collage_fx.lowering import CompensatedStep
from collage_fx.program import StepProgram

__all__ = ["ExactInterpreter", "TwinBackend", "without_pinning"]

aten = torch.ops.aten

#: What torch's eager CPU kernels round otherwise than the compiled code's instruction and C library: the eager float32 square root is
#: an ulp off for one argument in six (AVX-512 on AMD), pow is SLEEF's. Computed in float64 and rounded, the root is correctly
#: rounded, as 53 >= 2*24 + 2 (Figueroa, 1995), and so is pow unless the float64 result lies within 2**-29 of a tie.
THROUGH_FLOAT64 = frozenset(
    {aten.sqrt.default, aten.pow.Tensor_Tensor, aten.pow.Scalar, aten.pow.Tensor_Scalar}
)


class ExactInterpreter(Interpreter):
    """Runs a functional ATen graph with its ``copy_`` epilogue on real tensors, float32 roots and powers rounded once."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if target in THROUGH_FLOAT64 and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors):
            # A Python number beside a float32 tensor is a float32 number: 0.9 ** t is RN(0.9) ** t.
            wide = [arg.double() if isinstance(arg, torch.Tensor) else _as_float32(arg) for arg in args]
            return super().call_function(target, tuple(wide), kwargs).float()
        return super().call_function(target, args, kwargs)


def _as_float32(number: Any) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


class TwinBackend(CollageBackend):
    """A backend whose compiled steps run the rewritten graph eagerly while ``eager`` is set.

    Attributes:
        eager: what the next call of a step runs.
        graphs: the rewritten graphs, one per compilation.
        programs: what they were lowered from.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.eager = False
        self.graphs: list[GraphModule] = []
        self.programs: list[StepProgram] = []

    def lower(
        self, graph: StepProgram | GraphModule, example_inputs: Sequence[Any], inductor_options: dict[str, Any]
    ) -> Any:
        if not isinstance(graph, StepProgram):
            return super().lower(graph, example_inputs, inductor_options)
        rewritten = copy.deepcopy(graph.gm)  # Inductor edits the one it is given
        self.graphs.append(rewritten)
        self.programs.append(graph)
        step: CompensatedStep = super().lower(graph, example_inputs, inductor_options)
        compiled, interpreter = step.compiled, ExactInterpreter(rewritten)

        def either(arguments: list[Any]) -> Any:
            return interpreter.run(*arguments) if self.eager else compiled(arguments)

        step.compiled = either
        return step


@contextlib.contextmanager
def without_pinning() -> Iterator[None]:
    """Compile as if ``pin-roundings`` did not exist."""
    pipeline = collage_fx.backend.PIPELINE
    assert pipeline[-1].name == "pin-roundings"
    with mock.patch.object(collage_fx.backend, "PIPELINE", pipeline[:-1]):
        yield
