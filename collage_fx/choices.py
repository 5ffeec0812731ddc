"""Options of a backend, each a field of one dataclass, and the types of their values.

From a field come the option's name, type, default, check and documentation, the signatures of all functions
that take options, and the option of the command line. Imports no torch, so that ``--help`` is quick.
"""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

Strategy = Literal["none", "light", "plus", "full"]
Arithmetic = Literal["wide", "native"]
Rounding = Literal["nearest", "dither", "repay"]
Changes = Literal["summed", "as written"]
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

#: Formats that the package brings. A plug-in registers others, whose names a type checker does not know.
ErrorFormatName = Literal["exact", "mcf", "fp32", "byte", "dither"]
PackedFormatName = Literal["block16", "block8", "bf16"]
WeightFormatName = Literal["int16x32"]

#: Dtypes of parameters, and GPUs, that the command line offers.
Dtype = Literal["bfloat16", "float16", "float32"]
Architecture = Literal["sm_80", "sm_90", "sm_100", "gfx942"]

#: Default steps of an audit: enough for scheduled numbers to change, and for work done in every fifth step.
AUDIT_STEPS = 40

#: A pass, whose class needs torch: collage_fx.pipeline.Pass.
Pass = Any

Taking = TypeVar("Taking", bound=Callable[..., Any])


def _option(
    default: Any, summary: str, text: str, *, registry: str = "", otherwise: str = "", in_shell: bool = False
) -> Any:
    """Return the field of an option, with its effect in a few words and its documentation.

    ``registry`` names a table of ``collage_fx.numerics`` whose names are allowed, too; ``otherwise`` is
    another remedy for a value that is not allowed; ``in_shell``: whether the command line offers it.
    """
    about = {"summary": summary, "text": text, "registry": registry, "otherwise": otherwise}
    return field(default=default, metadata=about | {"in_shell": in_shell})


@dataclass(frozen=True, kw_only=True)
class OptionFields:
    """Options of a :class:`~collage_fx.CollageBackend`, as they are given."""

    strategy: Strategy = _option(
        "plus",
        "which tensors get error terms",
        """selects the bfloat16 and float16 tensors that get error terms (the names are the paper's).
        ``"none"``: none, plain Inductor. ``"light"``: parameters, and sums of either sign beside them.
        ``"plus"``: also optimizer state whose recurrence loses bits in its storage format. ``"full"``:
        all tensors that carry something from step to step.""",
        in_shell=True,
    )
    error_format: ErrorFormatName | None = _option(
        None,
        "what is kept beside a tensor",
        """``"exact"``: the other 16 bits of a float32 number, the default of ``wide``; if you name it,
        dither rounds sums of float32 parameters, too. ``"mcf"``: an error term of the tensor's own dtype, in
        as many bytes (the paper's; the default of ``native``). ``"byte"``: eight more bits of fraction in a
        byte, rounded up or down by dither. ``"fp32"``: a float32 master copy, for comparison.""",
        registry="ERROR_FORMATS",
        in_shell=True,
    )
    arithmetic: Arithmetic = _option(
        "wide",
        "float32 registers, or the paper's arithmetic in 16 bits",
        """``"wide"``: the step is computed on float32 values of ``hi + lo`` and split once at the store.
        ``"native"``: the paper's algorithms in the storage format, every operation rounded; needs
        ``"mcf"``.""",
        in_shell=True,
    )
    metrics: bool = _option(
        False,
        "measures what becomes of each update",
        """measure the fate of each compensated tensor's updates, for :meth:`metrics`; with strategy
        ``"none"``, of every bfloat16 and float16 parameter and state. No bit of a tensor changes.""",
    )
    metrics_every: int | None = _option(
        None,
        "measures each k-th step; by default each, or those that a trainer logs",
        """measure every so many steps. None is 1, or the interval at which a trainer logs whose callback
        has ``metrics=True``. A measured step takes several times as long on a CPU.""",
    )
    strict: bool = _option(
        True,
        "refuses what cannot be compensated; ``False`` warns and leaves it in plain precision",
        """refuse (raise) where a parameter cannot be compensated, rather than warn and leave it, or the
        whole step where one tensor cannot be told from the rest, to plain low precision.""",
    )
    mode: Mode | None = _option(
        None,
        "Inductor's mode, as ``torch.compile`` has it",
        "as in ``torch.compile``; passed on to Inductor.",
    )
    rounding: Rounding | None = _option(
        None,
        "how state without error terms is stored",
        """rounding of state that carries something from step to step and has no error terms, and of sums
        next to the old value in ``"exact"``. ``"dither"``: up or down, so that changes below an ulp
        arrive on average; the same in every run, and no byte more than a count for each tensor.
        ``"repay"``, the default of ``wide``: the same, except for moments of an update that is linear in
        them, as in Adam and SGD. Those are rounded to nearest, and each update makes up at once for what
        the rounding will do to later ones. ``"nearest"``, the default of ``native`` and its only
        rounding: changes below half an ulp are lost at every step, with error terms below half an ulp of
        float32.""",
        in_shell=True,
    )
    state: PackedFormatName | None = _option(
        None,
        "packs moments",
        """format of state that carries something from step to step. ``None``: as the optimizer makes it.
        ``"block16"``, ``"block8"``: packed, as integers of 16 or 8 bits, 32 neighbours with a scale; the
        recurrence of a state decides whether it is packed. Errors are those of
        :class:`~collage_fx.numerics.Blocks`. Plug-ins register others, such as
        ``examples/peer_formats.py``. Needs ``wide``, and a step that Dynamo captures: recorded steps pack
        nothing.""",
        registry="PACKED_FORMATS",
        otherwise="or import the module that registers another: collage_fx.examples.peer_formats has "
        "'fp8_lm' and 'coat'",
        in_shell=True,
    )
    weights: WeightFormatName | None = _option(
        None,
        "packs weights, without error terms",
        """format of parameters. ``None``: 16 bits with error terms beside them. ``"int16x32"``: packed, as
        integers of 16 bits, 32 neighbours with a scale, in 2.03 bytes each; the memory of the parameter is
        free between steps, and each operation of the model decodes the weight that it reads:
        :class:`~collage_fx.numerics.Weights`. Parameters without rows of 32 elements, or with fewer than 4096
        elements, keep error terms. Needs ``wide``, and a step that Dynamo captures.""",
        registry="WEIGHT_FORMATS",
        in_shell=True,
    )
    bytes_per_parameter: float | Literal["auto"] | None = _option(
        None,
        "a budget, instead of ``strategy``, ``error_format`` and ``state``: the most precise combination "
        "within it",
        """a budget instead of ``strategy``, ``error_format``, ``rounding``, ``state`` and ``weights``: the
        most precise combination of these within it, to 1.5 %, counting parameters, state and error terms (4.1
        to 12 for AdamW). The report shows it beside the others. The order is that of AdamW's errors in
        docs/formats.md. A recorded step, of which no part shows all state, gets a combination for AdamW
        without packed state (7 to 12). ``"auto"``: the fewest bytes with a predicted error of the
        weights up to 0.02 (``report().predicted_error()``), by the learning rate, gradients and weights of
        the first step of an installed optimizer; at least 6 for AdamW where these do not tell.""",
        in_shell=True,
    )
    changes: Changes = _option(
        "summed",
        "in which order a step adds up",
        """``"summed"``: what a step adds to a tensor is summed first, and a factor near one (weight
        decay, a moving average) is taken as what it takes away: ``x + (t - a x)`` for ``x (1 - a) + t``.
        So there is decay where float32 cannot tell its factor from 1 (lr * weight_decay below 6e-8), in
        float32 tensors, too. Numbers, such as bias corrections, are computed in float64. ``"as
        written"``: in the optimizer's operations; with ``"full"`` and ``rounding="nearest"`` as precise as
        float32. ``native`` arithmetic computes as written.""",
        otherwise="or call collage_fx.changes(model) to learn which weights have changed",
        in_shell=True,
    )
    passes: Sequence[Pass] | None = _option(
        None,
        "the pipeline, with passes of your own",
        """the pipeline, with passes of your own in it: see :func:`collage_fx.pipeline.inserted`. They run
        on steps that update a bfloat16 or float16 tensor, or sum changes of a float32 tensor; other
        graphs are lowered as they are.""",
    )


#: Options that pack tensors, each with the name of a packed format.
PACKING = ("state", "weights")


class GivenOptions(TypedDict, total=False):
    """Options of a :class:`~collage_fx.CollageBackend` as keywords, for type checkers and editors.

    A type checker cannot read :class:`OptionFields` as keywords; a test compares both. Names of formats that
    a plug-in registers are not in these types.
    """

    strategy: Strategy
    error_format: ErrorFormatName | None
    arithmetic: Arithmetic
    metrics: bool
    metrics_every: int | None
    strict: bool
    mode: Mode | None
    rounding: Rounding | None
    state: PackedFormatName | None
    weights: WeightFormatName | None
    bytes_per_parameter: float | Literal["auto"] | None
    changes: Changes
    passes: Sequence[Pass] | None


#: Name of an option -> its type.
TYPES: dict[str, Any] = get_type_hints(OptionFields)


def names_of(option: str) -> tuple[str, ...]:
    """Return the names that an option may have as its value; empty if its values have no names."""
    types = TYPES[option], *get_args(TYPES[option])
    literals = (each for each in types if isinstance(each, type(Strategy)))
    return tuple(name for literal in literals for name in get_args(literal) if isinstance(name, str))


#: Line of a docstring that stands for all options, also where a docstring is read without being executed.
PLACE = "options: by name; docs/options.md has them all."


def takes_options(taking: Taking) -> Taking:
    """Give a function or class with ``**options`` the signature of all options, for ``help()``: a decorator.

    :data:`PLACE` in its docstring, on a line of its own, becomes their documentation.
    """
    signature = inspect.signature(taking)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(each.name, kind, default=each.default, annotation=each.type)
        for each in fields(OptionFields)
        if each.name not in signature.parameters
    ]
    shown: Any = taking
    shown.__signature__ = signature.replace(parameters=[*own, *options])
    if taking.__doc__ and PLACE in taking.__doc__:
        texts = (f"{each.name}: {' '.join(each.metadata['text'].split())}" for each in fields(OptionFields))
        indent = taking.__doc__.partition(PLACE)[0].rpartition("\n")[2]
        behind = f"{indent}    "
        wrapped = (textwrap.fill(x, 110, initial_indent=indent, subsequent_indent=behind) for x in texts)
        taking.__doc__ = taking.__doc__.replace(PLACE, "\n".join(wrapped).strip())
    return taking


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint: the known names similar to ``name``; if none is similar, the first 20 known names.

    Case and leading dashes are not compared.
    """
    known = list(known)
    plain = {each.lstrip("-").lower(): each for each in known}
    wanted = name.lstrip("-").lower()
    near = [wanted] if wanted in plain else difflib.get_close_matches(wanted, plain, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(plain[each] for each in near)}?"
    if not known:
        return "there are none"
    return f"known are {', '.join(known[:20])}{', …' if len(known) > 20 else ''}"
