"""Records of all error terms, keyed by tensor, and the public functions that read and write error terms.

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
detached aliases makes new ones at every call (``AveragedModel.update_parameters`` does), and behind a graph
break Dynamo sees the alias. So a record is found in two ways: by the object that it was made for, which keeps
it when ``p.data`` is moved or replaced, and by the memory: same storage, offset, sizes, strides and dtype.
Somebody may keep the storage (``model.state_dict()``) after ``p.data`` has been replaced; a tensor there is
then another tensor. So is a view of other sizes or strides.

Note [Sharded tensors]
----------------------
Compiled code updates each process's shard of a DTensor, an ordinary tensor. The error terms are those of the
shard, with its sizes and strides. The record belongs to the DTensor, as FSDP now and then replaces the shard,
and is found by the memory of the shard as well. Users, and checkpoints, get a DTensor sharded like hi.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary, WeakIdRef, WeakTensorKeyDictionary

from collage_fx import errors, numerics, torch_compat
from collage_fx.codegen import are_halves, decode_blocks, has_fast_passes, join_halves
from collage_fx.errors import CheckpointMismatchError, ConflictingErrorFormatError, UnsupportedTensorError
from collage_fx.graph import is_dense
from collage_fx.numerics import Blocks, ErrorFormat, Exact
from collage_fx.state.fingerprints import bits_of
from collage_fx.state.host_twins import host_twin, update_twin, uploading
from collage_fx.state.packed import is_packed, move_packed, pack, unpack
from collage_fx.torch_compat import has_storage, local_tensor, real_tensors, storage_of, version_of


class _Records:
    """State of all records.

    Attributes:
        version: object that is replaced when a record is made, dropped or given other buffers.
        settle_written: function of a tensor that drops its error terms if the program has written to it.
    """

    version = object()
    settle_written: Callable[[Tensor], None]


_RECORDS = _Records()
#: Function that returns a larger number at each call: which of two events was the later.
next_event = itertools.count().__next__

#: Format of error terms that ``assign`` makes for a parameter.
_DEFAULT = numerics.ERROR_FORMATS["exact"]

#: Number of elements that are converted at a time.
PART = 1 << 20


def records_version() -> object:
    """Return an object that stays the same as long as all records do, but for records of passing tensors."""
    return _RECORDS.version


def settle_before_reading(settle: Callable[[Tensor], None]) -> None:
    """Call a function with each tensor whose error terms are about to be read or saved."""
    _RECORDS.settle_written = settle


@dataclass(eq=False)
class ErrorTermRecord:
    """Record of one tensor's auxiliaries.

    Attributes:
        format: encoding of the value in hi and the auxiliaries.
        dtype: dtype of hi. The same bits mean something else beside another dtype.
        auxiliaries: buffers, in the order of the format's specifications.
        start: index of the tensor's first element in the whole tensor that it is a shard of: int32, 0-d.
        owner: object that the record was made for.
        memory: storages, and regions in them, by which the record is found.
        claim: fingerprint of hi and the buffers when they were saved, if they have been loaded and no step
            has checked yet that they belong to this hi.
        is_used: whether a compiled step reads and writes the buffers; False if they have only been loaded.
        is_new: whether the buffers come from the step that made the tensor, and no step that updates the
            tensor has been compiled.
        is_passing: whether it belongs to a tensor that a step has made for itself: no step remembers it.
        is_whole: whether hi and the buffers have been loaded together, as a whole value, which state dicts
            without error terms leave whole; it holds as long as there is a claim.
        is_told: whether the user has been told that the program writes to the tensor, whose codes are kept.
        accepted: version of hi that the buffers have been declared to belong to, other than by a step.
        accepted_at: number of that event: :func:`next_event`.
        fitted: sizes, strides and device of the tensor that the buffers have been found to fit.
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
    is_passing: bool = False
    is_whole: bool = False
    is_told: bool = False
    accepted: int = -1
    accepted_at: int = -1
    fitted: tuple[torch.Size, tuple[int, ...], torch.device] | None = None
    _settle: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if not self.is_passing:
            _RECORDS.version = object()

    def __del__(self, records: _Records = _RECORDS) -> None:
        if not self.is_passing:
            records.version = object()

    def replace_contents(self, auxiliaries: Sequence[Tensor]) -> None:
        """Overwrite the buffers in place, so that compiled steps (and CUDA graphs) see the new contents."""
        self.drop_claim()
        with real_tensors(), torch.no_grad():
            for mine, new in zip(self.auxiliaries, auxiliaries, strict=True):
                if mine is not new:  # a copy to itself would count as a write
                    mine.copy_(new)

    def replace_buffers(self, auxiliaries: Sequence[Tensor]) -> None:
        self.auxiliaries, self.fitted = tuple(auxiliaries), None
        _RECORDS.version = object()

    def make_claim(self, claim: Tensor, settle: Callable[[], None]) -> None:
        """Set a claim, and the function that checks it before the next use of the error terms."""
        self.claim, self._settle = claim, settle
        _RECORDS.version = object()

    def drop_claim(self) -> None:
        """Declare that the error terms belong to hi: they have been checked, or replaced."""
        self.claim = self._settle = None
        if (tensor := self.owner()) is not None and not is_packed(tensor):
            self.accepted, self.accepted_at = version_of(tensor), next_event()

    def settle(self) -> None:
        """Check error terms before they are read: they may be of values that have been overwritten since."""
        self.settle_claim()
        self.settle_written()

    def settle_claim(self) -> None:
        """Check loaded error terms against hi, if nobody has checked them since they were loaded."""
        if self._settle is not None:
            self._settle()

    def settle_written(self) -> None:
        """Drop the error terms of values that the program has overwritten since the last step."""
        if (tensor := self.owner()) is not None and not is_packed(tensor):
            update_twin(tensor)
            _RECORDS.settle_written(tensor)

    def use(self, name: str) -> Sequence[Tensor]:
        """Return the buffers for a step, in the order in which the format's ``store`` takes them.

        Raises:
            UnsupportedTensorError: a packed format cannot hold the values that the tensor has been given.
        """
        was_used, self.is_used = self.is_used, True
        self.settle_claim()
        if (owner := self.owner()) is not None:
            _follow(self, local_tensor(owner))
        if not self.format.keeps_hi:
            self._pack(name, was_used=was_used)
        return self.format.operands(self.auxiliaries, self.start)

    @property
    def is_current(self) -> bool:
        """Whether the buffers hold the value; False if an unpacked tensor has been written to since."""
        tensor = self.owner()
        if self.format.keeps_hi or tensor is None or is_packed(tensor):
            return True
        hi = local_tensor(tensor.detach())
        with real_tensors(), torch.no_grad():
            return torch.equal(bits_of(self.decode(hi)), bits_of(hi))

    def _pack(self, name: str, *, was_used: bool) -> None:
        """Encode hi into the buffers, unless they hold it, and release its memory."""
        tensor = self.owner()
        if tensor is None or is_packed(tensor):
            return
        hi = local_tensor(tensor)
        if not self.is_current:
            if why_not := self.format.why_not_values(hi):
                met = f"{why_not} in a state that no step makes negative, and that is packed as such"
                remedy = "let the state begin with what its optimizer makes, or leave state= out"
                raise UnsupportedTensorError(met, where=name, remedy=remedy)
            if was_used and isinstance(tensor, torch.nn.Parameter):
                self._warn_of_write(tensor, name)
            self.encode(hi, keep_same=True)
        self._give_back(tensor)

    def move(self, device: torch.device) -> None:
        """Move the buffers, and the tensor if it is packed, to a device."""
        self.start = self.start.to(device)
        self.replace_buffers([each.to(device) for each in self.auxiliaries])
        if (tensor := self.owner()) is not None and is_packed(tensor):
            move_packed(tensor, device)

    def _give_back(self, tensor: Tensor) -> None:
        pack(tensor, self)
        record_memory(local_tensor(tensor), self)

    def recipe(self) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return a function, and its arguments, that make another packed tensor with the value."""
        hi = self.layout()
        specs = self.format.auxiliaries(hi)
        saved = tuple(spec.saved(each) for spec, each in zip(specs, self.auxiliaries, strict=True))
        return packed_tensor, (self.format.name, self.dtype, tuple(hi.shape), hi.stride(), saved)

    def layout(self) -> Tensor:
        """Return a tensor without memory, with the layout that hi has when unpacked."""
        codes = self.auxiliaries[0]
        return torch.empty_strided(codes.shape, codes.stride(), dtype=self.dtype, device="meta")

    def _warn_of_write(self, tensor: Tensor, name: str) -> None:
        """Warn, once, that the program has written to a packed tensor between two steps."""
        if self.accepted != version_of(tensor) and not self.is_told:
            self.is_told = True
            errors.warn(
                f"{name}: written to between two steps, by something else than the step. What was written "
                f"has the bits of {self.dtype}; other elements keep theirs. To write a value with all its "
                "bits, call collage_fx.assign(parameter, value); to read one, "
                "collage_fx.full_value(parameter)"
            )

    def encode(self, value: Tensor, *, keep_same: bool = False) -> None:
        """Encode a value in the buffers; with ``keep_same``, keep elements that round to it."""
        whole = value, *self.auxiliaries
        with real_tensors(), torch.no_grad():
            for part, *buffers in _rows_of(*whole) if self.format.by_rows else [whole]:
                codes = buffers[0]  # whose layout tells the elements of a block
                wide = torch.empty_like(codes, dtype=torch.float32).copy_(part)
                if keep_same:
                    held = self.format.join(part, *buffers)
                    is_same = bits_of(held.to(value.dtype)) == bits_of(part)
                    wide = torch.where(is_same, held, wide)
                encoded = self.format.split(wide, self.dtype)[1:]
                for mine, new in zip(buffers, encoded, strict=True):
                    if mine.dim():  # a 0-d auxiliary counts steps
                        mine.copy_(new)

    def decode(self, hi: Tensor) -> Tensor:
        """Return the value that the buffers hold."""
        codes, *others = self.auxiliaries
        encoding = (self.format.bits, self.format.signed) if isinstance(self.format, Blocks) else None
        are_taken = (encoding, hi.dtype) == ((16, True), torch.bfloat16)
        if are_taken and has_fast_passes(codes, others[0]):
            return decode_blocks(codes, others[0])
        return self.format.decoded(hi, *self.auxiliaries)

    def value_at(self, places: tuple[slice, ...]) -> Tensor:
        """Return the whole value, in float32, at slices of the tensor, or of its rows alone."""
        tensor = self.owner()
        hi = self.layout() if tensor is None or is_packed(tensor) else local_tensor(tensor.detach())
        terms = [each[places] if each.dim() else each for each in self.auxiliaries]
        return self.format.join(hi[places], *terms)

    def decoded_parts(self, elements: int) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
        """Yield rows of a packed tensor, decoded, with their auxiliaries, about ``elements`` at a time."""
        whole = self.layout(), *self.auxiliaries
        for hi, *auxiliaries in _rows_of(*whole, elements=elements) if self.format.by_rows else [whole]:
            with real_tensors(), torch.no_grad():
                yield self.format.join(hi, *auxiliaries).to(self.dtype), auxiliaries

    def note_unpacked(self, tensor: Tensor) -> None:
        if self.owner() is not None:
            record_memory(local_tensor(tensor), self)
        _RECORDS.version = object()

    def keep_where(self, same: Tensor) -> bool:
        """Zero the buffers except where elements of hi are the same; return whether all of them are."""
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
            return  # the next step compares and encodes hi
        with real_tensors(), torch.no_grad():
            for auxiliary in self.auxiliaries:
                auxiliary.zero_()


#: Records by object, and by storage and region in it: Note [One tensor under several objects].
_BY_OBJECT = WeakTensorKeyDictionary()
_BY_STORAGE = WeakIdKeyDictionary()
_LOCK = threading.RLock()


def record_of(tensor: Tensor) -> ErrorTermRecord | None:
    """Return the record of a tensor; None if it has none, or a record of another dtype or shape."""
    with torch_compat.without_torch_function():  # a packed tensor is not decoded for this
        for table in (_BY_OBJECT.get, _in_memory_of):
            found: ErrorTermRecord | None = table(tensor)
            if found is not None and _fits(found, local_tensor(tensor)):
                return found
    return None


def has_error_terms(tensor: Tensor) -> bool:
    """Return whether a tensor has error terms; a record alone may have none."""
    found = record_of(host_twin(tensor))
    return found is not None and found.format.keeps_error


def holds_more(tensor: Tensor) -> bool:
    """Return whether a tensor has error terms, or is packed."""
    found = record_of(host_twin(tensor))
    return found is not None and found.format.holds_more


def note_new(tensor: Tensor) -> None:
    """Note that a tensor has the error terms that it was made with, and no later step has chosen them."""
    if (found := record_of(tensor)) is not None:
        found.is_new, found.is_used = True, False
        _RECORDS.version = object()


def choose_new(tensor: Tensor, *, keep: bool) -> None:
    """Keep or drop the error terms that a tensor was made with, now that a step updates the tensor."""
    found = record_of(tensor)
    if found is not None and found.is_new:
        found.is_new = False
        if not keep:
            reset_error_terms(tensor)


class StoredAs(NamedTuple):
    """Facts about the record of a tensor that code depends on."""

    has_error_terms: bool = False
    is_new: bool = False  # which no step that updates the tensor has chosen to keep
    packed: ErrorFormat | None = None


def stored_as(tensor: Tensor) -> StoredAs:
    """Return the facts about the record of a tensor that code depends on."""
    found = record_of(tensor)
    if found is None:
        return StoredAs(has_error_terms(tensor))
    fmt = found.format
    return StoredAs(fmt.keeps_error, found.is_new, None if fmt.keeps_hi else fmt)


def _in_memory_of(tensor: Tensor) -> ErrorTermRecord | None:
    tensor = local_tensor(tensor)
    if not has_storage(tensor):
        return None
    by_region: dict[Hashable, ErrorTermRecord] = _BY_STORAGE.get(tensor.untyped_storage(), {})
    found = by_region.get(_region(tensor))
    owner = None if found is None else found.owner()
    return found if owner is None or is_same_memory(local_tensor(owner), tensor) else None


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same region of the same storage."""
    return has_storage(one) and storage_of(one) == storage_of(other) and _region(one) == _region(other)


def _region(tensor: Tensor) -> Hashable:
    return tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def record_memory(tensor: Tensor, record: ErrorTermRecord) -> None:
    """Register a record under the memory that its tensor, or the local shard, has now."""
    with torch_compat.without_torch_function():
        if not has_storage(tensor):
            return
        storage, region = tensor.untyped_storage(), _region(tensor)
        by_region = _BY_STORAGE.setdefault(storage, {})
        if by_region.get(region) is not record:
            by_region[region] = record
            there_still = [each for each in record.memory if each[0]() is not None]
            record.memory = [*there_still, (WeakIdRef(storage), region)]


def _forget_memory(record: ErrorTermRecord) -> None:
    for reference, region in record.memory:
        storage = reference()
        by_region = {} if storage is None else _BY_STORAGE.get(storage, {})
        if by_region.get(region) is record:
            del by_region[region]


def ensure_record(
    tensor: Tensor,
    error_format: ErrorFormat,
    *,
    name: str,
    buffers: Sequence[Tensor] | None = None,
    is_passing: bool = False,
) -> ErrorTermRecord:
    """Return the tensor's record; if there is none, make a record of zeros, or of given buffers.

    The tensor is hi, real, of low precision or with a packed format float32; it may be a DTensor: Note
    [Sharded tensors]. ``is_passing`` tells whether a step has made it for itself.

    Raises:
        ConflictingErrorFormatError: the tensor has error terms in another format, which a step uses.
    """
    with _LOCK:
        found = _converted(record_of(tensor), tensor, error_format)
        piece = local_tensor(tensor)
        if found is not None:
            require_format(found, error_format, name=name)
            _follow(found, piece)
            record_memory(piece, found)
            found.is_passing &= is_passing
            return found
        if tensor in _BY_OBJECT:
            errors.warn(
                f"{name} has changed its dtype or shape (now {tensor.dtype}, "
                f"{tuple(tensor.shape)}); its error terms start again from zero"
            )
        specs = error_format.auxiliaries(piece)
        with real_tensors(), torch.no_grad():
            if buffers is None:
                mine = tuple(spec.zeros(piece.device) for spec in specs)
            else:
                mine = tuple(
                    spec.fitted(each, piece.device) for spec, each in zip(specs, buffers, strict=True)
                )
            # Filled on the device: a number that is uploaded is waited for.
            first = (torch_compat.start_of_shard(tensor) + 2**31) % 2**32 - 2**31
            start = torch.full((), first, dtype=torch.int32, device=piece.device)
        owner = TensorWeakRef(tensor)
        made = ErrorTermRecord(error_format, tensor.dtype, mine, start, owner, is_passing=is_passing)
        _BY_OBJECT[tensor] = made
        record_memory(piece, made)
        return made


def memory_of_records() -> set[int]:
    """Return the storages of the buffers of all records."""
    return {storage_of(each) for record in _BY_OBJECT.values() for each in record.auxiliaries}


def packed_tensor(
    format_name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    saved: tuple[Tensor, ...],
    *,
    requires_grad: bool | None = None,
) -> Tensor:
    """Make a packed tensor from its saved auxiliaries. Files name this function: it is part of their format.

    The tensor takes over the saved auxiliaries; dtype, sizes and strides are its own. It is a parameter if
    ``requires_grad`` is given.

    Raises:
        CheckpointMismatchError: the auxiliaries do not fit such a tensor.
    """
    error_format = numerics.format_named(format_name)
    hi = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta")
    if why_not := _why_no_packed_tensor(error_format, hi, saved):
        raise CheckpointMismatchError(
            why_not,
            where=f"a tensor in the packed format {format_name!r}",
            remedy="load the file with the version of collage_fx that wrote it; else it is damaged",
        )
    assert error_format is not None
    device, pairs = saved[0].device, zip(error_format.auxiliaries(hi), saved, strict=True)
    with real_tensors(), torch.no_grad():
        auxiliaries = tuple(spec.fitted(spec.loaded(each), device) for spec, each in pairs)
        tensor = torch.empty((), dtype=dtype, device=device).expand(shape)
        if requires_grad is not None:
            tensor = torch.nn.Parameter(tensor, requires_grad)
        start = torch.zeros((), dtype=torch.int32, device=device)
    made = ErrorTermRecord(error_format, dtype, auxiliaries, start, TensorWeakRef(tensor))
    with _LOCK:
        _BY_OBJECT[tensor] = made
        made._give_back(tensor)
    return tensor


def _why_no_packed_tensor(error_format: ErrorFormat | None, hi: Tensor, saved: Sequence[Tensor]) -> str:
    """Return why saved auxiliaries do not make a packed tensor; empty if they do."""
    if error_format is None or error_format.keeps_hi:
        return "a format that is not registered: import the module that has it"
    if not (numerics.is_low_precision(hi.dtype) or hi.dtype is torch.float32):
        return f"a dtype of {hi.dtype}"
    if why_not := error_format.why_not(hi):
        return f"a tensor of which {why_not}"
    kept = [(tuple(each.shape), each.dtype) for each in saved]
    expected = [(tuple(spec.saved_shape), spec.saved_dtype) for spec in error_format.auxiliaries(hi)]
    return "" if kept == expected else f"{kept} where {expected} belong together"


def change_layout(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change sizes and strides of a tensor in place by ``change``, as ``t_`` does, and of its error terms."""
    record = record_of(tensor)
    if record is None:
        return change(tensor)
    if record.format.is_elementwise and record.format.keeps_hi:
        for each in (tensor, *(each for each in record.auxiliaries if each.dim())):
            change(each)
    else:  # what several elements share, such as a scale, then belongs to other elements
        value = record.format.join(tensor.detach(), *record.auxiliaries)
        change(tensor)
        _, *auxiliaries = record.format.split(change(value), tensor.dtype)
        record.replace_buffers(auxiliaries)
    record_memory(tensor, record)
    return tensor


def _converted(found: ErrorTermRecord | None, tensor: Tensor, fmt: ErrorFormat) -> ErrorTermRecord | None:
    """Return a tensor's record, in another format if no step uses it, or it has no error terms."""
    if found is None or found.format is fmt or (found.is_used and found.format.keeps_error):
        return found
    found.settle_claim()
    with real_tensors(), torch.no_grad():
        hi = local_tensor(tensor.detach())
        terms = found.format.error_terms(hi, *found.auxiliaries) if found.is_current else ()
        term = torch.as_tensor(sum(each.float() for each in terms))
    reset_error_terms(tensor)
    fill(made := ensure_record(tensor, fmt, name=""), tensor, term)
    return made


def fill(record: ErrorTermRecord, tensor: Tensor, term: Tensor) -> None:
    """Encode hi plus a float32 error term, in a tensor's own record; the tensor has its memory."""
    with real_tensors(), torch.no_grad():
        hi = local_tensor(tensor.detach())
        auxiliaries = record.format.beside(hi, term)
        if not record.format.keeps_hi and not record.format.why_not_values(hi):
            hi.copy_(record.format.join(hi, *auxiliaries))  # or codes of the whole value seem out of date
    record.replace_contents(auxiliaries)


def require_format(record: ErrorTermRecord, error_format: ErrorFormat, *, name: str) -> None:
    """Raise ``ConflictingErrorFormatError`` if a step uses a tensor's error terms in another format."""
    if record.format is not error_format and record.is_used and record.format.keeps_error:
        raise ConflictingErrorFormatError(
            f"error_format={error_format.name!r} was asked for a tensor whose error terms are "
            f"{record.format.name!r}",
            where=name,
            remedy="use one error format for all compiled steps of an optimizer, or drop the error terms "
            "first with collage_fx.reset_error_terms(tensor)",
        )


def _fits(record: ErrorTermRecord, tensor: Tensor) -> bool:
    """Return whether the buffers have the shapes and the dtype that belong to the tensor as it is now."""
    if record.dtype != tensor.dtype:
        return False
    if record.fitted is not None and record.fitted[0] == tensor.shape:
        return True
    if not record.format.keeps_hi:
        return record.auxiliaries[0].shape == tensor.shape
    found = [(each.dtype, each.shape) for each in record.auxiliaries]
    return found == [(spec.dtype, spec.shape) for spec in record.format.auxiliaries(tensor)]


def _follow(record: ErrorTermRecord, tensor: Tensor) -> None:
    """Move the error terms to the device and strides of the tensor."""
    if is_packed(tensor):
        return
    layout = tensor.shape, tensor.stride(), tensor.device
    if record.fitted == layout:
        return
    specs = record.format.auxiliaries(tensor)
    pairs = zip(record.auxiliaries, specs, strict=True)
    if all(each.device == tensor.device and spec.stride in (None, each.stride()) for each, spec in pairs):
        record.fitted = layout
        return
    with real_tensors(), torch.no_grad():
        moved = [spec.zeros(tensor.device) for spec in specs]
        for new, old in zip(moved, record.auxiliaries, strict=True):
            new.copy_(old)
    record.start = record.start.to(tensor.device)
    record.replace_buffers(moved)


def move_into(tensor: Tensor, other: Tensor) -> bool:
    """Give a tensor the memory of another tensor of its layout; return whether all error terms are kept."""
    record, brought = record_of(tensor), record_of(other)
    if record is None or record is brought:
        local_tensor(tensor).data = local_tensor(other).detach()
        return True
    keeps_all = True
    if brought is not None and brought.format is record.format:
        record.drop_claim()
        record.replace_buffers(brought.auxiliaries)
    elif record.format.keeps_hi and record.claim is None:
        keeps_all = record.keep_where(same_elements(local_tensor(tensor), local_tensor(other)))
    if is_packed(tensor) and is_packed(other):
        move_packed(tensor, other.device)
    else:
        local_tensor(tensor).data = local_tensor(other).detach()
    record_memory(local_tensor(tensor), record)
    _follow(record, local_tensor(tensor))
    _RECORDS.version = object()
    return keeps_all


def hand_over(old: Tensor, new: Tensor, *, name: str) -> bool:
    """Give a tensor the error terms of another tensor, for elements that are the same in both.

    Sizes may differ: elements of equal indices are compared. Return whether no element of both has lost its
    error term.
    """
    record, found = record_of(old), record_of(new)
    if record is None or not record.format.keeps_error or found not in (None, record):
        return True
    if found is record:  # another object in the same memory
        _BY_OBJECT[new], record.owner = record, TensorWeakRef(new)
        return True
    piece, whole = local_tensor(old.detach()), local_tensor(new.detach())
    if old.dtype != new.dtype or old.dim() != new.dim() or not record.format.is_elementwise:
        return False
    record.settle_claim()
    both = tuple(slice(min(sizes)) for sizes in zip(piece.shape, whole.shape, strict=True))
    same = same_elements(piece[both], whole[both])
    made = ensure_record(new, record.format, name=name)
    with real_tensors(), torch.no_grad():
        for mine, given in zip(made.auxiliaries, record.auxiliaries, strict=True):
            if mine.dim():
                mine[both].copy_(torch.where(same, given[both].to(same.device), torch.zeros_like(mine[both])))
            else:
                mine.copy_(given)
    return bool(same.all())


def same_elements(one: Tensor, other: Tensor) -> Tensor:
    """Return a mask of equal bits in two tensors; all False if most differ, as a few are equal by chance."""
    with real_tensors(), torch.no_grad():
        same = bits_of(one.detach().to(other.device)) == bits_of(other.detach())
        return same & (2 * same.sum() >= same.numel())


def error_terms(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the error terms of a tensor; the optimizer works with their sum with the tensor.

    Args:
        tensor: a parameter or an optimizer state, such as ``opt.state[p]["exp_avg_sq"]``.

    Returns:
        tensors of its shape on its device; ``()`` if the tensor has none. In the formats "mcf" and "fp32"
        they are the live buffers themselves, in other formats float32 copies. The error terms of a DTensor
        are DTensors with its mesh and placements. For a view of a flat buffer that the optimizer steps, they
        are a float32 copy of the view's part. Error terms that ``load_state_dict`` has loaded, and that no
        step has used, become zero if they belong to other values: load everything first. All processes have
        to call this for a DTensor then.
    """
    if (twin := host_twin(tensor)) is not tensor:
        return tuple(term.to(tensor.device) for term in error_terms(twin))
    record = record_of(tensor)
    if record is None:
        return _terms_in_memory_of(tensor)
    if not record.is_current:
        return ()
    record.settle()
    piece = local_tensor(tensor.detach())
    _follow(record, piece)
    terms = record.format.error_terms(piece, *record.auxiliaries)
    return tuple(torch_compat.distributed_like(tensor, term) for term in terms)


def _terms_in_memory_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the error terms that other tensors have in this tensor's memory; it has none of its own."""
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
        is_of_memory = owner is None or is_same_memory(local_tensor(owner), whole)
        if dtype != piece.dtype or count <= 0 or not is_of_memory or not record.format.keeps_error:
            continue
        buffers = [each for each in record.auxiliaries if each.dim()]
        is_alike = all((each.size(), each.stride()) == (size, stride) for each in buffers)
        if not (is_alike and is_dense(buffers[0])):
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
    return (torch_compat.distributed_like(tensor, found.as_strided(piece.size(), piece.stride(), 0)),)


def full_value(tensor: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the value ``hi + error terms`` in ``dtype``: a new tensor, sharded like a DTensor.

    Exact in float64 for every registered format (a bfloat16 pair spans at most 53 bits wherever lo is within
    2**-44 of hi).
    """
    record = record_of(tensor) if host_twin(tensor) is tensor else None
    packed = is_packed(tensor)
    if record is None or not (packed or (record.is_current and _is_joined(record, dtype))):
        value = local_tensor(tensor.detach()).to(dtype, copy=True)
        for term in map(local_tensor, error_terms(tensor)):
            # In chunks: an operand of another dtype is converted as a whole.
            for part, of_term in _rows_of(value, term):
                part.add_(of_term.to(dtype))
        return torch_compat.distributed_like(tensor, value)
    record.settle()
    piece = record.auxiliaries[0] if packed else local_tensor(tensor.detach())
    value = torch.empty_like(piece, dtype=dtype)
    if not packed:
        _follow(record, piece)
    if isinstance(record.format, Exact) and are_halves(piece, record.auxiliaries[0], value):
        join_halves(piece, record.auxiliaries[0], value)
    else:
        whole = value, value if packed else piece, *record.auxiliaries  # codes alone hold a packed value
        is_cut = record.format.by_rows or record.format.is_elementwise
        for part, *rows in _rows_of(*whole) if is_cut else [whole]:
            part.copy_(record.format.join(*rows))
    return torch_compat.distributed_like(tensor, value)


def _is_joined(record: ErrorTermRecord, dtype: torch.dtype) -> bool:
    """Return whether whole values are float32 numbers that a format stores in integers beside hi.

    Terms that are numbers are added to hi, which takes less memory.
    """
    made, are_codes = record.format, not any(map(torch.is_floating_point, record.auxiliaries))
    is_stored = isinstance(made, Exact) or dtype is torch.float32
    return is_stored and are_codes and made.is_elementwise and made.keeps_hi


def assign(tensor: Tensor, value: Tensor | float) -> None:
    """Write a value to a tensor and its error terms, where ``copy_`` would round it to 16 bits.

    ``assign(p, q)`` copies a tensor with its error terms, ``assign(p, full_value(p).clamp(-1, 1))``
    writes a result of float64. Compiled steps continue from there.

    Args:
        tensor: a parameter or a state of an optimizer. A parameter that has no error terms yet gets them; any
            other tensor without error terms is rounded, and so is a packed tensor.
        value: a tensor of its shape, or one that expands to it, with its error terms if it has any; or a
            number, taken as float32, as ``arithmetic="wide"`` does. Of a whole tensor each process takes its
            shard of a DTensor; a DTensor is redistributed as needed.
    """
    if (twin := host_twin(tensor)) is not tensor:
        assign(twin, value)
        with uploading(tensor), torch.no_grad():
            tensor.copy_(twin)
        return
    given = torch.as_tensor(value)
    own, theirs = record_of(tensor), record_of(given)
    with torch.no_grad():
        if isinstance(tensor, torch.nn.Parameter) and own is None and numerics.is_low_precision(tensor.dtype):
            wanted = theirs.format if theirs is not None and theirs.format.keeps_error else _DEFAULT
            own = ensure_record(tensor, wanted, name="assign")
        if own is not None and own is theirs:
            return
        if own is not None and theirs is not None and _are_alike(tensor, given, own, theirs):
            theirs.settle()
            local_tensor(tensor).copy_(local_tensor(given))
            own.replace_contents(theirs.auxiliaries)
        else:
            write(tensor, (full_value(given) if theirs is not None else given).expand(tensor.shape), own)


def _are_alike(tensor: Tensor, other: Tensor, own: ErrorTermRecord, theirs: ErrorTermRecord) -> bool:
    """Return whether the buffers of one tensor can be copied to another tensor's."""
    shapes = [(each.shape, each.dtype, torch_compat.sharding_of(each)) for each in (tensor, other)]
    return own.format is theirs.format and own.format.keeps_hi and shapes[0] == shapes[1]


def write(tensor: Tensor, value: Tensor, record: ErrorTermRecord | None) -> None:
    """Write a value of more bits, whole or a DTensor, to a tensor, and the rest to its error terms."""
    pieces, mine = torch_compat.sharding_of(tensor), local_tensor(tensor)
    source = torch_compat.whole_tensor(value) if pieces is None else local_tensor(value, pieces)
    if record is None or not record.format.keeps_hi:
        if record is None or record.format.why_not_values(source):
            mine.copy_(source)
        else:
            record.encode(source.to(mine.device))
            if not is_packed(tensor):
                mine.copy_(record.decode(mine))
        if record is not None:
            record.drop_claim()
        return
    whole = source, mine, *record.auxiliaries
    for part, *into in _rows_of(*whole) if record.format.is_elementwise else [whole]:
        split = record.format.split(part.to(mine.device, torch.float32), tensor.dtype)
        for each, new in zip(into, split, strict=True):
            each.copy_(new)
    record.drop_claim()


def _rows_of(*tensors: Tensor, elements: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of rows, of about ``PART`` elements each, of tensors of one shape, with all 0-d tensors."""
    first = tensors[0]
    if not first.dim() or not first.numel():
        return iter([tensors])
    rows = max(1, (elements or PART) * len(first) // first.numel())
    parts = len(first.split(rows))
    return zip(*(each.split(rows) if each.dim() else [each] * parts for each in tensors), strict=True)


def reset_error_terms(tensor: Tensor) -> None:
    """Drop a tensor's error terms: its value becomes exactly that of the 16-bit tensor.

    Use it after overwriting a parameter by hand, or before compiling a step with another error format. A
    compiled step that used them continues with new error terms, from zero.

    The next step notices by itself that hi has been overwritten (``p.copy_(...)``), and drops the error term
    with a warning; on a GPU it does not notice ``p.data.copy_(...)``. ``assign`` writes a value with all its
    bits. ``load_state_dict`` of a module or an optimizer drops error terms of other values.
    """
    unpack(tensor)
    with _LOCK:
        record = record_of(tensor)
        _BY_OBJECT.pop(tensor, None)
        if record is not None:
            if (owner := record.owner()) is not None:
                _BY_OBJECT.pop(owner, None)
            _forget_memory(record)
