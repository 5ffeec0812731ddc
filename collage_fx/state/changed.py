"""Bitmaps of the elements of parameters that have changed since a reader took them.

Note [Changed elements]
-----------------------
A step that tracks changes has the old and the new hi of each element in registers, and sets a bit in a bitmap
where they differ. A reader takes the elements whose bits are set, and the bits are cleared. There may be
several readers, such as an inference engine and a checkpoint, that take elements at different times: for each
reader but the one that takes, the bits are added to a bitmap of its own. A reader that has taken nothing yet
gets whole tensors.

Every other write (``load_state_dict``, ``p.mul_()``, a step that does not track changes) sets no bits. So the
version counter is read before and after each tracking step: a tensor that something else has written to in
between has changed as a whole, for all readers. So has a tensor that has other memory. A write through
``.data`` counts no version; the samples of Note [Written between two steps] show most of these on a CPU. Nor
does a batch norm count what it writes to its averages, nor a broadcast what it writes to another process's
parameters: tensors that no step tracks are compared by a hash of 64 bits of all elements.

The bitmap belongs to the object that the error terms belong to, for a DTensor to this process's shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from collage_fx.numerics import words_for
from collage_fx.state.error_terms import record_of
from collage_fx.state.fingerprints import fingerprint
from collage_fx.state.host_twins import host_twin
from collage_fx.torch_compat import local_tensor, real_tensors, version_of


@dataclass(eq=False)
class ChangedElements:
    """Changes of a tensor, or of this process's shard, that readers have not taken yet.

    Attributes:
        version: version of the tensor up to which ``words`` has all changes.
        address: address of the memory that readers have seen.
        seen: hash of the elements, as readers have seen them; None for a parameter that a step tracks.
        words: bitmap of the elements that tracking steps have changed; empty if no step tracks the tensor.
        readers: for each reader the bitmap of elements that it lacks beside those of ``words``; None = all.
    """

    version: int
    address: int
    words: Tensor
    seen: int | None
    readers: dict[str, Tensor | None] = field(default_factory=dict)

    def note_write(self) -> None:
        """Note that the tensor has been written to other than by a tracking step."""
        self.readers = dict.fromkeys(self.readers)

    def settle(self, tensor: Tensor) -> None:
        """Note the writes, and new memory, since a tracking step or a reader has seen the tensor."""
        values = None if self.words.numel() else _hash(tensor)
        now = _version(tensor), local_tensor(tensor).data_ptr(), values
        if now != (self.version, self.address, self.seen):
            self.note_write()
            self.version, self.address, self.seen = now

    def lacking(self, reader: str) -> Tensor | None:
        """Return the bitmap of elements that a reader lacks; None = all."""
        if self.words.numel():
            self.readers = {
                name: None if lacks is None else self.words | lacks if lacks.numel() else self.words.clone()
                for name, lacks in self.readers.items()
            }
            self.words.zero_()
        return self.readers.get(reader)

    def take(self, reader: str) -> None:
        """Note that a reader has the elements of the last :meth:`lacking`."""
        self.readers[reader] = _NOTHING


_NOTHING = torch.zeros(0, dtype=torch.int32)
_KNOWN = WeakTensorKeyDictionary()


def owner_of_changes(tensor: Tensor) -> Tensor:
    """Return the object that a tensor's bitmap belongs to."""
    tensor = host_twin(tensor)
    record = record_of(tensor)
    owner = None if record is None else record.owner()
    return tensor if owner is None else owner


def known_changes(owner: Tensor) -> ChangedElements:
    """Return the changes of a tensor; as of now, if nobody has asked before."""
    known: ChangedElements | None = _KNOWN.get(owner)
    if known is None:
        piece = local_tensor(owner)
        with real_tensors():
            words = torch.zeros(0, dtype=torch.int32, device=piece.device)
            values = _hash(owner)
        _KNOWN[owner] = known = ChangedElements(_version(owner), piece.data_ptr(), words, values)
    return known


def changed_elements(owner: Tensor) -> ChangedElements:
    """Return the changes of a tensor whose bits a step sets, with a bitmap on the tensor's device."""
    known, piece = known_changes(owner), local_tensor(owner)
    spec = words_for(piece.numel())
    if known.words.device != piece.device or known.words.shape != spec.shape:
        with real_tensors():
            known.settle(owner)
            known.words, known.seen = spec.zeros(piece.device), None
    return known


def note_write(tensor: Tensor) -> None:
    """Note that a tensor has been written to other than by a tracking step."""
    if (known := _KNOWN.get(tensor)) is not None:
        known.note_write()


class CompensatedWrites:
    """Context manager: inside, a step that tracks changes writes to some tensors; no other writes are noted.

    Args:
        tensors: objects that bitmaps belong to; they are kept alive.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._known = [changed_elements(tensor) for tensor in tensors]
        self._are_whole = all(local_tensor(tensor) is tensor for tensor in tensors)
        self._tensors = tensors

    def _versions(self) -> list[int]:
        if self._are_whole:
            return [*map(version_of, self._tensors)]
        return [*map(_version, self._tensors)]

    def __enter__(self) -> None:
        for known, version in zip(self._known, self._versions(), strict=True):
            if known.version != version:
                known.note_write()

    def __exit__(self, *exception: Any) -> None:  # a refused step has increased version counters, too
        for known, version in zip(self._known, self._versions(), strict=True):
            known.version = version


def _hash(tensor: Tensor) -> int:
    """Return a hash of a tensor's bits."""
    piece = local_tensor(tensor).detach()
    if piece.dtype.itemsize > torch.int32.itemsize:
        piece = piece.contiguous().view(-1).view(torch.int32)
    return int(fingerprint(piece, ()))


def _version(tensor: Tensor) -> int:
    """Return a number that each write to a tensor, or to its shard if it is a DTensor, changes."""
    piece = local_tensor(tensor)
    return version_of(tensor) if piece is tensor else version_of(tensor) + version_of(piece)
