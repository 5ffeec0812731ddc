"""``bytes_per_parameter``: a limit on bytes, and the options that it leads to."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.nn import Parameter

from collage_fx import CollageBackend, backend_of, explain, full_value, install
from collage_fx.errors import InvalidOptionError
from collage_fx.options.budgets import BUDGETS, TOLERANCE, Budget, frontier
from collage_fx.state import bytes_held, held_per_parameter, known_tensors
from collage_fx.state.error_terms import record_of
from tests.support.memory import left, peak
from tests.support.rules import PULLS, WEIGHTS
from tests.support.training import errors_beside_float64, parameters, run_steps, set_gradients

SHAPES = ((256, 256), (256,))

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "formats" / "results.json"

HTML = "{http://www.w3.org/1999/xhtml}"

Make = Callable[[Any], torch.optim.Optimizer]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=1e-3)


def held_by(params: Sequence[Parameter], **optimizers: torch.optim.Optimizer) -> float:
    """Bytes of parameters and state in memory, for each element, without gradients."""
    held = bytes_held(each.tensor for each in known_tensors(optimizers).values())
    return (held - sum(p.nbytes for p in params)) / sum(p.numel() for p in params)


def budgets(make: Make, limit: float) -> tuple[Budget, ...]:
    """The budget that is used, and all."""
    graph = explain(make(parameters(shapes=SHAPES)), bytes_per_parameter=limit).graphs[-1]
    return graph.budgets


@pytest.mark.parametrize(
    ("make", "limit", "expected"),
    [
        (adamw, 5.1, ("light", "byte", "block8")),
        (adamw, 6, ("light", "exact", "block8")),
        (adamw, 7, ("light", "byte", "block16")),
        (adamw, 8, ("light", "exact", "block16")),
        (adamw, 10, ("light", "exact", "block16")),
        (adamw, 12, ("full", "exact", None)),
        (momentum, 4.1, ("light", "byte", "block8")),
        (momentum, 5.1, ("light", "byte", "block16")),
        (momentum, 6.1, ("light", "exact", "block16")),
        (momentum, 8, ("full", "exact", None)),
        (adagrad, 5.1, ("light", "byte", "block16")),
        (adagrad, 8, ("plus", "exact", None)),
    ],
)
def test_the_most_precise_options_within_a_limit(
    make: Make, limit: float, expected: tuple[str | None, ...]
) -> None:
    used, *others = budgets(make, limit)
    assert (used.strategy, used.error_format, used.state) == expected
    assert used.bytes <= limit * (1 + TOLERANCE)
    assert len(others) == len(BUDGETS)
    assert [each.bytes for each in others] == sorted(each.bytes for each in others)


SMALL, BEATEN, SAME, LARGE = (
    Budget("light", "byte", "block8", 2.0),
    Budget("light", "exact", "block8", 4.0),
    Budget("light", "exact", None, 4.0),
    Budget("full", "exact", None, 5.0),
)


def test_a_frontier_has_no_budget_that_another_beats() -> None:
    """Of those with the same bytes and error format, which treat tensors alike, the simplest is left."""
    assert frontier([SMALL, BEATEN, SAME, LARGE]) == [SMALL, SAME, LARGE]
    assert frontier([SMALL, Budget("light", "byte", None, 3.0), Budget("light", "exact", "block8", 3.5)]) == [
        SMALL,
        Budget("light", "byte", None, 3.0),
    ]
    assert frontier([]) == []


def test_a_budget_names_the_formats_of_what_is_updated() -> None:
    assert Budget("light", "byte", "block8").formats == {"byte"}
    assert Budget("light", "byte", "block8", weights="int16x32").formats == {"byte", "int16x32"}


def test_order_is_that_of_the_study() -> None:
    """By the geometric mean of the errors over all cells of a beta2."""
    results = json.loads(RESULTS.read_text())
    names = {
        ("light", "byte", "block8", "int16x32"): "block8, int16x32",
        ("light", "byte", "block8", None): "block8, byte",
        ("light", "exact", "block8", None): "block8, exact",
        ("light", "exact", "block16", None): "block16, exact",
        ("light", "byte", None, None): "light, byte, dithered",
        ("light", "exact", None, None): "light, exact, dithered",
        ("plus", "exact", None, None): "plus, exact, dithered",
        ("full", "exact", None, None): "full, exact",
    }
    cells = {row["name"]: row["recorded"]["whole"][1] for row in results["states"]}  # beta2 = 0.999
    found = [names.get((each.strategy, each.error_format, each.state, each.weights)) for each in BUDGETS]
    measured = [
        math.prod(error for (error,) in cells[name]) ** (1 / len(cells[name])) for name in found if name
    ]
    assert len(measured) == len(names)
    assert measured == sorted(measured)


@pytest.mark.parametrize("budget", [5.1, 8, 12])
@pytest.mark.parametrize("make", [adamw, momentum, adagrad])
def test_a_run_within_a_budget(make: Make, budget: float) -> None:
    """Some optimizers make state in the first step, after which parameters' terms may have another format."""
    params = parameters(shapes=SHAPES)
    backend = CollageBackend(bytes_per_parameter=budget)

    def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        step: Callable[[], Any] = torch.compile(optimizer.step, backend=backend)
        return step

    _, (error, _) = errors_beside_float64(make, step_of, params, steps=12)
    per = backend.report().bytes_per_parameter()
    assert per["total"] <= budget * (1 + TOLERANCE)
    assert error < 0.05
    used = backend.report().graphs[-1].budgets[0]
    found = record_of(params[0])
    assert found is not None
    assert found.format.name == used.error_format


@pytest.mark.parametrize("budget", [5.1, 8, 12])
def test_the_allocator_hands_out_what_the_report_says(budget: float) -> None:
    backend = CollageBackend(bytes_per_parameter=budget)

    def trained() -> tuple[Any, ...]:
        params = [Parameter(torch.zeros(512, 256).bfloat16()) for _ in range(4)]
        optimizer = adamw(params)
        step: Any = torch.compile(optimizer.step, backend=backend)
        run_steps(step, params, range(3))
        optimizer.zero_grad(set_to_none=True)
        return params, optimizer, step

    elements = 4 * 512 * 256
    bytes_held = left(trained)
    assert bytes_held / elements == pytest.approx(backend.report().bytes_per_parameter()["total"], rel=0.01)

    params, _, step = trained()
    set_gradients(params)
    assert peak(step) < 0.01 * bytes_held


@pytest.mark.parametrize("budget", [5.1, 8, 10])
def test_saving_and_loading_take_what_the_report_says(budget: float, tmp_path: Path) -> None:
    """No more than a hundredth beside it: what is looked at in parts, and fingerprints."""
    backend, file = CollageBackend(bytes_per_parameter=budget), tmp_path / "optimizer.pt"
    params = [Parameter(torch.zeros(2048, 2048).bfloat16()) for _ in range(4)]
    optimizer = adamw(params)
    run_steps(torch.compile(optimizer.step, backend=backend), params, range(3))
    optimizer.zero_grad(set_to_none=True)
    per, elements = backend.report().bytes_per_parameter(), sum(p.numel() for p in params)
    beside_parameters = (per["total"] - per["parameters"]) * elements
    little = 0.01 * per["total"] * elements

    def resumed() -> torch.optim.Optimizer:
        other = adamw(params_there)
        install(other, bytes_per_parameter=budget)
        other.load_state_dict(torch.load(file, weights_only=True))
        return other

    assert peak(lambda: torch.save(optimizer.state_dict(), file)) < little
    assert file.stat().st_size == pytest.approx(beside_parameters, abs=little)
    copied = peak(lambda: copy.deepcopy(optimizer.state_dict()))
    assert copied == pytest.approx(beside_parameters, abs=little)

    params_there = [Parameter(p.detach().clone()) for p in params]
    assert peak(resumed) == pytest.approx(beside_parameters, abs=little)
    params_there = [Parameter(p.detach().clone()) for p in params]
    assert left(resumed) == pytest.approx(beside_parameters, abs=little)
    assert peak(lambda: optimizer.load_state_dict(optimizer.state_dict())) < little


def test_a_smaller_budget_for_more_state_converts_error_terms() -> None:
    params = parameters(shapes=SHAPES)
    optimizer = momentum(params)
    step: Any = torch.compile(optimizer.step, backend=CollageBackend(bytes_per_parameter=4.1))
    run_steps(step, params, [0])
    first = record_of(params[0])
    before = full_value(params[0])
    assert first is not None
    assert first.format.name == "exact"
    run_steps(step, params, [1])
    second = record_of(params[0])
    assert second is not None
    assert second.format.name == "byte"
    assert params[0].grad is not None
    moved = full_value(params[0]) - before
    expected = -1e-3 * full_value(optimizer.state[params[0]]["momentum_buffer"])
    # A rounding to 16 bits of fraction, of weights below 8, and one of momentum to 8 bits, to nearest: once,
    # since the update has read the momentum unrounded, and k = .9 / (1 - .9) times, since it repays that.
    of_momentum = 3 / 2 / 127 * float(expected.abs().max())
    assert float((moved - expected).abs().max()) < 2.0**-13 + (1 + 9) * of_momentum


class WideMomentum(torch.optim.Optimizer):
    """Its state is float32, as the optimizer makes it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"] = torch.zeros_like(p, dtype=torch.float32)
            state["m"].mul_(0.9).add_(p.grad)
            p.add_(state["m"].to(p.dtype), alpha=-1e-3)


@pytest.mark.parametrize(("budget", "error_format"), [(8, "exact"), (7, "byte")])
def test_state_that_is_wider_counts(budget: float, error_format: str) -> None:
    params = parameters(shapes=SHAPES)
    backend = CollageBackend(bytes_per_parameter=budget)
    step: Any = torch.compile(WideMomentum(params).step, backend=backend)
    run_steps(step, params, range(3))
    used = backend.report().graphs[-1].budgets[0]
    assert used.error_format == error_format
    assert used.bytes == pytest.approx({"exact": 8, "byte": 7}[error_format], rel=1e-3)
    found = record_of(params[0])
    assert found is not None
    assert found.format.name == error_format


def test_float32_parameters_and_their_state_count_with_the_others() -> None:
    """Their state is packed; that of 16-bit parameters, which is float32, is not. Both have some 7 bytes."""
    params = [*parameters(shapes=SHAPES), Parameter(torch.zeros(256, 256))]
    optimizer = install(WideMomentum(params), bytes_per_parameter=7)
    run_steps(optimizer.step, params, range(3))
    used = backend_of(optimizer).report().graphs[-1].budgets[0]
    assert (used.error_format, used.state) == ("exact", "block16")
    assert used.bytes == pytest.approx(held_by(params, optimizer=optimizer), rel=1e-12)


class Anchored(torch.optim.Optimizer):
    """Weights are drawn to where they began, which the step only reads."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            begin = self.state[p].setdefault("begin", p.clone())
            p.add_(begin - p, alpha=1e-3).add_(p.grad, alpha=-1e-3)


def test_state_that_is_only_read_counts() -> None:
    """With its error terms, as it is a copy of whole weights."""
    params = parameters(shapes=SHAPES)
    optimizer = install(Anchored(params), bytes_per_parameter=6)
    run_steps(optimizer.step, params, range(3))
    assert held_per_parameter(optimizer) == pytest.approx(6, rel=TOLERANCE)
    params = parameters(shapes=SHAPES)
    optimizer = install(Anchored(params), bytes_per_parameter=4.1)
    with pytest.raises(InvalidOptionError, match=r"where this step takes 5\.0\d at least"):
        run_steps(optimizer.step, params, range(3))


class Unused(torch.optim.Optimizer):
    """Optimizer that makes momentum, and reads none, as pytorch_optimizer's SM3 without momentum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p] = {"momentum": torch.zeros_like(p), "count": torch.zeros_like(p)}
            p.addcdiv_(p.grad, self.state[p]["count"].add_(1), value=-1e-3)


def test_state_that_a_step_does_not_touch_counts() -> None:
    params = parameters(shapes=SHAPES)
    optimizer = install(Unused(params), bytes_per_parameter=7)
    run_steps(optimizer.step, params, range(3))
    assert held_per_parameter(optimizer) == pytest.approx(7, rel=TOLERANCE)


class Named(torch.optim.Optimizer):
    """Its state is under a name, as of mechanic-pytorch, by parameter there; a part of it is not touched."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.anchors = {p: {"begin": p.detach().clone()} for p in self.param_groups[0]["params"]}
        self.state["named"] = {"of": self.anchors, "unused": [torch.zeros(4096), *self.anchors]}  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(self.anchors[p]["begin"] - p, alpha=1e-3).add_(p.grad, alpha=-1e-3)


class NamedAndRecorded(Named):
    """Step that branches on a value, so that it is recorded."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["params"][0].grad.sum() < torch.inf:
            super().step()


@pytest.mark.parametrize("make", [Named, NamedAndRecorded])
def test_state_under_a_name_counts(make: type[Named]) -> None:
    params = parameters(shapes=SHAPES)
    optimizer = install(make(params), bytes_per_parameter=6.5)
    run_steps(optimizer.step, params, range(3))
    named = bytes_held([each["begin"] for each in optimizer.anchors.values()]) + 4 * 4096
    elements = sum(p.numel() for p in params)
    assert held_per_parameter(optimizer) == pytest.approx((bytes_held(params) + named) / elements, rel=1e-12)
    params = parameters(shapes=SHAPES)
    optimizer = install(make(params), bytes_per_parameter=4.2)
    with pytest.raises(InvalidOptionError, match=r"bytes_per_parameter=4\.2, where this \w+ \w+ [45]\.[23]"):
        run_steps(optimizer.step, params, range(3))


@pytest.mark.parametrize(("make", "limit"), [(momentum, 4.1), (Anchored, 6), (Unused, 7), (WideMomentum, 8)])
def test_a_budget_says_to_the_byte_what_is_held(make: Make, limit: float) -> None:
    """By optimizers without counters, which no budget counts."""
    params = parameters(shapes=SHAPES)
    optimizer = install(make(params), bytes_per_parameter=limit)
    run_steps(optimizer.step, params, range(3))
    used = backend_of(optimizer).report().graphs[-1].budgets[0]
    assert used.bytes == pytest.approx(held_by(params, optimizer=optimizer), rel=1e-12)


class EverySecond(torch.optim.Optimizer):
    """Momentum moves in every second step, and other steps do not read it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.count = 0
        for p in self.param_groups[0]["params"]:
            self.state[p]["m"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for p in self.param_groups[0]["params"]:
            if self.count % 2:
                p.sub_(self.state[p]["m"].mul_(0.9).add_(p.grad), alpha=1e-3)
            else:
                p.sub_(p.grad, alpha=1e-3)


def test_a_graph_with_less_keeps_the_options_of_the_graph_before() -> None:
    params = parameters(shapes=SHAPES)
    optimizer = install(EverySecond(params), bytes_per_parameter=5.1)
    run_steps(optimizer.step, params, range(6))
    used = [graph.budgets[0] for graph in backend_of(optimizer).report().graphs]
    assert len(used) > 1
    assert {(each.strategy, each.error_format, each.state) for each in used} == {("light", "byte", "block16")}


@pytest.mark.parametrize("budget", [4.1, 5.1, 6])
def test_a_limit_holds_for_each_graph_of_a_step(budget: float) -> None:
    """Momentum is not packed any more once its decay changes: weights are."""
    params = parameters(shapes=SHAPES)
    optimizer = install(momentum(params), bytes_per_parameter=budget)
    formats = []
    for step in range(6):
        optimizer.param_groups[0]["momentum"] = 0.9 if step < 3 else 0.95
        run_steps(optimizer.step, params, [step])
        each = held_by(params, optimizer=optimizer)
        assert step == 0 or each <= budget * (1 + TOLERANCE)  # what the first step makes, the second counts
        record = record_of(params[0])
        formats.append(record and record.format.name)
    assert formats[1:4:2] == {4.1: ["byte", "int16x32"], 5.1: ["byte"] * 2, 6: ["exact"] * 2}[budget]


def test_wider_state_that_is_too_large_is_refused() -> None:
    params = parameters(shapes=SHAPES)
    step: Any = torch.compile(WideMomentum(params).step, backend=CollageBackend(bytes_per_parameter=5))
    with pytest.raises(ValueError, match=r"bytes_per_parameter=5, where this step takes 6\.0\d at least"):
        run_steps(step, params, range(2))


def test_what_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bytes_per_parameter=0\.5, where this step takes 4\.11 at least"):
        explain(adamw(parameters(shapes=SHAPES)), bytes_per_parameter=0.5)


def test_it_is_said_what_is_not_packed() -> None:
    with pytest.raises(
        ValueError, match=r"give it 7\.01 \(exp_avg is not packed: it has fewer than 4096 elements\)"
    ):
        explain(adamw(parameters(shapes=[(32, 32)])), bytes_per_parameter=5.1)


class SlowWeights(torch.optim.Optimizer):
    """Weights that follow those of an inner optimizer, in every second step, and draw them to themselves."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.count = inner, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        for p in self.param_groups[0]["params"]:
            slow = self.state[p].setdefault("slow", p.clone())
            p.lerp_(slow, 0.5)
            slow.copy_(p)


@pytest.mark.parametrize("budget", [5.1, 8, 12.2])
def test_state_of_an_inner_optimizer_counts(budget: float) -> None:
    """The inner one has chosen before there are slow weights: what it holds is not chosen again."""
    params = parameters(shapes=SHAPES)
    optimizer = install(SlowWeights(adamw(params)), bytes_per_parameter=budget)
    least = {5.1: r"8\.0\d", 8: r"12\.1", 12.2: "16"}[budget]
    with pytest.raises(InvalidOptionError, match=f"takes {least} at least, with what AdamW holds") as refused:
        run_steps(optimizer.step, params, range(4))
    assert "give strategy and error_format in its place" in str(refused.value)


@pytest.mark.parametrize(
    "options", [{"bytes_per_parameter": 16}, {"strategy": "light", "error_format": "byte"}]
)
def test_an_inner_optimizer_within_a_budget(options: dict[str, Any]) -> None:
    params = parameters(shapes=SHAPES)
    optimizer = install(SlowWeights(adamw(params)), **options)
    run_steps(optimizer.step, params, range(6))
    each = held_by(params, a=optimizer, b=optimizer.inner)
    assert each == pytest.approx(options.get("bytes_per_parameter", 10), rel=0.01)


class WithWeights(torch.optim.Optimizer):
    """A step of descent, and one that a state of the size of weights is subtracted in, in some order."""

    def __init__(self, params: Any, lines: Sequence[str], lr: float) -> None:
        super().__init__(params, {})
        self.update: dict[str, Any] = {}
        body = "".join(f"    {line}\n" for line in lines if line)
        exec(
            f"def update(p, g, m, s):\n    m.mul_(0.9).add_(g)\n    p.sub_(m, alpha={lr})\n{body}",
            self.update,
        )
        for p in self.param_groups[0]["params"]:
            self.state[p].update(m=torch.zeros_like(p), s=p.detach().clone())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.update["update"](p, p.grad, self.state[p]["m"], self.state[p]["s"])


@pytest.mark.parametrize("options", [{"bytes_per_parameter": 8}, {"bytes_per_parameter": 7.1}, {}], ids=str)
@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("state", WEIGHTS)
def test_state_of_the_size_of_weights(state: str, pull: str, options: dict[str, Any]) -> None:
    """Within a budget, weights are ten times as near to float64's as in plain bfloat16."""
    lines = [pull.format(s="s"), WEIGHTS[state].format(s="s")]
    lines = lines if len(state) % 2 else lines[::-1]
    params = parameters(shapes=SHAPES[:1])
    backend = CollageBackend(**options or {"strategy": "light"})

    def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        step: Callable[[], Any] = torch.compile(optimizer.step, backend=backend)
        return step

    def make(params: Any) -> WithWeights:
        return WithWeights(params, lines, lr=1e-4)

    plain = parameters(shapes=SHAPES[:1])
    _, (error,) = errors_beside_float64(make, step_of, params, steps=8)
    _, (error_of_plain,) = errors_beside_float64(make, lambda optimizer: optimizer.step, plain, steps=8)
    assert error < error_of_plain / 10


@pytest.mark.parametrize("budget", [0, -1, "8", True, float("nan")])
def test_what_is_no_number_of_bytes_is_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match=r"bytes_per_parameter=.* is not allowed"):
        CollageBackend(bytes_per_parameter=budget)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "light"},
        {"error_format": "byte"},
        {"rounding": "nearest"},
        {"state": "block8"},
        {"arithmetic": "native"},
    ],
)
def test_options_that_it_decides_are_refused_beside_it(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give either bytes_per_parameter or"):
        CollageBackend(bytes_per_parameter=8, **options)


def test_the_report_shows_the_budget_beside_others() -> None:
    report = explain(adamw(parameters(shapes=SHAPES)), bytes_per_parameter=8)
    (marked,) = (line for line in str(report).splitlines() if line.startswith("→"))
    assert marked.split()[1:4] == ["strategy='light',", "error_format='exact',", "state='block16'"]
    assert any("→" in line and line.startswith("|") for line in report.to_markdown().splitlines())
    shown = [line for line in str(report).splitlines() if "strategy='" in line]
    sizes = [float(line.split()[-1]) for line in shown]
    assert sizes == sorted(sizes)
    assert len(sizes) == 8
    root = ElementTree.fromstring(report.to_html())
    cells = [["".join(cell.itertext()).strip() for cell in row] for row in root.iter(f"{HTML}tr")]
    (used,) = (cell for cell in cells if cell[0] == "→")
    assert used[1] == str(report.graphs[-1].budgets[0])
