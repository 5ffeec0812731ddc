"""The rows that measured steps fill, and their copies: Note [Metrics] in ``numerics/update_sums.py``.

A step is what an optimizer's ``step`` does once, in however many compiled graphs: a step begins when a tensor
is updated that has been updated since the last one began.
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
from collage_fx.torch_compat import Pieces, pieces_of, real_tensors, takes_a_list

#: Numbers of a row in memory, and where its sizes begin: each part begins at a multiple of 128 bytes, as GPU
#: kernels may take for granted.
WIDTH, SIZES_AT = 64, 16

#: A compiled step, called with the list of its arguments.
Step = Callable[..., Any]


@dataclass(frozen=True)
class _Identity:
    """The identity of a measured tensor: a :class:`MeasuredTensor` before the model's names are known."""

    name: str
    kind: str
    group: int | None
    parameter: TensorWeakRef | None
    parameter_name: str


@dataclass
class _Clock:
    """Counts the steps of one subject."""

    step: int = 0
    updated: set[int] = field(default_factory=set)

    def tick(self, tensors: Sequence[int]) -> int:
        """The number of the step that updates these tensors, told by identity."""
        if self.step == 0 or not self.updated.isdisjoint(tensors):
            self.step += 1
            self.updated.clear()
        self.updated.update(tensors)
        return self.step


class _Copy:
    """A copy of rows in the host's memory, which devices write without anyone waiting for them.

    Args:
        buffers: memory with a row for each measured tensor, by device.
        devices: of the rows that are filled.
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
        """The rows, in memory that is not pinned; this waits for the devices."""
        for event in self._written:
            event.synchronize()
        if len(self._copies) == 1:
            (copy,) = self._copies.values()
            return copy.clone() if self._written else copy
        return torch.stack([self._copies[device][i] for i, device in enumerate(self._devices)])


@dataclass
class _Snapshot:
    """A copy of the rows that one measured call has filled, and which of them are of the tensors."""

    subject: str
    step: int
    tensors: Sequence[tuple[_Identity, MeasuredInput]]
    copy: _Copy | None
    there: Sequence[int]
    rows: Tensor = field(init=False)
    is_summed: bool = False  # over the processes that have pieces of a tensor

    def settle(self) -> None:
        """Have the rows at hand."""
        if self.copy is not None:
            self.rows, self.copy = self.copy.rows()[self.there], None

    def sum_pieces(self) -> None:
        """Make the rows those of whole tensors: all processes of a mesh call it."""
        if self.is_summed:
            return
        self.is_summed = True
        elements = torch.tensor([[measured.elements] for _, measured in self.tensors], dtype=self.rows.dtype)
        sizes = self.rows[:, SIZES_AT:][:, : len(SIZES)]
        sizes *= elements / sizes.sum(1, keepdim=True).clamp(min=1)  # of all elements, no longer of a sample
        self.rows = torch.cat([self.rows, elements], 1)
        in_pieces: dict[Pieces, list[int]] = {}
        for i, (_, measured) in enumerate(self.tensors):
            if measured.pieces is not None:
                in_pieces.setdefault(measured.pieces, []).append(i)
        for pieces, places in in_pieces.items():
            self.rows[places] = pieces.sum(self.rows[places])


class Meter:
    """A backend's measurements.

    Args:
        every: which steps are measured: those that it divides.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._clocks: dict[str, _Clock] = {}
        self._snapshots: list[_Snapshot] = []
        self._unsettled: deque[_Snapshot] = deque()
        self._identities = WeakTensorKeyDictionary()
        self._ranks: dict[str, int] = {}

    def learn(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Note the names and groups of what the optimizers hold."""
        for variable, optimizer in optimizers.items():
            prefix = f"{variable}." if len(optimizers) > 1 else ""
            groups = [i for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]
            for group, (name, parameter) in zip(groups, parameter_names(optimizer), strict=True):
                owner, where = TensorWeakRef(parameter), prefix + name
                found = [(parameter, _Identity(where, "parameter", group, owner, where))]
                for slot, tensor in state_tensors(optimizer.state.get(parameter, {})):
                    found.append((tensor, _Identity(f"{where}.{slot}", slot, group, owner, where)))
                for tensor, identity in found:
                    self._identities[tensor] = identity
                    self._ranks.setdefault(identity.name, len(self._ranks))

    def identity(self, tensor: Tensor, info: InputInfo) -> _Identity:
        """The identity of a measured tensor: as an optimizer knows it, or else as a graph's input."""
        kind = "parameter" if info.role is Role.PARAMETER else info.symbol
        known = self._identities.get(tensor)
        return known if known is not None else _Identity(info.name, kind, None, None, info.name)

    def clock(self, subject: str) -> _Clock:
        return self._clocks.setdefault(subject, _Clock())

    def keep(self, snapshot: _Snapshot) -> None:
        """Keep what has been measured; pinned memory is given back as devices have written to it."""
        self._snapshots.append(snapshot)
        self._unsettled.append(snapshot)
        while self._unsettled and (copy := self._unsettled[0].copy) is not None and copy.is_written:
            self._unsettled.popleft().settle()

    def forget(self) -> None:
        """Drop all measurements; the count of steps goes on."""
        self._snapshots.clear()
        self._unsettled.clear()

    def metrics(self, model: torch.nn.Module | None = None) -> Metrics:
        """All that has been measured; this waits for the devices. With DTensors, all processes call it.

        Args:
            model: whose names for parameters are used, rather than those that the optimizer knows.
        """
        own = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        several = len({snapshot.subject for snapshot in self._snapshots}) > 1
        steps: dict[int, dict[str, UpdateQuality]] = {}
        tensors: dict[str, MeasuredTensor] = {}
        while self._unsettled:
            self._unsettled.popleft().settle()
        for snapshot in self._snapshots:
            snapshot.sum_pieces()
            measured = steps.setdefault(snapshot.step, {})
            rows = zip(snapshot.tensors, snapshot.rows.tolist(), strict=True)
            for (identity, _), row in sorted(rows, key=lambda each: self._order(each[0][0])):
                tensor = _named(identity, own, snapshot.subject)
                name = f"{snapshot.subject}: {tensor.name}" if several else tensor.name
                tensors[name] = tensor
                measured[name] = _quality(row)
        return Metrics(dict(sorted(steps.items())), tensors)

    def _order(self, identity: _Identity) -> tuple[bool, int]:
        """A sort key: parameters first, and all in the order in which the optimizers have them."""
        return identity.kind != "parameter", self._ranks.get(identity.name, len(self._ranks))


def _quality(row: Sequence[float]) -> UpdateQuality:
    """The quality of an update, from its row, behind which stands how many elements there are."""
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
    """An input of a step that is measured.

    Attributes:
        index: of it among the step's arguments.
        info: what it is to the user.
        elements: how many it has.
        device: where it is.
        pieces: in which a DTensor is, of which this is one.
    """

    index: int
    info: InputInfo
    elements: int
    device: torch.device
    pieces: Pieces | None

    @classmethod
    def of(cls, state: StateTensor, index: int, info: InputInfo) -> MeasuredInput:
        """An input that the tensor of a program stands for."""
        pieces = None if info.tensor is None else pieces_of(info.tensor)
        return cls(index, info, int(state.value.numel()), state.value.device, pieces)


class Rows:
    """Memory for the sums of one compiled step, at the same addresses in every call."""

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
        """Whether what is launched where they are is recorded into a CUDA graph."""
        return any(map(is_captured, self._buffers))

    def copy(self) -> _Copy:
        """A copy of the sums, one row per tensor."""
        return _Copy(self._buffers, self._devices)


@takes_a_list
class MeteredStep:
    """A step that is measured every so often, in AOTAutograd's calling convention.

    Args:
        meter: keeps what is measured.
        subject: whose step it is.
        inputs: what is measured.
        rows: what the measured step fills, in the order of these.
        measured: the step with the sums.
        plain: the same step without; None if it is never called.
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
        # The records are not to keep tensors alive longer than the step needs them.
        self.inputs = [replace(each, info=replace(each.info, tensor=None)) for each in inputs]
        bound = [each.info.tensor for each in inputs if each.info.bound and each.info.tensor is not None]
        self.keys = tuple(map(id, bound))
        self.identities = self._identities(bound) if len(bound) == len(inputs) else None

    def __call__(self, arguments: list[Any], present: Present | None = None) -> Any:
        if self.rows.is_captured:
            raise InvalidOptionError(
                "metrics=True while a CUDA graph is captured: what its replays do would not be measured",
                where=self.subject,
                remedy="capture a step of a backend without metrics, or leave the capture out",
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
