"""A training on a card as a user writes it: schedule, clipping, checkpoint, metrics, two optimizers.

The bits of a whole run are looked at: beside float64, beside a run that was saved and resumed, and beside
the CPU's step with the same gradients.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import collage_fx
from collage_fx import full_value
from tests.support.training import Lion, differences, everything

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"
    ),
]

STEPS, SAVED = 8, 4
LARGEST_NORM = 0.05


@dataclass(frozen=True)
class Course:
    """Optimizer and options of a training.

    Attributes:
        make: parameters -> optimizer of the matrices.
        options: of the compiled step.
        changed_bits: the part of hi's elements that may differ from the CPU's step after all steps.
    """

    make: Callable[[Any], Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    changed_bits: float = 0.0


def _adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def _muon(parameters: Any) -> Optimizer:
    return torch.optim.Muon(parameters, lr=1e-2, weight_decay=0.1)


#: A float32 value that is an ulp off, by div.full or pow, is rounded to another bfloat16 in 2**-16 of all
#: cases for each ulp; of AdamW there are up to 16 (``assert_within_an_ulp_of_lo``), in each step.
DIVIDED = 16 * STEPS * 2.0**-16

COURSES = [
    pytest.param(Course(_adamw, {"metrics": True, "metrics_every": 3}, DIVIDED), id="AdamW, measured"),
    pytest.param(Course(_adamw, {"bytes_per_parameter": 5.1}, DIVIDED), id="AdamW, 5.1 bytes"),
    # Newton-Schulz iterates in bfloat16: another order of a product's sums moves everything.
    pytest.param(Course(_muon, {}, 1.0), id="Muon"),
]


class Training:
    """A model and its optimizers: that of the matrices, and a Lion for all else.

    Attributes:
        gradients: of each step, as the optimizers had them, on the CPU.
    """

    def __init__(self, course: Course, device: str) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.device = device
        layers = torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.LayerNorm(128), torch.nn.Linear(128, 33)
        self.model = torch.nn.Sequential(*layers).to(device, torch.bfloat16)
        self.parameters = list(self.model.parameters())
        matrices = [p for p in self.parameters if p.dim() == 2]
        rest = [p for p in self.parameters if p.dim() != 2]
        self.optimizers = [
            collage_fx.install(course.make(matrices), **course.options),
            collage_fx.install(Lion(rest, lr=1e-3)),
        ]
        self.schedules = [LambdaLR(each, _up_and_down) for each in self.optimizers]
        self.gradients: list[list[Tensor]] = []

    def run(self, steps: range) -> None:
        for i in steps:
            self._backward(i)
            self._step()

    def replay(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Take steps with given gradients."""
        for each in gradients:
            for p, grad in zip(self.parameters, each, strict=True):
                p.grad = grad.to(self.device)
            self._step()

    def _backward(self, i: int) -> None:
        draw = torch.Generator().manual_seed(i)
        x, y = (torch.randn(16, n, generator=draw).to(self.device, torch.bfloat16) for n in (32, 33))
        for each in self.optimizers:
            each.zero_grad()
        (self.model(x) - y).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, LARGEST_NORM)

    def _step(self) -> None:
        self.gradients.append([_gradient(p).cpu().clone() for p in self.parameters])
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()

    def saved(self) -> io.BytesIO:
        file = io.BytesIO()
        torch.save([each.state_dict() for each in self._parts()], file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        for each, state in zip(self._parts(), torch.load(file, weights_only=False), strict=True):
            each.load_state_dict(state)

    def _parts(self) -> list[Any]:
        return [self.model, *self.optimizers, *self.schedules]

    def everything(self) -> dict[str, Tensor]:
        return {
            f"{i}.{name}": tensor.cpu()
            for i, each in enumerate(self.optimizers)
            for name, tensor in everything(each).items()
        }

    def matrices(self) -> list[Tensor]:
        return [full_value(p).detach().cpu().double() for p in self.parameters if p.dim() == 2]


def _up_and_down(step: int) -> float:
    """Return 0 in the first step and the last, 1 in the middle."""
    return 0.5 * (1 - math.cos(2 * math.pi * min(step, STEPS - 1) / (STEPS - 1)))


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad.detach()


def _in_float64(course: Course, gradients: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Return where the matrices begin and where torch's optimizer takes them."""
    training = Training(course, "cpu")
    start = training.matrices()
    twins = [torch.nn.Parameter(each.clone()) for each in start]
    optimizer = course.make(twins)
    schedule = LambdaLR(optimizer, _up_and_down)
    for each in gradients:
        of_matrices = [grad for grad in each if grad.dim() == 2]
        for twin, grad in zip(twins, of_matrices, strict=True):
            twin.grad = grad.double()
        optimizer.step()
        schedule.step()
    return start, [twin.detach() for twin in twins]


def _error(ends: Sequence[Tensor], exact: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """Return the norm of all differences, relative to that of the way gone."""
    off, moved = (
        torch.cat([(a - b).flatten() for a, b in zip(one, other, strict=True)]).norm()
        for one, other in ((ends, exact), (exact, start))
    )
    return float(off / moved)


@pytest.mark.parametrize("course", COURSES)
def test_a_training(course: Course) -> None:
    """A training is as near to float64 as the CPU's, is resumed to the bit, and has hi bits of the CPU's."""
    on_card = Training(course, "cuda")
    on_card.run(range(SAVED))
    file = on_card.saved()
    on_card.run(range(SAVED, STEPS))

    resumed = Training(course, "cuda")
    resumed.load(file)
    resumed.run(range(SAVED, STEPS))
    assert differences(resumed.everything(), on_card.everything()) == []

    on_cpu = Training(course, "cpu")
    on_cpu.replay(on_card.gradients)
    start, exact = _in_float64(course, on_card.gradients)
    error, of_cpu = (_error(each.matrices(), exact, start) for each in (on_card, on_cpu))
    print(f"displacement error {error:.3g}, of the CPU's step {of_cpu:.3g}")
    assert error <= 1.05 * of_cpu

    pairs = [
        (p.detach().cpu(), q.detach()) for p, q in zip(on_card.parameters, on_cpu.parameters, strict=True)
    ]
    changed, elements = sum(int((p != q).sum()) for p, q in pairs), sum(p.numel() for p, _ in pairs)
    print(f"hi bits differ from the CPU's step in {changed} of {elements} elements")
    assert changed <= course.changed_bits * elements
    if "metrics" in course.options:
        measured = collage_fx.backend_of(on_card.optimizers[0]).metrics()
        assert list(measured) == [3, 6]


def _trained(*, in_backward: bool = False, offloaded: bool = False) -> tuple[list[Tensor], int]:
    """Train six layers; return the weights, and the most bytes of gradients after the backward pass."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Tanh()) for _ in range(6)]
    model = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)
    optimizer = collage_fx.install(_adamw(model.parameters()))
    if in_backward:
        collage_fx.step_in_backward(model, optimizer)
    if offloaded:
        collage_fx.offload(optimizer)
    batches = torch.Generator().manual_seed(1)
    alive = 0
    for _ in range(3):
        batch = torch.randn(8, 48, generator=batches).to("cuda", torch.bfloat16)
        model(batch).float().square().mean().backward()
        alive = max(alive, sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
    return [full_value(p).cpu() for p in model.parameters()], alive


def test_stepping_in_the_backward_pass() -> None:
    """On the thread that torch runs a device's backward pass in."""
    (found, few), (expected, many) = (_trained(in_backward=way) for way in (True, False))
    assert all(map(torch.equal, found, expected))
    assert few < many / 6


def test_stepping_in_host_memory() -> None:
    """Copies on streams of their own arrive in time; the CPU's kernels have other last bits."""
    (found, few), (expected, _) = (_trained(offloaded=way) for way in (True, False))
    assert few == 0
    torch.manual_seed(0)
    start = [p.detach() for _ in range(6) for p in torch.nn.Linear(48, 48).bfloat16().parameters()]
    off = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True)) ** 0.5
    way = sum(float((a - b).square().sum()) for a, b in zip(expected, start, strict=True)) ** 0.5
    assert off < 0.01 * way
