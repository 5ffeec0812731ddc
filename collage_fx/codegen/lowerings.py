"""Lowerings of our operators by Inductor: the integer operations of their eager functions.

A lowering interprets a trace of the operator's eager function, element by element: Note [Rounding must
survive lowering]. It has no vectors in Inductor's C++: on a CPU only steps compiled as one graph have it.

Inductor's cache of compiled graphs knows an operator by name only. :data:`REVISION` goes into the modules
that are compiled, so that code from an older definition is never found again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from collage_fx import graph, numerics, torch_compat


def _of_elements(
    function: Callable[..., Tensor], dtypes: tuple[torch.dtype, ...], constants: tuple[Any, ...] = ()
) -> Callable[[Sequence[Any]], Any]:
    """Return the code for one element of a function of tensors of these dtypes, and of constants.

    It runs a trace on Inductor's element values, one ``ops`` call for each node.
    """

    def of_element(inputs: Sequence[Any]) -> Any:
        trace = graph.trace_of(function, dtypes, constants).graph
        values: dict[Node, Any] = dict(zip(graph.placeholders(trace), inputs, strict=True))
        for node in trace.nodes:
            if node.op == "call_function":
                values[node] = torch_compat.pointwise_of(node, values)
        (result,) = trace.output_node().all_input_nodes
        return values[result]

    return of_element


def _of_place(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return the code for one element of a function of places in memory and numbers."""

    def of_element(dtype: torch.dtype, place: Any, *numbers: Any) -> Any:
        return _of_elements(function, (dtype, *[torch.int32] * len(numbers)))([place, *numbers])

    return of_element


def _scale_of_block(largest: Any, signed: bool) -> Any:
    root = _of_elements(numerics.in_map, (torch.float32,), (signed,))([largest])
    return _of_elements(numerics.block_scale, (torch.float32,))([root])


def _code_of_element(value: Any, scale: Any, threshold: Any, *kind: Any) -> Any:
    root = _of_elements(numerics.in_map, (torch.float32,), kind[1:2])([value])
    given, dtypes = [root, scale], (torch.float32, torch.uint8)
    if threshold is None:
        return _of_elements(numerics.block_code, dtypes, (None, *kind))(given)
    return _of_elements(numerics.block_code, (*dtypes, torch.int32), kind)([*given, threshold])


def _value_of_element(code: Any, scale: Any, *kind: Any) -> Any:
    return _of_elements(numerics.block_value, (numerics.CODES[kind], torch.uint8), kind)([code, scale])


for _each in numerics.ELEMENTWISE:
    torch_compat.register_pointwise_lowering(
        _each.operator,
        lambda *constants, of=_each: _of_elements(of.function, of.dtypes, constants),
        dtype=_each.result,
    )
for _operator, _function in numerics.PLACED.items():
    torch_compat.register_placed_lowering(_operator, _of_place(_function))
torch_compat.register_block_lowerings(
    numerics.BLOCK_OPERATORS,
    (_scale_of_block, _code_of_element, _value_of_element),
    block=numerics.BLOCK,
    dtype_of_codes=numerics.CODES,
)
torch_compat.register_realizing_lowering(graph.once)


def _sources() -> Iterator[str]:
    """Yield the source text of everything that decides how an operator is compiled."""
    yield Path(__file__).read_text(encoding="utf-8")
    yield Path(str(graph.__file__)).with_name("editor.py").read_text(encoding="utf-8")
    for room in (numerics, torch_compat):
        for path in sorted(Path(str(room.__file__)).parent.rglob("*.py")):
            yield path.read_text(encoding="utf-8")


#: Identifies the definitions above and the lowering; part of the compile cache's key.
REVISION = hashlib.sha256("".join(_sources()).encode()).hexdigest()
