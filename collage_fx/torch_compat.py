"""Everything that rests on torch's private interfaces, and so may differ from version to version.

Supported: torch 2.11 and newer (tested on 2.11, 2.13 and 2.15). A private name that has moved is reported by
name at import, with the versions that are known to work, rather than by an AttributeError in the middle of a
training run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch

__all__ = [
    "ShortenTraceback",
    "aot_input_of",
    "compile_with_inductor",
    "current_trace",
    "detect_fake_mode",
    "functional_decompositions",
    "has_internal_overlap",
    "has_storage",
    "inductor_compile_inner",
    "inductor_config",
    "make_fx",
    "mode_options",
    "pointwise_of",
    "real_tensors",
    "refuse_recompile_limit",
    "register_pointwise_lowering",
    "symbol_source",
    "traced_frame_name",
    "traced_frame_variables",
    "watch_traced_optimizers",
]

OLDEST_TORCH = (2, 11)
TESTED_TORCH = ("2.11", "2.13", "2.15")


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


if _version() < OLDEST_TORCH:
    raise ImportError(
        f"collage_fx needs torch >= {'.'.join(map(str, OLDEST_TORCH))}, found {torch.__version__}: "
        "AOTAutograd's input descriptors and the Inductor entry points it is built on are missing there"
    )

try:
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch._dynamo.exc import FailOnRecompileLimitHit, ShortenTraceback
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.optimizer import OptimizerVariable
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.descriptors import (
        BufferAOTInput,
        ParamAOTInput,
        PlainAOTInput,
        SyntheticBaseAOTInput,
        ViewBaseAOTInput,
    )
    from torch._guards import CompileContext, detect_fake_mode
    from torch._inductor import config as inductor_config
    from torch._inductor import ir, list_mode_options
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import ops
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import make_fx
except ImportError as error:
    raise ImportError(
        f"collage_fx does not know torch {torch.__version__}: {error}. "
        f"It is tested with torch {', '.join(TESTED_TORCH)}; please install one of those or a newer "
        "collage_fx"
    ) from error

#: Compiles one functional ATen graph with Inductor: ``(gm, example_inputs, **kwargs) -> callable taking a
#: list``.
inductor_compile_inner: Callable[..., Callable[[list[Any]], Any]] = compile_fx_inner


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    inner_compile: Callable[..., Any],
    config_patches: dict[str, Any] | None,
) -> Callable[..., Any]:
    """Run a Dynamo graph through AOTAutograd and Inductor with ``inner_compile`` in place of Inductor's own.

    AOTAutograd's cache is switched off: on a hit it would return the code of an earlier compilation without
    calling ``inner_compile``, that is without the error terms. Inductor's own cache, keyed by the graph it is
    given (the rewritten one), stays on, so that a second process still starts warm.
    """
    with functorch_config.patch(enable_autograd_cache=False):
        compiled = compile_fx(
            gm, list(example_inputs), inner_compile=inner_compile, config_patches=config_patches
        )
    return cast(Callable[..., Any], compiled)


def mode_options(mode: str) -> dict[str, Any]:
    """Inductor configuration of a ``torch.compile`` mode.

    Raises RuntimeError for a mode that torch doesn't know.
    """
    return dict(list_mode_options(mode))


def functional_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions Inductor expects to have been applied to the graphs it is given."""
    return dict(select_decomp_table())


def aot_input_of(
    placeholder: torch.fx.Node,
) -> tuple[Literal["attribute", "argument", "alias"], str | int] | None:
    """Where an input of an AOTAutograd graph comes from.

    Returns:
        ``("attribute", name)`` for a parameter or buffer of the Dynamo module, ``("argument", position)`` for
        one of its inputs, ``("alias", description)`` for the common memory of several aliasing inputs, None
        for anything else (pieces of tensor subclasses, tokens).
    """
    descriptor = placeholder.meta.get("desc")
    if isinstance(descriptor, (ParamAOTInput, BufferAOTInput)):
        return "attribute", descriptor.target
    if isinstance(descriptor, PlainAOTInput):
        return "argument", descriptor.idx
    if isinstance(descriptor, (SyntheticBaseAOTInput, ViewBaseAOTInput)):
        return "alias", descriptor.expr()
    return None


def traced_frame_variables() -> dict[str, Any]:
    """The Python variables of the frame that Dynamo is compiling, real objects; empty outside of Dynamo.

    Includes the globals that the frame's code names, so that a step inside a user's function is found too.
    """
    try:
        frame = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:  # torch's own signal for "no translation is running"
        return {}
    global_names = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
    return {**global_names, **frame.f_locals}


def has_internal_overlap(tensor: torch.Tensor) -> bool:
    """Whether elements of a strided tensor are known to share memory, as those of ``x.expand(n)`` do."""
    return bool(torch._debug_has_internal_overlap(tensor) == 1)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own, as sparse tensors and some wrapper subclasses have not."""
    return torch._C._has_storage(tensor)


def current_trace() -> object:
    """A value that identifies the compilation that Dynamo is at, None outside of Dynamo."""
    return CompileContext.current_compile_id()


def traced_frame_name() -> str:
    """The name of the function whose frame Dynamo is compiling right now; empty outside of Dynamo."""
    try:
        return str(InstructionTranslator.current_tx().output.root_tx.f_code.co_name)
    except AttributeError:
        return ""


def watch_traced_optimizers(watch: Callable[[torch.optim.Optimizer, Any, dict[str, Any]], None]) -> None:
    """Have ``watch(optimizer, backend, keywords)`` called when Dynamo begins to trace through an optimizer.

    ``backend`` is what ``torch.compile`` was given (a name already looked up) and ``keywords`` the ``mode``
    and ``options`` that go with it. An exception of a :class:`ShortenTraceback` class ends the trace and
    reaches the user as it is, before anything has run: that is how an input can be refused for which Dynamo
    would fall back to eager execution without asking any backend. Costs nothing where nothing is traced. One
    watch at a time; a second replaces the first.
    """
    original = getattr(OptimizerVariable.__init__, "__collage_fx__", OptimizerVariable.__init__)

    @functools.wraps(original)
    def watched(self: Any, value: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        watch(value, *_backend_being_traced_for())
        original(self, value, *args, **kwargs)

    watched.__collage_fx__ = original  # type: ignore[attr-defined]
    OptimizerVariable.__init__ = watched  # type: ignore[method-assign]


def _backend_being_traced_for() -> tuple[Any, dict[str, Any]]:
    try:
        return _innermost(InstructionTranslator.current_tx().output.compiler_fn)
    except AttributeError:
        return None, {}


def _innermost(compiler: Any) -> tuple[Any, dict[str, Any]]:
    """The backend as the user gave it, and the keywords ``torch.compile`` adds to its call."""
    keywords: dict[str, Any] = {}
    while True:  # torch.compile, Dynamo and its debugging tools each put a wrapper of their own around it
        attributes = getattr(compiler, "__dict__", {})
        keywords = {**keywords, **attributes.get("kwargs", {})}
        inner = attributes.get("compiler_fn") or attributes.get("_torchdynamo_orig_backend")
        if inner is None:
            return compiler, keywords
        compiler = inner


def refuse_recompile_limit(refusal: Callable[[Any, dict[str, Any], str], Exception | None]) -> None:
    """Have an exception raised where Dynamo would give up on a function and run it eagerly from then on.

    ``refusal(backend, keywords, function)`` gives the exception, or None for backends that it is not about
    (see :func:`watch_traced_optimizers`). Asked once per compilation of a frame; costs nothing where nothing
    is compiled.
    """
    original = getattr(ConvertFrameAssert.__call__, "__collage_fx__", ConvertFrameAssert.__call__)

    @functools.wraps(original)
    def guarded(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        exception = refusal(*_innermost(self._torchdynamo_orig_backend), frame.f_code.co_name)
        if exception is None:
            return original(self, frame, *args, **kwargs)
        try:
            with dynamo_config.patch(fail_on_recompile_limit_hit=True):
                return original(self, frame, *args, **kwargs)
        except FailOnRecompileLimitHit as limit:
            raise exception from limit

    guarded.__collage_fx__ = original  # type: ignore[attr-defined]
    ConvertFrameAssert.__call__ = guarded  # type: ignore[method-assign]


def symbol_source(value: torch.SymInt | torch.SymFloat) -> str:
    """The expression a symbolic number was read from, as ``self.param_groups[0]['lr']``, else its symbol."""
    expression = value.node.expr
    sources = value.node.shape_env.var_to_sources.get(expression, ())
    return str(sources[0].name) if sources and isinstance(sources[0].name, str) else str(expression)


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Allocate real tensors although a fake tensor mode is active (as it is while a backend runs)."""
    with unset_fake_temporarily():
        yield


def register_pointwise_lowering(
    operator: Any, element_function: Callable[..., Callable[[Sequence[Any]], Any]], *, dtype: torch.dtype
) -> None:
    """Lower ``operator(x, *constants)`` to one elementwise computation within the kernel that reads it.

    Args:
        operator: an overload of one tensor and constants.
        element_function: ``(*constants) -> function of [value of x]`` giving the value of the result, for one
            element.
        dtype: of the result.
    """

    def lowering(x: Any, *constants: Any) -> Any:
        load = x.make_loader()
        compute = element_function(*constants)
        return ir.Pointwise.create(
            device=x.get_device(),
            dtype=dtype,
            inner_fn=lambda index: compute([load(index)]),
            ranges=list(x.get_size()),
        )

    register_lowering(operator, type_promotion_kind=None)(lowering)


#: ATen operators whose name in Inductor's elementwise language differs.
_ELEMENT_NAMES = {"__rshift__": "bitwise_right_shift", "__lshift__": "bitwise_left_shift"}


def pointwise_of(node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> Any:
    """One node of a traced elementwise function in Inductor's language, its operands from ``values``."""
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    args: tuple[Any, ...] = node.args
    tensors = [arg for arg in args if isinstance(arg, torch.fx.Node)]
    dtype = (tensors[0] if tensors else node).meta["val"].dtype
    if name == "alias":
        return values[tensors[0]]
    if name == "full":
        return ops.constant(args[1], dtype)
    if node.target is torch.ops.aten.view.dtype:
        return ops.to_dtype_bitcast(values[tensors[0]], args[1], dtype)
    operands = [values[arg] if isinstance(arg, torch.fx.Node) else ops.constant(arg, dtype) for arg in args]
    return getattr(ops, _ELEMENT_NAMES.get(name, name))(*operands)
