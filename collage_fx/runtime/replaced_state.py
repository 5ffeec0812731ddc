"""State that the program puts in the place of an optimizer's, such as a copy that was on another device.

Note [A copy takes over]
------------------------
Error terms belong to a tensor and go with it. But ``state[p][key] = state[p][key].cpu()`` and back, as
programs do that make room on a device, leaves a new tensor with the old one's values. So each compilation
remembers the records of an optimizer's tensors by their names, and at the next one, which such a replacement
brings about, a tensor of which hi is what the old error terms were split from takes them over. What is
neither is other state, whose error terms start from zero, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from collage_fx.numerics import ErrorFormat
from collage_fx.runtime.claims import some
from collage_fx.runtime.error_terms import expansion_of
from collage_fx.torch_compat import local_tensor, real_tensors


class _ErrorTerms(NamedTuple):
    """What a tensor's record holds; neither the tensor nor the record is kept alive."""

    tensor: TensorWeakRef
    format: ErrorFormat
    auxiliaries: tuple[Tensor, ...]


#: By optimizer and name: what it had when a step was compiled or a checkpoint loaded last.
_remembered: WeakKeyDictionary[Optimizer, dict[str, _ErrorTerms]] = WeakKeyDictionary()


def remember(tensors: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    """Remember the error terms of an optimizer's tensors, given by name."""
    _remembered[optimizer] = {
        name: _ErrorTerms(TensorWeakRef(tensor), found.format, found.auxiliaries)
        for name, tensor in tensors.items()
        if (found := expansion_of(tensor)) is not None
    }


def format_before(name: str, optimizer: Optimizer) -> ErrorFormat | None:
    """The format of the error terms that an optimizer's tensor of that name had; None if it had none."""
    before = _remembered.get(optimizer, {}).get(name)
    return None if before is None else before.format


def carry_over(tensors: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    """Give tensors that are copies of remembered ones their error terms; warn of those that are not."""
    lost = []
    for name, tensor in tensors.items():
        before, now = _remembered.get(optimizer, {}).get(name), expansion_of(tensor)
        if before is None or now is None or now.is_used or before.tensor() is tensor:
            continue
        with real_tensors(), torch.no_grad():
            hi = local_tensor(tensor.detach())
            if before.format is now.format and _were_split_from(hi, before):
                now.replace_contents(before.auxiliaries)
            elif hi.any():  # else it begins anew
                lost.append(name)
    remember(tensors, optimizer)
    if lost:
        warnings.warn(
            f"collage_fx: {some(lost)} of {type(optimizer).__name__} has been replaced by a tensor of other "
            "values, whose error terms start from zero; change it in place to keep them",
            stacklevel=2,
        )


def _were_split_from(hi: Tensor, found: _ErrorTerms) -> bool:
    """Whether no value of hi's dtype is nearer to the sum of each element and its error term."""
    auxiliaries = [each.to(hi.device) for each in found.auxiliaries]
    specs = found.format.auxiliaries(hi)
    if [each.shape for each in auxiliaries] != [spec.shape for spec in specs]:
        return False
    value = found.format.join(hi, *auxiliaries)
    nearest, *_ = found.format.split(value, hi.dtype)
    return bool(((value - hi.float()).abs() <= (value - nearest.float()).abs()).all())
