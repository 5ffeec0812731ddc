"""``audit``: whether an optimizer is right in low precision, measured: your own, or any other.

All runs of an audit start from the same low-precision weights, N(0, 1), and get the same low-precision
gradients: a fixed direction of entries between 1/2 and 3/2 in magnitude, and noise of a third of that. So the
net displacement has a direction, signs do change now and then, and no gradient underflows when it is squared.
The optimizer runs eagerly in low precision, in float32 and in float64, and installed in low precision. An
error is ‖Δ - Δ64‖ / ‖Δ64‖: Δ is how far the parameters went, hi + lo of the installed one, Δ64 in float64.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.backend import CollageBackend
from collage_fx.errors import CollageError, InvalidOptionError
from collage_fx.graph import Role
from collage_fx.install import install
from collage_fx.numerics import STORAGE_FORMATS
from collage_fx.options import refuse_unknown
from collage_fx.state import bytes_held, full_value, known_tensors
from collage_fx.state.error_terms import error_terms
from collage_fx.torch_compat import conversions, forget_counts, graph_breaks, recompile_reasons

#: Outcomes. Everything else than the first two is a fault.
COMPENSATED = "compensated"
REFUSED = "refused"
UNSUPPORTED = "does not run eagerly"
NOTHING_TO_COMPARE = "nothing to compare"
RECOMPILES = "recompiles"
SILENT = "silently plain"
INACCURATE = "inaccurate"
FAILED = "fails"

#: A matrix and a vector: enough for every path that depends on a parameter's rank.
SHAPES = ((24, 16), (16,))
#: Enough for a scheduled number to be seen to change, and for what happens in one step of five.
STEPS = 40
#: Under the second schedule, the first step and the last change nothing.
FEWEST_STEPS = 3
WARM_UP = 10

Parameters = list[torch.nn.Parameter]
Make = Callable[[Parameters], Optimizer]

#: (step, steps) -> the factor of the learning rate.
Schedule = Callable[[int, int], float]

#: What the learning rate does, by name. The second is a trainer's default: it begins, and ends, at 0.
SCHEDULES: Mapping[str, Schedule | None] = {
    "constant": None,
    "0, up, down to 0": lambda step, steps: min(step, WARM_UP, steps - 1 - step) / WARM_UP,
}


@dataclass
class Measurement:
    """The outcome of measuring an optimizer under one schedule.

    Attributes:
        outcome: see above.
        reason: of an outcome other than ``compensated``.
        graphs: handed to the backend in the first step.
        compilations: graphs handed to it in all steps.
        seconds: from the call of the first step until nothing was compiled any more.
        late: times that Dynamo translated a frame, in the second half of the steps; 0 in a steady state.
        compensated: state tensors with error terms, by what they are to the optimizer (``exp_avg``).
        left: those without, each with the reason.
        plain, single, error: of eager low precision, of eager float32, of ``hi + lo``; None without a run.
        bytes: that parameters, state and error terms take in the end, for each element of the parameters.
        breaks, recompiles: the reasons that Dynamo gave.
        notes: what else there is to say.
        routes: the ways that the graphs took: captured or recorded, by family or not.
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
    bytes: float | None = None
    breaks: list[str] = field(default_factory=list)
    recompiles: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    routes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Audit:
    """What :func:`audit` found; a text when printed.

    Attributes:
        subject: the optimizer, and what it was given.
        measured: by schedule.
    """

    subject: str
    measured: Mapping[str, Measurement]

    @property
    def is_good(self) -> bool:
        """Whether it is compensated under every schedule, as precisely as it can be."""
        return all(map(_is_good, self.measured.values()))

    def __str__(self) -> str:
        rows = [
            (
                schedule,
                *map(_shown, (each.plain, each.single, each.error)),
                each.compilations,
                f"{each.seconds:.1f}",
                each.outcome,
            )
            for schedule, each in self.measured.items()
        ]
        headers = ("learning rate", "plain", "fp32", "compensated", "compiled", "seconds", "outcome")
        every = list(self.measured.values())
        lines = [self.subject, "", tabulate(rows, headers, disable_numparse=True), ""]
        lines += _listed("with error terms", (name for each in every for name in each.compensated))
        lines += _listed("without", (f"{name}: {why}" for each in every for name, why in each.left))
        lines += _listed("way", (way for each in every for way in each.routes))
        lines += _listed("noted", (note for each in every for note in (each.reason, *each.notes) if note))
        return "\n".join([*lines, "", f"Verdict: {self.verdict}"])

    @property
    def verdict(self) -> str:
        """A sentence."""
        bad = [
            f"{schedule}: {each.outcome}" for schedule, each in self.measured.items() if not _is_good(each)
        ]
        if all(each.outcome == NOTHING_TO_COMPARE for each in self.measured.values()):
            return f"none, for {next(iter(self.measured.values())).reason}"
        if bad:
            return f"not right ({'; '.join(bad)})"
        gains = [
            each.plain / each.error
            for each in self.measured.values()
            if each.plain and each.error is not None
        ]
        if not gains:
            return "compensated; there is no float64 run to compare with"
        return f"right: plain low precision is {min(gains):.3g} times as far off"


def audit(
    make: Make,
    *,
    shapes: Sequence[Sequence[int]] = SHAPES,
    dtype: torch.dtype = torch.bfloat16,
    steps: int = STEPS,
    schedules: Mapping[str, Schedule | None] = SCHEDULES,
    **options: Any,
) -> Audit:
    """Measure whether an optimizer is right in low precision: 4 runs a schedule, half a minute for most.

    ``print(collage_fx.audit(lambda params: MyOptimizer(params, lr=1e-4)))``

    Args:
        make: makes the optimizer for a list of parameters. It is called for each run.
        shapes: of the parameters.
        dtype: of parameters and gradients, bfloat16 or float16.
        steps: to take under each schedule.
        schedules: name -> ``(step, steps) -> factor`` of ``group["lr"]``; None leaves that alone.
        options: those of :class:`CollageBackend`, such as ``strategy="light"``.

    Returns:
        Errors, compilations, seconds, error terms and a verdict, for each schedule.

    Raises:
        CollageError: an argument that is not allowed; nothing has been measured.
    """
    refuse_unknown(options)
    CollageBackend(**options)
    if dtype not in STORAGE_FORMATS:
        raise InvalidOptionError(
            f"dtype={dtype} is not allowed: there is nothing to compensate in it",
            where="dtype",
            remedy=f"use one of {', '.join(map(str, STORAGE_FORMATS))}",
        )
    if not any(map(math.prod, shapes)):
        raise InvalidOptionError(
            "shapes without an element", where="shapes", remedy="give shapes such as (64, 64)"
        )
    if steps < FEWEST_STEPS:
        raise InvalidOptionError(
            f"steps={steps} is not allowed", where="steps", remedy=f"use {FEWEST_STEPS} or more"
        )
    trial = Trial(make, tuple(map(tuple, shapes)), dtype, steps, options=options)
    with contextlib.redirect_stdout(io.StringIO()):  # some optimizers print what they are
        subject = make(_weights(trial, dtype))
        measured = {
            name: measure_trial(replace(trial, schedule=schedule)) for name, schedule in schedules.items()
        }
    sizes = ", ".join("×".join(map(str, shape)) or "0-d" for shape in trial.shapes)
    lrs = {str(group.get("lr")) for group in subject.param_groups}
    return Audit(
        f"{type(subject).__module__}.{type(subject).__qualname__}, lr {', '.join(sorted(lrs))}: "
        f"{steps} steps of {str(dtype).removeprefix('torch.')} parameters {sizes}",
        measured,
    )


@dataclass(frozen=True)
class Trial:
    """What is measured.

    Attributes:
        make: makes the optimizer.
        shapes, dtype: of the parameters.
        steps: to take; in the second half of them, nothing is to be compiled any more.
        make_eager: makes it for the eager runs, if it differs there.
        schedule: of the learning rate.
        sparse: give sparse gradients.
        closure: ``step`` must be given a closure.
        why_inaccurate: what makes its low-precision rule another one than its float64 rule, if it is known.
        options: of the backend.
    """

    make: Make
    shapes: Sequence[Sequence[int]] = SHAPES
    dtype: torch.dtype = torch.bfloat16
    steps: int = STEPS
    make_eager: Make | None = None
    schedule: Schedule | None = None
    sparse: bool = False
    closure: bool = False
    why_inaccurate: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def falls_short(plain: float, compensated: float) -> bool:
    """Whether a compensated error is more than plain low precision's deserves.

    It has to be a tenth, wherever plain low precision loses something worth mentioning, and nowhere larger
    by more than what two ways of rounding may differ in. One that is not finite always is.
    """
    return (
        math.isinf(compensated) or compensated > 1.05 * plain or (plain >= 0.2 and compensated > plain / 10)
    )


def measure_trial(trial: Trial) -> Measurement:
    """Measure one trial."""
    measured = Measurement()
    runs: dict[torch.dtype, Tensor] = {}
    for each in (trial.dtype, torch.float32, torch.float64):
        try:
            runs[each] = _eager_displacement(trial, each)
        except Exception as error:  # whatever an optimizer raises is the finding
            if each is trial.dtype:
                measured.outcome, measured.reason = UNSUPPORTED, _said(error)
                return measured
            measured.notes.append(f"no {each} run: {_said(error)}")
    exact = runs.get(torch.float64)
    if exact is not None:
        measured.plain = _relative_error(runs[trial.dtype], exact)
        if torch.float32 in runs:
            measured.single = _relative_error(runs[torch.float32], exact)
    if exact is not None and not (exact.any() and exact.isfinite().all()):
        measured.outcome = NOTHING_TO_COMPARE
        finite = "no parameter moves" if exact.isfinite().all() else "parameters become infinite or NaN"
        measured.reason = f"{finite} in float64, too"
        return measured
    moved = _compiled_displacement(trial, measured)
    if moved is not None and exact is not None:
        measured.error = _relative_error(moved, exact)
        if measured.outcome == COMPENSATED and _disappoints(measured):
            measured.outcome = INACCURATE
            measured.reason = trial.why_inaccurate or "although there are error terms"
    return measured


def _disappoints(measured: Measurement) -> bool:
    """Whether a compensated error is too large, and not because float32 is no better at this optimizer."""
    assert measured.plain is not None
    assert measured.error is not None
    is_as_float32 = measured.error <= 2 * (measured.single or 0) and math.isfinite(measured.error)
    return falls_short(measured.plain, measured.error) and not is_as_float32


# Runs. ------------------------------------------------------------------------------------------------------


def _weights(trial: Trial, dtype: torch.dtype) -> Parameters:
    torch.manual_seed(0)  # of optimizers that draw numbers, from torch or from NumPy
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(tuple(shape), generator=generator).to(trial.dtype) for shape in trial.shapes)
    return [torch.nn.Parameter(each.to(dtype)) for each in values]


def _gradients(trial: Trial, dtype: torch.dtype) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    directions = []
    for shape in map(tuple, trial.shapes):
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        directions.append(signs * (torch.rand(shape, generator=generator) + 0.5))
    for _ in range(trial.steps):
        noisy = [d + torch.randn(d.shape, generator=generator) / 3 for d in directions]
        gradients = [gradient.to(trial.dtype).to(dtype) for gradient in noisy]
        yield [g.to_sparse(1) for g in gradients] if trial.sparse else gradients


def _take_steps(
    trial: Trial, optimizer: Optimizer, parameters: Parameters, after: Callable[[], object] = bool
) -> None:
    """All steps; ``after`` each."""
    lrs = [group.get("lr") for group in optimizer.param_groups]
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    needs_closure = trial.closure or (closure is not None and closure.default is inspect.Parameter.empty)
    for i, gradients in enumerate(_gradients(trial, parameters[0].dtype)):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if trial.schedule is not None:
            factor = trial.schedule(i, trial.steps)
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr if lr is None else lr * factor
        if needs_closure:
            optimizer.step(lambda: float(sum(p.detach().sum() for p in parameters)))
        else:
            optimizer.step()
        after()


def _eager_displacement(trial: Trial, dtype: torch.dtype) -> Tensor:
    parameters = _weights(trial, dtype)
    start = _values(parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _take_steps(trial, (trial.make_eager or trial.make)(parameters), parameters)
    return _values(parameters) - start


def _values(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([full_value(parameter).flatten() for parameter in parameters])


def _relative_error(moved: Tensor, exact: Tensor) -> float:
    error = float((moved - exact).norm() / exact.norm())
    return error if math.isfinite(error) else math.inf


def _compiled_displacement(trial: Trial, measured: Measurement) -> Tensor | None:
    """Run the compiled step, fill in what was compiled; None where it did not get to the end."""
    torch.compiler.reset()
    forget_counts()
    parameters = _weights(trial, trial.dtype)
    start = _values(parameters)
    optimizer, backend = trial.make(parameters), CollageBackend(**trial.options)
    graphs: list[int] = []  # after each step
    compiled: list[int] = []  # these, and Dynamo's conversions, which has no part in what is recorded

    def count() -> None:
        before = compiled[-1] if compiled else 0
        graphs.append(len(backend.reports))
        compiled.append(graphs[-1] + conversions())
        if compiled[-1] > before:
            measured.seconds = time.perf_counter() - started

    started = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _take_steps(trial, install(optimizer, backend=backend), parameters, count)
    except CollageError as refusal:
        measured.outcome = REFUSED
        measured.reason = f"{type(refusal).__name__}: {refusal.met} ({refusal.where})"
    except Exception as error:  # whatever happens is the finding
        measured.outcome, measured.reason = FAILED, _said(error)
    count()  # also where a step has raised
    measured.graphs, measured.compilations = graphs[0], graphs[-1]
    measured.late = compiled[-1] - compiled[trial.steps // 2 - 1] if len(compiled) > trial.steps else 0
    measured.breaks, measured.recompiles = graph_breaks(), recompile_reasons()
    _describe_state(backend, measured)
    if measured.outcome:
        return None
    ours = [str(warning.message) for warning in caught if "collage_fx:" in str(warning.message)]
    measured.notes.extend(dict.fromkeys(ours))
    _judge(parameters, measured, warned=bool(ours))
    known = known_tensors({"": optimizer}).values()
    held = bytes_held(each.tensor for each in known if each.role is not Role.GRADIENT)
    measured.bytes = held / sum(p.numel() for p in parameters)
    return _values(parameters) - start


def _describe_state(backend: CollageBackend, measured: Measurement) -> None:
    for tensor in backend.report().tensors:
        slot = re.sub(r"^param_groups\[\d+\]\.params\[\d+\]\.?", "", tensor.name) or "parameter"
        if tensor.compensated:
            measured.compensated.append(slot)
        else:
            measured.left.append((slot, tensor.selection))
    routes = (each.route for each in backend.reports)
    ways = (f"{route}{f' ({route.recorded})' if route.recorded else ''}" for route in routes)
    measured.routes = list(dict.fromkeys(ways))


def _judge(parameters: Parameters, measured: Measurement, *, warned: bool) -> None:
    """The outcome of a run that got to its end."""
    # Infinite values have no error terms.
    finite = ((i, p) for i, p in enumerate(parameters) if p.isfinite().all())
    plain = [i for i, p in finite if not any(bool(t.any()) for t in error_terms(p))]
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


def _is_good(measured: Measurement) -> bool:
    return measured.outcome == COMPENSATED


def _shown(error: float | None) -> str:
    return "" if error is None else "< 0.001" if error < 1e-3 else f"{error:.2g}"


def _listed(title: str, entries: Iterable[str]) -> list[str]:
    """A line for each different entry, the first behind a title."""
    different = list(dict.fromkeys(entries))
    return [f"{title + ':' if not i else '':18}{entry}" for i, entry in enumerate(different)]
