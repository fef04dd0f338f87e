"""Publish what Temporal shows of a running task: its status as search attributes, and its current details."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from temporalio import workflow

from flowkit.models import StatusChange, TaskStatus
from flowkit.workflows.display import details_markdown, views
from flowkit.workflows.display.notes import SlotLimits

if TYPE_CHECKING:
    from flowkit.models import Graph
    from flowkit.workflows.running_nodes import RunningNodes
    from flowkit.workflows.scheduling.scheduler import Scheduler
    from flowkit.workflows.state_codec import TaskState

_REFRESH_EVERY_SEC = 1.0
_SECOND_REFRESH_SEC = 5.0
"""Delay of the second refresh. It is long because a timer costs the server half as much as a node."""


class StatusPublisher:
    """Keep the task's status and status history, and publish them to Temporal.

    The current details are Markdown that the Web UI shows on the page of the run (see `details_markdown`).
    """

    def __init__(self, state: TaskState, graph: Graph, scheduler: Scheduler) -> None:
        self._state = state
        self._graph = graph
        self._scheduler = scheduler
        self._refreshing: asyncio.Task[None] | None = None
        self._queues = details_markdown.TaskQueues(
            namespace=workflow.info().namespace, prefix=state.opened.settings.queue
        )
        self._limits = SlotLimits(
            window=state.opened.settings.window, max_in_flight=state.opened.settings.max_in_flight
        )
        self._refreshed_at = 0.0
        self._reason: str | None = None
        self.silent_nodes: frozenset[str] = frozenset()
        """The ids of the nodes whose attempts send no heartbeats."""
        self.status = TaskStatus(state.status_history[-1].to)
        self._shorten_history()

    @property
    def history(self) -> list[StatusChange]:
        """The status changes of the task. A long history keeps only the first and the latest."""
        return self._state.status_history

    @property
    def omitted(self) -> int:
        """Number of entries dropped from the middle of `history`."""
        return self._state.status_history_omitted

    def _shorten_history(self) -> None:
        self._state.status_history_omitted += views.shorten_history(self.history)

    def set_status(self, status: TaskStatus) -> bool:
        """Set the task's status. Return False if the task already has it."""
        if status is self.status:
            return False
        at = workflow.now().timestamp()
        self.history.append(StatusChange(from_=self.status.value, to=status.value, at=at))
        self._shorten_history()
        self.status = status
        registered = self._state.opened.settings.search_attributes
        if updates := views.search_attributes(registered, self.history, self._graph, self._state.params):
            workflow.upsert_search_attributes(updates)
        return True

    def refresh(self, running: RunningNodes) -> None:
        """Update the current details.

        For a large graph, this happens at most once per second. A change is shown after at most five seconds. For a
        small graph, it happens at most once per second while only a local activity runs: the next change follows soon,
        and rendering takes as long as the rest of such a step.
        """
        if (
            len(self._scheduler.nodes) <= details_markdown.ROWS
            and running.only_local
            and not self._is_outdated()
        ):
            if self._refreshing is None:
                self._refreshing = asyncio.create_task(self._refresh_after_local(running))
            return
        if len(self._scheduler.nodes) <= details_markdown.ROWS or self._refreshing and self._is_outdated():
            self._refresh_now()
        elif self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh_twice())

    def _is_outdated(self) -> bool:
        return workflow.now().timestamp() - self._refreshed_at >= _REFRESH_EVERY_SEC

    def finish(self, reason: str | None) -> None:
        """Publish the final details. `reason` says why the task was stopped; None if it was not stopped."""
        self._reason = reason
        self.stop_refreshing()
        self._refresh_now()

    def stop_refreshing(self) -> None:
        """Cancel the pending refresh, if there is one."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            self._refreshing = None

    async def _refresh_after_local(self, running: RunningNodes) -> None:
        """Update the details when a regular activity follows, as if the local one failed. This starts no timer."""
        await workflow.wait_condition(lambda: running.in_flight > 0 and not running.only_local)
        self._refreshing = None
        self._refresh_now()

    async def _refresh_twice(self) -> None:
        """Update the details now, and again later for the changes in between."""
        self._refresh_now()
        await workflow.sleep(_SECOND_REFRESH_SEC, summary="refresh the details")
        self._refresh_now()
        self._refreshing = None

    def _refresh_now(self) -> None:
        self._refreshed_at = workflow.now().timestamp()
        details = details_markdown.render(
            self.status,
            self._scheduler,
            self._queues,
            self._reason,
            self._limits,
            self._refreshed_at,
            self.silent_nodes,
        )
        workflow.set_current_details(details)
