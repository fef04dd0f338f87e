"""Cancel a task: a long loop of batches stops within seconds, keeps its results and cleans up.

A node searches the numbers below a hundred million for the longest Collatz sequence (halve an even
number, triple an odd one and add one, until 1), ten thousand numbers per batch. This takes hours,
so the program cancels the task after three batches.

In the folder `examples`, run each command in its own terminal:

    flowkit up cancel:Search
    python cancel.py

The program prints the best number so far, how soon the loop stopped, and that its scratch file is
removed. You can also cancel with `flowkit cancel TASK` in a third terminal, or with Request
Cancellation in Temporal's Web UI.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployment import coordinator, run, wait_until
from flowkit.worker import Batch, BatchResult, RoleHandler, RunContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SIZE = 10_000
GRAPH = {"name": "collatz", "nodes": [{"node_id": "search", "type": "search"}]}


class Search(RoleHandler):
    """Searches for the longest sequence, batch by batch. FlowKit checks for a cancel between two batches."""

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
    """Return the scratch file of this attempt; FlowKit removes it when the attempt ends, even by a cancel."""
    if "scratch" not in ctx.kv:
        ctx.kv["scratch"] = Path(tempfile.mkstemp(prefix="collatz-")[1])
        ctx.register_temp_path(ctx.kv["scratch"])
    scratch: Path = ctx.kv["scratch"]
    return scratch


def longest(start: int, size: int) -> tuple[int, int]:
    """Return the number with the longest sequence among `size` numbers from `start`, and its steps."""
    return max(((number, steps(number)) for number in range(start, start + size)), key=lambda found: found[1])


def steps(number: int) -> int:
    """Return the number of steps from `number` to 1."""
    count = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        count += 1
    return count


async def main() -> None:
    """Start the search, cancel it, and print what it left."""
    tasks = coordinator()
    task_id = await tasks.create_task(params={}, graph=GRAPH)
    print(f"task {task_id} is searching")
    third = {"task_id": task_id, "node_id": "search", "status": "partial", "batch_uid": "from-000020001"}
    await wait_until(lambda: tasks.db.artifacts.find_one(third))
    requested_at = time.monotonic()
    await tasks.cancel_task(task_id, reason="too slow")
    status = await tasks.wait(task_id, timeout=60)
    print(f"{status.value} {time.monotonic() - requested_at:.1f} s after the request")
    batches = tasks.db.artifacts.find({"task_id": task_id, "node_id": "search", "status": "partial"})
    show_results([batch["meta"] async for batch in batches])


def show_results(results: list[dict[str, Any]]) -> None:
    """Print the best result so far, and whether the scratch file is removed."""
    best = max(results, key=lambda meta: meta["steps"])
    scratch = Path(best["scratch"])
    print(f"{len(results)} batches stored; best number so far: {best['number']} with {best['steps']} steps")
    print(f"scratch file {scratch.name} {'still exists' if scratch.exists() else 'is removed'}")


if __name__ == "__main__":
    run(main())
