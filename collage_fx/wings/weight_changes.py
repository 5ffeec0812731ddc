"""Changed weights: patches for inference engines, and incremental checkpoints.

Note [Layout of patches]
------------------------
A patch has the fields of vLLM's ``CheckpointWeightPatch`` in the same order (``vllm/model_executor/
model_loader/checkpoint_weight_patch.py``): ``CheckpointWeightPatch(*patch)`` makes vLLM's of ours. A file has
the layout of TRL's delta weight sync (``DeltaWeightTransferEngine``, pull request 5937): safetensors with
``{name}.idx`` and ``{name}.val`` for each changed tensor. In a file in which every tensor is whole, tensors
have their own names, as in TRL's anchors.

Note [What a reader has]
------------------------
For each reader of a tensor there is a copy, in host memory, of the values that it has: 2 bytes an element of
a bfloat16 tensor, none on the device. What has another bit than the copy has changed, whoever has written it
and in whatever way: a step, ``load_state_dict``, ``p.data``, another process. Of a tensor on a device, the
copy is sent there in parts, and compared there. It gets the new values when the reader is known to have them.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor
from torch.nn import Module

from collage_fx.choices import did_you_mean
from collage_fx.codegen import differing_elements, dtype_of_indices
from collage_fx.errors import CheckpointMismatchError, InvalidOptionError
from collage_fx.state import SafetensorsFile, write_safetensors
from collage_fx.torch_compat import local_tensor, offsets_of_shard, records

#: Encoding of the indices in a file: ``"gap_delta"``: the gaps between changed elements, 2 bytes each (4 if a
#: gap is larger than 65535); ``"raw"``: indices, 4 bytes each (8 in tensors of 2**31 elements or more).
Encoding = Literal["gap_delta", "raw"]

#: Endings of a sparse tensor's names in a file.
INDICES, VALUES = ".idx", ".val"

#: Names of entries of a file's metadata: the shapes of the tensors, ``name=2,3`` in lines, and a hash of all
#: else in the file, which files of earlier versions lack.
SHAPES, HASH = "shapes", "hash"


class WeightPatch(NamedTuple):
    """New values of a tensor, in the coordinates of the checkpoint: Note [Layout of patches].

    Attributes:
        name: name in the model's state dict.
        shape: shape of the whole tensor.
        dtype: dtype of the tensor.
        values: vector of the new values; of all elements, in row-major order, if ``indices`` is None.
        indices: sorted vector of their indices in the whole tensor in row-major order, int32 (int64 for 2**31
            elements or more).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    indices: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of values and indices."""
        return self.values.nbytes + (0 if self.indices is None else self.indices.nbytes)


@dataclass(frozen=True)
class WeightChanges(Sequence[WeightPatch]):
    """Patches of a model: a sequence of :class:`WeightPatch`, a tensor at most once, sorted by name.

    Attributes:
        patches: the patches; tensors without changes have none.
        elements: number of elements of all tensors of the model.
    """

    patches: tuple[WeightPatch, ...]
    elements: int

    def __getitem__(self, index: Any) -> Any:
        return self.patches[index]

    def __len__(self) -> int:
        return len(self.patches)

    def __repr__(self) -> str:
        changed = f"{self.changed:,} of {self.elements:,} elements in {len(self)} tensors"
        return f"WeightChanges({changed}, {self.nbytes:,} bytes)"

    @property
    def changed(self) -> int:
        """Number of elements with a new value."""
        return sum(patch.values.numel() for patch in self)

    @property
    def nbytes(self) -> int:
        """Bytes of all values and indices."""
        return sum(patch.nbytes for patch in self)

    @property
    def sparse(self) -> tuple[WeightPatch, ...]:
        """Patches with indices; vLLM loads these and :attr:`dense` in separate calls."""
        return tuple(patch for patch in self if patch.indices is not None)

    @property
    def dense(self) -> tuple[WeightPatch, ...]:
        """Patches of whole tensors."""
        return tuple(patch for patch in self if patch.indices is None)

    def save(self, path: str | os.PathLike[str], encoding: Encoding = "gap_delta", version: int = 0) -> None:
        """Write a safetensors file in TRL's layout: Note [Layout of patches].

        Args:
            path: path of the file; it appears only when it is complete.
            encoding: encoding of the indices, see :data:`Encoding`.
            version: number for TRL's ``model_version``.

        Raises:
            InvalidOptionError: another encoding.
        """
        if encoding not in get_args(Encoding):
            remedy = f"use one of {', '.join(map(repr, get_args(Encoding)))}"
            raise InvalidOptionError(f"encoding={encoding!r} is not allowed", where="encoding", remedy=remedy)
        is_sparse = bool(self.sparse) or not self
        tensors: dict[str, Tensor] = {}
        for patch in self:
            if not is_sparse:
                tensors[patch.name] = patch.values.view(patch.shape)
                continue
            indices = _all_indices(patch.values) if patch.indices is None else patch.indices
            tensors[patch.name + VALUES] = patch.values
            tensors[patch.name + INDICES] = _gaps(indices) if encoding == "gap_delta" else indices
        metadata = {
            "format": "sparse_weight_patch",
            "version": "1",
            "sparse": str(is_sparse),
            "model_version": str(version),
            "num_changed_params": str(len(self)),
            "total_changed_elements": str(self.changed),
            "total_elements": str(self.elements),
            "sparsity": str(1.0 - self.changed / max(self.elements, 1)),
            "encoding": encoding,
            SHAPES: "\n".join(f"{patch.name}={','.join(map(str, patch.shape))}" for patch in self),
        }
        metadata[HASH] = _hash(tensors, metadata)
        order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
        like = {name: tensors[name].to("meta") for name in order}
        write_safetensors(Path(path), like, (tensors[name] for name in order), metadata)

    def gathered(self, group: Any = None) -> WeightChanges:
        """Return the changes of all processes, on each of them, in host memory; all must call it.

        Args:
            group: process group; None = all processes.
        """
        found: list[Any] = [None] * torch.distributed.get_world_size(group)
        own = [patch._replace(values=patch.values.cpu()) for patch in self]
        own = [each if each.indices is None else each._replace(indices=each.indices.cpu()) for each in own]
        torch.distributed.all_gather_object(found, (own, self.elements), group=group)
        by_name = defaultdict[str, list[WeightPatch]](list)
        for patch in (patch for patches, _ in found for patch in patches):
            by_name[patch.name].append(patch)
        merged = tuple(_merged(by_name[name]) for name in sorted(by_name))
        return WeightChanges(merged, max(elements for _, elements in found))


def changes(model: Module, reader: str = "engine") -> WeightChanges:
    """Return the weights that have changed since a reader last took them, and note that it has them now.

    These are the elements of which a bit differs from what the reader has, whatever has written them: a
    value that has changed back is not among them. A reader that takes the first time gets whole tensors;
    :func:`forget_changes` lets it begin later. A tensor is also given whole where that takes fewer bytes than
    its changed elements with their indices, and where the tensor itself is another one. Error terms are no
    part of it. It takes memory for the patches, and as much host memory for each reader as the state dict has
    bytes. After an exception the next call gives these changes, too.

    Args:
        model: module whose state dict has the names of the checkpoint. A tensor with several names is given
            under each. DTensors give the elements of this process's shard, in coordinates of the whole
            tensor: see :meth:`WeightChanges.gathered`.
        reader: name of the reader. Readers are independent of each other.
    """
    found, lacking = _lacking_in(model, reader)
    _note_taken(lacking, reader)
    return found


def _lacking_in(model: Module, reader: str) -> tuple[WeightChanges, _Lacking]:
    """Return the elements of a model's tensors that a reader lacks: as patches, and by tensor."""
    found, elements, lacking = list[WeightPatch](), 0, _Lacking()
    with torch.no_grad():
        for name, tensor in _named(model):
            elements += tensor.numel()
            if id(tensor) not in lacking:  # it may have several names
                lacking[id(tensor)] = tensor, *_lacking_of(tensor, reader)
            _, values, indices = lacking[id(tensor)]
            if values.numel():
                if indices is not None or values.numel() < tensor.numel():
                    indices = _in_whole(indices, tensor)
                found.append(WeightPatch(name, tuple(tensor.shape), tensor.dtype, values, indices))
    return WeightChanges(tuple(sorted(found, key=lambda patch: patch.name)), elements), lacking


def _note_taken(lacking: _Lacking, reader: str) -> None:
    """Note that a reader has the elements now that it lacked; if that fails midway, it gets all anew."""
    on_host = []
    for tensor, values, indices in lacking.values():
        new = (None, _on_host(values)) if indices is None else (indices.cpu().long(), values.cpu())
        on_host.append((records.of(tensor, _Copies), *new))
    try:
        for copies, indices, values in on_host:
            if indices is None:
                copies[reader] = values
            else:
                copies[reader].index_copy_(0, indices, values)
    except BaseException:
        for copies, _, _ in on_host:
            copies.pop(reader, None)
        raise


def forget_changes(model: Module, reader: str = "engine") -> None:
    """Note that a reader has the weights as they are now: its next :func:`changes` begin from here.

    Args:
        model: as in :func:`changes`.
        reader: name of the reader.
    """
    for _, tensor in _named(model):
        records.of(tensor, _Copies)[reader] = _on_host(_flat(tensor))


def save_changes(
    model: Module, path: str | os.PathLike[str], reader: str = "checkpoint", encoding: Encoding = "gap_delta"
) -> WeightChanges:
    """Write the weights that have changed since the last call to a file: an incremental checkpoint.

    The first call writes whole tensors, as a full checkpoint does; call :func:`forget_changes` where another
    full checkpoint is written. :func:`load_changes` and :func:`apply_changes` restore the weights from the
    full checkpoint and all files after it, in their order. After an exception, of which all processes are
    told, the next call writes these changes, too.

    Args:
        model: as in :func:`changes`. With DTensors all processes must call this; the first writes.
        path: as in :meth:`WeightChanges.save`.
        reader: as in :func:`changes`.
        encoding: as in :meth:`WeightChanges.save`.
    """
    found, lacking = _lacking_in(model, reader)
    if is_sharded := any(local_tensor(tensor) is not tensor for _, tensor in _named(model)):
        found = found.gathered()
    failure: list[str | None] = [None]
    try:
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank()):
            found.save(path, encoding)
    except BaseException as error:
        failure = [repr(error)]
        raise
    finally:
        if is_sharded:
            torch.distributed.broadcast_object_list(failure)
    if failure[0] is not None:
        raise OSError(f"process 0 has not written {os.fspath(path)}: {failure[0]}")
    _note_taken(lacking, reader)
    return found


def load_changes(path: str | os.PathLike[str]) -> WeightChanges:
    """Read a file of :meth:`WeightChanges.save` or :func:`save_changes`.

    Raises:
        CheckpointMismatchError: the file is not one of these, or has been damaged.
    """
    file = SafetensorsFile(path)
    try:
        lines = (line.rpartition("=") for line in file.metadata[SHAPES].splitlines())
        shapes = {name: tuple(int(size) for size in sizes.split(",") if size) for name, _, sizes in lines}
        elements, is_gaps = int(file.metadata["total_elements"]), file.metadata["encoding"] == "gap_delta"
        held, patches = {name: file[name] for name in file}, []
        for name, shape in shapes.items():
            if name in held:
                patches.append(WeightPatch(name, shape, held[name].dtype, held[name].reshape(-1)))
                continue
            values, indices = held[name + VALUES], held[name + INDICES]
            if is_gaps:
                indices = ((indices.long() + 1).cumsum(0) - 1).to(dtype_of_indices(math.prod(shape)))
            patches.append(WeightPatch(name, shape, values.dtype, values, indices))
        if file.metadata.get(HASH) not in (None, _hash(held, file.metadata)):
            raise ValueError("its hash is another than that of what it holds")
    except (KeyError, ValueError) as error:
        raise CheckpointMismatchError(
            "a damaged file, or one without the entries of changed weights "
            f"({type(error).__name__}: {error})",
            where=os.fspath(path),
            remedy="give a file that collage_fx.save_changes, or WeightChanges.save, has written",
        ) from error
    return WeightChanges(tuple(patches), elements)


def apply_changes(target: Module | Mapping[str, Tensor], patches: Iterable[WeightPatch]) -> None:
    """Write changed weights into a model, or into the tensors of a state dict, in place.

    Args:
        target: the model or state dict, of the same names, shapes and dtypes. Of DTensors this process's
            shards are written.
        patches: :class:`WeightChanges`, or some patches.

    Raises:
        CheckpointMismatchError: a name is missing, a shape or dtype differs, or a patch is not what
            :class:`WeightPatch` describes, as one has been damaged. Nothing is written then.
    """
    held = dict(_named(target)) if isinstance(target, Module) else target
    chosen = list(patches)
    for patch in chosen:
        _refuse_unlike(patch, held)
    with torch.no_grad():
        for patch in chosen:
            _write(held[patch.name], patch)


def _refuse_unlike(patch: WeightPatch, held: Mapping[str, Tensor]) -> None:
    into = held.get(patch.name)
    if into is None:
        met, remedy = "changes of a tensor that is not there", did_you_mean(patch.name, held)
    elif (tuple(into.shape), into.dtype) != (patch.shape, patch.dtype):
        met = f"changes of a tensor of shape {patch.shape} and {patch.dtype}, where it has shape "
        met += f"{tuple(into.shape)} and {into.dtype}"
        remedy = "apply them to the model that they were taken from, in the same dtype"
    elif why_not := _why_no_patch(patch):
        met = f"changes with {why_not}"
        remedy = "take the changes, or write the file, anew: these have been damaged on the way"
    else:
        return
    raise CheckpointMismatchError(met, where=patch.name, remedy=remedy)


def _why_no_patch(patch: WeightPatch) -> str:
    """Return why a patch contradicts itself; an empty text if it does not."""
    values, indices, elements = patch.values, patch.indices, math.prod(patch.shape)
    if values.dtype is not patch.dtype:
        return f"values of {values.dtype} where {patch.dtype} is named"
    if indices is None:
        return "" if values.numel() == elements else f"{values.numel()} values for {elements} elements"
    if indices.dtype not in (torch.int32, torch.int64) or indices.dim() != 1 or values.dim() != 1:
        return f"indices of {indices.dtype} and shape {tuple(indices.shape)}"
    if len(indices) != len(values):
        return f"{len(values)} values at {len(indices)} indices"
    if len(indices) and not bool((indices[1:] > indices[:-1]).all()):
        return "indices that do not rise"
    if len(indices) and not (int(indices[0]) >= 0 and int(indices[-1]) < elements):
        return f"indices from {int(indices[0])} to {int(indices[-1])} for {elements} elements"
    return ""


class _Copies(dict[str, Tensor]):
    """Values of a tensor that each of its readers has, in host memory: a part of its record."""


#: ``id`` of a tensor -> the tensor, values of changed elements of this process's piece, and their indices in
#: it; None = all elements.
_Lacking = dict[int, tuple[Tensor, Tensor, Tensor | None]]


def _named(model: Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            yield name, value


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of this process's piece of a tensor, in row-major order."""
    return local_tensor(tensor.detach()).contiguous().view(-1)


def _on_host(values: Tensor) -> Tensor:
    """Return a copy in host memory, from which a GPU reads without a detour."""
    copy = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
    return copy.copy_(values)


def _lacking_of(tensor: Tensor, reader: str) -> tuple[Tensor, Tensor | None]:
    """Return the values of a tensor that a reader lacks, and their indices; None = all elements."""
    values, before = _flat(tensor), records.of(tensor, _Copies).get(reader)
    if before is not None and (before.shape, before.dtype) == (values.shape, values.dtype):
        indices, taken = differing_elements(values, before)
        if taken.nbytes + indices.nbytes < values.nbytes:
            return taken, indices
    return values.clone(), None


def _all_indices(values: Tensor) -> Tensor:
    return torch.arange(values.numel(), dtype=dtype_of_indices(values.numel()), device=values.device)


def _in_whole(indices: Tensor | None, tensor: Tensor) -> Tensor:
    """Convert indices in this process's piece, in row-major order, to indices in the whole tensor."""
    piece = local_tensor(tensor.detach())
    indices = _all_indices(piece) if indices is None else indices
    if piece.shape == tensor.shape:
        return indices
    whole = torch.zeros_like(indices, dtype=torch.int64)
    places = torch.unravel_index(indices.long(), piece.shape)
    steps = torch.empty(tensor.shape, device="meta").stride()
    for place, offset, step in zip(places, offsets_of_shard(tensor), steps, strict=True):
        whole += (place + offset) * step
    return whole.to(dtype_of_indices(tensor.numel()))


def _write(into: Tensor, patch: WeightPatch) -> None:
    piece = local_tensor(into.detach())
    values = patch.values.to(piece.device)
    if patch.indices is None or not patch.shape:
        values, offsets = values.view(patch.shape), offsets_of_shard(into)
        for dim, (offset, size) in enumerate(zip(offsets, piece.shape, strict=True)):
            values = values.narrow(dim, offset, size)
        piece.copy_(values)
        return
    places = torch.unravel_index(patch.indices.to(piece.device).long(), patch.shape)
    own = [place - offset for place, offset in zip(places, offsets_of_shard(into), strict=True)]
    if piece.shape != into.shape:
        is_here = torch.ones_like(values, dtype=torch.bool)
        for place, size in zip(own, piece.shape, strict=True):
            is_here &= (place >= 0) & (place < size)
        own, values = [place[is_here] for place in own], values[is_here]
    piece.index_put_(tuple(own), values)


def _merged(patches: Sequence[WeightPatch]) -> WeightPatch:
    """Merge the patches of a tensor's shards, or of its copies on several processes."""
    whole = next((patch for patch in patches if patch.indices is None), None)
    if whole is not None or len(patches) == 1:
        return whole or patches[0]
    indices, places = torch.cat([cast(Tensor, each.indices) for each in patches]).unique(return_inverse=True)
    values = patches[0].values.new_empty(len(indices))
    of_each = places.split([len(patch.values) for patch in patches])
    for patch, at in zip(reversed(patches), reversed(of_each), strict=True):  # the first counts
        values[at] = patch.values
    is_whole = indices.numel() == math.prod(patches[0].shape)
    return patches[0]._replace(values=values, indices=None if is_whole else indices)


def _hash(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Compute a hash of names, sizes and bits of tensors, and of metadata."""
    digest = hashlib.sha256(repr(sorted(item for item in metadata.items() if item[0] != HASH)).encode())
    for name in sorted(tensors):
        data = tensors[name].detach().cpu().contiguous()
        digest.update(repr((name, data.dtype, data.shape)).encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _gaps(indices: Tensor) -> Tensor:
    wide = indices.long()
    gaps = torch.diff(wide, prepend=wide.new_full((1,), -1)) - 1
    return gaps.to(torch.uint16 if not gaps.numel() or int(gaps.max()) < 1 << 16 else torch.uint32)
