"""Predicted error of weights: how far from float64's the formats of an optimizer will lead them.

Note [The model]
----------------
The error after n steps is ``|p - p64| / |p64 - p0|``. A store of an update of f spacings adds an error of
variance V(f) spacings squared, and loses the share L(f): :meth:`~collage_fx.numerics.ErrorFormat.noise`. The
errors of steps are independent. With a mean update d, and a part r of variable sign, the way is
``sqrt(n**2 d**2 + n r**2)``, and the error ``sqrt(L**2 way**2 + n spacing**2 V)``.

A state without error terms that keeps the share b of its old value errs by e of itself at each step, and
keeps that for T = 1 / (1 - b) steps, or n / sqrt(3) if these are fewer. A mean of squares is below a root:
e T / 2 of the mean update. A mean of gradients is the update: e T u / d of it. If the update repays the
rounding, only the present error is left: e T u / sqrt(1 - b**2), once.

The sizes of updates are those of the run, from a sample of its weights, as soon as the learning rate has not
risen for 48 steps, so that no warm-up is judged. Parts of the sample's way have their mean update in common,
and nothing else. Before, ``explain`` and ``bytes_per_parameter="auto"`` try a float64 copy of the optimizer
with a sample of the weights, and gradients of the present size with three tenths in one direction.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.graph import Role
from collage_fx.numerics import (
    ERROR_FORMATS,
    PACKED_FORMATS,
    ErrorFormat,
    format_named,
    is_low_precision,
    storage_format,
)
from collage_fx.options.budgets import Budget
from collage_fx.report.tensors import TensorReport
from collage_fx.state import clone_of, host_twin, parameter_names, record_of
from collage_fx.torch_compat import local_tensor, real_tensors, records

log = logging.getLogger("collage_fx")

#: Steps after which an error is predicted. Errors: warned of from, up to for "auto", and shown from.
STEPS, TOO_LARGE, ENOUGH, SHOWN = 600, 0.05, 0.02, 1e-4

#: Largest number of tensors in a sample, and of elements of each, about.
TENSORS, ELEMENTS = 8, 2048

#: Steps after which samples are taken.
TAKEN = (8, 24, 40, 55, 56)


class Sample(NamedTuple):
    """Sample of a parameter, and sizes of its updates.

    Attributes:
        values: float64; ``rest`` is the magnitude of value less hi.
        dtype, elements: dtype, and number of elements, of the whole parameter.
        change, mean, random: size of a step's update, and squares of its mean and of its random part.
        moved: how far elements go, relative to the root of the mean square.
    """

    values: Tensor
    rest: Tensor
    dtype: torch.dtype
    elements: int
    change: float = 0.0
    mean: float = 0.0
    random: float = 0.0
    moved: Tensor = torch.ones(())


class _State(NamedTuple):
    """State without error terms that keeps a share of its old value."""

    format: ErrorFormat
    share: float
    is_of_squares: bool
    is_repaid: bool = False


@dataclass
class Updates:
    """Part of an optimizer's record: its updates, of a trial, and then of the run.

    Attributes:
        of: name of a parameter -> sample and updates; empty if they are not known.
        lr: largest learning rate, with which they were made.
    """

    of: dict[str, Sample] = field(default_factory=dict)
    lr: float = 0.0
    _taken: list[dict[str, Sample]] = field(default_factory=list)
    _steps: int = 0
    _first_lr: float = 0.0
    _is_of_run: bool = False

    def after_step(self, optimizer: Optimizer, backend: Any) -> None:
        """Take a sample after some steps of the run; warn, once, if the predicted error is too large."""
        self._steps += 1
        if self._steps != TAKEN[len(self._taken)] or self._is_of_run:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        lr = _rate(optimizer, "lr")
        self._first_lr = self._first_lr if self._taken else lr
        self._taken.append(_samples(optimizer))
        if len(self._taken) == len(TAKEN):
            if 0 < lr <= self._first_lr:
                self.of, self.lr, self._is_of_run = _updates(self._taken), lr, True
                self._warn(backend.label([optimizer]), [*backend.reports])
            self._taken, self._steps = [], 0

    def _warn(self, subject: str, reports: Sequence[Any]) -> None:
        graphs = [graph for graph in reports if graph.updates is self]
        error = predicted_error(self, (row for graph in graphs for row in graph.tensors))
        if error is None or error <= TOO_LARGE:
            return
        used, *budgets = graphs[-1].budgets or (None,)
        better = enough(self, budgets or [Budget("plus", "exact")], TOO_LARGE)
        remedy = "no budget is enough for updates that small: use a larger learning rate, or float64"
        if better is not None:
            asked = (
                f"bytes_per_parameter={math.ceil(better.bytes * 10) / 10:g}"
                if budgets
                else "error_format='exact'"
            )
            remedy = f"collage_fx.install(optimizer, {asked})"
        held = f" in {used.bytes:.3g} bytes per parameter" if used else ""
        warnings.warn(
            f"collage_fx: {subject}{held}: {self.described(error)} Its formats have too few bits "
            f"for such updates.\n  what to do: {remedy}",
            stacklevel=4,
        )

    def described(self, error: float) -> str:
        """Describe a predicted error, and the sizes that it follows from."""
        count = sum(each.elements for each in self.of.values())
        size = math.sqrt(sum(s.elements * float(s.values.square().mean()) for s in self.of.values()) / count)
        made = "this run's updates" if self._is_of_run else "updates of a trial"
        return (
            f"Predicted error of the weights after {STEPS} steps: {error:.2g} of the way that they go in "
            f"float64, for weights of size {size:.2g}, lr {self.lr:g} and {made}."
        )


def known_updates(optimizers: Iterable[Optimizer]) -> Updates | None:
    """Return the updates of the first of some optimizers that has a place for them."""
    return next(filter(None, (records.find(each, Updates) for each in optimizers)), None)


def try_updates(optimizer: Optimizer) -> Updates:
    """Return an optimizer's updates; if none are known yet, try a copy of the optimizer.

    They stay unknown if the learning rate is 0, if they depend on the size of gradients and a parameter has
    no gradient, or if a float64 copy cannot be stepped.
    """
    found = records.of(optimizer, Updates)
    lr = max(_rate(optimizer, "lr"), _rate(optimizer, "initial_lr"))
    if found.of or not lr > 0:
        return found
    try:
        samples, found.lr = _samples(optimizer), lr
        gradients = [p.grad for name, p in parameter_names(optimizer) if name in samples]
        known = [float(local_tensor(g.to_dense()).double().norm()) for g in gradients if g is not None]
        elements = sum(g.numel() for g in gradients if g is not None)
        size = math.hypot(*known) / math.sqrt(elements) if any(known) else 1.0
        tried = _trial(optimizer, samples, size)
        if any(known) or _way(tried) < 2 * _way(_trial(optimizer, samples, size / 16)):
            found.of = tried
    except Exception as error:  # any exception of an optimizer that does not take these gradients
        log.info("%s: no error is predicted: %s", type(optimizer).__name__, error)
    return found


def predicted_error(updates: Updates, rows: Iterable[TensorReport]) -> float | None:
    """Return the error that is predicted for the formats in a report's rows; None if it is not known."""
    weights, states = dict[str, ErrorFormat](), dict[str, _State]()
    for row in rows:
        fmt = format_named(row.error_format)
        if fmt is not None and row.role is Role.PARAMETER:
            weights[row.name] = fmt
        elif fmt is not None and row.role is Role.STATE and not row.compensated:
            share = sympy.diff(row.expression, sympy.Symbol(row.symbol))
            if share.is_number and 0 < share < 1:
                is_of_squares = bool(row.expression.atoms(sympy.Pow))
                states[row.symbol] = _State(fmt, float(share), is_of_squares, row.is_repaid)
    return _predicted(
        [(s, weights[name]) for name, s in updates.of.items() if name in weights], states.values()
    )


def enough(updates: Updates | None, budgets: Sequence[Budget], most: float = ENOUGH) -> Budget | None:
    """Return the first of some budgets whose predicted error, by Adam's state, is at most ``most``.

    If nothing is known, it is the first that keeps float32's weights; None if no budget is enough.
    """
    for each in budgets:
        states = []
        if each.strategy == "light":  # bfloat16 in place of state that is not packed
            states = [_State(PACKED_FORMATS[each.state or "bf16"][1], 0.999, is_of_squares=True)]
        fmt = ERROR_FORMATS[each.error_format]
        with real_tensors():  # a step may be traced now
            error = _predicted([(s, fmt) for s in updates.of.values()], states) if updates else None
        if (each.error_format == "exact") if error is None else error <= most:
            return each
    return None


def _predicted(known: Sequence[tuple[Sample, ErrorFormat]], states: Iterable[_State]) -> float | None:
    wrong = whole = steps = 0.0
    for sample, fmt in known:
        values, drift, way = sample.values, STEPS * math.sqrt(sample.mean), _way({"": sample}) ** 2
        # Half an ulp is .72 u of a value on average. Error terms are anywhere below, or as far as updates.
        most = 0.72 * float(storage_format(sample.dtype).unit_roundoff)
        times = torch.linspace(0, 1, 8, device=values.device).reshape(-1, *[1] * values.dim())
        reached = (values.abs() * most).minimum(drift * sample.moved)
        spacing = fmt.spacing(values, torch.maximum(sample.rest, reached * times), sample.dtype)
        lost, variance = fmt.noise(sample.change / spacing)
        lost = lost.mean(0) * sample.moved
        noise = float((spacing.square() * variance).mean())
        wrong += float(lost.square().mean()) * way + sample.elements * STEPS * noise
        whole += way
        steps += sample.elements * STEPS * sample.change**2
    if not whole:
        return None
    total = wrong / whole
    mantissas = torch.linspace(1, 2, 64, dtype=torch.float64)
    for state in states:
        spacing = state.format.spacing(mantissas, mantissas, torch.bfloat16) / mantissas
        own = float((spacing.square() * state.format.noise((1 - state.share) / spacing)[1]).mean())
        if state.is_repaid:
            total += own / (1 - state.share) ** 2 / (1 - state.share**2) * steps / whole / STEPS
        else:
            kept = 1 / (1 - state.share + math.sqrt(3) / STEPS)
            total += own * kept**2 * (0.25 / STEPS if state.is_of_squares else steps / whole)
    return math.sqrt(total)


def _trial(optimizer: Optimizer, samples: dict[str, Sample], size: float) -> dict[str, Sample]:
    """Return the updates of a float64 copy of an optimizer, by gradients of a size."""
    small = {name: torch.nn.Parameter(sample.values.clone()) for name, sample in samples.items()}
    nothing = torch.nn.Parameter(torch.empty(0))
    replaced = {id(p): small.get(name, nothing) for name, p in parameter_names(optimizer)}
    clone = clone_of(optimizer, {**replaced, id(optimizer.state): defaultdict(dict)})
    for group in clone.param_groups:
        group["lr"] = max(float(group.get("lr") or 0), float(group.get("initial_lr") or 0))
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(TAKEN[-1] + 1, *p.shape, generator=generator) for name, p in small.items()}
    taken, step = [], inspect.unwrap(type(clone).step)  # without the hooks of all optimizers
    for i in range(1, TAKEN[-1] + 1):
        for name, p in small.items():
            p.grad = ((drawn[name][i] + 0.3 * drawn[name][0]) * size / math.hypot(1, 0.3)).to(p)
        with torch.no_grad():
            step(clone)
        if i in TAKEN:
            taken.append(
                {name: samples[name]._replace(values=p.detach().clone()) for name, p in small.items()}
            )
    return _updates(taken)


def _samples(optimizer: Optimizer) -> dict[str, Sample]:
    """Return samples of the whole values of an optimizer's largest bfloat16 and float16 parameters."""
    low = [(name, host_twin(p)) for name, p in parameter_names(optimizer) if is_low_precision(p.dtype)]
    found = {}
    for name, p in sorted(low, key=lambda each: -each[1].numel())[:TENSORS]:
        hi, record = local_tensor(p.detach()), record_of(p)
        if hi.numel() and (record is None or record.format.is_elementwise):
            most = math.ceil(ELEMENTS ** (1 / max(1, hi.dim())))
            places = tuple(slice(None, None, -(-size // most)) for size in hi.shape)
            value = near = hi[places].double()
            if record is not None:
                terms = (each[places] if each.dim() else each for each in record.auxiliaries)
                value = record.format.join(hi[places], *terms).double()
            found[name] = Sample(value, (value - near).abs(), hi.dtype, p.numel())
    return found


def _updates(taken: Sequence[dict[str, Sample]]) -> dict[str, Sample]:
    """Add the sizes of updates to the last of the samples that were taken after the steps :data:`TAKEN`."""
    part, whole, found = TAKEN[1] - TAKEN[0], TAKEN[-1] - TAKEN[0], {}
    for name, last in taken[-1].items():
        values = [each[name].values for each in taken if name in each]
        if len(values) == len(taken) and len({each.shape for each in values}) == 1:
            early, late = values[1] - values[0], values[4] - values[2]
            mean = max(0.0, float((early * late).mean())) / part**2
            moved = (values[4] - values[0]).abs()
            square, change = float(moved.square().mean()), float((values[4] - values[3]).abs().mean())
            random = max(0.0, square / whole - whole * mean)
            moved /= math.sqrt(square) or 1.0
            found[name] = last._replace(change=change, mean=mean, random=random, moved=moved)
    return found


def _way(samples: dict[str, Sample]) -> float:
    """Return how far weights go in all steps."""
    return math.sqrt(sum(s.elements * (STEPS**2 * s.mean + STEPS * s.random) for s in samples.values()))


def _rate(optimizer: Optimizer, key: str) -> float:
    """Return the largest number that the groups have under a key."""
    return max((float(group.get(key) or 0) for group in optimizer.param_groups), default=0.0)
