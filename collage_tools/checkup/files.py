"""Checkpoints on a disk, of any program, as mappings that read a tensor when it is looked up."""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collage_fx.errors import CheckpointMismatchError, InvalidOptionError
from collage_fx.tools import SafetensorsFile

#: Endings of files that ``torch.save`` writes.
TORCH_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
#: Files of a folder that hold weights, best first; the first pattern with a match is taken.
IN_A_FOLDER = (
    *("*.safetensors.index.json", "*.bin.index.json", "*.safetensors"),
    *(f"*{ending}" for ending in TORCH_ENDINGS),
)
#: Beginnings of names of files that lie beside weights and hold none.
NO_WEIGHTS = (
    "optimizer",
    "training_args",
    "scheduler",
    "scaler",
    "rng_state",
    "random_states",
    "adapter_config",
)
#: Keys under which training programs save the weights beside other things.
WEIGHTS_UNDER = ("state_dict", "model_state_dict", "model_state", "model", "module", "params", "weights")


def checkpoint_tensors(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a checkpoint by name; reading begins when a tensor is looked up.

    Args:
        path: a file in the safetensors format or of ``torch.save``, an index of such files
            (``*.index.json``), or a folder that holds one of them.

    Returns:
        mapping of tensors on the CPU.

    Raises:
        InvalidOptionError: there is no such file, or no weights in the folder.
        CheckpointMismatchError: a file cannot be read, or holds objects besides tensors, numbers and texts.
    """
    if not path.exists():
        raise InvalidOptionError(
            f"there is no file or folder {str(path)!r}", where="path", remedy="give the path of a checkpoint"
        )
    if path.is_dir():
        return _Joined([checkpoint_tensors(each) for each in _weights_in(path)])
    if path.name.endswith(".index.json"):
        return _Joined([checkpoint_tensors(path.parent / name) for name in _shards(path)])
    if path.suffix in TORCH_ENDINGS or zipfile.is_zipfile(path):  # an archive: torch.save, by another name
        loaded = load_plain(path)
        while isinstance(loaded, Mapping):
            inner = [loaded[key] for key in WEIGHTS_UNDER if isinstance(loaded.get(key), Mapping)]
            if not inner:
                break
            loaded = inner[0]
        return dict(_flat(loaded, ""))
    try:
        return SafetensorsFile(path)
    except CheckpointMismatchError as error:
        remedy = (
            "give a file that safetensors or torch.save has written, an index of such files, or their folder"
        )
        met = "neither safetensors nor torch.save has written this file, or its end is missing"
        raise CheckpointMismatchError(met, where=error.where, remedy=remedy) from error


def load_plain(path: Path) -> Any:
    """Load a file of ``torch.save`` that holds tensors and plain objects; its tensors are memory maps."""
    try:
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError:  # of torch before 1.6, whose files cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointMismatchError(
            f"the file holds an object of {found[1]}, which is not loaded: its code could do anything"
            if found
            else "torch.save has not written this file, or its end is missing",
            where=os.fspath(path),
            remedy="give a file of torch.save that holds state dicts alone, or a safetensors file",
        ) from error


class _Joined(Mapping[str, Tensor]):
    """Mapping of the tensors of several files."""

    def __init__(self, parts: list[Mapping[str, Tensor]]) -> None:
        self._part_of = {name: part for part in parts for name in part}

    def __getitem__(self, name: str) -> Tensor:
        return self._part_of[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._part_of)

    def __len__(self) -> int:
        return len(self._part_of)


def _weights_in(folder: Path) -> list[Path]:
    for pattern in IN_A_FOLDER:
        found = [each for each in sorted(folder.glob(pattern)) if not each.name.startswith(NO_WEIGHTS)]
        if found:
            return found
    raise InvalidOptionError(
        f"there are no weights in the folder {str(folder)!r}",
        where="path",
        remedy=f"give a folder with a file {', '.join(IN_A_FOLDER)}",
    )


def _shards(index: Path) -> list[str]:
    """Return the names of the files that an index lists."""
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointMismatchError(
            f"an index without a weight_map ({type(error).__name__}: {error})",
            where=os.fspath(index),
            remedy="give the index that save_pretrained has written, or the files themselves",
        ) from error


def _flat(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts and lists with their paths."""
    if isinstance(value, Tensor):
        yield name or "tensor", value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from _flat(each, f"{name}.{i}" if name else str(i))
