"""Loaded error terms until a step uses them: those that do not belong to the values beside them become zero.

A step asks for them all at once, so that processes that share tensors need to talk once, and when it does,
whatever order a program loads a model and its optimizer in, both are there.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from collage_fx.state.error_terms import Expansion, expansion_of
from collage_fx.state.fingerprints import fingerprint
from collage_fx.torch_compat import Sharding, local_tensor, real_tensors, sharding_of, wrap_loading_of_modules

log = logging.getLogger("collage_fx")


def install() -> None:
    """Wrap ``Module.load_state_dict``."""
    wrap_loading_of_modules(_loading)


@dataclass(frozen=True)
class _Claim:
    name: str
    expansion: weakref.ref[Expansion]
    number: Tensor


class Claims:
    """What error terms claim to belong to, which the first step after that looks at, for all of them at once.

    Until then hi may still change: a model is loaded before its optimizer or after it.

    Args:
        told: called with the names of those whose claim is wrong, if there are any.
    """

    def __init__(self, told: Callable[[list[str]], None]) -> None:
        self._told = told
        self._claims: list[_Claim] = []

    def add(self, name: str, expansion: Expansion, number: Tensor) -> None:
        """Have a record's error terms belong to the values of that fingerprint alone.

        Args:
            name: of the tensor.
            expansion: its record.
            number: the fingerprint, or this process's part of it; zero if nothing is known.
        """
        self._claims.append(_Claim(name, weakref.ref(expansion), number))
        expansion.make_claim(number, self.settle)

    def settle(self) -> None:
        """Zero the error terms whose claim is wrong. All processes of a mesh do that together."""
        alike: dict[Sharding | None, list[tuple[str, Expansion, Tensor]]] = defaultdict(list)
        claims, self._claims = self._claims, []
        with real_tensors(), torch.no_grad():
            for claim in claims:
                expansion = claim.expansion()
                owner = None if expansion is None else expansion.owner()
                if expansion is None or owner is None or expansion.claim is not claim.number:
                    continue  # the tensor is gone, or others have been loaded since
                expansion.drop_claim()
                actual = fingerprint(local_tensor(owner), expansion.auxiliaries)
                claimed = claim.number.to(actual.device)
                numbers = torch.stack([claimed - actual, (claimed != 0).long()])
                alike[sharding_of(owner)].append((claim.name, expansion, numbers))
            wrong = [name for pieces, group in alike.items() for name in _cleared(pieces, group)]
        if wrong:
            self._told(wrong)


def _cleared(pieces: Sharding | None, group: list[tuple[str, Expansion, Tensor]]) -> list[str]:
    """Names of those whose fingerprints differ, whose error terms have been made zero."""
    looked = torch.stack([numbers.cpu() for *_, numbers in group])
    looked = looked if pieces is None else pieces.sum(looked)
    names = []
    for (name, expansion, _), (difference, is_known) in zip(group, looked.tolist(), strict=True):
        if is_known and difference:
            expansion.clear()
            names.append(name)
    return names


def _loading(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Let error terms of a module's tensors become zero where other values are loaded."""

    def with_claims(self: Module, *args: Any, **kwargs: Any) -> Any:
        claims = Claims(lambda names: log.info("%s: loaded, so error terms start from zero", some(names)))
        for name, tensor in chain(self.named_parameters(), self.named_buffers()):
            expansion = expansion_of(tensor)
            if expansion is not None and expansion.claim is None:
                claims.add(name, expansion, fingerprint(local_tensor(tensor), expansion.auxiliaries))
        return load_state_dict(self, *args, **kwargs)

    return with_claims


def some(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
