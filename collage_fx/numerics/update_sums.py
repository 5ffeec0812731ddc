"""The sums over the elements of one tensor's update that the metrics are derived from.

Note [Metrics]
--------------
A measured step computes, beside each tensor's update and in the same loop, the few sums from which everything
in :mod:`collage_fx.metrics.quality` follows. What flows where:

* :func:`terms` is the definition: what each element adds to each sum. ``operators.py`` makes one operator of
  it, ``update_sums``, whose eager implementation sums the terms and whose lowering sums them in the loop of
  the update, so that nothing is read from memory a second time: by Inductor's reductions, on CPUs as Note
  [Sums in lanes] in ``codegen/sums.py`` says, and in kernels over a table as Note [Sums of a
  launch] in ``torch_compat/triton_sums.py``.
* :func:`sizes` counts updates by their size against half an ulp of the weight, over a *sample*: to look at
  every element for it would cost more than the step. Its operator, ``update_sizes``, computes the updates of
  the sampled elements anew from what the step reads. (On CPUs before the update: a *part* of its own.)
* The pass ``measure`` (``passes/measure.py``) puts both into the graph for each tensor, behind the
  compensation, and stores their results into further inputs of the graph, together a *row*. It adds readers
  to values that are there already and changes none. Without ``metrics=True`` the pass does not run.
* ``metrics/meter.py`` owns the rows' memory, counts steps, picks the measured or the plain variant of a step
  (``metrics_every``), and keeps a copy of the rows of each measured step, in the host's memory.
* ``metrics/quality.py`` reads the copies when it is asked, and derives norms, EDQ and shares.

Precision. An element's intended and effective update are differences of float32 numbers, each off by at most
u = 2**-24 of itself. Their products are exact in float64 (24 + 24 <= 53 bits), in which they are added: a sum
of n of them is off by at most ``2u + n * 2**-53`` of the sum of their absolute values. On CPUs they are added
in float32 by blocks, which Note [Sums in blocks] bounds by 33u: in all, the sums are within 2.1e-6 of the sum
of absolute values (cross products: of the root of the product of the two sums of squares) for any tensor that
fits a machine, and within 1.2e-7 elsewhere. Counts are exact. The order of the additions, which threads and
atomics change, is within that bound.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from collage_fx.numerics.formats import storage_format

#: The inner products, by name: of the intended update D with itself, of D with the effective update of hi
#: alone, of that with itself, likewise for hi + lo, and of lo with itself. The numbers are indices into what
#: :func:`values` returns.
PRODUCTS = {
    "intended": (0, 0),
    "along_hi": (0, 1),
    "effective_hi": (1, 1),
    "along": (0, 2),
    "effective": (2, 2),
    "error": (3, 3),
}

#: The counts of elements: D is not zero; and hi stayed as it was; and hi + lo did; hi stayed as it was,
#: whatever D; lo is not zero. By index, whether the value has to be zero.
COUNTS = {
    "asked": {0: False},
    "lost_hi": {0: False, 1: True},
    "lost": {0: False, 2: True},
    "unchanged": {1: True},
    "held": {3: False},
}

#: The names of all sums, in the order of a row.
SUMS = (*PRODUCTS, *COUNTS)

#: Sizes of D are told apart by octaves: 2**k halves of an ulp of hi and more, less than 2**(k + 1). What is
#: smaller or larger counts as the first or the last.
OCTAVES = range(-16, 16)

#: The counts over the sample: elements whose D is zero, then by octave.
SIZES = ("sizes_zero", *(f"sizes_2^{k}" for k in OCTAVES))

#: The columns of a row.
ROW = (*SUMS, *SIZES)

#: The most elements of a sample.
SAMPLE = 1024

#: Elements of a sample that are neighbours.
TOGETHER = 16

#: The sums that, without error terms, equal another one, or zero (None).
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
    """Float32 values that measure each element: its intended update, what hi and hi + lo moved by, and lo.

    All are float32: ``old`` and ``old_lo`` are hi and error term before the step, ``intended`` is the new
    value before it is stored, ``hi`` and ``lo`` are what is stored. Without error terms there are two.
    """
    moved_hi = hi - old
    if old_lo is None or lo is None:
        return intended - old, moved_hi
    return intended - (old + old_lo), moved_hi, moved_hi + (lo - old_lo), lo


def terms(
    old: Tensor, old_lo: Tensor | None, intended: Tensor, hi: Tensor, lo: Tensor | None
) -> dict[str, Tensor]:
    """The terms that each element adds to :data:`SUMS`: float64 products of :func:`values`, and truth values.

    Without error terms, those of :data:`WITHOUT_LO` are missing.
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
    """:data:`SUMS` of one tensor's update, float64."""
    found = {k: x.sum(dtype=torch.float64) for k, x in terms(old, old_lo, intended, hi, lo).items()}
    zero = torch.zeros((), dtype=torch.float64, device=old.device)
    found = {**{name: zero if same is None else found[same] for name, same in WITHOUT_LO.items()}, **found}
    return torch.stack([found[name] for name in SUMS])


def sampled(i: Any, elements: Any, divided: Callable[[Any, Any], Any] = operator.floordiv) -> Any:
    """Position of the i-th sampled element; there is none if that is not below ``elements``.

    All elements, if there are no more than :data:`SAMPLE`. Else groups of :data:`TOGETHER` neighbours, as far
    memory comes in lines: one of each run of groups, evenly spread over the places in a run, so that a matrix
    is not sampled in a few columns. The multiples of 633 go through all residues of 1024 (and of 64), in
    steps near the golden ratio.

    Args:
        i: below SAMPLE. It and ``elements`` are numbers, tensors or Inductor's expressions.
        elements: of the tensor.
        divided: floor division of what they are.
    """
    run = divided(elements + (SAMPLE - 1), SAMPLE)  # in groups
    group = divided(i, TOGETHER)
    spread = group * 633 - divided(group * 633, SAMPLE) * SAMPLE
    return (group * run + divided(spread * run, SAMPLE) - group) * TOGETHER + i


def nearest_sampled(place: Any, elements: Any, divided: Callable[[Any, Any], Any] = operator.floordiv) -> Any:
    """The i of :func:`sampled` of an element in the same run of groups: if it is sampled, its own."""
    run = divided(elements + (SAMPLE - 1), SAMPLE)
    group = divided(place, TOGETHER)
    return divided(group, run) * TOGETHER + place - group * TOGETHER


def size_bin(old: Tensor, old_lo: Tensor, intended: Tensor, dtype: torch.dtype) -> Tensor:
    """Which of :data:`SIZES` each element is counted in, int32; ``dtype`` is hi's.

    An ulp is that of hi's binade before the step, the least one for zero. An infinite or undefined D counts
    as the largest.
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
    """The exponent of a normal float32; -127 for zero and subnormals."""
    return ((x.view(torch.int32) >> 23) & 255) - 127


def sizes(old: Tensor, old_lo: Tensor, intended: Tensor, dtype: torch.dtype) -> Tensor:
    """How many of the sampled elements are of each of :data:`SIZES`, float64."""
    at = sampled(torch.arange(SAMPLE, device=old.device), old.numel())
    at = at[at < old.numel()]
    old, old_lo, intended = (each.flatten()[at] for each in (old, old_lo, intended))
    bins = size_bin(old, old_lo, intended, dtype)
    return torch.bincount(bins, minlength=len(SIZES)).to(torch.float64)
