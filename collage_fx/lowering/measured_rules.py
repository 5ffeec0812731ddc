"""Sums and counts that a kernel over a table computes instead of stores: Note [Sums of a launch]."""

from __future__ import annotations

import itertools
from typing import Any

import sympy
import torch

from collage_fx.codegen import MEAN, TOTAL
from collage_fx.graph import (
    Sums,
    sums_of_update,
    update_size,
    update_sizes,
    update_sums,
    update_value,
)
from collage_fx.lowering.rules import TOTALS, Line, Rule
from collage_fx.numerics import SIZES, SUMS
from collage_fx.numerics import update_sums as measures
from collage_fx.runtime import Summed
from collage_fx.torch_compat import Sampling, SummedValues, TableSums

aten = torch.ops.aten


def stores_of_sums(rule: Rule) -> list[tuple[int | None, Line]]:
    """Return the stores of sums and counts of a flat rule.

    Each is the line that it is stored into, None for a total, and the line of its value.
    """
    stored = [(into, rule.lines[value]) for into, value in rule.stores]
    return [
        (into, line)
        for into, line in stored
        if line.target in (update_sums, update_sizes) or (into is None and line.target in TOTALS)
    ]


def _sums_of(line: Line) -> Sums:
    """Return the description of the sums of a line."""
    return sums_of_update(sum(each is not None for each in line.args))


def values_of(line: Line) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return operators and arguments of the values stored for each element of a sum or count."""
    if line.target is update_sizes:
        return [(update_size, line.args)]
    if line.target in TOTALS:
        return [(aten.clone.default, line.args)]
    return [(update_value, (*line.args, i)) for i in range(_sums_of(line).values)]


def _argument(rule: Rule, line: int) -> int:
    """Return the number of the argument that is an input line of a rule."""
    lines = [i for i, each in enumerate(rule.lines) if each.target is None]
    return rule.flat + rule.is_placed + lines.index(line)


def table_sums(rule: Rule, inputs: int) -> TableSums | None:
    """Return the sums of a kernel over a table, whose last inputs are the values of elements."""
    lines = [line for _, line in stores_of_sums(rule)]
    if not lines:
        return None
    arguments = iter(range(inputs - sum(len(values_of(line)) for line in lines), inputs))
    tensors, sizes = list[SummedValues](), list[int]()
    for line in lines:
        of_line = tuple(itertools.islice(arguments, len(values_of(line))))
        if line.target is update_sizes:
            sizes += of_line
        elif line.target in TOTALS:
            tensors.append(SummedValues(of_line, ((0, None),), ()))
        else:
            sums = _sums_of(line)
            tensors.append(SummedValues(of_line, tuple(sums.products.values()), tuple(sums.counts.values())))
    number, place, elements = sympy.symbols("number place elements")
    sampling = Sampling(
        number=str(measures.nearest_sampled(place, elements, _quotient)),
        place=str(measures.sampled(number, elements, _quotient)),
        together=measures.TOGETHER,
        counters=len(SIZES),
    )
    return TableSums(tensors, sizes, sampling, rule.width)


def _quotient(dividend: Any, divisor: Any) -> sympy.Symbol:
    """Return the text of a quotient, rounded down, for use in expressions."""
    return sympy.Symbol(f"(({dividend}) // ({divisor}))")


def summed(rule: Rule) -> tuple[Summed, ...]:
    """Return the destination, a row and column or a number, of each partial sum and counter."""
    lines = [i for i, line in enumerate(rule.lines) if line.target is None]
    first = rule.flat + rule.is_placed
    results = iter(sorted(rule.totals))
    found = []
    parts = counters = 0
    for into, line in stores_of_sums(rule):
        if into is None:
            total = MEAN if line.target is aten.mean.default else TOTAL
            found.append(Summed(first + len(lines) + next(results), 0, parts, total=total))
            parts += 1
            continue
        argument = _argument(rule, into)
        if line.target is update_sizes:
            found.append(Summed(argument, 0, counters, len(SIZES)))
            counters += len(SIZES)
            continue
        sums = _sums_of(line)
        names = [*sums.products, *sums.counts]
        for place, name in enumerate(SUMS):
            same = name if name in names else measures.WITHOUT_LO[name]
            if same is not None:
                found.append(Summed(argument, place, parts + names.index(same)))
        parts += len(names)
    return tuple(found)
