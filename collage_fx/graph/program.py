"""Data that passes work on: a captured step, its state tensors, and the decisions about them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from collage_fx.choices import Arithmetic, Changes, Rounding, Strategy
from collage_fx.errors import FailedPassError
from collage_fx.graph.families import Repetition
from collage_fx.graph.nodes import copies_to_inputs, copy_of, placeholders, stored
from collage_fx.numerics import ErrorFormat, FloatFormat, storage_format
from collage_fx.torch_compat import GATHERED_SHARDS

if TYPE_CHECKING:
    import sympy


class Role(enum.Enum):
    """Role of a step's input for the user."""

    PARAMETER = "parameter"
    STATE = "state"
    GRADIENT = "gradient"
    CARRIED = "carried"  # a tensor that a recorded step computes in one graph and uses in a later graph
    NEW = "new"  # a tensor that a captured step creates and returns
    OTHER = "other"


@dataclass(frozen=True)
class InputInfo:
    """Facts about a graph input that the graph does not hold.

    Attributes:
        name: the user's name of the input, such as ``param_groups[0].params[3].exp_avg``.
        symbol: short name for recurrences, such as ``exp_avg``; a parameter is ``p``, its gradient ``g``.
        tensor: the real tensor met while compiling, None for numbers and for inputs that AOTAutograd added.
        bound: whether it is an attribute of the captured module, so the same tensor in every call.
        cut_from: number of elements of the whole DTensor if the input is a shard of it; 0 if it is not cut.
        spans_closure: whether the step writes it before it calls its closure, and may read it after that.
        is_made: whether the recorded step has made it since it began, in the place of another tensor perhaps.
        is_born: whether it is state that its parameter gets in the recorded step that this is a part of.
    """

    name: str
    symbol: str
    role: Role
    tensor: torch.Tensor | None = None
    bound: bool = False
    cut_from: int = 0
    spans_closure: bool = False
    is_made: bool = False
    is_born: bool = False


class Kind(enum.Enum):
    """Ways in which a state tensor's new value may depend on its old value."""

    ACCUMULATION = "accumulation"
    MOVING_AVERAGE = "moving average"
    OVERWRITE = "overwrite"
    OTHER = "other"


@dataclass(frozen=True)
class Recurrence:
    """Recurrence of a state tensor, ``symbol' = f(symbol, ...)``, and its kind.

    Attributes:
        expression: the new value; other state tensors' new values appear as primed symbols.
        slopes: the coefficients of the old value, one per branch of a piecewise linear update (maximum,
            where), numbers if known at compile time. Empty if the dependence is not linear.
        path: the nodes between the load and the store of the tensor, in graph order.
    """

    expression: sympy.Expr
    kind: Kind
    slopes: tuple[sympy.Expr, ...]
    path: tuple[Node, ...]


@dataclass(frozen=True)
class Verdict:
    """Verdict on a recurrence: the effect of storing it in plain low precision.

    Attributes:
        lossy: whether storing it rounded to nearest loses the update.
        noise: relative rms error if it is stored rounded by dither, from ``rms_noise``; None if unknown.
    """

    lossy: bool
    reason: str
    noise: float | None = None


#: Fewest elements of a packed tensor: with fewer, packing costs more than it saves. The shards of a tensor
#: are counted together, so that the bits do not depend on the number of shards.
FEWEST = 4096


@dataclass
class Expansion:
    """Input that may be stored in an error format.

    Attributes:
        position: its index among the graph's inputs.
        chosen_format: the format in which it becomes an expansion, None if it does not.
        auxiliaries: set by ``allocate``: placeholders of its error format's auxiliary tensors.
        start: set by ``allocate`` for a dithered format: placeholder of the index of its first element.
    """

    placeholder: Node
    position: int
    info: InputInfo
    _: KW_ONLY
    chosen_format: ErrorFormat | None = None
    auxiliaries: tuple[Node, ...] = ()
    start: Node | None = None

    @property
    def packed(self) -> bool:
        """Whether auxiliaries alone hold the tensor, so that the step neither reads nor writes hi."""
        return self.chosen_format is not None and not self.chosen_format.keeps_hi

    @property
    def holds_more(self) -> bool:
        """Whether more of the value is kept than hi: error terms, or packed codes."""
        return self.chosen_format is not None and self.chosen_format.holds_more

    @property
    def hi(self) -> tuple[Node, ...]:
        """Placeholder of hi; none if the tensor is packed, as its memory is freed between steps."""
        return () if self.packed else (self.placeholder,)

    def nbytes(self, like: torch.Tensor) -> tuple[int, int]:
        """Return the bytes of hi, or of codes in its place, and of error terms, for a tensor like this."""
        beside = 0 if self.chosen_format is None else self.chosen_format.nbytes(like)
        return (beside, 0) if self.packed else (like.nbytes, beside)

    @property
    def error_format(self) -> ErrorFormat:
        """Error format of a tensor that becomes an expansion."""
        assert self.chosen_format is not None
        return self.chosen_format

    @property
    def added_inputs(self) -> tuple[Node, ...]:
        """Placeholders of an expansion other than hi, which the error format's ``store`` takes behind hi."""
        return self.auxiliaries if self.start is None else (*self.auxiliaries, self.start)


@dataclass
class StateTensor(Expansion):
    """Input that the step mutates: of low precision, or float32 if state is to be packed.

    Attributes:
        store: its ``copy_`` in the epilogue.
        recurrence, verdict: how its new value depends on its old one, and whether storing it loses bits.
        replaces_terms: set by ``analyze``: whether a recorded step makes it in the place of a tensor whose
            error terms a step has chosen, or a checkpoint held.
        is_weight_sized: set by ``analyze``: whether it is as large as weights, as an average of weights is.
        amplification: set by ``analyze``: factor from its noise relative to itself to its noise relative to
            a parameter's update: Note [State of the size of weights] in ``graph/cancellation.py``.
        is_unbounded: set by ``analyze``: whether its rounding has no bound: Note [State without a bound].
        selection: why it is, or is not, compensated under the chosen strategy.
        not_packed: why it stays unpacked although state is to be packed; empty if packed or not to be.
        refusal: set by the compensating pass: why it could not keep the error term; empty if it could.
        remedy: set by the compensating pass: what to do about the refusal; if empty, the arithmetic's advice.
        keeps_small_updates: set by ``sum-changes``: whether the sum that is stored is rounded by dither.
        rounded: set by ``repay``: hi and the auxiliaries that are stored, rounded to nearest.
        counts_steps: set by ``repay``: whether its steps are counted although they are rounded to nearest.
    """

    store: Node
    recurrence: Recurrence
    verdict: Verdict
    replaces_terms: bool = False
    is_weight_sized: bool = False
    amplification: float = 0.0
    is_unbounded: bool = False
    selection: str = ""
    not_packed: str = ""
    refusal: str = ""
    remedy: str = ""
    keeps_small_updates: bool = False
    rounded: tuple[Node, ...] = ()
    counts_steps: bool = False

    def why_not_stored(self, fmt: ErrorFormat) -> str:
        """Return why a packed format cannot store it, whatever the step computes; empty if it can."""
        if not all(isinstance(size, int) for size in self.value.shape):
            return "its sizes may change from step to step"
        if max(self.value.numel(), self.info.cut_from) < FEWEST:
            return f"it has fewer than {FEWEST} elements"
        if not self.value.numel():
            return "this process has none of its elements"
        if self.info.cut_from and not fmt.by_rows:
            return f"it is a shard, and {fmt.name} needs whole tensors"
        if self.info.cut_from and self.info.role is Role.PARAMETER and not GATHERED_SHARDS.applies:
            return "it is a shard, and this version of torch has another FSDP2"
        return fmt.why_not(self.value)

    def pack(self, fmt: ErrorFormat, why_not: str, why: str) -> bool:
        """Choose a packed format and say why, or say why not; return whether it is chosen."""
        self.not_packed = why_not
        if why_not:
            self.selection += f"; not packed: {why_not}"
        else:
            self.chosen_format, self.selection = fmt, why
        return not why_not

    @property
    def compensated(self) -> bool:
        """Whether the tensor gets error terms."""
        return self.chosen_format is not None and self.chosen_format.keeps_error

    @property
    def is_float32(self) -> bool:
        """Whether the tensor is float32, which gets no error terms, but may be packed."""
        return self.value.dtype is torch.float32

    @property
    def written(self) -> tuple[Node, ...]:
        """Auxiliaries that the step writes: without a count of steps that nobody needs."""
        fmt, in_sum = self.chosen_format, self.keeps_small_updates
        if self.counts_steps or fmt is None or fmt.writes_all(in_sum=in_sum, to_nearest=bool(self.rounded)):
            return self.auxiliaries
        return self.auxiliaries[:-1]

    @property
    def depends_on_old_value(self) -> bool:
        """Whether the new value is computed from the old value, which rounding may lose."""
        return bool(self.recurrence.path)

    @property
    def stored(self) -> Node:
        """Node that is stored into the input."""
        return stored(self.store)

    @property
    def value(self) -> torch.Tensor:
        """FakeTensor of the input: its shape, strides, dtype and device."""
        return self.placeholder.meta["val"]

    @property
    def format(self) -> FloatFormat:
        return storage_format(self.value.dtype)


@dataclass
class StepProgram:
    """Captured step on its way through the pipeline, as the graph of one member of each family.

    Attributes:
        gm: the graph, edited in place by the passes.
        infos: one :class:`InputInfo` per input of the whole graph.
        repetition: relation of the inputs of ``gm`` to those of the whole graph; by default both are one.
        already_compensated: positions of inputs that have error terms already (from another compiled
            callable, an earlier compilation or a checkpoint).
        has_lasting_terms: positions of inputs whose error terms are not from the step that made them.
        may_get_terms: positions of inputs that are read alone and belong to an optimizer whose step gives
            error terms: they are read whole from the first call that finds error terms.
        is_recorded: whether it is a part of a recorded step: another part may have computed, from the old
            value of an input, the new value that this part stores.
        is_compiled: whether it is compiled, rather than run operation by operation.
        rounded_at_random: set by ``undo-stochastic-rounding``: inputs that the optimizer rounded at random.
        rounding: rounding of state without error terms: see :class:`~collage_fx.CollageBackend`.
        changes: whether the changes of a state are summed before they are added to it, likewise.
        summed: set by ``sum-changes``: number of updates that it has rewritten.
        packed: ``(format of signed state, format of never negative state)`` if state is packed.
        weights: format of parameters if they are packed.
        known_formats: formats of inputs that are kept in another one than ``error_format``, by position.
        takes_float32: whether float32 parameters and their state are among ``states``, because state is to be
            packed, or its bytes are limited, or float32 parameters are rounded by dither.
        sums_float32: whether the last sum of float32 parameters, too, is rounded by dither.
        captured: a copy of the graph before any pass if the step is measured; else None.
        reads: set by ``allocate``: inputs with error terms that the step reads whole but does not mutate, as
            the update of an average reads a parameter.
        left_out: failures of optional passes and steps of the lowering, without which the step is compiled.
    """

    gm: GraphModule
    infos: Sequence[InputInfo]
    strategy: Strategy
    arithmetic: Arithmetic
    error_format: ErrorFormat
    repetition: Repetition = None  # type: ignore[assignment]  # made of the infos
    already_compensated: frozenset[int] = frozenset()
    has_lasting_terms: frozenset[int] = frozenset()
    may_get_terms: frozenset[int] = frozenset()
    is_recorded: bool = False
    is_compiled: bool = True
    rounded_at_random: set[Node] = field(default_factory=set)
    rounding: Rounding = "nearest"
    changes: Changes = "summed"
    summed: int = 0
    packed: tuple[ErrorFormat, ErrorFormat] | None = None
    weights: ErrorFormat | None = None
    known_formats: dict[int, ErrorFormat] = field(default_factory=dict)
    takes_float32: bool = False
    sums_float32: bool = False
    captured: GraphModule | None = None
    states: list[StateTensor] = field(default_factory=list)
    reads: list[Expansion] = field(default_factory=list)
    left_out: list[FailedPassError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.repetition = self.repetition or Repetition.whole(len(self.infos))

    @property
    def inputs(self) -> list[InputInfo]:
        """:class:`InputInfo` of each input of ``gm``, taken from the first member of its family."""
        return [self.infos[copies[0]] for copies in self.repetition.copies]

    @property
    def sums(self) -> bool:
        """Whether the changes of a state are summed before they are added to it."""
        return self.arithmetic == "wide" and self.changes == "summed"

    @property
    def keeps_new_tensors(self) -> bool:
        """Whether tensors that the step creates and returns may get error terms."""
        return self.strategy != "none" and not self.is_recorded

    @property
    def parameters(self) -> list[StateTensor]:
        """State tensors that are parameters."""
        return [state for state in self.states if state.info.role is Role.PARAMETER]

    @property
    def compensated(self) -> list[StateTensor]:
        return [state for state in self.states if state.compensated]

    @property
    def expanded(self) -> list[StateTensor]:
        """State tensors stored in an error format, with error terms or without."""
        return [state for state in self.states if state.chosen_format is not None]

    @property
    def measured(self) -> list[StateTensor]:
        """State tensors whose updates are measured: weights and tensors with error terms; all with "none"."""
        if self.captured is None:
            return []
        weights = [each for each in self.parameters if each.packed]
        states = self.states if self.strategy == "none" else [*self.compensated, *weights]
        return [state for state in states if state.info.role is not Role.NEW]

    @property
    def extended(self) -> Repetition:
        """Repetition including the error terms, the inputs that passes have added."""
        owners = [each.position for each in self.expansions for _ in each.added_inputs]
        return self.repetition.extended(owners)

    def formats_of_signed(self, state: StateTensor) -> set[ErrorFormat]:
        """Return the format of a state, and that of packed state of either sign, if state is to be packed."""
        return {state.error_format, *(self.packed or ())[:1]}

    @property
    def compensation(self) -> str:
        """Summary of a compensating pass: ``148 tensors``, ``148 tensors, 12 refused``."""
        refused = sum(bool(state.refusal) for state in self.compensated)
        return f"{len(self.compensated)} tensors" + (f", {refused} refused" if refused else "")

    def before_passes(self, gm: GraphModule) -> StepProgram:
        """Return the program of the whole step before any pass, on ``gm``, without the real tensors."""
        copies = self.repetition.copies
        return StepProgram(
            gm,
            [replace(info, tensor=None) for info in self.infos],
            self.strategy,
            self.arithmetic,
            self.error_format,
            already_compensated=frozenset(index for i in self.already_compensated for index in copies[i]),
            is_recorded=self.is_recorded,
            rounding=self.rounding,
            packed=self.packed,
            weights=self.weights,
            takes_float32=self.takes_float32,
            sums_float32=self.sums_float32,
            changes=self.changes,
        )

    def move_to(self, gm: GraphModule) -> None:
        """Replace the graph by another copy of the captured graph; find the state tensors' nodes in it."""
        self.gm = gm
        inputs, stores = placeholders(gm.graph), copies_to_inputs(gm.graph)
        for state in self.states:
            state.placeholder = inputs[state.position]
            state.store = stores[state.placeholder]

    def spare(self) -> Callable[[], None]:
        """Copy the graph; return a function that goes back to the copy, with all tensors as they are now."""
        gm, states, reads = copy_of(self.gm), [*map(replace, self.states)], [*map(replace, self.reads)]
        copies = dict(zip(self.gm.graph.nodes, gm.graph.nodes, strict=True))
        rounded_at_random = {copies[node] for node in self.rounded_at_random}

        def copied(value: Any) -> Any:
            if isinstance(value, Recurrence):
                return replace(value, path=copied(value.path))
            return tuple(map(copied, value)) if isinstance(value, tuple) else copies.get(value, value)

        def moved(each: Any) -> Any:
            changes = {
                name: copied(value) for name, value in vars(each).items() if not isinstance(value, list)
            }
            return replace(each, **changes)

        def go_back() -> None:
            self.gm, self.states, self.reads = gm, [*map(moved, states)], [*map(moved, reads)]
            self.rounded_at_random = rounded_at_random

        return go_back

    @property
    def expansions(self) -> list[Expansion]:
        """Inputs whose error formats have added inputs, in the order of the added inputs."""
        return [*self.expanded, *self.reads]
