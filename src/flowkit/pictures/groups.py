"""Collapses large graphs, as `groups.js` of the page does. Pure.

Nodes of the same role, parents and children become one group, and so do the links of a chain.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_SHOWN: Final = 1_000
MAX_DEPTH: Final = 300
_ROUNDS: Final = 20

Edge = tuple[int, int, str]
"""The positions of two nodes, and the kind of the edge."""
_Neighbors = dict[int, frozenset[tuple[int, str]]]


def layers_of(count: int, edges: Sequence[Edge]) -> list[int]:
    """Return the layer of each node, from 0: the length of the longest path to it."""
    children: list[list[int]] = [[] for _ in range(count)]
    left = [0] * count
    for source, target, _ in edges:
        children[source].append(target)
        left[target] += 1
    layers = [0] * count
    ready = [index for index in range(count) if not left[index]]
    for index in ready:
        for child in children[index]:
            layers[child] = max(layers[child], layers[index] + 1)
            left[child] -= 1
            if not left[child]:
                ready.append(child)
    return layers


def is_large(count: int, edges: Sequence[Edge]) -> bool:
    """Return whether a graph is collapsed."""
    return count > MAX_SHOWN or max(layers_of(count, edges), default=0) >= MAX_DEPTH


def collapse(roles: Sequence[str], edges: Sequence[Edge]) -> tuple[list[list[int]], list[Edge]]:
    """Return groups of the positions of nodes, given their roles, and the edges between the groups."""
    group_of = [*range(len(roles))]
    for _ in range(_ROUNDS):
        before = len({*group_of})
        group_of = _merge_alike(roles, edges, group_of)
        group_of = _merge_chains(roles, edges, group_of)
        if len({*group_of}) == before:
            break
    return _gather(edges, group_of)


def _gather(edges: Sequence[Edge], group_of: Sequence[int]) -> tuple[list[list[int]], list[Edge]]:
    members: dict[int, list[int]] = {}
    for index, group in enumerate(group_of):
        members.setdefault(group, []).append(index)
    places = {group: place for place, group in enumerate(members)}
    ends = ((places[group_of[source]], places[group_of[target]], kind) for source, target, kind in edges)
    return [*members.values()], [*dict.fromkeys(edge for edge in ends if edge[0] != edge[1])]


def _neighbors(edges: Sequence[Edge], group_of: Sequence[int]) -> tuple[_Neighbors, _Neighbors]:
    parents: dict[int, set[tuple[int, str]]] = {}
    children: dict[int, set[tuple[int, str]]] = {}
    for source, target, kind in edges:
        above, below = group_of[source], group_of[target]
        if above != below:
            children.setdefault(above, set()).add((below, kind))
            parents.setdefault(below, set()).add((above, kind))
    return _frozen(parents), _frozen(children)


def _frozen(sets: dict[int, set[tuple[int, str]]]) -> _Neighbors:
    return {group: frozenset(each) for group, each in sets.items()}


def _merge_alike(roles: Sequence[str], edges: Sequence[Edge], group_of: Sequence[int]) -> list[int]:
    parents, children = _neighbors(edges, group_of)
    first: dict[object, int] = {}
    merged: dict[int, int] = {}
    for group in dict.fromkeys(group_of):
        key = (roles[group], parents.get(group), children.get(group))
        merged[group] = first.setdefault(key, group)
    return [merged[group] for group in group_of]


def _merge_chains(roles: Sequence[str], edges: Sequence[Edge], group_of: Sequence[int]) -> list[int]:
    parents, children = _neighbors(edges, group_of)
    sizes = Counter(group_of)
    above: dict[int, int] = {}
    for group in sizes:
        parent = _only(parents.get(group))
        if parent is None or _only(children.get(parent)) != group:
            continue
        if sizes[parent] == sizes[group] and roles[parent] == roles[group]:
            above[group] = parent
    heads: dict[int, int] = {}
    return [_head(group, above, heads) for group in group_of]


def _only(neighbors: frozenset[tuple[int, str]] | None) -> int | None:
    """Return the only neighboring group; None if there is another number of them."""
    groups = {group for group, _ in neighbors or ()}
    return groups.pop() if len(groups) == 1 else None


def _head(group: int, above: dict[int, int], known: dict[int, int]) -> int:
    """Return the first link of the chain of a group, and note it for all links on the way."""
    passed = []
    while group in above and group not in known:
        passed.append(group)
        group = above[group]
    head = known.get(group, group)
    known.update(dict.fromkeys(passed, head))
    return head
