"""What people see of a running task in Temporal: its status, search attributes and current details."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from temporalio import workflow

from flowkit.models import StatusChange, TaskStatus
from flowkit.workflows import details, views

if TYPE_CHECKING:
    from flowkit.models import Graph
    from flowkit.workflows.scheduler import Walk
    from flowkit.workflows.state_codec import TaskState

_DRAWN_EVERY_SEC = 1.0
_REDRAW_SEC = 5.0
"""A timer costs the server as much as half a node: it only draws what nobody drew meanwhile."""


class Display:
    """The task's own status with its history, and the picture of its nodes."""

    def __init__(self, state: TaskState, graph: Graph, walk: Walk) -> None:
        self._state = state
        self._graph = graph
        self._walk = walk
        self._drawing: asyncio.Task[None] | None = None
        self._home = details.Home(namespace=workflow.info().namespace, queue=state.opened.settings.queue)
        self._drawn_at = 0.0
        self._reason: str | None = None
        self.status = TaskStatus(state.status_history[-1].to)
        self._shorten()

    @property
    def history(self) -> list[StatusChange]:
        """The statuses that the task has had: the first and the latest."""
        return self._state.status_history

    @property
    def omitted(self) -> int:
        """How many entries `history` leaves out in its middle."""
        return self._state.status_history_omitted

    def _shorten(self) -> None:
        self._state.status_history_omitted += views.shorten(self.history)

    def become(self, status: TaskStatus) -> bool:
        """Give the task a status; False when it has it already."""
        if status is self.status:
            return False
        at = workflow.now().timestamp()
        self.history.append(StatusChange(from_=self.status.value, to=status.value, at=at))
        self._shorten()
        self.status = status
        registered = self._state.opened.settings.search_attributes
        if pairs := views.search_attributes(registered, self.history, self._graph, self._state.params):
            workflow.upsert_search_attributes(pairs)
        return True

    def draw(self) -> None:
        """Bring the details up to date; a large graph is redrawn once a second at most, and then within five."""
        if len(self._walk.nodes) <= details.ROWS or self._drawing and self._is_old():
            self._draw_now()
        elif self._drawing is None:
            self._drawing = asyncio.create_task(self._draw_twice())

    def _is_old(self) -> bool:
        return workflow.now().timestamp() - self._drawn_at >= _DRAWN_EVERY_SEC

    def finish(self, reason: str | None) -> None:
        """Draw for the last time; `reason` tells why the task was stopped, if it was."""
        self._reason = reason
        self.stop()
        self._draw_now()

    def stop(self) -> None:
        """Leave no timer behind."""
        if self._drawing is not None:
            self._drawing.cancel()
            self._drawing = None

    async def _draw_twice(self) -> None:
        self._draw_now()
        await workflow.sleep(_REDRAW_SEC, summary="redraw the details")
        self._draw_now()
        self._drawing = None

    def _draw_now(self) -> None:
        self._drawn_at = workflow.now().timestamp()
        workflow.set_current_details(details.render(self.status, self._walk, self._home, self._reason))
