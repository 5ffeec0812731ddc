"""Patches of Dynamo's trace of an optimizer: rests on its ``OptimizerVariable`` and ``OutputGraph``."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._dynamo import source as sources
from torch._dynamo import utils
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.pgo import auto_dynamic
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.utils.weak import TensorWeakRef

from collage_fx.torch_compat import records
from collage_fx.torch_compat.dynamo_trace import output_being_traced
from collage_fx.torch_compat.optim_frames import is_of_torch_optim, is_torchs_step, key_of_code
from collage_fx.torch_compat.patching import Patch, Replacement
from collage_fx.torch_compat.tensors import GuardedByIdentity

OPTIMIZERS = Patch(
    name="optimizers",
    target="torch._dynamo.variables.optimizer:OptimizerVariable.__init__(self, value)",
    why="an optimizer that cannot be compensated is refused before anything runs; step counters are kept",
    waits_for="a hook of a backend when Dynamo begins to trace an optimizer",
    relies_on=(
        "torch._dynamo.side_effects:SideEffects has __contains__, track_object_existing",
        "torch._dynamo.variables.base:VariableTracker has source",
        "torch._guards:Source has name",
    ),
)

NUMBERS = Patch(
    name="numbers",
    target="torch._dynamo.variables.builder:process_automatic_dynamic(tx, name, entry)",
    why="numbers are inputs of a graph if they change in its own optimizer, not if they differ in another",
    waits_for="a mark for numbers that are inputs of a graph, as mark_dynamic is for sizes",
    relies_on=(
        "torch._dynamo.variables.builder:VariableBuilder.wrap_symfloat has process_automatic_dynamic",
        "torch._dynamo.pgo:FrameStateSizeEntry has scalar, __ior__",
        "torch._dynamo.pgo:auto_dynamic",
    ),
)

STATE_LISTS = Patch(
    name="state-lists",
    target="torch._dynamo.variables.optimizer:OptimizerVariable.call_method(self, tx, name, args, kwargs)",
    why="lists that an optimizer fills as keyword arguments do not count as empty; counters stay on the host",
    waits_for="a fix in Dynamo: fill lists that are passed to _init_group by keyword",
    relies_on=("torch._dynamo.variables.optimizer:OptimizerVariable.move_step_if_cpu(self)",),
)

TYPES = Patch(
    name="types",
    target="torch._dynamo.guards:GuardBuilder.TYPE_MATCH(self, guard)",
    why="guards identify state by identity alone, because a step may give it another class",
    waits_for="an option of a backend to omit guards by tensor, not only by name",
    relies_on=("torch._dynamo.guards:GuardBuilder.get(self, guard_or_source)",),
)

GRADIENTS = Patch(
    name="gradients",
    target="torch._dynamo.guards:GuardBuilder.NOT_NONE_MATCH(self, guard)",
    why="a step that looks for gradients itself is not compiled again if a gradient is None",
    waits_for="an option of a backend to omit guards that a gradient is not None",
    needed_for="speed",
    relies_on=("torch._dynamo.variables.builder:VariableBuilder.wrap_tensor has NOT_NONE_MATCH",),
)

LISTS = Patch(
    name="lists",
    target=(
        "torch._dynamo.variables.optimizer:"
        "OptimizerVariable.update_list_args(self, tx, args, kwargs, py_args, py_kwargs)"
    ),
    why="the steps of torch.optim are traced for two parameters of each layout",
    waits_for="regional compilation in Dynamo: one trace for all parameters of a layout",
    needed_for="speed",
    relies_on=(
        "torch._dynamo.guards:GuardBuilder.ID_MATCH(self, guard)",
        "torch._dynamo.output_graph:OutputGraph.guards",
        "torch._dynamo.source:GradSource",
        "torch._dynamo.utils:get_static_address_type(t)",
        "torch._dynamo.variables.lists:ListVariable has items",
        "torch.optim:AdamW._init_group",
    ),
)

#: End of Dynamo's name of a learning rate.
LEARNING_RATE = "['lr']"

#: Location of a number of an optimizer: ``"param_groups"``, and the keys that lead to the number from there;
#: or ``"state"``, the position of a parameter in it, and keys.
Place = tuple[int | str, ...]


@contextlib.contextmanager
def watching_optimizers(watch: Callable[[torch.optim.Optimizer], Iterable[Place] | None]) -> Iterator[None]:
    """Context manager: call ``watch(optimizer)`` when Dynamo starts to trace an optimizer.

    A :class:`ShortenTraceback` exception ends the trace and reaches the user unchanged, before anything runs.
    So an input can be refused for which Dynamo would fall back to eager execution without calling a backend.

    If ``watch`` returns places of numbers, these are inputs of the graph from the start; Dynamo would make
    them constants until it sees them change. And two silent faults of Dynamo are corrected: it forgets values
    that a step assigns to attributes of the optimizer (``self.steps += 1``), which it does not register for
    side effects; and it takes lists that ``_init_group`` fills for empty if they are keyword arguments.

    Dynamo remembers numbers and sizes by code object, for all optimizers of a class together. Here each
    optimizer has its own record, as a number that differs between two optimizers is constant in each; but for
    learning rates, which decide nothing: the optimizers of a sweep share their code.
    """

    def watched(
        original: Callable[..., None], self: Any, value: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        places = watch(value)
        traced = records.of(value, _Traced)
        if traced.capturable is None:
            traced.capturable = [group.get("capturable") for group in value.param_groups]
        original(self, value, *args, **kwargs)
        if places is not None:
            output = InstructionTranslator.current_tx().output
            if value not in output.side_effects:
                output.side_effects.track_object_existing(value, self)
            traced.is_for_us = True
            trace = records.of(output, _Trace)
            trace.first = trace.first or value
            if self.source is not None:
                trace.changing.update(_name(self.source, place) for place in places)

    with (
        OPTIMIZERS.entered(watched),
        NUMBERS.entered(_by_optimizer),
        STATE_LISTS.entered(_with_positional_lists),
        TYPES.entered(_omitting_guards_of(GuardedByIdentity)),
    ):
        yield


def _omitting_guards_of(kind: type) -> Replacement:
    """Return a method that makes guards, but none of values whose records have a part."""

    def matched(match: Callable[..., None], self: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        if not records.has(self.get(guard), kind):
            match(self, guard, *args, **kwargs)

    return matched


def _with_positional_lists(
    call_method: Callable[..., Any], self: Any, tx: Any, name: str, args: Any, kwargs: Any
) -> Any:
    if name != "_init_group" or not records.of(self.value, _Traced).is_for_us:
        return call_method(self, tx, name, args, kwargs)
    if kwargs:
        bound = inspect.signature(self.value._init_group).bind(*args, **kwargs)
        args, kwargs = list(bound.args), bound.kwargs
    _make_entries(self.value)
    if any("capturable" in group for group in self.value.param_groups):
        return call_method(self, tx, name, args, kwargs)
    _return_counters(self.value)
    self.move_step_if_cpu = lambda: None
    try:
        return call_method(self, tx, name, args, kwargs)
    finally:
        del self.move_step_if_cpu


def _make_entries(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter with a gradient its entry in the state, as ``_init_group`` of torch.optim does.

    Dynamo makes guards of the state as it is behind the last group. Without the entry of a later group the
    code of the first step, in which SGD makes its momentum, would fit the next steps, too.
    """
    if is_of_torch_optim(type(optimizer)._init_group):  # type: ignore[attr-defined]
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    optimizer.state[p]


def _return_counters(optimizer: torch.optim.Optimizer) -> None:
    """Move step counters to the host if the optimizer of torch.optim would create them there.

    An optimizer without ``capturable`` reads its counters by ``.item()``. Dynamo would move existing counters
    (of a loaded optimizer, or after an eager step) to the device, and the step would differ from a first run.
    """
    for state in optimizer.state.values() if is_of_torch_optim(type(optimizer)) else ():
        counter = state.get("step") if isinstance(state, dict) else None
        if isinstance(counter, torch.Tensor) and not any(g.get("fused") for g in optimizer.param_groups):
            state["step"] = counter.cpu()


@dataclass(eq=False)
class _Traced:
    """Facts about Dynamo's traces of an optimizer: a part of its record.

    Attributes:
        is_for_us: whether it has been traced for a backend of ours.
        seen: numbers and sizes, by reading code and Dynamo's name.
        capturable: this option of its groups before the first trace.
    """

    is_for_us: bool = False
    seen: dict[tuple[Hashable, str], Any] = field(default_factory=dict)
    capturable: list[Any] | None = None


def restore_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Give the groups their option ``capturable`` back, before Python runs a step.

    Dynamo traces with ``capturable=True``, and writes it into each group that the step changes.
    """
    before = records.of(optimizer, _Traced).capturable or ()
    for group, was in zip(optimizer.param_groups, before, strict=False):
        if was is not None:
            group["capturable"] = was


@dataclass(eq=False)
class _Trace:
    """Part of the record of a trace, which is Dynamo's output graph.

    Attributes:
        first: the first optimizer of the trace: its record of numbers and sizes is used.
        changing: Dynamo's names of the numbers that will change.
    """

    first: torch.optim.Optimizer | None = None
    changing: set[str] = field(default_factory=set)
    thinned: list[ThinnedLists] = field(default_factory=list)


class _LookedFor:
    """Part of a gradient that the step being compiled looks for itself."""


def _name(source: Any, place: Place) -> str:
    """Return Dynamo's name of the value reached from ``source`` by an attribute and then by keys."""
    attribute, first, *keys = place
    container = f"{source.name}.{attribute}"
    of_parameter = f"list(dict.keys({container}))[{first}]" if attribute == "state" else first
    return f"{container}[{of_parameter}]" + "".join(f"[{key!r}]" for key in keys)


def _by_optimizer(process: Callable[..., Any], tx: Any, name: str, entry: Any, **keywords: Any) -> Any:
    trace = records.find(tx.output, _Trace)
    if trace is None or trace.first is None:
        return process(tx, name, entry, **keywords)
    read = key_of_code(tx.f_code), name
    seen = records.of(trace.first, _Traced).seen.setdefault(read, replace(entry))
    seen |= entry
    place = name.removesuffix(".item()")  # of a number of NumPy's
    if isinstance(entry.scalar, (int, float)) and place in trace.changing:
        return replace(seen, scalar=auto_dynamic)
    if place.endswith(LEARNING_RATE):
        return process(tx, name, entry, **keywords)
    return replace(seen)


@dataclass(frozen=True)
class ThinnedLists:
    """Lists filled by ``_init_group`` of which only some rows are traced.

    Attributes:
        optimizer: the optimizer whose step loops over the lists.
        rows: for each parameter its entries in the nonempty lists: the parameter, its gradient, its state.
        kept: indices of the rows that are traced.
        like: for each row the first row, traced, that is updated alike.
        come_and_go: whether the step looks for gradients itself: some may be None in the same code.
    """

    optimizer: torch.optim.Optimizer
    rows: tuple[tuple[Any, ...], ...]
    kept: Sequence[int]
    like: Sequence[int]
    come_and_go: bool


#: Function ``(optimizer, rows) -> lists with the rows to trace``, or None to trace all rows.
Thin = Callable[[torch.optim.Optimizer, tuple[tuple[Any, ...], ...]], ThinnedLists | None]


@contextlib.contextmanager
def thinning_lists(choose: Thin) -> Iterator[None]:
    """Context manager: Dynamo traces steps of torch.optim's classes for only some of their parameters.

    ``choose(optimizer, rows)`` is called each time that ``_init_group`` has filled the lists of a step.
    Guards are created for all rows. The backend must add the updates of the rows that are left out
    (:func:`thinned_lists`), or raise ``ConvertAgain(whole=True)``, also at a graph break, because after the
    break Python would continue with the shortened lists. Lists are thinned only if the step is the compiled
    function, so that no other code in the graph reads the updated tensors.
    """

    def update_list_args(
        original: Callable[..., None], self: Any, tx: Any, args: Any, kwargs: Any, py_args: Any, *others: Any
    ) -> None:
        original(self, tx, args, kwargs, py_args, *others)
        root = tx.output.root_tx
        is_for_us = records.of(self.value, _Traced).is_for_us
        is_ours = is_for_us and is_torchs_step(self.value, root.f_code, root.f_locals)
        filled = [(arg, py) for arg, py in zip(args, py_args, strict=True) if isinstance(py, list) and py]
        if tracing_whole.get() or not is_ours or not filled:
            return
        lists, columns = zip(*filled, strict=True)
        are_rows = all(len(column) == len(columns[0]) for column in columns)
        rows = tuple(zip(*columns, strict=True)) if are_rows else ()
        if (traced := choose(self.value, rows)) is None:
            return
        for row in rows if traced.come_and_go else ():
            for value in (each for each in row if each is row[0].grad):
                records.put(value, _LookedFor())
        left_out = set(range(len(rows))).difference(traced.kept)
        for column, each in enumerate(lists):
            for i in left_out:
                _guard(tx.output, each.items[i], rows[i][column])
            each.items[:] = [each.items[i] for i in traced.kept]
        records.of(tx.output, _Trace).thinned.append(traced)

    with LISTS.entered(update_list_args), GRADIENTS.entered(_omitting_guards_of(_LookedFor)):
        try:
            yield
        finally:
            records.clear(_LookedFor)


def _guard(output: Any, variable: Any, value: Any) -> None:
    """Add the guards that Dynamo would make of a value of a list, without tracing it.

    They are of the identity of parameters and state, and that there is a gradient.
    """
    is_gradient = isinstance(variable.source, sources.GradSource)
    is_static = utils.get_static_address_type(value) == "guarded"
    if is_static is is_gradient:
        variable.realize()
        return
    there = functools.partial(GuardBuilder.NOT_NONE_MATCH, value=TensorWeakRef(value))
    match = there if is_gradient else GuardBuilder.ID_MATCH
    output.guards.add(variable.source.make_guard(match), collect_debug_stack=False)


tracing_whole: ContextVar[bool] = ContextVar("tracing_whole", default=False)


def is_traced_whole() -> bool:
    """Return whether a step is traced for all rows: some are not understood, or a patch does not fit."""
    return tracing_whole.get() or not (LISTS.applies and GRADIENTS.applies)


def thinned_lists() -> list[ThinnedLists]:
    """Return the thinned lists of the step that is being compiled; empty if all rows are traced."""
    output = output_being_traced()
    return [] if output is None else list(records.of(output, _Trace).thinned)
