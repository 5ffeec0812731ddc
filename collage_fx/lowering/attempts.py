"""The compilation of a graph by Inductor, in simpler ways where the usual one fails.

Note [There is always a way]
----------------------------
Inductor fails now and then, at plain steps as at rewritten ones, and a machine may have no C++ compiler. That
is no reason for a step that can be compensated to end in somebody else's traceback: what failed is tried
again in ways that leave more and more of Inductor out. If all fail, the rewritten graph itself is run,
operation by operation. Its roundings are operators, so the bits are right in each of these ways; they differ
in time. The user gets one warning that names the fault and the price. Faults of our own are raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule

from collage_fx.graph import Reason, copy_of, device_facts
from collage_fx.torch_compat import (
    InductorFault,
    inductor_compile_inner,
    inductor_config,
    inductor_faults,
    prepare_cpp_compiler,
    takes_a_list,
    without_outer_loop_fusion,
)

__all__ = ["Attempt", "compile_somehow", "interpreted"]


def _one_operation_a_loop() -> AbstractContextManager[Any]:
    return inductor_config.patch({"max_fusion_size": 1, "cpp.simdlen": 1})


#: Ways to compile a graph, the fastest code first, by what they leave out.
WAYS: tuple[tuple[str, Callable[[], AbstractContextManager[Any]]], ...] = (
    ("as usual", nullcontext),
    ("without loops in common for what differs in inner loops", without_outer_loop_fusion),
    ("with a loop for each operation, and no vectors", _one_operation_a_loop),
)


class Attempt(NamedTuple):
    """The outcome of the attempts to compile a graph.

    Attributes:
        call: takes the inputs as one list.
        fault: why it is not the code that Inductor usually writes, and what it is instead; None if it is.
        is_compiled: whether Inductor compiled it in any way.
    """

    call: Callable[[list[Any]], Any]
    fault: Reason | None
    is_compiled: bool = True


def compile_somehow(gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Attempt:
    """Compile a graph in the first way that works, or else run it.

    Args:
        gm: a functional graph with ``copy_`` epilogue, which Inductor edits.
        inputs: fake ones.
        options: for ``inductor_compile_inner``.
    """
    spare, faults = copy_of(gm), list[str]()
    for way, simplified in WAYS:
        try:
            with simplified(), inductor_faults():
                if any(
                    isinstance(each, Tensor) and device_facts(each.device).compiles_cpp for each in inputs
                ):
                    prepare_cpp_compiler().result()
                compiled = inductor_compile_inner(copy_of(spare) if faults else gm, inputs, **options)
            return Attempt(
                compiled, Reason(f"Inductor failed: {faults[0]}; compiled {way}") if faults else None
            )
        except InductorFault as fault:
            faults.append(str(fault))
    why = Reason(f"Inductor failed: {faults[0]}; what is simplified fails, too: {faults[-1]}")
    return Attempt(interpreted(spare), why, is_compiled=False)


def interpreted(gm: GraphModule) -> Callable[[list[Any]], Any]:
    """A graph as a callable in AOTAutograd's convention that runs one operation after the other."""

    def run(arguments: list[Any]) -> Any:
        return gm(*arguments)

    return takes_a_list(run)
