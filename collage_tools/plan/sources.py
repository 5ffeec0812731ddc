"""Models to plan for: a configuration of transformers, or a Python file with a function ``model()``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from collage_fx.choices import did_you_mean
from collage_fx.errors import InvalidOptionError


@dataclass(eq=False)
class Replaced(TorchFunctionMode):
    """Context manager: other functions run in place of some of torch's."""

    others: Mapping[Any, Callable[..., Any]]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, or the function in its place."""
        return self.others.get(func, func)(*args, **kwargs or {})


@dataclass(frozen=True)
class Source:
    """Model that need not fit into memory: how to make it, and its loss.

    Attributes:
        name: name that tables show.
        make: function that returns the module; called on the meta device.
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
    remedy = "give a Python file that defines model(), which returns a torch.nn.Module"
    if not path.is_file():
        raise InvalidOptionError(f"there is no file {str(path)!r}", where="plan", remedy=remedy)
    sys.path.insert(0, str(path.resolve().parent))  # as for `python FILE`, which may import its neighbours
    found = runpy.run_path(str(path))
    if not callable(found.get("model")):
        raise InvalidOptionError(f"{path} defines no function model()", where="plan", remedy=remedy)
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
        InvalidOptionError: transformers does not know the configuration.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KINDS

    try:
        entries = dict(PreTrainedConfig.get_config_dict(name, local_files_only=True)[0])
    except OSError as error:
        if name not in KINDS:
            raise _refusal(
                f"no configuration {name!r} can be read: a file, a folder with config.json, a repository in "
                "the local cache, and a causal language model of transformers were looked for",
                f"{_similar(name, KINDS)}give the path of a config.json: nothing is downloaded",
            ) from error
        entries = {"model_type": name}
    kind = entries.pop("model_type", None)
    if kind is None:
        remedy = "give the config.json of a model of transformers, or a Python file with model() and loss()"
        raise _refusal(f"{name!r} has no entry model_type", remedy)
    if kind not in KINDS:
        raise _refusal(
            f"{kind}, the model_type of {name!r}, is no causal language model of transformers",
            f"{_similar(str(kind), KINDS)}give a Python file with model() and loss()",
        )
    usual = CONFIG_MAPPING[kind]()
    for key in changes:
        if not hasattr(usual, key):  # GPT-2 has hidden_size as another name of n_embd
            hint = did_you_mean(key, usual.to_dict())
            raise _refusal(f"a configuration of {kind} has no entry {key!r}", hint)
    try:
        config = CONFIG_MAPPING[kind](**{**entries, **changes})
    except Exception as error:  # of transformers or huggingface_hub
        raise _refusal(f"{kind} refuses its configuration: {error}", "change the entry it names") from error
    positions = getattr(config, "max_position_embeddings", None)
    return Source(name, lambda: AutoModelForCausalLM.from_config(config), _loss_of_hf, positions)


def _similar(name: str, kinds: Iterable[str]) -> str:
    """Return the beginning of a remedy that proposes similar types of models; empty if none is similar."""
    hint = did_you_mean(name, kinds)
    return f"{hint} Or " if hint.startswith("did") else ""


def _refusal(met: str, remedy: str) -> InvalidOptionError:
    return InvalidOptionError(met, where="--hf and --set", remedy=remedy)


def _loss_of_hf(model: nn.Module, micro_batch: int, sequence: int) -> Tensor:
    """Compute the loss; conditions on tensors hold, as transformers asks whether all tokens are attended."""
    tokens = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    with Replaced({Tensor.__bool__: lambda _: True}):
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss
