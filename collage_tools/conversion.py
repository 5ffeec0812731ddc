"""Conversion of float32 jobs' checkpoints to checkpoints of compensated bfloat16 jobs, and back.

A checkpoint is loaded into modules and an optimizer that hold its tensors under its own names and compute
nothing; :func:`collage_fx.convert` converts them, and the checkpoint is written again in its own form.
"""

from __future__ import annotations

import re
import runpy
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import Optimizer

import collage_fx
from collage_fx.errors import CheckpointMismatchError, InvalidOptionError
from collage_tools.checkup import TORCH_ENDINGS, WEIGHTS_UNDER, load_plain

#: Beginning of the keys of error terms in a state dict.
OURS = "collage_fx"
#: Names of an optimizer's file in a trainer's folder.
OF_OPTIMIZER = ("optimizer.pt", "optimizer.bin")
#: Names of the weights' file there.
OF_MODEL = ("model.safetensors", "pytorch_model.bin")


@dataclass
class Checkpoint:
    """Checkpoint of a model and its optimizer.

    Attributes:
        model: state dict of the model.
        optimizer: state dict of the optimizer.
        save: function that writes both state dicts, in the form that they were read in, to a path.
        is_in_order: whether the model's names are in the order of its modules.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    save: Callable[[Mapping[str, Tensor], Mapping[str, Any], Path], None]
    is_in_order: bool = True


def convert_checkpoint(
    source: Path, target: Path, dtype: torch.dtype, *, job: Path | None = None, keep: Sequence[str] = ()
) -> collage_fx.Conversion:
    """Convert the checkpoint of a float32 job to one of a compensated bfloat16 job, or back.

    No bit of a weight that the optimizer steps, or of its state, is lost. A job that has installed its
    optimizer loads the result, within any budget of bytes. Tensors that the optimizer does not step, such as
    buffers and frozen weights, stay as they are.

    Args:
        source: file of ``torch.save`` with the state dicts of a model and an optimizer; folder of
            accelerate or of the Trainer of transformers; or folder of ``torch.distributed.checkpoint``.
        target: file or folder to write, which does not exist; for ``torch.distributed.checkpoint``, a file.
        dtype: ``torch.bfloat16`` or ``torch.float32``.
        job: Python file with ``model()`` and ``optimizer(model)``, which return the job's: the names of the
            optimizer's parameters are read from them. By default they are in the checkpoint, or the only
            ones that fit.
        keep: as for :func:`collage_fx.convert`.

    Returns:
        the summary of the conversion.

    Raises:
        CheckpointMismatchError: a state dict is missing, or the names of parameters are not known.
        CollageError: as :func:`collage_fx.convert` raises it. Nothing has been written.
    """
    if target.exists():
        raise InvalidOptionError(f"{target} exists", where="OUT", remedy="name a file or folder to make")
    found = _read(source)
    names = _names_of(job) if job else _own_names(found, source)
    model, optimizer = _held(found, names, source, is_installed=dtype is torch.float32)
    done = collage_fx.convert(model, optimizer, dtype, keep=keep)
    saved = optimizer.state_dict()
    keys = [key for group in found.optimizer["param_groups"] for key in group["params"]]
    saved["state"] = {keys[i]: state for i, state in saved["state"].items()}
    for group, before in zip(saved["param_groups"], found.optimizer["param_groups"], strict=True):
        group["params"] = [*before["params"]]
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    others = {key: each for key, each in found.optimizer.items() if not key.startswith(OURS)}
    found.save({**found.model, **weights}, {**others, **saved}, target)
    if (config := target / "config.json").is_file():
        config.write_text(_with_dtype(config.read_text("utf-8"), dtype), "utf-8")
    return done


def _with_dtype(config: str, dtype: torch.dtype) -> str:
    """Return a model's config of transformers, which ``from_pretrained`` loads in the dtype that it names.

    Dtypes other than float32 and bfloat16 stay, and so does all other text.
    """
    name = str(dtype).removeprefix("torch.")
    return re.sub(r'("(?:torch_)?dtype"\s*:\s*)"(?:float32|bfloat16)"', rf'\1"{name}"', config)


# forms of a checkpoint --------------------------------------------------------------------------------------


def _read(source: Path) -> Checkpoint:
    """Read a checkpoint in any form."""
    if not source.exists():
        raise InvalidOptionError(f"there is no {source}", where="IN", remedy="give a checkpoint's path")
    if source.is_file():
        return _in_file(load_plain(source), source)
    if (source / ".metadata").exists():
        with TemporaryDirectory() as folder:
            dcp_to_torch_save(source, whole := Path(folder) / "whole.pt")
            return replace(_in_file(torch.load(whole, weights_only=False), source), is_in_order=False)
    files = {path.name: path for path in source.iterdir()}
    optimizers, models = ([files[n] for n in names if n in files] for names in (OF_OPTIMIZER, OF_MODEL))
    if not optimizers or not models:
        missing = " or ".join(OF_MODEL if optimizers else OF_OPTIMIZER)
        remedy = "give the folder of a checkpoint of Trainer or accelerate, with all weights in one file"
        raise _fault(f"the folder has no {missing}", source, remedy)

    def save(model: Mapping[str, Tensor], optimizer: Mapping[str, Any], target: Path) -> None:
        shutil.copytree(source, target)
        torch.save(optimizer, target / optimizers[0].name)
        if models[0].suffix in TORCH_ENDINGS:
            torch.save(dict(model), target / models[0].name)
        else:
            contiguous = {name: tensor.contiguous() for name, tensor in model.items()}
            safetensors.torch.save_file(contiguous, target / models[0].name, {"format": "pt"})

    is_pickle = models[0].suffix in TORCH_ENDINGS
    weights = load_plain(models[0]) if is_pickle else safetensors.torch.load_file(models[0])
    return Checkpoint(weights, load_plain(optimizers[0]), save, is_in_order=is_pickle)


def _in_file(contents: Any, source: Path) -> Checkpoint:
    """Return the checkpoint in the object that a file holds."""
    places = dict(_dicts(contents))
    optimizers = [place for place, each in places.items() if _is_of_optimizer(each)]
    known = [place for place in places if place and place[-1] in WEIGHTS_UNDER and place not in optimizers]
    models = [place for place in known if any(isinstance(each, Tensor) for each in places[place].values())]
    for kind, found in (("an optimizer", optimizers), ("a model", models)):
        if len(found) != 1:
            met = f"{len(found) or 'no'} state dict{'s' * bool(found)} of {kind}, where one is needed"
            remedy = (
                'save both: torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, path)'
            )
            raise _fault(met, source, remedy)
    of_model, of_optimizer = models[0], optimizers[0]

    def save(model: Mapping[str, Tensor], optimizer: Mapping[str, Any], target: Path) -> None:
        now = _with(contents, of_model, dict(model))
        torch.save(_with(now, of_optimizer, dict(optimizer)), target)

    return Checkpoint(places[of_model], places[of_optimizer], save)


def _dicts(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the dictionaries in nested dictionaries, with their places; none in an optimizer's."""
    if isinstance(value, dict):
        yield place, value
        for key, each in value.items() if not _is_of_optimizer(value) else ():
            yield from _dicts(each, (*place, key))


def _is_of_optimizer(value: Mapping[str, Any]) -> bool:
    return {"state", "param_groups"} <= value.keys()


def _with(value: Any, place: tuple[str, ...], new: Any) -> Any:
    """Return a copy of nested dictionaries with another value at a place."""
    return {**value, place[0]: _with(value[place[0]], place[1:], new)} if place else new


# names of the optimizer's parameters ------------------------------------------------------------------------


def _names_of(job: Path) -> list[list[str]]:
    """Return the names of the parameters in each group of a job's optimizer."""
    program = runpy.run_path(str(job))
    try:
        model = program["model"]()
        optimizer = program["optimizer"](model)
    except KeyError as error:
        remedy = "define model() and optimizer(model), which return the job's"
        raise InvalidOptionError(f"a file without {error}()", where=str(job), remedy=remedy) from error
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[name_of[id(each)] for each in group["params"]] for group in optimizer.param_groups]


def _own_names(found: Checkpoint, source: Path) -> list[list[str]]:
    """Return the names of the parameters in each group, from the checkpoint itself."""
    groups = found.optimizer["param_groups"]
    if all(isinstance(key, str) for group in groups for key in group["params"]):
        return [[*group["params"]] for group in groups]
    if all("param_names" in group for group in groups):
        return [[*group["param_names"]] for group in groups]
    names = [_only_fit(found, group["params"]) for group in groups] if found.is_in_order else []
    flat = [name for group in names for name in group or [""]]
    if not flat or "" in flat or len(set(flat)) < len(flat):
        remedy = "give --job FILE.py, with model() and optimizer(model) that return the job's"
        raise _fault("an optimizer whose parameters could be several of the model's", source, remedy)
    return [group for group in names if group is not None]


def _only_fit(found: Checkpoint, keys: Sequence[Any]) -> list[str] | None:
    """Return the names that alone, in the model's order, fit the shapes of a group's state; or None."""
    shapes = [_shape_of(found.optimizer["state"].get(key, {})) for key in keys]
    once: dict[Any, str] = {}  # of tied weights, the first name
    for name, tensor in found.model.items():
        if isinstance(tensor, Tensor):
            once.setdefault(_memory(tensor), name)
    weights = [(name, shape) for (_, shape), name in once.items() if shape in shapes]
    first, last = _embedded(shapes, weights), _embedded(shapes[::-1], weights[::-1])
    return first if len(first) == len(keys) and first == last[::-1] else None


def _embedded(shapes: Sequence[Any], weights: Sequence[tuple[str, Any]]) -> list[str]:
    """Return the first names with these shapes, in order; fewer if they do not all fit."""
    left = iter(weights)
    found = (next((name for name, has in left if has == shape), None) for shape in shapes)
    return [name for name in found if name is not None]


def _shape_of(state: Mapping[str, Any]) -> torch.Size | None:
    """Return the shape that all of a parameter's state has, numbers aside; None if there are several."""
    own = (each for key, each in state.items() if not key.startswith(OURS))
    shapes = {each.shape for each in own if isinstance(each, Tensor) and each.dim()}
    return shapes.pop() if len(shapes) == 1 else None


# what holds a checkpoint's tensors --------------------------------------------------------------------------


class _Held(Optimizer):
    """Optimizer that holds state, and takes no step."""

    def step(self, closure: Any = None) -> Any:
        """Change nothing."""


def _held(
    found: Checkpoint, names: Sequence[Sequence[str]], source: Path, *, is_installed: bool
) -> tuple[nn.Module, Optimizer]:
    """Return a module and an optimizer that hold the tensors of a checkpoint."""
    stepped = [name for group in names for name in group]
    counts = [len(group["params"]) for group in found.optimizer["param_groups"]]
    if unknown := [name for name in stepped if name not in found.model]:
        raise _fault(f"no weight {unknown[0]!r}, which the optimizer steps", source, "give its checkpoint")
    if counts != [*map(len, names)]:
        met = f"groups of {counts} parameters, where the job's optimizer has {[*map(len, names)]}"
        raise _fault(met, source, "give --job the program that wrote the checkpoint")
    parameters = {_memory(found.model[name]): nn.Parameter(found.model[name]) for name in stepped}
    model = nn.Module()
    for name, tensor in found.model.items():
        *path, last = name.split(".")
        module = model
        for each in path:
            if not hasattr(module, each):
                module.add_module(each, nn.Module())
            module = getattr(module, each)
        if isinstance(tensor, Tensor):
            held = parameters.get(_memory(tensor))
            module.register_buffer(last, tensor) if held is None else module.register_parameter(last, held)
    of_names = {name: parameters[_memory(found.model[name])] for name in stepped}
    optimizer = _Held([{"params": [of_names[name] for name in group]} for group in names], {})
    if is_installed:
        collage_fx.install(optimizer)
    optimizer.load_state_dict(found.optimizer)
    return model, optimizer


def _memory(tensor: Tensor) -> tuple[int, torch.Size]:
    """Return address and shape, which tied weights share."""
    return tensor.data_ptr(), tensor.shape


def _fault(met: str, source: Path, remedy: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(met, where=str(source), remedy=remedy)
