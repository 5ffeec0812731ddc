"""Tensors that the program writes to between two steps: their error terms belong to values that are gone.

Note [Written between two steps]
--------------------------------
Averages of local SGD, EMA weights that are swapped in, clamps and pruning write to hi and know of no error
terms. So tensors are checked before the next step, and before their error terms are read or saved: the
version counter of each parameter and, as a write through ``.data`` does not count, four elements of each on a
CPU with a C++ compiler. On a GPU, where the host would wait for them, such writes are not detected.

The first time, nobody can tell which elements have been written: all of the parameter's error terms become
zero, half an ulp at most. From then on a copy of that parameter is kept, two bytes an element, and unchanged
elements keep their error terms.

Other methods of an optimizer, such as the update of a Hessian, write to state eagerly, in the storage format.
The version counters of state show that, too; the user is told the first time. As such methods update the
state of all parameters, an eighth of the state is checked between two steps, in turn.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from operator import is_

from torch import Tensor
from torch.nn import Parameter

from collage_fx.codegen import PEEKED, Peek, is_library_loaded
from collage_fx.errors import warn
from collage_fx.state.claims import some
from collage_fx.state.error_terms import ErrorTermRecord, next_event, record_of, same_elements
from collage_fx.state.packed import PackedTensor, is_packed
from collage_fx.torch_compat import is_in_host_memory, local_tensor, version_of

#: Number of steps in which all state tensors are checked, a part each time.
TURNS = 8


class WriteDetector:
    """Detector of writes to an optimizer's parameters, and low-precision state, since its last step."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        state: Sequence[tuple[str, Tensor]],
        subject: str,
        detectors: Callable[[], Iterable[WriteDetector]],
    ) -> None:
        self.names = [name for name, _ in parameters]
        self.tensors = [tensor for _, tensor in parameters]
        self._positions = {id(tensor): i for i, tensor in enumerate(self.tensors)}
        # Lists that stay: reference counts tell whether the program holds a tensor.
        self.state = [[tensor for _, tensor in state[i::TURNS]] for i in range(min(TURNS, len(state)))]
        self._state_names = [[name for name, _ in state[i::TURNS]] for i in range(len(self.state))]
        self._turn = 0
        self._looked_at: list[Tensor] = []
        self._state_versions: list[int] = []
        self._is_state_told = False
        self._subject, self._detectors = subject, detectors
        self._copies: dict[int, Tensor] = {}
        self._versions: list[int] = []
        self._noted_at = 0
        self._elements: array[int] | None = None
        self._peek: Peek | None = None
        self._strides: list[tuple[int, ...]] = []

    def take_over(self, other: WriteDetector) -> bool:
        """Take over the knowledge of an earlier detector; return whether it had the same parameters."""
        self._is_state_told = other._is_state_told
        is_of_same = len(self.tensors) == len(other.tensors) and all(map(is_, self.tensors, other.tensors))
        if is_of_same:
            self._copies, self._peek, self._strides = other._copies, other._peek, other._strides
            self._versions, self._elements = other._versions, other._elements
            self._noted_at = other._noted_at
        return is_of_same

    def note(self) -> None:
        self._leave_out_packed()
        self._elements = self._sampled()
        asked = self.tensors if self._elements is None and is_library_loaded() else []
        if asked and all(is_in_host_memory(each) and each.is_contiguous() and each.numel() for each in asked):
            self._peek = Peek(self.tensors)
            self._strides = [each.stride() for each in self.tensors]
            self._elements = self._sampled()
        self._versions, self._noted_at = [*map(version_of, self.tensors)], next_event()
        if self.state:
            self._turn = (self._turn + 1) % len(self.state)
            self._looked_at = self.state[self._turn]
            self._state_versions = _versions_of(self._looked_at)
        for i, copy in self._copies.items():
            copy.copy_(local_tensor(self.tensors[i].detach()))

    def _leave_out_packed(self) -> None:
        """Leave out weights that are packed by now: a write unpacks them, and the next step compares."""
        if {*map(type, self.tensors)} <= _PLAIN or not any(map(is_packed, self.tensors)):
            return
        kept = [i for i, each in enumerate(self.tensors) if not isinstance(each, PackedTensor)]
        self.names, self.tensors = [self.names[i] for i in kept], [self.tensors[i] for i in kept]
        self._positions = {id(tensor): i for i, tensor in enumerate(self.tensors)}
        self._copies = {new: self._copies[old] for new, old in enumerate(kept) if old in self._copies}
        self._versions = [self._versions[i] for i in kept] if self._versions else []
        self._peek = self._elements = None

    def _position_of(self, tensor: Tensor) -> int | None:
        return None if isinstance(tensor, PackedTensor) else self._positions.get(id(tensor))

    def may_have_left(self, tensor: Tensor) -> bool:
        """Return whether the last step may have been the last to write to a tensor; True for state."""
        i = self._position_of(tensor)
        if i is not None and self._versions:
            return self._is_as_left(i)
        return any(each is tensor for part in self.state for each in part)

    def hi_of_last_step(self, tensor: Tensor) -> Tensor | None:
        """Return the value that the last step has left in a parameter: a copy, or the unchanged parameter.

        None if the parameter has been written to and there is no copy yet: from the next step on, there is.
        """
        i = self._position_of(tensor)
        if i is None or not self._versions:
            return None
        hi, record = local_tensor(tensor.detach()), record_of(tensor)
        if self.may_have_left(tensor) or (record is not None and self._is_accepted(i, record)):
            return hi
        if i in self._copies and self._copies[i].shape == hi.shape:
            return self._copies[i]
        self._copies[i] = hi.clone()
        return None

    def _is_of_another(self, tensor: Tensor) -> bool:
        """Return whether another optimizer's step may have been the last to write to a tensor."""
        return any(each.may_have_left(tensor) for each in self._detectors() if each is not self)

    def _sampled(self) -> array[int] | None:
        """Return sampled elements of all parameters; None if they are elsewhere, or have other sizes now."""
        return None if self._peek is None else self._peek(self.tensors)

    def _is_as_left(self, i: int) -> bool:
        """Return whether a parameter is as the last step has left it."""
        one = self.tensors[i]
        if version_of(one) != self._versions[i]:
            return False
        is_of_size = self._peek is not None and self._peek.lengths[i] == one.numel()
        return self._has_same_elements(i, Peek([one])([one]) if is_of_size else None)

    def _has_same_elements(self, i: int, now: array[int] | None) -> bool:
        """Return whether a parameter's sampled elements are the same; True if its layout has changed."""
        if self._elements is None or now is None or self.tensors[i].stride() != self._strides[i]:
            return True
        return self._elements[_part(i)] == now

    def _is_accepted(self, i: int, record: ErrorTermRecord) -> bool:
        """Return whether a parameter's error terms have been declared to be right since the last step."""
        return record.accepted == version_of(self.tensors[i]) and record.accepted_at > self._noted_at

    def settle(self, *, is_in_place: bool) -> None:
        """Drop the error terms of values that are gone; warn once for each parameter.

        ``is_in_place`` tells whether the state tensors are the same objects.
        """
        if is_in_place and self._state_versions:
            of_state = _versions_of(self._looked_at)
            if of_state != self._state_versions:
                self._settle_state(of_state)
        self._leave_out_packed()
        versions = [*map(version_of, self.tensors)]
        elements = self._sampled()
        if not self._versions or (versions == self._versions and elements == self._elements):
            return
        as_left = [
            version == before and self._has_same_elements(i, elements and elements[_part(i)])
            for i, (version, before) in enumerate(zip(versions, self._versions, strict=True))
        ]
        self._settle_parameters([i for i, is_same in enumerate(as_left) if not is_same])

    def settle_one(self, tensor: Tensor) -> None:
        """Drop the error terms of a parameter if it has been written to, before they are read."""
        i = self._position_of(tensor)
        if i is None or not self._versions or self._is_as_left(i):
            return
        self._settle_parameters([i])
        self._versions[i] = version_of(tensor)
        if i in self._copies:
            self._copies[i].copy_(local_tensor(tensor.detach()))

    def _settle_parameters(self, written: Sequence[int]) -> None:
        """Drop the error terms of parameters that have been written to; warn once for each."""
        new = []
        for i in written:
            record = record_of(self.tensors[i])
            if record is None or record.claim is not None or self._is_accepted(i, record):
                continue
            if self._is_of_another(self.tensors[i]):
                continue
            hi = local_tensor(self.tensors[i].detach())
            if i in self._copies and self._copies[i].shape == hi.shape:
                record.keep_where(same_elements(self._copies[i], hi))
            else:
                record.clear()
                self._copies[i] = hi.clone()
                new.append(self.names[i])
        if new:
            warn(
                f"{some(new)} of {self._subject}: written to between two steps, outside of a step. Their "
                "error terms belonged to the old values, and are now zero; later writes set only those of "
                "changed elements to zero. To write a value with all its bits, call "
                "collage_fx.assign(parameter, value); to read one, collage_fx.full_value(parameter). If a "
                "method of the optimizer writes, compile it, too"
            )

    def _settle_state(self, versions: Sequence[int]) -> None:
        """Drop the error terms of state that has been written to; warn if the values are not zeros."""
        written = []
        names = self._state_names[self._turn]
        looked_at = zip(names, self._looked_at, versions, self._state_versions, strict=True)
        for name, tensor, now, before in looked_at:
            if now == before or _PACKED in (now, before) or self._is_of_another(tensor):
                continue
            record = record_of(tensor)
            if record is not None and (record.claim is not None or record.accepted == now):
                continue
            if record is not None and record.format.keeps_error:
                record.clear()
            if local_tensor(tensor.detach()).any():
                written.append(name)
        if written and not self._is_state_told:
            self._is_state_told = True
            warn(
                f"{some(written)} of {self._subject}: written to between two steps, "
                "without compensation. If another method of the optimizer does that, have it compiled, too: "
                "method = torch.compile(optimizer.method, backend=collage_fx.backend_of(optimizer))"
            )


#: Classes of most tensors, which are asked for in each step.
_PLAIN = {Tensor, Parameter}

#: Version of a packed tensor, whose version counter is not read, as that would decode it.
_PACKED = -1


def _part(i: int) -> slice:
    """Return where the sampled elements of the i-th parameter are."""
    return slice(PEEKED * i, PEEKED * (i + 1))


def _versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the version counters of tensors, ``_PACKED`` for packed tensors."""
    if {*map(type, tensors)} <= _PLAIN:
        return [*map(version_of, tensors)]
    return [_PACKED if isinstance(each, PackedTensor) else version_of(each) for each in tensors]
