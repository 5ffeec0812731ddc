"""Metrics of :meth:`CollageBackend.metrics`: the share of each update that takes effect, from a few sums.

Definitions, for the elements of a tensor, a group or a module, in one step. D is the intended update: the new
value computed in float32 minus the whole old value, hi + lo. D̂ is the effective update: the stored value
after the step minus the stored value before. There are two of it: for hi alone, which the model computes
with, and for hi + lo, from which the optimizer continues. EDQ is the *effective descent quality* of Yu et
al., Collage, ICML 2024 (arXiv:2405.03637), section 4::

    EDQ = <D / ||D||, D̂>          EDQ ratio = EDQ / ||D|| = <D, D̂> / <D, D>

The ratio is 1 if every update takes effect and 0 if none does. For a single low-precision tensor it may
exceed 1, because updates that are rounded up count more. Several tensors are treated as if concatenated. Note
[Metrics] in ``rows.py`` says how the sums are computed, and how precise they are.
"""

from __future__ import annotations

import csv
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, TypeVar, cast

from collage_fx.errors import InvalidOptionError
from collage_fx.metrics.rows import OCTAVES, ROW, SIZES


@dataclass(frozen=True)
class MeasuredTensor:
    """Tensor whose update was measured.

    Attributes:
        name: the user's name of the tensor.
        kind: ``parameter``, or the name of an optimizer state, such as ``exp_avg_sq``.
        module: the module that its parameter belongs to; empty if the optimizer was created without names.
        group: number of its parameter group; None for a tensor that belongs to no parameter.
        step_of: class of the optimizer, numbered if the backend is used by several.
    """

    name: str
    kind: str
    module: str
    group: int | None
    step_of: str


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _root(name: str, doc: str) -> float:
    """Return a property, the root of an attribute; to a type checker it is its value."""
    return cast(float, property(lambda quality: math.sqrt(getattr(quality, name)), doc=doc))


def _share(part: str, whole: str, doc: str) -> float:
    """Return a property, the ratio of two attributes; NaN if the second is zero."""
    ratio = property(lambda quality: _ratio(getattr(quality, part), getattr(quality, whole)), doc=doc)
    return cast(float, ratio)


@dataclass(frozen=True)
class UpdateQuality:
    """Measurements of the update of one tensor, or of several, in a step.

    Attributes:
        intended: <D, D>.
        along_hi, effective_hi: <D, D̂> and <D̂, D̂> for hi alone.
        along, effective: <D, D̂> and <D̂, D̂> for hi + lo.
        error: <lo, lo> after the step.
        asked: number of elements with D ≠ 0.
        lost_hi, lost: number of elements with D ≠ 0 whose hi, or whose hi + lo, did not change.
        unchanged: number of elements whose hi did not change, for any D.
        held: number of elements whose lo is not zero after the step.
        sizes: histogram of |D| in units of half an ulp of hi: first the number of elements with D = 0, then
            one number per octave between :attr:`size_edges`; the first and last octave include everything
            beyond.

    Sums and counts are estimated from at most 1024 elements of each tensor: exact for smaller tensors.
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

    def __repr__(self) -> str:
        """Return the number of elements and the derived values that answer most questions."""
        names = ("edq_ratio", "lost_share", "lost_share_hi", "small_share", "error_share")
        values = "".join(f", {name}={getattr(self, name):.4g}" for name in names)
        return f"UpdateQuality(elements={self.elements:,}{values})"

    def __add__(self, other: UpdateQuality) -> UpdateQuality:
        """Return the measurements of both updates together, as if their tensors were concatenated."""
        numbers = [each.name for each in fields(self) if each.name != "sizes"]
        sizes = tuple(map(operator.add, self.sizes, other.sizes))
        sums = {name: getattr(self, name) + getattr(other, name) for name in numbers}
        return UpdateQuality(**sums, sizes=sizes)

    intended_norm = _root("intended", "Norm ||D|| of the intended update.")
    effective_norm = _root("effective", "Norm ||D̂|| of the effective update of hi + lo.")
    effective_norm_hi = _root("effective_hi", "Norm ||D̂|| of the effective update of hi alone.")
    edq = _share(
        "along", "intended_norm", "Effective descent quality of hi + lo: <D / ||D||, D̂> (section 4)."
    )
    edq_hi = _share("along_hi", "intended_norm", "Effective descent quality of hi alone.")
    edq_ratio = _share("along", "intended", "EDQ over its optimum, for hi + lo: <D, D̂> / <D, D>.")
    edq_ratio_hi = _share("along_hi", "intended", "EDQ over its optimum, for hi alone.")
    lost_share = _share("lost", "asked", "Share of elements with D ≠ 0 whose hi + lo did not change.")
    lost_share_hi = _share(
        "lost_hi",
        "asked",
        "Share of elements with D ≠ 0 whose hi did not change; lo holds most of these updates.",
    )
    imprecision = _share(
        "unchanged",
        "elements",
        "Imprecision percentage of the paper, as a share: elements with unchanged hi, over all elements. It "
        "includes elements whose update is held in lo, and elements with D = 0.",
    )

    @property
    def small_share(self) -> float:
        """Share of the elements with D ≠ 0 whose D is smaller than half an ulp of hi.

        Rounding to nearest loses these updates in a plain low-precision tensor (except that an element at a
        power of two can move towards zero by half as much). Estimated from a sample, like :attr:`sizes`.
        """
        _, *octaves = self.sizes
        return _ratio(math.fsum(octaves[: OCTAVES.index(0)]), math.fsum(octaves))

    error_norm = _root("error", "Norm ||lo|| of the error terms after the step.")
    error_share = _share("held", "elements", "Share of the elements whose error term is not zero.")

    def as_dict(self) -> dict[str, float]:
        """Return the derived values by name, for loggers."""
        return {name: getattr(self, name) for name in DERIVED}


#: Names of the derived values that are written to files and given to loggers.
DERIVED = tuple(name for name, value in vars(UpdateQuality).items() if isinstance(value, property))

#: Type of the keys that group tensors.
Key = TypeVar("Key")


class Metrics(Mapping[int, Mapping[str, UpdateQuality]]):
    """Measurements: step -> tensor's name -> :class:`UpdateQuality`. Steps are counted from 1."""

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
        told = f"{len(steps)} steps, {steps[0]} to {steps[-1]}, of {len(self.tensors)} tensors"
        kinds = {each.kind for each in self.tensors.values()}
        last = self.overall().get(steps[-1]) if "parameter" in kinds else None
        return f"Metrics({told}{'' if last is None else f'; the last of parameters: {last}'})"

    def by(
        self, key: Callable[[MeasuredTensor], Key], kind: str | None = "parameter"
    ) -> dict[int, dict[Key, UpdateQuality]]:
        """Return the measurements by step and by a key of the tensors.

        Args:
            key: function of a tensor; measurements with equal keys are added.
            kind: as in :meth:`overall`; None for all kinds.
        """
        kinds = {tensor.kind for tensor in self.tensors.values()}
        if kind is not None and kinds and kind not in kinds:
            met = f"no tensor of kind {kind!r} has been measured"
            remedy = f"use one of {', '.join(map(repr, sorted(kinds)))}"
            raise InvalidOptionError(met, where="kind", remedy=remedy)
        result: dict[int, dict[Key, UpdateQuality]] = {}
        for step, values in self.items():
            for name, quality in values.items():
                if kind in (None, self.tensors[name].kind):
                    found, group = result.setdefault(step, {}), key(self.tensors[name])
                    found[group] = found[group] + quality if group in found else quality
        return result

    def overall(self, kind: str = "parameter") -> dict[int, UpdateQuality]:
        """Return the measurements by step, over all tensors of a kind.

        Args:
            kind: ``parameter``, or the name of a state: :attr:`MeasuredTensor.kind`. Updates of different
                kinds have no common unit.
        """
        return {step: values[""] for step, values in self.by(lambda tensor: "", kind).items()}

    def by_group(self, kind: str = "parameter") -> dict[int, dict[int | None, UpdateQuality]]:
        """Return the measurements by step and number of the parameter group, over all optimizers."""
        return self.by(lambda tensor: tensor.group, kind)

    def by_module(
        self, depth: int | None = None, kind: str = "parameter"
    ) -> dict[int, dict[str, UpdateQuality]]:
        """Return the measurements by step and module prefix.

        Args:
            depth: number of parts of the module's name to use: 1 turns ``blocks.0.mlp`` into ``blocks``; None
                uses all parts.
            kind: as in :meth:`overall`.
        """
        return self.by(lambda tensor: ".".join(tensor.module.split(".")[:depth]), kind)

    def by_kind(self) -> dict[int, dict[str, UpdateQuality]]:
        """Return the measurements by step and kind: ``parameter``, ``exp_avg_sq``, ..."""
        return self.by(lambda tensor: tensor.kind, None)

    def scalars(self, prefix: str = "collage/") -> dict[str, float]:
        """Return the last measured step as ``{"collage/edq_ratio": ...}``, for any logger.

        First for all parameters together, then for each module's parameters
        (``collage/blocks.0.mlp/edq_ratio``). Empty if no step was measured.
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
        """Return a dictionary per step and tensor: the tensor's identity, the derived values, the sums."""
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
        """Write :meth:`rows` as a CSV table; return the path."""
        with (path := Path(path)).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows())
        return path

    def to_json(self, path: str | Path) -> Path:
        """Write :meth:`rows` as a JSON list of objects, NaN as null; return the path."""
        path = Path(path)
        rows = [{key: _plain(value) for key, value in row.items()} for row in self.rows()]
        path.write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return path


def _plain(value: object) -> object:
    """Return a value that JSON can hold: None for NaN and infinities."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


#: Columns of :meth:`Metrics.to_csv`.
COLUMNS = ("step", "tensor", "kind", "module", "group", "step_of", *DERIVED, "elements", *ROW)
