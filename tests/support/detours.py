"""Ways from one optimizer to another that goes on in its place: checkpoints, copies, and plain torch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from tests.support.training import compiled, everything, parameters, run_steps

#: Parameters -> optimizer.
Make = Callable[[Any], Optimizer]


def with_copied_parameters(optimizer: Optimizer, make: Make) -> Optimizer:
    """A new optimizer of copies of the parameters."""
    return make([Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]])


def saved_and_loaded(value: Any) -> Any:
    """What ``torch.load`` makes of what ``torch.save`` has written."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_a_file(optimizer: Optimizer, make: Make) -> Optimizer:
    other = with_copied_parameters(optimizer, make)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    return other


def loaded_by_plain_torch(optimizer: Optimizer, make: Make) -> Optimizer:
    """Whose state torch has cast to the parameters' dtype, with what this package has saved in it."""
    other = with_copied_parameters(optimizer, make)
    load = Optimizer.load_state_dict.__wrapped__  # type: ignore[attr-defined]
    load(other, copy.deepcopy(optimizer.state_dict()))
    return other


def saved_again_by_plain_torch(optimizer: Optimizer, make: Make) -> Optimizer:
    """Loaded by this package from what plain torch has loaded and saved."""
    save = Optimizer.state_dict.__wrapped__  # type: ignore[attr-defined]
    saved = save(loaded_by_plain_torch(optimizer, make))
    other = with_copied_parameters(optimizer, make)
    other.load_state_dict(copy.deepcopy(saved))
    return other


DETOURS: dict[str, Callable[[Optimizer, Make], Optimizer]] = {
    "file": through_a_file,
    "plain torch": loaded_by_plain_torch,
    "plain torch and back": saved_again_by_plain_torch,
    "deep copy": lambda optimizer, make: copy.deepcopy(optimizer),
    "pickle": lambda optimizer, make: pickle.loads(pickle.dumps(optimizer)),
}


def direct_and_by(
    detour: str,
    make: Make,
    shapes: Sequence[Sequence[int]],
    steps: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor], Optimizer]:
    """What a run leaves, and one with a detour after its first steps; and the optimizer of the latter."""
    left = []
    for resumed in (False, True):
        torch._dynamo.reset()
        params = parameters(dtype, shapes=shapes)
        optimizer = make(params)
        run_steps(compiled(optimizer, **options), params, range(steps[0]))
        if resumed:
            optimizer = DETOURS[detour](optimizer, make)
            params = optimizer.param_groups[0]["params"]
        run_steps(compiled(optimizer, **options), params, range(steps[0], sum(steps)))
        left.append(everything(optimizer))
    return left[0], left[1], optimizer
