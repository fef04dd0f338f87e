"""A request for admission runs, cancels and reports only the workflow that its dispatcher has started."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flowkit.adapters.tasks.store import TaskStore
from flowkit.admission.dispatcher import Dispatcher
from flowkit.admission.models import Limits, State
from flowkit.admission.queue import AdmissionQueue, request_of
from flowkit.admission.store import AdmissionStore
from flowkit.client import TaskClient
from flowkit.models.admission import Admission
from tests.integration.harness import node

if TYPE_CHECKING:
    from flowkit.core.utils import Fields
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

GIVEN = {"params": {}, "graph": {"nodes": [node("z", "approval")]}}


class Process:
    """The queue and the dispatcher of one process, whose steps the test makes."""

    def __init__(self, harness: Harness, client: object) -> None:
        self.store = AdmissionStore(harness.db, queue=harness.queue)
        self.queue = AdmissionQueue(self.store)
        self.tasks = TaskClient(client, TaskStore(harness.db), queue=harness.queue)  # type: ignore[arg-type]
        self.dispatcher = Dispatcher(self.queue, self.tasks)

    async def popped(self, task_id: str) -> Fields:
        """Submit a request, and return it with its slot."""
        await self.store.prepare()
        await self.store.set_limits(replace(Limits(), max_active=10))
        await self.queue.submit(request_of(Admission(user_id="eve"), task_id, GIVEN))
        [item] = await self.queue.dispatch()
        return item

    async def state(self, task_id: str) -> tuple[State, str | None]:
        """Return the state of a request, and its reason."""
        ticket = await self.queue.find(task_id)
        assert ticket is not None
        return ticket.state, ticket.reason


@pytest.mark.parametrize("deployment", ["same", "other"])
async def test_a_request_adopts_and_cancels_no_task_that_something_else_has_started(
    harness: Harness, other_harness: Harness, deployment: str
) -> None:
    victim = await harness.create(node("a", "approval"))
    process = Process(harness if deployment == "same" else other_harness, await harness.client())
    item = await process.popped(victim)
    await process.dispatcher._cancel({**item, "cancel": {"reason": "by a stranger"}})
    assert await process.state(victim) == (State.FAILED, "task_id_taken")
    found = await process.tasks.look_up(victim)
    assert (found.description is not None) is (deployment == "same")
    history = await (await harness.handle(victim)).fetch_history()
    assert not any(
        each.HasField("workflow_execution_cancel_requested_event_attributes") for each in history.events
    )


async def test_a_crash_between_the_start_and_its_note_finds_the_own_workflow(harness: Harness) -> None:
    first = Process(harness, await harness.client())
    item = await first.popped(harness.queue)
    await first.tasks.start_task(
        harness.queue, owner=await first.dispatcher._owner_of(item), graph=GIVEN["graph"], params={}
    )
    assert await first.state(harness.queue) == (State.STARTING, None)
    second = Process(harness, await harness.client())
    await second.dispatcher._start(item)
    assert await second.state(harness.queue) == (State.ACTIVE, None)
    await harness.engine()
    await harness.until_node(harness.queue, "z", "deferred", epoch=0)
    await harness.coordinator.decide(harness.queue, "z", "approve")
    await harness.until_status(harness.queue, "finished")
    await second.dispatcher._reconcile()
    assert await second.state(harness.queue) == (State.COMPLETED, None)


async def test_the_end_of_a_task_ends_no_request_that_has_not_started_it(harness: Harness) -> None:
    await harness.engine()
    task_id = await harness.create(node("a", "approval"))
    await harness.until_node(task_id, "a", "deferred", epoch=0)
    process = Process(harness, await harness.client())
    await process.popped(task_id)
    await harness.coordinator.decide(task_id, "a", "approve")
    await harness.result(task_id)
    assert await process.state(task_id) == (State.STARTING, None)
