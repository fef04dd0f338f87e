"""Fan-in: start a node after the first copy, after two copies, or after all of them.

Four nodes copy a file to four places at the same time, each at its own speed. Three nodes wait for
the copies: `readable` for any of them, `durable` for two, `verified` for all. `verified` also pulls
the checksums and compares them.

In the folder `examples`, run each command in its own terminal:

    flowkit up fan_in:Copy fan_in:Compare --concurrency 4
    python fan_in.py

The program prints when each node finished. `durable` does not wait for the slow tape.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployment import coordinator, run
from flowkit.worker import Batch, BatchResult, FinalizeResult, RoleHandler, RunContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SECONDS = {"disk": 0.1, "attic": 0.8, "cellar": 1.5, "tape": 3.0}
"""How long a copy to each place takes."""


class Copy(RoleHandler):
    """Copies a file to a place."""

    role = "copy"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        job = loaded["input_inline"]
        yield Batch(batch_uid=job["place"], payload=job)

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        place = Path(batch.payload["place"])
        await ctx.cancellable(asyncio.sleep(SECONDS[place.name]))
        checksum = await asyncio.to_thread(copy_file, Path(batch.payload["source"]), place)
        return BatchResult(success=True, metrics={"place": place.name, "sha256": checksum})


def copy_file(source: Path, place: Path) -> str:
    """Copy the file; returns the checksum of the copy."""
    place.mkdir(exist_ok=True)
    copy = shutil.copy(source, place)
    return hashlib.sha256(Path(copy).read_bytes()).hexdigest()


class Compare(RoleHandler):
    """Compares the checksums that it pulls from the copies."""

    role = "compare"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        return BatchResult(success=True, metrics=batch.payload["meta"])

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        found = {part["meta"]["place"]: part["meta"]["sha256"] async for part in ctx.artifacts.partials()}
        return FinalizeResult(metrics={"copies": len(found), "checksums": sorted(set(found.values()))})


def graph(source: Path, target: Path) -> dict[str, Any]:
    """Return a graph with four copies and the three nodes that wait for them."""
    places = list(SECONDS)
    jobs = {place: {"source": str(source), "place": str(target / place)} for place in places}
    copies = [{"node_id": place, "type": "copy", "io": {"input_inline": jobs[place]}} for place in places]
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
    """Run a backup and print when each node finished."""
    tasks = coordinator()
    with tempfile.TemporaryDirectory() as target:
        task_id = await tasks.create_task(params={}, graph=graph(Path(__file__), Path(target)))
        await tasks.result(task_id, timeout=60)
    task = await tasks.db.tasks.find_one({"id": task_id})
    nodes = {node["node_id"]: node for node in task["graph"]["nodes"]}
    begin = min(nodes[place]["started_at"] for place in SECONDS)
    for node in sorted(nodes.values(), key=lambda node: node["finished_at"]):
        what = f"gate opened, fan_in {node['fan_in']}" if node.get("depends_on") else "copied"
        print(f"{(node['finished_at'] - begin).total_seconds():5.1f} s  {node['node_id']:<9} {what}")
    verified = await tasks.db.artifacts.find_one(
        {"task_id": task_id, "node_id": "verified", "status": "complete"}
    )
    copies, checksums = verified["meta"]["copies"], verified["meta"]["checksums"]
    print(f"{copies} copies, {len(checksums)} checksum: {checksums[0][:16]}…")


if __name__ == "__main__":
    run(main())
