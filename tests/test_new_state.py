"""State that the first step makes and updates: it has an error term from its birth, if it is to have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx import CollageBackend, error_terms, full_value, install
from collage_fx.graph import results_to_inputs
from collage_fx.graph.program import Role
from tests.support.programs import captured, captured_of
from tests.support.twin import TwinBackend

LR = 2.0**-10
Update = Callable[[Tensor, Tensor, dict[str, Any]], None]


class Stepped(torch.optim.Optimizer):
    """Each parameter has an update of its own.

    Args:
        updates: of a parameter, its gradient and its state.
        dtype: of the parameters.
        branches: whether the step looks at a value, so that it is recorded.
    """

    def __init__(self, updates: list[Update], dtype: torch.dtype, *, branches: bool = False) -> None:
        self.updates = updates
        self.branches = branches
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.rand(6, generator=generator).add(1).bfloat16().to(dtype) for _ in updates]
        super().__init__([torch.nn.Parameter(each) for each in drawn], {})

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.param_groups[0]["params"])

    def give_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step + 1)
        for p in self.parameters:
            p.grad = torch.randn(6, generator=generator).bfloat16().add(0.5).to(p.dtype)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, update in zip(self.param_groups[0]["params"], self.updates, strict=True):
            if not self.branches or float(p.grad.abs().max()) > 0:
                update(p, p.grad, self.state[p])


def slow_weights(p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    if "slow" not in state:
        state["slow"] = p.clone()
    p.sub_(LR * g)
    state["slow"].lerp_(p, 0.5)
    p.copy_(state["slow"])


def iterate(p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    """As schedule-free optimizers have."""
    if "z" not in state:
        state["z"] = torch.empty_like(p)
        state["z"].copy_(p)
    state["z"].sub_(LR * g)
    p.lerp_(state["z"], 0.75)


def made_by_the_update(p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    if "z" not in state:
        state["z"] = p - LR * g
    else:
        state["z"].sub_(LR * g)
    p.copy_(state["z"])


def in_a_list(p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    if "old" not in state:
        state["old"] = [p.mul(0.5), p * 0.5 - LR * g]
    state["old"][0].sub_(LR * g)
    p.copy_(state["old"][0] + state["old"][1])


def power(p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    if "power" not in state:
        state["power"] = torch.ones((), dtype=p.dtype)
    state["power"].mul_(1 - 2.0**-10)
    p.sub_((1 - state["power"]) * g)


def counted(p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    if "t" not in state:
        state["t"] = torch.zeros(())
    state["t"] += 1
    p.sub_(g, alpha=LR)


def test_equal_counters_are_a_tensor_for_each_parameter() -> None:
    torch._dynamo.reset()
    optimizer = Stepped([counted, counted, counted], torch.bfloat16)
    step = torch.compile(optimizer.step, backend=CollageBackend())
    for i in range(3):
        optimizer.give_gradients(i)
        step()
    assert [float(optimizer.state[p]["t"]) for p in optimizer.parameters] == [3, 3, 3]


UPDATES: list[Update] = [slow_weights, iterate, made_by_the_update, in_a_list, power]
STEPS = 6


def stepped(backend: CollageBackend, *, branches: bool = False) -> tuple[Stepped, Stepped, list[Tensor]]:
    """Optimizers after some steps, compiled and in float64, and the float64 parameters before."""
    torch._dynamo.reset()
    optimizer = Stepped(UPDATES, torch.bfloat16, branches=branches)
    exact = Stepped(UPDATES, torch.float64)
    before = [p.detach().clone() for p in exact.parameters]
    step = torch.compile(optimizer.step, backend=backend)
    for i in range(STEPS):
        for each in (optimizer, exact):
            each.give_gradients(i)
        step()
        exact.step()
    return optimizer, exact, before


def differences(optimizer: Stepped, exact: Stepped) -> list[float]:
    pairs = zip(optimizer.parameters, exact.parameters, strict=True)
    return [float((full_value(p) - q.detach()).abs().max()) for p, q in pairs]


@pytest.mark.parametrize(
    ("strategy", "arithmetic"), [("plus", "wide"), ("light", "wide"), ("full", "wide"), ("plus", "native")]
)
def test_nothing_of_the_first_step_is_lost(strategy: Any, arithmetic: Any) -> None:
    """The bits are those of the eager twin, and the values those of float64 but for the roundings of a pair.

    At most eight roundings a step of numbers below 4 (native: of 7 u**2 each), and in native arithmetic those
    of what is added, of moves of at most 4 LR. Half an ulp of hi, which would be lost, is 2**-8.
    """
    backend = TwinBackend(strategy=strategy, arithmetic=arithmetic)
    backend.engine = "both" if arithmetic == "wide" else "compiled"
    optimizer, exact, _ = stepped(backend)
    assert not backend.different
    rounding = 2.0**-24 if arithmetic == "wide" else 7 * 2.0**-16
    moves = 0 if arithmetic == "wide" else 4 * 4 * LR * 2.0**-8
    assert max(differences(optimizer, exact)[:4]) <= STEPS * (8 * 4 * rounding + moves)


def test_a_number_that_is_born_under_full() -> None:
    """The power is rounded to float32 in each step; p moves by 1 - power times g, which is 4 at most."""
    optimizer, exact, _ = stepped(TwinBackend(strategy="full"))
    assert differences(optimizer, exact)[4] <= STEPS * STEPS * 4 * 2.0**-24 * 8


def test_recorded_steps() -> None:
    optimizer, exact, _ = stepped(CollageBackend(), branches=True)
    assert max(differences(optimizer, exact)[:4]) <= STEPS * 8 * 4 * 2.0**-24


def adam(p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    if "m" not in state:
        state["m"], state["v"] = g * 0.1, g * g * 0.001
    else:
        state["m"].mul_(0.9).add_(g, alpha=0.1)
        state["v"].mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(state["m"], state["v"].sqrt() + 1e-8, value=-LR)


def test_a_recorded_step_makes_state_again_and_again() -> None:
    """In each step ``|m| / sqrt(v)`` is 5 at most, of which m has lost two roundings, of 2**-8, at most."""
    optimizer, exact = Stepped([adam], torch.bfloat16, branches=True), Stepped([adam], torch.float64)
    backend = CollageBackend()
    step = torch.compile(optimizer.step, backend=backend)
    graphs = []
    for i in range(12):
        for each in (optimizer, exact):
            if i % 3 == 0:
                each.state.clear()
            each.give_gradients(i)
        step()
        exact.step()
        assert bool(error_terms(optimizer.state[optimizer.parameters[0]]["m"])) == (i % 3 == 0)
        graphs.append(len(backend.reports))
    assert graphs[-1] == graphs[2]
    assert differences(optimizer, exact)[0] <= 12 * LR * 5 * 2 * 2.0**-8


@pytest.mark.parametrize("branches", [False, True], ids=["captured", "recorded"])
def test_what_the_strategy_does_not_choose_keeps_no_error_term(branches: bool) -> None:
    """Moments made in the first step: bytes are those of moments that were there before."""
    torch._dynamo.reset()
    optimizer = Stepped([adam], torch.bfloat16, branches=branches)
    backend = TwinBackend(compiles=False) if not branches else CollageBackend()
    if isinstance(backend, TwinBackend):
        backend.engine = "eager"
    step = torch.compile(optimizer.step, backend=backend)
    for i in range(3):
        optimizer.give_gradients(i)
        step()
        state = optimizer.state[optimizer.parameters[0]]
        assert error_terms(state["v"])
        assert bool(error_terms(state["m"])) == (i == 0)


def test_a_result_becomes_an_input() -> None:
    program = captured_of(lambda p, g: (p - g, p.clone(), p.float()), *torch.ones(2, 4, dtype=torch.bfloat16))
    assert results_to_inputs(program) == {0: 2}
    assert [info.role for info in program.infos] == [Role.STATE, Role.STATE, Role.NEW]
    written = [node for node in program.gm.graph.nodes if node.target is torch.ops.aten.copy_.default]
    assert [(str(node.args[0]), str(node.args[1])) for node in written] == [("new_0", "sub")]
    assert "(None, " in str(program.gm.graph)


def test_what_is_no_tensor_of_its_own_stays_a_result() -> None:
    program = captured(lambda p, g: p.sub_(g), "p g")
    assert results_to_inputs(program) == {}


class Initialized(torch.optim.Optimizer):
    """Without ``torch.no_grad``; its state is made by ``torch.nn.init``, which switches gradients (Yogi)."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["average"] = torch.nn.init.constant_(torch.empty_like(p.data), 1e-6)
            average = self.state[p]["average"].mul_(0.9).add_(p.grad.data, alpha=0.1)
            p.data.add_(average, alpha=-LR)


def test_state_of_a_step_with_gradients_enabled_made_by_torch_nn_init() -> None:
    """Such a step was refused, as if it computed a loss."""
    drawn = torch.rand(64, generator=torch.Generator().manual_seed(0)).add(1).bfloat16()
    optimizers = [Initialized([torch.nn.Parameter(drawn.to(d))], {}) for d in (torch.bfloat16, torch.float64)]
    backend = CollageBackend()
    install(optimizers[0], backend=backend)
    for step in range(20):
        gradient = torch.randn(64, generator=torch.Generator().manual_seed(step)).bfloat16()
        for optimizer in optimizers:
            (p,) = optimizer.param_groups[0]["params"]
            p.grad = gradient.to(p.dtype)
            optimizer.step()
    ((ours,), (exact,)) = (optimizer.param_groups[0]["params"] for optimizer in optimizers)
    moved = (exact.detach() - drawn.double()).norm()
    assert (full_value(ours).double() - exact.detach()).norm() < 0.01 * moved
    assert not backend.report().routes().get("recorded")


def test_the_whole_graph_of_a_report_keeps_up_the_new_state_of_each_tensor() -> None:
    """Each has memory of its own, although one of them has been traced for all."""
    optimizer = Stepped([made_by_the_update] * 3, torch.bfloat16)
    optimizer.give_gradients(0)
    backend = CollageBackend()
    torch.compile(optimizer.step, backend=backend)()
    (graph,) = backend.report().graphs
    names = [node.name for node in graph.after.graph.find_nodes(op="placeholder")]
    assert {"new_0_rest", "new_1_rest", "new_2_rest"} <= {*names}
