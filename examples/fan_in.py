"""Fan-in: go on with the first copy, with two copies, with all of them.

A file is copied to four places at once, and each takes another time. Three nodes wait for the copies: `readable` for any
of them, `durable` for two, `verified` for all; the last one also pulls their checksums and compares them.

In the folder `examples`, each in a terminal of its own:

    flowkit up fan_in:Copy fan_in:Compare --concurrency 4
    python fan_in.py

You will see what each gate waited for, and that `durable` did not wait for the slow tape.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployment import coordinator, run
from flowkit.worker.handlers.base import Batch, BatchResult, FinalizeResult, RoleHandler, RunContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SECONDS = {"disk": 0.1, "attic": 0.8, "cellar": 1.5, "tape": 3.0}
"""How long each place takes."""


class Copy(RoleHandler):
    """Copies a file to a place."""

    role = "copy"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        order = loaded["input_inline"]
        yield Batch(batch_uid=order["place"], payload=order)

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        place = Path(batch.payload["place"])
        await ctx.cancellable(asyncio.sleep(SECONDS[place.name]))
        checksum = await asyncio.to_thread(copied, Path(batch.payload["source"]), place)
        return BatchResult(success=True, metrics={"place": place.name, "sha256": checksum})


def copied(source: Path, place: Path) -> str:
    """Copy the file; answers the checksum of what has arrived."""
    place.mkdir(exist_ok=True)
    copy = shutil.copy(source, place)
    return hashlib.sha256(Path(copy).read_bytes()).hexdigest()


class Compare(RoleHandler):
    """Compares the checksums that it pulls."""

    role = "compare"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        return BatchResult(success=True, metrics=batch.payload["meta"])

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        found = {part["meta"]["place"]: part["meta"]["sha256"] async for part in ctx.artifacts.partials()}
        return FinalizeResult(metrics={"copies": len(found), "checksums": sorted(set(found.values()))})


def graph(source: Path, target: Path) -> dict[str, Any]:
    """Four copies and the three nodes that wait for them."""
    places = list(SECONDS)
    orders = {place: {"source": str(source), "place": str(target / place)} for place in places}
    copies = [{"node_id": place, "type": "copy", "io": {"input_inline": orders[place]}} for place in places]
    pull = {"input_inline": {"input_adapter": "pull.from_artifacts"}}
    return {
        "name": "backup",
        "nodes": [
            *copies,
            {"node_id": "readable", "type": "coordinator_fn", "depends_on": places, "fan_in": "any"},
            {"node_id": "durable", "type": "coordinator_fn", "depends_on": places, "fan_in": "count:2"},
            {"node_id": "verified", "type": "compare", "depends_on": places, "fan_in": "all", "io": pull},
        ],
    }


async def main() -> None:
    """Run a backup and tell when each gate opened."""
    tasks = coordinator()
    with tempfile.TemporaryDirectory() as target:
        task_id = await tasks.create_task(params={}, graph=graph(Path(__file__), Path(target)))
        await tasks.result(task_id, timeout=60)
    task = await tasks.db.tasks.find_one({"id": task_id})
    nodes = {node["node_id"]: node for node in task["graph"]["nodes"]}
    begin = min(nodes[place]["started_at"] for place in SECONDS)
    for node in sorted(nodes.values(), key=lambda node: node["finished_at"]):
        what = f"opened for {node['fan_in']} of its parents" if node.get("depends_on") else "copied"
        print(f"{(node['finished_at'] - begin).total_seconds():5.1f} s  {node['node_id']:<9} {what}")
    verified = await tasks.db.artifacts.find_one(
        {"task_id": task_id, "node_id": "verified", "status": "complete"}
    )
    copies, checksums = verified["meta"]["copies"], verified["meta"]["checksums"]
    print(f"{copies} copies, {len(checksums)} checksum: {checksums[0][:16]}…")


if __name__ == "__main__":
    run(main())
