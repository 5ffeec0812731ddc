"""Options of a backend, and the checks of their values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, get_args

from typing_extensions import Unpack

from collage_fx import choices, numerics
from collage_fx.choices import Arithmetic, GivenOptions, Pass, Rounding
from collage_fx.errors import InvalidOptionError
from collage_fx.graph import Reason
from collage_fx.numerics import ERROR_FORMATS
from collage_fx.pipeline import PIPELINE, refuse_incomplete

#: Options whose defaults depend on the arithmetic.
_DOUBLE_WORDS = next(name for name, fmt in ERROR_FORMATS.items() if fmt.is_double_word)
DEFAULTS: dict[Arithmetic, dict[str, str]] = {
    "wide": {"error_format": next(iter(ERROR_FORMATS)), "rounding": "repay"},
    "native": {"error_format": _DOUBLE_WORDS, "rounding": "nearest"},
}


@dataclass(frozen=True, kw_only=True)
class Options(choices.OptionFields):
    """Checked options of a :class:`~collage_fx.CollageBackend`; no default depends on another option."""

    error_format: str = ""  # type: ignore[assignment]  # also a name that a plug-in registers
    rounding: Rounding = "repay"
    passes: tuple[Pass, ...] = PIPELINE
    names_format: bool = False

    @property
    def given(self) -> dict[str, Any]:
        """Values to make a backend with these options of."""
        values = {each.name: getattr(self, each.name) for each in fields(choices.OptionFields)}
        return values if self.names_format else values | {"error_format": None}

    @property
    def sums_float32(self) -> bool:
        """Whether the last sum of float32 parameters, too, is rounded by dither."""
        is_summed = self.changes == "summed" and self.rounding != "nearest" and self.strategy != "none"
        return is_summed and self.names_format and self.error_format == DEFAULTS["wide"]["error_format"]

    @property
    def takes_float32(self) -> bool:
        """Whether float32 parameters, or their state, may get error formats."""
        return self.packs or self.sums_float32

    @property
    def own_passes(self) -> tuple[Pass, ...]:
        """Passes that the user has added to the pipeline."""
        return tuple(each for each in self.passes if each not in PIPELINE)

    @property
    def packs(self) -> bool:
        """Whether state may be packed, also that of float32 parameters."""
        return self.strategy != "none" and (self.state is not None or self.bytes_per_parameter is not None)

    @property
    def asks_for_sizes(self) -> bool:
        """Whether the treatment of a tensor may depend on its sizes."""
        is_elementwise = ERROR_FORMATS[self.error_format].is_elementwise
        packs_any = self.packs or any(getattr(self, name) is not None for name in choices.PACKING)
        return packs_any or bool(self.metrics or self.own_passes) or not is_elementwise

    def not_by_family(self) -> Reason | None:
        """Return why equal updates cannot be compiled once for all with these options; None if they can."""
        if self.strategy == "none":
            return Reason("strategy 'none' leaves the graph to Inductor")
        for each in self.own_passes:
            if not each.by_family:
                return Reason(f"the pass {each.name} is to see every tensor (its by_family is False)")
        return None

    @classmethod
    def of(cls, **given: Unpack[GivenOptions]) -> Options:
        """Return the options that are given, with defaults for the others.

        Raises:
            InvalidOptionError: a value is not allowed, or one that another does not allow.
        """
        refuse_unknown(given)
        chosen: dict[str, Any] = {each.name: each.default for each in fields(choices.OptionFields)} | given
        chosen["names_format"] = chosen["error_format"] is not None
        # Values of arithmetic that do not exist are refused below.
        defaults = DEFAULTS["native" if chosen["arithmetic"] == "native" else "wide"]
        chosen |= {name: value for name, value in defaults.items() if chosen[name] is None}
        chosen["passes"] = PIPELINE if chosen["passes"] is None else tuple(chosen["passes"])
        return cls(**chosen)

    def __post_init__(self) -> None:
        for each in fields(choices.OptionFields):
            self._check_value(each)
        if self.arithmetic == "native" and not ERROR_FORMATS[self.error_format].is_double_word:
            formats = ", ".join(repr(name) for name, fmt in ERROR_FORMATS.items() if fmt.is_double_word)
            raise InvalidOptionError(
                f"arithmetic='native' needs error_format={formats}, not {self.error_format!r}: it computes "
                "with two numbers of the storage format",
                where="error_format",
                remedy=f"use error_format={formats}, or arithmetic='wide'",
            )
        if self.arithmetic == "native" and self.rounding != "nearest":
            met = "arithmetic='native' rounds every operation to nearest, and what is stored has been rounded"
            remedy = "use rounding='nearest', or arithmetic='wide'"
            raise InvalidOptionError(met, where="rounding", remedy=remedy)
        for name in choices.PACKING:
            value = getattr(self, name)
            if value is not None and (self.arithmetic == "native" or self.strategy == "none"):
                is_native = self.arithmetic == "native"
                option = f"arithmetic={self.arithmetic!r}" if is_native else "strategy='none'"
                raise InvalidOptionError(
                    f"{name}={value!r} packs what a step has computed in float32, which {option} does not do",
                    where=name,
                    remedy="leave it out, or use arithmetic='wide' and another strategy",
                )
        self._check_budget()
        refuse_incomplete(self.passes)
        if self.strategy == "none" and self.passes != PIPELINE:
            met = "strategy='none' lowers the graph as captured: no pass of yours would rewrite it"
            raise InvalidOptionError(met, where="passes", remedy="use another strategy")

    def _check_value(self, option: Field[Any]) -> None:
        """Raise unless an option has one of its values with names, or a value of its type."""
        name, value, otherwise = option.name, getattr(self, option.name), option.metadata["otherwise"]
        registry, kind = option.metadata["registry"], choices.TYPES[name]
        named: tuple[object, ...] = tuple(getattr(numerics, registry)) if registry else choices.names_of(name)
        allowed = (True, False) if kind is bool else named
        if allowed and float not in get_args(kind):
            optional = (None,) if getattr(Options, name) is None else ()
            refuse_unless(name, value, (*optional, *allowed), otherwise)
        elif kind == int | None and value is not None and (type(value) is not int or value < 1):
            remedy = f"use a whole number of 1 or more: {option.metadata['summary']}"
            raise InvalidOptionError(f"{name}={value!r} is not allowed", where=name, remedy=remedy)

    def _check_budget(self) -> None:
        budget = self.bytes_per_parameter
        if budget is None:
            return
        if budget != "auto" and (type(budget) not in (int, float) or not budget > 0):
            raise InvalidOptionError(
                f"bytes_per_parameter={budget!r} is not allowed",
                where="bytes_per_parameter",
                remedy="use a number of bytes, such as 8: of parameters, state and error terms together; or "
                "'auto'",
            )
        default = Options.of()
        for name in ("strategy", "error_format", "arithmetic", "rounding", *choices.PACKING):
            if getattr(self, name) != getattr(default, name):
                raise InvalidOptionError(
                    f"bytes_per_parameter={budget!r} chooses {name}, but {name}={getattr(self, name)!r} is "
                    "given, too",
                    where=name,
                    remedy=f"give either bytes_per_parameter or {name}, not both",
                )


def refuse_unknown(names: Iterable[str], taking: Callable[..., Any] | None = None) -> None:
    """Raise ``InvalidOptionError`` for a name that is not an option's.

    ``taking`` is the function with ``**options`` that was called: its own keywords are proposed, too.
    """
    options = [each.name for each in fields(choices.OptionFields)]
    own = inspect.signature(taking).parameters.values() if taking else ()
    keywords = [each.name for each in own if each.kind is each.KEYWORD_ONLY and each.name not in options]
    for name in names:
        if name not in options:
            hint = choices.did_you_mean(name, [*keywords, *options])
            raise InvalidOptionError(
                f"unknown option {name!r}" + (f"; {hint}" if hint.startswith("did") else ""),
                where=name,
                remedy=f"options of the backend are {', '.join(options)}"
                + (f"; others here: {', '.join(keywords)}" if keywords else ""),
            )


def refuse_unless(name: str, value: object, allowed: Sequence[object], otherwise: str = "") -> None:
    """Raise ``InvalidOptionError``, with another remedy, unless a value is allowed; True is not 1 here."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
        hint = choices.did_you_mean(str(value), [each for each in allowed if isinstance(each, str)])
        met = f"{name}={value!r} is not allowed" + (f"; {hint}" if hint.startswith("did") else "")
        remedy = ", ".join(filter(None, (f"use one of {', '.join(map(repr, allowed))}", otherwise)))
        raise InvalidOptionError(met, where=name, remedy=remedy)
