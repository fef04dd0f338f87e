"""Random retries of nodes, and nodes that are added, while a task runs: in the end, every node has ended as
it would have without them, or if the graph had contained all nodes from the beginning.

Each node always ends in the same way, so the statuses of a task without actions are the model.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from flowkit.actions.changed_nodes import changeable
from flowkit.actions.plans import Plan, TaskSnapshot
from flowkit.actions.preconditions import state_of
from flowkit.actions.records import RetryNode
from flowkit.actions.scopes import Pauses
from flowkit.actions.table import plan
from flowkit.errors import ActionRejected, GraphError, RejectionCause
from flowkit.graph.changes import change_problems
from flowkit.graph.validation import parse_graph
from flowkit.models import Graph, NodeState, NodeStatus
from flowkit.workflows.scheduling.scheduler import Scheduler

GRAPHS = 800
MOST_NODES = 9
MOST_STEPS = 400


def draw_graph(chance: random.Random) -> dict[str, Any]:
    """Return a graph in which each node depends on some of the earlier ones, waits for them in any way, or routes."""
    nodes: list[dict[str, Any]] = []
    for number in range(chance.randint(2, MOST_NODES)):
        above = [each["node_id"] for each in nodes]
        parents = chance.sample(above, min(len(above), chance.randint(0, 3)))
        count = f"count:{chance.randint(1, len(parents))}" if parents else "all"
        fan_in = chance.choice(["all", "all", "any", "all_done", count]) if parents else "all"
        node: dict[str, Any] = {"node_id": f"n{number}", "type": "r", "depends_on": parents, "fan_in": fan_in}
        if parents and chance.random() < 0.3:
            args = {"from_nodes": chance.sample(parents, 1)}
            node["io"] = {"input_inline": {"input_adapter": "pull.from_artifacts", "input_args": args}}
        nodes.append(node | {"allow_failure": chance.random() < 0.3})
    routed = [node for node in nodes if not node["depends_on"]][1:]
    for target in routed:
        router = chance.choice([node for node in nodes if node["node_id"] < target["node_id"]])
        kind = chance.choice(["on_success", "on_failure"])
        router.setdefault("routing", {}).setdefault(kind, []).append(target["node_id"])
    return {"nodes": nodes, "on_node_failure": "continue"}


class Play:
    """One task whose nodes run and end in a random order, with random retries of nodes."""

    def __init__(self, graph: Graph, fails: set[int], chance: random.Random) -> None:
        self.graph = graph
        self.states = [NodeState() for _ in graph.nodes]
        self.retries = 0
        self._fails = fails
        self._chance = chance
        self._scheduler = Scheduler(graph, self.states)
        self._running: set[int] = set()
        self._seen: dict[str, tuple[str, Any]] = {}
        """By node, the state in the latest preview of its retry, and what that stands for."""

    def run(self, most_retries: int) -> list[NodeStatus]:
        """Run the task to its end, and return the statuses of its nodes.

        The reason of a skip may depend on the order: a gate closes with the first parent that closes it.
        """
        for _ in range(MOST_STEPS):
            self._start()
            if self._scheduler.done and not most_retries > self.retries:
                return [state.status for state in self.states]
            if self.retries < most_retries and (not self._running or self._chance.random() < 0.3):
                self._retry()
            elif self._running:
                self._end(self._chance.choice(sorted(self._running)))
        raise AssertionError("the task does not end")

    def _start(self) -> None:
        for index in self._scheduler.pop_ready():
            assert index not in self._running, f"node {index} starts twice"
            self._running.add(index)
            self.states[index].status = NodeStatus.RUNNING
            self.states[index].epoch += 1
        if not self._scheduler.resetting and self._chance.random() < 0.2:  # as a new run of the workflow does
            self._scheduler = Scheduler(self.graph, self.states)
            assert {*self._scheduler.pop_ready()} == self._running

    def _end(self, index: int) -> None:
        self._running.discard(index)
        self._scheduler.end(index, NodeStatus.FAILED if index in self._fails else NodeStatus.FINISHED)

    def _retry(self) -> None:
        """Start a random node again, if the rules allow it; the reset takes a while, in which other nodes end."""
        self.retries += 1
        node = self._chance.choice(self.graph.nodes)
        task = TaskSnapshot(nodes=self.graph.nodes, states=self.states, pauses=Pauses(self.graph.nodes, []))
        try:
            planned = plan(RetryNode(node_id=node.node_id, interrupt=True), task)
        except ActionRejected:
            return
        self._check_precondition(node.node_id, planned, task)
        self._begin(planned)
        for index in sorted(self._running - {*planned.resets}):
            if self._chance.random() < 0.5:
                self._end(index)
            self._start()
        self._scheduler.resetting.clear()
        self._scheduler.renew(planned.interrupts)
        for index in planned.resets:
            state = self.states[index]
            state.epoch = state.first_epoch = state.epoch + 1
        self._scheduler.rebuild(self._running)

    def _check_precondition(self, node_id: str, planned: Plan, task: TaskSnapshot) -> None:
        """Retry the node as somebody who has looked earlier: that is rejected if an affected node has changed since."""
        states = [(index, self.states[index]) for index in planned.resets]
        now = [(index, state.status, state.epoch, state.generation) for index, state in states]
        state, before = self._seen.get(node_id, (state_of(planned, task), now))
        try:
            is_accepted = bool(plan(RetryNode(node_id=node_id, interrupt=True, if_state=state), task).resets)
        except ActionRejected as error:
            is_accepted = error.cause is not RejectionCause.OUTDATED
        assert is_accepted == (before == now), (node_id, before, now)
        self._seen[node_id] = state_of(planned, task), now

    def _begin(self, planned: Plan) -> None:
        self._running -= {*planned.resets}
        for index in planned.interrupts:
            self.states[index].status = NodeStatus.CANCELLING
        self._scheduler.resetting.update(planned.resets)
        self._scheduler.renew(index for index in planned.resets if index not in planned.interrupts)
        self._scheduler.unblock(planned.unblocks)
        self._scheduler.rebuild(self._running)


class GrowingPlay(Play):
    """A task whose graph has only its first nodes at the beginning, and gets the others in parts."""

    def __init__(self, raw: dict[str, Any], sizes: list[int], fails: set[int], chance: random.Random) -> None:
        self._raw = raw
        self._sizes = sizes
        super().__init__(changeable(self._prefix(sizes.pop(0)), {}), fails, chance)

    def _prefix(self, size: int) -> Graph:
        return parse_graph({**self._raw, "nodes": self._raw["nodes"][:size]})

    def run(self, most_retries: int) -> list[NodeStatus]:
        """Run the task to its end, with all nodes, and return the statuses of its nodes."""
        while self._sizes:
            self._start()
            if not self._running or self._chance.random() < 0.3:
                self._grow(self._sizes.pop(0))
            else:
                self._end(self._chance.choice(sorted(self._running)))
        return super().run(most_retries)

    def _grow(self, size: int) -> None:
        """Add nodes, and change one that has not started, for which nothing else changes."""
        nodes = self._prefix(size).nodes
        added = nodes[len(self.states) :]
        waiting = [i for i, state in enumerate(self.states) if state.status is NodeStatus.QUEUED]
        changed = [replace(nodes[self._chance.choice(waiting)], timeout_sec=5.0)] if waiting else []
        self._scheduler.change_graph(changed, added, [0 for _ in added])
        self._scheduler.rebuild(self._running)


def draw_sizes(raw: dict[str, Any], chance: random.Random) -> list[int]:
    """Return the numbers of nodes that the graph of a task has, one after another: some of those that the
    rules allow.
    """
    nodes, whole = raw["nodes"], parse_graph(raw)
    sizes = [at for at in range(1, len(nodes)) if chance.random() < 0.6 and _may_grow(raw, at, whole)]
    return [*sizes, len(nodes)]


def _may_grow(raw: dict[str, Any], at: int, whole: Graph) -> bool:
    """Return whether a task may begin with the first nodes of a graph, and get all others later."""
    try:
        before = parse_graph({**raw, "nodes": raw["nodes"][:at]})
    except GraphError:
        return False  # A node routes to one that does not exist yet.
    return not [*change_problems(before, whole, {"nodes": raw["nodes"][at:]}, ())]


@pytest.mark.parametrize("seed", range(4))
def test_nodes_end_as_if_the_graph_had_contained_them_from_the_beginning(seed: int) -> None:
    parts = 0
    for number in range(GRAPHS // 4):
        chance = random.Random(f"grow-{seed}-{number}")
        raw = draw_graph(chance)
        graph = changeable(parse_graph(raw), {})
        fails = {node.index for node in graph.nodes if chance.random() < 0.25}
        expected = Play(graph, fails, random.Random(0)).run(most_retries=0)
        if graph.warnings:
            # Routes that have no effect skip nodes before any other: the reason of a skip depends on the order.
            continue
        sizes = draw_sizes(raw, chance)
        parts += len(sizes) - 1
        assert GrowingPlay(raw, sizes, fails, chance).run(most_retries=2) == expected, f"seed {seed}-{number}"
    assert parts > GRAPHS // 8


@pytest.mark.parametrize("seed", range(4))
def test_retries_change_when_nodes_run_but_not_how_they_end(seed: int) -> None:
    retries = 0
    for number in range(GRAPHS // 4):
        chance = random.Random(f"{seed}-{number}")
        graph = changeable(parse_graph(draw_graph(chance)), {})
        fails = {node.index for node in graph.nodes if chance.random() < 0.25}
        expected = Play(graph, fails, random.Random(0)).run(most_retries=0)
        play = Play(graph, fails, chance)
        assert play.run(most_retries=6) == expected, f"seed {seed}-{number}"
        retries += sum(state.generation for state in play.states)
    assert retries > GRAPHS // 4
