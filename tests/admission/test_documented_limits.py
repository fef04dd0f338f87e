"""The two limits that the events of executions document, with their numbers and texts."""

from __future__ import annotations

import asyncio
from typing import Any

from flowkit.admission.models import Door, Kind, Request, State
from flowkit.admission.queue import AdmissionQueue
from tests.admission.memory import MemoryStore, Shared


def new_queue() -> AdmissionQueue:
    """Return an empty queue with the default limits."""
    store: Any = MemoryStore(Shared())
    return AdmissionQueue(store)


def request(number: int, user_id: str) -> Request:
    """Return a request of a user."""
    return Request(
        execution_id=f"ex-{number}", user_id=user_id, door=Door.PYTHON, kind=Kind.EXECUTION, body={}
    )


async def rejection(queue: AdmissionQueue, last: Request) -> dict[str, Any]:
    """Return the fields of the event that rejects a request."""
    assert (await queue.submit(last)).state is State.REJECTED
    [event] = await queue.events(last.execution_id)
    wanted = ("event_type", "exit_code", "error_type", "error_message", "resource_usage", "stdout", "stderr")
    return {name: event[name] for name in wanted}


async def test_after_ten_thousand_waiting_requests_the_queue_is_full() -> None:
    queue = new_queue()
    tickets = await asyncio.gather(
        *(queue.submit(request(number, f"u-{number % 200}")) for number in range(10_000))
    )
    assert {ticket.state for ticket in tickets} == {State.QUEUED}
    assert await rejection(queue, request(10_000, "u-new")) == {
        "event_type": "execution_failed",
        "exit_code": -1,
        "error_type": "resource_limit",
        "error_message": "Queue is full",
        "resource_usage": None,
        "stdout": "",
        "stderr": "Queue full: Queue is full. Queue size: 10000",
    }


async def test_a_user_with_a_hundred_requests_gets_no_other_one() -> None:
    queue = new_queue()
    await asyncio.gather(*(queue.submit(request(number, f"u-{number}")) for number in range(712)))
    await asyncio.gather(*(queue.submit(request(1_000 + number, "u-dora")) for number in range(100)))
    assert await rejection(queue, request(7042, "u-dora")) == {
        "event_type": "execution_failed",
        "exit_code": -1,
        "error_type": "resource_limit",
        "error_message": "User execution limit exceeded (100)",
        "resource_usage": None,
        "stdout": "",
        "stderr": "Queue full: User execution limit exceeded (100). Queue size: 812",
    }
    assert (await queue.submit(request(7043, "u-other"))).state is State.QUEUED
