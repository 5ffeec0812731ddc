"""Forward passes in float32 of chosen modules, from hi and the error terms: norms, heads, routers.

``full_precision_forward(modules)``. The modules compute as if their parameters were float32 tensors of the
values that the optimizer works with. No copy is kept between two forward passes.

Note [A twin with other parameters]
-----------------------------------
A chosen module's ``forward`` is called on a *twin*: another object with the same ``__dict__``, whose class
derives from the module's. In that class the parameters' names are properties: they read the module's own
parameter, and return its full value in float32. So the module keeps its class, its parameters and its state
dict, and a program that reads ``module.weight`` gets the parameter. Nothing is written during a forward pass:
Dynamo traces it without a graph break, also within activation checkpoints.

The full value is computed by an operator that Dynamo and Inductor do not look into, because error terms
appear, move, and change their format without a recompilation. In the backward pass the gradient of the
float32 value becomes the parameter's, in the parameter's dtype.

Note [Parameters that FSDP2 gathers]
------------------------------------
In a forward pass of FSDP2 a module has a gathered parameter, made of hi alone. Error terms belong to the
sharded parameter, which the module had when it was chosen. The module tells which gathered parameter it has
now, by its memory, and the full value of the shards is gathered, four bytes an element.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from collage_fx import torch_compat
from collage_fx.errors import InvalidOptionError, UnsupportedTensorError
from collage_fx.numerics import define_operator, is_low_precision
from collage_fx.state import full_value, has_error_terms


def full_precision_forward(
    modules: nn.Module | Iterable[nn.Module], *, output_dtype: torch.dtype | None = None
) -> FullPrecisionForward:
    """Compute the forward passes of chosen modules in float32, from parameters with their error terms.

    ``full_precision_forward(m for m in model.modules() if isinstance(m, nn.RMSNorm))``. The bits are those of
    modules whose parameters are ``full_value(p)``, rounded to float32: bfloat16 and float16 inputs are
    converted to float32, ``forward`` runs without autocast, and float32 outputs are converted to
    ``output_dtype``. Gradients of parameters are rounded once, to the dtype that they have without this.

    Parameters, state dict and class of a module stay the same. No memory is kept between forward passes; a
    forward pass makes float32 copies of the chosen parameters, four bytes an element, which autograd keeps
    for the backward pass if the module's operations need their weights there, as matrix products and norms
    do. Works with ``torch.compile``, activation checkpoints, DistributedDataParallel, FSDP2 (where the
    float32 values are gathered, too) and tensor parallelism. Without error terms, as before the first step,
    the full value is the parameter.

    Args:
        modules: a module, or several, with parameters of their own and none in submodules. Call
            ``fully_shard`` and ``to_empty``, which replace parameters, before.
        output_dtype: dtype of the outputs, such as float32 for a head whose logits the loss takes in float32.
            By default the dtype that the first floating-point input has; without one, that of the parameter.

    Returns:
        a handle: ``handle.remove()`` restores the modules, and so does the end of a ``with`` block.

    Raises:
        CollageError: a module has no parameters of its own, or has submodules with parameters; its forward
            writes to its weights (``max_norm``), or computes with 16-bit buffers or with weights made of
            others (``weight_norm``); another program has replaced its ``forward``; or ``output_dtype`` is no
            floating-point dtype. Nothing has changed.
    """
    given = [modules] if isinstance(modules, nn.Module) else modules
    chosen = list({id(each): each for each in given}.values())
    if output_dtype is not None and not output_dtype.is_floating_point:
        met = f"output_dtype={output_dtype} is no floating-point dtype"
        remedy = "give torch.float32, or leave it out for the dtype of the inputs"
        raise InvalidOptionError(met, where="full_precision_forward", remedy=remedy)
    for each in chosen:
        _refuse(each)
    return FullPrecisionForward(chosen, output_dtype)


class FullPrecisionForward:
    """Modules whose forward passes are computed in float32: the result of :func:`full_precision_forward`."""

    def __init__(self, modules: list[nn.Module], output_dtype: torch.dtype | None) -> None:
        self.modules = modules
        for module in modules:
            if _twin_in(module) is not None:
                _restore(module)
            forward = vars(module).get("forward")
            own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            twin = _twin_of(module, tuple(own), output_dtype, getattr(forward, "__func__", None))
            vars(module)["forward"] = twin.full_precision_forward
            torch_compat.records.put(module, _Chosen({name: TensorWeakRef(p) for name, p in own.items()}))

    def __repr__(self) -> str:
        kinds = ", ".join(sorted({type(module).__name__ for module in self.modules}))
        count = len(self.modules)
        return f"<FullPrecisionForward of {count} module{'s' if count > 1 else ''}: {kinds}>"

    def remove(self) -> None:
        """Make the modules compute with their parameters alone again."""
        for module in self.modules:
            _restore(module)

    def __enter__(self) -> FullPrecisionForward:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def _refuse(module: nn.Module) -> None:
    own = dict(module.named_parameters(recurse=False))
    within = [name for name, _ in module.named_parameters() if name not in own]
    kind = type(module).__name__
    if not own or within:
        what = "whose parameters are those of submodules" if within else "without parameters"
        raise UnsupportedTensorError(
            f"a {kind} {what}",
            where=within[0] if within else kind,
            remedy="choose the modules that hold the parameters: full_precision_forward(m for m in "
            "model.modules() if isinstance(m, ...))",
        )
    forward = vars(module).get("forward")
    is_method = isinstance(forward, MethodType) and forward.__self__ is module
    if not (forward is None or is_method or _twin_in(module) is not None):
        met = f"another program has replaced the forward of this {kind}"
        remedy = "choose the module before, or replace the forward by a method of the module"
        raise InvalidOptionError(met, where=f"forward of a {kind}", remedy=remedy)
    if getattr(module, "max_norm", None) is not None:
        raise UnsupportedTensorError(
            f"a {kind} with max_norm, whose forward writes to its weights, of which it would get a copy",
            where="max_norm",
            remedy="leave this module out, or set max_norm=None and scale the rows after the step, by "
            "collage_fx.assign",
        )
    buffers = dict(module.named_buffers(recurse=False))
    for name, tensor in {**buffers, **vars(module)}.items():
        if isinstance(tensor, Tensor) and is_low_precision(tensor.dtype):
            is_buffer = name in buffers
            raise UnsupportedTensorError(
                f"a {kind} that computes with {tensor.dtype}, in {'a buffer' if is_buffer else 'a tensor'} "
                "beside its parameters",
                where=name,
                remedy=f"make it float32: module.{name} = module.{name}.float()"
                if is_buffer
                else "leave this module out: a weight of it is computed from others (weight_norm, "
                "spectral_norm, prune)",
            )


def _twin_in(module: nn.Module) -> _Twin | None:
    """Return the twin that computes a module's forward pass in float32; None if there is none."""
    found = getattr(vars(module).get("forward"), "__self__", None)
    return found if isinstance(found, _Twin) else None


def _restore(module: nn.Module) -> None:
    twin = _twin_in(module)
    if twin is None:
        met = f"another program has replaced the forward of this {type(module).__name__}"
        remedy = "let it restore the forward first"
        raise InvalidOptionError(met, where=f"forward of a {type(module).__name__}", remedy=remedy)
    if twin.replaced is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = MethodType(twin.replaced, module)
    torch_compat.records.drop(module, _Chosen)


class _Twin(nn.Module):
    """Base of the classes of twins: Note [A twin with other parameters].

    Attributes:
        original: the module whose ``__dict__`` this object shares.
        names: names of the parameters that are properties.
        output_dtype: dtype of float32 outputs; None for that of the inputs.
        replaced: function that another program had made the module's forward; None for that of its class.
        facts: names, output_dtype and replaced.
        compute: forward of the module.
    """

    original: nn.Module
    names: tuple[str, ...]
    output_dtype: torch.dtype | None
    replaced: Callable[..., Any] | None
    facts: tuple[Any, ...]
    compute: Callable[..., Any]

    def full_precision_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's forward in float32."""
        parameter = getattr(self.original, self.names[0])
        plain = not kwargs and all(map(_is_float, args))  # as norms and heads are called; others take longer
        leaves = args if plain else torch_compat.pytree.tree_leaves((args, kwargs))
        dtype = self.output_dtype or next(filter(_is_float, leaves), parameter).dtype
        if plain:
            args = tuple(map(_widened, args))
        else:
            args, kwargs = torch_compat.pytree.tree_map(_widened, (args, kwargs))
        if torch.is_autocast_enabled(parameter.device.type):
            with torch.autocast(parameter.device.type, enabled=False):
                output = self.compute(*args, **kwargs)
        else:
            output = self.compute(*args, **kwargs)

        def narrowed(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, Tensor) and x.dtype is torch.float32 else x

        if isinstance(output, Tensor):
            return narrowed(output)
        return torch_compat.pytree.tree_map(narrowed, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Twin:
        return _twin_of(copy.deepcopy(self.original, memo), *self.facts)

    def __reduce__(self) -> tuple[Callable[..., _Twin], tuple[Any, ...]]:
        return _twin_of, (self.original, *self.facts)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _widened(x: Any) -> Any:
    """Convert a low-precision tensor to float32; return anything else unchanged."""
    return x.to(torch.float32) if isinstance(x, Tensor) and is_low_precision(x.dtype) else x


def _twin_of(module: nn.Module, *facts: Any) -> _Twin:
    """Make a twin of a module, which may still be without its attributes, as when a file is read."""
    kind = _twin_class(cast(Any, type(module)), *facts)
    twin = object.__new__(kind)
    object.__setattr__(twin, "__dict__", vars(module))
    object.__setattr__(twin, "original", module)
    return cast(_Twin, twin)


@functools.cache
def _twin_class(
    kind: type[nn.Module],
    names: tuple[str, ...],
    output_dtype: torch.dtype | None,
    replaced: Callable[..., Any] | None,
) -> type[nn.Module]:
    attributes = {
        "__slots__": ("original",),
        "names": names,
        "output_dtype": output_dtype,
        "replaced": staticmethod(replaced) if replaced is not None else None,
        "facts": (names, output_dtype, replaced),
        "compute": replaced or kind.forward,
        **{name: property(functools.partial(_full_precision_of, name=name)) for name in names},
    }
    return type(kind.__name__, (_Twin, kind), attributes)


def _full_precision_of(twin: _Twin, name: str) -> Tensor:
    """Return the full value of a module's parameter, in float32; of any other dtype, the parameter."""
    parameter: Tensor = getattr(twin.original, name)
    if not is_low_precision(parameter.dtype):
        return parameter
    if not isinstance(parameter, nn.Parameter) and _is_distributed():
        met = "another tensor stands for the parameter in the forward pass, as in FSDP1"
        raise UnsupportedTensorError(met, where=name, remedy="shard the model with fully_shard (FSDP2)")
    if torch_compat.sharding_of(parameter) is None:
        return FULL_PRECISION(parameter)
    return torch_compat.distributed_like(parameter, FULL_PRECISION(cast(Any, parameter).to_local()))


class _Chosen(dict[str, TensorWeakRef]):
    """Part of a chosen module: the parameters that it had then, by name."""


@dataclass
class _Gathered:
    """Part of a storage that FSDP2 has gathered: the sharded parameter; None if it is whole."""

    shards: TensorWeakRef | None


def _full_value(parameter: Tensor) -> Tensor:
    """Return the full value of a parameter as a module holds it, in float32; FSDP2 may have gathered it."""
    owner = _owner_of(parameter)
    value = full_value(owner, torch.float32)
    if owner is parameter:
        return value
    on_device = torch_compat.distributed_like(owner, torch_compat.local_tensor(value).to(parameter.device))
    return torch_compat.whole_tensor(on_device).contiguous()


def _is_distributed() -> bool:
    """Return whether there are other processes, so that FSDP2 may have gathered a parameter."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _owner_of(parameter: Tensor) -> Tensor:
    """Return the tensor that has a parameter's error terms: itself, or the shards that FSDP2 has gathered."""
    if not _is_distributed() or has_error_terms(parameter):
        return parameter
    storage = parameter.untyped_storage()
    found = torch_compat.records.find(storage, _Gathered)
    if found is None:
        found = torch_compat.records.put(storage, _Gathered(_sharded(torch_compat.storage_of(parameter))))
    return parameter if found.shards is None else _alive(found.shards)


def _sharded(storage: int) -> TensorWeakRef | None:
    """Return the shards of the chosen module's parameter that was gathered into a storage; None if whole."""
    for module, chosen in torch_compat.records.all_of(_Chosen):
        for name, now in module.named_parameters(recurse=False, remove_duplicate=False):
            if name not in chosen or torch_compat.storage_of(torch_compat.local_tensor(now)) != storage:
                continue
            before = _alive(chosen[name])
            if before is now:
                return None
            if torch_compat.sharding_of(before) is None:
                raise _replaced(name)
            if torch_compat.sharding_of(now) is not None:
                met = "a parameter that both FSDP2 and tensor parallelism have sharded"
                remedy = "choose modules whose parameters only one of the two shards"
                raise UnsupportedTensorError(met, where=name, remedy=remedy)
            return chosen[name]
    return None


def _alive(parameter: TensorWeakRef) -> Tensor:
    """Return the tensor that a reference is to; raise if it is no more."""
    found: Tensor | None = parameter()
    if found is None:
        raise _replaced("a parameter of a module of full_precision_forward")
    return found


def _replaced(name: str) -> UnsupportedTensorError:
    """Return the error of a parameter that the module did not have when it was chosen."""
    met = "the module has another parameter now than when it was chosen"
    remedy = "call full_precision_forward after fully_shard, and after to_empty"
    return UnsupportedTensorError(met, where=name, remedy=remedy)


#: Operator of :func:`_full_value`. CUDA graphs leave it out: it reads memory that is not among its arguments.
FULL_PRECISION = define_operator(
    "full_precision(Tensor parameter) -> Tensor",
    _full_value,
    lambda parameter: torch.empty_like(parameter, dtype=torch.float32),
    torch.Tag.cudagraph_unsafe,
    gradient=lambda _, gradient: gradient,
)
