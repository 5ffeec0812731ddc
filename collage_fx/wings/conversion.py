"""Conversion of a running float32 job to bfloat16 with error terms, in place, and back.

A float32 value becomes hi and an error term in the format ``"exact"``, which hold it bit for bit. The first
step converts error terms to the format that it uses, packs state, from the whole value, and drops error terms
of state that needs none.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from collage_fx import state, torch_compat
from collage_fx.backend import CollageBackend
from collage_fx.capture import first_overlap
from collage_fx.choices import did_you_mean, takes_options
from collage_fx.errors import CollageError, InvalidOptionError, UnsupportedTensorError
from collage_fx.graph import is_dense
from collage_fx.installation import CompiledStep, accepted, install, uninstall
from collage_fx.numerics import ERROR_FORMATS, is_low_precision
from collage_fx.options import GivenOptions, Options, refuse_unknown
from collage_fx.tools.explain import explain

log = logging.getLogger("collage_fx")

#: ``"weights"`` that an optimizer steps, ``"others"``, ``"gradients"``, ``"state"`` -> name -> tensor.
Tensors = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Conversion:
    """Summary of a conversion, which ``print`` shows as a table: the result of :func:`convert`.

    Attributes:
        dtype: dtype of the converted tensors afterwards.
        rounded: names of the parameters and buffers that lose bits, as no optimizer steps them.
        kept: names of the floating-point parameters and buffers that are not converted.
        bytes_before: bytes, in this process, of the tensors to convert, with their error terms: of
            ``"weights"``, ``"others"`` (which no optimizer steps), ``"gradients"`` and ``"state"``.
        bytes_after: the same afterwards, at most: the first step drops or packs what it does not need.
        predicted_error: error of the weights over 600 steps, as in a report; None: unknown, or not a dry run.
    """

    dtype: torch.dtype
    rounded: tuple[str, ...]
    kept: tuple[str, ...]
    bytes_before: Mapping[str, int]
    bytes_after: Mapping[str, int]
    predicted_error: float | None = None

    def __str__(self) -> str:
        lines = [f"{'to ' + str(self.dtype):17} {'bytes now':>16} {'then, at most':>16}"]
        for kind, before in self.bytes_before.items():
            lines.append(f"{kind:17} {before:16,} {self.bytes_after[kind]:16,}")
        for told, names in (("rounded", self.rounded), ("not converted", self.kept)):
            lines += [f"{told}: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"] if names else []
        if self.predicted_error is not None:
            lines.append(f"predicted error over 600 steps, at this learning rate: {self.predicted_error:.2g}")
        return "\n".join(lines)


@takes_options
def convert(
    model: nn.Module,
    optimizer: Any,
    dtype: torch.dtype = torch.bfloat16,
    *,
    keep: Sequence[str] = (),
    buffers: bool = False,
    dry_run: bool = False,
    backend: CollageBackend | None = None,
    **options: Unpack[GivenOptions],
) -> Conversion:
    """Make a running float32 job a compensated bfloat16 job in place, between two steps, or take it back.

    ``print(convert(model, opt, dry_run=True))`` says what it would do. Then ``convert(model, opt)`` splits
    each float32 weight that ``opt`` steps, and its float32 state, into bfloat16 and an error term without the
    loss of a bit, and installs the optimizer. ``convert(model, opt, torch.float32)`` adds the error terms,
    and uninstalls it, also after a first step that was refused. All tensors stay the same objects, so that
    schedulers, hooks and tied weights go on. Step counts, numbers (0-d) and groups stay unchanged; gradients,
    which the next backward pass replaces, are rounded.

    Args:
        model: module that computes with the parameters. FSDP2 is supported before its first forward pass,
            and at any time with ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)``.
        optimizer: its optimizer, or one of a trainer, as for :func:`install`; or a list of all of them.
        dtype: ``torch.bfloat16``, or ``torch.float32`` for the way back.
        keep: names of parameters, buffers or modules that stay as they are; ``*`` matches any characters.
        buffers: whether buffers are converted, too: they have no error terms, so that they are rounded.
        dry_run: whether to return the summary alone.
        backend: a backend for all of them, for bfloat16.
        options: options of a backend for each, for bfloat16.

    Returns:
        the summary, which is logged (INFO) before a tensor changes.

    Raises:
        CollageError: an option is not valid, or something cannot go on in the other dtype: a trainable
            parameter without an optimizer here, an installed optimizer, DistributedDataParallel, FSDP1,
            FSDP2 with gathered float32, a gradient scaler, batch norm of two dtypes. Nothing has changed.
    """
    refuse_unknown(options, convert)
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    inner = [each for one in given for each in accepted(one, backend, options)[0]]
    inner += [each for one in inner for each in state.held_optimizers(one)]
    found, kept = _tensors(model, inner, dtype, keep, buffers=buffers)
    chosen = (backend or CollageBackend(**options)).options
    late = "" if dtype is torch.bfloat16 else next(iter(options), "backend" if backend else "")
    for is_met, met, remedy in (
        (dtype not in (torch.bfloat16, torch.float32), f"dtype={dtype}", "give torch.bfloat16 or float32"),
        (late, f"{late}= beside torch.float32", "leave it out: it is for bfloat16"),
        (chosen.strategy == "none", "strategy='none', which drops bits", "give another strategy"),
        (not found["weights"], f"no weight to convert to {dtype}", "give weights that an optimizer steps"),
    ):
        if is_met:
            raise InvalidOptionError(f"convert() was given {met}", where="convert", remedy=remedy)
    for where, met, remedy in _faults(model, [*given, *inner], found, dtype):
        raise UnsupportedTensorError(met, where=where, remedy=remedy)
    plan = _summary(found, kept, dtype, chosen.bytes_per_parameter)
    if dry_run:
        return plan if dtype is torch.float32 else replace(plan, predicted_error=_error(inner, found, chosen))
    log.info("%s", plan)
    with torch.no_grad():
        for kind, name, tensor in ((n, *each) for n in found for each in found[n].items()):
            value = state.full_value(tensor, torch.float32)
            state.reset_error_terms(tensor)
            torch_compat.take_data(tensor, value.to(dtype))
            if dtype is torch.bfloat16 and kind in ("weights", "state"):
                state.write(tensor, value, state.ensure_record(tensor, ERROR_FORMATS["exact"], name=name))
                if kind == "state":
                    state.note_new(tensor)
    for each in given:
        if dtype is torch.float32:
            uninstall(each)
        else:
            install(each, backend=backend, **options)
    torch_compat.note_new_dtypes(model)
    torch.clear_autocast_cache()
    return plan


def _tensors(
    model: nn.Module, inner: Sequence[Optimizer], dtype: torch.dtype, keep: Sequence[str], *, buffers: bool
) -> tuple[Tensors, list[str]]:
    """Return the tensors to convert, and the names of others of floating point."""
    of_buffers = list(model.named_buffers(remove_duplicate=False))
    named = [*model.named_parameters(remove_duplicate=False), *of_buffers]
    first = {id(tensor): name for name, tensor in reversed(named)}
    staying = {id(tensor) for _, tensor in of_buffers if not buffers}
    for pattern in keep:
        met = {id(t) for name, t in named if fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")}
        if not met:
            near = did_you_mean(pattern, [name for name, _ in named])
            raise InvalidOptionError(f"keep={pattern!r} names nothing here", where="keep", remedy=near)
        staying |= met
    found: Tensors = {"weights": {}, "others": {}, "gradients": {}, "state": {}}
    stepped = [(number, p, one.state.get(p, {})) for one in inner for number, p in state.parameter_names(one)]
    ids, kept = {id(p) for _, p, _ in stepped}, []
    for name, tensor in {first[id(t)]: t for _, t in named if t.is_floating_point()}.items():
        if tensor.dtype is dtype or id(tensor) in staying:
            kept.append(name)
            continue
        found["weights" if id(tensor) in ids else "others"][name] = tensor
        if tensor.grad is not None and tensor.grad.dtype is tensor.dtype:
            found["gradients"][f"{name}.grad"] = tensor.grad
    for number, p, entries in stepped:
        if id(p) not in first:
            fault = "a parameter of the optimizer that is not in the model: a copy, or another model's"
            remedy = "give the model whose parameters the optimizer steps"
            raise UnsupportedTensorError(fault, where=number, remedy=remedy)
        name = first[id(p)]
        for slot, tensor in state.state_tensors(entries) if name in found["weights"] else ():
            if tensor.dtype is p.dtype and tensor.dim() and not state.is_spared(slot):
                found["state"][f"{name}.{slot}"] = tensor
    return found, kept


def _faults(
    model: nn.Module, optimizers: Sequence[Any], found: Tensors, dtype: torch.dtype
) -> Iterator[tuple[str, str, str]]:
    """Yield ``(where, met, remedy)`` for wrappers, steps and tensors that cannot be converted."""
    if any(isinstance(each, nn.parallel.DistributedDataParallel) for each in model.modules()):
        yield "model", "DistributedDataParallel", "convert the module in it, and wrap it again"
    if any(map(torch_compat.is_flattened, model.parameters())):
        yield "model", "FSDP1, whose parameters are parts of flat ones", "use FSDP2: fully_shard"
    if torch_compat.gathers_other_dtype(model, dtype):
        remedy = "give fully_shard MixedPrecisionPolicy(param_dtype=torch.bfloat16), or convert before that"
        yield "model", "FSDP2 that has gathered another dtype in a forward pass", remedy
    for each in optimizers:
        step, kind = torch_compat.own_step(each) if isinstance(each, Optimizer) else None, type(each).__name__
        if getattr(each, "scaler", None) is not None:
            yield kind, "a gradient scaler", "use mixed_precision='bf16', which needs none"
        if isinstance(step, CompiledStep) and dtype is torch.bfloat16:
            yield kind, "an optimizer that is installed", "call collage_fx.uninstall(optimizer) before"
        elif isinstance(step, CompiledStep) and step.release is not None:
            yield kind, "steps in the backward pass", "call remove() of their handle before"
    weights, is_back = {**found["weights"], **found["others"]}, dtype is torch.float32
    tensors = {**weights, **found["state"]}
    for name, tensor in tensors.items():
        is_known = is_low_precision(tensor.dtype) if is_back else tensor.dtype is torch.float32
        # On the way back, state may be packed.
        is_plain = is_back or not torch_compat.is_wrapper(torch_compat.local_tensor(tensor))
        if not (is_known and is_plain and tensor.device.type in ("cpu", "cuda")):
            met = f"a {type(tensor).__name__} of {tensor.dtype} on {tensor.device.type}"
            yield name, met, "convert tensors on a CPU or a CUDA device, of float32; or name it in keep="
    pieces = ((n, torch_compat.local_tensor(t.detach())) for n, t in tensors.items() if not is_back)
    if overlap := first_overlap(each for each in pieces if is_dense(each[1])):
        yield overlap[0], f"memory that it shares with {overlap[1]}", "clone() either, or use one parameter"
    for name, tensor in found["others"].items():
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            remedy = f"give a list of all optimizers, or freeze it, or leave it as it is by keep=[{name!r}]"
            yield name, "a trainable parameter that the optimizer does not step", remedy
    changing = set(map(id, weights.values()))
    for name, module in model.named_modules():
        mean, scale = getattr(module, "running_mean", None), getattr(module, "weight", None)
        if mean is not None and scale is not None and (id(mean) in changing) != (id(scale) in changing):
            remedy = f"give keep=[{name!r}] for all of it, or buffers=True"
            yield name, f"a {type(module).__name__} that would compute with two dtypes", remedy


def _summary(found: Tensors, kept: list[str], dtype: torch.dtype, limit: float | str | None) -> Conversion:
    local = {kind: list(map(torch_compat.local_tensor, found[kind].values())) for kind in found}
    others = zip(found["others"], local["others"], strict=True)
    rounded = tuple(name for name, t in others if not torch.equal(t.to(dtype).to(t.dtype), t))
    numbers = {kind: sum(each.numel() for each in local[kind]) for kind in local}
    after = {n: numbers[n] * (4 if n in ("weights", "state") else dtype.itemsize) for n in numbers}
    if isinstance(limit, (int, float)):
        after["state"] = min(after["state"], max(0, round((limit - 4) * numbers["weights"])))
    return Conversion(dtype, rounded, tuple(kept), {n: state.bytes_held(local[n]) for n in local}, after)


def _error(optimizers: Sequence[Optimizer], found: Tensors, options: Options) -> float | None:
    """Return the largest error that ``explain`` predicts for pieces of the weights in bfloat16, if any."""
    errors, changing = [], set(map(id, found["weights"].values()))

    def piece(tensor: Tensor, dtype: torch.dtype) -> Tensor:  # the first rows, with about 2**16 elements
        rows = torch.atleast_1d(torch_compat.local_tensor(tensor.detach()).to_dense())
        return rows[: max(1, 2**16 * len(rows) // max(1, rows.numel()))].to(dtype, copy=True)

    for one in optimizers:
        twins: dict[int, Any] = {id(one.state): defaultdict(dict)}
        for _, p in state.parameter_names(one):
            dtype = torch.bfloat16 if id(p) in changing else p.dtype
            twins[id(p)] = twin = nn.Parameter(piece(p, dtype), p.requires_grad)
            twin.grad = None if p.grad is None else piece(p.grad, dtype)
        clone = state.clone_of(one, twins)
        for group in clone.param_groups:
            group.pop("initial_lr", None)  # of a scheduler, whose rate is another by now
        try:
            errors.append(explain(clone, **options.given).predicted_error())
        except CollageError as error:  # of pieces: the whole optimizer may be accepted
            log.info("no error is predicted: %s", error)
    return max((each for each in errors if each is not None), default=None)
