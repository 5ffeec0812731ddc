"""Errors have codes that stay, a page each that says what they mean, and examples that raise them."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from collage_fx import CollageBackend, install
from collage_fx.errors import (
    CollageError,
    EagerStepError,
    FailedLoweringError,
    FailedPassError,
    InvalidOptionError,
    UnsupportedTensorError,
)
from collage_fx.graph import StepProgram
from collage_fx.passes.base import Pass
from collage_fx.pipeline import inserted
from collage_tools.cli import main
from tests.error_page import (
    EXAMPLES,
    FOLDER,
    INDEX,
    Example,
    error_kinds,
    explained,
    frame,
    index,
    page_of,
    run,
    shown,
)

#: Codes are for good: a new kind has a new one, and that of a kind that goes is not given again.
CODES = {
    "CFX001": "InvalidOptionError",
    "CFX002": "UnsupportedOptimizerError",
    "CFX003": "UnsupportedTensorError",
    "CFX004": "AliasedStateError",
    "CFX005": "ConflictingErrorFormatError",
    "CFX006": "CheckpointMismatchError",
    "CFX007": "ChangedTensorError",
    "CFX008": "LostErrorTermsError",
    "CFX009": "RecompileLimitError",
    "CFX010": "GraphBreakError",
    "CFX011": "EagerStepError",
    "CFX012": "UncompensatedParameterError",
    "CFX013": "FailedLoweringError",
    "CFX014": "GraphInvariantError",
    "CFX015": "FailedPassError",
    "CFX016": "UnsupportedTorchError",
    "CFX017": "GradientReleaseError",
}

KINDS = list(error_kinds().values())
CASES = [
    pytest.param(kind, example, id=f"{kind.code}-{i}")
    for kind, examples in EXAMPLES.items()
    for i, example in enumerate(examples, start=1)
]


def test_codes_stay() -> None:
    assert {code: kind.__name__ for code, kind in error_kinds().items()} == CODES


@pytest.mark.prose
@pytest.mark.parametrize(("kind", "example"), CASES)
def test_an_example_raises_what_its_page_shows_and_changes_nothing(
    kind: type[CollageError], example: Example
) -> None:
    outcome = run(kind, example)
    assert outcome.told.endswith(f"\n  more: collage-fx error {kind.code}")
    page = page_of(kind).read_text()
    assert shown(example, "")[: -len("\n```\n\n")] in page, "python -m tests.error_page writes the page"
    assert masked(outcome.told) in masked(page), "python -m tests.error_page writes the page"
    assert outcome.is_warning == ("(a warning" in example.caption)
    if not outcome.is_warning:
        assert bool(outcome.changed) == example.is_late, outcome.changed


def masked(text: str) -> str:
    """Without line numbers, and with another torch than that of the pages without what is torch's to say."""
    text = re.sub(r"(\.py:)\d+", r"\1N", text)
    if torch.__version__.startswith("2.13."):
        return text
    return re.sub(r"(eagerly, without error terms: |Inductor failed: ).*", r"\1...", text)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_a_page_is_as_it_is_written(kind: type[CollageError]) -> None:
    """All of it but the messages."""
    page = page_of(kind).read_text()
    without = re.sub(r"(?<=^```text\n).*?\n(?=```$)", "\n", page, flags=re.DOTALL | re.MULTILINE)
    head, foot = frame(kind)
    assert without == head + "".join(shown(each, "") for each in EXAMPLES[kind]) + foot


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_a_kind_is_explained_in_a_few_lines(kind: type[CollageError]) -> None:
    summary, meaning, remedy = explained(kind)
    assert re.fullmatch(r"[A-Z`].*\.", summary)
    assert "\n" not in summary, "a sentence or two"
    assert meaning
    assert remedy
    assert len(f"{summary}\n{meaning}\n{remedy}".splitlines()) <= 10


def test_there_are_pages_of_these_kinds_and_no_others() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {"index", *CODES}
    assert INDEX.read_text() == index(), "python -m tests.error_page writes the page"
    assert re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| `(\w+)` \| .+ \|$", INDEX.read_text(), re.MULTILINE) == [
        *CODES.items()
    ]


def test_only_these_kinds_are_warnings_of_their_own() -> None:
    """Others are warnings with ``strict=False``; these need no such wish."""
    warned_of = {
        kind for kind, examples in EXAMPLES.items() if any("(a warning" in each.caption for each in examples)
    }
    assert warned_of == {EagerStepError, FailedLoweringError}


@pytest.mark.parametrize("code", CODES)
def test_the_command_prints_what_a_kind_means(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["error", code.lower()]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{code}: {CODES[code]}\n\n")
    assert "\n## Example" in printed
    assert "\n## What to do\n" in printed
    assert "](../" not in printed  # a terminal has no links
    assert len(page_of(error_kinds()[code]).read_text()) - len(printed) < 400  # the last line, and links


def test_several_codes_are_explained_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["error", "CFX011", "CFX012"]) == 0
    printed = capsys.readouterr().out
    assert "CFX011: EagerStepError" in printed
    assert "\n\nCFX012: UncompensatedParameterError" in printed


def test_a_code_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["error", "CFX099"]) != 0
    assert "no error 'CFX099'; did you mean CFX0" in capsys.readouterr().err


# Tracebacks: a refusal comes out of Dynamo, and is as short as an error of the user's own. ------------------


def _lbfgs(p: Parameter) -> Optimizer:
    return torch.optim.LBFGS([p])


def _sparse(p: Parameter) -> Optimizer:
    p.grad = torch.ones(4, 4, dtype=torch.bfloat16).to_sparse()
    return torch.optim.SGD([p], lr=0.1)


def _adamw(p: Parameter) -> Optimizer:
    return torch.optim.AdamW([p])


def _of_a_product(p: Parameter) -> Optimizer:
    class Rotates(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            p.copy_(p @ p)

    return Rotates([p], lr=0.1)


MISTAKES: dict[str, tuple[Callable[[Parameter], Optimizer], dict[str, Any], str]] = {
    "LBFGS": (_lbfgs, {}, "UnsupportedOptimizerError: LBFGS decides"),
    "a sparse gradient": (_sparse, {}, "UnsupportedTensorError: a tensor of layout torch.sparse_coo"),
    "a budget too small": (_adamw, {"bytes_per_parameter": 3}, "InvalidOptionError: bytes_per_parameter=3"),
    "a product": (_of_a_product, {}, "UncompensatedParameterError: mm"),
}


def _traceback(mistake: str, *, is_installed: bool) -> str:
    """Return the traceback of a step that is refused, as Python prints it."""
    make, options, _ = MISTAKES[mistake]
    p = Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = make(p)
    step: Callable[..., Any]
    if is_installed:
        step = install(optimizer, **options).step
    else:
        step = torch.compile(optimizer.step, backend=CollageBackend(**options))
    arguments: list[Any] = [lambda: p.sum()] if mistake == "LBFGS" else []
    with pytest.raises(CollageError) as refused:
        step(*arguments)
    return "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("is_installed", [True, False], ids=["install", "torch.compile"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_traceback_is_short(mistake: str, is_installed: bool) -> None:
    """A refusal has 10 to 13 lines: user's call, callee, message. Dynamo has 100 to 180 more."""
    told = _traceback(mistake, is_installed=is_installed)
    assert len(told.splitlines()) <= 15, told
    assert "    step(*arguments)\n" in told, "the user's call"
    assert f"\ncollage_fx.errors.{MISTAKES[mistake][2]}" in told
    assert re.search(r"\n  more: collage-fx error CFX0\d\d\n$", told), "nothing that Dynamo adds"


def test_a_refused_update_is_shown_with_its_statement() -> None:
    told = _traceback("a product", is_installed=True)
    assert re.search(
        rf"where: param_groups\[0\]\.params\[0\], at {re.escape(__file__)}:\d+ in step: p\.copy_", told
    )


def test_a_step_that_is_refused_as_it_runs_is_shown_so_under_fullgraph() -> None:
    """Dynamo would trace the code that shortens the traceback, and raise an error of its own."""

    def refuse(*args: Any) -> None:
        raise UnsupportedTensorError("negative numbers", where="v", remedy="begin with zeros")

    step = torch.compile(lambda x: x + 1.0, backend=lambda gm, inputs: refuse, fullgraph=True)
    with pytest.raises(UnsupportedTensorError, match="negative numbers"):
        step(torch.ones(2))


def test_a_traceback_is_whole_on_request() -> None:
    with torch._dynamo.config.patch(verbose=True):
        assert "symbolic_convert.py" in _traceback("LBFGS", is_installed=True)


def test_frames_of_a_pass_that_fails_are_kept() -> None:
    class Fails(Pass):
        """A pass with a fault."""

        name = "fails"

        def run(self, program: StepProgram) -> str:
            return self.helper(program)

        def helper(self, program: StepProgram) -> str:
            raise ValueError("a fault")

    p = Parameter(torch.ones(8, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = install(torch.optim.SGD([p], lr=0.1), passes=inserted(Fails(), before="analyze"))
    with pytest.raises(FailedPassError) as failed:
        optimizer.step()
    told = "".join(traceback.format_exception(failed.value))
    assert "in run\n" in told
    assert "in helper\n" in told
    assert "symbolic_convert.py" not in told


def test_frames_of_a_closure_are_kept() -> None:
    p = Parameter(torch.ones(8, dtype=torch.bfloat16))

    def closure() -> float:
        install(torch.optim.SGD([p], lr=0.1), strategy="pluss")  # type: ignore[arg-type]
        return 0.0

    optimizer = install(torch.optim.SGD([p], lr=0.1))
    with pytest.raises(InvalidOptionError) as refused:
        optimizer.step(closure)
    assert "in closure\n" in "".join(traceback.format_exception(refused.value))
