"""Tensors, operators and modes: rests on ``torch._C``, a few private names around it, and FSDP2's groups."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch.overrides import _pop_mode_temporarily
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from collage_fx.torch_compat import records

RELIED_ON = (
    "torch:Tensor has _base, _make_wrapper_subclass, _use_count",
    "torch._dynamo:mark_static_address(t, guard)",
    "torch._C:DisableTorchFunctionSubclass",
    "torch._C:_is_torch_function_mode_enabled",
    "torch._C._dynamo.guards:TensorGuards",
    "torch.distributed.tensor:DTensor.__create_chunk_list__(self)",
)

#: Functions of torch for nested containers, which have no public name in Python.
pytree = _pytree

#: Function that a graph calls for ``torch.set_grad_enabled``.
SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled

#: Class of torch's operators in graphs.
OpOverload: Any = type(torch.ops.aten.add.Tensor)


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator: names and types of arguments and results, and mutations."""
    return operator._schema


def storage_of(of: torch.Tensor | torch.UntypedStorage) -> int:
    """Return a number that identifies memory, such as a tensor's, during its lifetime."""
    with without_torch_function():
        return int((of.untyped_storage() if isinstance(of, torch.Tensor) else of)._cdata)


def guard_by_identity(tensor: torch.Tensor) -> None:
    """Make Dynamo guard on a tensor's identity, not on its class."""
    torch._dynamo.mark_static_address(tensor, guard=True)
    records.put(tensor, GuardedByIdentity())


class GuardedByIdentity:
    """Part of a tensor given to :func:`guard_by_identity`."""


#: Function that returns a tensor's version: a number that grows with each write to the tensor or an alias.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that another tensor is a view of; None if it is not a view."""
    return tensor._base


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradients; the widest possible if any dtype is allowed."""
    allowed: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)
    return torch.promote_types(parameter.dtype, torch.float32) if allowed is None else allowed


def is_held_by_torch(tensor: torch.Tensor) -> bool:
    """Return whether torch refers to a tensor in addition to its Python object."""
    return tensor._use_count() > 1  # type: ignore[attr-defined]


def shares_memory(tensor: torch.Tensor) -> bool:
    """Return whether something else than a plain tensor has its memory, such as a view or a NumPy array.

    True where torch does not tell.
    """
    return _OF_TENSOR is None or _counts_of_memory(tensor) != _OF_TENSOR


def references_by_torch(tensor: torch.Tensor) -> int:
    """Return the number of references to a tensor that Python counts, but that are torch's: 0 or 1."""
    return int(_PYTHON_COUNTS_TORCH and is_held_by_torch(tensor))


def _python_counts_torch() -> bool:
    """Return whether Python's count of references is higher if torch refers to a tensor, as views do."""
    with torch.inference_mode(False):
        base = torch.empty(1)
        alone = sys.getrefcount(base)
        view = base.view(1)
        return sys.getrefcount(base) > alone and base_of(view) is base


_PYTHON_COUNTS_TORCH = _python_counts_torch()


def _counts_of_memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how often a tensor's memory is referenced by torch, and how often by Python."""
    memory = tensor.untyped_storage()
    return torch._C._storage_Use_Count(memory._cdata), sys.getrefcount(memory)


#: Counts of memory that nothing but a tensor has.
_OF_TENSOR: tuple[int, int] | None = None
with contextlib.suppress(AttributeError):  # a private name of torch, for speed alone
    _OF_TENSOR = _counts_of_memory(torch.empty(1, device="cpu"))


def has_internal_overlap(tensor: torch.Tensor) -> bool:
    """Return whether elements of a strided tensor share memory, as in ``x.expand(n)``."""
    repeated = (size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 0 and any(repeated)


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory; sparse tensors and some wrapper subclasses have none."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:  # torch's answer for a tensor without memory
        return False
    return True


def is_wrapper(value: torch.Tensor | type) -> bool:
    """Return whether a tensor, or each tensor of a class, wraps inner tensors, like a DTensor."""
    return hasattr(value, "__tensor_flatten__")


def is_class_traced(parameter: torch.Tensor) -> bool:
    """Return whether Dynamo knows the class of an optimizer's parameter, or a class that wraps tensors."""
    return type(parameter) in (torch.Tensor, torch.nn.Parameter) or is_wrapper(parameter)


def bytes_of(tensor: torch.Tensor) -> int:
    """Count the bytes of a tensor's elements, or of the inner tensors of a wrapper.

    A DTensor counts as its shard does, times the number of shards.
    """
    if not is_wrapper(tensor):
        return tensor.nbytes
    if sharding_of(tensor) is not None:
        local = local_tensor(tensor)
        return bytes_of(local) * tensor.numel() // max(1, local.numel())
    names, _ = cast(Any, tensor).__tensor_flatten__()
    return sum(bytes_of(getattr(tensor, name)) for name in names)


class Sharding(NamedTuple):
    """Placement of a DTensor's shards on a mesh of processes."""

    mesh: Any
    placements: tuple[Any, ...]

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers that each process has for its shard, summed over all shards."""
        summed = numbers.to(self.mesh.device_type, copy=True)
        for i in self._cut_by:
            torch.distributed.all_reduce(summed, group=self.mesh.get_group(i))
        return summed.to(numbers.device)

    @property
    def is_cut(self) -> bool:
        """Whether elements are divided among processes, rather than copied to each."""
        return bool(self._cut_by)

    @property
    def _cut_by(self) -> list[int]:
        """Dimensions of the mesh along which elements are divided; along the others there are copies."""
        # is_shard() is False for a strided shard, as FSDP2 with tensor parallelism uses.
        return [i for i, placement in enumerate(self.placements) if not placement.is_replicate()]

    @property
    def row_sharding(self) -> Sharding:
        """Placement of a tensor whose rows are divided among the same processes as the elements."""
        distributed = sys.modules["torch.distributed.tensor"]
        cut, copied = distributed.Shard(0), distributed.Replicate()
        placements = (cut if i in self._cut_by else copied for i in range(len(self.placements)))
        return Sharding(self.mesh, tuple(placements))

    def gives_rows_to_all(self, rows: int) -> bool:
        """Return whether each process gets a row if that many rows are divided like the elements."""
        counts = {rows}
        for i in self._cut_by:
            n = self.mesh.size(i)
            most = {count: -(-count // n) for count in counts}
            counts = {max(0, min(most[c], c - k * most[c])) for c in counts for k in range(n)}
        return min(counts) > 0

    def zeros(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a DTensor of zeros, its rows divided among the same processes as the elements."""
        zeros = sys.modules["torch.distributed.tensor"].zeros
        mesh, placements = self.row_sharding
        return cast(torch.Tensor, zeros(rows, columns, dtype=dtype, device_mesh=mesh, placements=placements))


def sharding_of(tensor: torch.Tensor) -> Sharding | None:
    """Return the placement of a DTensor's shards; None if a tensor is no DTensor."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return None
    module = sys.modules.get("torch.distributed.tensor")  # imported if there is a DTensor
    if module is None or not isinstance(tensor, module.DTensor):
        return None
    return Sharding(tensor.device_mesh, tensor.placements)


def is_flattened(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a flat one of FSDP1, or a part of it."""
    return getattr(parameter, "_fsdp_flattened", False)


def start_of_shard(tensor: torch.Tensor) -> int:
    """Return the index, in the whole tensor, of the first element of this process's shard."""
    offsets = offsets_of_shard(tensor)
    return sum(offset * step for offset, step in zip(offsets, tensor.stride(), strict=True))


def offsets_of_shard(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the indices, in the whole tensor, of the first element of this process's shard."""
    if sharding_of(tensor) is None:
        return (0,) * tensor.dim()
    (shard,) = cast(Any, tensor).__create_chunk_list__()  # as torch.distributed.checkpoint calls it
    return tuple(shard.offsets)


def local_tensor(tensor: torch.Tensor, sharding: Sharding | None = None) -> torch.Tensor:
    """Return this process's shard of a DTensor, as the same object each time; other tensors unchanged.

    ``sharding`` is the placement of the wanted shard, by default the tensor's own. An ordinary tensor, which
    all processes hold, is cut. A DTensor with another placement is redistributed: all processes must call it.
    """
    of, distributed = sharding_of(tensor), cast(Any, tensor)
    if of is None:
        if sharding is None:
            return tensor
        distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
        distributed = distribute(tensor.detach(), *sharding, src_data_rank=None)
    elif sharding is not None and of.placements != sharding.placements:
        distributed = distributed.redistribute(*sharding)
    return cast(torch.Tensor, distributed._local_tensor)  # to_local() makes a view of it


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of a DTensor (all processes must call it); other tensors unchanged."""
    return tensor if sharding_of(tensor) is None else cast(Any, tensor).full_tensor()


def distributed_like(
    tensor: torch.Tensor, local: torch.Tensor, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """Return a DTensor with the placement of ``tensor`` and the local shard ``local``.

    It is ``local`` itself if ``tensor`` is no DTensor. ``local`` may have further dimensions, for several
    numbers per element. ``shape`` is that of the whole, contiguous result, if ``local`` has other elements
    than ``tensor`` in the same rows.
    """
    whole: Any = tensor
    if (sharding := sharding_of(tensor)) is None:
        return local
    further = local.shape[whole.dim() :]
    of_elements = (*whole.shape, *further)
    stride = (*(step * further.numel() for step in whole.stride()), *local.stride()[whole.dim() :])
    if shape is not None and tuple(shape) != of_elements:
        of_elements, stride = tuple(shape), torch.empty(shape, device="meta").stride()
    return distributed(local, sharding, of_elements, stride)


def distributed(
    local: torch.Tensor, sharding: Sharding | None, shape: Sequence[int], stride: tuple[int, ...]
) -> torch.Tensor:
    """Return a DTensor of a local shard, its placement, and the sizes and strides of the whole.

    Without a placement, it is ``local`` itself.
    """
    if sharding is None:
        return local
    of: Any = sys.modules["torch.distributed.tensor"].DTensor
    made = of.from_local(local, *sharding, run_check=False, shape=torch.Size(shape), stride=stride)
    return cast(torch.Tensor, made)


def _groups(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters that FSDP2 gathers together, after ``reshard()`` of their modules."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            # Groups are found by what they hold: the attribute has another name in torch 2.11 than in 2.13.
            for value in vars(cast(Any, fully_shard).state(module)).values():
                found = value if isinstance(value, (list, tuple)) else [value]
                yield from (each for each in found if hasattr(each, "fsdp_params"))


def gathers_other_dtype(model: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Return whether a module has buffers, from a forward pass, that parameters of ``dtype`` do not fit."""
    pairs = ((group.mp_policy.param_dtype or dtype, p) for group in _groups(model) for p in group.fsdp_params)
    return any(each.dtype is not wanted for wanted, p in pairs for each in p.all_gather_outputs)


@torch.no_grad()
def note_new_dtypes(model: torch.nn.Module) -> None:
    """Make FSDP2 gather and reduce a module's parameters in the dtypes that they have now."""
    for group in _groups(model):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()
        if hasattr(group.comm_ctx, "device_handle"):  # after the first forward pass, which does this itself
            group.lazy_init()


def take_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give a tensor the data of another, of any dtype: ``tensor.data = other``, for DTensors, too."""
    tensor.data = other
    for name in getattr(type(tensor), "__slots__", ()):  # of a DTensor: its shard and its placement
        setattr(tensor, name, getattr(other, name))


def metadata_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function that tests whether tensors have the same metadata as the given tensors.

    Compared are class, dtype, device, size, stride, dispatch keys, and whether a gradient is required: code
    that is compiled for the given tensors can take the others. The test, a single call into C++, may return
    False for matching tensors, if the thread's modes have changed or a tensor is passed twice.
    """
    # Both arguments are required: without them the constructor crashes.
    dynamic: Any = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
    return cast("Callable[..., bool]", torch._C._dynamo.guards.TensorGuards(*tensors, **dynamic).check)


#: Context manager: operations ignore ``__torch_function__`` of tensor subclasses.
without_torch_function: Any = torch._C.DisableTorchFunctionSubclass

#: ``__torch_function__`` for a tensor subclass without overrides, such as a parameter.
disabled_torch_function: Any = torch.nn.Parameter.__torch_function__

#: Function that makes a tensor without memory: ``(class, size, strides=..., dtype=..., device=...)``.
wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Context manager: tensor operations ignore all active modes, of dispatch and of functions."""
    has_functions = torch._C._is_torch_function_mode_enabled()
    with _disable_current_modes(), _pop_mode_temporarily() if has_functions else contextlib.nullcontext():
        yield
