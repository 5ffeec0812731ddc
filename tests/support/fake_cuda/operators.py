"""torch's own operators, which are machine code of a card's: done by the host, on the device's memory.

An operator is done at once, behind all that is queued: it hides a race between itself and a kernel. In a
capture it is recorded, and its result is that of a trial on copies.
"""

from __future__ import annotations

import ctypes
import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.support.fake_cuda import driver
from tests.support.fake_cuda.launches import queue

__all__ = ["replace_operators", "used"]

#: How often each operator has been done.
used: Counter[str] = Counter()

#: Operators that only allocate, describe or copy: torch's own do it.
_OWN = re.compile(
    r"_?empty|resize|set_|_efficientzerotensor|record_stream|is_|_pin_memory|_local_scalar_dense|_?copy"
    r"|_to_copy|_?cudnn|_nested|_sparse"
)

#: Square roots, which a card rounds to nearest; the CPU's vectors are an ulp off for some.
_ROOTS = (torch.ops.aten.sqrt.default, torch.ops.aten._foreach_sqrt.default)
_ROOTS_IN_PLACE = (torch.ops.aten.sqrt_.default, torch.ops.aten._foreach_sqrt_.default)

#: Operators with one implementation for every device, which launch kernels all the same.
_COMPOSED = ("aten::ldexp.Tensor", "aten::ldexp.out", "aten::ldexp_")


def replace_operators() -> torch.library.Library:
    """Replace all operators but those that return a view or are composed of others; keep the result."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that are replaced
        for qualified in [*torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"), *_COMPOSED]:
            operator = _operator(qualified)
            if operator is not None:
                library.impl(
                    qualified.removeprefix("aten::"), _on_host(operator), "CUDA", allow_override=True
                )
        library.impl("copy_", _copy, "CUDA", allow_override=True)
        library.impl("_to_copy", _to_copy, "CUDA", allow_override=True)
    return library


def _operator(qualified: str) -> Any:
    """Return an operator that is to be replaced, or None."""
    namespace, _, name = qualified.partition("::")
    base, _, overload = name.partition(".")
    if namespace != "aten" or _OWN.match(base):
        return None
    operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
    if operator is None:
        return None
    schema = operator._schema
    is_view = any(each.alias_info and not each.alias_info.is_write for each in schema.returns)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    is_on_host = has(qualified, "CPU") or has(qualified, "CompositeExplicitAutograd")
    return None if is_view or "Dimname" in str(schema) or not is_on_host else operator


def _root(x: Tensor) -> Tensor:
    """Return the square root with one rounding: 53 >= 2 * 24 + 2 (Figueroa, 1995)."""
    return x.double().sqrt().to(x.dtype if x.dtype.is_floating_point else torch.float32)


def _is_on_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _host(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor of the host's."""
    storage = tensor.untyped_storage()
    size, strides, dtype = tensor.size(), tensor.stride(), tensor.dtype
    with torch._C._DisableTorchDispatch():
        if not storage.nbytes():
            return torch.empty_strided(size, strides, dtype=dtype)
        memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        of_host = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(of_host, tensor.storage_offset(), size, strides)


class _Arguments:
    """Arguments of an operator, as the host has them.

    Attributes:
        device: of the arguments.
        views: tensors of the device, each with the same memory as a tensor of the host.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.device: torch.device | None = None
        self.views: list[tuple[Tensor, Tensor]] = []
        self.args, self.kwargs = tree_map(self._on_host, (args, kwargs))

    def _on_host(self, value: Any) -> Any:
        if _is_on_device(value):
            self.device = self.device or value.device
            self.views.append((value, _host(value)))
            return self.views[-1][1]
        if isinstance(value, torch.device) and value.type == "cuda":
            self.device = self.device or value
            return torch.device("cpu")
        return None if isinstance(value, torch.Generator) else value

    def on_device(self, value: Any) -> Any:
        """Return a copy on the device."""
        if not isinstance(value, Tensor):
            return value
        made = torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=self.device or "cuda"
        )
        _host(made).copy_(value)
        return made


def _on_host(operator: Any) -> Callable[..., Any]:
    schema = operator._schema
    arguments = list(enumerate(schema.arguments))
    written = {i: each.name for i, each in arguments if each.alias_info and each.alias_info.is_write}
    tensors = {i for i, each in arguments if str(each.type) == "Tensor"}
    overloads = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))

    def compute(args: Any, kwargs: Any) -> Any:
        if operator in _ROOTS:
            return tree_map(_root, args[0])
        if operator in _ROOTS_IN_PLACE:
            return tree_map(lambda x: x.copy_(_root(x)), args[0])
        # A number in place of a tensor comes as what it is: another overload takes it.
        has_numbers = any(
            i in tensors and isinstance(each, (int, float, complex)) for i, each in enumerate(args)
        )
        return (overloads if has_numbers else operator)(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        used[str(operator)] += 1
        is_capturing = torch.cuda.is_current_stream_capturing()
        if not is_capturing:
            driver.drain()
        given = _Arguments(args, kwargs)
        mutated = [args[i] if i < len(args) else kwargs.get(name) for i, name in written.items()]
        if is_capturing:
            copies = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (given.args, given.kwargs))
            result = compute(*copies)
        else:
            result = compute(given.args, given.kwargs)
            for tensor, view in given.views:
                if tensor.shape != view.shape:  # an out= that had another size
                    tensor.resize_(view.shape)
                    _host(tensor).copy_(view)
        if not mutated:
            returned = tree_map(given.on_device, result)
        elif not schema.returns:
            returned = None
        else:
            returned = mutated[0] if len(schema.returns) == 1 else tuple(mutated)
        if is_capturing:

            def again() -> None:
                later = compute(given.args, given.kwargs)
                if not mutated:
                    tree_map(lambda x, y: _host(x).copy_(y) if _is_on_device(x) else x, returned, later)

            driver.push(torch.cuda.current_stream(given.device).cuda_stream, queue(again))
        return returned

    return run


def _to_copy(
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    used["_to_copy"] += 1
    device = torch.device(device) if device is not None else x.device
    dtype = dtype or x.dtype
    if dtype == x.dtype or torch.cuda.is_current_stream_capturing():
        made = torch.empty_like(x, dtype=dtype, device=device, pin_memory=bool(pin_memory))
        return made.copy_(x, non_blocking)
    driver.drain()
    converted = _host(x).to(dtype)
    if device.type == "cpu":
        return converted.pin_memory() if pin_memory else converted
    made = torch.empty_strided(converted.size(), converted.stride(), dtype=dtype, device=device)
    _host(made).copy_(converted)
    return made


#: Kinds of ``cudaMemcpy``.
_UPLOAD, _DOWNLOAD, _ON_DEVICE = 1, 2, 3


def _copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy: bytes in their turn, by the driver; what converts or expands at once, by the host."""
    device = self.device if self.is_cuda else source.device
    stream = torch.cuda.current_stream(device)
    is_capturing = torch.cuda.is_current_stream_capturing()
    is_whole = self.dtype == source.dtype and self.shape == source.shape and self.numel() > 0
    if is_whole and self.is_contiguous() and source.is_contiguous():
        kind = _UPLOAD if not source.is_cuda else _ON_DEVICE if self.is_cuda else _DOWNLOAD
        size = self.numel() * self.element_size()
        with torch.cuda.device(device):
            if driver.copy(self.data_ptr(), source.data_ptr(), size, kind, stream.cuda_stream):
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if not is_capturing and not non_blocking and kind != _ON_DEVICE:
            stream.synchronize()
        return self
    to, of = (_host(each) if _is_on_device(each) else each for each in (self, source))
    if is_capturing:
        driver.push(stream.cuda_stream, queue(lambda: to.copy_(of)))
    else:
        driver.drain()
        to.copy_(of)
    return self
