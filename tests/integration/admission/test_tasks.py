"""Tasks that wait for admission: they start in the order of their bands, and each end frees a slot."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError

from flowkit import Admission
from flowkit.adapters.tasks.store import TaskStore
from flowkit.admission.dispatcher import Dispatcher
from flowkit.admission.models import Changed, Limits, Report, State
from flowkit.admission.process import AdmissionProcess, AdmissionSettings
from flowkit.admission.queue import AdmissionQueue
from flowkit.admission.store import AdmissionStore
from flowkit.client import TaskClient
from flowkit.errors import AdmissionRejected, ConfigError, TaskCancelled, TaskFailed
from flowkit.models.admission import Priority
from tests.integration.handlers import Quick
from tests.integration.harness import Harness, eventually, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.admission.models import Ticket

pytestmark = pytest.mark.server


@asynccontextmanager
async def admission(harness: Harness, **limits: Any) -> AsyncIterator[AdmissionProcess]:
    """Run a process of the queue."""
    store = AdmissionStore(harness.db, queue=harness.queue)
    await store.set_limits(replace(Limits(), **limits))
    process = AdmissionProcess(
        db=harness.db, client=await harness.client(), settings=AdmissionSettings(queue=harness.queue)
    )
    await process.start()
    try:
        yield process
    finally:
        await process.stop()


async def until(queue: AdmissionQueue, task_id: str, *states: State) -> Ticket:
    """Wait until a request has one of these states."""

    async def look() -> Ticket | None:
        ticket = await queue.find(task_id)
        return ticket if ticket is not None and ticket.state in states else None

    return await eventually(look)


async def submit(harness: Harness, task_id: str, *, user: str = "dora", **given: Any) -> str:
    """Submit a task of one node."""
    admit = Admission(user_id=user, **given)
    graph = {"nodes": [node("only", "inline")]}
    return await harness.coordinator.create_task(params={}, graph=graph, task_id=task_id, admit=admit)


class Inline(Quick):
    """The same inside the engine."""

    role = "inline"
    inline = True


async def test_tasks_run_in_the_order_of_their_bands_and_free_their_slots(harness: Harness) -> None:
    names = [f"{harness.queue}-{number}" for number in range(6)]
    bands = ["low", "normal", "critical", "high", "background", "critical"]
    async with admission(harness, max_active=1) as process:
        await submit(harness, names[0], priority=bands[0])
        await until(process.queue, names[0], State.ACTIVE)
        for name, band in zip(names[1:], bands[1:], strict=True):
            await submit(harness, name, priority=band)
        await harness.engine({"inline": Inline()})
        tickets = [await until(process.queue, name, State.COMPLETED) for name in names]
        started = sorted(tickets[1:], key=lambda ticket: ticket.started_at or 0)
        assert [each.execution_id for each in started] == [names[at] for at in (2, 5, 3, 1, 4)]
        counters = await eventually(lambda: settled(process.queue))
    assert counters["pending"] == counters["active"] == 0
    document = await harness.document(names[0])
    assert document["status"] == "finished"


async def settled(queue: AdmissionQueue) -> dict[str, Any] | None:
    """Return the counters once nothing is active and nothing in doubt."""
    counters = await queue.store.counters()
    return counters if not counters["active"] and not counters["doubt"] else None


async def test_a_user_at_its_limit_is_rejected_and_others_are_not(harness: Harness) -> None:
    async with admission(harness, max_per_user=2):
        for number in range(2):
            await submit(harness, f"{harness.queue}-{number}")
        with pytest.raises(AdmissionRejected, match=r"User execution limit exceeded \(2\)") as caught:
            await submit(harness, f"{harness.queue}-2")
        assert (caught.value.reason, caught.value.retry_after_sec) == ("user_limit", 10.0)
        await submit(harness, f"{harness.queue}-3", user="emil")


async def test_terminated_and_unstartable_tasks_free_their_slots(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowkit.admission.dispatcher.RECONCILE_SEC", 0.2)
    async with admission(harness, max_active=1) as process:
        for number in range(3):
            await submit(harness, f"{harness.queue}-{number}")
        first = await until(process.queue, f"{harness.queue}-0", State.ACTIVE)
        await (await harness.client()).get_workflow_handle(first.execution_id).terminate("test")
        ended = await until(process.queue, first.execution_id, State.FAILED)
        assert ended.reason == "terminated"
        await until(process.queue, f"{harness.queue}-1", State.ACTIVE)
        waiting = await process.queue.cancel(f"{harness.queue}-2", reason="not needed", by="test")
        assert waiting.outcome is Changed.DONE
        running = await process.queue.cancel(f"{harness.queue}-1", reason="not needed", by="test")
        assert running.outcome is Changed.REQUESTED
        await harness.engine({"inline": Inline()})
        await until(process.queue, f"{harness.queue}-1", State.CANCELLED, State.COMPLETED)


async def test_an_engine_without_admission_frees_slots_by_the_check_of_the_dispatcher(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowkit.admission.dispatcher.RECONCILE_SEC", 0.2)
    monkeypatch.setattr("flowkit.products.on_closed", lambda db: [])
    await harness.engine({"inline": Inline()})
    async with admission(harness, max_active=1) as process:
        names = [await submit(harness, f"{harness.queue}-{number}") for number in range(2)]
        for name in names:
            await until(process.queue, name, State.COMPLETED)
        await eventually(lambda: settled(process.queue))


async def test_the_result_of_a_task_that_waits_can_be_awaited(harness: Harness) -> None:
    names = [f"{harness.queue}-{number}" for number in range(4)]
    async with admission(harness, max_active=1) as process:
        for name in names:
            await submit(harness, name)
        await until(process.queue, names[0], State.ACTIVE)
        results = [asyncio.create_task(harness.coordinator.result(name)) for name in names]
        assert await harness.coordinator.cancel_task(names[3], reason="not needed")
        with pytest.raises(TaskCancelled, match="not needed"):
            await results[3]
        assert not await harness.coordinator.cancel_task(names[3])
        await process.queue.report(names[2], Report(state=State.EXPIRED, reason="stale", error="too late"))
        with pytest.raises(TaskFailed, match="too late"):
            await results[2]
        await harness.engine({"inline": Inline()})
        assert [(await result).task_id for result in results[:2]] == names[:2]


async def test_a_change_of_priority_keeps_the_arrival(harness: Harness) -> None:
    async with admission(harness, max_active=1) as process:
        for number in range(4):
            await submit(harness, f"{harness.queue}-{number}")
        await until(process.queue, f"{harness.queue}-0", State.ACTIVE)
        moved = await process.queue.set_priority(f"{harness.queue}-3", Priority.HIGH)
        assert moved.ticket is not None
        assert (moved.outcome, moved.ticket.position) == (Changed.DONE, 1)
        late = await process.queue.set_priority(f"{harness.queue}-0", Priority.HIGH)
        assert late.outcome is Changed.NOT_WAITING
        status = await process.queue.status()
        assert (status.pending, status.active, status.by_priority) == (3, 1, {"high": 1, "normal": 2})
        assert [(load.user_id, load.pending, load.active) for load in status.top_users] == [("dora", 3, 1)]


async def test_a_start_that_arrives_after_a_cancel_starts_nothing(harness: Harness) -> None:
    client = await harness.client()
    store = AdmissionStore(harness.db, queue=harness.queue)
    queue = AdmissionQueue(store)
    tasks = TaskClient(client, TaskStore(harness.db), queue=harness.queue)
    dispatcher = Dispatcher(queue, tasks)
    await submit(harness, harness.queue)
    [item] = await queue.dispatch()
    assert (await queue.cancel(harness.queue, reason="test", by="me")).outcome is Changed.REQUESTED
    await dispatcher._keep_up()
    await harness.engine({"inline": Inline()})
    await until(queue, harness.queue, State.CANCELLED)
    with pytest.raises(WorkflowFailureError):  # The queue knows the end before the workflow has ended.
        await client.get_workflow_handle(harness.queue).result()
    first = await client.get_workflow_handle(harness.queue).describe()
    await dispatcher._start(item)
    last = await client.get_workflow_handle(harness.queue).describe()
    assert (last.run_id, last.status) == (first.run_id, WorkflowExecutionStatus.CANCELED)
    assert (await until(queue, harness.queue, State.CANCELLED)).cancel_requested is False


async def test_a_backfill_submits_its_tasks_with_their_nominal_times_and_its_cancel_leaves_none_queued(
    harness: Harness,
) -> None:
    schedules, backfills = await harness.coordinator.schedules(), await harness.coordinator.backfills()
    name, graph = f"hourly-{harness.queue}", {"nodes": [node("only", "inline")]}
    await schedules.create(
        name, graph=graph, params={"at": {"$cel": "task.scheduled_at"}}, every="1h", jitter="10m"
    )
    await schedules.pause(name)
    async with admission(harness, max_active=1) as process:
        await harness.engine()
        await backfills.create(
            name,
            start="2026-11-01",
            end="2026-11-02",
            max_active=3,
            admission=Admission(user_id="ada"),
            backfill_id=harness.queue,
        )

        async def submitted() -> str | None:
            """Return the task that was admitted, once three are submitted. Any of these may be the first one."""
            items = [each async for each in harness.db.admission_items.find({})]
            active = [each["_id"] for each in items if each["state"] == State.ACTIVE]
            return active[0] if len(items) == 3 and active else None

        first = await eventually(submitted)
        await backfills.cancel(harness.queue)

        async def one_is_left() -> bool:
            return (await backfills.status(harness.queue)).counts.text == "1 running, 23 cancelled"

        await eventually(one_is_left)
        await harness.engine({"inline": Inline()})
        await until(process.queue, first, State.COMPLETED)

        async def is_cancelled() -> bool:
            return (await backfills.status(harness.queue)).backfill.state.ended

        await eventually(is_cancelled)
    view = await backfills.status(harness.queue)
    assert view.counts.text == "1 succeeded, 23 cancelled"
    document = await harness.document(first)
    nominal = first.removeprefix(f"{name}-")
    assert (document["scheduled_at"], document["params"]) == (nominal, {"at": nominal})
    assert await harness.db.tasks.count_documents({}) == 1
    with pytest.raises(ConfigError, match="starts no task again whose request has ended"):
        await backfills.retry_failed(harness.queue)
