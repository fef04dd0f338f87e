"""The scopes of a pause: which nodes they cover, and what depends on a node. Pure."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from flowkit.actions.inputs import SCOPE_FORMS
from flowkit.actions.records import TASK_SCOPE
from flowkit.errors import ActionRejected, RejectionCause
from flowkit.text import names, printed, suggestion

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from flowkit.models import Node
    from flowkit.models.actions import PausedScope

_KINDS = ("node", "below", "role")


def nodes_below(nodes: Sequence[Node], index: int) -> set[int]:
    """Return the nodes that depend on a node, directly or through others.

    A node depends on its parents, on the nodes from which it pulls, on the nodes that its function names, and on the
    nodes that route to it.
    """
    return _find_below(children_of(nodes), index)


def _find_below(children: Sequence[Collection[int]], index: int) -> set[int]:
    found, waiting = {index}, [index]
    while waiting:
        new = [child for child in children[waiting.pop()] if child not in found]
        found.update(new)
        waiting += new
    return found - {index}


def children_of(nodes: Sequence[Node]) -> list[dict[int, bool]]:
    """Return the children of each node, with whether they use what the node has stored, or start by its route."""
    index_of = {node.node_id: node.index for node in nodes}
    children: list[dict[int, bool]] = [{} for _ in nodes]
    for node in nodes:
        for parent in node.depends_on:
            children[index_of[parent]].setdefault(node.index, False)
        for source in (*node.pulls_from, *list_function_sources(node)):
            if source in index_of:
                children[index_of[source]][node.index] = True
        children[node.index] |= {index_of[target]: True for target in (*node.on_success, *node.on_failure)}
    return children


def list_function_sources(node: Node) -> Iterator[str]:
    """Yield the nodes that the arguments of a function name."""
    for name in ("from_nodes", "from_node", "node_id"):
        value = (node.io.fn_args or {}).get(name) if node.is_function else None
        yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str))


class Pauses:
    """The paused scopes of a task, and the nodes that start no attempt because of them."""

    def __init__(self, nodes: Sequence[Node], scopes: list[PausedScope]) -> None:
        """Continue with these scopes. The list changes in place, because it is part of the state of the task."""
        self._nodes = nodes
        """All nodes of the task. The list changes in place when an action changes or adds nodes."""
        self.scopes = scopes
        self._nodes_of: dict[str, Collection[int]] = {}
        """The nodes of each scope that was used."""
        self.paused = self._find_paused(each.scope for each in scopes)
        """The indexes of the nodes that must not start an attempt."""

    @cached_property
    def children(self) -> list[dict[int, bool]]:
        """The children of each node, with whether they use its results. Only a change of the graph changes them."""
        return children_of(self._nodes)

    def change_graph(self) -> None:
        """Find the nodes of all scopes again, because the graph has changed."""
        self.__dict__.pop("children", None)
        self._nodes_of.clear()
        self.paused = self._find_paused(each.scope for each in self.scopes)

    def _find_paused(self, scopes: Iterable[str]) -> set[int]:
        return {index for scope in scopes for index in self.nodes_of(scope)}

    def nodes_of(self, scope: str) -> Collection[int]:
        """Return the indexes of the nodes in a scope. Raise ActionRejected if the task has no such scope."""
        if scope not in self._nodes_of:
            self._nodes_of[scope] = self._find_nodes(scope)
        return self._nodes_of[scope]

    def _find_nodes(self, scope: str) -> Collection[int]:
        if scope == TASK_SCOPE:
            return range(len(self._nodes))
        kind, colon, name = scope.partition(":")
        if not colon or kind not in _KINDS:
            raise ActionRejected(
                f"scopes has {printed(scope)}; a scope is {SCOPE_FORMS}", RejectionCause.INVALID
            )
        if kind == "role":
            return self._nodes_of_role(scope, name)
        index = next((node.index for node in self._nodes if node.node_id == name), None)
        if index is None:
            hint = suggestion(name, (node.node_id for node in self._nodes))
            raise ActionRejected(
                f"scopes has {printed(scope)}, but the task has no node {printed(name)}{hint}",
                RejectionCause.UNKNOWN,
            )
        if kind == "node":
            return (index,)
        below = _find_below(self.children, index)
        if not below:
            raise ActionRejected(
                f"scopes has {printed(scope)}, but no node depends on {printed(name)}", RejectionCause.UNKNOWN
            )
        return below

    def _nodes_of_role(self, scope: str, role: str) -> Collection[int]:
        indexes = frozenset(node.index for node in self._nodes if node.type == role)
        if not indexes:
            roles = sorted({node.type for node in self._nodes})
            raise ActionRejected(
                f"scopes has {printed(scope)}, but the roles of the task are {names(roles)}",
                RejectionCause.UNKNOWN,
            )
        return indexes

    @property
    def whole_task(self) -> bool:
        """Whether the whole task is paused, so that its deadline does not count."""
        return any(each.scope == TASK_SCOPE for each in self.scopes)

    def scope_of(self, index: int) -> PausedScope | None:
        """Return the earliest pause whose scope contains a node."""
        return next((each for each in self.scopes if index in self.nodes_of(each.scope)), None)

    def newly_paused(self, more: Iterable[str]) -> set[int]:
        """Return the nodes that these scopes would pause in addition."""
        return self._find_paused(more) - self.paused

    def paused_only_by(self, scopes: Collection[str]) -> set[int]:
        """Return the nodes that are paused by these scopes and by no others."""
        rest = self._find_paused(each.scope for each in self.scopes if each.scope not in scopes)
        return self.paused - rest

    def change(self, more: Iterable[PausedScope], fewer: Collection[str]) -> None:
        """Pause the scopes `more`, and end the pause of the scopes `fewer`."""
        self.scopes[:] = [*(each for each in self.scopes if each.scope not in fewer), *more]
        self.paused = self._find_paused(each.scope for each in self.scopes)

    def drained(self, scope: str, in_flight: Collection[int]) -> bool:
        """Return whether no attempt of a scope is in flight. `in_flight` has the indexes of nodes with an attempt."""
        covered = self.nodes_of(scope)
        return not any(index in covered for index in in_flight)
