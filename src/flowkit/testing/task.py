"""A task without Temporal. It follows the rules of the Task workflow, without timers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from temporalio.exceptions import FailureError

from flowkit.models import (
    AttemptFailure,
    CloseTask,
    NodeState,
    NodeStatus,
    OpenTask,
    RecordTask,
    SkipReason,
    StatusChange,
    TaskStatus,
    temporal_names,
)
from flowkit.testing.executors import RUN
from flowkit.workflows.display.task_status import failure_text
from flowkit.workflows.document import node_record, pulled_nodes
from flowkit.workflows.evaluations import apply_results, requests, results_of, value_failure, value_request
from flowkit.workflows.node import attempt_input, read_failure
from flowkit.workflows.retry import UNREQUESTED_CANCEL, Fail, decide, note_failure
from flowkit.workflows.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flowkit.graph.submission import NewTask
    from flowkit.models import FirstBatch, Graph, Node, NodeRecord
    from flowkit.testing.executors import Executors
    from flowkit.workflows.evaluations import Results
    from flowkit.workflows.scheduling.conditions import DueCondition

_RUN_SEQ = 1


class InProcessTask:
    """Runs one task. Nodes start when their gates open, and retries follow immediately."""

    def __init__(self, task_id: str, new: NewTask, graph: Graph, executors: Executors) -> None:
        self.task_id = task_id
        self.scheduler = Scheduler(_without_waits(graph), [NodeState() for _ in graph.nodes])
        self.reason: str | None = None
        """Why the task failed, or None."""
        self._new = new
        self._executors = executors
        self._pulled = pulled_nodes(graph.nodes)
        self._history = [
            _make_change(None, TaskStatus.QUEUED),
            _make_change(TaskStatus.QUEUED, TaskStatus.RUNNING),
        ]
        self._running: dict[asyncio.Task[NodeStatus], int] = {}
        """The nodes that run, by index. A node stays here until the scheduler knows that it has ended."""
        self._done: list[asyncio.Task[NodeStatus]] = []
        """Those of the running nodes that have ended, oldest first."""
        self._woken = asyncio.Event()
        """Set when a node has ended, or has stored the first batch that other nodes wait for."""
        executors.signals.receive = self._add_batch

    @property
    def status(self) -> TaskStatus:
        """The final status of the task."""
        return TaskStatus.FAILED if self.scheduler.failures else TaskStatus.FINISHED

    async def run(self) -> None:
        """Run the whole task: open its document, run its nodes and close the document."""
        await self._executors.engine(temporal_names.OPEN_TASK, self._make_opening())
        await self._run_nodes()
        if self.scheduler.failures:
            self.scheduler.end_all(NodeStatus.CANCELLED, SkipReason.TASK_FAILED)
            self.reason = failure_text(self.scheduler)
        await self._executors.engine(temporal_names.CLOSE_TASK, self._make_closing())

    async def _run_nodes(self) -> None:
        try:
            while not self.scheduler.done and self.scheduler.hard_failure is None:
                for index in self.scheduler.pop_ready():
                    self._start(self.scheduler.nodes[index])
                if due := self.scheduler.pop_due():
                    await self._evaluate(due)
                    continue
                await self._woken.wait()
                self._woken.clear()
                self._end_nodes()
                await self._record()
        finally:
            for each in self._running:
                each.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _start(self, node: Node) -> None:
        task = asyncio.create_task(self._run_node(node))
        self._running[task] = node.index
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[NodeStatus]) -> None:
        self._done.append(task)
        self._woken.set()

    def _end_nodes(self) -> None:
        """Let the scheduler know of the nodes that have ended. Raise the error of one that has not run as it must."""
        done, self._done = self._done, []
        for each in done:
            index = self._running.pop(each)
            self.scheduler.changed.add(index)
            self.scheduler.end(index, each.result())

    def _add_batch(self, batch: FirstBatch) -> None:
        if self.scheduler.accept_batch(batch):
            self._woken.set()

    async def _evaluate(self, due: list[DueCondition]) -> None:
        """Evaluate conditions while running nodes continue, and hand the results to the scheduler."""
        results: Results = {}
        for part in requests(self.scheduler, due, self.task_id, self._executors.settings.deployment):
            found = await self._executors.engine(temporal_names.EVALUATE_CONDITIONS, part)
            results |= results_of(part, found)
        apply_results(self.scheduler, due, results)
        await self._record()

    async def _run_node(self, node: Node) -> NodeStatus:
        state = self.scheduler.states[node.index]
        if node.is_engine_node:
            return NodeStatus.FINISHED
        if failure := await self._evaluate_values(node, state):
            note_failure(state, failure.code, failure.message)
            return NodeStatus.FAILED
        while failure := await self._run_attempt(node, state):
            decision = decide(node.retry_policy, failure, state, 0.0)
            if isinstance(decision, Fail):
                note_failure(state, decision.code, decision.message)
                return NodeStatus.FAILED
        return NodeStatus.FINISHED

    async def _evaluate_values(self, node: Node, state: NodeState) -> AttemptFailure | None:
        if not node.expressions or state.evaluated:
            return None
        deployment = self._executors.settings.deployment
        request = value_request(self.scheduler, node, self.task_id, deployment)
        found = await self._executors.engine(temporal_names.EVALUATE_CONDITIONS, request)
        return value_failure(node, state, found)

    async def _run_attempt(self, node: Node, state: NodeState) -> AttemptFailure | None:
        state.epoch += 1
        state.status = NodeStatus.RUNNING
        try:
            given = attempt_input(self.scheduler, self._executors.settings, self.task_id, node)
            await self._executors.attempt(node, given)
        except FailureError as error:
            return read_failure(error) or UNREQUESTED_CANCEL
        return None

    async def _record(self) -> None:
        """Record the nodes that ended without writing their own end. Nodes that pull from them wait for this."""
        nodes = self._make_records(sorted(self.scheduler.changed))
        self.scheduler.changed.clear()
        if nodes:
            await self._executors.engine(temporal_names.RECORD, self._make_recording(nodes))

    def _make_records(self, indexes: Iterable[int]) -> list[NodeRecord]:
        """Return what to record of these nodes: nothing of those that have not ended, or whose attempt
        wrote the end.
        """
        nodes, states = self.scheduler.nodes, self.scheduler.states
        return [
            node_record(nodes[index], states[index], pulled=nodes[index].node_id in self._pulled)
            for index in indexes
            if states[index].status.ended
            and (nodes[index].is_engine_node or states[index].status is not NodeStatus.FINISHED)
        ]

    def _make_opening(self) -> OpenTask:
        return OpenTask(
            task_id=self.task_id,
            first_run_id=RUN,
            run_id=RUN,
            at=time.time(),
            graph=self._new.graph,
            params=self._new.params,
        )

    def _make_recording(self, nodes: list[NodeRecord]) -> RecordTask:
        return RecordTask(
            task_id=self.task_id,
            run_id=RUN,
            run_seq=_RUN_SEQ,
            at=time.time(),
            nodes=nodes,
            status=TaskStatus.RUNNING,
            status_history=self._history,
        )

    def _make_closing(self) -> CloseTask:
        return CloseTask(
            task_id=self.task_id,
            run_id=RUN,
            run_seq=_RUN_SEQ,
            at=time.time(),
            status=self.status,
            status_history=[*self._history, _make_change(TaskStatus.RUNNING, self.status)],
            nodes=self._make_records(range(len(self.scheduler.nodes))),
            handled_failures=self.scheduler.handled_failures,
            reason=self.reason,
        )


def _without_waits(graph: Graph) -> Graph:
    """Return a graph whose nodes wait for no operator: no failure is held, and every prerequisite is satisfied."""
    return replace(graph, nodes=tuple(replace(node, hold_sec=None, prerequisites=()) for node in graph.nodes))


def _make_change(before: TaskStatus | None, after: TaskStatus) -> StatusChange:
    return StatusChange(from_=before.value if before else None, to=after.value, at=time.time())
