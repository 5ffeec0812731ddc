"""One variant measured: what was compiled, and how far its parameters went compared with float64.

All runs of a variant start from the same low-precision weights and get the same low-precision gradients: a
fixed direction of entries between 1/2 and 3/2 in magnitude, and noise of a third of that. So the net
displacement has a direction, signs do change now and then, and no gradient underflows when it is squared.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo import utils as dynamo_utils

from collage_fx import CollageBackend, CollageError, error_terms, full_value
from tests.compatibility.catalog import DTYPES, STEPS, Parameters, Variant

__all__ = [
    "COMPENSATED",
    "FAILED",
    "REFUSED",
    "UNSUPPORTED",
    "Measurement",
    "falls_short",
    "measure",
]

#: Outcomes. Everything else is a fault.
COMPENSATED = "compensated"
REFUSED = "refused"
UNSUPPORTED = "does not run eagerly"
RECOMPILES = "recompiles"
SILENT = "silently plain"
INACCURATE = "inaccurate"
FAILED = "fails"

#: How the reason begins of the graph break that torch itself puts around every optimizer's step.
OWN_BREAK = "Call to `torch._dynamo.graph_break()`"

#: Python-side options without which eager execution on the CPU gives the same numbers, and with which it
#: refuses.
COMPILED_ONLY = ("capturable", "fused")


@dataclass
class Measurement:
    """The outcome of measuring one variant.

    Attributes:
        outcome: see above.
        reason: of an outcome other than ``compensated``.
        graphs: handed to the backend in the first step.
        compilations: graphs handed to it in all steps.
        seconds: from the call of the first step until nothing was compiled any more.
        late: times that Dynamo translated a frame, in the second half of the steps; 0 in a steady state.
        compensated: state tensors with error terms, by what they are to the optimizer (``exp_avg``).
        left: those without, each with the reason.
        plain, single, error: norm of the net displacement's difference from that of the float64 run, relative
            to that: of plain eager low precision, of float32, and of the compensated ``hi + lo``.
        breaks, recompiles: the reasons that Dynamo gave.
        notes: what else there is to say.
    """

    outcome: str = ""
    reason: str = ""
    graphs: int = 0
    compilations: int = 0
    seconds: float = 0
    late: int = 0
    compensated: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    plain: float | None = None
    single: float | None = None
    error: float | None = None
    breaks: list[str] = field(default_factory=list)
    recompiles: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def falls_short(plain: float, compensated: float) -> bool:
    """Whether a compensated error is more than plain low precision's deserves.

    It has to be a tenth, wherever plain low precision loses something worth mentioning, and nowhere larger
    by more than what two ways of rounding may differ in.
    """
    return compensated > 1.05 * plain or (plain >= 0.2 and compensated > plain / 10)


def measure(variant: Variant) -> Measurement:
    """Measure one variant."""
    measured = Measurement()
    if variant.row.subject.steps != STEPS:
        measured.notes.append(f"{variant.row.subject.steps} steps")
    runs: dict[torch.dtype, Tensor] = {}
    dtype = DTYPES[variant.row.dtype]
    for each in (dtype, torch.float32, torch.float64):
        try:
            runs[each] = _eager_displacement(variant, each)
        except Exception as error:  # whatever an optimizer raises is the finding
            if each is dtype:
                measured.outcome, measured.reason = UNSUPPORTED, _said(error)
                return measured
            measured.notes.append(f"no {each} run: {_said(error)}")
    exact = runs.get(torch.float64)
    if exact is not None:
        measured.plain = _relative_error(runs[dtype], exact)
        if torch.float32 in runs:
            measured.single = _relative_error(runs[torch.float32], exact)
    moved = _compiled_displacement(variant, measured)
    if moved is not None and exact is not None:
        measured.error = _relative_error(moved, exact)
        if measured.outcome == COMPENSATED and _disappoints(measured):
            measured.outcome = INACCURATE
            measured.reason = variant.row.subject.why_inaccurate or "although there are error terms"
    return measured


def _disappoints(measured: Measurement) -> bool:
    """Whether a compensated error is too large, and not because float32 is no better at this optimizer."""
    assert measured.plain is not None
    assert measured.error is not None
    return falls_short(measured.plain, measured.error) and measured.error > 2 * (measured.single or 0)


# Runs. ------------------------------------------------------------------------------------------------------


def _weights(variant: Variant, dtype: torch.dtype) -> Parameters:
    torch.manual_seed(0)  # of optimizers that draw numbers
    np.random.seed(0)
    generator = torch.Generator().manual_seed(0)
    low = DTYPES[variant.row.dtype]
    shapes = variant.row.subject.shapes
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(low).to(dtype)) for s in shapes]


def _gradients(variant: Variant, dtype: torch.dtype) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    low = DTYPES[variant.row.dtype]
    shapes = variant.row.subject.shapes
    directions = []
    for shape in shapes:
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        directions.append(signs * (torch.rand(shape, generator=generator) + 0.5))
    for _ in range(variant.row.subject.steps):
        noisy = [d + torch.randn(d.shape, generator=generator) / 3 for d in directions]
        gradients = [gradient.to(low).to(dtype) for gradient in noisy]
        yield [g.to_sparse(1) for g in gradients] if variant.row.subject.sparse else gradients


def _take_steps(
    variant: Variant, parameters: Parameters, step: Callable[..., Any], after: Callable[[], object] = bool
) -> None:
    """All steps; ``after`` each."""
    for gradients in _gradients(variant, parameters[0].dtype):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if variant.row.subject.closure:
            step(lambda: sum(p.detach().sum() for p in parameters))
        else:
            step()
        after()


def _eager_displacement(variant: Variant, dtype: torch.dtype) -> Tensor:
    parameters = _weights(variant, dtype)
    start = _values(parameters)
    optimizer = variant.optimizer(parameters, without=COMPILED_ONLY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _take_steps(variant, parameters, optimizer.step)
    return _values(parameters) - start


def _values(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([full_value(parameter).flatten() for parameter in parameters])


def _relative_error(moved: Tensor, exact: Tensor) -> float:
    return float((moved - exact).norm() / exact.norm())


def _compiled_displacement(variant: Variant, measured: Measurement) -> Tensor | None:
    """Run the compiled step, fill in what was compiled; None where it did not get to the end."""
    torch._dynamo.reset()
    dynamo_utils.counters.clear()
    dynamo_utils.clear_compilation_metrics()
    parameters = _weights(variant, DTYPES[variant.row.dtype])
    start = _values(parameters)
    optimizer = variant.optimizer(parameters)
    backend = CollageBackend()
    step = torch.compile(optimizer.step, backend=backend)
    graphs: list[int] = []  # after each step
    compiled: list[int] = []  # these, and Dynamo's conversions, which has no part in what is recorded

    def count() -> None:
        before = compiled[-1] if compiled else 0
        graphs.append(len(backend.report().graphs))
        compiled.append(graphs[-1] + len(dynamo_utils.get_compilation_metrics()))
        if compiled[-1] > before:
            measured.seconds = time.perf_counter() - started

    started = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _take_steps(variant, parameters, step, count)
    except CollageError as refusal:
        measured.outcome = REFUSED
        measured.reason = f"{type(refusal).__name__}: {refusal.met} ({refusal.where})"
    except Exception as error:  # whatever happens is the finding
        measured.outcome, measured.reason = FAILED, _said(error)
    count()  # also where a step has raised
    measured.graphs, measured.compilations = graphs[0], graphs[-1]
    steps = variant.row.subject.steps
    measured.late = compiled[-1] - compiled[steps // 2 - 1] if len(compiled) > steps else 0
    measured.breaks = [b for b in dynamo_utils.counters["graph_break"] if not b.startswith(OWN_BREAK)]
    measured.recompiles = [
        metrics.recompile_reason
        for metrics in dynamo_utils.get_compilation_metrics()
        if metrics.recompile_reason
    ]
    _describe_state(backend, measured)
    if measured.outcome:
        return None
    ours = [str(warning.message) for warning in caught if "collage_fx:" in str(warning.message)]
    measured.notes.extend(dict.fromkeys(ours))
    _judge(parameters, measured, warned=bool(ours))
    return _values(parameters) - start


def _describe_state(backend: CollageBackend, measured: Measurement) -> None:
    for tensor in backend.report().tensors:
        slot = re.sub(r"^param_groups\[\d+\]\.params\[\d+\]\.?", "", tensor.name) or "parameter"
        if tensor.compensated:
            measured.compensated.append(slot)
        else:
            measured.left.append((slot, tensor.selection))


def _judge(parameters: Parameters, measured: Measurement, *, warned: bool) -> None:
    """The outcome of a run that got to its end."""
    plain = [i for i, p in enumerate(parameters) if not any(bool(t.any()) for t in error_terms(p))]
    if plain and warned:
        measured.outcome = REFUSED  # for what is noted
    elif plain:
        measured.outcome, measured.reason = SILENT, f"parameters {plain} have no error terms, or all zero"
    elif measured.late:
        last = measured.recompiles[-1] if measured.recompiles else "no reason given"
        measured.outcome, measured.reason = RECOMPILES, last
    else:
        measured.outcome = COMPENSATED


def _said(error: BaseException) -> str:
    """The exception and what it says, without Dynamo's account of where."""
    error = getattr(error, "inner_exception", error)  # of what a backend raised, Dynamo's own says nothing
    text = str(error).partition("\nfrom user code")[0].partition("\n For more details")[0]
    return f"{type(error).__name__}: {text.strip()}"
