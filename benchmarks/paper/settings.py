"""What is trained: strategies, sizes, settings, and all the cells that are made of them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.paper.optimizers import (
    Kahan,
    Kept,
    Making,
    Master,
    Pair,
    ReleasedInBfloat16,
    ReleasedInFloat32,
    Stochastic,
)


@dataclass(frozen=True)
class Strategy:
    """One way to keep weights and moments.

    Attributes:
        name: in the tables.
        letter: the paper's, where it has the same.
        made: the backend's options, or how the eager optimizer keeps its tensors.
        colour: in the pictures, of Okabe and Ito's.
        line: matplotlib's style.
        rate: times the setting's learning rate.
    """

    name: str
    letter: str
    made: dict[str, Any] | Making
    colour: str
    line: str = "-"
    rate: float = 1.0


BASELINE, MASTER_FREE = "fp32 master", "fp32 moments"
PAPERS_PRODUCT = "the paper's product"
RELEASED = ("released, bf16 default", "released, fp32 default")
LARGER_STEPS = "fp32 master, lr × √3"  # as a second moment makes them that is a third of what it should be

_FLOAT32 = torch.float32
STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("none", "A", {"strategy": "none"}, "#D55E00"),
        Strategy(
            "light, mcf",
            "B",
            {"strategy": "light", "error_format": "mcf", "rounding": "nearest"},
            "#56B4E9",
        ),
        Strategy(
            "plus, mcf", "C", {"strategy": "plus", "error_format": "mcf", "rounding": "nearest"}, "#0072B2"
        ),
        Strategy(BASELINE, "D", Making(Master, moments=_FLOAT32), "#000000", ":"),
        Strategy(MASTER_FREE, "D⁻ᴹᵂ", Making(moments=_FLOAT32), "#999999"),
        Strategy("Kahan", "", Making(Kahan), "#CC79A7"),
        Strategy("stochastic weights", "", Making(Stochastic), "#F0E442"),
        Strategy("stochastic", "", Making(Stochastic, Stochastic, Stochastic), "#E69F00"),
        Strategy("light", "", {"strategy": "light"}, "#56B4E9", "--"),
        Strategy("plus", "", {"strategy": "plus"}, "#009E73", "--"),
        Strategy("8 bytes", "", {"bytes_per_parameter": 8}, "#CC79A7", "-."),
        Strategy("5.1 bytes", "", {"bytes_per_parameter": 5.1}, "#E69F00", "-."),
        Strategy("4.1 bytes", "", {"bytes_per_parameter": 4.1}, "#F0E442", "-."),
        Strategy(PAPERS_PRODUCT, "", Making(Pair, Kept, Pair), "#0072B2"),
        Strategy(RELEASED[0], "", Making(Pair, Kept, ReleasedInBfloat16), "#D55E00"),
        Strategy(RELEASED[1], "", Making(Pair, Kept, ReleasedInFloat32), "#E69F00", "--"),
        Strategy(LARGER_STEPS, "", Making(Master, moments=_FLOAT32), "#000000", "--", rate=3**0.5),
    )
}

#: What the paper's product is about: trained in settings of each β2 alone.
OF_THE_PRODUCT = (PAPERS_PRODUCT, *RELEASED, LARGER_STEPS)
#: Trained beside fp32 masters alone, by ``--pairs``.
OF_PAIRS = ("4.1 bytes",)
_OTHERS = tuple(name for name in STRATEGIES if name not in (*OF_THE_PRODUCT, *OF_PAIRS))


@dataclass(frozen=True)
class Size:
    """A model, and for how long it is trained.

    Attributes:
        width, layers, heads: of a byte-level transformer; moments are packed in rows of 32 elements.
        context: bytes that it sees.
        batch: windows of that length a step, unless a setting says otherwise.
        steps: of a training.
        masked_start: steps of the float32 training that encoders go on from.
        tuning_steps: of a fine-tuning, and of a classifier.
    """

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    masked_start: int = 0
    tuning_steps: int = 0

    def parameters(self) -> int:
        """Elements of all weights."""
        norms = (2 * self.layers + 1) * self.width
        return 12 * self.layers * self.width**2 + (256 + self.context) * self.width + norms


SIZES = {
    "tiny": Size(
        width=64, layers=1, heads=2, context=64, batch=4, steps=24, masked_start=24, tuning_steps=12
    ),
    "0.3m": Size(96, layers=3, heads=4, context=64, batch=12, steps=600, masked_start=1000, tuning_steps=300),
    "1.4m": Size(width=192, layers=3, heads=6, context=64, batch=12, steps=400),
    "5m": Size(width=320, layers=4, heads=5, context=64, batch=12, steps=300),
    "124m": Size(width=832, layers=15, heads=13, context=512, batch=32, steps=2000),
}


@dataclass(frozen=True)
class Start:
    """A training in float32 that all strategies of a setting and seed go on from.

    Attributes:
        task: as of a setting.
        lr: the peak learning rate.
        steps: how many.
    """

    task: str
    lr: float
    steps: int


@dataclass(frozen=True)
class Setting:
    """What is varied beside the strategy and the seed.

    Attributes:
        task: ``bytes`` (predict the next), ``masked`` (an encoder, predict those that are masked),
            ``tuning`` (predict the next one of a second text) or ``sources`` (an encoder, classify windows by
            the text that they come from).
        size: of :data:`SIZES`.
        beta2: of the second moment.
        lr: the peak learning rate.
        batch: times the size's own.
    """

    task: str = "bytes"
    size: str = "0.3m"
    beta2: float = 0.999
    lr: float = 1e-3
    batch: int = 1

    def steps(self) -> int:
        """How many a training takes."""
        size = SIZES[self.size]
        return size.tuning_steps if self.task in ("tuning", "sources") else size.steps

    def start(self) -> Start | None:
        """What it begins with, if not with nothing.

        A fine-tuning does with a model of the first text. An encoder learns for hundreds of steps how
        frequent bytes are, until it begins to look at their neighbours. When that is, is a matter of chance,
        and moves the loss more than anything that is compared here: a start has it behind it.
        """
        size = SIZES[self.size]
        return {
            "tuning": Start("bytes", 1e-3, size.steps),
            "masked": Start("masked", 3e-3, size.masked_start),
            "sources": Start("masked", 3e-3, size.masked_start),
        }.get(self.task)

    def differs(self, other: Setting) -> dict[str, Any]:
        """What of it is not as in another one."""
        theirs = asdict(other)
        return {name: value for name, value in asdict(self).items() if value != theirs[name]}


MAIN = Setting()

#: The sweeps: each varies one thing of :data:`MAIN`. Fine-tuning has a tenth of its learning rate, as usual.
SETTINGS = (
    MAIN,
    *(replace(MAIN, beta2=beta2) for beta2 in (0.95, 0.98, 0.99)),
    *(replace(MAIN, lr=lr) for lr in (3e-4, 3e-3)),
    replace(MAIN, batch=2),
    *(replace(MAIN, size=size) for size in ("1.4m", "5m")),
    replace(MAIN, task="masked"),
    replace(MAIN, task="tuning", lr=1e-4),
)

#: A classifier that starts from a masked encoder, and its strategies: the paper's A, B, C and D.
CLASSIFIER = replace(MAIN, task="sources", lr=3e-4)
LETTERS = tuple(name for name, each in STRATEGIES.items() if each.letter in ("A", "B", "C", "D"))


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        setting, strategy: as they are.
        seed: counted from 0 in each setting.
    """

    setting: Setting
    strategy: str
    seed: int

    def draw(self) -> int:
        """What weights and batches are drawn by: the same for all strategies, and another in each setting.

        So the differences between two strategies are independent of each other, over all settings and seeds.
        """
        return zlib.crc32(repr((self.setting, self.seed)).encode())

    def key(self) -> dict[str, Any]:
        """What identifies it in a file of results."""
        return {**asdict(self.setting), "strategy": self.strategy, "seed": self.seed}

    def cost(self) -> float:
        """Predicted seconds on a core of a CPU: compiling, forward and backward passes, the optimizer."""
        size = SIZES[self.setting.size]
        tokens = size.batch * self.setting.batch * size.context
        each = 0.006 + 40e-9 * tokens + 28e-12 * tokens * size.parameters() + 6e-9 * size.parameters()
        return 6 + each * self.setting.steps()


@dataclass(frozen=True)
class Plan:
    """Cells, and the settings that they are of.

    Attributes:
        settings: of the sweeps, the main one first.
        cells: all that is trained.
        classifier: setting of a classifier, which is not one of the sweeps.
    """

    settings: tuple[Setting, ...]
    cells: tuple[Cell, ...]
    classifier: Setting = CLASSIFIER

    @property
    def main(self) -> Setting:
        return self.settings[0]


def _cells(settings: tuple[Setting, ...], seeds: int, strategies: tuple[str, ...]) -> Iterator[Cell]:
    for setting in settings:
        for seed in range(seeds):
            for strategy in strategies:
                yield Cell(setting, strategy, seed)


def full_plan(seeds: int = 3) -> Plan:
    """What ``./dev paper`` trains."""
    same_model = tuple(s for s in SETTINGS if set(s.differs(MAIN)) <= {"beta2"})
    cells = (
        *_cells(SETTINGS, seeds, _OTHERS),
        *_cells(same_model, seeds, OF_THE_PRODUCT),
        *_cells((CLASSIFIER,), seeds, LETTERS),
    )
    return Plan(SETTINGS, cells, CLASSIFIER)


def plan_of_pairs(strategies: Sequence[str], seeds: int = 3) -> Plan:
    """Return the plan of ``--pairs``: strategies beside fp32 masters, in all settings of the sweeps."""
    return Plan(SETTINGS, tuple(_cells(SETTINGS, seeds, (*strategies, BASELINE))))


QUICK = Setting(size="tiny")


def quick_plan() -> Plan:
    """What ``--quick`` trains: a few steps of every strategy, and of three in settings of each kind."""
    others = (
        replace(QUICK, beta2=0.95),
        replace(QUICK, lr=3e-3),
        replace(QUICK, batch=2),
        replace(QUICK, task="masked"),
        replace(QUICK, task="tuning", lr=1e-4),
    )
    classifier = replace(CLASSIFIER, size=QUICK.size)
    cells = (
        *_cells((QUICK,), 2, tuple(STRATEGIES)),
        *_cells(others, 2, ("none", "plus, mcf", BASELINE)),
        *_cells((classifier,), 2, LETTERS),
    )
    return Plan((QUICK, *others), cells, classifier)


def large_plan(size: str, seeds: int = 1) -> Plan:
    """What ``--size`` trains: every strategy at one size."""
    setting = replace(MAIN, size=size)
    return Plan((setting,), tuple(_cells((setting,), seeds, _OTHERS)))
