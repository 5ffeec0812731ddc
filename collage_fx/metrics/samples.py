"""Graphs of the values that a step intends and stores, for a sample of elements: Note [Metrics].

Where an operation is elementwise, its results for some elements are made of its operands for these elements.
So the choice of elements moves from the results of a graph towards its inputs, up to the first operation that
is not elementwise (a norm, a product of matrices), which is computed as a whole.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from collage_fx import graph
from collage_fx.metrics.rows import places
from collage_fx.runtime import bind
from collage_fx.torch_compat import real_tensors

aten = torch.ops.aten
prims = torch.ops.prims

#: Samples of a tensor; None in the place of an error term that there is not.
Samples = tuple[Any, ...]

#: Input of a graph: the position of an input of the step, and None for this input or the number of one of its
#: error terms.
Source = tuple[int, int | None]


class SampledGraph(NamedTuple):
    """Graph that torch runs operation by operation, in two pieces.

    Attributes:
        sources: the inputs.
        first: chooses the elements of the sample, of inputs and of what has to be computed as a whole.
        then: computes the results from these and from numbers, element by element.
        joins: whether ``then`` takes several instances at once, as rows of matrices and columns of numbers.
        draws: whether it draws random numbers.
    """

    sources: Sequence[Source]
    first: Callable[..., Sequence[Any]]
    then: Callable[..., Sequence[Tensor]]
    joins: bool
    draws: bool

    def __call__(self, instances: Sequence[Sequence[Any]]) -> list[Sequence[Tensor]]:
        """Return the results of each instance, given its inputs."""
        tensors = (value for values in instances for value in values if isinstance(value, Tensor))
        devices = {each.device for each in tensors if each.is_cuda} if self.draws else ()
        with torch.random.fork_rng(devices, enabled=self.draws):  # the step is to draw the same
            given = [self.first(*values) for values in instances]
        columns = [_joined(column) for column in zip(*given, strict=True)] if self.joins else [None]
        if len(given) == 1 or any(column is None for column in columns):
            return [self.then(*values) for values in given]
        rows = [each.expand(len(given), each.shape[-1]).unbind() for each in self.then(*columns)]
        return [*zip(*rows, strict=True)]


def _joined(values: Sequence[Any]) -> Any:
    """Return values of instances at once: samples as rows, numbers as a column; None if impossible."""
    first = values[0]
    if not isinstance(first, Tensor):
        return first if all(each == first for each in values) else None
    if first.dim():
        return torch.stack([*values])
    if all(each is first for each in values):
        return first
    return torch.stack([*values])[:, None]


class _Instance:
    """Instance of a family: where its inputs are among the arguments of a step."""

    def __init__(
        self, program: graph.StepProgram, states: Sequence[graph.StateTensor], instance: int
    ) -> None:
        repetition = program.repetition
        own = (None, repetition.owners[states[0].position])
        positions = [i for i, owner in enumerate(repetition.owners) if owner in own]
        self._index = {i: repetition.input_of(i, instance) for i in positions}
        self._terms = {}
        for each in program.expansions:
            if (index := self._index.get(each.position)) is not None:
                # A tensor without error terms is read with zeros; a packed one is its auxiliaries alone.
                fmt = each.error_format
                self._terms[each.position] = bind(index, program.infos[index], fmt, reads=fmt.keeps_error)
        #: Indices of the measured tensors.
        self.measured = [self._index[state.position] for state in states]

    def values(self, sources: Sequence[Source], arguments: Sequence[Any]) -> list[Any]:
        terms = {i: self._terms[i].added_to(arguments) for i, term in sources if term is not None}
        return [arguments[self._index[i]] if term is None else terms[i][term] for i, term in sources]


class Observer:
    """Reader of the measured tensors, ``states`` in each instance, of a family."""

    def __init__(
        self,
        program: graph.StepProgram,
        states: Sequence[graph.StateTensor],
        before: SampledGraph,
        after: SampledGraph,
    ) -> None:
        self.states = states
        self.instances = [
            _Instance(program, states, i) for i in range(len(program.repetition.copies[states[0].position]))
        ]
        self._before, self._after = before, after

    def present(self, absent: Collection[int]) -> list[_Instance]:
        """Return the instances none of whose measured tensors are at these indices of arguments."""
        return [each for each in self.instances if not any(index in absent for index in each.measured)]

    def read(self, present: Sequence[_Instance], arguments: Sequence[Any], *, before: bool) -> list[Samples]:
        """Return samples by instance: hi, the sum of error terms, and before the step the intended value."""
        sampled = self._before if before else self._after
        found: list[Samples] = []
        for of_one in sampled([each.values(sampled.sources, arguments) for each in present]):
            results = iter(of_one)
            for state in self.states:
                hi, lo = next(results), next(results) if state.auxiliaries else None
                found.append((hi, lo, next(results)) if before else (hi, lo))
        return found


def observers(program: graph.StepProgram, reference: graph.StepProgram) -> list[Observer]:
    """Return the observers of a step, given as it is after the pipeline, and in float32."""
    whole = _Whole(program, reference)
    by_family = defaultdict[int | None, list[graph.StateTensor]](list)
    for state in program.measured:
        by_family[program.repetition.owners[state.position]].append(state)
    found = []
    for states in by_family.values():
        held = {state.position: [*whole.held(state)] for state in states}
        after = [(node, state) for state in states for node in held[state.position]]
        before = [
            (node, state) for state in states for node in (*held[state.position], whole.intended(state))
        ]
        found.append(Observer(program, states, whole.sampled(before), whole.sampled(after)))
    return found


class _Whole:
    """The graph of the step in float32, which reads hi and error terms joined."""

    def __init__(self, program: graph.StepProgram, reference: graph.StepProgram) -> None:
        self._gm = reference.gm
        self._editor = graph.GraphEditor(reference.gm, "metrics")
        self._inputs = graph.placeholders(self._editor.graph)
        self._stores = graph.copies_to_inputs(self._editor.graph)
        self._sources: dict[Node, Source] = {node: (i, None) for i, node in enumerate(self._inputs)}
        self._terms: dict[int, list[Node]] = {}
        for each in program.expansions:
            terms = self._terms[each.position] = self._added(each.position, each.auxiliaries)
            graph.read_whole(self._editor, self._inputs[each.position], terms, each.error_format)

    def _added(self, position: int, auxiliaries: Sequence[Node]) -> list[Node]:
        """Add inputs for the error terms of an input."""
        added = []
        for i, auxiliary in enumerate(auxiliaries):
            with self._editor.graph.inserting_after([*self._sources][-1]):
                node = self._editor.graph.placeholder(f"{self._inputs[position].name}_{i}")
            node.meta["val"] = auxiliary.meta["val"]
            self._sources[node] = position, i
            added.append(node)
        return added

    def intended(self, state: graph.StateTensor) -> Node:
        """Return the value that the step stores, before it is rounded."""
        value = graph.unconverted(graph.stored(self._stores[self._inputs[state.position]]))
        with self._editor.graph.inserting_before(self._editor.graph.output_node()):
            return self._editor.convert(value, torch.float32)

    def held(self, state: graph.StateTensor) -> Iterator[Node]:
        """Yield hi and, if there are error terms, their sum, in float32."""
        hi, editor = self._inputs[state.position], self._editor
        with editor.graph.inserting_before(editor.graph.output_node()):
            yield editor.convert(hi, torch.float32)
            if state.auxiliaries:
                fmt = state.error_format
                inputs = self._terms[state.position]
                terms = editor.inline(fmt.error_terms, hi, *inputs, elementwise=fmt.is_elementwise)
                wide = [editor.convert(term, torch.float32) for term in terms]
                yield functools.reduce(lambda one, other: editor.call(aten.add.Tensor, one, other), wide)

    def sampled(self, wanted: Sequence[tuple[Node, graph.StateTensor]]) -> SampledGraph:
        # The places of a sample depend on its size: symbols become numbers.
        values = [(node, state.value) for node, state in wanted]
        samples = [(node, _Sample(torch.Size(map(int, each.shape)), each.device)) for node, each in values]
        return _Sampling(self._gm, self._sources, samples).graph()


class _Sample(NamedTuple):
    """Choice of elements of all tensors of a shape."""

    shape: torch.Size
    device: torch.device

    def has(self, value: Tensor | None) -> bool:
        """Return whether a value has this shape."""
        return value is not None and value.shape == self.shape

    def is_made_by(self, node: Node) -> bool:
        """Return whether a node's elements are made of its operands' elements at the same indices."""
        if node.op != "call_function" or not self.has(graph.tensor_value(node)):
            return False
        if graph.draws(node.target) or not graph.is_elementwise(node):
            return False
        if graph.is_pointwise(node.target):
            return True
        tensors = [graph.tensor_value(each) for each in (node, *node.all_input_nodes)]
        layouts = {(each.shape, each.stride()) for each in tensors if each is not None and each.dim()}
        return len(layouts) <= 1 and not graph.takes_strides(node.target)


class _Sampling:
    """Writer of the graph of some samples of nodes of ``gm``, whose inputs are ``sources``."""

    def __init__(
        self, gm: GraphModule, sources: Mapping[Node, Source], wanted: Sequence[tuple[Node, _Sample]]
    ) -> None:
        self._gm, self._sources, self._wanted = gm, sources, wanted
        self._first, self._then = Graph(), Graph()
        #: Nodes of the first piece by nodes of the graph; inputs of the second piece by nodes of the first;
        #: numbers that the second piece computes.
        self._whole: dict[Node, Node] = {}
        self._handed: dict[Node, Node] = {}
        self._numbers: dict[Node, Node] = {}
        self._part: dict[tuple[Node, _Sample], Node] = {}
        self._places: dict[_Sample, tuple[Node, int]] = {}

    def graph(self) -> SampledGraph:
        parts, whole, numbers = self._needed()
        sources = []
        for node in self._gm.graph.nodes:
            if node in whole:
                self._whole[node] = self._first.node_copy(node, self._whole.__getitem__)
                if node in self._sources:
                    sources.append(self._sources[node])
            if node in numbers:
                args, kwargs = map_arg((node.args, node.kwargs), self._number)
                self._numbers[node] = self._then.create_node("call_function", node.target, args, kwargs)
            for sample in parts[node]:
                made = self._by_element if sample.is_made_by(node) else self._taken
                self._part[node, sample] = made(node, sample)
        joins = all(map(_broadcasts, self._then.nodes))
        for node in (*self._first.nodes, *self._then.nodes):
            if node.target is prims.convert_element_type.default:  # torch takes five times as long as for:
                (source, dtype), node.target = node.args, aten._to_copy.default
                node.args, node.kwargs = (source,), {"dtype": dtype}
        self._then.output(tuple(self._part[each] for each in self._wanted))
        self._first.output(tuple(self._handed))
        first, then = GraphModule(self._gm, self._first).forward, GraphModule({}, self._then).forward
        is_random = any(graph.draws(node.target) for node in self._first.nodes)
        return SampledGraph(sources, first, then, joins=joins, draws=is_random)

    def _needed(self) -> tuple[Mapping[Node, dict[_Sample, None]], set[Node], set[Node]]:
        """Return the needed samples of each node, whole nodes, and operations on numbers."""
        parts, whole, numbers = defaultdict[Node, dict[_Sample, None]](dict), set[Node](), set[Node]()

        def need(operand: Node) -> None:
            (numbers if _is_made_of_numbers(operand) else whole).add(operand)

        for node, sample in self._wanted:
            parts[node][sample] = None
        for node in reversed(self._gm.graph.nodes):
            for sample in parts[node]:
                if not sample.is_made_by(node):
                    whole.add(node)
                    continue
                for operand in node.all_input_nodes:
                    if sample.has(graph.tensor_value(operand)):
                        parts[operand][sample] = None
                    else:
                        need(operand)
            if node in numbers:
                for operand in node.all_input_nodes:
                    need(operand)
            if node in whole:
                whole.update(node.all_input_nodes)
        return parts, whole, numbers

    def _by_element(self, node: Node, sample: _Sample) -> Node:
        """Write an operation on the elements of a sample."""

        def operand(each: Node) -> Node:
            if (each, sample) in self._part:
                return self._part[each, sample]
            value = graph.tensor_value(each)
            if value is not None and value.dim():
                return self._taken(each, sample)
            number, dtype = self._number(each), node.meta["val"].dtype
            if value is None or value.dtype is not torch.float64 or dtype is torch.float64:
                return number
            # A number in a column would make elements float64.
            return self._then.call_function(aten._to_copy.default, (number,), {"dtype": torch.float32})

        args, kwargs = map_arg((node.args, node.kwargs), operand)
        kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
        if (at := graph.size_argument(node.target)) is not None:
            args = (*args[:at], [self._places_of(sample)[1]], *args[at + 1 :])
        return self._then.create_node("call_function", node.target, args, kwargs)

    def _taken(self, node: Node, sample: _Sample) -> Node:
        """Write the choice of a sample's elements of a tensor."""
        value = self._whole[node]
        if not sample.has(graph.tensor_value(node)):
            value = self._first.call_function(aten.expand.default, (value, [*sample.shape]))
        return self._given(self._first.call_function(aten.take.default, (value, self._places_of(sample)[0])))

    def _number(self, node: Node) -> Node:
        return self._numbers[node] if node in self._numbers else self._given(self._whole[node])

    def _given(self, node: Node) -> Node:
        """Hand a value to the second piece."""
        if node not in self._handed:
            self._handed[node] = self._then.placeholder(f"value_{len(self._handed)}")
        return self._handed[node]

    def _places_of(self, sample: _Sample) -> tuple[Node, int]:
        """Return the indices of a sample's elements, a constant of the first piece, and their number."""
        if sample not in self._places:
            name = f"places_{len(self._places)}"
            with real_tensors():
                indices = places(sample.shape.numel(), sample.device)
            self._gm.register_buffer(name, indices)
            self._places[sample] = self._first.get_attr(name), len(indices)
        return self._places[sample]


def _is_made_of_numbers(node: Node) -> bool:
    """Return whether a node is an operation on 0-d tensors that also takes columns of them."""
    values = map(graph.tensor_value, (node, *node.all_input_nodes))
    is_known = node.op == "call_function" and _broadcasts(node) and not graph.draws(node.target)
    return is_known and all(each is not None and not each.dim() for each in values)


def _broadcasts(node: Node) -> bool:
    """Return whether a node takes rows of a matrix and columns as it takes vectors and numbers."""
    if node.op != "call_function":
        return True
    takes_number = "fill" in str(node.target) and any(isinstance(each, Node) for each in node.args[1:])
    return graph.is_pointwise(node.target) and graph.size_argument(node.target) is None and not takes_number
