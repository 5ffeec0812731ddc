"""The errors that a user can meet: what was expected, what was met, where, and what to do next.

All of them are :class:`CollageError`. They are raised while a step is *compiled*, before any kernel has run,
so a refused step has changed no parameter and no optimizer state; the exceptions to that rule say so in their
docstring. One goes for all kinds: a recorded step is compiled, and taken, part by part, and a refusal of a
later part leaves the earlier ones taken.

The docstring of a kind is what ``collage-fx error`` prints and its page in ``docs/errors/`` shows: what
it is, in a sentence, what it means, and a last paragraph that begins with "What to do:".

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
    "UnsupportedTorchError",
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
        code: of its kind, which stays; ``docs/errors/`` has a page for each.
    """

    code = "CFX000"

    def __init__(self, met: str, *, where: str, remedy: str) -> None:
        self.met = met
        self.where = where
        self.remedy = remedy
        text = f"{met}\n  where: {where}\n  what to do: {remedy}\n  more: collage-fx error {self.code}"
        super().__init__(text, first_useful_frame=None)


class InvalidOptionError(CollageError, ValueError):
    """An option that does not exist, a value that it does not take, or options that exclude each other.

    Options are checked where they are given; those of ``torch.compile(backend="collage", options=...)`` at
    the first call, and what depends on the optimizer, such as ``bytes_per_parameter``, when its step is
    compiled. The step has not been taken, and ``strict=False`` makes no warning of it. It is a
    ``ValueError``, too.

    What to do: give one of the values that the message lists; ``docs/options.md`` says what each option is
    for. Of options that exclude each other, keep one. In place of a budget that is too small, give as many
    bytes as the message says, or choose ``strategy``, ``error_format`` and ``state`` yourself.
    """

    code = "CFX001"


class UnsupportedOptimizerError(CollageError):
    """An optimizer whose update can't be captured as operations on tensors, or that can't be installed.

    LBFGS decides by the values of losses what to compute next, so that there is no graph of its step. An
    operator such as ``torch._fused_adamw_`` hides the whole update (``fused=True`` in torch.optim is fine).
    ``install`` takes optimizers, and classes of your own, whose ``step`` nobody else has replaced. Nothing
    has changed. With ``strict=False``, LBFGS is stepped all the same, with a warning.

    What to do: step LBFGS eagerly, on float32 parameters. Write an update as ordinary operations, or call the
    function of torch.optim for it: Inductor makes fused kernels of both. Call ``collage_fx.install`` with the
    optimizer itself, and before anything puts another ``step`` into it.
    """

    code = "CFX002"


class UnsupportedTensorError(CollageError):
    """A tensor has a layout, dtype, device or class that compensated arithmetic is not defined for.

    Error terms go with dense bfloat16 and float16 tensors on a CPU or a CUDA device; float32 and float64 stay
    as they are. Refused are complex and integer parameters, sparse gradients, parameters made of other
    tensors (quantized ones, not DTensors), DTensors in a recorded step, and what a packed format (``state=``)
    or a file can't hold. The step has not been taken. With ``strict=False`` most of it is a warning, and such
    a parameter is updated without an error term.

    What to do: make gradients dense, ``nn.Embedding(sparse=False)`` or ``grad.to_dense()``. Step such
    parameters with another optimizer, which is not compiled with this backend. A complex parameter can be one
    of its real parts, ``torch.view_as_real``. ``docs/limits.md`` lists what is refused, and the way out.
    """

    code = "CFX003"


class AliasedStateError(CollageError):
    """Two tensors of one step share memory, so neither has an error term of its own.

    Such are parameters that overlap, a parameter that is given twice, an expanded one, and state that is a
    view of its parameter: elements in common would be corrected by two error terms. It is looked for when a
    step is compiled, and nothing has changed; memory that is shared later on, by ``p.data = q.data``, is not
    noticed. With ``strict=False`` it is a warning, and the step is compiled without error terms.

    What to do: give each parameter and each state its own memory, ``tensor.clone()``, or give the optimizer
    the tensor that they are parts of, once. Tied weights are given once: ``model.parameters()`` has each of
    them one time.
    """

    code = "CFX004"


class ConflictingErrorFormatError(CollageError):
    """A tensor has error terms in another format than a step is to keep, or that step is to keep none.

    Error terms stay with their tensor from one compilation to the next. A step in another format can't read
    them, and a plain one, ``strategy="none"``, would leave them behind as the errors of values that are gone.
    It is found when the step is compiled, or before weights are loaded, and nothing has changed, whether
    ``strict`` or not.

    What to do: use one ``error_format``, and strategies other than "none", for all compiled steps of an
    optimizer and for ``collage_fx.load_full_state_dict``. To change over, drop the error terms of its
    parameters and state before, ``collage_fx.reset_error_terms(tensor)``: values lose what the error terms
    held, half an ulp at most, once.
    """

    code = "CFX005"


class CheckpointMismatchError(CollageError):
    """A checkpoint, or the error terms in it, does not fit the tensors that it is loaded into.

    An error term belongs to one tensor, of one shape, dtype and format; beside another it would be noise. A
    checkpoint of another model or optimizer is met here, one from which entries have been taken, names that a
    model does not have, and a file that is cut off. All is checked first: nothing has been loaded, and what
    was there is as it was.

    What to do: load the checkpoint that was saved from this model and this optimizer
    (``docs/checkpoints.md``). To go on without its error terms, delete the entries that begin with
    ``collage_fx`` from it; they start from zero then, which is told in a warning. To ``load_full_state_dict``
    give all names of ``model.state_dict()``, and no others.
    """

    code = "CFX006"


class ChangedTensorError(CollageError):
    """A tensor of a compiled step no longer has the layout, dtype or device that the step was compiled for.

    Compiled code goes by addresses, and Dynamo does not look at what ``p.data = ...`` has made of a
    parameter. It is met in the middle of a run, but before that step, of which nothing has been taken,
    whether ``strict`` or not. While a CUDA graph is captured, a tensor at another address than in the step
    before is refused, too: each replay would go by it.

    What to do: copy new values, ``p.data.copy_(...)``. After a change to another kind of tensor, have the
    step compiled anew, ``torch._dynamo.reset()``; if its dtype or shape has changed, its error terms start
    from zero, with a warning. Before a capture, take a step with the same tensors, and have each backward
    pass write gradients to the same memory.
    """

    code = "CFX007"


class LostErrorTermsError(CollageError):
    """The code of a compiled step was called, but the tensor that it updates, and its error terms, are gone.

    What ``torch.compile`` returns keeps its tensors alive, and so does an installed optimizer: a program that
    calls these does not meet it. It is for code that was taken out of there and goes on when the optimizer is
    dropped. It is raised before a kernel has run.

    What to do: compile the step of the optimizer in use, ``torch.compile(optimizer.step, backend=...)``, and
    call what that returns. If that raises this error, it is a bug in collage_fx; please report it.
    """

    code = "CFX008"


class RecompileLimitError(CollageError):
    """A function has been compiled again and again, and updates tensors without an optimizer.

    What changes at each call will change at the next, and compiling takes seconds. An optimizer's step is
    recorded once it has been compiled ``torch._dynamo.config.recompile_limit`` times (8), and the steps in
    another function at four times as many: no limit ends a run of theirs. A function in which no optimizer
    is stepped cannot be recorded, and is refused at four times the limit, before that call has done anything.
    With ``strict=False`` it is a warning, and the function is compiled once more. So is, with a warning, what
    32 steps in a row of a recorded optimizer have each brought anew.

    What to do: find out what changes with ``TORCH_LOGS=recompiles``. Let a number be a tensor,
    ``torch.tensor(...)``. If the compilations are worth their time, raise
    ``torch._dynamo.config.recompile_limit``.
    """

    code = "CFX009"


class GraphBreakError(CollageError):
    """Dynamo would run a part of an optimizer's update eagerly: without error terms.

    At what it can't capture, such as a branch on the value of a tensor, Dynamo breaks the graph and leaves
    the rest to Python. A step with such a line is recorded, which is no error
    (``docs/limits.md#recorded-steps``), unless an earlier break has left Python in the middle of it. What
    stands before the earlier break has been run by then, such as the inner step of a wrapper; the part that
    breaks has not. With ``strict=False`` that part is run, with a warning.

    What to do: change the line that the message names (``TORCH_LOGS=graph_breaks`` says more), a branch to
    ``torch.where`` for instance. If it belongs to the first step alone, which makes state, take that one
    eagerly, before the compiled ones. Of a wrapper, ``collage_fx.install(inner)`` compensates the step
    within; what the wrapper does itself stays eager.
    """

    code = "CFX010"


class EagerStepError(CollageError):
    """Parameters of a compensated step were stepped eagerly, by the optimizer's own method or another's.

    An eager step would neither use the error terms of its parameters nor keep them up. It is refused before
    it begins, and nothing has changed; with ``strict=False`` it is a warning, once. A step whose compiled
    form has never been called is refused the second time. Where the model is compiled with this backend, and
    the step is not, that is a warning, too: a forward pass is left to Inductor, and no update has an error
    term.

    What to do: make ``optimizer.step`` the compiled one, ``collage_fx.install(optimizer)``, for each
    optimizer of the parameters. Or call what ``torch.compile(optimizer.step, backend=...)`` has returned. To
    go on without error terms, ``collage_fx.uninstall(optimizer)`` what was installed, or
    ``collage_fx.reset_error_terms(tensor)`` of each parameter.
    """

    code = "CFX011"


class UncompensatedParameterError(CollageError):
    """A parameter's update ends in an operation through which the arithmetic can't carry an error term.

    A matrix product, for instance, reads tensors in the storage format and rounds its result to it: the new
    value knows nothing of the error term, and small updates would be lost again. So it is where a new value
    is rounded by operations on its bits. It is found when the step is compiled: nothing has changed, but by
    earlier parts of a recorded step. With ``strict=False`` it is a warning, as it always is for optimizer
    state, and that tensor is stored rounded.

    What to do: give that operation float32 tensors, ``x.float()``, in the optimizer. Round by
    ``x.to(p.dtype)``, not bit by bit. With ``arithmetic="native"``, try "wide", the default. Or leave the
    parameter to an optimizer of its own, which is not compiled with this backend.
    """

    code = "CFX012"


class FailedLoweringError(CollageError):
    """The rewritten step could not be compiled as usual. A warning if Inductor failed: the step is slower.

    Where Inductor or its compiler fails, the step is compiled in simpler ways, and if all of them fail, torch
    runs it operation by operation, 10 to 50 times slower. Parameters, state and error terms get the same bits
    in each way. The message begins with the first line of what Inductor said, and ``backend.report()`` says
    how each step has been compiled. Where code of collage_fx fails that Inductor calls, that is an error, and
    nothing has been run.

    What to do: run ``collage-fx doctor``, which says whether there is a compiler that works; if not, install
    g++, or name a compiler by the variable ``CXX``. See to it that the cache can be written
    (``TORCHINDUCTOR_CACHE_DIR``). Otherwise please report the message. Until an error of collage_fx's own is
    mended, ``backend="inductor"`` takes the step without error terms.
    """

    code = "CFX013"


class GraphInvariantError(CollageError):
    """A pass left the graph in a state that breaks an invariant.

    After each pass the graph is checked: each node has a value, each tensor is written once, at the end, and
    by one of its dtype and shape, and each error term is written. A fault of collage_fx, unless the pass is
    one of the user's own. Nothing has been compiled or run.

    What to do: in a pass of your own, edit the graph by a ``GraphEditor``, which keeps to the invariants
    (``docs/writing-a-pass.md``). Otherwise it is a bug; please report the message, and the graphs that
    ``COLLAGE_FX_DUMP=directory`` writes. Until it is mended, ``backend="inductor"`` takes the step without
    error terms.
    """

    code = "CFX014"

    def __init__(self, met: str, *, where: str) -> None:
        super().__init__(
            met, where=where, remedy="this is a bug in collage_fx; please report it with the graph"
        )


class FailedPassError(CollageError):
    """A pass raised an exception, which is its cause; nothing has been compiled or run.

    A fault of collage_fx, unless the pass is one of the user's own. The message says which pass, and where in
    it; the traceback above has the rest.

    What to do: mend a pass of your own at the place that the message names (``docs/writing-a-pass.md``).
    Otherwise it is a bug; please report the traceback, and the graphs up to that pass, which
    ``COLLAGE_FX_DUMP=directory`` writes. Until it is mended, ``backend="inductor"`` takes the step without
    error terms.
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


class UnsupportedTorchError(CollageError):
    """This version of torch lacks a function that collage_fx replaces or calls, or has it in another shape.

    Compensation rests on torch's compiler, whose inner functions change from version to version. The shapes
    of all that are needed are looked at, and without one of them no step is compiled. Nothing has changed.
    Where only time would be lost, there is no error, and ``collage-fx doctor`` names what is left out.

    What to do: install one of the versions of torch that the message names, or a newer collage_fx. The table
    of ``collage-fx doctor`` says what does not fit.
    """

    code = "CFX016"


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
