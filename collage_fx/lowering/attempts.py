"""The compilation of a graph by Inductor, in simpler ways where the usual one fails.

Note [There is always a way]
----------------------------
Inductor fails now and then, and a machine may have no C++ compiler. What failed is tried again with less of
Inductor; if all fails, the rewritten graph is run operation by operation. Its roundings are operators, so the
bits are right in each way, which differ in time. The user gets one warning that names the fault and the
price. A fault that began in code of this package, which Inductor calls, is a bug, and raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from collage_fx.errors import FailedLoweringError
from collage_fx.graph import Reason, Reasons, copy_of, device_facts, not_taken
from collage_fx.lowering.elementary import in_elementary_operations
from collage_fx.torch_compat import InductorFault, boxed_call, inductor_compile_inner, inductor_config

#: Ways to compile a graph, the fastest code first: descriptions and context managers.
_SIMPLE = {"max_fusion_size": 1, "cpp.simdlen": 1}
WAYS: tuple[tuple[str, Callable[[], AbstractContextManager[Any]]], ...] = (
    ("as usual", nullcontext),
    ("with a loop for each operation, and no vectors", lambda: inductor_config.patch(_SIMPLE)),
)


class Attempt(NamedTuple):
    """Outcome of the attempts to compile a graph: a function of the list of its inputs.

    ``reasons`` say why it is not the code that Inductor usually writes.
    """

    call: Callable[[list[Any]], Any]
    reasons: Reasons = ()
    is_compiled: bool = True


@contextmanager
def inductors_faults() -> Iterator[None]:
    """Context manager: raise InductorFault for a fault of Inductor, FailedLoweringError for one of ours."""
    try:
        yield
    except Exception as error:
        fault = InductorFault(error)
        if not fault.ours:
            raise fault from error
        met = f"code of collage_fx that Inductor calls failed: {fault}"
        remedy = "this is a bug in collage_fx; please report it with the traceback"
        raise FailedLoweringError(met, where=fault.ours, remedy=remedy) from error


def compile_somehow(gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Attempt:
    """Compile a functional graph with ``copy_`` epilogue in the first way that works, or else run it.

    Inductor, which edits its graphs, gets copies. ``inputs`` are fake.
    """
    faults = list[str]()
    for way, simplified in WAYS:
        try:
            with simplified(), inductors_faults():
                given = in_elementary_operations(copy_of(gm))
                compiled = inductor_compile_inner(given, inputs, **options)
            simpler = Reason(f"Inductor failed: {faults[0]}; compiled {way}") if faults else None
            return Attempt(compiled, not_taken(("by the usual code", simpler)))
        except InductorFault as fault:
            faults.append(str(fault))
    simplified_too = f"; simplified: {faults[-1]}" if faults[-1] != faults[0] else ""
    failed = Reason(f"Inductor failed: {faults[0]}{simplified_too}")
    return Attempt(interpreted(gm), (("by the usual code", failed),), is_compiled=False)


def interpreted(gm: GraphModule) -> Callable[[list[Any]], Any]:
    """Return a callable, in AOTAutograd's convention, that runs a graph one operation after the other."""
    exact = copy_of(gm)
    for node in exact.graph.find_nodes(op="call_function", target=torch.ops.aten.sqrt.default):
        node.target = _correctly_rounded_sqrt
    exact.recompile()
    return boxed_call(lambda arguments: exact(*arguments))


def _correctly_rounded_sqrt(x: Tensor) -> Tensor:
    """Return the square root rounded to nearest, as IEEE 754 defines it and compiled code computes it.

    torch.sqrt of float32 is MKL's, which on processors with AVX-512 is an ulp off in a fifth of the elements.
    float64's root is right to more than twice float32's digits, so that rounding it again does no harm.
    """
    if x.dtype is torch.float32 and device_facts(x.device).compiles_cpp:
        return x.double().sqrt().float()
    return x.sqrt()
