"""Submits tasks to the admission queue, and finds and cancels their requests, for `TaskClient`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flowkit.admission.models import ENDED, Changed, State
from flowkit.admission.queue import AdmissionQueue, queue_with, request_of
from flowkit.admission.store import AdmissionStore
from flowkit.errors import AdmissionRejected, FlowKitError, TaskCancelled, TaskFailed
from flowkit.products import PendingTask
from flowkit.text import format_duration, one_line

if TYPE_CHECKING:
    from flowkit.adapters.mongo import Database
    from flowkit.admission.models import Ticket
    from flowkit.models.admission import Admission


class AdmissionClient:
    """The tasks of one database that wait for admission. Submits to the queue of one engine."""

    def __init__(self, db: Database, queue: str) -> None:
        self._db = db
        self._store = AdmissionStore(db, queue=queue)
        self._queue: AdmissionQueue | None = None
        """The queue to which `submit` submits, once it has."""

    async def submit(self, admission: Admission, task_id: str, given: dict[str, Any]) -> None:
        """Submit a task. If the user has submitted a task with this id already, leave that unchanged.

        Raise TaskIdTaken if another one has used the id, AdmissionRejected if a limit is reached, ConfigError and
        StoreUnavailable.
        """
        request = request_of(admission, task_id, given)
        if self._queue is None:
            await self._store.prepare()
            self._queue = AdmissionQueue(self._store)
        ticket = await self._queue.submit(request)
        if not ticket.accepted:
            raise AdmissionRejected(ticket.error or "", ticket.reason or "", ticket.retry_after_sec)

    async def find(self, task_id: str) -> PendingTask | None:
        """Return how a task waits, or what became of its request; None if it was not submitted.

        Raise StoreUnavailable.
        """
        queue = await queue_with(self._db, task_id)
        ticket = None if queue is None else await queue.find(task_id)
        return None if ticket is None else _pending(ticket)

    async def cancel(self, task_id: str, reason: str) -> bool:
        """Cancel the request of a task. Return False if it has ended or does not exist. Raise StoreUnavailable."""
        queue = await queue_with(self._db, task_id)
        if queue is None:
            return False
        changed = await queue.cancel(task_id, reason=reason, by="flowkit")
        return changed.outcome in (Changed.DONE, Changed.REQUESTED)


def _pending(ticket: Ticket) -> PendingTask:
    return PendingTask(
        product="admission",
        state=ticket.state,
        text=describe(ticket),
        fields=asdict(ticket),
        started=ticket.state is State.ACTIVE,
        error=_end_error(ticket) if ticket.state in ENDED else None,
    )


def _end_error(ticket: Ticket) -> FlowKitError:
    """Return the error of a task whose request ended before the task started."""
    if ticket.state is State.CANCELLED:
        return TaskCancelled(ticket.execution_id, ticket.error)
    reason = ticket.reason or ticket.state.value
    return TaskFailed(ticket.execution_id, ticket.error or reason, reason)


def describe(ticket: Ticket) -> str:
    """Return one line about a request."""
    name = f"request {ticket.execution_id}"
    if ticket.state is State.QUEUED:
        return f"{name} waits: position {ticket.position:,}, priority {ticket.priority}, {_wait(ticket)}"
    if ticket.cancel_requested:
        return f"{name} is {ticket.state}; its end is requested"
    if ticket.state not in ENDED:
        return f"{name} is {ticket.state}"
    ended = "timed out" if ticket.state is State.TIMEOUT else ticket.state
    why = f": {one_line(ticket.error)}" if ticket.error and ticket.error != ticket.reason else ""
    return f"{name} {ended}{why}{f' ({ticket.reason})' if ticket.reason else ''}"


def _wait(ticket: Ticket) -> str:
    if ticket.estimated_wait_sec is None:
        return "estimated wait unknown"
    return f"estimated wait {format_duration(ticket.estimated_wait_sec)}"
