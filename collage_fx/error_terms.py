"""Where error terms live: a table keyed by tensor, and what a user may ask of it.

Note [Lifetime of error terms]
------------------------------
An error term belongs to the tensor it corrects and to nothing else. The table maps tensors (weakly, by
identity) to records, and a record is the only owner of the auxiliary buffers: compiled steps hold weak
references to records. So error terms survive recompilation, are shared by every compiled callable that
updates the tensor, and are freed with the tensor, even though the compiled code that used them lives on in
Dynamo's cache. Keeping them in ``optimizer.state`` instead would break Dynamo's guards for optimizers whose
state is born while they are traced, and would let ``load_state_dict`` cast them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from collage_fx.error_formats import ErrorFormat
from collage_fx.errors import ConflictingErrorFormatError
from collage_fx.torch_compat import real_tensors

__all__ = [
    "Expansion",
    "allocate",
    "error_terms",
    "expansion_of",
    "full_value",
    "require_format",
    "reset_error_terms",
]


@dataclass(eq=False)
class Expansion:
    """What is kept beside one tensor.

    Attributes:
        format: how hi and the auxiliaries encode the value.
        auxiliaries: the buffers, in the order of the format's specifications.
    """

    format: ErrorFormat
    auxiliaries: tuple[Tensor, ...]

    def replace_contents(self, auxiliaries: Sequence[Tensor]) -> None:
        """Overwrite the buffers in place, so that compiled steps (and CUDA graphs) see the new contents."""
        with torch.no_grad():
            for mine, new in zip(self.auxiliaries, auxiliaries, strict=True):
                mine.copy_(new)

    def clear(self) -> None:
        """Zero the buffers in place: the value becomes hi."""
        with torch.no_grad():
            for auxiliary in self.auxiliaries:
                auxiliary.zero_()


_TABLE = WeakTensorKeyDictionary()
_LOCK = threading.Lock()


def expansion_of(tensor: Tensor) -> Expansion | None:
    """The record of a tensor; None where it has none, or one from when it had another dtype or shape."""
    found: Expansion | None = _TABLE.get(tensor)
    return found if found is None or _fits(found, tensor) else None


def allocate(tensor: Tensor, error_format: ErrorFormat, *, name: str) -> Expansion:
    """The tensor's record, made with zeros if there is none.

    Args:
        tensor: a real low-precision tensor (hi).
        error_format: the format wanted.
        name: for error messages.

    Raises:
        ConflictingErrorFormatError: the tensor has error terms in another format.
    """
    with _LOCK:
        recorded: Expansion | None = _TABLE.get(tensor)
        if recorded is not None and _fits(recorded, tensor):
            require_format(recorded, error_format, name=name)
            _follow(recorded, tensor)
            return recorded
        if recorded is not None:
            warnings.warn(
                f"collage_fx: {name} has changed its dtype or shape (now {tensor.dtype}, "
                f"{tuple(tensor.shape)}); "
                "its error terms start again from zero",
                stacklevel=2,
            )
        with real_tensors(), torch.no_grad():
            made = Expansion(error_format, tuple(_zeros(tensor, error_format)))
        _TABLE[tensor] = made
        return made


def require_format(expansion: Expansion, error_format: ErrorFormat, *, name: str) -> None:
    """Raise ``ConflictingErrorFormatError`` if a tensor's error terms are in another format."""
    if expansion.format is not error_format:
        raise ConflictingErrorFormatError(
            f"error_format={error_format.name!r} was asked for a tensor whose error terms are "
            f"{expansion.format.name!r}",
            where=name,
            remedy="use one error format for all compiled steps of an optimizer, or drop the error terms "
            "first with collage_fx.reset_error_terms(tensor)",
        )


def _zeros(tensor: Tensor, error_format: ErrorFormat) -> list[Tensor]:
    """Zero-initialised auxiliaries with the tensor's strides, dense or not, and device."""
    zeros = []
    for spec in error_format.auxiliaries(tensor.dtype):
        if spec.shape is None:
            buffer = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=spec.dtype, device=tensor.device
            ).zero_()
        else:
            buffer = torch.zeros(spec.shape, dtype=spec.dtype, device=tensor.device)
        zeros.append(buffer)
    return zeros


def _fits(expansion: Expansion, tensor: Tensor) -> bool:
    """Whether the buffers have the dtypes and shapes that go with the tensor as it is now."""
    return all(
        auxiliary.dtype == spec.dtype
        and auxiliary.shape == (tensor.shape if spec.shape is None else spec.shape)
        for auxiliary, spec in zip(
            expansion.auxiliaries, expansion.format.auxiliaries(tensor.dtype), strict=True
        )
    )


def _follow(expansion: Expansion, tensor: Tensor) -> None:
    """Take the error terms along to the device and the strides that the tensor has been moved to."""
    specs = expansion.format.auxiliaries(tensor.dtype)
    if all(
        auxiliary.device == tensor.device
        and (spec.shape is not None or auxiliary.stride() == tensor.stride())
        for auxiliary, spec in zip(expansion.auxiliaries, specs, strict=True)
    ):
        return
    with real_tensors(), torch.no_grad():
        moved = _zeros(tensor, expansion.format)
        for new, old in zip(moved, expansion.auxiliaries, strict=True):
            new.copy_(old)
    expansion.auxiliaries = tuple(moved)


def error_terms(tensor: Tensor) -> tuple[Tensor, ...]:
    """The error terms of a tensor: with them added, it is the value that the optimizer works with.

    Args:
        tensor: a parameter or an optimizer state, such as ``opt.state[p]["exp_avg_sq"]``.

    Returns:
        tensors of its shape on its device, the live buffers themselves; ``()`` where the tensor has none.
    """
    expansion = expansion_of(tensor)
    return () if expansion is None else expansion.format.error_terms(*expansion.auxiliaries)


def full_value(tensor: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """``hi + error terms`` in ``dtype``, a new tensor of the same shape.

    Exact in float64 for every format here (a bfloat16 pair spans at most 53 bits wherever lo is within 2**-44
    of hi).
    """
    value = tensor.detach().to(dtype, copy=True)
    for term in error_terms(tensor):
        value += term.to(dtype)
    return value


def reset_error_terms(tensor: Tensor) -> None:
    """Drop a tensor's error terms: its value becomes exactly what the user sees.

    For use after overwriting a parameter by hand, or before compiling a step with another error format. A
    compiled step that used them goes on with new ones, from zero.
    """
    with _LOCK:
        _TABLE.pop(tensor, None)
