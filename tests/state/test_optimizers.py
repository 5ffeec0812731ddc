from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from collage_fx.graph.program import Role
from collage_fx.state.optimizers import (
    has_state,
    known_tensors,
    optimizers_among,
    other_state_bytes,
    parameter_names,
    shared_tensors,
    state_tensors,
)
from tests.support.training import Descent, parameters, set_gradients


def test_parameters_are_called_by_position_or_by_the_modules_names() -> None:
    model = torch.nn.Linear(2, 3)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    assert [name for name, _ in parameter_names(Descent(model.parameters()))] == [
        "param_groups[0].params[0]",
        "param_groups[0].params[1]",
    ]
    assert [name for name, _ in parameter_names(Descent(groups))] == [
        "param_groups[0].params[0]",
        "param_groups[1].params[0]",
    ]
    assert [name for name, _ in parameter_names(Descent(model.named_parameters()))] == ["weight", "bias"]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [(None, False), ({}, False), ([], False), ((), False), ([1], True), ({"step": 0}, True)],
)
def test_an_empty_entry_is_no_state(entry: Any, expected: bool) -> None:
    optimizer = Descent(params := parameters())
    optimizer.state[params[0]] = entry
    assert has_state(optimizer, params[0]) is expected
    assert not has_state(optimizer, params[1])


def test_state_that_no_report_has_a_row_for_is_counted() -> None:
    """State in other dtypes and of several tensors, but for numbers and what error terms are for."""
    optimizer = Descent(params := parameters(shapes=[(4, 6)]))
    low = torch.zeros(4, 6).bfloat16()
    state: dict[str, Any] = optimizer.state[params[0]]
    state |= {"moment": low, "step": torch.tensor(3.0)}
    assert other_state_bytes(optimizer) == 0
    state["wide"] = torch.zeros(4, 6)
    assert other_state_bytes(optimizer) == 4 * 24
    state["in two"] = TwoTensor(low, low.clone())
    assert other_state_bytes(optimizer) == 4 * 24 + 2 * 2 * 24


def test_state_tensors_are_found_inside_containers() -> None:
    a, b, c = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    found = list(state_tensors({"a": a, "nested": {"list": [1, b], "tuple": (c,)}, "step": 3}))
    assert [name for name, _ in found] == ["a", "nested.list.1", "nested.tuple.0"]
    assert [tensor for _, tensor in found] == [a, b, c]


def test_parameters_that_are_keys_of_state_are_numbered() -> None:
    """Some optimizers keep their state in a group, by parameter."""
    p, q = parameters()
    state = {p: {"m": torch.zeros(1), "v": torch.zeros(1)}, q: {"m": torch.zeros(1)}}
    names = [name for name, _ in shared_tensors([{"params": [p, q], "state": state}], {})]
    assert names == ["param_groups[0].state.0.m", "param_groups[0].state.0.v", "param_groups[0].state.1.m"]


def test_optimizers_are_found_in_variables_arguments_and_wrappers() -> None:
    first, second = Descent(parameters()), Descent(parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(second)
    assert optimizers_among({"self": first, "n": 3}) == {"self": first}
    assert optimizers_among({"args": (first, 2), "kwargs": {}}) == {"args": first}
    assert optimizers_among({"a": first, "scheduler": scheduler, "again": first}) == {
        "a": first,
        "scheduler": second,
    }
    assert list(optimizers_among({"args": (first, second)}).values()) == [first, second]


def test_known_tensors_are_in_the_optimizers_order_with_their_roles() -> None:
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=torch.tensor(0.1), momentum=0.9)
    set_gradients(params)
    optimizer.step()
    entries = [
        (entry.name, entry.symbol, entry.role) for entry in known_tensors({"self": optimizer}).values()
    ]
    assert entries == [
        ("param_groups[0].lr", "lr", Role.OTHER),
        ("param_groups[0].params[0]", "p", Role.PARAMETER),
        ("param_groups[0].params[0].grad", "g", Role.GRADIENT),
        ("param_groups[0].params[0].momentum_buffer", "momentum_buffer", Role.STATE),
        ("param_groups[0].params[1]", "p", Role.PARAMETER),
        ("param_groups[0].params[1].grad", "g", Role.GRADIENT),
        ("param_groups[0].params[1].momentum_buffer", "momentum_buffer", Role.STATE),
    ]


def test_with_several_optimizers_names_begin_with_the_variable() -> None:
    one, other = Descent(parameters(shapes=[(2,)])), Descent(parameters(shapes=[(3,)]))
    names = [entry.name for entry in known_tensors({"one": one, "other": other}).values()]
    assert names == ["one.param_groups[0].params[0]", "other.param_groups[0].params[0]"]


def test_what_parameters_share_is_found_in_groups_and_under_other_keys() -> None:
    a, b, c = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    p = parameters(shapes=[(2,)])[0]
    groups: list[dict[str, Any]] = [{"params": [p], "lr": 0.1}, {"params": [], "averages": [a]}]
    state = {p: {"moment": torch.zeros(2)}, "own": {"key": b}, "total": c}
    found = list(shared_tensors(groups, state))
    assert [name for name, _ in found] == ["param_groups[1].averages.0", "state.own.key", "state.total"]
    assert all(tensor is expected for (_, tensor), expected in zip(found, (a, b, c), strict=True))
    optimizer = Descent([p])
    optimizer.state["own"] = {"key": b}  # type: ignore[index]
    names = {entry.name: entry for entry in known_tensors({"self": optimizer}).values()}
    assert names["state.own.key"].role is Role.STATE
    assert names["state.own.key"].symbol == "key"
