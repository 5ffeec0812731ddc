"""``docs/paper.md`` and its pictures, from the files of results and nothing else."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from matplotlib.figure import Figure

from benchmarks.paper.costs import MASTERS
from benchmarks.paper.settings import (
    BASELINE,
    LETTERS,
    MASTER_FREE,
    OF_THE_PRODUCT,
    RELEASED,
    SIZES,
    STRATEGIES,
    Plan,
    Setting,
)
from benchmarks.paper.significance import LEVEL, Difference, holm, sign_test, welch
from benchmarks.paper.training import ACCURACY_BATCHES, VALIDATION_BATCH
from benchmarks.table import markdown

Record = dict[str, Any]
#: Anchor of the section on claims.
CLAIMS = "which-of-the-papers-orderings-hold-here"
TEMPLATE = Path(__file__).with_name("template.md")
#: Folder, in that of results, of trainings beside fp32 masters alone.
PAIRS = "pairs"


@dataclass
class Runs:
    """Records by setting, strategy and seed.

    Attributes:
        records: of all files.
        costs: rows of the costs.
        pairs: trainings beside fp32 masters alone.
    """

    records: list[Record]
    costs: list[Record]
    pairs: Runs | None = None

    @classmethod
    def of_folder(cls, folder: Path) -> Runs:
        """All files of results."""
        files = {
            path.stem: json.loads(path.read_text())["runs"] for path in sorted(folder.glob("paper-*.json"))
        }
        costs = files.pop("paper-costs", [])
        pairs = cls.of_folder(folder / PAIRS) if (folder / PAIRS).is_dir() else None
        return cls([record for runs in files.values() for record in runs], costs, pairs)

    def of(self, setting: Setting, strategy: str) -> dict[int, Record]:
        """Seed -> record."""
        key = {**asdict(setting), "strategy": strategy}
        found = [r for r in self.records if {name: r[name] for name in key} == key]
        return {r["seed"]: r for r in sorted(found, key=lambda r: int(r["seed"]))}

    def gaps(self, setting: Setting, strategy: str, other: str = BASELINE) -> dict[int, float]:
        """Seed -> how much higher the loss ends than another strategy's of the same seed."""
        theirs = self.of(setting, other)
        return {
            seed: record["loss"] - theirs[seed]["loss"]
            for seed, record in self.of(setting, strategy).items()
            if seed in theirs
        }

    def all_gaps(self, settings: Iterable[Setting], strategy: str) -> list[float]:
        """Return how much higher the losses of some settings end than those of fp32 masters."""
        return [gap for setting in settings for gap in self.gaps(setting, strategy).values()]


# Tables. ----------------------------------------------------------------------------------------------------


def _spread(values: Iterable[float], digits: int = 4) -> str:
    values = list(values)
    if not values:
        return "–"
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def _signed(values: Iterable[float], *, spread: bool = True) -> str:
    values = list(values)
    if not values:
        return "–"
    deviation = f" ± {statistics.stdev(values):.4f}" if spread and len(values) > 1 else ""
    return f"{_rounded(statistics.fmean(values)):+.4f}{deviation}"


def _rounded(value: float) -> float:
    """To four decimals, and no negative zero."""
    return round(value, 4) + 0.0


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return statistics.fmean(values) if values else math.nan


def _of_curve(record: Record, name: str) -> list[float]:
    return [value for _, value in record["curves"][name]]


def _named(strategy: str) -> str:
    letter = STRATEGIES[strategy].letter
    return f"{strategy} ({letter})" if letter else strategy


def _strategies(runs: Runs, setting: Setting, *, product: bool = False) -> list[str]:
    """Those that were trained in a setting."""
    return [name for name in STRATEGIES if (name in OF_THE_PRODUCT) == product and runs.of(setting, name)]


def main_table(runs: Runs, setting: Setting) -> str:
    """Results of every strategy in one setting; :func:`product_table` has those of the released code."""
    rows = []
    for name in _strategies(runs, setting):
        records = runs.of(setting, name)
        rows.append(
            [
                _named(name),
                f"{_mean(r['bytes'] for r in records.values()):.3g}",
                _spread(r["loss"] for r in records.values()),
                _signed(runs.gaps(setting, name).values()),
                f"{_mean(_mean(_of_curve(r, 'edq_ratio')) for r in records.values()):.4f}",
                f"{_mean(_mean(_of_curve(r, 'lost_share')) for r in records.values()):.1%}",
                f"{_mean(r['v_error'] for r in records.values()):.2%}",
            ]
        )
    headers = (
        "strategy",
        "bytes",
        "loss",
        "over D's",
        "EDQ ratio",
        "updates lost",
        "v off by",
    )
    return markdown(headers, rows, texts=1)


def sweep_table(runs: Runs, plan: Plan) -> str:
    """How much higher each strategy ends than D, by setting."""
    names = _strategies(runs, plan.main)
    rows = [
        [_named(n), *(_signed(runs.gaps(s, n).values(), spread=False) for s in plan.settings)]
        for n in names
        if n != BASELINE
    ]
    return markdown(("over D's loss", *(_title(s, plan.main) for s in plan.settings)), rows, texts=1)


def _title(setting: Setting, main: Setting) -> str:
    changes = setting.differs(main)
    if not changes:
        return f"main: {main.size}, β2 {main.beta2:g}, lr {main.lr:g}"
    names = {"beta2": "β2", "batch": "batch ×"}
    words = {"masked": "masked encoder", "tuning": "fine-tuning"}
    return ", ".join(
        words[value] if name == "task" else f"{names.get(name, name)} {value:g}" if name != "size" else value
        for name, value in changes.items()
    )


# What the paper says, and what is found. --------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, or of this project, and what it is tested by.

    Attributes:
        text: the statement.
        settings: in how many it was tested.
        positive: in how many trainings the difference is above zero.
        trainings: of how many.
        found: the difference, which is positive if the statement holds.
        equal: that the statement is that there is none.
    """

    text: str
    settings: int
    positive: int
    trainings: int
    found: Difference
    equal: bool = False

    def verdict(self, p: float) -> str:
        """What can be said at the level of the page."""
        if self.equal:
            bound = max(abs(self.found.low), abs(self.found.high))
            within = f"at most {bound:.4f} apart" if math.isfinite(bound) else "too few to say how far apart"
            return f"differs ({within})" if p < LEVEL else f"no difference found ({within})"
        if p < LEVEL:
            return "holds" if self.found.value > 0 else "the reverse holds"
        return "not shown"


def claims(runs: Runs, plan: Plan) -> list[Claim]:
    """The paper's orderings, each with what it is tested by."""
    main, every = plan.main, plan.settings
    slow = [s for s in every if s.task != "tuning" and s.beta2 == main.beta2]
    betas = sorted((s for s in every if set(s.differs(main)) <= {"beta2"}), key=lambda s: s.beta2)
    rates = sorted((s for s in every if set(s.differs(main)) <= {"lr"}), key=lambda s: s.lr)
    batches = sorted((s for s in every if set(s.differs(main)) <= {"batch"}), key=lambda s: s.batch)

    def ordering(
        text: str, worse: str, better: str, where: Sequence[Setting], equal: bool = False
    ) -> Iterable[Claim]:
        gaps = [each for s in where if (each := list(runs.gaps(s, worse, better).values()))]
        every_gap = [gap for each in gaps for gap in each]
        if every_gap:
            positive = sum(gap > 0 for gap in every_gap)
            yield Claim(text, len(gaps), positive, len(every_gap), sign_test(every_gap), equal)

    def contrast(text: str, more: Setting, less: Setting) -> Iterable[Claim]:
        first, second = (list(runs.gaps(s, "none").values()) for s in (more, less))
        if more != less and first and second:
            found = welch(first, second)
            above = sum(x > y for x in first for y in second)
            yield Claim(text, 2, above, len(first) * len(second), found)

    return [
        *ordering("bf16 alone (A) ends above fp32 master weights (D)", "none", BASELINE, every),
        *ordering("fp32 moments without master weights (D⁻ᴹᵂ) end above D", MASTER_FREE, BASELINE, every),
        *ordering("light (B) ends below A", "none", "light, mcf", every),
        *ordering("plus (C) ends below A", "none", "plus, mcf", every),
        *ordering("plus (C) ends below D⁻ᴹᵂ", MASTER_FREE, "plus, mcf", every),
        *ordering(f"plus (C) ends below light (B) at β2 = {main.beta2:g}", "light, mcf", "plus, mcf", slow),
        *ordering("stochastic rounding ends above D", "stochastic", BASELINE, every),
        *contrast(
            f"A loses more at β2 = {betas[-1].beta2:g} than at {betas[0].beta2:g}", betas[-1], betas[0]
        ),
        *contrast(
            f"A loses more at a peak lr of {rates[0].lr:g} than at {rates[-1].lr:g}", rates[0], rates[-1]
        ),
        *contrast(
            f"a batch {batches[-1].batch} times as large hides some of A's loss", batches[0], batches[-1]
        ),
        *ordering("plus (C) ends where D does", "plus, mcf", BASELINE, every, True),
        *ordering("Kahan ends where light (B) does", "Kahan", "light, mcf", every, True),
        *ordering("exact error terms (plus) end where D does", "plus", BASELINE, every, True),
        *ordering("8 bytes a parameter end where D does", "8 bytes", BASELINE, every, True),
        *ordering("5.1 bytes a parameter end where D does", "5.1 bytes", BASELINE, every, True),
    ]


def differences(runs: Runs, settings: Sequence[Setting], strategies: Sequence[str]) -> Iterator[str]:
    """Yield a line for each strategy: its losses less those of fp32 masters, and the time of a pair."""
    for name in strategies:
        gaps = runs.all_gaps(settings, name)
        if not gaps:
            continue
        found = sign_test(gaps)
        seconds = [
            records[seed]["seconds"] + masters[seed]["seconds"]
            for setting in settings
            for records, masters in [(runs.of(setting, name), runs.of(setting, BASELINE))]
            for seed in records.keys() & masters.keys()
        ]
        yield (
            f"{name} less fp32 masters: median {found.value:+.5f}, 95 % {found.low:+.5f} to "
            f"{found.high:+.5f}, {len(gaps)} pairs of {statistics.fmean(seconds):.0f} s each"
        )


def pairs_table(pairs: Runs, settings: Sequence[Setting]) -> str:
    """Tabulate how losses differ from those of fp32 masters trained beside them; empty if there are none."""
    rows = []
    for name in STRATEGIES:
        gaps = pairs.all_gaps(settings, name)
        if gaps and name != BASELINE:
            found, records = sign_test(gaps), [r for s in settings for r in pairs.of(s, name).values()]
            rows.append(
                [
                    name,
                    f"{_mean(r['bytes'] for r in records):.3g}",
                    f"{sum(gap > 0 for gap in gaps)} of {len(gaps)}",
                    f"{_rounded(found.value):+.4f}",
                    _interval(found),
                    f"{found.p:.2g}",
                ]
            )
    headers = ("strategy", "bytes", "positive", "difference", "95 %", "p")
    return markdown(headers, rows, texts=1) if rows else ""


def judged(runs: Runs, plan: Plan) -> list[tuple[Claim, float]]:
    """Each claim and its p-value, corrected among the claims of its kind."""
    found: list[tuple[Claim, float]] = []
    for equal in (False, True):
        tested = [claim for claim in claims(runs, plan) if claim.equal == equal]
        found += zip(tested, holm([claim.found.p for claim in tested]), strict=True)
    return found


def claim_table(runs: Runs, plan: Plan) -> str:
    """Each claim, the difference, the test and the verdict."""
    rows = [
        [
            claim.text,
            str(claim.settings),
            f"{claim.positive} of {claim.trainings}",
            f"{_rounded(claim.found.value):+.4f}",
            _interval(claim.found),
            f"{p:.2g}",
            claim.verdict(p),
        ]
        for claim, p in judged(runs, plan)
    ]
    headers = ("claim", "settings", "positive", "difference", "95 %", "p, Holm", "found")
    return markdown(headers, rows, texts=1)


def summary(runs: Runs, plan: Plan) -> str:
    """How many claims are found to be what."""
    verdicts = Counter(claim.verdict(p).partition(" (")[0] for claim, p in judged(runs, plan))
    counts = ", ".join(f"{verdict}: {number}" for verdict, number in verdicts.items())
    return (
        f"Of {verdicts.total()} claims of the paper and of this project [tested below](#{CLAIMS}): {counts}."
    )


def _interval(found: Difference) -> str:
    if math.isinf(found.low):
        return "–"
    return f"{_rounded(found.low):+.4f} to {_rounded(found.high):+.4f}"


def _of_product(runs: Runs, plan: Plan) -> list[Setting]:
    """The settings of the least and the largest β2 that the released product was trained in."""
    found = sorted((s for s in plan.settings if runs.of(s, RELEASED[0])), key=lambda s: s.beta2)
    return [found[0], found[-1]] if len(found) > 1 else found


def product_table(runs: Runs, plan: Plan) -> str:
    """The released code's second moment beside the paper's, for the least and the largest β2."""
    rows = []
    for setting in _of_product(runs, plan):
        for name in _strategies(runs, setting, product=True):
            records = runs.of(setting, name)
            final = [_of_curve(r, "v_mean")[-1] / _of_curve(r, "v_exact")[-1] for r in records.values()]
            rows.append(
                [
                    f"{setting.beta2:g}",
                    name,
                    f"{_mean(final):.3f}",
                    _spread(r["loss"] for r in records.values()),
                    _signed(runs.gaps(setting, name).values()),
                ]
            )
    return markdown(("β2", "product", "mean v ÷ exact", "loss", "over D's"), rows, texts=1)


def cost_table(runs: Runs) -> str:
    """Bytes and times over D's."""
    masters = next(row for row in runs.costs if row["optimizer"] == MASTERS)
    rows = [
        [
            row["optimizer"],
            f"{row['bytes']:g}",
            f"{row['bytes'] + 2:g}",
            f"{1 - (row['bytes'] + 2) / (masters['bytes'] + 2):.0%}",
            f"{row['step_ms']:.2f}",
            f"{row['step_ratio']:.2f}",
        ]
        for row in runs.costs
    ]
    headers = ("optimizer", "bytes", "with gradient", "less than D", "step, ms", "step ÷ D's")
    return markdown(headers, rows, texts=1)


def classifier_result(runs: Runs, setting: Setting) -> str:
    """Differences of accuracy from D's with the same seed."""
    theirs = runs.of(setting, BASELINE)
    less = {
        name: [100 * (theirs[seed]["accuracy"] - r["accuracy"]) for seed, r in runs.of(setting, name).items()]
        for name in LETTERS
    }
    below = sum(each > 0 for each in less["none"])
    others = max(abs(each) for name, all_of in less.items() if name != "none" for each in all_of)
    return (
        f"A is less accurate than D with {below} of {len(theirs)} seeds, by {_mean(less['none']):.1f} points "
        f"in the mean; B and C are within {others:.1f} points of D with each."
    )


def classifier_table(runs: Runs, setting: Setting) -> str:
    """Loss and accuracy of a classifier by strategy and seed."""
    rows = []
    for name in (each for each in LETTERS if runs.of(setting, each)):
        records = runs.of(setting, name)
        rows.append(
            [
                _named(name),
                _spread(r["loss"] for r in records.values()),
                _signed(runs.gaps(setting, name).values()),
                ", ".join(f"{r['accuracy']:.1%}" for r in records.values()),
                f"{_mean(r['accuracy'] for r in records.values()):.1%}",
            ]
        )
    headers = ("strategy", "loss", "over D's", "accuracy, by seed", "accuracy, mean")
    return markdown(headers, rows, texts=1)


# Pictures. --------------------------------------------------------------------------------------------------


def draw_main(runs: Runs, setting: Setting, path: Path) -> None:
    """Loss over D's, EDQ ratio, and lost updates, by step: means over seeds."""
    figure = Figure(figsize=(15, 5.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for name in _strategies(runs, setting):
        curves = (
            _gap_curve(runs, setting, name),
            *(_mean_curve(runs.of(setting, name).values(), key) for key in ("edq_ratio", "lost_share")),
        )
        for axes, points in zip(panels, curves, strict=True):
            axes.plot(*zip(*points, strict=True), label=_named(name), **_style(name))
    panels[0].set_yscale("symlog", linthresh=0.005)
    panels[2].set_yscale("symlog", linthresh=0.001)
    titles = ("Validation loss over D's, nats per byte", "EDQ ratio", "Share of updates that are lost")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=80)


def _style(name: str) -> dict[str, Any]:
    return {"color": STRATEGIES[name].colour, "linestyle": STRATEGIES[name].line, "linewidth": 2}


def _mean_curve(records: Iterable[Record], name: str) -> list[tuple[float, float]]:
    curves = [record["curves"][name] for record in records]
    return [(points[0][0], _mean(value for _, value in points)) for points in zip(*curves, strict=True)]


def _gap_curve(runs: Runs, setting: Setting, name: str) -> list[tuple[float, float]]:
    """How much higher the loss is than D's."""
    curves = (_mean_curve(runs.of(setting, each).values(), "loss") for each in (name, BASELINE))
    return [(step, loss - theirs) for (step, loss), (_, theirs) in zip(*curves, strict=True)]


def draw_sweeps(runs: Runs, plan: Plan, path: Path) -> None:
    """The final loss over D's by setting, a dot for each seed."""
    figure = Figure(figsize=(15, 6.5), layout="constrained")
    axes = figure.subplots()
    names = [name for name in _strategies(runs, plan.main) if name != BASELINE]
    for position, name in enumerate(names):
        offset = 0.8 * (position / max(1, len(names) - 1) - 0.5)
        points = [
            (column + offset, gap)
            for column, setting in enumerate(plan.settings)
            for gap in runs.gaps(setting, name).values()
        ]
        axes.plot(
            *zip(*points, strict=True),
            label=_named(name),
            color=STRATEGIES[name].colour,
            marker="osD^v<>PX*hp"[position % 12],
            linestyle="",
            markersize=6,
        )
    axes.axhline(0, color="black", linestyle=":")
    for column in range(1, len(plan.settings)):
        axes.axvline(column - 0.5, color="black", alpha=0.15)
    axes.set_xticks(
        range(len(plan.settings)), [_title(s, plan.main).replace(", ", "\n") for s in plan.settings]
    )
    axes.set_yscale("symlog", linthresh=0.003)
    axes.set_ylabel("final loss over D's, nats per byte (linear up to 0.003)")
    axes.grid(alpha=0.3, axis="y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=80)


def draw_product(runs: Runs, plan: Plan, path: Path) -> None:
    """The released product beside the paper's, for the least and the largest β2: loss and moments."""
    settings = _of_product(runs, plan)
    figure = Figure(figsize=(15, 4.6 * len(settings)), layout="constrained")
    rows = figure.subplots(len(settings), 2, squeeze=False)
    for setting, panels in zip(settings, rows, strict=True):
        for name in _strategies(runs, setting, product=True):
            records = list(runs.of(setting, name).values())
            stored, exact = _mean_curve(records, "v_mean"), _mean_curve(records, "v_exact")
            ratios = [(step, v / e) for (step, v), (_, e) in zip(stored, exact, strict=True)]
            for axes, points in zip(panels, (_gap_curve(runs, setting, name), ratios), strict=True):
                axes.plot(*zip(*points, strict=True), label=_named(name), **_style(name))
        panels[0].set_title(f"Validation loss over D's, β2 = {setting.beta2:g}")
        panels[1].set_title(f"Mean of the second moments over the exact, β2 = {setting.beta2:g}")
        for axes in panels:
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
    figure.legend(*rows[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=80)


# The page. --------------------------------------------------------------------------------------------------


def _sentence(runs: Runs, setting: Setting) -> str:
    """What the main setting's numbers say, whichever way they fall."""
    plain = _rounded(_mean(runs.gaps(setting, "none").values()))
    names = ("light, mcf", "plus, mcf", "light", "plus", "8 bytes", "5.1 bytes")
    gaps = [_mean(runs.gaps(setting, name).values()) for name in names]
    side = "above" if plain > 0 else "below"
    return (
        f"**Plain bf16 ends {abs(plain):.4f} nats {side} fp32 masters. With error terms, in 5.1 to 10 bytes\n"
        f"per parameter instead of 14, they end within {max(map(abs, gaps)):.4f} of them.**"
    )


def _machines(runs: Runs) -> str:
    found = {(r["machine"], r["torch"], r["python"]) for r in (*runs.records, *runs.costs)}
    return "; ".join(f"{machine}, torch {torch}, Python {python}" for machine, torch, python in sorted(found))


def _large(runs: Runs) -> str:
    setting = Setting(size="124m")
    if not _strategies(runs, setting):
        return (
            "not run. `./dev paper --device cuda --size 124m` trains all of them on a GPU, nine minutes\n"
            "a call, and goes on where it was; its table then stands here."
        )
    return f"\n\n{main_table(runs, setting)}"


def page(runs: Runs, plan: Plan) -> str:
    """The document."""
    costs = runs.costs[0]
    many = len({r["seed"] for r in runs.records})
    shown = _shown(runs, plan)
    sizes = ", ".join(dict.fromkeys(_size(runs, s) for s in shown.settings))
    return Template(TEMPLATE.read_text()).substitute(
        trainings=sum(cell.seed in runs.of(cell.setting, cell.strategy) for cell in plan.cells),
        planned=len(plan.cells),
        seeds=many,
        minutes=round(sum(r["seconds"] for r in runs.records) / 60),
        machines=_machines(runs),
        sizes=sizes,
        masked_start=SIZES[plan.main.size].masked_start,
        summary=summary(runs, shown),
        main_table=main_table(runs, shown.main),
        main_result=_sentence(runs, shown.main),
        sweep_table=sweep_table(runs, shown),
        level=f"{LEVEL:g}",
        claim_table=claim_table(runs, shown),
        pairs_table=pairs_table(runs.pairs or Runs([], []), shown.settings),
        product_table=product_table(runs, shown),
        classifier_result=classifier_result(runs, plan.classifier),
        classifier_table=classifier_table(runs, plan.classifier),
        classifier_steps=plan.classifier.steps(),
        classifier_windows=ACCURACY_BATCHES * VALIDATION_BATCH,
        millions=f"{costs['parameters'] / 1e6:.1f}",
        tokens=costs["tokens"],
        threads=costs["threads"],
        cost_table=cost_table(runs),
        passes_ms=f"{costs['passes_ms']:.0f}",
        large=_large(runs),
    )


def _shown(runs: Runs, plan: Plan) -> Plan:
    """The plan with those settings alone that D has been trained in."""
    return replace(plan, settings=tuple(s for s in plan.settings if runs.of(s, BASELINE)))


def _size(runs: Runs, setting: Setting) -> str:
    parameters = next(iter(runs.of(setting, BASELINE).values()))["parameters"]
    return f"{setting.size} ({parameters / 1e6:.2g} M parameters)"


def write_page(results: Path, document: Path, plan: Plan) -> None:
    """Write the document and, beside it, its pictures."""
    runs = Runs.of_folder(results)
    document.parent.mkdir(parents=True, exist_ok=True)
    document.write_text(page(runs, plan))
    shown = _shown(runs, plan)
    draw_main(runs, shown.main, document.with_name("paper-main.png"))
    draw_sweeps(runs, shown, document.with_name("paper-sweeps.png"))
    draw_product(runs, shown, document.with_name("paper-product.png"))
