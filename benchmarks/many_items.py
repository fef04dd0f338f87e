"""`python -m benchmarks.many_items`: what an item of a node with `map` costs when there are many.

Each size runs with new processes, so that their peak memory can be compared. The items are numbers in the params; the
handler does nothing with them. The params cost memory too, in the workflow and in each attempt, so each
size also runs with the same params and a short list.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from motor.motor_asyncio import AsyncIOMotorClient
from rich.console import Console
from rich.table import Table

from benchmarks.processes import OPTIMIZING, command, machine
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.connection import connect
from flowkit.local import Stack
from flowkit.worker import Batch, BatchResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowkit.worker.context import RunContext

QUEUE = "many-items"
SIZES = (10_000, 30_000, 100_000)
BATCH_SIZE, SHARDS, WORKERS = 10, 4, 2
SHORT = "[1]"
TIME_TARGET = 1.3
"""Largest time for an item of the last size, as a ratio to the first size."""
MEMORY_TARGET = 200
"""Bytes of peak memory, of engine and workers together, that an item may add."""


class Items(RoleHandler):
    """Counts the items of a batch."""

    role = "items"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return their number."""
        return BatchResult(success=True, metrics={"n": len(batch.payload["items"])})


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One size."""

    items: int
    node_sec: float
    """From the begin of the task to the end of the node, which includes the evaluation of the list."""
    engine_mb: float
    workers_mb: float
    events: int
    """Events in the history of the task."""

    @property
    def item_ms(self) -> float:
        """Milliseconds for each item."""
        return self.node_sec * 1000 / self.items


def main() -> None:
    """Measure all sizes, print a table, and exit with 1 if a target is missed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ.setdefault("_JAVA_OPTIONS", OPTIMIZING)
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), keeps_data=False) as stack:
        os.environ.update(stack.exports)
        _measure(1_000)  # The servers' compilers warm up.
        found = [_measure(size) for size in SIZES]
        params = [_measure(size, over=SHORT) for size in (SIZES[0], SIZES[-1])]
    table = Table("items", "seconds", "ms for an item", "engine, MB", "workers, MB", "events")
    for each in found:
        sizes = (f"{each.engine_mb:.0f}", f"{each.workers_mb:.0f}", f"{each.events:,}")
        table.add_row(f"{each.items:,}", f"{each.node_sec:.1f}", f"{each.item_ms:.3f}", *sizes)
    console = Console(width=120)
    console.print(table)
    first, last = found[0], found[-1]
    slower = last.item_ms / first.item_ms
    more_bytes, of_params = _more_bytes(first, last), _more_bytes(*params)
    console.print(f"time for an item: {slower:.2f} of that of {first.items:,} items; target {TIME_TARGET}")
    console.print(
        f"memory: {more_bytes:.0f} bytes for each further item, {of_params:.0f} of them for the params; "
        f"target {MEMORY_TARGET}"
    )
    console.print(f"Measured on {machine()}.")
    sys.exit(0 if slower <= TIME_TARGET and more_bytes <= MEMORY_TARGET else 1)


def _more_bytes(first: Measured, last: Measured) -> float:
    """Return how much memory each further item takes in the engine and the workers, in bytes."""
    more = last.engine_mb + last.workers_mb - first.engine_mb - first.workers_mb
    return more * 2**20 / (last.items - first.items)


def _measure(items: int, over: str = "params.all") -> Measured:
    worker = command("worker", "benchmarks.many_items:Items", "--queue", QUEUE, "--concurrency", "2")
    with ExitStack() as processes:
        engine = processes.enter_context(_started(command("engine", "--queue", QUEUE)))
        workers = [processes.enter_context(_started(worker)) for _ in range(WORKERS)]
        seconds, events = uvloop.run(_run(items, over))
        return Measured(
            items=items,
            node_sec=seconds,
            engine_mb=_peak_mb(engine),
            workers_mb=sum(map(_peak_mb, workers)),
            events=events,
        )


async def _run(items: int, over: str) -> tuple[float, int]:
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    for name in ("tasks", "artifacts", "metrics_raw", "stream_progress", "node_shards", "map_items"):
        await mongo["flowkit"][name].delete_many({})
    tasks = TaskClient(await connect(), TaskStore(mongo["flowkit"]), queue=QUEUE)
    mapped = {"over": over, "batch_size": BATCH_SIZE, "parallel": SHARDS}
    graph = {"nodes": [{"node_id": "m", "type": "items", "map": mapped}]}
    began = time.perf_counter()
    task_id = await tasks.create_task(params={"all": [*range(items)]}, graph=graph)
    await tasks.handle(task_id).result()
    took = time.perf_counter() - began
    stored = await mongo["flowkit"].metrics_raw.count_documents({"task_id": task_id, "metrics.n": BATCH_SIZE})
    if over != SHORT and stored * BATCH_SIZE != items:
        raise RuntimeError(f"the node has processed {stored * BATCH_SIZE:,} of {items:,} items")
    return took, (await tasks.handle(task_id).describe()).history_length


@contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def _peak_mb(process: subprocess.Popen[bytes]) -> float:
    """Return the largest resident memory of a process, in MB; needs Linux."""
    lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM:"))
    return int(peak.split()[1]) / 1024


if __name__ == "__main__":
    main()
