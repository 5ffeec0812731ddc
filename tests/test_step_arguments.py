"""Arguments of a step, by ``install`` and ``torch.compile``: bound as in eager torch, or the same exception.

Signatures and calls are drawn. An argument may be given by position or by keyword, be required, be missing or
be one too many; the closure stands anywhere, may be keyword-only, may have another name or be absent.
"""

from __future__ import annotations

import itertools
import random
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import install
from tests.support.training import compiled, parameters
from tests.support.written_classes import gradients, relative_error, written_class

STEPS = 3
SHAPES = ((8, 16), (6,))

#: Bound of the error: a bfloat16 term under a bfloat16 value leaves 2**-17 of each weight of about 1 at each
#: of three steps; a weight moves by about 2**-10. Plain bfloat16 (2**-9 of a weight) is off by 1.
ALLOWED = STEPS * 2.0**-17 / 2.0**-10


class Case(NamedTuple):
    """Signature of a step, what the step does with its closure, and the arguments of a call."""

    signature: str
    closure: str | None
    body: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        given = [*map(str, self.args), *(f"{name}={value}" for name, value in self.kwargs.items())]
        return f"step(self, {self.signature}): {self.body or 'no closure'}; step({', '.join(given)})"


#: The value of an argument of a call that stands for the closure.
CLOSURE = "closure"

BODIES = {
    "ignored": "",
    "first": "if {0} is not None:\n    with torch.enable_grad():\n        loss = {0}()",
    "scales": "if {0} is not None:\n    loss = {0}()\n    factor = loss",
    "and a condition": "if {0} is not None and {1} > 2:\n    with torch.enable_grad():\n        loss = {0}()",
    "given, under a condition": "if {1} > 2:\n    with torch.enable_grad():\n        loss = {0}()",
    "or a condition": "if {0} is not None or {1} > 2:\n    loss = {0}()",
    "unless": "if not ({0} is None and {1} < 2):\n    loss = {0}()",
    "else": "if {0} is None and {1} < 2:\n    pass\nelse:\n    loss = {0}()",
    "twice": "if {0} is not None:\n    with torch.enable_grad():\n        {0}()\n        loss = {0}()",
}


def drawn(seed: int) -> Case:
    draw = random.Random(seed)
    closure = draw.choice(["closure", "closure", "closure", "evaluate", None])
    names = ["scale", "offset"][: draw.randrange(3)]
    positional = [*names, *([closure] if closure else [])]
    draw.shuffle(positional)
    keyword_only = [positional.pop()] if positional and draw.random() < 0.3 else []
    required = draw.randrange(len(positional) + 1) if draw.random() < 0.4 else 0
    default = {"scale": "1.0", "offset": "0.5", closure: "None"}
    rest = not keyword_only and draw.random() < 0.25
    parts = [name if i < required else f"{name}={default[name]}" for i, name in enumerate(positional)]
    parts += ["*rest"] * rest + ["*"] * bool(keyword_only)
    parts += [f"{name}={default[name]}" for name in keyword_only]
    parts += ["**more"] * (draw.random() < 0.2)
    value = {"scale": 3.0, "offset": 2.0, closure: draw.choice([CLOSURE, CLOSURE, None])}
    given = draw.randrange(len(positional) + 1)
    args = [value[name] for name in positional[:given]]
    args += [4.0] * (given == len(positional) and draw.random() < 0.3)
    left = [*positional[given:], *keyword_only]
    kwargs = {name: value[name] for name in left if draw.random() < 0.6}
    kwargs |= {"extra": 5.0} if draw.random() < 0.15 else {}
    body = "" if closure is None else draw.choice([*BODIES])
    return Case(", ".join(parts), closure, body, tuple(args), kwargs)


def optimizer_class(case: Case, *, has_source: bool) -> Callable[[Any], Optimizer]:
    """Return the class of a case."""
    values = [name for name in ("scale", "offset") if name in case.signature]
    loss = textwrap.indent(BODIES.get(case.body, "").format(case.closure, [*values, "1.0"][0]), " " * 4)
    size = " + ".join(["1.0", *values, *["sum(rest)"] * ("*rest" in case.signature)])
    body = f"""
@torch.no_grad()
def step(self, {case.signature}):
    loss = None
    factor = 1.0
{loss}
    size = ({size}) * factor
    for group in self.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.sub_(p.grad * size * 2.0**-10)
    return loss
"""
    return written_class(body, has_source=has_source, label=str(case))


class Outcome(NamedTuple):
    """Result of a run of steps: returned values or the exception, calls of the closure, and parameters."""

    said: Any
    calls: int
    params: list[Tensor]
    optimizer: Optimizer  # error terms live as long as it does


def outcome(
    case: Case, kind: Callable[[Any], Optimizer], dtype: torch.dtype, door: Callable[[Optimizer], Any]
) -> Outcome:
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in start()]
    optimizer = kind(params)
    step, calls = door(optimizer), itertools.count()

    def closure() -> Tensor:
        give_gradients(params, next(calls))
        return torch.tensor(0.5)

    said: list[Any] = []
    args = [closure if each is CLOSURE else each for each in case.args]
    kwargs = {name: closure if each is CLOSURE else each for name, each in case.kwargs.items()}
    for seed in range(STEPS):
        give_gradients(params, 100 + seed)
        try:
            said.append(step(*args, **kwargs))
        except TypeError as error:
            said.append((type(error), str(error)))
    return Outcome(said, next(calls), list(params), optimizer)


def start() -> list[torch.nn.Parameter]:
    return parameters(shapes=SHAPES)


def give_gradients(params: Sequence[Tensor], seed: int) -> None:
    for p, gradient in zip(params, gradients(params, seed), strict=True):
        p.grad = gradient


def faults(case: Case, *, has_source: bool) -> Iterator[str]:
    """Yield what differs from eager torch, by ``install``, by ``torch.compile``, in float32."""
    torch._dynamo.reset()
    kind = optimizer_class(case, has_source=has_source)
    exact = outcome(case, kind, torch.float64, lambda optimizer: optimizer.step)
    doors: dict[str, tuple[torch.dtype, Callable[[Optimizer], Any]]] = {
        "install": (torch.bfloat16, lambda optimizer: install(optimizer).step),
        "torch.compile": (torch.bfloat16, compiled),
        "install, float32": (torch.float32, lambda optimizer: install(optimizer).step),
    }
    for door, (dtype, enter) in doors.items():
        ours = outcome(case, kind, dtype, enter)
        if ours.said != exact.said or ours.calls != exact.calls:
            yield f"{door}: {ours.said}, {ours.calls} calls; eager: {exact.said}, {exact.calls} calls; {case}"
        elif (off := relative_error(ours.params, exact.params, start())) > ALLOWED:
            yield f"{door}: error {off:.3g}; {case}"


@pytest.mark.parametrize(
    "body", ["given, under a condition", "and a condition", "or a condition", "unless", "else"]
)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_closure_is_called_if_the_arguments_ask_for_it(scale: float, body: str) -> None:
    case = Case("scale, closure=None", "closure", body, (scale, CLOSURE), {})
    assert not list(faults(case, has_source=True))


@pytest.mark.parametrize("seed", range(12))
def test_drawn_signatures_and_calls(seed: int) -> None:
    assert not list(faults(drawn(seed), has_source=seed % 4 != 3))
