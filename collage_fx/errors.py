"""Errors that a user can meet; each names the fault, its location, and the remedy.

All of them are subclasses of :class:`CollageError`. They are raised while a step is *compiled*, before any
kernel runs, so a refused step has changed no parameter and no optimizer state. Exceptions to this rule are
named in the docstring of the kind, except this one, which concerns all kinds: a recorded step is compiled and
executed part by part, so if a later part is refused, the earlier parts have been executed.

``collage-fx error`` prints the docstring of a kind, and its page in ``docs/errors/`` shows it: a sentence
that says what happened, an explanation, and a last paragraph that begins with "What to do:".

``CollageError`` derives from Dynamo's ``ShortenTraceback``: Dynamo passes only such exceptions unchanged from
a backend to the user, and wraps all others in ``BackendCompilerFailed``. The traceback ends at the call of
the compiled step, without the frames of Dynamo and of this package, unless ``TORCHDYNAMO_VERBOSE=1`` is set.
"""

from __future__ import annotations

import inspect
import os
import traceback
import warnings

from collage_fx.torch_compat import Refused, records

#: Folder of the library, whose statements are not the optimizer's.
_FOLDER = os.path.join(os.path.dirname(__file__), "")

#: Packages whose lines a warning does not name.
_INNER = ("collage_fx", "torch", "contextlib", "functools")


class CollageError(Refused, RuntimeError):
    """Base of all errors of this package.

    Args:
        met: description of the fault, as a sentence.
        where: tensor, graph node or option with the fault.
        remedy: advice to the user.

    Attributes:
        code: permanent code of the kind; ``docs/errors/`` has a page for each code.
    """

    code = "CFX000"

    def __init__(self, met: str, *, where: str, remedy: str) -> None:
        self.met = met
        self.where = where
        self.remedy = remedy
        super().__init__(self._text_with(where))

    def _text_with(self, where: str) -> str:
        what = f"{self.met}\n  where: {where}\n  what to do: {self.remedy}"
        return f"{what}\n  more: collage-fx error {self.code}"

    def raise_or_warn(self, about: object, *, strict: bool) -> None:
        """Raise this error if ``strict``; otherwise warn of it, once in the lifetime of ``about``.

        ``about`` is the optimizer or function concerned.
        """
        if strict:
            raise self
        warned = records.of(about, _Warned)
        if str(self) not in warned:
            warned.add(str(self))
            warn(self)

    def located(self, text: str, statement: str) -> str:
        """Return the message, with the statement of the optimizer if Dynamo was tracing it."""
        location = statement.partition(" in ")[0]
        if location in self.where or location.startswith(_FOLDER):
            return text
        return self._text_with(f"{self.where}, at {statement}")


class InvalidOptionError(CollageError, ValueError):
    """An option does not exist, does not take the given value, or excludes another option.

    Options are checked when they are given. There are two exceptions: options of
    ``torch.compile(backend="collage", options=...)`` are checked at the first call, and options that depend
    on the optimizer, such as ``bytes_per_parameter``, when its step is compiled. The step has not been
    executed. ``strict=False`` does not turn this error into a warning. It is also a ``ValueError``.

    What to do: give one of the values that the message lists; ``help(collage_fx.CollageBackend)`` describes
    each option. If two options exclude each other, remove one. If a budget is too small, give the number of
    bytes that the message names, or choose ``strategy``, ``error_format`` and ``state`` yourself.
    """

    code = "CFX001"


class UnsupportedOptimizerError(CollageError):
    """An optimizer cannot be installed, or its update cannot be captured as operations on tensors.

    The values of losses decide what LBFGS computes next, so its step has no single graph. An operator such as
    ``torch._fused_adamw_`` hides the whole update (``fused=True`` in torch.optim is allowed). ``install``
    accepts optimizers, also of your own classes, whose ``step`` updates parameters. A step that can only
    raise belongs to an optimizer that updates them elsewhere. A wrapper that does not call
    ``Optimizer.__init__`` has no parameters of its own. Nothing has changed. With ``strict=False``, LBFGS is
    stepped without error terms, with a warning.

    What to do: step LBFGS eagerly, on float32 parameters. Write an update as ordinary operations, or call the
    function of torch.optim: Inductor generates fused kernels for both. Of a wrapper, install the optimizers
    that it holds.
    """

    code = "CFX002"


class UnsupportedTensorError(CollageError):
    """A tensor has a layout, dtype, device or class that compensated arithmetic is not defined for.

    Error terms exist for dense bfloat16 and float16 tensors on a CPU or a CUDA device; float32 and float64
    tensors are not changed. Refused are complex and integer parameters, sparse gradients, parameters that are
    tensor subclasses with inner tensors (quantized ones; DTensors are allowed), DTensors in a recorded step,
    and values that a packed format (``state=``) or a file cannot hold. The step has not been executed. With
    ``strict=False`` most of these are warnings, and such a parameter is updated without an error term.

    What to do: make gradients dense, with ``nn.Embedding(sparse=False)`` or ``grad.to_dense()``. Update such
    parameters with another optimizer that is not compiled with this backend. Replace a complex parameter by
    ``torch.view_as_real`` of it. ``docs/limits.md`` lists what is refused, with a remedy for each.
    """

    code = "CFX003"


class AliasedStateError(CollageError):
    """Two tensors of a step share memory, so an error term cannot belong to either of them alone.

    Examples: parameters that overlap, a parameter that is given twice, an expanded parameter, and state that
    is a view of its parameter. Two error terms would correct the shared elements. This is checked when a step
    is compiled, and nothing has changed; memory that is shared later, by ``p.data = q.data``, is not
    detected. With ``strict=False`` it is a warning, and the step is compiled without error terms.

    What to do: give each parameter and each state its own memory with ``tensor.clone()``, or give the
    optimizer the tensor that contains both, once. Give tied weights once: ``model.parameters()`` lists each
    of them only once.
    """

    code = "CFX004"


class ConflictingErrorFormatError(CollageError):
    """A tensor has error terms in another format than the step uses, or the step uses none.

    Error terms stay with their tensor from one compilation to the next. A step in another format cannot read
    them, and a step with ``strategy="none"`` would change the tensor but not its error terms, which would
    then be wrong. This is checked when the step is compiled, or before weights are loaded, and nothing has
    changed. ``strict=False`` does not turn this error into a warning.

    What to do: use the same ``error_format``, and no strategy "none", for all compiled steps of an optimizer
    and for ``collage_fx.load_full_state_dict``. To change the format, first drop the error terms of its
    parameters and state with ``collage_fx.reset_error_terms(tensor)``: each value changes once, by at most
    half an ulp.
    """

    code = "CFX005"


class CheckpointMismatchError(CollageError):
    """A checkpoint, or an error term in it, does not fit the tensors that it is loaded into.

    An error term belongs to a single tensor, with its shape, dtype and format; added to another tensor it
    would be noise. Causes: a checkpoint of another model or optimizer, a checkpoint with deleted entries,
    names that the model does not have, or a truncated file. Everything is checked before loading: nothing has
    been loaded, and nothing has changed.

    What to do: load the checkpoint that was saved from this model and this optimizer
    (``docs/checkpoints.md``). To continue without its error terms, delete the entries that begin with
    ``collage_fx`` from it; error terms then start from zero, with a warning. Give ``load_full_state_dict``
    exactly the names of ``model.state_dict()``.
    """

    code = "CFX006"


class ChangedTensorError(CollageError):
    """A tensor of a compiled step no longer has the layout, dtype or device that the step was compiled for.

    Compiled code reads memory by address, and Dynamo does not notice that ``p.data = ...`` has changed a
    parameter's memory. The error is raised in the middle of a run, but before the step: no part of the step
    has been executed. ``strict=False`` does not turn this error into a warning. While a CUDA graph is
    captured, a tensor at another address than in the previous step is refused, too, because every replay
    would use that address.

    What to do: copy new values with ``p.data.copy_(...)``. If the tensor had to change, call
    ``collage_fx.install(optimizer)`` again, which compiles the step anew; if its dtype or shape has changed,
    its error terms start from zero, with a warning. Before the capture of a CUDA graph, run a step with the
    same tensors, and let each backward pass write gradients to the same memory.
    """

    code = "CFX007"


class LostErrorTermsError(CollageError):
    """The code of a compiled step was called after the tensor that it updates was deleted.

    With the tensor, its error terms were deleted. The function that ``torch.compile`` returns keeps its
    tensors alive, and so does an installed optimizer: a program that calls these does not meet this error. It
    concerns compiled code that was extracted from them and is called after the optimizer was deleted. It is
    raised before any kernel runs.

    What to do: call the function that ``torch.compile(optimizer.step, backend=...)`` returns for the
    optimizer in use. If that call raises this error, it is a bug in collage_fx; please report it.
    """

    code = "CFX008"


class RecompileLimitError(CollageError):
    """A function that updates tensors without an optimizer was compiled too many times.

    If each call needs a new compilation, so will the next, and compiling takes seconds. An optimizer's step
    is recorded instead of captured once it has been compiled ``torch._dynamo.config.recompile_limit`` times
    (8), and optimizer steps inside another function after four times as many compilations, so they never
    reach this error. A function that calls no optimizer's step cannot be recorded; it is refused at four
    times the limit, before the call has executed anything. With ``strict=False`` it is a warning, and the
    function is compiled once more. There is a warning, too, if each of 32 consecutive steps of a recorded
    optimizer needs a new compilation.

    What to do: find out what changes with ``TORCH_LOGS=recompiles``. Pass a changing number as a tensor,
    ``torch.tensor(...)``. If the compilations are worth their time, raise
    ``torch._dynamo.config.recompile_limit``.
    """

    code = "CFX009"


class GraphBreakError(CollageError):
    """Dynamo would run updates of weights eagerly, without error terms.

    At a line that it cannot capture, such as a branch on the value of a tensor, Dynamo breaks the graph and
    leaves the rest to Python. A step with such a line is recorded, without an error
    (``docs/limits.md#recorded-steps``), and so is a function that updates weights without gradients. Refused
    are functions that are called with gradients, and steps that ``torch.compile`` was given with a closure if
    their class does not call ``Optimizer.__init__``. The function that the message names has not been run; an
    earlier part of the step may have been.

    What to do: put ``@torch.no_grad()`` before a function that differentiates nothing, or move the lines that
    update weights to a function that it calls. Call ``collage_fx.install(optimizer)`` in place of
    ``torch.compile`` for a step. ``TORCH_LOGS=graph_breaks`` says more about the line.
    """

    code = "CFX010"


class EagerStepError(CollageError):
    """Parameters of a compensated step were updated eagerly, by their own or another optimizer.

    An eager step would neither read nor update the error terms of its parameters. It is refused before it
    begins, and nothing has changed; with ``strict=False`` it is a warning, once. If the compiled step has
    never been called, the second eager step is refused, as is a step set after ``install``,
    ``optimizer.step = ...``, that does not call the compiled step (if that is held elsewhere, after a step).
    There is a warning, too, if the model is compiled with this backend and the step is not.

    What to do: call ``collage_fx.install(optimizer)`` for each optimizer of the parameters, which makes
    ``optimizer.step`` the compiled step; or call the function that
    ``torch.compile(optimizer.step, backend=...)`` has returned. To continue without error terms, call
    ``collage_fx.uninstall(optimizer)`` for an installed optimizer, or
    ``collage_fx.reset_error_terms(tensor)`` for each parameter.
    """

    code = "CFX011"


class UncompensatedParameterError(CollageError):
    """A parameter's update ends in an operation that the error term cannot pass through.

    A matrix product, for example, reads tensors in the storage format and rounds its result to this format:
    the new value does not depend on the error term, and small updates would be lost again. The same happens
    if operations on bits round a new value. This is found when the step is compiled: nothing has changed,
    except by earlier parts of a recorded step. With ``strict=False``, and always for optimizer state, it is a
    warning, and the tensor is stored rounded.

    What to do: in the optimizer, pass float32 tensors to that operation, ``x.float()``. Round with
    ``x.to(p.dtype)``, not by operations on bits. With ``arithmetic="native"``, try "wide", the default. Or
    move the parameter to another optimizer that is not compiled with this backend.
    """

    code = "CFX012"


class FailedLoweringError(CollageError):
    """The rewritten step could not be compiled as usual; if Inductor failed, this is only a warning.

    If Inductor or its compiler fails, the step is compiled in simpler ways; if all of them fail, torch runs
    it operation by operation, 10 to 50 times slower. Parameters, state and error terms get the same bits in
    each way. The message begins with the first line of Inductor's message, and ``backend.report()`` says how
    each step was compiled. If code of collage_fx fails that Inductor calls, that is an error, and nothing has
    been executed.

    What to do: run ``collage-fx doctor``, which says whether a compiler works; if none does, install g++, or
    name a compiler in the environment variable ``CXX``. Make sure that the cache directory is writable
    (``TORCHINDUCTOR_CACHE_DIR``). Otherwise please report the message. Until an error of collage_fx itself is
    fixed, ``backend="inductor"`` runs the step without error terms.
    """

    code = "CFX013"


class GraphInvariantError(CollageError):
    """A pass left the graph in a state that breaks an invariant.

    The graph is checked after each pass: each node has ``meta["val"]``; each tensor is written once, at the
    end, with a value of its dtype and shape; and each error term is written. It is a bug in collage_fx,
    unless the pass is your own. Nothing has been compiled or executed.

    What to do: in a pass of your own, edit the graph with a ``GraphEditor``, which keeps the invariants
    (``docs/writing-a-pass.md``). Otherwise it is a bug; please report the message, and the graphs that
    ``COLLAGE_FX_DUMP=directory`` writes. Until it is fixed, ``backend="inductor"`` runs the step without
    error terms.
    """

    code = "CFX014"

    def __init__(self, met: str, *, where: str) -> None:
        remedy = "this is a bug in collage_fx; please report it with the graph"
        super().__init__(met, where=where, remedy=remedy)


class FailedPassError(CollageError):
    """A pass raised an exception, whose traceback this error has.

    It is a bug in collage_fx, unless the pass is your own. The message names the pass and the line; the
    traceback shows the frames of the pass. Nothing has been compiled or executed. If the pass only saves time
    or memory (its ``optional`` is True), this is only a warning: the step is compiled without the pass.

    What to do: fix a pass of your own at the line that the message names (``docs/writing-a-pass.md``).
    Otherwise it is a bug; please report the traceback, and the graphs up to that pass, which
    ``COLLAGE_FX_DUMP=directory`` writes. Until it is fixed, ``backend="inductor"`` runs the step without
    error terms.
    """

    code = "CFX015"

    def __init__(self, name: str, error: Exception, *, optional: bool = False) -> None:
        at = traceback.extract_tb(error.__traceback__)[-1]
        without = ". The step is compiled without it, and has the same results" if optional else ""
        super().__init__(
            f"the pass {name!r} has raised {type(error).__name__}: {error}{without}",
            where=f"{at.filename}:{at.lineno} in {at.name}",
            remedy="if the pass is your own, fix it there; otherwise this is a bug in collage_fx: please "
            "report it with the graph (COLLAGE_FX_DUMP=directory writes it)",
        )
        assert error.__traceback__ is not None
        # Without the frame of the function that has caught it. A warning keeps no frames, and so no tensors.
        self.frames = None if optional else error.__traceback__.tb_next


class UnsupportedTorchError(CollageError):
    """A function of torch that collage_fx needs is missing in this version, or has changed.

    collage_fx depends on internal functions of torch's compiler, which change from version to version. It
    checks the signatures of all that it needs; if one does not fit, no step is compiled. Nothing has changed.
    If a function is needed only for speed, there is no error, and ``collage-fx doctor`` says that it is off.

    What to do: install a version of torch that the message names, or a newer collage_fx. The table of
    ``collage-fx doctor`` shows which function does not fit.
    """

    code = "CFX016"


class GradientReleaseError(CollageError):
    """A parameter that is stepped in the backward pass would be stepped with a gradient that is not whole.

    ``step_in_backward`` uses a gradient as soon as it is complete. It is not complete if another backward
    pass adds to it before ``optimizer.step()``, or if other processes' gradients are added later, as
    FullyShardedDataParallel (FSDP1) and a DistributedDataParallel that is put around the model afterwards do.
    The parameter that the message names has not been stepped a second time. Other parameters may have been
    stepped in the same backward pass.

    What to do: call ``optimizer.step()`` after each backward pass, or say how many backward passes belong to
    a step: ``step_in_backward(..., accumulate=4)``. Wrap and shard the model before.
    """

    code = "CFX017"


def warn(text: object) -> None:
    """Warn at the line of the user's program: that of the innermost call from outside of us and torch.

    ``text`` is a sentence, or a refusal that a strict backend would raise.
    """
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        frame, level = frame.f_back, level + 1
    warnings.warn(f"collage_fx: {text}", stacklevel=level)


class _Warned(set[str]):
    """Texts of warnings already given about an optimizer or function: a part of its record."""
