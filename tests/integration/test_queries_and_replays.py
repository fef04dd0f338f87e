"""A history replays although queries come while local activities run, or while another engine is frozen."""

from __future__ import annotations

import asyncio
import threading
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from temporalio import activity, workflow
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import GetSystemInfoRequest, PollWorkflowTaskQueueRequest
from temporalio.service import RPCError
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner, Worker

from flowkit.engine.activations import OrderedRunner
from tests.integration.harness import EVENT_TIMEOUT_SEC, wait_seconds

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
