"""Decide which nodes may start, which are skipped, and how a failure affects other nodes.

Pure: no Temporal, no I/O, no clock. The workflow calls `Scheduler.end` for each node that ends, which skips the nodes
that can no longer start. `Scheduler.pop_ready` returns the nodes that may start.

A node's gate is the state of its fan-in (in Airflow: of its trigger rule). The gate opens when enough parents have
finished, or have stored a batch from which the node streams (`streams`), and closes when too few parents can still do
so. A gate with the mode `all_done` opens when all parents have ended. The gate of a routing target also
needs a route (`routing`). A node is open until it has ended.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from functools import cached_property
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

from flowkit import reason_codes
from flowkit.actions.scopes import Pauses, list_function_sources
from flowkit.limits import FAILED_BATCHES_NODES
from flowkit.models import NodeState, NodeStatus, OnNodeFailure, SkipReason, VersionPolicy
from flowkit.models.graphs import inherited_reason
from flowkit.workflows.retry import note_failure
from flowkit.workflows.scheduling.conditions import Conditions, DueCondition
from flowkit.workflows.scheduling.gates import Gates, higher_precedence, is_closed, is_open
from flowkit.workflows.scheduling.routing import RouteTable
from flowkit.workflows.scheduling.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from flowkit.models import FirstBatch, Graph, Node
    from flowkit.models.actions import PausedScope

HOLD = -1.0
"""The `held_until` of a node whose hold has not begun."""

PARENT_FAILED = "the node has processed the batches of its parents, but a parent failed later"


class Scheduler:
    """Schedule the nodes of one task's graph.

    The scheduler changes `states` in place. They are its complete state: a new scheduler created from them continues
    where the previous one stopped.
    """

    def __init__(
        self,
        graph: Graph,
        states: list[NodeState],
        paused: list[PausedScope] | None = None,
        satisfied: list[str] | None = None,
    ) -> None:
        """Continue with these states, paused scopes and satisfied prerequisites. The lists change in place."""
        self.nodes: Sequence[Node] = graph.nodes
        self.states = states
        self.satisfied = [] if satisfied is None else satisfied
        self._satisfied = {*self.satisfied}
        self.resetting: set[int] = set()
        """The nodes whose reset or change is in progress. They neither start nor end meanwhile, whatever their attempts
        still report."""
        self.has_generations = any(state.first_epoch for state in states)
        """Whether a node has had more than one generation."""
        self.rounds: Counter[int] = Counter()
        """For each node, how often an action has made the results of its conditions outdated."""
        self.shard_epochs: dict[int, set[int]] = {}
        """The epochs of the attempts of shards in flight, of each node that runs some."""
        self.pauses = Pauses(graph.nodes, [] if paused is None else paused)
        self.changed: set[int] = set()
        """Indexes of nodes whose status the workflow must still write to the task document.

        The workflow clears the set. It also adds nodes, see `Task._process_events`.
        """
        self._on_failure = graph.on_node_failure
        self.pins_versions = graph.version_policy is VersionPolicy.PIN
        """Whether all attempts of a role run with one version of its handler."""
        self.streams = Streams(graph.nodes)
        self._children = _children(graph.nodes)
        self._conditions = Conditions(graph.nodes, states)
        self.rebuild()

    @cached_property
    def _position(self) -> list[int]:
        """The position of each node in a topological order. Most tasks need none, and large ones take long for it."""
        return _topological_positions(self.nodes, self.routing)

    @cached_property
    def index_of(self) -> dict[str, int]:
        """The index of each node by its id. The dictionary changes in place when nodes are added."""
        return {node.node_id: node.index for node in self.nodes}

    def rebuild(self, active: Collection[int] = ()) -> None:
        """Derive gates, routes and ready nodes from `states`, as after a new generation of nodes.

        `active` are nodes that the workflow has started, and that do not become ready again.
        """
        self.streams.forget()
        self.routing = RouteTable(self.nodes)
        self._gates = Gates(self.nodes, self.states, self._conditions, self.streams)
        self._open_nodes = len(self.nodes)
        self._hard_failure: int | None = None
        self._ready: list[int] = []
        self._made_ready: set[int] = {*active}
        self._sources: dict[int, frozenset[int]] = {}
        """For each node that was to start during a reset, the nodes whose results it uses."""
        self._rebuild()
        self._skip_unreachable()

    def _rebuild(self) -> None:
        for index, state in enumerate(self.states):
            if state.streamed and index not in self.resetting:
                for child in self.streams.children.get(index, ()):
                    self._gates.count_batch(child, index)
        ended = [i for i, state in enumerate(self.states) if state.status.ended]
        for index in ended:
            self._record_end(index)
        self._sort_open_nodes()

    def _sort_open_nodes(self) -> None:
        """Note which open nodes may start or continue, and skip those that no longer can."""
        closed: list[int] = []
        for index, state in enumerate(self.states):
            if state.status.ended or index in self.resetting:
                continue
            if state.status.begun:
                self._add_begun(index)
            elif self._is_gate_open(index):
                self._add_ready(index)
            elif self._is_gate_closed(index):
                closed.append(index)
        self._settle(closed)

    def _add_begun(self, index: int) -> None:
        """Let a node continue that has started in an earlier run of the workflow, whatever its gate shows now."""
        if index not in self._made_ready:
            self._made_ready.add(index)
            self._ready.append(index)

    def renew(self, indexes: Iterable[int], kept: Collection[int] = ()) -> None:
        """Give nodes the state of a new generation. `rebuild` must follow.

        Those in `kept` start again in their generation. Attempts of the earlier generation that have not
        ended keep its state, which no longer counts.
        """
        self.has_generations = True
        self.streams.forget()
        for index in indexes:
            old = self.states[index]
            new = NodeState(epoch=old.epoch, ordinary=old.ordinary)
            if index in kept:
                new.first_epoch, new.generation = old.first_epoch, old.generation
                new.kept = True
            else:
                new.first_epoch, new.generation = old.epoch, old.generation + 1
            self.states[index] = new
            self.forget_conditions(index)

    def unblock(self, indexes: Iterable[int]) -> None:
        """Forget what was decided about nodes that have not started, because their gates are decided again."""
        for index in indexes:
            state = self.states[index]
            state.condition, state.edges, state.evaluated = None, {}, False
            state.deadline_at = state.deadline_left = None
            self.forget_conditions(index)

    def forget_conditions(self, index: int) -> None:
        """Let the conditions of a node, and of the edges from and to it, be evaluated again."""
        self.rounds[index] += 1
        self._conditions.forget(index)

    def change_node(self, node: Node) -> None:
        """Replace a node by itself with other fields. What depends on which node does not change."""
        assert isinstance(self.nodes, list), "the nodes of a running task can change"
        self.nodes[node.index] = node
        self._sources.pop(node.index, None)

    def change_graph(self, changed: Sequence[Node], added: Sequence[Node], epochs: Sequence[int]) -> None:
        """Replace nodes that have not started, and add nodes whose attempts begin after `epochs`.

        `rebuild` must follow.

        A node that runs signals its first batch only if others streamed from it when its attempt began. A new node that
        streams from it therefore starts as if there was a batch.
        """
        assert isinstance(self.nodes, list), "the nodes of a running task can change"
        followed = {*self.streams.children}
        for node in changed:
            self.change_node(node)
        self.renew(node.index for node in changed)
        self.nodes.extend(added)
        self.states.extend(NodeState(epoch=epoch, first_epoch=epoch) for epoch in epochs)
        self.index_of.update({node.node_id: node.index for node in added})
        self._children = _children(self.nodes)
        self.streams.change_graph()
        self.pauses.change_graph()
        self.__dict__.pop("_position", None)
        for index in self.streams.children.keys() - followed:
            self.states[index].streamed |= self.states[index].status is NodeStatus.RUNNING

    def satisfy(self, prerequisite: str) -> None:
        """Note that a prerequisite is satisfied, and start the nodes that have waited only for it."""
        self.satisfied.append(prerequisite)
        self._satisfied.add(prerequisite)
        named = (node.index for node in self.nodes if prerequisite in node.prerequisites)
        self._settle(index for index in named if not self.states[index].status.ended)

    def missing_prerequisites(self, index: int) -> list[str]:
        """Return the prerequisites of a node that are not satisfied."""
        return [each for each in self.nodes[index].prerequisites if each not in self._satisfied]

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
    def must_stop(self) -> bool:
        """Whether a failure stops the task now.

        With `finish_running`, running attempts and their retries end before.
        """
        return self._hard_failure is not None and not (
            self.finishes_running and any(map(self._keeps_open, self.nodes, self.states))
        )

    def _keeps_open(self, node: Node, state: NodeState) -> bool:
        """Return whether a task that starts no further node waits for this one: it runs, or runs again by itself.

        Nodes that wait for a person or for a time do not count, nor do paused ones. A node that has yielded to its
        sources runs again when all of them have ended; until then, the task waits for the sources.
        """
        if state.status is not NodeStatus.DEFERRED:
            return state.status.begun
        if node.approval is not None or node.delay is not None or state.held_until is not None:
            return False
        return node.index not in self.pauses.paused and not self.yields_to_sources(node)

    def yields_to_sources(self, node: Node) -> bool:
        """Return whether a node has yielded, and waits for nodes from which it pulls and that have not ended."""
        if self.states[node.index].reason_code != reason_codes.YIELDED:
            return False
        return any(not self.states[self.index_of[source]].status.ended for source in node.pulls_from)

    def source_progress(self, node: Node) -> int:
        """Return a number that increases when a node from which this one pulls starts an attempt, or ends."""
        states = (self.states[self.index_of[source]] for source in node.pulls_from)
        return sum(2 * state.epoch + state.status.ended for state in states)

    def is_stalled(self, node: Node, seen: int) -> bool:
        """Return whether a node that has yielded would find nothing new: no source runs, and one has not ended.

        `seen` is the progress of its sources when the attempt began that has yielded.
        """
        sources = [self.states[self.index_of[source]].status for source in node.pulls_from]
        is_idle = not any(status.in_flight for status in sources)
        return is_idle and not all(status.ended for status in sources) and self.source_progress(node) == seen

    @property
    def finishes_running(self) -> bool:
        """Whether no further node starts, because one has failed in a graph with `finish_running`."""
        return self._hard_failure is not None and self._on_failure is OnNodeFailure.FINISH_RUNNING

    @property
    def stoppers(self) -> list[int]:
        """The failed nodes because of which no further node starts."""
        return [node.index for node in self.failures] if self.finishes_running else []

    def must_not_start(self, index: int) -> bool:
        """Return whether a node has not started, and no further node of the task starts."""
        return self.finishes_running and not self.states[index].status.begun

    def end_holds(self) -> list[int]:
        """Fail the held nodes of a task that starts no further node, and return their indexes.

        Such a task does not wait for a decision. Do nothing in other tasks.
        """
        if not self.finishes_running:
            return []
        held = [index for index, state in enumerate(self.states) if state.held_until is not None]
        for index in held:
            self.states[index].held_until = None
            self.end(index, NodeStatus.FAILED)
        self.changed.update(held)
        return held

    @property
    def failures(self) -> list[Node]:
        """Failed nodes that make the task `failed`, in graph order."""
        pending = self.routing.is_pending
        return [node for node in self._failed() if not self._is_handled(node) and not pending(node.index)]

    @property
    def left_incomplete(self) -> list[Node]:
        """Nodes that an earlier run of the task has not completed, and that this one has not started, in
        graph order.
        """
        return [node for node in self.nodes if self.states[node.index].was_stopped]

    @property
    def failed_batches(self) -> dict[str, int]:
        """The number of batches that were set aside, by node id, of the first nodes that have set some aside."""
        found = (
            (node.node_id, state.failed_batches)
            for node, state in zip(self.nodes, self.states, strict=True)
            if state.failed_batches
        )
        return dict(itertools.islice(found, FAILED_BATCHES_NODES))

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
        ready = [
            index
            for index in self._ready
            if not self.states[index].status.ended and not self.must_not_start(index)
        ]
        self._ready.clear()
        return ready

    @property
    def any_due(self) -> bool:
        """Whether conditions have become due since the last call of `pop_due`."""
        return bool(self._conditions.due) and not self.finishes_running

    def pop_due(self) -> list[DueCondition]:
        """Return the conditions that have become due since the last call, in the order of becoming due.

        The condition of a paused node is evaluated after the pause, immediately before the node starts, and that of a
        node whose reset is in progress after the reset.
        """
        return [due for due in self._conditions.pop_due(self._is_blocked) if self.awaits(due)]

    def _is_blocked(self, due: DueCondition) -> bool:
        return due.node in self.resetting or (due.parent is None and due.node in self.pauses.paused)

    def text_of(self, due: DueCondition) -> str:
        """Return the expression of a condition."""
        return self._conditions.text_of(due)

    def awaits(self, due: DueCondition) -> bool:
        """Return whether the result of a condition still matters: the node is open, and has not started without it."""
        state = self.states[due.node]
        if state.status.ended or due.node in self.resetting:
            return False
        if due.parent is None:
            return state.condition is None
        return (
            due.parent not in state.edges
            and due.node not in self._made_ready
            and self._gates.needs_condition(due.node, due.parent)
        )

    def decide(self, results: Mapping[DueCondition, bool]) -> None:
        """Store the results of conditions that still matter, and only then start and skip nodes."""
        awaited = [(due, result) for due, result in results.items() if self.awaits(due)]
        nodes: list[int] = []
        if any(due.parent is not None for due, _ in awaited):
            self.streams.forget()
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
        """Fail open nodes, and only then skip the nodes whose gates close as a result.

        Those whose failure is held become ready, with `held_until` HOLD.
        """
        held = {index: None for index in indexes if self.holds_failure(index)}
        for index in held:
            self.states[index].held_until = HOLD
            self._add_begun(index)
        ready = {*self._ready}
        self._ready += [index for index in held if index not in ready]
        failed = [index for index in indexes if index not in held]
        self._settle(self._end_together(failed, NodeStatus.FAILED))

    def holds_failure(self, index: int) -> bool:
        """Return whether the failure of a node is held for a decision."""
        return self.nodes[index].hold_sec is not None and not self.finishes_running

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
        that a batch has started fails as `upstream_failed` if failed parents would have kept it from
        starting. A finished node does not keep the error of an earlier attempt. The end of an attempt whose node is
        being reset does not count.
        """
        state = self.states[index]
        if not state.status.ended and index not in self.resetting:
            if status is NodeStatus.FINISHED:
                state.last_error = state.reason_code = None
            state.status, state.skip_reason = self._checked(index, status), reason
            self._settle(self._record_end(index))

    def end_as_decided(self, ends: Mapping[int, NodeStatus], active: Collection[int]) -> None:
        """End open nodes as a person or a rule has decided, whatever their gates and their parents say.

        The gates are decided anew, as after a reset, with the ends of the nodes in place. `active` are those
        of `rebuild`.
        """
        for index, status in ends.items():
            state = self.states[index]
            state.status = status
            state.skip_reason = SkipReason.USER if status is NodeStatus.SKIPPED else None
        self.rebuild(active)

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
            if index in self.resetting or self.states[index].status.begun:
                continue
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
        """Open the gates for the first batch of an attempt.

        Return False if it changes nothing, or is not the latest.
        """
        index = self.index_of.get(batch.node_id)
        if index is None or not self.is_current(index, batch.epoch):
            return False
        return self.add_batch(index)

    def is_current(self, index: int, epoch: int) -> bool:
        """Return whether an epoch is that of the latest attempt of a node, or of one of its shards that run.

        A node that is being reset has no such attempt: what its attempts store or report belongs to what it gives up.
        """
        if index in self.resetting:
            return False
        return self.states[index].epoch == epoch or epoch in self.shard_epochs.get(index, ())

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
                attempted = state.epoch > state.first_epoch
                state.status = status if attempted else NodeStatus.SKIPPED
                state.skip_reason = None if attempted else skip_reason
                state.last_error = state.reason_code = state.held_until = None
                self.changed.add(index)
                self._record_end(index)

    def _record_end(self, index: int) -> Iterable[int]:
        """Count the end of a node, note a hard failure, and update the gates of its children and targets.

        Return those of them that are still open.
        """
        state, targets = self.states[index], self.routing.targets(index)
        self._open_nodes -= 1
        if state.status is not NodeStatus.FINISHED:
            self.streams.forget_passing()
        self._note_hard_failure(self.routing.end(index, state))
        for child in self._children[index]:
            self._gates.count_end(child, index)
        inherited = inherited_reason(self.nodes[index], state.status, state.skip_reason)
        for target in targets:
            gate = self._gates[target]
            gate.route_reason = higher_precedence(gate.route_reason, inherited or SkipReason.ROUTING)
        return [child for child in (*self._children[index], *targets) if not self.states[child].status.ended]

    def _note_hard_failure(self, unhandled: Iterable[int]) -> None:
        """Keep the first failure that stops the task. `unhandled` are failures that cannot be handled."""
        hard = (index for index in unhandled if not self.nodes[index].allow_failure)
        if self._on_failure is not OnNodeFailure.CONTINUE and self._hard_failure is None:
            self._hard_failure = next(hard, None)

    def _add_ready(self, index: int) -> None:
        if index not in self._made_ready:
            self._made_ready.add(index)
            if self.nodes[index].when is None or self._conditions.may_start(index):
                self._ready.append(index)

    def _is_gate_open(self, index: int) -> bool:
        route = self.routing.gate(index)
        opened = (route is None or route.is_open) and is_open(self.nodes[index], self._gates[index])
        if not opened or (self.nodes[index].prerequisites and self.missing_prerequisites(index)):
            return False
        return not self.resetting or index in self._made_ready or not self._uses_outdated(index)

    def _uses_outdated(self, index: int) -> bool:
        """Return whether a node would use what another one has stored that is being reset, and may not depend on it."""
        if index not in self._sources:
            node = self.nodes[index]
            named = (self.index_of.get(each) for each in (*node.pulls_from, *list_function_sources(node)))
            self._sources[index] = frozenset(each for each in named if each is not None)
        return not self._sources[index].isdisjoint(self.resetting)

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


def _topological_positions(nodes: Sequence[Node], routing: RouteTable) -> list[int]:
    """Return the position of each node in a topological order: after its parents and its routers."""
    earlier = {
        node.node_id: [*node.depends_on, *(nodes[router].node_id for router in routing.routers(node.index))]
        for node in nodes
    }
    position_of = {
        node_id: position for position, node_id in enumerate(TopologicalSorter(earlier).static_order())
    }
    return [position_of[node.node_id] for node in nodes]
