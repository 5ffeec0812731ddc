"""The ways in which a run gets from one set of objects, or from one process, into another."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn import Module, ParameterList
from torch.optim import Optimizer

from tests.reliability.runs import Run, Setup, forget_other_numbers, params_of
from tests.support.training import compiled, run_steps

Way = Callable[[Setup, Run, Path], Run]


def restored(setup: Setup, values: list[Tensor], saved: dict[str, Any]) -> Run:
    optimizer, step = setup.fresh(values)
    optimizer.load_state_dict(saved)
    return optimizer, step


def by_state_dict(setup: Setup, run: Run, directory: Path) -> Run:
    return restored(setup, list(params_of(run[0])), copy.deepcopy(run[0].state_dict()))


def by_file(setup: Setup, run: Run, directory: Path) -> Run:
    torch.save((list(map(torch.detach, params_of(run[0]))), run[0].state_dict()), directory / "file")
    return restored(setup, *torch.load(directory / "file", weights_only=True))


def by_model_last(setup: Setup, run: Run, directory: Path) -> Run:
    saved = ParameterList(params_of(run[0])).state_dict()
    optimizer, step = restored(setup, setup.start(), copy.deepcopy(run[0].state_dict()))
    ParameterList(params_of(optimizer)).load_state_dict(saved)
    return optimizer, step


def into_a_running_one(setup: Setup, run: Run, directory: Path) -> Run:
    optimizer, step = setup.running()
    with torch.no_grad():
        for p, value in zip(params_of(optimizer), params_of(run[0]), strict=True):
            p.copy_(value)
    optimizer.load_state_dict(copy.deepcopy(run[0].state_dict()))
    return optimizer, step


def by_copy(setup: Setup, run: Run, directory: Path) -> Run:
    return _with_a_step(setup, copy.deepcopy((params_of(run[0]), run[0]))[1])


def by_pickle(setup: Setup, run: Run, directory: Path) -> Run:
    file = io.BytesIO()
    pickle.dump((params_of(run[0]), run[0]), file)
    file.seek(0)
    return _with_a_step(setup, pickle.load(file)[1])


def _with_a_step(setup: Setup, optimizer: Optimizer) -> Run:
    if "decay" in vars(run := setup.make(params_of(optimizer))):  # attributes that pickles leave out
        vars(optimizer).setdefault("decay", vars(run)["decay"])
    forget_other_numbers()
    return optimizer, compiled(optimizer, **setup.options)


def through_plain_torch(setup: Setup, run: Run, directory: Path) -> Run:
    plain, _ = setup.fresh(list(params_of(run[0])))
    Optimizer.load_state_dict.__wrapped__(plain, copy.deepcopy(run[0].state_dict()))  # type: ignore[attr-defined]
    saved = Optimizer.state_dict.__wrapped__(plain)  # type: ignore[attr-defined]
    return restored(setup, list(params_of(plain)), copy.deepcopy(saved))


def _model(optimizer: Optimizer) -> Module:
    return ParameterList(params_of(optimizer))


def by_dcp(setup: Setup, run: Run, directory: Path, *, flatten: bool = False) -> Run:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def states(of: Run) -> dict[str, Any]:
        model, optimizer = get_state_dict(_model(of[0]), of[0], options=options)
        return {"model": model, "optimizer": optimizer}

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        checkpoint.save(states(run), checkpoint_id=directory / "dcp")
        optimizer, step = setup.running()  # for what it has to have to be loaded into
        found = states((optimizer, step))
        checkpoint.load(found, checkpoint_id=directory / "dcp")
    set_state_dict(
        _model(optimizer),
        optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
        options=options,
    )
    return optimizer, step


def by_flat_dcp(setup: Setup, run: Run, directory: Path) -> Run:
    return by_dcp(setup, run, directory, flatten=True)


#: Each can follow another, without a step in between.
WAYS: dict[str, Way] = {
    "load_state_dict into new objects": by_state_dict,
    "load_state_dict into one that has trained on something else": into_a_running_one,
    "torch.save and torch.load": by_file,
    "an optimizer loaded before its model": by_model_last,
    "copy.deepcopy of parameters and optimizer": by_copy,
    "pickle of parameters and optimizer": by_pickle,
    "loaded and saved by plain PyTorch": through_plain_torch,
    "torch.distributed.checkpoint, nested": by_dcp,
    "torch.distributed.checkpoint, flattened": by_flat_dcp,
}


def killed(setup: Setup, run: Run, directory: Path, first: int, last: int, random: Random) -> tuple[Run, int]:
    """A process that takes steps and saves after each is killed (SIGKILL); and what it has saved last.

    Returns:
        the run, and how many steps have been taken.
    """
    optimizer, step = run
    path = directory / "latest"

    def save(taken: int) -> None:
        torch.save(
            (list(map(torch.detach, params_of(optimizer))), optimizer.state_dict(), taken), f"{path}.tmp"
        )
        os.replace(f"{path}.tmp", path)

    save(first)
    child = os.fork()
    if child == 0:
        for taken in range(first, last):
            run_steps(step, params_of(optimizer), [taken])
            save(taken + 1)
        signal.pause()
    time.sleep(random.uniform(0.0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    values, saved, taken = torch.load(path, weights_only=True)
    return restored(setup, values, saved), taken
