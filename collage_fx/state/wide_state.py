"""State that an optimizer keeps in another dtype than its parameter, and its dtype in a checkpoint.

Note [Wide state]
-----------------
``Optimizer.load_state_dict`` casts each tensor of a parameter's state, except ``step``, to the parameter's
dtype: the float32 numbers of ASGD and NAdam, counters of integers, and float32 moments of bfloat16 parameters
would have 8 bits from then on. A checkpoint does not say by itself whether its float32 state is of this kind,
or that of a float32 run, which a bfloat16 optimizer keeps in bfloat16 with error terms. So a state dict of
ours has a key ``collage_fx.<slot>.kept.<dtype>`` for each such tensor. Its value is the bytes of a number
(0-d), which survive a cast by plain torch, and one zero for others.

Wide state without such a key, of plain torch and of earlier versions, is kept as it was saved

* if it holds integers, booleans or complex numbers;
* if the optimizer that is loaded has state of this dtype in the same place; if it has state of another
  dtype there, it is cast;
* if the parameter had 16 bits where it was saved, as its error terms or other state of 16 bits show;
* if it is a number beside a parameter that is none: optimizers make such numbers in float32.

All other wide state is cast, and its rest becomes error terms.

Narrow state, such as bfloat16 moments of a float32 parameter, and bfloat16 state beside float16 have such a
key, too. Without one it keeps its dtype if the optimizer that is loaded has state of this dtype there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from collage_fx.numerics import is_low_precision
from collage_fx.torch_compat import local_tensor, pytree

#: Name in the place of an error format's, in keys of a state dict.
KEPT = "kept"


def is_wide(dtype: torch.dtype, parameter: Tensor) -> bool:
    """Return whether a cast of state to the dtype of its parameter, as by torch's load, loses bits."""
    if not parameter.is_floating_point():
        return False
    return not dtype.is_floating_point or torch.finfo(dtype).bits > torch.finfo(parameter.dtype).bits


def is_narrow(dtype: torch.dtype, parameter: Tensor) -> bool:
    """Return whether state of 16 bits has another dtype than its parameter."""
    return parameter.is_floating_point() and is_low_precision(dtype) and dtype is not parameter.dtype


def is_spared(slot: str) -> bool:
    """Return whether torch's load spares the state in a slot from its cast."""
    return slot.rpartition(".")[2] == "step"


def kept_entries(parameter: Tensor, slots: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(slot.kept.dtype, bytes)`` for wide state of a 16-bit parameter, and for narrow state."""
    for slot, tensor in slots:
        is_kept = is_narrow(tensor.dtype, parameter) or (
            is_low_precision(parameter.dtype) and is_wide(tensor.dtype, parameter)
        )
        if is_kept and not is_spared(slot):
            held = torch.zeros(1, dtype=torch.uint8, device=tensor.device)
            if not tensor.dim():  # a copy: torch.save refuses one memory that is viewed as two dtypes
                held = local_tensor(tensor.detach()).reshape(-1).clone().view(torch.uint8)
            yield f"{slot}.{KEPT}.{str(tensor.dtype).removeprefix('torch.')}", held


def is_kept(saved: Tensor, parameter: Tensor, live: torch.dtype | None, *, was_low_precision: bool) -> bool:
    """Return whether an optimizer keeps state, of which a checkpoint has no key, in its own dtype.

    ``live`` is the dtype of the state in its place before the load; ``was_low_precision`` tells whether the
    checkpoint shows that the saved parameter had 16 bits.
    """
    if is_narrow(saved.dtype, parameter):
        return live is saved.dtype
    if not is_wide(saved.dtype, parameter):
        return False
    if not saved.is_floating_point():
        return True
    if not is_low_precision(parameter.dtype):
        return False
    if live is not None:
        return live is saved.dtype
    return was_low_precision or (saved.dim() == 0 and parameter.dim() > 0)


def value_kept(saved: Tensor, dtype: torch.dtype, held: Tensor | None) -> tuple[Tensor, bool]:
    """Return state in the dtype that an optimizer keeps it in, and whether it has all its bits.

    ``saved`` is the state in a checkpoint, or as plain torch has loaded it: cast. Bytes ``held`` under its
    key are used if they are those of the number ``saved``: plain torch may have taken steps since.
    """
    if saved.dtype is dtype:
        return saved, True
    if held is not None and not saved.dim() and held.numel() == dtype.itemsize:
        number = held.to(torch.uint8).contiguous().view(dtype).reshape(()).to(saved.device)
        if bool(number.to(saved.dtype) == local_tensor(saved)):
            return number, True
    return saved.to(dtype), not saved.dim() or torch.promote_types(saved.dtype, dtype) is saved.dtype


def replace_tensors(entries: dict[Any, Any], new: Mapping[int, Tensor]) -> None:
    """Replace tensors, given by ``id``, in the state of a parameter and in containers in it."""
    for key, value in entries.items():
        if any(id(each) in new for each in pytree.tree_leaves(value)):
            entries[key] = pytree.tree_map_only(Tensor, lambda each: new.get(id(each), each), value)
