"""Equal updates compiled once: the same bits, the same report and the same refusals as each for itself."""

from __future__ import annotations

import contextlib
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.variables.builder import VariableBuilder
from torch.fx import Graph, GraphModule
from torch.optim import Optimizer

from collage_fx import CollageBackend, error_terms, explain, reset_error_terms
from collage_fx.capture.families import _seems_to_change
from collage_fx.capture.rows import Rows, rows_to_trace
from collage_fx.errors import AliasedStateError
from collage_fx.graph import is_number, placeholders
from collage_fx.pipeline import PIPELINE
from collage_fx.report import CollageReport
from tests.capture.test_numbers import USES
from tests.state.test_between_steps import calls_of
from tests.support.training import (
    Descent,
    LateMomentum,
    compiled,
    differences,
    everything,
    parameters,
    run_steps,
    set_gradients,
)
from tests.support.warned import warned
from tests.support.whole import WHOLE

#: Two families of several members in each group, and a shape of its own.
SHAPES = [(4, 6), (5,), (4, 6), (5,), (3, 2), (4, 6), (5,)]

Parameters = list[torch.nn.Parameter]


def units(backend: CollageBackend) -> list[str]:
    """What was compiled at once in each of its compilations."""
    return [graph.route.unit for graph in backend.report().graphs]


class Counting(Optimizer):
    """One 0-d tensor for all parameters, which the step changes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.steps = torch.tensor(0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps.copy_(self.steps + 1)
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * 2.0**-12 / self.steps)


class AllUses(Descent):
    """Step that uses the learning rate of a group in another way for each of its parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p, use in zip(group["params"], USES.values(), strict=True):
                use(p, p.grad, group["lr"], 3)


def groups(params: Parameters) -> list[dict[str, Any]]:
    return [{"params": params[:4]}, {"params": params[4:], "weight_decay": 0.5}]


def adamw(params: Parameters) -> Optimizer:
    return torch.optim.AdamW(groups(params))


def adam_tensor_lr(params: Parameters) -> Optimizer:
    return torch.optim.Adam(groups(params), lr=torch.tensor(1e-3))


def sgd(params: Parameters) -> Optimizer:
    return torch.optim.SGD(groups(params), momentum=0.9, lr=1e-3)


def scaled_adamw(params: Parameters) -> Optimizer:
    """Fused, and with what a loss scaler gives it."""
    optimizer = torch.optim.AdamW(groups(params), fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)  # type: ignore[attr-defined]
    return optimizer


def layered(params: Parameters) -> Optimizer:
    """Each group has a learning rate, the last both families' only member."""
    rates = [(params[:3], 2e-3), (params[3:5], 1e-3), (params[5:], 5e-4)]
    return torch.optim.AdamW([{"params": each, "lr": lr} for each, lr in rates])


def layered_tensor_lr(params: Parameters) -> Optimizer:
    rates = [(params[:3], torch.tensor(2e-3)), (params[3:5], torch.tensor(1e-3)), (params[5:], 5e-4)]
    return torch.optim.Adam([{"params": each, "lr": lr} for each, lr in rates])


def adafactor(params: Parameters) -> Optimizer:
    return torch.optim.Adafactor(groups(params))


def run(make: Callable[[Parameters], Optimizer], backend: CollageBackend) -> Optimizer:
    """Four steps with a float learning rate that changes, if it is one."""
    torch._dynamo.reset()
    params = parameters(shapes=SHAPES)
    optimizer = make(params)
    step = torch.compile(optimizer.step, backend=backend)
    for i in range(4):
        run_steps(step, params, [i])
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), float):
                group["lr"] *= 0.75
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        adamw, adam_tensor_lr, scaled_adamw, sgd, layered, layered_tensor_lr, adafactor, Descent, LateMomentum
    ],
)  # fmt: skip
def test_as_if_each_were_compiled_for_itself(make: Any) -> None:
    backends = (CollageBackend(), CollageBackend(passes=WHOLE))
    optimizers = [run(make, backend) for backend in backends]
    reports = [backend.report() for backend in backends]
    assert units(backends[0]) == ["by family"] * len(reports[1].graphs)
    assert "by family" not in units(backends[1])
    assert differences(*map(everything, optimizers)) == []
    assert [p._version for p in _parameters(optimizers[0])] == [
        p._version for p in _parameters(optimizers[1])
    ]
    for one, other in zip(*(report.graphs for report in reports), strict=True):
        assert one.tensors == other.tensors
        assert one.passes == other.passes[:-1]
        for graphs in ((one.before, other.before), (one.after, other.after)):
            assert len({tuple(_operations(gm, numbers=make is not layered)) for gm in graphs}) == 1


@pytest.mark.parametrize(
    "options", [{"strategy": "light"}, {"strategy": "plus", "metrics_every": 2}], ids=str
)
@pytest.mark.parametrize("make", [adamw, adafactor])
def test_measured_as_if_each_were_compiled_for_itself(make: Any, options: dict[str, Any]) -> None:
    backends = (
        CollageBackend(metrics=True, **options),
        CollageBackend(metrics=True, passes=WHOLE, **options),
    )
    optimizers = [run(make, backend) for backend in backends]
    assert differences(*map(everything, optimizers)) == []
    graphs = [backend.report().graphs for backend in backends]
    assert {(graph.route.unit, graph.route.is_measured) for graph in graphs[0]} == {("by family", True)}
    assert [one.passes for one in graphs[0]] == [one.passes[:-1] for one in graphs[1]]
    found, wanted = (backend.metrics() for backend in backends)
    assert list(wanted) == ([2, 4] if "metrics_every" in options else [1, 2, 3, 4])
    assert [(step, list(found[step].items())) for step in found] == [
        (step, list(wanted[step].items())) for step in wanted
    ]


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _operations(gm: torch.fx.GraphModule, *, numbers: bool) -> list[str]:
    """List the operations of a graph, sorted: names and the order of independent updates are free.

    The numbers of a group are computed for each member of a family of several groups: they may be left out.
    """
    return sorted(
        f"{node.op} {node.target if node.op == 'call_function' else node.name}"
        for node in gm.graph.nodes
        if numbers or not is_number(node)
    )


def inputs_rewritten(report: CollageReport) -> int:
    """Return the number of inputs of the graph that the newest compilation has sent through the passes."""
    return len(placeholders(report.graphs[-1].captured.graph))


@pytest.mark.parametrize("count", [3, 30])
def test_work_does_not_grow_with_the_number_of_tensors(count: int) -> None:
    report = explain(torch.optim.AdamW(parameters(shapes=[(2, 3)] * count)))
    assert inputs_rewritten(report) == 5  # parameter, gradient, two moments and the step's number
    assert len(report.tensors) == 3 * count
    assert len({row.name for row in report.tensors}) == 3 * count
    inputs = [name for row in report.tensors for name in row.inputs]
    after = {node.name for node in report.graphs[0].after.graph.find_nodes(op="placeholder")}
    assert len(set(inputs)) == len(inputs)
    assert after.issuperset(inputs)


@pytest.mark.parametrize(
    ("shapes", "options", "families"),
    [
        ([(2, 3)] * 4, {}, 1),
        ([(2, 3), (3, 2), (2, 3), (3, 2)], {}, 1),  # code for all sizes
        ([(2, 3), (6,), (2, 3), (6,)], {}, 2),
        ([(2, 3)] * 4, {"weight_decay": 0.5}, 2),  # of the second group: another constant
        ([(2, 3)] * 4, {"lr": 0.5}, 1.2),  # a number that is an input, beside five others
    ],
)
def test_what_is_a_family(
    shapes: Sequence[tuple[int, ...]], options: dict[str, Any], families: float
) -> None:
    params = parameters(shapes=shapes)
    report = explain(torch.optim.Adam([{"params": params[:2]}, {"params": params[2:], **options}]))
    assert inputs_rewritten(report) == 5 * families


def test_groups_in_which_numbers_are_used_in_all_ways_are_stepped_alike() -> None:
    """Where a number decides, or cannot be an input, members have code of their own."""
    found = []
    for passes in (PIPELINE, WHOLE):
        torch._dynamo.reset()
        params = parameters(shapes=[(5,)] * 3 * len(USES))
        optimizer = AllUses([{"params": params[i::3], "lr": 2.0**-9 * (1 + i / 3)} for i in range(3)])
        backend = CollageBackend(passes=passes)
        step = torch.compile(optimizer.step, backend=backend)
        for i in range(3):
            run_steps(step, params, [i])
            for group in optimizer.param_groups:
                group["lr"] *= 1 - i / 3
        found.append((everything(optimizer), units(backend)))
    assert differences(found[0][0], found[1][0]) == []


def test_a_layout_of_its_own_is_no_member() -> None:
    params = parameters(shapes=[(3, 3)] * 3)
    params[1] = torch.nn.Parameter(params[1].detach().t())
    assert inputs_rewritten(explain(torch.optim.Adam(params))) == 10


def test_a_tensor_that_has_error_terms_already_is_no_member() -> None:
    params = parameters(shapes=[(2, 3)] * 3)
    run_steps(torch.compile(Descent(params[:1]).step, backend=CollageBackend()), params[:1], [0])
    backend = CollageBackend()
    run_steps(torch.compile(Descent(params).step, backend=backend), params, [0])
    assert inputs_rewritten(backend.report()) == 4


def test_a_common_tensor_that_changes_is_no_common_one() -> None:
    backends = (CollageBackend(), CollageBackend(passes=WHOLE))
    optimizers = [run(Counting, backend) for backend in backends]
    assert "by family" not in units(backends[0])
    assert differences(*map(everything, optimizers)) == []


@pytest.mark.parametrize("strict", [True, False])
def test_memory_in_common_is_refused_by_name(strict: bool) -> None:
    first, second, third = parameters(shapes=[(4, 6)] * 3)
    third.data = second.data
    optimizer = Descent([first, second, third])
    for p in (first, second, third):
        p.grad = torch.ones_like(p)
    step = torch.compile(optimizer.step, backend=CollageBackend(strict=strict))
    where = r"params\[1\] and param_groups\[0\]\.params\[2\]"
    if strict:
        with pytest.raises(AliasedStateError, match=where):
            step()
    else:
        (told,) = warned(step)
        assert re.search(where, told)
        assert warned(step) == []


@pytest.mark.parametrize("shared", [{4: 0}, {1: 0}, {5: 1, 4: 0}, {3: 5}], ids=str)
def test_a_gradient_of_two_parameters_counts_for_each(shared: dict[int, int]) -> None:
    """Of these rows some are traced and some are not: the bits are those of a copy for each parameter."""
    ends = []
    for copies in (True, False):
        torch._dynamo.reset()
        optimizer = torch.optim.AdamW(params := parameters(shapes=[(4, 6)] * 6), lr=1e-3)
        step = compiled(optimizer)
        for seed in range(3):
            optimizer.zero_grad()
            set_gradients(params, seed)
            for one, other in shared.items():
                gradient = params[other].grad
                assert gradient is not None
                params[one].grad = gradient.clone() if copies else gradient
            step()
        ends.append(everything(optimizer))
    assert differences(*ends) == []


def test_error_terms_that_have_been_dropped_are_made_again() -> None:

    params = parameters(shapes=[(4, 6)] * 3)
    step = torch.compile(Descent(params).step, backend=CollageBackend())
    run_steps(step, params, [0, 1])
    dropped = error_terms(params[1])[0]
    reset_error_terms(params[1])
    run_steps(step, params, [2])
    assert error_terms(params[1])[0] is not dropped
    assert all(error_terms(p)[0].any() for p in params)


# -- rows of torch.optim's lists that Dynamo is not given to trace

#: Of the first layout two rows more than are traced, of the second one.
ROWS = [(4, 6), (5,), (4, 6), (4, 6), (5,), (4, 6), (5,)]
TWO_EACH = [0, 1, 2, 4]


ALL_ROWS = list(range(len(ROWS)))


class NotingRows(CollageBackend):
    """A backend that notes which parameters are in the graph that Dynamo makes, for each compilation.

    Attributes:
        parameters: the parameters to look for.
        traced: their indices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parameters: Parameters = []
        self.traced: list[list[int]] = []

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        there = {id(each) for each in (*gm.parameters(), *gm.buffers(), *example_inputs)}
        self.traced.append([i for i, p in enumerate(self.parameters) if id(p) in there])
        return super().__call__(gm, example_inputs, **options)


#: What has happened to parameters since the last step.
Event = Callable[[Optimizer, Parameters], Any]


def nothing(optimizer: Optimizer, params: Parameters) -> None:
    pass


def without_gradient(optimizer: Optimizer, params: Parameters) -> None:
    params[5].grad = None


def state_replaced(optimizer: Optimizer, params: Parameters) -> None:
    state = optimizer.state[params[5]]
    state["exp_avg"] = state["exp_avg"].clone()


def own_rate(optimizer: Optimizer, params: Parameters) -> None:
    params.append(parameters(shapes=[(4, 6)], seed=1)[0])
    optimizer.add_param_group({"params": params[-1:], "lr": 0.5})
    set_gradients(params[-1:])


def run_rows(backend: CollageBackend, make: Callable[[Parameters], Optimizer], event: Event) -> Optimizer:
    torch._dynamo.reset()
    params = parameters(shapes=ROWS)
    if isinstance(backend, NotingRows):
        backend.parameters = params
    optimizer = make(params)
    step = torch.compile(optimizer.step, backend=backend)
    for i in range(4):
        optimizer.zero_grad()
        set_gradients(params, i)
        if i == 2:
            event(optimizer, params)
        step()
    return optimizer


def momentum(params: Parameters) -> Optimizer:
    """State that the first step makes is made for each."""
    return torch.optim.SGD(params, momentum=0.9)


def foreach(params: Parameters) -> Optimizer:
    """Operations on lists, of which each is given some rows."""
    return torch.optim.Adam(params, foreach=True)


@pytest.mark.parametrize(
    ("make", "event", "compilations", "same_graph"),
    [
        (torch.optim.AdamW, nothing, [TWO_EACH], True),
        (torch.optim.RMSprop, nothing, [TWO_EACH], True),
        (torch.optim.Adam, without_gradient, [TWO_EACH, TWO_EACH], False),  # also of the row without
        (torch.optim.Adam, state_replaced, [TWO_EACH], True),
        (torch.optim.Adam, own_rate, [TWO_EACH, [*TWO_EACH, len(ROWS)]], True),
        (momentum, nothing, [ALL_ROWS, TWO_EACH], True),
        (foreach, nothing, [TWO_EACH], False),  # operations on tensors, not on lists
    ],
)
def test_rows_left_out_are_stepped(
    make: Any, event: Event, compilations: list[list[int]], same_graph: bool
) -> None:
    backends = (NotingRows(), CollageBackend(passes=WHOLE))
    optimizers = [run_rows(backend, make, event) for backend in backends]
    assert backends[0].traced == compilations
    assert differences(*map(everything, optimizers)) == []
    assert [p._version for p in _parameters(optimizers[0])] == [
        p._version for p in _parameters(optimizers[1])
    ]
    graphs_of_each = [backend.report().graphs for backend in backends]
    assert len(graphs_of_each[0]) == len(graphs_of_each[1])
    for one, other in zip(*graphs_of_each, strict=True) if same_graph else ():
        assert one.tensors == other.tensors
        for graphs in ((one.before, other.before), (one.after, other.after)):
            assert len({tuple(_operations(gm, numbers=True)) for gm in graphs}) == 1


def test_dynamo_looks_at_rows_left_out_for_their_parameters_alone() -> None:
    """Values that it traces are compared with all others, so that time would grow with their square."""
    looked_at = []
    for count in (6, 16):
        optimizer = torch.optim.AdamW(params := parameters(shapes=[(3,)] * count))
        set_gradients(params)
        step = torch.compile(optimizer.step, backend=CollageBackend())
        looked_at.append(calls_of(step, VariableBuilder.wrap_tensor.__code__))
    assert looked_at[1] - looked_at[0] == 10


#: Matrices of four shapes, vectors of three, and others for which code may differ.
SIZES = [(4, 6), (9,), (4, 6), (3, 7), (2,), (16, 5), (40, 2), (7,), (1, 6), (5, 1), (2, 3, 4), (0, 4), ()]


class Scaled(Descent):
    """Step whose numbers depend on the number of elements, but for small tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * (1 / p.numel() if p.numel() > 8 else 0.125))


class Clipped(Descent):
    """Step that divides each gradient by its norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / (p.grad.norm() + 1))


class Centered(Descent):
    """Step that subtracts from each gradient the means of its rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad - p.grad.mean(-1, keepdim=True) if p.dim() else p.grad)


class Filled(Descent):
    """Step that makes a tensor of each parameter's shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(torch.where(p.grad > 0, p.grad, torch.zeros_like(p)) / 8)


def run_sizes(backend: CollageBackend, make: Callable[[Parameters], Optimizer]) -> Optimizer:
    torch._dynamo.reset()
    params = parameters(shapes=SIZES)
    params.append(torch.nn.Parameter(params[-1].new_full((9, 6), 0.5).t()))
    optimizer = make(params)
    run_steps(torch.compile(optimizer.step, backend=backend), params, range(3))
    return optimizer


@pytest.mark.parametrize(
    ("make", "options", "inputs"),
    [
        (torch.optim.AdamW, {}, 8 * 5),
        (torch.optim.AdamW, {"bytes_per_parameter": 8}, 13 * 5),
        (torch.optim.AdamW, {"metrics": True}, 13 * 5),
        (Descent, {}, 8 * 2),
        (Filled, {}, 8 * 2),
        (Scaled, {}, 11 * 2),  # matrices of 80 elements have one number, and vectors of up to eight
        (Clipped, {}, 13 * 2),
        (Centered, {}, 13 * 2),
    ],
)
def test_updates_of_one_kind_are_compiled_once_for_all_sizes(
    make: Any, options: dict[str, Any], inputs: int
) -> None:
    """If they are elementwise, and nothing depends on the sizes; as if each were compiled for itself."""
    backends = (CollageBackend(**options), CollageBackend(passes=WHOLE, **options))
    optimizers = [run_sizes(backend, make) for backend in backends]
    assert differences(*map(everything, optimizers)) == []
    reports = [backend.report() for backend in backends]
    assert inputs_rewritten(reports[0]) == inputs
    assert Rows.of(optimizers[0]).depend_on_sizes == (make is Clipped)  # so that it is not tried again
    for one, other in zip(*(report.graphs for report in reports), strict=True):
        rows = ([replace(row, inputs=()) for row in graph.tensors] for graph in (one, other))  # in any order
        assert next(rows) == next(rows)
        for graphs in ((one.before, other.before), (one.after, other.after)):
            assert len({tuple(_operations(gm, numbers=True)) for gm in graphs}) == 1
            first, second = (
                sorted(str(node.meta["val"]) for node in gm.graph.nodes if "val" in node.meta)
                for gm in graphs
            )
            assert first == second


def test_of_rows_of_several_sizes_two_sizes_are_traced() -> None:
    rows = tuple((p, torch.zeros_like(p)) for p in parameters(shapes=[(3, 2), (3, 2), (9,), (5, 4), (2, 2)]))
    optimizer = torch.optim.SGD([p for p, _ in rows])
    kept = [
        rows_to_trace(optimizer, rows, come_and_go=True, packs=False, any_size=any_size)
        for any_size in (True, False)
    ]
    assert [each.kept for each in kept if each is not None] == [[0, 2, 3], [0, 1, 2, 3, 4]]


def test_where_nothing_is_compensated_all_rows_are_traced() -> None:
    rows = tuple((p, torch.zeros_like(p)) for p in parameters(shapes=ROWS))
    optimizer = torch.optim.SGD([p for p, _ in rows])
    found = rows_to_trace(optimizer, rows, come_and_go=False, packs=False, any_size=False)
    assert found is not None
    assert (found.kept, found.come_and_go) == (TWO_EACH, False)
    for in_vain in (torch.Tensor.float, torch.Tensor.to_sparse, lambda x: x.to("meta")):
        others = tuple(tuple(map(in_vain, row)) for row in rows)
        assert rows_to_trace(optimizer, others, come_and_go=False, packs=False, any_size=False) is None


def test_what_follows_a_step_sees_all_rows_stepped() -> None:
    def train(optimizer: Optimizer, last: torch.Tensor) -> torch.Tensor:
        optimizer.step()
        return last * 2

    found = []
    for backend in (CollageBackend(), CollageBackend(passes=WHOLE)):
        torch._dynamo.reset()
        params = parameters(shapes=ROWS)
        set_gradients(params)
        found.append(torch.compile(train, backend=backend)(torch.optim.Adam(params), params[-1]).detach())
    assert torch.equal(*found)


def test_memory_that_a_row_left_out_shares_is_refused_by_name() -> None:
    params = parameters(shapes=ROWS)
    params[5].data = params[3].data
    optimizer = torch.optim.Adam(params)
    set_gradients(params)
    with pytest.raises(AliasedStateError, match=r"params\[3\] and param_groups\[0\]\.params\[5\]"):
        torch.compile(optimizer.step, backend=CollageBackend())()
    assert not optimizer.state


def test_behind_a_graph_break_all_rows_are_stepped() -> None:
    def breaking(step: Any) -> Any:
        torch._dynamo.graph_break()
        return step

    params = parameters(shapes=ROWS)
    before = [p.detach().clone() for p in params]
    set_gradients(params)
    with mock.patch("torch.optim.adam._get_value", breaking), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the break
        torch.compile(torch.optim.Adam(params, lr=1.0).step, backend=CollageBackend(strict=False))()
    assert not any(torch.equal(p, old) for p, old in zip(params, before, strict=True))


@pytest.mark.parametrize("name", [name for name in dir(operator) if not name.startswith("_")])
def test_what_changes_its_operand_is_known_by_its_name(name: str) -> None:
    """Of Python's operators: ``step += 1`` changes a tensor that others may read."""
    function = getattr(operator, name)
    tensors = [torch.tensor([4]), torch.tensor([4.0])]
    for x in tensors:
        with contextlib.suppress(Exception):  # not a function of two tensors, or of such
            function(x, torch.tensor([3], dtype=x.dtype))
    assert _seems_to_change(Graph().call_function(function)) == any(x.item() != 4 for x in tensors)
