"""Models to plan for: a configuration of transformers, or a Python file with a function ``model()``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from collage_fx.choices import did_you_mean
from collage_fx.errors import InvalidOptionError


@dataclass(frozen=True)
class Source:
    """Model that need not fit into memory: how to make it, and its loss.

    Attributes:
        name: name that tables show.
        make: function that returns the module; called under fake tensors, which have no memory.
        loss: function of the module, a micro-batch and a sequence length; returns the loss, a scalar.
        positions: longest sequence that the model has positions for; None = not known.
    """

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], Tensor]
    positions: int | None = None


def from_file(path: Path) -> Source:
    """Return the source of a Python file with ``model()`` and, unless that takes tokens, ``loss()``.

    ``model()`` returns a module. ``loss(model, micro_batch, sequence)`` makes the inputs, returns the loss.
    Without ``loss`` the module is called with tokens, int64[micro_batch, sequence], and returns a scalar or
    logits, [micro_batch, sequence, classes], whose cross entropy is computed in float32.

    Raises:
        InvalidOptionError: there is no such file, or no function ``model`` in it.
    """
    if not path.is_file():
        raise InvalidOptionError(
            f"there is no file {str(path)!r}", where="plan", remedy="give a Python file that defines model()"
        )
    sys.path.insert(0, str(path.resolve().parent))  # as for `python FILE`, which may import its neighbours
    found = runpy.run_path(str(path))
    if not callable(found.get("model")):
        raise InvalidOptionError(
            f"{path} defines no function model()",
            where="plan",
            remedy="define model(), which returns a torch.nn.Module, and loss(model, micro_batch, sequence) "
            "if the model does not take tokens",
        )
    return Source(path.stem, found["model"], found.get("loss", _loss_of_tokens))


def _loss_of_tokens(model: nn.Module, micro_batch: int, sequence: int) -> Tensor:
    tokens = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    result: Tensor = model(tokens)
    if not result.dim():
        return result
    return nn.functional.cross_entropy(result.flatten(0, -2).float(), tokens.flatten())


def from_hf(name: str, changes: Mapping[str, Any]) -> Source:
    """Return the source of a causal language model of transformers; nothing is downloaded.

    Args:
        name: file ``config.json``, folder with such a file, repository in the local cache, or type of a model
            such as ``llama``, whose default configuration is taken.
        changes: entries of the configuration that get other values.

    Raises:
        InvalidOptionError: transformers is not installed or does not know the configuration.
    """
    try:
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
        from transformers import PreTrainedConfig as Config
    except ImportError as error:
        raise InvalidOptionError(
            "--hf needs the package transformers", where="hf", remedy="pip install transformers"
        ) from error
    entries: dict[str, Any] = {"model_type": name}
    if name not in CONFIG_MAPPING or Path(name).exists():
        try:
            entries = dict(Config.get_config_dict(name, local_files_only=True)[0])
        except OSError as error:
            raise InvalidOptionError(
                f"no configuration {name!r} can be read: a file, a folder with config.json, a repository in "
                "the local cache, and a model type of transformers were looked for",
                where="hf",
                remedy="give the path of a config.json; nothing is downloaded",
            ) from error
    kind = entries.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise InvalidOptionError(
            f"transformers does not know the model_type {kind!r} of the configuration {name!r}",
            where="hf",
            remedy=f"{did_you_mean(str(kind), list(CONFIG_MAPPING))}, or give a Python file with model()",
        )
    usual = CONFIG_MAPPING[kind]()
    for key in changes:
        if not hasattr(usual, key):
            raise InvalidOptionError(
                f"a configuration of {kind} has no entry {key!r}",
                where="set",
                remedy=did_you_mean(key, list(usual.to_dict())),
            )
    config = CONFIG_MAPPING[kind](**{**entries, **changes})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InvalidOptionError(
            f"{kind}, the model_type of {name!r}, is no causal language model of transformers",
            where="hf",
            remedy="give a Python file with model() and loss(model, micro_batch, sequence) instead",
        )
    positions = getattr(config, "max_position_embeddings", None)
    return Source(name, lambda: AutoModelForCausalLM.from_config(config), _loss_of_hf, positions)


class _Whole(TorchFunctionMode):
    """Context manager: conditions on tensors hold; transformers asks whether no token is padded or packed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func is Tensor.__bool__ else func(*args, **kwargs or {})


def _loss_of_hf(model: nn.Module, micro_batch: int, sequence: int) -> Tensor:
    tokens = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    with _Whole():
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss
