"""Packed tensors: tensors whose values only an error format keeps, and how programs see them.

Note [A packed tensor]
----------------------
An optimizer keeps holding the tensor that it has made for its state, with its sizes and its dtype. The memory
of the tensor is freed: it is one NaN, with strides of 0. Compiled steps read and write the buffers of its
record. A program that looks at the tensor sees its value, decoded: the tensor has a class of its own, whose
``__torch_function__`` calls every operation of torch on the decoded tensor instead. If the operation writes
to the decoded tensor, or exposes its memory, that becomes the tensor's memory: it is an ordinary tensor then,
as for a trace by Dynamo (:func:`unpack`) and for recorded steps, until the next compiled step packs it. A
value that has not changed since it was decoded is not encoded again. Dynamo guards state of torch.optim by
identity; state of other optimizers by the class too, unless told not to.

Copies (``copy.deepcopy``), pickles, and tensors moved to another device are packed tensors too, with copies
of the buffers, and nothing is decoded, except those of a DTensor's shard.

Code that bypasses Python, as extensions in C++ do, reads NaNs, and cannot write.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor

from collage_fx.torch_compat import (
    distributed_like,
    guard_by_identity,
    has_storage,
    local_tensor,
    pytree,
    real_tensors,
    storage_of,
    version_of,
    without_torch_function,
)

if TYPE_CHECKING:
    from collage_fx.state.error_terms import ErrorTermRecord


_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "requires_grad", "grad", "grad_fn"),
    *("is_leaf", "is_cuda", "is_sparse", "is_meta", "is_quantized"),
)
#: Facts that a packed tensor answers without decoding.
_FACTS = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_neg, Tensor.is_conj, Tensor.__hash__),
}
#: Facts about the layout, answered as if the tensor had memory.
_LAYOUT = {Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset}
_DATA: Any = Tensor.data
#: Functions that make a writable alias.
_ALIASES = {Tensor.detach, _DATA.__get__, Tensor.view_as}
#: Functions that replace a tensor's memory.
_REPLACEMENTS = {_DATA.__set__, Tensor.set_}
#: Functions that expose a tensor's memory other than as a tensor.
_EXPOSURES = {
    *(Tensor.untyped_storage, Tensor.storage, Tensor.data_ptr),
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__),
}
#: Functions whose result counts as a copy, even if it is the same memory.
_COPIES = {Tensor.cpu}


class PackedTensor(Tensor):
    """Tensor whose value only its error format keeps: Note [A packed tensor].

    Attributes:
        record: record of the tensor that was packed, shared by all its aliases.
    """

    record: ErrorTermRecord

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            if func in _FACTS:
                return func(*args, **(kwargs or {}))
            if func in _LAYOUT:
                return func(_laid_out(args[0]), *args[1:], **(kwargs or {}))
            if func in _ALIASES and isinstance(args[0], PackedTensor):
                alias = _make_packed(args[0].detach(), args[0].record)
                _is_still_packed(alias)
                return alias
            if func in _REMADE and _is_still_packed(args[0]) and local_tensor(args[0]) is args[0]:
                return _REMADE[func](*args, **(kwargs or {}))
            return _call_decoded(func, args, kwargs or {})


@functools.cache
def _packed_class(plain: type[Tensor]) -> type[Tensor]:
    return PackedTensor if plain is Tensor else type(f"Packed{plain.__name__}", (PackedTensor, plain), {})


def is_packed(tensor: Any) -> bool:
    """Return whether a tensor has no memory of its own."""
    return isinstance(tensor, PackedTensor)


def pack(tensor: Tensor, record: ErrorTermRecord) -> None:
    """Release a tensor's memory: its value is decoded from its record from now on."""
    move_packed(tensor, local_tensor(tensor).device)
    guard_by_identity(tensor)
    _make_packed(tensor, record)


def move_packed(tensor: Tensor, device: torch.device) -> None:
    """Move the single element of memory that a packed tensor has to a device."""
    piece = local_tensor(tensor)
    with without_torch_function(), real_tensors(), torch.no_grad():
        nothing = torch.full((), float("nan"), dtype=piece.dtype, device=device)
        piece.data = nothing.expand(piece.shape)


def unpack(tensor: Tensor) -> None:
    """Give a packed tensor memory of its own, with its value; do nothing for other tensors."""
    if isinstance(tensor, PackedTensor):
        with without_torch_function():
            _restore_memory(tensor, decoded(tensor))


def decoded(tensor: Tensor) -> Tensor:
    """Decode a packed tensor to a new tensor, sharded like it; return any other tensor unchanged."""
    if not isinstance(tensor, PackedTensor):
        return tensor
    with real_tensors(), torch.no_grad():
        return distributed_like(tensor, tensor.record.decode(local_tensor(tensor)))


def plain_class(tensor: Tensor) -> type[Tensor]:
    """Return the class of a tensor; for a packed tensor, the class that it has when unpacked."""
    classes: Iterable[Any] = type(tensor).__mro__
    return next(each for each in classes if not issubclass(each, PackedTensor))


def stride_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor; for a packed tensor, the strides that it has when unpacked."""
    return _laid_out(tensor).stride()


def original_of(tensor: Tensor) -> Tensor:
    """Return the tensor that was packed, for a packed tensor that may be an alias of it."""
    assert isinstance(tensor, PackedTensor)
    original = tensor.record.owner()
    return tensor if original is None else original


def _objects(tensor: Tensor) -> Iterable[Tensor]:
    """Return a tensor and its local shard, which may be the same object."""
    return {id(each): each for each in (tensor, local_tensor(tensor))}.values()


def _make_packed(tensor: Tensor, record: ErrorTermRecord) -> Tensor:
    """Switch a tensor object, and its local shard, to the packed class; return the tensor."""
    for each in _objects(tensor):
        each.__class__ = _packed_class(type(each))
        each.record = record  # type: ignore[attr-defined]  # of the class that it has now, which mypy cannot see
    return tensor


def _make_plain(tensor: Tensor, memory: Tensor) -> None:
    """Switch a tensor object, and its local shard, back to the plain class, with memory."""
    for each in _objects(tensor):
        if isinstance(each, PackedTensor):
            del each.record
            each.__class__ = plain_class(each)  # type: ignore[assignment]
    local_tensor(tensor).data = local_tensor(memory)


def _laid_out(tensor: Tensor) -> Tensor:
    """Return a tensor with the layout of an unpacked tensor, maybe itself; a DTensor keeps its own layout."""
    if isinstance(tensor, PackedTensor) and local_tensor(tensor) is tensor:
        return tensor.record.layout()
    return tensor


def _deep_copy(tensor: PackedTensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) not in memo:
        make, arguments = tensor.record.recipe()
        memo[id(tensor)] = make(*copy.deepcopy(arguments, memo))
    return cast(Tensor, memo[id(tensor)])


def _to(tensor: PackedTensor, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Tensor.to``: the result is packed if dtype and strides stay the same."""
    probe = torch.empty((), dtype=tensor.dtype, device=tensor.device)
    if kwargs.get("memory_format") not in (None, torch.preserve_format):
        return _call_decoded(Tensor.to, (tensor, *args), kwargs)
    moved = probe.to(*args, **kwargs)
    if moved is probe:
        return tensor
    if moved.dtype != tensor.dtype:
        return _call_decoded(Tensor.to, (tensor, *args), kwargs)
    make, arguments = tensor.record.recipe()
    to_there = functools.partial(torch.Tensor.to, device=moved.device, copy=True)
    return make(*pytree.tree_map_only(Tensor, to_there, arguments))


#: torch's functions that make packed tensors of packed tensors -> our replacements.
_REMADE: dict[Any, Callable[..., Any]] = {
    Tensor.__reduce_ex__: lambda tensor, protocol: tensor.record.recipe(),
    Tensor.__deepcopy__: _deep_copy,
    Tensor.to: _to,
}


def _restore_memory(tensor: PackedTensor, memory: Tensor) -> None:
    """Give a packed tensor, and the given alias of it, the memory of a decoded tensor."""
    record, original = tensor.record, original_of(tensor)
    if original is not tensor:
        _make_plain(original, memory)
    _make_plain(tensor, memory)
    record.note_unpacked(original)


def _call_decoded(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function on decoded tensors; a packed tensor that it writes to or exposes is unpacked."""
    replaced: dict[ErrorTermRecord, tuple[PackedTensor, Tensor, int]] = {}

    def plain(each: Any) -> Any:
        if not _is_still_packed(each):
            return each
        if each.record not in replaced:
            made = decoded(each)
            replaced[each.record] = each, made, version_of(local_tensor(made))
        return replaced[each.record][1]

    result = func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))
    tensors = (local_tensor(each) for each in pytree.tree_leaves(result) if isinstance(each, Tensor))
    shown = {storage_of(each) for each in tensors if has_storage(each)}
    originals: dict[int, Tensor] = {}
    for tensor, made, version in replaced.values():
        memory = local_tensor(made)
        is_shown = storage_of(memory) in shown and func not in _COPIES
        is_seen = is_shown or func in _EXPOSURES or func in _REPLACEMENTS
        if is_seen or version_of(memory) != version:
            _restore_memory(tensor, made)
            originals[id(made)] = tensor
    return pytree.tree_map(lambda each: originals.get(id(each), each), result)


def _is_still_packed(each: Any) -> TypeGuard[PackedTensor]:
    """Return whether an object is packed; an alias of a tensor that has memory again gets that memory."""
    if not isinstance(each, PackedTensor):
        return False
    original = original_of(each)
    if is_packed(original):
        return True
    _make_plain(each, original)
    return False
