"""What a queue does about the submissions of processes that were killed."""

from __future__ import annotations

from typing import Any

import pytest

from flowkit.admission.queue import SESSION_SEC, AdmissionQueue
from flowkit.models.admission import Kind, Limits, Request, State
from tests.admission.memory import MemoryStore, Outage, Shared

REQUEST = Request(execution_id="e", user_id="dora", kind=Kind.EXECUTION, body={})


class Killed(MemoryStore):
    """The store of a process that is killed after it has stored its request."""

    async def hold(self, holds: Any) -> list[bool]:
        """End."""
        raise Outage


async def test_a_rejection_is_reported_even_if_a_repeated_request_is_cut_off() -> None:
    shared, now = Shared(), 0.0
    shared.limits = Limits(max_per_user=0)
    queues = []
    for number, kind in enumerate((MemoryStore, Killed)):
        store: Any = kind(shared)
        queues.append(AdmissionQueue(store, clock=lambda: now, new_id=f"s{number}".format))
    queue, killed = queues
    assert (await queue.submit(REQUEST)).state is State.REJECTED
    with pytest.raises(Outage):
        await killed.submit(REQUEST)
    now += SESSION_SEC + 1
    await queue.recover()
    assert [event["type"] for event in shared.items["e"]["events"]] == ["execution_failed"]
    del shared.items["e"]["unsent"]
    await queue.recover()
    assert "e" not in shared.items
