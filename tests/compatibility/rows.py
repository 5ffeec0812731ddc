"""All rows, and finding one by its name."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from tests.compatibility import third_party, torch_optim
from tests.compatibility.catalog import Row, Variant, rows_of

__all__ = ["ROWS", "variant_named"]

#: In the table's order.
ROWS: tuple[Row, ...] = tuple(
    row for subject in (*torch_optim.SUBJECTS, *third_party.SUBJECTS) for row in rows_of(subject)
)


@functools.cache
def _variants() -> Mapping[str, Variant]:
    return {variant.name: variant for row in ROWS for variant in row.variants()}


def variant_named(name: str) -> Variant:
    return _variants()[name]
