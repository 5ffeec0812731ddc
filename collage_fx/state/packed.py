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

A packed parameter is a leaf of autograd as before. A function that is given it gets a decoded copy, through
which the gradient flows, and autograd keeps no decoded copy for the backward pass, but decodes again then:
one weight at a time has memory. Views of a weight (``w.t()``), which a program may keep, keep it as long.
Dynamo traces the decoding as one operator.

Copies (``copy.deepcopy``), pickles, and tensors moved to another device are packed tensors too, with copies
of the buffers, and nothing is decoded, except those of a DTensor's shard. The pickle of a parameter is that
of a plain one, with its value in its dtype: a model's file has to be read without this package.

Code that bypasses Python, as extensions in C++ do, reads NaNs, and cannot write.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor

from collage_fx import torch_compat
from collage_fx.numerics import WEIGHT_FORMATS, define_operator
from collage_fx.torch_compat import local_tensor, pytree, storage_of, version_of, without_torch_function

if TYPE_CHECKING:
    from collage_fx.state.error_terms import ErrorTermRecord


_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "requires_grad", "grad", "grad_fn"),
    *("is_leaf", "grad_dtype", "is_cuda", "is_sparse", "is_meta", "is_quantized"),
)
#: Descriptors of attributes that are written, too: a leaf of autograd has them itself.
_OWN: Any = (Tensor.grad, Tensor.requires_grad)
#: Facts that a packed tensor answers without decoding.
_FACTS = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(Tensor, name)),
    *(each.__set__ for each in _OWN),
    *(_OWN[0].__delete__, Tensor.requires_grad_),
    *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_neg, Tensor.is_conj, Tensor.__hash__),
}
#: Facts about the layout, answered as if the tensor had memory.
_LAYOUT = {Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset}
_DATA: Any = Tensor.data
_TENSOR: Any = Tensor
#: Functions that make a writable alias.
_ALIASES = {Tensor.detach, _DATA.__get__, Tensor.view_as}
#: Functions that replace a tensor's memory.
_REPLACEMENTS = {_DATA.__set__, Tensor.set_}
#: Functions that expose a tensor's memory other than as a tensor.
_EXPOSURES = {
    *(Tensor.untyped_storage, Tensor.storage, Tensor.data_ptr),
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__),
}
#: Functions whose result may be a view: an in-place operation on it would write to the packed tensor.
_VIEWS = {
    *(Tensor.t, Tensor.view, Tensor.reshape, Tensor.transpose, Tensor.permute, Tensor.expand, Tensor.flatten),
    *(Tensor.__getitem__, Tensor.squeeze, Tensor.unsqueeze, Tensor.narrow, Tensor.select, Tensor.split),
    *(Tensor.chunk, Tensor.unbind, Tensor.as_strided, Tensor.unflatten, Tensor.movedim, Tensor.contiguous),
    *(_TENSOR.T.__get__, _TENSOR.mT.__get__, Tensor.__iter__, Tensor.diagonal, Tensor.expand_as),
    *(torch.t, torch.transpose, torch.permute, torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze),
    *(torch.narrow, torch.select, torch.split, torch.chunk, torch.unbind, torch.as_strided, torch.movedim),
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
        if torch.compiler.is_dynamo_compiling():
            return _traced(func, args, kwargs or {})
        return _call()(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not isinstance(self, torch.nn.Parameter):
            return super().__deepcopy__(memo)
        return _deep_copy(self, memo, requires_grad=self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(decoded(self), self.requires_grad)  # rounded to its dtype
            return plain.__reduce_ex__(protocol)
        return super().__reduce_ex__(protocol)


@functools.cache
def _call() -> Callable[[Any, Any, Any], Any]:
    """Return the function that calls torch's functions with packed tensors; Dynamo traces no frame of it."""
    return torch_compat.untraced(PackedTensor.__torch_function__, _called)


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    with without_torch_function():
        if func in _FACTS or _is_ours(func) or torch_compat.current_trace() is not None:
            return func(*args, **kwargs)
        if func in _LAYOUT:
            return func(laid_out(args[0]), *args[1:], **kwargs)
        if func in _ALIASES and isinstance(args[0], PackedTensor):
            alias = _make_packed(args[0].detach(), args[0].record)
            _is_still_packed(alias)
            return alias
        if func in _REMADE and _is_still_packed(args[0]) and local_tensor(args[0]) is args[0]:
            return _REMADE[func](*args, **kwargs)
        return _call_decoded(func, args, kwargs)


def _is_ours(func: Any) -> bool:
    """Return whether a function is an operator of ours, which finds the whole value itself."""
    return getattr(func, "namespace", None) == DECODED.namespace


def _traced(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function as Dynamo traces it; the trace ends where the result may be written to."""
    if _is_ours(func):
        with without_torch_function():
            return func(*args, **kwargs)
    is_writable = not torch.is_grad_enabled()  # torch refuses to write to a view of a leaf otherwise
    if func in _ALIASES and is_writable:
        return args[0]
    name = func.__name__
    writes = name == "__setitem__" or name[-1] == "_" != name[-2]
    if (writes and isinstance(args[0], PackedTensor)) or func in _ALIASES or (func in _VIEWS and is_writable):
        return _call()(func, args, kwargs)
    with without_torch_function():
        args, kwargs = pytree.tree_map_only(PackedTensor, DECODED, (args, kwargs))
        return func(*args, **kwargs)


@functools.cache
def _packed_class(plain: type[Tensor]) -> type[Tensor]:
    return PackedTensor if plain is Tensor else type(f"Packed{plain.__name__}", (PackedTensor, plain), {})


def is_packed(tensor: Any) -> bool:
    """Return whether a tensor has no memory of its own."""
    return isinstance(tensor, PackedTensor)


def pack(tensor: Tensor, record: ErrorTermRecord) -> None:
    """Release a tensor's memory: its value is decoded from its record from now on."""
    move_packed(tensor, local_tensor(tensor).device)
    if isinstance(tensor, torch.nn.Parameter) and local_tensor(tensor) is not tensor:
        torch_compat.gather_from(tensor, decoded)
    torch_compat.guard_by_identity(tensor)
    _call()
    _make_packed(tensor, record)


def move_packed(tensor: Tensor, device: torch.device) -> None:
    """Move the single element of memory that a packed tensor has to a device."""
    piece = local_tensor(tensor)
    with without_torch_function(), torch_compat.real_tensors(), torch.no_grad():
        nothing = torch.full((), float("nan"), dtype=piece.dtype, device=device)
        piece.data = nothing.expand(piece.shape)


def unpack(tensor: Any) -> bool:
    """Give a packed tensor memory of its own, with its value; return whether it was packed."""
    if not isinstance(tensor, PackedTensor):
        return False
    with without_torch_function():
        _restore_memory(tensor, decoded(tensor))
    return True


def decoded(tensor: Tensor) -> Tensor:
    """Decode a packed tensor to a new tensor, sharded like it; return any other tensor unchanged."""
    if not isinstance(tensor, PackedTensor):
        return tensor
    # A tensor of inference mode would not tell whether it has been written to.
    with torch_compat.real_tensors(), torch.inference_mode(False), torch.no_grad():
        return torch_compat.distributed_like(tensor, tensor.record.decode(local_tensor(tensor)))


def plain_class(tensor: Tensor) -> type[Tensor]:
    """Return the class of a tensor; for a packed tensor, the class that it has when unpacked."""
    classes: Iterable[Any] = type(tensor).__mro__
    return next(each for each in classes if not issubclass(each, PackedTensor))


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


def laid_out(tensor: Tensor) -> Tensor:
    """Return a tensor with the layout of an unpacked tensor, maybe itself; a DTensor keeps its own layout."""
    if isinstance(tensor, PackedTensor) and local_tensor(tensor) is tensor:
        return tensor.record.layout()
    return tensor


def _deep_copy(tensor: PackedTensor, memo: dict[int, Any], **options: Any) -> Tensor:
    if id(tensor) not in memo:
        make, arguments = tensor.record.recipe()
        memo[id(tensor)] = make(*copy.deepcopy(arguments, memo), **options)
    return cast(Tensor, memo[id(tensor)])


def _to(tensor: PackedTensor, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Tensor.to``: the result is packed if dtype and strides stay the same."""
    is_trained = tensor.requires_grad and torch.is_grad_enabled()
    if is_trained or kwargs.get("memory_format") not in (None, torch.preserve_format):
        return _call_decoded(Tensor.to, (tensor, *args), kwargs)
    probe = torch.empty((), dtype=tensor.dtype, device=tensor.device)
    moved = probe.to(*args, **kwargs)
    if moved is probe:
        return tensor
    if moved.dtype != tensor.dtype:
        return _call_decoded(Tensor.to, (tensor, *args), kwargs)
    make, arguments = tensor.record.recipe()
    to_there = functools.partial(torch.Tensor.to, device=moved.device, copy=True)
    return make(*pytree.tree_map_only(Tensor, to_there, arguments))


def _reduced(tensor: PackedTensor, protocol: int) -> Any:
    """Replace ``Tensor.__reduce_ex__``: a file holds the codes of state, and the values of weights."""
    if tensor.record.format in WEIGHT_FORMATS.values():
        return decoded(tensor).__reduce_ex__(protocol)
    return tensor.record.recipe()


#: torch's functions that make packed tensors of packed tensors -> our replacements.
_REMADE: dict[Any, Callable[..., Any]] = {
    Tensor.__reduce_ex__: _reduced,
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
            is_weight = each.requires_grad and torch.is_grad_enabled()
            made = _Decode.apply(each) if is_weight else decoded(each)
            replaced[each.record] = each, made, version_of(local_tensor(made))
        return replaced[each.record][1]

    if kwargs or any(isinstance(each, list | tuple | dict) for each in args):
        args, kwargs = pytree.tree_map(plain, (args, kwargs))
    else:  # as operations of models are called
        args = tuple(map(plain, args))
    trained = (each for each in replaced.values() if each[1].requires_grad)
    weights = {storage_of(local_tensor(made)): tensor for tensor, made, _ in trained}
    with _decoding_again(weights) if weights else contextlib.nullcontext():
        result = func(*args, **kwargs)
    tensors = (local_tensor(each) for each in pytree.tree_leaves(result) if isinstance(each, Tensor))
    shown = {storage_of(each) for each in tensors if torch_compat.has_storage(each)}
    originals: dict[int, Tensor] = {}
    for tensor, made, version in replaced.values():
        memory = local_tensor(made)
        is_written, is_weight = version_of(memory) != version, made.requires_grad
        if is_weight and is_written:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        is_shown = storage_of(memory) in shown and func not in _COPIES and not is_weight
        is_seen = is_shown or func in _EXPOSURES or func in _REPLACEMENTS
        if is_seen or is_written:
            _restore_memory(tensor, made)
            originals[id(made)] = tensor
    return pytree.tree_map(lambda each: originals.get(id(each), each), result)


def _decoding_again(weights: Mapping[int, PackedTensor]) -> contextlib.AbstractContextManager[Any]:
    """Context manager: autograd saves no decoded weight, given by its storage, but decodes it again."""

    def leave_out(saved: Tensor) -> Any:
        piece = local_tensor(saved)
        weight = weights.get(storage_of(piece)) if torch_compat.has_storage(piece) else None
        if weight is None:
            return saved
        layout = piece.size(), piece.stride(), piece.storage_offset()
        whole = torch_compat.sharding_of(saved), saved.size(), saved.stride()
        return weight, version_of(weight), layout, whole

    def decode_again(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        weight, version, layout, whole = saved
        with without_torch_function():
            if version_of(weight) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: a weight of sizes {tuple(weight.shape)} was updated after its forward pass"
                )
            return torch_compat.distributed(local_tensor(decoded(weight)).as_strided(*layout), *whole)

    return torch.autograd.graph.saved_tensors_hooks(leave_out, decode_again)


class _Decode(torch.autograd.Function):
    """Function that decodes a packed parameter, and whose gradient is the parameter's."""

    @staticmethod
    def forward(context: Any, weight: Tensor) -> Tensor:
        return decoded(weight)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return gradient


#: Operator that Dynamo traces for :class:`_Decode`. CUDA graphs leave it out: it reads memory that is not
#: among its arguments.
DECODED = define_operator(
    "decoded(Tensor weight) -> Tensor",
    lambda weight: decoded(weight).contiguous() if is_packed(weight) else weight.clone(),
    lambda weight: torch.empty_like(weight, memory_format=torch.contiguous_format),
    torch.Tag.cudagraph_unsafe,
    gradient=lambda _, gradient: gradient,
)


def _is_still_packed(each: Any) -> TypeGuard[PackedTensor]:
    """Return whether an object is packed; an alias of a tensor that has memory again gets that memory."""
    if not isinstance(each, PackedTensor):
        return False
    original = original_of(each)
    if is_packed(original):
        return True
    _make_plain(each, original)
    return False
