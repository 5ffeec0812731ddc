"""There is always a way: what Inductor fails at is compiled in a simpler one, or run, with the same bits."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch._inductor.utils import fresh_cache
from torch.optim import Optimizer

from collage_fx import CollageBackend
from collage_fx.errors import FailedLoweringError
from collage_fx.lowering import forget_kernels, interpreted
from tests.support.substitutes import failing_at_first, no_compiler, tracing_roundings
from tests.support.training import Descent, differences, everything, parameters, run_steps


class Centralized(Optimizer):
    """Adam of gradients without their mean, and weights that follow the slow ones.

    Inductor's C++ backend ends in a KeyError at it: loops over rows and over elements of rows become one nest
    that reads a buffer which has been taken away.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(m=torch.zeros_like(p), v=torch.zeros_like(p), slow=p.clone())
            g = p.grad
            if g.dim() > 1:
                g = g - g.mean(dim=tuple(range(1, g.dim())), keepdim=True)
            state["m"].mul_(0.9).add_(g, alpha=0.1)
            state["v"].mul_(0.999).addcmul_(g, g, value=0.001)
            p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-(2.0**-10))
            state["slow"].lerp_(p, 0.5)
            p.copy_(state["slow"])


def run(make: Any, backend: CollageBackend, shapes: list[tuple[int, ...]]) -> Optimizer:
    torch._dynamo.reset()
    params = parameters(shapes=shapes)
    optimizer: Optimizer = make(params)
    run_steps(torch.compile(optimizer.step, backend=backend), params, range(4))
    return optimizer


def test_a_fault_of_inductors_leaves_the_step_compiled_by_family() -> None:
    backend = CollageBackend()
    shapes: list[tuple[int, ...]] = [(4, 6), (4, 6), (5,), (3, 2, 2, 2)]
    compiled = run(Centralized, backend, shapes)
    assert {graph.route.unit for graph in backend.report().graphs} == {"by family"}
    forget_kernels()
    with pytest.warns(UserWarning, match="Inductor failed"), no_compiler(OSError("none")):
        interpreted = run(Centralized, CollageBackend(), shapes)
    assert differences(everything(compiled), everything(interpreted)) == []
    forget_kernels()


@pytest.mark.parametrize("arithmetic", ["wide", "native"])
@pytest.mark.parametrize("make", [Descent, torch.optim.RMSprop])
def test_without_a_compiler_the_rewritten_graph_is_run(make: Any, arithmetic: Any) -> None:
    backend, shapes = CollageBackend(arithmetic=arithmetic), [(4, 6), (4, 6), (5,)]
    with (
        pytest.warns(
            UserWarning,
            match=r"OSError: no compiler here\. .* 10 to 50 times slower\n.*where: param_groups.*\n.*CXX",
        ),
        no_compiler(OSError("no compiler here")),
    ):
        run_without = run(make, backend, shapes)
    assert {graph.route.unit for graph in backend.report().graphs} == {"operation by operation"}
    assert "Run operation by operation" in str(backend.report())
    assert (
        differences(
            everything(run_without), everything(run(make, CollageBackend(arithmetic=arithmetic), shapes))
        )
        == []
    )


def test_roots_are_correctly_rounded_without_a_compiler() -> None:
    """MKL's are not on every processor, and an ulp would be seen in the error terms."""
    every_mantissa = torch.arange(0x3F800000, 0x40800000, dtype=torch.int32).view(torch.float32)
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.sqrt.default, (graph.placeholder("x"),)))
    root = interpreted(torch.fx.GraphModule({}, graph))([every_mantissa])
    assert torch.equal(root, torch.from_numpy(np.sqrt(every_mantissa.numpy())))


@pytest.mark.usefixtures("by_inductor")
def test_a_fault_in_one_way_is_made_good_by_the_next() -> None:
    """The second attempt gets the graph as it was, and nothing but the first fails."""

    def fail(gm: Any) -> None:
        gm.graph.erase_node(gm.graph.output_node())
        raise RuntimeError("in the middle")

    with failing_at_first(fail) as graphs, pytest.warns(UserWarning, match="in the middle"):
        optimizer = run(Descent, CollageBackend(), [(4, 6)])
    assert graphs[0] == graphs[1]
    assert differences(everything(optimizer), everything(run(Descent, CollageBackend(), [(4, 6)]))) == []


def broken(*args: Any, **kwargs: Any) -> Any:
    raise LookupError("a bug")


def broken_in_a_library(*args: Any, **kwargs: Any) -> Any:
    return json.loads("{")


@pytest.mark.usefixtures("by_inductor")
@pytest.mark.parametrize("fault", [broken, broken_in_a_library])
def test_a_fault_of_our_own_is_no_fault_of_inductors(fault: Any) -> None:
    params = parameters(shapes=[(4, 64)])
    before = [p.detach().clone() for p in params]
    step = torch.compile(Descent(params).step, backend=CollageBackend(error_format="mcf"))
    error = "JSONDecodeError" if fault is broken_in_a_library else "LookupError"
    with (
        tracing_roundings(fault),
        fresh_cache(),
        pytest.raises(FailedLoweringError, match=rf"collage_fx.* failed: .*{error}") as raised,
    ):
        run_steps(step, params, range(1))
    assert re.search(r"where: \S*collage_fx/\S*\.py:\d+ in ", str(raised.value))
    assert "report it" in str(raised.value)
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
