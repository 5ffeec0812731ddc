"""Connected components: the cut of a step into updates that have nothing in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)
Item = TypeVar("Item")


@dataclass
class Groups(Generic[Member]):
    """Disjoint sets, of nodes for example (union-find)."""

    parent: dict[Member, Member] = field(default_factory=dict)

    def find(self, member: Member) -> Member:
        """Return the representative of a member's set, which is a set of its own if it is new."""
        root = member
        while (up := self.parent.setdefault(root, root)) != root:
            root = up
        while member != root:
            self.parent[member], member = root, self.parent[member]
        return root

    def join(self, a: Member, b: Member) -> None:
        """Join the sets of two members."""
        self.parent[self.find(a)] = self.find(b)


def components(items: Iterable[Item], values_of: Callable[[Item], Iterable[Hashable]]) -> list[list[Item]]:
    """Split items into connected components: two items are connected if they have a value in common.

    Args:
        items: operations, for example.
        values_of: gives the values that connect an item with others, such as its operands and results. It
            leaves out values that updates share without being one update, such as a learning rate.

    Returns:
        the components in the order of their first items, and each one's items in the order given. An item
        without values is a component by itself.
    """
    items = list(items)
    groups = Groups[int]()
    first: dict[Hashable, int] = {}
    for number, item in enumerate(items):
        for value in values_of(item):
            groups.join(number, first.setdefault(value, number))
    found: dict[int, list[Item]] = defaultdict(list)
    for number, item in enumerate(items):
        found[groups.find(number)].append(item)
    return list(found.values())
