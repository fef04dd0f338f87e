"""Decide which targets the routers of a graph start, and whether the failure of a router is handled. Pure.

A router names targets in `routing`. A target starts after all its routers have ended, if at least one of them fired it:
by finishing (`on_success`) or by failing permanently (`on_failure`). A failure is handled if one of the targets that it
fires finishes, or if the failure of such a target is itself handled.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit.limits import FAILED_NODES
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import Node, NodeState


@dataclass(slots=True)
class RouteGate:
    """How far the routers of a target have ended."""

    open_routers: int
    fired: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the target may start, as far as its routers decide."""
        return self.open_routers == 0 and self.fired

    @property
    def is_closed(self) -> bool:
        """Whether no router can fire the target any more."""
        return self.open_routers == 0 and not self.fired


class RouteTable:
    """The routes of one graph, updated with each node that ends."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        index_of = {node.node_id: node.index for node in nodes}
        self._targets = {
            node.index: [index_of[target] for target in dict.fromkeys((*node.on_success, *node.on_failure))]
            for node in nodes
            if node.on_success or node.on_failure
        }
        self._routers: dict[int, list[int]] = {node.index: [] for node in nodes if node.conditional}
        for router, named in self._targets.items():
            for target in named:
                self._routers[target].append(router)
        self._index_of = index_of
        self._remediated: dict[int, list[int]] = {}
        """For each target of a list `on_failure`, the routers that fire it when they fail."""
        for router in self._targets:
            for target_id in nodes[router].on_failure:
                self._remediated.setdefault(index_of[target_id], []).append(router)
        self._gates = {target: RouteGate(len(routers)) for target, routers in self._routers.items()}
        self._failed: set[int] = set()
        """Failed nodes with a list `on_failure`."""
        self._successful: set[int] = set()
        """Routers with a target in `on_failure` that handles a failure, because it finished or was itself handled."""
        self._unsuccessful: Counter[int] = Counter()
        """For each router, the number of its targets in `on_failure` that can no longer handle a failure."""
        self._handled: dict[int, bool] = {}
        """Whether a failure is handled, for each node in `_failed` for which this is decided."""

    def routers(self, index: int) -> Sequence[int]:
        """Return the nodes that can start this target."""
        return self._routers.get(index, ())

    def open_routers(self, index: int, states: Sequence[NodeState]) -> list[int]:
        """Return the nodes that can start this target and have not ended."""
        return [router for router in self.routers(index) if not states[router].status.ended]

    def targets(self, index: int) -> Sequence[int]:
        """Return the nodes that this router can start."""
        return self._targets.get(index, ())

    def gate(self, index: int) -> RouteGate | None:
        """Return the state of a target's routes, or None if the node needs none to start."""
        return self._gates.get(index)

    def end(self, index: int, state: NodeState) -> list[int]:
        """Update the routes after a node has ended. Return the failed nodes whose failures can no longer be handled.

        A failed node without `on_failure` is one of them.
        """
        node, failed = self._nodes[index], state.status is NodeStatus.FAILED
        for target in self.targets(index):
            self._gates[target].open_routers -= 1
        for target_id in fired_targets(node, state):
            self._gates[self._index_of[target_id]].fired = True
        if failed and node.on_failure:
            self._failed.add(index)
            return self._decide([index])
        lost = self._report(index, success=state.status is NodeStatus.FINISHED)
        return [index, *lost] if failed else lost

    def is_handled(self, index: int) -> bool:
        """Return whether the failure of this node is handled."""
        return self._handled.get(index, False)

    def is_pending(self, index: int) -> bool:
        """Return whether targets of this failed node can still handle its failure."""
        return index in self._failed and index not in self._handled

    def _report(self, target: int, *, success: bool) -> list[int]:
        """Note whether `target` handles the failures of its routers. Return those that can no longer be handled."""
        return self._decide(self._note(target, success=success))

    def _note(self, target: int, *, success: bool) -> list[int]:
        """Count the target for its routers, which it returns."""
        routers = self._remediated.get(target, [])
        if success:
            self._successful.update(routers)
        else:
            self._unsuccessful.update(routers)
        return routers

    def _decide(self, routers: list[int]) -> list[int]:
        """Decide which failures of `routers` are handled, and what follows. Return those that cannot be handled."""
        lost, undecided = [], list(routers)
        while undecided:
            router = undecided.pop()
            if not self.is_pending(router):
                continue
            handled = router in self._successful
            if handled or self._unsuccessful[router] == len(self._nodes[router].on_failure):
                self._handled[router] = handled
                lost += [] if handled else [router]
                undecided += self._note(router, success=handled)
        return lost

    def failed_nodes(self, index: int, states: Sequence[NodeState]) -> list[dict[str, Any]]:
        """Return the failures that fired this target, in the form that its attempts receive."""
        failed = [
            router for router in self._remediated.get(index, ()) if states[router].status is NodeStatus.FAILED
        ]
        return [_failure(self._nodes[router], states[router]) for router in failed[:FAILED_NODES]]


def fired_targets(router: Node, state: NodeState) -> Sequence[str]:
    """Return the ids of the targets that a router fires by ending in `state`."""
    if state.status is NodeStatus.FINISHED:
        return router.on_success
    return router.on_failure if state.status is NodeStatus.FAILED else ()


def _failure(node: Node, state: NodeState) -> dict[str, Any]:
    return {
        "node_id": node.node_id,
        "attempt_epoch": state.epoch,
        "reason_code": state.reason_code,
        "error": state.last_error,
    }
