"""Decide which nodes may start, which are skipped, and how a failure affects other nodes.

Pure: no Temporal, no I/O, no clock. The workflow calls `Scheduler.end` for each node that ends, which skips the nodes
that can no longer start. `Scheduler.pop_ready` returns the nodes that may start.

A node's gate is the state of its fan-in (in Airflow: of its trigger rule). The gate opens when enough parents have
finished, or have stored a batch from which the node streams (`streams`), and closes when too few parents can still do
so. A gate with the mode `all_done` opens when all parents have ended. The gate of a routing target also needs a route (`routing`). A node is open until it has ended.
"""

from __future__ import annotations

import heapq
from collections import Counter
from functools import cached_property
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

from flowkit import reason_codes
from flowkit.models import NodeState, NodeStatus, OnNodeFailure, SkipReason, VersionPolicy
from flowkit.workflows.retry import note_failure
from flowkit.workflows.scheduling.actions import Pauses
from flowkit.workflows.scheduling.conditions import Conditions, Due
from flowkit.workflows.scheduling.gates import Gates, higher_precedence, inherited_reason, is_closed, is_open
from flowkit.workflows.scheduling.routing import Routing
from flowkit.workflows.scheduling.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from flowkit.models import FirstBatch, Graph, Node
    from flowkit.models.actions import PausedScope

PARENT_FAILED = "the node has processed the batches of its parents, but a parent failed later"


class Scheduler:
    """Schedule the nodes of one task's graph.

    The scheduler changes `states` in place. They are its complete state: a new scheduler created from them continues
    where the previous one stopped.
    """

    def __init__(
        self, graph: Graph, states: list[NodeState], paused: list[PausedScope] | None = None
    ) -> None:
        self.nodes: Sequence[Node] = graph.nodes
        self.states = states
        self.pauses = Pauses(graph.nodes, [] if paused is None else paused)
        self.changed: set[int] = set()
        """Indexes of nodes whose status the workflow must still write to the task document.

        The workflow clears the set. It also adds nodes, see `Task._process_events`.
        """
        self._on_failure = graph.on_node_failure
        self.pins_versions = graph.version_policy is VersionPolicy.PIN
        """Whether all attempts of a role run with one version of its handler."""
        self.routing = Routing(graph.nodes)
        self.streams = Streams(graph.nodes)
        self._children = _children(graph.nodes)
        self._conditions = Conditions(graph.nodes, states)
        self._gates = Gates(graph.nodes, states, self._conditions)
        self._open_nodes = len(graph.nodes)
        self._hard_failure: int | None = None
        self._ready: list[int] = []
        self._made_ready: set[int] = set()
        self._rebuild()
        self._skip_unreachable()

    @cached_property
    def _position(self) -> list[int]:
        """The position of each node in a topological order. Most tasks need none, and large ones take long for it."""
        return _topological_positions(self.nodes, self.routing)

    @cached_property
    def index_of(self) -> dict[str, int]:
        """The index of each node by its id."""
        return {node.node_id: node.index for node in self.nodes}

    def _rebuild(self) -> None:
        """Derive gates and ready nodes from `states`, which may come from a previous run of the workflow."""
        for index, state in enumerate(self.states):
            if state.streamed:
                for child in self.streams.children.get(index, ()):
                    self._gates.count_batch(child, index)
        ended = [i for i, state in enumerate(self.states) if state.status.ended]
        for index in ended:
            self._record_end(index)
        for node in self.nodes:
            if not self.states[node.index].status.ended and self._is_gate_open(node.index):
                self._add_ready(node.index)

    def _skip_unreachable(self) -> None:
        """Skip the conditional nodes to which no route can lead."""
        for node in self.nodes:
            if node.conditional and not self.routing.routers(node.index):
                self._skip(node.index)

    def _skip(self, index: int) -> None:
        if not self.states[index].status.ended:
            self.changed.add(index)
            self.end(index, NodeStatus.SKIPPED, SkipReason.ROUTING)

    @property
    def done(self) -> bool:
        """Whether every node has ended."""
        return self._open_nodes == 0

    @property
    def hard_failure(self) -> Node | None:
        """The first node whose failure stops the task, or None.

        `allow_failure`, `routing.on_failure` and `on_node_failure` decide this.
        """
        return None if self._hard_failure is None else self.nodes[self._hard_failure]

    @property
    def failures(self) -> list[Node]:
        """Failed nodes that make the task `failed`, in graph order."""
        pending = self.routing.is_pending
        return [node for node in self._failed() if not self._is_handled(node) and not pending(node.index)]

    @property
    def handled_failures(self) -> list[str]:
        """Ids of failed nodes with `allow_failure`, or whose failures routing has handled, in graph order."""
        return [node.node_id for node in self._failed() if self._is_handled(node)]

    def _is_handled(self, node: Node) -> bool:
        return node.allow_failure or self.routing.is_handled(node.index)

    def _failed(self) -> Iterator[Node]:
        return (node for node in self.nodes if self.states[node.index].status is NodeStatus.FAILED)

    def failed_nodes(self, node: Node) -> list[dict[str, Any]]:
        """Return the failures that started this node, in the form that its attempts receive."""
        return self.routing.failed_nodes(node.index, self.states) if node.conditional else []

    def has_opened(self, index: int) -> bool:
        """Return whether the gate of a node has opened, so that the node may start when its condition is true."""
        return index in self._made_ready

    def waits_for_parents(self, index: int) -> bool:
        """Return whether too few parents of a node have satisfied their edges, whatever its routers do."""
        return not is_open(self.nodes[index], self._gates[index])

    def satisfied_parents(self, index: int) -> int:
        """Return how many parents of a node have satisfied their edges."""
        return self._gates[index].satisfied

    def counts(self) -> Counter[NodeStatus]:
        """Return the number of nodes with each status."""
        return Counter(state.status for state in self.states)

    def pop_ready(self) -> list[int]:
        """Return the indexes of nodes whose gates have opened since the last call, in the order of opening.

        A node with a condition follows when its condition is true.
        """
        ready = [index for index in self._ready if not self.states[index].status.ended]
        self._ready.clear()
        return ready

    @property
    def any_due(self) -> bool:
        """Whether conditions have become due since the last call of `pop_due`."""
        return bool(self._conditions.due)

    def pop_due(self) -> list[Due]:
        """Return the conditions that have become due since the last call, in the order of becoming due.

        The condition of a paused node is evaluated after the pause, immediately before the node starts.
        """
        return [due for due in self._conditions.pop_due(self._is_held) if self.awaits(due)]

    def _is_held(self, due: Due) -> bool:
        return due.parent is None and due.node in self.pauses.held

    def text_of(self, due: Due) -> str:
        """Return the expression of a condition."""
        return self._conditions.text_of(due)

    def awaits(self, due: Due) -> bool:
        """Return whether the result of a condition still matters: the node is open, and has not started without it."""
        if self.states[due.node].status.ended:
            return False
        if due.parent is None:
            return True
        return due.node not in self._made_ready and self._gates.needs_condition(due.node, due.parent)

    def decide(self, results: Mapping[Due, bool]) -> None:
        """Store the results of conditions that still matter, and only then start and skip nodes."""
        awaited = [(due, result) for due, result in results.items() if self.awaits(due)]
        nodes: list[int] = []
        for due, result in awaited:
            self._conditions.store(due, result)
            if due.parent is not None:
                self._gates.count_decided(due.node, due.parent)
                nodes.append(due.node)
            elif result:
                self._ready.append(due.node)
        false = [due.node for due, result in awaited if due.parent is None and not result]
        self._settle([*nodes, *self._end_together(false, NodeStatus.SKIPPED, SkipReason.CONDITION)])

    def fail(self, indexes: Collection[int]) -> None:
        """Fail open nodes, and only then skip the nodes whose gates close as a result."""
        self._settle(self._end_together(indexes, NodeStatus.FAILED))

    def _end_together(
        self, indexes: Collection[int], status: NodeStatus, reason: SkipReason | None = None
    ) -> list[int]:
        """End open nodes. Return their children and targets that are still open."""
        for index in indexes:
            self.states[index].status, self.states[index].skip_reason = status, reason
        self.changed.update(indexes)
        return [child for index in indexes for child in self._record_end(index)]

    def end(self, index: int, status: NodeStatus, reason: SkipReason | None = None) -> None:
        """End a node with `status`, and skip the nodes whose gates close as a result, parents before children.

        The skipped nodes are added to `changed`. The node itself is not, unless it ends with another status: a node
        that a batch has started fails as `upstream_failed` if failed parents would have kept it from starting.
        """
        state = self.states[index]
        if not state.status.ended:
            state.status, state.skip_reason = self._checked(index, status), reason
            self._settle(self._record_end(index))

    def _settle(self, nodes: Iterable[int]) -> None:
        """Note which of these nodes may start, and skip those that no longer can, with the nodes below them."""
        pending: list[tuple[int, int]] = []
        self._sort_by_gate(nodes, pending)
        while pending:
            _, index = heapq.heappop(pending)
            state = self.states[index]
            if not state.status.ended:
                state.status, state.skip_reason = NodeStatus.SKIPPED, self._skip_reason_of(index)
                self.changed.add(index)
                self._sort_by_gate(self._record_end(index), pending)

    def _sort_by_gate(self, nodes: Iterable[int], closed: list[tuple[int, int]]) -> None:
        """Note which of these nodes may start, and add those that no longer can to the heap `closed`."""
        for index in nodes:
            if self._is_gate_open(index):
                self._add_ready(index)
            elif self._is_gate_closed(index):
                heapq.heappush(closed, (self._position[index], index))

    def _checked(self, index: int, status: NodeStatus) -> NodeStatus:
        """Return `failed` for a node that has finished although failed parents close its gate; else `status`."""
        if status is not NodeStatus.FINISHED or not self.nodes[index].streams_from:
            return status
        if not self.streams.fails_with_parents(index, self.states):
            return status
        note_failure(self.states[index], reason_codes.UPSTREAM_FAILED, PARENT_FAILED)
        self.changed.add(index)
        return NodeStatus.FAILED

    def accept_batch(self, batch: FirstBatch) -> bool:
        """Open the gates for the first batch of an attempt. Return False if it changes nothing, or is not the latest."""
        index = self.index_of.get(batch.node_id)
        if index is None or self.states[index].epoch != batch.epoch:
            return False
        return self.add_batch(index)

    def add_batch(self, index: int) -> bool:
        """Note that a node has stored its first batch, and open the gates for which this is enough.

        The node may have ended meanwhile, because signals and ends can overtake each other. Return False if the batch
        was known.
        """
        state = self.states[index]
        if state.streamed:
            return False
        state.streamed = True
        children = self.streams.children.get(index, ())
        for child in children:
            if state.status.ended:
                self._gates.count_late_batch(child, index)
            else:
                self._gates.count_batch(child, index)
        self._settle(child for child in children if not self.states[child].status.ended)
        return True

    def _skip_reason_of(self, index: int) -> SkipReason:
        """Return why a node is skipped: because of its parents, its routers or both."""
        gate, route = self._gates[index], self.routing.gate(index)
        by_parents = self._gates.skip_reason(index) if is_closed(self.nodes[index], gate) else None
        not_routed = route is not None and route.is_closed
        by_routers = (gate.route_reason or SkipReason.ROUTING) if not_routed else None
        return higher_precedence(by_parents, by_routers) or SkipReason.UPSTREAM_FAILED

    def mark_cancelling(self) -> None:
        """Give running nodes the status `cancelling`."""
        for index, state in enumerate(self.states):
            if state.status is NodeStatus.RUNNING:
                state.status = NodeStatus.CANCELLING
                self.changed.add(index)

    def end_all(self, status: NodeStatus, skip_reason: SkipReason) -> None:
        """End all open nodes. Nodes that had an attempt get `status`; the others are skipped for `skip_reason`.

        The error of an earlier attempt is not the reason of such an end, so no node keeps one.
        """
        for index, state in enumerate(self.states):
            if not state.status.ended:
                attempted = state.epoch > 0
                state.status = status if attempted else NodeStatus.SKIPPED
                state.skip_reason = None if attempted else skip_reason
                state.last_error = state.reason_code = None
                self.changed.add(index)
                self._record_end(index)

    def _record_end(self, index: int) -> Iterable[int]:
        """Count the end of a node, note a hard failure, and update the gates of its children and targets.

        Return those of them that are still open.
        """
        state, targets = self.states[index], self.routing.targets(index)
        self._open_nodes -= 1
        self._note_hard_failure(self.routing.end(index, state))
        for child in self._children[index]:
            self._gates.count_end(child, index)
        inherited = inherited_reason(self.nodes[index], state)
        for target in targets:
            gate = self._gates[target]
            gate.route_reason = higher_precedence(gate.route_reason, inherited or SkipReason.ROUTING)
        return [child for child in (*self._children[index], *targets) if not self.states[child].status.ended]

    def _note_hard_failure(self, unhandled: Iterable[int]) -> None:
        """Keep the first failure that stops the task. `unhandled` are failures that cannot be handled."""
        hard = (index for index in unhandled if not self.nodes[index].allow_failure)
        if self._on_failure is OnNodeFailure.FAIL and self._hard_failure is None:
            self._hard_failure = next(hard, None)

    def _add_ready(self, index: int) -> None:
        if index not in self._made_ready:
            self._made_ready.add(index)
            if self.nodes[index].when is None or self._conditions.may_start(index):
                self._ready.append(index)

    def _is_gate_open(self, index: int) -> bool:
        route = self.routing.gate(index)
        return (route is None or route.is_open) and is_open(self.nodes[index], self._gates[index])

    def _is_gate_closed(self, index: int) -> bool:
        route = self.routing.gate(index)
        return (route is not None and route.is_closed) or is_closed(self.nodes[index], self._gates[index])


def _children(nodes: Sequence[Node]) -> list[list[int]]:
    index_of = {node.node_id: node.index for node in nodes}
    children: list[list[int]] = [[] for _ in nodes]
    for node in nodes:
        for parent in node.depends_on:
            children[index_of[parent]].append(node.index)
    return children


def _topological_positions(nodes: Sequence[Node], routing: Routing) -> list[int]:
    """Return the position of each node in a topological order: after its parents and its routers."""
    earlier = {
        node.node_id: [*node.depends_on, *(nodes[router].node_id for router in routing.routers(node.index))]
        for node in nodes
    }
    position_of = {
        node_id: position for position, node_id in enumerate(TopologicalSorter(earlier).static_order())
    }
    return [position_of[node.node_id] for node in nodes]
