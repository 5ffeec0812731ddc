"""Tool ``audit``: measure how precise an optimizer is in low precision.

All runs of an audit start from the same low-precision weights, drawn from N(0, 1), and get the same
low-precision gradients: a fixed direction with entries between 1/2 and 3/2 in magnitude, plus noise of
standard deviation 1/3. So the net displacement has a direction, signs change now and then, and no gradient
underflows when it is squared. The optimizer runs eagerly in low precision, in float32 and in float64, and
installed in low precision. The error of a run is ‖Δ - Δ64‖ / ‖Δ64‖, where Δ is the displacement of the
parameters in that run (of hi + lo if installed), and Δ64 the displacement in float64.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from collage_fx import CollageBackend, error_terms, full_value, install
from collage_fx.choices import AUDIT_STEPS, takes_options
from collage_fx.errors import CollageError, InvalidOptionError
from collage_fx.graph import Role
from collage_fx.numerics import STORAGE_FORMATS
from collage_fx.options import GivenOptions
from collage_fx.tools import (
    bytes_held,
    conversions,
    forget_counts,
    known_tensors,
    recompile_reasons,
    refuse_unknown,
    try_updates,
)

#: Outcomes of a measurement. COMPENSATED, and PACKED for float32 parameters, are the good outcomes.
COMPENSATED = "compensated"
PACKED = "packed"
GOOD = (COMPENSATED, PACKED)
REFUSED = "refused"
UNSUPPORTED = "does not run eagerly"
NOTHING_TO_COMPARE = "nothing to compare"
RECOMPILES = "recompiles"
SILENT = "silently plain"
INACCURATE = "inaccurate"
FAILED = "fails"

#: Largest error of float32 parameters with packed state: that of ``block8`` on hard gradients.
MOST_OF_PACKED = 0.1

#: Default shapes, a matrix and a vector: enough for optimizers that treat them differently.
SHAPES = ((24, 16), (16,))
STEPS = AUDIT_STEPS
#: Fewest steps: under the second schedule, the first and the last step have learning rate 0.
FEWEST_STEPS = 3
WARM_UP = 10
#: Number of steps without gradients, in which weight decay is measured.
STEPS_OF_DECAY = 400

Parameters = list[torch.nn.Parameter]
Make = Callable[[Parameters], Optimizer]

#: Function ``(step, steps) -> factor`` of the learning rate.
Schedule = Callable[[int, int], float]

#: Learning rate schedules by name. The second is the default of trainers: it begins and ends at 0.
SCHEDULES: Mapping[str, Schedule | None] = {
    "constant": None,
    "0, up, down to 0": lambda step, steps: min(step, WARM_UP, steps - 1 - step) / WARM_UP,
}


@dataclass
class Measurement:
    """Outcome of measuring an optimizer under a learning rate schedule.

    Attributes:
        outcome: one of the constants above, such as :data:`COMPENSATED`.
        reason: reason of an outcome other than ``compensated``.
        graphs, compilations: numbers of graphs that the backend got in the first step, and in all steps.
        seconds: time from the call of the first step to the end of the last compilation.
        late: number of compilations in the second half of the steps, 0 in a steady state: graphs of the
            backend, and frames that Dynamo translated.
        compensated, packed: state tensors with error terms, and packed, by their names (``exp_avg``).
        left: other state tensors without error terms, as ``(name, reason)``.
        plain, single, error: errors of eager low precision, of eager float32, which is what float32 master
            weights do, and of compensated low precision (``hi + lo``); None without a run.
        decay_single, decay: shares of float64's weight decay that float32 and compensated low precision
            apply in steps without gradients; None without weight decay.
        bytes: bytes of parameters, state and error terms at the end, per element of the parameters.
        predicted: predicted error after more steps, and sizes of weights and updates; empty if not known.
        recompiles: reasons of recompilations that Dynamo gave.
        routes: routes of the graphs through the compiler: captured or recorded, by family or not.
    """

    outcome: str = ""
    reason: str = ""
    graphs: int = 0
    compilations: int = 0
    seconds: float = 0
    late: int = 0
    compensated: list[str] = field(default_factory=list)
    packed: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    plain: float | None = None
    single: float | None = None
    error: float | None = None
    decay_single: float | None = None
    decay: float | None = None
    bytes: float | None = None
    predicted: str = ""
    recompiles: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    routes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Audit:
    """Result of :func:`audit`; prints as text: a title, and the measurements by schedule."""

    subject: str
    measured: Mapping[str, Measurement]

    @property
    def is_good(self) -> bool:
        """Whether the optimizer is compensated, and as precise as it can be, under every schedule."""
        return all(each.outcome in GOOD for each in self.measured.values())

    def __str__(self) -> str:
        rows = [
            {
                "learning rate": schedule,
                "plain": _shown(each.plain),
                "fp32 masters": _shown(each.single),
                "compensated": _shown(each.error),
                "decay, fp32 masters": _share(each.decay_single),
                "decay": _share(each.decay),
                "compiled": each.compilations,
                "seconds": f"{each.seconds:.1f}",
                "outcome": each.outcome,
            }
            for schedule, each in self.measured.items()
        ]
        every = list(self.measured.values())
        lines = [self.subject, "", tabulate(rows, headers="keys", disable_numparse=True), ""]
        lines += _listed("with error terms", (name for each in every for name in each.compensated))
        lines += _listed("packed", (name for each in every for name in each.packed))
        lines += _listed("without", (f"{name}: {why}" for each in every for name, why in each.left))
        lines += _listed("route", (route for each in every for route in each.routes))
        lines += _listed("predicted", (each.predicted for each in every if each.predicted))
        lines += _listed("notes", (note for each in every for note in (each.reason, *each.notes) if note))
        return "\n".join([*lines, "", f"Verdict: {self.verdict}"])

    @property
    def verdict(self) -> str:
        """Verdict as a sentence."""
        every = list(self.measured.values())
        bad = [f"{name}: {each.outcome}" for name, each in self.measured.items() if each.outcome not in GOOD]
        if all(each.outcome == NOTHING_TO_COMPARE for each in every):
            return f"none, because {every[0].reason}"
        if bad:
            return f"not precise ({'; '.join(bad)})"
        is_packed = all(each.outcome == PACKED for each in every)
        of_others = ((each.error, each.single if is_packed else each.plain) for each in every)
        known = [(error, other) for error, other in of_others if error is not None and other is not None]
        if not known:
            return f"{PACKED if is_packed else COMPENSATED}; there is no float64 run to compare with"
        if is_packed:
            error, single = max(known)
            return f"packed: the error is {error:.2g} at most, where that of float32 state is {single:.2g}"
        gain = min(plain / error if error else math.inf for error, plain in known)
        if math.isinf(gain):
            return "precise: the compensated steps have no error"
        return f"precise: the error of plain low precision is {gain:.3g} times as large"


@takes_options
def audit(
    make: Make,
    *,
    shapes: Sequence[Sequence[int]] = SHAPES,
    dtype: torch.dtype = torch.bfloat16,
    steps: int = STEPS,
    schedules: Mapping[str, Schedule | None] = SCHEDULES,
    **options: Unpack[GivenOptions],
) -> Audit:
    """Measure how precise an optimizer is in low precision: 4 to 7 runs per schedule, mostly half a minute.

    ``print(collage_fx.audit(lambda params: MyOptimizer(params, lr=1e-4)))``

    Args:
        make: function that creates the optimizer for a list of parameters; called for each run.
        shapes: shapes of the parameters.
        dtype: dtype of parameters and gradients: bfloat16, float16, or with packed state float32.
        steps: number of steps under each schedule.
        schedules: functions ``(step, steps) -> factor`` of ``group["lr"]`` by name; None: no change of the
            learning rate.
        options: options of :class:`CollageBackend`, such as ``strategy="light"``.

    Returns:
        Errors, compilations, seconds, error terms and a verdict, for each schedule.

    Raises:
        CollageError: an argument is not allowed; nothing has been measured.
    """
    refuse_unknown(options, audit)
    allowed = {*STORAGE_FORMATS, *([torch.float32] if CollageBackend(**options).options.packs else [])}
    dtypes = f"{', '.join(map(str, STORAGE_FORMATS))}, or torch.float32 with state= or bytes_per_parameter="
    for is_right, where, met, remedy in (
        (dtype in allowed, "dtype", f"dtype={dtype} is not allowed: it needs no compensation", dtypes),
        (any(map(math.prod, shapes)), "shapes", "no shape has an element", "shapes such as (64, 64)"),
        (steps >= FEWEST_STEPS, "steps", f"steps={steps} is not allowed", f"{FEWEST_STEPS} or more"),
        (schedules, "schedules", "there is no schedule", '{"constant": None}, or leave it out'),
    ):
        if not is_right:
            raise InvalidOptionError(met, where=where, remedy=f"use {remedy}")
    trial = Trial(make, tuple(map(tuple, shapes)), dtype, steps, options=options)
    with contextlib.redirect_stdout(io.StringIO()):  # some optimizers print messages
        subject = make(weights_of(trial, dtype))
        measured = {name: measure_trial(replace(trial, schedule=each)) for name, each in schedules.items()}
    sizes = ", ".join("×".join(map(str, shape)) or "0-d" for shape in trial.shapes)
    lrs = {str(group.get("lr")) for group in subject.param_groups}
    return Audit(
        f"{type(subject).__module__}.{type(subject).__qualname__}, lr {', '.join(sorted(lrs))}: "
        f"{steps} steps of {str(dtype).removeprefix('torch.')} parameters {sizes}",
        measured,
    )


@dataclass(frozen=True)
class Trial:
    """Settings of a measurement.

    Attributes:
        steps: number of steps; a compilation in their second half counts as a fault.
        make_eager: function that creates the optimizer for the eager runs, if it differs there.
        closure: whether ``step`` needs a closure, although its signature does not say so.
        backend: function that makes the backend of the ``options``.
        with_decay: whether weight decay is measured, in steps without gradients.
        of_each: whether the errors are those of the worst parameter, not of all of them together.
    """

    make: Make
    shapes: Sequence[Sequence[int]] = SHAPES
    dtype: torch.dtype = torch.bfloat16
    steps: int = STEPS
    make_eager: Make | None = None
    schedule: Schedule | None = None
    sparse: bool = False
    closure: bool = False
    is_still: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    backend: Callable[..., CollageBackend] = CollageBackend
    with_decay: bool = True
    of_each: bool = False


def falls_short(plain: float, compensated: float) -> bool:
    """Return whether a compensated error is infinite, or too large beside plain low precision's.

    Too large is more than a tenth of a plain error of 0.2 or more, and more than 1.05 times any plain error:
    two ways of rounding may differ so much.
    """
    return (
        math.isinf(compensated) or compensated > 1.05 * plain or (plain >= 0.2 and compensated > plain / 10)
    )


def measure_trial(trial: Trial) -> Measurement:
    """Measure the runs of a trial: eager in three dtypes, then compiled."""
    measured = Measurement()
    runs: dict[torch.dtype, Tensor] = {}
    for each in dict.fromkeys((trial.dtype, torch.float32, torch.float64)):
        try:
            runs[each] = _eager_displacement(trial, each)
        except Exception as error:  # any exception of an optimizer is a result of the audit
            if each is trial.dtype:
                measured.outcome, measured.reason = UNSUPPORTED, _message(error)
                return measured
            measured.notes.append(f"no {each} run: {_message(error)}")
    exact, plain, single = runs.get(torch.float64), math.nan, 0.0
    if exact is not None:
        plain = measured.plain = relative_error(trial, runs[trial.dtype], exact)
        if torch.float32 in runs:
            single = measured.single = relative_error(trial, runs[torch.float32], exact)
        if not (exact.any() and exact.isfinite().all()):
            finite = "no parameter moves" if exact.isfinite().all() else "parameters become infinite or NaN"
            measured.outcome, measured.reason = NOTHING_TO_COMPARE, f"{finite} in float64, too"
            return measured
    moved = _compiled_displacement(trial, measured)
    if moved is not None and exact is not None:
        found = measured.error = relative_error(trial, moved, exact)
        is_as_float32 = found <= 2 * single and math.isfinite(found)  # float32 is no better here
        if measured.outcome == COMPENSATED and falls_short(plain, found) and not is_as_float32:
            measured.outcome, measured.reason = INACCURATE, "although there are error terms"
        if measured.outcome == PACKED and found > MOST_OF_PACKED:
            measured.outcome, measured.reason = INACCURATE, "although most state is float32's to 8 bits"
    measures_decay = trial.with_decay and trial.schedule is None and not trial.sparse
    if measured.outcome in GOOD and measures_decay:
        _measure_decay(replace(trial, steps=STEPS_OF_DECAY, is_still=True), measured)
    return measured


def _measure_decay(trial: Trial, measured: Measurement) -> None:
    """Fill in the shares of weight decay that are applied in steps without gradients."""
    exact = _eager_displacement(trial, torch.float64)
    square = float(exact.dot(exact))
    if 0 < square < math.inf:
        measured.decay_single = float(_eager_displacement(trial, torch.float32).dot(exact)) / square
        moved = _compiled_displacement(trial, Measurement())
        measured.decay = None if moved is None else float(moved.dot(exact)) / square


def weights_of(trial: Trial, dtype: torch.dtype) -> Parameters:
    """Make the parameters that all runs start from, and seed the generators."""
    torch.manual_seed(0)  # for optimizers that draw random numbers from torch or from NumPy
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
        gradients = [gradient.to(trial.dtype).to(dtype) * (not trial.is_still) for gradient in noisy]
        yield [g.to_sparse(1) for g in gradients] if trial.sparse else gradients


def take_steps(
    trial: Trial,
    optimizer: Optimizer,
    parameters: Parameters,
    after: Callable[[], object] = bool,
    *,
    first: int = 0,
) -> None:
    """Take all steps from the ``first`` on; call ``after`` after each."""
    lrs = [group.get("lr") for group in optimizer.param_groups]
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    needs_closure = trial.closure or (closure is not None and closure.default is inspect.Parameter.empty)
    for i, gradients in itertools.islice(enumerate(_gradients(trial, parameters[0].dtype)), first, None):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if trial.schedule is not None:
            factor = trial.schedule(i, trial.steps)
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr if lr is None else lr * factor
        optimizer.step(*([partial(_closure, parameters, gradients)] if needs_closure else []))
        after()


def _closure(parameters: Parameters, gradients: Sequence[Tensor]) -> float:
    """Set the gradients anew, as a backward pass does, and return a loss."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return float(sum(p.detach().sum() for p in parameters))


def _eager_displacement(trial: Trial, dtype: torch.dtype) -> Tensor:
    parameters = weights_of(trial, dtype)
    start = values_of(parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        take_steps(trial, (trial.make_eager or trial.make)(parameters), parameters)
    return values_of(parameters) - start


def values_of(parameters: Sequence[Tensor]) -> Tensor:
    """Return the whole values of all parameters in one flat tensor."""
    return torch.cat([full_value(parameter).flatten() for parameter in parameters])


def relative_error(trial: Trial, moved: Tensor, exact: Tensor) -> float:
    """Return the error of a displacement: ``‖moved - exact‖ / ‖exact‖``."""
    sizes = [math.prod(shape) for shape in trial.shapes] if trial.of_each else [exact.numel()]
    pairs = zip((moved - exact).split(sizes), exact.split(sizes), strict=True)
    errors = [float(difference.norm() / wanted.norm()) for difference, wanted in pairs if wanted.any()]
    return max(errors, default=0.0) if all(map(math.isfinite, errors)) else math.inf


def _compiled_displacement(trial: Trial, measured: Measurement) -> Tensor | None:
    """Run the compiled steps and fill in ``measured``; None if a step raised."""
    torch.compiler.reset()
    forget_counts()
    parameters = weights_of(trial, trial.dtype)
    start = values_of(parameters)
    optimizer, backend = trial.make(parameters), trial.backend(**trial.options)
    graphs: list[int] = []  # after each step
    compiled: list[int] = []  # graphs plus Dynamo's conversions; recorded graphs need no conversion

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
            take_steps(trial, install(optimizer, backend=backend), parameters, count)
    except CollageError as refusal:
        measured.outcome = REFUSED
        measured.reason = f"{type(refusal).__name__}: {refusal.met} ({refusal.where})"
    except Exception as error:  # any exception is a result of the audit
        measured.outcome, measured.reason = FAILED, _message(error)
    count()  # also if a step raised
    try_updates(optimizer)
    measured.graphs, measured.compilations = graphs[0], graphs[-1]
    measured.late = compiled[-1] - compiled[trial.steps // 2 - 1] if len(compiled) > trial.steps else 0
    measured.recompiles = recompile_reasons()
    _describe_state(backend, measured)
    if measured.outcome:
        return None
    ours = [str(warning.message) for warning in caught if "collage_fx:" in str(warning.message)]
    measured.notes.extend(dict.fromkeys(ours))
    _judge(parameters, measured, warned=bool(ours))
    known = known_tensors({"": optimizer}).values()
    held = bytes_held(each.tensor for each in known if each.role is not Role.GRADIENT)
    measured.bytes = held / sum(p.numel() for p in parameters)
    return values_of(parameters) - start


def _describe_state(backend: CollageBackend, measured: Measurement) -> None:
    report = backend.report()
    measured.predicted = " ".join(report.predictions())
    for tensor in report.tensors:
        slot = re.sub(r"^param_groups\[\d+\]\.params\[\d+\]\.?", "", tensor.name) or "parameter"
        if tensor.compensated:
            measured.compensated.append(slot)
        elif tensor.packed:
            measured.packed.append(slot)
        else:
            measured.left.append((slot, tensor.selection))
    measured.routes = list(dict.fromkeys(each.route.with_cause() for each in backend.reports))


def _judge(parameters: Parameters, measured: Measurement, *, warned: bool) -> None:
    """Set the outcome of a run that finished."""
    # Infinite values have no error terms.
    finite = ((i, p) for i, p in enumerate(parameters) if p.isfinite().all())
    plain = [i for i, p in finite if not any(bool(t.any()) for t in error_terms(p))]
    is_float32 = all(p.dtype is torch.float32 for p in parameters)
    if is_float32 and not measured.packed:
        measured.outcome, measured.reason = SILENT, "no state is packed"
    elif is_float32 and not warned:
        measured.outcome = PACKED
    elif plain and warned:
        measured.outcome = REFUSED  # the notes say why
    elif plain:
        measured.outcome, measured.reason = SILENT, f"parameters {plain} have no error terms, or all zero"
    else:
        measured.outcome = COMPENSATED
    if measured.outcome in GOOD and measured.late:
        last = measured.recompiles[-1] if measured.recompiles else "no reason given"
        measured.outcome, measured.reason = RECOMPILES, last


def _message(error: BaseException) -> str:
    """Return the exception's type and message, without Dynamo's account of the location."""
    error = getattr(error, "inner_exception", error)  # the backend's exception, which Dynamo has wrapped
    text = str(error).partition("\nfrom user code")[0].partition("\n For more details")[0]
    return f"{type(error).__name__}: {text.strip()}"


def _shown(error: float | None) -> str:
    return "" if error is None else "< 0.001" if error < 1e-3 else f"{error:.2g}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"


def _listed(title: str, entries: Iterable[str]) -> list[str]:
    different = list(dict.fromkeys(entries))
    return [f"{title + ':' if not i else '':18}{entry}" for i, entry in enumerate(different)]
