"""The documentation as a site: built with warnings as errors, whole, and from this folder alone."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import collage_fx
from tests.support.browser import BROWSER, NO_BROWSER, View, look
from tests.support.questions import QUESTIONS

pytestmark = pytest.mark.prose

ROOT = Path(__file__).resolve().parent.parent
PHONE, DESKTOP = (390, 844), (1280, 800)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("mkdocs", "mkdocstrings"):
        pytest.importorskip(name, reason="needs what ./dev installs: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).with_suffix(".html") for path in docs.rglob("*.md")}
    pages |= {Path(f"{name}.html") for name in ("index", "CONTRIBUTING", "CHANGELOG")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    loading = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(https?:[^\"> ]+)")
    for page in site.rglob("*.html"):
        assert loading.findall(page.read_text()) == [], page


@pytest.mark.parametrize("name", sorted({*collage_fx.__all__} - {"optim"}))  # of which the page has of()
def test_the_reference_has_all_public_names(site: Path, name: str) -> None:
    page = (site / "reference.html").read_text()
    module = r"collage_fx\.((installation|tools\.explain|tools\.audit)\.)?"
    tools = r"collage_tools\.(audit|checkup\.verdicts|gpu_code\.kernels)\."
    assert re.search(rf'id="({module}|{tools}){name}" class="doc doc-heading"', page)
    assert not re.search(":(class|meth|func|data|mod):", page)


@pytest.mark.parametrize(("question", "answer"), QUESTIONS.items())
def test_a_question_is_answered_one_click_from_the_start(
    site: Path, question: str, answer: tuple[str, str, str]
) -> None:
    page, anchor, _ = answer
    page = page.replace("README.md", "index.md").replace(".md", ".html")
    assert page == "index.html" or f'href="{page}' in (site / "index.html").read_text(), question
    assert f'id="{anchor}"' in (site / page).read_text(), question


def test_search_works_from_a_disk(site: Path) -> None:
    """A browser fetches no file of a disk, but runs scripts: the index has to be one."""
    assert (site / "search" / "search_index.js").is_file()


def test_the_style_sheet_knows_of_numbers_and_long_code(site: Path) -> None:
    paper, training, trainers = (
        (site / f"{name}.html").read_text() for name in ("paper", "training", "trainers")
    )
    assert re.search(r'<td class="number"[^>]*>2\.\d{4} ± 0\.\d{4}</td>', paper)
    assert "<code>metrics[50][" in (site / "metrics.html").read_text()
    assert "<code>prepare(accelerator, <wbr>model, <wbr>opt, <wbr>...)" in training
    assert "<code>trainer.<wbr>train(<wbr>resume_<wbr>from_" in trainers  # one long argument
    assert '<code class="short">--resume</code>' in trainers


def test_handles_are_shown_with_public_methods_alone(site: Path) -> None:
    page = (site / "reference.html").read_text()
    for name, methods in {"GradientRelease": {"remove"}, "Offload": {"remove"}}.items():
        assert set(re.findall(rf'id="collage_fx\.(?:\w+\.)*{name}\.(\w+)"', page)) == methods


@pytest.fixture(scope="module")
def views(site: Path) -> list[View]:
    if BROWSER is None:
        pytest.skip(NO_BROWSER)
    return look(site, sorted(str(page.relative_to(site)) for page in site.rglob("*.html")), [PHONE, DESKTOP])


def test_no_page_is_wider_than_a_phone_or_a_screen(views: list[View]) -> None:
    assert {view.width for view in views} == {PHONE[0], DESKTOP[0]}
    assert {(view.path, view.width): view.wide for view in views if view.wide} == {}


def test_only_tables_of_numbers_scroll_sideways(views: list[View]) -> None:
    """Words and code are wrapped: on a phone tables of words are cards."""
    scrolling = [(view.path, view.width, each) for view in views for each in view.scrolling]
    assert [each for each in scrolling if not each[2].startswith(("table", "printed"))] == []


def test_the_first_screen_has_the_button_and_two_commands(views: list[View]) -> None:
    first = [view.text for view in views if view.path == "index.html"]
    assert len(first) == 2
    for text in first:
        for words in ("fp32 master weights", "Get started", "install(opt)", "./dev demo", "./dev test"):
            assert words in text


def test_the_drawing_is_that_of_the_library(site: Path) -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "site_drawing.py"))["draw"]()
    assert (ROOT / "docs" / "bits.svg").read_text() == drawn, "python docs/site_drawing.py writes it"
    assert (site / "bits.svg").is_file()
