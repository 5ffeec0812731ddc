"""What is summed over the elements of one tensor's update: the in-graph half of the metrics.

Note [Metrics]
--------------
A measured step computes, beside each tensor's update and in the same loop, the few sums from which everything
in :mod:`collage_fx.metrics` follows. What flows where:

* :func:`terms` is the definition: what each element adds to each sum. ``operators.py`` makes one operator of
  it, ``measure``, whose eager implementation sums the terms and whose lowering makes Inductor reductions of
  them, so that nothing is read from memory a second time.
* The pass ``measure`` (``passes/measure.py``) puts one such node into the graph per tensor, behind the
  compensation, and stores its result into a *row*, a further input of the graph. It adds readers to values
  that are there already and changes none. Without ``metrics=True`` the pass does not run.
* ``metering.py`` owns the rows' memory, counts steps, picks the measured or the plain variant of a step
  (``metrics_every``), and keeps a copy of the rows of each measured step, on the tensor's device.
* ``metrics.py`` reads the copies when it is asked, and derives norms, EDQ and shares.

Precision. An element's intended and effective update are differences of float32 numbers, each off by at most
u = 2**-24 of itself; their products are exact in float64 (24 + 24 <= 53 bits), in which they are added. A sum
of n products is therefore off by at most ``2u + n * 2**-53`` of the sum of their absolute values: 1.2e-7 for
any tensor that fits a machine. Counts are exact. The order of the additions, which threads and atomics
change, is within that bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["COUNTS", "PRODUCTS", "SUMS", "WITHOUT_LO", "sums", "terms"]

#: The inner products, by name: of the intended update D with itself, of D with the effective update of hi
#: alone, of that with itself, likewise for hi + lo, and of lo with itself.
PRODUCTS = ("intended", "along_hi", "effective_hi", "along", "effective", "error")

#: The counts of elements: D is not zero; and hi stayed as it was; and hi + lo did; hi stayed as it was,
#: whatever D; lo is not zero.
COUNTS = ("asked", "lost_hi", "lost", "unchanged", "held")

#: The columns of a row.
SUMS = (*PRODUCTS, *COUNTS)

#: Without error terms, those that are another one, or zero (None).
WITHOUT_LO = {
    "along": "along_hi",
    "effective": "effective_hi",
    "error": None,
    "lost": "lost_hi",
    "held": None,
}


def terms(old: Tensor, old_lo: Tensor, intended: Tensor, hi: Tensor, lo: Tensor) -> tuple[Tensor, ...]:
    """What each element adds to :data:`SUMS`: float64 products, then truth values.

    All are float32: ``old`` and ``old_lo`` are hi and error term before the step, ``intended`` is the new
    value before it is stored, ``hi`` and ``lo`` are what is stored.
    """
    update = intended - (old + old_lo)
    moved_hi = hi - old
    moved = moved_hi + (lo - old_lo)
    asked, same_hi, same = update != 0, moved_hi == 0, moved == 0
    wide = [each.to(torch.float64) for each in (update, moved_hi, moved, lo)]
    update, moved_hi, moved, error = wide
    products = (
        update * update,
        update * moved_hi,
        moved_hi * moved_hi,
        update * moved,
        moved * moved,
        error * error,
    )
    return *products, asked, asked & same_hi, asked & same, same_hi, lo != 0


def sums(old: Tensor, old_lo: Tensor, intended: Tensor, hi: Tensor, lo: Tensor) -> Tensor:
    """:data:`SUMS` of one tensor's update, float64."""
    return torch.stack([term.sum(dtype=torch.float64) for term in terms(old, old_lo, intended, hi, lo)])
