"""A history replays although queries come while local activities run, or while another engine is frozen, and although
updates that are rejected come between events.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
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
        self._count = 0
        self._is_over = False

    @workflow.signal
    def notify(self) -> None:
        """Do nothing."""

    @workflow.signal
    def finish(self) -> None:
        self._is_over = True

    @workflow.signal
    def block(self) -> None:
        self._is_over = True
        blocked.count.release()
        blocked.may_end.wait(EVENT_TIMEOUT_SEC)

    @workflow.query
    def ended(self) -> int:
        return self._count

    @workflow.update
    def change(self, accepts: bool) -> bool:
        return accepts

    @change.validator
    def refuse(self, accepts: bool) -> None:
        if not accepts:
            raise ValueError("nothing can be changed")

    @workflow.run
    async def run(self, activities: str | None) -> int:
        if activities is not None:
            ends = [
                workflow.start_activity(end, number, task_queue=activities, schedule_to_close_timeout=FOREVER)
                for number in range(2)
            ]
            await workflow.wait_condition(lambda: any(each.done() for each in ends))
            self._count = sum(each.done() for each in ends)
            await asyncio.gather(*ends)
        await workflow.wait_condition(lambda: self._is_over)
        if activities is not None:
            await workflow.execute_activity(
                echo,
                self._count,
                activity_id=f"with {self._count}",
                task_queue=activities,
                schedule_to_close_timeout=FOREVER,
            )
        return self._count


class Interrupted:
    """A run in whose history an update causes a workflow task, and an event comes before that can start."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._queue = f"updates-{uuid.uuid4().hex[:8]}"
        self.handle: Any = None

    def activities(self) -> Worker:
        return Worker(self._client, task_queue=f"{self._queue}-activities", activities=[echo, end])

    def engine(self) -> Worker:
        return allow_long_workflow_tasks(
            Worker(
                self._client,
                task_queue=self._queue,
                workflows=[CountsEnds],
                workflow_runner=runner(),
                max_concurrent_workflow_tasks=2,
            )
        )

    async def _start(self, activities: str | None) -> Any:
        return await self._client.start_workflow(
            CountsEnds.run, activities, id=uuid.uuid4().hex, task_queue=self._queue, task_timeout=FOREVER
        )

    async def _has(self, kind: int, count: int, handle: Any = None) -> bool:
        events = (await (handle or self.handle).fetch_history()).events
        return sum(bool(each.event_type == kind) for each in events) >= count

    async def begin(self) -> None:
        """Start the run, with two workflow tasks that lead to no command. The first activity ends in the second."""
        self.handle = await self._start(f"{self._queue}-activities")
        for count, proceed in enumerate((self._notify, self._end_first), 1):
            await eventually(partial(self._has, EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED, count))
            await proceed()
        await eventually(partial(self._has, EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED, 3))

    async def _notify(self) -> None:
        await self.handle.signal(CountsEnds.notify)

    async def _end_first(self) -> None:
        moments.first_may_end.set()

    async def update(self, *, accepts: bool) -> None:
        """Send an update while the engine is busy. The second activity ends before the engine is idle again."""
        blockers = [await self._start(None) for _ in range(2)]
        for each in blockers:
            await eventually(partial(self._has, EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED, 1, each))
        for each in blockers:
            await each.signal(CountsEnds.block)
        for _ in blockers:
            assert await asyncio.to_thread(blocked.count.acquire, timeout=EVENT_TIMEOUT_SEC)
        update = asyncio.create_task(self.handle.execute_update(CountsEnds.change, accepts))
        await wait_seconds(0.5)
        moments.second_may_end.set()
        await eventually(partial(self._has, EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED, 2))
        blocked.may_end.set()
        with nullcontext() if accepts else pytest.raises(WorkflowUpdateFailedError):
            await update
        await self.handle.signal(CountsEnds.finish)


@pytest.mark.parametrize(
    ("engine", "accepts"), [("same", False), ("new", True), ("asked", False)], ids=["same", "new", "asked"]
)
async def test_history_replays_although_an_update_came_between_events_that_led_to_no_command(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, engine: str, accepts: bool
) -> None:
    """A replay takes the workflow task of the first event for a heartbeat of the second one, unless the acceptance of
    the update is its first command. A new engine may have run the first one again, for a query, before the second came.
    """
    monkeypatch.setitem(globals(), "moments", Moments())
    monkeypatch.setitem(globals(), "blocked", Blocked())
    run = Interrupted(await harness.client())
    async with run.activities():
        async with run.engine():
            await run.begin()
            if engine == "same":
                await run.update(accepts=accepts)
                await run.handle.result()
        if engine != "same":
            async with run.engine():
                if engine == "asked":
                    assert await run.handle.query(CountsEnds.ended) == 1
                await run.update(accepts=accepts)
                await run.handle.result()
    replayer = Replayer(workflows=[CountsEnds], workflow_runner=runner())
    await replayer.replay_workflow(await run.handle.fetch_history())


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
