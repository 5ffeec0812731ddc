"""How a step's graph falls apart: what has to stay together, what is copied, what is not cut at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx.graph import Reason, placeholders
from collage_fx.lowering.parts import Part, parts_of
from collage_fx.lowering.rules import Rule, rule_of
from tests.support.triton_offline import functional_graph

aten = torch.ops.aten


def parts(step: Callable[..., Any], *tensors: Tensor) -> list[Part]:
    found = parts_of(functional_graph(step, *tensors).graph)
    assert not isinstance(found, Reason)
    return found


def stored(part: Part) -> set[int]:
    """Positions of the inputs that a part stores."""
    inputs = placeholders(part.stores[0].graph)
    return {inputs.index(store.all_input_nodes[0]) for store in part.stores}


def rules(step: Callable[..., Any], *tensors: Tensor) -> list[Rule]:
    return [rule_of(part) for part in parts(step, *tensors)]


def vectors(*lengths: int) -> list[Tensor]:
    return [torch.ones(length) for length in lengths]


def test_updates_of_two_tensors_are_two_parts_with_one_rule() -> None:
    def step(p: Tensor, q: Tensor, g: Tensor, h: Tensor) -> None:
        p.mul_(0.5).add_(g)
        q.mul_(0.5).add_(h)

    tensors = vectors(3, 5, 3, 5)
    assert [stored(part) for part in parts(step, *tensors)] == [{0}, {1}]
    first, second = rules(step, *tensors)
    assert first.flat
    assert first.key == second.key
    assert (first.length, second.length) == (3, 5)


def test_constants_tell_rules_apart() -> None:
    def step(p: Tensor, q: Tensor, r: Tensor, s: Tensor) -> None:
        p.mul_(0.5)
        q.mul_(0.25)
        r.mul_(0.5)
        s.pow_(2).mul_(-0.0)

    p, q, r, s = rules(step, *vectors(3, 3, 5, 3))
    assert p.key == r.key
    assert len({p.key, q.key, s.key}) == 3


def test_equal_numbers_of_other_types_and_signs_are_other_constants() -> None:
    def step(p: Tensor, q: Tensor, r: Tensor) -> None:
        p.clamp_(min=0.0)
        q.clamp_(min=-0.0)
        r.clamp_(min=0)

    assert len({rule.key for rule in rules(step, *vectors(3, 3, 3))}) == 3


def test_readers_of_a_tensor_that_is_stored_stay_with_its_store() -> None:
    """What reads ``p`` here means the old one. Apart, it would depend on who runs first."""

    def step(p: Tensor, average: Tensor) -> None:
        old = p * 2
        p.add_(1)
        average.mul_(0.5).add_(old)

    (part,) = parts(step, *vectors(3, 3))
    assert stored(part) == {0, 1}


@pytest.mark.parametrize("factor", [0.5, 0.25, 0.125, 3.0])  # whatever the fingerprints
def test_old_values_are_stored_before_they_are_overwritten(factor: float) -> None:
    def step(older: Tensor, p: Tensor) -> None:
        older.copy_(p)
        p.mul_(factor)

    (part,) = parts(step, *vectors(3, 3))
    assert [store.all_input_nodes[0] for store in part.stores] == placeholders(part.stores[0].graph)


def test_a_tensor_that_is_only_read_joins_nothing() -> None:
    def step(p: Tensor, q: Tensor, g: Tensor) -> None:
        p.add_(g)
        q.add_(g)

    assert [stored(part) for part in parts(step, *vectors(3, 3, 3))] == [{0}, {1}]


def test_what_is_made_of_a_counter_is_apart_from_the_elements() -> None:
    def step(p: Tensor, q: Tensor, s: Tensor, t: Tensor) -> None:
        for x, n in ((p, s), (q, t)):
            n.add_(1)
            x.div_(1 - 0.5**n)

    found = parts(step, *vectors(3, 5), torch.ones(()), torch.ones(()))
    assert [stored(part) for part in found] == [{2}, {3}, {0}, {1}]
    counters, elements = found[:2], found[2:]
    assert [part.given for part in elements] == [set(part.results) for part in counters]
    for same in (counters, elements):
        assert len({rule_of(part).key for part in same}) == 1
        assert all(rule_of(part).independent for part in same)


def test_a_counter_of_several_is_a_part_of_its_own_and_runs_first() -> None:
    def step(p: Tensor, q: Tensor, t: Tensor) -> None:
        t.add_(1)
        factor = 1 - 0.5**t
        p.div_(factor)
        q.div_(factor)

    counter, first, second = parts(step, *vectors(3, 5), torch.ones(()))
    assert stored(counter) == {2}
    assert len(counter.results) == 1
    assert first.given == second.given == set(counter.results)
    assert rule_of(first).key == rule_of(second).key


def test_a_shared_counter_whose_old_value_is_read_stays_with_that_reader() -> None:
    def step(p: Tensor, q: Tensor, t: Tensor) -> None:
        p.div_(t)  # the old one
        t.add_(1)
        q.div_(1 - 0.5**t)

    together = [stored(part) for part in parts(step, *vectors(3, 5), torch.ones(()))]
    assert {0, 2} <= together[0]


def test_numbers_that_no_step_changes_are_copied_into_each_part() -> None:
    def step(p: Tensor, q: Tensor, lr: Tensor) -> None:
        p.mul_(1 - lr * 0.5)
        q.mul_(1 - lr * 0.5)

    first, second = parts(step, *vectors(3, 5), torch.ones(()))
    assert not first.given
    assert not second.given
    assert rule_of(first).key == rule_of(second).key


def test_a_norm_over_all_tensors_keeps_them_together() -> None:
    def step(p: Tensor, q: Tensor) -> None:
        norm = p.square().sum() + q.square().sum()
        p.div_(norm)
        q.div_(norm)

    (part,) = parts(step, *vectors(3, 5))
    assert stored(part) == {0, 1}
    assert not rule_of(part).flat


def test_what_is_no_function_of_its_operands_is_not_cut() -> None:
    def step(p: Tensor, q: Tensor) -> None:
        p.add_(torch.rand_like(p))
        q.add_(1)

    assert isinstance(parts_of(functional_graph(step, *vectors(3, 5)).graph), Reason)


def test_returned_tensors_belong_to_a_part() -> None:
    def step(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        momentum = g * 0.5
        p.add_(momentum)
        return momentum, torch.zeros(4)

    gm = functional_graph(step, *vectors(3, 3))
    found = parts_of(gm.graph)
    assert not isinstance(found, Reason)
    assert [len(part.results) for part in found] == [1, 1]


def test_views_that_are_returned_are_not_cut_off_from_their_memory() -> None:
    def of_an_input(p: Tensor, g: Tensor) -> Tensor:
        p.add_(1)
        return g[1:]

    def of_each_other(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        p.add_(1)
        new = g * 2
        return new, new[1:]

    for step in (of_an_input, of_each_other):
        assert isinstance(parts_of(functional_graph(step, *vectors(3, 3)).graph), Reason)


# What is flat. --------------------------------------------------------------------------------------------


def layouts_flat(*tensors: Tensor) -> bool:
    def step(p: Tensor, g: Tensor) -> None:
        p.add_(g)

    (rule,) = rules(step, *tensors)
    return rule.flat


def test_flat_is_one_dense_layout() -> None:
    matrix, strided = torch.ones(4, 6), torch.ones(4, 12)[:, ::2]
    images = torch.ones(2, 3, 4, 5)
    last = images.to(memory_format=torch.channels_last)
    assert layouts_flat(matrix, matrix.clone())
    assert layouts_flat(matrix.t(), matrix.clone().t())
    assert not layouts_flat(matrix.t(), torch.ones(6, 4))
    assert layouts_flat(last, last.clone())
    assert not layouts_flat(last, images)
    assert not layouts_flat(strided, strided.clone())
    assert layouts_flat(torch.ones(8, 6)[2:6], matrix)


def test_flat_is_one_shape_of_some_elements() -> None:
    assert layouts_flat(torch.ones(4, 6), torch.ones(6))  # one number for each column
    assert not layouts_flat(torch.ones(2, 3, 4), torch.ones(2, 1, 4))
    assert not layouts_flat(torch.ones(6, 4).t(), torch.ones(6))
    assert layouts_flat(torch.ones(1), torch.ones(1))
    assert not layouts_flat(torch.ones(0), torch.ones(0))
    assert not layouts_flat(torch.ones(()), torch.ones(()))
    assert layouts_flat(torch.ones(2), torch.ones(2))


def test_a_view_of_a_number_has_one_element_whatever_length_others_have() -> None:
    def step(s: Tensor, g: Tensor) -> None:
        s.add_(g.flatten())

    (rule,) = rules(step, torch.ones(1), torch.ones(()))
    assert not rule.flat


def test_a_reason_names_the_operators_of_a_rule() -> None:
    def step(p: Tensor, g: Tensor) -> None:
        p.sub_(g.sqrt())

    (rule,) = rules(step, torch.ones(3), torch.ones(3))
    assert rule.operations == "aten.sqrt.default, aten.sub.Tensor"


def test_rules_that_are_not_flat_name_their_shapes() -> None:
    def step(p: Tensor, q: Tensor, r: Tensor) -> None:
        for x in (p, q, r):
            x.div_(x.square().sum())

    p, q, r = rules(step, torch.ones(3, 4), torch.ones(3, 4), torch.ones(4, 3))
    assert p.key == q.key
    assert p.key != r.key
