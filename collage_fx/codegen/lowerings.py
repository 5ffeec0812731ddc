"""Lowerings of our operators by Inductor: the integer operations of their eager functions.

Note [Integer operations are immune]
------------------------------------
A lowering interprets a trace of the operator's eager function, element by element. Roundings are integer
operations there, which no simplification of a compiler knows to be roundings: they are neither dropped nor
merged. They have no vectors in Inductor's C++: on a CPU only a step compiled as one graph is made of these.

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
from collage_fx.graph import once, trace_of
from collage_fx.numerics import (
    BLOCK,
    BLOCK_CODES,
    BLOCK_SCALES,
    BLOCK_VALUES,
    CODES,
    ELEMENTWISE,
    PHASES,
    block_code,
    block_scale,
    block_value,
    in_map,
    phase_at,
)
from collage_fx.torch_compat import (
    pointwise_of,
    register_block_lowerings,
    register_placed_lowering,
    register_pointwise_lowering,
    register_realizing_lowering,
)


def _of_elements(
    function: Callable[..., Tensor], dtypes: tuple[torch.dtype, ...], constants: tuple[Any, ...] = ()
) -> Callable[[Sequence[Any]], Any]:
    """Return the code for one element of a function of tensors of these dtypes, and of constants.

    It runs a trace on Inductor's element values, one ``ops`` call for each node.
    """

    def of_element(inputs: Sequence[Any]) -> Any:
        graph = trace_of(function, dtypes, constants).graph
        values: dict[Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
        for node in graph.nodes:
            if node.op == "call_function":
                values[node] = pointwise_of(node, values)
        (result,) = graph.output_node().all_input_nodes
        return values[result]

    return of_element


def _phase_of_element(dtype: torch.dtype, place: Any, *phase_and_first: Any) -> Any:
    """Return the phase of an element, from its place and the phase of the first element: Note [Dither]."""
    dtypes = dtype, *(torch.int32,) * len(phase_and_first)
    return _of_elements(phase_at, dtypes)([place, *phase_and_first])


def _scale_of_block(largest: Any, signed: bool) -> Any:
    root = _of_elements(in_map, (torch.float32,), (signed,))([largest])
    return _of_elements(block_scale, (torch.float32,))([root])


def _code_of_element(value: Any, scale: Any, phase: Any, *kind: Any) -> Any:
    root = _of_elements(in_map, (torch.float32,), kind[1:2])([value])
    if phase is None:
        return _of_elements(block_code, (torch.float32, torch.uint8), (None, *kind))([root, scale])
    return _of_elements(block_code, (torch.float32, torch.uint8, torch.int32), kind)([root, scale, phase])


def _value_of_element(code: Any, scale: Any, *kind: Any) -> Any:
    return _of_elements(block_value, (CODES[kind], torch.uint8), kind)([code, scale])


for _each in ELEMENTWISE:
    register_pointwise_lowering(
        _each.operator,
        lambda *constants, of=_each: _of_elements(of.function, of.dtypes, constants),
        dtype=_each.result,
    )
register_placed_lowering(PHASES, _phase_of_element)
register_block_lowerings(
    BLOCK_SCALES,
    BLOCK_CODES,
    BLOCK_VALUES,
    _scale_of_block,
    _code_of_element,
    _value_of_element,
    block=BLOCK,
    dtype_of_codes=CODES,
)
register_realizing_lowering(once)


def _sources() -> Iterator[str]:
    """Yield the source text of everything that decides how an operator is compiled."""
    yield Path(__file__).read_text(encoding="utf-8")
    yield Path(str(graph.__file__)).with_name("operators.py").read_text(encoding="utf-8")
    for room in (numerics, torch_compat):
        for path in sorted(Path(str(room.__file__)).parent.rglob("*.py")):
            yield path.read_text(encoding="utf-8")


#: Identifies the definitions above and the lowering; part of the compile cache's key.
REVISION = hashlib.sha256("".join(_sources()).encode()).hexdigest()
