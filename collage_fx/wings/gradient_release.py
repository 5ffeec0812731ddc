"""Stepping in the backward pass: each gradient is used and freed while the backward pass goes on.

``release = step_in_backward(model, optimizer)``. Others call this gradient release, or an optimizer in the
backward. The gradients of a whole model are never in memory at once: two bytes a parameter less.

Note [Some parameters at a time]
--------------------------------
A hook of torch tells when a parameter's gradient is complete. Complete gradients wait until they take
``bucket_bytes``. Then the optimizer takes a step in which no other parameter has a gradient, and these are
freed. ``optimizer.step()``, which the program calls as before, steps the parameters that are left.

* The compiled step is that of the whole optimizer, compiled once, for whatever parameters have a gradient:
  Note [Members that come and go] in ``capture/rows.py``. Steps that do not consist of rows are recorded.
* What a step changes for all parameters at once must change once: a counter in ``param_groups``, or an
  attribute of the optimizer. Each part of a step begins with the values that the first part began with
  (:class:`CommonValues`).
* An optimizer that computes something from all gradients cannot be stepped so. This is found out by
  experiment (:func:`refuse_joint`): small copies are stepped together and apart.
"""

from __future__ import annotations

import gc
import logging
import math
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack

from collage_fx.capture import expect_some_gradients, stand_in_for
from collage_fx.choices import takes_options
from collage_fx.errors import GradientReleaseError, InvalidOptionError, UnsupportedOptimizerError
from collage_fx.installation import CompiledStep, InstallOptions, inner_optimizers, join, remove_release
from collage_fx.options import refuse_unknown, refuse_unless
from collage_fx.runtime import STAND_INS
from collage_fx.state import clone_of
from collage_fx.torch_compat import local_tensor, own_step, sharding_of, whole_tensor, without_hooks

log = logging.getLogger("collage_fx")

Clip = Literal["last step", "each tensor"]


class ReleaseOptions(NamedTuple):
    """Options of :func:`step_in_backward`, whose documentation describes them, and of ``offload``."""

    accumulate: int | Callable[[], bool] = 1
    bucket_bytes: int | None = None
    max_norm: float | None = None
    clip: Clip = "last step"
    scaler: torch.amp.GradScaler | None = None


#: Parts of a step, if the program does not say how many bytes of gradients may wait: usually, and if each
#: part is compiled by itself.
PARTS, COMPILED_PARTS = 24, 6

#: Attribute that makes GradScaler leave it to an optimizer's step to look for overflows, and to divide by the
#: scale, and the attributes that tell the step about them.
SCALED, GIVEN = "_step_supports_amp_scaling", ("grad_scale", "found_inf")

#: Attributes of an optimizer that no step computes with, and an entry of its groups that Dynamo sets for good
#: when it traces the first step on a GPU.
OTHER = frozenset({"_opt_called", SCALED, *GIVEN, "capturable"})

#: Largest size of a dimension in the experiment, number of its steps, and smallest relative difference.
SMALL, STEPS, TOLERANCE = 8, 3, 1e-5


@takes_options
def step_in_backward(
    model: torch.nn.Module,
    optimizer: Any,
    *,
    accumulate: int | Callable[[], bool] = 1,
    bucket_bytes: int | None = None,
    max_norm: float | None = None,
    clip: Clip = "last step",
    scaler: torch.amp.GradScaler | None = None,
    **options: Unpack[InstallOptions],
) -> GradientRelease:
    """Step each parameter in the backward pass, as soon as its gradient is complete, and free the gradient.

    The program stays as it is: it calls ``optimizer.step()`` after each backward pass, or after several. The
    bits are those of stepping after the backward pass. State, schedulers and checkpoints know no difference.
    A parameter whose gradient does not come is left alone.

    Args:
        model: the model, after ``fully_shard`` or ``DistributedDataParallel``. In FSDP2 a gradient is
            complete when it has been reduced. DistributedDataParallel keeps all gradients in buffers of its
            own, so parameters are stepped in ``optimizer.step()``, and no memory is saved.
        optimizer: any optimizer that computes a parameter's update from that parameter's gradient and state.
            It is installed, if it was not.
        accumulate: number of backward passes before ``optimizer.step()``; gradients are kept until the last
            of them. Or a function that tells whether the current backward pass is the last, such as
            ``lambda: accelerator.sync_gradients``.
        bucket_bytes: bytes of complete gradients that may wait to be stepped together; by default a 24th of
            all. A step of few parameters takes the host about as long as one of many.
        max_norm: largest norm of the gradients, in place of ``clip_grad_norm_``, which comes too late.
        clip: ``"last step"``: gradients are multiplied by ``max_norm / norm``, if below 1, with the norm of
            all gradients of the step before, because the norm of this one is not known yet. In the first
            step each of n gradients is clipped to ``max_norm / sqrt(n)``, so that all have at most
            ``max_norm``. ``"each tensor"``: each gradient is clipped to ``max_norm`` by itself.
        scaler: the ``GradScaler`` that scales the loss; the program goes on to call ``scaler.step`` and
            ``scaler.update``, but not ``scaler.unscale_``. A part of a step whose gradients are not all
            finite is skipped; parts before it have been stepped, where ``scaler.step`` would skip all.
        options: options of :func:`collage_fx.install`; an optimizer that is installed keeps its own, and is
            not to be asked for others here.

    Returns:
        a handle: ``release.remove()`` lets the optimizer step after the backward pass again.

    Raises:
        CollageError: the optimizer needs all gradients at once, or a closure; or FSDP1 has flattened the
            parameters. Nothing has changed.
    """
    refuse_unknown(options.keys() - {"backend"}, step_in_backward)
    given = ReleaseOptions(accumulate, bucket_bytes, max_norm, clip, scaler)
    chosen = sole_optimizer(optimizer, given, where="step_in_backward")
    is_reduced_late = reduced_late(model.parameters())
    refuse_joint(chosen, where="step_in_backward")
    join(chosen, options)
    names = {id(p): name for name, p in model.named_parameters()}
    release = GradientRelease(chosen, names, given)
    if not is_reduced_late:
        release.watch()
    return release


def reduced_late(parameters: Iterable[Tensor]) -> bool:
    """Return whether DistributedDataParallel reduces the gradients of some parameters.

    It does so when the backward pass has ended: until then a gradient is that of one process. Nothing leads
    from a parameter to it, and the program may have made it at any time. FSDP1, which does so too, is
    refused.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    mine = {id(p) for p in parameters}
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = (DistributedDataParallel, *([] if fsdp is None else [fsdp.FullyShardedDataParallel]))
    # By type: isinstance() asks a proxy, whose object may be gone.
    wrappers: Iterable[Any] = (each for each in gc.get_objects() if issubclass(type(each), kinds))
    wrapper = next((each for each in wrappers if any(id(p) in mine for p in each.parameters())), None)
    if wrapper is None:
        return False
    if not isinstance(wrapper, DistributedDataParallel):
        met = "FullyShardedDataParallel (FSDP1) calls hooks before it has reduced a gradient"
        remedy = "shard the model with fully_shard (FSDP2)"
        raise GradientReleaseError(met, where=type(wrapper.module).__name__, remedy=remedy)
    log.info("DistributedDataParallel keeps all gradients to the end of the backward pass: steps come then")
    return True


def sole_optimizer(optimizer: Any, options: ReleaseOptions, *, where: str) -> Optimizer:
    """Return the optimizer that steps are passed on to; raise for several, or values that are not allowed."""
    inner = list(inner_optimizers(optimizer))
    if len(inner) != 1:
        met = f"this {type(optimizer).__name__} holds {len(inner)} optimizers"
        raise InvalidOptionError(met, where=where, remedy="call it for each of them")
    accumulate = options.accumulate
    if not (callable(accumulate) or (type(accumulate) is int and accumulate > 0)):
        raise InvalidOptionError(
            f"accumulate={accumulate!r} is not allowed",
            where="accumulate",
            remedy="give the number of backward passes before optimizer.step(), or a function that tells "
            "whether the current one is the last",
        )
    refuse_unless("clip", options.clip, get_args(Clip))
    return inner[0]


class GradientRelease:
    """Optimizer that is stepped in the backward pass: the result of :func:`step_in_backward`.

    Attributes:
        norm: norm of all gradients of the last step, before they were clipped; None without ``max_norm``.
        largest: most bytes of complete gradients that have waited at once.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], options: ReleaseOptions) -> None:
        self.norm: Tensor | None = None
        self.largest = 0
        self._optimizer, self._names, self._options = optimizer, names, options
        self._parameters: list[Tensor] = []
        self._waiting: list[Tensor] = []
        self._bytes_waiting = 0
        #: Number of parameters of the last step; None in the first.
        self._expected: int | None = None
        self._stepped: set[int] = set()
        self._passes: defaultdict[int, int] = defaultdict(int)
        self._norms: list[Tensor] = []
        self._common: CommonValues | None = None
        self._parts: list[SimpleNamespace] = []
        self._lock = threading.RLock()
        self._is_first = True
        remove_release(optimizer)
        step = own_step(optimizer)
        assert isinstance(step, CompiledStep)
        step.release, self._compiled = self, step
        self._stand_ins: dict[int, Tensor] = {}
        self._scaled_before = vars(optimizer).get(SCALED)
        if options.scaler is not None:
            vars(optimizer)[SCALED] = True
        self._hooks: dict[int, Any] = {}
        self._is_watching = False
        self._ask()

    def __repr__(self) -> str:
        of = f"{type(self._optimizer).__name__}: {len(self._parameters)} parameters"
        return f"<{type(self).__name__} of {of}, at most {self.largest:,} bytes of gradients have waited>"

    def watch(self, *, is_watching: bool = True) -> None:
        """Note each gradient when it is complete, by hooks, or leave all to the program's ``step()``."""
        self._is_watching = is_watching
        self._follow_hooks()

    def _ask(self) -> None:
        """Ask the optimizer for its parameters: the program may have thawed, added or replaced some."""
        groups = self._optimizer.param_groups
        now = [p for group in groups for p in group["params"] if p.requires_grad or p.grad is not None]
        if len(now) == len(self._parameters) and all(map(is_, now, self._parameters)):
            return
        self._parameters = now
        self._takes_stand_ins = expect_some_gradients(self._optimizer, self._compiled.backend)
        is_cut = any(sharding_of(p) is not None for p in now)
        parts = COMPILED_PARTS if is_cut and not self._takes_stand_ins else PARTS
        asked = self._options.bucket_bytes
        self._bucket_bytes = sum(map(_bytes, now)) // parts if asked is None else asked
        self._follow_hooks()

    def _begin(self) -> None:
        """Prepare for a step at its first gradient, in the program's backward pass."""
        self._ask()
        if self._is_first and reduced_late(self._given()):  # the model has been wrapped since
            self.watch(is_watching=False)
        self._is_first = False

    def _follow_hooks(self) -> None:
        """Put hooks on all parameters that the optimizer has now, if it watches; remove other hooks."""
        now = {id(p): p for p in self._parameters if p.requires_grad and self._is_watching}
        for gone in self._hooks.keys() - now.keys():
            self._hooks.pop(gone).remove()
        for new in now.keys() - self._hooks.keys():
            hooked, hook = self._hook_of(now[new])  # compiled autograd would trace it
            self._hooks[new] = hooked.register_post_accumulate_grad_hook(torch.compiler.disable(hook))

    def _hook_of(self, parameter: Tensor) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Return the tensor on which the hook of a parameter of the optimizer is put, and the hook."""
        return parameter, self.take

    def remove(self) -> None:
        """Make the optimizer step after the backward pass again; gradients that wait are kept."""
        self.watch(is_watching=False)
        if self._options.scaler is not None:
            vars(self._optimizer)[SCALED] = self._scaled_before
        self._compiled.release = None

    def refuse_arguments(self, names: Iterable[str]) -> None:
        """Raise if a step after the backward pass has arguments: parameters are stepped without them."""
        for name in names:
            raise GradientReleaseError(
                f"step() was given {name!r}, after the backward pass, in which parameters are stepped "
                "without it",
                where=f"{type(self._optimizer).__name__}.step",
                remedy="call remove() of the handle that step_in_backward or offload returned, before the "
                "backward pass: then all parameters are stepped here",
            )

    def refuse_copy(self) -> None:
        """Accept copies of the optimizer, which step after the backward pass."""

    def finish(self, step: Callable[[], Any]) -> Any:
        """Step the parameters that are left, at the program's ``optimizer.step()``; return its result."""
        with self._lock:
            self._ask()
            if self._common is not None:
                self._common.refuse_edits()
            left = [p for p in self._parameters if p.grad is not None and id(p) not in self._stepped]
            # Set by GradScaler.step, for a step that divides gradients by the scale itself.
            given = {name: vars(self._optimizer).pop(name) for name in GIVEN if name in vars(self._optimizer)}
            try:
                returned = self._step(left, step) if left or not self._stepped else None
            finally:
                vars(self._optimizer).update(given)
            if self._norms:
                self.norm = torch.stack([whole_tensor(norm) for norm in self._norms]).norm()
            self._waiting, self._bytes_waiting = [], 0
            self._norms, self._parts, self._common = [], [], None
            self._expected = len(self._stepped) or self._expected
            self._stepped.clear()
            self._passes.clear()
            return returned

    def take(self, parameter: Tensor) -> None:
        """Take note of a gradient, which may be complete; step when enough of them are."""
        is_complete = self.is_last_pass(parameter)
        with self._lock:
            if is_complete and not self._stepped and not self._waiting:
                self._begin()
        if id(parameter) in self._hooks:  # the optimizer still has it
            self.take_complete(parameter, is_complete)

    def is_last_pass(self, parameter: Tensor) -> bool:
        """Return whether a gradient that has come is complete. It is asked in the program's backward pass."""
        if callable(accumulate := self._options.accumulate):
            return accumulate()
        with self._lock:
            self._passes[id(parameter)] += 1
            return self._passes[id(parameter)] >= accumulate

    def take_complete(self, parameter: Tensor, is_complete: bool) -> None:
        """Take note of a gradient; step when enough of them are complete."""
        with self._lock:
            if id(parameter) in self._stepped:
                raise GradientReleaseError(
                    "the gradient of this parameter came a second time, after it was stepped in the backward "
                    "pass",
                    where=self._names.get(id(parameter), "a parameter that is not the model's"),
                    remedy="call optimizer.step() after each backward pass, or give the number of backward "
                    "passes before it: step_in_backward(..., accumulate=4). If one backward pass brings "
                    "several gradients, as reentrant checkpoints of tied weights do, use "
                    "checkpoint(..., use_reentrant=False)",
                )
            if not is_complete:
                return
            self._waiting.append(parameter)
            self._bytes_waiting += 0 if parameter.grad is None else _bytes(parameter.grad)
            self.largest = max(self.largest, self._bytes_waiting)
            is_last = len(self._stepped) + len(self._waiting) == (self._expected or len(self._parameters))
            if is_last or self._bytes_waiting >= self._bucket_bytes:
                with without_hooks(self._optimizer):
                    self._step(self._waiting, self._compiled.run)

    def _step(self, parameters: Sequence[Tensor], step: Callable[[], Any]) -> Any:
        """Step some parameters alone, and free their gradients."""
        some = {id(p): p for p in parameters if p.grad is not None}
        others = [(p, p.grad) for p in self._parameters if id(p) not in some]
        if self._common is None:
            self._common = CommonValues(self._optimizer)
        else:
            self._common.refuse_edits()
            self._common.restore()
        for parameter, gradient in others:
            parameter.grad = self._stand_in(parameter, gradient) if self._takes_stand_ins else None
        token = STAND_INS.set(frozenset(map(id, self._stand_ins.values())))
        try:
            with torch.no_grad():  # in the backward pass and after it, or Dynamo would compile for both
                returned = self._step_of_present(list(some.values()), step)
        finally:
            STAND_INS.reset(token)
            for parameter, gradient in others:
                parameter.grad = gradient
        self._common.note_after()
        for parameter in some.values():
            parameter.grad = None
        self.hand_on(list(some.values()))
        self._waiting, self._bytes_waiting = [], 0
        self._stepped |= some.keys()
        return returned

    def hand_on(self, parameters: Sequence[Tensor]) -> None:
        """Pass on parameters that have been stepped, for subclasses."""

    def _stand_in(self, parameter: Tensor, gradient: Tensor | None) -> Tensor:
        """Return the tensor that stands for a gradient that is absent from a part of a step."""
        dtype = None if gradient is None else gradient.dtype
        known = self._stand_ins.get(id(parameter))
        if known is None or (dtype is not None and known.dtype is not dtype):
            known = self._stand_ins[id(parameter)] = stand_in_for(parameter, dtype)
        return known

    def _step_of_present(self, parameters: Sequence[Tensor], step: Callable[[], Any]) -> Any:
        """Step after the gradients have been divided by the scale, and clipped."""

        def clip_and_step() -> Any:
            if self._options.max_norm is not None and parameters:
                self._clip_gradients(parameters, self._options.max_norm)
            return step()

        if self._options.scaler is None or not parameters:
            return clip_and_step()
        # The part is an optimizer to GradScaler, which knows it by its id until its update().
        part = SimpleNamespace(param_groups=[{"params": list(parameters)}], step=clip_and_step)
        self._parts.append(part)
        return self._options.scaler.step(part)  # type: ignore[arg-type]

    def _clip_gradients(self, parameters: Sequence[Tensor], max_norm: float) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self._norms.append(norm)
        if self._options.clip == "last step":
            if self.norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, self.norm)
                return
            max_norm /= math.sqrt(len(self._parameters))
        for parameter in parameters:
            torch.nn.utils.clip_grad_norm_([parameter], max_norm)

    def _given(self) -> list[Tensor]:
        """Return the parameters that backward passes give gradients."""
        return self._parameters


class CommonValues:
    """Values that a step changes once, for all parameters: numbers in groups, and attributes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._holders: list[dict[str, Any]] = [*optimizer.param_groups, vars(optimizer)]
        self._after = [*map(_comparable, optimizer.param_groups)]
        self._is_begun = False
        self._before = [
            {key: (each, each.detach().clone() if isinstance(each, Tensor) else each) for key, each in found}
            for found in map(_numbers_in, self._holders)
        ]

    def note_after(self) -> None:
        """Note the values that the first part of the step has left; the other parts leave the same."""
        if self._is_begun:
            self.refuse_edits()
        self._is_begun, self._after = True, [_comparable(group) for group in self._holders[:-1]]

    def refuse_edits(self) -> None:
        """Raise if the program has changed a number of a group since the step, or a part of it, was begun."""
        for i, (group, after) in enumerate(zip(self._holders[:-1], self._after, strict=False)):
            for name, value in _comparable(group).items():
                if value != after.get(name, value):
                    raise GradientReleaseError(
                        f"the program has changed {name!r} from {after[name]} to {value} while parameters "
                        "are stepped, which begins in the backward pass",
                        where=f"param_groups[{i}][{name!r}]",
                        remedy="change it before backward()",
                    )

    def restore(self) -> None:
        """Set the values from before the step, and remove values that the step has added."""
        for holder, before in zip(self._holders, self._before, strict=True):
            for key, value in _numbers_in(holder):
                if key not in before:
                    del holder[key]
                elif value is not before[key][0]:
                    holder[key] = before[key][0]
            for value, copy in before.values():
                if isinstance(value, Tensor):
                    with torch.no_grad():
                        value.copy_(copy)


def _comparable(group: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a group, and of its tensors on the CPU."""
    return {
        name: value.item() if isinstance(value, Tensor) else value
        for name, value in _numbers_in(group)
        if not isinstance(value, Tensor) or (value.device.type == "cpu" and value.numel() == 1)
    }


def _numbers_in(holder: dict[str, Any]) -> list[tuple[str, Any]]:
    kinds = bool, int, float, complex, Tensor
    return [(key, each) for key, each in holder.items() if isinstance(each, kinds) and key not in OTHER]


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, or of this process's shard."""
    return local_tensor(tensor.detach()).nbytes


def refuse_joint(optimizer: Optimizer, *, where: str) -> None:
    """Raise if an optimizer computes an update from the gradients of several parameters.

    Small parameters, two for each group, with gradients at random, are stepped together and apart, by copies.
    """
    kind, remedy = type(optimizer).__name__, "step it after the backward pass: collage_fx.install(optimizer)"
    try:
        together, apart = (_moved(optimizer, apart=is_apart) for is_apart in (False, True))
    except Exception as error:
        raise UnsupportedOptimizerError(
            f"a small copy of this {kind} cannot take a step without a closure, for some parameters at a "
            f"time: {type(error).__name__}: {error}",
            where=where,
            remedy=remedy,
        ) from error
    for one, other in zip(together, apart, strict=True):
        if not float((one - other).norm()) <= TOLERANCE * float(one.norm()):
            raise UnsupportedOptimizerError(
                f"{kind} computes an update from the gradients of all parameters, which are never there at "
                "once in the backward pass",
                where=where,
                remedy=remedy,
            )


@torch.random.fork_rng(devices=())  # an optimizer that adds noise draws the same in each call
def _moved(optimizer: Optimizer, *, apart: bool) -> list[Tensor]:
    """Return how small parameters move in some steps of a copy of an optimizer."""
    generator = torch.Generator().manual_seed(0)  # of its own: other threads may draw numbers, too

    def drawn(like: Tensor) -> Tensor:
        shape = [min(size, SMALL) for size in like.shape]
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(like.device)

    held = (p for group in optimizer.param_groups for p in group["params"])
    small = {id(p): torch.nn.Parameter(drawn(p)) for p in held}
    clone = clone_of(optimizer, {**small, id(optimizer.state): defaultdict(dict)})
    chosen = [p for group in clone.param_groups for p in group["params"][:2]]
    for group in clone.param_groups:
        group["params"] = group["params"][:2]
        if "lr" in group and not float(group["lr"]):
            group["lr"] = 1e-3  # as at the start of a warm-up, where nothing would move
    start = [p.detach().clone() for p in chosen]
    step = type(clone).step
    for _ in range(STEPS):
        # Gradients differ in size: else a mean over all of them would be that of each.
        gradients = [drawn(p) * 10.0 ** (i % 3 - 1) for i, p in enumerate(chosen)]
        common = CommonValues(clone)
        for i, part in enumerate([[p] for p in chosen] if apart else [chosen]):
            if i:
                common.restore()
            for p, gradient in zip(chosen, gradients, strict=True):
                p.grad = gradient.clone() if any(p is each for each in part) else None
            step(clone)
    return [p.detach() - before for p, before in zip(chosen, start, strict=True)]
