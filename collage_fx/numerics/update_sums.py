"""Sums over the elements of one tensor's update, from which metrics are derived.

Note [Metrics]
--------------
A measured step computes a few sums beside each tensor's update, in the same loop. All of
:mod:`collage_fx.metrics.quality` follows from them. The data flows like this:

* :func:`terms` is the definition: the term of each element in each sum. ``operators.py`` makes the operator
  ``update_sums`` of it. The eager implementation sums the terms. The lowered one sums them in the loop of the
  update, so that nothing is read from memory twice: by Inductor's reductions; on CPUs by Note [Sums in lanes]
  in ``codegen/sums.py``; in kernels over a table by Note [Sums of a launch] in
  ``torch_compat/triton_sums.py``.
* :func:`sizes` counts updates by their size against half an ulp of the weight, over a *sample*: for every
  element it would cost more than the step. Its operator ``update_sizes`` computes the updates of the sampled
  elements again from the inputs of the step. (On CPUs before the update, in a *part* of its own.)
* The pass ``measure`` (``passes/measure.py``) adds both operators to the graph for each tensor, after the
  compensation, and stores their results into additional inputs of the graph, together a *row*. It adds
  readers to values and changes none. Without ``metrics=True`` the pass does not run.
* ``metrics/meter.py`` owns the memory of the rows, counts steps, picks the measured or the plain variant of a
  step (``metrics_every``), and keeps a copy of the rows of each measured step on the host.
* ``metrics/quality.py`` reads the copies on request, and derives norms, EDQ and shares.

Precision. The intended and the effective update of an element are differences of float32 numbers, with a
relative error of at most u = 2**-24. Their products are exact in float64 (24 + 24 <= 53 bits), and are added
in float64: a sum of n products has an error of at most ``2u + n * 2**-53`` of the sum of absolute values. On
CPUs they are added in float32 by chunks, for which Note [Sums in lanes] gives a bound of 9u. In all, the
error is at most 6.6e-7 of the sum of absolute values for any tensor that fits a machine, and 1.2e-7 elsewhere
(for cross products: of the root of the product of both sums of squares). Counts are exact. The order of the
additions, which threads and atomics change, is within that bound.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from collage_fx.numerics.formats import storage_format

#: Inner products by name, as pairs of indices into the result of :func:`values`: of the intended update D
#: with itself, of D with the effective update of hi alone, of that with itself, the last two for hi + lo, and
#: of lo with itself.
PRODUCTS = {
    "intended": (0, 0),
    "along_hi": (0, 1),
    "effective_hi": (1, 1),
    "along": (0, 2),
    "effective": (2, 2),
    "error": (3, 3),
}

#: Counts of elements by name, as conditions: index into the result of :func:`values` -> whether the value has
#: to be zero. "asked": D is not zero; "lost_hi": and hi did not change; "lost": and hi + lo did not change;
#: "unchanged": hi did not change, for any D; "held": lo is not zero.
COUNTS = {
    "asked": {0: False},
    "lost_hi": {0: False, 1: True},
    "lost": {0: False, 2: True},
    "unchanged": {1: True},
    "held": {3: False},
}

#: Names of all sums, in the order of a row.
SUMS = (*PRODUCTS, *COUNTS)

#: Octaves by which sizes of D are counted. Octave k has sizes from 2**k to 2**(k + 1) halves of an ulp of hi.
#: Smaller and larger sizes count in the first and the last octave.
OCTAVES = range(-16, 16)

#: Names of the counts over the sample: elements whose D is zero, then elements by octave.
SIZES = ("sizes_zero", *(f"sizes_2^{k}" for k in OCTAVES))

#: Names of the columns of a row.
ROW = (*SUMS, *SIZES)

#: Largest number of elements in a sample.
SAMPLE = 1024

#: Number of neighbours in a group of a sample.
TOGETHER = 16

#: Sums that are equal to another sum without error terms; None = zero.
WITHOUT_LO = {
    "along": "along_hi",
    "effective": "effective_hi",
    "error": None,
    "lost": "lost_hi",
    "held": None,
}


def values(
    old: Tensor, old_lo: Tensor | None, intended: Tensor, hi: Tensor, lo: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute the measured values of each element: the intended update, changes of hi and hi + lo, and lo.

    Without error terms the result has the first two alone. All tensors are float32.

    Args:
        old: hi before the step.
        old_lo: error term before the step; None if there is none.
        intended: new value before it is stored.
        hi: stored hi.
        lo: stored error term; None if there is none.
    """
    moved_hi = hi - old
    if old_lo is None or lo is None:
        return intended - old, moved_hi
    return intended - (old + old_lo), moved_hi, moved_hi + (lo - old_lo), lo


def terms(
    old: Tensor, old_lo: Tensor | None, intended: Tensor, hi: Tensor, lo: Tensor | None
) -> dict[str, Tensor]:
    """Compute the terms of each element in :data:`SUMS`: float64 products of :func:`values`, and booleans.

    Without error terms, the sums of :data:`WITHOUT_LO` have none.
    """
    each = values(old, old_lo, intended, hi, lo)
    wide = [value.to(torch.float64) for value in each]
    found = {name: wide[i] * wide[j] for name, (i, j) in PRODUCTS.items() if j < len(each)}
    for name, conditions in COUNTS.items():
        if max(conditions) < len(each):
            tests = ((each[i] == 0) if is_zero else (each[i] != 0) for i, is_zero in conditions.items())
            found[name] = functools.reduce(operator.and_, tests)
    return found


def sums(old: Tensor, old_lo: Tensor | None, intended: Tensor, hi: Tensor, lo: Tensor | None) -> Tensor:
    """Compute :data:`SUMS` of one tensor's update, float64."""
    found = {k: x.sum(dtype=torch.float64) for k, x in terms(old, old_lo, intended, hi, lo).items()}
    zero = torch.zeros((), dtype=torch.float64, device=old.device)
    found = {**{name: zero if same is None else found[same] for name, same in WITHOUT_LO.items()}, **found}
    return torch.stack([found[name] for name in SUMS])


def sampled(i: Any, elements: Any, divided: Callable[[Any, Any], Any] = operator.floordiv) -> Any:
    """Return the index of the i-th sampled element; it does not exist if the index is ``elements`` or more.

    A tensor of at most :data:`SAMPLE` elements is sampled as a whole. Otherwise the sample consists of groups
    of :data:`TOGETHER` neighbours, because memory comes in lines: one group of each run of groups. Its
    position in the run varies evenly, so that a matrix is not sampled in a few columns: multiples of 633 go
    through all residues of 1024 (and of 64), in steps near the golden ratio.

    Args:
        i: number below SAMPLE. ``i`` and ``elements`` are numbers, tensors or expressions of Inductor.
        elements: number of elements of the tensor.
        divided: floor division of such numbers, tensors or expressions.
    """
    run = divided(elements + (SAMPLE - 1), SAMPLE)  # in groups
    group = divided(i, TOGETHER)
    spread = group * 633 - divided(group * 633, SAMPLE) * SAMPLE
    return (group * run + divided(spread * run, SAMPLE) - group) * TOGETHER + i


def nearest_sampled(place: Any, elements: Any, divided: Callable[[Any, Any], Any] = operator.floordiv) -> Any:
    """Return the i of :func:`sampled` for the run of groups of an element; its own i if it is sampled."""
    run = divided(elements + (SAMPLE - 1), SAMPLE)
    group = divided(place, TOGETHER)
    return divided(group, run) * TOGETHER + place - group * TOGETHER


def size_bin(old: Tensor, old_lo: Tensor, intended: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the index in :data:`SIZES` that each element counts in, int32; ``dtype`` is the dtype of hi.

    The ulp is that of hi's binade before the step; for zero, the smallest ulp. An infinite D or NaN counts in
    the last octave.
    """
    storage = storage_format(dtype)
    update = intended - (old + old_lo)
    subnormal = update.abs() < 2.0**-126
    exponent = torch.where(subnormal, _exponent(update * 2.0**24) - 24, _exponent(update))
    binade = _exponent(old)
    binade = torch.where(binade < storage.min_exponent, storage.min_exponent, binade)
    octave = exponent - (binade - storage.precision) - OCTAVES[0]
    is_beyond = (octave >= len(OCTAVES)) | (exponent > 127)
    octave = torch.where(octave < 0, 0, torch.where(is_beyond, len(OCTAVES) - 1, octave))
    return torch.where(update == 0, 0, octave + 1)


def _exponent(x: Tensor) -> Tensor:
    """Return the exponent of float32 numbers; -127 for zero and subnormals."""
    return ((x.view(torch.int32) >> 23) & 255) - 127


def sizes(old: Tensor, old_lo: Tensor, intended: Tensor, dtype: torch.dtype) -> Tensor:
    """Count the sampled elements by :data:`SIZES`, float64."""
    at = sampled(torch.arange(SAMPLE, device=old.device), old.numel())
    at = at[at < old.numel()]
    old, old_lo, intended = (each.flatten()[at] for each in (old, old_lo, intended))
    bins = size_bin(old, old_lo, intended, dtype)
    return torch.bincount(bins, minlength=len(SIZES)).to(torch.float64)
