"""Full state dict: a model's weights with their error terms added, and the way back.

Note [One tensor at a time]
---------------------------
Weights in float32 are twice as large as the model. So a full state dict is a mapping that makes a tensor when
it is read, its file is written and read tensor by tensor, and a DTensor is gathered only in its turn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from collage_fx.choices import did_you_mean
from collage_fx.errors import CheckpointMismatchError, InvalidOptionError, UnsupportedTensorError
from collage_fx.numerics import ERROR_FORMATS, is_low_precision
from collage_fx.state import error_terms
from collage_fx.state.checkpoint import adopt
from collage_fx.state.claims import Claims
from collage_fx.state.fingerprints import fingerprint
from collage_fx.state.optimizers import parameter_names
from collage_fx.state.safetensors_file import NAMES, SafetensorsFile, write_safetensors
from collage_fx.torch_compat import local_tensor, sharding_of, whole_tensor


def full_state_dict(
    model: Module, dtype: torch.dtype = torch.float32, *, gather: bool = False
) -> Mapping[str, Any]:
    """Return the model's state dict with full values, hi + error terms, of bfloat16 and float16 parameters.

    ``dict(full_state_dict(model))`` is for ``torch.save``, ``load_state_dict`` of a float32 model, or
    ``save_pretrained(state_dict=...)``; a loop over ``.items()`` that deletes each tensor has one at a time.

    Args:
        model: any module, its parameters DTensors or not. It is not changed.
        dtype: dtype of the full values. float32 holds the values of ``arithmetic="wide"`` bit for bit, and
            rounds other sums once, to nearest; float64 holds all.
        gather: whether DTensors become whole tensors, on every process. All processes then have to read the
            same names in the same order. Otherwise, they are DTensors with the parameter's mesh and
            placements.

    Returns:
        a mapping with the names of ``model.state_dict()``. It makes a tensor each time a name is read, from
        the parameter as it is then. Another name of the same parameter gives the same tensor as long as
        somebody keeps it. Parameters of other dtypes, buffers and values that are no tensors are returned
        unchanged. Loaded error terms that no step has used become zero before they are read if they belong to
        other values: for DTensors all processes have to read then.

    Raises:
        UnsupportedTensorError: a parameter with error terms is not in ``model.state_dict()`` itself (FSDP1
            makes other tensors of it).
    """
    return _FullStateDict(model, dtype, gather=gather)


class _FullStateDict(Mapping[str, Any]):
    """Mapping that makes each tensor when it is read."""

    def __init__(self, model: Module, dtype: torch.dtype, *, gather: bool) -> None:
        self.held: dict[str, Any] = model.state_dict(keep_vars=True)
        self._dtype = dtype
        self._gather = gather
        self._made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._made_as: dict[int, str] = {}
        held = set(map(id, self.held.values()))
        for name, parameter in model.named_parameters():
            if id(parameter) not in held and error_terms.has_error_terms(parameter):
                raise UnsupportedTensorError(
                    "a parameter with error terms that is not in model.state_dict() itself",
                    where=name,
                    remedy="use FSDP2 (torch.distributed.fsdp.fully_shard), whose state dicts hold the "
                    "parameters, where FSDP1 makes other tensors of them",
                )

    def __getitem__(self, name: str) -> Any:
        tensor = self.held[name]
        if not isinstance(tensor, Tensor):
            return tensor
        made = self._made.get(id(tensor))
        if made is None or self._made_as[id(tensor)] == name:
            made = error_terms.full_value(tensor, self._dtype) if _is_full(tensor) else tensor.detach()
            if self._gather:
                made = whole_tensor(made)
            self._made[id(tensor)], self._made_as[id(tensor)] = made, name
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # pickles and copies are ordinary dictionaries, with all tensors


def _is_full(tensor: Tensor) -> bool:
    """Return whether a full state dict has hi + error terms of a tensor, rather than the tensor."""
    is_weight = isinstance(tensor, Parameter) or error_terms.has_error_terms(tensor)
    return is_weight and is_low_precision(tensor.dtype)


def save_full_state_dict(
    model: Module, path: str | os.PathLike[str], dtype: torch.dtype = torch.float32
) -> None:
    """Write ``full_state_dict(model, dtype)`` to a safetensors file, with one tensor at a time in memory.

    Tensors that the model has under several names are written once, under the first name, as
    ``safetensors.torch.save_model`` does; ``load_model``, transformers and :func:`load_full_state_dict` read
    it. The file gets its name only when it is complete.

    Args:
        model: any module. If it has DTensors, all processes have to call this, and the first of their mesh
            writes; otherwise each process that calls it writes.
        path: path of the file.
        dtype: as in :func:`full_state_dict`.

    Raises:
        UnsupportedTensorError: as in :func:`full_state_dict`, or a value is no tensor, or of a dtype that
            such files do not have; nothing has been written then.
        OSError: the file cannot be written; an earlier file is unchanged.
    """
    full = _FullStateDict(model, dtype, gather=True)
    like: dict[str, Tensor] = {}
    for name, held in full.held.items():
        is_tensor = isinstance(held, Tensor)
        kind = type(held).__name__ if not is_tensor else dtype if _is_full(held) else held.dtype
        if kind not in NAMES:
            met = f"{kind}, which a safetensors file cannot hold"
            remedy = "torch.save(dict(collage_fx.full_state_dict(model)), path)"
            raise UnsupportedTensorError(met, where=name, remedy=remedy)
        like[name] = torch.empty(held.shape, dtype=kind, device="meta")
    first = _first_names(full.held)
    order = sorted((name for name in like if first[name] == name), key=lambda name: -like[name].itemsize)
    tensors = (full[name] for name in order)
    ranks = [int(pieces.mesh.mesh.min()) for pieces in map(sharding_of, full.held.values()) if pieces]
    metadata = {"format": "pt", **{name: of for name, of in first.items() if of != name}}
    try:
        if not ranks or torch.distributed.get_rank() == min(ranks):
            write_safetensors(Path(path), {name: like[name] for name in order}, tensors, metadata)
    finally:
        for _ in tensors:  # all processes have to gather each tensor, or none
            pass


def load_full_state_dict(
    model: Module,
    optimizer: Optimizer,
    weights: Mapping[str, Any] | str | os.PathLike[str],
    *,
    error_format: str = "exact",
) -> None:
    """Load weights of more bits than the model's parameters have, and keep the rest in error terms.

    A bfloat16 or float16 parameter becomes the float32 weight rounded to nearest, and its error term the
    rest. With "exact" and "fp32" their sum is the weight (with "exact" beside float16 it is off by at most
    2**-40); with "mcf" it is off by at most 2**-16 of the weight beside bfloat16, and by at most 2**-22 of
    the weight or 2**-25 beside float16. Compiled steps continue from there. The optimizer's state is not
    changed.

    Args:
        model: any module, its parameters DTensors or not.
        optimizer: the optimizer that steps it. Parameters that it does not hold (frozen ones) have no error
            terms: they are rounded.
        weights: tensors by the names of ``model.state_dict()``, or the path of a safetensors file, which is
            read a tensor at a time. A tensor with several names in the model may be given under one of them.
            Each process takes its shard of a whole tensor; a DTensor is redistributed as needed.
        error_format: format of the error terms, that of the compiled steps.

    Raises:
        CheckpointMismatchError: names are missing or unknown, shapes differ, integers are given for
            floating-point numbers, or no parameter of the optimizer is in ``model.state_dict()`` (FSDP1 has
            others there).
        ConflictingErrorFormatError: a parameter has error terms in another format.
        InvalidOptionError: there is no such error format. In all three cases nothing has been changed.
    """
    if error_format not in ERROR_FORMATS:
        met = f"unknown error format {error_format!r}"
        remedy = did_you_mean(error_format, ERROR_FORMATS)
        raise InvalidOptionError(met, where="load_full_state_dict(error_format=...)", remedy=remedy)
    adopt(optimizer)
    kept_in = ERROR_FORMATS[error_format]
    sources = weights if isinstance(weights, Mapping) else SafetensorsFile(weights)
    held: dict[str, Any] = model.state_dict(keep_vars=True)
    stepped = {id(parameter) for _, parameter in parameter_names(optimizer)}
    _refuse_misfits(held, sources, stepped)
    for name, target in held.items():
        record = error_terms.record_of(target) if isinstance(target, Tensor) else None
        if record is not None and id(target) in stepped:
            error_terms.require_format(record, kept_in, name=name)

    claims = Claims()
    with torch.no_grad():
        for name in sources:
            target = held[name]
            if not isinstance(target, Tensor):
                model.load_state_dict({name: sources[name]}, strict=False)
                continue
            is_stepped = id(target) in stepped and is_low_precision(target.dtype)
            record = error_terms.ensure_record(target, kept_in, name=name) if is_stepped else None
            error_terms.write(target, sources[name], record)
            if record is not None:
                record.is_whole = True
                claims.add(name, record, fingerprint(local_tensor(target), record.auxiliaries))
            elif (live := error_terms.record_of(target)) is not None:
                live.clear()


def _refuse_misfits(held: Mapping[str, Any], sources: Mapping[str, Any], stepped: set[int]) -> None:
    """Raise unless ``sources`` fits a model's tensors, and the optimizer steps some of them."""
    if stepped.isdisjoint(map(id, held.values())):
        raise CheckpointMismatchError(
            "an optimizer none of whose parameters is in model.state_dict() itself",
            where="load_full_state_dict",
            remedy="make the optimizer of this model's parameters, after what replaces them (FSDP1, which "
            "makes other tensors of them for a state dict, is not supported: use fully_shard)",
        )
    first = _first_names(held)
    given = {first.get(name) for name in sources}
    missing = [name for name in held if isinstance(held[name], Tensor) and first[name] not in given]
    unknown = [name for name in sources if name not in held]
    if missing or unknown:
        lists = (("weights are missing:", missing), ("names the model has not:", unknown))
        met = [f"{what} {names[:8]}{' and more' if len(names) > 8 else ''}" for what, names in lists if names]
        remedy = "give the state dict of this model; names as in model.state_dict()"
        raise CheckpointMismatchError("; ".join(met), where="load_full_state_dict", remedy=remedy)
    for name in sources:
        source, target = sources[name], held[name]
        fault, are_tensors = "", isinstance(source, Tensor) and isinstance(target, Tensor)
        if isinstance(source, Tensor) != isinstance(target, Tensor):
            fault = f"a {type(source).__name__} where the model has a {type(target).__name__}"
        elif are_tensors and source.shape != target.shape:
            fault = f"a shape of {tuple(source.shape)} where the model's is {tuple(target.shape)}"
        elif are_tensors and source.is_floating_point() != target.is_floating_point():
            fault = f"{source.dtype} where the model has {target.dtype}"
        if fault:
            raise CheckpointMismatchError(fault, where=name, remedy="give the state dict of this model")


def _first_names(held: Mapping[str, Any]) -> dict[str, str]:
    """Map every name to the first name of the same object."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(each), name) for name, each in held.items()}
