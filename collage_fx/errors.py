"""The errors that a user can meet: what was expected, what was met, where, and what to do next.

All of them are :class:`CollageError`. They are raised while a step is *compiled*, before any kernel has run,
so a refused step has changed no parameter and no optimizer state; the exceptions to that rule say so in their
docstring.

``CollageError`` derives from Dynamo's ``ShortenTraceback`` because that is the one family of exceptions that
Dynamo hands from a backend to the user as it is; any other would arrive wrapped in ``BackendCompilerFailed``.
"""

from __future__ import annotations

import difflib
import traceback
import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from collage_fx.torch_compat import ShortenTraceback

__all__ = [
    "AliasedStateError",
    "ChangedTensorError",
    "CheckpointMismatchError",
    "CollageError",
    "ConflictingErrorFormatError",
    "EagerStepError",
    "FailedLoweringError",
    "FailedPassError",
    "GraphBreakError",
    "GraphInvariantError",
    "InvalidOptionError",
    "LostErrorTermsError",
    "RecompileLimitError",
    "UncompensatedParameterError",
    "UnsupportedOptimizerError",
    "UnsupportedTensorError",
    "did_you_mean",
    "error_kinds",
    "raise_or_warn",
    "warn",
]


class CollageError(ShortenTraceback, RuntimeError):
    """The base of all errors of this package.

    Args:
        met: what was seen, as a sentence.
        where: the tensor, graph node or option it was seen at.
        remedy: what the user can do about it.

    Attributes:
        code: of its kind, which stays; ``docs/errors.md`` has a section for each.
    """

    code = "CFX000"

    def __init__(self, met: str, *, where: str, remedy: str) -> None:
        self.met = met
        self.where = where
        self.remedy = remedy
        text = f"{met}\n  where: {where}\n  what to do: {remedy}\n  more: collage-fx error {self.code}"
        super().__init__(text, first_useful_frame=None)


class InvalidOptionError(CollageError, ValueError):
    """An option that does not exist, or a value that it does not take.

    A CollageError too, because with ``torch.compile(backend="collage", options=...)`` options are read at the
    first call, inside Dynamo.
    """

    code = "CFX001"


class UnsupportedOptimizerError(CollageError):
    """An optimizer, or an option of one, whose update can't be captured as operations on tensors."""

    code = "CFX002"


class UnsupportedTensorError(CollageError):
    """A state tensor or gradient whose layout, dtype or device compensated arithmetic is not defined for."""

    code = "CFX003"


class AliasedStateError(CollageError):
    """Two state tensors of one step share memory, so neither has an error term of its own."""

    code = "CFX004"


class ConflictingErrorFormatError(CollageError):
    """A tensor already has error terms in another format, or a plain step was asked for on such a tensor."""

    code = "CFX005"


class CheckpointMismatchError(CollageError):
    """A checkpoint's error terms do not fit the tensors they belong to. Raised before anything is loaded."""

    code = "CFX006"


class ChangedTensorError(CollageError):
    """A tensor of a compiled step no longer has the layout, dtype or device that the step was compiled for.

    Or, while a CUDA graph is captured, the memory. Raised in the middle of a run, but before that step.
    """

    code = "CFX007"


class LostErrorTermsError(CollageError):
    """A compiled step was called after its error terms had been dropped. Raised before the step runs."""

    code = "CFX008"


class RecompileLimitError(CollageError):
    """A function of an optimizer has been compiled again and again.

    Raised in the middle of a run, but before that step.
    """

    code = "CFX009"


class GraphBreakError(CollageError):
    """Dynamo would run a part of an optimizer's update eagerly: without error terms."""

    code = "CFX010"


class EagerStepError(CollageError):
    """An optimizer was stepped without its compiled callable.

    Raised before that step where its parameters have error terms. Where only the model is compiled with this
    backend, it is a warning.
    """

    code = "CFX011"


class UncompensatedParameterError(CollageError):
    """A parameter's update ends in an operation through which the arithmetic can't carry an error term."""

    code = "CFX012"


class FailedLoweringError(CollageError):
    """Inductor, or its compiler, failed at a rewritten step. A warning: the step is taken in a slower way."""

    code = "CFX013"


class GraphInvariantError(CollageError):
    """A pass left the graph in a state that breaks an invariant.

    A fault of collage_fx, not of the user's program.
    """

    code = "CFX014"

    def __init__(self, met: str, *, where: str) -> None:
        super().__init__(
            met, where=where, remedy="this is a bug in collage_fx; please report it with the graph"
        )


class FailedPassError(CollageError):
    """A pass raised an exception, which is its cause; nothing has been compiled or run.

    A fault of collage_fx, unless the pass is one of the user's own.
    """

    code = "CFX015"

    def __init__(self, name: str, error: Exception) -> None:
        at = traceback.extract_tb(error.__traceback__)[-1]
        super().__init__(
            f"the pass {name} failed with {type(error).__name__}: {error}",
            where=f"{at.filename}:{at.lineno} in {at.name}",
            remedy="a pass of your own has to be mended there; of others this is a bug in collage_fx; please "
            "report it with the graph (COLLAGE_FX_DUMP=directory writes it)",
        )


def error_kinds() -> dict[str, type[CollageError]]:
    """All kinds of errors, by their codes."""
    kinds = (each for each in globals().values() if isinstance(each, type) and issubclass(each, CollageError))
    return {each.code: each for each in kinds if each is not CollageError}


def warn(refusal: CollageError) -> None:
    """Warn of what a strict backend would refuse."""
    warnings.warn(f"collage_fx: {refusal}", stacklevel=3)


def raise_or_warn(about: Any, refusal: CollageError, *, strict: bool) -> None:
    """Raise a refusal, or warn of it once.

    Args:
        about: the optimizer or function concerned; what has been said is remembered as long as it lives.
        refusal: what is to be said.
        strict: whether to raise.
    """
    if strict:
        raise refusal
    said = _said.setdefault(about, set())
    if str(refusal) not in said:
        said.add(str(refusal))
        warn(refusal)


_said: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known names that look like ``name``; all of them where none does and they are few."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    lower = {each.lower(): each for each in known}
    if not near and name.lower() in lower:
        near = [lower[name.lower()]]
    if near:
        return f"did you mean {' or '.join(near)}?"
    if not known:
        return "there are none"
    return f"known are {', '.join(known[:20])}{', …' if len(known) > 20 else ''}"
