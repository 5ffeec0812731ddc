"""Predicted error of weights: how far from float64's the formats of an optimizer lead them in 600 steps.

Note [The model]
----------------
The error after n steps is ``|p - p64| / |p64 - p0|``. A store of an update of f spacings adds an error of
variance V(f) spacings squared, and loses the share L(f): :meth:`~collage_fx.numerics.ErrorFormat.noise`. The
errors of steps are independent. With a mean update d, and a part r of variable sign, the way is
``sqrt(n**2 d**2 + n r**2)``, and the error ``sqrt(L**2 way**2 + n spacing**2 V)``.

A state without error terms that keeps the share b of its old value errs by e of itself at each step, and
keeps that for T = 1 / (1 - b) steps, or n / sqrt(3) if these are fewer. A mean of squares is below a root:
e T / 2 of the mean update. A mean of gradients is the update, of size u: e T u / d of it. If the update
repays the rounding, only the present error is left: e T u / sqrt(1 - b**2), once.

The sizes of updates are those of the run, from a sample of its weights, as soon as the learning rate has not
risen for 48 steps, so that no warm-up is judged. Before, ``explain`` and ``bytes_per_parameter="auto"`` try a
float64 copy of the optimizer with the sample, and gradients of the present size with three tenths in one
direction.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.errors import warn
from collage_fx.graph import Role
from collage_fx.numerics import PACKED_FORMATS, ErrorFormat, format_named, is_low_precision
from collage_fx.options.budgets import Budget
from collage_fx.report.tensors import TensorReport
from collage_fx.state import clone_of, host_twin, parameter_names, record_of
from collage_fx.torch_compat import local_tensor, real_tensors, records

log = logging.getLogger("collage_fx")

#: Steps after which an error is predicted. Errors: warned of from, up to for "auto", and shown from.
STEPS, TOO_LARGE, ENOUGH, SHOWN = 600, 0.05, 0.02, 1e-4

#: Largest number of tensors in a sample, and of elements of each, about.
TENSORS, ELEMENTS = 8, 2048

#: Steps after which samples are taken. The first three and the others have only the mean update in common.
TAKEN = (8, 24, 40, 55, 56)

OF_TRIAL, OF_RUN = "updates of a trial", "this run's updates"


class Motion(NamedTuple):
    """Sample of a parameter, and sizes of its updates.

    Attributes:
        values: sample of the whole values, float64.
        dtype, elements: dtype, and number of elements, of the parameter.
        change: mean magnitude of a step's update.
        drift, way: root mean squares of how far elements go in 600 steps: by the mean update, and by all.
    """

    values: Tensor
    dtype: torch.dtype
    elements: int
    change: float
    drift: float
    way: float


@dataclass
class Updates:
    """Part of an optimizer's record: its updates, of a trial, and then of the run.

    Attributes:
        of: name of a parameter -> its motion; empty if no updates are known.
        lr: largest learning rate, with which they were made.
    """

    of: dict[str, Motion] = field(default_factory=dict)
    lr: float = 0.0
    made: str = OF_TRIAL
    _steps: int = 0
    _taken: list[tuple[float, dict[str, Tensor]]] = field(default_factory=list)

    def after_step(self, optimizer: Optimizer, backend: Any) -> None:
        """Take a sample after some steps of the run; warn, once, if the predicted error is too large."""
        self._steps += 1
        if self.made == OF_RUN or self._steps != TAKEN[len(self._taken)]:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        lr = _largest("lr", optimizer.param_groups)
        self._taken.append((lr, _samples(optimizer)))
        if self._steps == TAKEN[-1]:
            if 0 < lr <= self._taken[0][0]:
                samples = [sample for _, sample in self._taken]
                self.of, self.lr, self.made = _motions(optimizer, samples), lr, OF_RUN
                self._warn(backend.label([optimizer]), backend.reports)
            self._steps, self._taken = 0, []

    def _warn(self, subject: str, reports: Sequence[Any]) -> None:
        graphs = [graph for graph in reports if graph.updates is self]
        error = predicted_error(self, (row for graph in graphs for row in graph.tensors))
        if error is None or error <= TOO_LARGE:
            return
        used, *budgets = graphs[-1].budgets or (None, Budget("plus", "exact"))
        remedy = "no budget is enough for updates that small: use a larger learning rate, or float64"
        if better := enough(self, budgets, TOO_LARGE):
            least = f"bytes_per_parameter={math.ceil(better.bytes * 10) / 10:g}"
            asked = least if used else "error_format='exact'"
            remedy = f"collage_fx.install(optimizer, {asked})"
        held = f" in {used.bytes:.3g} bytes per parameter" if used else ""
        warn(
            f"{subject}{held}: {self.described(error)} Its formats have too few bits for such updates.\n"
            f"  what to do: {remedy}"
        )

    def described(self, error: float) -> str:
        """Describe a predicted error, and the sizes that it follows from."""
        squares = sum(each.elements * float(each.values.square().mean()) for each in self.of.values())
        size = math.sqrt(squares / sum(each.elements for each in self.of.values()))
        return (
            f"Predicted error of the weights over {STEPS} steps: {error:.2g} of the way that they go in "
            f"float64 in these steps, for weights of size {size:.2g}, lr {self.lr:g} and {self.made}."
        )


def updates_of(optimizers: Iterable[Optimizer]) -> Updates:
    """Return the updates of the first of some optimizers."""
    return next((records.of(each, Updates) for each in optimizers), Updates())


def try_updates(optimizer: Optimizer) -> Updates:
    """Return an optimizer's updates; if none of the run are known, try a copy at its learning rate.

    They stay unknown if the learning rate is 0, if no bfloat16 or float16 values can be read, if they depend
    on the size of gradients and there is no gradient, or if the step of the copy raises.
    """
    found, samples = records.of(optimizer, Updates), _samples(optimizer)
    lr = max(_largest(key, optimizer.param_groups) for key in ("lr", "initial_lr"))
    if found.made == OF_RUN or lr == found.lr or not samples or not lr > 0:
        return found
    given = [p.grad for name, p in parameter_names(optimizer) if name in samples and p.grad is not None]
    gradients = [local_tensor(each).to_dense() for each in given]
    norm = math.hypot(*(float(each.norm(dtype=torch.float64)) for each in gradients))
    size = norm / math.sqrt(sum(each.numel() for each in gradients)) if norm else 1.0
    tried = _trial(optimizer, samples, size)
    is_known = norm or _way(tried) < 2 * _way(_trial(optimizer, samples, size / 16))
    found.of, found.lr = (tried, lr) if is_known else ({}, 0.0)
    return found


def predicted_error(updates: Updates, rows: Iterable[TensorReport]) -> float | None:
    """Return the error over 600 steps that is predicted for the formats in a report's rows, or None."""
    weights, states = dict[str, ErrorFormat](), dict[str, tuple[float, float]]()
    for row in rows:
        fmt = format_named(row.error_format)
        if fmt is not None and row.role is Role.PARAMETER:
            weights[row.name] = fmt
        elif fmt is not None and row.role is Role.STATE and not row.compensated:
            share = sympy.diff(row.expression, sympy.Symbol(row.symbol))
            if share.is_number and 0 < share < 1:
                are_squares = bool(row.expression.atoms(sympy.Pow))
                states[row.symbol] = _by_state(
                    fmt, float(share), is_repaid=row.is_repaid, are_squares=are_squares
                )
    return _predicted(updates, weights, states.values())


def enough(updates: Updates, budgets: Sequence[Budget], most: float = ENOUGH) -> Budget | None:
    """Return the first of some budgets whose predicted error, by Adam's state, is at most ``most``.

    If nothing is known, it is the first that keeps float32's weights; None if no budget is enough.
    """
    for each in budgets:
        fmt = PACKED_FORMATS[each.state or "bf16"][1]  # bfloat16 in place of state that is not packed
        formats = dict.fromkeys(updates.of, each.of_parameters)
        with real_tensors():  # a step may be traced now
            state = _by_state(fmt, 0.999, is_repaid=False, are_squares=True)
            error = _predicted(updates, formats, [state] if each.strategy == "light" else [])
        if (each.error_format == "exact") if error is None else error <= most:
            return each
    return None


def _predicted(
    updates: Updates, formats: Mapping[str, ErrorFormat], states: Iterable[tuple[float, float]]
) -> float | None:
    wrong = whole = steps = 0.0
    for name in updates.of.keys() & formats.keys():
        values, dtype, elements, change, drift, way = updates.of[name]
        size = values.flatten().abs().clamp(min=torch.finfo(torch.float32).tiny)
        # An error term is as now or larger: half an ulp, 0.36 eps of values on average, or as far as they go,
        # which is twice the mean for some. Those lose most.
        most = (0.36 * torch.finfo(dtype).eps * size).clamp(max=2 * drift)
        now = (values - values.to(dtype)).flatten().abs()
        rest = torch.maximum(now, torch.linspace(0, 1, 8, device=size.device)[:, None] * most)
        lost, variance = formats[name].noise(change, size, rest, dtype)
        wrong += elements * float(lost.mean(0).square().mean() * way**2 + STEPS * variance.mean())
        whole += elements * way**2
        steps += elements * change**2
    if not 0 < whole < math.inf:
        return None
    return math.sqrt((wrong + sum(of_step * steps + of_way * whole for of_step, of_way in states)) / whole)


def _by_state(fmt: ErrorFormat, share: float, *, is_repaid: bool, are_squares: bool) -> tuple[float, float]:
    """Return the squared error that a state causes, as shares of the squares of an update and of the way."""
    _, own = fmt.noise(1 - share, torch.ones(()), torch.ones(()), torch.bfloat16)
    kept = float(own) / (1 - share + math.sqrt(3) / STEPS) ** 2
    if is_repaid:
        return kept / (1 - share**2), 0.0
    return (0.0, kept / 4 / STEPS) if are_squares else (kept * STEPS, 0.0)


def _trial(optimizer: Optimizer, samples: dict[str, Tensor], size: float) -> dict[str, Motion]:
    """Return the motions by a float64 copy of an optimizer and gradients of a size; none if it raises."""
    small = {name: torch.nn.Parameter(values.clone()) for name, values in samples.items()}
    nothing = torch.nn.Parameter(torch.empty(0))
    replaced = {id(p): small.get(name, nothing) for name, p in parameter_names(optimizer)}
    clone = clone_of(optimizer, {**replaced, id(optimizer.state): defaultdict(dict)})
    for group in clone.param_groups:
        group["lr"] = max(_largest(key, [group]) for key in ("lr", "initial_lr"))
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(TAKEN[-1] + 1, *p.shape, generator=generator) for name, p in small.items()}
    taken, step = [], inspect.unwrap(type(clone).step)  # without the hooks of all optimizers
    for i in range(1, TAKEN[-1] + 1):
        for name, p in small.items():
            p.grad = ((drawn[name][i] + 0.3 * drawn[name][0]) * size / math.hypot(1, 0.3)).to(p)
        try:
            with torch.no_grad():
                step(clone)
        except Exception as error:  # any exception of an optimizer that does not take these gradients
            log.info("%s: no error is predicted: %s", type(optimizer).__name__, error)
            return {}
        if i in TAKEN:
            taken.append({name: p.detach().clone() for name, p in small.items()})
    return _motions(optimizer, taken)


def _samples(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return samples of the whole values of an optimizer's largest bfloat16 and float16 parameters."""
    low = [(name, host_twin(p)) for name, p in parameter_names(optimizer) if is_low_precision(p.dtype)]
    found = {}
    for name, p in sorted(low, key=lambda each: -each[1].numel())[:TENSORS]:
        hi, record = local_tensor(p.detach()), record_of(p)
        is_real = type(hi) is Tensor or (record is not None and not record.format.keeps_hi)  # and not fake
        is_readable = is_real and not hi.is_meta and hi.numel()
        if is_readable and (record is None or record.format.is_elementwise or record.format.by_rows):
            most = math.ceil(ELEMENTS ** (1 / max(1, hi.dim())))
            places = tuple(slice(None, None, -(-size // most)) for size in hi.shape)
            if record is None:
                value = hi[places]
            elif record.format.is_elementwise:
                value = record.value_at(places)
            else:  # elements of a row have scales in common
                value = record.value_at(places[:1])[(slice(None), *places[1:])]
            found[name] = value.double()
    return found


def _motions(optimizer: Optimizer, taken: Sequence[dict[str, Tensor]]) -> dict[str, Motion]:
    """Return the motions of parameters by samples that were taken after the steps :data:`TAKEN`."""
    found = {}
    for name, p in parameter_names(optimizer):
        values = [sample[name] for sample in taken if name in sample]
        if len(values) == len(TAKEN) and len({each.shape for each in values}) == 1:
            first, second, third, fourth, last = values
            steps = TAKEN[-1] - TAKEN[0]
            common = float(((second - first) * (last - third)).mean())
            drift = STEPS * math.sqrt(max(common, 0.0)) / (TAKEN[1] - TAKEN[0])
            random = float((last - first).square().mean()) * STEPS / steps - drift**2 * steps / STEPS
            change = float((last - fourth).abs().mean())
            way = math.sqrt(drift**2 + max(0.0, random))
            found[name] = Motion(last, p.dtype, p.numel(), change, drift, way)
    return found


def _way(motions: dict[str, Motion]) -> float:
    return math.hypot(*(math.sqrt(each.elements) * each.way for each in motions.values()))


def _largest(key: str, groups: Iterable[dict[str, Any]]) -> float:
    return max((float(group.get(key) or 0) for group in groups), default=0.0)
