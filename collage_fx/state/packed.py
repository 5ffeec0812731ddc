"""Packed tensors: those whose values their error format alone keeps, and what programs see of them.

Note [A packed tensor]
----------------------
An optimizer goes on holding the tensor that it has made for its state, with its sizes and its dtype. Its
memory is given back: it is one NaN, with strides of 0. What compiled steps read and write are the buffers of
its record. A program that looks at the tensor sees its value, decoded: it has a class of its own, whose
``__torch_function__`` calls every operation of torch's with the decoded tensor in its place. Where that is
written to, or its memory is seen by something else, it becomes the tensor's memory again, which is an
ordinary tensor then, until the next compiled step packs it. So does a trace by Dynamo, which is to see an
ordinary tensor (:func:`unpack`). What is still what it was decoded to is not encoded again. Of torch.optim's
state Dynamo goes by the identity; of that of others by the class too, unless it is told not to.

Copies (``copy.deepcopy``), pickles and what is moved to another device are packed tensors too, of copies of
the buffers: so a state dict that is copied, saved, loaded and moved takes what is kept, and nothing decoded.
Those of a piece of a DTensor are decoded.

Code that goes past Python, as that of extensions in C++, reads NaNs, and can't write.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

from collage_fx.torch_compat import (
    distributed_like,
    has_storage,
    known_by_identity,
    local_tensor,
    pytree,
    real_tensors,
    storage_of,
    version_of,
    without_torch_function,
)


def _attribute(name: str) -> Any:
    """The descriptor of a tensor's attribute."""
    return getattr(Tensor, name)


#: What a packed tensor tells of itself as it is.
_FACTS = {
    *(
        _attribute(name).__get__
        for name in (
            *("shape", "dtype", "device", "layout", "ndim", "itemsize", "requires_grad", "grad", "grad_fn"),
            *("is_leaf", "is_cuda", "is_sparse", "is_meta", "is_quantized"),
        )
    ),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_neg, Tensor.is_conj, Tensor.__hash__),
}
#: What it tells as if it had memory.
_LAYOUT = {Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset}
#: The same tensor as another object, as which it may be written to.
_ALIASES = {Tensor.detach, _attribute("data").__get__, Tensor.view_as}
#: What gives a tensor other memory.
_REPLACEMENTS = {_attribute("data").__set__, Tensor.set_}
#: What shows a tensor's memory in another way than as a tensor.
_EXPOSURES = {
    Tensor.untyped_storage,
    Tensor.storage,
    Tensor.data_ptr,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
}


#: What is taken for a copy of a tensor's: not for its memory, even where it is on the CPU already.
_COPIES = {Tensor.cpu}


class Value:
    """What a packed tensor is decoded from.

    Args:
        decode: from a packed tensor, of which sizes and dtype count, to its value as a new ordinary tensor.
        tensor: gives the tensor that was packed; None when it is gone.
        unpacked: called with that, or another object of it, where it has got memory again.
        layout: gives a tensor without memory of the tensor's sizes and strides.
        recipe: gives a function, and the arguments of which it makes another packed tensor with the value.
    """

    def __init__(
        self,
        decode: Callable[[Tensor], Tensor],
        tensor: Callable[[], Tensor | None],
        unpacked: Callable[[Tensor], None],
        layout: Callable[[], Tensor],
        recipe: Callable[[], tuple[Callable[..., Tensor], tuple[Any, ...]]],
    ) -> None:
        self.decode = decode
        self.tensor = tensor
        self.unpacked = unpacked
        self.layout = layout
        self.recipe = recipe

    def of(self, packed: Tensor) -> Tensor:
        """The value of the tensor, in pieces like it."""
        with real_tensors(), torch.no_grad():
            return distributed_like(packed, self.decode(local_tensor(packed)))


class PackedTensor(Tensor):
    """A tensor that its error format alone keeps: Note [A packed tensor]."""

    #: What it is decoded from: the same for all objects of the tensor.
    packed_value: Value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            if func in _FACTS:
                return func(*args, **(kwargs or {}))
            if func in _LAYOUT:
                return func(_laid_out(args[0]), *args[1:], **(kwargs or {}))
            if func in _ALIASES and isinstance(args[0], PackedTensor):
                return another_name(args[0])
            if func in _REMADE and _is_whole(args[0]):
                return _REMADE[func](*args, **(kwargs or {}))
            return _called(func, args, kwargs or {})


@functools.cache
def _packed_class(plain: type[Tensor]) -> type[Tensor]:
    """The class of packed tensors that are otherwise of this one."""
    return PackedTensor if plain is Tensor else type(f"Packed{plain.__name__}", (PackedTensor, plain), {})


def is_packed(tensor: Any) -> bool:
    """Whether a tensor has no memory of its own."""
    return isinstance(tensor, PackedTensor)


def pack(tensor: Tensor, value: Value) -> None:
    """Give a tensor's memory back: its value is to be decoded from now on."""
    move_packed(tensor, local_tensor(tensor).device)
    known_by_identity(tensor)
    _dress(tensor, value)


def move_packed(tensor: Tensor, device: torch.device) -> None:
    """Let the one element that a packed tensor has of memory be on a device."""
    piece = local_tensor(tensor)
    with without_torch_function(), real_tensors(), torch.no_grad():
        nothing = torch.full((), float("nan"), dtype=piece.dtype, device=device)
        piece.data = nothing.expand(piece.shape)


def unpack(tensor: Tensor) -> None:
    """Give a packed tensor memory of its own, with its value; nothing where it has that."""
    if isinstance(tensor, PackedTensor):
        with without_torch_function():
            _take(tensor, decoded(tensor))


def decoded(tensor: Tensor) -> Tensor:
    """The value of a packed tensor, a new one in pieces like it; any other tensor itself."""
    return tensor.packed_value.of(tensor) if isinstance(tensor, PackedTensor) else tensor


def plain_class(tensor: Tensor) -> type[Tensor]:
    """The class of a tensor, of a packed one that which it has while it isn't."""
    classes: Iterable[Any] = type(tensor).__mro__
    return next(each for each in classes if not issubclass(each, PackedTensor))


def stride_of(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor, of a packed one those of its value."""
    return _laid_out(tensor).stride()


def packed_original(tensor: Tensor) -> Tensor:
    """The tensor that a packed one, which may be another object of it, was packed as."""
    assert isinstance(tensor, PackedTensor)
    original = tensor.packed_value.tensor()
    return tensor if original is None else original


def _objects(tensor: Tensor) -> Iterable[Tensor]:
    """The object of a tensor, and that of its piece."""
    return {id(each): each for each in (tensor, local_tensor(tensor))}.values()


def _dress(tensor: Tensor, value: Value) -> None:
    """Have Python see the decoded value in an object of a packed tensor, and in its piece."""
    for each in _objects(tensor):
        each.__class__ = _packed_class(type(each))
        each.packed_value = value  # type: ignore[attr-defined]


def _undress(tensor: Tensor, memory: Tensor) -> None:
    """Let an object of a tensor that was packed be an ordinary one, which has this memory."""
    for each in _objects(tensor):
        if isinstance(each, PackedTensor):
            del each.packed_value
            each.__class__ = plain_class(each)  # type: ignore[assignment]
    local_tensor(tensor).data = local_tensor(memory)


def another_name(tensor: Tensor) -> Tensor:
    """Another object of a tensor, which may be packed."""
    with without_torch_function():
        alias = tensor.detach()
        if isinstance(tensor, PackedTensor):
            _dress(alias, tensor.packed_value)
            _is_still_packed(alias)
    return alias


def _laid_out(tensor: Tensor) -> Tensor:
    """A tensor laid out as a packed one was, maybe itself: a DTensor's layout is its own."""
    if isinstance(tensor, PackedTensor) and local_tensor(tensor) is tensor:
        return tensor.packed_value.layout()
    return tensor


def _is_whole(tensor: Tensor) -> bool:
    """Whether an object is of a packed tensor, still, and of no DTensor."""
    return isinstance(tensor, PackedTensor) and local_tensor(tensor) is tensor and _is_still_packed(tensor)


def _reduced(tensor: PackedTensor, protocol: Any) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """What a pickle holds of a packed tensor."""
    return tensor.packed_value.recipe()


def _deep_copy(tensor: PackedTensor, memo: dict[int, Any]) -> Tensor:
    """Another packed tensor, of copies of the buffers."""
    if id(tensor) not in memo:
        make, arguments = tensor.packed_value.recipe()
        memo[id(tensor)] = make(*copy.deepcopy(arguments, memo))
    return cast(Tensor, memo[id(tensor)])


def _moved(tensor: PackedTensor, *args: Any, **kwargs: Any) -> Any:
    """What ``tensor.to(...)`` is: packed where its dtype and its strides stay."""
    probe = torch.empty((), dtype=tensor.dtype, device=tensor.device)
    if kwargs.get("memory_format") not in (None, torch.preserve_format):
        return _called(Tensor.to, (tensor, *args), kwargs)
    moved = probe.to(*args, **kwargs)
    if moved is probe:
        return tensor
    if moved.dtype != tensor.dtype:
        return _called(Tensor.to, (tensor, *args), kwargs)
    make, arguments = tensor.packed_value.recipe()
    to_there = functools.partial(torch.Tensor.to, device=moved.device, copy=True)
    return make(*pytree.tree_map_only(Tensor, to_there, arguments))


#: What makes of a packed tensor another one: a function like torch's.
_REMADE: dict[Any, Callable[..., Any]] = {
    Tensor.__reduce_ex__: _reduced,
    Tensor.__deepcopy__: _deep_copy,
    Tensor.to: _moved,
}


def _take(tensor: PackedTensor, memory: Tensor) -> None:
    """Let the memory of a decoded tensor be that of the packed one, which ``tensor`` is an object of."""
    value = tensor.packed_value
    original = value.tensor()
    if original is not None and original is not tensor:
        _undress(original, memory)
    _undress(tensor, memory)
    value.unpacked(tensor if original is None else original)


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with decoded tensors in the place of packed ones."""
    replaced: dict[Value, tuple[PackedTensor, Tensor, int]] = {}

    def plain(each: Any) -> Any:
        if not _is_still_packed(each):
            return each
        value = each.packed_value
        if value not in replaced:
            made = value.of(each)
            replaced[value] = each, made, version_of(local_tensor(made))
        return replaced[value][1]

    result = func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))
    shown = {storage_of(each) for each in _memory_of(result)}
    originals: dict[int, Tensor] = {}
    for tensor, made, version in replaced.values():
        memory = local_tensor(made)
        is_shown = storage_of(memory) in shown and func not in _COPIES
        is_seen = is_shown or func in _EXPOSURES or func in _REPLACEMENTS
        if is_seen or version_of(memory) != version:
            _take(tensor, made)
            originals[id(made)] = tensor
    return pytree.tree_map(lambda each: originals.get(id(each), each), result)


def _is_still_packed(each: Any) -> TypeGuard[PackedTensor]:
    """Whether it is a packed tensor; an object from before its tensor got memory again is given that."""
    if not isinstance(each, PackedTensor):
        return False
    original = packed_original(each)
    if is_packed(original):
        return True
    _undress(each, original)
    return False


def _memory_of(result: Any) -> Iterator[Tensor]:
    """The tensors in a result that have memory."""
    for each in pytree.tree_leaves(result):
        if isinstance(each, Tensor) and has_storage(local_tensor(each)):
            yield local_tensor(each)
