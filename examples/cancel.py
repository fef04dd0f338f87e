"""Cancel: a long loop of batches stops within seconds, keeps what is done, and cleans up.

A node looks for the number below a hundred million whose Collatz sequence is longest (halve what is even, triple what is
odd and add one, until 1), ten thousand numbers a batch. That takes hours; you lose patience after three batches.

In the folder `examples`, each in a terminal of its own:

    flowkit up cancel:Search
    python cancel.py

You will see the best numbers so far, how soon the loop stopped, and that its scratch file is gone. `flowkit cancel TASK`
in a third terminal, or Cancel in Temporal's Web UI, does the same.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployment import coordinator, run, until
from flowkit.worker.handlers.base import Batch, BatchResult, RoleHandler, RunContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SIZE = 10_000
GRAPH = {"name": "collatz", "nodes": [{"node_id": "search", "type": "search"}]}


class Search(RoleHandler):
    """Looks for the longest sequence, batch by batch. Between two batches FlowKit itself looks for a cancel."""

    role = "search"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        for start in range(1, 100_000_000, SIZE):
            yield Batch(batch_uid=f"from-{start:09}", payload={"start": start})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        scratch = scratch_file(ctx)
        number, steps = await ctx.cancellable(asyncio.to_thread(longest, batch.payload["start"], SIZE))
        with scratch.open("a") as notes:
            notes.write(f"{number} {steps}\n")
        return BatchResult(success=True, metrics={"number": number, "steps": steps, "scratch": str(scratch)})


def scratch_file(ctx: RunContext) -> Path:
    """The run's own file; it is removed at the end of the run, however that comes."""
    if "scratch" not in ctx.kv:
        ctx.kv["scratch"] = Path(tempfile.mkstemp(prefix="collatz-")[1])
        ctx.register_temp_path(ctx.kv["scratch"])
    scratch: Path = ctx.kv["scratch"]
    return scratch


def longest(start: int, size: int) -> tuple[int, int]:
    """The number from `start` on with the longest sequence, and its steps."""
    return max(((number, steps(number)) for number in range(start, start + size)), key=lambda found: found[1])


def steps(number: int) -> int:
    """Steps until 1."""
    count = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        count += 1
    return count


async def main() -> None:
    """Start the search, cancel it, and tell what is left of it."""
    tasks = coordinator()
    task_id = await tasks.create_task(params={}, graph=GRAPH)
    print(f"task {task_id} searches")
    done = {"task_id": task_id, "node_id": "search", "status": "partial", "batch_uid": "from-000020001"}
    await until(lambda: tasks.db.artifacts.find_one(done))
    asked = time.monotonic()
    await tasks.cancel_task(task_id, reason="too slow")
    status = await tasks.wait(task_id, timeout=60)
    print(f"{status.value} {time.monotonic() - asked:.1f} s after it was asked to stop")
    batches = tasks.db.artifacts.find({"task_id": task_id, "node_id": "search", "status": "partial"})
    tell([batch["meta"] async for batch in batches])


def tell(found: list[dict[str, Any]]) -> None:
    """What is left of the search."""
    best = max(found, key=lambda meta: meta["steps"])
    scratch = Path(best["scratch"])
    print(f"{len(found)} batches are kept; the best so far: {best['number']} with {best['steps']} steps")
    print(f"its scratch file {scratch.name} is {'still there' if scratch.exists() else 'removed'}")


if __name__ == "__main__":
    run(main())
