"""Tool ``checkup``: tell from the files of a checkpoint whether bf16 or fp16 has frozen its weights.

Weights are judged by their numbers alone, so it does not matter which program has written them. The evidence:

- pile-ups at exact powers of two: Note [Pile-ups];
- vectors, such as the weights of norms, of which many entries have the constant of an initializer, and others
  are far from it;
- with an earlier checkpoint: large weights that did not move, although small weights of the same tensor moved
  farther than the half ulp of the large ones.

A tensor that is constant as a whole is no evidence: somebody may have frozen it on purpose.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collage_fx.errors import InvalidOptionError
from collage_fx.numerics import STORAGE_FORMATS, short_name
from collage_tools.checkup.code_counts import (
    CODES,
    MAGNITUDES,
    Moves,
    PileUp,
    as_16_bits,
    count_codes,
    count_moves,
    count_stuck,
    is_table,
    magnitudes,
    moves,
    pile_ups,
    power_sums,
    unevenness,
    values,
)
from collage_tools.checkup.files import checkpoint_tensors, load_plain
from collage_tools.checkup.page import json_of, page_of, text_of

#: Verdicts. ROUNDED_AWAY is the finding; NO_SIGN is for master weights, error terms and stochastic rounding.
ROUNDED_AWAY = "trained without master weights"
NO_SIGN = "no sign of lost updates"
CANNOT_TELL = "cannot tell"

#: Share of a tensor that has one value, and fewest entries, from which it is the constant of an initializer.
LEAST_CONSTANT, FEWEST_CONSTANT = 0.05, 8
#: Shares of a vector at its constant, and far from it, that are a mixture; and least ratio of the entries at
#: the constant to those at the two numbers next to it.
MIXED_AT, MIXED_FAR, MIXED_PEAK = 0.2, 0.1, 5.0
#: Distance from the constant, relative to it, that is far.
FAR = 2.0**-5
#: Fewest entries of a vector, and fewest vectors, that are judged as mixtures.
FEWEST_IN_VECTOR, FEWEST_VECTORS = 32, 2
#: Least overlap of two vectors' entries that have left the constant, from which a mask has chosen them: the
#: number in both over the number in any. Independent vectors have at most 2/3: MIXED_AT of the entries stay.
ONE_MASK = 0.8
#: Least share of moves that are missing between two checkpoints.
LEAST_LOST = 0.01
#: Unevenness of a matrix, in standard deviations, and share of a vector that has left its constant, from
#: which it counts as trained.
TRAINED, LEFT_CONSTANT = 8.0, 0.5
#: Limits of values that are around 1.
AROUND_ONE = (0.25, 4.0)
#: Fewest powers of two that have to be tested for the verdict NO_SIGN.
FEWEST_POWERS = 3
#: Largest share of one code in a matrix that is judged; more is a mask, or a constant.
MOST_OF_ONE_CODE = 0.25


@dataclass(frozen=True)
class TensorCheck:
    """Counts of one tensor.

    Attributes:
        name, shape: name and shape in the checkpoint.
        dtype: stored dtype.
        held: bfloat16 or float16 if every value is a number of it, else the stored dtype.
        constant: value of an initializer that at least 5 % of the entries have, or None.
        at_constant: number of entries with that value.
        has_left: mask of the entries that have left the constant, of a vector that is mixed; else None.
        is_trained: whether the tensor is surely not as an initializer draws or fills it.
        zeros, not_finite: number of zeros, and of infinities and NaN.
        stuck: number of entries that no update of the given learning rate can move, or None.
        moves: comparison with the earlier checkpoint, or None.
        at_powers: sums for pile-ups, or None for vectors, masks and tables of numbers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    held: torch.dtype
    constant: float | None = None
    at_constant: int = 0
    has_left: Tensor | None = field(default=None, repr=False, compare=False)
    is_trained: bool = False
    zeros: int = 0
    not_finite: int = 0
    stuck: int | None = None
    moves: Moves | None = None
    at_powers: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def entries(self) -> int:
        return math.prod(self.shape)

    @property
    def is_mixed(self) -> bool:
        """Whether a vector has entries at the constant and far from it, but few between."""
        return self.has_left is not None

    @property
    def is_judged(self) -> bool:
        return self.held in STORAGE_FORMATS

    @property
    def is_vector(self) -> bool:
        return is_vector(self.shape)


@dataclass(frozen=True)
class Group:
    """Tensors whose names differ in numbers only, with equal dtypes: ``blocks.*.norm.weight``."""

    name: str
    tensors: tuple[TensorCheck, ...]

    @property
    def entries(self) -> int:
        return sum(each.entries for each in self.tensors)

    @property
    def constant(self) -> float | None:
        """Constant of the first tensor with a constant."""
        return next((each.constant for each in self.tensors if each.constant is not None), None)

    @property
    def at_constant(self) -> float:
        """Share of the entries at :attr:`constant`."""
        wanted = self.constant
        return sum(each.at_constant for each in self.tensors if each.constant == wanted) / max(
            1, self.entries
        )

    @property
    def stuck(self) -> float | None:
        """Share of the entries that no update of the learning rate can move."""
        counts = [each.stuck for each in self.tensors if each.stuck is not None]
        return sum(counts) / max(1, self.entries) if counts else None

    @property
    def moved(self) -> float | None:
        """Share of the entries that differ from the earlier checkpoint."""
        found = [each.moves for each in self.tensors if each.moves is not None]
        return (
            sum(each.moved for each in found) / max(1, sum(each.entries for each in found)) if found else None
        )

    @property
    def expected(self) -> float | None:
        """Least share of the judged entries that should have moved."""
        found = [each.moves for each in self.tensors if each.moves is not None and each.moves.judged]
        judged = sum(each.judged for each in found)
        return sum(each.judged_expected for each in found) / judged if judged else None

    @property
    def pile_up(self) -> PileUp | None:
        """Most significant pile-up of the tensors together."""
        return strongest(self.tensors)


@dataclass(frozen=True)
class SecondMoments:
    """State of an optimizer that has to decay: a moving average of squares.

    Attributes:
        name: name in the optimizer's state, such as ``exp_avg_sq``.
        dtype: dtype of the state.
        decay: the factor of each step, beta2.
        entries: number of entries.
        has_error_terms: whether the file has the error terms of collage_fx.
    """

    name: str
    dtype: torch.dtype
    decay: float
    entries: int
    has_error_terms: bool

    @property
    def is_stuck(self) -> bool:
        """Whether rounding to nearest turns each decay into none: 1 - beta2 is below half an ulp of 2**k."""
        fmt = STORAGE_FORMATS.get(self.dtype)
        return fmt is not None and not self.has_error_terms and 1 - self.decay < fmt.unit_roundoff / 2


@dataclass(frozen=True, repr=False)
class Checkup:
    """Result of :func:`checkup`; prints as text.

    Attributes:
        path: path of the checkpoint; ``earlier``: of the earlier one, or None.
        verdict: ``ROUNDED_AWAY``, ``NO_SIGN`` or ``CANNOT_TELL``.
        reasons: the evidence for the verdict, a sentence each.
        findings: other faults: weight decay that had no effect, second moments that cannot decay.
        notes: further remarks.
        tensors: counts of all tensors.
        histograms: counts of magnitudes of matrices, by dtype: int64[32768].
        vectors: counts of codes of vectors around 1 or at a constant, by dtype: int64[65536].
        lr, weight_decay, steps: the given hyperparameters.
        second_moments: state of the optimizer's file.
        seconds: time that the checkup took.
    """

    path: str
    earlier: str | None
    verdict: str
    reasons: tuple[str, ...]
    findings: tuple[str, ...]
    notes: tuple[str, ...]
    tensors: tuple[TensorCheck, ...]
    histograms: Mapping[torch.dtype, Tensor] = field(compare=False)
    vectors: Mapping[torch.dtype, Tensor] = field(compare=False)
    lr: float | None = None
    weight_decay: float | None = None
    steps: int | None = None
    second_moments: tuple[SecondMoments, ...] = ()
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether nothing was found: neither lost updates nor another fault."""
        return self.verdict != ROUNDED_AWAY and not self.findings

    @property
    def groups(self) -> list[Group]:
        """Tensors by name, with numbers replaced by ``*``."""
        return grouped(self.tensors)

    def __repr__(self) -> str:
        """Return a line; ``print(checkup)`` shows the table."""
        return f"<Checkup of {self.path}: {self.verdict}, {len(self.tensors)} tensors>"

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, full: bool = False) -> str:
        """Return verdict, reasons and table as text; ``full``: a row for each tensor."""
        return text_of(self, full=full)

    def to_json(self) -> str:
        """Return all numbers as JSON."""
        return json_of(self)

    def save_html(self, path: str | Path) -> Path:
        """Write a page with the table and histograms; return its path."""
        path = Path(path)
        path.write_text(page_of(self), encoding="utf-8")
        return path


def checkup(
    path: str | Path,
    earlier: str | Path | None = None,
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    steps: int | None = None,
    optimizer: str | Path | None = None,
) -> Checkup:
    """Tell whether a checkpoint was trained in bf16 or fp16 without master weights, and name frozen tensors.

    Args:
        path: a safetensors file, a file of ``torch.save``, an index of shards, or a folder of them.
        earlier: an earlier checkpoint of the same run, to compare with.
        lr: learning rate of an optimizer whose updates are about ``lr`` in size, such as Adam, or less.
        weight_decay: weight decay of the run; each step multiplies weights by ``1 - lr * weight_decay``.
        steps: number of steps from ``earlier`` to ``path``.
        optimizer: file of the optimizer's ``state_dict()``.

    Returns:
        verdict, reasons, and counts by tensor. One tensor is in memory at a time.

    Raises:
        InvalidOptionError: a path does not exist, or a number is not allowed.
        CheckpointMismatchError: a file cannot be read.
    """
    begun = time.monotonic()
    for name, number in (("lr", lr), ("weight_decay", weight_decay), ("steps", steps)):
        if number is not None and not 0 <= number < float("inf"):
            raise InvalidOptionError(
                f"{name}={number} is not allowed", where=name, remedy="give a positive number"
            )
    weights = checkpoint_tensors(Path(path))
    before = None if earlier is None else checkpoint_tensors(Path(earlier))
    moments = () if optimizer is None else second_moments(Path(optimizer))
    counter = _Counter(lr, weight_decay or 0.0)
    checks = [
        counter.check(name, weights[name], None if before is None else before.get(name)) for name in weights
    ]
    verdict, reasons, notes = judge(checks)
    findings = [*_decay_findings(checks, lr, weight_decay, steps), *_moment_findings(moments)]
    if before is not None and not any(each.moves for each in checks):
        notes.append(
            "Nothing was compared: no tensor of both checkpoints has one shape and holds bf16 or fp16 "
            "numbers in both. float32 weights lose too little to be compared."
            if any(each.name in before for each in checks)
            else "The earlier checkpoint is an optimizer's file: give it by optimizer= (--optimizer)."
            if _is_state(before)
            else "The two checkpoints have no tensors in common."
        )
    if verdict == ROUNDED_AWAY and lr and weight_decay:
        notes += _decay_notes(checks, lr, weight_decay)
    return Checkup(
        str(path),
        None if earlier is None else str(earlier),
        verdict,
        tuple(reasons),
        tuple(findings),
        tuple(notes),
        tuple(checks),
        counter.histograms,
        counter.vectors,
        lr,
        weight_decay,
        steps,
        moments,
        time.monotonic() - begun,
    )


# Counting. --------------------------------------------------------------------------------------------------


def is_vector(shape: tuple[int, ...]) -> bool:
    """Return whether at most one size differs from 1, as of weights of norms and biases."""
    return sum(size != 1 for size in shape) <= 1


@dataclass
class _Counter:
    """Counter of tensors that sums up their histograms."""

    lr: float | None
    weight_decay: float
    histograms: dict[torch.dtype, Tensor] = field(default_factory=dict)
    vectors: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def check(self, name: str, tensor: Tensor, earlier: Tensor | None) -> TensorCheck:
        shape = tuple(tensor.shape)
        narrow = as_16_bits(tensor)
        if narrow is None or not narrow.numel():
            trained = tensor.is_floating_point() and tensor.ndim > 1 and tensor.dtype.itemsize > 1
            trained = trained and unevenness(tensor) > TRAINED
            return TensorCheck(name, shape, tensor.dtype, tensor.dtype, is_trained=trained)
        dtype = narrow.dtype
        counts = count_codes(narrow)
        of_magnitudes = magnitudes(counts)
        zeros = int(of_magnitudes[0])
        finite = int(of_magnitudes[values(dtype)[:MAGNITUDES].isfinite()].sum())
        constant, at_constant = _constant(counts, dtype)
        has_left = sums = None
        if is_vector(shape):
            if constant and _is_mixed(counts, dtype, constant, at_constant):
                has_left = torch.ne(narrow, constant).flatten()
            trained = _has_left_one(counts, dtype)
            if trained or constant:
                self.vectors[dtype] = self.vectors.get(dtype, 0) + counts
        else:
            nonzero = counts[1:MAGNITUDES].max(), counts[MAGNITUDES + 1 :].max()
            is_mask = max(map(int, nonzero)) > MOST_OF_ONE_CODE * narrow.numel()
            if not is_mask and not is_table(of_magnitudes, dtype):
                sums = power_sums(of_magnitudes, dtype)
                self.histograms[dtype] = self.histograms.get(dtype, 0) + of_magnitudes
            trained = unevenness(tensor) > TRAINED
        stuck = None if self.lr is None else count_stuck(of_magnitudes, dtype, self.lr, self.weight_decay)
        compared = None
        if earlier is not None and earlier.shape == tensor.shape:
            old = as_16_bits(earlier)
            if old is not None:
                compared = moves(count_moves(old, narrow), STORAGE_FORMATS[dtype].precision)
        return TensorCheck(
            name,
            shape,
            tensor.dtype,
            dtype,
            constant,
            at_constant,
            has_left,
            trained,
            zeros,
            narrow.numel() - finite,
            stuck,
            compared,
            sums,
        )


def _constant(counts: Tensor, dtype: torch.dtype) -> tuple[float | None, int]:
    """Return the value of an initializer that many entries have, and their number.

    That is the most frequent value if it is 0 or 1 and has LEAST_CONSTANT of the entries, or any value that
    most entries have.
    """
    total = int(counts.sum())
    code = int(counts.argmax())
    number = int(counts[code])
    value = float(values(dtype)[code])
    if code == MAGNITUDES:  # -0
        value = 0.0
    usual = value in (0.0, 1.0) and number >= LEAST_CONSTANT * total
    many = total >= FEWEST_CONSTANT and (usual or number > total / 2)
    return (value, number) if many else (None, 0)


def _has_left_one(counts: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a vector has different values around 1; initializers write 1, or values around 0."""
    around = (values(dtype) > AROUND_ONE[0]) & (values(dtype) < AROUND_ONE[1])
    total = int(counts.sum())
    return int(counts[around].sum()) == total and int(counts.max()) < LEFT_CONSTANT * total


def _is_mixed(counts: Tensor, dtype: torch.dtype, constant: float, at_constant: int) -> bool:
    """Return whether some entries stand at the constant, and others, which left it, are far from it."""
    total = int(counts.sum())
    far = int(counts[(values(dtype) / constant - 1).abs() >= FAR].sum())
    code = int(torch.tensor(constant).to(dtype).view(torch.uint16))
    beside = int(counts[(code + 1) % CODES] + counts[code - 1])
    return (
        total >= FEWEST_IN_VECTOR
        and MIXED_AT * total <= at_constant
        and far >= MIXED_FAR * total
        and at_constant >= MIXED_PEAK * beside
    )


def grouped(tensors: tuple[TensorCheck, ...] | list[TensorCheck]) -> list[Group]:
    """Group tensors whose names differ in numbers only."""
    found: dict[Any, list[TensorCheck]] = {}
    for each in tensors:
        key = (re.sub(r"\d+", "*", each.name), each.dtype, each.held, each.is_vector)
        found.setdefault(key, []).append(each)
    return [
        Group(key[0] if len(members) > 1 else members[0].name, tuple(members))
        for key, members in found.items()
    ]


def strongest(tensors: tuple[TensorCheck, ...] | list[TensorCheck]) -> PileUp | None:
    """Return the most significant pile-up of tensors, taken together by dtype."""
    return max(_tested(tensors), key=lambda each: each.significance, default=None)


def _tested(tensors: tuple[TensorCheck, ...] | list[TensorCheck]) -> list[PileUp]:
    sums: dict[torch.dtype, Tensor] = {}
    for each in tensors:
        if each.at_powers is not None:
            sums[each.held] = sums.get(each.held, 0) + each.at_powers
    return [pile_up for dtype, total in sums.items() for pile_up in pile_ups(total, dtype)]


# Judging. ---------------------------------------------------------------------------------------------------


def _is_state(names: Iterable[str]) -> bool:
    """Return whether all tensors belong to an optimizer's file."""
    names = list(names)
    return bool(names) and all(name.startswith("state.") for name in names)


def judge(checks: list[TensorCheck]) -> tuple[str, list[str], list[str]]:
    """Return verdict, reasons and notes."""
    judged = [each for each in checks if each.is_judged]
    matrices = [each for each in checks if not each.is_vector and each.dtype.is_floating_point]
    wide = [each for each in matrices if not each.is_judged]
    notes = _notes(checks)
    if _is_state(each.name for each in checks):
        reason = "The file holds an optimizer's state and no weights: give the model's file, and this one by "
        return CANNOT_TELL, [reason + "optimizer= (--optimizer)."], notes
    if not judged or sum(each.entries for each in wide) > sum(each.entries for each in matrices) / 2:
        if any(each.dtype in (torch.float32, torch.float64) for each in wide):
            return NO_SIGN, ["The matrices are float32 with more bits than bf16 or fp16 have."], notes
        return CANNOT_TELL, ["There are no weights in bf16 or fp16."], notes
    found = [*_pile_up_reasons(judged), *_mixture_reasons(judged), *_move_reasons(judged)]
    if found:
        return ROUNDED_AWAY, [*found, *_constant_reasons(judged)], notes
    tested = {each.exponent for each in _tested(judged) if each.span == 1}
    compared = [each.moves for each in judged if each.moves is not None and each.moves.judged]
    if compared:
        share = sum(each.judged_moved for each in compared) / sum(each.judged for each in compared)
        return NO_SIGN, [f"Large weights moved as far as small ones: {share:.0%} of them moved."], notes
    constants = _constant_reasons(judged)
    trained = [each for each in judged if each.is_trained]
    if len(tested) < FEWEST_POWERS:
        reason = (
            "Weights are too few to see a pile-up at powers of two, or an initializer's rounded products."
        )
        return CANNOT_TELL, [reason], notes
    if not trained:
        reason = "The weights do not differ from those of an untrained model."
        return CANNOT_TELL, [reason, *constants], notes
    if constants:
        reason = "There is no pile-up at powers of two, but vectors have never moved: frozen on purpose?"
        return CANNOT_TELL, [reason, *constants], notes
    reason = (
        f"No power of two from 2**{min(tested)} to 2**{max(tested)} has more weights than its neighbours."
    )
    return NO_SIGN, [reason], notes


def _pile_up_reasons(checks: list[TensorCheck]) -> list[str]:
    """Say where weights pile up: in all matrices together, and in which of them."""
    found = strongest(checks)
    groups = [(each, each.pile_up) for each in grouped(checks)]
    certain = [(each, pile_up) for each, pile_up in groups if pile_up is not None and pile_up.is_certain]
    if found is None or not (found.is_certain or certain):
        return []
    if not found.is_certain:
        found = max((pile_up for _, pile_up in certain), key=lambda each: each.significance)
    where = _powers(found)
    reason = (
        f"Weights pile up at exact powers of two: {found.factor:.1f} times as many are ±{where} as the "
        "numbers next to it lead to expect. Rounding to nearest does this to updates "
        "that are less than half an ulp."
    )
    if certain and len(certain) < len([each for each, pile_up in groups if pile_up is not None]):
        reason += f" Most of all in {_listed([each.name for each, _ in certain])}."
    return [reason]


def _powers(found: PileUp) -> str:
    if found.span == 1:
        return f"2**{found.exponent}"
    return f"2**{found.exponent - found.span + 1} to 2**{found.exponent}"


def _mixture_reasons(checks: list[TensorCheck]) -> list[str]:
    # Rounding keeps other entries in each vector; the same in several are a mask, as of pruned channels.
    left = {each.name: each.has_left for each in checks if each.has_left is not None}
    pairs = [pair for pair in combinations(left, 2) if _are_one_mask(*(left[name] for name in pair))]
    masked = {name for pair in pairs for name in pair}
    mixed = [each for each in checks if each.is_mixed and each.name not in masked]
    if len(mixed) < FEWEST_VECTORS:
        return []
    share = sum(each.at_constant for each in mixed) / sum(each.entries for each in mixed)
    names = _listed([each.name for each in grouped(mixed)])
    constants = " or ".join(dict.fromkeys(f"{each.constant:g}" for each in mixed))
    return [
        f"{share:.0%} of {names} are exactly {constants}, few are next to it, and others are far away: most "
        "updates were too small to leave the constant."
    ]


def _are_one_mask(one: Tensor, other: Tensor) -> bool:
    """Return whether two masks of entries have one length and are nearly the same."""
    return one.shape == other.shape and int((one & other).sum()) > ONE_MASK * int((one | other).sum())


def _move_reasons(checks: list[TensorCheck]) -> list[str]:
    compared = [each.moves for each in checks if each.moves is not None]
    judged = sum(each.judged for each in compared)
    lost = sum(each.lost for each in compared)
    if not judged or lost < LEAST_LOST * judged:
        return []
    moved = sum(each.judged_moved for each in compared)
    expected = sum(each.judged_expected for each in compared)
    return [
        f"Since the earlier checkpoint {moved / judged:.1%} of the large weights moved, where at least "
        f"{expected / judged:.1%} should have: small weights of the same tensors moved farther than half "
        "an ulp of the large ones."
    ]


def _constant_reasons(checks: list[TensorCheck]) -> list[str]:
    """Name vectors of which most entries have a constant other than 0."""
    found = []
    for group in grouped(checks):
        share = group.at_constant
        if group.tensors[0].is_vector and group.constant and share >= LEFT_CONSTANT:
            found.append((share, group))
    return [
        f"{share:.0%} of {group.name} are exactly {group.constant:g}, as an initializer wrote them."
        for share, group in sorted(found, key=lambda each: -each[0] * each[1].entries)
    ]


def _notes(checks: list[TensorCheck]) -> list[str]:
    notes = []
    narrow = [
        each for each in checks if each.is_judged and each.dtype is torch.float32 and not each.is_vector
    ]
    if narrow:
        kinds = ", ".join(sorted({short_name(each.held) for each in narrow}))
        notes.append(
            f"{_listed([each.name for each in grouped(narrow)])}: float32, but all values are {kinds}."
        )
    broken = [each for each in checks if each.not_finite]
    if broken:
        number = sum(each.not_finite for each in broken)
        notes.append(f"{number:,} infinities or NaN, in {_listed([each.name for each in grouped(broken)])}.")
    others = [
        each for each in checks if not each.is_judged and each.dtype not in (torch.float32, torch.float64)
    ]
    if others:
        kinds = ", ".join(sorted({short_name(each.dtype) for each in others}))
        notes.append(f"{len(others)} tensors of {kinds} were not judged.")
    return notes


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# Other faults. ----------------------------------------------------------------------------------------------


def _decay_findings(
    checks: list[TensorCheck], lr: float | None, weight_decay: float | None, steps: int | None
) -> list[str]:
    """Find weight decay that should have moved all weights, but did not."""
    if not (lr and weight_decay and steps):
        return []
    shrunk = 1 - (1 - lr * weight_decay) ** steps
    compared = [
        (each.moves, STORAGE_FORMATS[each.held].precision)
        for each in checks
        if each.moves is not None and each.moves.moved and not each.is_vector
    ]
    # A decay by 2 ulps of the largest relative size, 2**(1 - precision), moves any weight on its own.
    compared = [(each, precision) for each, precision in compared if shrunk > 2.0 ** (2 - precision)]
    entries = sum(each.entries for each, _ in compared)
    still = sum(each.entries - each.moved for each, _ in compared)
    if not entries or still < LEAST_CONSTANT * entries:
        return []
    return [
        f"Weight decay that did not happen: {steps:,} steps of lr {lr:g} and weight decay {weight_decay:g} "
        f"shrink each weight by {shrunk:.1%}, but {still / entries:.0%} of the weights have not changed."
    ]


def _decay_notes(checks: list[TensorCheck], lr: float, weight_decay: float) -> list[str]:
    dtypes = {each.held for each in checks if each.is_judged and not each.is_vector}
    for dtype in dtypes:
        least = float(STORAGE_FORMATS[dtype].unit_roundoff) / 2
        if lr * weight_decay < least:
            return [
                f"A weight decay of lr * weight_decay = {lr * weight_decay:.1g} a step is less than half an "
                f"ulp of any {short_name(dtype)} number ({least:.1g} of it): on its own, it changes nothing."
            ]
    return []


def second_moments(path: Path) -> tuple[SecondMoments, ...]:
    """Return the moving averages of squares in the file of an optimizer's ``state_dict()``."""
    if not path.exists():
        raise InvalidOptionError(
            f"there is no file {str(path)!r}", where="optimizer", remedy="give the file of a state dict"
        )
    loaded = load_plain(path)
    for key in ("optimizer", "optimizer_state_dict", "optim"):
        if isinstance(loaded, Mapping) and key in loaded:
            loaded = loaded[key]
    if not (isinstance(loaded, Mapping) and "state" in loaded and "param_groups" in loaded):
        raise InvalidOptionError(
            f"there is no optimizer's state in {str(path)!r}",
            where="optimizer",
            remedy="give the file that torch.save(optimizer.state_dict(), path) writes",
        )
    decays = {}
    for group in loaded["param_groups"]:
        betas = group.get("betas") or (None, group.get("alpha"))  # RMSprop's alpha
        decays.update(dict.fromkeys(group["params"], betas[-1]))
    found: dict[tuple[str, torch.dtype, float, bool], int] = {}
    for index, state in loaded["state"].items():
        decay = decays.get(index)
        for name in ("exp_avg_sq", "square_avg"):
            tensor = state.get(name)
            if isinstance(tensor, Tensor) and decay is not None:
                ours = any(str(key).startswith(f"collage_fx.{name}.") for key in state)
                kind = (name, tensor.dtype, float(decay), ours)
                found[kind] = found.get(kind, 0) + tensor.numel()
    return tuple(
        SecondMoments(name, dtype, decay, entries, ours)
        for (name, dtype, decay, ours), entries in found.items()
    )


def _moment_findings(moments: tuple[SecondMoments, ...]) -> list[str]:
    return [
        f"Second moments that never decayed: {each.name} is {short_name(each.dtype)}, and a decay by "
        f"{float(1 - Fraction(str(each.decay))):g} a step is less than half an ulp, so rounding to nearest "
        "keeps each of them at its largest value."
        for each in moments
        if each.is_stuck
    ]
