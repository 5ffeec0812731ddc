"""``python -m tests.compatibility.dtypes``: measure each triple of dtypes, and write its table.

A triple is the dtypes of parameter, gradient and state. Each optimizer of torch.optim takes 40 steps for each
triple, on small tensors of odd shapes, and its weights are compared with those of a float64 run from the same
weights and state, with the same gradients. The table is the last section of
``docs/compatibility-rows.md``.
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from collage_fx import CollageBackend, full_value, install
from tests.compatibility.results import ROOT

__all__ = [
    "CASES",
    "LARGEST",
    "TRIPLES",
    "Case",
    "Cell",
    "Triple",
    "measure",
    "section_of",
    "without_section",
]

PATH = ROOT / "docs" / "compatibility-rows.md"
HEADING = "## Dtypes of parameter, gradient and state"

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEPS = 40

#: Largest error of a displacement that counts as right, whatever float32 does.
LARGEST = 0.005
#: An error is "as float32" if it is at most this many times that of eager float32 parameters.
AS_FLOAT32 = 2

SHAPES = ((7, 5), (11,), (1, 3))
MATRICES = ((7, 5), (13, 3))


class Triple(NamedTuple):
    """Names of the dtypes of parameter, gradient and state."""

    parameter: str
    gradient: str
    state: str

    def __str__(self) -> str:
        return "/".join(self)


TRIPLES = tuple(Triple(*names) for names in itertools.product(DTYPES, repeat=3))


@dataclass(frozen=True, eq=False)
class Case:
    """An optimizer of torch.optim with options; ``way`` are those that choose its implementation."""

    name: str
    options: Mapping[str, Any]
    way: Mapping[str, bool] = field(default_factory=dict)
    shapes: Sequence[tuple[int, ...]] = SHAPES

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.way.items())])

    def make(self, parameters: Sequence[Parameter], **way: bool) -> Optimizer:
        """Make the optimizer."""
        optimizer: Optimizer = getattr(torch.optim, self.name)(parameters, **self.options, **way)
        return optimizer


FOREACH: tuple[Mapping[str, bool], ...] = ({"foreach": False}, {"foreach": True})
FUSED: Mapping[str, bool] = {"fused": True}

_OPTIMIZERS: Mapping[str, tuple[Mapping[str, Any], Sequence[Mapping[str, bool]]]] = {
    "ASGD": ({"lr": 5e-5, "lambd": 0.5}, FOREACH),
    "Adadelta": ({"lr": 0.02}, FOREACH),
    "Adafactor": ({"lr": 1e-4}, ({},)),
    "Adagrad": ({"lr": 2e-4}, (*FOREACH, FUSED)),
    "Adam": ({"lr": 5e-5}, (*FOREACH, FUSED)),
    "AdamW": ({"lr": 5e-5, "amsgrad": True}, (*FOREACH, FUSED)),
    "Adamax": ({"lr": 5e-5}, FOREACH),
    "Muon": ({"lr": 2e-4}, ({},)),
    "NAdam": ({"lr": 5e-5}, FOREACH),
    "RAdam": ({"lr": 5e-5}, FOREACH),
    "RMSprop": ({"lr": 2e-5, "momentum": 0.9, "centered": True}, FOREACH),
    "Rprop": ({"lr": 2e-5, "step_sizes": (1e-6, 1e-4)}, FOREACH),
    "SGD": ({"lr": 5e-5, "momentum": 0.9}, (*FOREACH, FUSED)),
}

CASES = tuple(
    Case(name, options, way, MATRICES if name == "Muon" else SHAPES)
    for name, (options, ways) in _OPTIMIZERS.items()
    for way in ways
)


@dataclass(frozen=True)
class Cell:
    """Errors of one case and one triple, ‖Δ - Δ64‖ / ‖Δ64‖, or the message of an exception.

    Attributes:
        eager: of torch's eager step.
        single: of torch's eager step with float32 parameters; where it cannot take it, of a float64 step
            whose state is rounded after each step.
        error: of the compensated step.
    """

    eager: float | str
    single: float
    error: float | str

    @property
    def is_right(self) -> bool:
        """Whether the compensated step is right, or as right as eager float32."""
        return isinstance(self.error, float) and self.error <= max(LARGEST, AS_FLOAT32 * self.single)


class _InDouble(TorchFunctionMode):
    """Mode in which what is converted to bfloat16, as Muon's products are, is converted to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bfloat16:
            func = Tensor.double
        if func is Tensor.to and kwargs and kwargs.get("dtype") is torch.bfloat16:  # since torch 2.15
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **(kwargs or {}))


def measure(case: Case, triple: Triple) -> Cell:
    """Measure one case with one triple."""
    start = [weights.to(DTYPES[triple.parameter]) for weights in _draws(case, 0)]
    with _InDouble():
        exact = _moved(case, triple, start, torch.float64)

    def error(moved: Tensor) -> float:
        return float((moved - exact).norm() / exact.norm())

    def attempted(dtype: torch.dtype, *, compiled: bool = False) -> float | str:
        try:
            # The state counts a step and has no error terms, of which a compensated step warns.
            with warnings.catch_warnings(action="ignore"):
                return error(_moved(case, triple, start, dtype, compiled=compiled))
        except Exception as raised:  # any exception is a result
            inner = getattr(raised, "inner_exception", raised)
            return f"{type(inner).__name__}: {inner}"

    single = attempted(torch.float32)
    if isinstance(single, str):
        single = error(_moved(case, triple, start, torch.float64, rounds_state=True))
    torch.compiler.reset()
    return Cell(
        attempted(DTYPES[triple.parameter]),
        single,
        attempted(DTYPES[triple.parameter], compiled=True),
    )


def _draws(case: Case, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in case.shapes]


def _gradients(case: Case, triple: Triple) -> Iterator[list[Tensor]]:
    """Yield a constant direction plus noise, in the triple's dtype; no square of it underflows."""
    directions = [torch.sign(draw) * (0.5 + draw.abs().clamp(max=1)) for draw in _draws(case, 1)]
    for seed in range(2, STEPS + 2):
        noises = _draws(case, seed)
        yield [(d + n / 3).to(DTYPES[triple.gradient]) for d, n in zip(directions, noises, strict=True)]


def optimizer_of(
    case: Case, triple: Triple, start: Sequence[Tensor], dtype: torch.dtype, **way: bool
) -> tuple[list[Parameter], Optimizer]:
    """Make an optimizer whose parameters have a dtype, and state of the triple's dtype after a first step."""
    before = [Parameter(weights.double()) for weights in start]
    first = case.make(before)
    for parameter, gradient in zip(before, next(_gradients(case, triple)), strict=True):
        parameter.grad = gradient.double()
    first.step()
    parameters = [Parameter(weights.to(dtype, copy=True)) for weights in start]
    optimizer = case.make(parameters, **way)
    for parameter, old in zip(parameters, before, strict=True):
        allow_any_gradient(parameter)
        optimizer.state[parameter] = {
            name: _state(name, value, DTYPES[triple.state], dtype) for name, value in first.state[old].items()
        }
    return parameters, optimizer


def _state(name: str, value: Any, state: torch.dtype, parameter: torch.dtype) -> Any:
    """Return a value of a float64 optimizer's state as another optimizer holds it."""
    if not isinstance(value, Tensor) or name == "step":
        return value
    if not value.dim():
        return value.float()
    return value.to(state).to(parameter if parameter is torch.float64 else state)


def allow_any_gradient(parameter: Tensor) -> None:
    """Let a parameter have gradients of any dtype, where this torch has a setting for it."""
    if hasattr(parameter, "grad_dtype"):
        parameter.grad_dtype = None


def _moved(
    case: Case,
    triple: Triple,
    start: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    compiled: bool = False,
    rounds_state: bool = False,
) -> Tensor:
    """Return how far all steps move parameters of a dtype."""
    way = {} if dtype is torch.float64 else case.way
    parameters, optimizer = optimizer_of(case, triple, start, dtype, **way)
    if compiled:
        install(optimizer, backend=CollageBackend())
    for gradients in _gradients(case, triple):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(torch.float64 if dtype is torch.float64 else gradient.dtype)
        optimizer.step()
        for value in (v for p in parameters for v in optimizer.state[p].values() if rounds_state):
            if isinstance(value, Tensor) and value.dim():
                value.copy_(value.to(DTYPES[triple.state]))
    ends = [full_value(parameter).double() for parameter in parameters]
    return torch.cat([(end - weights.double()).flatten() for end, weights in zip(ends, start, strict=True)])


# The section. -----------------------------------------------------------------------------------------------

TEXT = """\
{right} of {count} combinations are right; {cannot} of these eager torch itself refuses on a CPU. {others}

Each line is an optimizer with {triples} combinations of dtypes, those of parameter, gradient and state from
{dtypes}: {steps} steps each after `collage_fx.install(opt)`. A combination is *right* if the error is at
most {largest}, or {times} times that of eager torch with float32 parameters. *eager cannot* counts
combinations that are right here and that eager torch refuses. *error* is the largest of the compensated
steps, *plain* that of eager steps with bf16 or fp16 parameters. Parameters are {shapes} (Muon: {matrices}).

Written by `python -m tests.compatibility.dtypes` with torch {torch}."""


def section(measured: Mapping[Case, Mapping[Triple, Cell]]) -> str:
    """Write the section of a page."""
    rows = []
    for case, cells in measured.items():
        right = [cell for cell in cells.values() if cell.is_right]
        low = [cell.eager for t, cell in cells.items() if t.parameter != "fp32"]
        rows.append(
            (
                case.name,
                ", ".join(f"{name}={value}" for name, value in case.way.items()),
                f"{len(right)} of {len(cells)}",
                sum(isinstance(cell.eager, str) for cell in right),
                _largest(low),
                _largest(cell.error for cell in cells.values()),
            )
        )
    every = {(case, t): cell for case, cells in measured.items() for t, cell in cells.items()}
    wrong = {key: cell for key, cell in every.items() if not cell.is_right}
    described = "; ".join(f"{case} {t}: {_short(cell.error)}" for (case, t), cell in wrong.items())
    text = TEXT.format(
        torch=torch.__version__.partition("+")[0],
        shapes=_listed(SHAPES),
        matrices=_listed(MATRICES),
        right=len(every) - len(wrong),
        count=len(every),
        cannot=sum(isinstance(cell.eager, str) for cell in every.values() if cell.is_right),
        others=f"Not right: {described}." if wrong else "None is refused here.",
        triples=len(TRIPLES),
        dtypes=", ".join(DTYPES),
        steps=STEPS,
        largest=LARGEST,
        times=AS_FLOAT32,
    )
    headers = ("optimizer", "options", "right", "eager cannot", "plain", "error")
    table = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    return f"{HEADING}\n\n{text}\n\n{table}\n"


def _largest(errors: Any) -> str:
    numbers = [error for error in errors if isinstance(error, float)]
    return f"{max(numbers):.2g}" if numbers else "–"


def _short(error: float | str) -> str:
    return f"{error:.2g}" if isinstance(error, float) else error.partition("\n")[0]


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join("×".join(map(str, shape)) for shape in shapes)


def section_of(text: str) -> str:
    """Return the section in a page; empty if it has none."""
    _, heading, rest = text.partition(HEADING)
    return heading + rest


def without_section(text: str) -> str:
    """Return a page without its section."""
    return text.partition(f"\n{HEADING}")[0]


def main(names: Sequence[str], show: Callable[[str], None] = print) -> int:
    """Measure the cases of some optimizers, or all; all are written to the page."""
    logging.getLogger("collage_fx").setLevel(logging.ERROR)
    measured: dict[Case, Mapping[Triple, Cell]] = {}
    for case in (case for case in CASES if not names or case.name in names):
        measured[case] = cells = {triple: measure(case, triple) for triple in TRIPLES}
        show(f"{case}: {sum(cell.is_right for cell in cells.values())} of {len(cells)} right")
        for triple, cell in cells.items():
            if not cell.is_right:
                show(f"  {triple}: {_short(cell.error)}; eager {_short(cell.eager)}, fp32 {cell.single:.2g}")
    written = section(measured)
    if names:
        show(written)
    else:
        PATH.write_text(f"{without_section(PATH.read_text())}\n{written}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
