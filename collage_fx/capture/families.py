"""Search for families: updates in a captured graph that are equal except for their tensors.

Note [One of each family]
-------------------------
The step of 148 parameters is one update, written 148 times. So the captured graph is cut into components that
have no value in common, components that do the same to tensors of the same layout and meaning form a
*family*, and a graph of one component of each family is compiled. Its parts are then called for the tensors
of all components (:mod:`collage_fx.graph.families`).

* A component is connected by operations and by the tensors that they read. Numbers connect nothing, nor does
  a 0-d tensor that several components read: it is *common* to the step. Nothing may write to what is common,
  which is known once AOTAutograd has found the writes.
* Two components are equal if, one by one in the order of the graph, their operations, their constants and the
  common values that they read are equal, and so are the layout, the role, the symbol in recurrences and the
  presence of error terms of their tensors. So every decision about one component holds for its family. Only
  names differ, and what is common to some components only, such as the learning rate of a group: each
  member then has its own (:meth:`_Search._with_own_numbers`).
* Sizes do not count if no option asks for them, and all tensors of a component, but scalars, have one shape
  and are contiguous. If an operation turns out not to be elementwise, families are found again by sizes.
* No two inputs may share memory, though they may lie side by side in one storage, as the gradients of FSDP
  and DistributedDataParallel do: components can then run in any order.
* A component of DTensors, all of one shape and sharded alike, becomes a component of this process's shards if
  each element turns out to be computed from the same elements alone. AOTAutograd knows what others exchange.

Dynamo, whose trace takes longest, gets only two rows of each layout of the lists of parameters, gradients and
state that the steps of torch.optim loop over (:func:`rows_to_trace`), of two sizes if there are. If both turn
out to be members of the same families, at the same indices, so are the others. If not, all are traced.

Whatever is not understood becomes a :class:`~collage_fx.graph.Reason` in the report: the graph is one family.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from collage_fx import graph, torch_compat
from collage_fx.capture.lists import with_lists_apart
from collage_fx.capture.numbers import is_number
from collage_fx.capture.refusals import first_overlap
from collage_fx.capture.rows import ListRows, common_shape, is_plain, layout_of, layouts_of
from collage_fx.graph import InputInfo, Reason, Repetition
from collage_fx.torch_compat import SET_GRAD_ENABLED, local_tensor


@dataclass(frozen=True)
class Families:
    """A module of one component of each family, and the way in which the whole graph is made of them."""

    module: GraphModule  # the graph of the first component of each family, on local shards
    arguments: tuple[Any, ...]  # of ``module``
    inputs: tuple[Any, ...]  # of the whole graph, in AOTAutograd's order: parameters, buffers, arguments
    bound: int  # number of inputs that are attributes of the module, hence the same tensors in every call
    gradients: Mapping[int, int]  # index of a gradient that is not passed -> index of its parameter
    #: Indices of gradient and parameter of each member of the repetition; empty unless gradients come and go.
    members: tuple[tuple[int, int], ...]
    infos: tuple[InputInfo, ...]  # names and roles of the inputs
    distributed: Mapping[int, torch_compat.Sharding]  # index of an input that is a DTensor -> its sharding
    origins: tuple[tuple[str, str | int], ...]  # of each input of ``module``: see ``aot_input_of``
    repetition: Repetition  # of the inputs of ``module``, in the order of ``origins``, and of its results
    own_numbers: Sequence[Any]  # symbolic numbers in ``module`` that stand for those of other members
    symbols_left_out: frozenset[str]  # of these other numbers


#: ``(inputs, names, number of bound inputs)`` -> for each its description, and facts that equal inputs share.
Describe = Callable[[Sequence[Any], Sequence[str], int], Sequence[tuple[InputInfo, Hashable]]]


def families_of(
    gm: GraphModule,
    arguments: Sequence[Any],
    describe: Describe,
    thinned: Sequence[torch_compat.ThinnedLists] = (),
    *,
    own_numbers: bool = True,
    any_size: bool = False,
) -> Families | Reason:
    """Find the families of a graph that Dynamo captured, or the reason why it has none.

    Of the lists ``thinned``, Dynamo has traced some rows; members are found for the others. Without
    ``own_numbers``, members of a family read the same numbers. With ``any_size``, they may differ in sizes.
    """
    found = _Search(with_lists_apart(gm), arguments, ListRows(thinned), any_size=any_size)
    if (reason := found.input_not_understood() or found.operation_not_understood()) is not None:
        return reason
    described = describe(found.inputs, found.names, found.bound)
    found.meanings = [(info.symbol, (info.role, kind)) for info, kind in described]
    families = found.families(own_numbers=own_numbers)
    for family in families:
        if (reason := found.not_sharded_alike(family[0])) is not None:
            return reason
    gains = found.pieces or found.rows.come_and_go  # even in families of one
    if len(found.order) == len(families) and not gains:
        return Reason("no two tensors have the same shape, dtype and update")
    if not found.adds_rows_left_out(families):
        return Reason("the rows that were traced do not show how the others are updated")
    return found.result(families, tuple(info for info, _ in described))


@dataclass(eq=False)
class _Component:
    nodes: list[Node] = field(default_factory=list)  # operations in the order of the graph
    inputs: list[int] = field(default_factory=list)  # that no other component reads, as they are first read
    results: list[Node] = field(default_factory=list)  # nodes that the graph returns
    numbers: list[int] = field(default_factory=list)  # inputs in which members of its family differ


class _Search:
    def __init__(self, gm: GraphModule, arguments: Sequence[Any], rows: ListRows, *, any_size: bool) -> None:
        self.gm = gm
        self.rows = rows
        self.any_size = any_size
        placeholders = list(gm.graph.find_nodes(op="placeholder"))
        passed = list(zip((node.name for node in placeholders), arguments, strict=True))
        attributes = map(list, (gm.named_parameters(), gm.named_buffers()))
        bound = dict(each for named in attributes for each in rows.with_rows_left_out(named))
        given = dict(rows.with_rows_left_out(passed))
        self.inputs = (*bound.values(), *given.values())
        self.index_by_id = {id(value): i for i, value in enumerate(self.inputs)}
        self.names = (*bound, *given)
        self.bound = len(bound)
        #: Index of an input that is a DTensor -> its sharding.
        self.pieces = {
            index: pieces
            for index, value in enumerate(self.inputs)
            if isinstance(value, Tensor) and (pieces := torch_compat.sharding_of(value)) is not None
        }
        index_of = {name: index for index, name in enumerate(bound)}
        #: Node -> index of the input; -1 for an attribute that is no parameter or buffer.
        self.index = {node: index_of.get(str(node.target), -1) for node in gm.graph.find_nodes(op="get_attr")}
        argument_indices = {name: self.bound + i for i, name in enumerate(given)}
        self.index |= {node: argument_indices[node.name] for node in placeholders}
        #: Nodes that are numbers computed from inputs and other numbers alone.
        self.numbers: set[Node] = set()
        self._computed: dict[Node, tuple[Hashable, tuple[int, ...]]] = {}
        self._known: dict[Hashable, int] = {}
        #: Symbol of each input, with its role and facts about its record.
        self.meanings: Sequence[tuple[str, Hashable]] = ()

    def input_not_understood(self) -> Reason | None:
        """Return the first input of an unknown kind, or in the memory of another; None if there is none."""
        for node, index in self.index.items():
            if index < 0:
                return Reason.at(node, "it is neither a parameter nor a buffer nor an argument")
        pieces = []
        for name, value in zip(self.names, self.inputs, strict=True):
            if isinstance(value, Tensor):
                if not graph.device_facts(value.device).in_parts:
                    return Reason(f"on {value.device.type} a step is compiled as one", name)
                if not is_plain(value):
                    return Reason("this input is no ordinary dense tensor of known sizes", name)
                pieces.append((name, local_tensor(value)))
            elif not isinstance(value, (torch.SymInt, torch.SymFloat)):
                return Reason("this input is neither a tensor nor a number", name)
        if (overlap := first_overlap(pieces)) is not None:
            return Reason(f"this input shares memory with {overlap[0]}", overlap[1])
        return None

    def operation_not_understood(self) -> Reason | None:
        """Return the first operation of an unknown kind; None if there is none."""
        if self.rows.thinned and self._returned():
            return Reason("the step returns something, of which Dynamo has traced only a part")
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            if node.op not in ("call_function", "call_method"):
                return Reason.at(node, "it is not a function call")
            is_mode = node.target is SET_GRAD_ENABLED  # how the nodes after it are captured
            if not (node.all_input_nodes or is_mode or _is_tensor(node) or is_number(node)):
                return Reason.at(node, "it has no operands and makes neither a tensor nor a number")
        for result in self._returned():
            if not (isinstance(result, Node) and _is_tensor(result)):
                return Reason("the step returns something else than tensors", str(result))
        return None

    def _returned(self) -> list[Any]:
        return list(torch_compat.pytree.tree_leaves(self.gm.graph.output_node().args))

    def families(self, *, own_numbers: bool) -> list[list[_Component]]:
        """Group the components by family; families come in the order of their first components."""
        found = self._components()
        readers = Counter(index for component in found for index in component.inputs)
        self.common = {index for index, count in readers.items() if count > 1}
        self.common |= {index for number in self.numbers for index in self._read_by(number)}
        self.common |= {i for i, value in enumerate(self.inputs) if not isinstance(value, Tensor)}
        self.order = found
        families: dict[Hashable, list[_Component]] = {}
        for component in found:
            component.inputs = [index for index in component.inputs if index not in self.common]
            families.setdefault(self._key(component), []).append(component)
        return self._with_own_numbers(list(families.values()), allowed=own_numbers)

    def _with_own_numbers(self, families: list[list[_Component]], *, allowed: bool) -> list[list[_Component]]:
        """Give the members of a family numbers of their own where they read different inputs.

        A graph has an input once. So the first members, which stand in the graph, must differ in all these
        inputs from those of other families. If they cannot, members with different inputs are families apart.
        """
        several, common = [], set[int]()
        for family in families:
            if any(component.numbers != family[0].numbers for component in family):
                several.append(family)
                continue
            common.update(family[0].numbers)
            for component in family:
                component.numbers = []
        taken = set(common)
        for family in several:
            first = next((each for each in family if taken.isdisjoint(each.numbers)), None)
            if first is None or not allowed:
                break
            taken.update(first.numbers)
            family.remove(first)
            family.insert(0, first)
        else:
            owned = {index for family in several for each in family for index in each.numbers}
            self.common -= owned - common
            return families
        apart: dict[Hashable, list[_Component]] = {}
        for i, family in enumerate(families):
            for component in family:
                apart.setdefault((i, *component.numbers), []).append(component)
                component.numbers = []
        return list(apart.values())

    def not_sharded_alike(self, component: _Component) -> Reason | None:
        """Return why a component of DTensors, if elementwise, is not one of local shards; None if it is."""
        pieces = {
            self.names[index]: (self.pieces.get(index), self.inputs[index].shape)
            for index in component.inputs
            if index in self.pieces or self.inputs[index].dim() > 0
        }
        first, _ = alike = next(iter(pieces.values()), (None, ()))
        if first is None and not any(of for of, _ in pieces.values()):
            return None
        for name, each in pieces.items():
            if each != alike:
                return Reason("this input is not sharded like the others of its update", name)
        assert first is not None
        if any(placement.is_partial() for placement in first.placements):
            return Reason("each process has a summand of its inputs (Partial)", next(iter(pieces)))
        if component.results:
            return Reason.at(component.results[0], "the step returns a new DTensor")
        return None

    def adds_rows_left_out(self, families: list[list[_Component]]) -> bool:
        """Add the rows left out to the families; return False if the traced rows do not justify that.

        They do if the two rows of each layout have their components in the same families, and nothing else.
        """
        if not self.rows.thinned:
            return True
        members: dict[tuple[int, int], list[tuple[int, tuple[int, ...], list[int]]]] = defaultdict(list)
        rows: dict[int, tuple[int, int]] = {}
        cell_of = self.rows.cells.get
        for f, family in enumerate(families):
            for component in family:
                cells = [cell_of(id(self.inputs[index]), (-1, -1, -1)) for index in component.inputs]
                if len({(t, r) for t, _, r in cells}) != 1:
                    return False
                t, _, r = cells[0]
                members[t, r].append((f, tuple(c for _, c, _ in cells), component.numbers))
                rows[id(component)] = t, r
        for (t, r), left_out in self.rows.stands_for.items():
            if members[t, r] != members[t, self.rows.second[t, r]]:
                return False
            for row in left_out:
                for f, columns, numbers in members[t, r]:
                    own = [self.index_by_id[id(self.rows.value(t, c, row))] for c in columns]
                    first = families[f][0]
                    if self._inputs(own, first.nodes) != self._inputs(first.inputs, first.nodes):
                        return False
                    families[f].append(_Component(inputs=own, numbers=numbers))
                    self.order.append(families[f][-1])
                    rows[id(families[f][-1])] = t, row
        self.order.sort(key=lambda component: rows[id(component)])
        return True

    def _inputs(self, indices: Sequence[int], nodes: Sequence[Node]) -> tuple[Any, ...]:
        """Return layouts, roles and symbols of inputs, which are equal for corresponding inputs."""
        values = [self.inputs[index] for index in indices]
        layouts = layouts_of(values, any_size=self.any_size and _may_be_elementwise(nodes))
        return tuple((each, *self.meanings[i]) for i, each in zip(indices, layouts, strict=True))

    def _components(self) -> list[_Component]:
        operations = []
        for node in self.gm.graph.nodes:
            if node.op not in ("call_function", "call_method") or node.target is SET_GRAD_ENABLED:
                continue
            if is_number(node) and all(n in self.numbers or n in self.index for n in node.all_input_nodes):
                self.numbers.add(node)
            else:
                operations.append(node)
        returned = set(self._returned())
        found = []
        for nodes in graph.components(operations, self._connecting):
            read = dict.fromkeys(index for node in nodes for index in self._read_by(node))
            found.append(_Component(nodes, list(read), [node for node in nodes if node in returned]))
        return found

    def _connecting(self, node: Node) -> Iterator[Node]:
        """Yield the values that connect an operation with others: its result and its own operands.

        A 0-d input may be one number for all its readers, such as ``lr``, unless an operation seems to write
        to it. If that guess is wrong, the graph is compiled whole.
        """
        yield node
        for operand in node.all_input_nodes:
            if operand not in self.index:
                is_own = operand not in self.numbers
            else:
                value = self.inputs[self.index[operand]]
                is_changed = any(map(_seems_to_change, operand.users))
                is_own = isinstance(value, Tensor) and (value.dim() > 0 or is_changed)
            if is_own:
                yield operand

    def _read_by(self, node: Node) -> list[int]:
        return [self.index[operand] for operand in node.all_input_nodes if operand in self.index]

    def _key(self, component: _Component) -> Hashable:
        """Return a key that is equal for components that do the same to tensors of equal layout and role.

        Common values that are inputs may differ: they are noted in the component as its numbers.
        """
        own = {index: i for i, index in enumerate(component.inputs)}
        numbers: dict[int, int] = {}
        local = {node: i for i, node in enumerate(component.nodes)}

        def named(node: Node) -> Hashable:
            if node in local:
                return "result", local[node]
            if (index := self.index.get(node, -1)) in own:
                return "own", own[index]
            computed, indices = self._number(node)
            return computed, *(numbers.setdefault(i, len(numbers)) for i in indices)

        nodes = component.nodes
        operations = tuple((node.target, _described((node.args, node.kwargs), named)) for node in nodes)
        of_numbers = (self.inputs[i] for i in numbers)
        kinds = [layout_of(each) if isinstance(each, Tensor) else (type(each),) for each in of_numbers]
        meanings = [self.meanings[i][1] for i in numbers]
        layouts = (self._inputs(component.inputs, nodes), tuple(zip(kinds, meanings, strict=True)))
        component.numbers = list(numbers)
        return operations, layouts, tuple(local[node] for node in component.results)

    def _number(self, node: Node) -> tuple[Hashable, tuple[int, ...]]:
        """Return a key that is equal for numbers that are computed alike, and the inputs that they are of."""
        if node not in self.numbers:
            return "input", (self.index[node],)
        if node not in self._computed:
            places: dict[int, int] = {}

            def named(operand: Node) -> Hashable:
                computed, indices = self._number(operand)
                return computed, *(places.setdefault(index, len(places)) for index in indices)

            key = node.target, _described((node.args, node.kwargs), named)
            self._computed[node] = self._known.setdefault(key, len(self._known)), tuple(places)
        return self._computed[node]

    def result(self, families: list[list[_Component]], infos: tuple[InputInfo, ...]) -> Families | Reason:
        """Build the module of one component of each family, and the repetition."""
        family_of = {id(c): (f, m) for f, family in enumerate(families) for m, c in enumerate(family)}
        first = [family[0] for family in families]
        read = [[(*component.inputs, *component.numbers) for component in family] for family in families]
        indices = sorted({index for each in read for index in each[0]} | self.common)
        copies: dict[int, tuple[int, ...]] = {index: (index,) for index in indices}
        owners: dict[int, int | None] = dict.fromkeys(indices)
        for f in range(len(families)):
            for members_inputs in zip(*read[f], strict=True):
                copies[members_inputs[0]], owners[members_inputs[0]] = members_inputs, f
        if unread := {*range(len(self.inputs))}.difference(*copies.values()):
            return Reason("no update reads this input", self.names[min(unread)])
        gradients = self._gradients()
        if (other := next((i for i, parameter in gradients.items() if parameter == -1), None)) is not None:
            return Reason("it belongs to a row that was not traced and is no gradient", self.names[other])
        members = self._members()
        if any(-1 in member for member in members):
            return Reason("an update does not read its parameter and its gradient")
        results = [node for component in first for node in component.results]
        number = {node: i for i, node in enumerate(results)}
        outputs: dict[Node, tuple[int, int]] = {}
        for component in self.order:
            f, m = family_of[id(component)]
            for node, of_first in zip(component.results, first[f].results, strict=True):
                outputs[node] = (number[of_first], m)
        repetition = Repetition(
            inputs=len(self.inputs),
            copies=tuple(copies.values()),
            owners=tuple(owners.values()),
            members=tuple(family_of[id(component)] for component in self.order),
            outputs=tuple(outputs[node] for node in self._returned()),
            shapes=tuple(map(self._shapes, families)),
        )
        kept = {node for component in first for node in component.nodes}
        for node in reversed(self.gm.graph.nodes):
            if node in self.numbers and not kept.isdisjoint(node.users):
                kept.add(node)
        module = self._module(set(indices), kept, results)
        own = {index for component in first for index in component.numbers}
        values = {node: node.meta["example_value"] for node in self.numbers}
        symbolic = {node: value for node, value in values.items() if isinstance(value, torch.SymFloat)}
        left_in = torch_compat.symbols_of(symbolic[node] for node in symbolic.keys() & kept)
        arguments = [self.inputs[index] for index in indices if index >= self.bound]
        bound = indices[: len(indices) - len(arguments)]
        return Families(
            module,
            tuple(local_tensor(each) if isinstance(each, Tensor) else each for each in arguments),
            self.inputs,
            self.bound,
            gradients,
            members,
            infos,
            self.pieces,
            (
                *(("attribute", self.names[i]) for i in bound),
                *(("argument", i) for i in range(len(arguments))),
            ),
            repetition,
            [value for node, value in symbolic.items() if not own.isdisjoint(self._number(node)[1])],
            torch_compat.symbols_of(symbolic.values()) - left_in if own else frozenset(),
        )

    def _shapes(self, family: list[_Component]) -> tuple[torch.Size, ...]:
        """Return the shape of each member of a family if they differ; else nothing."""
        of = [common_shape([self.inputs[index] for index in component.inputs]) for component in family]
        shapes = tuple(shape for shape in of if shape is not None)
        return shapes if self.any_size and len({*shapes}) > 1 else ()

    def _members(self) -> tuple[tuple[int, int], ...]:
        """Return the indices of the gradient and the parameter of each component, -1 for no input."""
        if not self.rows.come_and_go:
            return ()
        first = (self.rows.cells[id(self.inputs[component.inputs[0]])] for component in self.order)
        found = (self.rows.value(t, 0, r) for t, _, r in first)
        return tuple((self.index_by_id.get(id(p.grad), -1), self.index_by_id.get(id(p), -1)) for p in found)

    def _gradients(self) -> dict[int, int]:
        """Map the gradients of rows that were not traced to the indices of their parameters."""
        of = {id(value.grad): index for index, value in enumerate(self.inputs[: self.bound])}
        passed = enumerate(self.inputs[self.bound :], self.bound)
        return {i: of.get(id(value), -1) for i, value in passed if self.rows.is_left_out(value)}

    def _module(self, indices: set[int], kept: set[Node], results: list[Node]) -> GraphModule:
        """Copy some of the operations, and the inputs that they read, into a module."""
        body = Graph()
        copied: dict[Node, Node] = {}
        for node in self.gm.graph.nodes:
            if self.index.get(node) in indices or node in kept or node.target is SET_GRAD_ENABLED:
                copied[node] = body.node_copy(node, copied.__getitem__)
        body.output(map_arg(tuple(results), copied.__getitem__))
        tensors = {self.names[i]: local_tensor(self.inputs[i]) for i in indices if i < self.bound}
        # Without meta, which describes the inputs of the whole graph.
        return GraphModule(tensors, body)


def _may_be_elementwise(nodes: Sequence[Node]) -> bool:
    """Return whether all values of a component, but scalars, have one shape, and none is returned."""
    values = [node.meta.get("example_value") for node in nodes]
    shapes = [value.shape for value in values if isinstance(value, Tensor) and value.dim()]
    if any(type(size) is not int for shape in shapes for size in shape):
        return False
    is_returned = any(user.op == "output" for node in nodes for user in node.users)
    return len({*shapes}) == 1 and not is_returned


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)


def _seems_to_change(node: Node) -> bool:
    """Return whether an operation has the name of an in-place operation: ``add_``, or Python's ``iadd``."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") != "_operator":
        return name.endswith("_")
    return name.startswith("i") and all(hasattr(Tensor, f"__{each}__") for each in (name, name[1:]))


def _described(value: Any, named: Callable[[Node], Hashable]) -> Hashable:
    if isinstance(value, Node):
        return named(value)
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_described(each, named) for each in value))
    if isinstance(value, dict):
        return tuple((key, _described(each, named)) for key, each in value.items())
    if isinstance(value, slice):
        return ("slice", *(_described(each, named) for each in (value.start, value.stop, value.step)))
    return type(value).__name__, repr(value)
