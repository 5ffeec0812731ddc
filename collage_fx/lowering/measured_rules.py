"""Sums and counts that a kernel over a table computes instead of stores: Note [Sums of a launch]."""

from __future__ import annotations

import itertools
from typing import Any

import sympy

from collage_fx.graph import Sums, sums_of_update, update_size, update_sizes, update_sums, update_value
from collage_fx.lowering.rules import Line, Rule
from collage_fx.numerics import SIZES, SUMS
from collage_fx.numerics import update_sums as measures
from collage_fx.runtime import Summed
from collage_fx.torch_compat import Sampling, SummedValues, TableSums


def stores_of_measures(rule: Rule) -> list[tuple[int, Line]]:
    """Return the stores of sums and counts: line of the row, and the line that is stored there."""
    found = []
    for into, value in rule.stores:
        if rule.lines[value].target in (update_sums, update_sizes):
            assert into is not None, "rows are inputs of the step"
            found.append((into, rule.lines[value]))
    return found


def _sums_of(line: Line) -> Sums:
    """Return the description of the sums of a line."""
    return sums_of_update(sum(each is not None for each in line.args))


def values_of(line: Line) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return operators and arguments of the values that are stored for each element of a sum or count."""
    if line.target is update_sizes:
        return [(update_size, line.args)]
    return [(update_value, (*line.args, i)) for i in range(_sums_of(line).values)]


def table_sums(rule: Rule, inputs: int) -> TableSums:
    """Return the sums of a kernel over a table, whose last inputs are the values of elements."""
    lines = [line for _, line in stores_of_measures(rule)]
    arguments = iter(range(inputs - sum(len(values_of(line)) for line in lines), inputs))
    tensors, sizes = list[SummedValues](), list[int]()
    for line in lines:
        of_line = tuple(itertools.islice(arguments, len(values_of(line))))
        if line.target is update_sizes:
            sizes += of_line
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
    """Return the destination row and column of each partial sum and counter."""
    lines = [i for i, line in enumerate(rule.lines) if line.target is None]
    found = []
    parts = counters = 0
    for into, line in stores_of_measures(rule):
        argument = lines.index(into) + rule.flat + rule.is_placed
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
