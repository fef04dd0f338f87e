"""Retries: a temporary failure, a permanent one, and what they mean for the other nodes.

The task adds up three files of orders. `january.csv` arrives late: reading it fails until it
exists, and FlowKit retries after 0.5, 1, 2… seconds. `february.csv` contains a typing error, which
no retry can fix, so FlowKit does not retry. `march.csv` is valid. `total` adds up all files that
could be read, `letter` depends on February.

In the folder `examples`, run each command in its own terminal:

    flowkit up retries:Read retries:Total retries:Letter
    python retries.py

The program runs the same graph twice. With `on_node_failure: continue` the task fails, but only
after all nodes that do not depend on February have finished. With `allow_failure` on February the
task finishes. By default, with neither, the first permanent failure stops the task.
"""

from __future__ import annotations

import asyncio
import csv
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployment import coordinator, run, wait_until
from flowkit.worker import Batch, BatchResult, FinalizeResult, RoleHandler, RunContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit import Coordinator

JANUARY = "order,amount\n1001,12.50\n1002,80.00\n"
FEBRUARY = "order,amount\n1003,9.90\n1004,2O.00\n"  # the letter O
MARCH = "order,amount\n1005,41.25\n"
RETRY_POLICY = {"max": 8, "backoff_sec": 0.5, "backoff_coefficient": 2, "max_backoff_sec": 10}


class Read(RoleHandler):
    """Adds up the amounts of a file."""

    role = "read"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        file = loaded["input_inline"]["file"]
        yield Batch(batch_uid=Path(file).stem, payload={"file": file})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        amounts = await asyncio.to_thread(amounts_of, Path(batch.payload["file"]))
        return BatchResult(success=True, metrics={"amount": sum(amounts)})

    def classify_error(self, exc: BaseException) -> tuple[str, bool]:
        """Retry while the file is missing. An invalid number (ValueError) is permanent, as `bad_input`."""
        return ("no_file_yet", False) if isinstance(exc, FileNotFoundError) else super().classify_error(exc)


def amounts_of(file: Path) -> list[float]:
    """Return all amounts; raises FileNotFoundError for a missing file, ValueError for an invalid number."""
    with file.open(newline="") as rows:
        return [float(row["amount"]) for row in csv.DictReader(rows)]


class Total(RoleHandler):
    """Adds up the amounts that it pulls."""

    role = "total"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        return BatchResult(success=True, metrics=batch.payload["meta"])

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        return FinalizeResult(
            metrics={"total": sum([p["meta"]["amount"] async for p in ctx.artifacts.partials()])}
        )


class Letter(RoleHandler):
    """Would write to the customers. It never runs here, because February fails."""

    role = "letter"


def graph(folder: Path, **february: Any) -> dict[str, Any]:
    """Return a graph that reads three files, adds them up, and writes a letter after February."""
    months = ["january", "february", "march"]
    orders = {month: {"input_inline": {"file": str(folder / f"{month}.csv")}} for month in months}
    reads = [
        {"node_id": month, "type": "read", "io": orders[month], "retry_policy": RETRY_POLICY}
        for month in months
    ]
    reads[1].update(february)
    pull = {"input_inline": {"input_adapter": "pull.from_artifacts"}}
    total = {"node_id": "total", "type": "total", "depends_on": months, "fan_in": "count:2", "io": pull}
    return {"nodes": [*reads, total, {"node_id": "letter", "type": "letter", "depends_on": ["february"]}]}


async def show(tasks: Coordinator, task_id: str, setting: str) -> None:
    """Print how the task and each of its nodes ended."""
    status = await tasks.wait(task_id, timeout=60)
    task = await tasks.db.tasks.find_one({"id": task_id})
    print(f"{setting}: {status.value}{', ' + task['reason'] if task.get('reason') else ''}")
    for node in task["graph"]["nodes"]:
        why = node.get("last_error") or node.get("skip_reason") or ""
        print(f"  {node['node_id']:<9} {node['status']:<9} attempts: {node['attempt_epoch']}  {why}")
    marker = {"task_id": task_id, "node_id": "total", "status": "complete"}
    print(f"  sum of the files read: {(await tasks.db.artifacts.find_one(marker))['meta']['total']:.2f}")


async def main() -> None:
    """Run both tasks, and create January's file after both failed to read it twice."""
    tasks = coordinator()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "february.csv").write_text(FEBRUARY)
        (folder / "march.csv").write_text(MARCH)
        failing = await tasks.create_task(params={}, graph={**graph(folder), "on_node_failure": "continue"})
        tolerant = await tasks.create_task(params={}, graph=graph(folder, allow_failure=True))
        await wait_for_third_attempt(tasks, failing)
        await wait_for_third_attempt(tasks, tolerant)
        (folder / "january.csv").write_text(JANUARY)
        await show(tasks, failing, "on_node_failure: continue")
        await show(tasks, tolerant, "allow_failure")


async def wait_for_third_attempt(tasks: Coordinator, task_id: str) -> None:
    """Wait until the third attempt at January has started."""
    third = {"node_id": "january", "attempt_epoch": {"$gte": 3}}
    started = {"id": task_id, "graph.nodes": {"$elemMatch": third}}
    await wait_until(lambda: tasks.db.tasks.find_one(started))


if __name__ == "__main__":
    run(main())
