"""The metrics of :meth:`CollageBackend.metrics`: how much of each update arrived, derived from a few sums.

Definitions, for the elements of a tensor, a group or a module, in one step. D is the intended update: the new
value computed in float32 less the whole old value, hi + lo. D̂ is the effective update: what is stored after
the step less what was stored before, once for hi alone, which is what the model computes with, and once for
hi + lo, which is what the optimizer goes on from. EDQ is the *effective descent quality* of Yu et al.,
Collage, ICML 2024 (arXiv:2405.03637), section 4::

    EDQ = <D / ||D||, D̂>          EDQ ratio = EDQ / ||D|| = <D, D̂> / <D, D>

The ratio is 1 where every update arrives and 0 where none does. Of a single low-precision tensor it may be
more: updates that are rounded up count for more than they are. Several tensors count as one, laid end to end.
See Note [Metrics] in ``numerics/update_sums.py`` for how the sums are computed, and how precisely.
"""

from __future__ import annotations

import csv
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, TypeVar

from collage_fx.errors import InvalidOptionError
from collage_fx.numerics import OCTAVES, ROW, SIZES


@dataclass(frozen=True)
class MeasuredTensor:
    """The tensor whose update was measured.

    Attributes:
        name: as the user knows it.
        kind: ``parameter``, or the name of an optimizer state, such as ``exp_avg_sq``.
        module: the module that its parameter belongs to; empty where the optimizer was not given names.
        group: number of its parameter group; None for a tensor that belongs to no parameter.
        step_of: whose step it is: the optimizer's class, numbered where a backend serves several.
    """

    name: str
    kind: str
    module: str
    group: int | None
    step_of: str


@dataclass(frozen=True)
class UpdateQuality:
    """The measurements of one step's update of one tensor, or of several.

    Attributes:
        elements: how many.
        intended: <D, D>.
        along_hi: <D, D̂> for hi alone.
        effective_hi: <D̂, D̂> for hi alone.
        along: <D, D̂> for hi + lo.
        effective: <D̂, D̂> for hi + lo.
        error: <lo, lo> after the step.
        asked: elements whose D is not zero.
        lost_hi: of these, those whose hi did not change.
        lost: of these, those whose hi + lo did not change.
        unchanged: elements whose hi did not change, D or no D.
        held: elements whose lo is not zero after the step.
        sizes: elements by the size of their D in halves of an ulp of hi: first those whose D is zero, then by
            the octaves between :attr:`size_edges`, the first and the last of which take what is beyond. From
            a sample of at most 1024 elements of each tensor, and so exact where it has no more.
    """

    #: Bounds of the octaves.
    size_edges: ClassVar[tuple[float, ...]] = tuple(2.0**k for k in (*OCTAVES, OCTAVES.stop))

    elements: int
    intended: float
    along_hi: float
    effective_hi: float
    along: float
    effective: float
    error: float
    asked: float
    lost_hi: float
    lost: float
    unchanged: float
    held: float
    sizes: tuple[float, ...]

    def __add__(self, other: UpdateQuality) -> UpdateQuality:
        """The update of the tensors of both, laid end to end."""
        numbers = [each.name for each in fields(self) if each.name != "sizes"]
        sizes = tuple(map(operator.add, self.sizes, other.sizes))
        return UpdateQuality(
            **{name: getattr(self, name) + getattr(other, name) for name in numbers}, sizes=sizes
        )

    @property
    def intended_norm(self) -> float:
        """The norm ||D|| of the intended update."""
        return math.sqrt(self.intended)

    @property
    def effective_norm(self) -> float:
        """The norm ||D̂|| of the effective update of hi + lo."""
        return math.sqrt(self.effective)

    @property
    def effective_norm_hi(self) -> float:
        """The norm ||D̂|| of the effective update of hi alone."""
        return math.sqrt(self.effective_hi)

    @property
    def edq(self) -> float:
        """Effective descent quality of hi + lo: <D / ||D||, D̂> (section 4); NaN where D is zero."""
        return _ratio(self.along, self.intended_norm)

    @property
    def edq_hi(self) -> float:
        """Effective descent quality of hi alone."""
        return _ratio(self.along_hi, self.intended_norm)

    @property
    def edq_ratio(self) -> float:
        """EDQ over its optimum, of hi + lo: <D, D̂> / <D, D>; NaN where D is zero."""
        return _ratio(self.along, self.intended)

    @property
    def edq_ratio_hi(self) -> float:
        """EDQ over its optimum, of hi alone."""
        return _ratio(self.along_hi, self.intended)

    @property
    def lost_share(self) -> float:
        """The share of the elements with an intended update whose hi + lo did not change: what is lost."""
        return _ratio(self.lost, self.asked)

    @property
    def lost_share_hi(self) -> float:
        """The share of the elements with an intended update whose hi did not change.

        Where there are error terms, these hold most of them.
        """
        return _ratio(self.lost_hi, self.asked)

    @property
    def imprecision(self) -> float:
        """The paper's imprecision percentage, as a share: elements of which hi did not change, of all.

        It counts updates that are held in lo, and elements whose intended update is zero.
        """
        return _ratio(self.unchanged, self.elements)

    @property
    def small_share(self) -> float:
        """The share of the elements with an intended update whose update is less than half an ulp of hi.

        These are what rounding to nearest takes away from a plain low-precision tensor (save that an element
        at a power of two moves towards zero by half as much). From a sample, as :attr:`sizes` is.
        """
        _, *octaves = self.sizes
        return _ratio(math.fsum(octaves[: OCTAVES.index(0)]), math.fsum(octaves))

    @property
    def error_norm(self) -> float:
        """The norm ||lo|| of the error terms after the step."""
        return math.sqrt(self.error)

    @property
    def error_share(self) -> float:
        """Share of the elements whose error term is not zero."""
        return _ratio(self.held, self.elements)

    def as_dict(self) -> dict[str, float]:
        """The derived values by name, for loggers."""
        return {name: getattr(self, name) for name in DERIVED}


#: The derived values that are written into files and given to loggers.
DERIVED = tuple(name for name, value in vars(UpdateQuality).items() if isinstance(value, property))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


#: The type of keys by which tensors are put into groups.
Key = TypeVar("Key")


class Metrics(Mapping[int, Mapping[str, UpdateQuality]]):
    """The measurements: step -> tensor's name -> :class:`UpdateQuality`. Steps are counted from 1.

    Args:
        steps: what has been measured.
        tensors: name -> whose update it is.
    """

    def __init__(
        self, steps: Mapping[int, Mapping[str, UpdateQuality]], tensors: Mapping[str, MeasuredTensor]
    ) -> None:
        self._steps = steps
        self.tensors = tensors

    def __getitem__(self, step: int) -> Mapping[str, UpdateQuality]:
        return self._steps[step]

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        if not self:
            return "Metrics(nothing measured yet)"
        steps = list(self)
        return f"Metrics({len(steps)} steps, {steps[0]} to {steps[-1]}, of {len(self.tensors)} tensors)"

    def by(
        self, key: Callable[[MeasuredTensor], Key], kind: str | None = "parameter"
    ) -> dict[int, dict[Key, UpdateQuality]]:
        """The measurements by step and by whatever tells tensors apart.

        Args:
            key: of a tensor.
            kind: as in :meth:`overall`; None for all.
        """
        kinds = {tensor.kind for tensor in self.tensors.values()}
        if kind is not None and kinds and kind not in kinds:
            raise InvalidOptionError(
                f"no tensor of kind {kind!r} has been measured",
                where="kind",
                remedy=f"use one of {', '.join(map(repr, sorted(kinds)))}",
            )
        result: dict[int, dict[Key, UpdateQuality]] = {}
        for step, values in self.items():
            for name, quality in values.items():
                tensor = self.tensors[name]
                if kind in (None, tensor.kind):
                    found = result.setdefault(step, {})
                    group = key(tensor)
                    found[group] = found[group] + quality if group in found else quality
        return result

    def overall(self, kind: str = "parameter") -> dict[int, UpdateQuality]:
        """The measurements by step, over all tensors of a kind.

        Args:
            kind: ``parameter``, or the name of a state: :attr:`MeasuredTensor.kind`. Updates of different
                kinds have no common unit.
        """
        by_step = self.by(lambda tensor: "", kind)
        return {step: values[""] for step, values in by_step.items()}

    def by_group(self, kind: str = "parameter") -> dict[int, dict[int | None, UpdateQuality]]:
        """The measurements by step and number of the parameter group, over all optimizers."""
        return self.by(lambda tensor: tensor.group, kind)

    def by_module(
        self, depth: int | None = None, kind: str = "parameter"
    ) -> dict[int, dict[str, UpdateQuality]]:
        """The measurements by step and module prefix.

        Args:
            depth: how many parts of the module's name count: of ``blocks.0.mlp``, 1 leaves ``blocks``; all of
                them if None.
            kind: as in :meth:`overall`.
        """
        return self.by(lambda tensor: ".".join(tensor.module.split(".")[:depth]), kind)

    def by_kind(self) -> dict[int, dict[str, UpdateQuality]]:
        """The measurements by step and kind: ``parameter``, ``exp_avg_sq``, ..."""
        return self.by(lambda tensor: tensor.kind, None)

    def scalars(self, prefix: str = "collage/") -> dict[str, float]:
        """The last measured step as ``{"collage/edq_ratio": ...}``, for any logger; empty before it.

        Over all parameters, then over each module's parameters (``collage/blocks.0.mlp/edq_ratio``).
        """
        if not self:
            return {}
        last = list(self)[-1]
        found: dict[str, float] = {}
        for module, quality in {"": self.overall().get(last), **self.by_module().get(last, {})}.items():
            if quality is not None and (module or f"{prefix}edq" not in found):
                where = f"{prefix}{module}/" if module else prefix
                found.update({f"{where}{name}": value for name, value in quality.as_dict().items()})
        return found

    def rows(self) -> list[dict[str, object]]:
        """One plain dictionary per step and tensor: whose it is, the derived values, the sums."""
        return [
            {
                "step": step,
                "tensor": name,
                **{key: value for key, value in vars(self.tensors[name]).items() if key != "name"},
                **quality.as_dict(),
                **{key: value for key, value in vars(quality).items() if key != "sizes"},
                **dict(zip(SIZES, quality.sizes, strict=True)),
            }
            for step, values in self.items()
            for name, quality in values.items()
        ]

    def to_csv(self, path: str | Path) -> Path:
        """Write :meth:`rows` as a table; returns the path."""
        path = Path(path)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows())
        return path

    def to_json(self, path: str | Path) -> Path:
        """Write :meth:`rows` as a list of objects, NaN as null; returns the path."""
        path = Path(path)
        rows = [{key: _plain(value) for key, value in row.items()} for row in self.rows()]
        path.write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return path


def _plain(value: object) -> object:
    """A value as JSON can write it: NaN and infinities as None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


#: The columns of :meth:`Metrics.to_csv`.
COLUMNS = ("step", "tensor", "kind", "module", "group", "step_of", *DERIVED, "elements", *ROW)
