"""``fused=True`` is compiled as ``fused=False``, and does for a loss scaler what torch's kernels do."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.overrides import TorchFunctionMode

from collage_fx import CollageBackend, error_terms, full_value, install
from collage_fx.capture.recording import is_recorded
from collage_fx.errors import UncompensatedParameterError, UnsupportedOptimizerError
from collage_fx.torch_compat import trace_unfused
from tests.support.race import Race
from tests.support.refusals import refused
from tests.support.training import Descent, compiled, differences, everything, parameters, set_gradients
from tests.support.twin import TwinBackend

Parameters = list[torch.nn.Parameter]
Make = Callable[[Parameters, bool], Optimizer]

SHAPES = [(4, 6)]

#: Options of the groups of one optimizer.
MOMENTA: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.5},
    {"momentum": 0.9, "dampening": 0.25, "maximize": True},
]
MOMENTS: list[dict[str, Any]] = [{}, {"amsgrad": True, "weight_decay": 0.5}, {"maximize": True, "eps": 1e-4}]


def optimizer_of(
    cls: type[Optimizer], groups: Sequence[dict[str, Any]], params: Parameters, **options: Any
) -> Optimizer:
    """One with groups of as many parameters each."""
    each = len(params) // len(groups)
    return cls(
        [{"params": params[i * each : (i + 1) * each], **group} for i, group in enumerate(groups)],
        **options,
    )


def sgd(params: Parameters, fused: bool) -> Optimizer:
    return optimizer_of(SGD, MOMENTA, params, lr=2.0**-12, fused=fused)


def adam(params: Parameters, fused: bool) -> Optimizer:
    return optimizer_of(Adam, MOMENTS, params, lr=torch.tensor(1e-4), fused=fused)


def adamw(params: Parameters, fused: bool) -> Optimizer:
    return optimizer_of(AdamW, MOMENTS, params, lr=1e-4, fused=fused)


def adagrad(params: Parameters, fused: bool) -> Optimizer:
    groups = [{"lr_decay": 0.01}, {"weight_decay": 0.5, "maximize": True}]
    return optimizer_of(Adagrad, groups, params, lr=1e-4, fused=fused)


EACH = pytest.mark.parametrize("make", [sgd, adam, adamw, adagrad])


def mixed_parameters() -> Parameters:
    """For three groups or two, both formats in each."""
    dtypes = (torch.bfloat16, torch.float16)
    return [parameters(dtype, SHAPES, seed=i)[0] for i in range(6) for dtype in dtypes]


class Run:
    """An optimizer under a compiled step, and perhaps a loss scaler.

    Args:
        make: parameters, fused or not -> optimizer.
        backend: of the compiled step.
        fused: whether it is to be fused.
        scale: the scaler's, at first; it doubles with every step that is taken. None: no scaler.
        few: whether one parameter of each format will do.
    """

    def __init__(
        self,
        make: Make,
        backend: CollageBackend,
        *,
        fused: bool,
        scale: float | None = None,
        few: bool = False,
    ) -> None:
        torch._dynamo.reset()
        self.params = mixed_parameters()[: 2 if few else None]
        self.optimizer = make(self.params, fused)
        self.backend = backend
        self.optimizer.step = torch.compile(self.optimizer.step, backend=backend)  # type: ignore[assignment, method-assign]
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=scale or 1.0, growth_interval=1, enabled=scale is not None
        )

    def step(self, seed: int, *, overflowing: bool = False) -> None:
        """A step with the same gradients whatever their scale."""
        self.scaler.scale(torch.ones(()))  # makes its state
        set_gradients(self.params, seed)
        for p in self.params:
            assert p.grad is not None
            p.grad *= self.scaler.get_scale()
        if overflowing:
            assert p.grad is not None
            p.grad[0] = float("inf")
        self.scaler.step(self.optimizer)
        self.scaler.update()


def interpreted(options: dict[str, Any]) -> TwinBackend:
    """A backend whose steps run as rewritten, without a compiler."""
    backend = TwinBackend(compiles=False, **options)
    backend.engine = "eager"
    return backend


@EACH
def test_as_if_it_were_not_fused(make: Make) -> None:
    """The captured graph is the same, so all that is made of it is, whatever the options."""
    runs = [Run(make, interpreted({}), fused=fused) for fused in (True, False)]
    for run in runs:
        for seed in range(4):
            run.step(seed)
    assert differences(*(everything(run.optimizer) for run in runs)) == []
    assert all(term.any() for p in runs[0].params for term in error_terms(p))
    for one, other in zip(*(run.backend.report().graphs for run in runs), strict=True):
        # Dynamo takes the inputs in another order.
        assert [replace(each, inputs=()) for each in one.tensors] == [
            replace(each, inputs=()) for each in other.tensors
        ]
        assert one.passes == other.passes
        assert operations(one.before.graph) == operations(other.before.graph)
        assert operations(one.after.graph) == operations(other.after.graph)


def operations(graph: Graph) -> Counter[tuple[str, torch.dtype]]:
    """The operations of a graph, and the dtypes of their results."""
    return Counter(
        (str(node.target), node.meta["val"].dtype) for node in graph.nodes if node.op == "call_function"
    )


def race_with_a_scaler(
    make: Make, backends: Sequence[CollageBackend], *, few: bool = False
) -> tuple[Run, Run]:
    """A skipped step changes no bit; the others are those that are taken without a scaler.

    Scales are powers of two, so that gradients divided by them are the same numbers.
    """
    scaled = Run(make, backends[0], fused=True, scale=4.0, few=few)
    if not hasattr(scaled.optimizer, "_step_supports_amp_scaling"):
        pytest.skip("before torch 2.13 Adagrad leaves unscaling to the scaler, which refuses float16")
    plain = Run(make, backends[1], fused=False, few=few)
    for seed in range(6):
        overflowing = seed in (2, 4)
        before = everything(scaled.optimizer)
        scaled.step(seed, overflowing=overflowing)
        if overflowing:
            assert differences(before, everything(scaled.optimizer)) == []
        else:
            plain.step(seed)
            for p, q in zip(scaled.params, plain.params, strict=True):
                assert p.grad is not None
                assert q.grad is not None
                assert torch.equal(p.grad, q.grad)  # divided by the scale, as the kernels leave them
    assert differences(everything(scaled.optimizer), everything(plain.optimizer)) == []
    assert scaled.scaler.get_scale() == 4.0 * 2**4 / 2**2
    return scaled, plain


@pytest.mark.parametrize(
    "options", [{"strategy": "light"}, {"strategy": "plus", "arithmetic": "native"}], ids=str
)
@EACH
def test_under_a_loss_scaler(make: Make, options: dict[str, Any]) -> None:
    scaled, plain = race_with_a_scaler(make, [interpreted(options) for _ in range(2)])
    rows = {row.name: row for row in scaled.backend.report().graphs[-1].tensors}
    for row in plain.backend.report().graphs[-1].tensors:
        scaled_row = rows[row.name]
        assert (scaled_row.kind, scaled_row.lossy, scaled_row.why) == (row.kind, row.lossy, row.why)


def adamw_alone(params: Parameters, fused: bool) -> Optimizer:
    return AdamW(params, lr=1e-4, fused=fused)


def test_under_a_loss_scaler_compiled_by_family() -> None:
    race_with_a_scaler(adamw_alone, [CollageBackend() for _ in range(2)])


@pytest.mark.parametrize("cls", [AdamW, Adagrad])
def test_against_float64(cls: type[Optimizer]) -> None:
    """The twins, plain and in float64, run torch's kernels eagerly; SGD's gets momenta of 16 bits wrong."""
    race = Race(parameters(shapes=[(4, 6)]), lambda params: cls(params, lr=1e-5, fused=True))  # type: ignore[call-arg]
    race.run(40)
    race.assert_compensated()
    assert race.compilations == 1


def scaled(optimizer: Optimizer, grad_scale: float | None, found_inf: float) -> None:
    """What a loss scaler does before it calls ``step``."""
    optimizer.grad_scale = None if grad_scale is None else torch.tensor(grad_scale)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(found_inf)  # type: ignore[attr-defined]


def test_gradients_are_divided_by_the_scale_in_float32() -> None:
    """One that float16 holds only before it is divided moves the parameter."""
    p = torch.nn.Parameter(torch.ones(3).half())
    p.grad = torch.full_like(p, 2.0**-10)
    optimizer = SGD([p], lr=2.0**10, fused=True)
    scaled(optimizer, 2.0**16, 0.0)
    compiled(optimizer)()
    assert torch.equal(full_value(p), torch.full((3,), 1 - 2.0**-16, dtype=torch.float64))
    assert torch.equal(p.grad, torch.zeros_like(p))


@pytest.mark.parametrize("way", ["eager", "fused", "float32 gradients"])
def test_float16_parameters_need_a_fused_step_or_float32_gradients_under_a_scaler(way: str) -> None:
    """Torch's scaler refuses float16 gradients that it has to divide itself, installed or not."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).half()
    for p in model.parameters() if way == "float32 gradients" else ():
        p.grad_dtype = torch.float32
    optimizer = install(AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=way == "fused"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(*, overflowing: bool = False) -> Tensor:
        before = full_value(model.weight)
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 8).half()).float().mean()).backward()
        assert model.weight.grad is not None
        if overflowing:
            model.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        return (full_value(model.weight) - before).abs()

    if way == "eager":
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            step()
        return
    assert step().min() > 5e-4
    assert step(overflowing=True).max() == 0
    assert scaler.get_scale() == 2.0**9
    assert step().min() > 5e-4


def test_a_scaler_that_has_unscaled_the_gradients_itself() -> None:
    p = torch.nn.Parameter(torch.ones(3).bfloat16())
    optimizer = SGD([p], lr=2.0**-12, fused=True)
    step = compiled(optimizer)
    for found_inf in (0.0, 1.0, 0.0):
        p.grad = torch.ones_like(p)
        scaled(optimizer, None, found_inf)
        step()
    assert torch.equal(full_value(p), torch.full((3,), 1 - 2 * 2.0**-12, dtype=torch.float64))


@pytest.mark.parametrize("arithmetic", ["wide", "native"])
def test_a_skipped_step_is_measured_as_one_that_was_to_change_nothing(arithmetic: Any) -> None:
    p = torch.nn.Parameter(torch.ones(3).bfloat16())
    optimizer = SGD([p], lr=2.0**-12, fused=True)
    backend = CollageBackend(metrics=True, arithmetic=arithmetic)
    step = torch.compile(optimizer.step, backend=backend)
    for found_inf in (0.0, 1.0):
        p.grad = torch.full_like(p, float("inf") if found_inf else 1.0)
        scaled(optimizer, 1.0, found_inf)
        step()
    taken, skipped = (next(iter(values.values())) for values in backend.metrics().values())
    assert (taken.asked, taken.lost, taken.intended) == (3, 0, 3 * 2.0**-24)
    assert (skipped.asked, skipped.lost, skipped.intended, skipped.effective) == (0, 0, 0.0, 0.0)


def test_a_momentum_that_is_born_in_a_skipped_step_is_zero() -> None:
    p = torch.nn.Parameter(torch.ones(3).bfloat16())
    optimizer = SGD([p], lr=2.0**-12, momentum=0.5, fused=True)
    step = compiled(optimizer)
    p.grad = torch.full_like(p, float("inf"))
    scaled(optimizer, 1.0, 1.0)
    step()
    assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.zeros_like(p))
    assert torch.equal(full_value(p), torch.ones(3, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    scaled(optimizer, 1.0, 0.0)
    step()
    assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.ones_like(p))


def test_state_goes_from_one_to_the_other_and_back() -> None:
    steady, changing = Run(adamw_alone, interpreted({}), fused=True, few=True), None
    for turn, fused in enumerate((True, False, True)):
        run = Run(adamw_alone, interpreted({}), fused=fused, few=True)
        if changing is not None:
            for p, q in zip(run.params, changing.params, strict=True):
                p.data.copy_(q.data)
            state = changing.optimizer.state_dict()
            assert state["state"].keys() == steady.optimizer.state_dict()["state"].keys()
            run.optimizer.load_state_dict(state)
            for group in run.optimizer.param_groups:
                group["fused"] = fused
        changing = run
        for each in (steady, changing):
            each.step(2 * turn)
            each.step(2 * turn + 1)
    assert changing is not None
    assert differences(everything(steady.optimizer), everything(changing.optimizer)) == []


def branching(cls: Any) -> Any:
    """A class whose step looks at values in a loop, and is recorded for that."""

    class Branching(cls):  # type: ignore[misc]
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                if p.grad.isnan().any():
                    return None
            return super().step(closure)

    return Branching


RECORDED: dict[str, Callable[..., Optimizer]] = {
    "adam": functools.partial(branching(Adam), lr=1e-4, amsgrad=True),
    "adamw": functools.partial(branching(AdamW), lr=1e-4),
    "sgd": functools.partial(branching(SGD), lr=2.0**-12),
    "momentum": functools.partial(branching(SGD), lr=2.0**-12, momentum=0.9, nesterov=True),
    "adagrad": functools.partial(branching(Adagrad), lr=1e-4, lr_decay=0.01),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_steps(name: str) -> None:
    """Python calls the operator, of which elementary operations are recorded."""

    def make(params: Parameters, fused: bool) -> Optimizer:
        return RECORDED[name](params, fused=fused)

    scaled, _ = race_with_a_scaler(make, [CollageBackend() for _ in range(2)], few=True)
    assert is_recorded(scaled.optimizer)
    assert all(term.any() for p in scaled.params for term in error_terms(p))


# What is not for us. ----------------------------------------------------------------------------------------


class Calls(TorchFunctionMode):
    """Takes down which functions of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_steps_of_others_call_the_fused_operator() -> None:
    """Eager ones, and those that are compiled for another backend: of these Dynamo captures nothing."""
    graphs: list[GraphModule] = []

    def other(gm: GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    optimizers = [AdamW(parameters(), lr=1e-4, fused=True) for _ in range(2)]
    steps = [optimizers[0].step, torch.compile(optimizers[1].step, backend=other)]
    for optimizer, step in zip(optimizers, steps, strict=True):
        set_gradients(optimizer.param_groups[0]["params"])
        with Calls() as calls:
            step()
        assert "_fused_adamw_" in calls.names
    assert graphs == []
    assert differences(*map(everything, optimizers)) == []


def test_a_substitute_of_somebody_elses_stays(caplog: pytest.LogCaptureFixture) -> None:
    """As does ours, which stands for the functions of torch.optim since the import."""
    trace_unfused(lambda: True)
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(" cannot")[0] for text in told] == [
        f"steps with fused=True that call {name}" for name in ("adam", "adamw", "sgd", "adagrad")
    ]
    graphs: list[GraphModule] = []

    def other(gm: GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    optimizer = AdamW(parameters(), lr=1e-4, fused=True)
    set_gradients(optimizer.param_groups[0]["params"])
    torch.compile(optimizer.step, backend=other)()
    assert graphs == []


class CallsTheOperator(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        torch._fused_sgd_(
            params,
            [p.grad for p in params],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=1e-3,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


@torch.library.custom_op("collage_fx_tests::whole_update", mutates_args=("p",))
def whole_update(p: Tensor, g: Tensor) -> None:
    p.sub_(g)


class CallsItsOwnOperator(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            whole_update(p, p.grad)


@pytest.mark.parametrize(
    ("cls", "error", "name"),
    [
        (CallsTheOperator, UnsupportedOptimizerError, "torch._fused_sgd_"),
        (CallsItsOwnOperator, UncompensatedParameterError, "collage_fx_tests.whole_update.default"),
    ],
)
def test_an_opaque_update_is_refused_by_the_name_of_its_operator(
    cls: type[Descent], error: Any, name: str
) -> None:
    params = parameters()
    set_gradients(params)
    assert name in refused(cls(params), error)
