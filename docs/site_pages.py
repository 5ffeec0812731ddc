"""A hook of mkdocs: pages and files of the repository that stand outside of docs/ are part of the site.

In the repository, README.md links to ``docs/x.md`` and a page here to ``../README.md``: on the site they are
beside each other.
"""

from __future__ import annotations

import posixpath
import re
from html import unescape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent

#: Files outside, by where they are on the site. Others are added as pages link to them.
PAGES = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "benchmarks/README.md": "benchmarks/README.md",
}
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(<code>)~?([\w.]+)")
NOTE = re.compile(r"(?<![\w`])\[(\d+)\]")
CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
NUMBER = re.compile(r"[-+−<>≥≤≈→÷/×%±(). \d,]*\d[-+−<>≥≤≈→/×%±(). \d,eB]*")
CODE = re.compile(r"<code>([^\n]*?)</code>")
FLAG = re.compile(r"(?<![\w-])--\w[\w-]*")
#: Characters of code in a sentence or a cell up to which it stays on one line.
LONGEST_CODE = 16
#: Where longer code in a cell may be broken: between arguments, or elsewhere, too, if one is long.
COMMA = re.compile(r", ")
LONGEST_ARGUMENT = 24
BREAK = re.compile(r"(?<=[\w)\]}.,\"'])(?:, ?|[_/]|\.(?!\d)|(?:=|\(|\[)(?=[\[\"']|\w{5}))(?![ .)]|$)")
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
BLOCK = re.compile(r'(<div class="[^"]*highlight)(">.*?</div>)', re.DOTALL)
#: A line below the head of a table that a command has printed.
RULE = re.compile(r"^-{3,} {2,}-{3,}", re.MULTILINE)
#: Words of a cell of the longest column, on average, from which a table is one of words.
WORDS_OF_CARDS = 4
#: Words of the home page with the picture below them; the link in them that is shown as a button.
BESIDE = re.compile(r"(?<=\n)(?:\*\*|\| AdamW).*?\n!\[[^\n]*\n", re.DOTALL)
BUTTON = re.compile(r"^\[[^\]]*\]\(#[^)]*\)$", re.MULTILINE)
LINK = re.compile(r"(\]\(|src=\")(?!https?:|#|mailto:)([^)#\"\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add what is outside, and what it and the pages link to."""
    for place, path in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    known = {file.src_uri for file in files}
    for file in [each for each in files if each.src_uri.endswith(".md")]:
        for _, target in LINK.findall(Path(str(file.abs_src_path)).read_text(encoding="utf-8")):
            place = _place(_repository_path(file.src_uri, target))
            source = ROOT / _repository_path(file.src_uri, target)
            if place not in known and source.is_file():
                known.add(place)
                files.append(File.generated(config, place, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to where things are on the site."""
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["navigation", "toc"]  # its section has no other page
        markdown = BESIDE.sub(_beside, markdown)

    def moved(match: re.Match[str]) -> str:
        place = _place(_repository_path(here, match[2]))
        return match[1] + posixpath.relpath(place, posixpath.dirname(here) or ".")

    # A note's number in a table, such as [7] [44], is no link.
    lines = LINK.sub(moved, markdown).split("\n")
    return "\n".join(NOTE.sub(r"\\[\1]", line) if line.startswith("|") else line for line in lines)


def on_page_content(html: str, **_: Any) -> str:
    """Show what docstrings name by roles, ``:class:`~a.B```, as code; tell site.css of cells' contents."""
    text = CODE.sub(_kept, ROLE.sub(lambda match: match[1] + match[2].rpartition(".")[2], html))
    return BLOCK.sub(_ruled, TABLE.sub(_cards, CELL.sub(_classed, text)))


def _beside(match: re.Match[str]) -> str:
    """Words of the home page, whose picture stands beside them where there is room."""
    words = BUTTON.sub(r"\g<0>{ .md-button .md-button--primary }", match[0])
    return f'<div class="beside" markdown>\n\n{words}\n</div>\n'


def _kept(match: re.Match[str]) -> str:
    """Code in a sentence, with a class if it is short, so that no hyphen in it breaks a line; also flags."""
    if len(_words(match[0])) <= LONGEST_CODE:
        return f'<code class="short">{match[1]}</code>'
    return FLAG.sub(r'<span class="short">\g<0></span>', match[0])


def _words(html: str) -> str:
    return unescape(re.sub(r"<.*?>", "", html))


def _ruled(match: re.Match[str]) -> str:
    """A block of code, with a class if it has a table of columns, whose lines are not to be wrapped."""
    is_ruled = RULE.search(re.sub(r"<.*?>", "", match[2].removeprefix('">')))
    return f"{match[1]} ruled{match[2]}" if is_ruled else match[0]


def _cards(match: re.Match[str]) -> str:
    """A table that a phone shows as cards, if it has many columns of words; cells name their columns."""
    heads = [re.sub(r"<.*?>", "", head) for head in re.findall(r"<th[^>]*>(.*?)</th>", match[0], re.DOTALL)]
    cells = re.findall(r"<td.*?</td>", match[0], re.DOTALL)
    counts = [len(re.sub(r"<.*?>", "", cell).split()) for cell in cells]
    rows = len(cells) // len(heads)
    longest = max((sum(counts[i :: len(heads)]) for i in range(len(heads))), default=0)
    if len(heads) < 3 or longest < WORDS_OF_CARDS * rows or 2 * match[0].count('class="number"') > len(cells):
        return match[0]
    columns = iter(heads * rows)

    def named(cell: re.Match[str]) -> str:
        head = next(columns)
        return cell[0] if head in ("", heads[0]) else f'<td data-head="{head}"{cell[1]}>'

    return f'<div class="cards">{re.sub(r"<td([^>]*)>", named, match[0])}</div>'


def _classed(match: re.Match[str]) -> str:
    """A cell of a table, with a class if it is a number; long code in it says where it may be broken."""
    if NUMBER.fullmatch(unescape(match[2].strip())):
        return f'<td class="number"{match[1]}>{match[2]}</td>'
    return f"<td{match[1]}>{CODE.sub(_broken, match[2])}</td>"


def _broken(match: re.Match[str]) -> str:
    """Long code with places to break it; the words between its tags alone have them."""
    pattern = BREAK if max(map(len, _words(match[1]).split(", "))) > LONGEST_ARGUMENT else COMMA
    parts = re.split(r"(<.*?>)", match[1])
    parts[::2] = (pattern.sub(r"\g<0><wbr>", each) for each in parts[::2])
    return f"<code>{''.join(parts)}</code>"


def _repository_path(here: str, target: str) -> str:
    """What a link on a page of the site names, from the repository's root."""
    own = PAGES.get(here, f"docs/{here}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(own), target))


def _place(path: str) -> str:
    """Where on the site a file of the repository is."""
    by_path = {outside: place for place, outside in PAGES.items()}
    return by_path.get(path, path.removeprefix("docs/"))
