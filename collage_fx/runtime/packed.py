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

Code that goes past Python, as that of extensions in C++, reads NaNs, and can't write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

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

__all__: list[str] = []


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


class Value:
    """What a packed tensor is decoded from.

    Args:
        decode: from a packed tensor, of which sizes and dtype count, to its value as a new ordinary tensor.
        tensor: gives the tensor that was packed; None when it is gone.
        unpacked: called with that, or another object of it, where it has got memory again.
    """

    def __init__(
        self,
        decode: Callable[[Tensor], Tensor],
        tensor: Callable[[], Tensor | None],
        unpacked: Callable[[Tensor], None],
    ) -> None:
        self.decode = decode
        self.tensor = tensor
        self.unpacked = unpacked

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
            if func in _ALIASES and isinstance(args[0], PackedTensor):
                return _alias(args[0])
            return _called(func, args, kwargs or {})


@functools.cache
def _packed_class(plain: type[Tensor]) -> type[Tensor]:
    """The class of packed tensors that are otherwise of this one."""
    return PackedTensor if plain is Tensor else type(f"Packed{plain.__name__}", (PackedTensor, plain), {})


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor has no memory of its own."""
    return isinstance(tensor, PackedTensor)


def pack(tensor: Tensor, value: Value) -> None:
    """Give a tensor's memory back: its value is to be decoded from now on."""
    piece = local_tensor(tensor)
    with real_tensors(), torch.no_grad():
        nothing = torch.full((), float("nan"), dtype=piece.dtype, device=piece.device)
        piece.data = nothing.expand(piece.shape)
    known_by_identity(tensor)
    _dress(tensor, value)


def unpack(tensor: Tensor) -> None:
    """Give a packed tensor memory of its own, with its value; nothing where it has that."""
    if isinstance(tensor, PackedTensor):
        with without_torch_function():
            _take(tensor, decoded(tensor))


def decoded(tensor: Tensor) -> Tensor:
    """The value of a packed tensor, a new one in pieces like it; any other tensor itself."""
    return tensor.packed_value.of(tensor) if isinstance(tensor, PackedTensor) else tensor


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
            plain: Any = next(base for base in type(each).__mro__ if not issubclass(base, PackedTensor))
            each.__class__ = plain
    local_tensor(tensor).data = local_tensor(memory)


def _alias(tensor: PackedTensor) -> Tensor:
    """Another object of a packed tensor."""
    value, original = tensor.packed_value, tensor.packed_value.tensor()
    alias = tensor.detach()
    _dress(alias, value)
    if original is not None and not is_packed(original):
        _undress(alias, original)
    return alias


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
        if not isinstance(each, PackedTensor):
            return each
        value, original = each.packed_value, each.packed_value.tensor()
        if original is not None and not is_packed(original):
            _undress(each, original)  # which has got memory since this object was made
            return each
        if value not in replaced:
            made = value.of(each)
            replaced[value] = each, made, version_of(local_tensor(made))
        return replaced[value][1]

    result = func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))
    shown = {storage_of(each) for each in _memory_of(result)}
    originals: dict[int, Tensor] = {}
    for tensor, made, version in replaced.values():
        memory = local_tensor(made)
        is_seen = func in _EXPOSURES or func in _REPLACEMENTS or storage_of(memory) in shown
        if is_seen or version_of(memory) != version:
            _take(tensor, made)
            originals[id(made)] = tensor
    return pytree.tree_map(lambda each: originals.get(id(each), each), result)


def _memory_of(result: Any) -> Iterator[Tensor]:
    """The tensors in a result that have memory."""
    for each in pytree.tree_leaves(result):
        if isinstance(each, Tensor) and has_storage(local_tensor(each)):
            yield local_tensor(each)
