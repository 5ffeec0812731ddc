"""Memory of a training job under each budget of bytes per parameter."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

import collage_fx
from collage_fx.errors import InvalidOptionError
from collage_fx.graph import Role
from collage_fx.torch_compat import FakeTensorMode
from collage_tools.plan.activations import meta_model, peak, repeated_layers
from collage_tools.plan.sources import Source

#: Bytes of a GB.
GB = 1_000_000_000
#: Least difference of two budgets in a table, as a share.
STEP = 0.03
#: Layers that FSDP2 holds whole at once: the layer that computes, and the next layer, being gathered.
GATHERED = 2
#: Columns of a table after the kinds of memory.
AFTER = PEAK, SHARE, LARGEST, TOKENS = "peak", "to masters", "largest micro-batch", "tokens in flight"


class Activations(NamedTuple):
    """Peak of activations, linear in the micro-batch: bytes of a sequence, and of each more."""

    first: int
    further: float

    def at(self, micro_batch: int) -> int:
        """Return the bytes of a micro-batch."""
        return self.first + math.ceil(self.further * (micro_batch - 1))

    def largest(self, nbytes: int) -> int:
        """Return the largest micro-batch within some bytes; 0 if a single sequence takes more."""
        return max(0, 1 + math.floor((nbytes - self.first) / self.further))


@dataclass
class Plan:
    """Memory of a training job, counted on the meta device, where tensors have no memory.

    Args:
        source: model and loss.
        make_optimizer: function that makes the optimizer of a list of parameters.
        gpu: memory of a GPU, in GB of 10**9 bytes.
        sequence: tokens of a sequence.
        fsdp: number of GPUs that shard the model by FSDP2.
        micro_batch: number of sequences on each GPU, for the peaks that are shown.
        dtype: dtype of parameters and gradients, bfloat16 or float16.
        reserve: share of a GPU's memory that tensors cannot have: contexts, NCCL, fragmentation.
        checkpointing: which of without (False) and with (True) activation checkpointing to plan.
        squares: attention keeps its matrices of scores, as torch's does on a CPU with dropout.

    Attributes:
        count: number of elements of the parameters.
        usable: bytes of a GPU that tensors can have.
        whole: bytes of parameters and gradients that FSDP2 would hold whole.
        budgets: ``fp32 masters``, ``default``, or bytes per parameter -> kind of memory -> bytes on each GPU;
            state includes error terms and masters.
        activations: activations without (False) and with (True) checkpointing of layers.

    Raises:
        CollageError: the model does not run on the meta device, or collage_fx refuses the optimizer.
    """

    source: Source
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
    _: KW_ONLY
    gpu: float
    sequence: int
    fsdp: int = 1
    micro_batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    reserve: float = 0.06
    checkpointing: Sequence[bool] = (False, True)
    squares: bool = False

    def __post_init__(self) -> None:
        name, positions = self.source.name, self.source.positions
        if positions is not None and self.sequence > positions:
            raise InvalidOptionError(
                f"sequences of {self.sequence} tokens, where {name} has {positions} positions",
                where="seq",
                remedy=f"shorten them, or give --set max_position_embeddings={self.sequence}",
            )
        model = meta_model(self.source, self.dtype)
        parameters, layers = list(model.parameters()), repeated_layers(model)
        inside = {p for layer in layers for p in layer.parameters()}
        largest = max((sum(p.nbytes for p in layer.parameters()) for layer in layers), default=0)
        self.whole = sum(p.nbytes for p in parameters if p not in inside) + GATHERED * largest
        self.count = sum(p.numel() for p in parameters)
        self.usable = int(self.gpu * GB * (1 - self.reserve))
        ways = [each for each in self.checkpointing if layers or not each] or [False]
        counted = partial(peak, self.source, model, squares=self.squares)
        sizes = {each: partial(counted, layers if each else []) for each in ways}
        self.activations = {each: self._measured(size) for each, size in sizes.items()}
        with FakeTensorMode():
            self.budgets = dict(self._budgets(parameters))
        room = self.usable - min(map(self.total, self.budgets))
        for each, found in self.activations.items():
            if (most := max(self.micro_batch, found.largest(room))) > 2:
                self.activations[each] = self._measured(sizes[each], most)

    def total(self, options: str) -> int:
        """Return the bytes of a budget, without activations."""
        return sum(self.budgets[options].values())

    def table(self, checkpointing: bool) -> dict[str, dict[str, float]]:
        """Return budget -> column -> bytes, share, sequences or tokens; 0 sequences if not one fits."""
        rows: dict[str, dict[str, float]] = {}
        activations = self.activations[checkpointing]
        for options, fixed in self.budgets.items():
            sizes = {**fixed, "activations": activations.at(self.micro_batch)}
            peak = sum(sizes.values())
            masters = rows["fp32 masters"][PEAK] if rows else peak
            largest = activations.largest(self.usable - self.total(options))
            rows[options] = {**sizes, PEAK: peak, SHARE: peak / masters - 1}
            rows[options] |= {LARGEST: largest, TOKENS: largest * self.sequence * self.fsdp}
        return rows

    def _measured(self, size: Callable[[int, int], int], most: int = 2) -> Activations:
        """Draw a line from one sequence to ``most``, which is no lower than a convex peak between."""
        first = size(1, self.sequence)
        found = Activations(first, (size(most, self.sequence) - first) / (most - 1))
        if found.further <= 0:
            raise InvalidOptionError(
                f"a second sequence takes no memory in {self.source.name}",
                where="loss(model, micro_batch, sequence)",
                remedy="make inputs of micro_batch sequences in it",
            )
        return found

    def _budgets(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield fp32 masters, the default, and the budgets of ``explain`` from the largest to the smallest.

        Explaining a step takes a parameter for each shape of a shard, the first GPU's, which is the largest.
        """
        shards = {p: (*(-(-rows // self.fsdp) for rows in p.shape[:1]), *p.shape[1:]) for p in parameters}
        numbers = Counter(shard for p, shard in shards.items() if p.requires_grad)
        optimizer = self.make_optimizer([nn.Parameter(torch.ones(s, dtype=self.dtype)) for s in numbers])
        elements = sum(math.prod(shape) * number for shape, number in numbers.items())
        shared = {
            "parameters": sum(p.itemsize * math.prod(shard) for p, shard in shards.items()),
            "gradients": self.dtype.itemsize * elements,
        }

        def sizes(report: collage_fx.CollageReport, *, masters: bool = False) -> dict[str, int]:
            state = sum(report.other_state.values()) / sum(map(math.prod, numbers)) * elements
            saved = 0
            for row in report.tensors:
                own = row.error_bytes + row.bytes * (row.role not in (Role.PARAMETER, Role.GRADIENT))
                if masters:  # float32 state beside them
                    own = 4 * row.numel * (row.role is not Role.GRADIENT)
                index = re.search(r"params\[(\d+)\]", row.name)
                number = [*numbers.values()][int(index[1])] if index else 1
                state += own * number
                if row.packed and row.role is Role.PARAMETER:
                    saved += number * (self.dtype.itemsize * row.numel - row.bytes)
            gathered = {"gathered": self.whole} if self.fsdp > 1 else {}
            return {**shared, "parameters": shared["parameters"] - saved, "state": round(state), **gathered}

        default = collage_fx.explain(optimizer)
        yield "fp32 masters", sizes(default, masters=True)
        yield "default", sizes(default)
        limit = math.inf
        with contextlib.suppress(InvalidOptionError):  # no budget is that small
            while True:
                report = collage_fx.explain(optimizer, bytes_per_parameter=limit)
                total = report.bytes_per_parameter()["total"]
                if total > limit / (1 - STEP):  # a recorded step, which packs nothing
                    return
                yield f"{total:.3g} bytes", sizes(report)
                limit = total * (1 - STEP)
