"""Rows of sums that measured steps fill, and copies of them: Note [Metrics] in ``numerics/update_sums.py``.

A step is a call of an optimizer's ``step``, which may run several compiled graphs. A new step begins when a
graph updates a tensor that has been updated since the current step began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from collage_fx.errors import InvalidOptionError
from collage_fx.graph import InputInfo, Role, StateTensor
from collage_fx.metrics.quality import MeasuredTensor, Metrics, UpdateQuality
from collage_fx.numerics import SIZES, SUMS
from collage_fx.runtime import Present, is_captured
from collage_fx.state import parameter_names, state_tensors
from collage_fx.torch_compat import Sharding, boxed_call, real_tensors, sharding_of

#: Float64 numbers of a row in memory, and index of its sizes: sums and sizes each begin at a multiple of 128
#: bytes, an alignment that GPU kernels may assume.
WIDTH, SIZES_AT = 64, 16

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


@dataclass
class _Clock:
    """Counter of the steps of a subject."""

    step: int = 0
    updated: set[int] = field(default_factory=set)

    def tick(self, tensors: Sequence[int]) -> int:
        """Return the number of the step that updates the tensors with these ids."""
        if self.step == 0 or not self.updated.isdisjoint(tensors):
            self.step += 1
            self.updated.clear()
        self.updated.update(tensors)
        return self.step


class _Copy:
    """Copy of rows in the host's memory, written by devices asynchronously.

    Args:
        buffers: by device, a buffer with a row for every measured tensor of all devices.
        devices: device of each row.
    """

    def __init__(self, buffers: Mapping[torch.device, Tensor], devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._written: list[torch.cuda.Event] = []
        self._copies = {device: self._copied(buffer) for device, buffer in buffers.items()}

    def _copied(self, buffer: Tensor) -> Tensor:
        if not buffer.is_cuda:
            return buffer.to("cpu", copy=True)
        with torch.cuda.device(buffer.device):
            copy = torch.empty_like(buffer, device="cpu", pin_memory=True)
            copy.copy_(buffer, non_blocking=True)
            self._written.append(torch.cuda.Event())
            self._written[-1].record()
        return copy

    @property
    def is_written(self) -> bool:
        return all(event.query() for event in self._written)

    def rows(self) -> Tensor:
        """Wait for the devices and return the rows, in memory that is not pinned."""
        for event in self._written:
            event.synchronize()
        if len(self._copies) == 1:
            (copy,) = self._copies.values()
            return copy.clone() if self._written else copy
        return torch.stack([self._copies[device][i] for i, device in enumerate(self._devices)])


@dataclass
class _Snapshot:
    """Copy of the rows that a measured call has filled, and the tensors that they belong to."""

    subject: str
    step: int
    tensors: Sequence[tuple[_Identity, MeasuredInput]]
    copy: _Copy | None
    there: Sequence[int]
    rows: Tensor = field(init=False)
    is_summed: bool = False  # over the processes that hold shards of a tensor

    def settle(self) -> None:
        """Wait for the device copy and keep the rows on the host."""
        if self.copy is not None:
            self.rows, self.copy = self.copy.rows()[self.there], None

    def sum_shards(self) -> None:
        """Add up the rows of shards to rows of whole tensors; all processes of a mesh call it."""
        if self.is_summed:
            return
        self.is_summed = True
        elements = torch.tensor([[measured.elements] for _, measured in self.tensors], dtype=self.rows.dtype)
        sizes = self.rows[:, SIZES_AT:][:, : len(SIZES)]
        sizes *= elements / sizes.sum(1, keepdim=True).clamp(min=1)  # scaled from the sample to all elements
        self.rows = torch.cat([self.rows, elements], 1)
        by_sharding: dict[Sharding, list[int]] = {}
        for i, (_, measured) in enumerate(self.tensors):
            if measured.sharding is not None:
                by_sharding.setdefault(measured.sharding, []).append(i)
        for sharding, places in by_sharding.items():
            self.rows[places] = sharding.sum(self.rows[places])


class Meter:
    """Measurements of a backend.

    Args:
        every: measure each step whose number is a multiple of this.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._clocks: dict[str, _Clock] = {}
        self._snapshots: list[_Snapshot] = []
        self._unsettled: deque[_Snapshot] = deque()
        self._identities = WeakTensorKeyDictionary()
        self._ranks: dict[str, int] = {}

    def learn(self, optimizers: Mapping[str, Optimizer], *, without: type[Tensor]) -> None:
        """Note the names and groups of the tensors that the optimizers hold.

        Args:
            optimizers: the optimizers, by variable.
            without: class of tensors that become other tensors later, and must have no weak references.
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
                        self._identities[tensor] = identity
                    self._ranks.setdefault(identity.name, len(self._ranks))

    def identity(self, tensor: Tensor, info: InputInfo) -> _Identity:
        """Return the identity of a measured tensor: the optimizer's name, or else the graph input's."""
        kind = "parameter" if info.role is Role.PARAMETER else info.symbol
        known = self._identities.get(tensor)
        return known if known is not None else _Identity(info.name, kind, None, None, info.name)

    def clock(self, subject: str) -> _Clock:
        return self._clocks.setdefault(subject, _Clock())

    def keep(self, snapshot: _Snapshot) -> None:
        """Keep a snapshot; release the pinned memory of earlier snapshots that devices have written."""
        self._snapshots.append(snapshot)
        self._unsettled.append(snapshot)
        while self._unsettled and (copy := self._unsettled[0].copy) is not None and copy.is_written:
            self._unsettled.popleft().settle()

    def forget(self) -> None:
        """Drop all measurements; the step counter continues."""
        self._snapshots.clear()
        self._unsettled.clear()

    def metrics(self, model: torch.nn.Module | None = None) -> Metrics:
        """Return all measurements; waits for the devices. With DTensors, all processes must call it.

        Args:
            model: module whose names for parameters replace the optimizer's names.
        """
        own = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        several = len({snapshot.subject for snapshot in self._snapshots}) > 1
        steps: dict[int, dict[str, UpdateQuality]] = {}
        tensors: dict[str, MeasuredTensor] = {}
        while self._unsettled:
            self._unsettled.popleft().settle()
        for snapshot in self._snapshots:
            snapshot.sum_shards()
            measured = steps.setdefault(snapshot.step, {})
            rows = zip(snapshot.tensors, snapshot.rows.tolist(), strict=True)
            for (identity, _), row in sorted(rows, key=lambda each: self._order(each[0][0])):
                tensor = _named(identity, own, snapshot.subject)
                name = f"{snapshot.subject}: {tensor.name}" if several else tensor.name
                tensors[name] = tensor
                measured[name] = _quality(row)
        return Metrics(dict(sorted(steps.items())), tensors)

    def _order(self, identity: _Identity) -> tuple[bool, int]:
        """Return a sort key: parameters first, otherwise the order of the optimizers."""
        return identity.kind != "parameter", self._ranks.get(identity.name, len(self._ranks))


def _quality(row: Sequence[float]) -> UpdateQuality:
    """Return the quality of an update from its row, whose last entry is the number of elements."""
    sizes = tuple(row[SIZES_AT:][: len(SIZES)])
    return UpdateQuality(int(row[-1]), **dict(zip(SUMS, row, strict=False)), sizes=sizes)


def _named(identity: _Identity, own: Mapping[int, str], subject: str) -> MeasuredTensor:
    parameter = None if identity.parameter is None else identity.parameter()
    name = own.get(id(parameter), identity.parameter_name)
    is_named = not name.split(".")[-1].startswith("params[")
    module = name.rpartition(".")[0] if is_named and identity.group is not None else ""
    full = name + identity.name.removeprefix(identity.parameter_name)
    return MeasuredTensor(full, identity.kind, module, identity.group, subject)


@dataclass(frozen=True)
class MeasuredInput:
    """Input of a step that is measured.

    Attributes:
        index: index among the step's arguments.
        info: name and role.
        elements: number of elements.
        device: device of the tensor.
        sharding: placement of the DTensor, if the input is a shard; else None.
    """

    index: int
    info: InputInfo
    elements: int
    device: torch.device
    sharding: Sharding | None

    @classmethod
    def of(cls, state: StateTensor, index: int, info: InputInfo) -> MeasuredInput:
        """Return the measured input of a state tensor."""
        sharding = None if info.tensor is None else sharding_of(info.tensor)
        return cls(index, info, int(state.value.numel()), state.value.device, sharding)


class Rows:
    """Memory for the sums of a compiled step, at the same addresses in every call."""

    def __init__(self, measured: Sequence[MeasuredInput]) -> None:
        self._devices = [each.device for each in measured]
        with real_tensors():
            self._buffers = {
                device: torch.zeros(len(measured), WIDTH, dtype=torch.float64, device=device)
                for device in {each.device for each in measured}
            }
            self._rows = [self._buffers[each.device][i] for i, each in enumerate(measured)]
            self.inputs = [
                part for row in self._rows for part in (row[: len(SUMS)], row[SIZES_AT:][: len(SIZES)])
            ]

    @property
    def is_captured(self) -> bool:
        """Whether launches on the rows' devices are being captured into a CUDA graph."""
        return any(map(is_captured, self._buffers))

    def copy(self) -> _Copy:
        """Copy the sums to the host, one row per tensor."""
        return _Copy(self._buffers, self._devices)


@boxed_call
class MeteredStep:
    """Step that is measured in some of its calls, in AOTAutograd's calling convention.

    Args:
        meter: the measurements.
        subject: name of the optimizer or function whose step it is.
        inputs: the measured inputs.
        rows: rows that the measured step fills, in the order of ``inputs``.
        measured: the step with sums.
        plain: the step without sums; None if every call is measured.
    """

    def __init__(
        self,
        meter: Meter,
        subject: str,
        inputs: Sequence[MeasuredInput],
        rows: Rows,
        measured: Step,
        plain: Step | None,
    ) -> None:
        self.meter = meter
        self.subject = subject
        self.clock = meter.clock(subject)
        self.measured = measured
        self.plain = plain
        self.rows = rows
        # Without tensors: snapshots must not keep them alive.
        self.inputs = [replace(each, info=replace(each.info, tensor=None)) for each in inputs]
        bound = [each.info.tensor for each in inputs if each.info.bound and each.info.tensor is not None]
        self.keys = tuple(map(id, bound))
        self.identities = self._identities(bound) if len(bound) == len(inputs) else None

    def __call__(self, arguments: list[Any], present: Present | None = None) -> Any:
        if self.rows.is_captured:
            raise InvalidOptionError(
                "metrics=True while a CUDA graph is captured: its replays would not be measured",
                where=self.subject,
                remedy="capture a step of a backend without metrics, or do not capture",
            )
        keys, identities = self.keys, self.identities
        if identities is None:
            tensors = [arguments[each.index] for each in self.inputs]
            keys, identities = tuple(map(id, tensors)), self._identities(tensors)
        some = () if present is None else (present,)
        step = self.clock.tick(keys)
        if self.plain is not None and step % self.meter.every:
            return self.plain(arguments, *some)
        result = self.measured(arguments, *some)
        absent = frozenset() if present is None else present.absent
        there = [i for i, each in enumerate(self.inputs) if each.index not in absent]
        measured = [identities[i] for i in there]
        self.meter.keep(_Snapshot(self.subject, step, measured, self.rows.copy(), there))
        return result

    def _identities(self, tensors: Sequence[Tensor]) -> list[tuple[_Identity, MeasuredInput]]:
        return [
            (self.meter.identity(tensor, each.info), each)
            for tensor, each in zip(tensors, self.inputs, strict=True)
        ]
