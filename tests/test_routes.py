"""The way that a step takes through the compiler, with the reason for each faster one that it does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import CollageBackend, explain
from collage_fx.graph import Reason, Reasons, Route
from tests.support.training import Descent, Lion, everything, parameters, run_steps, set_gradients
from tests.support.whole import WHOLE

ALIKE = [(4, 6), (4, 6), (4, 6), (5,)]

#: Of a step whose elements one kernel computes; and one whose sampled sizes another one does.


class Branching(Descent):
    """Looks at each gradient before it goes down it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad.norm() > 0:
                p.add_(p.grad, alpha=-(2.0**-12))


class Returning(Descent):
    """Returns a view of a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        return self.param_groups[0]["params"][0].grad[1:]


def route(make: Callable[[Any], Optimizer], shapes: Any = ALIKE, **options: Any) -> Route:
    torch._dynamo.reset()
    params, backend = parameters(shapes=shapes), CollageBackend(**options)
    run_steps(torch.compile(make(params).step, backend=backend), params, [0])
    return backend.report().graphs[-1].route


@pytest.mark.parametrize(
    ("make", "options", "words", "reasons"),
    [
        (torch.optim.AdamW, {}, "captured, compiled by family", []),
        (torch.optim.AdamW, {"metrics": True}, "captured, compiled by family, measured", []),
        (
            torch.optim.AdamW,
            {"passes": WHOLE},
            "captured, compiled in parts",
            ["not by family: the pass onlooker is to see every tensor (its by_family is False)"],
        ),
        (
            torch.optim.SGD,
            {"strategy": "none"},
            "captured, compiled as captured",
            ["not by family: strategy 'none' leaves the graph to Inductor"],
        ),
        (
            Branching,
            {},
            "recorded, compiled in parts",
            ["not captured: ", "not by family: "],
        ),
    ],
)
def test_the_way_and_its_reasons(make: Any, options: Any, words: str, reasons: list[str]) -> None:
    found = route(make, **options)
    assert str(found) == words
    explained = found.explained()
    assert len(explained) == len(reasons)
    assert all(line.startswith(reason) for line, reason in zip(explained, reasons, strict=True))


def in_a_buffer(values: list[Tensor]) -> list[Tensor]:
    """One after another, behind an element that makes all of them unaligned."""
    buffer = torch.cat([torch.zeros(1, dtype=values[0].dtype), *(value.flatten() for value in values)])
    ends = itertools.accumulate((value.numel() for value in values), initial=1)
    return [buffer[i : i + value.numel()].view_as(value) for i, value in zip(ends, values, strict=False)]


def transposed(values: list[Tensor]) -> list[Tensor]:
    return [value.t().contiguous().t() for value in values]


def every_other(values: list[Tensor]) -> list[Tensor]:
    return [torch.stack([value, value], -1)[..., 1] for value in values]


def rows_of_a_matrix(values: list[Tensor]) -> list[Tensor]:
    return [torch.cat([value, value])[len(value) :] for value in values]


def expanded(values: list[Tensor]) -> list[Tensor]:
    return [value.flatten()[0].expand_as(value) for value in values]


def views_of_views(values: list[Tensor]) -> list[Tensor]:
    return [value.view(1, -1)[:, :][0].view_as(value) for value in in_a_buffer(values)]


def left_with(
    kind: type[Optimizer], laid_out: Callable[[list[Tensor]], list[Tensor]], *, own: bool
) -> tuple[list[Tensor], list[str]]:
    """Take steps with such gradients, or with copies in memory of their own: tensors after them, units."""
    torch._dynamo.reset()
    params, backend = parameters(shapes=ALIKE), CollageBackend()
    optimizer = kind(params)  # type: ignore[call-arg]
    step = torch.compile(optimizer.step, backend=backend)
    for seed in range(4):
        optimizer.zero_grad()
        set_gradients(params, seed)
        views = laid_out([parameter.grad for parameter in params if parameter.grad is not None])
        given = [view.clone(memory_format=torch.contiguous_format) for view in views] if own else views
        for parameter, gradient in zip(params, given, strict=True):
            parameter.grad = gradient
        step()
        assert all(parameter.grad is gradient for parameter, gradient in zip(params, given, strict=True))
        del views, given  # those of the next step are elsewhere
    return [*everything(optimizer).values()], [graph.route.unit for graph in backend.report().graphs]


@pytest.mark.parametrize(
    ("kind", "laid_out"),
    [
        (torch.optim.AdamW, in_a_buffer),
        *((Lion, each) for each in (in_a_buffer, transposed, every_other, rows_of_a_matrix, expanded)),
        (Lion, views_of_views),
    ],
)
def test_gradients_that_are_views_take_the_way_of_others(kind: Any, laid_out: Any) -> None:
    views, of_views = left_with(kind, laid_out, own=False)
    plain, of_plain = left_with(kind, laid_out, own=True)
    assert of_views == of_plain
    assert set(of_plain) == {"by family"}
    assert all(torch.equal(view, other) for view, other in zip(views, plain, strict=True))


def test_gradients_that_are_views_in_a_function_that_steps_a_global_optimizer() -> None:
    params, backend = parameters(shapes=ALIKE), CollageBackend()
    optimizer = Lion(params)
    set_gradients(params)
    for parameter, gradient in zip(
        params, in_a_buffer([p.grad for p in params if p.grad is not None]), strict=True
    ):
        parameter.grad = gradient
    names: dict[str, Any] = {"optimizer": optimizer}
    exec("def function():\n    optimizer.step()", names)
    torch.compile(names["function"], backend=backend)()
    assert {graph.route.unit for graph in backend.report().graphs} == {"by family"}


def test_what_is_returned_is_a_reason() -> None:
    (way, reason), *_ = route(Returning).reasons
    assert (way, reason.what) == (
        "by family",
        "AOTAutograd has more to do around the graph than to count versions",
    )


def test_a_matrix_rule_says_why_it_is_called_from_python() -> None:
    reasons = dict(route(torch.optim.Muon, shapes=[(4, 6), (4, 6)]).reasons)
    assert "neither elementwise" in reasons["in one call for all tensors"].what


def test_looking_changes_nothing_that_is_looked_at(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = route(torch.optim.AdamW)
    monkeypatch.setenv("COLLAGE_FX_DUMP", str(tmp_path))
    assert route(torch.optim.AdamW) == plain
    assert list(tmp_path.iterdir())


def test_a_graph_that_is_differentiated_is_no_step() -> None:
    backend = CollageBackend()
    p = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: x * 2, backend=backend)(p).sum().backward()
    (graph,) = backend.report().graphs
    assert graph.route.unit == "as captured"
    assert "autograd" in graph.note


def test_explain_tells_the_way_that_a_compilation_takes() -> None:
    for make in (torch.optim.AdamW, torch.optim.Adafactor):
        params = parameters(shapes=ALIKE)
        set_gradients(params)
        explained = explain(make(params)).graphs[-1].route
        assert explained.unit == route(make).unit
    report = explain(torch.optim.AdamW(parameters(shapes=[(4, 6)])))
    assert report.why() == (
        "AdamW: captured, compiled in parts\n"
        "  not by family: no two tensors have the same shape, dtype and update"
    )
    assert "ompiled in parts" not in str(report), "only why() says this"


def test_a_reason_at_a_node() -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1

    node = next(n for n in torch.fx.symbolic_trace(f).graph.nodes if n.op == "call_function")
    assert str(Reason.at(node, "it adds")) == f"it adds ({node.format_node()})"
    assert str(Reason("it adds")) == "it adds"


def test_the_route_is_in_why_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    params, backend = parameters(shapes=ALIKE), CollageBackend()
    with caplog.at_level("DEBUG", "collage_fx"):
        run_steps(torch.compile(torch.optim.AdamW(params).step, backend=backend), params, [0])
    report = backend.report()
    assert "ompiled by family" not in str(report)
    assert report.why() == "AdamW: captured, compiled by family"
    assert report.why() in caplog.messages


def test_a_route_with_its_cause_says_why_dynamo_did_not_capture_the_step() -> None:
    assert Route("in parts").with_cause() == "captured, compiled in parts"
    assert Route("in parts", "it branches").with_cause() == "recorded, compiled in parts (it branches)"


def test_a_route_as_a_sentence_has_its_first_reason() -> None:
    assert Route("by family").sentence() == "Compiled by family."
    reasons: Reasons = (("by family", Reason("it has a sum")), ("in parts", Reason("it has two")))
    assert Route("whole", reasons=reasons).sentence() == "Compiled whole (not by family: it has a sum)."
