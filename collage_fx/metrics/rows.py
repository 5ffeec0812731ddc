"""Sums over a sample of a tensor's elements, from which metrics are derived.

Note [Metrics]
--------------
A measured step is the step that is compiled without metrics. Beside it, a *sample* of each tensor's elements
is looked at. The data flows like this:

* :func:`places` says which elements are in the sample: all of a small tensor.
* ``samples.py`` makes two graphs for each tensor. One computes the value that the step intends, in float32,
  from the whole old value, on the elements of the sample alone where operations are elementwise. The other
  reads what is stored, before and after the step. torch runs both, operation by operation.
* :func:`rows_of` sums what these graphs return: a row of numbers for each tensor.
* ``meter.py`` counts and chooses steps (``metrics_every``), and keeps the rows on the host.
* ``quality.py`` derives norms, EDQ and shares from the rows on request.

Precision. The intended and the effective update of an element are differences of float32 numbers, with a
relative error of at most u = 2**-24. Their products are exact in float64 (24 + 24 <= 53 bits) and are added
in float64: the sum of a sample of n elements has a relative error of at most ``2u + n * 2**-53``, a cross
product as much of the root of the product of both sums of squares. Sums and counts are multiplied by the
number of elements for each element of the sample. So they are exact to this bound for tensors of at most
:data:`SAMPLE` elements, and estimates for larger ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from collage_fx.numerics import storage_format

#: Names of the sums, inner products and then counts of elements: attributes of ``UpdateQuality``.
PRODUCTS = ("intended", "along_hi", "effective_hi", "along", "effective", "error")
COUNTS = ("asked", "lost_hi", "lost", "unchanged", "held")
SUMS = (*PRODUCTS, *COUNTS)

#: Octaves by which sizes of D are counted. Octave k has sizes from 2**k to 2**(k + 1) halves of an ulp of hi.
#: Smaller and larger sizes count in the first and the last octave.
OCTAVES = range(-16, 16)

#: Names of the counts by size: elements whose D is zero, then elements by octave.
SIZES = ("sizes_zero", *(f"sizes_2^{k}" for k in OCTAVES))

#: Names of the columns of a row.
ROW = (*SUMS, *SIZES)

#: Largest number of elements in a sample, and of neighbours in a group of a sample.
SAMPLE, TOGETHER = 1024, 16

#: Step from a group's position in its run to the next position, as a part of the run (times SAMPLE): near the
#: golden ratio, and odd, so that the groups go through all columns of a matrix.
_SPREAD = 633


class Sampled(NamedTuple):
    """Values of the elements of a sample, float32; error terms are None if there are none.

    Attributes:
        old, old_lo: hi and the sum of the error terms before the step.
        intended: new value, as it is before it is stored.
        hi, lo: hi and the sum of the error terms after the step.
    """

    old: Tensor
    old_lo: Tensor | None
    intended: Tensor
    hi: Tensor
    lo: Tensor | None


def places(elements: int, device: torch.device) -> Tensor:
    """Return the indices of a sample's elements.

    A tensor of at most :data:`SAMPLE` elements is sampled as a whole. Otherwise the sample consists of groups
    of :data:`TOGETHER` neighbours, because memory comes in lines: one group of each run of groups. Its
    position in the run varies evenly, so that a matrix is not sampled in a few columns.
    """
    i = torch.arange(SAMPLE, device=device)
    run = -(-elements // SAMPLE)  # in groups
    group = i // TOGETHER
    spread = group * _SPREAD % SAMPLE
    found = (group * run + spread * run // SAMPLE - group) * TOGETHER + i
    return found[found < elements]


def rows_of(samples: Sequence[Sampled], elements: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Compute the row (float64, :data:`ROW`) of each of some tensors on a device, for all its elements."""
    counts = torch.tensor([each.old.numel() for each in samples])
    scale = torch.tensor(elements, dtype=torch.float64) / counts.clamp(min=1)
    columns = zip(*samples, strict=True)
    old, old_lo, intended, hi, lo = (_stacked(column, samples) for column in columns)
    device = old.device
    there = torch.arange(old.shape[1], device=device) < counts.to(device)[:, None]
    moved_hi = hi - old
    # The intended update D, the changes of hi and of hi + lo, and lo.
    values = torch.stack([intended - (old + old_lo), moved_hi, moved_hi + (lo - old_lo), lo], 1).double()
    products = values @ values.mT
    update, still_hi, still, none = (values == 0).unbind(1)
    asked = ~update & there
    counted = (asked, asked & still_hi, asked & still, still_hi & there, ~none & there)
    sums = [products[:, i, j] for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (2, 2), (3, 3))]
    sums += [each.sum(1).double() for each in counted]
    bins = torch.where(there, size_bin(old, old_lo, intended, dtype), len(SIZES))
    sizes = torch.zeros(len(samples), len(SIZES) + 1, dtype=torch.float64, device=device)
    sizes.scatter_add_(1, bins.long(), torch.ones_like(bins, dtype=torch.float64))
    return torch.cat([torch.stack(sums, 1), sizes[:, :-1]], 1) * scale.to(device)[:, None]


def _stacked(values: Sequence[Tensor | None], samples: Sequence[Sampled]) -> Tensor:
    """Return the values of samples as rows of a matrix, with zeros for error terms that there are not."""
    pairs = zip(values, samples, strict=True)
    given = [torch.zeros_like(of.old) if value is None else value for value, of in pairs]
    return torch.nn.utils.rnn.pad_sequence(given, batch_first=True)


def size_bin(old: Tensor, old_lo: Tensor, intended: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the index in :data:`SIZES` that each element counts in, int32; ``dtype`` is the dtype of hi.

    The ulp is that of hi's binade before the step; for zero, the smallest ulp. An infinite D or NaN counts in
    the last octave.
    """
    storage = storage_format(dtype)
    update = intended - (old + old_lo)
    subnormal = update.abs() < 2.0**-126
    exponent = torch.where(subnormal, _exponent(update * 2.0**24) - 24, _exponent(update))
    binade = _exponent(old).clamp(min=storage.min_exponent)
    octave = exponent - (binade - storage.precision) - OCTAVES[0]
    is_beyond = (octave >= len(OCTAVES)) | (exponent > 127)
    octave = torch.where(is_beyond, len(OCTAVES) - 1, octave.clamp(min=0))
    return torch.where(update == 0, 0, octave + 1)


def _exponent(x: Tensor) -> Tensor:
    """Return the exponent of float32 numbers; -127 for zero and subnormals."""
    return ((x.view(torch.int32) >> 23) & 255) - 127
