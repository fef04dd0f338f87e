"""Streaming: the time from a parent's stored batch to the child's handler, and stages that overlap."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.latencies import Latency

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from flowkit.client import TaskClient

POLL_MS = 300
STAGE_BATCHES = 1_000
TASKS = 11
"""Tasks whose first batch is measured."""
LATER = 40
"""Batches of the task whose later batches are measured."""
GAP_SEC = 0.1
"""The time between two of these batches, which is less than `POLL_MS`."""

STAGES = f"streaming: 3 stages of {STAGE_BATCHES:,} batches"
_FIRST, _FAR, _NEAR = (
    "streaming: first batch",
    f"streaming: later batches, other process (poll_ms {POLL_MS})",
    "streaming: later batches, same process",
)
NAMES = (_FIRST, _FAR, _NEAR)


def commands(queue: str) -> list[list[str]]:
    """Return the arguments of the two `flowkit worker` processes."""
    served = (("Ticker", "Near", "Stage", "LastStage"), ("Far", "FarStage"))
    return [
        ["worker", *(f"benchmarks.streaming_handlers:{name}" for name in names), "--queue", queue]
        for names in served
    ]


class Streaming:
    """Runs the tasks of the streaming cases."""

    def __init__(self, tasks: TaskClient, db: Any) -> None:
        self._tasks = tasks
        self._db = db
        self._warm = False

    async def latencies(self, only: str) -> AsyncIterator[Latency]:
        """Measure the cases with `only` in their name."""
        cases = {
            _FIRST: (100.0, self._first_batches),
            _FAR: (POLL_MS + 50.0, lambda: self._later_batches("far")),
            _NEAR: (20.0, lambda: self._later_batches("near")),
        }
        for name, (target_ms, measure) in cases.items():
            if only in name:
                began = time.monotonic()
                samples = await measure()
                took_sec = time.monotonic() - began
                yield Latency(name=name, target_ms=target_ms, samples=samples, took_sec=took_sec)

    async def _first_batches(self) -> list[float]:
        """Measure the first batch of each task, after one task that warms up the servers. The parent runs on."""
        tasks = [await self._delays("far", batches=1, gap_sec=0.5) for _ in range(TASKS + 1)]
        return [delays[0] for delays in tasks[1:]]

    async def _later_batches(self, role: str) -> list[float]:
        """Measure the batches of one task, without those that are stored before the child runs."""
        return (await self._delays(role, batches=LATER, gap_sec=GAP_SEC))[5:]

    async def _delays(self, role: str, **inline: Any) -> list[float]:
        parent = {"node_id": "parent", "type": "ticker", "io": {"input_inline": inline}}
        task_id = await self._run([parent, _pulling("child", role, "parent", streams=True)])
        stored = {
            row["batch_uid"]: row["created_at"].timestamp() * 1000
            async for row in self._db.artifacts.find(
                {"task_id": task_id, "node_id": "parent", "status": "partial"}
            )
        }
        called = {
            row["batch_uid"]: row["metrics"]["called_ms"]
            async for row in self._db.metrics_raw.find({"task_id": task_id, "node_id": "child"})
        }
        return [called[uid] - stored[uid] for uid in sorted(stored, key=lambda uid: int(uid[1:]))]

    async def _run(self, nodes: list[dict[str, Any]]) -> str:
        task_id = await self._tasks.create_task(params={}, graph={"nodes": nodes})
        await self._tasks.handle(task_id).result()
        return task_id

    def stages(self) -> Mapping[str, Callable[[], Awaitable[float]]]:
        """Return functions that run three stages, in sequence and streaming, and return the seconds.

        The batches pass from one process to the other and back. Each stage has a role of its own, because two stages of
        one role would share the role's only slot in a worker, and run one after the other. The first call warms up the
        servers with few batches.
        """

        async def run(*, streams: bool) -> float:
            if not self._warm:
                self._warm = True
                await self._three_stages(100, streams=True)
            began = time.perf_counter()
            await self._three_stages(STAGE_BATCHES, streams=streams)
            return time.perf_counter() - began

        return {"baseline": lambda: run(streams=False), "flowkit": lambda: run(streams=True)}

    async def _three_stages(self, batches: int, *, streams: bool) -> None:
        first = {"node_id": "n0", "type": "stage", "io": {"input_inline": {"batches": batches}}}
        roles = enumerate(("far_stage", "last_stage"), 1)
        later = [_pulling(f"n{n}", role, f"n{n - 1}", streams=streams) for n, role in roles]
        await self._run([first, *later])


def _pulling(node_id: str, role: str, parent: str, *, streams: bool) -> dict[str, Any]:
    inline = {"input_adapter": "pull.from_artifacts", "input_args": {"poll_ms": POLL_MS}}
    start = {"start_when": "first_batch"} if streams else {}
    return {
        "node_id": node_id,
        "type": role,
        "depends_on": [parent],
        "io": {"input_inline": inline, **start},
    }
