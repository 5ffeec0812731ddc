"""The tables of all error terms, keyed by tensor, and the functions by which a user asks for them.

Note [Lifetime of error terms]
------------------------------
An error term belongs to the tensor it corrects and to nothing else. The tables map tensors (weakly) to
records, and a record is the only owner of the auxiliary buffers: compiled steps hold weak references to
records. So error terms survive recompilation, are shared by every compiled callable that updates the tensor,
and are freed with the tensor, even though the compiled code that used them lives on in Dynamo's cache.
Keeping them in ``optimizer.state`` instead would break Dynamo's guards for optimizers whose state is born
while they are traced, and would let ``load_state_dict`` cast them.

Note [One tensor under several objects]
---------------------------------------
``p``, ``p.data`` and ``p.detach()`` are three objects and one tensor. Code that updates parameters through
detached aliases makes new ones at every call (``AveragedModel.update_parameters`` does), and what Dynamo
sees behind a graph break is the alias. So a record is found by the object it was made for, which takes it
along when ``p.data`` is moved or replaced, and by the memory: same storage, offset, sizes, strides and dtype.
The latter lives as long as the storage, which somebody may keep (``model.state_dict()``) when ``p.data`` has
been replaced; what lies there then is another tensor. So is a view of other sizes or strides.

Note [Tensors in pieces]
------------------------
Of a DTensor, each process of a mesh has a piece, an ordinary tensor, which is what compiled code updates. Its
error terms are those of the piece, of whose sizes and strides they are. The record belongs to the DTensor,
as FSDP now and then puts another tensor in the place of the piece, and is found by the memory of the piece as
well. What a user gets, and a checkpoint holds, is a DTensor in pieces like hi.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary, WeakIdRef, WeakTensorKeyDictionary

from collage_fx.errors import CheckpointMismatchError, ConflictingErrorFormatError, UnsupportedTensorError
from collage_fx.graph import is_dense
from collage_fx.numerics import ERROR_FORMATS, AuxiliarySpec, ErrorFormat, format_named, is_low_precision
from collage_fx.state.packed import Value, is_packed, move_packed, pack, unpack
from collage_fx.torch_compat import (
    distributed_like,
    has_storage,
    local_tensor,
    real_tensors,
    sharding_of,
    start_of_shard,
    storage_of,
    version_of,
    whole_tensor,
    without_torch_function,
)


class _Records:
    """The records of all error terms.

    Attributes:
        state: another object since a record was dropped or given other buffers.
    """

    state = object()


_RECORDS = _Records()

#: The format of error terms of a parameter that no step has asked for in another one.
_DEFAULT = ERROR_FORMATS["exact"]

#: Elements that are handled at once where a tensor is too large to be converted as a whole.
PART = 1 << 20


def state_of_records() -> object:
    """An object that stays the same as long as all records are there, with the same buffers."""
    return _RECORDS.state


@dataclass(eq=False)
class Expansion:
    """The record of one tensor's auxiliaries.

    Attributes:
        format: how hi and the auxiliaries encode the value.
        dtype: of hi. Bits that are kept beside one dtype mean something else beside another.
        auxiliaries: the buffers, in the order of the format's specifications.
        start: the index of the tensor's first element in the whole of which it is a piece: int32, 0-d.
        owner: the object it was made for.
        memory: the storages and the regions in them by which it can be found.
        claim: a fingerprint of hi and the buffers as they were saved, where they have been loaded and no step
            has looked yet whether they belong to this hi.
        is_used: whether a compiled step reads and writes the buffers, rather than that they have been loaded.
        is_new: whether they come from the step that made the tensor, and no step that updates it has been
            compiled.
        accepted: the version of hi that the buffers have been said to belong to, other than by a step.
    """

    format: ErrorFormat
    dtype: torch.dtype
    auxiliaries: tuple[Tensor, ...]
    start: Tensor
    owner: TensorWeakRef
    memory: list[tuple[WeakIdRef, Hashable]] = field(default_factory=list)
    claim: Tensor | None = None
    is_used: bool = False
    is_new: bool = False
    accepted: int = -1
    _settle: Callable[[], None] | None = None

    def __del__(self, records: _Records = _RECORDS) -> None:
        records.state = object()

    def replace_contents(self, auxiliaries: Sequence[Tensor]) -> None:
        """Overwrite the buffers in place, so that compiled steps (and CUDA graphs) see the new contents."""
        self.drop_claim()
        with real_tensors(), torch.no_grad():
            for mine, new in zip(self.auxiliaries, auxiliaries, strict=True):
                mine.copy_(new)

    def replace_buffers(self, auxiliaries: Sequence[Tensor]) -> None:
        """Take other buffers, which compiled steps will find."""
        self.auxiliaries = tuple(auxiliaries)
        _RECORDS.state = object()

    def make_claim(self, claim: Tensor, settle: Callable[[], None]) -> None:
        """Have the next step that uses the error terms call ``settle`` before, which looks at the claim."""
        self.claim, self._settle = claim, settle
        _RECORDS.state = object()

    def drop_claim(self) -> None:
        """Let the error terms belong to hi as it is: it has been looked at, or they are others now."""
        self.claim = self._settle = None
        if (tensor := self.owner()) is not None and not is_packed(tensor):
            self.accepted = version_of(tensor)

    def settle(self) -> None:
        """See to it that the error terms belong to hi, if nobody has looked since they were loaded."""
        if self._settle is not None:
            self._settle()

    def use(self, name: str) -> Sequence[Tensor]:
        """The buffers, for a step, as its format's ``store`` takes them.

        Args:
            name: for error messages.

        Raises:
            UnsupportedTensorError: a packed format cannot hold what the tensor has been given.
        """
        self.is_used = True
        self.settle()
        if (owner := self.owner()) is not None:
            _follow(self, local_tensor(owner))
        if not self.format.keeps_hi:
            self._pack(name)
        return (*self.auxiliaries, self.start) if self.format.is_dithered else self.auxiliaries

    @property
    def is_current(self) -> bool:
        """Whether the buffers hold the value: of a tensor that is not packed now, whether they give its."""
        tensor = self.owner()
        if self.format.keeps_hi or tensor is None or is_packed(tensor):
            return True
        hi = local_tensor(tensor.detach())
        with real_tensors(), torch.no_grad():
            return torch.equal(self._decode(hi).view(torch.int16), hi.view(torch.int16))

    def _pack(self, name: str) -> None:
        """Encode hi into the buffers, unless they hold it, and give its memory back."""
        tensor = self.owner()
        if tensor is None or is_packed(tensor):
            return
        hi = local_tensor(tensor)
        if not self.is_current:
            if why_not := self.format.why_not_values(hi):
                raise UnsupportedTensorError(
                    f"{why_not} in a state that no step makes negative, and that is packed as such",
                    where=name,
                    remedy="let the state begin with what its optimizer makes, or leave state= out",
                )
            self._encode(hi)
        self._give_back(tensor)

    def move(self, device: torch.device) -> None:
        """Have the buffers on a device; a packed tensor is there, too."""
        self.start = self.start.to(device)
        self.replace_buffers([each.to(device) for each in self.auxiliaries])
        if (tensor := self.owner()) is not None and is_packed(tensor):
            move_packed(tensor, device)

    def _give_back(self, tensor: Tensor) -> None:
        """Give the memory of a tensor back, whose value the buffers are."""
        pack(tensor, Value(self._decode, self.owner, self._unpacked, self._layout, self._recipe))
        record_memory(local_tensor(tensor), self)

    def _recipe(self) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        hi = self._layout()
        specs = self.format.auxiliaries(hi)
        saved = tuple(spec.saved(each) for spec, each in zip(specs, self.auxiliaries, strict=True))
        return packed_tensor, (self.format.name, self.dtype, tuple(hi.shape), hi.stride(), saved)

    def _layout(self) -> Tensor:
        return _like(self.auxiliaries[0].shape, self.auxiliaries[0].stride(), self.dtype)

    def _encode(self, hi: Tensor) -> None:
        rows = max(1, PART * len(hi) // hi.numel()) if self.format.by_rows else len(hi)
        with real_tensors(), torch.no_grad():
            for first in range(0, len(hi), rows):
                part = slice(first, first + rows)
                encoded = self.format.split(hi[part].to(torch.float32), hi.dtype)[1:]
                for mine, new in zip(self.auxiliaries, encoded, strict=True):
                    if mine.dim():  # what is a number counts steps
                        mine[part] = new

    def _decode(self, hi: Tensor) -> Tensor:
        return self.format.join(hi, *self.auxiliaries).to(hi.dtype)

    def decoded_parts(self, elements: int) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
        """Rows of a packed tensor, decoded, and of its auxiliaries, of about so many elements at a time."""
        codes = self.auxiliaries[0]
        rows = max(1, elements * len(codes) // codes.numel()) if self.format.by_rows else len(codes)
        for first in range(0, len(codes), rows):
            part = slice(first, first + rows)
            auxiliaries = [each[part] if each.dim() else each for each in self.auxiliaries]
            hi = _like(auxiliaries[0].shape, auxiliaries[0].stride(), self.dtype)
            with real_tensors(), torch.no_grad():
                yield self.format.join(hi, *auxiliaries).to(self.dtype), auxiliaries

    def _unpacked(self, tensor: Tensor) -> None:
        if self.owner() is not None:
            record_memory(local_tensor(tensor), self)
        _RECORDS.state = object()

    def keep_where(self, same: Tensor) -> bool:
        """Zero the buffers in place but where elements of hi are the same; whether all of them are."""
        keeps_all = bool(same.all())
        if not keeps_all and self.format.is_elementwise:
            with real_tensors(), torch.no_grad():
                for auxiliary in (each for each in self.auxiliaries if each.dim()):
                    auxiliary.masked_fill_(~same.to(auxiliary.device), 0)
        elif not keeps_all:
            self.clear()
        return keeps_all

    def clear(self) -> None:
        """Zero the buffers in place: the value becomes hi."""
        self.drop_claim()
        if not self.format.keeps_hi:
            return  # it is looked at before the next step
        with real_tensors(), torch.no_grad():
            for auxiliary in self.auxiliaries:
                auxiliary.zero_()


#: The records by object, and by storage and region in it: Note [One tensor under several objects].
_BY_OBJECT = WeakTensorKeyDictionary()
_BY_STORAGE = WeakIdKeyDictionary()
_LOCK = threading.Lock()


def expansion_of(tensor: Tensor) -> Expansion | None:
    """The record of a tensor; None where it has none, or one from when it had another dtype or shape."""
    with without_torch_function():  # a packed tensor is looked at as it is
        for table in (_BY_OBJECT.get, _in_memory_of):
            found: Expansion | None = table(tensor)
            if found is not None and _fits(found, local_tensor(tensor)):
                return found
    return None


def records_there() -> Hashable:
    """A value that is another one once a record has been made or dropped."""
    return state_of_records(), len(_BY_OBJECT)


def has_error_terms(tensor: Tensor) -> bool:
    """Whether a tensor has error terms, rather than none or a record without."""
    found = expansion_of(tensor)
    return found is not None and found.format.keeps_error


def note_new(tensor: Tensor) -> None:
    """Note that a tensor's error terms are those that it was made with, which no later step has chosen."""
    if (found := expansion_of(tensor)) is not None:
        found.is_new, found.is_used = True, False


def choose_new(tensor: Tensor, *, keep: bool) -> None:
    """Keep the error terms that a tensor was made with, or drop them, now that a step updates it."""
    found = expansion_of(tensor)
    if found is not None and found.is_new:
        found.is_new = False
        if not keep:
            reset_error_terms(tensor)


def packed_format(tensor: Tensor) -> ErrorFormat | None:
    """The format of a tensor that is packed whenever a compiled step has updated it; None of any other."""
    found = expansion_of(tensor)
    return None if found is None or found.format.keeps_hi else found.format


def _in_memory_of(tensor: Tensor) -> Expansion | None:
    tensor = local_tensor(tensor)
    if not has_storage(tensor):
        return None
    by_region: dict[Hashable, Expansion] = _BY_STORAGE.get(tensor.untyped_storage(), {})
    found = by_region.get(_region(tensor))
    owner = None if found is None else found.owner()
    return found if owner is None or _is_same_memory(local_tensor(owner), tensor) else None


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return has_storage(one) and storage_of(one) == storage_of(other) and _region(one) == _region(other)


def _region(tensor: Tensor) -> Hashable:
    return tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def record_memory(tensor: Tensor, expansion: Expansion) -> None:
    """Have a record found by the memory that its tensor, or its piece, has now."""
    with without_torch_function():
        if not has_storage(tensor):
            return
        storage, region = tensor.untyped_storage(), _region(tensor)
        by_region = _BY_STORAGE.setdefault(storage, {})
        if by_region.get(region) is not expansion:
            by_region[region] = expansion
            there_still = [each for each in expansion.memory if each[0]() is not None]
            expansion.memory = [*there_still, (WeakIdRef(storage), region)]


def _forget_memory(expansion: Expansion) -> None:
    for reference, region in expansion.memory:
        storage = reference()
        by_region = {} if storage is None else _BY_STORAGE.get(storage, {})
        if by_region.get(region) is expansion:
            del by_region[region]


def ensure_expansion(
    tensor: Tensor,
    error_format: ErrorFormat,
    *,
    name: str,
    contents: Sequence[Tensor] | None = None,
    take_over: bool = False,
) -> Expansion:
    """The tensor's record, made with zeros if there is none.

    Args:
        tensor: a real low-precision tensor (hi), maybe a DTensor: Note [Tensors in pieces].
        error_format: the format wanted.
        name: for error messages.
        contents: what its buffers are to hold.
        take_over: whether a new record may take these as its buffers.

    Raises:
        ConflictingErrorFormatError: the tensor has error terms in another format, which a step uses.
    """
    _convert(tensor, error_format)
    with _LOCK:
        found = expansion_of(tensor)
        piece = local_tensor(tensor)
        if found is not None:
            require_format(found, error_format, name=name)
            _follow(found, piece)
            record_memory(piece, found)
            if contents is not None:
                found.replace_contents(contents)
            return found
        if tensor in _BY_OBJECT:
            warnings.warn(
                f"collage_fx: {name} has changed its dtype or shape (now {tensor.dtype}, "
                f"{tuple(tensor.shape)}); "
                "its error terms start again from zero",
                stacklevel=2,
            )
        with real_tensors(), torch.no_grad():
            buffers = _buffers(error_format.auxiliaries(piece), piece.device, contents, take_over=take_over)
            start = torch.tensor(start_of_shard(tensor), dtype=torch.int64, device=piece.device)
            start = start.to(torch.int32)  # modulo 2**32
        made = Expansion(error_format, tensor.dtype, buffers, start, TensorWeakRef(tensor))
        _BY_OBJECT[tensor] = made
        record_memory(piece, made)
        return made


def _buffers(
    specs: Sequence[AuxiliarySpec],
    device: torch.device,
    contents: Sequence[Tensor] | None,
    *,
    take_over: bool,
) -> tuple[Tensor, ...]:
    """Buffers with these contents, or of zeros; what can be taken over is."""
    if contents is None:
        return tuple(spec.zeros(device) for spec in specs)
    return tuple(
        spec.fitted(each, device) if take_over else spec.zeros(device).copy_(each)
        for spec, each in zip(specs, contents, strict=True)
    )


def memory_of_records() -> set[int]:
    """The memory of the buffers of all records."""
    return {storage_of(each) for record in _BY_OBJECT.values() for each in record.auxiliaries}


def packed_tensor(
    format_name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    saved: tuple[Tensor, ...],
) -> Tensor:
    """A packed tensor of what a checkpoint holds of it. Files name this function: it is part of their format.

    Args:
        format_name: of a packed format.
        dtype: of the tensor.
        shape: its sizes.
        stride: its strides.
        saved: its auxiliaries as they are saved, which it takes over.

    Raises:
        CheckpointMismatchError: they are none of such a tensor.
    """
    error_format, hi = format_named(format_name), _like(shape, stride, dtype)
    if why_not := _why_none(error_format, hi, saved):
        raise CheckpointMismatchError(
            why_not,
            where=f"a tensor in the packed format {format_name!r}",
            remedy="load the file with the version of collage_fx that wrote it; else it is damaged",
        )
    assert error_format is not None
    specs, device = error_format.auxiliaries(hi), saved[0].device
    with real_tensors(), torch.no_grad():
        loaded = [spec.loaded(each) for spec, each in zip(specs, saved, strict=True)]
        auxiliaries = _buffers(specs, device, loaded, take_over=True)
        tensor = torch.empty((), dtype=dtype, device=device).expand(shape)
        start = torch.zeros((), dtype=torch.int32, device=device)
    made = Expansion(error_format, dtype, auxiliaries, start, TensorWeakRef(tensor))
    with _LOCK:
        _BY_OBJECT[tensor] = made
        made._give_back(tensor)
    return tensor


def _like(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor without memory, for a format's specifications."""
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta")


def _why_none(error_format: ErrorFormat | None, hi: Tensor, saved: Sequence[Tensor]) -> str:
    """The reason why these are no saved auxiliaries of a packed tensor; empty if they are."""
    if error_format is None or error_format.keeps_hi:
        return "a format that is not registered: import the module that has it"
    if not is_low_precision(hi.dtype):
        return f"a dtype of {hi.dtype}"
    if why_not := error_format.why_not(hi):
        return f"a tensor of which {why_not}"
    kept = [(tuple(each.shape), each.dtype) for each in saved]
    expected = [(tuple(spec.saved_shape), spec.saved_dtype) for spec in error_format.auxiliaries(hi)]
    return "" if kept == expected else f"{kept} where {expected} belong together"


def change_layout(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Let ``change`` give a tensor other sizes and strides in place, as ``t_`` does, and its error terms."""
    expansion = expansion_of(tensor)
    if expansion is None:
        return change(tensor)
    if expansion.format.is_elementwise:
        for each in (tensor, *(each for each in expansion.auxiliaries if each.dim())):
            change(each)
    else:  # what belongs to several elements, such as a scale, is that of others then
        value = expansion.format.join(tensor.detach(), *expansion.auxiliaries)
        change(tensor)
        _, *auxiliaries = expansion.format.split(change(value), tensor.dtype)
        expansion.replace_buffers(auxiliaries)
    record_memory(tensor, expansion)
    return tensor


def _convert(tensor: Tensor, error_format: ErrorFormat) -> None:
    """Have what no step has used yet, or has no error, in another format, as far as that can hold it."""
    found = expansion_of(tensor)
    if found is None or found.format is error_format or (found.is_used and found.format.keeps_error):
        return
    found.settle()
    with real_tensors(), torch.no_grad():
        hi = local_tensor(tensor.detach())
        term = sum(local_tensor(each).float() for each in error_terms(tensor))
        auxiliaries = error_format.beside(hi, torch.as_tensor(term))
    reset_error_terms(tensor)
    ensure_expansion(tensor, error_format, name="").replace_contents(auxiliaries)


def require_format(expansion: Expansion, error_format: ErrorFormat, *, name: str) -> None:
    """Raise ``ConflictingErrorFormatError`` if a step uses a tensor's error terms in another format."""
    if expansion.format is not error_format and expansion.is_used and expansion.format.keeps_error:
        raise ConflictingErrorFormatError(
            f"error_format={error_format.name!r} was asked for a tensor whose error terms are "
            f"{expansion.format.name!r}",
            where=name,
            remedy="use one error format for all compiled steps of an optimizer, or drop the error terms "
            "first with collage_fx.reset_error_terms(tensor)",
        )


def _fits(expansion: Expansion, tensor: Tensor) -> bool:
    """Whether the buffers are of the tensor's dtype and have the shapes that go with it as it is now."""
    if expansion.dtype != tensor.dtype:
        return False
    if not expansion.format.keeps_hi:
        return expansion.auxiliaries[0].shape == tensor.shape
    specs = expansion.format.auxiliaries(tensor)
    return len(specs) == len(expansion.auxiliaries) and all(
        auxiliary.dtype == spec.dtype and auxiliary.shape == spec.shape
        for auxiliary, spec in zip(expansion.auxiliaries, specs, strict=True)
    )


def _follow(expansion: Expansion, tensor: Tensor) -> None:
    """Take the error terms along to the device and the strides that the tensor has been moved to."""
    if is_packed(tensor):
        return
    specs = expansion.format.auxiliaries(tensor)
    if all(
        auxiliary.device == tensor.device and spec.stride in (None, auxiliary.stride())
        for auxiliary, spec in zip(expansion.auxiliaries, specs, strict=True)
    ):
        return
    with real_tensors(), torch.no_grad():
        moved = [spec.zeros(tensor.device) for spec in specs]
        for new, old in zip(moved, expansion.auxiliaries, strict=True):
            new.copy_(old)
    expansion.start = expansion.start.to(tensor.device)
    expansion.replace_buffers(moved)


def move_into(tensor: Tensor, other: Tensor) -> bool:
    """Give a tensor the memory of another one of its layout; error terms of elements that are the same stay.

    Returns:
        whether all error terms have been kept.
    """
    expansion, brought = expansion_of(tensor), expansion_of(other)
    if expansion is None or expansion is brought:
        local_tensor(tensor).data = local_tensor(other).detach()
        return True
    keeps_all = True
    if brought is not None and brought.format is expansion.format:
        expansion.drop_claim()
        expansion.replace_buffers(brought.auxiliaries)
    elif expansion.format.keeps_hi and expansion.claim is None:
        keeps_all = expansion.keep_where(same_elements(local_tensor(tensor), local_tensor(other)))
    if is_packed(tensor) and is_packed(other):
        move_packed(tensor, other.device)
    else:
        local_tensor(tensor).data = local_tensor(other).detach()
    record_memory(local_tensor(tensor), expansion)
    _follow(expansion, local_tensor(tensor))
    _RECORDS.state = object()
    return keeps_all


def hand_over(old: Tensor, new: Tensor, *, name: str) -> bool:
    """Give a tensor the error terms of another one, of those elements that are the same in both.

    Args:
        old: the tensor that had them.
        new: of other sizes, maybe; what is at the same indices is compared.
        name: of the new one.

    Returns:
        whether no element of both has lost its error term.
    """
    expansion, found = expansion_of(old), expansion_of(new)
    if expansion is None or not expansion.format.keeps_error or found not in (None, expansion):
        return True
    if found is expansion:  # another object in the same memory
        _BY_OBJECT[new], expansion.owner = expansion, TensorWeakRef(new)
        return True
    piece, whole = local_tensor(old.detach()), local_tensor(new.detach())
    if old.dtype != new.dtype or old.dim() != new.dim() or not expansion.format.is_elementwise:
        return False
    expansion.settle()
    both = tuple(slice(min(sizes)) for sizes in zip(piece.shape, whole.shape, strict=True))
    same = same_elements(piece[both], whole[both])
    made = ensure_expansion(new, expansion.format, name=name)
    with real_tensors(), torch.no_grad():
        for mine, given in zip(made.auxiliaries, expansion.auxiliaries, strict=True):
            if mine.dim():
                mine[both].copy_(torch.where(same, given[both].to(same.device), torch.zeros_like(mine[both])))
            else:
                mine.copy_(given)
    return bool(same.all())


def same_elements(one: Tensor, other: Tensor) -> Tensor:
    """Which elements of two tensors have the same bits; none where most have not, and few do by chance."""
    with real_tensors(), torch.no_grad():
        same = one.detach().to(other.device).view(torch.int16) == other.detach().view(torch.int16)
        return same & (2 * same.sum() >= same.numel())


def error_terms(tensor: Tensor) -> tuple[Tensor, ...]:
    """The error terms of a tensor: with them added, it is the value that the optimizer works with.

    Args:
        tensor: a parameter or an optimizer state, such as ``opt.state[p]["exp_avg_sq"]``.

    Returns:
        tensors of its shape on its device; ``()`` where the tensor has none. In the formats "mcf" and "fp32"
        they are the live buffers themselves, in others float32 copies. Of a DTensor they are DTensors with
        its mesh and placements, made of those of each process. A view of a flat buffer that the optimizer
        steps has a float32 copy of its part of the buffer's. Error terms that ``load_state_dict`` has loaded,
        and no step has used yet, become zero where they belong to other values: load all first. Of DTensors
        all processes have to ask then.
    """
    expansion = expansion_of(tensor)
    if expansion is None:
        return _terms_in_memory_of(tensor)
    if not expansion.is_current:
        return ()
    expansion.settle()
    piece = local_tensor(tensor.detach())
    _follow(expansion, piece)
    terms = expansion.format.error_terms(piece, *expansion.auxiliaries)
    return tuple(distributed_like(tensor, term) for term in terms)


def _terms_in_memory_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The error terms that other tensors have in the memory of this one, which has none of its own."""
    piece = local_tensor(tensor.detach())
    if not has_storage(piece) or not piece.numel():
        return ()
    first = piece.storage_offset()
    length = 1 + sum((size - 1) * stride for size, stride in zip(piece.shape, piece.stride(), strict=True))
    found: Tensor | None = None
    for (dtype, start, size, stride), record in _BY_STORAGE.get(piece.untyped_storage(), {}).items():
        owner, begin = record.owner(), max(start, first)
        count = min(start + math.prod(size), first + length) - begin
        whole = piece.as_strided(size, stride, start)
        is_of_memory = owner is None or _is_same_memory(local_tensor(owner), whole)
        if dtype != piece.dtype or count <= 0 or not is_of_memory or not record.format.keeps_error:
            continue
        buffers = [each for each in record.auxiliaries if each.dim()]
        if any((each.size(), each.stride()) != (size, stride) for each in buffers) or not is_dense(
            buffers[0]
        ):
            continue
        record.settle()
        found = piece.new_zeros((length,), dtype=torch.float32) if found is None else found
        hi = piece.as_strided((count,), (1,), begin)
        lo = [
            each.as_strided((count,), (1,), each.storage_offset() + begin - start) if each.dim() else each
            for each in record.auxiliaries
        ]
        for term in record.format.error_terms(hi, *lo):
            found[begin - first :][:count] += term
    if found is None:
        return ()
    return (distributed_like(tensor, found.as_strided(piece.size(), piece.stride(), 0)),)


def full_value(tensor: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The value ``hi + error terms`` in ``dtype``, a new tensor; of a DTensor, one in pieces like it.

    Exact in float64 for every registered format (a bfloat16 pair spans at most 53 bits wherever lo is within
    2**-44 of hi).
    """
    value = local_tensor(tensor.detach()).to(dtype, copy=True)
    for term in map(local_tensor, error_terms(tensor)):
        # Part by part: an operand of another dtype is converted as a whole.
        for part, of_term in zip(parts_of(value), parts_of(term), strict=True):
            part.add_(of_term.to(dtype))
    return distributed_like(tensor, value)


def assign(tensor: Tensor, value: Tensor | float) -> None:
    """Write a value to a tensor and its error terms, where ``copy_`` rounds to 16 bits.

    ``assign(p, q)`` copies a tensor with its error terms, ``assign(p, full_value(p).clamp(-1, 1))``
    writes a result of float64. Compiled steps go on from there.

    Args:
        tensor: a parameter or a state of an optimizer. A parameter that has no error terms yet gets them; any
            other tensor without is rounded, and so is one that is packed.
        value: of its shape, or of one that is expanded to it. Of a compensated tensor the error terms are
            part of the value. Of a whole tensor each process takes its piece of a DTensor; a DTensor is sent
            around as that needs. Numbers are taken as float32, as ``arithmetic="wide"`` does.
    """
    given = torch.as_tensor(value)
    own, theirs = expansion_of(tensor), expansion_of(given)
    with torch.no_grad():
        if isinstance(tensor, torch.nn.Parameter) and own is None and is_low_precision(tensor.dtype):
            wanted = theirs.format if theirs is not None and theirs.format.keeps_error else _DEFAULT
            own = ensure_expansion(tensor, wanted, name="assign")
        if own is not None and own is theirs:
            return
        if own is not None and theirs is not None and _are_alike(tensor, given, own, theirs):
            theirs.settle()
            local_tensor(tensor).copy_(local_tensor(given))
            own.replace_contents(theirs.auxiliaries)
        else:
            write(tensor, (full_value(given) if theirs is not None else given).expand(tensor.shape), own)


def _are_alike(tensor: Tensor, other: Tensor, own: Expansion, theirs: Expansion) -> bool:
    """Whether the buffers of one tensor can be copied to those of another."""
    shapes = [(each.shape, each.dtype, sharding_of(each)) for each in (tensor, other)]
    return own.format is theirs.format and own.format.keeps_hi and shapes[0] == shapes[1]


def write(tensor: Tensor, value: Tensor, expansion: Expansion | None) -> None:
    """Write a value of more bits to a tensor, and what is left of it to its error terms.

    Args:
        tensor: the tensor, maybe a DTensor.
        value: of its shape; whole, or a DTensor.
        expansion: the record of the error terms; None to round.
    """
    pieces, mine = sharding_of(tensor), local_tensor(tensor)
    source = whole_tensor(value) if pieces is None else local_tensor(value, pieces)
    if expansion is None or not expansion.format.keeps_hi:
        mine.copy_(source)
        if expansion is not None:
            expansion.clear()
        return
    error_format = expansion.format
    parts = parts_of(source) if error_format.is_elementwise else (source,)
    into_all = [
        parts_of(each) if error_format.is_elementwise and each.dim() else [each] * len(parts)
        for each in (mine, *expansion.auxiliaries)
    ]
    for part, *into in zip(parts, *into_all, strict=True):
        split = error_format.split(part.to(mine.device, torch.float32), tensor.dtype)
        for each, new in zip(into, split, strict=True):
            each.copy_(new)
    expansion.drop_claim()


def parts_of(tensor: Tensor) -> Sequence[Tensor]:
    """Views of all rows of a tensor, of about ``PART`` elements each."""
    if tensor.dim() == 0 or not tensor.numel():
        return (tensor,)
    return tensor.split(max(1, PART * len(tensor) // tensor.numel()))


def reset_error_terms(tensor: Tensor) -> None:
    """Drop a tensor's error terms: its value becomes exactly what the user sees.

    For use after overwriting a parameter by hand, or before compiling a step with another error format. A
    compiled step that used them goes on with new ones, from zero.

    Overwriting hi in place (``p.data.copy_(...)``) keeps the old error term: half an ulp of the old value at
    most. ``assign`` writes a value with all its bits. ``load_state_dict`` of a module or an optimizer drops
    error terms of other values itself.
    """
    unpack(tensor)
    with _LOCK:
        expansion = expansion_of(tensor)
        _BY_OBJECT.pop(tensor, None)
        if expansion is not None:
            if (owner := expansion.owner()) is not None:
                _BY_OBJECT.pop(owner, None)
            _forget_memory(expansion)
