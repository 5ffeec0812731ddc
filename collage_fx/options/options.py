"""Options of a backend, and the checks of their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from typing_extensions import TypedDict

from collage_fx.choices import (
    Arithmetic,
    Changes,
    ErrorFormatName,
    Mode,
    PackedFormatName,
    Rounding,
    Strategy,
    did_you_mean,
)
from collage_fx.errors import InvalidOptionError
from collage_fx.graph import Reason
from collage_fx.numerics import ERROR_FORMATS, PACKED_FORMATS
from collage_fx.pipeline import PIPELINE, Pass, refuse_incomplete

#: Default error format of each arithmetic.
DEFAULT_FORMATS: dict[Arithmetic, str] = {
    "wide": next(iter(ERROR_FORMATS)),
    "native": next(name for name, fmt in ERROR_FORMATS.items() if fmt.is_double_word),
}

#: Default rounding of state without error terms, for each arithmetic.
DEFAULT_ROUNDINGS: dict[Arithmetic, Rounding] = {"wide": "dither", "native": "nearest"}

MODES = get_args(Mode)


class GivenOptions(TypedDict, total=False):
    """Options of a :class:`~collage_fx.CollageBackend` as keywords.

    In ``def f(**options: Unpack[GivenOptions])`` a type checker finds misspelt names and values. An editor
    completes them. Names of formats that a plug-in registers are not in these types.
    """

    strategy: Strategy
    error_format: ErrorFormatName | None
    arithmetic: Arithmetic
    metrics: bool
    metrics_every: int
    strict: bool
    mode: Mode | None
    rounding: Rounding | None
    state: PackedFormatName | None
    bytes_per_parameter: float | None
    changes: Changes
    passes: Sequence[Pass]


@dataclass(frozen=True)
class Options:
    """Options of a :class:`~collage_fx.CollageBackend`."""

    strategy: Strategy
    error_format: str
    arithmetic: Arithmetic
    metrics: bool
    metrics_every: int
    strict: bool
    mode: str | None
    rounding: Rounding
    state: str | None
    bytes_per_parameter: float | None
    changes: Changes = "summed"
    passes: tuple[Pass, ...] = PIPELINE

    @property
    def own_passes(self) -> tuple[Pass, ...]:
        """Passes that the user has added to the pipeline."""
        return tuple(each for each in self.passes if each not in PIPELINE)

    @property
    def packs(self) -> bool:
        """Whether state may be packed, also that of float32 parameters."""
        return self.strategy != "none" and (self.state is not None or self.bytes_per_parameter is not None)

    def not_by_family(self) -> Reason | None:
        """Return why equal updates cannot be compiled once for all with these options; None if they can."""
        if self.strategy == "none":
            return Reason("strategy 'none' leaves the graph to Inductor")
        for each in self.own_passes:
            if not each.by_family:
                return Reason(f"the pass {each.name} is to see every tensor (its by_family is False)")
        return None

    def __post_init__(self) -> None:
        refuse_unless("strategy", self.strategy, get_args(Strategy))
        refuse_unless("arithmetic", self.arithmetic, get_args(Arithmetic))
        refuse_unless("error_format", self.error_format, tuple(ERROR_FORMATS))
        refuse_unless("metrics", self.metrics, (True, False))
        if type(self.metrics_every) is not int or self.metrics_every < 1:
            raise InvalidOptionError(
                f"metrics_every={self.metrics_every!r} is not allowed",
                where="metrics_every",
                remedy="use a whole number: every how many steps the metrics are computed",
            )
        refuse_unless("strict", self.strict, (True, False))
        refuse_unless("mode", self.mode, (None, *MODES))
        refuse_unless("rounding", self.rounding, get_args(Rounding))
        refuse_unless(
            "changes",
            self.changes,
            get_args(Changes),
            "or call collage_fx.changes(model) to learn which weights have changed",
        )
        refuse_unless(
            "state",
            self.state,
            (None, *PACKED_FORMATS),
            "or import the module that registers another: collage_fx.examples.peer_formats has 'fp8_lm' and "
            "'coat'",
        )
        if self.arithmetic == "native" and not ERROR_FORMATS[self.error_format].is_double_word:
            formats = ", ".join(repr(name) for name, fmt in ERROR_FORMATS.items() if fmt.is_double_word)
            raise InvalidOptionError(
                "arithmetic='native' computes with double words of the storage format, which error_format="
                f"{self.error_format!r} does not keep",
                where="error_format",
                remedy=f"use error_format={formats}, or arithmetic='wide'",
            )
        if self.arithmetic == "native" and self.rounding == "dither":
            raise InvalidOptionError(
                "arithmetic='native' rounds every operation to nearest, and what is stored has been rounded",
                where="rounding",
                remedy="use rounding='nearest', or arithmetic='wide'",
            )
        if self.state is not None and (self.arithmetic == "native" or self.strategy == "none"):
            option = f"arithmetic={self.arithmetic!r}" if self.arithmetic == "native" else "strategy='none'"
            raise InvalidOptionError(
                f"state={self.state!r} packs what a step has computed in float32, which {option} does not do",
                where="state",
                remedy="leave it out, or use arithmetic='wide' and another strategy",
            )
        self._check_budget()
        refuse_incomplete(self.passes)
        if self.strategy == "none" and self.passes != PIPELINE:
            raise InvalidOptionError(
                "strategy='none' lowers the graph as captured: no pass of yours would rewrite it",
                where="passes",
                remedy="use another strategy",
            )

    def _check_budget(self) -> None:
        budget = self.bytes_per_parameter
        if budget is None:
            return
        if type(budget) not in (int, float) or not budget > 0:
            raise InvalidOptionError(
                f"bytes_per_parameter={budget!r} is not allowed",
                where="bytes_per_parameter",
                remedy="use a number of bytes, such as 8: of parameters, state and error terms together",
            )
        defaults: dict[str, str | None] = {
            "strategy": "plus",
            "error_format": DEFAULT_FORMATS["wide"],
            "arithmetic": "wide",
            "rounding": DEFAULT_ROUNDINGS["wide"],
            "state": None,
        }
        for name, value in defaults.items():
            if getattr(self, name) != value:
                raise InvalidOptionError(
                    f"bytes_per_parameter={budget!r} chooses {name}, but {name}={getattr(self, name)!r} is "
                    "given, too",
                    where=name,
                    remedy=f"give either bytes_per_parameter or {name}, not both",
                )


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise ``InvalidOptionError`` for a name that is not an option's."""
    known = list(Options.__dataclass_fields__)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise InvalidOptionError(
                f"unknown option {name!r}" + (f"; {hint}" if hint.startswith("did") else ""),
                where=name,
                remedy=f"options of the backend are {', '.join(known)}",
            )


def refuse_unless(name: str, value: object, allowed: Sequence[object], otherwise: str = "") -> None:
    """Raise ``InvalidOptionError`` unless a value is allowed. ``True`` is not equal to 1 here.

    Args:
        name: name of the option.
        value: its value.
        allowed: the allowed values.
        otherwise: another remedy, for the message.
    """
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
        raise InvalidOptionError(
            f"{name}={value!r} is not allowed",
            where=name,
            remedy=", ".join(filter(None, (f"use one of {', '.join(map(repr, allowed))}", otherwise))),
        )
