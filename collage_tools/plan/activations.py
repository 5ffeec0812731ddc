"""Peak of a forward and backward pass on the meta device, whose tensors have no memory.

Note [What is counted]: a storage counts from the operation that returns it until the last tensor that uses it
is gone, in bytes as requested. Parameters and gradients are there before and count elsewhere; a gradient that
is about to be added to that of earlier micro-batches counts here. Memory that a kernel allocates and frees
inside of an operation is not seen. Dropout keeps 2 bytes for each element, where a GPU's keeps 1.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from collage_fx.errors import InvalidOptionError
from collage_fx.torch_compat import TorchDispatchMode
from collage_tools.plan.sources import Source

aten = torch.ops.aten


class Allocations(TorchDispatchMode):
    """Context manager: sum the bytes of storages that operations make, and keep the largest sum.

    Attributes:
        now: bytes that are alive.
        peak: most bytes that were alive at once.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._kept = [tensor.untyped_storage() for tensor in known]
        self._seen = {id(storage) for storage in self._kept}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the storages of its results that were not there before."""
        result = func(*args, **kwargs or {})
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor) and id(storage := each.untyped_storage()) not in self._seen:
                self._seen.add(id(storage))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        return result

    def _free(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.now -= nbytes


class _FlashAttention(TorchFunctionMode):
    """Context manager: attention is "flash" attention; the meta device would keep squares."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs or {})

        def flash(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            mask = attn_mask if attn_mask is None else attn_mask.to(query.dtype)
            called = aten._scaled_dot_product_flash_attention_for_cpu
            result: Tensor = called(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
            return result

        return flash(*args, **kwargs or {})


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of each outermost ``ModuleList`` or ``Sequential`` whose modules are of one class."""
    layers = list(model.children())
    is_list = isinstance(model, (nn.ModuleList, nn.Sequential)) and len(layers) > 1
    if is_list and len({*map(type, layers)}) == 1 and next(model.parameters(), None) is not None:
        return layers
    return [layer for part in layers for layer in repeated_layers(part)]


@contextlib.contextmanager
def _recomputed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager: the layers keep their inputs alone, and compute the rest again in the backward."""
    for layer in layers:
        layer.forward = functools.partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (contextlib.nullcontext(), _FlashAttention()),  # backward() suspends the mode
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class MetaModel:
    """Model on the meta device, with the gradients of an earlier micro-batch.

    Attributes:
        dtype: dtype that parameters and buffers are converted to.
        module: the model.
        layers: layers that are checkpointed, and that FSDP2 gathers one by one.
    """

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        self.source, self.dtype = source, dtype
        with _on_meta(source):
            self.module = source.make().train().to(dtype)
        self.layers = repeated_layers(self.module)
        if not self.trained:
            raise InvalidOptionError(
                f"no parameter of {source.name} requires a gradient", where="model()", remedy="thaw some"
            )
        for p in self.trained:
            p.grad = torch.zeros_like(p)

    @property
    def trained(self) -> list[nn.Parameter]:
        """Parameters that have gradients and state."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def peak(self, micro_batch: int, sequence: int, *, checkpointing: bool) -> int:
        """Return the most bytes of activations that are alive at once in a forward and backward pass."""
        gradients = [p.grad for p in self.trained if p.grad is not None]
        with (
            _on_meta(self.source),
            _recomputed(self.layers if checkpointing else ()),
            Allocations([*self.module.parameters(), *self.module.buffers(), *gradients]) as allocations,
            _FlashAttention(),
        ):
            self.source.loss(self.module, micro_batch, sequence).backward()
        return allocations.peak


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
