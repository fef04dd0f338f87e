"""Replaces Temporal in the fuzz of concurrency limits: it runs the activities that the workflow calls."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from temporalio import workflow
from temporalio.exceptions import ActivityError, CancelledError
from tests.fuzz.play import Difference
from tests.fuzz.slot_model import Attempt
from tests.fuzz.slot_world import Task, pause

from flowkit.models import SlotReply, SlotRequest, temporal_names
from flowkit.workflows import engine_calls, slots

if TYPE_CHECKING:
    import random
    from collections.abc import Coroutine, Iterator

    from tests.fuzz.slot_world import Engine, World

_TURNS_OF_WORKFLOW_TASK = 5
"""After so many turns of the loop, the nodes that got slots by one call have started their attempts."""

CURRENT: ContextVar[Task] = ContextVar("task")
"""The task whose code runs."""


def _error(text: str, activity: str, number: str = "") -> ActivityError:
    return ActivityError(
        text,
        scheduled_event_id=1,
        started_event_id=1,
        identity="",
        activity_type=activity,
        activity_id=number,
        retry_state=None,
    )


class Temporal:
    """Runs activities on the engines, late, sometimes twice, and on after a cancel of the workflow."""

    ActivityCancellationType = workflow.ActivityCancellationType

    def __init__(self, chance: random.Random, world: World, engines: list[Engine]) -> None:
        self._chance, self._world, self._engines = chance, world, engines
        self._number = 0
        self._ignored: set[str] = set()
        """Ids of activities that the workflow has cancelled."""
        self.running: set[asyncio.Task[Any]] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the limits of tasks use this server."""
        with patch.multiple(slots, workflow=self), patch.multiple(engine_calls, workflow=self):
            yield

    def info(self) -> Any:
        """Return the id of the task whose code runs."""
        return SimpleNamespace(workflow_id=CURRENT.get().name)

    def now(self) -> datetime:
        """Return a time that is later than all earlier ones."""
        self._number += 1
        return datetime.fromtimestamp(self._number, UTC)

    async def wait(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Wait for tasks."""
        await asyncio.wait(tasks)

    async def execute_activity(self, name: str, record: Any, **options: Any) -> Any:
        """Run an activity. A cancel ends the wait at once, but not the activity."""
        self._number += 1
        task, number = CURRENT.get(), str(self._number)
        activity = self._keep(self._run(task, number, name, record))
        try:
            result = await asyncio.shield(activity)
            self._keep(self._end_workflow_task(task, number))
            return result
        except asyncio.CancelledError:
            self._ignored.add(number)
            task.unread.discard(number)
            if name == temporal_names.AWAIT_SLOT and self._chance.random() < 0.5:
                task.open_waits.discard(_attempt_of(record))
            raise _error("cancelled", name, number) from CancelledError("cancelled")

    def _keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` in the background."""
        running = asyncio.create_task(work)
        self.running.add(running)
        running.add_done_callback(self.running.discard)
        return running

    async def _end_workflow_task(self, task: Task, number: str) -> None:
        """End the workflow task that has received a result, once the workflow has started what follows from it."""
        await pause(_TURNS_OF_WORKFLOW_TASK)
        task.unread.discard(number)

    async def execute_local_activity(self, name: str, record: Any, **options: Any) -> Any:
        """Run a local activity. It may fail, with or without effect, as after its time limit."""
        fails = self._chance.random() < 0.1
        if fails and self._chance.random() < 0.5:
            raise _error("no effect", name)
        result = await self.execute_activity(name, record, **options)
        if fails:
            raise _error("the result is lost", name)
        return result

    async def _run(self, task: Task, number: str, name: str, record: Any) -> Any:
        task.calls[number] = name
        if isinstance(record, SlotRequest):
            if not record.asked_at:
                raise Difference(f"a request that waits says since when: {name} {record}")
            record = replace(record, run_id=task.run_id)
        if name == temporal_names.AWAIT_SLOT:
            del task.calls[number]
            return await self._wait(task, number, record)
        result = await self._call(name, record)
        del task.calls[number]
        self._end(task, number)
        return result

    def _end(self, task: Task, number: str) -> None:
        """Let the workflow read the result of an activity, unless it has cancelled the activity."""
        if number not in self._ignored:
            task.unread.add(number)

    async def _wait(self, task: Task, number: str, request: SlotRequest) -> Any:
        attempt = _attempt_of(request)
        task.open_waits.add(attempt)
        awaited = asyncio.get_running_loop().create_future()

        def on_reply(reply: SlotReply) -> None:
            awaited.set_result(reply)
            self._end(task, number)

        self._world.replies[request.run_id, attempt] = on_reply
        await self._call(temporal_names.AWAIT_SLOT, request)
        return await awaited

    async def _call(self, name: str, record: Any) -> Any:
        """Call an engine. The first calls may be in vain, because their results are lost."""
        result = None
        for _ in range(self._chance.choice([1, 1, 1, 2])):
            await pause(self._chance.randint(0, 6))
            engine = self._chance.choice(self._engines).grants
            calls: dict[str, Any] = {
                temporal_names.ACQUIRE_SLOTS: partial(engine.acquire, run_id=CURRENT.get().run_id),
                temporal_names.AWAIT_SLOT: engine.wait,
                temporal_names.RELEASE_SLOTS: engine.release,
            }
            result = await calls[name](record)
            await pause(self._chance.randint(0, 3))
        return result


def _attempt_of(request: SlotRequest) -> Attempt:
    return Attempt(request.task_id, request.node_id, request.epoch, request.role)
