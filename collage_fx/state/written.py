"""Tensors that the program writes to between two steps: their error terms are of values that are gone.

Note [Written between two steps]
--------------------------------
Averages of local SGD, EMA weights that are swapped in, clamps and pruning write to hi and know of no error
term. So what a step has left is looked at before the next one: the version counter of each parameter and, as
a write through ``.data`` does not count, four elements of each on a CPU with a C++ compiler. That takes some
10 microseconds for 148 parameters. On a GPU elements would have to be waited for: there writes through
``.data`` are not seen.

Which elements have been written, nobody can tell the first time: all of the parameter's error terms become
zero, half an ulp at most. From then on a copy of that parameter is kept, two bytes an element, and elements
that are as the step has left them keep their error terms: a clamp in every step costs nothing of the rest.

State is written to by other methods of an optimizer, such as the update of a Hessian: eagerly, so its format
rounds that. The version counters of state tell, too; the first time they do, the user is told. As such
methods update what all parameters have, an eighth of it is looked at between two steps, in turn.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Sequence
from operator import is_

from torch import Tensor

from collage_fx.codegen import PEEKED, Peek, is_library_loaded
from collage_fx.state.claims import some
from collage_fx.state.error_terms import expansion_of, same_elements
from collage_fx.state.packed import PackedTensor
from collage_fx.torch_compat import local_tensor, version_of

#: Between two steps one of so many tensors of state is looked at.
TURNS = 8


class Written:
    """Sees which of an optimizer's tensors have been written to since its last step.

    Args:
        parameters: with error terms, by name.
        state: of low precision, by name.
        subject: the optimizer, for a warning.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, Tensor]], state: Sequence[tuple[str, Tensor]], subject: str
    ) -> None:
        self.names = [name for name, _ in parameters]
        self.tensors = [tensor for _, tensor in parameters]
        parts = [state[i::TURNS] for i in range(min(TURNS, len(state)))]
        self._state_names = [[name for name, _ in part] for part in parts]
        # In lists for good: whether the program holds a tensor is told by the references to it.
        self._state = [[tensor for _, tensor in part] for part in parts]
        self._turn = 0
        self._looked_at: list[Tensor] = []
        self._state_versions: list[int] = []
        self._is_state_told = False
        self._subject = subject
        self._copies: dict[int, Tensor] = {}
        self._versions: list[int] = []
        self._elements: array[int] | None = None
        self._peek: Peek | None = None
        self._strides: list[tuple[int, ...]] = []

    def take_over(self, other: Written) -> None:
        """Go on from another one's knowledge, if it is of the same parameters."""
        self._is_state_told = other._is_state_told
        is_of_same = len(self.tensors) == len(other.tensors)
        if is_of_same and all(map(is_, self.tensors, other.tensors)):
            self._copies, self._peek, self._strides = other._copies, other._peek, other._strides
            self._versions, self._elements = other._versions, other._elements

    def note(self) -> None:
        """Note what a step has left."""
        if self._peek is None and is_library_loaded() and _are_in_host_memory(self.tensors):
            self._peek = Peek(self.tensors)
            self._strides = [each.stride() for each in self.tensors]
        self._versions = [*map(version_of, self.tensors)]
        if self._state:
            self._turn = (self._turn + 1) % len(self._state)
            self._looked_at = self._state[self._turn]
            self._state_versions = _versions_of(self._looked_at)
        self._elements = None if self._peek is None else self._peek(self.tensors)
        for i, copy in self._copies.items():
            copy.copy_(local_tensor(self.tensors[i].detach()))

    def may_have_left(self, tensor: Tensor) -> bool:
        """Whether the optimizer's last step may have been the last to write to a tensor; to state, always."""
        for i, (each, version) in enumerate(zip(self.tensors, self._versions, strict=False)):
            if each is tensor:
                now = None if self._peek is None else self._peek(self.tensors)
                return version_of(tensor) == version and self._has_same_elements(i, self._elements, now)
        return any(each is tensor for part in self._state for each in part)

    def _has_same_elements(self, i: int, before: array[int] | None, now: array[int] | None) -> bool:
        """Whether those of a parameter are the same; of one that is laid out anew it is not known."""
        if before is None or now is None or self.tensors[i].stride() != self._strides[i]:
            return True
        part = slice(PEEKED * i, PEEKED * (i + 1))
        return before[part] == now[part]

    def settle(self, is_written_elsewhere: Callable[[Tensor], bool], *, is_in_place: bool) -> None:
        """Drop the error terms of values that are gone, with a warning for each parameter once.

        Args:
            is_written_elsewhere: whether the last to write to a tensor was another compensated step.
            is_in_place: whether the optimizer's state is what it was.
        """
        if is_in_place and self._state_versions:
            of_state = _versions_of(self._looked_at)
            if of_state != self._state_versions:
                self._settle_state(of_state, is_written_elsewhere)
        versions = [*map(version_of, self.tensors)]
        elements = None if self._peek is None else self._peek(self.tensors)
        if not self._versions or (versions == self._versions and elements == self._elements):
            return
        new = []
        for i, tensor in enumerate(self.tensors):
            expansion = expansion_of(tensor)
            if expansion is None or expansion.claim is not None or expansion.accepted == versions[i]:
                continue
            is_same = self._has_same_elements(i, self._elements, elements)
            if (versions[i] == self._versions[i] and is_same) or is_written_elsewhere(tensor):
                continue
            hi = local_tensor(tensor.detach())
            if i in self._copies and self._copies[i].shape == hi.shape:
                expansion.keep_where(same_elements(self._copies[i], hi))
            else:
                expansion.clear()
                self._copies[i] = hi.clone()
                new.append(self.names[i])
        if new:
            warnings.warn(
                f"collage_fx: {some(new)} of {self._subject} has been written to between two steps, where "
                "its error terms are of the values before: this time all of them begin again from zero, "
                "later those of elements that have other values. collage_fx.assign(parameter, value) writes "
                "a value with all its bits, and collage_fx.full_value(parameter) reads one. A method of the "
                "optimizer that writes to it has to be compiled, too",
                stacklevel=2,
            )

    def _settle_state(self, versions: Sequence[int], is_written_elsewhere: Callable[[Tensor], bool]) -> None:
        """Drop the error terms of state that has been written to; tell of values that are not zeros."""
        written = []
        names = self._state_names[self._turn]
        looked_at = zip(names, self._looked_at, versions, self._state_versions, strict=True)
        for name, tensor, now, before in looked_at:
            if now == before or _PACKED in (now, before) or is_written_elsewhere(tensor):
                continue
            expansion = expansion_of(tensor)
            if expansion is not None:
                if expansion.claim is not None or expansion.accepted == now:
                    continue
                if expansion.format.keeps_error:
                    expansion.clear()
            if local_tensor(tensor.detach()).any():
                written.append(name)
        if written and not self._is_state_told:
            self._is_state_told = True
            warnings.warn(
                f"collage_fx: {some(written)} of {self._subject} has been written to between two steps, "
                "without compensation. If another method of the optimizer does that, have it compiled, too: "
                "method = torch.compile(optimizer.method, backend=collage_fx.backend_of(optimizer))",
                stacklevel=2,
            )


#: In place of the version of a packed tensor, which would be decoded for it.
_PACKED = -1


def _versions_of(tensors: Sequence[Tensor]) -> list[int]:
    packed = {kind for kind in {*map(type, tensors)} if issubclass(kind, PackedTensor)}
    if not packed:
        return [*map(version_of, tensors)]
    return [_PACKED if type(each) in packed else version_of(each) for each in tensors]


def _are_in_host_memory(tensors: Sequence[Tensor]) -> bool:
    return all(
        each is local_tensor(each) and each.device.type == "cpu" and each.is_contiguous() and each.numel()
        for each in tensors
    )
