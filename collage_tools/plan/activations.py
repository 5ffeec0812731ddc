"""Peak of a forward and backward pass on the meta device, whose tensors have no memory.

Note [What is counted]: a storage counts from the operation that returns it until the last tensor that uses it
is gone, in bytes as requested. Parameters and gradients are there before and count elsewhere; a gradient that
is about to be added to that of earlier micro-batches counts here. Memory that a kernel allocates and frees
inside of an operation is not seen. Dropout keeps 2 bytes for each element, where a GPU's keeps 1. Fused
attention keeps no squares; with dropout torch has none for CPUs.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from collage_fx.errors import InvalidOptionError
from collage_fx.torch_compat import TorchDispatchMode
from collage_tools.plan.sources import Replaced, Source

aten = torch.ops.aten


class Allocations(TorchDispatchMode):
    """Context manager: sum the bytes of storages that operations make; ``peak`` is the largest sum."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the storages of its results that were not there before."""
        result = func(*args, **kwargs or {})
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor) and (storage := each.untyped_storage()) not in self._seen:
                self._seen.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, nbytes: int) -> None:
        self.now -= nbytes


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention without its squares, which the meta device would keep."""
    mask = attn_mask if attn_mask is None else attn_mask.to(query.dtype)
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    result: Tensor = attention(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
    return result


def _attention(squares: bool) -> contextlib.AbstractContextManager[Any]:
    """Context manager: attention is fused, or keeps its squares, as on the meta device."""
    fused = {nn.functional.scaled_dot_product_attention: _flash}
    return contextlib.nullcontext() if squares else Replaced(fused)


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of each outermost ``ModuleList`` or ``Sequential`` whose modules are of one class."""
    layers = list(model.children())
    is_list = isinstance(model, (nn.ModuleList, nn.Sequential)) and len(layers) > 1
    if is_list and len({*map(type, layers)}) == 1 and next(model.parameters(), None) is not None:
        return layers
    return [layer for part in layers for layer in repeated_layers(part)]


@contextlib.contextmanager
def _on_meta(source: Source) -> Iterator[None]:
    """Context manager: tensors are made without memory; an error says whose model needs some."""
    try:
        with torch.device("meta"):
            yield
    except Exception as error:
        raise InvalidOptionError(
            f"{source.name} does not run on the meta device: {type(error).__name__}: {error}",
            where="plan",
            remedy="make model() without weights from files or devices in its code, and without branches on "
            "values of tensors",
        ) from error


def meta_model(source: Source, dtype: torch.dtype) -> nn.Module:
    """Make the model in ``dtype`` on the meta device, with the gradients of an earlier micro-batch."""
    with _on_meta(source):
        model = source.make().train().to(dtype)
    if not any(p.requires_grad for p in model.parameters()):
        raise InvalidOptionError(
            f"no parameter of {source.name} requires a gradient", where="model()", remedy="thaw some"
        )
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    return model


def peak(
    source: Source,
    model: nn.Module,
    layers: Iterable[nn.Module],
    micro_batch: int,
    sequence: int,
    *,
    squares: bool = False,
) -> int:
    """Return the most bytes of activations that are alive at once in a forward and backward pass.

    ``layers`` are those that keep their inputs alone, and compute the rest again in the backward pass. With
    ``squares``, attention keeps its matrices of scores.
    """
    for layer in layers:
        layer.forward = functools.partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (contextlib.nullcontext(), _attention(squares)),  # backward() suspends modes
        )
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found = Allocations([*model.parameters(), *model.buffers(), *gradients])
    try:
        with _on_meta(source), found, _attention(squares):
            source.loss(model, micro_batch, sequence).backward()
    finally:
        for layer in layers:
            del layer.forward
    return found.peak
