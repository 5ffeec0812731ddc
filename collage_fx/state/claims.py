"""Claims: loaded error terms become zero at their first use unless they belong to the values beside them.

A step checks all claims at once, so that processes that share tensors need to communicate once. By then, both
a model and its optimizer have been loaded, in whatever order.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from collage_fx.state.error_terms import ErrorTermRecord
from collage_fx.state.fingerprints import differences
from collage_fx.state.host_twins import update_twin
from collage_fx.torch_compat import Sharding, local_tensor, real_tensors, sharding_of

log = logging.getLogger("collage_fx")


class Claims:
    """Claims that the first step after them checks, all at once.

    Args:
        report_wrong: called with the names of tensors whose claim is wrong, if there are any; None to log.
    """

    def __init__(self, report_wrong: Callable[[list[str]], None] | None = None) -> None:
        self._report_wrong = report_wrong
        #: Name of a tensor, its record, and the fingerprint.
        self._claims: list[tuple[str, weakref.ref[ErrorTermRecord], Tensor]] = []

    def add(self, name: str, record: ErrorTermRecord, number: Tensor) -> None:
        """Claim that a fingerprint, or this process's part of it, is that of a tensor; zero: unknown."""
        self._claims.append((name, weakref.ref(record), number))
        record.make_claim(number, self.settle)

    def settle(self) -> None:
        """Zero the error terms whose claim is wrong; all processes of a mesh do so together."""
        alike: dict[Sharding | None, list[tuple[str, ErrorTermRecord, Tensor]]] = defaultdict(list)
        claims, self._claims = self._claims, []
        with real_tensors(), torch.no_grad():
            for name, reference, number in claims:
                record = reference()
                owner = None if record is None else record.owner()
                if record is None or owner is None or record.claim is not number:
                    continue  # the tensor is gone, or others have been loaded since
                update_twin(owner)
                record.drop_claim()
                far = differences(number, local_tensor(owner), record.auxiliaries)
                numbers = torch.stack([*far, (number != 0).long().to(far.device)])
                alike[sharding_of(owner)].append((name, record, numbers))
            wrong = []
            for pieces, group in alike.items():
                looked = torch.stack([numbers.cpu() for *_, numbers in group])
                looked = looked if pieces is None else pieces.sum(looked)
                for (name, record, _), (*far, is_known) in zip(group, looked.tolist(), strict=True):
                    if is_known and all(far):
                        record.clear()
                        wrong.append(name)
        if wrong and self._report_wrong is not None:
            self._report_wrong(wrong)
        elif wrong:
            log.info("%s: loaded, so error terms start from zero", some(wrong))


def some(names: Sequence[str]) -> str:
    """Join the first names of a list, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
