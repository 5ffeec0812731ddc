"""One variant of the compatibility table, measured as ``collage_fx.audit`` measures optimizers."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from collage_fx import CollageBackend, error_terms, install
from collage_fx.errors import CollageError
from collage_fx.graph import Role
from collage_fx.state.optimizers import known_tensors
from collage_tools.audit import (
    COMPENSATED,
    FAILED,
    INACCURATE,
    REFUSED,
    UNSUPPORTED,
    Make,
    Measurement,
    Trial,
    measure_trial,
    relative_error,
    take_steps,
    values_of,
    weights_of,
)
from tests.compatibility.catalog import (
    BEFORE_SAVED,
    DTYPES,
    ON_OTHER_SHAPES,
    OTHER_SHAPES,
    RESUMED,
    RESUMED_STEPS,
    STEPS,
    Variant,
)
from tests.support.twin import TwinBackend

__all__ = ["DIFFERS", "interpreting", "measure", "measure_quickly"]

#: Python-side options without which eager execution on the CPU gives the same numbers, and with which it
#: refuses.
COMPILED_ONLY = ("capturable", "fused")

#: Outcome of a resumed run whose bits are not those of the run that went on.
DIFFERS = "differs"


def interpreting(**options: Any) -> CollageBackend:
    """Make a backend that runs the rewritten graphs operation by operation: nothing is lowered."""
    backend = TwinBackend(compiles=False, **options)
    backend.engine = "eager"
    return backend


def measure(variant: Variant, backend: Callable[..., CollageBackend] = CollageBackend) -> Measurement:
    """Measure one variant."""
    subject, trial = variant.row.subject, _trial(variant, backend)
    if variant.check == RESUMED:
        return measure_resumed(replace(trial, steps=RESUMED_STEPS))[0]
    is_of_others = variant.check == ON_OTHER_SHAPES
    if is_of_others:
        measured = _on_other_shapes(replace(trial, of_each=True, shapes=OTHER_SHAPES))
    else:
        measured = measure_trial(trial)
    if measured.outcome == INACCURATE and subject.why_inaccurate:
        measured.reason = subject.why_inaccurate
    if subject.steps != STEPS and not is_of_others:
        measured.notes.insert(0, f"{subject.steps} steps")
    return measured


def _trial(variant: Variant, backend: Callable[..., CollageBackend]) -> Trial:
    subject = variant.row.subject
    return Trial(
        variant.optimizer,
        subject.shapes,
        DTYPES[variant.row.dtype],
        subject.steps,
        make_eager=partial(variant.optimizer, without=COMPILED_ONLY),
        sparse=subject.sparse,
        closure=subject.closure,
        options={} if variant.budget is None else {"bytes_per_parameter": variant.budget},
        backend=backend,
        with_decay=False,
    )


def _on_other_shapes(trial: Trial) -> Measurement:
    """Measure a trial on those of the other shapes that the class takes in plain eager torch."""
    taken, note = _shapes_taken(trial)
    if not taken:
        return Measurement(UNSUPPORTED, note)
    measured = measure_trial(replace(trial, shapes=taken))
    if note:
        measured.notes.insert(0, note)
    return measured


def _shapes_taken(trial: Trial) -> tuple[list[tuple[int, ...]], str]:
    """Return the shapes of a trial that the class takes in plain eager torch, and a note on the rest."""
    refused: dict[tuple[int, ...], str] = {}
    shapes = [tuple(shape) for shape in trial.shapes]
    for shape in shapes:
        for dtype in (trial.dtype, torch.float64):
            try:
                _moved(replace(trial, shapes=(shape,)), dtype)
            except Exception as error:  # any exception of an optimizer is a result
                refused[shape] = type(error).__name__
    names = ", ".join("×".join(map(str, shape)) or "0-d" for shape in refused)
    note = f"eager torch refuses {names} ({', '.join(dict.fromkeys(refused.values()))})" if refused else ""
    return [shape for shape in shapes if shape not in refused], note


def _moved(trial: Trial, dtype: torch.dtype, *, is_seeded_again: bool = False) -> Tensor:
    """Return how far the steps of a trial move the parameters in eager torch.

    ``is_seeded_again``: with the random numbers of a run that :func:`_resumed` goes on with.
    """
    parameters = weights_of(trial, dtype)
    with warnings.catch_warnings(action="ignore"):
        optimizer, first = (trial.make_eager or trial.make)(parameters), 0
        if is_seeded_again:
            first = BEFORE_SAVED
            take_steps(replace(trial, steps=first), optimizer, parameters)
            torch.manual_seed(1)
        take_steps(trial, optimizer, parameters, first=first)
    return values_of(parameters) - values_of(weights_of(trial, dtype))


def measure_quickly(variant: Variant) -> Measurement:
    """Measure a few interpreted steps of a variant on every other of the other shapes, resumed."""
    shapes = OTHER_SHAPES[len(variant.name) % 2 :: 2]
    trial = replace(_trial(variant, interpreting), of_each=True, steps=RESUMED_STEPS, shapes=shapes)
    taken, note = _shapes_taken(trial)
    if not taken:
        return Measurement(UNSUPPORTED, note)
    trial = replace(trial, shapes=taken)
    measured, values = measure_resumed(trial)
    if values is not None:
        dtypes = torch.float64, trial.dtype, torch.float32
        exact, plain, single = (_moved(trial, dtype, is_seeded_again=True) for dtype in dtypes)
        measured.plain, measured.single = (relative_error(trial, each, exact) for each in (plain, single))
        measured.error = relative_error(trial, values - values_of(weights_of(trial, trial.dtype)), exact)
    return measured


def measure_resumed(trial: Trial) -> tuple[Measurement, Tensor | None]:
    """Compare a run that goes on with one that is saved and loaded into other parameters and an optimizer.

    Returns:
        The outcome, :data:`COMPENSATED` if all bits are the same; if not, a note says whether they are in
        plain eager torch. And the values of the parameters in the end, if there are any.
    """
    install_on = partial(install, backend=trial.backend(**trial.options))
    values = None
    try:
        different, values = _resumed(trial, trial.make, install_on)
    except CollageError as refusal:
        return Measurement(REFUSED, f"{type(refusal).__name__}: {refusal.met} ({refusal.where})"), None
    except Exception as error:  # any exception is a result
        measured = Measurement(FAILED, f"{type(error).__name__}: {error}".partition("\n")[0])
    else:
        if not different:
            return Measurement(COMPENSATED), values
        measured = Measurement(DIFFERS, f"{len(different)} tensors, {different[0]} first")
    try:
        plain, _ = _resumed(trial, trial.make_eager or trial.make, lambda optimizer: optimizer)
    except Exception as error:  # any exception is a result
        measured.notes.append(f"plain eager torch: {type(error).__name__}: {error}".partition("\n")[0])
    else:
        if plain:
            measured.notes.append("plain eager torch differs, too")
    return measured, values


def _resumed(
    trial: Trial, make: Make, installed: Callable[[Optimizer], Optimizer]
) -> tuple[list[str], Tensor]:
    """Go on after some steps, and resume from there in new objects.

    Returns:
        Names of the tensors in which both runs differ, and the values of the parameters of the first.
    """
    with warnings.catch_warnings(action="ignore"):
        parameters = weights_of(trial, trial.dtype)
        optimizer = installed(make(parameters))
        take_steps(replace(trial, steps=BEFORE_SAVED), optimizer, parameters)
        file = io.BytesIO()
        weights = [p.detach() for p in parameters]
        torch.save({"parameters": weights, "optimizer": optimizer.state_dict()}, file)
        others = weights_of(trial, trial.dtype)
        again = installed(make(others))
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        with torch.no_grad():
            for other, value in zip(others, saved["parameters"], strict=True):
                other.copy_(value)
        again.load_state_dict(saved["optimizer"])
        found = []
        for each, held in ((optimizer, parameters), (again, others)):
            torch.manual_seed(1)
            take_steps(trial, each, held, first=BEFORE_SAVED)
            found.append(_everything(each, held))
    one, other_one = found
    different = [name for name in one | other_one if not _same(one.get(name), other_one.get(name))]
    return different, values_of(parameters)


def _everything(optimizer: Optimizer, parameters: list[Parameter]) -> dict[str, Tensor]:
    """Return all tensors that a run depends on, with error terms, by name."""
    known = {k.name: k.tensor for k in known_tensors({"": optimizer}).values() if k.role is not Role.GRADIENT}
    known |= {f"parameter {i}": p.detach() for i, p in enumerate(parameters)}
    terms = {f"{name}, error {i}": t for name, each in known.items() for i, t in enumerate(error_terms(each))}
    return known | terms


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.dtype is not other.dtype or one.shape != other.shape:
        return False
    if hasattr(one, "__tensor_flatten__"):  # of torchao, which has no ==
        return all(_same(getattr(one, part), getattr(other, part)) for part in one.__tensor_flatten__()[0])
    return bool(((one == other) | ((one != one) & (other != other))).all())
