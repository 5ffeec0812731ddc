"""Measurements on disk, one file a variant, so that an interrupted run goes on where it stopped.

A measurement holds for the sources and the torch it was made with; files from others are not read.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict
from pathlib import Path

import torch

from collage_tools.audit import Measurement
from tests.compatibility.catalog import Variant

__all__ = ["FOLDER", "load", "save"]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "compat"

#: What a measurement depends on. How rows are listed, run and printed is not in it.
SOURCES = ("collage_fx/**/*.py", "passes/*.py", "tests/compatibility/measure.py")


def _digest(variant: Variant) -> str:
    hashed = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        hashed.update(path.read_bytes())
    subject = variant.row.subject
    always = sorted(subject.always.items())
    facts = (variant.name, subject.lr, always, subject.shapes, subject.steps, subject.version)
    hashed.update(repr((facts, torch.__version__, platform.machine())).encode())
    return hashed.hexdigest()


def _path(variant: Variant) -> Path:
    return FOLDER / f"{hashlib.sha256(variant.name.encode()).hexdigest()[:16]}.json"


def load(variant: Variant) -> Measurement | None:
    """The stored measurement of a variant; None where it has to be measured."""
    path = _path(variant)
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    return Measurement(**stored["measured"]) if stored["digest"] == _digest(variant) else None


def save(variant: Variant, measured: Measurement) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    contents = {"name": variant.name, "digest": _digest(variant), "measured": asdict(measured)}
    _path(variant).write_text(json.dumps(contents, indent=1))
