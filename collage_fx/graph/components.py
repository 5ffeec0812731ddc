"""Connected components: the cut of a step into updates that have nothing in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def components(items: Iterable[Item], values_of: Callable[[Item], Iterable[Hashable]]) -> list[list[Item]]:
    """Split items into connected components: two items are connected if they have a value in common.

    The components are in the order of their first items, and each one's items in the order given. An item
    without values is a component by itself. ``values_of`` gives an operation's operands and results, without
    values that updates share without being one update, such as a learning rate.
    """
    items = list(items)
    above = [*range(len(items))]  # union-find: a chain of items to the one that stands for a component

    def root(number: int) -> int:
        while above[number] != number:
            above[number] = number = above[above[number]]
        return number

    first: dict[Hashable, int] = {}
    for number, item in enumerate(items):
        for value in values_of(item):
            above[root(number)] = root(first.setdefault(value, number))
    found: dict[int, list[Item]] = defaultdict(list)
    for number, item in enumerate(items):
        found[root(number)].append(item)
    return list(found.values())
