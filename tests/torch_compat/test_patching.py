"""A patch: what it replaces, for whom, for how long, and what it says where torch is another."""

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from collage_fx.torch_compat import PATCHES
from collage_fx.torch_compat.patching import Patch, _owner, misfit
from tests.patches_page import PAGE, page
from tests.support.substitutes import is_entered

#: What stands for something of torch's.
HERE = f"{__name__}:"


class Base:
    def inherited(self) -> str:
        return "original"


class Target(Base):
    def method(self, x: int = 0) -> str:
        return "original"

    @staticmethod
    def static(x: int = 0) -> str:
        return "original"

    @classmethod
    def of_class(cls) -> str:
        return f"original of {cls.__name__}"


def function(x: int, *, y: int = 0) -> str:
    text = "a piece of text"
    return f"original{x + y}" if text else ""


def _saying(word: str) -> Callable[..., str]:
    """A replacement that says that it was there."""
    return lambda original, *args, **kwargs: f"{word}({original(*args, **kwargs)})"


@pytest.fixture(autouse=True)
def _module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This file under its name, which pytest's import mode does not see to; restored afterwards."""
    monkeypatch.setitem(__import__("sys").modules, __name__, SimpleNamespace(**globals()))
    before = dict(vars(Target))
    yield
    for name in set(vars(Target)) - set(before):
        delattr(Target, name)
    for name in ("method", "static", "of_class"):
        setattr(Target, name, before[name])


def _patch(name: str) -> Patch:
    return Patch(name=name, target=f"{HERE}Target.{name}", why="a test")


@pytest.mark.parametrize("name", ["method", "static", "inherited", "of_class"])
def test_a_patch_is_in_force_within_and_gone_afterwards(name: str) -> None:
    raw, before = vars(Target).get(name), getattr(Target(), name)()
    patch = _patch(name)
    with patch.entered(_saying("ours")):
        assert getattr(Target(), name)() == f"ours({before})"
        assert is_entered(patch)
        assert patch.is_in_place
        with patch.entered(_saying("inner")):
            assert getattr(Target(), name)() == f"inner(ours({before}))"
        assert getattr(Target(), name)() == f"ours({before})"
    assert vars(Target).get(name) is raw
    assert not patch.is_in_place


def test_other_threads_get_what_was_replaced() -> None:
    inside, looked, said = threading.Event(), threading.Event(), []

    def other() -> None:
        inside.wait()
        said.append(Target().method())
        looked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with _patch("method").entered(_saying("ours")):
        inside.set()
        assert looked.wait(30)
    thread.join()
    assert said == ["original"]


def test_two_threads_within_leave_in_any_order() -> None:
    patch, entered, left = _patch("method"), threading.Event(), threading.Event()
    said = []

    def other() -> None:
        with patch.entered(_saying("second")):
            entered.set()
            left.wait()
            said.append(Target().method())

    thread = threading.Thread(target=other)
    with patch.entered(_saying("first")):
        thread.start()
        entered.wait()
        said.append(Target().method())
    said.append(Target().method())
    left.set()
    thread.join()
    assert said == ["first(original)", "original", "second(original)"]
    assert not patch.is_in_place


def _theirs(name: str) -> None:
    original = getattr(Target, name)

    @functools.wraps(original)
    def wrapped(self: Any) -> str:
        return f"theirs({original(self)})"

    setattr(Target, name, wrapped)


def test_an_installed_patch_keeps_its_place_below_and_above_those_of_others() -> None:
    patch = _patch("method")
    _theirs("method")
    patch.install(_saying("ours"))
    assert Target().method() == "ours(theirs(original))"
    _theirs("method")
    patch.install(_saying("again"))
    assert Target().method() == "theirs(again(theirs(original)))"


def test_somebody_elses_replacement_outlives_ours() -> None:
    patch = _patch("method")
    with patch.entered(_saying("ours")):
        _theirs("method")
        assert Target().method() == "theirs(ours(original))"
    assert Target().method() == "theirs(original)"
    with patch.entered(_saying("ours")):
        assert Target().method() == "ours(theirs(original))"
    assert Target().method() == "theirs(original)"


def test_a_patch_that_this_version_does_without_changes_nothing() -> None:
    patch = Patch(name="old", target=f"{HERE}Target.missing", why="a test", until=(2, 0))
    patch.install(_saying("ours"))
    with patch.entered(_saying("ours")):
        assert patch.misfit is None
        assert Target().method() == "original"


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        (f"{HERE}function(x) has y, text", None),
        (f"{HERE}Target has method, inherited", None),
        ("collage_fx.torch_compat.patching:Patch has relies_on", None),
        ("collage_fx.torch_compat.patching:_Layer has installed", None),
        ("no.such.module:name", "no.such.module:name: No module named 'no'"),
        (f"{HERE}Target.lost", "has no attribute 'lost'"),
        (f"{HERE}function(y)", "function takes x, y, not y"),
        (f"{HERE}function has z", "function no longer has z"),
        (f"{HERE}Target has lost", "Target no longer has lost"),
    ],
)
def test_what_no_longer_fits_is_told(shape: str, told: str | None) -> None:
    found = misfit(shape)
    assert (found is None) if told is None else (found is not None and told in found)


def test_a_patch_tells_what_it_relies_on_too() -> None:
    lost = f"{HERE}Target.lost"
    patch = Patch(name="all", target=f"{HERE}Target.method", why="a test", relies_on=(lost,))
    assert "lost" in str(patch.misfit)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_of_something_renamed_changes_nothing(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it patches, and whatever else it relies on."""
    for shape in (patch.target, *patch.relies_on):
        fresh = replace(patch, until=None, is_there=True)
        owner, name = _owner(shape)
        with monkeypatch.context() as renamed:
            renamed.delattr(next(c for c in getattr(owner, "__mro__", [owner]) if name in vars(c)), name)
            if hasattr(owner, name):
                continue  # inherited: of Python 3.11 on, object has __getstate__
            told = fresh.misfit
            assert told is not None
            assert name in told
            fresh.install(_saying("ours"))
            with fresh.entered(_saying("ours")):
                assert not hasattr(owner, name)
                assert not fresh.is_in_place


def test_each_patch_says_with_what_it_would_go() -> None:
    assert [patch.name for patch in PATCHES if not patch.goes_with] == []
    assert PAGE.read_text() == page(), "python -m tests.patches_page writes the page"


def test_all_patches_fit_and_have_names_of_their_own() -> None:
    assert [patch.misfit for patch in PATCHES] == [None] * len(PATCHES)
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)
