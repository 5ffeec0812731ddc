"""Every ``torch._foreach_`` function of the installed torch, in a step that is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from collage_fx import full_value, install
from collage_fx.capture.lists import PREFIX
from collage_fx.capture.recording import is_recorded
from tests.support.training import Descent
from tests.support.twin import TwinBackend

NAMES = [name for name in dir(torch) if name.startswith(PREFIX)]
MOVE = 2.0**-10

#: Overloads that Dynamo of torch 2.13 has no rule for, or that read numbers: their steps are recorded.
UNKNOWN_TO_DYNAMO = {
    *(f"_foreach_{name}.Tensor" for name in ("addcdiv", "addcdiv_", "addcmul", "addcmul_")),
    "_foreach_max.default",
    "_foreach_mm.default",
    "_foreach_powsum.Scalar",
}

#: What a call is given for an argument of a type; lists have an element for each of two parameters.
ARGUMENTS: dict[str, Callable[[list[Tensor]], Any]] = {
    "List[Tensor]": lambda lists: [x.abs() + 0.5 for x in lists],
    "List[number]": lambda lists: [0.25, 0.75],
    "number": lambda lists: 0.5,
    "Tensor": lambda lists: torch.tensor(0.5, dtype=lists[0].dtype),
    "scalars": lambda lists: torch.tensor([0.25, 0.75]),
}


def calls_of(name: str) -> Iterator[tuple[str, Callable[[list[Tensor]], Any]]]:
    """The overloads of a ``_foreach_`` function, and calls of each with a list and the arguments it needs."""
    packet = getattr(torch.ops.aten, name)
    for overload in packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        if not any(argument.is_out for argument in arguments):
            needed = [argument for argument in arguments if not argument.has_default_value()]
            kinds = [_kind(argument) for argument in needed]
            position = kinds.index("List[Tensor]")
            before, behind = kinds[:position], kinds[position + 1 :]
            function = getattr(torch, name)
            yield f"{name}.{overload}", partial(_called, function, before, behind)
            if behind and position == 0:
                keywords = {
                    each.name: kind for each, kind in zip(needed, kinds, strict=True) if each.name != "self"
                }
                yield f"{name}.{overload}, by name", partial(_called_by_name, function, keywords)


def takes_more_than_a_list(name: str) -> bool:
    packet = getattr(torch.ops.aten, name)
    schemas = (getattr(packet, overload)._schema.arguments for overload in packet.overloads())
    return any(len(each) > 1 and not any(argument.is_out for argument in each) for each in schemas)


def _kind(argument: Any) -> str:
    kind = str(argument.type)
    return "scalars" if (kind, argument.name) == ("Tensor", "scalars") else kind


def _called(function: Callable[..., Any], before: list[str], behind: list[str], lists: list[Tensor]) -> Any:
    first, last = ([ARGUMENTS[kind](lists) for kind in kinds] for kinds in (before, behind))
    return function(*first, lists, *last)


def _called_by_name(function: Callable[..., Any], keywords: dict[str, str], lists: list[Tensor]) -> Any:
    """Call with keywords, the last argument first."""
    given = {name: ARGUMENTS[kind](lists) for name, kind in keywords.items()}
    return function(lists, **dict(reversed(given.items())))


class WithLists(Optimizer):
    """Moves parameters by the result of a function of lists, or by lists that it has changed in place."""

    def __init__(
        self, params: Any, call: Callable[[list[Tensor]], Any], *, in_place: bool, recorded: bool
    ) -> None:
        super().__init__(params, {})
        self.call, self.in_place, self.recorded = call, in_place, recorded

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        lists = [p.grad.clone() for p in params]
        made = self.call(lists)
        if self.recorded and params[0].norm() > 1e9:
            return
        torch._foreach_add_(params, lists if self.in_place else made, alpha=-MOVE)


def parameters(dtype: torch.dtype) -> list[Parameter]:
    """Two of one layout, and gradients in the domain of every function."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(2):
        p, gradient = (torch.rand(2, 2, generator=generator) for _ in range(2))
        made.append(Parameter((1 + p).bfloat16().to(dtype)))
        made[-1].grad = (0.25 + gradient / 2).bfloat16().to(dtype)
    return made


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize(
    ("name", "recorded"),
    [*((name, False) for name in NAMES), *((name, True) for name in NAMES if takes_more_than_a_list(name))],
)
def test_every_function_of_lists(name: str, recorded: bool) -> None:
    """It is captured or, where Dynamo does not know it or the step branches on values, recorded.

    The result may be rounded to bfloat16 twice (2**-8 of it), the parameter to float32 once.
    """
    for overload, call in calls_of(name):
        torch._dynamo.reset()
        params, exact = parameters(torch.bfloat16), parameters(torch.float64)
        before = [p.detach().clone() for p in exact]
        optimizer, reference = (
            WithLists(each, call, in_place=name.endswith("_"), recorded=recorded) for each in (params, exact)
        )
        backend = TwinBackend(compiles=False)
        backend.engine = "eager"
        torch.compile(optimizer.step, backend=backend)()
        reference.step()
        assert is_recorded(optimizer) or not recorded
        assert recorded or not is_recorded(optimizer) or overload.split(",")[0] in UNKNOWN_TO_DYNAMO, overload
        for p, p64, start in zip(params, exact, before, strict=True):
            allowed = 2.0**-8 * (p64 - start).abs() + 2.0**-23 * p64.abs()
            off = (full_value(p) - p64).abs()
            assert bool((off <= allowed).all()), f"{overload}: off by {off}, not {allowed}"


class Follows(Descent):
    """Parameters move towards their gradients by a constant share of the way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        torch._foreach_lerp_(params, [p.grad for p in params], 0.775)


def test_a_weight_from_a_half_on_is_not_rounded_to_16_bits() -> None:
    """In eager torch on a CPU it is not, but Dynamo traces what torch does on a GPU."""
    params = parameters(torch.bfloat16)
    expected = [torch.lerp(p.detach().double(), p.grad.double(), 0.775) for p in params if p.grad is not None]
    install(Follows(params)).step()
    for p, value in zip(params, expected, strict=True):
        # The value and its error term have 16 bits together; 1 - 0.775 would be off by 2**-9.3.
        assert float((full_value(p) - value).abs().max()) <= float(value.abs().max()) * 2.0**-16
