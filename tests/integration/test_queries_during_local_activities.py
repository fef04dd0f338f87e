"""A history replays although queries are answered while local activities end."""

from __future__ import annotations

import asyncio
import threading
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from temporalio import activity, workflow
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner, Worker

from flowkit.engine.activations import LocalResults, OrderedRunner
from tests.integration.harness import wait_seconds

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

FOREVER = timedelta(minutes=1)


class Moments:
    """What happens in the workflow and in its activities, shared by their threads."""

    def __init__(self) -> None:
        self.first_runs, self.first_may_end = threading.Event(), threading.Event()
        self.answering, self.second_ends = threading.Event(), threading.Event()
        self.answered_beside = False


moments = Moments()


@activity.defn
async def first() -> None:
    moments.first_runs.set()
    await asyncio.to_thread(moments.first_may_end.wait)


@activity.defn
async def second(waits: bool) -> None:
    if waits:
        await asyncio.to_thread(moments.answering.wait, 5)
    moments.second_ends.set()


@workflow.defn(name="Task")
class TwoActivities:
    """Stops a timer at the end of its second local activity, in the workflow task that a query has come with."""

    def __init__(self) -> None:
        self._goes_on = False
        self._ended = False

    @workflow.signal
    def go_on(self) -> None:
        self._goes_on = True

    @workflow.query
    def slow(self) -> bool:
        moments.answering.set()
        moments.answered_beside |= self._goes_on and not self._ended
        moments.second_ends.wait(1)
        threading.Event().wait(0.05)  # what has ended is on its way now, unless it is held back
        return self._goes_on

    @workflow.run
    async def run(self, waits: bool) -> None:
        await workflow.execute_local_activity(first, start_to_close_timeout=FOREVER)
        await workflow.wait_condition(lambda: self._goes_on)
        ending = asyncio.create_task(self._end(waits))
        await workflow.wait_condition(lambda: self._ended, timeout=FOREVER)
        await ending

    async def _end(self, waits: bool) -> None:
        await workflow.execute_local_activity(second, waits, start_to_close_timeout=FOREVER)
        self._ended = True


def runner() -> OrderedRunner:
    """Return the engine's runner, without a sandbox."""
    return OrderedRunner(UnsandboxedWorkflowRunner())


@pytest.mark.parametrize("waits", [True, False], ids=["ends during the query", "ends before the query"])
async def test_history_replays_although_a_local_activity_ends_while_a_query_is_answered(
    harness: Harness, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await harness.client()
    queue = f"queries-{uuid.uuid4().hex[:8]}"
    worker = Worker(
        client,
        task_queue=queue,
        workflows=[TwoActivities],
        activities=[first, second],
        workflow_runner=runner(),
        interceptors=[LocalResults()],
    )
    async with worker:
        for _ in range(10):  # a query comes with a workflow task only if it arrives while the one before runs
            monkeypatch.setitem(globals(), "moments", Moments())
            handle = await client.start_workflow(
                TwoActivities.run, waits, id=uuid.uuid4().hex, task_queue=queue
            )
            await asyncio.to_thread(moments.first_runs.wait)
            query = asyncio.create_task(handle.query(TwoActivities.slow))
            await wait_seconds(0.2)
            await handle.signal(TwoActivities.go_on)
            moments.first_may_end.set()
            await handle.result()
            assert await query
            replayer = Replayer(workflows=[TwoActivities], workflow_runner=runner())
            await replayer.replay_workflow(await handle.fetch_history())
            if moments.answered_beside or not waits:
                return
    raise AssertionError("no query was answered while a local activity ran")
