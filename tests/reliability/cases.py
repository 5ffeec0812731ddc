"""Drawn cases: a run is carried on in some way, or its checkpoint spoiled, and what comes of it is judged."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from collage_fx import error_terms, full_value
from tests.reliability.runs import SETUPS, STEPS, Run, Setup, different_elements, params_of, uninterrupted
from tests.reliability.ways import WAYS, killed, restored
from tests.support.training import everything, run_steps


class Outcome(NamedTuple):
    """What came of a case.

    Attributes:
        what: the ways that the run took, or what was done to it.
        lost: elements that are not what they should be.
        told: what was raised or warned about.
    """

    what: tuple[str, ...]
    lost: int
    told: tuple[str, ...]


def drawn(seed: int) -> Outcome:
    """The case of a seed."""
    random = Random(seed)
    setup = random.choice(SETUPS)
    kind = random.choices((_carried, _killed, _spoiled, _converted), weights=(70, 10, 10, 10))[0]
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        what, lost = kind(setup, Path(directory), random)
    told = (str(each.message) for each in caught if "collage_fx" in str(each.message))
    return Outcome(what, lost, tuple(told))


def _carried(setup: Setup, directory: Path, random: Random) -> tuple[tuple[str, ...], int]:
    """In one to three ways, one after the other; then it takes some steps."""
    first = random.randrange(2, STEPS - 3)  # with the error terms of state that the first step makes
    run = _of(setup, first)
    possible = [way for way in WAYS if not any(words in way for words in setup.not_by)]
    ways = tuple(random.choices(possible, k=random.randint(1, 3)))
    for i, way in enumerate(ways):
        (directory / str(i)).mkdir()
        run = WAYS[way](setup, run, directory / str(i))
    return ways, _gone_on(setup, run, first, random)


def _killed(setup: Setup, directory: Path, random: Random) -> tuple[tuple[str, ...], int]:
    first = random.randrange(2, STEPS - 5)
    run = _of(setup, first)
    run_steps(run[1], params_of(run[0]), [first])
    run, taken = killed(setup, run, directory, first + 1, STEPS - 3, random)
    return ("SIGKILL while it steps and saves",), _gone_on(setup, run, taken, random)


def _of(setup: Setup, taken: int) -> Run:
    moment = uninterrupted(setup)[taken]
    return restored(setup, moment.values, copy.deepcopy(moment.saved))


def _gone_on(setup: Setup, run: Run, taken: int, random: Random) -> int:
    """Elements that differ from those of the uninterrupted run, some steps later."""
    optimizer, step = run
    steps = random.randint(1, 3)
    run_steps(step, params_of(optimizer), range(taken, taken + steps))
    return different_elements(uninterrupted(setup)[taken + steps].everything, everything(optimizer))


def _spoiled(setup: Setup, directory: Path, random: Random) -> tuple[tuple[str, ...], int]:
    """An element of a parameter, or of an error term, is another than when it was saved.

    Those of that tensor have to become zero, and all others stay.
    """
    taken = random.randrange(1, STEPS - 3)
    moment = uninterrupted(setup)[taken]
    values, saved = [value.clone() for value in moment.values], copy.deepcopy(moment.saved)
    i = random.randrange(len(values))
    changes_hi = random.random() < 0.5
    keys = [
        key
        for key in saved["state"][i]
        if key.startswith("collage_fx.parameter") and key.endswith((".lo", ".rest"))
    ]
    spoiled = values[i] if changes_hi else saved["state"][i][keys[0]]
    element = spoiled.view(-1)[random.randrange(spoiled.numel()) :][:1]
    if element.is_floating_point():
        element.copy_(torch.where(element == 0, 1.0, -element))
    else:
        element ^= 1 << random.randrange(8)
    optimizer, step = restored(setup, values, saved)
    _move_nothing(optimizer, step)
    lost = 0
    for k, (p, value) in enumerate(zip(params_of(optimizer), values, strict=True)):
        (lo,) = error_terms(p)
        expected = torch.zeros_like(lo) if k == i else moment.everything[f"0.{k}.parameter.error.0"]
        lost += int((p.detach() != value).sum()) + int((lo != expected).sum())
    return ("a value changed after it was saved" if changes_hi else "an error term damaged in a file",), lost


def _move_nothing(optimizer: Optimizer, step: Callable[[], object]) -> None:
    for p in params_of(optimizer):
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step()


def _converted(setup: Setup, directory: Path, random: Random) -> tuple[tuple[str, ...], int]:
    """Loaded into a float32 model, which holds hi + lo from the first step of its plain optimizer on."""
    taken = random.randrange(1, STEPS)
    moment = uninterrupted(setup)[taken]
    optimizer, _ = setup.fresh(moment.values)
    optimizer.load_state_dict(copy.deepcopy(moment.saved))
    wide = setup.make([Parameter(value.float()) for value in moment.values])
    wide.load_state_dict(copy.deepcopy(moment.saved))
    _move_nothing(wide, wide.step)
    lost = 0
    for p, q in zip(params_of(optimizer), params_of(wide), strict=True):
        lost += int((full_value(p).float() != q.detach()).sum())
    return ("a 16-bit checkpoint loaded into a float32 model",), lost
