"""The eager twin of a compiled step: the same rewritten graph, run operation by operation, not lowered."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from collage_fx import CollageBackend
from collage_fx.graph import Reason, StepProgram, repeated_graph
from collage_fx.lowering import Lowered
from collage_fx.runtime.step import CompensatedStep
from collage_fx.state.packed import is_packed
from tests.support.float_bits import same_bits
from tests.support.substitutes import nothing_compiled
from tests.support.triton_offline import copy_graph

__all__ = ["Engine", "ExactInterpreter", "TwinBackend"]

aten = torch.ops.aten

#: What torch's eager CPU kernels round otherwise than the compiled code's instruction and C library: the
#: eager float32 square root is an ulp off for one argument in six (AVX-512 on AMD), pow is SLEEF's.
#: Computed in float64 and rounded, the root is correctly rounded, as 53 >= 2*24 + 2 (Figueroa, 1995), and
#: so is pow unless the float64 result lies within 2**-29 of a tie.
THROUGH_FLOAT64 = frozenset(
    {aten.sqrt.default, aten.pow.Tensor_Tensor, aten.pow.Scalar, aten.pow.Tensor_Scalar}
)


class ExactInterpreter(Interpreter):
    """Runs a functional graph with its ``copy_`` epilogue, float32 roots and powers rounded once."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if target in THROUGH_FLOAT64 and all(
            t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors
        ):
            # A Python number beside a float32 tensor is a float32 number: 0.9 ** t is RN(0.9) ** t.
            wide = [arg.double() if isinstance(arg, Tensor) else _as_float32(arg) for arg in args]
            return super().call_function(target, tuple(wide), kwargs).float()
        if target is aten.pow.Scalar and args[1].device.type == "cuda":
            return _powers_of(args[0])(args[1])
        return super().call_function(target, args, kwargs)


@functools.cache
def _powers_of(base: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A kernel for powers: eager pow is the CUDA toolkit's, an ulp off that of Triton's libdevice."""
    power: Callable[[torch.Tensor], torch.Tensor] = torch.compile(
        lambda exponent: base**exponent, dynamic=False
    )
    return power


def _as_float32(number: Any) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


#: Runs a rewritten graph: the arguments in the order of its placeholders, the error terms last; mutates them.
Engine = Callable[[list[Any]], Any]


class TwinBackend(CollageBackend):
    """A backend whose steps run the rewritten graph by an engine of the test's choice.

    Args:
        compiles: whether Inductor compiles the steps; if not, ``engine`` has to be set.
        options: those of :class:`CollageBackend`.

    Attributes:
        engine: what the next call of a step runs: Inductor's code, the eager twin, both (the twin on copies),
            or a function.
        graphs: the rewritten graphs, one per compilation.
        different: arguments with memory, of the last step that ran both, of which the twin left other bits.
    """

    def __init__(self, *, compiles: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.compiles = compiles
        self.engine: Literal["compiled", "eager", "both"] | Engine = "compiled"
        self.graphs: list[GraphModule] = []
        self.different: list[Tensor] = []

    def lower(
        self,
        program: StepProgram,
        example_inputs: Sequence[Any],
        inductor_options: dict[str, Any],
    ) -> Lowered | Reason:
        # Inductor edits the graph that it is given.
        rewritten = repeated_graph(copy_graph(program.gm), program.extended)
        with contextlib.nullcontext() if self.compiles else nothing_compiled():
            lowered = super().lower(program, example_inputs, inductor_options)
        if isinstance(lowered, Reason):
            return lowered
        self.graphs.append(rewritten)
        step = cast(CompensatedStep, lowered.step)
        compiled, interpreter = step.compiled, ExactInterpreter(rewritten)

        def run(arguments: list[Any]) -> Any:
            if self.engine == "eager":
                return interpreter.run(*arguments)
            if self.engine != "both":
                return compiled(arguments) if self.engine == "compiled" else self.engine(arguments)
            copies = [_copied(each) for each in arguments]
            pairs = [
                (one, other)
                for one, other in zip(arguments, copies, strict=True)
                if isinstance(one, Tensor) and not is_packed(one)
            ]
            result = compiled(arguments)  # which takes them out of the list
            interpreter.run(*copies)
            self.different = [one for one, other in pairs if not bool(same_bits(one, other).all())]
            return result

        step.compiled = run
        return lowered


def _copied(argument: Any) -> Any:
    """A tensor of the same strides and bits; anything else itself."""
    if not isinstance(argument, Tensor):
        return argument
    empty = torch.empty_strided(
        argument.shape, argument.stride(), dtype=argument.dtype, device=argument.device
    )
    return empty.copy_(argument)
