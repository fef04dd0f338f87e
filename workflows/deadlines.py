"""Enforce the deadlines of a running task with a single timer, which is armed for the earliest deadline."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from temporalio import workflow

from flowkit import reason_codes
from flowkit.workflows.display.summaries import deadline_summary
from flowkit.workflows.scheduling.deadlines import Deadlines, node_failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.models import AttemptFailure, Graph
    from flowkit.workflows.state_codec import TaskState

_SHORTEST_TIMER_SEC = 0.001


class TaskDeadlines:
    """The deadlines of a task and its nodes. A task without deadlines has no timer."""

    def __init__(
        self, state: TaskState, graph: Graph, *, stop_node: Callable[[int, AttemptFailure, str], None]
    ) -> None:
        """Call `stop_node` with the index, the failure and the cancel reason of each node that must end."""
        self._deadlines = Deadlines(graph, state.nodes, opened_at=state.opened.created_at)
        self._nodes = graph.nodes
        self._stop_node = stop_node
        self._timer: asyncio.Task[None] | None = None
        self._armed_for = 0.0
        self.has_events = False
        """Whether the timer has fired, so that the main loop must call `process_events`."""
        self.task_failure: str | None = None
        """Why the task must fail, once it has exceeded its deadline."""

    def begin(self, ready: list[int]) -> list[int]:
        """Begin the deadlines of the nodes whose gates have opened, arm the timer, and return `ready`."""
        self._deadlines.begin(ready, workflow.now().timestamp())
        self._arm()
        return ready

    def process_events(self) -> None:
        """Stop the nodes that have exceeded their deadlines, and set `task_failure` if the task has."""
        self.has_events, now = False, workflow.now().timestamp()
        for index in self._deadlines.pop_overdue(now):
            self._stop_node(index, node_failure(self._nodes[index]), reason_codes.DEADLINE)
        self.task_failure = self._deadlines.task_failure(now)

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        """Arm the timer for the earliest deadline, unless it is armed for this one or an earlier one.

        A timer for the deadline of a node that has ended stays, because it is cheaper to let it fire in vain.
        """
        due = self._deadlines.next_due()
        if due is None or (self._timer is not None and self._armed_for <= due[0]):
            return
        self.stop()
        self._armed_for = due[0]
        self._timer = asyncio.create_task(self._fire(*due))

    async def _fire(self, at: float, limits: str) -> None:
        wait_sec = max(at - workflow.now().timestamp(), _SHORTEST_TIMER_SEC)
        await workflow.sleep(wait_sec, summary=deadline_summary(limits, wait_sec))
        self._timer, self.has_events = None, True
