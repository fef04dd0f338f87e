"""Retries: a failure that heals, one that never will, and what becomes of the rest.

Three files of orders are to be added up. `january.csv` arrives late: reading it fails until it is there, and is tried
again after 0.5, 1, 2… seconds. `february.csv` has a typing error: no retry would help, so there is none. `march.csv` is
fine. `total` adds up whatever could be read, `letter` wants February.

In the folder `examples`, each in a terminal of its own:

    flowkit up retries:Read retries:Total retries:Letter
    python retries.py

You will see the same graph twice: with `on_node_failure: continue` the task has failed, although all that does not need
February was done; with `allow_failure` on February it has finished. With neither, the default, the first failure would
stop everything.
"""

from __future__ import annotations

import asyncio
import csv
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployment import coordinator, run, until
from flowkit.worker.handlers.base import Batch, BatchResult, FinalizeResult, RoleHandler, RunContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit import Coordinator

JANUARY = "order,amount\n1001,12.50\n1002,80.00\n"
FEBRUARY = "order,amount\n1003,9.90\n1004,2O.00\n"  # the letter O
MARCH = "order,amount\n1005,41.25\n"
PATIENTLY = {"max": 8, "backoff_sec": 0.5, "backoff_coefficient": 2, "max_backoff_sec": 10}


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
        """A file that is not there yet may come; a wrong number (ValueError) is `bad_input`, which is permanent."""
        return ("no_file_yet", False) if isinstance(exc, FileNotFoundError) else super().classify_error(exc)


def amounts_of(file: Path) -> list[float]:
    """FileNotFoundError when it is not there, ValueError when one is no number."""
    with file.open(newline="") as rows:
        return [float(row["amount"]) for row in csv.DictReader(rows)]


class Total(RoleHandler):
    """Adds up what it pulls."""

    role = "total"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        return BatchResult(success=True, metrics=batch.payload["meta"])

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        return FinalizeResult(
            metrics={"total": sum([p["meta"]["amount"] async for p in ctx.artifacts.partials()])}
        )


class Letter(RoleHandler):
    """Would write to the customers; the role only has to be there."""

    role = "letter"


def graph(folder: Path, **february: Any) -> dict[str, Any]:
    """Three files, what adds them up, and a letter that February's alone would allow."""
    months = ["january", "february", "march"]
    orders = {month: {"input_inline": {"file": str(folder / f"{month}.csv")}} for month in months}
    reads = [
        {"node_id": month, "type": "read", "io": orders[month], "retry_policy": PATIENTLY} for month in months
    ]
    reads[1].update(february)
    pull = {"input_inline": {"input_adapter": "pull.from_artifacts"}}
    total = {"node_id": "total", "type": "total", "depends_on": months, "fan_in": "count:2", "io": pull}
    return {"nodes": [*reads, total, {"node_id": "letter", "type": "letter", "depends_on": ["february"]}]}


async def show(tasks: Coordinator, task_id: str, how: str) -> None:
    """What became of the task and of each node."""
    status = await tasks.wait(task_id, timeout=60)
    task = await tasks.db.tasks.find_one({"id": task_id})
    print(f"{how}: {status.value}{', ' + task['reason'] if task.get('reason') else ''}")
    for node in task["graph"]["nodes"]:
        why = node.get("last_error") or node.get("skip_reason") or ""
        print(f"  {node['node_id']:<9} {node['status']:<9} attempts: {node['attempt_epoch']}  {why}")
    marker = {"task_id": task_id, "node_id": "total", "status": "complete"}
    print(f"  total of what was read: {(await tasks.db.artifacts.find_one(marker))['meta']['total']:.2f}")


async def main() -> None:
    """Run both tasks; January's file arrives when both have missed it."""
    tasks = coordinator()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "february.csv").write_text(FEBRUARY)
        (folder / "march.csv").write_text(MARCH)
        failing = await tasks.create_task(params={}, graph={**graph(folder), "on_node_failure": "continue"})
        tolerant = await tasks.create_task(params={}, graph=graph(folder, allow_failure=True))
        await missed(tasks, failing)
        await missed(tasks, tolerant)
        (folder / "january.csv").write_text(JANUARY)
        await show(tasks, failing, "on_node_failure: continue")
        await show(tasks, tolerant, "allow_failure")


async def missed(tasks: Coordinator, task_id: str) -> None:
    """Wait until January has been missed twice: a third attempt has begun."""
    third = {"node_id": "january", "attempt_epoch": {"$gte": 3}}
    tried = {"id": task_id, "graph.nodes": {"$elemMatch": third}}
    await until(lambda: tasks.db.tasks.find_one(tried))


if __name__ == "__main__":
    run(main())
