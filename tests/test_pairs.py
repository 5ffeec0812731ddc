"""Features two by two: 20 steps against float64, and the bits of a resume in the middle; or a refusal.

Gradients are drawn, so that each program has the same, whatever its weights are: what differs from float64
is the optimizer's part alone. Each run tries a tenth of the pairs, another one each day, and ``--all`` all
of them. ``python -m tests.test_pairs`` writes ``docs/pairs.md``: what is right, and what is refused.
"""

from __future__ import annotations

import copy
import datetime
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import collage_fx
from collage_fx import assign, backend_of, full_value, install, offload, step_in_backward
from collage_fx.errors import CollageError
from tests.support.training import Descent

SHAPES = ((64, 64), (33,), (8, 3, 3, 3), (1,), (64, 64), (128, 16))
STEPS, RESUMED = 20, 10


class Weighted(nn.Module):
    """The sum of a weight's elements, times a given tensor, which is so the gradient."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, gradient: Tensor) -> Tensor:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        total: Tensor = (self.weight.to(wide) * gradient.to(wide)).sum()
        return total


class Model(nn.ModuleList):
    """A weight of each shape; the loss is the sum of all."""

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.stack([each(given) for each, given in zip(self, gradients, strict=True)]).sum()


class Branching(Descent):
    """Adam's recurrences behind a condition on a value, so that its step is recorded."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or float(p.grad.abs().max()) > 1e9:
                    continue
                state = self.state[p]
                if not state:
                    state["slow"], state["square"] = torch.zeros_like(p), torch.ones_like(p)
                state["slow"].lerp_(p.grad, 0.1)
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                p.addcdiv_(state["slow"], state["square"].sqrt(), value=-group["lr"])


@dataclass
class Program:
    """A training with features.

    Attributes:
        dtype: dtype of the model; float64 for the reference, which has no features of ours.
        forward: computes the loss: the model, or what wraps it.
    """

    features: tuple[Feature, ...]
    dtype: torch.dtype = torch.bfloat16
    model: Any = None
    forward: Any = None
    optimizer: Any = None
    average: Any = None
    copy: dict[str, Tensor] = field(default_factory=dict)
    expected: list[Tensor] = field(default_factory=list)
    passes: int = 1

    @property
    def is_exact(self) -> bool:
        return self.dtype is torch.float64

    def begin(self) -> None:
        """Make the model and the optimizer, and what the features make of them."""
        torch.manual_seed(0)
        self.model = Model(map(Weighted, SHAPES)).to(torch.bfloat16).to(self.dtype)
        self.forward = self.model
        for each in self.features:
            if each.wrap is not None and not self.is_exact:
                self.forward = each.wrap(self.model)
        makes = [each.optimizer for each in self.features if each.optimizer is not None]
        make = makes[0] if makes else lambda of: torch.optim.AdamW(of, lr=1e-4)
        self.optimizer = make(self.model.parameters())
        self.passes = max(each.passes for each in self.features)
        if not self.is_exact:
            options: dict[str, Any] = {}
            for each in self.features:
                options |= each.options
            install(self.optimizer, **options)
        for each in self.features:
            each.begin(self)

    def step(self, i: int) -> None:
        self.take(i)
        for feature in self.features:
            feature.after_step(self, i)

    def take(self, i: int) -> None:
        """Take a step, without what features do after it."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        for k in range(self.passes):
            gradients = [drawn_gradients(1000 * i + 100 * rank + k) for rank in range(ranks)]
            if self.is_exact:
                given = [torch.stack(of).double().mean(0) for of in zip(*gradients, strict=True)]
            else:
                given = gradients[dist.get_rank() if ranks > 1 else 0]
            self.forward(given).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        found = [whole(p) for p in self.model.parameters()]
        if self.average is not None:
            found += [whole(p) for p in self.average.module.parameters()]
        return found

    def save(self) -> bytes:
        file = io.BytesIO()
        average = None if self.average is None else self.average.state_dict()
        torch.save((self.model.state_dict(), self.optimizer.state_dict(), average), file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        weights, state, average = torch.load(io.BytesIO(saved))
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        if average is not None:
            self.average.load_state_dict(average)


def drawn_gradients(seed: int) -> list[Tensor]:
    """Return a gradient of each weight: powers of two, so that 16-bit sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES)
    return [each.sign() * 2.0 ** each.abs().mul(3).round().neg() for each in drawn]


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor's whole value; of a DTensor in one piece."""
    value = full_value(tensor)
    return value.full_tensor() if isinstance(value, DTensor) else value


def nothing(program: Program) -> None:
    pass


def nothing_after(program: Program, i: int) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Feature:
    """Feature that a program uses.

    Attributes:
        name: its name.
        options: options of ``install``.
        optimizer: makes the optimizer of parameters; None for AdamW.
        begin: called when the optimizer is installed.
        after_step: called after each step, also of the exact program.
        passes: backward passes before a step.
        wrap: divides the model among processes; returns what computes the loss.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], Optimizer] | None = None
    begin: Callable[[Program], None] = nothing
    after_step: Callable[[Program, int], None] = nothing_after
    passes: int = 1
    wrap: Callable[[Model], nn.Module] | None = None


def in_pieces(model: Model) -> nn.Module:
    for each in (*model, model):
        fully_shard(each)
    return model


def begin_offload(program: Program) -> None:
    if not program.is_exact:
        offload(program.optimizer, accumulate=program.passes, bucket_bytes=4096)


def begin_release(program: Program) -> None:
    if not program.is_exact:
        step_in_backward(program.model, program.optimizer, accumulate=program.passes, bucket_bytes=4096)


def copy_changes(program: Program, i: int) -> None:
    """A copy that gets the changed weights has the bits of the model."""
    if program.is_exact:
        return
    found = collage_fx.changes(program.model)
    state = program.model.state_dict()
    if not program.copy:
        program.copy.update({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    collage_fx.apply_changes(program.copy, found)
    assert all(torch.equal(tensor, program.copy[name]) for name, tensor in state.items())


def begin_full_precision(program: Program) -> None:
    if not program.is_exact:
        collage_fx.full_precision_forward(list(program.model))


def read_forward(program: Program, i: int) -> None:
    """The forward pass computes with hi + lo."""
    if not program.is_exact:
        for each in program.model:
            one = torch.zeros(each.weight.numel())
            one[0] = 1.0
            found = each(one.view(each.weight.shape))
            assert float(found.detach()) == float(whole(each.weight).float().flatten()[0])


def read_metrics(program: Program, i: int) -> None:
    if i == STEPS - 1 and not program.is_exact:
        assert backend_of(program.optimizer).report().metrics


@torch.no_grad()
def clamp(program: Program, i: int) -> None:
    for p in program.model.parameters():
        if program.is_exact:
            p.clamp_(-1.5, 1.5).mul_(1 - 2.0**-10)
        else:
            assign(p, full_value(p).clamp(-1.5, 1.5) * (1 - 2.0**-10))


def read_full_state(program: Program, i: int) -> None:
    if not program.is_exact:
        found = collage_fx.full_state_dict(program.model)
        for name, p in program.model.named_parameters():
            value = found[name]
            value = value.full_tensor() if isinstance(value, DTensor) else value
            assert torch.equal(value, whole(p).float())


def begin_average(program: Program) -> None:
    program.average = AveragedModel(program.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def follow(program: Program, i: int) -> None:
    update = program.average.update_parameters
    if not program.is_exact:
        update = torch.compile(update, backend=backend_of(program.optimizer))
    update(program.model)


def step_copy(program: Program, i: int) -> None:
    """A deep copy takes the same step."""
    if program.is_exact:
        return
    if i == 5:
        of, optimizer = copy.deepcopy((program.model, program.optimizer))
        copied = Program(program.features, model=of, optimizer=optimizer, passes=program.passes)
        copied.forward = next((each.wrap(of) for each in program.features if each.wrap is not None), of)
        copied.take(i + 1)
        program.expected = copied.values()
    if i == 6:
        now = [whole(p) for p in program.model.parameters()]
        if not any(each.name == "assign" for each in program.features):  # which comes after the step
            assert all(map(torch.equal, program.expected, now)), "a copy has other bits"


FEATURES = [
    Feature("offload", begin=begin_offload),
    Feature("in backward", begin=begin_release),
    Feature("changes", after_step=copy_changes),
    Feature("full precision", begin=begin_full_precision, after_step=read_forward),
    Feature("metrics", options={"metrics": True}, after_step=read_metrics),
    Feature("assign", after_step=clamp),
    Feature("full state", after_step=read_full_state),
    Feature("average", begin=begin_average, after_step=follow),
    Feature("copies", after_step=step_copy),
    Feature("accumulation", passes=2),
    Feature("recorded", optimizer=lambda of: Branching(of, lr=1e-3)),
    Feature("8 bytes", options={"bytes_per_parameter": 8}),
    Feature("5.6 bytes", options={"bytes_per_parameter": 5.6}),
    Feature("full, mcf", options={"strategy": "full", "error_format": "mcf"}),
    Feature("light, byte", options={"strategy": "light", "error_format": "byte"}),
    Feature(
        "packed weights",
        options={"weights": "int16x32"},
        optimizer=lambda of: torch.optim.AdamW(of, lr=1e-3),  # with 1e-4 these weights need more bits
    ),
    Feature("DDP", wrap=DistributedDataParallel),
    Feature("FSDP2", wrap=in_pieces),
]
BY_NAME = {each.name: each for each in FEATURES}

#: Names of the features for readers of the page.
SHOWN = {
    "offload": "`offload`",
    "in backward": "`step_in_backward`",
    "changes": "`changes`, `apply_changes`",
    "full precision": "`full_precision_forward`",
    "metrics": "`metrics=True`",
    "assign": "`assign`",
    "full state": "`full_state_dict`",
    "average": "an `AveragedModel` that is compiled",
    "copies": "`copy.deepcopy` of model and optimizer",
    "accumulation": "gradients of two backward passes",
    "recorded": "a [recorded](limits.md#recorded-steps) step",
    "8 bytes": "`bytes_per_parameter=8`",
    "5.6 bytes": "`bytes_per_parameter=5.6`",
    "full, mcf": '`strategy="full", error_format="mcf"`',
    "light, byte": '`strategy="light", error_format="byte"`',
    "packed weights": '`weights="int16x32"`',
    "DDP": "DistributedDataParallel",
    "FSDP2": "FSDP2",
}

PAGE = Path(__file__).parents[1] / "docs" / "pairs.md"
HEAD = """# Features together

Each feature was tried with each other one, in 20 steps of AdamW on six weights (with
DistributedDataParallel and FSDP2 on two processes). The values have to be those of float64 to a tenth of
what plain bf16 loses, and a run that is saved after ten steps and resumed has to have the same bits.

These go with every other feature: {free}.

Of the others, every pair is right but for these. What is refused is refused by name.
`tests/test_pairs.py` tries a tenth of the pairs in each run, and all of them nightly; it writes this page.

| feature | refused with | is used in place of, or torch refuses it with |
|---|---|---|
{rows}
`collage_fx.convert` comes before `install`, `step_in_backward` and `offload`; to go back to float32,
`remove()` their handle first ([in the middle of a run](pure-bf16.md#in-the-middle-of-a-run)).
"""

#: Pairs that exclude each other: both are ways to step, or choose the formats, or torch refuses them.
EXCLUDED = [
    {"offload", "in backward"},
    {"8 bytes", "5.6 bytes", "full, mcf", "light, byte"},
    {"8 bytes", "packed weights"},
    {"5.6 bytes", "packed weights"},
    {"DDP", "FSDP2"},
    {"average", "FSDP2"},  # torch refuses a deep copy of the model
    {"copies", "FSDP2"},
]


def pairs() -> Iterator[tuple[str, str]]:
    for one, other in itertools.combinations(BY_NAME, 2):
        if not any({one, other} <= group for group in EXCLUDED):
            yield one, other


def check(one: str, other: str) -> str:
    """Try a pair; return "right", or the message of the refusal."""
    features = BY_NAME[one], BY_NAME[other]
    exact = Program(features, torch.float64)
    exact.begin()
    start = exact.values()
    for i in range(STEPS):
        exact.step(i)
    program = Program(features)
    try:
        program.begin()
        for i in range(STEPS):
            if i == RESUMED:
                saved = program.save()
            program.step(i)
    except CollageError as refusal:
        return str(refusal)
    moved = torch.cat([(a - b).flatten() for a, b in zip(exact.values(), start, strict=True)])
    error = torch.cat([(a - b).flatten() for a, b in zip(program.values(), exact.values(), strict=True)])
    assert float(error.norm() / moved.norm()) < 0.1, (
        "a tenth of what plain bfloat16 loses, as in docs/compatibility.md"
    )
    resumed = Program(features)
    resumed.begin()
    resumed.load(saved)
    for i in range(RESUMED, STEPS):
        resumed.step(i)
    names = [name for name, _ in program.model.named_parameters()]  # a file of an average has its hi alone
    differ = [
        name
        for name, a, b in zip(names, program.values(), resumed.values(), strict=False)
        if not torch.equal(a, b)
    ]
    assert not differ, "a resumed run has other bits"
    return "right"


#: Pairs that are refused, with a part of the message.
REFUSED = {
    ("offload", "average"): "a weight of an offloaded optimizer",
    ("offload", "copies"): "an offloaded optimizer is copied",
    ("offload", "FSDP2"): "a DTensor, which is not offloaded here",
    ("recorded", "FSDP2"): "a DTensor in a step that has to be recorded",
    ("recorded", "5.6 bytes"): "its steps are recorded, operation by operation, and pack no state",
}


def page() -> str:
    """Return the page that says which pairs are refused; all others are right."""
    tried = list(pairs())
    free, lines = [], []
    for name in BY_NAME:
        refused = [each for each in BY_NAME if (name, each) in REFUSED or (each, name) in REFUSED]
        others = [each for each in BY_NAME if not {(name, each), (each, name)} & {*tried} and each != name]
        if not refused and not others:
            free.append(SHOWN[name])
            continue
        shown = ("; ".join(SHOWN[each] for each in some) or "–" for some in (refused, others))
        lines.append(f"| {SHOWN[name]} | {' | '.join(shown)} |\n")
    return HEAD.format(free="; ".join(free), rows="".join(lines))


def test_the_page_lists_the_pairs() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.test_pairs writes it"


def drawn_today() -> Iterator[Any]:
    """Yield all pairs; those that are not today's are slow."""
    today = datetime.date.today().toordinal() % 10
    for i, pair in enumerate(pairs()):
        yield pytest.param(*pair, marks=() if i % 10 == today else pytest.mark.slow)


@pytest.mark.parametrize(("one", "other"), drawn_today())
def test_a_pair_is_right_or_refused(one: str, other: str, request: pytest.FixtureRequest) -> None:
    if BY_NAME[one].wrap or BY_NAME[other].wrap:
        found, of_the_other = request.getfixturevalue("two_processes").run(check, one, other)
        assert found == of_the_other or "right" not in (found, of_the_other)
    else:
        found = check(one, other)
    refusal = REFUSED.get((one, other))
    assert found == "right" if refusal is None else refusal in found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
