"""A history replays although queries come while local activities run, or while another engine is frozen, and although
updates that are rejected come between events.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from temporalio import activity, workflow
from temporalio.api.enums.v1 import EventType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import GetSystemInfoRequest, PollWorkflowTaskQueueRequest
from temporalio.client import WorkflowUpdateFailedError
from temporalio.service import RPCError
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner, Worker

from flowkit.engine.activations import OrderedRunner, allow_long_workflow_tasks
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, wait_seconds

if TYPE_CHECKING:
    from temporalio.client import Client

    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

FOREVER = timedelta(minutes=1)


class Moments:
    """What happens in the activities, shared by their threads."""

    def __init__(self) -> None:
        self.first_runs, self.first_may_end, self.second_may_end = (threading.Event() for _ in range(3))


moments = Moments()


@activity.defn
async def first() -> None:
    moments.first_runs.set()
    await asyncio.to_thread(moments.first_may_end.wait, EVENT_TIMEOUT_SEC)


@activity.defn
async def second() -> None:
    await asyncio.to_thread(moments.second_may_end.wait, EVENT_TIMEOUT_SEC)


@workflow.defn(name="Task")
class TwoActivities:
    """Starts its second local activity in the workflow task that a query has come with."""

    def __init__(self) -> None:
        self._goes_on = False
        self._ended = False

    @workflow.signal
    def go_on(self) -> None:
        self._goes_on = True

    @workflow.query
    def state(self) -> list[bool]:
        return [self._goes_on, self._ended]

    @workflow.run
    async def run(self) -> None:
        await workflow.execute_local_activity(first, start_to_close_timeout=FOREVER)
        await workflow.wait_condition(lambda: self._goes_on)
        length = workflow.info().get_current_history_length()
        await workflow.execute_local_activity(second, start_to_close_timeout=FOREVER)
        self._ended = True
        if length == workflow.info().get_current_history_length():
            workflow.upsert_memo({"one task": True})


def runner() -> OrderedRunner:
    """Return the engine's runner, without a sandbox."""
    return OrderedRunner(UnsandboxedWorkflowRunner())


async def test_history_replays_although_a_query_comes_while_a_local_activity_runs(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workflow has a memo if its second activity ends in the workflow task in which it began, as it
    does in a replay.
    """
    client = await harness.client()
    queue = f"queries-{uuid.uuid4().hex[:8]}"
    worker = Worker(
        client,
        task_queue=queue,
        workflows=[TwoActivities],
        activities=[first, second],
        workflow_runner=runner(),
    )
    async with worker:
        for _ in range(10):  # a query comes with a workflow task only if it arrives while the one before runs
            monkeypatch.setitem(globals(), "moments", Moments())
            handle = await client.start_workflow(TwoActivities.run, id=uuid.uuid4().hex, task_queue=queue)
            await asyncio.to_thread(moments.first_runs.wait)
            query = asyncio.create_task(handle.query(TwoActivities.state))
            await wait_seconds(0.2)
            await handle.signal(TwoActivities.go_on)
            moments.first_may_end.set()
            await wait_seconds(0.3)
            moments.second_may_end.set()
            await handle.result()
            replayer = Replayer(workflows=[TwoActivities], workflow_runner=runner())
            await replayer.replay_workflow(await handle.fetch_history())
            if await query == [True, True]:
                return
    raise AssertionError("no query came while a local activity ran")


@activity.defn
async def echo(number: int) -> int:
    return number


@workflow.defn(name="Task")
class CountsSignals:
    """Runs an activity with the number of the signals that it has in its first activation with one."""

    def __init__(self) -> None:
        self._signals = 0

    @workflow.signal
    def notify(self) -> None:
        self._signals += 1

    @workflow.query
    def signals(self) -> int:
        return self._signals

    @workflow.run
    async def run(self) -> int:
        await workflow.wait_condition(lambda: self._signals > 0)
        number = self._signals
        await workflow.execute_activity(
            echo, number, activity_id=f"with {number}", schedule_to_close_timeout=FOREVER
        )
        return number


class Blocked:
    """Keeps the threads of an engine busy."""

    def __init__(self) -> None:
        self.count = threading.Semaphore(0)
        self.may_end = threading.Event()


blocked = Blocked()


@activity.defn
async def end(number: int) -> int:
    """Take as long as the test wants."""
    await asyncio.to_thread((moments.first_may_end, moments.second_may_end)[number].wait, EVENT_TIMEOUT_SEC)
    return number


@workflow.defn(name="Task")
class CountsEnds:
    """Runs an activity with the number of the activities that have ended in its first activation with one."""

    def __init__(self) -> None:
        self._is_over = False

    @workflow.signal
    def notify(self) -> None:
        """Do nothing."""

    @workflow.signal
    def block(self) -> None:
        self._is_over = True
        blocked.count.release()
        blocked.may_end.wait(EVENT_TIMEOUT_SEC)

    @workflow.update
    def change(self) -> None:
        raise AssertionError("the validator has accepted a change")

    @change.validator
    def refuse(self) -> None:
        raise ValueError("nothing can be changed")

    @workflow.run
    async def run(self, counts: bool) -> int:
        if not counts:
            await workflow.wait_condition(lambda: self._is_over)
            return 0
        ends = [
            workflow.start_activity(end, number, schedule_to_close_timeout=FOREVER) for number in range(2)
        ]
        await workflow.wait_condition(lambda: any(each.done() for each in ends))
        count = sum(each.done() for each in ends)
        await asyncio.gather(*ends)
        await workflow.execute_activity(
            echo, count, activity_id=f"with {count}", schedule_to_close_timeout=FOREVER
        )
        return count


async def test_history_replays_although_a_rejected_update_came_between_events_that_led_to_no_command(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update causes a workflow task, in whose history the second event comes before the engine can start it. A
    replay takes the workflow task before it, of the first event, for a heartbeat of this one.
    """
    monkeypatch.setitem(globals(), "moments", Moments())
    monkeypatch.setitem(globals(), "blocked", Blocked())
    client = await harness.client()
    queue = f"updates-{uuid.uuid4().hex[:8]}"
    worker = allow_long_workflow_tasks(
        Worker(
            client,
            task_queue=queue,
            workflows=[CountsEnds],
            activities=[echo, end],
            workflow_runner=runner(),
            max_concurrent_workflow_tasks=2,
        )
    )

    async def started(*, counts: bool) -> Any:
        return await client.start_workflow(
            CountsEnds.run, counts, id=uuid.uuid4().hex, task_queue=queue, task_timeout=FOREVER
        )

    async def has(kind: int, count: int) -> bool:
        events = (await handle.fetch_history()).events
        return sum(bool(each.event_type == kind) for each in events) >= count

    async with worker:
        blockers = [await started(counts=False) for _ in range(2)]
        handle = await started(counts=True)
        await eventually(lambda: has(EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED, 1))
        await handle.signal(CountsEnds.notify)
        await eventually(lambda: has(EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED, 2))
        moments.first_may_end.set()
        await eventually(lambda: has(EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED, 3))
        for each in blockers:
            await each.signal(CountsEnds.block)
        for _ in blockers:
            assert await asyncio.to_thread(blocked.count.acquire, timeout=EVENT_TIMEOUT_SEC)
        update = asyncio.create_task(handle.execute_update(CountsEnds.change))
        await wait_seconds(0.5)
        moments.second_may_end.set()
        await eventually(lambda: has(EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED, 2))
        blocked.may_end.set()
        with pytest.raises(WorkflowUpdateFailedError):
            await update
        assert await handle.result() in (1, 2)
    replayer = Replayer(workflows=[CountsEnds], workflow_runner=runner())
    await replayer.replay_workflow(await handle.fetch_history())


async def take_workflow_task(client: Client, queue: str) -> None:
    """Poll as an engine does that is frozen then: take the queries of a queue, and its workflow task, and
    complete none.
    """
    request = PollWorkflowTaskQueueRequest(
        namespace=client.namespace, task_queue=TaskQueue(name=queue), identity="frozen"
    )
    is_query = True
    while is_query:
        taken = await client.workflow_service.poll_workflow_task_queue(request)
        is_query = bool(taken.query.query_type) or not taken.task_token


async def test_history_replays_although_a_query_brought_events_of_a_task_that_timed_out_elsewhere(
    harness: Harness,
) -> None:
    client = await harness.client()
    queue = f"queries-{uuid.uuid4().hex[:8]}"

    def engine() -> Worker:
        return Worker(
            client,
            task_queue=queue,
            workflows=[CountsSignals],
            activities=[echo],
            workflow_runner=runner(),
        )

    async with engine():
        handle = await client.start_workflow(
            CountsSignals.run, id=uuid.uuid4().hex, task_queue=queue, task_timeout=timedelta(seconds=3)
        )
        assert await handle.query(CountsSignals.signals) == 0
    queries = [asyncio.create_task(handle.query(CountsSignals.signals)) for _ in range(8)]
    await wait_seconds(0.5)
    await handle.signal(CountsSignals.notify)
    await take_workflow_task(client, queue)
    async with engine():
        await asyncio.wait(queries, return_when=asyncio.FIRST_COMPLETED)
        try:
            await handle.signal(CountsSignals.notify)
        except (
            RPCError
        ):  # Server 1.32 gives the frozen poller all queries, so none brings events before the timeout.
            assert (
                await client.workflow_service.get_system_info(GetSystemInfoRequest())
            ).server_version >= "1.32"
        else:
            assert await handle.result() == 2
    for query in queries:
        query.cancel()
    await asyncio.gather(*queries, return_exceptions=True)
    replayer = Replayer(workflows=[CountsSignals], workflow_runner=runner())
    await replayer.replay_workflow(await handle.fetch_history())
