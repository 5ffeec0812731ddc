"""C++ statements that compute some values of a graph: before all loops, or in the body of a loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from collage_fx.codegen.elements import Elements, Kind, function_at, is_rounding, place
from collage_fx.codegen.functions import expression
from collage_fx.codegen.spellings import CPP, bare, in_register
from collage_fx.graph import made_of
from collage_fx.numerics import number_of_code

aten = torch.ops.aten

#: Operators that read a small integer alike with more bits: a store, and that of a code, which has no others.
TAKE_ANY_BITS = {aten.copy_.default, number_of_code}

#: Results of a function of the place in a chunk, less the first element's: the function is linear.
STEPS = """struct Steps {{
  int32_t of[{length}];
  Steps() {{
    for (int j = 0; j < {length}; ++j) of[j] = {function}({arguments});
  }}
}};
alignas(64) const Steps steps;
"""


class Statements:
    """C++ statements that compute some values.

    Args:
        known: expressions of values that need no statement.
        finite: whether numbers are known to be finite: Note [Early and late].
        before_stores: whether stores follow: then what they overwrite is loaded first.

    Attributes:
        lines: the statements.
    """

    def __init__(
        self,
        elements: Elements,
        wanted: Sequence[Node],
        known: Mapping[Node, str],
        *,
        finite: bool = False,
        before_stores: bool = False,
    ) -> None:
        self._elements, self._finite = elements, finite
        self._overwritten = elements.written if before_stores else set()
        self.texts = dict(known)
        self.lines: list[str] = []
        needed = made_of(*wanted, up_to=known).difference(known)
        order = [node for node in elements.nodes if node in needed]
        uses = Counter(wanted)
        for node in order:
            uses.update(node.all_input_nodes)
        for node in order:
            self._write(node, is_shared=uses[node] > 1)

    def _write(self, node: Node, *, is_shared: bool) -> None:
        if not isinstance(node.meta["val"], torch.Tensor):
            self.texts[node] = node.name  # a length, of which tensors of constants are made
            return
        kind, dtype = self._elements.kinds[node], node.meta["val"].dtype
        text = self._expression(node)
        is_worth_a_name = is_shared and bool(node.all_input_nodes) and not text.isidentifier()
        if is_worth_a_name or kind in (Kind.OF_BLOCK, Kind.OF_ROW) or node in self._overwritten:
            line = f"const {in_register(dtype)} {self._elements.name_of(node)} = {bare(text)};"
            self.lines.append(line)
            text = self._elements.name_of(node)
        self.texts[node] = text

    def _expression(self, node: Node) -> str:
        elements = self._elements
        kind, dtype = elements.kinds[node], node.meta["val"].dtype
        if node.op == "placeholder":
            places = {
                Kind.NUMBER: "0",
                Kind.OF_ROW: "row",
                Kind.OF_COLUMN: "column + j",
                Kind.OF_BLOCK: f"at / {elements.width} + block",
                Kind.OF_ELEMENT: "at + j",
            }
            return f"{node.name}[{places[kind]}]"
        if node.target is place:
            return "int32_t(at)" if elements.width else "0"
        finite = "true" if self._finite and kind is Kind.OF_ELEMENT else "false"
        if (function := function_at(node)) is not None:
            elements.functions[function.name] = function.definition
            name = f"{function.name}<{finite}>" if function.tests else function.name
            operands = ", ".join(bare(self.texts[arg]) for arg in node.args if isinstance(arg, Node))
            is_cut = function.is_cut or all(user.target in TAKE_ANY_BITS for user in node.users)
            cut = "" if is_cut else CPP.types[dtype]
            text = f"{cut}({name}({operands}))" if cut else f"{name}({operands})"
            if elements.width and any(each.target is place for each in node.all_input_nodes):
                zeros = ", ".join(["j", *("0" for _ in node.args[1:])])
                steps = STEPS.format(function=name, arguments=zeros, length=elements.chunk)
                elements.functions["steps"] = steps
                return f"(steps.of[j] + {text})"
            return text
        if is_rounding(node):
            (operand,) = node.all_input_nodes
            name = f"float_to_bf16<{finite}>" if dtype is torch.bfloat16 else "float_to_f16"
            return f"{name}({bare(self.texts[operand])})"
        return expression(node, self.texts, CPP, is_number=kind is Kind.NUMBER)
