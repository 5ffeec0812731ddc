"""``install()``: the compiled step is the optimizer's own, whoever calls it, and its copies' too."""

from __future__ import annotations

import copy
import functools
import io
import logging
import pickle
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import collage_fx
from collage_fx import CollageBackend, CollageError, backend_of, error_terms, full_value, install, uninstall
from collage_fx.errors import (
    ChangedTensorError,
    InvalidOptionError,
    UnsupportedOptimizerError,
    UnsupportedTensorError,
)
from collage_fx.graph import DEVICES
from collage_fx.installation import kept_backend
from tests.support.substitutes import meta_device_as
from tests.support.training import (
    Descent,
    compiled,
    differences,
    everything,
    parameters,
    run_steps,
    set_gradients,
)
from tests.support.warned import warned


def adamw(**options: Any) -> Optimizer:
    return AdamW(parameters(), **{"lr": 1e-4, "weight_decay": 0.1, **options})


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def are_compensated(optimizer: Optimizer) -> bool:
    return all(error_terms(p) for p in params_of(optimizer))


def differ(one: Optimizer, other: Optimizer) -> list[str]:
    return differences(everything(one), everything(other))


@pytest.fixture
def reference() -> Optimizer:
    """Three steps of ``torch.compile(optimizer.step)``."""
    optimizer = adamw()
    run_steps(compiled(optimizer), params_of(optimizer), range(3))
    return optimizer


def test_the_bits_are_those_of_the_compiled_step(reference: Optimizer) -> None:
    optimizer = adamw()
    assert install(optimizer) is optimizer
    run_steps(optimizer.step, params_of(optimizer), range(3))
    assert not differ(optimizer, reference)
    assert type(optimizer) is AdamW
    assert [each.subject for each in backend_of(optimizer).report().graphs] == ["AdamW"]


def test_options_are_those_of_the_backend() -> None:
    optimizer = install(adamw(), strategy="light")
    assert backend_of(optimizer).options.strategy == "light"
    shared = CollageBackend()
    assert backend_of(install(adamw(), backend=shared)) is shared
    with pytest.raises(CollageError, match="a backend, and options"):
        install(optimizer, backend=shared, strategy="plus")
    with pytest.raises(CollageError, match="strateggy'; did you mean strategy"):
        install(optimizer, strateggy="plus")  # type: ignore[call-arg]
    assert backend_of(optimizer).options.strategy == "light"


def test_what_it_does_is_said_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "collage_fx"):
        install(adamw())
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage().startswith(
        "AdamW: its first step compiles it with CollageBackend(strategy='plus'"
    )
    assert record.getMessage().endswith("2 of 2 parameters are bfloat16 or float16")


@pytest.mark.parametrize("is_installed", [True, False], ids=["install", "torch.compile"])
def test_float32_parameters_are_said_to_have_no_error_terms(
    caplog: pytest.LogCaptureFixture, is_installed: bool
) -> None:
    """Before the first step, and afterwards the report does not wait for a step."""
    params = parameters(torch.float32)
    optimizer, backend = AdamW(params), CollageBackend()
    with caplog.at_level(logging.WARNING, "collage_fx"):
        if is_installed:
            install(optimizer, backend=backend)
            step: Callable[..., Any] = optimizer.step
        else:
            step = torch.compile(optimizer.step, backend=backend)
    (record,) = caplog.records
    assert record.getMessage() == (
        "AdamW: no error terms: its parameters are float32 (autocast keeps them so). For pure bf16, call "
        "model.to(torch.bfloat16)"
    )
    assert "not compiled yet" not in str(backend.report())
    run_steps(step, params, [0])
    assert str(backend.report()).startswith("AdamW: updates of float32 tensors, without error terms")
    assert "not compiled yet" not in str(backend.report())


@pytest.mark.parametrize("eps", [(None, 1e-3), (1e-7, 1e-3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_epsilon_of_16_bits_is_told(
    caplog: pytest.LogCaptureFixture, dtype: torch.dtype, eps: tuple[float | None, float]
) -> None:
    """Adafactor of torch normalizes no gradient below it, as it does with float32 weights. Groups count."""
    install(torch.optim.Adafactor([{"params": parameters(dtype), "eps": eps}], eps=(1e-30, 1e-3)))
    told = [each.getMessage() for each in caplog.records if "eps[0]" in each.getMessage()]
    expected = (
        "Adafactor: eps[0]=None is 0.0078, the machine epsilon of bfloat16: smaller gradients are not "
        "normalized. To train as with float32 weights, give eps=(1.19e-07, 0.001)"
    )
    assert told == ([expected] if dtype is torch.bfloat16 and eps[0] is None else [])


def test_no_warning_where_state_of_float32_parameters_is_packed(caplog: pytest.LogCaptureFixture) -> None:
    install(AdamW(parameters(torch.float32)), state="block8")
    assert caplog.records == []


def test_after_a_change_of_dtype_it_is_enough_to_install_again() -> None:
    params = parameters()
    optimizer = install(AdamW(params))
    run_steps(optimizer.step, params, [0])
    for p in params:
        p.data = p.data.float()
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ChangedTensorError, match=r"call collage_fx\.install\(optimizer\) again"):
        optimizer.step()
    assert all(map(torch.equal, before, params))
    install(optimizer)
    optimizer.step()
    assert not any(map(torch.equal, before, params))


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (torch.nn.Linear(2, 2), "pass the optimizer: install(optimizer)"),
        (
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step,
            "pass the optimizer itself, not its step",
        ),
    ],
)
def test_another_object_is_refused_with_a_way_out(wrong: Any, remedy: str) -> None:
    with pytest.raises(UnsupportedOptimizerError, match=re.escape(remedy)):
        install(wrong)


def test_it_can_be_installed_again_with_other_options() -> None:
    optimizer = install(adamw(), strategy="light")
    run_steps(optimizer.step, params_of(optimizer), [0])
    assert backend_of(install(optimizer)).options.strategy == "light", "what was asked for stays"
    run_steps(install(optimizer, strategy="plus").step, params_of(optimizer), [1])
    names = {name for name in everything(optimizer) if ".error." in name}
    assert names == {f"0.{i}.{slot}.error.0" for i in range(2) for slot in ("parameter", "exp_avg_sq")}
    assert backend_of(optimizer).options.strategy == "plus"


def test_a_strategy_of_fewer_error_terms_drops_those_of_state(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = install(adamw(), strategy="plus")
    run_steps(optimizer.step, params_of(optimizer), [0])
    before = {name: x for name, x in everything(optimizer).items() if ".error." in name}
    with caplog.at_level(logging.INFO, logger="collage_fx"):
        for strategy in ("plus", "full", "none"):
            install(optimizer, strategy=strategy)
        assert {name for name in everything(optimizer) if ".error." in name} == before.keys()
        assert "dropped" not in caplog.text
        install(optimizer, strategy="full")
        install(optimizer, strategy="light")
    assert {name for name in everything(optimizer) if ".error." in name} == {
        f"0.{i}.parameter.error.0" for i in range(2)
    }
    assert (
        "AdamW: strategy='light' in place of 'full': the error terms of 2 state tensors are dropped, "
        "param_groups[0].params[0].exp_avg_sq first"
    ) in caplog.text


def test_none_is_asked_for_like_any_other_value() -> None:
    optimizer = install(adamw(), state="block8")
    with pytest.raises(InvalidOptionError, match=r"state=None is asked .* installed with state='block8'"):
        kept_backend(optimizer, {"state": None})
    assert kept_backend(optimizer, {"backend": None}) is backend_of(optimizer)


def test_after_uninstall_it_is_plain_torch_from_hi(reference: Optimizer) -> None:
    plain = adamw()
    plain.load_state_dict(copy.deepcopy(without_error_terms(reference)))
    for ours, theirs in zip(params_of(plain), params_of(reference), strict=True):
        ours.data.copy_(theirs)
    optimizer = install(adamw())
    run_steps(optimizer.step, params_of(optimizer), range(3))
    assert uninstall(optimizer) is optimizer
    for each in (optimizer, plain):
        run_steps(each.step, params_of(each), range(3, 6))
    assert not differ(optimizer, plain)
    assert "step" not in vars(optimizer)
    with pytest.raises(CollageError, match="is not installed"):
        backend_of(optimizer)


def without_error_terms(optimizer: Optimizer) -> dict[str, Any]:
    saved = optimizer.state_dict()
    for entries in saved["state"].values():
        for key in [key for key in entries if key.startswith("collage_fx.")]:
            del entries[key]
    return saved


def test_a_checkpoint_that_is_loaded_after_uninstall_is_plain_torchs(reference: Optimizer) -> None:
    optimizer = install(adamw())
    run_steps(optimizer.step, params_of(optimizer), range(3))
    saved = copy.deepcopy(without_error_terms(optimizer))
    uninstall(optimizer)
    set_gradients(params_of(optimizer), 3)
    assert warned(lambda: optimizer.load_state_dict(saved), optimizer.step, optimizer.step) == []
    held = optimizer.state_dict()["state"]
    assert {key for entries in held.values() for key in entries} == {"step", "exp_avg", "exp_avg_sq"}
    assert not any(map(error_terms, params_of(optimizer)))


def test_uninstalling_ends_recorded_steps() -> None:
    class Branching(Descent):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in params_of(self):
                if p.grad is not None and p.grad.abs().sum() > 0:
                    p.add_(p.grad, alpha=-self.defaults["lr"])

    optimizer, plain = install(Branching(parameters())), Branching(parameters())
    run_steps(optimizer.step, params_of(optimizer), range(2))
    assert are_compensated(optimizer)
    uninstall(optimizer)
    for ours, theirs in zip(params_of(plain), params_of(optimizer), strict=True):
        ours.data.copy_(theirs)
    for each in (optimizer, plain):
        run_steps(each.step, params_of(each), range(2, 4))
    assert not differ(optimizer, plain)


def test_a_first_step_says_nothing_that_is_not_the_users_business() -> None:
    """In a process of its own: torch says such things once."""
    program = """
        import torch, collage_fx
        p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        optimizer = collage_fx.install(torch.optim.AdamW([p]))
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1)
        optimizer.step()
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    of_torch = "No CUDA runtime is found"  # where there is a compiler for it, and no device
    said = [line for line in done.stderr.splitlines() if of_torch not in line]
    waits = "AdamW: compiling its step"  # the only line on why nothing happens, where there is no terminal
    assert (done.stdout, [line.partition(": about")[0] for line in said]) == ("", [waits])


# Schedulers. ------------------------------------------------------------------------------------------------


def warm_up(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda i: min(i, 3) / 3)


@pytest.mark.parametrize("order", ["before", "after", "both"])
def test_a_scheduler_is_made_before_or_after(order: str) -> None:
    def made(into: Callable[[Optimizer], Any], step: Callable[[Optimizer], Any]) -> Optimizer:
        optimizer = adamw()
        schedulers = [] if order == "after" else [warm_up(optimizer)]
        into(optimizer)
        schedulers += [] if order == "before" else [warm_up(optimizer)]
        run = step(optimizer)
        for seed in range(5):
            run_steps(run, params_of(optimizer), [seed])
            for scheduler in schedulers:
                scheduler.step()
        return optimizer

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        installed = made(install, lambda optimizer: optimizer.step)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.. before", category=UserWarning)
        reference = made(lambda optimizer: None, compiled)
    assert not differ(installed, reference)
    assert are_compensated(installed)


def test_a_schedulers_function_outlives_the_step() -> None:
    optimizer = install(adamw())
    scheduler = warm_up(optimizer)
    uninstall(optimizer)
    run_steps(optimizer.step, params_of(optimizer), [0])
    scheduler.step()
    assert not any(map(error_terms, params_of(optimizer)))
    run_steps(install(optimizer).step, params_of(optimizer), [1])
    assert are_compensated(optimizer)


# Closures and hooks. ----------------------------------------------------------------------------------------


class Loss:
    """A closure that is an object; it fills the gradients."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.params = params_of(optimizer)
        self.seed = 0

    def __call__(self) -> Tensor:
        assert torch.is_grad_enabled()
        set_gradients(self.params, self.seed)
        self.seed += 1
        return torch.tensor(float(self.seed))


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda loss: loss,
        lambda loss: functools.partial(loss),
        lambda loss: lambda: loss(),
        torch.compiler.disable,
    ],
    ids=["object", "partial", "function", "disabled"],
)
def test_any_closure_is_called_once_before_the_step(
    wrapped: Callable[[Any], Callable[[], Tensor]], reference: Optimizer
) -> None:
    optimizer = install(adamw())
    closure = wrapped(Loss(optimizer))
    with torch.no_grad():
        assert [float(optimizer.step(closure)) for _ in range(2)] == [1, 2]  # type: ignore[arg-type]
    assert float(optimizer.step(closure=closure)) == 3  # type: ignore[arg-type]
    assert not differ(optimizer, reference)


def test_a_closure_that_is_required_is_the_steps_own() -> None:
    class Twice(Descent):
        @torch.no_grad()
        def step(self, closure: Any) -> float:  # type: ignore[override]
            losses = []
            for _ in range(2):
                with torch.enable_grad():
                    losses.append(float(closure()))
                for p in params_of(self):
                    assert p.grad is not None
                    p.add_(p.grad, alpha=-self.defaults["lr"])
            return sum(losses)

    optimizer = install(Twice(parameters()))
    assert optimizer.step(Loss(optimizer)) == 3
    assert are_compensated(optimizer)


def test_hooks_run_eagerly_around_the_step(reference: Optimizer) -> None:
    optimizer, seen = adamw(), list[Any]()

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        seen.append(("before", full_value(params_of(optimizer)[0]).sum(), args[1:], kwargs))

    optimizer.register_step_pre_hook(before)
    install(optimizer)
    handle = optimizer.register_step_post_hook(lambda optimizer, args, kwargs: seen.append(("after",)))
    closure = Loss(optimizer)
    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]
    handle.remove()
    optimizer.step(closure=closure)  # type: ignore[arg-type]
    assert [each[0] for each in seen] == ["before", "after", "before", "after", "before"]
    assert seen[0][2:] == ((closure,), {})
    assert seen[-1][2:] == ((), {"closure": closure})
    assert len({float(each[1]) for each in seen if len(each) > 1}) == 3
    assert not differ(optimizer, reference)
    assert backend_of(optimizer).report().graphs[0].route


def test_a_hook_that_a_step_registers_is_the_optimizers() -> None:
    class Registers(Descent):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.seen: list[Optimizer] = []

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-(2.0**-12))
                if float(p.grad.abs().max()) > 0 and not self.seen:
                    self.register_step_post_hook(lambda optimizer, *_: self.seen.append(optimizer))
                    self.seen.append(self)

    one, other = install(Registers(parameters())), install(Descent(parameters()))
    for _ in range(3):
        run_steps(one.step, params_of(one), range(1))
        run_steps(other.step, params_of(other), range(1))
    assert one.seen == [one] * 4
    assert are_compensated(one)


def test_an_optimizer_that_has_no_hooks_is_installed() -> None:
    """As one that wraps another and does not call ``Optimizer.__init__``."""

    class Around(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.inner, self.param_groups = inner, inner.param_groups
            self.state, self.defaults = inner.state, inner.defaults

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step(closure)

    optimizer = install(Around(Descent(parameters())))
    run_steps(optimizer.step, params_of(optimizer), range(2))
    assert are_compensated(optimizer)
    assert "_optimizer_step_pre_hooks" not in vars(optimizer)


def test_a_hook_that_is_the_first_of_an_optimizer_without_hooks_stays() -> None:
    """Registered by its step, as those of an optimizer that calls ``Optimizer.__init__`` stay."""
    calls: list[int] = []

    class Around(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.inner, self.param_groups = inner, inner.param_groups
            self.state, self.defaults = inner.state, inner.defaults

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if not calls:
                self.register_step_post_hook(lambda *_: calls.append(1))
                calls.append(0)
            self.inner.step(closure)

    optimizer = install(Around(Descent(parameters())))
    run_steps(optimizer.step, params_of(optimizer), range(3))
    assert calls[-2:] == [1, 1]
    assert are_compensated(optimizer)


def test_a_hook_may_replace_the_arguments(reference: Optimizer) -> None:
    optimizer = install(adamw())
    closure = Loss(optimizer)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, closure), {}))
    for _ in range(3):
        optimizer.step()
    assert not differ(optimizer, reference)


# Copies, pickles, checkpoints. ------------------------------------------------------------------------------


def pickled(optimizer: Optimizer) -> Optimizer:
    loaded = pickle.loads(pickle.dumps(optimizer))
    assert isinstance(loaded, Optimizer)
    return loaded


def saved_whole(optimizer: Optimizer) -> Optimizer:
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, Optimizer)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved_whole])
@pytest.mark.parametrize("steps", [0, 2])
def test_copies_are_installed(
    copied: Callable[[Optimizer], Optimizer], steps: int, reference: Optimizer
) -> None:
    optimizer = install(adamw(), metrics=False)
    run_steps(optimizer.step, params_of(optimizer), range(steps))
    other = copied(optimizer)
    assert backend_of(other).options == backend_of(optimizer).options
    assert (backend_of(other) is backend_of(optimizer)) == (copied is copy.deepcopy)
    for each in (optimizer, other):
        run_steps(each.step, params_of(each), range(steps, 3))
        assert not differ(each, reference)


def test_a_copy_of_what_is_not_installed_is_not() -> None:
    assert "step" not in vars(copy.deepcopy(adamw()))
    assert "step" not in vars(copy.deepcopy(uninstall(install(adamw()))))


def test_a_state_dict_goes_on_in_another_optimizer(reference: Optimizer) -> None:
    optimizer = install(adamw())
    run_steps(optimizer.step, params_of(optimizer), range(2))
    other = install(adamw())
    for ours, theirs in zip(params_of(other), params_of(optimizer), strict=True):
        ours.data.copy_(theirs)
    other.load_state_dict(optimizer.state_dict())
    run_steps(other.step, params_of(other), [2])
    assert not differ(other, reference)


def test_what_accelerate_does_to_a_fresh_optimizer_brings_no_warning() -> None:
    optimizer = install(adamw())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(optimizer.state_dict())
        run_steps(optimizer.step, params_of(optimizer), [0])


# Classes. ---------------------------------------------------------------------------------------------------


@install
class Decorated(AdamW):
    """With its own default."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, lr=lr, weight_decay=0.1)


def test_a_decorated_class_makes_installed_optimizers(reference: Optimizer) -> None:
    optimizer = Decorated(parameters())
    run_steps(optimizer.step, params_of(optimizer), range(2))
    other = pickled(optimizer)
    assert type(other) is Decorated
    run_steps(other.step, params_of(other), [2])
    assert not differ(other, reference)


def test_a_class_is_installed_with_options_and_uninstalled() -> None:
    class Own(AdamW):
        pass

    class Derived(Own):
        pass

    backend = CollageBackend(strategy="light")
    assert install(Own, backend=backend) is Own
    assert backend_of(Own(parameters())) is backend
    assert backend_of(Derived(parameters())) is backend
    assert backend_of(install(Derived, strategy="full")(parameters())).options.strategy == "full"
    uninstall(Derived)
    assert backend_of(Derived(parameters())) is backend
    uninstall(Own)
    assert "step" not in vars(Own(parameters()))
    assert "step" not in vars(Derived(parameters()))
    assert "step" not in vars(AdamW(parameters()))


def test_torchs_own_classes_are_refused() -> None:
    with pytest.raises(CollageError, match="AdamW is not an optimizer class of your own"):
        install(AdamW)
    with pytest.raises(CollageError, match="object is not a torch"):
        install(object())


# Others' steps and wrappers. --------------------------------------------------------------------------------


def test_a_step_around_the_installed_one_is_met(reference: Optimizer) -> None:
    optimizer = install(adamw())
    own = optimizer.step
    optimizer.step = lambda closure=None: own()  # type: ignore[method-assign, assignment]
    run_steps(optimizer.step, params_of(optimizer), range(3))
    assert not differ(optimizer, reference)
    uninstall(optimizer)
    run_steps(optimizer.step, params_of(optimizer), [3])
    assert not any(map(error_terms, params_of(optimizer)))


def test_the_class_step_of_an_installed_optimizer_is_recorded() -> None:
    """A wrapper may have taken it before; it goes on with the error terms."""
    optimizer, other = adamw(), install(adamw())
    start = [full_value(p) for p in params_of(other)]
    held = optimizer.step
    install(optimizer)
    run_steps(optimizer.step, params_of(optimizer), [0])
    run_steps(held, params_of(optimizer), [1, 2])
    run_steps(optimizer.step, params_of(optimizer), [3])
    run_steps(other.step, params_of(other), range(4))
    for p, q, begun in zip(params_of(optimizer), params_of(other), start, strict=True):
        assert (full_value(p) - full_value(q)).norm() < 0.01 * (full_value(q) - begun).norm()


def test_a_function_compiled_around_it_calls_it(reference: Optimizer) -> None:
    optimizer = install(adamw())

    def train(scale: Tensor) -> Tensor:
        doubled = scale * 2
        optimizer.step()
        return doubled + 1

    step = torch.compile(train, backend="eager")
    run_steps(lambda: step(torch.ones(2)), params_of(optimizer), range(3))
    assert not differ(optimizer, reference)


@pytest.mark.parametrize("fused", [None, True])
def test_a_gradient_scaler_steps_it(fused: bool | None) -> None:
    """Also where it leaves its numbers to a fused optimizer; steps with infinite gradients are left out."""

    def trained(step_of: Callable[[Optimizer], Any]) -> Optimizer:
        optimizer = AdamW(parameters(), lr=1e-4, fused=fused)
        step_of(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for seed in range(4):
            set_gradients(params_of(optimizer), seed)
            for p in params_of(optimizer):
                assert p.grad is not None
                p.grad.mul_(scaler.scale(torch.ones(())) if seed != 1 else torch.inf)
            scaler.step(optimizer)
            scaler.update()
        return optimizer

    def set_compiled(optimizer: Optimizer) -> None:
        optimizer.step = compiled(optimizer)  # type: ignore[method-assign, assignment]

    installed = trained(install)
    assert are_compensated(installed)
    assert not differ(installed, trained(set_compiled))


@pytest.fixture
def one_process(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_the_inner_optimizer_of_zero_is_installed(reference: Optimizer) -> None:
    params = parameters()
    zero = ZeroRedundancyOptimizer(params, AdamW, lr=1e-4, weight_decay=0.1)
    install(zero)
    run_steps(zero.step, params, range(3))
    assert not differ(zero.optim, reference)
    assert backend_of(zero) is backend_of(zero.optim)
    uninstall(zero)
    run_steps(zero.step, params, [3])
    assert not any(map(error_terms, params))


def test_it_is_part_of_the_package() -> None:
    assert {"install", "uninstall", "backend_of"} <= set(collage_fx.__all__)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_a_device_that_is_known_not_to_work_is_refused_at_once(kind: str) -> None:
    """Not at the first step, after minutes of loading a model: with what the device lacks."""
    parameter = torch.nn.Parameter(torch.empty(4, dtype=torch.bfloat16, device="meta"))
    optimizer = torch.optim.SGD([("head.weight", parameter)])
    method = optimizer.step
    with meta_device_as(kind), pytest.raises(UnsupportedTensorError) as refusal:
        install(optimizer)
    assert DEVICES[kind].refused in refusal.value.met
    assert refusal.value.where == "head.weight"
    assert optimizer.step == method
    install(optimizer)  # parameters that are on the meta device may be moved before the first step


def test_float32_parameters_may_be_anywhere() -> None:
    parameter = torch.nn.Parameter(torch.empty(4, device="meta"))
    with meta_device_as("mps"):
        install(torch.optim.SGD([parameter]))
