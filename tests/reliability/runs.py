"""Training runs that nothing interrupts, step by step: what all others have to come to."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from tests.support.training import LateMomentum, compiled, everything, parameters, run_steps

STEPS = 10
Step = Callable[[], Any]
#: What is carried: an optimizer, and the step that has been compiled for it.
Run = tuple[Optimizer, Step]


@dataclass(frozen=True)
class Setup:
    """What is trained, and how.

    Attributes:
        name: in the table.
        make: an optimizer of some parameters.
        dtype: theirs.
        options: of the backend.
        not_by: words of ways that torch does not offer it.
    """

    name: str
    make: Callable[[Any], Optimizer]
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    not_by: tuple[str, ...] = ()

    def fresh(self, values: list[Tensor]) -> Run:
        """An optimizer of new parameters, and its compiled step, which has not been compiled yet."""
        forget_other_numbers()
        optimizer = self.make([Parameter(value.detach().clone()) for value in values])
        return optimizer, compiled(optimizer, **self.options)

    def running(self) -> Run:
        """An optimizer that has trained on something else, and its step, which compiles no more.

        It is one of two by turns, because compiling is nearly all that a case takes: what a run is carried on
        into has to be another than the run, and it is over with the last but one.
        """
        run = next(two_running(self))
        run_steps(run[1], params_of(run[0]), [77, 78])
        return run

    def start(self) -> list[Tensor]:
        """The values of the parameters before the first step."""
        return list(parameters(self.dtype))


adamw = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
momentum = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)

SETUPS = (
    Setup("AdamW, plus", adamw),
    Setup("AdamW, light", adamw, options={"strategy": "light"}),
    # Plain PyTorch casts state to the parameter's dtype; DCP flattens no lists.
    Setup("AdamW, fp32 terms", adamw, options={"error_format": "fp32"}, not_by=("plain PyTorch",)),
    Setup("AdamW, exact terms", adamw, options={"error_format": "exact"}, not_by=("plain PyTorch",)),
    Setup("AdamW, native", adamw, options={"arithmetic": "native"}),
    Setup("Adam, amsgrad, float16", functools.partial(torch.optim.Adam, amsgrad=True), torch.float16),
    Setup("SGD, momentum", momentum, options={"strategy": "full"}),
    Setup("Adafactor", functools.partial(torch.optim.Adafactor, lr=1e-3)),
    Setup("state in containers", LateMomentum, not_by=("flattened",)),
)


@dataclass
class Moment:
    """A run between two of its steps.

    Attributes:
        values: of the parameters.
        saved: ``optimizer.state_dict()``.
        everything: parameters, state and error terms, by name.
    """

    values: list[Tensor]
    saved: dict[str, Any]
    everything: dict[str, Tensor]


def params_of(optimizer: Optimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def forget_other_numbers() -> None:
    """Let Dynamo take an optimizer's numbers for constants, whatever those of others have been."""
    torch._dynamo.pgo.reset_code_state()


@functools.cache
def two_running(setup: Setup) -> Iterator[Run]:
    return itertools.cycle([setup.fresh(setup.start()) for _ in range(2)])


@functools.cache
def uninterrupted(setup: Setup) -> list[Moment]:
    """A run before its first step, and after each."""
    optimizer, step = setup.fresh(setup.start())
    moments = []
    for seed in range(STEPS + 1):
        values = [p.detach().clone() for p in params_of(optimizer)]
        moments.append(Moment(values, copy.deepcopy(optimizer.state_dict()), everything(optimizer)))
        run_steps(step, params_of(optimizer), [seed])
    return moments


def different_elements(expected: dict[str, Tensor], found: dict[str, Tensor]) -> int:
    """How many elements differ in any bit."""
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    count = 0
    for name, tensor in expected.items():
        integers = bits[tensor.dtype.itemsize]
        count += int((tensor.view(integers) != found[name].view(integers)).sum())
    return count
