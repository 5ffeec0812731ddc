"""State that the program puts in the place of an optimizer's: it has no error terms, which is said by name.

Error terms belong to a tensor and go with it. ``state[p][key] = state[p][key].cpu()`` and back, as programs
do that make room on a device, leaves a new tensor; ``state[p][key].data = ...`` is the old one in another
place. Whether the new one has the old one's values can no longer be seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from collage_fx.numerics import ErrorFormat
from collage_fx.runtime.claims import some
from collage_fx.runtime.error_terms import expansion_of
from collage_fx.torch_compat import local_tensor, real_tensors


class _Known(NamedTuple):
    tensor: TensorWeakRef
    format: ErrorFormat


#: By optimizer and name: what had error terms when a step was compiled or a checkpoint loaded last.
_known: WeakKeyDictionary[Optimizer, dict[str, _Known]] = WeakKeyDictionary()


def remember(tensors: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    """Remember which of an optimizer's tensors, given by name, have error terms."""
    _known[optimizer] = {
        name: _Known(TensorWeakRef(tensor), found.format)
        for name, tensor in tensors.items()
        if (found := expansion_of(tensor)) is not None and found.format.keeps_error
    }


def format_before(name: str, optimizer: Optimizer) -> ErrorFormat | None:
    """The format of the error terms that an optimizer's tensor of that name had; None if it had none."""
    known = _known.get(optimizer, {}).get(name)
    return None if known is None else known.format


def warn_of_replaced(state: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    """Warn of the tensors in an optimizer's state, given by name, that are others than remembered ones.

    Not of those that begin anew, with zeros.
    """
    known = _known.get(optimizer, {})
    replaced = [name for name, each in state.items() if name in known and known[name].tensor() is not each]
    with real_tensors():
        replaced = [name for name in replaced if local_tensor(state[name].detach()).any()]
    if replaced:
        warnings.warn(
            f"collage_fx: {some(replaced)} of {type(optimizer).__name__} has been replaced by another "
            "tensor, whose error terms start from zero; assign to its .data, or copy into it, to keep them",
            stacklevel=2,
        )
