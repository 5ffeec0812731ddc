"""What the documentation shows is what the commands print."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from collage_fx import CollageBackend, explain
from collage_fx.choices import OptionFields
from collage_fx.graph.nodes import graph_text
from collage_fx.graph.recurrence import TOLERATED_STALL, representation_error, rms_noise, stall_band
from collage_fx.metrics.rows import ROW
from collage_fx.numerics.formats import BFLOAT16, FLOAT16, FloatFormat
from collage_tools.cli import main
from tests.support.questions import QUESTIONS
from tests.support.training import parameters

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
WRITTEN_WITH = "2.13."

as_written = pytest.mark.skipif(
    not torch.__version__.startswith(WRITTEN_WITH),
    reason=f"the pages show graphs as torch {WRITTEN_WITH}x captures them, this is {torch.__version__}",
)


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block of a language."""
    pages = sorted(DOCS.glob("*.md"))
    pattern = rf"^```{language}\n(.*?)^```$"
    return [
        (page.name, text)
        for page in pages
        for text in re.findall(pattern, page.read_text(), re.DOTALL | re.MULTILINE)
    ]


CONSOLE = [
    (page, *text.removeprefix("$ ").rstrip().split("\n", 1))
    for page, text in blocks("console")
    if text.startswith("$ collage-fx ")
]


#: Pages whose programs write the files that their commands read.
MADE_BY_PROGRAM = {"checkup.md"}


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([("weight", torch.nn.Parameter(torch.ones(4).bfloat16()))], lr=0.5)


@as_written
@pytest.mark.parametrize(
    ("command", "shown"),
    [block[1:] for block in CONSOLE],
    ids=[f"{page}: {line}" for page, line, _ in CONSOLE],
)
def test_a_command_prints_what_the_page_shows(
    command: str,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    made = next((page for page, line, _ in CONSOLE if line == command and page in MADE_BY_PROGRAM), None)
    if made is not None:  # the files that the command reads
        exec("\n".join(text for page, text in blocks("python") if page == made), {})
    main(shlex.split(command)[1:])
    captured = capsys.readouterr()
    printed = captured.out + "".join(
        line for line in captured.err.splitlines(True) if line.startswith("collage")
    )
    if command.endswith("doctor"):  # versions and devices are this machine's
        expected = {line for line in shown.splitlines() if re.match(r"cpu .*float16|All is", line)}
        assert len(expected) == 3
        assert expected <= set(printed.splitlines())
    else:
        pattern = ".*".join(map(re.escape, re.split(r"^\.\.\.\n?", shown + "\n", flags=re.MULTILINE)))
        assert re.fullmatch(pattern, printed.rstrip() + "\n", re.DOTALL)


def test_there_are_commands_to_run() -> None:
    assert len(CONSOLE) == 9


@as_written
def test_the_graph_of_sgd_is_the_one_captured() -> None:
    (graph,) = explain(sgd()).graphs
    assert f"```\n{graph_text(graph.before.graph)}\n```" in (DOCS / "how-it-works.md").read_text()


@as_written
def test_the_drawing_of_sgd_is_up_to_date(tmp_path: Path) -> None:
    drawn = explain(sgd()).graphs[0].draw(tmp_path / "sgd.svg")
    assert drawn.read_text() == (DOCS / "sgd.svg").read_text()


@pytest.mark.parametrize(
    ("example", "name"), [("own_pass.py", "ClipGradients"), ("own_format.py", "NearestByte")]
)
def test_what_is_shown_of_ones_own_is_the_examples(example: str, name: str) -> None:
    shown = [text for page, text in blocks("python") if f"class {name}" in text]
    assert len(shown) == 1
    assert shown[0] in (ROOT / "examples" / example).read_text()
    assert len(shown[0].splitlines()) <= 35


@pytest.mark.parametrize("decay", ["0.9", "0.95", "0.98", "0.99", "0.995", "0.999", "0.9999"])
def test_the_table_of_decays(decay: str) -> None:
    def cell(fmt: FloatFormat) -> str:
        exact = Fraction(float(decay))
        error = max(stall_band(exact, fmt), representation_error(exact, fmt))
        return f"{float(error):.2g} {'lossy' if error > TOLERATED_STALL else 'fine'}"

    row = f"| {decay} | {cell(BFLOAT16)} | {cell(FLOAT16)} |"
    assert row in (DOCS / "strategies.md").read_text().splitlines()


@pytest.mark.parametrize("decay", ["0.9", "0.95", "0.99", "0.999"])
def test_the_table_of_noise(decay: str) -> None:
    first, second = (f"{100 * rms_noise(Fraction(decay), fmt):.2g} %" for fmt in (BFLOAT16, FLOAT16))
    rows = (DOCS / "strategies.md").read_text().splitlines()
    assert any(re.match(rf"\| {decay} \| {first} \| \S+ % \| {second} \|", row) for row in rows)


def bytes_in_tables() -> list[tuple[str, str, float]]:
    """(page, options, bytes per parameter of AdamW) of each row that says how many there are."""
    patterns = {
        "strategies.md": (
            r"\| `(none|light|plus|full)` \|[^|]*\| (\d+) \|",
            r"\| `(state=[^`]*)` \| ([\d.]+) \|",
        ),
        "choosing.md": (r"\| [^|]+ \| `([^`]+)` \| ([\d.]+) \|",),
    }
    found = []
    for page, of_page in patterns.items():
        for pattern in of_page:
            rows = re.findall(f"^{pattern}", (DOCS / page).read_text(), re.MULTILINE)
            assert rows, (page, pattern)
            found += [(page, options, float(count)) for options, count in rows]
    return found


@pytest.mark.prose
@pytest.mark.parametrize(("page", "options", "count"), bytes_in_tables())
def test_bytes_are_those_of_a_report(page: str, options: str, count: float) -> None:
    if "=" not in options:
        given: dict[str, Any] = {"strategy": options}
    else:
        given = eval(f"dict({options})", {"dict": dict})
        if "state" in given:
            given["strategy"] = "light"
    weights = parameters(shapes=((1024, 1024), (1024,)))
    report = explain(torch.optim.AdamW(weights), **given)
    assert report.bytes_per_parameter()["total"] == pytest.approx(count, abs=0.0101)


#: Rows of the README's table, and of the demo's. Masters are as people use them, not the demo's reference.
README_ROWS = {
    "plain bf16": ("none", None),
    "**default**": ("plus", None),
    "`bytes_per_parameter=8`": ("8 bytes", None),
    "`bytes_per_parameter=5.1`": ("5.1 bytes", None),
    "`bytes_per_parameter=4.1`": ("4.1 bytes", None),
    "fp32 masters": ("fp32 master", 14.0),
}


def test_the_readme_has_the_numbers_of_the_demo() -> None:
    demo = (DOCS / "demo.md").read_text()
    rows = (ROOT / "README.md").read_text().splitlines()
    for name, (of_demo, held) in README_ROWS.items():
        found = re.search(rf"^    {of_demo} {{2,}}([\d.]+) .* ([\d.]+) +[\d.]+ ms$", demo, re.MULTILINE)
        assert found is not None, of_demo
        count = float(found[2]) if held is None else held
        row = f"| {name} | {count:g} | {7 * count:.0f} GB | {float(found[1]):.3f} |"
        assert row in rows, row


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    missing = [each for each in targets if "://" not in each and each and not (page.parent / each).exists()]
    assert missing == []


def test_the_short_table_of_small_learning_rates_is_that_of_the_long_ones() -> None:
    text, measured = (DOCS / "beyond-fp32.md").read_text().split("Error of the weights after 1500 steps")
    ours, masters = (
        next(line.split("|") for line in measured.splitlines() if line.startswith(f"| {name} "))
        for name in ("here, bfloat16, `plus`", "float32, or float32 masters")
    )
    assert f"lr 3e-6 | {ours[4].strip()} | {masters[4].strip()} |" in text


@pytest.mark.parametrize("state", ["bf16", "block16", "block8"])
def test_the_first_table_of_float32_parameters_is_that_of_the_measured_ones(state: str) -> None:
    first, measured = (DOCS / "float32.md").read_text().split("## Measured")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in measured.splitlines()
        if line.startswith(f'| `state="{state}"` ')
    ]
    errors, losses, times = rows
    _, _, *counts, _ = next(line for line in first.splitlines() if line.startswith(f'| `"{state}"` ')).split(
        " | "
    )
    assert counts == [errors[1], errors[2], times[1]]
    said = re.search(r"within ([\d.]+) of float32's", first)
    assert said
    assert abs(float(losses[-1].split()[0])) <= float(said[1])


@pytest.mark.parametrize(("question", "answer"), QUESTIONS.items())
def test_a_question_is_answered_one_click_from_the_readme(
    question: str, answer: tuple[str, str, str]
) -> None:
    page, anchor, words = answer
    readme = (ROOT / "README.md").read_text()
    assert page == "README.md" or f"](docs/{page}" in readme, question
    text = readme if page == "README.md" else (DOCS / page).read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert anchor in slugs
    assert words in text


def test_the_pages_list_all_options() -> None:
    names = {each.name for each in fields(OptionFields)}
    (public,) = re.findall(r"^\| the options (.*?) \|", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", public)) == names
    table = (DOCS / "options.md").read_text().partition("## Values")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == names


def test_the_bytes_kept_of_a_measured_tensor() -> None:
    kept = f"{(len(ROW) + 1) * torch.float64.itemsize} bytes per tensor and"
    assert kept in (DOCS / "metrics.md").read_text()
    assert kept in str(CollageBackend.metrics.__doc__)


#: Parts of pages that commands have written, and pages that they write as wholes.
GENERATED = re.compile(r"<!-- (?:written )?by .*?<!-- (?:end|to here)[^>]*-->|```.*?```", re.DOTALL)
BY_COMMANDS = {
    "compatibility.md",
    "compatibility-rows.md",
    "formats.md",
    "paper.md",
    "reliability.md",
    "demo.md",
}
#: Measured numbers in sentences: shares, factors, times.
MEASURED = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(?= times| %| ms| ?×| nats)")
#: A page -> numbers in its sentences that are in no table of a command, and the reason.
ALLOWED = {
    "strategies.md": {"0.091", "0.055", "0.072", "0.28"},  # test_the_table_of_decays and _of_noise hold them
    "metrics.md": {"40", "38"},  # an example's text, of an optimizer in words
    "gpu.md": {"14.3", "90"},  # measured by hand on the card, as the page says
}


def _written_by_commands() -> str:
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted(DOCS.glob("*.md"))]
    parts = [
        text if page.name in BY_COMMANDS else "".join(GENERATED.findall(text))
        for page in pages
        for text in [page.read_text()]
    ]
    return "\n".join(parts)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_a_measured_number_in_a_sentence_is_in_a_table_that_a_command_wrote(page: Path) -> None:
    if page.name in BY_COMMANDS:
        return
    known = {float(each) for each in re.findall(r"\d+(?:\.\d+)?", _written_by_commands())}
    known |= {round(100 * each, 6) for each in known if each < 1}  # a share, written in percent
    found = MEASURED.findall(GENERATED.sub("", page.read_text()))
    unknown = {each for each in found if float(each) not in known} - ALLOWED.get(page.name, set())
    assert not unknown, f"{page.name}: write them by a command, or hold them by a test"


def test_comparison_says_the_times_of_its_table() -> None:
    text = (DOCS / "comparison.md").read_text()
    for row, said in (
        ("HeavyBall, 16 \\+ 8 bits", r"compiled step takes ([\d.]+) times as long as a copy"),
        (r"Kahan sum of weights \(optimi\)", r"takes ([\d.]+) times as long as a copy;"),
    ):
        measured = re.search(rf"^\| {row} .* ([\d.]+) \|$", text, re.MULTILINE)
        spoken = re.search(said, text)
        assert measured
        assert spoken
        assert spoken[1] == measured[1]


def test_the_readme_says_how_fast_a_step_is_on_cpus() -> None:
    tables = (ROOT / "benchmarks" / "README.md").read_text().split("| optimizer ")[1:]
    faster = []
    for table in tables:
        heads = [each.strip() for each in table.splitlines()[0].split("|")]
        row = re.search(r"^\| torch fp32 fused +(\|.*)$", table, re.MULTILINE)
        if row and "plus ÷ it" in heads:
            value = row[1].split("|")[heads.index("plus ÷ it")].split("±")[0].strip()
            faster += [1 / float(value)] if value else []  # that of a GPU has none
    said = re.search(r"A step is \[([\d.]+) to ([\d.]+) times as fast\]", (ROOT / "README.md").read_text())
    assert len(faster) >= 3
    assert said
    assert (said[1], said[2]) == (f"{min(faster):.1f}", f"{max(faster):.1f}")


def test_choosing_says_the_errors_of_the_long_run() -> None:
    long_run = (
        (ROOT / "benchmarks" / "README.md").read_text().partition("**N(0, 1), lr 1e-05, weight decay 0**")[2]
    )
    ends = [
        float(re.search(rf"^\| +[\d.]+ \| {name} .* ([\d.]+) \|$", long_run, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("plus, mcf", "fp32 masters", "plus, exact")
    ]
    mcf, masters, default = (100 * each for each in ends)
    said = f"`mcf` is off by {mcf:.0f} %, fp32 masters by {masters:.1f} %, the default by {default:.2f} %"
    assert said in (DOCS / "choosing.md").read_text()
