"""Actions on a running task: the time from the request to the first attempt that follows."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from benchmarks.handler import OneBatch
from benchmarks.latencies import Latency
from flowkit.actions.records import DECIDE, PAUSE, RESUME, RETRY_NODE
from flowkit.workflows.task import Task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.client import TaskClient

SAMPLES = 15
"""Measured actions of each kind, after one that warms up the servers."""
_RETRY, _RESUME = "actions: retry_node", "actions: resume"
NAMES = (_RETRY, _RESUME)


class Actions:
    """Acts on a task of one node, which an approval keeps open."""

    def __init__(self, tasks: TaskClient, db: Any) -> None:
        self._tasks = tasks
        self._db = db

    async def latencies(self, only: str) -> AsyncIterator[Latency]:
        """Measure the cases with `only` in their name: milliseconds from the request to the begin of the attempt."""
        for name, paused in ((_RETRY, False), (_RESUME, True)):
            if only in name:
                began = time.monotonic()
                samples = await self._measure(paused=paused)
                yield Latency(name=name, target_ms=100.0, samples=samples, took_sec=time.monotonic() - began)

    async def _measure(self, *, paused: bool) -> list[float]:
        nodes = [
            {"node_id": "a", "type": OneBatch.role, "io": {"input_inline": {"batches": 1}}},
            {"node_id": "open", "type": "approval"},
        ]
        task_id = await self._tasks.create_task(params={}, graph={"nodes": nodes})
        await self._finished(task_id, 0.0)
        samples = [await self._sample(task_id, paused=paused) for _ in range(SAMPLES + 1)]
        await self._tasks.act(task_id, DECIDE, {"node_id": "open", "decision": "approve"})
        await self._tasks.handle(task_id).result()
        return samples[1:]

    async def _sample(self, task_id: str, *, paused: bool) -> float:
        """Return the milliseconds from `retry_node`, or from `resume` if the node is paused, to the next attempt."""
        name, given = RETRY_NODE, {"node_id": "a"}
        await self._known_as_finished(task_id)
        if paused:
            await self._tasks.act(task_id, PAUSE, {"scopes": ["task"]})
            await self._tasks.act(task_id, RETRY_NODE, given)
            await asyncio.sleep(0.2)  # The reset ends meanwhile, so that the node waits only for the resume.
            name, given = RESUME, {}
        sent = time.time()
        await self._tasks.act(task_id, name, given)
        return (await self._finished(task_id, sent) - sent) * 1000

    async def _known_as_finished(self, task_id: str) -> None:
        """Wait until the workflow knows the end of the node, which the task document shows a moment earlier."""
        handle = self._tasks.handle(task_id)
        while (await handle.query(Task.status))["nodes"][0]["status"] != "finished":  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)

    async def _finished(self, task_id: str, after: float) -> float:
        """Wait until an attempt has finished that began at this time or later. Return when it began."""
        while True:
            found = await self._db.tasks.find_one({"id": task_id}, {"graph.nodes": 1})
            node = found["graph"]["nodes"][0] if found else {}
            # MongoDB keeps milliseconds.
            if node.get("status") == "finished" and node["started_at"].timestamp() >= after - 0.001:
                began: float = node["started_at"].timestamp()
                return began
            await asyncio.sleep(0.01)
