"""What Temporal shows of a running task: its status as search attributes, and its current details."""

from __future__ import annotations

from typing import TYPE_CHECKING

from temporalio import workflow

from flowkit.models import StatusChange, TaskStatus
from flowkit.workflows.display import details_markdown
from flowkit.workflows.display import task_status as views
from flowkit.workflows.display.details import SlotLimits

if TYPE_CHECKING:
    from flowkit.models import Graph
    from flowkit.workflows.scheduling.scheduler import Scheduler
    from flowkit.workflows.state_codec import TaskState


class StatusPublisher:
    """Keep the task's status and status history, publish them to Temporal, and render the current details.

    The current details are Markdown that the Web UI shows on the page of the run (see `details_markdown`).
    """

    def __init__(self, state: TaskState, graph: Graph, scheduler: Scheduler) -> None:
        self._state = state
        self._graph = graph
        self._scheduler = scheduler
        self._queues = details_markdown.TaskQueues(
            namespace=workflow.info().namespace, prefix=state.opened.settings.queue
        )
        self._limits = SlotLimits(
            window=state.opened.settings.window, max_in_flight=state.opened.settings.max_in_flight
        )
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

    def details(self) -> str:
        """Return the current details. They are rendered when they are queried, because few of them are ever read."""
        return details_markdown.render(
            self.status,
            self._scheduler,
            self._queues,
            self._reason,
            self._limits,
            workflow.now().timestamp(),
            self.silent_nodes,
        )

    def finish(self, reason: str | None) -> None:
        """Note in the details why the task was stopped; None if it was not stopped."""
        self._reason = reason
