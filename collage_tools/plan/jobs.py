"""Memory of a training job under each budget of bytes per parameter."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

import collage_fx
from collage_fx.errors import InvalidOptionError
from collage_fx.graph import Role
from collage_fx.torch_compat import FakeTensorMode
from collage_tools.plan.activations import MetaModel
from collage_tools.plan.sources import Source

#: Bytes of a GB.
GB = 1_000_000_000
#: Least difference of two budgets in a table, as a share.
STEP = 0.03
#: Layers that FSDP2 holds whole at once: the layer that computes, and the next layer, being gathered.
GATHERED = 2


@dataclass(frozen=True)
class Budget:
    """Bytes on each GPU that no micro-batch changes.

    Attributes:
        options: ``fp32 masters``, ``default``, or the value of ``bytes_per_parameter``.
        parameters, gradients, state: bytes of the shards; state includes error terms and masters.
        gathered: bytes of parameters and gradients that FSDP2 holds whole.
    """

    options: str
    parameters: int
    gradients: int
    state: int
    gathered: int

    @property
    def total(self) -> int:
        """Bytes without activations."""
        return self.parameters + self.gradients + self.state + self.gathered


@dataclass(frozen=True)
class Activations:
    """Peak of activations, linear in the micro-batch: bytes of a sequence, and of each more."""

    first: int
    further: float

    def at(self, micro_batch: int) -> int:
        """Return the bytes of a micro-batch."""
        return self.first + math.ceil(self.further * (micro_batch - 1))

    def largest(self, nbytes: int) -> int:
        """Return the largest micro-batch within some bytes; 0 if a single sequence takes more."""
        return max(0, 1 + math.floor((nbytes - self.first) / self.further))


@dataclass(frozen=True)
class Plan:
    """Memory of a training job on each of its GPUs, in bytes.

    Attributes:
        name: name of the model.
        count: number of elements of its parameters.
        gpu, usable: memory of a GPU, and the part that tensors can have.
        sequence: tokens of a sequence.
        fsdp: number of GPUs that shard the model.
        micro_batch: micro-batch of the peaks that are shown.
        budgets: the budgets, fp32 masters first.
        activations: activations without (False) and with (True) checkpointing of layers.
    """

    name: str
    count: int
    gpu: int
    usable: int
    sequence: int
    fsdp: int
    micro_batch: int
    budgets: tuple[Budget, ...]
    activations: dict[bool, Activations]

    def largest(self, budget: Budget, *, checkpointing: bool) -> int:
        """Return the largest micro-batch that fits; 0 if no sequence does."""
        return self.activations[checkpointing].largest(self.usable - budget.total)

    def lacking(self, budget: Budget) -> int:
        """Return the bytes that a GPU lacks for a single sequence; 0 if it fits."""
        least = min(each.first for each in self.activations.values())
        return max(0, budget.total + least - self.usable)


def plan(
    source: Source,
    make_optimizer: Callable[[list[torch.nn.Parameter]], Optimizer],
    *,
    gpu: float,
    sequence: int,
    fsdp: int = 1,
    micro_batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    reserve: float = 0.06,
    checkpointing: Sequence[bool] = (False, True),
) -> Plan:
    """Plan the memory of a training job on the meta device, where tensors have no memory.

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

    Raises:
        CollageError: the model does not run on the meta device, or collage_fx refuses the optimizer.
    """
    if source.positions is not None and sequence > source.positions:
        raise InvalidOptionError(
            f"sequences of {sequence} tokens, where {source.name} has {source.positions} positions",
            where="seq",
            remedy=f"shorten them, or give --set max_position_embeddings={sequence}",
        )
    model = MetaModel(source, dtype)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        budgets = tuple(_budgets(model, make_optimizer, fsdp))
    usable = int(gpu * GB * (1 - reserve))
    room = usable - min(budget.total for budget in budgets)

    def measured(checkpointed: bool) -> Activations:
        first, second = (model.peak(n, sequence, checkpointing=checkpointed) for n in (1, 2))
        found = Activations(first, second - first)
        if (most := max(micro_batch, found.largest(room))) > 2:  # a chord is no lower than a convex peak
            last = model.peak(most, sequence, checkpointing=checkpointed)
            found = Activations(first, (last - first) / (most - 1))
        return found

    chosen = [each for each in checkpointing if model.layers or not each] or [False]
    count = sum(p.numel() for p in model.module.parameters())
    activations = {each: measured(each) for each in chosen}
    return Plan(source.name, count, int(gpu * GB), usable, sequence, fsdp, micro_batch, budgets, activations)


def _budgets(
    model: MetaModel, make_optimizer: Callable[[list[torch.nn.Parameter]], Optimizer], fsdp: int
) -> Iterator[Budget]:
    """Yield fp32 masters, the default, and budgets from the largest to the smallest, as ``explain`` has them.

    Explaining a step takes a parameter for each shape of a shard, the first GPU's, which is the largest.
    """
    shards = Counter((-(-p.shape[0] // fsdp), *p.shape[1:]) if p.dim() else () for p in model.trained)
    optimizer = make_optimizer([torch.nn.Parameter(torch.ones(s, dtype=model.dtype)) for s in shards])
    elements = sum(math.prod(shape) * number for shape, number in shards.items())

    def held(report: collage_fx.CollageReport, masters: bool = False) -> float:
        """Sum the bytes of state, error terms, or masters and float32 state, of all shards."""
        other = sum(report.other_state.values()) / sum(map(math.prod, shards)) * elements
        total = other + 4 * elements * masters
        for row in report.tensors:
            index = re.search(r"params\[(\d+)\]", row.name)
            own = (
                0 if row.role in (Role.PARAMETER, Role.GRADIENT) else 4 * row.numel if masters else row.bytes
            )
            added = own if masters else own + row.error_bytes
            total += added * (1 if index is None else [*shards.values()][int(index[1])])
        return total

    whole = {
        p: -(-p.shape[0] // fsdp) * math.prod(p.shape[1:]) if p.dim() else 1
        for p in model.module.parameters()
    }
    size = model.dtype.itemsize
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in model.layers]
    inside = {p for layer in model.layers for p in layer.parameters()}
    outside = sum(p.nbytes for p in whole if p not in inside)
    gathered = outside + GATHERED * max(layers, default=0) if fsdp > 1 else 0

    def budget(options: str, state: float) -> Budget:
        return Budget(options, size * sum(whole.values()), size * elements, round(state), gathered)

    default = collage_fx.explain(optimizer)
    yield budget("fp32 masters", held(default, masters=True))
    yield budget("default", held(default))
    limit = math.inf
    while True:
        try:
            report = collage_fx.explain(optimizer, bytes_per_parameter=limit)
        except InvalidOptionError:  # no budget is that small
            return
        total = report.bytes_per_parameter()["total"]
        if total > limit / (1 - STEP):  # a recorded step, which packs nothing
            return
        limit = total * (1 - STEP)
        yield budget(f"{total:.3g} bytes", held(report))
