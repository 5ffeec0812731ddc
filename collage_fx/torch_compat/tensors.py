"""Tensors, operators and modes themselves: rests on ``torch._C`` and a few private names around it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch._ops import OpOverload as OpOverload
from torch.overrides import _pop_mode_temporarily
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

RELIED_ON = (
    "torch:Tensor has _base, _make_wrapper_subclass, _use_count",
    "torch._dynamo:mark_static_address(t, guard)",
    "torch._C:DisableTorchFunctionSubclass",
    "torch._C:_storage_Use_Count",
    "torch._C:_is_torch_function_mode_enabled",
    "torch._C._dynamo.guards:TensorGuards",
    "torch.distributed.tensor:DTensor.__create_chunk_list__(self)",
)

#: torch's functions of nested containers, which have no public name in Python.
pytree = _pytree

#: The function that a graph calls for ``torch.set_grad_enabled``.
SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled


def schema_of(operator: OpOverload) -> Any:
    """The names and types of an operator's arguments and results, and what it does to them."""
    return operator._schema


def storage_of(tensor: torch.Tensor) -> int:
    """A number that identifies the memory of a tensor as long as that lives."""
    with without_torch_function():
        return int(tensor.untyped_storage()._cdata)


def known_by_identity(tensor: torch.Tensor) -> None:
    """Have Dynamo ask, before a compiled call, whether a tensor is the same, and not of what class."""
    torch._dynamo.mark_static_address(tensor, guard=True)
    _known[tensor] = True


#: The tensors of which :func:`known_by_identity` has said so.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def is_known_by_identity(value: object) -> bool:
    """Whether :func:`known_by_identity` has said so of a tensor."""
    return isinstance(value, torch.Tensor) and value in _known


#: Gives the version of a tensor: a number that grows whenever it, or another object of it, is written to.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that another was made from as a view; None where it is none."""
    return tensor._base


def is_held_by_torch(tensor: torch.Tensor) -> bool:
    """Whether something in torch, besides its Python object, refers to a tensor."""
    return tensor._use_count() > 1  # type: ignore[attr-defined]


def has_internal_overlap(tensor: torch.Tensor) -> bool:
    """Whether elements of a strided tensor are known to share memory, as those of ``x.expand(n)`` do."""
    repeated = (size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 0 and any(repeated)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own, as sparse tensors and some wrapper subclasses have not."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:  # torch's answer for a tensor without
        return False
    return True


def is_made_of_tensors(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for others that compiled code gets in its place, as a DTensor does."""
    return is_class_of_made_ones(type(tensor))


def is_class_of_made_ones(kind: type) -> bool:
    """Whether tensors of a class are made of others."""
    return hasattr(kind, "__tensor_flatten__")


class Pieces(NamedTuple):
    """How a DTensor is in pieces, of which each process of a mesh has one."""

    mesh: Any
    placements: tuple[Any, ...]

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers that each process has for its piece, summed over all pieces."""
        summed = numbers.to(self.mesh.device_type, copy=True)
        for i in self._cut_by:
            torch.distributed.all_reduce(summed, group=self.mesh.get_group(i))
        return summed.to(numbers.device)

    @property
    def are_cut(self) -> bool:
        """Whether elements are shared out among processes, rather than that each has a copy of all."""
        return bool(self._cut_by)

    @property
    def _cut_by(self) -> list[int]:
        """The dimensions of the mesh by which elements are shared out; the others hold copies."""
        # A strided one, of FSDP2 with tensor parallelism, says no to is_shard().
        return [i for i, placement in enumerate(self.placements) if not placement.is_replicate()]

    @property
    def of_rows(self) -> Pieces:
        """Rows shared out among the processes among which elements are."""
        distributed = sys.modules["torch.distributed.tensor"]
        placements = (
            distributed.Shard(0) if i in self._cut_by else distributed.Replicate()
            for i in range(len(self.placements))
        )
        return Pieces(self.mesh, tuple(placements))

    def have_rows(self, rows: int) -> bool:
        """Whether each process would have one of that many rows shared out among them as elements are."""
        counts = {rows}
        for i in self._cut_by:
            n = self.mesh.size(i)
            counts = {
                max(0, min(-(-count // n), count - k * -(-count // n))) for count in counts for k in range(n)
            }
        return min(counts) > 0

    def zeros(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """A DTensor of zeros, its rows shared out among the processes among which elements are."""
        zeros = sys.modules["torch.distributed.tensor"].zeros
        mesh, placements = self.of_rows
        return cast(torch.Tensor, zeros(rows, columns, dtype=dtype, device_mesh=mesh, placements=placements))


def pieces_of(tensor: torch.Tensor) -> Pieces | None:
    """How a tensor is in pieces; None if it is no DTensor."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return None
    module = sys.modules.get("torch.distributed.tensor")  # imported by whoever has made one
    if module is None or not isinstance(tensor, module.DTensor):
        return None
    return Pieces(tensor.device_mesh, tensor.placements)


def start_of_piece(tensor: torch.Tensor) -> int:
    """The index, in the whole tensor, of the first element of this process's piece."""
    if pieces_of(tensor) is None:
        return 0
    (piece,) = cast(Any, tensor).__create_chunk_list__()  # as torch.distributed.checkpoint asks for it
    return sum(offset * step for offset, step in zip(piece.offsets, tensor.stride(), strict=True))


def keep_sizes(tensor: torch.Tensor) -> None:
    """Have Dynamo take a DTensor's sizes for numbers, where it has seen others in another optimizer's step.

    Of ordinary tensors that an optimizer holds it does so by itself. Not while it traces.
    """
    if pieces_of(tensor) is not None:
        torch._dynamo.mark_static(tensor)


def local_tensor(tensor: torch.Tensor, pieces: Pieces | None = None) -> torch.Tensor:
    """This process's piece of a DTensor, as the object that it is; any other tensor itself.

    Args:
        tensor: the tensor.
        pieces: in which its elements are wanted. Of an ordinary tensor, which all processes have, each takes
            its own. Those of a DTensor in other pieces are sent: all processes have to call it.
    """
    of = pieces_of(tensor)
    if of is None and pieces is None:
        return tensor
    distributed: Any = tensor
    if of is None:
        assert pieces is not None
        distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
        distributed = distribute(tensor.detach(), *pieces, src_data_rank=None)
    elif pieces is not None and of.placements != pieces.placements:
        distributed = distributed.redistribute(*pieces)
    return cast(torch.Tensor, distributed._local_tensor)  # to_local() makes a view of it


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a DTensor, for which all processes have to call it; any other tensor itself."""
    return tensor if pieces_of(tensor) is None else cast(Any, tensor).full_tensor()


def distributed_like(
    tensor: torch.Tensor, local: torch.Tensor, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """A DTensor in pieces as ``tensor`` is, of which ``local`` is this process's; itself if that is none.

    Args:
        tensor: the tensor.
        local: of this process. It may have further dimensions, of each of the elements.
        shape: of the whole, contiguous, where ``local`` is not for the elements of the tensor but for others
            in its rows.
    """
    whole: Any = tensor
    if (pieces := pieces_of(tensor)) is None:
        return local
    further = local.shape[whole.dim() :]
    of_elements = (*whole.shape, *further)
    stride = (*(step * further.numel() for step in whole.stride()), *local.stride()[whole.dim() :])
    if shape is not None and tuple(shape) != of_elements:
        of_elements, stride = tuple(shape), torch.empty(shape, device="meta").stride()
    made = whole.from_local(local, *pieces, run_check=False, shape=torch.Size(of_elements), stride=stride)
    return cast(torch.Tensor, made)


def laid_out_like(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Make a function of as many tensors that tells whether compiled code can take each for the one here.

    Class, dtype, device, size, stride, dispatch keys (sparse, negated, ...), and whether it requires a
    gradient. One call into C++. It may say no to tensors that are: if the thread's modes are others, or if
    there is one twice. The tensors are not kept alive.
    """
    # The two are not optional: left out, the constructor crashes.
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
    )
    return cast("Callable[..., bool]", guards.check)


#: A context in which operations take tensors of any class as they are.
without_torch_function: Any = torch._C.DisableTorchFunctionSubclass

#: ``__torch_function__`` of a tensor subclass that has nothing to say there, as a parameter has not.
disabled_torch_function: Any = torch.nn.Parameter.__torch_function__


def wrapper_subclass(
    cls: type[torch.Tensor],
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Make a tensor of class ``cls`` that has no memory."""
    return torch.Tensor._make_wrapper_subclass(cls, size, strides=stride, dtype=dtype, device=device)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Run tensor operations as if no mode were active, whether of dispatch or of functions."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        if torch._C._is_torch_function_mode_enabled():
            stack.enter_context(_pop_mode_temporarily())
        yield
