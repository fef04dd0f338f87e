"""Random retries of nodes while a task runs: in the end, every node has ended as it would have without them.

Each node always ends in the same way, so the statuses of a task without actions are the model.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from flowkit.errors import ActionRejected
from flowkit.graph.validation import parse_graph
from flowkit.models import Graph, NodeState, NodeStatus
from flowkit.models.actions import RetryNode
from flowkit.workflows.scheduling.actions import Pauses, Plan, Task, changeable, plan
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
        task = Task(nodes=self.graph.nodes, states=self.states, pauses=Pauses(self.graph.nodes, []))
        try:
            planned = plan(RetryNode(node_id=node.node_id, interrupt=True), task)
        except ActionRejected:
            return
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

    def _begin(self, planned: Plan) -> None:
        self._running -= {*planned.resets}
        for index in planned.interrupts:
            self.states[index].status = NodeStatus.CANCELLING
        self._scheduler.resetting.update(planned.resets)
        self._scheduler.renew(index for index in planned.resets if index not in planned.interrupts)
        self._scheduler.unblock(planned.unblocks)
        self._scheduler.rebuild(self._running)


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
