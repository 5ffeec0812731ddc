from __future__ import annotations

import importlib.metadata
import inspect
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import collage_fx
from collage_fx import (
    CollageBackend,
    CollageError,
    audit,
    backend_for,
    collage_backend,
    error_terms,
    explain,
    full_value,
    install,
    offload,
    step_in_backward,
)
from collage_fx.capture import watch
from collage_fx.choices import Mode, OptionFields
from collage_fx.options import GivenOptions
from tests.support.training import (
    Descent,
    compiled,
    differences,
    errors_beside_float64,
    everything,
    live_error_terms,
    parameters,
    run_steps,
    set_gradients,
)

NAMES = ("collage", "collage_fx")
REGISTERED = importlib.metadata.entry_points(group="torch_dynamo_backends").names >= {*NAMES}
needs_entry_point = pytest.mark.skipif(
    not REGISTERED, reason="collage-fx is not installed here, so its entry point is not registered"
)

# Options. -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"strategy": "heavy"}, ["'none'", "'light'", "'plus'", "'full'"]),
        ({"strategy": ["plus"]}, ["'none'", "'light'", "'plus'", "'full'"]),
        ({"error_format": "fp8"}, ["'exact'", "'mcf'", "'fp32'"]),
        ({"arithmetic": None}, ["'wide'", "'native'"]),
        ({"metrics": "yes"}, ["False"]),
        ({"strict": 1}, ["True", "False"]),
        ({"mode": "fastest"}, ["'reduce-overhead'", "'max-autotune'"]),
        ({"arithmetic": "native", "error_format": "fp32"}, ["'mcf'", "arithmetic='wide'"]),
    ],
)
@pytest.mark.parametrize("make", [CollageBackend, backend_for])
def test_wrong_values_are_refused_with_those_allowed(
    make: Callable[..., Any], options: dict[str, Any], allowed: list[str]
) -> None:
    with pytest.raises(ValueError, match=next(iter(options))) as refusal:
        make(**options)
    assert all(value in str(refusal.value) for value in allowed)


def test_unknown_option_is_refused_with_those_that_exist() -> None:
    with pytest.raises(
        ValueError, match=r"unknown option 'stratgy'[\s\S]*strategy, error_format, arithmetic"
    ):
        backend_for(stratgy="plus")  # type: ignore[call-arg]


def test_repr_says_the_options() -> None:
    assert repr(CollageBackend(strategy="light", error_format="fp32")) == (
        "CollageBackend(strategy='light', error_format='fp32', arithmetic='wide', metrics=False, "
        "metrics_every=None, strict=True, mode=None, rounding='repay', state=None, "
        "weights=None, bytes_per_parameter=None, changes='summed')"
    )


def test_one_backend_for_each_choice_of_options() -> None:
    assert backend_for() is collage_backend
    assert backend_for(strategy="plus") is collage_backend  # the default, spelled out
    assert backend_for(strategy="light") is backend_for(strategy="light", strict=True) is not collage_backend


@needs_entry_point
@pytest.mark.parametrize("name", NAMES)
def test_found_by_name_with_options(name: str) -> None:
    assert name in torch._dynamo.list_backends()
    (p,) = params = parameters(shapes=[(3,)])
    optimizer = Descent(params)
    step = torch.compile(optimizer.step, backend=name, options={"error_format": "fp32", "strategy": "light"})
    run_steps(step, params, [0])
    assert error_terms(p)[0].dtype is torch.float32
    assert backend_for(strategy="light", error_format="fp32").report().tensors[-1].compensated


@needs_entry_point
@pytest.mark.parametrize("options", [{"strategy": "heavy"}, {"stratgy": "plus"}])
def test_wrong_options_by_name_reach_the_user_as_value_errors(options: dict[str, Any]) -> None:
    params = parameters(shapes=[(3,)])
    set_gradients(params)
    with pytest.raises(ValueError, match=r"'none', 'light', 'plus', 'full'|unknown option 'stratgy'"):
        torch.compile(Descent(params).step, backend="collage", options=options)()


def test_a_mode_that_does_not_exist_is_refused_with_those_that_do() -> None:
    params = parameters(shapes=[(3,)])
    set_gradients(params)
    with pytest.raises(ValueError, match=r"mode='fastest'[^\n]*\n.*\n.*'default', 'reduce-overhead'"):
        torch.compile(Descent(params).step, backend=CollageBackend(), mode="fastest")()


def test_options_beside_a_backend_object_are_refused() -> None:
    params = parameters(shapes=[(3,)])
    set_gradients(params)
    with pytest.raises(ValueError, match=r"backend=CollageBackend\(strategy"):
        torch.compile(Descent(params).step, backend=CollageBackend(), options={"strategy": "light"})()


@pytest.mark.parametrize("where", ["backend", "torch.compile"])
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("reduce-overhead", {"triton.cudagraphs": True}),
        ("max-autotune", {"max_autotune": True, "triton.cudagraphs": True}),
        ("max-autotune-no-cudagraphs", {"max_autotune": True, "triton.cudagraphs": False}),
        ("default", {"max_autotune": False, "triton.cudagraphs": False}),
    ],
)
def test_mode_reaches_inductor_and_works_on_cpu(
    where: str, mode: Mode, settings: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[dict[str, bool]] = []

    class Watched(CollageBackend):
        def lower(self, *args: Any) -> Any:
            config = torch._inductor.config
            met.append(
                {name: getattr(config, name) for name in ("max_autotune",)}
                | {"triton.cudagraphs": config.triton.cudagraphs}
            )
            return super().lower(*args)

    (p,) = params = parameters(shapes=[(3,)])
    optimizer = Descent(params)
    backend = Watched(mode=mode) if where == "backend" else Watched()
    step = torch.compile(optimizer.step, backend=backend, mode=None if where == "backend" else mode)
    run_steps(step, params, [0])
    assert settings.items() <= met[0].items()
    assert error_terms(p)


# One step, one compilation. -------------------------------------------------------------------------------


@pytest.fixture
def adamw_run(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What compiling an AdamW step costs in graph breaks and compilations, with ours and plain Inductor."""
    found = {}
    backends: dict[str, Any] = {"collage": CollageBackend(), "inductor": "inductor"}
    for name, backend in backends.items():
        torch._dynamo.reset()
        counters.clear()
        params = parameters()
        optimizer = torch.optim.AdamW(params, foreach=request.param)
        step = torch.compile(optimizer.step, backend=backend)
        run_steps(step, params, [0])
        first = (dict(counters["stats"]), dict(counters["graph_break"]), dict(counters["frames"]))
        run_steps(step, params, [1, 2])
        found[name] = (
            first,
            (dict(counters["stats"]), dict(counters["graph_break"]), dict(counters["frames"])),
        )
    return found


@pytest.mark.parametrize("adamw_run", [None, True, False], indirect=True)
def test_a_step_adds_no_graph_break_compiles_once_and_never_again(adamw_run: dict[str, Any]) -> None:
    ours, later = adamw_run["collage"]
    plain, _ = adamw_run["inductor"]
    assert (ours[0], ours[2]) == (plain[0], plain[2])
    assert sum(ours[1].values()) == 1  # torch.optim breaks the graph once itself, around the step
    assert ours[0]["unique_graphs"] == 1
    assert later == ours


# Several steps, recompilations and callables. -------------------------------------------------------------


def test_error_terms_survive_a_recompilation() -> None:
    params = parameters()
    optimizer = Descent(params)
    backend = CollageBackend()
    step = torch.compile(optimizer.step, backend=backend)
    run_steps(step, params, [0, 1])
    buffers = [live_error_terms(p)[0] for p in params]
    values = [full_value(p) for p in params]
    graphs = len(backend.report().graphs)
    optimizer.param_groups[0]["lr"] *= 2  # a scheduler's doing: one recompilation
    run_steps(step, params, [2])
    assert len(backend.report().graphs) == graphs + 1
    for p, buffer, value in zip(params, buffers, values, strict=True):
        assert live_error_terms(p)[0] is buffer
        assert p.grad is not None
        expected = value - optimizer.param_groups[0]["lr"] * p.grad.double()
        # float32 arithmetic is right to 2**-24 an operation
        assert torch.all((full_value(p) - expected).abs() <= expected.abs() * 4 * 2.0**-24)


def test_two_callables_over_one_optimizer_share_its_error_terms() -> None:
    params = parameters()
    optimizer = torch.optim.RMSprop(params, lr=1e-3, alpha=0.999)
    run_steps(compiled(optimizer, strategy="light"), params, range(3))
    states = [optimizer.state[p]["square_avg"] for p in params]
    buffers = [live_error_terms(p)[0] for p in params]
    assert all(error_terms(p)[0].abs().max() > 0 for p in params)
    assert [error_terms(state) for state in states] == [(), ()]
    plus = compiled(optimizer, strategy="plus")
    run_steps(plus, params, [3])
    assert all(live_error_terms(p)[0] is buffer for p, buffer in zip(params, buffers, strict=True))
    assert all(error_terms(state)[0].abs().max() > 0 for state in states)
    light = CollageBackend(strategy="light")  # keeps up what exists, though it would not have chosen it
    run_steps(torch.compile(optimizer.step, backend=light), params, [4])
    row = next(row for row in light.report().tensors if row.name == "param_groups[0].params[0].square_avg")
    assert row.compensated
    assert "another compiled step" in row.selection


def test_alternating_callables_equal_one() -> None:
    """Two compiled callables in turn are the same run as one of them alone."""
    results = []
    for callables in (1, 2):
        params = parameters()
        optimizer = Descent(params)
        steps = [compiled(optimizer) for _ in range(callables)]
        for seed in range(6):
            run_steps(steps[seed % callables], params, [seed])
        results.append(everything(optimizer))
    assert differences(*results) == []


def test_another_error_format_for_the_same_tensors_is_refused() -> None:
    params = parameters()
    optimizer = Descent(params)
    run_steps(compiled(optimizer), params, [0])
    before = everything(optimizer)
    with pytest.raises(
        CollageError,
        match=r"'fp32'[\s\S]*'exact'[\s\S]*param_groups\[0\].params\[0\][\s\S]*reset_error_terms",
    ):
        compiled(optimizer, error_format="fp32")()
    assert differences(before, everything(optimizer)) == []
    for p in params:
        collage_fx.reset_error_terms(p)
    run_steps(compiled(optimizer, error_format="fp32"), params, [1])
    assert error_terms(params[0])[0].dtype is torch.float32


def test_a_plain_step_over_tensors_with_error_terms_is_refused() -> None:
    params = parameters()
    optimizer = Descent(params)
    run_steps(compiled(optimizer), params, [0])
    before = everything(optimizer)
    with pytest.raises(CollageError, match=r"strategy='none'[\s\S]*reset_error_terms"):
        compiled(optimizer, strategy="none")()
    assert differences(before, everything(optimizer)) == []


def test_a_step_goes_on_from_zero_after_a_reset() -> None:
    (p,) = params = parameters(shapes=[(4,)])
    optimizer = Descent(params)
    step = compiled(optimizer)
    run_steps(step, params, [0])
    collage_fx.reset_error_terms(p)
    assert error_terms(p) == ()
    before = p.detach().double()
    run_steps(step, params, [1])
    assert p.grad is not None
    expected = before - optimizer.param_groups[0]["lr"] * p.grad.double()
    assert torch.all((full_value(p) - expected).abs() <= expected.abs() * (2.0**-16 + 2.0**-22))


def test_two_optimizers_in_one_process_stay_apart() -> None:
    backend = CollageBackend()
    optimizers = [Descent(parameters(shapes=[(3,)])), Descent(parameters(shapes=[(7,)]))]
    steps = [torch.compile(optimizer.step, backend=backend) for optimizer in optimizers]
    for optimizer, step in zip(optimizers, steps, strict=True):
        run_steps(step, optimizer.param_groups[0]["params"], range(2))
    alone = Descent(parameters(shapes=[(7,)]))
    run_steps(compiled(alone), alone.param_groups[0]["params"], range(2))
    assert differences(everything(optimizers[1]), everything(alone)) == []
    assert [(row.name, row.shape) for row in backend.report().tensors] == [
        ("param_groups[0].params[0]", (3,)),
        ("param_groups[0].params[0]", (7,)),
    ]
    assert "Descent #2" in str(backend.report())


def test_a_step_inside_a_users_function() -> None:
    params, more = parameters(), parameters(seed=1)
    optimizer, other = Descent(params), Descent(more)
    backend = CollageBackend()

    @torch.compile(backend=backend)
    def train(scale: float) -> float:
        optimizer.step()
        other.step()
        return scale * 2

    for seed in range(2):
        set_gradients(params, seed)
        set_gradients(more, seed)
        assert train(3.0) == 6.0
    reference = Descent(parameters())
    run_steps(compiled(reference), reference.param_groups[0]["params"], range(2))
    assert differences(everything(optimizer), everything(reference)) == []
    assert len(backend.report().tensors) == 4
    assert all(error_terms(p) for p in more)


def test_parameters_that_are_arguments_are_looked_up_at_each_call() -> None:
    backend = CollageBackend()

    def update(p: torch.Tensor, g: torch.Tensor) -> None:
        p.add_(g)

    step = torch.no_grad()(torch.compile(update, backend=backend))
    one, other = parameters(shapes=[(4,), (4,)])
    gradient = torch.full((4,), 2.0**-14, dtype=torch.bfloat16)
    for p in (one, other, one, one):
        before = full_value(p)
        step(p, gradient)
        assert torch.equal(full_value(p), before + 2.0**-14)
    assert error_terms(one)[0].data_ptr() != error_terms(other)[0].data_ptr()
    assert {row.name for row in backend.report().tensors} == {"p"}


@pytest.mark.parametrize("gradient", ["laid out alike", "contiguous"])
@pytest.mark.parametrize("layout", ["transposed", "channels last"])
def test_error_terms_have_the_strides_of_their_tensor(layout: str, gradient: str) -> None:
    torch.manual_seed(0)
    if layout == "transposed":
        p = torch.nn.Parameter(torch.randn(6, 4).bfloat16().t())
    else:
        p = torch.nn.Parameter(torch.randn(2, 3, 4, 5).bfloat16().to(memory_format=torch.channels_last))
    assert not p.is_contiguous()
    p.grad = torch.randn_like(p) if gradient == "laid out alike" else torch.randn(p.shape).to(p.dtype)
    optimizer = torch.optim.RMSprop([p], lr=1e-3, alpha=0.999, eps=0.0)
    before = p.detach().double()
    compiled(optimizer)()
    assert error_terms(p)[0].stride() == p.stride()
    state = optimizer.state[p]["square_avg"]
    assert error_terms(state)[0].stride() == state.stride()
    # the first step moves every weight by lr / sqrt(1 - alpha); the pair holds it to u**2 of the weight
    moved = (full_value(p) - before) / p.grad.double().sign()
    bound = full_value(p).abs() * 2.0**-16 + 0.0317 * 2.0**-21  # and float32 arithmetic
    assert torch.all((moved + 1e-3 / 0.001**0.5).abs() <= bound)


# What is left alone. --------------------------------------------------------------------------------------


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    records: list[str] = []
    caplog.set_level(logging.INFO, logger="collage_fx")
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("collage_fx").addHandler(handler)
    yield records
    logging.getLogger("collage_fx").removeHandler(handler)


def test_float32_state_is_lowered_as_inductor_does_with_one_line(messages: list[str]) -> None:
    results = []
    backend = CollageBackend(changes="as written")
    for each in (backend, "inductor"):
        torch._dynamo.reset()
        params = parameters(torch.float32)
        optimizer = torch.optim.RMSprop(params)
        run_steps(torch.compile(optimizer.step, backend=each), params, range(3))
        results.append(everything(optimizer))
    assert differences(*results) == []
    told, compiling, line = messages
    assert told.startswith("RMSprop: no error terms: its parameters are float32")
    assert compiling.startswith("RMSprop: compiling its step")
    assert line == "RMSprop: the graph updates no bfloat16 or float16 tensor; lowered by Inductor as it is"
    assert str(backend.report()) == line
    assert backend.report().tensors == []


def test_a_models_forward_and_backward_is_lowered_as_inductor_does_with_one_line(messages: list[str]) -> None:
    results = []
    for backend in (CollageBackend(), "inductor"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 1)).bfloat16()
        x = torch.randn(3, 5).bfloat16()

        def loss_of(x: torch.Tensor, model: torch.nn.Module = model) -> torch.Tensor:
            return model(x).float().pow(2).sum()

        loss = torch.compile(loss_of, backend=backend)(x)
        loss.backward()
        results.append(
            {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}
        )
    assert len(results[0]) == 5
    assert differences(*results) == []
    assert messages == [
        "loss_of: the graph needs autograd, so it is no optimizer step; lowered by Inductor as it is"
    ]


def test_the_none_strategy_is_plain_inductor_with_a_report() -> None:
    results = []
    backend = CollageBackend(strategy="none")
    for each in (backend, "inductor"):
        torch._dynamo.reset()
        params = parameters()
        optimizer = torch.optim.RMSprop(params)
        run_steps(torch.compile(optimizer.step, backend=each), params, range(3))
        results.append(everything(optimizer))
    assert differences(*results) == []
    assert [row.compensated for row in backend.report().tensors] == [False] * 4


#: Sums with a product of matrices, and a factor, which Inductor of torch 2.13 drops where it makes addmm.
SUMS_OF_PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "in place": lambda p, a, b: p.add_(a @ b, alpha=-0.25),
    "subtracted": lambda p, a, b: p.sub_(a @ b, alpha=0.25),
    "a new tensor": lambda p, a, b: torch.add(p, a @ b, alpha=3),
    "the other operand": lambda p, a, b: torch.add(a @ b, p, alpha=3),
    "a transpose": lambda p, a, b: p.add_((a @ b).T, alpha=-0.25),
    "two products": lambda p, a, b: torch.add(a @ b, b @ a, alpha=-0.5),
    "a stack": lambda p, a, b: torch.add(p[None], torch.bmm(a[None], b[None]), alpha=3),
    "addmm": lambda p, a, b: torch.addmm(p, a, b, beta=0.5, alpha=3),
    "a vector": lambda p, a, b: torch.add(p[0], a @ b[0], alpha=3),
}


@pytest.mark.parametrize("name", SUMS_OF_PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_factor_of_a_product_stays(name: str, dtype: torch.dtype) -> None:
    function = SUMS_OF_PRODUCTS[name]
    given = [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(3)]
    expected = function(*(each.double() for each in given))
    found = torch.compile(function, backend=CollageBackend(strict=False))(*given)
    # At most 8 roundings (four products, their sum, the factor, the last sum), to half an eps each, of terms
    # that are within twice the result here. Without its factor a result is off by a quarter of 1 and more.
    most = 8 * torch.finfo(dtype).eps * max(1.0, float(expected.abs().max()))
    assert float((found.double() - expected).abs().max()) <= most


class ByProduct(Descent):
    """Descent along a product, as of optimizers with a projection or a preconditioner."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad @ p.grad.T, alpha=-self.param_groups[0]["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_by_a_product_has_its_learning_rate(dtype: torch.dtype) -> None:
    params = parameters(dtype, shapes=[(4, 4)])
    _, errors = errors_beside_float64(ByProduct, lambda optimizer: install(optimizer).step, params, steps=3)
    assert max(errors) <= 0.02


def test_a_graph_that_does_nothing() -> None:
    backend = CollageBackend()

    @torch.no_grad()
    def nothing(p: torch.Tensor) -> torch.Tensor:
        p.add_(0)
        return p.view(-1)

    @torch.no_grad()
    def less(p: torch.Tensor) -> torch.Tensor:
        return p

    (p,) = parameters(shapes=[(2, 2)])
    before = p.detach().clone()
    assert torch.equal(torch.compile(nothing, backend=backend)(p), before.view(-1))
    assert torch.compile(less, backend=backend)(p) is p
    assert torch.equal(p, before)
    assert all(not term.any() for term in error_terms(p))


# The package. ---------------------------------------------------------------------------------------------


#: Modules that an import of torch leaves out, and that the first optimizer that is installed needs.
HEAVY = ("sympy", "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "collage_fx.backend")


def _after(program: str) -> Any:
    """Run a program in a new process; return what it prints as JSON."""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_an_import_of_the_package_imports_no_compiler() -> None:
    heavy = f"[name for name in {HEAVY} if name in sys.modules]"
    of_torch, of_ours, of_a_name = _after(
        f"import json, sys, torch\nfound = [{heavy}]\n"
        f"import collage_fx\nfound.append({heavy})\n"
        f"collage_fx.install\nfound.append({heavy})\nprint(json.dumps(found))"
    )
    assert of_ours == of_torch
    assert of_a_name == list(HEAVY)


def test_using_the_package_compiles_nothing_and_starts_no_cuda() -> None:
    program = (
        "import json, torch\nfrom collage_fx import install\n"
        "print(json.dumps([torch.cuda.is_initialized(), torch._dynamo.utils.counters['stats']]))"
    )
    assert _after(program) == [False, {}]


def test_installing_the_hooks_again_leaves_one_layer() -> None:
    optimizer = Descent(parameters())
    for _ in range(3):
        collage_fx.torch_compat.patch_steps.install_averages()
        watch.start_watch()
    params = optimizer.param_groups[0]["params"]
    run_steps(compiled(optimizer), params, [0])
    keys = [f"collage_fx.parameter.exact.{name}" for name in ("rest", "count", "fingerprint")]
    assert list(optimizer.state_dict()["state"][0]) == keys


def test_options_are_listed_alike() -> None:
    """As arguments of the backend, as keywords for type checkers, and as they are kept: names and types."""
    arguments = {
        name: parameter.annotation for name, parameter in inspect.signature(CollageBackend).parameters.items()
    }
    assert {name: each.__forward_arg__ for name, each in GivenOptions.__annotations__.items()} == arguments
    assert list(arguments) == [each.name for each in fields(OptionFields)]


@pytest.mark.parametrize(
    "taking", [CollageBackend, backend_for, install, explain, audit, offload, step_in_backward]
)
def test_help_shows_the_options(taking: Callable[..., Any]) -> None:
    shown = inspect.signature(taking).parameters
    for each in fields(OptionFields):
        assert (shown[each.name].default, shown[each.name].annotation) == (each.default, each.type)
    assert not any(each.kind is each.VAR_KEYWORD for each in shown.values())


def test_the_page_of_options_lists_them() -> None:
    page = (Path(__file__).parents[1] / "docs" / "options.md").read_text(encoding="utf-8")
    options = CollageBackend().options
    for each in fields(OptionFields):
        value = getattr(options, each.name)
        default = json.dumps(value) if isinstance(value, str) else str(value)
        shown = "the pipeline" if each.name == "passes" else f"`{default}`"
        assert f"| `{each.name}` | {shown} | {each.metadata['summary'].replace('``', '`')} |\n" in page
