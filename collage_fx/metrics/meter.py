"""Steps that are measured, and the rows of their tensors: Note [Metrics] in ``rows.py``.

A step is a call of an optimizer's ``step``, which may run several compiled graphs. A new step begins when a
graph updates a tensor that has been updated since the current step began.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from collage_fx.errors import InvalidOptionError
from collage_fx.graph import Role, StepProgram
from collage_fx.metrics.quality import MeasuredTensor, Metrics, UpdateQuality
from collage_fx.metrics.rows import ROW, SUMS, Sampled, rows_of
from collage_fx.metrics.samples import observers
from collage_fx.runtime import Present, is_captured
from collage_fx.state import parameter_names, state_tensors
from collage_fx.torch_compat import Sharding, boxed_call, sharding_of

#: Compiled step, called with the list of its arguments.
Step = Callable[..., Any]


@dataclass(frozen=True)
class _Identity:
    """Identity of a measured tensor: a :class:`MeasuredTensor` before the model's names are known."""

    name: str
    kind: str
    group: int | None
    parameter: TensorWeakRef | None
    parameter_name: str


class _Snapshot:
    """Row of each tensor of a measured call; devices copy the rows to the host asynchronously.

    ``rows`` come in pieces, each with its places among all rows.
    """

    def __init__(
        self,
        subject: str,
        step: int,
        tensors: Sequence[tuple[_Identity, MeasuredInput]],
        rows: Iterable[tuple[Tensor, Sequence[int]]],
    ) -> None:
        self.subject, self.step, self.tensors = subject, step, tensors
        self._written: list[torch.cuda.Event] = []
        self._copies = [(self._copied(each), indices) for each, indices in rows]
        self._is_summed = False  # over the processes that hold shards of a tensor

    def _copied(self, rows: Tensor) -> Tensor:
        if not rows.is_cuda:
            return rows.cpu()
        with torch.cuda.device(rows.device):
            copy = torch.empty_like(rows, device="cpu", pin_memory=True)
            copy.copy_(rows, non_blocking=True)
            self._written.append(torch.cuda.Event())
            self._written[-1].record()
        return copy

    @property
    def is_written(self) -> bool:
        return all(event.query() for event in self._written)

    def settle(self) -> None:
        """Wait for the devices and keep the rows, and numbers of elements, in memory that is not pinned."""
        for event in self._written:
            event.synchronize()
        self.rows = torch.empty(len(self.tensors), len(ROW) + 1, dtype=torch.float64)
        self.rows[:, -1] = torch.tensor([measured.elements for _, measured in self.tensors])
        for copy, indices in self._copies:
            self.rows[[*indices], :-1] = copy
        self._copies.clear()

    def sum_shards(self) -> None:
        """Add up the rows of shards to rows of whole tensors; all processes of a mesh call it."""
        by_sharding = defaultdict[Sharding, list[int]](list)
        for i, (_, measured) in enumerate(self.tensors):
            if measured.sharding is not None and not self._is_summed:
                by_sharding[measured.sharding].append(i)
        for sharding, places in by_sharding.items():
            self.rows[places] = sharding.sum(self.rows[places])
        self._is_summed = True


class Meter:
    """Measurements of a backend: of each step whose number is a multiple of ``every``; None = every step."""

    def __init__(self, every: int | None) -> None:
        self.every = every or 1
        self._is_given = every is not None
        #: Number of steps before the first that is counted.
        self._before = 0
        #: Number of the current step, and ids of the tensors that it has updated, by subject.
        self._steps = Counter[str]()
        self._updated = defaultdict[str, set[int]](set)
        self._snapshots: list[_Snapshot] = []
        self._unsettled: deque[_Snapshot] = deque()
        self.identities = WeakTensorKeyDictionary()
        self._ranks: dict[str, int] = {}

    def follow(self, every: int, done: int) -> None:
        """Measure the steps that a trainer logs, unless ``every`` was given.

        Steps are counted from the ``done`` steps of the trainer on, if none has been measured.
        """
        if not self._is_given:
            self.every = every
        if not self._steps:
            self._before = done

    def learn(self, optimizers: Mapping[str, Optimizer], *, without: type[Tensor]) -> None:
        """Note the names and groups of the tensors that the optimizers, by variable, hold.

        Tensors of the class ``without`` become other tensors later, and must have no weak references.
        """
        for variable, optimizer in optimizers.items():
            prefix = f"{variable}." if len(optimizers) > 1 else ""
            groups = [i for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]
            for group, (name, parameter) in zip(groups, parameter_names(optimizer), strict=True):
                owner, where = TensorWeakRef(parameter), prefix + name
                found = [(parameter, _Identity(where, "parameter", group, owner, where))]
                for slot, tensor in state_tensors(optimizer.state.get(parameter, {})):
                    found.append((tensor, _Identity(f"{where}.{slot}", slot, group, owner, where)))
                for tensor, identity in found:
                    if type(tensor) is not without:
                        self.identities[tensor] = identity
                    self._ranks.setdefault(identity.name, len(self._ranks))

    def tick(self, subject: str, tensors: Sequence[int]) -> int:
        """Return the number of the step of a subject that updates the tensors with these ids."""
        updated = self._updated[subject]
        if not self._steps[subject] or not updated.isdisjoint(tensors):
            self._steps[subject] += 1
            updated.clear()
        updated.update(tensors)
        return self._before + self._steps[subject]

    def keep(self, snapshot: _Snapshot) -> None:
        """Keep a snapshot; release the pinned memory of earlier snapshots that devices have written."""
        self._snapshots.append(snapshot)
        self._unsettled.append(snapshot)
        while self._unsettled and self._unsettled[0].is_written:
            self._unsettled.popleft().settle()

    def forget(self) -> None:
        """Drop all measurements; the step counter continues."""
        self._snapshots.clear()
        self._unsettled.clear()

    @property
    def taken(self) -> int:
        """Number of graphs that have been measured."""
        return len(self._snapshots)

    def metrics(self, model: torch.nn.Module | None = None, *, only_last: bool = False) -> Metrics:
        """Return all measurements; waits for the devices. With DTensors, all processes must call it.

        Args:
            model: module whose names for parameters replace the optimizer's names.
            only_last: whether to return those of the last step alone.
        """
        last = max((each.step for each in self._snapshots), default=0) if only_last else 0
        snapshots = [each for each in self._snapshots if each.step >= last]
        own = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        several = len({snapshot.subject for snapshot in snapshots}) > 1
        steps: dict[int, dict[str, UpdateQuality]] = {}
        tensors: dict[str, MeasuredTensor] = {}
        while self._unsettled:
            self._unsettled.popleft().settle()
        for snapshot in snapshots:
            snapshot.sum_shards()
            measured = steps.setdefault(snapshot.step, {})
            rows = zip(snapshot.tensors, snapshot.rows.tolist(), strict=True)
            for (identity, _), row in sorted(rows, key=self._order):
                tensor = _named(identity, own, snapshot.subject)
                name = f"{snapshot.subject}: {tensor.name}" if several else tensor.name
                tensors[name] = tensor
                sums, sizes = dict(zip(SUMS, row, strict=False)), tuple(row[len(SUMS) : -1])
                measured[name] = UpdateQuality(int(row[-1]), **sums, sizes=sizes)
        return Metrics(dict(sorted(steps.items())), tensors)

    def _order(self, row: tuple[tuple[_Identity, MeasuredInput], Any]) -> tuple[bool, int]:
        """Return a sort key: parameters first, otherwise the order of the optimizers."""
        (identity, _), _ = row
        return identity.kind != "parameter", self._ranks.get(identity.name, len(self._ranks))


def _named(identity: _Identity, own: Mapping[int, str], subject: str) -> MeasuredTensor:
    parameter = None if identity.parameter is None else identity.parameter()
    name = own.get(id(parameter), identity.parameter_name)
    is_named = not name.split(".")[-1].startswith("params[")
    module = name.rpartition(".")[0] if is_named and identity.group is not None else ""
    full = name + identity.name.removeprefix(identity.parameter_name)
    return MeasuredTensor(full, identity.kind, module, identity.group, subject)


@dataclass(frozen=True)
class MeasuredInput:
    """Input of a step that is measured."""

    index: int  # among the step's arguments
    unknown: _Identity  # by the graph input's name, if the optimizer is not known
    elements: int
    dtype: torch.dtype
    device: torch.device
    sharding: Sharding | None  # of the DTensor, if the input is a shard


@boxed_call
class MeteredStep:
    """Step that is measured in some of its calls, in AOTAutograd's calling convention.

    ``program`` is the step after the pipeline, ``reference`` the step in float32.
    """

    def __init__(
        self, meter: Meter, subject: str, program: StepProgram, reference: StepProgram, step: Step
    ) -> None:
        self.meter = meter
        self.subject = subject
        self.step = step
        self.observers = observers(program, reference)
        self.inputs = []
        bound = []
        for observer in self.observers:
            for each in observer.instances:
                for state, index in zip(observer.states, each.measured, strict=True):
                    info, value = program.infos[index], state.value
                    sharding = None if info.tensor is None else sharding_of(info.tensor)
                    if info.bound and info.tensor is not None:
                        bound.append(info.tensor)
                    kind = "parameter" if info.role is Role.PARAMETER else info.symbol
                    unknown = _Identity(info.name, kind, None, None, info.name)
                    tensor = int(value.numel()), value.dtype, value.device, sharding
                    self.inputs.append(MeasuredInput(index, unknown, *tensor))
        self.devices = {each.device for each in self.inputs}
        self.keys = tuple(map(id, bound))
        self.identities = self._identities(bound) if len(bound) == len(self.inputs) else None

    def __call__(self, arguments: list[Any], present: Present | None = None) -> Any:
        if any(map(is_captured, self.devices)):
            met = "metrics=True while a CUDA graph is captured: its replays would not be measured"
            remedy = "capture a step of a backend without metrics, or do not capture"
            raise InvalidOptionError(met, where=self.subject, remedy=remedy)
        keys, identities = self.keys, self.identities
        if identities is None:
            tensors = [arguments[each.index] for each in self.inputs]
            keys, identities = tuple(map(id, tensors)), self._identities(tensors)
        passed = () if present is None else (present,)
        number = self.meter.tick(self.subject, keys)
        if number % self.meter.every:
            return self.step(arguments, *passed)
        absent = frozenset() if present is None else present.absent
        watching = [(each, some) for each in self.observers if (some := each.present(absent))]
        given = [*arguments]
        with torch.no_grad():
            before = [sample for each, some in watching for sample in each.read(some, given, before=True)]
            result = self.step(arguments, *passed)
            after = [sample for each, some in watching for sample in each.read(some, given, before=False)]
        samples = [Sampled(*old, *new) for old, new in zip(before, after, strict=True)]
        measured = [each for each in identities if each[1].index not in absent]
        self.meter.keep(_Snapshot(self.subject, number, measured, _rows_of(samples, measured)))
        return result

    def _identities(self, tensors: Sequence[Tensor]) -> list[tuple[_Identity, MeasuredInput]]:
        pairs = zip(tensors, self.inputs, strict=True)
        return [(self.meter.identities.get(tensor, each.unknown), each) for tensor, each in pairs]


def _rows_of(
    samples: Sequence[Sampled], measured: Sequence[tuple[_Identity, MeasuredInput]]
) -> Iterator[tuple[Tensor, Sequence[int]]]:
    """Yield the rows of samples of one device and dtype, and their places among the samples."""
    alike = defaultdict[tuple[torch.device, torch.dtype], list[int]](list)
    for i, (_, each) in enumerate(measured):
        alike[each.device, each.dtype].append(i)
    for (_, dtype), indices in alike.items():
        elements = [measured[i][1].elements for i in indices]
        yield rows_of([samples[i] for i in indices], elements, dtype), indices
