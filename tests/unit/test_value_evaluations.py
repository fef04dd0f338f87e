"""How many nodes of a task have their values by expression evaluated at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.unit.event_loop import let_other_tasks_run

from flowkit.models import ConditionResults, NodeState
from flowkit.workflows import node as node_module
from flowkit.workflows.node import MOST_EVALUATIONS, run_node

if TYPE_CHECKING:
    import pytest

NODES = 3 * MOST_EVALUATIONS


class Evaluations:
    """Stands in for the activity, which ends when the test opens the gate."""

    def __init__(self) -> None:
        self.running = self.most = self.started = 0
        self.gate = asyncio.Event()

    async def evaluate(self, _: Any) -> ConditionResults:
        """Count the evaluation, and wait for the gate."""
        self.running, self.started = self.running + 1, self.started + 1
        self.most = max(self.most, self.running)
        await self.gate.wait()
        self.running -= 1
        return ConditionResults(results=["no such key"])


class Nodes:
    """What `run_node` reads of the running nodes of a task, up to the evaluation of values."""

    def __init__(self) -> None:
        self.evaluations = asyncio.Semaphore(MOST_EVALUATIONS)
        self.settings, self.scheduler, self.local = SimpleNamespace(deployment=""), None, None
        self.draining = False

    def starts_no_attempt_of(self, _: Any) -> bool:
        """Return whether the task is draining."""
        return self.draining

    async def reserve_input_bytes(self, _: int) -> None:
        """Accept any size."""


def start_all(monkeypatch: pytest.MonkeyPatch, nodes: Nodes, evaluations: Evaluations) -> list[Any]:
    """Start nodes whose expression has no value."""
    request = SimpleNamespace(texts=["params.x"], nodes={})
    monkeypatch.setattr("temporalio.workflow.info", lambda: SimpleNamespace(workflow_id="t"))
    monkeypatch.setattr(node_module, "value_request", lambda *_: request)
    monkeypatch.setattr(node_module, "evaluate_values", evaluations.evaluate)
    node: Any = SimpleNamespace(expressions=(("io.x", "params.x"),), map=None, approval=None, delay=None)
    running: Any = nodes
    return [asyncio.ensure_future(run_node(running, node, NodeState())) for _ in range(NODES)]


async def settle() -> None:
    """Let all nodes continue as far as they can."""
    for _ in range(NODES):
        await let_other_tasks_run()


async def test_a_wide_graph_evaluates_the_values_of_few_nodes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Temporal fails each workflow task of a task with 2,000 pending activities."""
    evaluations = Evaluations()
    running = start_all(monkeypatch, Nodes(), evaluations)
    await settle()
    evaluations.gate.set()
    assert {await each for each in running} == {"failed"}
    assert (evaluations.most, evaluations.started) == (MOST_EVALUATIONS, NODES)


async def test_a_task_that_drains_starts_no_further_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes that wait for their turn return as nodes that have not started."""
    evaluations, nodes = Evaluations(), Nodes()
    running = start_all(monkeypatch, nodes, evaluations)
    await settle()
    nodes.draining = True
    evaluations.gate.set()
    ended = [await each for each in running]
    assert (evaluations.started, ended.count(None)) == (MOST_EVALUATIONS, NODES - MOST_EVALUATIONS)
