"""Mutants of a file: which faults there are, in which lines; drawn, at most one in a function.

The faults are operators of the package ``cosmic_ray``, and one of our own, :class:`DeleteStatement`.
"""

from __future__ import annotations

import ast
import bisect
import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parso.python.tree
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator

Position = tuple[int, int]


class DeleteStatement(Operator):  # type: ignore[misc]  # the package has no annotations
    """A call whose result is not used, or an assignment to an attribute or element, is left out."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Position, Position]]:
        is_call = node.type in ("atom_expr", "power") and _is_trailer(node.children[-1], "(")
        is_assignment = node.type == "expr_stmt" and node.children[0].type in ("atom_expr", "power")
        is_statement = node.parent is not None and node.parent.type == "simple_stmt"
        if is_statement and (is_assignment or is_call):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return parso.python.tree.Keyword("pass", node.start_pos, node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        return ()


def _is_trailer(node: Any, opening: str) -> bool:
    return node.type == "trailer" and node.children[0].value == opening


#: Faults: operators of ``cosmic_ray`` whose mutants another reader would call wrong. Others of its 170 make
#: the same mutants (``is`` -> ``==``), or mutants that cannot be imported.
OPERATORS: dict[str, Operator] = {
    "delete": DeleteStatement(),
    **{
        name: get_operator(f"core/{name}")()
        for name in (
            "AddNot",
            "NumberReplacer",
            "ReplaceAndWithOr",
            "ReplaceBinaryOperator_Add_Sub",
            "ReplaceBinaryOperator_BitAnd_BitOr",
            "ReplaceBinaryOperator_BitOr_BitAnd",
            "ReplaceBinaryOperator_Div_Mul",
            "ReplaceBinaryOperator_FloorDiv_Mul",
            "ReplaceBinaryOperator_LShift_RShift",
            "ReplaceBinaryOperator_Mod_Add",
            "ReplaceBinaryOperator_Mul_Div",
            "ReplaceBinaryOperator_RShift_LShift",
            "ReplaceBinaryOperator_Sub_Add",
            "ReplaceBreakWithContinue",
            "ReplaceComparisonOperator_Eq_NotEq",
            "ReplaceComparisonOperator_Gt_GtE",
            "ReplaceComparisonOperator_GtE_Gt",
            "ReplaceComparisonOperator_Is_IsNot",
            "ReplaceComparisonOperator_IsNot_Is",
            "ReplaceComparisonOperator_Lt_LtE",
            "ReplaceComparisonOperator_LtE_Lt",
            "ReplaceComparisonOperator_NotEq_Eq",
            "ReplaceContinueWithBreak",
            "ReplaceFalseWithTrue",
            "ReplaceOrWithAnd",
            "ReplaceTrueWithFalse",
            "ReplaceUnaryOperator_Delete_Not",
            "ReplaceUnaryOperator_USub_UAdd",
            "ZeroIterationForLoop",
        )
    },
}


@dataclass(frozen=True)
class Mutant:
    """One fault in one file.

    Attributes:
        path: the file, relative to the repository.
        line: line of the fault, from 1.
        function: name of the function around it; empty outside of functions.
        operator: key in :data:`OPERATORS`.
        occurrence: number of the place among those of the operator in the file.
    """

    path: Path
    line: int
    function: str
    operator: str
    occurrence: int

    def text(self, source: str) -> str:
        """Return the source of the file with the fault."""
        mutated = mutate_code(source, OPERATORS[self.operator], self.occurrence)
        assert mutated is not None, self
        return str(mutated)


def mutants_of(path: Path, source: str, lines: Collection[int]) -> list[Mutant]:
    """Return the mutants of a file in some of its lines, but for those that no test can or need tell.

    Annotations, docstrings, decorators, assertions and what is raised are left alone, as are ``strict`` of
    ``zip``, an assertion too, the number of digits of a digest: any will do, and the star in front of
    parameters that are keywords alone: a slash there, which is drawn for it, lets them be keywords, too.
    """
    tree = ast.parse(source)
    spared, functions = _spared(tree), _functions(tree)
    nodes = [*ast_nodes(get_ast(source))]
    found = []
    for name, operator in OPERATORS.items():
        places = (each for node in nodes for each in operator.mutation_positions(node))
        for occurrence, (begin, _) in enumerate(places):
            if begin[0] in lines and not _is_within(begin, spared):
                found.append(Mutant(path, begin[0], _around(begin[0], functions), name, occurrence))
    return found


def lines_beside(line: int, source: str) -> list[int]:
    """Return the lines of the statement that a line is in, without those of statements in it."""
    around = [
        each
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.stmt) and each.lineno <= line <= (each.end_lineno or each.lineno)
    ]
    inner = max(around, key=lambda each: each.lineno)
    within = [each.lineno for each in ast.walk(inner) if isinstance(each, ast.stmt) and each is not inner]
    return [*range(inner.lineno, min(within, default=(inner.end_lineno or inner.lineno) + 1))]


def is_another_program(mutant: Mutant, source: str) -> bool:
    """Return whether a mutant can be compiled, and differs from the file in more than its text."""
    try:
        mutated = ast.parse(mutant.text(source))
    except SyntaxError:
        return False
    return ast.dump(mutated) != ast.dump(ast.parse(source))


def _spared(tree: ast.Module) -> list[tuple[Position, Position]]:
    """Return the spans of a file that are not mutated, by their beginnings."""
    spans: list[ast.AST | None] = []
    stars: list[tuple[Position, Position]] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            spans += [node.returns, *node.decorator_list]
            if node.args.kwonlyargs:
                first = node.args.kwonlyargs[0]
                before: list[ast.arg | ast.expr] = [*node.args.args, *node.args.defaults]
                ends = [(each.end_lineno or 0, each.end_col_offset or 0) for each in before]
                stars.append((max(ends, default=(node.lineno, 0)), (first.lineno, first.col_offset)))
        elif isinstance(node, ast.ClassDef):
            spans += node.decorator_list
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            spans.append(node.annotation)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "zip":
            spans += [each.value for each in node.keywords]  # strict alone
        elif isinstance(node, ast.Subscript) and "hexdigest" in ast.unparse(node.value):
            spans.append(node.slice)
        elif isinstance(node, (ast.Raise, ast.Assert)) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            spans.append(node)
    return sorted(
        [
            *stars,
            *(
                ((each.lineno, each.col_offset), (each.end_lineno or 0, each.end_col_offset or 0))
                for each in spans
                if isinstance(each, (ast.expr, ast.stmt))
            ),
        ]
    )


def _is_within(place: Position, spans: list[tuple[Position, Position]]) -> bool:
    return any(begin <= place < end for begin, end in spans)


def _functions(tree: ast.Module) -> list[tuple[int, int, str]]:
    """Return ``(first line, last line, name)`` of each function; inner ones after those around them."""
    return sorted(
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def _around(line: int, functions: list[tuple[int, int, str]]) -> str:
    """Return the function that a line is in, as ``name:first line``; empty outside of functions."""
    last = bisect.bisect_right(functions, (line, 1 << 30, ""))
    around = [(first, name) for first, end, name in functions[:last] if end >= line]
    return f"{around[-1][1]}:{around[-1][0]}" if around else ""


def drawn(mutants: Collection[Mutant], count: int, seed: int, sources: Mapping[Path, str]) -> list[Mutant]:
    """Draw mutants: one of each function, then, if functions are few, another one of each.

    Args:
        mutants: the mutants to draw from.
        count: number of mutants to draw, if there are as many.
        seed: seed of the draw.
        sources: text of each file.
    """
    draw = random.Random(seed)
    by_function: defaultdict[tuple[Path, str], list[Mutant]] = defaultdict(list)
    for each in mutants:
        by_function[each.path, each.function].append(each)
    functions = [by_function[key] for key in sorted(by_function)]
    draw.shuffle(functions)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(functions):
        for remaining in functions[:]:
            if remaining and len(chosen) < count:
                # A line first, then a fault in it: long expressions have more faults than statements.
                line = draw.choice(sorted({each.line for each in remaining}))
                found = draw.choice([each for each in remaining if each.line == line])
                remaining.remove(found)
                if is_another_program(found, sources[found.path]):
                    chosen.append(found)
    return chosen
