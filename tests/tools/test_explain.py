from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx import CollageBackend, error_terms, explain, install
from collage_fx.errors import InvalidOptionError, UnsupportedTensorError
from collage_fx.torch_compat import FakeTensorMode
from collage_tools.gpu_code import gpu_code
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


def rmsprop(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters(), alpha=0.999, **options)


def snapshot(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything of an optimizer that a step could change, as tensors."""
    found = everything(optimizer)
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        if p.grad is not None:
            found[f"grad {i}"] = p.grad.clone()
    return found


def settings(optimizer: torch.optim.Optimizer) -> Any:
    """The rest of it."""
    state = optimizer.state_dict()
    return copy.deepcopy(
        (state["param_groups"], {k: sorted(v) for k, v in state["state"].items()}, optimizer.defaults)
    )


@pytest.mark.parametrize("when", ["before the first step", "after compiled steps", "after eager steps"])
def test_explaining_touches_nothing(when: str) -> None:
    optimizer = rmsprop(lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # wraps the instance's step
    params = optimizer.param_groups[0]["params"]
    if when != "before the first step":
        run_steps(compiled(optimizer) if "compiled" in when else optimizer.step, params, range(2))
        scheduler.step()
    tensors, rest, attributes = snapshot(optimizer), settings(optimizer), dict(vars(optimizer))
    report = explain(optimizer)
    assert len(report.tensors) == 4
    assert differences(tensors, snapshot(optimizer)) == []
    assert settings(optimizer) == rest
    assert all(vars(optimizer)[name] is value for name, value in attributes.items())
    if when == "before the first step":
        assert all(p.grad is None and error_terms(p) == () for p in params)
        assert not optimizer.state


def test_it_says_what_the_compiled_steps_report_says() -> None:
    optimizer = rmsprop()
    explained = explain(optimizer)
    backend = CollageBackend()
    run_steps(torch.compile(optimizer.step, backend=backend), optimizer.param_groups[0]["params"], [0])
    assert explained.tensors == backend.report().tensors
    assert [graph.after.code for graph in explained.graphs] == [
        graph.after.code for graph in backend.report().graphs
    ]
    assert str(explained) == str(backend.report())


def test_names_are_the_users() -> None:
    model = torch.nn.Linear(3, 2).bfloat16()
    by_position = explain(torch.optim.SGD(model.parameters()))
    assert [row.name for row in by_position.tensors] == [
        "param_groups[0].params[0]",
        "param_groups[0].params[1]",
    ]
    by_name = explain(torch.optim.RMSprop(model.named_parameters()))
    assert [row.name for row in by_name.tensors] == ["weight", "weight.square_avg", "bias", "bias.square_avg"]


def test_a_scheduled_number_is_called_by_its_key() -> None:
    """In recurrences, where torch's name for an input is that of the whole way to it."""
    groups = [{"params": [param]} for param in parameters(shapes=((3,), (5, 2)))]
    optimizer = torch.optim.SGD(groups, lr=0.1, foreach=False)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    first, second = (str(row.expression) for row in explain(optimizer).tensors)
    assert (first, second) == ("-g*lr + p", "-g*lr_1 + p")


def test_options_are_the_backends() -> None:
    optimizer = rmsprop()
    assert [row.compensated for row in explain(optimizer, strategy="light").tensors] == [True, False] * 2
    assert {row.error_format for row in explain(optimizer, error_format="fp32").tensors} == {"fp32"}
    assert not any(row.compensated for row in explain(optimizer, strategy="none").tensors)
    with pytest.raises(ValueError, match="'light'"):
        explain(optimizer, strategy="heavy")  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [explain, gpu_code])
def test_an_option_that_does_not_exist_is_refused(asked: Callable[..., Any]) -> None:
    with pytest.raises(InvalidOptionError, match="unknown option 'stratgy'; did you mean strategy"):
        asked(torch.optim.SGD(parameters()), stratgy="plus")


def test_it_can_be_called_more_often_than_dynamo_recompiles() -> None:
    optimizer = Descent(parameters())
    reports = [explain(optimizer) for _ in range(12)]
    assert all(len(report.tensors) == 2 for report in reports)
    sgd = torch.optim.SGD(params := parameters(), lr=0.1)
    assert [len(explain(sgd).tensors) for _ in range(12)] == [2] * 12
    run_steps(compiled(sgd), params, [0])  # and uses up nothing of what the real step may need
    assert all(error_terms(p) for p in params)


def test_state_that_the_first_step_makes_is_in_the_report() -> None:
    optimizer = LateMomentum(parameters())
    report = explain(optimizer)
    assert not optimizer.state
    names = [row.name for row in report.tensors]
    assert "param_groups[0].params[0].moments.second.0" in names
    assert len(names) == 4


def test_state_that_only_a_second_step_reads_is_in_the_report() -> None:
    """torch.optim.SGD's momentum is the gradient at first."""
    rows = explain(torch.optim.SGD(parameters(), lr=0.1, momentum=0.999)).tensors
    assert [row.symbol for row in rows] == ["p", "momentum_buffer"] * 2
    assert all(row.compensated for row in rows)


def test_hooks_and_attributes_of_the_instance() -> None:
    """Hooks aren't called; what can't be copied is shared."""
    optimizer = LateMomentum(parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    vars(optimizer)["lock"] = threading.Lock()
    assert len(explain(optimizer).tensors) == 4
    assert calls == []


def live_parameters() -> list[torch.nn.Parameter]:
    return [each for each in gc.get_objects() if type(each) is torch.nn.Parameter]


def test_nothing_is_kept_alive() -> None:
    gc.collect()
    others = live_parameters()  # of other tests: held, so that none of them goes meanwhile
    optimizer = rmsprop()
    assert len(live_parameters()) == len(others) + 2
    report = explain(optimizer)
    gc.collect()
    assert len(live_parameters()) == len(others) + 2  # the copy has gone
    del optimizer
    gc.collect()
    assert len(live_parameters()) == len(others)
    assert "square_avg" in str(report)


def test_what_compiling_would_refuse_is_refused() -> None:
    p = torch.nn.Parameter(torch.randn(4, 2).bfloat16())
    p.grad = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.ones(1, 2), (4, 2), dtype=torch.bfloat16, check_invariants=True
    )
    with pytest.raises(UnsupportedTensorError, match="sparse"):
        explain(torch.optim.SGD([p]))


def test_an_optimizer_with_nothing_to_compensate() -> None:
    report = explain(torch.optim.SGD(parameters(torch.float32)))
    assert report.tensors == []
    assert "updates no bfloat16 or float16 tensor" in str(report)


def test_gradients_that_are_there_are_not_read() -> None:
    optimizer = Descent(parameters())
    set_gradients(params := optimizer.param_groups[0]["params"])
    params[0].grad.fill_(float("nan"))
    tensors = snapshot(optimizer)
    explain(optimizer)
    assert differences(tensors, snapshot(optimizer)) == []


def test_parameters_without_memory_are_explained_as_real_ones() -> None:
    """Also in a process that has taken steps, whose later garbage collections found freed memory."""
    stepped, real = parameters(shapes=[(64, 64)] * 2)
    optimizer = install(torch.optim.AdamW([stepped]))
    set_gradients([stepped], seed=0)
    optimizer.step()
    other = torch.optim.AdamW([real])
    wanted = [explain(other, bytes_per_parameter=limit).bytes_per_parameter() for limit in (10.1, 5.2)]
    with FakeTensorMode():
        fake = torch.optim.AdamW([torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))])
        for _ in range(2):
            found = [explain(fake, bytes_per_parameter=limit).bytes_per_parameter() for limit in (10.1, 5.2)]
            gc.collect()
    assert found == wanted
