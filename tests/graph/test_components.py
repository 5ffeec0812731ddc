"""Connected components, against a search from each item to those that it has a value in common with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from collage_fx.graph import components


def by_search(items: list[tuple[int, ...]]) -> list[list[int]]:
    """The numbers of the items of each component, found one neighbour after another."""
    left = dict(enumerate(items))
    found = []
    while left:
        waiting, component = [next(iter(left))], []
        while waiting:
            number = waiting.pop()
            if number in left:
                values = left.pop(number)
                component.append(number)
                waiting += [other for other, theirs in left.items() if set(values) & set(theirs)]
        found.append(sorted(component))
    return found


@given(st.lists(st.lists(st.integers(0, 12), max_size=3).map(tuple), max_size=12))
def test_components_are_those_of_a_search(items: list[tuple[int, ...]]) -> None:
    assert components(range(len(items)), items.__getitem__) == by_search(items)


def test_components_and_their_items_keep_their_order() -> None:
    values = {"a": "x", "b": "y", "c": "z", "d": "yx", "e": ""}
    assert components("ebcad", values.__getitem__) == [["e"], ["b", "a", "d"], ["c"]]
