"""The documentation as a site: built with warnings as errors, whole, and from this folder alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import collage_fx
from tests.support.questions import QUESTIONS

pytestmark = pytest.mark.prose

ROOT = Path(__file__).resolve().parent.parent


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
    module = r"collage_fx\.((install|tools\.explain|tools\.audit)\.)?"
    tools = r"collage_tools\.(checkup\.verdicts|gpu_code\.kernels)\."
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
    paper, options = ((site / f"{name}.html").read_text() for name in ("paper", "training"))
    assert re.search(r'<td class="number"[^>]*>2\.\d{4} ± 0\.\d{4}</td>', paper)
    assert "<code>metrics[50][" in (site / "metrics.html").read_text()
    assert re.search(r'<td class="long"[^>]*><code>get_peft_model|<td class="long"', options)
