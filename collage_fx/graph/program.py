"""The data that passes work on: one captured step, its state tensors and what is decided about them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch.fx import GraphModule, Node

from collage_fx.graph.families import Repetition
from collage_fx.graph.nodes import copies_to_inputs, copy_of, placeholders, stored, tensor_value
from collage_fx.numerics import ErrorFormat, FloatFormat, storage_format

if TYPE_CHECKING:
    import sympy

Strategy = Literal["none", "light", "plus", "full"]
Arithmetic = Literal["wide", "native"]
Rounding = Literal["nearest", "dither"]


class Role(enum.Enum):
    """The role that an input of the step has for the user.

    CARRIED is what a recorded step computes in one graph and uses in the next, NEW is what a captured step
    makes and returns.
    """

    PARAMETER = "parameter"
    STATE = "state"
    GRADIENT = "gradient"
    CARRIED = "carried"
    NEW = "new"
    OTHER = "other"


@dataclass(frozen=True)
class InputInfo:
    """The facts about one graph input that the graph does not hold.

    Attributes:
        name: as the user knows it, such as ``param_groups[0].params[3].exp_avg``.
        symbol: short name for recurrences, such as ``exp_avg``; a parameter is ``p``, its gradient ``g``.
        role: parameter, optimizer state, gradient or other.
        tensor: the real tensor met while compiling, None for numbers and for what AOTAutograd made up.
        bound: whether it is an attribute of the captured module, so the same tensor in every call.
        cut_from: the elements of a DTensor of which this process has some and others have the rest; 0 if it
            has all.
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
    """The ways in which a state tensor's new value may depend on its old one."""

    ACCUMULATION = "accumulation"
    MOVING_AVERAGE = "moving average"
    OVERWRITE = "overwrite"
    OTHER = "other"


@dataclass(frozen=True)
class Recurrence:
    """A state tensor's recurrence, ``symbol' = f(symbol, ...)``, and of which kind it is.

    Attributes:
        expression: the new value; other state tensors' new values appear as primed symbols.
        kind: see :class:`Kind`.
        slopes: the coefficients of the old value, one per branch of a piecewise linear update (maximum,
            where): a number where it is known while compiling, else a SymPy expression. Empty where the
            dependence isn't linear.
        path: the nodes between the load and the store of the tensor, in graph order.
    """

    expression: sympy.Expr
    kind: Kind
    slopes: tuple[sympy.Expr, ...]
    path: tuple[Node, ...]


@dataclass(frozen=True)
class Verdict:
    """The verdict on a recurrence: what becomes of it in plain low precision.

    Attributes:
        lossy: whether storing it rounded to nearest loses the update.
        reason: why.
        noise: what storing it rounded by dither leaves instead, relatively, as in ``dithered_noise``; None
            where nothing is known of it.
    """

    lossy: bool
    reason: str
    noise: float | None = None


@dataclass
class StateTensor:
    """A low-precision input that the step mutates.

    Attributes:
        placeholder: the graph input.
        position: its index among the graph's inputs.
        info: name and role.
        store: its ``copy_`` in the epilogue.
        recurrence, verdict: how its new value depends on its old one, and whether storing it loses bits.
        is_weight_sized: set by ``analyze``: whether it is as large as weights, as their average is.
        amplification: set by ``analyze``: of its noise, relative to the update of a parameter:
            Note [State of the size of weights] in ``graph/cancellation.py``.
        chosen_format: set by ``analyze``: the error format in which it becomes an expansion, if it does.
        selection: why it is, or is not, compensated under the chosen strategy.
        not_packed: why it is not packed where state is; empty if it is, or none is.
        refusal: set by the compensating pass where it could not keep the error term, and why.
        remedy: likewise, what to do about it; the arithmetic's usual advice if empty.
        auxiliaries: set by ``allocate``: placeholders of its error format's auxiliary tensors.
        start: likewise, where the format is dithered: that of the index of its first element.
        intended: set by ``compensate-wide``: the float32 new value that is split and stored.
        row: set by ``measure``: the placeholders that its sums and sizes are stored into.
    """

    placeholder: Node
    position: int
    info: InputInfo
    store: Node
    recurrence: Recurrence
    verdict: Verdict
    is_weight_sized: bool = False
    amplification: float = 0.0
    chosen_format: ErrorFormat | None = None
    selection: str = ""
    not_packed: str = ""
    refusal: str = ""
    remedy: str = ""
    auxiliaries: tuple[Node, ...] = ()
    start: Node | None = None
    intended: Node | None = None
    row: tuple[Node, ...] = ()

    @property
    def compensated(self) -> bool:
        """Whether it gets error terms."""
        return self.chosen_format is not None and self.chosen_format.keeps_error

    @property
    def packed(self) -> bool:
        """Whether its format alone keeps it, so that the step reads and writes no hi."""
        return self.chosen_format is not None and not self.chosen_format.keeps_hi

    @property
    def error_format(self) -> ErrorFormat:
        """The error format of a tensor that becomes an expansion."""
        assert self.chosen_format is not None
        return self.chosen_format

    @property
    def added(self) -> tuple[Node, ...]:
        """The placeholders that an expansion has besides its hi."""
        return self.auxiliaries if self.start is None else (*self.auxiliaries, self.start)

    @property
    def carries_its_old_value(self) -> bool:
        """Whether the new value is computed from the old one, which may be lost on the way."""
        return bool(self.recurrence.path)

    @property
    def stored(self) -> Node:
        """The node that is stored into the input."""
        return stored(self.store)

    @property
    def value(self) -> torch.Tensor:
        """The FakeTensor of the input: its shape, strides, dtype and device."""
        value = tensor_value(self.placeholder)
        assert value is not None
        return value

    @property
    def format(self) -> FloatFormat:
        return storage_format(self.value.dtype)


@dataclass
class ReadExpansion:
    """A low-precision input that has error terms and that the step reads, but does not mutate.

    A parameter in the update of its moving average, say: the average is one of hi + lo, not of hi.

    Attributes:
        placeholder, position, info, error_format, auxiliaries, start: as in :class:`StateTensor`.
    """

    placeholder: Node
    position: int
    info: InputInfo
    error_format: ErrorFormat
    auxiliaries: tuple[Node, ...] = ()
    start: Node | None = None

    @property
    def packed(self) -> bool:
        """As in :class:`StateTensor`."""
        return not self.error_format.keeps_hi

    @property
    def added(self) -> tuple[Node, ...]:
        """As in :class:`StateTensor`."""
        return self.auxiliaries if self.start is None else (*self.auxiliaries, self.start)


@dataclass
class StepProgram:
    """One captured step on its way through the pipeline: the graph of one of each family of equal updates.

    Attributes:
        gm: the graph, edited in place by the passes.
        infos: one :class:`InputInfo` per input of the whole graph.
        repetition: how the inputs of ``gm`` recur among those; it is a family of one if this is left out.
        already_compensated: positions of inputs that have error terms already (from another compiled
            callable, an earlier compilation or a checkpoint).
        is_recorded: whether it is a part of a recorded step: what it stores may have been computed, by
            another part, from what it overwrites.
        is_compiled: whether it is to be compiled, rather than run operation by operation.
        rounded_at_random: set by ``undo-stochastic-rounding``: the inputs whose new values were.
        rounding: of state without error terms: see :class:`~collage_fx.CollageBackend`.
        packed: the formats of state that is to be packed, for numbers of either sign and for numbers that are
            never negative; None if none is.
        captured: a copy of the graph as captured, where the step is to be measured; else None.
        states: set by ``analyze``.
        reads: set by ``allocate``.
        rows: memory of the rows that ``measure`` has made inputs.
    """

    gm: GraphModule
    infos: Sequence[InputInfo]
    strategy: Strategy
    arithmetic: Arithmetic
    error_format: ErrorFormat
    repetition: Repetition = None  # type: ignore[assignment]  # made of the infos
    already_compensated: frozenset[int] = frozenset()
    is_recorded: bool = False
    is_compiled: bool = True
    rounded_at_random: set[Node] = field(default_factory=set)
    rounding: Rounding = "nearest"
    packed: tuple[ErrorFormat, ErrorFormat] | None = None
    captured: GraphModule | None = None
    states: list[StateTensor] = field(default_factory=list)
    reads: list[ReadExpansion] = field(default_factory=list)
    rows: Sequence[torch.Tensor] = ()

    def __post_init__(self) -> None:
        self.repetition = self.repetition or Repetition.of_one(len(self.infos))

    @property
    def inputs(self) -> list[InputInfo]:
        """One :class:`InputInfo` per input of ``gm``: that of the first in its family."""
        return [self.infos[copies[0]] for copies in self.repetition.copies]

    @property
    def compensated(self) -> list[StateTensor]:
        return [state for state in self.states if state.compensated]

    @property
    def expanded(self) -> list[StateTensor]:
        """The state tensors that an error format stores, with error terms or without."""
        return [state for state in self.states if state.chosen_format is not None]

    @property
    def measured(self) -> list[StateTensor]:
        """The state tensors that have a row of sums, in the order of the rows."""
        return [state for state in self.states if state.row]

    @property
    def extended(self) -> Repetition:
        """How the inputs recur with those that the passes have added: all error terms, then all rows."""
        of_error_terms = [state.position for state in self.expansions for _ in state.added]
        of_rows = [state.position for state in self.measured for _ in state.row] if self.rows else []
        return self.repetition.extended(of_error_terms).extended(of_rows)

    @property
    def compensation(self) -> str:
        """The summary of a compensating pass: ``148 tensors``, ``148 tensors, 12 refused``."""
        refused = sum(bool(state.refusal) for state in self.compensated)
        return f"{len(self.compensated)} tensors" + (f", {refused} refused" if refused else "")

    def unrun(self, gm: GraphModule) -> StepProgram:
        """The whole step before any pass, on ``gm`` and without the real tensors."""
        copies = self.repetition.copies
        return StepProgram(
            gm,
            [replace(info, tensor=None) for info in self.infos],
            self.strategy,
            self.arithmetic,
            self.error_format,
            already_compensated=frozenset(index for i in self.already_compensated for index in copies[i]),
            is_recorded=self.is_recorded,
            captured=None if self.captured is None else copy_of(gm),
            rounding=self.rounding,
            packed=self.packed,
        )

    def move_to(self, gm: GraphModule) -> None:
        """Take another copy of the captured graph, and find the state tensors' nodes in it."""
        self.gm = gm
        inputs, stores = placeholders(gm.graph), copies_to_inputs(gm.graph)
        for state in self.states:
            state.placeholder = inputs[state.position]
            state.store = stores[state.placeholder]

    @property
    def expansions(self) -> list[StateTensor | ReadExpansion]:
        """All inputs whose error formats have made inputs too, in the order of these."""
        return [*self.expanded, *self.reads]
