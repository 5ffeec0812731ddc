"""``collage_fx`` operators: elementwise arithmetic that is one node in a graph and integer code in a kernel.

Note [One node, one definition]
-------------------------------
A pinned rounding is a dozen elementary operations. Put into the graph one by one they would bury the step
that a person wants to read, and Inductor, which inlines a value into each of its readers, would trace them
again and again. So each is an operator of its own, whose eager implementation is the function in
``arithmetic.py`` and whose lowering *interprets a
trace of that same function*, element by element, in the kernel that reads it: the arithmetic is written once.

Inductor's cache of compiled graphs knows an operator by name only. :data:`REVISION` goes into the modules
that are compiled, so that code from an older definition is never found again.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from collage_fx import arithmetic
from collage_fx.torch_compat import (
    functional_decompositions,
    make_fx,
    pointwise_of,
    register_pointwise_lowering,
    register_realizing_lowering,
)

__all__ = ["REVISION", "once", "round_to_storage"]

aten = torch.ops.aten

LIBRARY = torch.library.Library("collage_fx", "DEF")
LIBRARY.define("round_to_storage(Tensor x, ScalarType dtype) -> Tensor", tags=(torch.Tag.pointwise,))
LIBRARY.impl("round_to_storage", arithmetic.round_to_storage, "CompositeExplicitAutograd")

#: ``round_to_storage(x, dtype)``: :func:`collage_fx.arithmetic.round_to_storage` as one operator.
round_to_storage = torch.ops.collage_fx.round_to_storage.default


@torch.library.register_fake("collage_fx::round_to_storage", lib=LIBRARY)
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x)


LIBRARY.define("once(Tensor x) -> Tensor")
LIBRARY.impl("once", torch.clone, "CompositeExplicitAutograd")

#: ``once(x)``: ``x``, computed once and kept in memory, rather than in every place that reads it.
once = torch.ops.collage_fx.once.default


@torch.library.register_fake("collage_fx::once", lib=LIBRARY)
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


register_realizing_lowering(once)


@functools.cache
def _trace(function: Callable[..., Tensor], constants: tuple[Any, ...]) -> GraphModule:
    """The elementary operations of a function of one float32 tensor."""
    tracer = make_fx(lambda x: function(x, *constants), decomposition_table=functional_decompositions())
    with FakeTensorMode(), torch.no_grad():
        return tracer(torch.empty(2))


def _interpret(trace: GraphModule, inputs: Sequence[Any]) -> Any:
    """Run a trace on Inductor's element values, one ``ops`` call for each node."""
    values: dict[Node, Any] = dict(zip(trace.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in trace.graph.nodes:
        if node.op == "call_function":
            values[node] = pointwise_of(node, values)
    (result,) = pytree.tree_leaves(next(iter(trace.graph.find_nodes(op="output"))).args)
    return values[result]


register_pointwise_lowering(
    round_to_storage,
    lambda dtype: functools.partial(_interpret, _trace(arithmetic.round_to_storage, (dtype,))),
    dtype=torch.float32,
)

#: Identifies the definitions above and the lowering; part of the compile cache's key.
REVISION = hashlib.sha256(
    inspect.getsource(arithmetic).encode() + inspect.getsource(_interpret).encode()
).hexdigest()
